"""The waiting queue of the fair policy: tenants by their counters, first come first inside one."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence as Seq

from deepinfer.scheduler.queues import WaitingQueue
from deepinfer.scheduler.sequence import Sequence
from deepinfer.scheduler.tenants import NOBODY_WAITS, Tenants
from deepinfer.wire.checks import shown


class FairQueue(WaitingQueue):
    """Sequences without a slot. The head is the first of the tenant with the smallest counter.

    A tenant's own are in the order of arrival. So one that was preempted stands before those that
    never started: they arrived later.

    Iteration is by arrival over all tenants. What goes first changes with every token, so no list
    is kept in that order: the head is looked for, over columns, when there is room for one.
    """

    fair = True

    def __init__(self, tenants: Tenants) -> None:
        super().__init__(by_priority=False)
        self._tenants = tenants
        self._lines: dict[int, list[tuple[int, Sequence]]] = {}

    def held(self) -> list[Sequence]:
        """Return those that are not schedulable, in the order in which they are helped to be."""
        return self.in_order(super().held())

    def set_schedulable(self, sequence: Sequence, schedulable: bool, now: float) -> None:
        """Let a sequence be admitted from now on, or not any more; as with one that enters."""
        if schedulable and sequence.tenant not in self._lines:
            self._tenants.lift(sequence.tenant)
        super().set_schedulable(sequence, schedulable, now)

    def _first(self) -> Sequence | None:
        """Return the first of the tenant that is next, as of the counters' last settling."""
        return self._lines[self._tenants.next()][0][1] if self._entries else None

    def enter(self, sequence: Sequence, now: float) -> None:
        """Put in a sequence that just arrived; its tenant is lifted if nothing of it waited."""
        if sequence.tenant not in self._lines:
            self._tenants.lift(sequence.tenant)
        super().enter(sequence, now)

    def add(self, sequence: Sequence, now: float) -> None:
        """Put the sequence at its place among its tenant's."""
        super().add(sequence, now)
        if not sequence.schedulable:
            return
        line = self._lines.setdefault(sequence.tenant, [])
        insort(line, (sequence.arrival_number, sequence))
        self._tenants.set_first(sequence.tenant, line[0][0])

    def remove(self, sequence: Sequence, now: float) -> None:
        """Take out a sequence that is admitted or has ended."""
        super().remove(sequence, now)
        if not sequence.schedulable:
            return
        line = self._lines[sequence.tenant]
        del line[bisect_left(line, (sequence.arrival_number,))]
        if line:
            self._tenants.set_first(sequence.tenant, line[0][0])
        else:
            del self._lines[sequence.tenant]
            self._tenants.set_first(sequence.tenant, NOBODY_WAITS)

    def rank_of(self, sequence: Sequence) -> float:
        """Return how much a sequence's tenant was served: the most served gives way first."""
        return float(self._tenants.order[sequence.tenant])

    def goes_before(self, sequence: Sequence, head: Sequence) -> bool:
        """Whether an unfinished prompt gets its chunks before the head of the queue would."""
        order = self._tenants.order
        mine, its = order[sequence.tenant], order[head.tenant]
        # Of equals too one goes first: that of ``in_order``.
        return bool(mine < its) or (mine == its and super().goes_before(sequence, head))

    def in_order(self, prompts: Seq[Sequence]) -> list[Sequence]:
        """Return unfinished prompts in the order in which they get chunks.

        The tenant with the smallest counter first, so that a short prompt is not behind another
        tenant's long ones. A counter with what is still to be computed does not move while that is
        computed, so prompts do not take turns.
        """
        order = self._tenants.order
        return sorted(prompts, key=lambda prompt: (order[prompt.tenant], prompt.queue_key))

    def choose(self, head: Sequence, now: float) -> None:
        """Write down why the head is admitted now, and tell whom it passes over."""
        super().choose(head, now)
        tenants, order = self._tenants, self._tenants.order
        head.chosen = {}
        if not tenants.contended:
            return
        mine = f"tenant {shown(tenants.names[head.tenant])}"
        head.chosen = {"why": f"{mine} was served least: counter {order[head.tenant]:.0f}"}
        first = self._entries[0][1]
        if first is head:
            return
        first.passed_over += 1
        if first.passed_over == 1:
            first.story.tell(
                now,
                "passed_over",
                head.story.whose,
                by_counter=round(order[head.tenant]),
                counter=round(order[first.tenant]),
                why="the other tenant was served less",
            )
