"""When a request ends: the limits, the stop rules and their order, and every path in the table."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from deepinfer.scheduler.ends import Ending
from deepinfer.scheduler.lifecycle_doc import endings_table, state_diagram
from deepinfer.scheduler.sequence import TRANSITIONS, InvalidTransition, Status
from deepinfer.wire.config import EngineArgs
from deepinfer.wire.params import SamplingParams
from support.core_driver import EOS, CoreDriver, Request, reference
from support.scripted_images import PLACEHOLDER

DETAIL_RULES = {
    "image",
    "eos",
    "stop_token",
    "stop_string",
    "max_tokens",
    "max_model_len",
    "kv_capacity",
    "client_abort",
    "disconnect",
    "slow_reader",
    "deadline",
    "shutdown",
    "preempted",
    "worker_failed",
    "row_failed",
}


def greedy(max_tokens: int, **fields: object) -> SamplingParams:
    return SamplingParams(seed=0, temperature=0.0, max_tokens=max_tokens, **fields)  # type: ignore[arg-type]


def driver(num_blocks: int = 32, **fields: object) -> CoreDriver:
    values: dict[str, object] = {
        "max_num_seqs": 4,
        "max_num_batched_tokens": 16,
        "block_size": 4,
        "max_model_len": 48,
    }
    return CoreDriver(EngineArgs(**(values | fields)), num_blocks)  # type: ignore[arg-type]


def prompt_saying(want: Callable[[list[int]], bool], length: int = 5) -> list[int]:
    """Return a prompt whose continuation (without stops) satisfies ``want``."""
    for seed in range(20_000):
        prompt = [4 + (seed // 36**i) % 36 for i in range(length)]
        said = reference(prompt, greedy(12, ignore_eos=True), 48, 10_000).tokens
        if want(said):
            return prompt
    raise AssertionError("no such prompt")


@pytest.mark.parametrize("chunk", [4, 16])
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("tokens_per_row", [1, 4])
@pytest.mark.parametrize("max_tokens", [10, 100])
def test_prompt_and_output_never_pass_the_length_limit(
    chunk: int, overlap: bool, tokens_per_row: int, max_tokens: int
) -> None:
    args = EngineArgs(
        max_model_len=16,
        block_size=4,
        max_num_seqs=4,
        max_num_batched_tokens=max(chunk, tokens_per_row),
        async_scheduling=overlap,
    )
    engine = CoreDriver(args, 16, tokens_per_row)
    for length in range(12, 18):
        request = engine.add([7] * length, greedy(max_tokens, ignore_eos=True))
        engine.run()
        engine.hold_alone(request)
        assert request.end is not None
        expected = {16: 1, 17: 0}.get(length, min(max_tokens, 16 - length))
        assert request.end.num_output_tokens == expected
        assert length + expected <= max(16, length + (length == 16))


def test_a_prompt_of_the_whole_cache_yields_one_token_and_a_longer_one_is_ignored() -> None:
    engine = driver(num_blocks=3)
    full, over = engine.add([7] * 12, greedy(5)), engine.add([7] * 13, greedy(5))
    almost = engine.add([7] * 10, greedy(5, ignore_eos=True))
    engine.run()
    assert full.end is not None and over.end is not None and almost.end is not None
    assert (full.end.detail, len(full.tokens)) == ("kv_capacity", 1)
    assert (over.end.status, over.end.detail) == ("FINISHED_IGNORED", "kv_capacity")
    assert over.end.reason == "prompt_length_exceeded" and over.tokens == []
    assert (almost.end.detail, len(almost.tokens)) == ("kv_capacity", 2)


def test_eos_as_the_last_token_allowed_ends_as_stopped() -> None:
    prompt = prompt_saying(lambda said: said[2] == EOS and EOS not in said[:2])
    for params in (greedy(3), greedy(3, stop_token_ids=[EOS])):
        engine = driver()
        request = engine.add(prompt, params)
        engine.run()
        assert request.end is not None
        assert (request.end.status, request.end.detail) == ("FINISHED_STOPPED", "eos")
    at_limit = driver(max_model_len=len(prompt) + 3)
    request = at_limit.add(prompt, greedy(3))
    at_limit.run()
    assert request.end is not None and request.end.detail == "eos"


def test_the_length_limit_is_named_before_max_tokens() -> None:
    engine = driver(max_model_len=8)
    request = engine.add([7] * 5, greedy(3, ignore_eos=True))
    engine.run()
    assert request.end is not None and request.end.detail == "max_model_len"


def test_ignore_eos_does_not_ignore_the_same_id_as_a_stop_token() -> None:
    prompt = prompt_saying(lambda said: said[1] == EOS and said[0] != EOS)
    engine = driver()
    ignored = engine.add(prompt, greedy(6, ignore_eos=True))
    named = engine.add(prompt, greedy(6, ignore_eos=True, stop_token_ids=[EOS]))
    engine.run()
    assert ignored.end is not None and ignored.end.detail == "max_tokens"
    assert named.end is not None and named.end.detail == f"stop_token:{EOS}"
    assert named.end.last_token_id == EOS and len(named.tokens) == 2


@pytest.mark.parametrize("tokens_per_row", [1, 3])
def test_no_stop_rule_fires_before_min_tokens(tokens_per_row: int) -> None:
    prompt = prompt_saying(lambda said: said[1] == EOS and EOS in said[4:9])
    args = EngineArgs(max_num_seqs=2, max_num_batched_tokens=16, block_size=4, max_model_len=48)
    engine = CoreDriver(args, 32, tokens_per_row)
    request = engine.add(prompt, greedy(12, min_tokens=5))
    stops = engine.add(prompt, greedy(12, min_tokens=5, stop_token_ids=[EOS], ignore_eos=True))
    engine.run()
    for each in (request, stops):
        engine.hold_alone(each)
        assert len(each.tokens) >= 5


@pytest.mark.parametrize("given", [0, 1, 3, 6])
def test_a_resubmitted_request_continues_after_what_was_delivered(given: int) -> None:
    engine = driver()
    params = greedy(6, ignore_eos=True, min_tokens=2)
    alone = reference([9, 8, 7], params, 48, 1000).tokens
    request = engine.add([9, 8, 7], params, output=alone[:given])
    if given == 6:
        assert request.end is not None, "nothing was left to do, so it ends at once"
    engine.run()
    engine.hold_alone(request)
    assert request.tokens == alone[given:]
    assert request.end is not None and request.end.num_output_tokens == 6


# ---- every ending -------------------------------------------------------------------------------


def _run_one(params: SamplingParams, prompt: list[int] | None = None, **fields: object) -> Request:
    engine = driver(**fields)  # type: ignore[arg-type]
    request = engine.add(prompt or [7] * 5, params)
    engine.run()
    return request


def _disturbed(disturb: Callable[[CoreDriver, Request], None]) -> Request:
    engine = driver()
    request = engine.add([7] * 5, greedy(30, ignore_eos=True), timeout_ms=1000.0)
    engine.step()
    engine.step()
    disturb(engine, request)
    engine.run()
    return request


def _deadline(engine: CoreDriver, _: Request) -> None:
    assert engine.core.next_deadline() == 1.0
    engine.now = 1.0
    engine.core.tick(engine.now)
    engine.collect()


def _row_fails(engine: CoreDriver, _: Request) -> None:
    engine.worker.fail_slots.add(0)


def _shutdown(engine: CoreDriver, _: Request) -> None:
    engine.core.shutdown(engine.now)
    engine.collect()


def _down(engine: CoreDriver, _: Request) -> None:
    engine.core.worker_gone(engine.now, "killed")
    engine.core.engine_down(engine.now, "three deaths in a minute")
    engine.collect()


def _preempted() -> Request:
    engine = driver(num_blocks=20)
    # Each grows to 12 blocks in the end, and all begin together.
    older, _, request = (engine.add([7 + i] * 5, greedy(43, ignore_eos=True)) for i in range(3))
    engine.run()
    engine.hold_alone(older)
    return request


def _no_image() -> Request:
    engine = CoreDriver(EngineArgs(max_num_seqs=4, max_model_len=48), 32, arena_cells=16)
    request = engine.add([7, PLACEHOLDER], greedy(3), pictures=[b"no picture"])
    engine.run()
    return request


def _slow_reader(engine: CoreDriver, request: Request) -> None:
    engine.core.client_gone(request.client, "slow_reader", engine.now)
    engine.collect()


SCENARIOS: dict[Ending, Callable[[], Request]] = {
    Ending.EOS: lambda: _run_one(greedy(12), prompt_saying(lambda said: EOS in said)),
    Ending.STOP_TOKEN: lambda: _run_one(
        greedy(12, ignore_eos=True, stop_token_ids=list(range(1, 40)))
    ),
    Ending.STOP_STRING: lambda: _disturbed(lambda engine, r: engine.stop_matched(r, "END", 1)),
    Ending.MODEL_LENGTH: lambda: _run_one(greedy(100, ignore_eos=True)),
    Ending.CACHE_LENGTH: lambda: _run_one(greedy(100, ignore_eos=True), num_blocks=5),
    Ending.MAX_TOKENS: lambda: _run_one(greedy(3, ignore_eos=True)),
    Ending.CLIENT_ABORT: lambda: _disturbed(lambda engine, r: engine.abort(r)),
    Ending.DISCONNECT: lambda: _disturbed(lambda engine, r: engine.abort(r, "disconnect")),
    Ending.SLOW_READER: lambda: _disturbed(_slow_reader),
    Ending.DEADLINE: lambda: _disturbed(_deadline),
    Ending.SHUTDOWN: lambda: _disturbed(_shutdown),
    Ending.WORKER_FAILED: lambda: _disturbed(_down),
    Ending.ROW_FAILED: lambda: _disturbed(_row_fails),
    Ending.PREEMPTED: _preempted,
    Ending.PROMPT_OVER_MODEL: lambda: _run_one(greedy(3), [7] * 49),
    Ending.PROMPT_OVER_CACHE: lambda: _run_one(greedy(3), [7] * 13, num_blocks=3),
    Ending.IMAGE_FAILED: _no_image,
}


@pytest.mark.parametrize("ending", Ending, ids=lambda ending: ending.name)
def test_every_path_of_the_table_can_be_taken_and_ends_as_the_table_says(ending: Ending) -> None:
    request = SCENARIOS[ending]()
    assert request.end is not None
    assert request.end.status == ending.status.name
    assert request.end.reason == ending.status.reason
    assert request.end.detail.partition(":")[0] == ending.rule


def test_the_rules_are_a_closed_vocabulary_and_every_status_but_one_has_a_path() -> None:
    assert {ending.rule for ending in Ending} == DETAIL_RULES
    unused = {status for status in Status if status.finished} - {e.status for e in Ending}
    # Grammars are not served yet.
    assert unused == {Status.FINISHED_SO_FAILED}


def test_the_documents_name_every_move_and_every_ending() -> None:
    diagram, table = state_diagram(), endings_table()
    for status, targets in TRANSITIONS.items():
        for target in targets:
            assert f"    {status.name} --> {target.name}\n" in diagram
    moves = sum(len(targets) for targets in TRANSITIONS.values())
    final = sum(status.finished for status in Status)
    assert diagram.count("-->") == 1 + moves + final
    for ending in Ending:
        assert f"| {ending.name} | {ending.status.name} |" in table


def test_a_move_against_the_table_raises_with_the_story() -> None:
    engine = driver()
    request = engine.add([7] * 5, greedy(3))
    sequence = engine.core._life.clients.find(request.client, request.key)
    assert sequence is not None
    for status in Status:
        for target in Status:
            sequence.status = status
            if target in TRANSITIONS[status]:
                sequence.move(target)
                assert sequence.status is target
            else:
                with pytest.raises(InvalidTransition, match="r1.*arrived"):
                    sequence.move(target)
