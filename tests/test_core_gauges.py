"""Whatever happened, an idle engine owns nothing: gauges at zero, slots and blocks all there."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from deepinfer.wire.config import EngineArgs
from deepinfer.wire.params import SamplingParams
from support.core_driver import CoreDriver

Disturbance = Callable[[CoreDriver], object]


def _requests(engine: CoreDriver) -> None:
    """More than fit: some run, some are in the middle of their prompt, some wait."""
    for i in range(12):
        params = SamplingParams(
            seed=0,
            temperature=0.0,
            max_tokens=4 + 3 * i,
            stop_token_ids=[7, 8 + i],
            logprobs=0,
            prompt_logprobs=0 if i % 3 == 0 else None,
        )
        prompt = [4 + i % 4] * (3 + 2 * i)
        client = b"a" if i % 2 else b"b"
        engine.add(
            prompt, params, client=client, timeout_ms=9e6, priority=i % 3, user_id=f"tenant {i % 3}"
        )


def _abort_all(engine: CoreDriver) -> None:
    for request in engine.requests.values():
        engine.abort(request)


def _evict_all(engine: CoreDriver) -> None:
    for request in engine.requests.values():
        engine.evict(request)


def _fail_rows(engine: CoreDriver) -> None:
    engine.worker.fail_slots |= {0, 1, 2}


def _time_out(engine: CoreDriver) -> None:
    engine.now += 1e5
    engine.core.tick(engine.now)
    engine.collect()


def _lose_a_client(engine: CoreDriver) -> None:
    engine.core.client_gone(b"a", "disconnect", engine.now)
    engine.collect()


def _shut_down(engine: CoreDriver) -> None:
    engine.core.shutdown(engine.now)
    engine.collect()


def _lose_the_engine(engine: CoreDriver) -> None:
    engine.results.clear()
    engine.core.worker_gone(engine.now, "killed")
    engine.core.engine_down(engine.now, "no model")
    engine.collect()


DISTURBANCES: list[Disturbance] = [
    lambda engine: None,
    _abort_all,
    _evict_all,
    _fail_rows,
    _time_out,
    _lose_a_client,
    CoreDriver.kill_worker,
    _shut_down,
    _lose_the_engine,
]
NAMES = ["nothing", "abort", "evict", "fail", "deadline", "client", "kill", "shutdown", "down"]


@pytest.mark.parametrize("disturb", DISTURBANCES, ids=NAMES)
@pytest.mark.parametrize("stop", [True, False])
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("policy", ["fcfs", "priority", "fair"])
def test_gauges_return_to_zero_whenever_something_happens(
    policy: str, overlap: bool, stop: bool, disturb: Disturbance
) -> None:
    """QUIESCE of the cases, LEAK-01 in the small; interrupted before each of the first steps."""
    args = EngineArgs(
        max_num_seqs=6,
        max_num_batched_tokens=16,
        block_size=4,
        max_model_len=64,
        policy=policy,
        async_scheduling=overlap,
        stop_preempted_request=stop,
    )
    engine = CoreDriver(args, 24)
    for moment in range(0, 12, 3):
        if disturb in (_shut_down, _lose_the_engine):
            engine = CoreDriver(args, 24)  # nothing is accepted after these
        _requests(engine)
        for _ in range(moment):
            engine.step()
        engine.plan()
        disturb(engine)
        engine.run()
        engine.hold_idle()
        life = engine.core._life
        assert len(life.table.free_slots) == life.table.num_slots
        assert not life.pool.references.any()
        assert not life.deadlines and not life.stop_users and len(life.clients) == 0
        assert all(request.end is not None for request in engine.requests.values())


@pytest.mark.parametrize("overlap", [True, False])
def test_the_gauges_count_what_is_there_while_it_is(overlap: bool) -> None:
    args = EngineArgs(
        max_num_seqs=4,
        max_num_batched_tokens=8,
        block_size=4,
        max_model_len=64,
        async_scheduling=overlap,
    )
    engine = CoreDriver(args, 64)
    params = SamplingParams(seed=0, temperature=0.0, max_tokens=20, ignore_eos=True)
    for i in range(6):
        engine.add([5 + i] * 6, params)
    assert engine.core.stats()["waiting"] == engine.core.stats()["live"] == 6
    while engine.plan() is not None:
        pass
    stats = engine.core.stats()
    assert stats["in_flight"] == (2 if overlap else 1)
    assert stats["running"] + stats["waiting"] == 6 and 0 < stats["running"] <= 4
    assert 0 < stats["prefilling"] <= stats["running"]
    assert stats["blocks_free"] + stats["blocks_cached"] < stats["blocks_total"]
    engine.run()
    engine.hold_idle()
