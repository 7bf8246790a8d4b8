"""Drives a scheduler core without processes: a worker that obeys plans to the letter, and clients.

``MirrorWorker`` keeps what ``wire/steps.py`` says a worker keeps, and refuses a plan that cannot
be executed. Its "keys and values" are a hash chain in paged memory: the entry of a position is
made of the entry before it and the token, read through the block table. The next token is a
function of the last entry alone. So a wrong block, a stale block, a skipped or a repeated
position changes what the request says, and ``reference`` (the same chain without an engine)
disagrees.

``CoreDriver`` plays all clients of a core: it adds requests, hands plans to the worker and
results back, in whatever order a test asks for, and holds every output against the promises:
tokens before the end, one end, nothing after it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np

from deepinfer.scheduler.core import Core
from deepinfer.wire.columns import pack_int32, unpack_int32, unpack_uint32
from deepinfer.wire.config import EngineArgs
from deepinfer.wire.messages import (
    Abort,
    AddRequest,
    End,
    OutputBatch,
    PromptLogprobs,
    Refused,
    StopMatched,
    TokenLogprobs,
)
from deepinfer.wire.params import SamplingParams
from deepinfer.wire.steps import (
    RowFailed,
    RowLogprobs,
    RowPromptLogprobs,
    StepPlan,
    StepResult,
    WorkerReady,
)

VOCAB = 40
EOS = 3
ROOT = 1


def chain(before: int, token: int) -> int:
    """Return the entry after ``before`` for ``token``: never 0, which is unwritten memory."""
    text = b"%d %d" % (before, token)
    return int.from_bytes(blake2b(text, digest_size=7).digest(), "little") | 1


def next_token(entry: int) -> int:
    """Return the token that the model says after an entry: EOS about once in forty."""
    return (entry >> 8) % VOCAB


def score(entry: int, token: int) -> float:
    """Return the log probability that the model gives to a token after an entry."""
    return -float((entry ^ token * 7919) % 1000) / 100


def entries(tokens: list[int]) -> list[int]:
    """Return the chain's entries for a whole sequence."""
    found, before = [], ROOT
    for token in tokens:
        before = chain(before, token)
        found.append(before)
    return found


@dataclass
class Expected:
    """What a request says when it is alone and nothing disturbs it."""

    tokens: list[int]
    status: str
    detail: str


def reference(
    prompt: list[int], params: SamplingParams, max_model_len: int, cache_tokens: int
) -> Expected:
    """Run one request without an engine."""
    limit = min(max_model_len, cache_tokens)
    at_limit = "max_model_len" if max_model_len <= cache_tokens else "kv_capacity"
    if len(prompt) > limit:
        return Expected([], "FINISHED_IGNORED", at_limit)
    entry, output = entries(prompt)[-1], []
    while True:
        token = next_token(entry)
        output.append(token)
        entry = chain(entry, token)
        if len(output) >= params.min_tokens:
            if token == EOS and not params.ignore_eos:
                return Expected(output, "FINISHED_STOPPED", "eos")
            if token in (params.stop_token_ids or ()):
                return Expected(output, "FINISHED_STOPPED", f"stop_token:{token}")
        if len(prompt) + len(output) >= limit:
            return Expected(output, "FINISHED_LENGTH_CAPPED", at_limit)
        if len(output) >= params.max_tokens:
            return Expected(output, "FINISHED_LENGTH_CAPPED", "max_tokens")


@dataclass
class _Row:
    epoch: int
    tokens: list[int]
    num_admitted: int
    num_prompt: int
    computed: int
    blocks: list[int]
    params: SamplingParams
    prompt_logprobs_start: int
    decodes: bool = False
    failed: bool = False


