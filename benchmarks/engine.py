"""Runs the workloads on a whole engine, all processes included; one JSON line for each.

    python benchmarks/engine.py [--model smollm2-135m] [--only BATCH64,SINGLE16] [--reps 3]

``out_tok_s`` is output tokens a second from the median of the repeats; ``ttft_ms_med`` the median
time to the first token over the requests; ``decode_ms_tok`` (one stream) the time after the first
token over the tokens after it; ``cached_share`` the prompt tokens found in the prefix cache over
all of a run (the repeats begin with what the run before left there); ``pss_mib`` the memory of all
processes, shared pages once.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import psutil
from workloads import WORKLOADS, Workload

from deepinfer import EngineArgs, LLMEngine, SamplingParams


def run(engine: LLMEngine, workload: Workload, name: str) -> tuple[float, list[float], float, int]:
    """Return the seconds of one run, each request's time to first token, that from the first token
    to the last, and how many prompt tokens came from the cache.
    """
    first: dict[str, float] = {}
    cached = 0
    start = time.perf_counter()
    for i, (prompt, out) in enumerate(workload):
        params = SamplingParams(temperature=0, max_tokens=out, ignore_eos=True)
        engine.add_request(f"{name}-{i}", prompt, params)
    tokens = 0
    while engine.has_unfinished_requests():
        for output in engine.step():
            tokens += 1
            first.setdefault(output.request_id, time.perf_counter() - start)
            cached += output.cached_tokens if output.finished else 0
    seconds = time.perf_counter() - start
    assert tokens == sum(out for _, out in workload), "every request yields all its tokens"
    return seconds, list(first.values()), seconds - min(first.values()), cached


def pss_mib() -> int:
    """Return the memory of this process and its children, MiB."""
    me = psutil.Process()
    processes = [me, *me.children(recursive=True)]
    return round(sum(p.memory_full_info().pss for p in processes) / 2**20)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--quantization", default="none")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--only", default=",".join(WORKLOADS))
    parser.add_argument("--reps", type=int, default=3)
    parser.add_argument("--sync", action="store_true", help="async_scheduling=False")
    parser.add_argument("--threads", type=int, default=None)
    arguments = parser.parse_args()

    setting = arguments.dtype if arguments.quantization == "none" else arguments.quantization
    if arguments.kv_cache_dtype != "auto":
        setting += f", {arguments.kv_cache_dtype} cache"
    if arguments.sync:
        setting += ", sync"

    start = time.perf_counter()
    engines: dict[bool, LLMEngine] = {}
    for name in arguments.only.split(","):
        workload = WORKLOADS[name]()
        caching = name.startswith("SHARED")
        if caching not in engines:
            for other in engines.values():
                other.close()
            start = time.perf_counter()
            args = EngineArgs(
                model=arguments.model,
                dtype=arguments.dtype,
                quantization=arguments.quantization,
                kv_cache_dtype=arguments.kv_cache_dtype,
                enable_prefix_caching=caching,
                async_scheduling=not arguments.sync,
                num_threads=arguments.threads,
                max_num_seqs=64,
                kv_cache_bytes=2 << 30,
            )
            engines = {caching: LLMEngine(args)}
            startup = time.perf_counter() - start
        engine = engines[caching]
        warm = [(prompt[:20] or [100], 4) for prompt, _ in workload[:2]]
        run(engine, warm, "warm")
        runs = [run(engine, workload, f"{name}-{rep}") for rep in range(arguments.reps)]
        seconds = statistics.median(r[0] for r in runs)
        out = sum(count for _, count in workload)
        prompts = sum(len(prompt) for prompt, _ in workload)
        line = {
            "engine": "deepinfer",
            "setting": setting,
            "workload": name,
            "reps": arguments.reps,
            "sec_min": round(min(r[0] for r in runs), 4),
            "sec_med": round(seconds, 4),
            "sec_max": round(max(r[0] for r in runs), 4),
            "prompt_tok": prompts,
            "cached_share": round(statistics.median(r[3] for r in runs) / prompts, 4),
            "out_tok": out,
            "out_tok_s": round(out / seconds, 2),
            "ttft_ms_med": round(1e3 * statistics.median(t for r in runs for t in r[1]), 2),
            "startup_s": round(startup, 2),
            "pss_mib": pss_mib(),
        }
        if len(workload) == 1 and out > 1:
            line["decode_ms_tok"] = round(
                1e3 * statistics.median(r[2] for r in runs) / (out - 1), 3
            )
        print(json.dumps(line), flush=True)
    for engine in engines.values():
        engine.close()


if __name__ == "__main__":
    main()
