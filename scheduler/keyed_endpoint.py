"""The endpoint of clients that prove a key: CURVE over tcp, and who is let in."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable

import zmq
from zmq.utils import z85

from deepinfer.scheduler.client_names import identity_of, key_of, keyed_name
from deepinfer.wire.actor import Actor
from deepinfer.wire.curve import AllowedKeys, server_secret
from deepinfer.wire.sockets import PeerGone, bind_keyed_router, send_to

log = logging.getLogger("deepinfer.scheduler")

MIN_IDENTITY_BYTES = 16
"""Of random bytes; whoever knows another's could wait for its connection to end and take it."""
MAX_CLIENTS_PER_KEY = 1024

_LOOK_S = 1.0
"""How often the files of the keys are looked at, and so how long a key outlives its file."""

# An unknown key may have been made just now. A flood of them keeps this process from its work for
# one part in so many.
_LOOK_SHARE = 20


class KeyedEndpoint:
    """A CURVE socket, and the ZAP handler (ZeroMQ RFC 27) that answers for it in the same poller.

    Clients are named by their key and their identity (``keyed_name``). ``on_frames`` gets the name
    and the frames of a message, ``on_revoked`` is called when keys were taken away;
    ``unknown_keys`` counts who was not let in. ``ValueError`` or ``OSError`` when the keys or the
    endpoint cannot be used.
    """

    def __init__(
        self,
        actor: Actor,
        endpoint: str,
        folder: str,
        *,
        on_frames: Callable[[bytes, list[bytes]], None],
        on_revoked: Callable[[], None],
    ) -> None:
        self.unknown_keys = 0
        self._allowed = AllowedKeys(folder)
        self._look_again = 0.0
        self._on_frames = on_frames
        self._on_revoked = on_revoked
        # Who speaks under an identity now.
        self._holders: dict[bytes, bytes] = {}
        self._clients_by_key: Counter[bytes] = Counter()
        secret = server_secret(folder)
        self._zap = actor.context.socket(zmq.REP)
        # Before the other one is bound: without a handler ZeroMQ would let everyone in.
        self._zap.bind("inproc://zeromq.zap.01")
        actor.add_socket(self._zap, self._authenticate)
        self._socket = bind_keyed_router(actor.context, endpoint, secret)
        actor.add_socket(self._socket, self._receive)
        actor.every(_LOOK_S, self._refresh)

    @staticmethod
    def is_fit(name: bytes) -> bool:
        """Whether the identity is one that a client chose, and too long to be met by chance."""
        identity = identity_of(name)
        return len(identity) >= MIN_IDENTITY_BYTES and not identity.startswith(b"\0")

    def allows(self, name: bytes) -> bool:
        """Whether the client's key is good still."""
        return key_of(name) in self._allowed

    def is_operator(self, name: bytes) -> bool:
        """Whether the client's key is an operator's."""
        return self._allowed.is_operator(key_of(name))

    def settle(self, name: bytes) -> None:
        """Note that a client lives under its identity; nothing more goes to one with another key.

        That one's connection has ended, or this one could not speak: while a connection lives,
        ZeroMQ listens to no second one under its identity.
        """
        self._holders[identity_of(name)] = name
        self._clients_by_key[key_of(name)] += 1

    def has_room(self, name: bytes) -> bool:
        """Whether the client's key may have one client more, so that others find room too."""
        return self._clients_by_key[key_of(name)] < MAX_CLIENTS_PER_KEY

    def leave(self, name: bytes) -> None:
        """Note that a client that had settled is gone."""
        self._clients_by_key[key_of(name)] -= 1
        if self._holders.get(identity_of(name)) == name:
            del self._holders[identity_of(name)]

    def send(self, name: bytes, frame: bytes) -> None:
        """Send without blocking; ``PeerFull`` or ``PeerGone``."""
        identity = identity_of(name)
        if self._holders.get(identity, name) != name or not self.allows(name):
            raise PeerGone
        send_to(self._socket, identity, frame)

    def _receive(self, frames: list[bytes]) -> None:
        key, identity, *rest = frames
        name = keyed_name(key, identity)
        if self.allows(name):
            self._on_frames(name, rest)

    # pyzmq's own handlers run in a thread or an asyncio loop; this process has neither.
    def _authenticate(self, frames: list[bytes]) -> None:
        _version, request, _domain, address, _identity, mechanism, *credentials = frames
        key = z85.encode(credentials[0]) if mechanism == b"CURVE" else b""
        if key not in self._allowed and time.monotonic() > self._look_again:
            self._refresh()
        if key in self._allowed:
            answer = (b"200", b"OK", key)
        else:
            self.unknown_keys += 1
            log.info("a client at %s has an unknown key %s", address.decode(), key.decode())
            answer = (b"400", b"unknown key", b"")
        self._zap.send_multipart((b"1.0", request, *answer, b""), zmq.NOBLOCK)

    def _refresh(self) -> None:
        began = time.thread_time()
        changed = self._allowed.refresh()
        self._look_again = time.monotonic() + _LOOK_SHARE * (time.thread_time() - began)
        if changed:
            self._on_revoked()
