"""Steps: the budget, who waits how long, what is in flight, and what a result may do."""

from __future__ import annotations

import msgspec
import pytest

from deepinfer.scheduler.queues import AGEING_S
from deepinfer.scheduler.results import BrokenResult
from deepinfer.wire.columns import pack_int32, unpack_int32
from deepinfer.wire.config import EngineArgs
from deepinfer.wire.params import SamplingParams
from deepinfer.wire.steps import RowFailed
from support.core_driver import CoreDriver, Request


def greedy(max_tokens: int = 8, **fields: object) -> SamplingParams:
    values = {"seed": 0, "temperature": 0.0, "ignore_eos": True, "max_tokens": max_tokens}
    return SamplingParams(**(values | fields))  # type: ignore[arg-type]


def driver(num_blocks: int = 400, tokens_per_row: int = 1, **fields: object) -> CoreDriver:
    values: dict[str, object] = {
        "max_num_seqs": 8,
        "max_num_batched_tokens": 16,
        "block_size": 4,
        "max_model_len": 1200,
        "stop_preempted_request": False,
    }
    args = EngineArgs(**(values | fields))  # type: ignore[arg-type]
    return CoreDriver(args, num_blocks, tokens_per_row)


def steps_until(engine: CoreDriver, done: Request, most: int = 2000) -> int:
    for count in range(most):
        if done.end is not None or (done.tokens and done.params.max_tokens > 1):
            return count
        engine.step()
    raise AssertionError(f"{done.request_id} got nothing in {most} steps")


# ---- long prompts -------------------------------------------------------------------------------


@pytest.mark.parametrize("num_long", [1, 4])
@pytest.mark.parametrize("overlap", [True, False])
def test_a_long_prompt_stops_neither_streams_nor_short_newcomers(
    num_long: int, overlap: bool
) -> None:
    """SCH-01."""
    engine = driver(1100, async_scheduling=overlap)
    stream = engine.add([5] * 4, greedy(400))
    steps_until(engine, stream)
    # 64 chunks of a step's budget (less the stream's token).
    longs = [engine.add([6 + i] * (64 * 15), greedy(3)) for i in range(num_long)]
    for _ in range(2):
        engine.step()
    got_before = len(stream.tokens)
    short = engine.add([4, 4], greedy(4))
    assert steps_until(engine, short) <= 4
    taken = 2 + steps_until(engine, longs[0])
    # Alone it takes 64 steps and the last one's result.
    assert taken <= 1.5 * 64
    # The stream got a token in every step in between, the last ones are in flight.
    assert len(stream.tokens) - got_before >= taken - 4
    engine.run()
    for request in (stream, *longs, short):
        engine.hold_alone(request)
    assert max(engine.worker.step_tokens) <= 16


def test_many_short_newcomers_slow_a_long_prompt_by_a_third_at_most() -> None:
    engine = driver(600)
    long = engine.add([5] * (64 * 16), greedy(3))
    taken = 0
    while not long.tokens:
        engine.add([4, 4, 4], greedy(1))
        engine.step()
        taken += 1
    assert taken <= 1.5 * 64
    engine.run()


def test_decode_rows_never_wait_for_prompts() -> None:
    engine = driver(4000, max_num_seqs=64, max_num_batched_tokens=16)
    requests = [engine.add([4 + i % 30] * 9, greedy(12)) for i in range(40)]
    engine.run()
    for request in requests:
        engine.hold_alone(request)
        steps = request.steps
        assert [b - a for a, b in zip(steps, steps[1:], strict=False)] == [1] * (len(steps) - 1)
    assert max(engine.worker.step_tokens) <= 16


def test_steps_are_described_anew_only_when_a_row_comes_or_goes() -> None:
    engine = driver()
    stream = engine.add([5] * 4, greedy(40))
    steps_until(engine, stream)

    def latest_of_two_steps() -> list[object]:
        described = []
        for _ in range(2):
            engine.step()
            described.append(list(engine.core._life.in_flight.values())[-1])
        return described

    engine.step()
    first, second = latest_of_two_steps()
    assert first is second
    other = engine.add([6] * 4, greedy(12))
    steps_until(engine, other)
    engine.step()
    third, fourth = latest_of_two_steps()
    assert third is fourth is not second
    engine.run()
    for request in (stream, other):
        engine.hold_alone(request)


