"""Executes step plans: the worker without its sockets.

Plans are executed in the order in which they come, and nothing else is assumed about what the
scheduler has seen. With overlap it plans a step before it read the result of the one before, so a
row may be computed once more after its sequence has ended; its result carries an old epoch and is
void there.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Protocol

import numpy as np
import numpy.typing as npt

from deepinfer.gpu_worker.backend import RaggedBatch
from deepinfer.gpu_worker.kernels.fork_join import ThreadTeam
from deepinfer.gpu_worker.logprobs import PromptLogprobsOfChunk
from deepinfer.gpu_worker.row_images import ImageReader
from deepinfer.gpu_worker.sampler import NOT_FINITE, Sampler
from deepinfer.gpu_worker.slot_table import PlanError, SlotTable
from deepinfer.wire.arena import Arena
from deepinfer.wire.columns import pack_int32
from deepinfer.wire.steps import (
    RowAdmit,
    RowFailed,
    RowLogprobs,
    RowPromptLogprobs,
    StepPlan,
    StepResult,
)

__all__ = ["MAX_PROMPT_LOGIT_ROWS", "PlanError", "Runner", "StepModel"]

Float32 = npt.NDArray[np.float32]
Index = npt.NDArray[np.integer]

MAX_PROMPT_LOGIT_ROWS = 128
"""Positions whose logits are held at once for prompt log probabilities.

A longer chunk is computed in pieces: a vocabulary of 150,000 would otherwise take 1.2 GB for a
chunk of 2,048 tokens. How a prompt is cut does not change its results.
"""


class StepModel(Protocol):
    """What the runner needs of a model. Its KV cache is attached already."""

    @property
    def vocab_size(self) -> int:
        """Columns of the logits; every token id is below it."""

    @property
    def hidden_size(self) -> int:
        """Columns of an embedding."""

    @property
    def rope_axes(self) -> int:
        """Numbers that a token's rotary position has: one, or three in models with images."""

    def forward(self, batch: RaggedBatch) -> Float32:
        """Compute a step; return logits float32 [len(batch.logit_index), vocab_size].

        The result is writable and C-contiguous, and valid until the next call.
        """


