"""The waiting queue and its order, and how a step's token budget is split between prompts."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterator
from collections.abc import Sequence as Seq

from deepinfer.scheduler.sequence import Sequence

AGEING_S = 10.0
"""Under the priority policy, ten seconds of waiting count as much as one priority level."""

MAX_PREFILLING = 8
"""Prompts that may be part-way at once while they fill the steps.

Each holds its blocks, so more would only keep memory from rows that run; fewer would let several
long prompts at the front keep a short one behind them from the share that ``split_budget`` gives.
"""

SHORT_SHARE = 4
"""The prompt that is nearest to its end gets at least one part in so many of the prefill budget."""


class Places:
    """How many requests wait, by who asked for them, and whether there is room for one more."""

    def __init__(self) -> None:
        self.total = 0
        self.taken: Counter[bytes | str] = Counter()

    def has_room(self, asker: bytes | str, limit: int) -> bool:
        """Whether one more may wait.

        Where ``limit`` wait already that is so only for who has less than an equal share of it, up
        to twice as many in all: whoever fills the queue keeps nobody else out.
        """
        if self.total < limit:
            return True
        askers = len(self.taken) + (asker not in self.taken)
        return self.total < 2 * limit and self.taken[asker] < max(1, limit // askers)

    def take(self, asker: bytes | str) -> None:
        """One of the asker's requests waits from now on."""
        self.total += 1
        self.taken[asker] += 1

    def leave(self, asker: bytes | str) -> None:
        """One of them waits no longer."""
        self.total -= 1
        self.taken[asker] -= 1
        if not self.taken[asker]:
            del self.taken[asker]


MAX_PASSING = 1024
"""Sequences that may pass one whose images are not there yet.

It loses nothing by them while it waits, for it is the next to be admitted as soon as it can be; but
they take slots and blocks, and it must not find all of them taken whenever it comes.
"""

_Entry = tuple[tuple[float, int, int], Sequence]


class WaitingQueue:
    """Sequences without a slot, in the order they are admitted.

    *fcfs*: by arrival. *priority*: a lower number goes first, equals by arrival; each ``AGEING_S``
    seconds of waiting count as one level, so a request of priority p is overtaken only by requests
    of priority q < p that arrive at most ``(p - q) * AGEING_S`` seconds after it. Because all
    waiting requests age alike, their order never changes and one static key holds it.

    A preempted sequence keeps its key, so it stands before its peers that never started: those
    arrived later.

    Sequences that are not schedulable keep their place, and others pass them. When ``MAX_PASSING``
    have passed the first of them, those behind it wait.

    What differs under the *fair* policy stands in ``FairQueue``.
    """

    fair = False

    def __init__(self, by_priority: bool) -> None:
        self.by_priority = by_priority
        self._entries: list[_Entry] = []
        self._held: list[_Entry] = []
        self.places = {False: Places(), True: Places()}
        """Those of new requests, and those of resubmitted ones."""

    def __len__(self) -> int:
        return len(self._entries) + len(self._held)

    def __iter__(self) -> Iterator[Sequence]:
        return (sequence for _, sequence in heapq.merge(self._entries, self._held))

    def __contains__(self, sequence: Sequence) -> bool:
        line = self._line(sequence)
        at = bisect_left(line, (sequence.queue_key,))
        return at < len(line) and line[at][1] is sequence

    def head(self) -> Sequence | None:
        """Return the sequence that is admitted next; ``None`` when there is none."""
        first = self._first()
        if first is not None and self._held:
            held = self._held[0][1]
            if held.passed_by >= MAX_PASSING and self.goes_before(held, first):
                return None
        return first

    def held(self) -> list[Sequence]:
        """Return those that are not schedulable, in the order in which they are helped to be."""
        return [sequence for _, sequence in self._held]

    def set_schedulable(self, sequence: Sequence, schedulable: bool, now: float) -> None:
        """Say that a sequence that waits may be admitted from now on, or may not any more."""
        self.remove(sequence, now)
        sequence.schedulable = schedulable
        self.add(sequence, now)

    def _first(self) -> Sequence | None:
        return self._entries[0][1] if self._entries else None

    def _line(self, sequence: Sequence) -> list[_Entry]:
        return self._entries if sequence.schedulable else self._held

    def first_key(self, sequence: Sequence) -> tuple[float, int, int]:
        """Return the place of a sequence that just arrived; unique by its last part."""
        if not self.by_priority:
            return (0.0, 0, sequence.arrival_number)
        aged = sequence.priority * AGEING_S + sequence.arrival
        return (aged, sequence.priority, sequence.arrival_number)

    def enter(self, sequence: Sequence, now: float) -> None:
        """Put in a sequence that just arrived."""
        sequence.queue_key = self.first_key(sequence)
        self.add(sequence, now)

    def class_of(self, sequence: Sequence) -> int:
        """Return a running sequence's priority, improved by the time it has spent in the queue.

        All are equal under fcfs.
        """
        if not self.by_priority:
            return 0
        return sequence.priority - int(sequence.waited_s / AGEING_S)

    def rank_of(self, sequence: Sequence) -> float:
        """Return a number that is larger for those who give way first."""
        return self.class_of(sequence)

    def goes_before(self, sequence: Sequence, head: Sequence) -> bool:
        """Whether an unfinished prompt gets its chunks before the head of the queue would."""
        return sequence.queue_key < head.queue_key

    def in_order(self, prompts: Seq[Sequence]) -> list[Sequence]:
        """Return unfinished prompts, given by their keys, in the order in which they get chunks."""
        return list(prompts)

    def choose(self, head: Sequence, now: float) -> None:
        """Take note that the head is admitted now."""
        if self._held and self.goes_before(self._held[0][1], head):
            self._held[0][1].passed_by += 1

    def add(self, sequence: Sequence, now: float) -> None:
        """Put the sequence at the place of its key."""
        sequence.queued_at = now
        # Keys are unique, so a comparison never reaches the sequence.
        insort(self._line(sequence), (sequence.queue_key, sequence))
        self.places[sequence.resubmitted].take(sequence.asker)

    def remove(self, sequence: Sequence, now: float) -> None:
        """Take out a sequence that is admitted or has ended, and count how long it waited."""
        line = self._line(sequence)
        at = bisect_left(line, (sequence.queue_key,))
        assert line[at][1] is sequence, f"{sequence.request_id!r} is not in the queue"
        del line[at]
        self.places[sequence.resubmitted].leave(sequence.asker)
        sequence.waited_s += now - sequence.queued_at


def split_budget(budget: int, remaining: list[int]) -> list[int]:
    """Split ``budget`` tokens between prompts with ``remaining`` tokens each, in their order.

    The first prompts take what they need, but the one with the least left to compute (the first
    of equals) has a quarter of the budget for sure. So a short newcomer starts at once beside a
    prompt of any length, and the long one keeps three quarters of its pace.
    """
    grants = [0] * len(remaining)
    if not remaining:
        return grants
    shortest = remaining.index(min(remaining))
    grants[shortest] = min(remaining[shortest], budget // SHORT_SHARE)
    left = budget - grants[shortest]
    for row, wanted in enumerate(remaining):
        more = min(wanted - grants[row], left)
        grants[row] += more
        left -= more
    return grants
