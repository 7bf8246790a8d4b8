"""What HTTP costs, and what a crowd of bad clients does to it, on the scripted model.

    python benchmarks/gateway.py [--streams 1000] [--seconds 60] [--reps 3]

JSON lines: ``overhead`` is output tokens per second through ``deepinfer serve`` and through
``Client`` at the same engine, in turns. ``large`` is /health while 20 MB chats and 200 prompts of
medium length arrive. ``crowd`` keeps so many connections busy: a quarter hangs up at random, a
quarter reads slowly, some never finish their request; every finished stream is held to its
reference, and at the end the server must hold what it held before.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
import conftest  # noqa: F401  (workers find ``support`` through it)

from deepinfer import Client, SamplingParams
from support.scripted_engine import ScriptedFolder

PATH = "/v1/completions"


def request(body: dict, path: str = PATH) -> bytes:
    content = json.dumps(body).encode()
    return (
        f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        f"connection: close\r\ncontent-length: {len(content)}\r\n\r\n"
    ).encode() + content


def prompt(number: int) -> list[int]:
    return [number % 190 + 5, number // 190 + 5, 7]


def ask(number: int, tokens: int) -> dict:
    return {"prompt": prompt(number), "max_tokens": tokens, "temperature": 0, "stream": True}


def text_of(answer: bytes) -> str | None:
    """The text of a whole stream; ``None`` of one that was cut."""
    if not answer.rstrip().endswith(b"0"):
        return None
    lines = [line for line in answer.split(b"\n") if line.startswith(b"data: ")]
    if not lines or not lines[-1].startswith(b"data: [DONE]"):
        return None
    chunks = [json.loads(line[6:]) for line in lines[:-1]]
    return "".join(chunk["choices"][0]["text"] for chunk in chunks)


class Server:
    """``deepinfer serve`` with an endpoint for ``Client`` as well."""

    def __init__(self, folder: ScriptedFolder, endpoint: str, *flags: str) -> None:
        self.folder, self.endpoint = folder, endpoint
        self.process = subprocess.Popen(
            [sys.executable, "-m", "deepinfer", "serve", "--model", str(folder.path),
             "--worker-module", "support.scripted_worker", "--port", "0",
             "--endpoint", endpoint, "--max-body-bytes", str(32 << 20), *flags],
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().split()[-1]
        host, port = self.url.removeprefix("http://").split(":")
        self.address = host, int(port)
        self.gateway = psutil.Process(self.process.pid)

    def held(self) -> dict[str, int]:
        """Memory in MB and descriptors of the gateway's process."""
        return {
            "rss_mb": self.gateway.memory_info().rss >> 20,
            "descriptors": self.gateway.num_fds(),
        }

    def stop(self) -> None:
        """Let it finish what is open."""
        self.process.send_signal(signal.SIGTERM)
        self.process.wait()


@contextlib.asynccontextmanager
async def health(server: Server, times: dict):
    """Poll /health from another process meanwhile; milliseconds go into ``times``."""
    poller = await asyncio.create_subprocess_exec(
        sys.executable, __file__, "--poll", server.url,
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert poller.stdout is not None
    await poller.stdout.readline()
    try:
        yield
    finally:
        poller.terminate()
        found = sorted(json.loads(await poller.stdout.read()))
        await poller.wait()
        if found:
            times |= {
                "health_p50_ms": round(statistics.median(found), 1),
                "health_p99_ms": round(found[int(len(found) * 0.99)], 1),
                "health_max_ms": round(found[-1], 1),
                "health_polls": len(found),
            }


def poll(url: str) -> None:
    """Ask for /health every 50 ms until SIGTERM, then print the milliseconds."""
    import http.client

    over = False

    def stop(*_: object) -> None:
        nonlocal over
        over = True

    signal.signal(signal.SIGTERM, stop)
    times: list[float] = []
    print("polling", flush=True)
    while not over:
        began = time.perf_counter()
        connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=30)
        connection.request("GET", "/health")
        assert connection.getresponse().status == 200
        connection.close()
        times.append((time.perf_counter() - began) * 1000)
        time.sleep(0.05)
    print(json.dumps(times), flush=True)


