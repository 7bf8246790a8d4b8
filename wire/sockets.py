"""ZeroMQ sockets with the limits every link has, and the private directory of ipc sockets."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import re
import shutil
import socket as unix_socket
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import zmq

from deepinfer.wire.codec import MAX_MESSAGE_BYTES, MAX_REQUEST_BYTES
from deepinfer.wire.curve import ClientKeys

MAX_IPC_PATH = 107
"""Bytes of a unix socket's path, a limit of the operating system."""

_PREFIX = "deepinfer-"
_HOST = re.compile(r"\*|[\w.%-]{1,255}|\[[0-9A-Fa-f:.%\w]{1,100}\]")

# How long a stranger may take to prove its key, and when a connection that went dead is cut.
_HANDSHAKE_MS = 5_000
_PING_MS = 5_000
_PONG_LIMIT_MS = 15_000

# Plain numbers: operations on pyzmq's enums take microseconds.
_POLLIN = int(zmq.POLLIN)
_NOBLOCK = int(zmq.NOBLOCK)
_NOBLOCK_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)

# Messages of one peer that wait inside a ROUTER, each way. More waits where its bytes are counted.
_ROUTER_HWM = 64


class PeerGone(Exception):
    """Nobody with this identity is connected."""


class PeerFull(Exception):
    """The peer does not read; its queue is at the high-water mark."""


def private_directory() -> Path:
    """Make a directory of mode 0700 for ipc sockets, and remove those of dead owners.

    The name carries the owner's process id. It lies in ``$XDG_RUNTIME_DIR`` or the temporary
    directory, where the path is short enough for a unix socket.
    """
    parent = Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir())
    if not parent.is_dir() or len(str(parent)) > MAX_IPC_PATH - 60:
        parent = Path("/tmp")
    _sweep(parent)
    return Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=parent))


def _sweep(parent: Path) -> None:
    for folder in parent.glob(f"{_PREFIX}*-*"):
        owner = folder.name.removeprefix(_PREFIX).split("-")[0]
        # Anybody may have put a name there that only looks like ours.
        if not re.fullmatch("[0-9]{1,9}", owner):
            continue
        with contextlib.suppress(OSError):  # gone meanwhile, or another user's
            if folder.stat(follow_symlinks=False).st_uid != os.getuid():
                continue
            try:
                os.kill(int(owner), 0)
            except ProcessLookupError:
                shutil.rmtree(folder, ignore_errors=True)


def check_endpoint(endpoint: str, *, secured: bool = False) -> None:
    """Raise ``ValueError`` unless the endpoint is ``ipc://PATH`` or ``tcp://HOST:PORT``.

    Without keys (``secured``) the host must be on loopback; with them, only tcp will do.
    """
    scheme, _, rest = endpoint.partition("://")
    if scheme == "ipc" and rest:
        if secured:
            raise ValueError(f"endpoint: keys are for tcp, got {endpoint[:200]!r}")
        if len(rest.encode()) > MAX_IPC_PATH:
            raise ValueError(f"endpoint: a socket path may have {MAX_IPC_PATH} bytes, got {rest!r}")
        return
    if scheme != "tcp" or ":" not in rest:
        raise ValueError(
            f"endpoint must be ipc://PATH or tcp://127.0.0.1:PORT, got {endpoint[:200]!r}"
        )
    host, _, port = rest.rpartition(":")
    if not re.fullmatch("[0-9]{1,5}", port) or not 1 <= int(port) <= 65_535:
        raise ValueError(f"endpoint: a port is a number from 1 to 65535, got {port[:200]!r}")
    if secured:
        if not _HOST.fullmatch(host):
            raise ValueError(f"endpoint: got no host name or address, but {host[:200]!r}")
        return
    host = host.strip("[]")
    if is_loopback(host):
        return
    raise ValueError(
        f"endpoint must be on loopback (127.0.0.1, [::1], localhost), got host {host[:200]!r}: "
        "beyond this machine an engine needs curve_keys, and its clients server_key and secret_key"
    )


def is_loopback(host: str) -> bool:
    """Whether a host, an address or a name, can only be reached from this machine."""
    if host == "localhost":
        return True
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return False


def bind_router(
    context: zmq.Context[zmq.Socket[bytes]], endpoint: str, max_bytes: int = MAX_REQUEST_BYTES
) -> zmq.Socket[bytes]:
    """Bind a ROUTER that reports an absent or stalled peer instead of dropping its messages.

    ``ValueError`` when the endpoint is not allowed or in use.
    """
    socket = context.socket(zmq.ROUTER)
    _limit(socket, max_bytes)
    socket.set_hwm(_ROUTER_HWM)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    # A client that reconnects under its identity takes the place of its dead connection.
    socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
    try:
        bind_also(socket, endpoint)
    except ValueError:
        socket.close()
        raise
    return socket


class KeyedRouter(zmq.Socket[bytes]):
    """A ROUTER with CURVE: each message it receives begins with its sender's public key (Z85).

    The key stands before the identity; it is the ``User-Id`` that the ZAP handler gave.
    """

    def recv_multipart(self, flags: int = 0, copy: bool = True, track: bool = False) -> list[Any]:
        """Receive the sender's key, its identity, and the frames of one message."""
        frames = super().recv_multipart(flags, copy=False)
        return [str(frames[0].get("User-Id")).encode(), *(frame.bytes for frame in frames)]


