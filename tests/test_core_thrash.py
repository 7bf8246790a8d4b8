"""A pool far too small for its requests: all finish, and little is computed twice."""

from __future__ import annotations

import pytest

from support.oversubscription import NAMED_MIXES, POOL_TOKENS, random_mix, serve

MOST_RECOMPUTED = 0.5
"""Recomputed tokens for each token that a client got."""

LONG = [name for name in NAMED_MIXES if name.startswith("long")]
RANDOM = [name for name in NAMED_MIXES if name.startswith("random")]


def test_the_mixes_are_what_they_are_called() -> None:
    for name in LONG:
        lengths = [len(prompt) / POOL_TOKENS for prompt, _ in NAMED_MIXES[name]]
        assert sorted(share > 0.59 for share in lengths) == [False] * 5 + [True] * 3
    assert len(RANDOM) == 20
    for name in RANDOM:
        wanted = sum(len(prompt) + count for prompt, count in NAMED_MIXES[name])
        assert 3.0 <= wanted / POOL_TOKENS < 3.6
        assert all(len(prompt) + count < POOL_TOKENS for prompt, count in NAMED_MIXES[name])
    assert random_mix(4) == random_mix(4) != random_mix(7)


@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("stop", [True, False])
@pytest.mark.parametrize("name", LONG)
@pytest.mark.parametrize("overlap", [True, False])
def test_long_prompts_and_short_ones_all_finish(
    overlap: bool, name: str, stop: bool, cache: bool
) -> None:
    cost = serve(NAMED_MIXES[name], stop=stop, cache=cache, overlap=overlap)
    assert cost.recomputed_share < MOST_RECOMPUTED
    assert stop or not cost.stopped


@pytest.mark.slow
@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("stop", [True, False])
def test_random_mixes_three_times_too_large_all_finish(stop: bool, cache: bool) -> None:
    costs = [serve(NAMED_MIXES[name], stop=stop, cache=cache) for name in RANDOM]
    assert sum(cost.preemptions for cost in costs) > 20, "the pool is too large for this test"
    assert max(cost.recomputed_share for cost in costs) < MOST_RECOMPUTED
    assert stop or not any(cost.stopped for cost in costs)
