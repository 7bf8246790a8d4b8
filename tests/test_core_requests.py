"""Who may ask for what: refusals, ids and keys, aborts in every phase, and nothing left behind."""

from __future__ import annotations

import math
import random
import tracemalloc

import pytest

from deepinfer.scheduler.client_names import keyed_name
from deepinfer.scheduler.clients import MAX_EARLY_ABORTS
from deepinfer.scheduler.core import Core
from deepinfer.scheduler.planner import MAX_ADMIT_BYTES
from deepinfer.scheduler.story import MAX_EVENTS, MAX_FINISHED
from deepinfer.wire.columns import pack_int32
from deepinfer.wire.config import EngineArgs
from deepinfer.wire.messages import Abort, AddRequest, ImageRef, Refused
from deepinfer.wire.params import MAX_ALLOWED_TOKEN_IDS, SamplingParams
from support.core_driver import VOCAB, CoreDriver, Request


def greedy(max_tokens: int = 8, **fields: object) -> SamplingParams:
    values = {"seed": 0, "temperature": 0.0, "ignore_eos": True, "max_tokens": max_tokens}
    return SamplingParams(**(values | fields))  # type: ignore[arg-type]


def driver(num_blocks: int = 32, **fields: object) -> CoreDriver:
    values: dict[str, object] = {
        "max_num_seqs": 4,
        "max_num_batched_tokens": 16,
        "block_size": 4,
        "max_model_len": 48,
    }
    return CoreDriver(EngineArgs(**(values | fields)), num_blocks)  # type: ignore[arg-type]


BAD_FIELDS: list[tuple[str, dict[str, object]]] = [
    ("key", {"key": -1}),
    ("key", {"key": 1 << 32}),
    ("request_id", {"request_id": ""}),
    ("request_id", {"request_id": "x" * 1_000_000}),
    ("user_id", {"user_id": "x" * 257}),
    ("salt", {"salt": "x" * 257}),
    ("priority", {"priority": 1 << 40}),
    ("weight", {"weight": 0.0}),
    ("weight", {"weight": 1001.0}),
    ("weight", {"weight": math.nan}),
    ("timeout_ms", {"timeout_ms": 0.0}),
    ("timeout_ms", {"timeout_ms": -5.0}),
    ("timeout_ms", {"timeout_ms": math.nan}),
    ("timeout_ms", {"timeout_ms": math.inf}),
    ("images", {"images": [ImageRef(b"x")]}),
    ("prompt", {"prompt": b""}),
    ("prompt", {"prompt": b"\1\0\0\0\1"}),
    ("prompt", {"prompt": pack_int32([1, VOCAB])}),
    ("prompt", {"prompt": pack_int32([-1])}),
    ("output", {"output": pack_int32([VOCAB])}),
    ("output", {"output": b"\1\0"}),
    ("output", {"output": pack_int32([1] * 9)}),
    ("seed", {"params": SamplingParams()}),
    ("n", {"params": greedy(n=2)}),
    ("bad_words", {"params": greedy(bad_words=["word"])}),
    ("bad_words", {"params": greedy(bad_words=[[VOCAB]])}),
    ("stop_token_ids", {"params": greedy(stop_token_ids=[VOCAB])}),
    ("logit_bias", {"params": greedy(logit_bias={VOCAB: 1.0})}),
    ("allowed_token_ids", {"params": greedy(allowed_token_ids=[VOCAB])}),
    ("golden_token_ids", {"params": greedy(golden_token_ids=[VOCAB])}),
]


@pytest.mark.parametrize(("field", "change"), BAD_FIELDS)
def test_a_bad_field_is_refused_by_name_and_disturbs_nobody(
    field: str, change: dict[str, object]
) -> None:
    engine = driver()
    other = engine.add([5, 6, 7], greedy())
    engine.step()
    values: dict[str, object] = {
        "key": 99,
        "request_id": "bad",
        "prompt": pack_int32([1, 2]),
        "params": greedy(),
    }
    engine.core.handle(b"c", AddRequest(**(values | change)), 0.0)  # type: ignore[arg-type]
    [(client, refused)] = [m for m in engine.core.outbox() if isinstance(m[1], Refused)]
    assert isinstance(refused, Refused)
    assert (client, refused.code, refused.field) == (b"c", "invalid", field)
    assert refused.message.startswith(field) and len(refused.message) < 400
    engine.check()
    engine.run()
    engine.hold_alone(other)
    assert engine.core.stats()["accepted"] == 1


