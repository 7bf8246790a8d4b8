"""``Core``: the scheduler without I/O. Messages and times go in, plans and outputs come out.

No sockets, no clock, no randomness: the same inputs give the same decisions, so a trace replays.
``now`` is always seconds of a monotonic clock.
"""

from __future__ import annotations

from collections import Counter

from deepinfer.scheduler.client_names import asker_of
from deepinfer.scheduler.ends import ABORT_RULES, GONE_RULES, Ending
from deepinfer.scheduler.image_flow import ImageFlow
from deepinfer.scheduler.intake import MAX_HELD_BYTES, BadRequest, check_images, check_request
from deepinfer.scheduler.invariants import check
from deepinfer.scheduler.lifecycle import Lifecycle
from deepinfer.scheduler.planner import Planner
from deepinfer.scheduler.results import ResultReader
from deepinfer.scheduler.sequence import Sequence
from deepinfer.scheduler.view import look_in
from deepinfer.wire.checks import shown
from deepinfer.wire.config import EngineArgs
from deepinfer.wire.image_jobs import ImageDone, ImageJob, ImageWorkerReady
from deepinfer.wire.messages import (
    Abort,
    AddRequest,
    EngineView,
    Goodbye,
    OutputBatch,
    Refused,
    StopMatched,
    StoryEvent,
)
from deepinfer.wire.params import MAX_STOP_CHARS
from deepinfer.wire.steps import StepPlan, StepResult, WorkerReady


