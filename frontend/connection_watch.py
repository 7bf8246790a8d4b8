"""What ZeroMQ tells of a client's connection: made, lost, or not allowed, and why."""

from __future__ import annotations

from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

_EVENTS = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_DISCONNECTED
)
_OTHER_MECHANISM = zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH


class ConnectionWatch:
    """Watches one DEALER. ``read`` takes the news; ``descriptor`` is readable when there is some.

    - ``lost``: the connection was made and has ended. ZeroMQ would make it again by itself, but
      what was on its way is gone, so one goes on with another connection.
    - ``refused``: why the peer does not take this one; ZeroMQ does not try again.
    - ``closed_early``: the peer closed the connection before either of them knew the other.
    """

    def __init__(self, socket: zmq.Socket[bytes], *, has_keys: bool) -> None:
        self.lost = False
        self.refused = ""
        self.closed_early = False
        self._has_keys = has_keys
        self._made = False
        self._watched = socket
        self._monitor: zmq.Socket[Any] = socket.get_monitor_socket(_EVENTS)
        self.descriptor = int(self._monitor.getsockopt(zmq.FD))

    def read(self) -> None:
        """Take all that is new."""
        while self._monitor.poll(0):
            frames = self._monitor.recv_multipart(zmq.NOBLOCK)
            news = parse_monitor_message(frames)
            self._take(news["event"], news["value"])

    def close(self) -> None:
        """Stop watching; before the socket is closed."""
        self._watched.disable_monitor()
        self._monitor.close(linger=0)

    def _take(self, event: int, value: int) -> None:
        match event:
            case zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._made, self.closed_early = True, False
            case zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                self.refused = (
                    "it does not know the key; the public one must lie among the clients/*.pub of "
                    "the engine's keys"
                )
            case zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL if value == _OTHER_MECHANISM:
                self.refused = (
                    "it has no keys; leave out server_key and secret_key"
                    if self._has_keys
                    else "it wants keys: give server_key and secret_key (see `deepinfer keys`)"
                )
            case zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
                self.closed_early = True
            case zmq.EVENT_DISCONNECTED if self._made:
                self.lost = True
