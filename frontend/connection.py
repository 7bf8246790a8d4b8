"""Sockets of a client: one for an asyncio loop, one for plain code."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable

import msgspec
import zmq

from deepinfer.wire.codec import MAX_MESSAGE_BYTES, MAX_REQUEST_BYTES, BadFrame, Codec
from deepinfer.wire.messages import ToClient
from deepinfer.wire.sockets import connect_dealer

# Frames taken before the loop's other tasks get a turn.
_FRAMES_PER_TURN = 64

# What may be sent to a scheduler that says nothing, though a live one speaks every second.
_MAX_UNHEARD_BYTES = 64 << 20
_STALL_S = 3.0


class Connection:
    """A DEALER to a scheduler with its codec. Not thread-safe.

    ``heard`` and ``last_heard`` (seconds of the monotonic clock) say whether and when anything
    was received.
    """

    def __init__(self, endpoint: str, identity: bytes) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.junk_frames = 0
        self.heard = False
        self.last_heard = time.monotonic()
        self._unheard_bytes = 0
        self._codec = Codec(ToClient, max_in=MAX_MESSAGE_BYTES, max_out=MAX_REQUEST_BYTES)
        try:
            self.socket = connect_dealer(self._context, endpoint, identity)
        except BaseException:
            self._context.term()
            raise

    def send(self, message: msgspec.Struct) -> None:
        """Queue a message without blocking; ``ValueError`` when it is above the size limit.

        The queue has no limit, so that no abort is ever lost; see :attr:`stalled`.
        """
        frame = self._codec.encode(message)
        self._unheard_bytes += len(frame)
        self.socket.send(frame, zmq.NOBLOCK)

    def send_all(self, messages: Iterable[msgspec.Struct]) -> None:
        """Send each of them; an error is raised when the others were sent."""
        error: ValueError | None = None
        for message in messages:
            try:
                self.send(message)
            except ValueError as too_large:
                error = error or too_large
        if error is not None:
            raise error

    @property
    def stalled(self) -> bool:
        """Whether much was sent since the scheduler last spoke, and that is long ago.

        Whoever has a new request asks here first: it would only wait in this process's memory.
        """
        silent_s = time.monotonic() - self.last_heard
        return self._unheard_bytes > _MAX_UNHEARD_BYTES and silent_s > _STALL_S

    def receive(self) -> ToClient | None:
        """Return a message that has arrived, or ``None``. Junk is counted and dropped."""
        while True:
            try:
                frame = self.socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return None
            self.heard, self.last_heard = True, time.monotonic()
            self._unheard_bytes = 0
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
        self._loop.add_reader(self._descriptor, self.drain)

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
