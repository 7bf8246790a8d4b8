"""Whatever happens in whatever order: every request ends once, with the tokens it has when alone.

A hypothesis state machine (cases CACHE-02 and ISO-01) drives the core through arrivals, aborts,
evictions, deaths, and results that are held, or come in the wrong order, twice or never. After
every event the core checks its own invariants (blocks are conserved, each block and slot has one
owner; a move against the table of transitions raises), the worker in ``mirror_worker`` refuses
plans that cannot be executed, and a grammar's matcher must be given each token once and in order.
At the end the engine must be empty and every output equal to (or, when it was cut short, a
beginning of) the reference.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from deepinfer.wire.config import EngineArgs
from deepinfer.wire.messages import Goodbye
from deepinfer.wire.params import SamplingParams
from support.core_driver import CoreDriver, Request
from support.scripted_grammar import GRAMMAR, VOCAB
from support.scripted_images import MAX_LINES, PLACEHOLDER, picture

CLIENTS = (b"alice", b"bob")
NATURAL_RULES = {"eos", "stop_token", "max_tokens", "max_model_len", "kv_capacity"}


@dataclass(frozen=True)
class Wish:
    """What a client asks for."""

    prompt: list[int]
    params: SamplingParams
    priority: int
    timeout_ms: float | None
    salt: str
    user_id: str
    weight: float
    pictures: list[bytes]
    by_url: bool


def wish(pick: random.Random) -> Wish:
    """Prompts share beginnings, so that blocks are shared, and have every length around borders."""
    stem = [pick.randrange(4, 7)] * pick.randrange(25)
    tail = [pick.randrange(4, VOCAB) for _ in range(pick.randrange(1, 5))]
    max_tokens = pick.randrange(1, 25)
    pictures = [
        picture(pick.randrange(5), pick.randrange(1, MAX_LINES + 1))
        for _ in range(pick.choice([0, 0, 0, 1, 1, 3]))
    ]
    if pictures and pick.random() < 0.1:
        pictures[-1] = b"no picture at all"
    prompt = stem + tail
    for _ in pictures:
        prompt.insert(pick.randrange(len(prompt) + 1), PLACEHOLDER)
    return Wish(
        prompt=pick.choice([[], [], [], [GRAMMAR]]) + prompt,
        params=SamplingParams(
            seed=0,
            temperature=0.0,
            max_tokens=max_tokens,
            min_tokens=pick.randrange(min(4, max_tokens) + 1),
            ignore_eos=pick.random() < 0.5,
            stop_token_ids=pick.choice([None, None, [9, 11]]),
            logprobs=pick.choice([None, None, 0]),
            prompt_logprobs=None if pictures else pick.choice([None, None, 0]),
        ),
        priority=pick.randrange(4),
        timeout_ms=pick.choice([None, None, None, 5000.0]),
        salt=pick.choice(["", "", "tenant"]),
        user_id=pick.choice(["", "one", "two"]),
        weight=pick.choice([1.0, 1.0, 3.0]),
        pictures=pictures,
        by_url=pick.random() < 0.2,
    )


# Drawing from a list, the smallest first so that failures shrink, costs a fraction of drawing a
# request part by part.
WISHES = sorted(
    (wish(random.Random(seed)) for seed in range(2000)),
    key=lambda wish: len(wish.prompt) + wish.params.max_tokens,
)
wishes = st.integers(0, len(WISHES) - 1).map(lambda number: WISHES[number])
numbers = st.integers(0, 99)


class CoreMachine(RuleBasedStateMachine):
    depth = 2
    tokens_per_row = 1
    driver: CoreDriver

    @initialize(
        slots=st.integers(1, 5),
        budget=st.integers(0, 12),
        block_size=st.sampled_from([1, 2, 4, 16]),
        blocks=st.integers(1, 14),
        max_model_len=st.integers(6, 48),
        policy=st.sampled_from(["fcfs", "priority", "fair"]),
        stop=st.booleans(),
        cache=st.booleans(),
        image_workers=st.integers(1, 2),
        arena_cells=st.integers(1 + MAX_LINES, 6 * (1 + MAX_LINES)),
    )
    def start(
        self,
        slots: int,
        budget: int,
        block_size: int,
        blocks: int,
        max_model_len: int,
        policy: str,
        stop: bool,
        cache: bool,
        image_workers: int,
        arena_cells: int,
    ) -> None:
        args = EngineArgs(
            max_num_seqs=slots,
            max_num_batched_tokens=self.tokens_per_row + budget,
            block_size=block_size,
            max_model_len=max_model_len,
            policy=policy,
            stop_preempted_request=stop,
            enable_prefix_caching=cache,
            async_scheduling=self.depth == 2,
            num_image_workers=image_workers,
            image_urls=True,
        )
        # With small blocks a pool of as many would hold next to nothing.
        scale = max(1, 8 // block_size)
        self.driver = CoreDriver(args, blocks * scale, self.tokens_per_row, arena_cells=arena_cells)
        self.lost = False

    # ---- clients --------------------------------------------------------------------------------

    @rule(client=st.sampled_from(CLIENTS), wish=wishes)
    def add(self, client: bytes, wish: Wish) -> None:
        self.driver.add(
            wish.prompt,
            wish.params,
            client=client,
            priority=wish.priority,
            timeout_ms=wish.timeout_ms,
            salt=wish.salt,
            user_id=wish.user_id,
            weight=wish.weight,
            pictures=wish.pictures,
            by_url=wish.by_url,
        )

    @rule(wish=wishes, percent=numbers)
    def resubmit(self, wish: Wish, percent: int) -> None:
        request = Request(b"", 0, "", wish.prompt, wish.params, wish.pictures)
        alone = self.driver.expected(request).tokens
        self.driver.add(
            wish.prompt,
            wish.params,
            output=alone[: percent * len(alone) // 99],
            pictures=wish.pictures,
        )

    @rule(wish=wishes)
    def abort_before_add(self, wish: Wish) -> None:
        key = len(self.driver.requests) + 1
        self.driver.abort(Request(b"c", key, "", wish.prompt, wish.params))
        request = self.driver.add(wish.prompt, wish.params, key=key, pictures=wish.pictures)
        assert request.end is not None and request.end.detail == "client_abort"

    @precondition(lambda self: self.live())
    @rule(number=numbers)
    def abort(self, number: int) -> None:
        request = self.pick(number)
        self.driver.abort(request)
        assert request.end is not None and request.end.status == "FINISHED_ABORTED"

    @precondition(lambda self: self.live())
    @rule(number=numbers, back=st.integers(0, 2))
    def stop_string(self, number: int, back: int) -> None:
        request = self.pick(number)
        count = max(len(request.output) - back, 0)
        self.driver.stop_matched(request, "END", count)
        assert request.end is not None and request.end.detail == "stop_string:END"
        assert request.end.num_output_tokens == count

    @rule(client=st.sampled_from(CLIENTS))
    def client_leaves(self, client: bytes) -> None:
        self.driver.core.handle(client, Goodbye(), self.driver.now)
        self.driver.collect()
        assert not [request for request in self.live() if request.client == client]

    @rule(seconds=st.floats(0.1, 6.0))
    def time_passes(self, seconds: float) -> None:
        self.driver.now += seconds
        self.driver.core.tick(self.driver.now)
        self.driver.collect()
        deadline = self.driver.core.next_deadline()
        assert deadline is None or deadline > self.driver.now

    # ---- steps ----------------------------------------------------------------------------------

    @rule()
    def plan(self) -> None:
        self.driver.plan()

    @precondition(lambda self: self.driver.results)
    @rule()
    def deliver(self) -> None:
        self.driver.deliver()

    @rule(steps=st.integers(1, 6))
    def run_a_little(self, steps: int) -> None:
        for _ in range(steps):
            self.driver.step()

    @precondition(lambda self: len(self.driver.results) > 1)
    @rule()
    def deliver_the_later_one(self) -> None:
        self.driver.deliver(1)

    @precondition(lambda self: self.driver.delivered)
    @rule(back=st.integers(1, 4))
    def deliver_again(self, back: int) -> None:
        result = self.driver.delivered[-back:][0]
        self.driver.core.step_result(result, self.driver.now)
        self.driver.collect()

    @precondition(lambda self: self.driver.results)
    @rule()
    def lose_a_result(self) -> None:
        del self.driver.results[0]
        self.lost = True

    @precondition(lambda self: self.driver.late)
    @rule()
    def a_dead_worker_is_heard(self) -> None:
        ignored = self.driver.core.stats()["ignored_results"]
        self.driver.core.step_result(self.driver.late.pop(), self.driver.now)
        self.driver.collect()
        assert self.driver.core.stats()["ignored_results"] == ignored + 1

    @precondition(lambda self: self.live())
    @rule(number=numbers)
    def evict(self, number: int) -> None:
        self.driver.evict(self.pick(number))

    @rule()
    def worker_dies(self) -> None:
        self.driver.kill_worker()
        self.lost = False

    @rule(slot=st.integers(0, 4))
    def a_row_fails(self, slot: int) -> None:
        self.driver.worker.fail_slots.add(slot)

    # ---- images ---------------------------------------------------------------------------------

    @rule()
    def image_workers_begin(self) -> None:
        self.driver.take_image_jobs()

    @precondition(lambda self: self.driver.image_jobs)
    @rule(number=numbers, fails=st.sampled_from([False, False, False, True]))
    def an_image_worker_answers(self, number: int, fails: bool) -> None:
        busy = list(self.driver.image_jobs)
        self.driver.finish_image(busy[number % len(busy)], "it broke" if fails else "")

    @rule(number=st.integers(0, 1))
    def an_image_worker_dies(self, number: int) -> None:
        self.driver.kill_image_worker(number % self.driver.args.num_image_workers)

    # ---- the end --------------------------------------------------------------------------------

    def live(self) -> list[Request]:
        return [request for request in self.driver.requests.values() if request.live]

    def pick(self, number: int) -> Request:
        """One of the live requests."""
        live = self.live()
        return live[number % len(live)]

    def teardown(self) -> None:
        if not hasattr(self, "driver"):
            return
        if self.lost:
            # What the shell does when no step ends any more.
            self.driver.kill_worker()
        self.driver.worker.fail_slots.clear()
        self.driver.run()
        for request in self.driver.requests.values():
            assert request.refused is None and request.end is not None, request
            self.hold_against_reference(request)
        self.driver.hold_idle()
        assert self.driver.core.stats()["accepted"] == len(self.driver.requests)
        self.hold_the_charges()

    def hold_the_charges(self) -> None:
        """Each output is charged to somebody once, and no prompt token more often than once."""
        served = sum(told["served_tokens"] for told in self.driver.core.tenants().values())
        outputs = sum(len(request.tokens) for request in self.driver.requests.values())
        known = sum(len(r.whole_prompt) + len(r.resubmitted) for r in self.driver.requests.values())
        assert outputs <= served <= outputs + known

    def hold_against_reference(self, request: Request) -> None:
        end, alone = request.end, self.driver.expected(request)
        assert end is not None
        assert request.output == alone.tokens[: len(request.output)], request
        if end.detail.partition(":")[0] in NATURAL_RULES:
            assert (end.status, end.detail) == (alone.status, alone.detail), request
            assert request.output == alone.tokens, request
            if request.params.prompt_logprobs is not None and request.tokens:
                positions = sorted(request.prompt_logprobs)
                assert positions == list(range(1, len(request.prompt))), request
        if end.status == "FINISHED_VE_FAILED":
            assert request.pictures and not request.tokens, request
        if end.detail == "preempted":
            assert self.driver.args.stop_preempted_request
        if request.params.logprobs is not None:
            assert len(request.logprobs) == len(request.tokens), request


# 5,000 sequences of events, in parts. With a depth of 2, results are in flight while the next step
# is planned; a depth of 1 is there to show that the same promises hold without. Rows of three
# tokens stand for drafts.
PARTS = [(2, 1, 500)] * 5 + [(2, 3, 500)] * 4 + [(1, 1, 250), (1, 3, 250)]


@pytest.mark.slow
@pytest.mark.parametrize(("depth", "tokens_per_row", "sequences"), PARTS)
def test_every_request_ends_once_with_the_tokens_it_has_alone(
    depth: int, tokens_per_row: int, sequences: int
) -> None:
    machine = type("Machine", (CoreMachine,), {"depth": depth, "tokens_per_row": tokens_per_row})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=sequences,
            stateful_step_count=25,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            print_blob=True,
        ),
    )
