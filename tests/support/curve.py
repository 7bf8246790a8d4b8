"""Keys, ports, raw clients and a breakable wire for engines that clients reach over tcp."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio

from deepinfer.wire.curve import ClientKeys, client_keys, make_client_keys, make_server_keys
from deepinfer.wire.messages import ToClient
from support.patience import PATIENCE_S

_reserved: list[socket.socket] = []


def free_endpoint() -> str:
    """A tcp endpoint of this machine where nobody listens, nor will by chance.

    The port stays bound while this process lives, so that the system gives it to nobody who asks
    for any. Who asks for this one, and allows to share it as servers do, gets it.
    """
    probe = socket.socket()
    _reserved.append(probe)
    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    probe.bind(("127.0.0.1", 0))
    return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


class KeyFolder:
    """A folder of keys. ``keys.client("a")`` are the keyword arguments of a ``Client`` let in.

    Those that tests use are there before the engine is: it looks for a new one at once, unless it
    looked a moment before.
    """

    NAMES = ("a", "anna", "b", "ben", "heir", "hostile", "one", "stays", "three", "two", "victim")

    def __init__(self, path: Path, names: tuple[str, ...] = NAMES) -> None:
        self.path = path
        make_server_keys(path)
        for name in names:
            self.client(name)

    def client(self, name: str, *, operator: bool = False) -> dict[str, Path]:
        secret = self.path / ("operators" if operator else "clients") / f"{name}.key"
        if not secret.exists():
            make_client_keys(self.path, name, operator=operator)
        return {"server_key": self.path / "server.pub", "secret_key": secret}

    def raw(self, name: str) -> ClientKeys:
        keys = client_keys(**self.client(name))
        assert keys is not None
        return keys

    def remove(self, name: str) -> None:
        (self.path / "clients" / f"{name}.pub").unlink()


class RawClient:
    """A DEALER of a client in another language."""

    def __init__(
        self, endpoint: str, keys: ClientKeys | None = None, identity: bytes | None = None
    ) -> None:
        self.socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.IDENTITY, identity or os.urandom(16).hex().encode())
        if keys is not None:
            self.socket.setsockopt(zmq.CURVE_SERVERKEY, keys.server)
            self.socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)
            self.socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
        self.socket.connect(endpoint)

    async def send(self, message: msgspec.Struct | bytes) -> None:
        await self.socket.send(
            message if isinstance(message, bytes) else msgspec.msgpack.encode(message)
        )

    async def receive(self, *wanted: type) -> msgspec.Struct:
        """The next message of one of these types; others are passed over."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                message = msgspec.msgpack.decode(await self.socket.recv(), type=ToClient)
                if isinstance(message, wanted):
                    return message

    def close(self) -> None:
        self.socket.close(linger=0)


class Wire:
    """Passes bytes between its own endpoint and another, until it is ``cut``."""

    def __init__(self, target: str) -> None:
        self._target = target.removeprefix("tcp://").split(":")
        self._writers: list[asyncio.StreamWriter] = []
        self._pumps: list[asyncio.Task[None]] = []
        self.endpoint = free_endpoint()

    @contextlib.asynccontextmanager
    async def up(self) -> AsyncIterator[Wire]:
        server = await asyncio.start_server(
            self._connected, "127.0.0.1", int(self.endpoint.rpartition(":")[2])
        )
        try:
            yield self
        finally:
            server.close()
            self.cut()
            await asyncio.gather(*self._pumps, return_exceptions=True)

    def cut(self) -> None:
        """End all connections at once, with what is on its way; new ones are taken."""
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection(*self._target)
        except OSError:
            writer.transport.abort()
            return
        self._writers += [writer, far_writer]
        pumps = (_pump(reader, far_writer), _pump(far_reader, writer))
        self._pumps += [asyncio.ensure_future(pump) for pump in pumps]


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(65_536):
            writer.write(data)
            await writer.drain()
    writer.transport.abort()
