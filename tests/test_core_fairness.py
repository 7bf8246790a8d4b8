"""The fair policy: tenants are served by their weights, and none waits behind another's flood."""

from __future__ import annotations

import random

import pytest

from deepinfer.scheduler.tenants import MAX_IDLE_TENANTS, MAX_TENANTS_TOLD, Tenants
from deepinfer.wire.columns import unpack_int32
from deepinfer.wire.config import EngineArgs
from deepinfer.wire.messages import StoryEvent
from deepinfer.wire.params import SamplingParams
from support.core_driver import CoreDriver, Request
from support.scripted_grammar import VOCAB

BUDGET = 64


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(seed=0, temperature=0.0, ignore_eos=True, max_tokens=max_tokens)


class Engine(CoreDriver):
    """A small engine under the fair policy whose prompts share nothing unless they are to."""

    def __init__(self, num_blocks: int = 400, **fields: object) -> None:
        values: dict[str, object] = {
            "max_num_seqs": 8,
            "max_num_batched_tokens": BUDGET,
            "block_size": 4,
            "max_model_len": 256,
            "policy": "fair",
            "stop_preempted_request": False,
        }
        super().__init__(EngineArgs(**(values | fields)), num_blocks)  # type: ignore[arg-type]
        self.random = random.Random(0)

    def ask(self, tenant: str, prompt: int, output: int, **fields: object) -> Request:
        tokens = [self.random.randrange(4, VOCAB) for _ in range(prompt)]
        return self.add(tokens, greedy(output), user_id=tenant, **fields)

    def served(self) -> dict[str, float]:
        return {name: told["served_tokens"] for name, told in self.core.tenants().items()}

    def waiting(self, tenant: str) -> float:
        return self.core.tenants()[tenant]["waiting"]

    def steps_to_first_token(self, request: Request, most: int = 500) -> int:
        """Count the plans from now on to the one that brings the first token, it included."""
        before = len(self.plans)
        for _ in range(most):
            if request.tokens:
                return request.steps[0] - before
            self.step()
        raise AssertionError(f"{request.request_id} got nothing in {most} steps")

    def story(self, request: Request) -> dict[str, StoryEvent]:
        events = self.core.story(request.request_id)
        assert events is not None
        return {event.event: event for event in events}


