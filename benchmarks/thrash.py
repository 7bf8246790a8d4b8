"""What a KV cache that is far too small costs: tokens computed again because of preemption.

    PYTHONPATH=tests python benchmarks/thrash.py [--cache on,off] [--policy recompute,stop]

The core alone, with the scripted worker of the tests, on the mixes of
``tests/support/oversubscription.py``: three prompts of 60 % of the pool each beside five short
ones, and twenty random mixes that need three times the pool. Every result is checked against the
request alone, and so is that the oldest is never preempted. Prints one table for each setting;
``again/token`` is recomputed tokens per output token.
"""

from __future__ import annotations

import argparse

from support.oversubscription import NAMED_MIXES, Cost, serve

COLUMNS = ("requests", "steps", "preempted", "stopped", "prompt", "output", "cached", "again")


def row(name: str, cost: Cost) -> str:
    numbers = (
        cost.requests,
        cost.steps,
        cost.preemptions,
        cost.stopped,
        cost.prompt_tokens,
        cost.output_tokens,
        cost.cached_tokens,
        cost.recomputed_tokens,
    )
    return f"{name:28}" + "".join(f"{number:10}" for number in numbers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cache", default="on,off", help="prefix cache: on, off or both")
    parser.add_argument("--policy", default="recompute,stop")
    options = parser.parse_args()
    for policy in options.policy.split(","):
        for cache in options.cache.split(","):
            print(f"\npolicy {policy}, prefix cache {cache}")
            print(f"{'mix':28}" + "".join(f"{name:>10}" for name in COLUMNS) + "   again/token")
            worst = 0.0
            for name, mix in NAMED_MIXES.items():
                cost = serve(mix, stop=policy == "stop", cache=cache == "on")
                worst = max(worst, cost.recomputed_share)
                print(row(name, cost) + f"{cost.recomputed_share:14.3f}", flush=True)
            print(f"worst again/token: {worst:.3f}")


if __name__ == "__main__":
    main()
