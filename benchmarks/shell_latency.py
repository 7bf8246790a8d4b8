"""Why actors poll instead of awaiting: the cost of one message through the two possible shells.

Two processes exchange a small message over ``ipc``; one answers from a ``zmq.Poller`` loop, then
from ``zmq.asyncio`` on uvloop. Prints one JSON line with the median microseconds per round trip and
the processor time of the answering side.

    python benchmarks/shell_latency.py [--rounds 5000]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import tempfile
import time

import uvloop
import zmq
import zmq.asyncio


def answer_polling(endpoint: str, rounds: int) -> None:
    socket = zmq.Context.instance().socket(zmq.DEALER)
    socket.connect(endpoint)
    poller = zmq.Poller()
    poller.register(socket, zmq.POLLIN)
    for _ in range(rounds):
        poller.poll()
        socket.send(socket.recv(zmq.NOBLOCK), zmq.NOBLOCK)
    socket.send(str(time.process_time()).encode())
    socket.close(linger=1000)


def answer_awaiting(endpoint: str, rounds: int) -> None:
    async def main() -> None:
        socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
        socket.connect(endpoint)
        for _ in range(rounds):
            await socket.send(await socket.recv())
        await socket.send(str(time.process_time()).encode())
        socket.close(linger=1000)

    uvloop.run(main())


def measure(answer, rounds: int) -> tuple[float, float]:
    with tempfile.TemporaryDirectory() as folder:
        endpoint = f"ipc://{folder}/s"
        socket = zmq.Context.instance().socket(zmq.DEALER)
        socket.bind(endpoint)
        child = multiprocessing.get_context("spawn").Process(target=answer, args=(endpoint, rounds))
        child.start()
        times = []
        for _ in range(rounds):
            start = time.perf_counter()
            socket.send(b"x" * 64)
            socket.recv()
            times.append(time.perf_counter() - start)
        used = float(socket.recv())
        child.join()
        socket.close(linger=0)
        return statistics.median(times) * 1e6, used / rounds * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=5000)
    rounds = parser.parse_args().rounds
    result: dict[str, float] = {}
    for name, answer in (("poller", answer_polling), ("asyncio_uvloop", answer_awaiting)):
        trip, cpu = measure(answer, rounds)
        result[f"{name}_us_per_round_trip"] = round(trip, 1)
        result[f"{name}_cpu_us_per_message"] = round(cpu, 1)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
