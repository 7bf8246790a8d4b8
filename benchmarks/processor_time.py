"""What a token costs besides the forward pass: processor time by process and thread.

    python benchmarks/processor_time.py [--model smollm2-135m] [--quantization int4] [--streams 1]
    python benchmarks/processor_time.py --scripted --streams 1,64,500

One JSON line for each number of streams and each front: ``async`` streams with ``AsyncEngine`` on
asyncio, as a gateway does, ``plain`` with ``LLMEngine``. ``us_per_token`` holds microseconds of
processor time by process and thread (``io`` are the threads of ZeroMQ) and ``switches_per_token``
how often the thread was waited for and went to sleep, from ``/proc/PID/task/TID``. With
``--scripted`` an instant model answers in the real processes, so nearly all of the worker's time is
not an engine's; without it the worker's main thread is the forward pass.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import psutil
import uvloop
from workloads import Workload, single

from deepinfer import AsyncEngine, EngineArgs, LLMEngine, SamplingParams

TESTS = str(Path(__file__).parent.parent / "tests")
Usage = tuple[Counter[str], Counter[str]]


def usage() -> Usage:
    """Return nanoseconds of processor time and voluntary switches so far, by process and thread."""
    nanoseconds: Counter[str] = Counter()
    switches: Counter[str] = Counter()
    me = psutil.Process()
    for process in [me, *me.children(recursive=True)]:
        words = " ".join(process.cmdline())
        name = "scheduler" if ".scheduler" in words else "worker"
        name = "frontend" if process == me else name
        for task in Path(f"/proc/{process.pid}/task").iterdir():
            comm = (task / "comm").read_text()
            thread = "main" if int(task.name) == process.pid else "others"
            key = f"{name} {'io' if comm.startswith('ZMQ') else thread}"
            nanoseconds[key] += int((task / "schedstat").read_text().split()[0])
            status = (task / "status").read_text()
            switches[key] += int(status.split("\nvoluntary_ctxt_switches:")[1].split()[0])
    return nanoseconds, switches


def report(front: str, streams: int, tokens: int, seconds: float, before: Usage) -> None:
    after = usage()
    time_used, switches = (a - b for a, b in zip(after, before, strict=True))
    line = {
        "front": front,
        "streams": streams,
        "tok_s": round(tokens / seconds, 1),
        "us_per_token": {name: round(ns / tokens / 1e3, 1) for name, ns in time_used.items()},
        "switches_per_token": {name: round(n / tokens, 2) for name, n in switches.items()},
    }
    print(json.dumps(line), flush=True)


def measure_plain(args: EngineArgs, workload: Workload, warm: int) -> None:
    with LLMEngine(args) as engine:
        for count in (warm, 0):
            before, start, tokens = usage(), time.perf_counter(), 0
            for i, (prompt, out) in enumerate(workload):
                params = SamplingParams(temperature=0, max_tokens=count or out, ignore_eos=True)
                engine.add_request(str(i), prompt, params)
            while engine.has_unfinished_requests():
                tokens += len(engine.step())
        report("plain", len(workload), tokens, time.perf_counter() - start, before)


async def measure_async(args: EngineArgs, workload: Workload, warm: int) -> None:
    async def one(prompt: list[int], out: int) -> int:
        params = SamplingParams(temperature=0, max_tokens=out, ignore_eos=True)
        tokens = 0
        async for _ in engine.generate(prompt, params):
            tokens += 1
        return tokens

    async with AsyncEngine(args) as engine:
        for count in (warm, 0):
            before, start = usage(), time.perf_counter()
            tokens = sum(await asyncio.gather(*(one(p, count or out) for p, out in workload)))
        report("async", len(workload), tokens, time.perf_counter() - start, before)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--quantization", default="none")
    parser.add_argument("--scripted", action="store_true")
    parser.add_argument("--streams", default="1")
    parser.add_argument("--front", default="async,plain")
    parser.add_argument("--out", type=int, default=None)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        fields: dict[str, object] = {"quantization": arguments.quantization}
        model = arguments.model
        if arguments.scripted:
            sys.path.append(TESTS)
            os.environ["PYTHONPATH"] = os.pathsep.join([TESTS, os.environ.get("PYTHONPATH", "")])
            from support.scripted_engine import ScriptedFolder

            model = str(ScriptedFolder(Path(folder)).path)
            fields["worker_module"] = "support.scripted_worker"
        for streams in map(int, arguments.streams.split(",")):
            out = arguments.out or (512 if streams == 1 else 64)
            prompt = [token % 250 for token in single(16)[0][0]]
            workload = [([i % 250, *prompt[1:]], out) for i in range(streams)]
            args = EngineArgs(
                model=model,
                enable_prefix_caching=False,
                max_num_seqs=streams,
                max_num_batched_tokens=max(2048, streams),
                **fields,
            )
            if "async" in arguments.front:
                uvloop.run(measure_async(args, workload, warm=16))
            if "plain" in arguments.front:
                measure_plain(args, workload, warm=16)


if __name__ == "__main__":
    main()