class MirrorWorker:
    """A device worker in miniature; raises ``AssertionError`` for a plan it cannot execute."""

    def __init__(
        self,
        *,
        num_slots: int,
        num_blocks: int,
        block_size: int,
        max_tokens_per_step: int,
        tokens_per_row: int,
    ) -> None:
        self.memory = np.zeros(num_blocks * block_size, dtype=np.int64)
        self.rows: dict[int, _Row] = {}
        self.num_slots = num_slots
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.max_tokens_per_step = max_tokens_per_step
        self.tokens_per_row = tokens_per_row
        self.last_step = 0
        self.fail_slots: set[int] = set()
        self.step_tokens: list[int] = []

    def execute(self, plan: StepPlan) -> StepResult:
        """Apply a plan in the order of its fields, compute, and return what it brought."""
        assert plan.step > self.last_step, f"step {plan.step} after {self.last_step}"
        self.last_step = plan.step
        self._change_rows(plan)
        chunks = unpack_int32(plan.chunks).reshape(-1, 2).tolist()
        decode = [slot for slot in sorted(self.rows) if self.rows[slot].decodes]
        assert decode or chunks, "a step that computes nothing"
        total = len(decode) * self.tokens_per_row + sum(q for _, q in chunks)
        assert total <= self.max_tokens_per_step, f"{total} tokens in one step"
        self.step_tokens.append(total)
        written: dict[int, int] = {}
        brought: dict[int, list[int]] = {}
        prompt_logprobs = []
        for slot, q in chunks:
            row = self.rows[slot]
            assert not row.decodes, f"a chunk for decode row {slot}"
            assert q > 0 and row.computed + q <= row.num_admitted
            begin = row.computed
            for _ in range(q):
                self._compute(slot, row, written)
            scores = self._prompt_scores(row, begin)
            if scores is not None:
                prompt_logprobs.append(RowPromptLogprobs(slot, scores))
            if row.computed == row.num_admitted:
                row.tokens.append(next_token(self._entry(row, row.computed - 1)))
                brought[slot] = row.tokens[-1:]
                row.decodes = True
        for slot in decode:
            row = self.rows[slot]
            if row.failed:
                continue
            brought[slot] = []
            if self.tokens_per_row > 1 and row.computed >= len(row.blocks) * self.block_size:
                # With drafts a row may be past its longest length before the core could know. Its
                # result is void, whatever it says; if it were not, the reference would disagree.
                brought[slot] = [0]
                continue
            for _ in range(self._wanted(plan.step, slot)):
                if brought[slot] and row.computed >= len(row.blocks) * self.block_size:
                    break  # drafts stop where the blocks do
                self._compute(slot, row, written)
                row.tokens.append(next_token(self._entry(row, row.computed - 1)))
                brought[slot].append(row.tokens[-1])
        self._check_writers(written)
        return self._result(plan.step, brought, decode, prompt_logprobs)

    def _change_rows(self, plan: StepPlan) -> None:
        for slot in unpack_int32(plan.released).tolist():
            assert slot in self.rows, f"slot {slot} is released and was empty"
            del self.rows[slot]
        for admit in plan.admitted:
            assert admit.slot not in self.rows, f"slot {admit.slot} is taken"
            assert 0 <= admit.slot < self.num_slots
            row = _Row(
                epoch=admit.epoch,
                tokens=unpack_int32(admit.tokens).tolist(),
                num_admitted=len(admit.tokens) // 4,
                num_prompt=admit.num_prompt,
                computed=admit.num_cached,
                blocks=unpack_int32(admit.blocks).tolist(),
                params=admit.params,
                prompt_logprobs_start=admit.prompt_logprobs_start,
            )
            assert row.computed < row.num_admitted, "nothing is left to compute"
            assert len(row.blocks) * self.block_size >= row.num_admitted
            right = entries(row.tokens[: row.computed])
            held = [self._entry(row, position) for position in range(row.computed)]
            assert held == right, "a cached block holds something else"
            self.rows[admit.slot] = row
        for slot, block in unpack_int32(plan.grown).reshape(-1, 2).tolist():
            self.rows[slot].blocks.append(block)
        for row in self.rows.values():
            assert len(set(row.blocks)) == len(row.blocks), "a block twice in one table"
            assert all(0 <= block < self.num_blocks for block in row.blocks)

    def _place(self, row: _Row, position: int) -> int:
        index = position // self.block_size
        assert index < len(row.blocks), f"position {position} has no block"
        return row.blocks[index] * self.block_size + position % self.block_size

    def _entry(self, row: _Row, position: int) -> int:
        return int(self.memory[self._place(row, position)])

    def _compute(self, slot: int, row: _Row, written: dict[int, int]) -> None:
        position = row.computed
        before = self._entry(row, position - 1) if position else ROOT
        place = self._place(row, position)
        self.memory[place] = chain(before, row.tokens[position])
        row.computed += 1
        block = place // self.block_size
        assert written.setdefault(block, slot) == slot, f"block {block} has two writers"

    def _check_writers(self, written: dict[int, int]) -> None:
        for slot, row in self.rows.items():
            for block in row.blocks:
                writer = written.get(block, slot)
                assert writer == slot, f"block {block} of slot {slot} is written by {writer}"

    def _prompt_scores(self, row: _Row, begin: int) -> PromptLogprobs | None:
        if row.params.prompt_logprobs is None:
            return None
        start = max(begin + 1, row.prompt_logprobs_start)
        end = min(row.computed + 1, row.num_prompt)
        if start >= end:
            return None
        return PromptLogprobs(
            start=start,
            token_ids=[[row.tokens[p]] for p in range(start, end)],
            logprobs=[[score(self._entry(row, p - 1), row.tokens[p])] for p in range(start, end)],
        )

    def _wanted(self, step: int, slot: int) -> int:
        """How many tokens a decode row brings: any number up to ``tokens_per_row``."""
        return 1 + (step * 31 + slot * 17) % 7 % self.tokens_per_row

    def _result(
        self,
        step: int,
        brought: dict[int, list[int]],
        decode: list[int],
        prompt_logprobs: list[RowPromptLogprobs],
    ) -> StepResult:
        for slot in self.fail_slots & brought.keys():
            self.rows[slot].failed = True
        self.fail_slots.clear()
        failed = [slot for slot in {*decode, *brought} if self.rows[slot].failed]
        slots = [slot for slot in brought if slot not in failed]
        several = any(len(brought[slot]) != 1 for slot in slots)
        logprobs = []
        for slot in slots:
            row = self.rows[slot]
            if row.params.logprobs is not None:
                first = len(row.tokens) - len(brought[slot])
                told = [
                    TokenLogprobs(score(self._entry(row, p - 1), row.tokens[p]), 0.0, [], [])
                    for p in range(first, len(row.tokens))
                ]
                logprobs.append(RowLogprobs(slot, told))
        return StepResult(
            step=step,
            slots=pack_int32(slots),
            epochs=pack_int32(self.rows[slot].epoch for slot in slots),
            counts=pack_int32(len(brought[slot]) for slot in slots) if several else b"",
            tokens=pack_int32(token for slot in slots for token in brought[slot]),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            failed=[RowFailed(slot, self.rows[slot].epoch, "it broke") for slot in failed],
        )


