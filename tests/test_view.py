"""What an engine shows of itself: who is where, who holds what, the last steps and ends."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from deepinfer import AsyncEngine, Client, EngineArgs, SamplingParams
from deepinfer.scheduler.recent import MAX_ENDS, MAX_STEPS, StepLog
from deepinfer.scheduler.view import MAX_IN_SLOTS, MAX_REQUESTS, MAX_USERS
from deepinfer.wire.codec import Codec
from deepinfer.wire.columns import pack_int32
from deepinfer.wire.messages import Answer, EngineView, ToClient, UserShare
from deepinfer.wire.steps import StepPlan, StepResult
from support.core_driver import CoreDriver, recomputing_driver, reference
from support.scripted_engine import ScriptedFolder
from support.streams import outputs

GREEDY = {"seed": 0, "temperature": 0.0}


def view_of(engine: CoreDriver) -> EngineView:
    view = EngineView(0, True, "", "ready", {})
    engine.core.view(engine.now, view)
    return view


def rows(view: EngineView) -> dict[str, tuple[str, int, int, int]]:
    """By id: status, computed, output tokens, blocks."""
    return {
        r.request_id: (r.status, r.computed_tokens, r.output_tokens, r.blocks)
        for r in view.requests
    }


def shares(view: EngineView) -> dict[str, UserShare]:
    return {share.user_id: share for share in view.users}


def test_a_request_is_shown_where_it_is_from_the_queue_to_its_end() -> None:
    engine = recomputing_driver(max_num_batched_tokens=8, max_num_seqs=2)
    params = SamplingParams(max_tokens=3, **GREEDY)
    engine.add([5] * 12, params, user_id="anna", request_id="long", priority=2)
    engine.add([6] * 3, params, user_id="ben", request_id="short")
    engine.add([7] * 2, params, user_id="ben", request_id="last")
    engine.now = 2.0
    first = view_of(engine)
    assert rows(first) == {name: ("waiting", 0, 0, 0) for name in ("long", "short", "last")}
    assert first.requests[0].age_ms == 2000 and first.requests[0].priority == 2
    assert shares(first)["ben"] == UserShare("ben", 2, 0, 0, 0, 0)

    engine.plan()  # 8 tokens: 6 for the long one, 2 for sure for the short one
    second = view_of(engine)
    assert rows(second)["long"] == ("prefilling", 6, 0, 3)
    assert rows(second)["short"] == ("prefilling", 2, 0, 1)
    assert [r.request_id for r in second.requests] == ["long", "short", "last"]

    while not all(rows(second)[name][0] == "running" for name in ("long", "short")):
        engine.step()
        second = view_of(engine)
    assert rows(second)["last"] == ("waiting", 0, 0, 0), "there are two slots"
    engine.now = 3.0
    engine.run()
    engine.now = 3.5
    ended = view_of(engine)
    assert not ended.requests and ended.left_out == 0
    assert {(e.request_id, e.user_id, e.reason, e.detail) for e in ended.ended} == {
        ("long", "anna", "length", "max_tokens"),
        ("short", "ben", "length", "max_tokens"),
        ("last", "ben", "length", "max_tokens"),
    }
    assert [e.output_tokens for e in ended.ended] == [3, 3, 3]
    assert {e.ago_ms for e in ended.ended} == {500.0}
    assert {e.total_ms for e in ended.ended} == {3000.0}
    assert shares(ended)["ben"].output_tokens == 6 and shares(ended)["anna"].output_tokens == 3


def test_each_kv_block_is_counted_once_for_its_owner() -> None:
    engine = recomputing_driver(num_blocks=32)
    params = SamplingParams(max_tokens=30, **GREEDY)
    prompt = list(range(4, 16))
    for user, tail in (("anna", 1), ("anna", 2), ("ben", 3)):
        engine.add([*prompt, tail], params, user_id=user)
        engine.step()  # the next one finds the blocks of this one
    engine.step()
    view = view_of(engine)
    held = {share.user_id: share.blocks for share in view.users}
    assert view.blocks_shared == 3, "twelve tokens of prompt that all three have"
    assert held["anna"] > held["ben"] > 0
    owned = sum(held.values()) + view.blocks_shared
    assert view.blocks_total == owned + view.blocks_free + view.blocks_cached == 32
    engine.run()
    view = view_of(engine)
    assert view.blocks_free + view.blocks_cached == 32 and view.blocks_cached > 0


def test_a_preempted_request_is_shown_waiting_with_what_it_has() -> None:
    engine = recomputing_driver()
    request = engine.add([5] * 6, SamplingParams(max_tokens=20, **GREEDY), user_id="anna")
    while len(request.tokens) < 3:
        engine.step()
    engine.evict(request)
    (shown,) = view_of(engine).requests
    assert (shown.status, shown.preemptions, shown.blocks) == ("waiting", 1, 0)
    assert shown.output_tokens >= 3
    assert shares(view_of(engine))["anna"].output_tokens == shown.output_tokens


def test_tokens_of_a_user_never_become_fewer() -> None:
    engine = recomputing_driver(num_blocks=12)
    for i in range(6):
        params = SamplingParams(max_tokens=4 + 4 * i, **GREEDY)
        engine.add([5 + i] * 6, params, user_id="anna" if i % 2 else "ben")
    before = {"anna": 0, "ben": 0}
    had = dict(before)
    while engine.step():
        now = {name: share.output_tokens for name, share in shares(view_of(engine)).items()}
        assert all(now[name] >= before[name] for name in before)
        before = now
    for number, request in enumerate(engine.requests.values()):
        had["anna" if number % 2 else "ben"] += len(request.output)
    assert before == had


def test_tokens_that_a_request_came_with_are_not_counted_again() -> None:
    engine = recomputing_driver()
    params = SamplingParams(max_tokens=9, **GREEDY)
    alone = reference([5] * 6, params, 64, 256).tokens
    engine.add([5] * 6, params, user_id="anna", output=alone[:4], resubmitted=True)
    assert shares(view_of(engine))["anna"].output_tokens == 0
    engine.step()
    engine.run()
    (share,) = view_of(engine).users
    assert share.output_tokens == len(alone) - 4 == engine.core.stats()["output_tokens"]


def test_a_view_is_bounded_whatever_the_load() -> None:
    """What computes is listed first, then who is admitted next; the rest is counted."""
    args = EngineArgs(max_num_seqs=300, max_num_batched_tokens=1024, block_size=4, max_model_len=64)
    engine = CoreDriver(args, 2048)
    total = 300 + 200
    for i in range(total):
        params = SamplingParams(max_tokens=5, **GREEDY)
        user, name = f"user-{i % 90}" + "x" * 200, f"{i}-" + "y" * 240
        engine.add([5 + i % 4] * 3, params, user_id=user, request_id=name)
    engine.plan()
    view = view_of(engine)
    assert len(view.requests) == MAX_REQUESTS and view.left_out == total - MAX_REQUESTS
    statuses = [request.status for request in view.requests]
    assert statuses == ["running"] * MAX_IN_SLOTS + ["waiting"] * (MAX_REQUESTS - MAX_IN_SLOTS)
    waiting = [r.request_id.partition("-")[0] for r in view.requests if r.status == "waiting"]
    assert waiting == [str(300 + i) for i in range(MAX_REQUESTS - MAX_IN_SLOTS)]
    assert len(view.users) == MAX_USERS
    engine.run()
    ended = view_of(engine)
    assert len(ended.ended) == MAX_ENDS and len(ended.users) == MAX_USERS
    assert len(Codec(ToClient).encode(Answer(1, view=view))) < 1 << 18


def test_before_a_worker_was_ready_there_is_nothing_to_show() -> None:
    from deepinfer.scheduler.core import Core

    view = EngineView(0, False, "", "starting", {})
    Core(EngineArgs()).view(0.0, view)
    assert (view.requests, view.ended, view.users, view.blocks_total) == ([], [], [], 0)


def test_step_times_are_kept_for_the_last_steps_and_stay_in_order() -> None:
    log = StepLog()
    for step in range(1, MAX_STEPS + 20):
        chunks = pack_int32([3, 16, 5, 7]) if step % 2 else b""
        log.planned(StepPlan(step, chunks=chunks), 9, step * 100, step * 100 + 5)
    last = MAX_STEPS + 19
    log.read(StepResult(last, started_ns=last * 100 + 10, ended_ns=last * 100 + 60), 99_999)
    log.read(StepResult(last - 1, started_ns=1, ended_ns=2), 99_998)  # before it was planned
    log.read(StepResult(3, started_ns=311, ended_ns=312), 99_997)  # no longer kept
    log.read(StepResult(last + 5), 99_996)  # never planned
    steps = log.steps()
    assert [step.step for step in steps] == list(range(20, MAX_STEPS + 20))
    assert [step.prefill_tokens for step in steps[:2]] == [0, 23]
    end = last * 100
    assert msgspec.structs.astuple(steps[-1]) == (
        *(last, end, end + 5, end + 10, end + 60, 99_999, 9, 23 * (last % 2)),
    )
    assert (steps[-2].began_ns, steps[-2].ended_ns, steps[-2].read_ns) == (0, 0, 99_998)
    assert all(step.read_ns == 0 for step in steps[:-2])


@pytest.mark.process
async def test_an_engine_shows_itself_to_its_clients(tmp_path: Path) -> None:
    folder = ScriptedFolder(tmp_path / "m", step_ms=2)
    endpoint = f"ipc://{tmp_path}/engine"
    async with AsyncEngine(folder.args(max_num_seqs=2, endpoint=endpoint)) as engine:
        async with Client(endpoint) as onlooker:
            with folder.held() as hold:
                params = SamplingParams(max_tokens=40, temperature=0)
                streams = [
                    asyncio.ensure_future(
                        outputs(engine, [5] * 9, params, f"r{i}", user_id=f"u{i % 2}")
                    )
                    for i in range(3)
                ]
                while (await engine.stats())["live"] < 3:
                    await asyncio.sleep(0)
                hold.let_pass(3)
                view = await onlooker.view()
                while sum(r.output_tokens for r in view.requests) < 3:
                    view = await onlooker.view()
                assert [(r.request_id, r.status) for r in view.requests] == [
                    ("r0", "running"),
                    ("r1", "running"),
                    ("r2", "waiting"),
                ]
                assert view.ok and view.worker == "ready" and view.stats["running"] == 2
                assert view.stats["blocks_total"] == view.blocks_total
            await asyncio.gather(*streams)
            view = await onlooker.view()
            while len(view.ended) < 3 or any(not step.read_ns for step in view.steps):
                view = await onlooker.view()
        assert {e.request_id: e.output_tokens for e in view.ended} == {
            "r0": 40, "r1": 40, "r2": 40,
        }  # fmt: skip
        steps = view.steps
        assert [step.step for step in steps] == list(range(1, len(steps) + 1))
        for step in steps:
            assert step.plan_began_ns < step.plan_ended_ns < view.now_ns
            assert step.plan_began_ns < step.began_ns < step.ended_ns < step.read_ns < view.now_ns
            assert step.ended_ns - step.began_ns >= 2_000_000
        for before, after in zip(steps, steps[1:], strict=False):
            assert before.ended_ns <= after.began_ns, "the worker runs one step at a time"
        assert sum(step.prefill_tokens for step in steps) == view.stats["computed_tokens"]
        assert max(step.decode_rows for step in steps) == 2
        together = await asyncio.gather(*(engine.view() for _ in range(30)))
        assert len({view.now_ns for view in together}) < 30, "who asks together gets one view"