async def overhead(server: Server, reps: int, streams: int = 64, tokens: int = 200) -> None:
    async def over_http(number: int) -> None:
        reader, writer = await asyncio.open_connection(*server.address)
        writer.write(request(ask(number, tokens)))
        answer = await reader.read()
        assert answer.count(b"data: ") >= 2 and b"[DONE]" in answer
        writer.close()

    async def over_zmq(client: Client, number: int) -> None:
        params = SamplingParams(max_tokens=tokens, temperature=0)
        async for output in client.generate(prompt(number), params):
            last = output
        assert last.num_output_tokens == tokens

    rates: dict[str, list[float]] = {"http": [], "client": []}
    async with Client(server.endpoint) as client:
        for rep in range(reps + 1):
            for kind in rates:
                began = time.perf_counter()
                numbers = range(rep * streams, (rep + 1) * streams)
                if kind == "http":
                    await asyncio.gather(*map(over_http, numbers))
                else:
                    await asyncio.gather(*(over_zmq(client, number) for number in numbers))
                if rep:  # the first one warms up
                    rates[kind].append(streams * tokens / (time.perf_counter() - began))
    medians = {kind: round(statistics.median(found)) for kind, found in rates.items()}
    share = round(medians["http"] / medians["client"], 3)
    print(
        json.dumps({"overhead": {"streams": streams, "tokens_per_s": medians, "ratio": share}}),
        flush=True,
    )


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

    times: dict = {}
    began = time.perf_counter()
    async with health(server, times):
        statuses = Counter(await asyncio.gather(*map(send, requests)))
        seconds = time.perf_counter() - began
    counts = {status.decode(): count for status, count in statuses.items()}
    print(
        json.dumps({"large": {"seconds": round(seconds, 2), "statuses": counts, **times}}),
        flush=True,
    )


async def crowd(server: Server, streams: int, seconds: float, tokens: int = 60) -> None:
    tokenizer = server.folder.tokenizer
    references = [tokenizer.decode(server.folder.reference(prompt(n), tokens)) for n in range(100)]
    rng = random.Random(1)
    done: Counter[str] = Counter()
    end = time.monotonic() + seconds

    async def one() -> None:
        number = rng.randrange(100)
        way = rng.choice(["reads", "reads", "hangs up", "slow", "loris"])
        reader, writer = await asyncio.open_connection(*server.address, limit=1 << 12)
        content = request(ask(number, tokens))
        try:
            if way == "loris":
                for byte in content[: rng.randrange(20)]:
                    writer.write(bytes([byte]))
                    await asyncio.sleep(0.1)
                done[way] += 1
                return
            writer.write(content)
            if way == "hangs up":
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(rng.random() * 3):
                        await reader.read(1 << 14)
                writer.transport.abort()
                done[way] += 1
                return
            parts = []
            while part := await reader.read(512 if way == "slow" else 1 << 16):
                parts.append(part)
                if way == "slow":
                    await asyncio.sleep(0.05)
            answer = b"".join(parts)
            status = answer[9:12].decode()
            good = status == "200" and text_of(answer) == references[number]
            done[f"{way}: " + ("right" if good else f"WRONG {status}")] += 1
        except OSError as error:
            done[f"{way}: {type(error).__name__}"] += 1
        finally:
            writer.close()

    async def again_and_again() -> None:
        while time.monotonic() < end:
            await one()

    async with Client(server.endpoint) as client:
        before = server.held()
        times: dict = {}
        async with health(server, times):
            await asyncio.gather(*(again_and_again() for _ in range(streams)))
        while (stats := await client.stats())["live"]:
            await asyncio.sleep(0.1)
    while server.held()["descriptors"] > before["descriptors"]:
        await asyncio.sleep(0.1)
    report = {
        "connections": streams, "seconds": seconds, "ended": dict(sorted(done.items())), **times,
        "before": before, "after": server.held(), "live": stats["live"],
        "output_tokens": stats["output_tokens"],
        "blocks_lost": stats["blocks_total"] - stats["blocks_free"] - stats["blocks_cached"],
    }  # fmt: skip
    print(json.dumps({"crowd": report}), flush=True)


async def measure(args: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        model = ScriptedFolder(Path(folder) / "model")
        server = Server(model, f"ipc://{folder}/engine")
        try:
            await overhead(server, args.reps)
            await large(server)
            if args.streams:
                await crowd(server, args.streams, args.seconds)
        finally:
            server.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--reps", type=int, default=3)
    parser.add_argument("--poll", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.poll:
        poll(args.poll)
    else:
        asyncio.run(measure(args))


if __name__ == "__main__":
    main()