def test_nothing_is_accepted_before_the_worker_is_ready_or_after_the_end() -> None:
    engine = driver()
    core = Core(engine.args)
    add = AddRequest(1, "r", pack_int32([1]), greedy())

    def code() -> str:
        core.handle(b"c", add, 0.0)
        [(_, refused)] = core.outbox()
        assert isinstance(refused, Refused)
        core.check()
        return refused.code

    assert code() == "busy"
    core.shutdown(0.0)
    assert code() == "shutdown"
    core.engine_down(0.0, "no model")
    assert code() == "down"


def test_a_full_queue_refuses_until_there_is_room_again() -> None:
    engine = driver(max_queue_len=2, max_num_seqs=1)
    running = engine.add([5], greedy(20))
    engine.step()
    waiting = [engine.add([5], greedy(3)) for _ in range(2)]
    refused = engine.add([5], greedy(3))
    assert refused.refused is not None and refused.refused.code == "busy"
    engine.abort(waiting[0])
    later = engine.add([5], greedy(3))
    engine.run()
    for request in (running, waiting[1], later):
        engine.hold_alone(request)


def test_a_request_that_was_accepted_before_a_failover_finds_room_in_a_full_queue() -> None:
    engine = driver(max_queue_len=4, max_num_seqs=2)
    for _ in range(2):
        engine.add([5], greedy(20))
        engine.step()
    requests = [engine.add([6], greedy(3), resubmitted=True) for _ in range(10)]
    # But who only says so cannot fill the memory.
    refused = engine.add([6], greedy(3), resubmitted=True)
    assert refused.refused is not None and refused.refused.code == "busy"
    engine.run()
    for request in requests:
        engine.hold_alone(request)


def test_requests_with_long_lists_do_not_all_come_to_the_worker_in_one_plan() -> None:
    engine = driver(max_num_seqs=64, max_num_batched_tokens=256)
    ids = [1] * MAX_ALLOWED_TOKEN_IDS
    for _ in range(20):
        engine.add([5], greedy(2, allowed_token_ids=ids, golden_token_ids=ids))
    engine.run()
    admitted = [len(plan.admitted) for plan in engine.plans]
    assert sum(admitted) == 20
    assert max(admitted) <= 1 + MAX_ADMIT_BYTES // (8 * MAX_ALLOWED_TOKEN_IDS)


def test_one_client_cannot_have_two_live_requests_of_one_id_or_key_but_two_clients_can() -> None:
    """ID-01."""
    engine = driver()
    first = engine.add([5, 6], greedy(), client=b"a", request_id="same")
    again = engine.add([7, 8], greedy(), client=b"a", request_id="same")
    assert again.refused is not None
    assert (again.refused.code, again.refused.field) == ("duplicate", "request_id")
    core_says = []
    message = AddRequest(first.key, "other", pack_int32([1]), greedy())
    engine.core.handle(b"a", message, 0.0)
    core_says = [m for _, m in engine.core.outbox()]
    assert [(m.code, m.field) for m in core_says if isinstance(m, Refused)] == [
        ("duplicate", "key")
    ]
    elsewhere = engine.add([7, 8], greedy(), client=b"b", request_id="same")
    engine.run()
    engine.hold_alone(first)
    engine.hold_alone(elsewhere)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("how", ["finish", "abort", "fail"])
def test_an_id_can_be_used_again_at_once_and_brings_no_token_of_the_earlier_run(
    how: str, overlap: bool
) -> None:
    """ID-01: with overlap a step of the earlier run may still be in flight."""
    engine = driver(async_scheduling=overlap)
    pick = random.Random(0)
    for _ in range(150):
        request = engine.add(
            [pick.randrange(4, VOCAB) for _ in range(4)], greedy(4), request_id="same"
        )
        if how == "finish":
            while request.end is None:
                engine.step()  # a step of this request may still be in flight when it ends
            engine.hold_alone(request)
        else:
            for _ in range(pick.randrange(5)):
                engine.step()
            if how == "abort":
                engine.abort(request)
            else:
                engine.worker.fail_slots |= {0, 1, 2, 3}
                while request.end is None:
                    engine.step()
            assert request.output == engine.expected(request).tokens[: len(request.output)]
        assert request.refused is None
    engine.run()
    assert all(value >= 0 for value in engine.core.stats().values())


# ---- aborts -------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [True, False])
def test_aborting_a_queued_request_ends_it_at_once_with_no_token_and_no_prefill(
    overlap: bool,
) -> None:
    """ABT-01, also in the step in which the running one ends."""
    for moment in range(14):
        engine = driver(max_num_seqs=1, async_scheduling=overlap)
        first = engine.add([5, 6, 7], greedy(6))
        second, third = engine.add([8] * 9, greedy(6)), engine.add([9] * 9, greedy(6))
        for _ in range(moment):
            if moment % 2:
                engine.step()
            else:
                engine.plan()
        ran = [bool(request.steps) for request in (second, third)]
        live = [request for request in (second, third) if request.live]
        prompt_tokens = engine.core.stats()["prompt_tokens"]
        for request in live:
            engine.abort(request)
            assert request.end is not None
            assert request.end.status == "FINISHED_ABORTED" and request.end.reason == "abort"
        if not any(ran) and first.live:
            assert second.tokens == third.tokens == []
            assert engine.core.stats()["prompt_tokens"] == prompt_tokens == (3 if moment else 0)
        engine.run()
        engine.hold_alone(first)


