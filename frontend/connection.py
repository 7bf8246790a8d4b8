"""The socket of a client to its scheduler."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable

import msgspec
import zmq

from deepinfer.wire.codec import MAX_MESSAGE_BYTES, MAX_REQUEST_BYTES, BadFrame, Codec
from deepinfer.wire.curve import ClientKeys
from deepinfer.wire.messages import ToClient
from deepinfer.wire.silence import Silence
from deepinfer.wire.sockets import connect_dealer, readable

LOSSES_ALLOWED = 5
"""Schedulers that may be lost in a row, none of them having got ready, before a client gives up."""

HEARTBEAT_S = 1.0
"""A client says at least this often that it is there."""

TAKEN_FOR_GONE = "the engine had taken this client for gone: it was silent or did not read"
"""What a ``Forgotten`` from the scheduler means."""

# What may be sent to a scheduler that says nothing, though a live one speaks every second.
_MAX_UNHEARD_BYTES = 64 << 20
_STALL_S = 3.0


class Connection:
    """A DEALER to a scheduler with its codec. Not thread-safe.

    ``heard`` says whether anything was received; ``silence``, since when nothing was, for whoever
    asks about every ``watched_every_s`` seconds. ``frame_bytes`` is how large the frame of the
    latest message was.
    """

    def __init__(
        self,
        endpoint: str,
        identity: bytes,
        keys: ClientKeys | None = None,
        *,
        watched_every_s: float = HEARTBEAT_S,
        before_connect: Callable[[zmq.Socket[bytes]], None] | None = None,
    ) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.junk_frames = 0
        self.heard = False
        self.silence = Silence(watched_every_s)
        self.frame_bytes = 0
        self._last_heard = time.monotonic()
        self._unheard_bytes = 0
        self._codec = Codec(ToClient, max_in=MAX_MESSAGE_BYTES, max_out=MAX_REQUEST_BYTES)
        try:
            self.socket = connect_dealer(
                self._context, endpoint, identity, keys=keys, before_connect=before_connect
            )
        except BaseException:
            self._context.destroy(linger=0)  # with whatever was opened before it should connect
            raise
        self._poller = zmq.Poller()
        self._poller.register(self.socket, zmq.POLLIN)

    def send(self, message: msgspec.Struct) -> None:
        """Queue a message without blocking; ``ValueError`` when it is above the size limit.

        The queue has no limit, so that no abort is ever lost; see :attr:`stalled`.
        """
        frame = self._codec.encode(message)
        self._unheard_bytes += len(frame)
        # ZeroMQ gives up a connection that the peer refuses. There is no queue then, and who
        # watches the connection learns why.
        with contextlib.suppress(zmq.Again):
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
        silent_s = time.monotonic() - self._last_heard
        return self._unheard_bytes > _MAX_UNHEARD_BYTES and silent_s > _STALL_S

    def receive(self) -> ToClient | None:
        """Return a message that has arrived, or ``None``. Junk is counted and dropped."""
        while readable(self.socket):
            try:
                frame = self.socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return None
            self.heard, self._last_heard = True, time.monotonic()
            self.silence.heard()
            self._unheard_bytes = 0
            self.frame_bytes = len(frame)
            try:
                message: ToClient = self._codec.decode(frame)
                return message
            except BadFrame:
                self.junk_frames += 1
        return None

    def wait(self, timeout_s: float) -> bool:
        """Block until a message is there, at most ``timeout_s`` seconds."""
        return bool(self._poller.poll(int(timeout_s * 1000)))

    def close(self, linger_s: float = 0.2) -> None:
        """Close; messages that are on their way get ``linger_s`` seconds."""
        self.socket.close(linger=int(linger_s * 1000))
        self._context.term()
