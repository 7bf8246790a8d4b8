"""The socket of a client inside an asyncio loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec
import zmq

from deepinfer.frontend.connection import Connection
from deepinfer.frontend.connection_watch import ConnectionWatch
from deepinfer.wire.curve import ClientKeys
from deepinfer.wire.messages import ToClient

# Frames taken before the loop's other tasks get a turn.
_FRAMES_PER_TURN = 64


class LoopConnection(Connection):
    """A connection read by the running asyncio loop through the socket's descriptor.

    That costs a quarter of what ``zmq.asyncio`` does. The descriptor is edge-triggered, so after
    every event and every send the socket is read until it is empty. With ``on_trouble`` the
    connection is watched: it is called when ``watch`` says that it was lost or refused.
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
        self._loop.add_reader(self._descriptor, self.drain)
        if self.watch is not None:
            self._loop.add_reader(self.watch.descriptor, self._look)
            self._loop.call_soon(self._look)

    def send(self, message: msgspec.Struct) -> None:
        """Queue a message without blocking; ``ValueError`` when it is above the size limit."""
        super().send(message)
        self._loop.call_soon(self.drain)

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

    def drain(self) -> None:
        """Hand over what has arrived; the rest, when it is much, with the loop's next turn."""
        for _ in range(_FRAMES_PER_TURN):
            if self._closed:
                return
            message = self.receive()
            if message is None:
                return
            self._on_message(message)
        self._loop.call_soon(self.drain)

    def _look(self) -> None:
        if self._closed:
            return
        assert self.watch is not None and self._on_trouble is not None
        self.watch.read()
        if self.watch.lost or self.watch.refused:
            self._on_trouble()
