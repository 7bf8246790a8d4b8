"""A device worker in miniature for tests of the core: exact about the protocol, instant to run.

``MirrorWorker`` keeps what ``wire/steps.py`` says a worker keeps, and refuses a plan that cannot
be executed. Its "keys and values" are a hash chain in paged memory: the entry of a position is
made of the entry before it and the token, read through the block table. The next token is a
function of the last entry (and, for a prompt that begins with ``GRAMMAR``, of the row's grammar
matcher). So a wrong block, a stale block, a skipped or a repeated position changes what the
request says, and ``reference`` (the same chain without an engine) disagrees.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

from deepinfer.wire.arena import Region
from deepinfer.wire.columns import pack_int32, unpack_int32
from deepinfer.wire.messages import PromptLogprobs, TokenLogprobs
from deepinfer.wire.params import SamplingParams
from deepinfer.wire.steps import (
    ImageSpan,
    RowFailed,
    RowLogprobs,
    RowPromptLogprobs,
    StepPlan,
    StepResult,
)
from support.scripted_grammar import EOS, VOCAB, BracketMatcher, matcher_for
from support.scripted_images import CellArena, expanded

ROOT = 1


def chain(before: int, token: int) -> int:
    """Return the entry after ``before`` for ``token``: never 0, which is unwritten memory."""
    text = b"%d %d" % (before, token)
    return int.from_bytes(blake2b(text, digest_size=7).digest(), "little") | 1


def next_token(entry: int) -> int:
    """Return the token that the model says after an entry: EOS about once in forty."""
    return (entry >> 8) % VOCAB


def say(entry: int, matcher: BracketMatcher | None) -> int:
    """Return the token said after an entry: any while no grammar binds, else one it allows."""
    if matcher is None or matcher.done:
        return next_token(entry)
    allowed = matcher.allowed()
    return allowed[(entry >> 8) % len(allowed)]


def score(entry: int, token: int) -> float:
    """Return the log probability that the model gives to a token after an entry."""
    return -float((entry ^ token * 7919) % 1000) / 100


def entries(contents: list[int]) -> list[int]:
    """Return the chain's entries for a whole sequence: tokens, and lines of images."""
    found, before = [], ROOT
    for token in contents:
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
    prompt: list[int],
    params: SamplingParams,
    max_model_len: int,
    cache_tokens: int,
    pictures: Sequence[bytes] = (),
) -> Expected:
    """Run one request without an engine."""
    limit = min(max_model_len, cache_tokens)
    at_limit = "max_model_len" if max_model_len <= cache_tokens else "kv_capacity"
    if len(prompt) > limit:
        return Expected([], "FINISHED_IGNORED", at_limit)
    matcher = matcher_for(prompt)
    prompt, content = expanded(prompt, pictures)
    if len(prompt) > limit:
        return Expected([], "FINISHED_VE_FAILED", "image")
    entry, output = entries(content)[-1], []
    while True:
        token = say(entry, matcher)
        if matcher is not None:
            matcher.accept(len(output), token)
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
    images: list[ImageSpan]
    matcher: BracketMatcher | None = None
    decodes: bool = False
    failed: bool = False


class MirrorWorker:
    """A device worker in miniature; raises ``AssertionError`` for a plan it cannot execute."""

    vocab_size = VOCAB
    eos_token_ids = (EOS,)

    def __init__(
        self,
        *,
        num_slots: int,
        num_blocks: int,
        block_size: int,
        max_tokens_per_step: int,
        tokens_per_row: int,
        last_step: int = 0,
        arena: CellArena | None = None,
    ) -> None:
        self.memory = np.zeros(num_blocks * block_size, dtype=np.int64)
        self.rows: dict[int, _Row] = {}
        self.num_slots = num_slots
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.max_tokens_per_step = max_tokens_per_step
        self.tokens_per_row = tokens_per_row
        self.last_step = last_step
        self.fail_slots: set[int] = set()
        self.step_tokens: list[int] = []
        self.arena = arena
        self.read_in_step: dict[int, list[Region]] = {}
        """Regions that a step reads. It runs some time before its result is read."""

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
            regions = [span.region for span in row.images]
            self.read_in_step.setdefault(plan.step, []).extend(regions)
            for _ in range(q):
                self._compute(slot, row, written)
            scores = self._prompt_scores(row, begin)
            if scores is not None:
                prompt_logprobs.append(RowPromptLogprobs(slot, scores))
            if row.computed == row.num_admitted:
                brought[slot] = [self._sample(row)]
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
                brought[slot].append(self._sample(row))
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
                images=admit.images,
            )
            assert row.computed < row.num_admitted, "nothing is left to compute"
            assert len(row.blocks) * self.block_size >= row.num_admitted
            right = entries(self._content(row)[: row.computed])
            held = [self._entry(row, position) for position in range(row.computed)]
            assert held == right, "a cached block holds something else"
            row.matcher = matcher_for(row.tokens[: row.num_prompt])
            if row.matcher is not None:
                for position, token in enumerate(row.tokens[row.num_prompt :]):
                    row.matcher.accept(position, token)
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
        content = self._content(row) if position < row.num_admitted else row.tokens
        self.memory[place] = chain(before, content[position])
        row.computed += 1
        block = place // self.block_size
        assert written.setdefault(block, slot) == slot, f"block {block} has two writers"

    def _content(self, row: _Row) -> list[int]:
        """What is computed at each position: the token, or the line of an image."""
        content = list(row.tokens)
        for span in row.images:
            assert self.arena is not None
            for position, value in self.arena.read(span).items():
                content[position] = value
        return content

    def _sample(self, row: _Row) -> int:
        token = say(self._entry(row, row.computed - 1), row.matcher)
        if row.matcher is not None:
            row.matcher.accept(len(row.tokens) - row.num_prompt, token)
        row.tokens.append(token)
        return token

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
