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
from pathlib import Path

import zmq

from deepinfer.wire.codec import MAX_MESSAGE_BYTES, MAX_REQUEST_BYTES

MAX_IPC_PATH = 107
"""Bytes of a unix socket's path, a limit of the operating system."""

_PREFIX = "deepinfer-"

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


def check_endpoint(endpoint: str) -> None:
    """Raise ``ValueError`` unless the endpoint is ``ipc://PATH`` or ``tcp://`` on loopback."""
    scheme, _, rest = endpoint.partition("://")
    if scheme == "ipc" and rest:
        if len(rest.encode()) > MAX_IPC_PATH:
            raise ValueError(f"endpoint: a socket path may have {MAX_IPC_PATH} bytes, got {rest!r}")
        return
    if scheme != "tcp" or ":" not in rest:
        raise ValueError(
            f"endpoint must be ipc://PATH or tcp://127.0.0.1:PORT, got {endpoint[:200]!r}"
        )
    host, _, port = rest.rpartition(":")
    host = host.strip("[]")
    if not re.fullmatch("[0-9]{1,5}", port) or not 1 <= int(port) <= 65_535:
        raise ValueError(f"endpoint: a port is a number from 1 to 65535, got {port[:200]!r}")
    with contextlib.suppress(ValueError):
        if host == "localhost" or ipaddress.ip_address(host).is_loopback:
            return
    raise ValueError(
        f"endpoint must be on loopback (127.0.0.1, [::1], localhost), got host {host[:200]!r}: "
        "traffic beyond this machine needs authentication, which this version does not have"
    )


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
) -> zmq.Socket[bytes]:
    """Connect a DEALER under the given identity (1 to 255 bytes, not starting with zero)."""
    check_endpoint(endpoint)
    socket = context.socket(zmq.DEALER)
    _limit(socket, max_bytes)
    # What waits here is this side's own: its requests, or the results of plans in flight. A limit
    # would lose an abort among them.
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.IDENTITY, identity)
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


def send_to(socket: zmq.Socket[bytes], identity: bytes, frame: bytes) -> None:
    """Send without blocking; raise ``PeerFull`` or ``PeerGone``."""
    try:
        socket.send_multipart((identity, frame), zmq.NOBLOCK, copy=len(frame) < 65_536)
    except zmq.Again as error:
        raise PeerFull from error
    except zmq.ZMQError as error:
        if error.errno == errno.EHOSTUNREACH:
            raise PeerGone from error
        raise