def bind_keyed_router(
    context: zmq.Context[zmq.Socket[bytes]], endpoint: str, secret_key: bytes
) -> KeyedRouter:
    """Bind a ROUTER to which only those get through whom the context's ZAP handler lets in.

    ``ValueError`` when the endpoint is not allowed or in use. The handler must be there before.
    A second connection under the identity of a living one is not listened to: else one client
    could take another's answers.
    """
    check_endpoint(endpoint, secured=True)
    socket = KeyedRouter(context, zmq.ROUTER)
    _limit(socket, MAX_REQUEST_BYTES)
    socket.set_hwm(_ROUTER_HWM)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_SECRETKEY, secret_key)
    socket.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
    socket.setsockopt(zmq.HEARTBEAT_IVL, _PING_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _PONG_LIMIT_MS)
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        socket.close()
        raise ValueError(f"endpoint {endpoint} cannot be used: {error.strerror}") from error
    return socket


def bind_also(router: zmq.Socket[bytes], endpoint: str) -> None:
    """Bind a ROUTER to one more endpoint; ``ValueError`` when it is not allowed or in use.

    An ipc socket's file gets mode 0600 whatever the process's umask is.
    """
    check_endpoint(endpoint)
    check_free(endpoint)
    old = os.umask(0o177)
    try:
        router.bind(endpoint)
    except zmq.ZMQError as error:
        raise ValueError(f"endpoint {endpoint} cannot be used: {error.strerror}") from error
    finally:
        os.umask(old)


def remove_socket_file(endpoint: str) -> None:
    """Remove what an ipc endpoint leaves in the file system; only for who listens there himself."""
    scheme, _, path = endpoint.partition("://")
    if scheme == "ipc":
        with contextlib.suppress(OSError):
            os.unlink(path)


def check_free(endpoint: str) -> None:
    """Refuse an ipc endpoint that somebody listens on: ZeroMQ would push him out silently."""
    if listens(endpoint):
        raise ValueError(f"endpoint {endpoint} is in use by another engine")


def listens(endpoint: str) -> bool:
    """Whether somebody listens on an ipc endpoint; ``ValueError`` when it cannot be used.

    Always ``False`` for a tcp endpoint, where only binding or asking can tell.
    """
    scheme, _, path = endpoint.partition("://")
    if scheme != "ipc":
        return False
    with unix_socket.socket(unix_socket.AF_UNIX, unix_socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except (FileNotFoundError, ConnectionRefusedError):
            return False
        except OSError as error:
            reason = error.strerror or error
            raise ValueError(f"endpoint {endpoint} cannot be used: {reason}") from error
    return True


def connect_dealer(
    context: zmq.Context[zmq.Socket[bytes]],
    endpoint: str,
    identity: bytes,
    max_bytes: int = MAX_MESSAGE_BYTES,
    keys: ClientKeys | None = None,
    before_connect: Callable[[zmq.Socket[bytes]], None] | None = None,
) -> zmq.Socket[bytes]:
    """Connect a DEALER under the given identity (1 to 255 bytes, not starting with zero).

    ``before_connect`` gets the socket while nothing can have happened to it yet.
    """
    check_endpoint(endpoint, secured=keys is not None)
    socket = context.socket(zmq.DEALER)
    _limit(socket, max_bytes)
    # What waits here is this side's own: its requests, or the results of plans in flight. A limit
    # would lose an abort among them.
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.IDENTITY, identity)
    if keys is not None:
        socket.setsockopt(zmq.CURVE_SERVERKEY, keys.server)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
    if before_connect is not None:
        before_connect(socket)
    try:
        socket.connect(endpoint)
    except zmq.ZMQError as error:
        socket.close()  # an open one would keep its context from ending
        raise ValueError(f"endpoint {endpoint} cannot be used: {error.strerror}") from error
    return socket


def _limit(socket: zmq.Socket[bytes], max_bytes: int) -> None:
    socket.setsockopt(zmq.LINGER, 0)
    # The codec counts what is above its limit; past twice that the connection is cut unread.
    socket.setsockopt(zmq.MAXMSGSIZE, 2 * max_bytes)
    socket.setsockopt(zmq.IPV6, 1)


def readable(socket: zmq.Socket[bytes]) -> bool:
    """Whether a message has arrived. To try, and fail, takes five times as long: it raises."""
    return bool(int(socket.get(zmq.EVENTS)) & _POLLIN)


def send_to(socket: zmq.Socket[bytes], identity: bytes, frame: bytes) -> None:
    """Send without blocking; raise ``PeerFull`` or ``PeerGone``."""
    try:
        socket.send(identity, _NOBLOCK_MORE)
        socket.send(frame, _NOBLOCK, copy=len(frame) < 65_536)
    except zmq.Again as error:
        raise PeerFull from error
    except zmq.ZMQError as error:
        if error.errno == errno.EHOSTUNREACH:
            raise PeerGone from error
        raise
