"""The scheduler's shell: sockets, timers, the worker and signals around the pure core."""

from __future__ import annotations

import logging
import math
import resource
import signal
import time

from deepinfer.scheduler.client_link import MAX_CLIENTS, ClientLink
from deepinfer.scheduler.client_names import key_of
from deepinfer.scheduler.core import Core
from deepinfer.scheduler.image_link import ImageLink
from deepinfer.scheduler.images import BrokenImage
from deepinfer.scheduler.recent import StepLog
from deepinfer.scheduler.results import BrokenResult
from deepinfer.scheduler.worker_link import WATCH_S, WorkerLink, WorkerState
from deepinfer.wire.actor import Actor
from deepinfer.wire.arena import Arena
from deepinfer.wire.checks import shown
from deepinfer.wire.children import Child
from deepinfer.wire.config import SchedulerConfig
from deepinfer.wire.image_jobs import ImageDone, ImageWorkerReady
from deepinfer.wire.messages import (
    MAX_IMAGE_BYTES,
    MAX_IMAGES,
    PROTOCOL_VERSION,
    Answer,
    Call,
    ClientHeartbeat,
    Drain,
    EngineDown,
    EngineInfo,
    EngineView,
    FromClient,
    Hello,
    ImageInput,
    SchedulerHeartbeat,
    Welcome,
)
from deepinfer.wire.recorder import Recorder, timed
from deepinfer.wire.steps import StepResult, WorkerReady

log = logging.getLogger("deepinfer.scheduler")

_PUSH_INTERVAL_S = 0.005
# A view is shown again for so long, and for so many times as long as it took to make.
_VIEW_FRESH_NS = 50_000_000
_VIEW_FRESH_FACTOR = 20