# ---- priorities ---------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [True, False])
def test_a_high_priority_starts_within_two_steps_when_lower_ones_hold_every_slot(
    overlap: bool,
) -> None:
    """SCH-02."""
    engine = driver(
        max_num_seqs=2,
        policy="priority",
        stop_preempted_request=True,
        async_scheduling=overlap,
    )
    lows = [engine.add([5 + i] * 6, greedy(200), priority=5) for i in range(2)]
    for _ in range(20):
        engine.step()
    engine.now = 3600.0  # however long they have been running
    high = engine.add([9] * 6, greedy(5), priority=0)
    peer = engine.add([9] * 7, greedy(5), priority=5)
    plans = len(engine.plans)
    while not any(
        unpack_int32(row.tokens)[0] == 9 for plan in engine.plans[plans:] for row in plan.admitted
    ):
        engine.step()
        assert len(engine.plans) - plans <= 3
    assert len(engine.plans) - plans <= 3
    engine.run()
    for request in (high, peer, *lows):
        engine.hold_alone(request)
    assert sum(low.num_preemptions for low in lows) == 1
    # The one that made way resumed before its peer that had not started.
    assert max(low.steps[-1] for low in lows) > 0
    evicted = next(low for low in lows if low.num_preemptions)
    resumed = next(step for step in evicted.steps if step > high.steps[0])
    assert resumed < peer.steps[0]


def test_a_high_priority_also_gets_the_blocks_of_lower_ones() -> None:
    engine = driver(12, max_num_seqs=8, policy="priority", max_model_len=48)
    low = engine.add([5] * 20, greedy(20), priority=1)
    for _ in range(6):
        engine.step()
    high = engine.add([6] * 24, greedy(8), priority=0)
    assert steps_until(engine, high) <= 6
    engine.run()
    engine.hold_alone(high)
    engine.hold_alone(low)


