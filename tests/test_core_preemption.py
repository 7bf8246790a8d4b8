"""Preemption and the death of a worker lose nothing and repeat nothing."""

from __future__ import annotations

import itertools

import pytest

from deepinfer.wire.columns import unpack_int32
from deepinfer.wire.params import SamplingParams
from support.core_driver import CoreDriver, recomputing_driver


def greedy(max_tokens: int = 8, **fields: object) -> SamplingParams:
    values = {"seed": 0, "temperature": 0.0, "ignore_eos": True, "max_tokens": max_tokens}
    return SamplingParams(**(values | fields))  # type: ignore[arg-type]


SETTINGS = list(itertools.product([True, False], [True, False], [8, 64], [1, 3]))


@pytest.mark.parametrize(("cache", "overlap", "budget", "tokens_per_row"), SETTINGS)
def test_eight_requests_in_room_for_three_say_what_they_say_alone(
    cache: bool, overlap: bool, budget: int, tokens_per_row: int
) -> None:
    """PRE-01: prefix cache, chunks, overlap and drafts, each on and off."""
    engine = recomputing_driver(
        24,
        tokens_per_row,
        enable_prefix_caching=cache,
        async_scheduling=overlap,
        max_num_batched_tokens=max(budget, 8 * tokens_per_row),
    )
    requests = [engine.add([4 + i, 5, 6, 7], greedy(28, logprobs=0)) for i in range(8)]
    engine.run()
    assert engine.core.stats()["preemptions"] > 0
    for request in requests:
        engine.hold_alone(request)
        assert len(request.logprobs) == len(request.tokens)
        assert request.end is not None
        assert request.end.num_preemptions == request.num_preemptions
    assert requests[0].num_preemptions == 0, "the oldest is never a victim"
    counted = sum(r.end.recomputed_tokens for r in requests if r.end)
    assert counted == engine.core.stats()["recomputed_tokens"]


@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("position", range(20))
def test_a_request_evicted_at_any_position_continues_exactly(
    position: int, overlap: bool, cache: bool
) -> None:
    """PRE-01: a hook evicts at every position, with results in flight."""
    engine = recomputing_driver(
        64, enable_prefix_caching=cache, async_scheduling=overlap, max_num_batched_tokens=8
    )
    request, other = engine.add([5] * 21, greedy(14)), engine.add([6] * 5, greedy(20))
    for _ in range(position):
        engine.step()
    engine.plan()
    evicted = engine.evict(request)
    engine.run()
    engine.hold_alone(request)
    engine.hold_alone(other)
    assert request.end is not None and request.end.num_preemptions == int(evicted)
    if evicted and not cache:
        assert request.end.recomputed_tokens > 0
    story = engine.core.story(request.request_id)
    assert story is not None
    assert ("preempted" in [event.event for event in story]) == evicted


@pytest.mark.parametrize("overlap", [True, False])
def test_the_stop_policy_ends_a_preempted_request_with_a_correct_beginning(overlap: bool) -> None:
    """PRE-01 in stop mode."""
    engine = recomputing_driver(24, stop_preempted_request=True, async_scheduling=overlap)
    requests = [engine.add([4 + i, 5, 6, 7], greedy(28)) for i in range(8)]
    engine.run()
    ended = [r for r in requests if r.end and r.end.detail == "preempted"]
    assert ended and len(ended) < 8
    for request in requests:
        assert request.end is not None
        if request in ended:
            assert request.end.status == "FINISHED_PREEMPTED"
            assert request.end.reason == "insufficient_system_resource"
            assert request.output == engine.expected(request).tokens[: len(request.output)]
        else:
            engine.hold_alone(request)
    engine.hold_alone(requests[0])  # the oldest is never a victim


@pytest.mark.parametrize("stop", [True, False])
def test_a_step_that_preempted_admits_nobody(stop: bool) -> None:
    engine = recomputing_driver(24, stop_preempted_request=stop)
    seen = 0
    for i in range(90):
        # There is always a newcomer small enough for what a preemption frees.
        if engine.core.stats()["waiting"] < 2:
            engine.add([4 + i % 30], greedy(40))
        before = _preempted(engine)
        plan = engine.plan()
        if plan is not None and _preempted(engine) > before:
            seen += 1
            assert not plan.admitted
        if plan is None:
            engine.deliver()
    assert seen > 0
    engine.run()


def _preempted(engine: CoreDriver) -> float:
    stats = engine.core.stats()
    return stats["preemptions"] + stats["ended_preempted"]


def test_shared_beginnings_are_computed_once_also_by_prompts_that_come_together() -> None:
    engine = recomputing_driver(64, max_num_batched_tokens=16)
    stem = [9] * 24
    first = engine.add([*stem, 5], greedy(4))
    others = [engine.add([*stem, 6 + i], greedy(4)) for i in range(4)]
    engine.run()
    assert first.cached_tokens == 0
    # The second begins in the step that ends the first, beside it, and finds what came before.
    assert [request.cached_tokens for request in others] == [16, 24, 24, 24]
    assert engine.core.stats()["computed_tokens"] == 25 + 9 + 3
    for request in (first, *others):
        engine.hold_alone(request)


def test_a_full_hit_leaves_a_token_to_compute_and_salts_keep_tenants_apart() -> None:
    engine = recomputing_driver(64)
    prompt = [9] * 16
    for salt, expected in (("", 0), ("", 12), ("tenant", 0), ("tenant", 12)):
        request = engine.add(prompt, greedy(3), salt=salt)
        engine.run()
        engine.hold_alone(request)
        assert request.cached_tokens == expected


