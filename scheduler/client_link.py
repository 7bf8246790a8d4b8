"""The scheduler's side of its clients: who is there, who is silent, who does not read."""

from __future__ import annotations

import contextlib
import re
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import msgspec

from deepinfer.scheduler.client_names import key_of
from deepinfer.scheduler.keyed_endpoint import (
    MAX_CLIENTS_PER_KEY,
    MIN_IDENTITY_BYTES,
    KeyedEndpoint,
)
from deepinfer.wire.actor import Actor
from deepinfer.wire.codec import MAX_REQUEST_BYTES, BadFrame, Codec
from deepinfer.wire.messages import (
    AddRequest,
    EngineDown,
    Forgotten,
    FromClient,
    Goodbye,
    Hello,
    Refused,
)
from deepinfer.wire.sockets import (
    PeerFull,
    PeerGone,
    bind_also,
    bind_router,
    remove_socket_file,
    send_to,
)

MAX_CLIENTS = 4096
MAX_BACKLOG_BYTES = 16 << 20
"""What may wait for one client that does not read, beside what its socket holds."""

_STOPPED_S = 1.0

_UNFIT_IDENTITY = (
    f"the identity of a client with a key has {MIN_IDENTITY_BYTES} to 255 bytes, random ones that "
    "do not begin with zero, new for each connection"
)


@dataclass(slots=True)
class _Client:
    heard: float
    greeted: bool = False
    backlog: deque[bytes] = field(default_factory=deque)
    backlog_bytes: int = 0


