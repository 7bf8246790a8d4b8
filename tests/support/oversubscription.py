"""Requests that need more KV cache than there is, and what serving them costs.

A *mix* is a list of requests that arrive together. ``serve`` runs one on a core over the scripted
worker, holds every result against the request alone, and returns the cost. All mixes are for a
pool of ``POOL_TOKENS`` tokens.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass

from deepinfer.scheduler.sequence import Sequence
from deepinfer.wire.config import EngineArgs
from deepinfer.wire.params import SamplingParams
from support.core_driver import CoreDriver, Request
from support.scripted_grammar import VOCAB

BLOCK_SIZE = 16
NUM_BLOCKS = 64
POOL_TOKENS = BLOCK_SIZE * NUM_BLOCKS

Mix = list[tuple[list[int], int]]
"""Prompts with the number of tokens each answer has."""


def _prompt(pick: random.Random, length: int) -> list[int]:
    return [pick.randrange(4, VOCAB) for _ in range(length)]


def long_and_short(order: str, seed: int = 0) -> Mix:
    """Three prompts of 60 % of the pool each and five short ones.

    ``order``: which come first, ``long``, ``short`` or ``mixed``.
    """
    pick = random.Random(seed)
    longs = [(_prompt(pick, POOL_TOKENS * 6 // 10), pick.randrange(32, 129)) for _ in range(3)]
    shorts = [(_prompt(pick, pick.randrange(8, 65)), pick.randrange(32, 129)) for _ in range(5)]
    if order == "long":
        return longs + shorts
    if order == "short":
        return shorts + longs
    pairs = itertools.zip_longest(shorts, longs)
    return [request for pair in pairs for request in pair if request]


def random_mix(seed: int, oversubscription: float = 3.0) -> Mix:
    """Requests whose final lengths add up to that many pools.

    The seed also chooses the kind of traffic: long answers, long prompts, or both at random; and
    whether prompts share a beginning.
    """
    pick = random.Random(seed)
    prompts, answers = [((1, 32), (64, 257)), ((64, 257), (8, 65)), ((1, 257), (1, 257))][seed % 3]
    stem = _prompt(pick, 48) if seed % 2 else []
    mix: Mix = []
    wanted = oversubscription * POOL_TOKENS
    while wanted > 0:
        own = _prompt(pick, pick.randrange(*prompts))
        mix.append((stem + own if len(own) > 48 else own, pick.randrange(*answers)))
        wanted -= len(mix[-1][0]) + mix[-1][1]
    return mix


NAMED_MIXES = {
    **{f"long-and-short, {o} first": long_and_short(o) for o in ("long", "short", "mixed")},
    **{f"random {seed:2}": random_mix(seed) for seed in range(20)},
}


@dataclass(frozen=True)
class Cost:
    """What it took to serve a mix."""

    requests: int
    steps: int
    preemptions: int
    """Of either policy."""
    stopped: int
    """Requests that the stop policy ended."""
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    recomputed_tokens: int

    @property
    def recomputed_share(self) -> float:
        """Recomputed tokens per useful one: a token that a client got. Prompts do not count."""
        return self.recomputed_tokens / self.output_tokens


def serve(mix: Mix, *, stop: bool, cache: bool, overlap: bool = True) -> Cost:
    """Serve a mix; ``AssertionError`` when a result is wrong or the oldest is a victim."""
    args = EngineArgs(
        max_num_seqs=64,
        max_num_batched_tokens=256,
        block_size=BLOCK_SIZE,
        max_model_len=POOL_TOKENS,
        stop_preempted_request=stop,
        enable_prefix_caching=cache,
        async_scheduling=overlap,
    )
    engine = CoreDriver(args, NUM_BLOCKS)
    victims = _watch_victims(engine)
    requests = [
        engine.add(
            prompt,
            SamplingParams(seed=0, temperature=0.0, ignore_eos=True, max_tokens=count),
        )
        for prompt, count in mix
    ]
    engine.run(20_000)
    for request in requests:
        _hold(engine, request, stop)
    engine.hold_idle()
    stats = engine.core.stats()
    return Cost(
        requests=len(mix),
        steps=int(stats["steps_done"]),
        preemptions=len(victims),
        stopped=int(stats["ended_preempted"]),
        prompt_tokens=sum(len(prompt) for prompt, _ in mix),
        output_tokens=int(stats["output_tokens"]),
        cached_tokens=int(stats["cached_tokens"]),
        recomputed_tokens=int(stats["recomputed_tokens"]),
    )


def _hold(engine: CoreDriver, request: Request, stop: bool) -> None:
    assert request.end is not None, f"{request.request_id} has no end"
    if stop and request.end.detail == "preempted":
        assert request.output == engine.expected(request).tokens[: len(request.output)]
    else:
        engine.hold_alone(request)


def _watch_victims(engine: CoreDriver) -> list[str]:
    """Return a list that fills with the ids of those who are preempted; never the oldest."""
    life = engine.core._life
    preempt = life.preempt
    victims: list[str] = []

    def watched(victim: Sequence, *args: object, **fields: object) -> None:
        holders = [seq for seq in life.table.bound() if life.table.held[seq.slot]]
        oldest = min(holders, key=lambda seq: seq.arrival_number)
        assert victim is not oldest, f"{victim.request_id} is the oldest and was preempted"
        victims.append(victim.request_id)
        preempt(victim, *args, **fields)  # type: ignore[arg-type]

    life.preempt = watched  # type: ignore[method-assign]
    return victims