# ---- shares -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("weights", "sizes"),
    [
        ((1.0, 1.0), ((100, 40), (100, 40))),
        ((1.0, 1.0), ((160, 20), (12, 8))),
        ((3.0, 1.0), ((60, 60), (60, 60))),
        ((1.0, 3.0), ((120, 30), (10, 50))),
        ((1.0, 2.0, 4.0), ((60, 20), (60, 20), (60, 20))),
    ],
)
def test_backlogged_tenants_are_served_by_their_weights(
    weights: tuple[float, ...], sizes: tuple[tuple[int, int], ...]
) -> None:
    """SCH-03: within 20 %, whatever the sizes, the numbers of requests and who came first."""
    engine = Engine()
    names = [f"tenant {i}" for i in range(len(weights))]
    for name, weight, (prompt, output) in zip(names, weights, sizes, strict=True):
        for _ in range(int(5_000 * weight) // (prompt + output)):
            engine.ask(name, prompt, output, weight=weight)
    warm: dict[str, float] = {}
    while all(engine.waiting(name) for name in names):
        assert engine.step()
        if not warm and len(engine.delivered) == 30:
            warm = engine.served()
    served = engine.served()
    gained = [served[name] - warm[name] for name in names]
    total = sum(gained)
    assert total > 4_000
    for weight, part in zip(weights, gained, strict=True):
        assert part / total == pytest.approx(weight / sum(weights), rel=0.2)
    stats = engine.core.stats()
    assert stats["recomputed_tokens"] < 0.1 * stats["computed_tokens"]


def test_many_request_ids_and_clients_of_one_identity_are_one_tenant() -> None:
    """SCH-03."""
    engine = Engine()
    for i in range(300):
        engine.ask("many", 40, 20, client=b"client %d" % (i % 50))
    for _ in range(300):
        engine.ask("one", 40, 20)
    for _ in range(400):
        engine.step()
    served = engine.served()
    assert served["many"] == pytest.approx(served["one"], rel=0.2)


def test_first_come_first_served_inside_a_tenant() -> None:
    engine = Engine(max_num_seqs=2)
    requests = [engine.ask("ab"[i % 2], 12, 12) for i in range(20)]
    engine.run()
    for mine in (requests[::2], requests[1::2]):
        starts = [request.steps[0] for request in mine]
        assert starts == sorted(starts)
        for request in mine:
            engine.hold_alone(request)


# ---- work is conserved --------------------------------------------------------------------------


def test_a_tenant_alone_has_everything_and_takes_as_many_steps_as_under_fcfs() -> None:
    """SCH-03: with B idle A gets everything."""
    taken = []
    for policy in ("fcfs", "fair"):
        engine = Engine(policy=policy)
        engine.ask("b", 10, 5)
        engine.run()
        requests = [engine.ask("a", 100, 40) for _ in range(40)]
        before = len(engine.plans)
        engine.run()
        taken.append(len(engine.plans) - before)
        for request in requests:
            engine.hold_alone(request)
        assert engine.core.stats()["preemptions"] == 0
    assert taken[0] == taken[1]


def test_no_step_is_idle_while_anyone_waits() -> None:
    """SCH-03: there is always a plan when the pipeline has room, and slots do not stay empty."""
    pick = random.Random(1)
    engine = Engine()
    for name in ("a", "b", "c"):
        for _ in range(30):
            engine.ask(name, pick.randrange(4, 120), pick.randrange(1, 60))
    idle = 0
    while engine.core.stats()["waiting"]:
        plan = engine.plan()
        assert plan is not None or len(engine.results) == 2
        if len(engine.results) == 2:
            engine.deliver()
        stats = engine.core.stats()
        idle += bool(stats["waiting"]) and stats["running"] < 7
    # A slot may be empty for the step in which its owner's end is read.
    assert idle < 0.05 * len(engine.plans)
    engine.run()
    engine.hold_idle()


# ---- getting in ---------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("num_blocks", [400, 130])
def test_a_flood_delays_another_tenants_first_token_by_the_steps_in_flight(
    num_blocks: int, overlap: bool
) -> None:
    """SCH-03: A holds every slot, or nearly all blocks; B asks now and then."""
    engine = Engine(num_blocks, async_scheduling=overlap)
    floods = [engine.ask("a", 120, 60) for _ in range(60)]
    for _ in range(60):
        engine.step()
    waits: list[int] = []
    asked: list[Request] = []
    while engine.waiting("a") > 5:
        asked.append(engine.ask("b", 20, 8))
        waits.append(engine.steps_to_first_token(asked[-1]))
        for _ in range(12):
            engine.step()
    # It is in the next plan, or in the one after: when a slot is about to be free anyway, or when
    # the plan had to preempt somebody for a row that runs.
    assert len(waits) > 20 and max(waits) <= 2 and sum(w > 1 for w in waits) < len(waits) / 3
    engine.run()
    for request in floods + asked:
        engine.hold_alone(request)
    stats = engine.core.stats()
    assert stats["preemptions"] > 0
    assert stats["recomputed_tokens"] < 0.25 * stats["computed_tokens"]
    assert not any(request.num_preemptions for request in asked)


def test_the_oldest_of_a_tenant_is_never_pushed_out_and_the_youngest_is() -> None:
    engine = Engine(max_num_seqs=3)
    flood = [engine.ask("a", 20, 60) for _ in range(6)]
    for _ in range(8):
        engine.step()
    first = engine.ask("b", 20, 40)
    assert engine.steps_to_first_token(first) == 1
    assert [request.num_preemptions for request in flood[:3]] == [0, 0, 0]
    story = engine.story(flood[2])
    made_way = story["preempted"].detail
    assert (made_way["by"], made_way["by_user"]) == (first.request_id, "b")
    assert made_way["why"] == "its tenant had more than its share and more than the other one"
    # 'b' has one slot of three, another one would be more than its share.
    second = engine.ask("b", 20, 4)
    assert engine.steps_to_first_token(second) > 5
    engine.run()
    assert [request.num_preemptions for request in flood] == [0, 0, 1, 0, 0, 0]
    # Preempted ones come before their tenant's never-started ones.
    resumed = next(step for step in flood[2].steps if step > first.steps[0])
    assert resumed <= flood[3].steps[0]
    for request in (*flood, first, second):
        engine.hold_alone(request)


def test_as_many_as_its_share_get_in_at_once_and_more_when_others_are_far_ahead() -> None:
    engine = Engine()
    for _ in range(20):
        engine.ask("a", 20, 200)
    for _ in range(20):
        engine.step()
    light = [engine.ask("b", 20, 60) for _ in range(4)]
    assert engine.steps_to_first_token(light[0]) == 1
    for request in light[1:]:
        # As soon as "a" got 20 tokens more than "b", whose prompt took as many: with five rows
        # against three that is ten steps.
        assert engine.steps_to_first_token(request) <= 12
    while engine.core.tenants()["b"]["running"] or engine.core.tenants()["a"]["running"] < 8:
        engine.step()
    heavy = [engine.ask("b", 20, 30) for _ in range(30)]
    # 'a' gets eight tokens a step, and 256 are the longest a sequence can get.
    assert 256 / 8 - 10 < engine.steps_to_first_token(heavy[0]) < 256 / 8 + 10
    engine.run()
    for request in light + heavy:
        engine.hold_alone(request)


@pytest.mark.parametrize("cache", [True, False])
def test_two_floods_do_not_push_each_other_back_and_forth(cache: bool) -> None:
    """Recomputation stays bounded, also with too few blocks."""
    engine = Engine(150, enable_prefix_caching=cache)
    for _ in range(60):
        engine.ask("long", 150, 40)
        engine.ask("short", 20, 20)
        engine.ask("short", 20, 20)
        engine.ask("talkative", 20, 90)
    while all(engine.waiting(name) for name in ("long", "short", "talkative")):
        engine.step()
    stats = engine.core.stats()
    assert stats["recomputed_tokens"] < 0.2 * stats["computed_tokens"]
    engine.run()
    engine.hold_idle()


def test_a_short_prompt_is_not_behind_the_chunks_of_another_tenants_long_ones() -> None:
    engine = Engine(800, max_num_batched_tokens=16)
    for _ in range(4):
        engine.ask("a", 200, 4)
    for _ in range(3):
        engine.step()
    short = engine.ask("b", 14, 4)
    assert engine.steps_to_first_token(short) == 1


# ---- credit -------------------------------------------------------------------------------------


def test_idling_earns_no_credit() -> None:
    """SCH-03: B comes back after a long time and is level with A, not ahead of it."""
    engine = Engine()
    engine.ask("b", 10, 5)
    for _ in range(400):
        engine.ask("a", 40, 20)
    for _ in range(300):
        engine.step()
    assert engine.served()["a"] > 5000 > 100 > engine.served()["b"]
    before = engine.served()
    for _ in range(200):
        engine.ask("b", 40, 20)
    for _ in range(300):
        engine.step()
    gained = {name: count - before[name] for name, count in engine.served().items()}
    assert gained["b"] / sum(gained.values()) == pytest.approx(0.5, rel=0.2)


def test_debts_are_forgiven_when_nobody_waits() -> None:
    engine = Engine()
    engine.ask("a", 200, 50)
    engine.run()
    engine.ask("b", 5, 2)
    engine.run()
    tenants = engine.core.tenants()
    assert tenants["b"]["counter"] == tenants["a"]["counter"] + 7 == 257


# ---- charges ------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["fcfs", "priority", "fair"])
def test_a_tenant_is_charged_for_what_was_computed_for_it(policy: str) -> None:
    """SCH-03: not for cached tokens or recomputed ones, and for what ran of aborted ones."""
    engine = Engine(policy=policy)
    prompt = [5] * 43
    engine.add(prompt, greedy(10), user_id="first")
    engine.run()
    again = engine.add(prompt, greedy(10), user_id="again")
    engine.run()
    assert again.cached_tokens == 40
    assert engine.served() == {"first": 53, "again": 13}

    evicted = engine.ask("evicted", 30, 20)
    for _ in range(8):
        engine.step()
    assert engine.evict(evicted)
    engine.core._life.cache.enabled = False  # everything is computed again
    engine.run()
    assert engine.core.stats()["recomputed_tokens"] >= 30
    assert engine.served()["evicted"] == 50
    engine.hold_alone(evicted)


def test_half_of_a_flood_is_aborted_and_stays_charged_for_what_ran() -> None:
    """SCH-03."""
    engine = Engine(async_scheduling=False)
    flood = [engine.ask("a", 100, 40) for _ in range(10)]
    engine.ask("b", 10, 200)
    for _ in range(20):
        engine.step()
    served = engine.served()["a"]
    for request in flood[::2]:
        engine.abort(request)
    assert engine.served()["a"] == served
    chunks = sum(engine.worker.step_tokens)
    assert 0 < served <= chunks + 20 * 8
    engine.run()
    done = [request for request in flood if request.end and request.end.detail == "max_tokens"]
    assert len(done) == 5
    ran = sum(len(request.tokens) for request in flood)
    assert 5 * 140 <= engine.served()["a"] <= 10 * 100 + ran
    queued = [request for request in flood if not request.tokens]
    assert queued, "one was to be aborted before it ran"
    assert engine.served()["a"] <= (10 - len(queued)) * 100 + ran


def test_the_weight_is_that_of_the_latest_request_from_then_on() -> None:
    engine = Engine()
    engine.ask("a", 40, 10)
    engine.run()
    engine.ask("a", 40, 10, weight=10.0)
    engine.run()
    told = engine.core.tenants()["a"]
    assert (told["weight"], told["served_tokens"], told["counter"]) == (10.0, 100, 55.0)


# ---- what is told -------------------------------------------------------------------------------


def test_stories_say_who_was_passed_over_by_whom_and_why() -> None:
    engine = Engine(max_num_seqs=1)
    flood = [engine.ask("a", 30, 30) for _ in range(3)]
    for _ in range(4):
        engine.step()
    late = engine.ask("b", 10, 5)
    engine.run()
    assert "why" not in engine.story(flood[0])["admitted"].detail, "nobody else was there"
    assert engine.story(late)["admitted"].detail["why"].startswith("tenant 'b' was served least")
    over = engine.story(flood[1])["passed_over"].detail
    assert (over["by"], over["by_user"]) == (late.request_id, "b")
    assert (
        over["by_counter"] < over["counter"] and over["why"] == "the other tenant was served less"
    )
    for request in (flood[0], flood[2], late):
        assert "passed_over" not in engine.story(request)


def test_the_numbers_of_tenants_count_what_is_there() -> None:
    engine = Engine(max_num_seqs=2)
    for _ in range(3):
        engine.ask("a", 8, 50, weight=2.0)
    for _ in range(5):
        engine.step()
    told = engine.core.tenants()["a"]
    assert (told["running"], told["waiting"], told["weight"]) == (2, 1, 2.0)
    assert told["counter"] == told["served_tokens"] / 2 > 8


# ---- bounds -------------------------------------------------------------------------------------


def test_tenants_without_requests_are_forgotten_from_the_smallest_counter_on() -> None:
    tenants = Tenants()
    busy = tenants.index_of("busy", 1.0)
    tenants.add(busy)
    for i in range(MAX_IDLE_TENANTS + 100):
        index = tenants.index_of(f"{i}", 1.0)
        tenants.add(index)
        tenants.counter[index] = 10_000 - i
        tenants.remove(index)
        assert len(tenants) <= MAX_IDLE_TENANTS + 1
    tenants.check()
    assert tenants.index_of("busy", 1.0) == busy
    known = tenants.numbers({})
    assert len(known) == MAX_TENANTS_TOLD and "busy" in known
    # The one that owed most is known still, the one that owed least is a stranger.
    assert tenants.counter[tenants.index_of("0", 1.0)] == 10_000
    assert tenants.counter[tenants.index_of(f"{MAX_IDLE_TENANTS + 99}", 1.0)] == 0


def test_who_is_forgotten_at_the_floor_comes_back_as_if_it_had_not_been() -> None:
    engine = Engine()
    for _ in range(60):
        engine.ask("a", 40, 20)
    engine.ask("b", 10, 5)
    for _ in range(60):
        engine.step()
    tenants = engine.core._life.tenants
    engine.ask("stranger", 10, 5)
    engine.ask("b", 10, 5)
    told = engine.core.tenants()
    assert told["b"]["counter"] == told["stranger"]["counter"] == tenants.floor > 0


def test_a_tenant_floods_with_other_names_and_the_plan_stays_a_plan() -> None:
    """Thousands of tenants wait: each is one request, all are served, in the order they came."""
    engine = Engine(max_num_seqs=4)
    requests = [engine.ask(f"name {i}", 8, 2) for i in range(300)]
    engine.run()
    starts = [request.steps[0] for request in requests]
    assert starts == sorted(starts)
    engine.hold_idle()


def test_rows_admitted_again_in_the_plan_that_preempted_are_the_favoured_ones() -> None:
    engine = Engine(max_num_seqs=2)
    for _ in range(4):
        engine.ask("a", 30, 30)
    for _ in range(4):
        engine.step()
    late = engine.ask("b", 9, 5)
    engine.step()
    plan = next(plan for plan in engine.plans if plan.released and plan.admitted)
    assert [unpack_int32(row.tokens).tolist() for row in plan.admitted] == [late.prompt]
