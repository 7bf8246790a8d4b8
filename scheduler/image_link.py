"""The scheduler's side of the image workers: start and watch them, give each one job at a time."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from deepinfer.scheduler.worker_link import FIRST_WORD_S, WATCH_S, WorkerState
from deepinfer.wire.actor import Actor
from deepinfer.wire.children import Child
from deepinfer.wire.codec import BadFrame, Codec
from deepinfer.wire.config import EngineArgs, WorkerConfig
from deepinfer.wire.image_jobs import (
    FromImageWorker,
    ImageDone,
    ImageJob,
    ImageWorkerFailed,
    ImageWorkerHeartbeat,
    ImageWorkerHello,
    ImageWorkerReady,
)
from deepinfer.wire.silence import Silence
from deepinfer.wire.sockets import PeerFull, PeerGone, bind_router, send_to

DEATHS_ALLOWED = 8
"""Image workers that may die in a row before they are ready, until requests do not wait for one.

What dies over a job is counted against the job (``scheduler.images``).
"""

PAUSE_S = 10.0
"""How long the next one is not started then."""

GRACE_S = 2.0
"""A worker that has its job for so much longer than the job's deadline is taken as hung."""


@dataclass(slots=True)
class _Worker:
    """One process. Its place is its number; what takes its place has another identity.

    ``child`` is ``None`` for one that is to be started at the time ``started``.
    """

    child: Child | None
    identity: bytes
    started: float
    silence: Silence = field(default_factory=lambda: Silence(WATCH_S))
    said_hello: bool = False
    state: WorkerState = WorkerState.STARTING
    due: float | None = None