class Runner:
    """Turns a stream of plans into a stream of results.

    ``max_model_len`` and ``num_blocks * block_size`` both bound the tokens of a sequence.
    ``eos_token_ids`` are only banned (for ``min_tokens``) here; the scheduler decides what ends.
    ``team`` is the backend's, see ``Sampler``. ``arena`` is where images' embeddings come from.
    """

    def __init__(
        self,
        model: StepModel,
        *,
        max_num_seqs: int,
        max_model_len: int,
        num_blocks: int,
        block_size: int,
        eos_token_ids: Iterable[int] = (),
        team: ThreadTeam | None = None,
        arena: Arena | None = None,
    ) -> None:
        self._model = model
        self._team = team or ThreadTeam(1)
        images = None
        if arena is not None:
            images = ImageReader(arena, model.hidden_size, model.rope_axes)
        self._table = SlotTable(max_num_seqs, max_model_len, num_blocks, block_size, images)
        self._sampler = Sampler(model.vocab_size, eos_token_ids, max_num_seqs, self._team)
        # Slot to (how many, the first prompt position that is still wanted).
        self._prompt_logprobs: dict[int, tuple[int, int]] = {}
        self._step = -1

    def warm_up(self) -> None:
        """Compile what sampling needs, so that no request waits for it."""
        self._sampler.warm_up()

    def execute(self, plan: StepPlan) -> StepResult:
        """Execute one step.

        ``PlanError`` when the plan is impossible; the runner must not be used after it, nor after
        an exception of the model.
        """
        result = StepResult(plan.step, started_ns=time.monotonic_ns())
        if plan.step <= self._step:
            raise PlanError(f"step {plan.step} after step {self._step}")
        self._step = plan.step
        self._apply(plan, result)
        slots, counts = self._table.chunks(plan.chunks)
        if self._prompt_logprobs:
            slots, counts, collected = self._compute_prompt_logprobs(slots, counts, result)
        else:
            collected = {}
        self._compute(slots, counts, collected, result)
        for slot, found in collected.items():
            if not self._table.dead[slot]:
                result.prompt_logprobs.append(RowPromptLogprobs(slot, found.message()))
        result.ended_ns = time.monotonic_ns()
        return result

    def _apply(self, plan: StepPlan, result: StepResult) -> None:
        """Bring the table to the plan's state, in the order of its fields."""
        for slot in self._table.release(plan.released):
            self._sampler.release(slot)
            self._prompt_logprobs.pop(slot, None)
        for row in plan.admitted:
            self._table.admit(row)
            try:
                self._admit_params(row)
            except ValueError as error:
                self._fail(row.slot, str(error), result)
        if plan.grown:
            self._table.grow(plan.grown)

    def _admit_params(self, row: RowAdmit) -> None:
        tokens = self._table.tokens(row.slot)
        wrong = (tokens < 0) | (tokens >= self._model.vocab_size)
        if wrong.any():
            raise ValueError(
                f"tokens must be ids below the vocabulary size {self._model.vocab_size}, "
                f"got {tokens[wrong][0]}"
            )
        self._sampler.admit(row.slot, row.params, row.num_prompt)
        count, start = row.params.prompt_logprobs, max(row.prompt_logprobs_start, 1)
        if count is not None and start < row.num_prompt:
            # Position p's logits tell about p + 1, so the first to compute is start - 1.
            if row.num_cached >= start:
                raise PlanError(
                    f"slot {row.slot}: prompt_logprobs from {start} on need position {start - 1}, "
                    f"but {row.num_cached} tokens are cached"
                )
            self._prompt_logprobs[row.slot] = (count, start)

    def _compute(
        self,
        chunk_slots: Index,
        chunk_counts: Index,
        collected: dict[int, PromptLogprobsOfChunk],
        result: StepResult,
    ) -> None:
        """Run the model over decode rows and chunks, and sample where all tokens are computed."""
        table = self._table
        if not len(chunk_slots):
            self._decode(result)
            return
        decode = table.decode_rows()
        slots = np.concatenate([decode, chunk_slots])
        counts = np.concatenate([np.ones(len(decode), np.int32), chunk_counts])
        samples = table.computed[slots] + counts == table.length[slots]
        asks = samples.copy()
        for slot in collected:
            asks |= slots == slot
        batch = table.batch(slots, counts)
        batch.logit_index = batch.logit_index[asks]
        logits = self._model.forward(batch)
        table.computed[slots] += counts
        for slot, found in collected.items():
            at = np.flatnonzero(slots[asks] == slot)
            if len(at):
                self._collect(slot, int(table.computed[slot]) - 1, logits[at], found, result)
        # A row that samples is past its prompt: it cannot have failed by its prompt's logits.
        chosen = samples[asks]
        self._sample(slots[samples], logits if chosen.all() else logits[chosen], result)

    def _decode(self, result: StepResult) -> None:
        """Run the model over the decode rows alone: most steps have no others."""
        rows = self._table.decode_batch()
        if not len(rows.slots):
            return
        logits = self._model.forward(rows.batch)
        self._table.computed[rows.slots] = rows.batch.lengths
        self._sample(rows.slots, logits, result)

    def _sample(self, slots: Index, logits: Float32, result: StepResult) -> None:
        """Sample, append and report one token for each slot, or its failure."""
        if not len(slots):
            return
        table = self._table
        num_outputs = table.length[slots] - table.num_prompt[slots]
        sampled = self._sampler.sample(logits, slots, num_outputs, table.tokens)
        tokens = sampled.tokens
        for row, entry in sampled.logprobs.items():
            result.logprobs.append(RowLogprobs(int(slots[row]), [entry]))
        if sampled.failed:
            for row, message in sampled.failed.items():
                self._fail(int(slots[row]), message, result)
            going_on = np.delete(np.arange(len(slots)), list(sampled.failed))
            slots, tokens = slots[going_on], tokens[going_on]
        table.append(slots, tokens)
        result.slots, result.epochs = table.columns(slots)
        result.tokens = pack_int32(tokens)

    def _compute_prompt_logprobs(
        self, slots: Index, counts: Index, result: StepResult
    ) -> tuple[Index, Index, dict[int, PromptLogprobsOfChunk]]:
        """Compute the chunks that bring prompt log probabilities, all but their last token.

        Returns the chunks that are left for the step's common batch, and what was collected for
        each slot; the last token's entry is still missing from it. Leaving that token to the common
        batch keeps one rule there: no row has more than one line of logits.
        """
        table = self._table
        counts = counts.copy()
        collected: dict[int, PromptLogprobsOfChunk] = {}
        for at, (slot, count) in enumerate(zip(slots.tolist(), counts.tolist(), strict=True)):
            if slot not in self._prompt_logprobs:
                continue
            num_top, start = self._prompt_logprobs[slot]
            first = max(int(table.computed[slot]), start - 1)
            if first >= min(table.computed[slot] + count, table.num_prompt[slot] - 1):
                continue
            collected[slot] = PromptLogprobsOfChunk(self._team.control, first + 1, num_top)
            while count > 1 and not table.dead[slot]:
                piece = min(MAX_PROMPT_LOGIT_ROWS, count - 1)
                position = int(table.computed[slot])
                lines = np.arange(max(0, min(first - position, piece)), piece)
                batch = table.batch(np.array([slot]), np.array([piece]), lines)
                logits = self._model.forward(batch)
                table.computed[slot] += piece
                self._collect(slot, position + piece - len(lines), logits, collected[slot], result)
                count -= piece
            counts[at] = count
        alive = ~table.dead[slots]
        return slots[alive], counts[alive], collected

    def _collect(
        self,
        slot: int,
        position: int,
        logits: Float32,
        found: PromptLogprobsOfChunk,
        result: StepResult,
    ) -> None:
        """Take logits of ``position`` and those after it, as far as a prompt token follows."""
        table = self._table
        followers = table.pool[slot, position + 1 : table.num_prompt[slot]][: len(logits)]
        if len(followers) and not found.add(logits[: len(followers)], followers):
            self._fail(slot, NOT_FINITE, result)

    def _fail(self, slot: int, message: str, result: StepResult) -> None:
        self._table.bury(slot)
        result.failed.append(RowFailed(slot, int(self._table.epoch[slot]), message))