def test_an_abort_before_its_request_is_remembered_but_not_for_ever() -> None:
    engine = driver()
    engine.core.handle(b"c", Abort(1), 0.0)
    for key in range(2, MAX_EARLY_ABORTS + 2):
        engine.core.handle(b"c", Abort(key), 0.0)
    forgotten = engine.add([5], greedy(2), key=1)
    remembered = engine.add([5], greedy(2), key=2)
    assert remembered.end is not None and remembered.end.num_output_tokens == 0
    engine.run()
    engine.hold_alone(forgotten)
    elsewhere = engine.add([5], greedy(2), client=b"other", key=3)
    engine.run()
    engine.hold_alone(elsewhere)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("steps", range(12))
def test_after_an_abort_nothing_more_comes_and_all_is_free(steps: int, overlap: bool) -> None:
    """ABT-03 as the core sees it."""
    engine = driver(async_scheduling=overlap)
    request = engine.add([5] * 30, greedy(8))
    for _ in range(steps):
        engine.step()
    if request.end is None:
        engine.abort(request)
        engine.abort(request)
        assert request.end is not None and request.end.num_output_tokens == len(request.tokens)
    engine.run()
    stats = engine.core.stats()
    assert stats["blocks_free"] + stats["blocks_cached"] == engine.num_blocks
    assert stats["live"] == stats["in_flight"] == 0


def test_a_client_that_leaves_takes_only_its_own_requests_along() -> None:
    engine = driver()
    mine = [engine.add([5] * 6, greedy(), client=b"a") for _ in range(3)]
    theirs = [engine.add([6] * 6, greedy(), client=b"b") for _ in range(3)]
    for _ in range(3):
        engine.step()
    engine.core.client_gone(b"a", "disconnect", engine.now)
    engine.collect()
    engine.run()
    assert [r.end.detail for r in mine if r.end] == ["disconnect"] * 3
    for request in theirs:
        engine.hold_alone(request)


