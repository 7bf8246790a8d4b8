"""The smallest scheduler that can drive a ``Runner``: for tests of the worker alone.

It hands out blocks in a shuffled order, grows block tables as rows decode and gathers what each
row got. Policy is the test's: it says in each step which chunks to compute.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from deepinfer.gpu_worker.runner import Runner, StepModel
from deepinfer.wire.arena import Arena
from deepinfer.wire.columns import pack_int32, unpack_int32
from deepinfer.wire.messages import PromptLogprobs, TokenLogprobs
from deepinfer.wire.params import SamplingParams
from deepinfer.wire.steps import ImageSpan, RowAdmit, StepPlan, StepResult

GREEDY = SamplingParams(temperature=0.0, max_tokens=1000)


@dataclass(eq=False)
class Row:
    """A sequence as the driver sees it; ``outputs`` include those it was admitted with.

    The first ``num_shared`` of its blocks are another's.
    """

    prompt: list[int]
    params: SamplingParams
    slot: int
    epoch: int
    blocks: list[int]
    outputs: list[int] = field(default_factory=list)
    left: int = 0
    num_shared: int = 0
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)
    failure: str = ""

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.outputs)


class RunnerDriver:
    """Adds, steps and releases rows of one runner."""

    def __init__(
        self,
        model: StepModel,
        *,
        max_num_seqs: int = 8,
        num_blocks: int = 64,
        block_size: int = 16,
        max_model_len: int = 1024,
        eos_token_ids: Sequence[int] = (0,),
        seed: int = 0,
        arena: Arena | None = None,
    ) -> None:
        self.runner = Runner(
            model,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            num_blocks=num_blocks,
            block_size=block_size,
            eos_token_ids=eos_token_ids,
            arena=arena,
        )
        self.block_size = block_size
        self.free_blocks = list(range(num_blocks))
        self.free_slots = list(range(max_num_seqs))
        shuffle = random.Random(seed)
        shuffle.shuffle(self.free_blocks)
        shuffle.shuffle(self.free_slots)
        self.rows: list[Row] = []
        self.step_number = 0
        self._epoch = 0
        self._admitted: list[RowAdmit] = []
        self._released: list[int] = []

    def add(
        self,
        prompt: Sequence[int],
        params: SamplingParams = GREEDY,
        *,
        outputs: Sequence[int] = (),
        prompt_logprobs_start: int = 1,
        images: Sequence[ImageSpan] = (),
        cached: tuple[Row, int] | None = None,
    ) -> Row:
        """Admit a sequence with the next step.

        ``cached``: a row that stays, and how many of its first blocks hold this one's beginning.
        """
        tokens = [*prompt, *outputs]
        self._epoch += 1
        blocks = [] if cached is None else cached[0].blocks[: cached[1]]
        num_shared, num_cached = len(blocks), len(blocks) * self.block_size
        while len(blocks) * self.block_size < len(tokens):
            blocks.append(self.free_blocks.pop())
        slot, left = self.free_slots.pop(), len(tokens) - num_cached
        row = Row(list(prompt), params, slot, self._epoch, blocks, list(outputs), left, num_shared)
        self._admitted.append(
            RowAdmit(
                slot=slot,
                epoch=row.epoch,
                tokens=pack_int32(tokens),
                num_prompt=len(prompt),
                num_cached=num_cached,
                blocks=pack_int32(blocks),
                params=params,
                prompt_logprobs_start=prompt_logprobs_start,
                images=list(images),
            )
        )
        self.rows.append(row)
        return row

    def release(self, row: Row) -> None:
        """Take a row out with the next step; its slot and blocks are free at once."""
        self.rows.remove(row)
        self._released.append(row.slot)
        self.free_slots.append(row.slot)
        self.free_blocks += row.blocks[row.num_shared :]

    def step(self, chunks: Mapping[Row, int] | None = None, chunk_size: int = 0) -> StepResult:
        """Execute one step.

        ``chunks`` names the rows that compute a part of their prompt; with ``chunk_size`` all of
        them do, that many tokens at most.
        """
        if chunks is None:
            chunks = {r: min(chunk_size, r.left) for r in self.rows if r.left and not r.failure}
        grown = []
        for row in self.rows:
            if not row.left and row.num_tokens > len(row.blocks) * self.block_size:
                row.blocks.append(self.free_blocks.pop())
                grown += [row.slot, row.blocks[-1]]
        pairs = [number for row, count in chunks.items() for number in (row.slot, count)]
        plan = StepPlan(
            step=self.step_number,
            released=pack_int32(self._released),
            admitted=self._admitted,
            grown=pack_int32(grown),
            chunks=pack_int32(pairs),
        )
        self.step_number += 1
        self._admitted, self._released = [], []
        result = self.runner.execute(plan)
        for row, count in chunks.items():
            row.left -= count
        self._read(result)
        return result

    def run(self, num_outputs: int, chunk_size: int = 1 << 20) -> None:
        """Step until each row has that many outputs or has failed."""
        while any(len(r.outputs) < num_outputs and not r.failure for r in self.rows):
            self.step(chunk_size=chunk_size)

    def _read(self, result: StepResult) -> None:
        by_slot = {row.slot: row for row in self.rows}
        columns = (unpack_int32(c).tolist() for c in (result.slots, result.epochs, result.tokens))
        for slot, epoch, token in zip(*columns, strict=True):
            assert by_slot[slot].epoch == epoch
            assert not by_slot[slot].left, "a token although the prompt is not computed"
            by_slot[slot].outputs.append(token)
        for extra in result.logprobs:
            by_slot[extra.slot].logprobs += extra.logprobs
        for prompt in result.prompt_logprobs:
            by_slot[prompt.slot].prompt_logprobs.append(prompt.prompt_logprobs)
        for failed in result.failed:
            assert by_slot[failed.slot].epoch == failed.epoch
            assert not by_slot[failed.slot].failure, "failed twice"
            by_slot[failed.slot].failure = failed.message
