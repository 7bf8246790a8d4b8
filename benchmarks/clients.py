"""What many streaming clients cost: BATCH64 by one app, and by 50 ZeroMQ clients on the same cores.

    python benchmarks/clients.py [--model smollm2-135m] [--clients 50] [--reps 3]

One JSON line. In the quiet run the app that embeds the engine streams all requests itself; in the
other one a second process with so many ``Client`` connections does, each with its share of the
requests. Both detokenise and read every output. They take turns in one engine; ``ratio`` is quiet
seconds over clients' seconds, of the medians.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

from workloads import Workload, batch

from deepinfer import AsyncEngine, Client, EngineArgs, SamplingParams


async def stream(source: AsyncEngine | Client, workload: Workload) -> None:
    """Stream the requests at once; each yields all its tokens."""

    async def one(prompt: list[int], out: int) -> None:
        params = SamplingParams(temperature=0, max_tokens=out, ignore_eos=True)
        tokens = 0
        async for output in source.generate(prompt, params):
            tokens = output.num_output_tokens
        assert tokens == out

    await asyncio.gather(*(one(prompt, out) for prompt, out in workload))


async def run_clients(endpoint: str, number: int) -> None:
    """Connect, say so, wait for a line, stream, and print the seconds that took."""
    clients = [Client(endpoint) for _ in range(number)]
    for client in clients:
        await client.__aenter__()
    print("connected", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    started = time.perf_counter()
    shares = [batch()[i::number] for i in range(number)]
    await asyncio.gather(*(stream(c, share) for c, share in zip(clients, shares, strict=True)))
    print(time.perf_counter() - started, flush=True)
    for client in clients:
        await client.__aexit__(None, None, None)


async def by_clients(endpoint: str, number: int) -> float:
    """Return the seconds that a process with so many clients took."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, __file__, "--clients", str(number), "--connect", endpoint,
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert process.stdin is not None and process.stdout is not None
    assert await process.stdout.readline() == b"connected\n"
    process.stdin.write(b"go\n")
    seconds = float(await process.stdout.readline())
    assert await process.wait() == 0
    return seconds


async def measure(model: str, number: int, reps: int) -> None:
    quiet, streamed = [], []
    with tempfile.TemporaryDirectory() as folder:
        endpoint = f"ipc://{Path(folder) / 'engine'}"
        args = EngineArgs(
            model=model, endpoint=endpoint, enable_prefix_caching=False, max_num_seqs=64
        )
        async with AsyncEngine(args) as engine:
            await stream(engine, batch())
            for _ in range(reps):
                started = time.perf_counter()
                await stream(engine, batch())
                quiet.append(time.perf_counter() - started)
                streamed.append(await by_clients(endpoint, number))
    result = {
        "clients": number,
        "quiet_s": [round(seconds, 2) for seconds in quiet],
        "clients_s": [round(seconds, 2) for seconds in streamed],
        "ratio": round(statistics.median(quiet) / statistics.median(streamed), 3),
    }
    print(json.dumps(result))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--reps", type=int, default=3)
    parser.add_argument("--connect", help="the endpoint of a running engine (used by itself)")
    args = parser.parse_args()
    if args.connect:
        asyncio.run(run_clients(args.connect, args.clients))
    else:
        asyncio.run(measure(args.model, args.clients, args.reps))


if __name__ == "__main__":
    main()