@dataclass
class Request:
    """A request as its client sees it."""

    client: bytes
    key: int
    request_id: str
    prompt: list[int]
    params: SamplingParams
    resubmitted: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    prompt_logprobs: dict[int, float] = field(default_factory=dict)
    cached_tokens: int = 0
    num_preemptions: int = 0
    end: End | None = None
    refused: Refused | None = None
    steps: list[int] = field(default_factory=list)

    @property
    def output(self) -> list[int]:
        """All outputs, those of an earlier submission included."""
        return self.resubmitted + self.tokens

    @property
    def live(self) -> bool:
        """Whether neither an end nor a refusal came."""
        return self.end is None and self.refused is None


class CoreDriver:
    """One core, one worker, any number of clients; ``now`` moves only when a test says so."""

    def __init__(self, args: EngineArgs, num_blocks: int, tokens_per_row: int = 1) -> None:
        self.args = args
        self.num_blocks = num_blocks
        self.tokens_per_row = tokens_per_row
        self.core = Core(args, tokens_per_row)
        self.now = 0.0
        self.results: list[StepResult] = []
        self.delivered: list[StepResult] = []
        self.plans: list[StepPlan] = []
        self.requests: dict[tuple[bytes, int], Request] = {}
        self.worker = self._new_worker()
        self.start_worker()

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
        **fields: object,
    ) -> Request:
        """Send an ``AddRequest``; the key is a new one when not given."""
        if key is None:
            key = len(self.requests) + 1
        params = params or SamplingParams(seed=0, max_tokens=8, temperature=0.0)
        request = Request(client, key, request_id or f"r{key}", prompt, params, output or [])
        if (client, key) not in self.requests:
            self.requests[client, key] = request
        message = AddRequest(
            key=key,
            request_id=request.request_id,
            prompt=pack_int32(prompt),
            params=params,
            output=pack_int32(output or []),
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
        return reference(request.prompt, request.params, self.max_model_len, self.cache_tokens)

    def hold_alone(self, request: Request) -> None:
        """Assert that the request ended as it does when it is alone, with the same tokens."""
        alone = self.expected(request)
        assert request.end is not None, f"{request.request_id} has no end"
        assert request.output == alone.tokens
        assert (request.end.status, request.end.detail) == (alone.status, alone.detail)

    # ---- the worker -----------------------------------------------------------------------------

    def evict(self, request: Request) -> bool:
        """Preempt a request by recompute, wherever it is; return whether it held a slot."""
        life = self.core._life
        sequence = life.clients.find(request.client, request.key)
        if sequence is None or sequence.slot < 0 or not life.table.known[sequence.slot]:
            return False
        life.preempt(sequence, self.now, by="test", why="asked to", recompute=True)
        self.check()
        return True

    def plan(self) -> StepPlan | None:
        """Let the core plan a step and the worker execute it; the result waits in ``results``."""
        plan = self.core.plan(self.now)
        if plan is not None:
            self.plans.append(plan)
            self.results.append(self.worker.execute(plan))
            self.check()
        return plan

    def deliver(self, index: int = 0) -> None:
        """Give the core a waiting result, the oldest if no other is named."""
        result = self.results.pop(index)
        self.delivered.append(result)
        self.core.step_result(result, self.now)
        self.collect()

    def step(self) -> bool:
        """Fill the pipeline and deliver one result; return whether anything happened."""
        busy = False
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
        """The worker dies with everything it knew; another one is ready at once."""
        self.results.clear()
        self.core.worker_gone(self.now, "killed")
        self.collect()
        self.start_worker()

    def start_worker(self) -> None:
        """Make an empty worker and announce it."""
        last = self.worker.last_step
        self.worker = self._new_worker()
        self.worker.last_step = last
        ready = WorkerReady(
            vocab_size=VOCAB,
            eos_token_ids=[EOS],
            max_model_len=self.max_model_len,
            num_blocks=self.num_blocks,
            dtype="float32",
            device="cpu",
            architecture="chain",
            phases={},
        )
        self.core.worker_ready(ready, self.now)
        self.collect()

    def _new_worker(self) -> MirrorWorker:
        return MirrorWorker(
            num_slots=self.args.max_num_seqs,
            num_blocks=self.num_blocks,
            block_size=self.args.block_size,
            max_tokens_per_step=self.args.max_num_batched_tokens,
            tokens_per_row=self.tokens_per_row,
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
            request.tokens += tokens[:count]
            request.steps.append(batch.step)
            del tokens[:count]
        for note in batch.notes:
            request = self.requests[client, note.key]
            request.cached_tokens = note.cached_tokens
            request.num_preemptions = note.num_preemptions
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
            everything = request.prompt + request.output[: end.num_output_tokens]
            assert end.last_token_id == everything[-1]
            assert end.queue_ms <= end.total_ms