class SchedulerProcess:
    """Feeds the core with what arrives and sends what it decides."""

    def __init__(
        self,
        config: SchedulerConfig,
        first_worker: Child,
        arena: Arena | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        self._config = config
        self._core = Core(config.args, image_arena_bytes=arena.size if arena is not None else 0)
        self._plan = timed(recorder, "plan", self._core.plan)
        self._info: EngineInfo | None = None
        self._device: EngineInfo | None = None
        self._down = ""
        self._down_told = False
        self._started = self._last_step = time.monotonic()
        self._steps = 0
        self._worker_busy_ns = self._worker_idle_ns = 0
        self._step_ended_ns: int | None = None
        self._step_log = StepLog()
        self._view: EngineView | None = None
        self._view_until_ns = 0
        self._actor = Actor(after_turn=self._turn)
        self._clients = ClientLink(
            self._actor,
            f"ipc://{config.directory}/engine",
            owner=config.owner,
            silence_limit_s=config.args.heartbeat_timeout_s,
            on_message=timed(recorder, "message", self._on_message),
            on_gone=lambda client, rule: self._core.client_gone(client, rule, time.monotonic()),
        )
        self._worker = WorkerLink(
            self._actor,
            config.args,
            config.directory,
            first_worker,
            arena.fileno if arena is not None else None,
            on_ready=self._on_ready,
            on_result=timed(recorder, "result", self._on_result),
            on_gone=self._on_worker_gone,
            on_down=self._on_worker_down,
        )
        self._images = self._image_link(arena) if arena is not None else None
        if config.args.endpoint is not None:
            try:
                self._clients.listen_also(config.args.endpoint, config.args.curve_keys)
            except (ValueError, OSError) as error:
                # The owner hears of it on the private socket; trying again would not help.
                self._worker.give_up(str(error))
        self._actor.every(WATCH_S, self._watch)
        self._actor.every(1.0, self._beat)
        self._drain_until = math.inf
        self._actor.on_signals((signal.SIGTERM, signal.SIGUSR1), self._on_signal)

    def run(self) -> None:
        """Run until it is drained, or told to end at once (SIGUSR1), or the parent is gone.

        The owner's ``Drain`` and SIGTERM begin to drain: what is open may finish. A service manager
        may well send SIGTERM to all processes at once, so here a second one means nothing.
        """
        self._actor.run(timeout_s=self._longest_wait)
        self._clients.stop_listening()
        if self._images is not None:
            self._images.stop()
        self._worker.stop()
        self._actor.close()

    def give_up(self, cause: str) -> None:
        """Be an engine that cannot serve; clients are told why."""
        self._worker.give_up(cause)

    # ---- the turn -------------------------------------------------------------------------------

    def _turn(self) -> None:
        now = time.monotonic()
        self._core.tick(now)
        if self._draining:
            told = self._core.idle and not self._clients.stalled
            if told or now >= self._drain_until:
                self._core.shutdown(now)
                self._actor.stop()
        # The worker first: it computes while the outputs are encoded.
        while self._worker.state is WorkerState.READY:
            began_ns = time.monotonic_ns()
            plan = self._plan(now)
            if plan is None:
                break
            ended_ns = time.monotonic_ns()
            self._worker.send(plan)
            self._step_log.planned(plan, self._core.decode_rows, began_ns, ended_ns)
        if self._images is not None:
            for number, job in self._core.image_jobs(now):
                self._images.send(number, job)
        for client, message in self._core.outbox():
            self._clients.send(client, message)
        if self._down and not self._down_told:
            # After the outbox: a request's own end comes before the news that ends everything.
            self._down_told = True
            for client in self._clients.greeted():
                self._clients.send(client, EngineDown(self._down))
        if self._clients.stalled:
            self._clients.push()

    def _longest_wait(self) -> float | None:
        now = time.monotonic()
        waits = [_PUSH_INTERVAL_S] if self._clients.stalled else []
        deadline = self._core.next_deadline()
        if deadline is not None:
            waits.append(deadline - now)
        if self._draining:
            waits.append(self._drain_until - now)
        due = self._core.plan_due()
        # When it has passed there is nothing to plan before something arrives.
        if due is not None and due > now:
            waits.append(due - now)
        return min(waits) if waits else None

    def _watch(self) -> None:
        self._clients.watch(time.monotonic())
        self._worker.watch()
        if self._images is not None:
            self._images.watch()

    def _beat(self) -> None:
        for client in self._clients.greeted():
            self._clients.send(client, SchedulerHeartbeat(self._steps))

    @property
    def _draining(self) -> bool:
        return self._drain_until < math.inf

    def _on_signal(self, number: int) -> None:
        self._drain(0.0 if number == signal.SIGUSR1 else self._config.args.drain_timeout_s)

    def _drain(self, timeout_s: float) -> None:
        self._drain_until = min(self._drain_until, time.monotonic() + timeout_s)
        self._core.drain()

    # ---- clients --------------------------------------------------------------------------------

    def _on_message(self, client: bytes, message: FromClient) -> None:
        match message:
            case Hello():
                self._greet(client, message)
            case Drain():
                if self._clients.owns(client):
                    self._drain(message.timeout_s)
            case ClientHeartbeat():
                pass
            case Call():
                self._clients.send(client, self._answer(client, message))
            case _:
                self._core.handle(client, message, time.monotonic())

    def _greet(self, client: bytes, hello: Hello) -> None:
        if hello.protocol != PROTOCOL_VERSION:
            text = f"this engine speaks protocol {PROTOCOL_VERSION}, not {hello.protocol}"
            self._clients.send(client, EngineDown(text))
        elif self._down:
            self._clients.send(client, EngineDown(self._down))
        elif self._info is not None:
            self._clients.send(client, Welcome(self._info))

    def _answer(self, client: bytes, call: Call) -> Answer:
        reader = None if self._clients.sees_all(client) else key_of(client)
        if reader is not None and call.what in ("view", "tenants"):
            text = (
                f"{call.what} tells of all clients, and this key is not an operator's "
                "(deepinfer keys --client NAME --operator makes one)"
            )
            return Answer(call.call_id, error=text)
        match call.what:
            case "stats":
                return Answer(call.call_id, numbers=self._stats())
            case "health":
                return self._health(call.call_id)
            case "story":
                story = self._core.story(call.request_id, reader)
                if story is None:
                    return Answer(
                        call.call_id, error=f"no story of request {shown(call.request_id)}"
                    )
                return Answer(call.call_id, story=story)
            case "view":
                return Answer(call.call_id, view=self._look_in())
            case "tenants":
                return self._tenants(call.call_id)
            case what:
                return Answer(call.call_id, error=f"unknown call {shown(what)}")

    def _tenants(self, call_id: int) -> Answer:
        told = list(self._core.tenants().items())
        return Answer(
            call_id,
            numbers={
                f"{i}.{name}": value
                for i, (_, numbers) in enumerate(told)
                for name, value in numbers.items()
            },
            texts={str(i): user_id for i, (user_id, _) in enumerate(told)},
        )

    def _stats(self) -> dict[str, float]:
        now = time.monotonic()
        return self._core.stats() | {
            "clients": len(self._clients),
            "junk_frames": self._clients.junk_frames
            + self._worker.junk_frames
            + (self._images.junk_frames if self._images is not None else 0),
            "unknown_keys": self._clients.unknown_keys,
            "worker_restarts": self._worker.restarts,
            "image_worker_restarts": self._images.restarts if self._images is not None else 0,
            "worker_busy_s": self._worker_busy_ns / 1e9,
            "worker_idle_s": self._worker_idle_ns / 1e9,
            "last_step_age_s": now - self._last_step,
            "uptime_s": now - self._started,
        }

    def _health(self, call_id: int) -> Answer:
        """Health is progress: with work at hand, a step must have ended not long ago."""
        age = time.monotonic() - self._last_step
        stats = self._core.stats()
        waits = stats["running"] + stats["waiting"] > 0
        stuck = waits and age > self._config.args.heartbeat_timeout_s
        cause = self._down or (f"no step ended for {age:.1f} s" if stuck else "")
        ok = self._worker.state is WorkerState.READY and not cause
        return Answer(
            call_id,
            numbers={
                "ok": float(ok),
                "steps": self._steps,
                "last_step_age_s": age,
                "worker_pid": self._worker.pid,
            },
            texts={
                "worker": self._worker.state.value,
                "cause": cause,
                "images": self._images.state if self._images is not None else "none",
            },
        )

    def _look_in(self) -> EngineView:
        """Return a view that is new, or nearly: many who look on must not slow the steps down."""
        now_ns = time.monotonic_ns()
        if self._view is None or now_ns > self._view_until_ns:
            health = self._health(0)
            self._view = EngineView(
                now_ns=now_ns,
                ok=bool(health.numbers["ok"]),
                cause=health.texts["cause"],
                worker=health.texts["worker"],
                stats=dict(self._stats()),
                steps=self._step_log.steps(),
            )
            self._core.view(now_ns / 1e9, self._view)
            made_ns = time.monotonic_ns()
            fresh_ns = max(_VIEW_FRESH_NS, _VIEW_FRESH_FACTOR * (made_ns - now_ns))
            self._view_until_ns = made_ns + fresh_ns
        return self._view

    # ---- the worker -----------------------------------------------------------------------------

    def _on_ready(self, ready: WorkerReady) -> None:
        now = time.monotonic()
        self._core.worker_ready(ready, now)
        self._last_step = now
        args = self._config.args
        log.info("worker ready: %s", " ".join(f"{k} {v:.2f}s" for k, v in ready.phases.items()))
        self._device = EngineInfo(
            model=args.model,
            tokenizer=args.tokenizer or args.model,
            vocab_size=ready.vocab_size,
            eos_token_ids=ready.eos_token_ids,
            max_model_len=self._core.limit,
            block_size=args.block_size,
            num_blocks=ready.num_blocks,
            max_num_seqs=min(args.max_num_seqs, args.max_num_batched_tokens),
            max_num_batched_tokens=args.max_num_batched_tokens,
            dtype=ready.dtype,
            device=ready.device,
            architecture=ready.architecture,
            start_s=ready.phases,
        )
        self._announce()

    def _announce(self) -> None:
        """Tell clients of the engine, once all its parts are there."""
        if self._device is None:
            return
        images = None
        if self._images is not None and not self._images.down:
            if self._core.image_placeholder < 0:
                return
            images = ImageInput(
                placeholder=self._core.image_placeholder,
                max_images=MAX_IMAGES,
                max_bytes=MAX_IMAGE_BYTES,
                urls=self._config.args.image_urls,
            )
        first, self._info = self._info is None, self._device
        self._info.images = images
        if first:
            for client in self._clients.greeted():
                self._clients.send(client, Welcome(self._info))

    def _on_result(self, result: StepResult) -> None:
        read_ns = time.monotonic_ns()
        self._last_step = read_ns / 1e9
        self._steps += 1
        self._step_log.read(result, read_ns)
        try:
            self._core.step_result(result, self._last_step)
        except BrokenResult as error:
            self._worker.replace(f"sent a broken result: {error}")
            return
        self._worker_busy_ns += result.ended_ns - result.started_ns
        if self._step_ended_ns is not None:
            self._worker_idle_ns += result.started_ns - self._step_ended_ns
        # Time without a request to work for is not counted as idle.
        self._step_ended_ns = None if self._core.idle else result.ended_ns

    def _on_worker_gone(self, cause: str) -> None:
        log.warning("%s; starting another", cause)
        self._step_ended_ns = None
        self._core.worker_gone(time.monotonic(), cause)

    def _on_worker_down(self, cause: str) -> None:
        if self._info is not None:  # else whoever started it gets the cause as the error
            log.error("the engine is down: %s", cause)
        self._down = cause
        self._core.engine_down(time.monotonic(), cause)
        if self._images is not None:
            self._images.stop()

    # ---- image workers --------------------------------------------------------------------------

    def _image_link(self, arena: Arena) -> ImageLink:
        return ImageLink(
            self._actor,
            self._config.args,
            self._config.directory,
            arena.fileno,
            on_ready=self._on_image_worker_ready,
            on_done=self._on_image_done,
            on_gone=self._on_image_worker_gone,
            on_down=self._on_images_down,
        )

    def _on_image_worker_ready(self, number: int, ready: ImageWorkerReady) -> None:
        assert self._images is not None
        try:
            self._core.image_worker_ready(number, ready)
        except ValueError as error:
            self._images.give_up(f"cannot work: {error}")
            return
        self._announce()

    def _on_image_done(self, number: int, done: ImageDone) -> None:
        assert self._images is not None
        try:
            self._core.image_done(number, done, time.monotonic())
        except BrokenImage as error:
            self._images.replace(number, f"sent a broken answer: {error}")

    def _on_image_worker_gone(self, number: int, cause: str) -> None:
        log.warning("%s; starting another", cause)
        self._core.image_worker_gone(number, cause, time.monotonic())

    def _on_images_down(self, cause: str) -> None:
        log.error("requests with images cannot be served: %s", cause)
        self._core.images_down(cause, time.monotonic())
        self._announce()


def _allow_descriptors(wanted: int) -> None:
    """Raise the soft limit: each connection takes one, also one that never gets through."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


def main(
    config: SchedulerConfig, first_worker: Child, arena: Arena | None = None, trouble: str = ""
) -> None:
    """Run the scheduler; ``first_worker`` is ``start_worker``'s generation 1.

    ``arena`` is there when the model takes images; ``trouble`` says why the engine cannot serve.
    """
    logging.basicConfig(format="%(asctime)s %(name)s %(levelname)s %(message)s", level="WARNING")
    _allow_descriptors(2 * MAX_CLIENTS)
    folder = config.args.profile
    recorder = Recorder(folder, "scheduler") if folder is not None else None
    try:
        scheduler = SchedulerProcess(config, first_worker, arena, recorder)
        if trouble:
            scheduler.give_up(trouble)
        scheduler.run()
    finally:
        if recorder is not None:
            recorder.write()
