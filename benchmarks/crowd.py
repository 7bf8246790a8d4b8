"""Many HTTP streams from one cheap process: the load of ``gateway.py``, which starts it.

Reads a ``Plan`` from stdin and writes a ``Result`` to stdout, both JSON. Plain sockets, all looked
at every ``TURN_S`` and not at each event of theirs, so that a core that is shared with the server
stays the server's; nothing here measures latency.
"""

from __future__ import annotations

import heapq
import json
import random
import re
import select
import socket
import struct
import sys
import time
from collections import Counter
from collections.abc import Iterator

import msgspec

TURN_S = 0.04
SLOW_BYTES, SLOW_S = 1600, 0.2
"""A slow reader takes so much, and again after so long."""
HANG_UP_S = 3.0
"""Who hangs up does so at a random moment before."""
_PATIENCE_S = 60.0

_TEXT = re.compile(rb'"text":"((?:[^"\\]|\\.)*)"')
_RESET = struct.pack("ii", 1, 0)


class Ask(msgspec.Struct):
    """One request as it goes over the wire, and what must come back."""

    request: str
    text: str
    tokens: int


class Plan(msgspec.Struct):
    """``streams`` at a time: begun for ``seconds``, or ``total`` of them.

    ``asks`` holds the requests of each way to behave (``reads``, ``slow``, ``hangs up``) and
    ``weights`` how often each is chosen.
    """

    host: str
    port: int
    streams: int
    asks: dict[str, list[Ask]]
    weights: dict[str, float]
    seconds: float = 0.0
    total: int = 0


class Result(msgspec.Struct):
    """``ended`` counts by way and outcome; ``right`` is text, end and usage as they must be."""

    started: int
    ended: dict[str, int]
    seconds: float


class _Stream:
    def __init__(self, way: str, ask: Ask, address: tuple[str, int]) -> None:
        self.way, self.ask = way, ask
        self.parts: list[bytes] = []
        self.sent = False
        self.socket = socket.socket()
        self.socket.setblocking(False)
        if way == "slow":
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self.socket.connect_ex(address)

    def right(self) -> bool:
        answer = b"".join(self.parts)
        text = json.loads(b'"%s"' % b"".join(_TEXT.findall(answer)))
        return (
            answer.startswith(b"HTTP/1.1 200 ")
            and answer.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
            and answer.count(b'"finish_reason":"length"') == 1
            and answer.count(b'"completion_tokens":%d,' % self.ask.tokens) == 1
            and text == self.ask.text
        )


class Crowd:
    """Keeps the streams of a plan going and holds each to what it must be."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._rng = random.Random(1)
        self._poll = select.epoll()
        self._open: dict[int, _Stream] = {}
        self._due: list[tuple[float, int, _Stream]] = []
        self._started = 0
        self._ended: Counter[str] = Counter()

    def run(self) -> Result:
        """Load the server until the plan is done and all streams have ended."""
        began = time.monotonic()
        choices = self._choices()
        while True:
            now = time.monotonic()
            more = now < began + self._plan.seconds or self._started < self._plan.total
            while more and len(self._open) < self._plan.streams:
                self._start(*next(choices), now)
                more = self._started != self._plan.total
            if now > began + self._plan.seconds + _PATIENCE_S:
                for stream in list(self._open.values()):
                    self._end(stream, "HUNG")
            if not self._open:
                return Result(self._started, dict(sorted(self._ended.items())), now - began)
            for descriptor, events in self._poll.poll(TURN_S, 4096):
                self._ready(self._open[descriptor], events)
            self._take_due(time.monotonic())
            time.sleep(max(0.0, now + TURN_S - time.monotonic()))

    def _choices(self) -> Iterator[tuple[str, Ask]]:
        ways, weights = zip(*self._plan.weights.items(), strict=True)
        while True:
            way = self._rng.choices(ways, weights)[0]
            yield way, self._rng.choice(self._plan.asks[way])

    def _start(self, way: str, ask: Ask, now: float) -> None:
        stream = _Stream(way, ask, (self._plan.host, self._plan.port))
        self._started += 1
        self._open[stream.socket.fileno()] = stream
        self._poll.register(stream.socket, select.EPOLLOUT)
        if way == "hangs up":
            self._later(stream, now + self._rng.random() * HANG_UP_S)

    def _later(self, stream: _Stream, at: float) -> None:
        heapq.heappush(self._due, (at, id(stream), stream))

    def _take_due(self, now: float) -> None:
        while self._due and self._due[0][0] <= now:
            _, _, stream = heapq.heappop(self._due)
            if stream.socket.fileno() < 0:
                continue
            if stream.way == "hangs up":
                stream.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                self._end(stream, "hung up")
            elif self._read(stream, SLOW_BYTES):
                self._later(stream, now + SLOW_S)

    def _ready(self, stream: _Stream, events: int) -> None:
        if not stream.sent:
            try:
                stream.socket.send(stream.ask.request.encode())
            except OSError as error:
                self._end(stream, type(error).__name__)
                return
            stream.sent = True
            if stream.way == "slow":
                self._poll.unregister(stream.socket)
                self._later(stream, time.monotonic() + SLOW_S)
            else:
                self._poll.modify(stream.socket, select.EPOLLIN)
        else:
            self._read(stream, 1 << 18)

    def _read(self, stream: _Stream, size: int) -> bool:
        """Whether the stream goes on."""
        try:
            part = stream.socket.recv(size)
        except BlockingIOError:
            return True
        except OSError as error:
            self._end(stream, type(error).__name__)
            return False
        if part:
            stream.parts.append(part)
            return True
        self._end(stream, "right" if stream.right() else "WRONG")
        return False

    def _end(self, stream: _Stream, outcome: str) -> None:
        self._ended[f"{stream.way}: {outcome}"] += 1
        del self._open[stream.socket.fileno()]
        stream.socket.close()


if __name__ == "__main__":
    plan = msgspec.json.decode(sys.stdin.buffer.read(), type=Plan)
    print(msgspec.json.encode(Crowd(plan).run()).decode())