@pytest.mark.parametrize("overlap", [True, False])
def test_the_next_turn_of_a_chat_finds_the_answer_before_it(overlap: bool) -> None:
    engine = recomputing_driver(64, async_scheduling=overlap)
    first = engine.add([9] * 12, greedy(12))
    engine.run()
    turn = first.prompt + first.tokens + [5, 6]
    second = engine.add(turn, greedy(4))
    engine.run()
    # The last token of an answer is not computed: 23 positions are known, five full blocks.
    assert second.cached_tokens == 20
    engine.hold_alone(second)


# ---- the worker dies ----------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("stop", [True, False])
@pytest.mark.parametrize("moment", range(0, 12, 2))
def test_streams_continue_exactly_after_a_worker_died_whatever_the_policy(
    moment: int, stop: bool, overlap: bool
) -> None:
    """PROC-01 as the core sees it: the worker dies with results in flight, some come late."""
    engine = recomputing_driver(
        64, stop_preempted_request=stop, async_scheduling=overlap, max_num_batched_tokens=8
    )
    requests = [engine.add([5 + i] * (3 + 4 * i), greedy(10, prompt_logprobs=0)) for i in range(4)]
    for _ in range(moment):
        engine.step()
    engine.plan()
    late = list(engine.results)
    assert late, "nothing is in flight, so the death would be no test"
    engine.kill_worker()
    for result in late:  # from the dead worker
        engine.core.step_result(result, engine.now)
        engine.collect()
    assert engine.core.stats()["ignored_results"] == len(late)
    engine.run()
    for request in requests:
        engine.hold_alone(request)
        assert sorted(request.prompt_logprobs) == list(range(1, len(request.prompt)))
        assert request.end is not None and request.end.num_preemptions == 0
    assert any("worker_restart" in _events(engine, r.request_id) for r in requests)


def _events(engine: CoreDriver, request_id: str) -> list[str]:
    return [event.event for event in engine.core.story(request_id) or []]


def test_sequences_resume_in_the_order_of_their_arrival_after_a_worker_died() -> None:
    engine = recomputing_driver(64, max_num_seqs=2)
    requests = [engine.add([5 + i] * 6, greedy(10)) for i in range(4)]
    for _ in range(3):
        engine.step()
    engine.kill_worker()
    plan = engine.plan()
    assert plan is not None
    firsts = [unpack_int32(row.tokens)[0] for row in plan.admitted]
    assert firsts == [5, 6]
    engine.run()
    for request in requests:
        engine.hold_alone(request)


def test_tokens_go_to_whom_they_belong_after_a_worker_died() -> None:
    engine = recomputing_driver(64)
    gone = engine.add([5] * 4, greedy(20), client=b"a")
    for _ in range(5):
        engine.step()
    engine.kill_worker()
    engine.abort(gone)
    stays = engine.add([6] * 4, greedy(20), client=b"b")
    engine.run()
    engine.hold_alone(stays)


# ---- log probabilities --------------------------------------------------------------------------


@pytest.mark.parametrize("length", [3, 4, 5, 15, 16, 17, 33])
@pytest.mark.parametrize("budget", [8, 64])
@pytest.mark.parametrize("evict_after", [None, 1, 2, 3, 4])
@pytest.mark.parametrize("overlap", [True, False])
def test_prompt_logprobs_come_once_per_position_whatever_is_cached_or_evicted(
    length: int, budget: int, evict_after: int | None, overlap: bool
) -> None:
    """LP-01: the cache on, chunks, evictions; each position once, none from somebody else."""
    plain = recomputing_driver(64, enable_prefix_caching=False, max_num_batched_tokens=64)
    prompt = [5 + i % 7 for i in range(length)]
    alone = plain.add(prompt, greedy(4, prompt_logprobs=0))
    plain.run()
    engine = recomputing_driver(64, max_num_batched_tokens=budget, async_scheduling=overlap)
    sharing = engine.add([*prompt[: length // 2], 9, 9, 9], greedy(4))
    engine.run()
    requests = []
    for _ in range(2):
        requests.append(engine.add(prompt, greedy(4, prompt_logprobs=0)))
        for _ in range(evict_after or 0):
            engine.step()
        if evict_after:
            engine.evict(requests[-1])
        engine.run()
    for request in requests:
        engine.hold_alone(request)
        assert request.prompt_logprobs == alone.prompt_logprobs
        assert sorted(request.prompt_logprobs) == list(range(1, length))
        assert request.cached_tokens == 0
    engine.hold_alone(sharing)


def test_prompt_logprobs_of_a_request_that_is_gone_reach_nobody() -> None:
    engine = recomputing_driver(64, max_num_seqs=1, max_num_batched_tokens=8)
    gone = engine.add([5 + i % 9 for i in range(24)], greedy(4, prompt_logprobs=0))
    engine.plan()
    late = engine.results.pop()
    engine.abort(gone)
    stays = engine.add([9 - i % 4 for i in range(24)], greedy(4, prompt_logprobs=0))
    engine.plan()
    engine.results.insert(0, late)
    engine.run()
    engine.hold_alone(stays)
    assert gone.prompt_logprobs == {}
    assert sorted(stays.prompt_logprobs) == list(range(1, 24))