class ImageLink:
    """``num_image_workers`` processes and the socket they share.

    A worker that dies, falls silent or overruns the deadline of its job is replaced; nobody who
    does not wait for its job notices. The callbacks are called from the actor's loop: ``on_ready``,
    ``on_done`` and ``on_gone`` with the worker's number, ``on_down`` when no image worker gets
    ready: for good when the first one failed by itself, and then ``down`` says why; else until
    one is.
    """

    def __init__(
        self,
        actor: Actor,
        args: EngineArgs,
        directory: str,
        arena_fd: int,
        *,
        on_ready: Callable[[int, ImageWorkerReady], None],
        on_done: Callable[[int, ImageDone], None],
        on_gone: Callable[[int, str], None],
        on_down: Callable[[str], None],
    ) -> None:
        self.restarts = 0
        self.junk_frames = 0
        self.down = ""
        """Why there are no image workers and will be none."""
        self._args = args
        self._endpoint = f"ipc://{directory}/images"
        self._arena_fd = arena_fd
        self._codec = Codec(FromImageWorker)
        self._on_ready = on_ready
        self._on_done = on_done
        self._on_gone = on_gone
        self._on_down = on_down
        self._ever_ready = False
        self._barren_deaths = 0
        self._generation = 0
        self._socket = bind_router(actor.context, self._endpoint)
        actor.add_socket(self._socket, self._receive)
        self._workers = [self._start() for _ in range(args.num_image_workers)]

    @property
    def state(self) -> str:
        """``ready`` when at least one worker is, else ``starting`` or ``down``."""
        states = [worker.state for worker in self._workers]
        ready = WorkerState.READY in states
        return (WorkerState.READY if ready else states[0]).value

    def send(self, number: int, job: ImageJob) -> None:
        """Give a worker that is idle a job."""
        worker = self._workers[number]
        worker.due = time.monotonic() + job.timeout_s + GRACE_S
        try:
            send_to(self._socket, worker.identity, self._codec.encode(job))
        except (PeerGone, PeerFull):
            self._bury(number, "does not take its job")

    def watch(self) -> None:
        """Find out who died, went silent or hangs. Called every ``WATCH_S``."""
        for number, worker in enumerate(self._workers):
            if self.down:
                return
            now = time.monotonic()
            if worker.child is None:
                if now > worker.started:
                    self._workers[number] = self._start()
            elif worker.child.poll() is not None:
                self._bury(number, worker.child.describe_exit())
            elif (silent_s := worker.silence.seconds()) > self._silence_limit(worker):
                self._bury(number, f"was silent for {silent_s:.1f} s")
            elif worker.due is not None and now > worker.due:
                self._bury(number, f"took longer than {self._args.image_timeout_s:g} s")
            elif (
                worker.state is WorkerState.STARTING
                and now - worker.started > self._args.start_timeout_s
            ):
                self.give_up(f"was not ready after {self._args.start_timeout_s:g} s")

    def replace(self, number: int, cause: str) -> None:
        """Take a worker that cannot be trusted as dead."""
        self._bury(number, cause)

    def give_up(self, cause: str) -> None:
        """End all workers; there will be no others."""
        if self.down:
            return
        self.down = f"the image worker {cause}"
        self._end_all()
        for number, worker in enumerate(self._workers):
            if worker.state is WorkerState.READY:
                self._on_gone(number, self.down)
            worker.state = WorkerState.DOWN
        self._on_down(self.down)

    def stop(self) -> None:
        """End the workers. There is nothing in them that is worth waiting for."""
        self._end_all()

    def _end_all(self) -> None:
        for worker in self._workers:
            if worker.child is not None:
                worker.child.kill()

    def _start(self) -> _Worker:
        self._generation += 1
        identity = b"image-%d" % self._generation
        config = WorkerConfig(
            args=self._args,
            endpoint=self._endpoint,
            identity=identity,
            arena_fd=self._arena_fd,
        )
        child = Child(self._args.image_worker_module, config, pass_fds=(self._arena_fd,))
        return _Worker(child, identity, time.monotonic())

    def _silence_limit(self, worker: _Worker) -> float:
        # Before its hello it still starts the interpreter and cannot send anything.
        limit = self._args.heartbeat_timeout_s
        return limit if worker.said_hello else max(limit, FIRST_WORD_S)

    def _receive(self, frames: list[bytes]) -> None:
        identity = frames[0].removesuffix(b"-beat")
        number = next((i for i, w in enumerate(self._workers) if w.identity == identity), None)
        if len(frames) != 2 or number is None or self.down:
            self.junk_frames += 1  # a buried worker's last words, or not a worker at all
            return
        worker = self._workers[number]
        try:
            message = self._codec.decode(frames[1])
        except BadFrame:
            self.junk_frames += 1
            return
        worker.said_hello = True
        worker.silence.heard()
        match message:
            case ImageDone():
                worker.due = None
                self._on_done(number, message)
            case ImageWorkerReady():
                worker.state = WorkerState.READY
                self._ever_ready = True
                self._barren_deaths = 0
                self._on_ready(number, message)
            case ImageWorkerFailed():
                self._bury(number, f"failed: {message.message}", stated=True)
            case ImageWorkerHello() | ImageWorkerHeartbeat():
                pass

    def _bury(self, number: int, cause: str, stated: bool = False) -> None:
        """A worker is dead or as good as dead: start another, unless that leads nowhere."""
        worker = self._workers[number]
        assert worker.child is not None
        status = worker.child.poll()
        worker.child.kill()
        was_ready = worker.state is WorkerState.READY
        self._barren_deaths += not was_ready
        # A first worker that leaves by itself has a reason that the next one would have too.
        hopeless = not self._ever_ready and (stated or (status is not None and status >= 0))
        if hopeless:
            self.give_up(cause)
            return
        self.restarts += 1
        cause = f"the image worker {cause}"
        if self._barren_deaths <= DEATHS_ALLOWED:
            self._workers[number] = self._start()
        else:
            later = time.monotonic() + PAUSE_S
            self._workers[number] = _Worker(None, b"", later)
            self._on_down(cause)
        if was_ready:
            self._on_gone(number, cause)
