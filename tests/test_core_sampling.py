"""With overlap, evictions and deaths the sampler sees real tokens only: core and runner together.

The worker is the real runner, so penalties, bad words, seeds, bans up to ``min_tokens`` and log
probabilities are the sampler's own; the model is scripted. Each request must get exactly what it
gets alone without overlap, whatever happens to it between any two steps.
"""

from __future__ import annotations

import itertools

import pytest

from deepinfer.wire.config import EngineArgs
from deepinfer.wire.params import SamplingParams
from support.core_driver import CoreDriver, Request
from support.runner_worker import EOS, VOCAB, core_with_runner

PROMPT = [3, 4, 5]
PLAIN = SamplingParams(seed=0, temperature=0.0, max_tokens=24, ignore_eos=True)
NO_REPEATS = SamplingParams(
    seed=1, temperature=0.0, max_tokens=24, ignore_eos=True, repetition_penalty=100.0
)
# Whatever the model says first, it may not say next.
PAIRS = [[a, b] for a in range(1, 12) for b in range(20, 35)]
NO_PAIRS = SamplingParams(seed=2, max_tokens=24, ignore_eos=True, bad_words=PAIRS)
KINDS = [
    PLAIN,
    NO_REPEATS,
    NO_PAIRS,
    SamplingParams(seed=3, max_tokens=24, logprobs=2, ignore_eos=True),
    SamplingParams(seed=4, max_tokens=24, temperature=0.7, top_p=0.9, top_k=20, min_p=0.01),
    SamplingParams(seed=5, max_tokens=24, presence_penalty=1.5, frequency_penalty=0.7, logprobs=0),
    SamplingParams(seed=6, max_tokens=24, logit_bias={EOS: 100.0}, min_tokens=9),
    SamplingParams(seed=7, max_tokens=24, golden_token_ids=[9, 8, 7, 6], ignore_eos=True),
    SamplingParams(seed=8, max_tokens=24, prompt_logprobs=2, stop_token_ids=list(range(50, 60))),
]


def engine_with(num_blocks: int = 200, **fields: object) -> CoreDriver:
    values: dict[str, object] = {
        "max_num_seqs": 16,
        "max_num_batched_tokens": 64,
        "block_size": 4,
        "max_model_len": 64,
        "stop_preempted_request": False,
    }
    return core_with_runner(EngineArgs(**(values | fields)), num_blocks)  # type: ignore[arg-type]


def alone(prompt: list[int], params: SamplingParams) -> Request:
    """The request by itself: no overlap, no cache, the prompt in one piece."""
    engine = engine_with(async_scheduling=False, enable_prefix_caching=False)
    request = engine.add(prompt, params)
    engine.run()
    return request


def hold_alone(request: Request, expected: Request) -> None:
    assert request.end is not None and expected.end is not None
    assert request.tokens == expected.tokens
    assert request.end.detail == expected.end.detail
    assert request.logprobs == expected.logprobs
    assert request.prompt_logprobs == expected.prompt_logprobs


@pytest.fixture(scope="module")
def references() -> list[Request]:
    """Each kind of request alone; the prompts differ, so that rows are not the same by chance."""
    return [alone([*PROMPT, kind], params) for kind, params in enumerate(KINDS)]


@pytest.mark.parametrize("overlap", [True, False])
def test_penalties_and_bad_words_see_every_token_when_a_request_joins_late_and_is_evicted(
    overlap: bool,
) -> None:
    """PEN-01: B is evicted once, at every third of its positions, and never."""
    expected = [alone(PROMPT, params) for params in (PLAIN, NO_REPEATS, NO_PAIRS)]
    for position in range(0, 24, 3):
        engine = engine_with(async_scheduling=overlap)
        plain = engine.add(PROMPT, PLAIN)
        for _ in range(3):
            engine.step()
        assert plain.tokens, "A runs first"
        no_repeats, no_pairs = engine.add(PROMPT, NO_REPEATS), engine.add(PROMPT, NO_PAIRS)
        for _ in range(position):
            engine.step()
        if position:
            engine.plan()
            assert engine.evict(no_repeats)
        engine.run()
        for request, reference in zip((plain, no_repeats, no_pairs), expected, strict=True):
            hold_alone(request, reference)
        everything = PROMPT + no_repeats.tokens
        assert len(set(everything)) == len(everything)
        pairs = zip(no_pairs.tokens, no_pairs.tokens[1:], strict=False)
        assert not [pair for pair in pairs if list(pair) in PAIRS]
        engine.hold_idle()


def test_the_penalties_of_these_requests_matter() -> None:
    free = SamplingParams(seed=2, max_tokens=24, ignore_eos=True)
    assert alone(PROMPT, NO_PAIRS).tokens != alone(PROMPT, free).tokens
    assert alone(PROMPT, NO_REPEATS).tokens != alone(PROMPT, PLAIN).tokens


@pytest.mark.parametrize(
    ("overlap", "cache", "budget"), list(itertools.product([True, False], [True, False], [16, 64]))
)
def test_every_kind_of_request_gets_what_it_gets_alone_in_a_pool_too_small(
    references: list[Request], overlap: bool, cache: bool, budget: int
) -> None:
    """PRE-01 and PEN-01 with the real sampler: tokens, ends and log probabilities."""
    engine = engine_with(
        24, async_scheduling=overlap, enable_prefix_caching=cache, max_num_batched_tokens=budget
    )
    requests = [engine.add([*PROMPT, kind], params) for kind, params in enumerate(KINDS)]
    engine.run()
    assert engine.core.stats()["preemptions"] > 0
    for request, expected in zip(requests, references, strict=True):
        hold_alone(request, expected)
    engine.hold_idle()


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("how", ["evict", "kill"])
def test_every_kind_of_request_goes_on_exactly_wherever_it_is_interrupted(
    references: list[Request], how: str, overlap: bool
) -> None:
    """PRE-01, PEN-01 and LP-01: all are interrupted at once, early, late and in between."""
    for position in range(0, 24, 4):
        engine = engine_with(async_scheduling=overlap, max_num_batched_tokens=24)
        requests = [engine.add([*PROMPT, kind], params) for kind, params in enumerate(KINDS)]
        for _ in range(position):
            engine.step()
        engine.plan()
        if how == "kill":
            engine.kill_worker()
        else:
            for request in requests:
                engine.evict(request)
        engine.run()
        for request, expected in zip(requests, references, strict=True):
            hold_alone(request, expected)
        engine.hold_idle()


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("length", [15, 16, 17, 33])
def test_prompt_logprobs_are_whole_with_cache_chunks_overlap_and_evictions(
    length: int, overlap: bool
) -> None:
    """LP-01 with real log probabilities."""
    prompt = [1 + i * 7 % (VOCAB - 1) for i in range(length)]
    for count in (0, 1, 5):
        params = SamplingParams(seed=0, temperature=0.0, max_tokens=3, prompt_logprobs=count)
        expected = alone(prompt, params)
        assert sorted(expected.prompt_logprobs) == list(range(1, length))
        for budget, evict_after in itertools.product((8, 64), (0, 1, 2, 3)):
            engine = engine_with(
                async_scheduling=overlap, max_num_batched_tokens=budget, max_num_seqs=8
            )
            engine.add([*prompt[: length // 2], 9, 9, 9], PLAIN)
            engine.run()
            for _ in range(2):
                request = engine.add(prompt, params)
                for _ in range(evict_after):
                    engine.step()
                if evict_after:
                    engine.evict(request)
                engine.run()
                hold_alone(request, expected)
