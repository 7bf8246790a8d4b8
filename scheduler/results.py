"""Reads step results: tokens to their sequences, the stop check after each, voids by epoch."""

from __future__ import annotations

import numpy as np

from deepinfer.scheduler.ends import Ending
from deepinfer.scheduler.in_flight import InFlight
from deepinfer.scheduler.lifecycle import Lifecycle
from deepinfer.scheduler.outbox import Addresses
from deepinfer.scheduler.sequence import Sequence
from deepinfer.scheduler.table import UInt8
from deepinfer.wire.columns import Int32, unpack_int32, unpack_uint32
from deepinfer.wire.messages import PromptLogprobs
from deepinfer.wire.steps import StepResult


class BrokenResult(ValueError):
    """A result that cannot be one of its plan: the worker is broken."""


class ResultReader:
    """Applies results in the order of their steps.

    The worker answers in order, so a gap means that a result was lost; what came after it waits
    (at most as many as the pipeline is deep) until the missing one arrives or the worker is
    declared gone. A result of a step that is not in flight, or that is here already, is dropped
    and counted: it is a duplicate, or from a worker that was replaced.
    """

    def __init__(self, life: Lifecycle) -> None:
        self._life = life
        self.forget()

    def forget(self) -> None:
        """Drop what belongs to a worker and a batch table that were replaced."""
        nobody: Int32 = np.zeros(0, dtype=np.int32)
        self._early: dict[int, StepResult] = {}
        # Whose the rows of the latest step were: table version, slots, addresses.
        self._latest = (-1, b"", Addresses([], nobody, nobody.view(np.uint32)))

    def read(self, result: StepResult, now: float) -> None:
        """Take in a result; raise ``BrokenResult`` when it does not match its plan."""
        flights = self._life.in_flight
        if result.step not in flights or result.step in self._early:
            self._life.counters.ignored_results += 1
            return
        self._early[result.step] = result
        while flights:
            step = next(iter(flights))
            first = self._early.pop(step, None)
            if first is None:
                break
            self._apply(first, flights[step], now)
            del flights[step]
            if self._life.paced:
                self._life.pace.ended(first, now)
            self._life.counters.steps_done += 1

    def _apply(self, result: StepResult, flight: InFlight, now: float) -> None:
        life, table = self._life, self._life.table
        slots, tokens, classes, counts = self._columns(result, flight)
        failed = [row for row in result.failed if self._is_live(row.slot, row.epoch)]
        column = result.slots
        num_void = 0
        # Where no slot was left since the plan, what came back as it was asked for is all live.
        asked = flight.version, flight.column, flight.epochs_column
        if asked != (table.version, column, result.epochs):
            live = table.epoch[slots] == unpack_int32(result.epochs)
            num_void = len(slots) - int(np.count_nonzero(live))
        if num_void:
            life.counters.voided_rows += num_void
            if counts is not None:
                tokens = tokens[np.repeat(live, counts)]
                counts = counts[live]
            else:
                tokens, classes = tokens[live], classes[live]
            slots = slots[live]
            column = slots.tobytes()
        if failed or column != flight.column:
            self._check_complete(flight, slots, [row.slot for row in failed])
        if result.prompt_logprobs:
            self._forward_prompt_logprobs(result, flight)
        # Whose the tokens are must be known before ends empty their slots.
        addresses = self._addresses(slots, column)
        if counts is None:
            self._append_one_each(slots, tokens, classes, result, now)
        else:
            tokens, counts = self._append_several(slots, tokens, counts, result, now)
        for row in failed:
            life.end(table.at(row.slot), Ending.ROW_FAILED, now, message=row.message)
        life.counters.output_tokens += len(tokens)
        life.outbox.close_step(result.step, addresses, tokens, counts)

    def _columns(
        self, result: StepResult, flight: InFlight
    ) -> tuple[Int32, Int32, UInt8, Int32 | None]:
        """Return slots, tokens, the tokens' classes, and counts when they are not one each."""
        slots_known = result.slots == flight.column
        slots = flight.slots if slots_known else unpack_int32(result.slots)
        tokens = unpack_int32(result.tokens)
        counts = unpack_int32(result.counts) if result.counts else None
        total = len(slots) if counts is None else int(counts.sum())
        if (
            len(result.epochs) != len(result.slots)
            or (counts is not None and (len(counts) != len(slots) or counts.min() < 1))
            or len(tokens) != total
        ):
            raise BrokenResult(f"step {result.step}: the result's columns do not fit together")
        # As unsigned numbers, negative ones are too large as well.
        try:
            classes = self._life.token_class[unpack_uint32(result.tokens)]
            if not slots_known:
                self._life.table.epoch[unpack_uint32(result.slots)]
        except IndexError:
            raise BrokenResult(f"step {result.step}: a slot or a token is out of range") from None
        return slots, tokens, classes, counts

    def _check_complete(self, flight: InFlight, slots: Int32, failed: list[int]) -> None:
        epoch = self._life.table.epoch
        expected = np.sort(flight.slots[epoch[flight.slots] == flight.epochs])
        got = np.sort(np.concatenate([slots, np.array(failed, dtype=np.int32)]))
        if not np.array_equal(expected, got):
            raise BrokenResult(
                f"the result brings tokens for slots {got.tolist()[:20]}…, "
                f"the plan asked for {expected.tolist()[:20]}…"
            )

    def _addresses(self, slots: Int32, column: bytes) -> Addresses:
        """Return whose rows these are; the answer is kept while no row comes or goes."""
        table = self._life.table
        version, known, addresses = self._latest
        if version != table.version or known != column:
            names = self._life.clients.names
            addresses = Addresses(names, table.client[slots], table.key[slots])
            self._latest = (table.version, column, addresses)
        return addresses

    # ---- tokens ---------------------------------------------------------------------------------

    def _append_one_each(
        self, slots: Int32, tokens: Int32, classes: UInt8, result: StepResult, now: float
    ) -> None:
        """One token a row: rows that go on as before cost no Python."""
        life, table = self._life, self._life.table
        position = table.length[slots]
        length = position + 1
        table.tokens[slots, position] = tokens
        table.length[slots] = length
        # Rows to look at: a token that may stop its sequence, the longest length, a first token.
        look = classes & table.stop_mask[slots]
        look |= length >= table.look_at[slots]
        if life.tokens_per_row > 1:
            table.computed[slots] -= life.tokens_per_row - 1
        if result.logprobs:
            self._forward_logprobs(result, dict.fromkeys(slots.tolist(), 1))
        for row in look.nonzero()[0].tolist():
            sequence = table.at(int(slots[row]))
            if not table.look_at[sequence.slot]:
                life.first_token(sequence, now)
            self._check_stop(sequence, int(tokens[row]), now)

    def _append_several(
        self,
        slots: Int32,
        tokens: Int32,
        counts: Int32,
        result: StepResult,
        now: float,
    ) -> tuple[Int32, Int32]:
        """Rows with several tokens: one by one, and what follows a stop is dropped."""
        life, table = self._life, self._life.table
        kept = np.zeros(len(slots), dtype=np.int32)
        parts: list[Int32] = []
        endings: list[tuple[Sequence, int]] = []
        ends = np.cumsum(counts)
        for row, slot in enumerate(slots.tolist()):
            sequence = table.at(slot)
            mine = tokens[ends[row] - counts[row] : ends[row]]
            length = int(table.length[slot])
            for token in mine.tolist():
                table.tokens[slot, length] = token
                length += 1
                kept[row] += 1
                if life.rules.after_token(sequence, token, length) is not None:
                    endings.append((sequence, token))
                    break
            table.length[slot] = length
            table.sure[slot] += len(mine) - 1
            table.computed[slot] += len(mine) - life.tokens_per_row
            parts.append(mine[: kept[row]])
            if not table.look_at[slot]:
                life.first_token(sequence, now)
        if result.logprobs:
            self._forward_logprobs(result, dict(zip(slots.tolist(), kept.tolist(), strict=True)))
        for sequence, token in endings:
            self._check_stop(sequence, token, now)
        return np.concatenate(parts) if parts else tokens, kept

    def _check_stop(self, sequence: Sequence, token: int, now: float) -> None:
        length = int(self._life.table.length[sequence.slot])
        stop = self._life.rules.after_token(sequence, token, length)
        if stop is not None:
            ending, matched = stop
            self._life.end(sequence, ending, now, matched)

    # ---- log probabilities ----------------------------------------------------------------------

    def _forward_logprobs(self, result: StepResult, kept: dict[int, int]) -> None:
        """Forward the log probabilities of the tokens that were kept, by slot."""
        life, table = self._life, self._life.table
        for row in result.logprobs:
            if row.slot in kept:
                sequence = table.at(row.slot)
                extra = life.outbox.extra(sequence.client, sequence.key)
                extra.logprobs.extend(row.logprobs[: kept[row.slot]])

    def _forward_prompt_logprobs(self, result: StepResult, flight: InFlight) -> None:
        """Forward prompt log probabilities, each position once whatever was recomputed."""
        life, table = self._life, self._life.table
        for row in result.prompt_logprobs:
            if not self._is_live(row.slot, flight.chunks.get(row.slot, -1)):
                continue
            sequence = table.at(row.slot)
            brought = row.prompt_logprobs
            seen = sequence.prompt_logprobs_next - brought.start
            fresh = PromptLogprobs(
                start=brought.start + seen,
                token_ids=brought.token_ids[seen:],
                logprobs=brought.logprobs[seen:],
            )
            if fresh.token_ids:
                sequence.prompt_logprobs_next += len(fresh.token_ids)
                extra = life.outbox.extra(sequence.client, sequence.key)
                extra.prompt_logprobs.append(fresh)

    def _is_live(self, slot: int, epoch: int) -> bool:
        table = self._life.table
        return 0 <= slot < table.num_slots and int(table.epoch[slot]) == epoch
