"""What HTTP costs, and what a crowd of bad clients does to it, on the scripted model.

    python benchmarks/gateway.py [--only overhead,large,crowd] [--streams 1000] [--seconds 300]

- ``overhead``: output tokens per second through ``deepinfer serve`` and through ``Client`` at the
  same engine, in turns, each from a process of its own, and what a token costs each process.
- ``large``: /health while 20 MB chats and 200 prompts of medium length arrive.
- ``crowd``: so many streams at a time for so long; a quarter reads more slowly than it is
  answered, a quarter hangs up, and beside them 20 connections never finish their request. Every
  stream that ends is held to its reference, and at the end the processes must hold what they held.

/health is asked every 50 ms from a process of its own, each time over a new connection, from
before it connects until it has read all. How late the system lets that process go on after its
pauses is measured too (``late``): that much of the times is the machine's.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import resource
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
import conftest  # noqa: F401  (workers find ``support`` through it)
import crowd as crowds

from deepinfer import Client, SamplingParams
from support.scripted_engine import ScriptedFolder

HERE = Path(__file__).parent
UNFINISHED = 20
SLOW_MS = 200


def request(body: dict, path: str = "/v1/completions") -> bytes:
    content = json.dumps(body).encode()
    return (
        f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        f"connection: close\r\ncontent-length: {len(content)}\r\n\r\n"
    ).encode() + content


def prompt(number: int) -> list[int]:
    return [number % 190 + 5, number // 190 + 5, 7]


def ask(folder: ScriptedFolder, number: int, tokens: int) -> crowds.Ask:
    body = {
        "prompt": prompt(number), "max_tokens": tokens, "temperature": 0, "stream": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    text = folder.tokenizer.decode(folder.reference(prompt(number), tokens))
    return crowds.Ask(request(body).decode(), text, tokens)


class Server:
    """``deepinfer serve`` with an endpoint for ``Client`` as well."""

    def __init__(self, folder: ScriptedFolder, endpoint: str, *flags: str) -> None:
        self.folder, self.endpoint = folder, endpoint
        self._process = subprocess.Popen(
            [sys.executable, "-m", "deepinfer", "serve", "--model", str(folder.path),
             "--worker-module", "support.scripted_worker", "--port", "0",
             "--endpoint", endpoint, "--max-body-bytes", str(32 << 20), *flags],
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self._process.stdout is not None
        self.url = self._process.stdout.readline().split()[-1]
        host, port = self.url.removeprefix("http://").split(":")
        self.address = host, int(port)
        gateway = psutil.Process(self._process.pid)
        children = {child.cmdline()[-1].split(".")[-1]: child for child in gateway.children(True)}
        self.processes = {"gateway": gateway, **children}

    def held(self) -> dict[str, dict[str, int]]:
        """Memory in MB and descriptors of each process."""
        return {
            name: {"rss_mb": each.memory_info().rss >> 20, "descriptors": each.num_fds()}
            for name, each in self.processes.items()
        }

    def stop(self) -> None:
        """Let it finish what is open."""
        self._process.send_signal(signal.SIGTERM)
        self._process.wait()


@contextlib.contextmanager
def processor_time(processes: dict[str, psutil.Process]) -> Iterator[dict[str, float]]:
    """Seconds of each process's processor time, filled in at the end."""

    def spent() -> dict[str, float]:
        return {name: sum(each.cpu_times()[:2]) for name, each in processes.items()}

    seconds: dict[str, float] = {}
    before = spent()
    yield seconds
    seconds |= {name: now - before[name] for name, now in spent().items()}