# ---- company, memory, stories -------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [True, False])
def test_sixty_four_requests_in_any_company_say_what_they_say_alone(overlap: bool) -> None:
    """ISO-01: arrivals, aborts and evictions at random in a pool that is too small."""
    pick = random.Random(3)
    engine = driver(
        num_blocks=24, max_num_seqs=8, stop_preempted_request=False, async_scheduling=overlap
    )
    requests: list[Request] = []
    evicted = 0
    while len(requests) < 64 or any(request.live for request in requests):
        if len(requests) < 64 and pick.random() < 0.4:
            prompt = [5] * pick.randrange(9) + [4 + len(requests) % 36, 5 + len(requests) // 36]
            client = b"client%d" % pick.randrange(5)
            params = greedy(pick.randrange(1, 20), ignore_eos=False)
            requests.append(engine.add(prompt, params, client=client))
        live = [request for request in requests if request.live]
        if live and pick.random() < 0.05:
            engine.abort(pick.choice(live))
        elif live and pick.random() < 0.1:
            evicted += engine.evict(pick.choice(live))
        engine.step()
    assert evicted > 3
    for request in requests:
        assert request.end is not None
        if request.end.detail == "client_abort":
            assert request.tokens == engine.expected(request).tokens[: len(request.tokens)]
        else:
            engine.hold_alone(request)


def test_memory_does_not_grow_with_the_requests_that_passed() -> None:
    """LEAK-01 for the core."""
    engine = driver(max_num_seqs=4)
    engine.check = lambda: None  # type: ignore[method-assign]
    pick = random.Random(5)

    def serve(count: int) -> None:
        for _ in range(count):
            prompt = [pick.randrange(4, VOCAB) for _ in range(6)]
            request = engine.add(
                prompt,
                greedy(1, stop_token_ids=[pick.randrange(VOCAB)], logprobs=0),
                request_id=f"r{pick.random()}",
                timeout_ms=60_000.0,
            )
            if pick.random() < 0.1:
                engine.abort(request)
            engine.run()
            engine.requests.clear()
            engine.plans.clear()
            engine.delivered.clear()
            engine.worker.step_tokens.clear()

    serve(MAX_FINISHED + 200)
    tracemalloc.start()
    serve(20)
    before = tracemalloc.get_traced_memory()[0]
    serve(400)
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    # 400 of the kept stories were replaced by ones made while memory is traced; nothing else grew.
    assert grown < 400 * 6000
    life = engine.core._life
    assert len(life.shelf) == MAX_FINISHED
    assert not life.deadlines and not life.stop_users and not life.in_flight
    assert len(life.clients) == 0 and len(life.clients.names) == 1


def test_a_story_says_what_happened_and_stays_bounded() -> None:
    engine = driver(max_num_seqs=2, max_num_batched_tokens=4, max_model_len=400, num_blocks=200)
    request = engine.add([5] * 300, greedy(5), request_id="long")
    engine.step()
    live = engine.core.story("long")
    assert live is not None
    assert [event.event for event in live][:3] == ["arrived", "queued", "admitted"]
    engine.run()
    engine.hold_alone(request)
    story = engine.core.story("long")
    assert story is not None and len(story) == MAX_EVENTS
    assert [event.event for event in story][-2:] == ["and more", "ended"]
    # 75 chunks and the first token came after the three events at the start.
    assert story[-2].detail["n"] == 3 + 75 + 1 - (MAX_EVENTS - 2)
    assert story[-1].detail["detail"] == "max_tokens"
    assert engine.core.story("nobody") is None
    times = [event.at_ms for event in story]
    assert times == sorted(times)


def test_who_has_a_key_reads_the_stories_of_this_key_and_nothing_of_others() -> None:
    """SEC-01: one id of two keys is two requests, and another's is not named in one's own."""
    engine = driver(max_num_seqs=1, policy="priority", stop_preempted_request=False)
    anna, ben = (name * 40 for name in (b"a", b"b"))

    def ask(key: bytes, request_id: str, **fields: object) -> Request:
        client = keyed_name(key, request_id.encode())
        request = engine.add([5], greedy(6), client=client, request_id=request_id, **fields)
        engine.step()
        engine.step()
        return request

    def preempted(reader: bytes | None) -> list[dict[str, object]]:
        events = engine.core.story("same", reader)
        assert events is not None
        return [event.detail for event in events if event.event == "preempted"]

    def hold_apart() -> None:
        own, foreign = preempted(anna)
        assert (own["by"], own["by_user"]) == ("first", "u")
        assert foreign["by"] == "another client's request"
        assert "by_user" not in foreign
        assert preempted(ben) == []
        assert engine.core.story("first", ben) is engine.core.story("same", b"c" * 40) is None

    ask(anna, "same", priority=9)
    ask(anna, "first", user_id="u")
    while engine.core.stats()["waiting"]:
        engine.step()
    ask(ben, "same", user_id="v")
    hold_apart()
    assert preempted(None) == [], "of all, the latest of this id"
    engine.run()
    hold_apart()
    assert [(told["by"], told["by_user"]) for told in preempted(None)] == [
        ("first", "u"), ("same", "v")
    ]  # fmt: skip


# ---- places in the queue ------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["fcfs", "priority", "fair"])
@pytest.mark.parametrize("resubmitted", [False, True])
@pytest.mark.parametrize("by_key", [False, True])
def test_who_fills_the_queue_keeps_nobody_else_out(
    policy: str, resubmitted: bool, by_key: bool
) -> None:
    """ZMQ-01: nor by saying that its requests are from before a failover, nor by other names."""
    engine = driver(max_num_seqs=2, max_queue_len=6, policy=policy)
    numbers = iter(range(1000))

    def ask(who: str) -> Request:
        number = next(numbers)
        if by_key:
            client, user = keyed_name(who.encode() * 40, b"%d" % number), f"{who}{number}"
        else:
            client, user = b"%d" % number, who
        return engine.add(
            [5], greedy(3), client=client, user_id=user, resubmitted=resubmitted,
            request_id=f"{number}",
        )  # fmt: skip

    def fill(who: str) -> int:
        count = 0
        while ask(who).refused is None:
            count += 1
        return count

    limit = 2 * 6 + 2 if resubmitted else 6
    assert fill("a") == limit
    assert fill("b") == limit // 2
    assert fill("c") == limit // 3
    assert limit + limit // 2 + limit // 3 + fill("d") == 2 * limit, "and no more in all"
    assert fill("e") == 0
    engine.run()
    assert fill("a") == limit
    engine.run()
    engine.hold_idle()


def test_a_user_without_a_name_is_its_connection() -> None:
    engine = driver(max_num_seqs=1, max_queue_len=2)
    asked = [engine.add([5], greedy(3), client=client) for client in (b"1", b"1", b"1", b"2")]
    assert [request.refused is None for request in asked] == [True, True, False, True]
    engine.run()
    engine.hold_idle()
