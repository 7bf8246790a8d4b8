"""The socket of a client inside an asyncio loop."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable

import msgspec
import zmq

from deepinfer.frontend.connection import Connection
from deepinfer.frontend.connection_watch import ConnectionWatch
from deepinfer.wire.curve import ClientKeys
from deepinfer.wire.messages import Answer, ToClient

# What arrived is handed over for so long before the loop's other tasks get a turn: short enough
# that they never wait long, long enough that several tokens of a stream are passed on together.
_HAND_OVER_S = 0.005
# What is read ahead of that; the rest stays in the socket, and then with the scheduler.
_READ_AHEAD_BYTES = 16 << 20


class LoopConnection(Connection):
    """A connection read by the running asyncio loop through the socket's descriptor.

    That costs a quarter of what ``zmq.asyncio`` does. The descriptor is edge-triggered, so after
    every event and every send the socket is read until it is empty. What an app is too slow for
    waits here, in order; only an ``Answer`` is handed over as soon as it was read, so that whoever
    asks how the engine is does not wait behind all outputs. With ``on_trouble`` the connection is
    watched: it is called when ``watch`` says that it was lost or refused.
    """

    def __init__(
        self,
        endpoint: str,
        identity: bytes,
        on_message: Callable[[ToClient], None],
        *,
        keys: ClientKeys | None = None,
        on_trouble: Callable[[], None] | None = None,
    ) -> None:
        self.watch: ConnectionWatch | None = None

        def watch(socket: zmq.Socket[bytes]) -> None:
            # Before it connects: that may have succeeded, or failed for good, the moment after.
            if on_trouble is not None:
                self.watch = ConnectionWatch(socket, has_keys=keys is not None)

        super().__init__(endpoint, identity, keys, before_connect=watch)
        self._on_message = on_message
        self._on_trouble = on_trouble
        self._loop = asyncio.get_running_loop()
        self._descriptor = int(self.socket.getsockopt(zmq.FD))
        self._closed = False
        self._waiting: deque[tuple[ToClient, int]] = deque()
        self._waiting_bytes = 0
        self._drain_comes = False
        self._loop.add_reader(self._descriptor, self._on_readable)
        if self.watch is not None:
            self._loop.add_reader(self.watch.descriptor, self._look)
            self._loop.call_soon(self._look)

    def send(self, message: msgspec.Struct) -> None:
        """Queue a message without blocking; ``ValueError`` when it is above the size limit."""
        super().send(message)
        self._drain_soon()

    def close(self, linger_s: float = 0.2) -> None:
        """Close; messages that are on their way get ``linger_s`` seconds."""
        if not self._closed:
            self._closed = True
            if not self._loop.is_closed():
                self._loop.remove_reader(self._descriptor)
                if self.watch is not None:
                    self._loop.remove_reader(self.watch.descriptor)
            if self.watch is not None:
                self.watch.close()
            super().close(linger_s)

    @property
    def behind(self) -> bool:
        """Whether messages that were read wait to be handed over."""
        return bool(self._waiting) and not self._closed

    def wait(self, timeout_s: float) -> bool:
        """Block until ``drain`` has something to hand over, at most ``timeout_s`` seconds."""
        return self.behind or super().wait(timeout_s)

    def drain(self) -> None:
        """Hand over what has arrived; the rest, when it is much, with the loop's next turn."""
        self._drain_comes = True  # what is read now is handed over below
        self.read()
        self._drain_comes = False
        end = time.monotonic() + _HAND_OVER_S
        while self._waiting and not self._closed:
            message, size = self._waiting.popleft()
            self._waiting_bytes -= size
            self._on_message(message)
            if time.monotonic() > end:
                break
        if self.behind:
            self._drain_soon()

    def read(self) -> None:
        """Read what has arrived; but for answers, it is handed over with the loop's next turn."""
        while not self._closed and self._waiting_bytes < _READ_AHEAD_BYTES:
            message = self.receive()
            if message is None:
                return
            if isinstance(message, Answer):
                self._on_message(message)
            else:
                self._waiting.append((message, self.frame_bytes))
                self._waiting_bytes += self.frame_bytes
                self._drain_soon()

    def _on_readable(self) -> None:
        if self._drain_comes:  # this turn hands over no more
            self.read()
        else:
            self.drain()

    def _drain_soon(self) -> None:
        if not self._drain_comes:
            self._drain_comes = True
            self._loop.call_soon(self.drain)

    def _look(self) -> None:
        if self._closed:
            return
        assert self.watch is not None and self._on_trouble is not None
        self.watch.read()
        if self.watch.lost or self.watch.refused:
            self._on_trouble()