class Core:
    """Everything that decides. One per engine.

    ``tokens_per_row`` is how many tokens a running row can bring in one step at most: 1, plus the
    drafts when there are any. Blocks and budget are reserved for it. ``image_arena_bytes`` is the
    size of the arena, 0 when there is none, for a model or an engine that takes no images.
    """

    def __init__(
        self, args: EngineArgs, tokens_per_row: int = 1, image_arena_bytes: int = 0
    ) -> None:
        self._life = Lifecycle(args, tokens_per_row, image_arena_bytes)
        self._flow = ImageFlow(self._life)
        self._planner = Planner(self._life, depth=2 if args.async_scheduling else 1)
        self._reader = ResultReader(self._life)
        self._arrivals = 0
        self._started = False
        self._closed: tuple[str, str] | None = None

    @property
    def idle(self) -> bool:
        """Whether no accepted request is open."""
        return not self._life.clients

    @property
    def limit(self) -> int:
        """Most tokens a sequence may hold; known once a worker was ready."""
        return self._life.rules.limit

    # ---- clients --------------------------------------------------------------------------------

    def handle(self, client: bytes, message: object, now: float) -> None:
        """Take in a message of a client, named by its ZeroMQ identity."""
        match message:
            case AddRequest():
                self._add(client, message, now)
            case Abort():
                self._abort(client, message, now)
            case StopMatched():
                self._stop_matched(client, message, now)
            case Goodbye():
                self.client_gone(client, "disconnect", now)
            case _:
                raise TypeError(f"the core does not handle {type(message).__name__}")

    def client_gone(self, client: bytes, rule: str, now: float) -> None:
        """End all requests of a client; ``rule`` is one of ``GONE_RULES``."""
        for sequence in self._life.clients.of(client):
            self._life.end(sequence, GONE_RULES[rule], now)

    def outbox(self) -> list[tuple[bytes, OutputBatch | Refused]]:
        """Return what is to be sent, by client, and forget it."""
        return self._life.outbox.drain()

    # ---- the worker -----------------------------------------------------------------------------

    def worker_ready(self, ready: WorkerReady, now: float) -> None:
        """A worker is loaded and empty: planning begins, or begins again."""
        self._life.set_up(ready)
        self._reader.forget()
        self._started = True
        # Another worker may have less memory than the one before it.
        for sequence in list(self._life.queue):
            self._life.end_if_unservable(sequence, now)

    def worker_gone(self, now: float, cause: str) -> None:
        """The worker died: all its sequences go back to the queue with their tokens."""
        if self._life.ready:
            self._life.restart(now, cause)

    def engine_down(self, now: float, cause: str) -> None:
        """There will be no worker any more: end everything, refuse what comes."""
        self._close("down", f"the engine is down: {cause}")
        self._end_all(Ending.WORKER_FAILED, now, cause)

    def plan(self, now: float) -> StepPlan | None:
        """Return the next step for the worker, ``None`` when there is no room or no work."""
        return self._planner.plan(now)

    def plan_due(self) -> float | None:
        """Return the time before which ``plan`` holds a step back, if it does."""
        return self._planner.due

    def step_result(self, result: StepResult, now: float) -> None:
        """Take in a result.

        Raises ``BrokenResult`` (a ``ValueError``) when it cannot belong to its plan; the worker
        that sent it is broken and must be replaced.
        """
        self._reader.read(result, now)

    # ---- image workers --------------------------------------------------------------------------

    def image_worker_ready(self, worker: int, ready: ImageWorkerReady) -> None:
        """An image worker is loaded and waits; they are told apart by numbers.

        ``ValueError`` when the arena is too small.
        """
        self._flow.worker_ready(worker, ready)

    def image_worker_gone(self, worker: int, cause: str, now: float) -> None:
        """An image worker died; nothing writes to the arena any more that it was given."""
        self._flow.worker_gone(worker, cause, now)

    def images_down(self, cause: str, now: float) -> None:
        """No image worker gets ready: requests with images end until one does, others go on."""
        self._flow.down(cause, now)

    def image_jobs(self, now: float) -> list[tuple[int, ImageJob]]:
        """Return jobs, each with the number of the image worker that is to have it."""
        return self._flow.jobs(now)

    def image_done(self, worker: int, done: ImageDone, now: float) -> None:
        """Take in an image worker's answer.

        Raises ``BrokenImage`` (a ``ValueError``) when it cannot be one to its job; the worker is
        broken and must be replaced.
        """
        self._flow.done(worker, done, now)

    @property
    def image_placeholder(self) -> int:
        """The token that stands for an image, -1 while no image worker was ready."""
        return self._life.images.placeholder

    # ---- time and end ---------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """End the requests whose deadline has passed."""
        deadlines = self._life.deadlines
        while deadlines and deadlines[0][0] <= now:
            self._life.end(deadlines[0][2], Ending.DEADLINE, now)

    def next_deadline(self) -> float | None:
        """Return the time of the next deadline."""
        deadlines = self._life.deadlines
        return deadlines[0][0] if deadlines else None

    def drain(self) -> None:
        """Refuse what comes from now on; what was accepted goes on."""
        self._close("shutdown", "the engine shuts down; ask another, or this one later")

    def shutdown(self, now: float) -> None:
        """End everything, refuse what comes."""
        self.drain()
        self._end_all(Ending.SHUTDOWN, now)

    # ---- looking in -----------------------------------------------------------------------------

    def stats(self) -> dict[str, float]:
        """Return gauges and totals, by name."""
        life, counters = self._life, self._life.counters
        numbers: dict[str, float] = {
            name: getattr(counters, name) for name in counters.__slots__ if name != "ended"
        }
        numbers |= {f"ended_{end.name.lower()}": count for end, count in counters.ended.items()}
        numbers["live"] = len(life.clients)
        numbers["waiting"] = len(life.queue)
        numbers["in_flight"] = len(life.in_flight)
        numbers["tenants"] = len(life.tenants)
        numbers |= life.images.stats()
        if self._started:
            numbers["prefilling"] = len(life.prefilling)
            numbers["running"] = sum(seq is not None for seq in life.table.sequences)
            numbers["blocks_total"] = life.pool.num_blocks
            numbers["blocks_free"] = life.pool.num_free
            numbers["blocks_cached"] = life.pool.num_idle
        else:
            numbers["running"] = numbers["prefilling"] = 0
        return numbers

    @property
    def decode_rows(self) -> int:
        """How many rows the latest plan decodes."""
        return self._planner.decode_rows

    def view(self, now: float, into: EngineView) -> None:
        """Fill in what the requests do and who holds the KV blocks; the times are the shell's."""
        look_in(self._life, now, into)

    def tenants(self) -> dict[str, dict[str, float]]:
        """Return weight, served tokens, counter and requests of the tenants, by ``user_id``."""
        waiting = Counter(sequence.tenant for sequence in self._life.queue)
        return self._life.tenants.numbers(waiting)

    def story(self, request_id: str, reader: bytes | None = None) -> list[StoryEvent] | None:
        """Return what happened to a request that lives or ended not long ago.

        A ``reader``, the key of a client, finds requests of this key only, and nothing of others
        in them.
        """
        live = self._life.clients.with_id(request_id, reader)
        story = live.story if live else self._life.shelf.find(request_id, reader)
        return story.events(reader) if story else None

    def check(self) -> None:
        """Raise ``AssertionError`` when an invariant of the state is broken."""
        check(self._life)

    # ---- inside ---------------------------------------------------------------------------------

    def _add(self, client: bytes, add: AddRequest, now: float) -> None:
        refused = self._refusal(client, add)
        if refused is not None:
            self._life.counters.refused += 1
            self._life.outbox.refuse(client, refused)
            return
        self._arrivals += 1
        sequence = Sequence(
            client=client,
            client_index=self._life.clients.index_of(client),
            key=add.key,
            request_id=add.request_id,
            prompt=add.prompt,
            output=add.output,
            params=add.params,
            priority=add.priority,
            salt=add.salt,
            arrival=now,
            arrival_number=self._arrivals,
            deadline=None if add.timeout_ms is None else now + add.timeout_ms / 1e3,
            user_id=add.user_id,
            tenant=self._life.tenants.index_of(add.user_id, add.weight),
            resubmitted=add.resubmitted,
        )
        self._life.enter(sequence, now)
        early = self._life.clients.take_early_abort(client, add.key)
        if early is not None:
            self._life.end(sequence, ABORT_RULES[early], now)
        elif not self._life.end_if_unservable(sequence, now):
            if add.images:
                self._flow.arrive(sequence, add.images, now)
            else:
                self._life.enqueue(sequence, now)

    def _refusal(self, client: bytes, add: AddRequest) -> Refused | None:
        images = self._life.images
        if self._closed:
            code, message = self._closed
            return Refused(add.key, code, "", message)
        if not self._started:
            return Refused(add.key, "busy", "", "the engine is still loading")
        try:
            check_request(add, self._life.vocab_size)
            if add.images or images.placeholder >= 0:
                check_images(
                    add, images.placeholder, urls=self._life.args.image_urls, why=images.down
                )
        except BadRequest as bad:
            # A key that fits no column is answered with the number it came with.
            return Refused(add.key, "invalid", bad.field, str(bad))
        if self._life.clients.find(client, add.key):
            return Refused(add.key, "duplicate", "key", f"key {add.key} is in use")
        if self._life.clients.has_id(client, add.request_id):
            message = f"request_id {shown(add.request_id)} is in use by a live request"
            return Refused(add.key, "duplicate", "request_id", message)
        if images.held_bytes > MAX_HELD_BYTES * (2 if add.resubmitted else 1) and add.images:
            message = f"images of {images.held_bytes} bytes wait already; retry later"
            return Refused(add.key, "busy", "", message)
        limit = self._life.args.max_queue_len
        if add.resubmitted:
            # Room for all that an engine like this one may have accepted before it was lost.
            limit = 2 * limit + self._life.args.max_num_seqs
        places = self._life.queue.places[add.resubmitted]
        if not places.has_room(asker_of(client, add.user_id), limit):
            message = f"{places.total} requests wait already; retry later"
            return Refused(add.key, "busy", "", message)
        return None

    def _abort(self, client: bytes, abort: Abort, now: float) -> None:
        rule = abort.rule if abort.rule in ABORT_RULES else "client_abort"
        sequence = self._life.clients.find(client, abort.key)
        if sequence is None:
            self._life.clients.abort_early(client, abort.key, rule)
        else:
            self._life.end(sequence, ABORT_RULES[rule], now)

    def _stop_matched(self, client: bytes, match: StopMatched, now: float) -> None:
        sequence = self._life.clients.find(client, match.key)
        if sequence is None:
            return  # it ended by another rule before the frontend's word came
        produced = self._life.num_tokens(sequence) - sequence.num_prompt
        count = min(max(match.num_output_tokens, 0), produced)
        matched = match.stop[:MAX_STOP_CHARS]
        self._life.end(sequence, Ending.STOP_STRING, now, matched=matched, num_output=count)

    def _close(self, code: str, message: str) -> None:
        self._closed = (code, message)

    def _end_all(self, ending: Ending, now: float, message: str = "") -> None:
        for sequence in list(self._life.clients):
            self._life.end(sequence, ending, now, message=message)
