"""The shell that all workers of a scheduler share: one socket, one loop, and a heart that beats."""

from __future__ import annotations

import threading
import time
from typing import Any, ClassVar

import zmq

from deepinfer.wire.actor import Actor
from deepinfer.wire.codec import MAX_MESSAGE_BYTES, BadFrame, Codec
from deepinfer.wire.config import WorkerConfig
from deepinfer.wire.messages import Message
from deepinfer.wire.sockets import connect_dealer

_HEARTBEAT_S = 1.0
_MAX_ERROR_CHARS = 2000


class WorkerShell:
    """Says hello, loads, and works until told to stop; the process ends with the scheduler.

    A subclass names the messages, loads in ``_load`` and does one piece of work in ``_work``.
    """

    WORK: ClassVar[type[Message]]
    """What it is sent to do; any other message means to stop."""
    ACCEPTS: ClassVar[Any]
    """The union of all messages that may arrive."""
    HELLO: ClassVar[type[Message]]
    HEARTBEAT: ClassVar[Any]
    """Made of the number of the work and the seconds for which it has been computed."""
    FAILED: ClassVar[Any]
    """Made of the reason, for people."""
    MAX_BYTES: ClassVar[int] = MAX_MESSAGE_BYTES

    def __init__(self, config: WorkerConfig) -> None:
        self._config = config
        self._codec = Codec(self.ACCEPTS, max_in=self.MAX_BYTES, max_out=self.MAX_BYTES)
        self._actor = Actor()
        self._socket = self._connect(config.identity)
        self._actor.add_socket(self._socket, self._receive)
        self._number = 0
        self._busy_since: float | None = None

    def run(self) -> None:
        """Load, then work until told to stop."""
        self._send(self.HELLO())
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()
        try:
            ready = self._load()
        except (ValueError, OSError, MemoryError, ImportError, RuntimeError) as error:
            self._fail(error)
            return
        self._send(ready)
        self._actor.run()
        self._actor.close()

    def _load(self) -> Message:
        """Get ready to work and return what tells of it; the errors that ``run`` knows end it."""
        raise NotImplementedError

    def _work(self, message: Any) -> None:
        """Do what a message asks for, between ``_begin`` and ``_end``."""
        raise NotImplementedError

    def _begin(self, number: int) -> None:
        self._number = number
        self._busy_since = time.monotonic()

    def _end(self, result: Message) -> None:
        self._busy_since = None
        self._send(result)

    def _fail(self, error: Exception) -> None:
        text = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        self._send(self.FAILED(text[:_MAX_ERROR_CHARS]))
        self._actor.stop()
        self._actor.close()

    def _send(self, message: Message) -> None:
        self._socket.send(self._codec.encode(message))

    def _receive(self, frames: list[bytes]) -> None:
        try:
            message = self._codec.decode(frames[-1])
        except BadFrame as error:
            # What was in it is waited for, and what follows may build on it.
            self._fail(error)
            return
        if isinstance(message, self.WORK):
            self._work(message)
        else:
            self._actor.stop()

    def _connect(self, identity: bytes) -> zmq.Socket[bytes]:
        return connect_dealer(self._actor.context, self._config.endpoint, identity, self.MAX_BYTES)

    def _beat(self) -> None:
        """Beat from a thread and a socket of its own, so that long work is no silence."""
        socket = self._connect(self._config.identity + b"-beat")
        codec = Codec(self.ACCEPTS)
        while True:
            since = self._busy_since
            busy_s = 0.0 if since is None else time.monotonic() - since
            try:
                socket.send(codec.encode(self.HEARTBEAT(self._number, busy_s)), zmq.NOBLOCK)
            except zmq.Again:
                pass  # the scheduler does not read; its own watchers deal with that
            except zmq.ZMQError:
                socket.close()
                return  # the context is closing
            time.sleep(_HEARTBEAT_S)
