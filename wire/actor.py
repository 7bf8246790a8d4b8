"""The loop of a process: one poller over sockets, timers and signals, and nothing else that blocks.

A poller and not asyncio: one message through ``zmq.asyncio`` on uvloop costs two and a half times
the processor time (``benchmarks/shell_latency.py``), and a step passes four of them.
"""

from __future__ import annotations

import math
import signal
import socket
import time
from collections.abc import Callable

import zmq

from deepinfer.wire.sockets import readable

# A socket is drained at most this far in one turn, so that a flood on one starves neither another
# nor the timers and the work after the turn.
_FRAMES_PER_TURN = 256
_SECONDS_PER_TURN = 0.01


class Actor:
    """Polls sockets and timers and calls handlers, until ``stop``.

    A handler gets the frames of one message. ``after_turn`` runs after each round of handlers: the
    place for work that answers everything that arrived together.
    """

    def __init__(self, after_turn: Callable[[], None] | None = None) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._poller = zmq.Poller()
        self._handlers: dict[zmq.Socket[bytes], Callable[[list[bytes]], None]] = {}
        self._timers: list[_Timer] = []
        self._due = math.inf
        self._after_turn = after_turn
        self._running = True

    def add_socket(
        self, zmq_socket: zmq.Socket[bytes], handler: Callable[[list[bytes]], None]
    ) -> None:
        """Call ``handler`` with the frames of each message that arrives."""
        self._handlers[zmq_socket] = handler
        self._poller.register(zmq_socket, zmq.POLLIN)

    def every(self, interval_s: float, callback: Callable[[], None]) -> None:
        """Call ``callback`` about every ``interval_s`` seconds."""
        self._timers.append(_Timer(interval_s, callback))
        self._due = min(timer.due for timer in self._timers)

    def on_signals(self, signals: tuple[int, ...], callback: Callable[[int], None]) -> None:
        """Call ``callback`` from the loop, not from the handler, when one of the signals comes."""
        reader, writer = socket.socketpair()
        reader.setblocking(False)
        writer.setblocking(False)
        for number in signals:
            signal.signal(number, lambda *_: None)
        signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        self._signal_pair = (reader, writer)
        self._signals = set(signals)
        self._on_signal = callback
        self._poller.register(reader.fileno(), zmq.POLLIN)

    def stop(self) -> None:
        """Leave ``run`` after this turn."""
        self._running = False

    def run(self, timeout_s: Callable[[], float | None] = lambda: None) -> None:
        """Run until ``stop``. ``timeout_s`` gives the longest next wait in seconds, or ``None``."""
        while self._running:
            for ready, _ in self._poller.poll(self._wait_ms(timeout_s())):
                if isinstance(ready, int):
                    self._take_signals()
                else:
                    self._drain(ready)
            if (now := time.monotonic()) >= self._due:
                self._call_timers(now)
            if self._after_turn is not None:
                self._after_turn()

    def close(self) -> None:
        """Close all sockets. What was sent and not delivered gets one second."""
        for zmq_socket in list(self._handlers):
            self._poller.unregister(zmq_socket)
            zmq_socket.close(linger=1000)
        self._handlers.clear()
        self.context.term()

    def _wait_ms(self, timeout_s: float | None) -> int | None:
        wait_s = self._due - time.monotonic()
        if timeout_s is not None:
            wait_s = min(wait_s, timeout_s)
        return math.ceil(max(0.0, wait_s) * 1000) if wait_s < math.inf else None

    def _call_timers(self, now: float) -> None:
        for timer in self._timers:
            if now >= timer.due:
                timer.due = now + timer.interval_s
                timer.callback()
        self._due = min(timer.due for timer in self._timers)

    def _drain(self, zmq_socket: zmq.Socket[bytes]) -> None:
        handler = self._handlers[zmq_socket]
        end = time.monotonic() + _SECONDS_PER_TURN
        for _ in range(_FRAMES_PER_TURN):
            try:
                frames = zmq_socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            handler(frames)
            if zmq_socket.closed or not readable(zmq_socket) or time.monotonic() > end:
                return

    def _take_signals(self) -> None:
        for number in self._signal_pair[0].recv(64):
            if number in self._signals:
                self._on_signal(number)


class _Timer:
    def __init__(self, interval_s: float, callback: Callable[[], None]) -> None:
        self.interval_s = interval_s
        self.callback = callback
        self.due = time.monotonic() + interval_s
