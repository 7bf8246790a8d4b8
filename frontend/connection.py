"""Sockets of a client: one for an asyncio loop, one for plain code."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import msgspec
import zmq

from deepinfer.wire.codec import BadFrame, Codec
from deepinfer.wire.messages import ToClient
from deepinfer.wire.sockets import connect_dealer

# Frames taken before the loop's other tasks get a turn.
_FRAMES_PER_TURN = 64


class Connection:
    """A DEALER to a scheduler with its codec. Not thread-safe."""

    def __init__(self, endpoint: str, identity: bytes) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.junk_frames = 0
        self._codec = Codec(ToClient)
        try:
            self.socket = connect_dealer(self._context, endpoint, identity)
        except BaseException:
            self._context.term()
            raise

    def send(self, message: msgspec.Struct) -> None:
        """Queue a message without blocking; ``zmq.Again`` when the engine does not read."""
        self.socket.send(self._codec.encode(message), zmq.NOBLOCK)

    def receive(self) -> ToClient | None:
        """Return a message that has arrived, or ``None``. Junk is counted and dropped."""
        while True:
            try:
                frame = self.socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return None
            try:
                message: ToClient = self._codec.decode(frame)
                return message
            except BadFrame:
                self.junk_frames += 1

    def wait(self, timeout_s: float) -> bool:
        """Block until a message is there, at most ``timeout_s`` seconds."""
        return bool(self.socket.poll(int(timeout_s * 1000)))

    def close(self, linger_s: float = 0.2) -> None:
        """Close; messages that are on their way get ``linger_s`` seconds."""
        self.socket.close(linger=int(linger_s * 1000))
        self._context.term()


class LoopConnection(Connection):
    """A connection read by the running asyncio loop through the socket's descriptor.

    That costs a quarter of what ``zmq.asyncio`` does. The descriptor is edge-triggered, so after
    every event and every send the socket is read until it is empty.
    """

    def __init__(
        self, endpoint: str, identity: bytes, on_message: Callable[[ToClient], None]
    ) -> None:
        super().__init__(endpoint, identity)
        self._on_message = on_message
        self._loop = asyncio.get_running_loop()
        self._descriptor = int(self.socket.getsockopt(zmq.FD))
        self._closed = False
        self.heard = False
        self.last_heard = time.monotonic()
        self._loop.add_reader(self._descriptor, self.drain)

    def send(self, message: msgspec.Struct) -> None:
        """Queue a message without blocking; ``zmq.Again`` when the engine does not read."""
        super().send(message)
        self._loop.call_soon(self.drain)

    def close(self, linger_s: float = 0.2) -> None:
        """Close; messages that are on their way get ``linger_s`` seconds."""
        if not self._closed:
            self._closed = True
            self._loop.remove_reader(self._descriptor)
            super().close(linger_s)

    def drain(self) -> None:
        """Hand over what has arrived; the rest, when it is much, with the loop's next turn."""
        for _ in range(_FRAMES_PER_TURN):
            if self._closed:
                return
            message = self.receive()
            if message is None:
                return
            self.heard = True
            self.last_heard = time.monotonic()
            self._on_message(message)
        self._loop.call_soon(self.drain)
