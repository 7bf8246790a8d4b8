"""Plays all clients and the worker of a scheduler core, without processes or a clock.

``CoreDriver`` adds requests, hands plans to the worker and results back, in whatever order a test
asks for, and holds every output against the promises: tokens before the end, one end, nothing
after it; and, where a grammar binds a request, every token once and in order. The worker is a
``MirrorWorker`` if no other is given.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from deepinfer.scheduler.core import Core
from deepinfer.wire.arena import ALIGNMENT
from deepinfer.wire.columns import pack_int32, unpack_int32, unpack_uint32
from deepinfer.wire.config import EngineArgs
from deepinfer.wire.image_jobs import ImageDone, ImageJob, ImageWorkerReady
from deepinfer.wire.messages import (
    Abort,
    AddRequest,
    End,
    ImageRef,
    OutputBatch,
    Refused,
    StopMatched,
)
from deepinfer.wire.params import SamplingParams
from deepinfer.wire.steps import StepPlan, StepResult, WorkerReady
from support.mirror_worker import Expected, MirrorWorker, reference
from support.scripted_grammar import EOS, VOCAB, BracketMatcher, matcher_for
from support.scripted_images import (
    MAX_LINES,
    PLACEHOLDER,
    CellArena,
    content_of,
    encoded,
    expanded,
    url_of,
)

STEP_NS = 30_000_000

__all__ = ["EOS", "VOCAB", "CoreDriver", "Request", "reference"]


@dataclass
class Request:
    """A request as its client sees it."""

    client: bytes
    key: int
    request_id: str
    prompt: list[int]
    params: SamplingParams
    pictures: list[bytes] = field(default_factory=list)
    resubmitted: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    prompt_logprobs: dict[int, float] = field(default_factory=dict)
    cached_tokens: int = 0
    num_preemptions: int = 0
    end: End | None = None
    refused: Refused | None = None
    steps: list[int] = field(default_factory=list)
    matcher: BracketMatcher | None = None

    def __post_init__(self) -> None:
        self.matcher = matcher_for(self.prompt)
        self._match(0, self.resubmitted)

    def take(self, tokens: list[int]) -> None:
        """Append tokens that came; a grammar that binds the request must see each of them once."""
        self._match(len(self.output), tokens)
        self.tokens += tokens

    def _match(self, position: int, tokens: list[int]) -> None:
        if self.matcher is not None:
            for offset, token in enumerate(tokens):
                self.matcher.accept(position + offset, token)

    @property
    def output(self) -> list[int]:
        """All outputs, those of an earlier submission included."""
        return self.resubmitted + self.tokens

    @property
    def whole_prompt(self) -> list[int]:
        """The prompt with the tokens of its pictures."""
        return expanded(self.prompt, self.pictures)[0]

    @property
    def live(self) -> bool:
        """Whether neither an end nor a refusal came."""
        return self.end is None and self.refused is None


class Worker(Protocol):
    """What the driver asks of a device worker."""

    vocab_size: int
    eos_token_ids: Sequence[int]

    def execute(self, plan: StepPlan) -> StepResult:
        """Compute a step."""


class CoreDriver:
    """One core, one worker, any number of clients; ``now`` moves only when a test says so.

    ``make_worker`` makes a worker, at the start and after each death.
    """

    def __init__(
        self,
        args: EngineArgs,
        num_blocks: int,
        tokens_per_row: int = 1,
        make_worker: Callable[[], Worker] | None = None,
        arena_cells: int = 0,
    ) -> None:
        self.args = args
        self.num_blocks = num_blocks
        self.tokens_per_row = tokens_per_row
        self._make_worker = make_worker or self._mirror_worker
        self.core = Core(args, tokens_per_row, arena_cells * ALIGNMENT)
        self.arena = CellArena(arena_cells)
        self.image_jobs: dict[int, ImageJob] = {}
        self.images_done = 0
        self.now = 0.0
        self.results: list[StepResult] = []
        self.delivered: list[StepResult] = []
        self.late: list[StepResult] = []
        self.plans: list[StepPlan] = []
        self.requests: dict[tuple[bytes, int], Request] = {}
        self.start_worker()
        for number in range(args.num_image_workers if arena_cells else 0):
            self.start_image_worker(number)

    @property
    def max_model_len(self) -> int:
        """The length limit the worker's model has."""
        return self.args.max_model_len or 64

    @property
    def cache_tokens(self) -> int:
        """Tokens that the whole KV cache holds."""
        return self.num_blocks * self.args.block_size

    # ---- clients --------------------------------------------------------------------------------

    def add(
        self,
        prompt: list[int],
        params: SamplingParams | None = None,
        *,
        client: bytes = b"c",
        key: int | None = None,
        request_id: str | None = None,
        output: list[int] | None = None,
        pictures: Sequence[bytes] = (),
        by_url: bool = False,
        **fields: object,
    ) -> Request:
        """Send an ``AddRequest``; the key is a new one when not given.

        ``pictures`` belong to the ``PLACEHOLDER`` tokens of the prompt.
        """
        if key is None:
            key = len(self.requests) + 1
        params = params or SamplingParams(seed=0, max_tokens=8, temperature=0.0)
        name = request_id or f"r{key}"
        request = Request(client, key, name, prompt, params, list(pictures), output or [])
        places = [at for at, token in enumerate(prompt) if token == PLACEHOLDER]
        refs = [
            ImageRef(url=url_of(data), position=at) if by_url else ImageRef(data, "", at)
            for data, at in zip(pictures, places, strict=False)
        ]
        if (client, key) not in self.requests:
            self.requests[client, key] = request
        message = AddRequest(
            key=key,
            request_id=request.request_id,
            prompt=pack_int32(prompt),
            params=params,
            output=pack_int32(output or []),
            images=refs,
            **fields,  # type: ignore[arg-type]
        )
        self.core.handle(client, message, self.now)
        self.collect()
        return request

    def abort(self, request: Request, rule: str = "client_abort") -> None:
        """Send an ``Abort``."""
        self.core.handle(request.client, Abort(request.key, rule), self.now)
        self.collect()

    def stop_matched(self, request: Request, stop: str, num_output_tokens: int) -> None:
        """Send a ``StopMatched``."""
        message = StopMatched(request.key, stop, num_output_tokens)
        self.core.handle(request.client, message, self.now)
        self.collect()

    def expected(self, request: Request) -> Expected:
        """Return what the request says when it is alone."""
        return reference(
            request.prompt,
            request.params,
            self.max_model_len,
            self.cache_tokens,
            request.pictures,
        )

    def hold_alone(self, request: Request) -> None:
        """Assert that the request ended as it does when it is alone, with the same tokens."""
        alone = self.expected(request)
        assert request.end is not None, f"{request.request_id} has no end"
        assert request.output == alone.tokens
        assert (request.end.status, request.end.detail) == (alone.status, alone.detail)

    def hold_idle(self) -> None:
        """Assert that nothing is left of any request: gauges at zero, one end for each accepted."""
        stats = self.core.stats()
        gauges = ("live", "waiting", "prefilling", "running", "in_flight")
        assert {name: stats[name] for name in gauges} == dict.fromkeys(gauges, 0)
        assert stats["blocks_free"] + stats["blocks_cached"] == stats["blocks_total"]
        assert stats["images_waiting"] == stats["images_encoding"] == stats["image_file_bytes"] == 0
        assert stats["image_arena_used_bytes"] == stats["image_arena_cached_bytes"]
        ended = sum(count for name, count in stats.items() if name.startswith("ended_"))
        assert ended == stats["accepted"]
        assert all(value >= 0 for value in stats.values())
        self.check()

    # ---- the worker -----------------------------------------------------------------------------

    def evict(self, request: Request) -> bool:
        """Preempt a request by recompute, wherever it is; return whether it held a slot."""
        life = self.core._life
        sequence = life.clients.find(request.client, request.key)
        if sequence is None or sequence.slot < 0 or not life.table.known[sequence.slot]:
            return False
        life.preempt(sequence, self.now, why="asked to", recompute=True)
        self.check()
        return True

    def plan(self) -> StepPlan | None:
        """Let the core plan a step and the worker execute it; the result waits in ``results``."""
        plan = self.core.plan(self.now)
        if plan is not None:
            self.plans.append(plan)
            self.results.append(self.worker.execute(plan))
            # As far as time passed since: no step is believed to be longer than that.
            self.results[-1].ended_ns = STEP_NS
            self.check()
        return plan

    def deliver(self, index: int = 0) -> None:
        """Give the core a waiting result, the oldest if no other is named."""
        result = self.results.pop(index)
        if isinstance(self.worker, MirrorWorker):
            for region in self.worker.read_in_step.pop(result.step, []):
                assert self.arena.holds(region), "a step read what was given away"
        self.delivered.append(result)
        self.core.step_result(result, self.now)
        self.collect()

    def step(self) -> bool:
        """Fill the pipeline, deliver one result, finish one image; return whether any was there."""
        self.take_image_jobs()
        busy = bool(self.image_jobs)
        if busy:
            self.finish_image(next(iter(self.image_jobs)))
        while self.plan() is not None:
            busy = True
        if self.results:
            busy = True
            self.deliver()
        return busy

    def run(self, most: int = 5000) -> None:
        """Step until nothing is left to do."""
        for _ in range(most):
            if not self.step():
                return
        raise AssertionError(f"not idle after {most} steps: {self.core.stats()}")

    def kill_worker(self) -> None:
        """The worker dies with everything it knew; another one is ready at once.

        What it had answered and nobody read may still come, from ``late``.
        """
        self.late += self.results
        self.results.clear()
        self.core.worker_gone(self.now, "killed")
        self.collect()
        self.start_worker()

    def start_worker(self) -> None:
        """Make an empty worker and announce it."""
        self.worker = self._make_worker()
        ready = WorkerReady(
            vocab_size=self.worker.vocab_size,
            eos_token_ids=list(self.worker.eos_token_ids),
            max_model_len=self.max_model_len,
            num_blocks=self.num_blocks,
            dtype="float32",
            device="cpu",
            architecture="chain",
            phases={},
        )
        self.core.worker_ready(ready, self.now)
        self.collect()

    # ---- image workers --------------------------------------------------------------------------

    def start_image_worker(self, number: int) -> None:
        """Announce an image worker."""
        ready = ImageWorkerReady(PLACEHOLDER, (1 + MAX_LINES) * ALIGNMENT, {})
        self.core.image_worker_ready(number, ready)

    def take_image_jobs(self) -> None:
        """Let idle image workers begin what the core has for them."""
        for number, job in self.core.image_jobs(self.now):
            assert number not in self.image_jobs, "a second job at a time"
            self.image_jobs[number] = job
            self.arena.begin(job.region)
        self.collect()

    def finish_image(self, number: int, error: str = "") -> None:
        """Let an image worker answer: the image, or an error."""
        job = self.image_jobs.pop(number)
        done = ImageDone(job.job, error=error)
        if not error:
            data = content_of(job.image)
            try:
                done.encoded = encoded(data)
                self.arena.write(job.region, data)
                self.images_done += 1
            except ValueError as bad:
                done.error = str(bad)
        self.core.image_done(number, done, self.now)
        self.collect()

    def kill_image_worker(self, number: int) -> None:
        """An image worker dies, and another is ready at once."""
        self.image_jobs.pop(number, None)
        self.core.image_worker_gone(number, "killed", self.now)
        self.collect()
        self.start_image_worker(number)

    def _mirror_worker(self) -> MirrorWorker:
        return MirrorWorker(
            last_step=self.plans[-1].step if self.plans else 0,
            num_slots=self.args.max_num_seqs,
            num_blocks=self.num_blocks,
            block_size=self.args.block_size,
            max_tokens_per_step=self.args.max_num_batched_tokens,
            tokens_per_row=self.tokens_per_row,
            arena=self.arena,
        )

    # ---- what comes back ------------------------------------------------------------------------

    def check(self) -> None:
        """Hold the core's own invariants."""
        self.core.check()

    def collect(self) -> None:
        """Read the outbox and hold it against what clients may rely on."""
        for client, message in self.core.outbox():
            if isinstance(message, Refused):
                request = self.requests.get((client, message.key))
                if request is not None and request.end is None and not request.tokens:
                    request.refused = message
            else:
                self._take_batch(client, message)
        self.check()

    def _take_batch(self, client: bytes, batch: OutputBatch) -> None:
        keys = unpack_uint32(batch.keys).tolist()
        tokens = unpack_int32(batch.tokens).tolist()
        counts = unpack_int32(batch.counts).tolist() or [1] * len(keys)
        assert len(counts) == len(keys) and sum(counts) == len(tokens)
        assert len(set(keys)) == len(keys)
        assert keys or batch.ends or batch.extras, "an empty batch"
        for key, count in zip(keys, counts, strict=True):
            request = self.requests[client, key]
            assert request.end is None, f"tokens of {request.request_id} after its end"
            request.take(tokens[:count])
            request.steps.append(batch.step)
            del tokens[:count]
        for note in batch.notes:
            request = self.requests[client, note.key]
            request.cached_tokens = note.cached_tokens
            request.num_preemptions = note.num_preemptions
            assert note.prompt_tokens == len(request.whole_prompt)
        for extra in batch.extras:
            request = self.requests[client, extra.key]
            request.logprobs += [told.logprob for told in extra.logprobs]
            for part in extra.prompt_logprobs:
                for offset, (ids, values) in enumerate(
                    zip(part.token_ids, part.logprobs, strict=True)
                ):
                    position = part.start + offset
                    assert position not in request.prompt_logprobs, "a position came twice"
                    assert ids[0] == request.prompt[position]
                    request.prompt_logprobs[position] = values[0]
        for end in batch.ends:
            request = self.requests[client, end.key]
            assert request.end is None, f"{request.request_id} ended twice"
            request.end = end
            assert end.num_output_tokens <= len(request.output)
            if not end.detail.startswith("stop_string"):
                assert end.num_output_tokens == len(request.output)
            # One that ended before its pictures were there has the prompt that it was sent with.
            whole = [request.prompt, request.whole_prompt][end.prompt_tokens != len(request.prompt)]
            assert end.prompt_tokens == len(whole)
            assert whole == request.whole_prompt or not request.tokens
            everything = whole + request.output[: end.num_output_tokens]
            assert end.last_token_id == everything[-1]
            assert end.queue_ms <= end.total_ms


def recomputing_driver(
    num_blocks: int = 64, tokens_per_row: int = 1, **fields: object
) -> CoreDriver:
    """Return a small engine under the recompute policy; ``fields`` change its arguments."""
    values: dict[str, object] = {
        "max_num_seqs": 8,
        "max_num_batched_tokens": 32,
        "block_size": 4,
        "max_model_len": 64,
        "stop_preempted_request": False,
    }
    args = EngineArgs(**(values | fields))  # type: ignore[arg-type]
    return CoreDriver(args, num_blocks, tokens_per_row)