def test_room_kept_for_lower_ones_to_grow_does_not_keep_a_higher_one_waiting() -> None:
    engine = driver(64, max_num_seqs=8, policy="priority", max_model_len=256)
    low = engine.add([5] * 20, greedy(200), priority=1000)
    for _ in range(6):
        engine.step()
    high = engine.add([6] * 210, greedy(8), priority=0)
    chunks = -(-210 // engine.args.max_num_batched_tokens)
    assert steps_until(engine, high) <= chunks + 5
    engine.run()
    engine.hold_alone(high)
    engine.hold_alone(low)


def test_equal_or_higher_priorities_are_never_pushed_out() -> None:
    engine = driver(max_num_seqs=1, policy="priority")
    running = engine.add([5] * 6, greedy(40), priority=1)
    for _ in range(4):
        engine.step()
    engine.now = 100.0
    later = [engine.add([6] * 6, greedy(3), priority=priority) for priority in (1, 2)]
    engine.run()
    assert running.num_preemptions == 0
    for request in (running, *later):
        engine.hold_alone(request)


@pytest.mark.parametrize("overlap", [True, False])
def test_a_low_priority_completes_within_the_ageing_bound_under_endless_high_ones(
    overlap: bool,
) -> None:
    """SCH-02: how long a low class waits is bounded."""
    engine = driver(max_num_seqs=1, policy="priority", async_scheduling=overlap)
    low = engine.add([5] * 6, greedy(10), priority=3)
    highs: list[Request] = []
    while low.end is None:
        if not highs or highs[-1].tokens:
            highs.append(engine.add([6 + len(highs) % 30] * 6, greedy(6), priority=0))
        engine.step()
        engine.now += 0.1
        assert engine.now < 3 * AGEING_S + 5.0
    assert low.end is not None
    # It had to wait, and nobody pushed it out again once it had waited long enough.
    assert low.end.queue_ms > 2 * AGEING_S * 1e3
    assert low.num_preemptions == 0
    engine.run()
    engine.hold_alone(low)


@pytest.mark.parametrize("overlap", [True, False])
def test_equals_start_in_the_order_of_their_arrival_and_the_evicted_before_the_new(
    overlap: bool,
) -> None:
    """SCH-02: equal classes with evictions."""
    for policy in ("fcfs", "priority", "fair"):
        engine = driver(
            26, max_num_seqs=8, policy=policy, max_model_len=64, async_scheduling=overlap
        )
        requests = [engine.add([4 + i] * 5, greedy(40)) for i in range(12)]
        engine.run()
        starts = [request.steps[0] for request in requests]
        assert starts == sorted(starts)
        assert engine.core.stats()["preemptions"] > 0
        for request in requests:
            engine.hold_alone(request)


def test_a_step_in_which_no_row_needs_a_block_or_ends_is_planned_without_looking_for_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The schedule is cheap: what is known from the step before is not found out again."""
    engine = driver(
        enable_prefix_caching=False, max_num_batched_tokens=64, block_size=8, max_model_len=96
    )
    requests = [engine.add([5 + i] * 9, greedy(80)) for i in range(4)]
    engine.step()
    looks = []
    planner = engine.core._planner
    look, drain = planner._short_of_blocks, planner._drain
    monkeypatch.setattr(planner, "_short_of_blocks", lambda: looks.append("blocks") or look())
    monkeypatch.setattr(planner, "_drain", lambda: looks.append("ends") or drain())
    before = len(engine.plans)
    engine.run()
    steps = len(engine.plans) - before
    assert steps > 75
    # All need a block in every eighth step. It is looked for in that one and in the one behind it,
    # which finds out how long nothing more is needed.
    assert looks.count("blocks") <= 2 * (steps / 8 + 2)
    assert looks.count("ends") <= 2 * (steps / 8 + 2)
    for request in requests:
        engine.hold_alone(request)


# ---- in flight ----------------------------------------------------------------------------------


def test_a_row_is_not_planned_past_an_end_that_can_be_foreseen() -> None:
    engine = driver(enable_prefix_caching=False)
    requests = [engine.add([5 + i] * 6, greedy(4 + i)) for i in range(3)]
    engine.run()
    stats = engine.core.stats()
    assert stats["voided_rows"] == 0
    assert sum(engine.worker.step_tokens) == sum(6 + 4 + i - 1 for i in range(3))
    for request in requests:
        engine.hold_alone(request)


def test_a_row_that_stops_by_its_token_wastes_one_row_of_one_step_at_most() -> None:
    engine = driver()
    requests = [engine.add([5 + i, 6, 7], greedy(60, ignore_eos=False)) for i in range(20)]
    engine.run()
    stopped = [r for r in requests if r.end and r.end.detail == "eos"]
    assert stopped
    assert engine.core.stats()["voided_rows"] <= len(stopped)
    for request in requests:
        engine.hold_alone(request)


def test_the_pipeline_is_never_deeper_than_asked() -> None:
    for overlap, depth in ((True, 2), (False, 1)):
        engine = driver(async_scheduling=overlap)
        engine.add([5] * 6, greedy(20))
        planned = 0
        while engine.plan() is not None:
            planned += 1
        assert planned == depth == engine.core.stats()["in_flight"]
        engine.run()


def test_results_in_the_wrong_order_or_twice_change_nothing() -> None:
    engine = driver()
    requests = [engine.add([5 + i, 6, 7], greedy(12, ignore_eos=False)) for i in range(3)]
    while engine.core.stats()["live"]:
        while engine.plan() is not None:
            pass
        if len(engine.results) > 1:
            engine.deliver(1)
            assert engine.core.stats()["in_flight"] == 2, "the later one waits for the earlier"
        engine.deliver()
        engine.core.step_result(engine.delivered[-1], engine.now)
        engine.collect()
    engine.run()
    assert engine.core.stats()["ignored_results"] > 3
    for request in requests:
        engine.hold_alone(request)


def test_a_row_that_fails_ends_alone_with_its_message() -> None:
    engine = driver()
    requests = [engine.add([5 + i] * 6, greedy(10)) for i in range(3)]
    for _ in range(4):
        engine.step()
    engine.worker.fail_slots.add(1)
    engine.run()
    failed = [request for request in requests if request.end and request.end.message]
    assert len(failed) == 1
    assert failed[0].end is not None
    assert (failed[0].end.detail, failed[0].end.message) == ("row_failed", "it broke")
    for request in requests:
        if request not in failed:
            engine.hold_alone(request)


@pytest.mark.parametrize(
    "broken",
    [
        {"slots": pack_int32([0])},
        {"slots": pack_int32([0, 99]), "epochs": pack_int32([0, 0])},
        {"slots": pack_int32([0, -1]), "epochs": pack_int32([0, 0])},
        {"tokens": pack_int32([5])},
        {"tokens": pack_int32([5, 40])},
        {"tokens": pack_int32([5, -1])},
        {"counts": pack_int32([1, 2])},
        {"counts": pack_int32([2, 0])},
        {"counts": pack_int32([1])},
        {"slots": b"", "epochs": b"", "tokens": b""},
        {"failed": [RowFailed(0, 0, "and also a token")]},
    ],
)
def test_a_result_that_cannot_be_of_its_plan_is_an_error_and_changes_nothing(
    broken: dict[str, object],
) -> None:
    engine = driver()
    requests = [engine.add([5 + i] * 6, greedy(10)) for i in range(2)]
    for _ in range(4):
        engine.step()
    before = [list(request.tokens) for request in requests]
    engine.plan()
    right = engine.results[0]
    assert len(right.slots) == 8
    with pytest.raises(BrokenResult):
        engine.core.step_result(msgspec.structs.replace(right, **broken), engine.now)
    engine.collect()
    assert [request.tokens for request in requests] == before
    engine.kill_worker()
    engine.run()
    for request in requests:
        engine.hold_alone(request)


def test_the_same_inputs_give_the_same_decisions() -> None:
    def trace() -> list[object]:
        engine = driver(20, max_model_len=48)
        for i in range(10):
            engine.add([5 + i % 3] * (3 + i), greedy(12, ignore_eos=False), timeout_ms=900.0)
            engine.step()
            engine.now += 0.05
            engine.core.tick(engine.now)
            engine.collect()
        engine.run()
        return [*engine.plans, *(request.end for request in engine.requests.values())]

    assert trace() == trace()


# ---- workers that die ---------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("others", [0, 1, 5])
def test_a_request_that_kills_its_workers_ends_alone(others: int, overlap: bool) -> None:
    engine = driver(async_scheduling=overlap)
    company = [engine.add([9 + i] * (3 + 5 * i), greedy(12)) for i in range(others)]
    poison = engine.add([3, 4, 5, 6], greedy(40))
    deaths = 0
    for _ in range(400):
        if poison.end is not None:
            break
        engine.plan()
        if len(poison.tokens) >= 5 and computes(engine, poison):
            deaths += 1
            engine.kill_worker()
        elif engine.results:
            engine.deliver()
    assert poison.end is not None
    assert poison.end.detail == "worker_failed"
    assert deaths == (5 if others else 2)
    engine.run()
    for request in company:
        engine.hold_alone(request)


def test_a_worker_that_dies_now_and_then_accuses_nobody() -> None:
    engine = driver()
    requests = [engine.add([9 + i] * (3 + 5 * i), greedy(30)) for i in range(6)]
    for turn in range(400):
        engine.plan()
        if turn % 17 == 16:
            engine.kill_worker()
        elif engine.results:
            engine.deliver()
    engine.run()
    for request in requests:
        engine.hold_alone(request)


def computes(engine: CoreDriver, request: Request) -> bool:
    """Whether the worker's current step computes the request."""
    return any(
        (sequence.client, sequence.key) == (request.client, request.key)
        for sequence in engine.core._life._rows_of_current_step()
    )
