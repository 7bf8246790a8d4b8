"""The scheduler's side of one device worker: start it, watch it, bury it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from enum import Enum

from deepinfer.scheduler.worker_process import start_worker, worker_endpoint, worker_identity
from deepinfer.wire.actor import Actor
from deepinfer.wire.children import Child
from deepinfer.wire.codec import MAX_STEP_BYTES, BadFrame, Codec
from deepinfer.wire.config import EngineArgs
from deepinfer.wire.silence import Silence
from deepinfer.wire.sockets import PeerFull, PeerGone, bind_router, send_to
from deepinfer.wire.steps import (
    FromWorker,
    StepPlan,
    StepResult,
    WorkerFailed,
    WorkerHeartbeat,
    WorkerHello,
    WorkerReady,
)

WATCH_S = 0.1
"""How often a worker is looked at."""
DEATHS_ALLOWED = 8
"""Workers that may die in a row, no step having ended between, before the engine is down.

A request that kills its workers is found and ended before that (``scheduler.suspects``).
"""
FIRST_WORD_S = 30.0
"""How long a process may take to say hello."""
STEP_LIMIT_S = 300.0
"""A step that computes for longer is taken as hung, though the process still answers."""


class WorkerState(Enum):
    """Where a worker is in its life."""

    STARTING = "starting"
    READY = "ready"
    DOWN = "down"


class WorkerLink:
    """One worker process and its socket.

    The callbacks are called from the actor's loop: ``on_ready``, ``on_result``, ``on_gone`` (it
    died, loaded or not, and another is starting) and ``on_down`` (it failed for good), the last two
    with a cause. ``first_worker`` was started before, as generation 1.
    """

    def __init__(
        self,
        actor: Actor,
        args: EngineArgs,
        directory: str,
        first_worker: Child,
        arena_fd: int | None = None,
        *,
        on_ready: Callable[[WorkerReady], None],
        on_result: Callable[[StepResult], None],
        on_gone: Callable[[str], None],
        on_down: Callable[[str], None],
    ) -> None:
        self.state = WorkerState.STARTING
        self.restarts = 0
        self.junk_frames = 0
        self._args = args
        self._directory = directory
        self._arena_fd = arena_fd
        self._codec = Codec(FromWorker, max_in=MAX_STEP_BYTES, max_out=MAX_STEP_BYTES)
        self._on_ready = on_ready
        self._on_result = on_result
        self._on_gone = on_gone
        self._on_down = on_down
        self._ever_ready = False
        self._barren_deaths = 0
        self._socket = bind_router(actor.context, worker_endpoint(directory), MAX_STEP_BYTES)
        actor.add_socket(self._socket, self._receive)
        self._generation = 0
        self._take_on(first_worker)

    @property
    def pid(self) -> int:
        """Process id of the worker that runs now."""
        return self._child.pid

    def send(self, plan: StepPlan) -> None:
        """Send a plan. A worker that cannot take it is found dead by the next ``watch``."""
        try:
            send_to(self._socket, self._identity, self._codec.encode(plan))
        except (PeerGone, PeerFull):
            self._bury("does not take its plans")

    def watch(self) -> None:
        """Find out whether the worker died, went silent or hangs. Called every ``WATCH_S``."""
        if self.state is WorkerState.DOWN:
            return
        if self._child.poll() is not None:
            self._bury(self._child.describe_exit())
        elif (silent_s := self._silence.seconds()) > self._silence_limit():
            self._bury(f"was silent for {silent_s:.1f} s")
        elif self._busy_s > STEP_LIMIT_S:
            self._bury(f"computes one step for {self._busy_s:.0f} s")
        elif (
            self.state is WorkerState.STARTING
            and time.monotonic() - self._started > self._args.start_timeout_s
        ):
            self.give_up(f"the worker was not ready after {self._args.start_timeout_s:g} s")

    def replace(self, cause: str) -> None:
        """Take a worker that cannot be trusted as dead."""
        self._bury(cause)

    def give_up(self, cause: str) -> None:
        """End the worker; there will be no other."""
        self.state = WorkerState.DOWN
        self._child.kill()
        self._on_down(cause)

    def stop(self) -> None:
        """End the worker."""
        self._child.stop(grace_s=1.0)

    def _take_on(self, worker: Child) -> None:
        """Wait for a worker that was just started to be ready."""
        self._child = worker
        self._generation += 1
        self._identity = worker_identity(self._generation)
        self._started = time.monotonic()
        self._silence = Silence(WATCH_S)
        self._said_hello = False
        self._busy_s = 0.0
        self.state = WorkerState.STARTING

    def _silence_limit(self) -> float:
        # Before its hello a worker still starts the interpreter and cannot send anything.
        limit = self._args.heartbeat_timeout_s
        return limit if self._said_hello else max(limit, FIRST_WORD_S)

    def _receive(self, frames: list[bytes]) -> None:
        if len(frames) != 2 or not frames[0].startswith(self._identity):
            self.junk_frames += 1  # a buried worker's last words, or not a worker at all
            return
        try:
            message = self._codec.decode(frames[1])
        except BadFrame:
            self.junk_frames += 1
            return
        self._said_hello = True
        self._silence.heard()
        match message:
            case StepResult():
                self._barren_deaths = 0
                self._on_result(message)
            case WorkerHeartbeat():
                self._busy_s = message.busy_s
            case WorkerHello():
                pass
            case WorkerReady():
                self.state = WorkerState.READY
                self._ever_ready = True
                self._on_ready(message)
            case WorkerFailed():
                self._bury(f"failed: {message.message}", stated=True)

    def _bury(self, cause: str, stated: bool = False) -> None:
        """The worker is dead or as good as dead: start another, unless that leads nowhere."""
        status = self._child.poll()
        self._child.kill()
        self._barren_deaths += 1
        cause = f"the device worker {cause}"
        # A first worker that leaves by itself has a reason that the next one would have too, unless
        # it says otherwise; one that was killed or stopped from outside has not.
        left = status is not None and status >= 0 and status != os.EX_TEMPFAIL
        hopeless = not self._ever_ready and (stated or left)
        if self._barren_deaths > DEATHS_ALLOWED or hopeless:
            self.give_up(cause)
            return
        self.restarts += 1
        self._on_gone(cause)
        generation = self._generation + 1
        self._take_on(start_worker(self._args, self._directory, generation, self._arena_fd))