class ClientLink:
    """The ROUTER that clients connect to.

    ``on_message`` gets each valid message; ``on_gone`` is called once when a client left, is silent
    past its limit, or let its backlog grow past the bound, with the rule that ends its requests.
    Such a client is told ``Forgotten`` as soon as it reads, and again when it sends anything but
    ``Hello``. Junk never reaches anyone: it is counted, and answered only where it was meant as a
    request.

    Clients are known by their ZeroMQ identity; at an endpoint with keys it follows their key.
    """

    def __init__(
        self,
        actor: Actor,
        endpoint: str,
        *,
        owner: bytes,
        silence_limit_s: float,
        on_message: Callable[[bytes, FromClient], None],
        on_gone: Callable[[bytes, str], None],
    ) -> None:
        self.junk_frames = 0
        self._owner = owner
        self._silence_limit_s = silence_limit_s
        self._on_message = on_message
        self._on_gone = on_gone
        self._codec = Codec(FromClient, max_in=MAX_REQUEST_BYTES)
        self._forgotten = self._codec.encode(Forgotten())
        self._clients: dict[bytes, _Client] = {}
        self._stalled: set[bytes] = set()
        # Who was dropped and may still believe to be connected (the latest only), and those among
        # them who have yet to be told.
        self._dropped: dict[bytes, None] = {}
        self._untold: dict[bytes, None] = {}
        self._also: str | None = None
        self._keyed: KeyedEndpoint | None = None
        self._actor = actor
        self._watched = time.monotonic()
        self._socket = bind_router(actor.context, endpoint)
        actor.add_socket(self._socket, self._receive)

    def listen_also(self, endpoint: str, curve_keys: str | None = None) -> None:
        """Take clients on one more endpoint, with a folder of keys only those that have one.

        ``ValueError`` or ``OSError`` when it cannot be used.
        """
        if curve_keys is not None:
            self._keyed = KeyedEndpoint(
                self._actor,
                endpoint,
                curve_keys,
                on_frames=self._receive_keyed,
                on_revoked=self._drop_revoked,
            )
            return
        bind_also(self._socket, endpoint)
        self._also = endpoint

    def stop_listening(self) -> None:
        """Leave no file of the endpoint that was added; connections stay."""
        if self._also is not None:
            remove_socket_file(self._also)

    def __len__(self) -> int:
        return len(self._clients)

    @property
    def unknown_keys(self) -> int:
        """How many connections were not let in, for want of a key that is known."""
        return self._keyed.unknown_keys if self._keyed is not None else 0

    def greeted(self) -> Iterator[bytes]:
        """The clients that said hello."""
        return iter([name for name, client in self._clients.items() if client.greeted])

    def owns(self, identity: bytes) -> bool:
        """Whether a client is the owner of the engine."""
        return bool(self._owner) and identity.startswith(self._owner)

    def sees_all(self, identity: bytes) -> bool:
        """Whether a client may see what concerns others: without keys everyone, else operators."""
        return not key_of(identity) or (
            self._keyed is not None and self._keyed.is_operator(identity)
        )

    def send(self, identity: bytes, message: msgspec.Struct) -> None:
        """Queue a message for a client; never blocks. Unknown clients are ignored."""
        client = self._clients.get(identity)
        if client is None:
            return
        try:
            frame = self._codec.encode(message)
        except ValueError:  # only what the client itself made that large
            self._drop(identity, "slow_reader")
            return
        if client.backlog:
            self._hold(identity, client, frame)
            return
        try:
            self._send_frame(identity, frame)
        except PeerFull:
            self._hold(identity, client, frame)
        except PeerGone:
            self._drop(identity, "disconnect")

    def watch(self, now: float) -> None:
        """Drop the clients that were silent for too long, and tell those that read again.

        Called several times a second.
        """
        # As in ``Silence``: who was stopped together with this process could not speak.
        stopped_s = now - self._watched if now - self._watched > _STOPPED_S else 0.0
        self._watched = now
        for identity, client in list(self._clients.items()):
            client.heard += stopped_s
            if not self.owns(identity) and now - client.heard > self._silence_limit_s:
                self._drop(identity, "disconnect")
        for identity in list(self._untold):
            self._tell_forgotten(identity)

    @property
    def stalled(self) -> bool:
        """Whether some client has a backlog; call ``push`` again soon then."""
        return bool(self._stalled)

    def push(self) -> None:
        """Send what waits for clients that read again."""
        for identity in list(self._stalled):
            client = self._clients[identity]
            try:
                while client.backlog:
                    self._send_frame(identity, client.backlog[0])
                    client.backlog_bytes -= len(client.backlog.popleft())
                self._stalled.discard(identity)
            except PeerFull:
                continue
            except PeerGone:
                self._drop(identity, "disconnect")

    def _send_frame(self, identity: bytes, frame: bytes) -> None:
        if self._keyed is not None and key_of(identity):
            self._keyed.send(identity, frame)
        else:
            send_to(self._socket, identity, frame)

    def _drop_revoked(self) -> None:
        """End what clients have here whose keys were taken away; no word goes to them."""
        assert self._keyed is not None
        for identity in list(self._clients):
            if key_of(identity) and not self._keyed.allows(identity):
                self._drop(identity, "disconnect", left=True)

    def _tell_forgotten(self, identity: bytes) -> None:
        self._untold.pop(identity, None)
        try:
            self._send_frame(identity, self._forgotten)
        except PeerFull:
            self._untold[identity] = None
        except PeerGone:
            self._dropped.pop(identity, None)

    def _hold(self, identity: bytes, client: _Client, frame: bytes) -> None:
        client.backlog.append(frame)
        client.backlog_bytes += len(frame)
        self._stalled.add(identity)
        if client.backlog_bytes > MAX_BACKLOG_BYTES:
            self._drop(identity, "slow_reader")

    def _drop(self, identity: bytes, rule: str, *, left: bool = False) -> None:
        """End what a client has here; unless it ``left`` by itself it is to hear of it."""
        self._stalled.discard(identity)
        if self._clients.pop(identity, None) is None:
            return
        if self._keyed is not None and key_of(identity):
            self._keyed.leave(identity)
        if not left:
            self._dropped[identity] = self._untold[identity] = None
            if len(self._dropped) > MAX_CLIENTS:
                oldest = next(iter(self._dropped))
                del self._dropped[oldest]
                self._untold.pop(oldest, None)
        self._on_gone(identity, rule)

    def _receive(self, frames: list[bytes]) -> None:
        if len(frames) != 2:
            self.junk_frames += 1
            return
        self._take(*frames)

    def _receive_keyed(self, identity: bytes, frames: list[bytes]) -> None:
        if len(frames) != 1:
            self.junk_frames += 1
        elif not KeyedEndpoint.is_fit(identity):
            self._turn_away(identity, _UNFIT_IDENTITY)
        else:
            self._take(identity, *frames)

    def _take(self, identity: bytes, frame: bytes) -> None:
        try:
            message = self._codec.decode(frame)
        except BadFrame as error:
            self.junk_frames += 1
            self._answer_bad_request(identity, frame, str(error))
            return
        client = self._clients.get(identity)
        if client is None and identity in self._dropped:
            if identity in self._untold or not isinstance(message, Hello):
                self._tell_forgotten(identity)
            if not isinstance(message, Hello) or identity in self._untold:
                return
            self._dropped.pop(identity, None)
        if client is None:
            if len(self._clients) >= MAX_CLIENTS:
                text = f"{MAX_CLIENTS} clients are connected, which is the limit"
                self._turn_away(identity, text)
                return
            if self._keyed is not None and key_of(identity):
                if not self._keyed.has_room(identity):
                    text = f"{MAX_CLIENTS_PER_KEY} clients have this key, which is the limit"
                    self._turn_away(identity, text)
                    return
                self._keyed.settle(identity)
            client = self._clients[identity] = _Client(time.monotonic())
        client.heard = time.monotonic()
        client.greeted |= isinstance(message, Hello)
        if isinstance(message, Goodbye):
            self._drop(identity, "disconnect", left=True)
        else:
            self._on_message(identity, message)

    def _turn_away(self, identity: bytes, why: str) -> None:
        with contextlib.suppress(PeerFull, PeerGone):
            self._send_frame(identity, self._codec.encode(EngineDown(why)))

    def _answer_bad_request(self, identity: bytes, frame: bytes, error: str) -> None:
        """A frame that was meant as a request is refused by name, not only counted."""
        if identity not in self._clients or len(frame) > MAX_REQUEST_BYTES:
            return
        try:
            parts = msgspec.msgpack.decode(frame)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError):
            return
        if (
            isinstance(parts, list)
            and len(parts) > 1
            and parts[0] == AddRequest.__name__
            and type(parts[1]) is int
            and 0 <= parts[1] < 1 << 32
        ):
            self.send(identity, Refused(parts[1], "invalid", _field(error), error[:1000]))


def _field(error: str) -> str:
    """Return the field of an ``AddRequest`` that a decoding error is about."""
    text, _, path = error.partition(" - at `$")
    if name := re.match(r"\[\d+\]\.(\w+)", path):
        return name[1]
    first_word = text.partition(" ")[0]
    if first_word.islower():  # a check of ``SamplingParams``
        return first_word
    index = re.match(r"\[(\d+)\]", path)
    return AddRequest.__struct_fields__[int(index[1]) - 1] if index else ""