async def in_process(*arguments: str, stdin: bytes = b"") -> bytes:
    """Run a script of this folder and return what it prints."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, *arguments, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    out, _ = await process.communicate(stdin)
    assert process.returncode == 0, arguments
    return out


async def run_crowd(plan: crowds.Plan) -> crowds.Result:
    out = await in_process(str(HERE / "crowd.py"), stdin=msgspec.json.encode(plan))
    return msgspec.json.decode(out, type=crowds.Result)


# ---- /health ------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def health(server: Server) -> AsyncIterator[dict[str, Any]]:
    """Poll /health from another process meanwhile; what it took is filled in at the end."""
    poller = await asyncio.create_subprocess_exec(
        sys.executable, __file__, "--poll", server.url, stdout=asyncio.subprocess.PIPE
    )
    assert poller.stdout is not None
    await poller.stdout.readline()
    times: dict[str, Any] = {}
    try:
        yield times
    finally:
        poller.terminate()
        found = json.loads(await poller.stdout.read())
        await poller.wait()
        begun = found["began"]
        slow = Counter(
            int(at - begun[0])
            for at, asked in zip(begun, found["asked"], strict=True)
            if asked > SLOW_MS
        )
        asked, late = sorted(found["asked"]), sorted(found["late"])
        times |= {
            "slow_in_seconds": ", ".join(f"{at}: {count}" for at, count in sorted(slow.items())),
            "polls": len(asked), "not_ok": found["not_ok"],
            "p50_ms": round(statistics.median(asked), 1),
            "p99_ms": round(asked[int(len(asked) * 0.99)], 1),
            "max_ms": round(asked[-1], 1),
            "late_p99_ms": round(late[int(len(late) * 0.99)], 1),
        }  # fmt: skip


def poll(url: str) -> None:
    """Ask for /health every 50 ms until SIGTERM, then print the milliseconds."""
    host, port = url.removeprefix("http://").split(":")
    over = False

    def stop(*_: object) -> None:
        nonlocal over
        over = True

    signal.signal(signal.SIGTERM, stop)
    begun: list[float] = []
    asked: list[float] = []
    late: list[float] = []
    not_ok = 0
    print("polling", flush=True)
    while not over:
        began = time.perf_counter()
        answer = b""
        with (
            contextlib.suppress(OSError),
            socket.create_connection((host, int(port)), timeout=30) as connection,
        ):
            connection.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
            while part := connection.recv(1 << 16):
                answer += part
        begun.append(began)
        asked.append((time.perf_counter() - began) * 1000)
        not_ok += not answer.startswith(b"HTTP/1.1 200 ")
        paused = time.perf_counter()
        time.sleep(0.05)
        late.append((time.perf_counter() - paused - 0.05) * 1000)
    found = {"began": begun, "asked": asked, "late": late, "not_ok": not_ok}
    print(json.dumps(found), flush=True)


# ---- the parts ----------------------------------------------------------------------------------


async def overhead(server: Server, reps: int, streams: int = 64, tokens: int = 200) -> None:
    rates: dict[str, list[float]] = {"http": [], "client": []}
    cost: dict[str, Counter[str]] = {"http": Counter(), "client": Counter()}
    for rep in range(reps + 1):
        asks = [ask(server.folder, rep * streams + i, tokens) for i in range(streams)]
        for kind in rates:
            with processor_time(server.processes) as spent:
                if kind == "http":
                    plan = crowds.Plan(*server.address, streams, {"reads": asks}, {"reads": 1.0},
                                       total=streams)  # fmt: skip
                    result = await run_crowd(plan)
                    assert result.ended == {"reads: right": streams}, result
                    seconds = result.seconds
                else:
                    out = await in_process(
                        __file__, "--client", json.dumps([server.endpoint, rep, streams, tokens])
                    )
                    seconds, own = json.loads(out)
            if rep:  # the first one warms up
                rates[kind].append(streams * tokens / seconds)
                cost[kind].update(spent)
                if kind == "client":
                    cost[kind]["client"] += own
    medians = {kind: round(statistics.median(found)) for kind, found in rates.items()}
    print(json.dumps({"overhead": {
        "streams": streams, "tokens_per_s": medians,
        "ratio": round(medians["http"] / medians["client"], 3),
        "ratios": [round(a / b, 2) for a, b in zip(*rates.values(), strict=True)],
        "us_per_token": {
            kind: {name: round(1e6 * seconds / (reps * streams * tokens), 1)
                   for name, seconds in sorted(found.items())}
            for kind, found in cost.items()
        },
    }}), flush=True)  # fmt: skip


async def client(endpoint: str, rep: int, streams: int, tokens: int) -> None:
    """Print the seconds that the streams of a repetition take, and their processor time."""

    async def one(number: int) -> None:
        params = SamplingParams(max_tokens=tokens, temperature=0)
        async for output in client.generate(prompt(number), params):
            last = output
        assert last.num_output_tokens == tokens

    async with Client(endpoint) as client:
        spent, began = time.process_time(), time.perf_counter()
        await asyncio.gather(*(one(rep * streams + i) for i in range(streams)))
        print(json.dumps([time.perf_counter() - began, time.process_time() - spent]))


async def large(server: Server) -> None:
    chat = {"messages": [{"role": "user", "content": "word " * (4 << 20)}]}
    requests = [request(chat, "/v1/chat/completions")] * 5
    requests += [request({"prompt": "ab " * 300, "max_tokens": 1})] * 200

    async def send(content: bytes) -> bytes:
        reader, writer = await asyncio.open_connection(*server.address)
        writer.write(content)
        status = (await reader.read()).split(b" ", 2)[1]
        writer.close()
        return status

    began = time.perf_counter()
    async with health(server) as times:
        statuses = Counter(await asyncio.gather(*map(send, requests)))
        seconds = time.perf_counter() - began
    counts = {status.decode(): count for status, count in statuses.items()}
    print(
        json.dumps({"large": {"seconds": round(seconds, 2), "statuses": counts, "health": times}}),
        flush=True,
    )


async def crowd(server: Server, streams: int, seconds: float) -> None:
    rng = random.Random(1)
    asks = {
        "reads": [ask(server.folder, i, rng.randrange(50, 250)) for i in range(64)],
        "slow": [ask(server.folder, 64 + i, 900) for i in range(16)],
        "hangs up": [ask(server.folder, 80 + i, 900) for i in range(16)],
    }
    plan = crowds.Plan(
        *server.address, streams, asks, {"reads": 0.5, "slow": 0.25, "hangs up": 0.25},
        seconds=seconds,
    )  # fmt: skip

    async def unfinished() -> None:
        while True:
            _, writer = await asyncio.open_connection(*server.address)
            try:
                for byte in asks["reads"][0].request[:100].encode():
                    writer.write(bytes([byte]))
                    await asyncio.sleep(0.1)
            finally:
                writer.transport.abort()

    async def look() -> None:
        while True:
            await asyncio.sleep(seconds / 5)
            meanwhile.append(server.held())

    meanwhile: list[dict[str, dict[str, int]]] = []
    async with Client(server.endpoint) as client:
        await run_crowd(msgspec.structs.replace(plan, seconds=1.0))  # what is loaded once, is
        before, before_stats = server.held(), await client.stats()
        others = [asyncio.ensure_future(unfinished()) for _ in range(UNFINISHED)]
        others.append(asyncio.ensure_future(look()))
        began = time.monotonic()
        with processor_time(server.processes) as spent:
            async with health(server) as times:
                result = await run_crowd(plan)
        seconds = time.monotonic() - began
        for other in others:
            other.cancel()
        while (stats := await client.stats())["live"]:
            await asyncio.sleep(0.1)
        held_back = sum(each["descriptors"] for each in before.values())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(20):
                while sum(each["descriptors"] for each in server.held().values()) > held_back:
                    await asyncio.sleep(0.1)
    after = server.held()
    new = {name: stats[name] - before_stats.get(name, 0) for name in stats}
    lines = {
        "streams at a time, seconds": f"{streams}, {seconds:.0f}",
        "started": result.started,
        **{f"ended: {name}": count for name, count in result.ended.items()},
        "sequences accepted / ended": f"{new['accepted']:.0f} / "
        f"{sum(count for name, count in new.items() if name.startswith('ended_')):.0f}",
        "live at the end; KV blocks lost": f"{stats['live']:.0f}; "
        f"{stats['blocks_total'] - stats['blocks_free'] - stats['blocks_cached']:.0f}",
        "output tokens, per second": f"{new['output_tokens']:.0f}, "
        f"{new['output_tokens'] / seconds:.0f}",
        "/health p50 / p99 / max, ms": f"{times['p50_ms']} / {times['p99_ms']} / {times['max_ms']}",
        f"/health over {SLOW_MS} ms, second: polls": times["slow_in_seconds"],
        "/health polls, not 200": f"{times['polls']}, {times['not_ok']}",
        "the poller itself late, p99, ms": times["late_p99_ms"],
    }
    for name in server.processes:
        for what in ("descriptors", "rss_mb"):
            values = [held[name][what] for held in (before, *meanwhile, after)]
            lines[f"{name}: {what} before, meanwhile, after"] = ", ".join(map(str, values))
        lines[f"{name}: processor time"] = f"{100 * spent[name] / seconds:.0f} %"
    width = max(map(len, lines))
    for name, value in lines.items():
        print(f"| {name:{width}} | {value} |", flush=True)


async def measure(args: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        model = ScriptedFolder(Path(folder) / "model")
        server = Server(model, f"ipc://{folder}/engine", "--num-kv-blocks", "65536",
                        "--max-num-seqs", str(args.running))  # fmt: skip
        try:
            if "overhead" in args.only:
                await overhead(server, args.reps)
            if "large" in args.only:
                await large(server)
            if "crowd" in args.only:
                await crowd(server, args.streams, args.seconds)
        finally:
            server.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="overhead,large,crowd", help="comma-separated parts")
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--running", type=int, default=1024, help="max_num_seqs of the engine")
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--reps", type=int, default=7)
    parser.add_argument("--poll", help=argparse.SUPPRESS)
    parser.add_argument("--client", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.poll:
        poll(args.poll)
    elif args.client:
        asyncio.run(client(*json.loads(args.client)))
    else:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # the crowd inherits it
        asyncio.run(measure(args))


if __name__ == "__main__":
    main()
