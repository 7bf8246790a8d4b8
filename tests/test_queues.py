"""Who goes first, and how a step's budget is shared: fair, bounded, never above the budget."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from deepinfer.scheduler.queues import AGEING_S, SHORT_SHARE, WaitingQueue, split_budget
from deepinfer.scheduler.sequence import Sequence
from deepinfer.wire.params import SamplingParams


def sequence(number: int, priority: int = 0, arrival: float = 0.0) -> Sequence:
    return Sequence(
        client=b"c",
        client_index=0,
        key=number,
        request_id=f"r{number}",
        prompt=b"\0\0\0\0",
        output=b"",
        params=SamplingParams(seed=0),
        priority=priority,
        salt="",
        arrival=arrival,
        arrival_number=number,
        deadline=None,
    )


def queued(queue: WaitingQueue, *sequences: Sequence) -> None:
    for item in sequences:
        item.queue_key = queue.first_key(item)
        queue.add(item, item.arrival)


def order(queue: WaitingQueue) -> list[int]:
    return [item.arrival_number for item in queue]


arrivals = st.lists(st.tuples(st.integers(-3, 3), st.floats(0, 200)), min_size=1, max_size=30)


@given(items=arrivals)
def test_fcfs_is_the_order_of_arrival_whatever_the_priorities(
    items: list[tuple[int, float]],
) -> None:
    queue = WaitingQueue(by_priority=False)
    times = sorted(when for _, when in items)
    all_of_them = [
        sequence(n, priority, when)
        for n, ((priority, _), when) in enumerate(zip(items, times, strict=True))
    ]
    queued(queue, *reversed(all_of_them))
    assert order(queue) == list(range(len(items)))


@given(items=arrivals)
def test_a_request_is_overtaken_only_within_the_ageing_bound(
    items: list[tuple[int, float]],
) -> None:
    queue = WaitingQueue(by_priority=True)
    items = sorted(items, key=lambda item: item[1])
    everyone = [sequence(n, priority, when) for n, (priority, when) in enumerate(items)]
    queued(queue, *everyone)
    place = {number: at for at, number in enumerate(order(queue))}
    for earlier in everyone:
        for later in everyone[earlier.arrival_number + 1 :]:
            if place[later.arrival_number] < place[earlier.arrival_number]:
                levels = earlier.priority - later.priority
                assert levels > 0
                assert later.arrival - earlier.arrival <= levels * AGEING_S + 1e-6


@given(items=arrivals, picks=st.lists(st.integers(0, 100), max_size=30))
def test_a_sequence_can_leave_from_any_place(
    items: list[tuple[int, float]], picks: list[int]
) -> None:
    queue = WaitingQueue(by_priority=True)
    everyone = [sequence(n, priority, when) for n, (priority, when) in enumerate(items)]
    queued(queue, *everyone)
    left = order(queue)
    for pick in picks:
        if not left:
            break
        number = left.pop(pick % len(left))
        assert everyone[number] in queue
        queue.remove(everyone[number], now=500.0)
        assert everyone[number] not in queue
        assert order(queue) == left
        assert everyone[number].waited_s == 500.0 - everyone[number].arrival


@given(
    budget=st.integers(0, 4096),
    remaining=st.lists(st.integers(1, 5000), max_size=12),
)
def test_the_budget_is_spent_and_never_exceeded(budget: int, remaining: list[int]) -> None:
    grants = split_budget(budget, remaining)
    assert sum(grants) == min(budget, sum(remaining))
    assert all(0 <= grant <= wanted for grant, wanted in zip(grants, remaining, strict=True))


@given(
    budget=st.integers(4, 4096),
    remaining=st.lists(st.integers(1, 5000), min_size=1, max_size=12),
)
def test_the_nearest_to_its_end_has_its_share_and_the_oldest_has_the_rest(
    budget: int, remaining: list[int]
) -> None:
    grants = split_budget(budget, remaining)
    shortest = remaining.index(min(remaining))
    assert grants[shortest] >= min(remaining[shortest], budget // SHORT_SHARE)
    assert grants[0] >= min(remaining[0], budget - budget // SHORT_SHARE)
