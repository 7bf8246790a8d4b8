"""PRE-03: a grammar's matcher is given every real token once, in order, and nothing else.

Two matchers follow each request: the worker's, rebuilt from the outputs whenever a row is
admitted, chooses the tokens; the client's is given what the core sends. Both raise for a token
that is void, comes twice or out of order, or breaks the grammar (``support.scripted_grammar``).
"""

from __future__ import annotations

import itertools
from functools import cache

import pytest

from deepinfer.scheduler import lifecycle
from deepinfer.wire.params import SamplingParams
from support.core_driver import CoreDriver, Request, recomputing_driver, reference
from support.scripted_grammar import ATOMS, CLOSES, EOS, GRAMMAR, OPENS, BracketMatcher

PARAMS = SamplingParams(seed=0, temperature=0.0, max_tokens=40)


@cache
def prompts_that_end(shortest: int, count: int) -> list[list[int]]:
    """Prompts whose answers close all their brackets after so many tokens or more."""
    found: list[list[int]] = []
    for tail in itertools.product(range(4, 40), repeat=3):
        prompt = [GRAMMAR, *tail]
        said = reference(prompt, PARAMS, max_model_len=64, cache_tokens=64)
        if said.detail == "eos" and len(said.tokens) >= shortest:
            found.append(prompt)
            if len(found) == count:
                break
    return found


def hold_grammar(engine: CoreDriver, request: Request) -> None:
    """The request ended as it does alone, and its text is a whole sentence of the grammar."""
    engine.hold_alone(request)
    judge = BracketMatcher()
    for position, token in enumerate(request.output):
        judge.accept(position, token)
    assert judge.done and request.matcher is not None and request.matcher.done
    engine.hold_idle()


@pytest.mark.parametrize("tokens_per_row", [1, 4])
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("caching", [True, False])
def test_a_matcher_agrees_with_the_tokens_wherever_its_request_is_evicted(
    caching: bool, overlap: bool, tokens_per_row: int
) -> None:
    """PRE-03, evicted at every output position."""
    fields = {"enable_prefix_caching": caching, "async_scheduling": overlap}
    evicted = 0
    for position in itertools.count():
        engine = recomputing_driver(tokens_per_row=tokens_per_row, **fields)
        request = engine.add(prompts_that_end(12, 1)[0], PARAMS)
        free = engine.add([5] * 9, PARAMS)
        for _ in range(position):
            engine.step()
        if request.end is not None:
            break
        engine.plan()  # so that a result is in flight, and with overlap two
        evicted += engine.evict(request)
        engine.run()
        hold_grammar(engine, request)
        engine.hold_alone(free)
    assert evicted >= 12 // tokens_per_row


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("how", ["evicted together", "the worker dies"])
def test_two_matchers_rebuilt_in_the_same_step_do_not_mix(how: str, overlap: bool) -> None:
    """PRE-03, two constrained requests at once."""
    for position in range(1, 12):
        engine = recomputing_driver(async_scheduling=overlap)
        requests = [engine.add(prompt, PARAMS) for prompt in prompts_that_end(14, 2)]
        for _ in range(position):
            engine.step()
        engine.plan()
        if how == "the worker dies":
            engine.kill_worker()
        else:
            assert all([engine.evict(request) for request in requests])
        engine.run()
        for request in requests:
            hold_grammar(engine, request)


@pytest.mark.parametrize("tokens_per_row", [1, 4])
@pytest.mark.parametrize("overlap", [True, False])
def test_matchers_survive_a_pool_that_holds_a_third_of_their_requests(
    overlap: bool, tokens_per_row: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PRE-03, evictions as the engine makes them."""
    # Requests so short would wait until all of them fit.
    monkeypatch.setattr(lifecycle, "HEADROOM", 0)
    engine = recomputing_driver(14, tokens_per_row, async_scheduling=overlap)
    requests = [engine.add(prompt, PARAMS) for prompt in prompts_that_end(12, 6)]
    engine.run()
    assert engine.core.stats()["preemptions"] > 0
    for request in requests:
        hold_grammar(engine, request)


SENTENCE = [OPENS[1], ATOMS[2], OPENS[3], CLOSES[3], CLOSES[1], EOS]


@pytest.mark.parametrize(
    "wrong",
    [
        [0, 1, 3, 4, 5],  # one is missing
        [0, 1, 2, 2, 3, 4, 5],  # one comes twice
        [0, 1, 2, 4, 3, 5],  # two are out of order
        [0, 1, 2, 3, 5],  # the end comes before the brackets are closed
    ],
)
@pytest.mark.parametrize("numbered", [True, False])
def test_the_matcher_notices_a_wrong_token(wrong: list[int], numbered: bool) -> None:
    right, other = BracketMatcher(), BracketMatcher()
    for position, token in enumerate(SENTENCE):
        right.accept(position, token)
    assert right.done
    with pytest.raises(AssertionError):
        for place, position in enumerate(wrong):
            # Also when the numbers hide it, what follows breaks the grammar sooner or later.
            other.accept(position if numbered else place, SENTENCE[position])
        assert other.done and other.num_accepted == len(SENTENCE)
