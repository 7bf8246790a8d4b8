"""What overlap is worth: the worker's idle share between steps in steady decode, off and on.

    python benchmarks/overlap.py [--model smollm2-135m] [--reps 3]

One JSON line for each number of streams and each setting. ``idle_share`` is the time between the
end of one step's computation and the beginning of the next, over all time of the window in which
every stream decodes; ``step_ms`` the length of a step in it. Off and on take turns in one run.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics

from workloads import Workload, batch, single

from deepinfer import AsyncEngine, EngineArgs, SamplingParams


async def window(engine: AsyncEngine, workload: Workload, out: int) -> dict[str, float]:
    """Return how much the engine's counters grew while all streams decoded."""
    decoding = 0
    all_decode, one_ended = asyncio.Event(), asyncio.Event()

    async def stream(prompt: list[int]) -> None:
        nonlocal decoding
        params = SamplingParams(temperature=0, max_tokens=out, ignore_eos=True)
        async for output in engine.generate(prompt, params):
            if output.num_output_tokens == 2:
                decoding += 1
                if decoding == len(workload):
                    all_decode.set()
        one_ended.set()

    tasks = [asyncio.create_task(stream(prompt)) for prompt, _ in workload]
    await all_decode.wait()
    before = await engine.stats()
    await one_ended.wait()
    after = await engine.stats()
    await asyncio.gather(*tasks)
    return {name: after[name] - before[name] for name in after}


async def measure(model: str, reps: int) -> None:
    # Short prompts, so that no stream ends before the last one decodes.
    workloads = {1: (single(16), 128), 64: ([(prompt[:16], 0) for prompt, _ in batch()], 96)}
    for streams, (workload, out) in workloads.items():
        shares: dict[bool, list[float]] = {False: [], True: []}
        steps: dict[bool, list[float]] = {False: [], True: []}
        for _ in range(reps):
            for overlap in (False, True):
                args = EngineArgs(
                    model=model,
                    async_scheduling=overlap,
                    enable_prefix_caching=False,
                    max_num_seqs=64,
                )
                async with AsyncEngine(args) as engine:
                    grown = await window(engine, workload, out)
                wall = grown["worker_idle_s"] + grown["worker_busy_s"]
                shares[overlap].append(grown["worker_idle_s"] / wall)
                steps[overlap].append(1e3 * wall / grown["steps_planned"])
        for overlap in (False, True):
            line = {
                "streams": streams,
                "overlap": overlap,
                "reps": reps,
                "idle_share": round(statistics.median(shares[overlap]), 4),
                "idle_share_max": round(max(shares[overlap]), 4),
                "step_ms": round(statistics.median(steps[overlap]), 3),
            }
            print(json.dumps(line), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--reps", type=int, default=3)
    arguments = parser.parse_args()
    asyncio.run(measure(arguments.model, arguments.reps))


if __name__ == "__main__":
    main()
