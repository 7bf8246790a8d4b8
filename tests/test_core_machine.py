"""Whatever happens in whatever order: every request ends once, with the tokens it has when alone.

A hypothesis state machine drives the core through arrivals, aborts, deaths, and results that come
late, in the wrong order, twice or never. The core checks its own invariants after every event, the
worker in ``core_driver`` refuses plans that cannot be executed, and at the end the engine must be
empty and every output equal to (or, when it was cut short, a beginning of) the reference.
"""

from __future__ import annotations

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
from support.core_driver import VOCAB, CoreDriver, Request

CLIENTS = (b"alice", b"bob")
NATURAL_RULES = {"eos", "stop_token", "max_tokens", "max_model_len", "kv_capacity"}

# Prompts share beginnings, so that blocks are shared, and have every length around block borders.
prompts = st.builds(
    lambda stem, length, tail: ([stem] * 40)[:length] + tail,
    st.integers(4, 6),
    st.integers(0, 24),
    st.lists(st.integers(4, VOCAB - 1), min_size=1, max_size=4),
)


@st.composite
def sampling(draw: st.DrawFn) -> SamplingParams:
    max_tokens = draw(st.integers(1, 24))
    return SamplingParams(
        seed=0,
        temperature=0.0,
        max_tokens=max_tokens,
        min_tokens=draw(st.integers(0, min(4, max_tokens))),
        ignore_eos=draw(st.booleans()),
        stop_token_ids=draw(st.sampled_from([None, None, [9, 11]])),
        logprobs=draw(st.sampled_from([None, None, 0])),
        prompt_logprobs=draw(st.sampled_from([None, None, 0])),
    )


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
        policy=st.sampled_from(["fcfs", "priority"]),
        stop=st.booleans(),
        cache=st.booleans(),
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
        )
        # With small blocks a pool of as many would hold next to nothing.
        scale = max(1, 8 // block_size)
        self.driver = CoreDriver(args, blocks * scale, self.tokens_per_row)
        self.lost = False

    # ---- clients --------------------------------------------------------------------------------

    @rule(
        client=st.sampled_from(CLIENTS),
        prompt=prompts,
        params=sampling(),
        priority=st.integers(0, 3),
        timeout_ms=st.sampled_from([None, None, None, 5000.0]),
        salt=st.sampled_from(["", "", "tenant"]),
    )
    def add(
        self,
        client: bytes,
        prompt: list[int],
        params: SamplingParams,
        priority: int,
        timeout_ms: float | None,
        salt: str,
    ) -> None:
        self.driver.add(
            prompt, params, client=client, priority=priority, timeout_ms=timeout_ms, salt=salt
        )

    @rule(prompt=prompts, params=sampling(), part=st.floats(0, 1))
    def resubmit(self, prompt: list[int], params: SamplingParams, part: float) -> None:
        alone = self.driver.expected(Request(b"", 0, "", prompt, params)).tokens
        self.driver.add(prompt, params, output=alone[: round(part * len(alone))])

    @rule(prompt=prompts, params=sampling())
    def abort_before_add(self, prompt: list[int], params: SamplingParams) -> None:
        key = len(self.driver.requests) + 1
        self.driver.abort(Request(b"c", key, "", prompt, params))
        request = self.driver.add(prompt, params, key=key)
        assert request.end is not None and request.end.detail == "client_abort"

    @precondition(lambda self: self.live())
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.live()), label="request")
        self.driver.abort(request)
        assert request.end is not None and request.end.status == "FINISHED_ABORTED"

    @precondition(lambda self: self.live())
    @rule(data=st.data(), back=st.integers(0, 2))
    def stop_string(self, data: st.DataObject, back: int) -> None:
        request = data.draw(st.sampled_from(self.live()), label="request")
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
    @rule(data=st.data())
    def deliver_again(self, data: st.DataObject) -> None:
        result = data.draw(st.sampled_from(self.driver.delivered[-4:]), label="result")
        self.driver.core.step_result(result, self.driver.now)
        self.driver.collect()

    @precondition(lambda self: self.driver.results)
    @rule()
    def lose_a_result(self) -> None:
        del self.driver.results[0]
        self.lost = True

    @rule()
    def worker_dies(self) -> None:
        self.driver.kill_worker()
        self.lost = False

    @rule(slot=st.integers(0, 4))
    def a_row_fails(self, slot: int) -> None:
        self.driver.worker.fail_slots.add(slot)

    # ---- the end --------------------------------------------------------------------------------

    def live(self) -> list[Request]:
        return [request for request in self.driver.requests.values() if request.live]

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
        stats = self.driver.core.stats()
        assert stats["live"] == stats["waiting"] == stats["running"] == stats["in_flight"] == 0
        assert stats["blocks_free"] + stats["blocks_cached"] == self.driver.num_blocks
        assert stats["accepted"] == len(self.driver.requests)
        ended = sum(count for name, count in stats.items() if name.startswith("ended_"))
        assert ended == stats["accepted"]

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
        if end.detail == "preempted":
            assert self.driver.args.stop_preempted_request
        if request.params.logprobs is not None:
            assert len(request.logprobs) == len(request.tokens), request


@pytest.mark.slow
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("tokens_per_row", [1, 3])
def test_every_request_ends_once_with_the_tokens_it_has_alone(
    depth: int, tokens_per_row: int
) -> None:
    machine = type("Machine", (CoreMachine,), {"depth": depth, "tokens_per_row": tokens_per_row})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=500,
            stateful_step_count=30,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            print_blob=True,
        ),
    )
