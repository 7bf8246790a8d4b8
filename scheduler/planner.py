"""Makes the next step: who leaves, who grows, who is preempted, who comes in, who gets how much."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from deepinfer.scheduler.in_flight import InFlight
from deepinfer.scheduler.lifecycle import Lifecycle
from deepinfer.scheduler.queues import MAX_PREFILLING, split_budget
from deepinfer.scheduler.sequence import Sequence
from deepinfer.scheduler.suspects import is_suspected
from deepinfer.scheduler.table import BatchTable
from deepinfer.scheduler.victims import fair_victims, memory_victim, priority_victims
from deepinfer.wire.columns import Int32, pack_int32
from deepinfer.wire.steps import RowAdmit, StepPlan

MAX_ADMIT_BYTES = 4 << 20
"""About how much one step brings a worker to unpack; it is silent meanwhile."""

MAX_HURRIES = 2
"""Steps in a row that are kept short for light tenants: the wait for a slot, and the prompt."""


@dataclass(slots=True)
class _DecodeRows:
    """The decode rows of one version of a table; ``flight`` is a step of them alone.

    ``least`` and ``most`` are what a step brings, by slot: for certain, and if all goes well.
    ``quiet`` is how many more steps are certain to need no block and end no row.
    """

    table: BatchTable
    flight: InFlight
    least: Int32
    most: Int32
    quiet: int = 0


class Planner:
    """Plans steps. With ``depth`` 2 a step is planned while the one before it runs.

    Then the tokens in flight are not known here, so lengths are bounds: ``computed`` from above
    (blocks are there for the worst case) and ``sure`` from below. A row that reaches its longest
    length with what is in flight for certain is drained instead of planned once more; a row that
    stops by a token it gets is computed once for nothing, and that result is void by its epoch.
    """

    def __init__(self, life: Lifecycle, depth: int) -> None:
        self._life = life
        self._depth = depth
        self._latest: _DecodeRows | None = None
        self._hurries = 0
        self._for_light = False

    @property
    def decode_rows(self) -> int:
        """How many rows the latest plan decodes."""
        return len(self._latest.flight.slots) if self._latest is not None else 0

    @property
    def due(self) -> float | None:
        """When the next step is planned, if that is not as soon as there is room and work.

        Under the fair policy it is left open for a light tenant until the worker is about to need
        it.
        """
        life = self._life
        waits = life.queue.fair and 0 < len(life.in_flight) < self._depth
        return life.pace.due if waits else None

    def plan(self, now: float) -> StepPlan | None:
        """Return the next step, or ``None`` when the pipeline is full or nothing can be computed.

        A step in which a sequence was preempted admits nobody, unless it would compute nothing:
        whoever comes in must not take at once what a preemption was needed to find. Under the fair
        policy the one it was found for comes in at once, and nobody else.
        """
        life = self._life
        if not life.ready or len(life.in_flight) >= self._depth:
            return None
        due = self.due
        if due is not None and now < due:
            return None
        quiet = self._is_quiet()
        if not quiet:
            self._drain()
        # Before anybody grows: who is preempted must not be given a block in the same plan.
        preempted, favoured = False, None
        if life.queue.by_priority:
            preempted = self._make_room(now)
        elif life.queue.fair and life.tenants.contended:
            favoured = self._weigh_tenants(now)
        grown, short = (b"", False) if quiet else self._grow(now)
        if favoured is not None:
            if not short:
                self._admit(favoured, now)
        elif not (preempted or short) or self._nobody_left():
            self._fill_slots(now)
        return self._compose(grown, now)

    def _nobody_left(self) -> bool:
        return not self._life.prefilling and not self._life.table.decode.any()

    # ---- rows that run --------------------------------------------------------------------------

    def _is_quiet(self) -> bool:
        """Whether it is known from a step before that ``_drain`` and ``_grow`` find nothing."""
        rows = self._decode_rows()
        rows.quiet -= 1
        return rows.quiet >= 0

    def _look_ahead(self) -> None:
        """Note for how many steps behind this one no row needs a block or is at its end."""
        rows, table = self._decode_rows(), self._life.table
        slots = rows.flight.slots
        # Where results may bring several tokens, nobody knows how far they get.
        if len(slots) and self._life.tokens_per_row == 1:
            left = np.minimum(table.room - table.computed, table.max_length - table.sure)
            rows.quiet = int(left[slots].min()) - 1

    def _drain(self) -> None:
        table = self._life.table
        certain = table.sure >= table.max_length
        certain &= table.decode
        for slot in np.flatnonzero(certain).tolist():
            self._life.drain(table.at(slot))

    def _grow(self, now: float) -> tuple[bytes, bool]:
        """Give every decode row the blocks its worst case needs; preempt while there are none.

        Returns (slot, block) pairs to append to the block tables, and whether it preempted.
        """
        life, table = self._life, self._life.table
        preempted = False
        while True:
            slots, missing = self._short_of_blocks()
            total = int(missing.sum())
            if total <= life.pool.available:
                break
            preempted |= self._free_some(now)
        if not total:
            self._look_ahead()
            return b"", preempted
        blocks = np.array(life.pool.allocate(total), dtype=np.int32)
        if total == len(slots):
            table.add_block_each(slots, blocks)
        else:
            slots = np.repeat(slots, missing)
            for slot, block in zip(slots.tolist(), blocks.tolist(), strict=True):
                table.add_blocks(slot, [block])
        pairs = np.empty((total, 2), dtype=np.int32)
        pairs[:, 0] = slots
        pairs[:, 1] = blocks
        return pack_int32(pairs), preempted

    def _short_of_blocks(self) -> tuple[Int32, Int32]:
        """Return the decode rows that need blocks for the next step, and how many each."""
        life, table = self._life, self._life.table
        # The last token of a sequence is never computed: positions end at max_length - 2. (With
        # drafts a row may be past that before its results were read; what it computes then is
        # void, and the worker needs no block for it.)
        reach = np.minimum(table.computed + life.tokens_per_row, table.max_length - 1)
        short = reach > table.room
        short &= table.decode
        slots = np.flatnonzero(short).astype(np.int32)
        return slots, -((table.room[slots] - reach[slots]) // life.args.block_size)

    def _free_some(self, now: float) -> bool:
        """Get blocks back from one sequence; return whether that was a preemption."""
        life = self._life
        for sequence in reversed(life.queue.in_order(life.prefilling)):
            if not life.table.known[sequence.slot]:
                life.give_back(sequence, now)
                return False
        if life.queue.fair:
            life.tenants.settle()
        victim = memory_victim(life.table, life.queue)
        life.preempt(
            victim,
            now,
            why="a running row needs a block and none is free",
            recompute=not life.args.stop_preempted_request,
        )
        return True

    # ---- rows that come in ----------------------------------------------------------------------

    def _fill_slots(self, now: float) -> None:
        """Take sequences from the front of the queue while they fit; nobody passes the first."""
        life, table = self._life, self._life.table
        if not life.queue:
            return
        budget = self._prefill_budget()
        wanted = sum(map(self._remaining, life.prefilling))
        admit_bytes = 0
        while table.free_slots and admit_bytes < MAX_ADMIT_BYTES:
            head = life.queue.head()
            if head is None:
                break
            full = len(life.prefilling) >= MAX_PREFILLING and wanted >= budget
            if full and self._is_full_before(head, budget):
                break
            if not self._admit(head, now):
                break
            admit_bytes += head.wire_bytes
            wanted += self._remaining(head)

    def _admit(self, head: Sequence, now: float) -> bool:
        """Give the head of the queue a free slot if it may run and its blocks are there."""
        life = self._life
        if is_suspected(head) and any(map(is_suspected, life.table.bound())):
            return False
        cached = life.cached_blocks(head)
        if not life.table.free_slots or life.missing_blocks(head, cached) > life.pool.available:
            return False
        life.queue.choose(head, now)
        life.take_slot(head, cached, now)
        return True

    def _is_full_before(self, head: Sequence, budget: int) -> bool:
        """Whether unfinished prompts that go before ``head`` fill the step and are enough."""
        queue = self._life.queue
        before = [seq for seq in self._life.prefilling if queue.goes_before(seq, head)]
        return len(before) >= MAX_PREFILLING and sum(map(self._remaining, before)) >= budget

    def _make_room(self, now: float) -> bool:
        """Preempt lower classes for a higher one at the front that finds no slot or no blocks.

        The request so favoured is admitted in the next step, so it starts at most two plans after
        it came to the front. Priority preemption always recomputes.
        """
        life = self._life
        head = life.queue.head()
        if head is None:
            return False
        missing = life.missing_blocks(head, life.cached_blocks(head))
        victims = priority_victims(life.table, life.queue, life.pool, head, missing)
        for victim in victims:
            # Its place is behind the one it makes way for, but before all its own peers.
            victim.queue_key = max(
                victim.queue_key, (head.queue_key[0], victim.priority, victim.arrival_number)
            )
            life.preempt(
                victim,
                now,
                by=head,
                why=f"priority {head.priority} goes before {victim.priority}",
                recompute=True,
            )
        return bool(victims)

    def _weigh_tenants(self, now: float) -> Sequence | None:
        """Settle the counters if there is anything to decide by them in this plan.

        Where an over-served tenant has to make way for the head of the queue, preempt it and return
        the head. Fair preemption always recomputes.
        """
        life = self._life
        someone = bool(life.queue) and (
            bool(life.table.free_slots) or life.tenants.may_push(life.table.num_slots)
        )
        if someone or len(life.prefilling) > 1:
            life.tenants.settle()
        head = life.queue.head() if someone else None
        if head is None or is_suspected(head):
            return None
        victims = fair_victims(
            life.table,
            life.pool,
            life.tenants,
            head,
            life.rules.limit,
            lambda: life.missing_blocks(head, life.cached_blocks(head)),
        )
        for victim in victims:
            if not life.table.known[victim.slot]:
                life.give_back(victim, now)
                continue
            life.preempt(
                victim,
                now,
                by=head,
                why="its tenant had more than its share and more than the other one",
                recompute=True,
            )
        return head if victims else None

    # ---- the step -------------------------------------------------------------------------------

    def _compose(self, grown: bytes, now: float) -> StepPlan | None:
        life, table = self._life, self._life.table
        rows = self._decode_rows()
        flight = rows.flight
        admitted, chunks, finishing = self._chunks(now)
        if not flight.column and not chunks:
            assert not grown
            return None
        # Many times quicker than an addition with ``where``.
        table.sure += rows.least
        table.computed += rows.most
        for sequence in finishing:
            life.start_decoding(sequence)
        if chunks:
            last = np.array([sequence.slot for sequence in finishing], dtype=np.int32)
            flight = InFlight.of(table, np.concatenate([flight.slots, last]), chunks)
        life.counters.steps_planned += 1
        step = life.counters.steps_planned
        life.in_flight[step] = flight
        if life.paced:
            num_decode = len(rows.flight.slots) * life.tokens_per_row
            life.pace.planned(num_decode, sum(q for _, q in chunks), self._for_light, now)
        released, life.released = life.released, []
        return StepPlan(
            step=step,
            released=pack_int32(released) if released else b"",
            admitted=admitted,
            grown=grown,
            chunks=pack_int32(number for pair in chunks for number in pair) if chunks else b"",
        )

    def _decode_rows(self) -> _DecodeRows:
        """Return the decode rows, the same as for the step before while none comes or goes."""
        table, rows = self._life.table, self._latest
        if rows is None or rows.table is not table or rows.flight.version != table.version:
            slots = np.flatnonzero(table.decode).astype(np.int32)
            least = table.decode.astype(np.int32)
            most = least * self._life.tokens_per_row
            rows = self._latest = _DecodeRows(table, InFlight.of(table, slots, []), least, most)
        return rows

    def _chunks(self, now: float) -> tuple[list[RowAdmit], list[tuple[int, int]], list[Sequence]]:
        """Split the budget between unfinished prompts.

        Returns the rows the worker has to hear of, (slot, q) pairs, and the sequences whose last
        chunk is among them.
        """
        life, table = self._life, self._life.table
        admitted: list[RowAdmit] = []
        chunks: list[tuple[int, int]] = []
        finishing: list[Sequence] = []
        if not life.prefilling:
            return admitted, chunks, finishing
        rows, budget = self._hurried(life.queue.in_order(life.prefilling))
        grants = split_budget(budget, [self._remaining(row) for row in rows])
        for sequence, grant in zip(rows, grants, strict=True):
            if not grant:
                continue
            slot = sequence.slot
            if not table.known[slot]:
                life.rematch(sequence)
                admitted.append(life.introduce(sequence, now))
            remaining = self._remaining(sequence)
            q = min(grant, remaining)
            chunks.append((slot, q))
            table.computed[slot] += q
            life.counters.computed_tokens += q
            sequence.story.tell(now, "chunk", tokens=q, left=remaining - q)
            if q == remaining:
                finishing.append(sequence)
        # Only now: a prompt in this very step must not rely on what the step is still to compute.
        for slot, _ in chunks:
            life.register(table.at(slot), int(table.computed[slot]))
        return admitted, chunks, finishing

    def _hurried(self, rows: list[Sequence]) -> tuple[list[Sequence], int]:
        """Return which of these unfinished prompts, in their order, share how many tokens now.

        All share ``_prefill_budget``, but under the fair policy no step in which a light tenant's
        prompt comes to its end, or would but for ``max_step_ms``, or behind which there is a slot
        for it, is made longer by other tenants' chunks. After ``MAX_HURRIES`` of them one is open
        to all, so that light tenants in any number do not keep the others' prompts waiting. One
        prompt that has such a step for itself may have twice ``max_step_ms``.
        """
        life = self._life
        chosen = rows
        if life.queue.fair and life.tenants.contended and self._hurries < MAX_HURRIES:
            first = rows[0]
            if self._slot_is_near():
                chosen = []
            elif self._is_light(first) and self._remaining(first) <= self._room():
                chosen = [row for row in rows if row.tenant == first.tenant]
        self._hurries = self._hurries + 1 if len(chosen) < len(rows) else 0
        # Where there are slots for all every tenant is light, one with many prompts, too.
        self._for_light = len(chosen) == 1 < len(rows)
        return chosen, self._prefill_budget(self._for_light)

    def _slot_is_near(self) -> bool:
        """Whether a light tenant's sequence waits and a result in flight brings it a slot."""
        life, table = self._life, self._life.table
        head = life.queue.head()
        return (
            head is not None
            and not table.free_slots
            and self._is_light(head)
            and bool(table.decode.any())
            and bool((~table.decode & (table.sure > 0)).any())
        )

    def _is_light(self, sequence: Sequence) -> bool:
        return self._life.tenants.is_light(sequence.tenant, self._life.table.num_slots)

    def _room(self) -> int:
        """Tokens a step may have beside its decode rows."""
        life = self._life
        num_decode = int(np.count_nonzero(life.table.decode))
        return life.args.max_num_batched_tokens - num_decode * life.tokens_per_row

    def _prefill_budget(self, for_light: bool = False) -> int:
        room = self._room()
        num_decode = self._life.args.max_num_batched_tokens - room
        return int(min(room, self._life.pace.prefill_limit(num_decode, for_light)))

    def _remaining(self, sequence: Sequence) -> int:
        table, slot = self._life.table, sequence.slot
        return int(table.length[slot] - table.computed[slot])
