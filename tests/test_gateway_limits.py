"""Buckets hold a rate exactly; slots are never lost, never doubled, and given in order."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.frontend.gateway.limits import Bucket, Slots, Turns
from support.patience import PATIENCE_S

RATES = st.floats(0.01, 1e6)
EVENTS = st.lists(st.tuples(st.floats(0, 100), st.floats(0, 1e4)), max_size=30)


@given(RATES, st.floats(1, 1e6), st.floats(0, 1e7), EVENTS)
def test_a_bucket_is_what_flowed_in_less_what_was_taken(
    rate: float, burst: float, start: float, events: list[tuple[float, float]]
) -> None:
    bucket = Bucket(rate, burst, start)
    now, level = start, burst
    for pause, units in events:
        now += pause
        level = min(burst, level + pause * rate) - units
        bucket.take(units, now)
        # A time of 1e7 s has steps of 2e-9 s.
        assert bucket.level(now) == pytest.approx(level, rel=1e-6, abs=1e-6 + rate * 1e-7)


@given(RATES, st.floats(1, 1e6), EVENTS, st.floats(0, 1))
def test_a_bucket_knows_when_there_will_be_enough(
    rate: float, burst: float, events: list[tuple[float, float]], part: float
) -> None:
    bucket = Bucket(rate, burst, 0.0)
    now = 0.0
    for pause, units in events:
        now += pause
        bucket.take(units, now)
    wanted = part * burst
    wait = bucket.wait_s(wanted, now)
    assert bucket.wait_s(wanted, now + wait) == 0
    if wait > 1e-3:
        assert bucket.level(now + 0.99 * wait) < wanted
        assert bucket.wait_s(wanted, now + 0.99 * wait) > 0


@given(RATES, RATES, st.floats(0, 1e4), st.floats(1, 1e4))
def test_another_rate_keeps_what_is_in_the_bucket_or_owed(
    rate: float, other: float, taken: float, burst: float
) -> None:
    bucket = Bucket(rate, 1000.0, 5.0)
    bucket.take(taken, 5.0)
    bucket.change(other, burst, 5.0)
    expected = min(1000.0 - taken, burst)
    assert bucket.level(5.0) == pytest.approx(expected, rel=1e-6, abs=1e-6 + other * 1e-9)
    later = min(burst, expected + other)
    assert bucket.level(6.0) == pytest.approx(later, rel=1e-6, abs=1e-6 + other * 1e-9)


class Visitors:
    """Drives slots and keeps its own account: who came in which order, who is in, who gave up."""

    def __init__(self, limit: int) -> None:
        self.slots = Slots(limit)
        self.tasks: dict[int, asyncio.Task[None]] = {}
        self.go: dict[int, asyncio.Event] = {}
        self.arrived: list[int] = []
        self.entered: list[int] = []
        self.inside: set[int] = set()
        self.most: list[tuple[int, float]] = []

    def arrive(self) -> None:
        number = len(self.arrived)
        self.arrived.append(number)
        self.go[number] = asyncio.Event()
        self.tasks[number] = asyncio.create_task(self._visit(number))

    async def _visit(self, number: int) -> None:
        await self.slots.enter()
        self.entered.append(number)
        self.inside.add(number)
        # The slot may be taken while the limit is lowered: only a later arrival may not exceed it.
        self.most.append((self.slots.inside, self.slots.limit))
        try:
            await self.go[number].wait()
        finally:
            self.inside.discard(number)
            self.slots.leave()

    def release(self, pick: int) -> None:
        if self.inside:
            self.go[sorted(self.inside)[pick % len(self.inside)]].set()

    def hold_order(self) -> None:
        """Nobody waits while a later one was let in.

        Those who get a slot in one turn of the loop may go on in any order.
        """
        entered = set(self.entered)
        waiting = {
            number
            for number, task in self.tasks.items()
            if number not in entered and not task.done()
        }
        assert len(waiting) == self.slots.waiting
        assert max(entered, default=-1) < min(waiting, default=len(self.arrived))

    def cancel(self, pick: int) -> None:
        live = [task for task in self.tasks.values() if not task.done()]
        if live:
            live[pick % len(live)].cancel()


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["arrive", "arrive", "release", "cancel", "resize", "turn", "settle"]),
        st.integers(0, 30),
    ),
    max_size=80,
)


async def settle() -> None:
    """Let everything that can go on go on."""
    for _ in range(8):
        await asyncio.sleep(0)


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 4), OPERATIONS)
def test_no_slot_is_lost_or_doubled_whoever_gives_up(
    limit: int, operations: list[tuple[str, int]]
) -> None:
    """Arrivals, departures, cancellations and new limits in any order and in the same turn."""

    async def story() -> None:
        visitors = Visitors(limit)
        slots = visitors.slots
        lowered = False
        for name, number in operations:
            match name:
                case "arrive":
                    visitors.arrive()
                case "release":
                    visitors.release(number)
                case "cancel":
                    visitors.cancel(number)
                case "resize":
                    lowered |= number % 5 + 1 < slots.limit
                    slots.resize(number % 5 + 1)
                case "turn":
                    await asyncio.sleep(0)
                case "settle":
                    await settle()
                    assert slots.inside == len(visitors.inside)
                    assert not slots.waiting or slots.inside >= slots.limit
                    visitors.hold_order()
        if not lowered:
            assert all(count <= at_most for count, at_most in visitors.most)
        for event in visitors.go.values():
            event.set()
        await asyncio.gather(*visitors.tasks.values(), return_exceptions=True)
        assert (slots.inside, slots.waiting) == (0, 0)
        served = [number for number, task in visitors.tasks.items() if not task.cancelled()]
        assert set(served) <= set(visitors.entered), "somebody was never let in"

    asyncio.run(story())


async def test_a_slot_given_in_the_turn_of_a_cancellation_goes_on_to_the_next() -> None:
    slots = Slots(1)
    await slots.enter()
    second, third = (asyncio.create_task(slots.enter()) for _ in range(2))
    await settle()
    slots.leave()  # given to the second …
    second.cancel()  # … who does not take it any more
    await asyncio.wait_for(third, PATIENCE_S)
    assert second.cancelled()
    assert (slots.inside, slots.waiting) == (1, 0)


async def test_a_higher_limit_lets_in_those_who_wait_at_once() -> None:
    slots = Slots(1)
    await slots.enter()
    waiting = [asyncio.create_task(slots.enter()) for _ in range(5)]
    await settle()
    slots.resize(4)
    await settle()
    assert [task.done() for task in waiting] == [True, True, True, False, False]
    slots.resize(float("inf"))
    await settle()
    assert all(task.done() for task in waiting)
    assert slots.inside == 6


async def test_so_many_go_on_in_a_turn_of_the_loop_the_others_in_order_and_none_for_who_left() -> (
    None
):
    turns, now, went = Turns(2), 0, []

    async def go(number: int) -> None:
        await turns.take()
        went.append((number, now))

    tasks = [asyncio.create_task(go(number)) for number in range(7)]
    for now in range(1, 8):
        await asyncio.sleep(0)
        if now == 2:
            tasks[4].cancel()
    assert [number for number, _ in went] == [0, 1, 2, 3, 5, 6]
    by_turn = [at for _, at in went]
    assert all(by_turn.count(at) == 2 for at in by_turn)
    late = asyncio.create_task(go(7))
    await late
    assert went[-1][0] == 7
