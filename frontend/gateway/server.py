"""``deepinfer serve``: the gateway's HTTP server and the engine behind it, from start to end."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import uvicorn

from deepinfer.frontend.engine import AsyncEngine
from deepinfer.frontend.gateway.app import Gateway
from deepinfer.frontend.gateway.http_protocol import (
    KEEP_ALIVE_S,
    BoundedProtocol,
    raise_descriptor_limit,
)
from deepinfer.frontend.gateway.ledger import Ledger
from deepinfer.frontend.gateway.tenants import Tenants
from deepinfer.frontend.gateway.tracing import Tracing
from deepinfer.frontend.service import Service
from deepinfer.wire.config import EngineArgs
from deepinfer.wire.sockets import is_loopback

_LAST_ANSWERS_S = 2.0
_FULL_COLLECTION_S = 60.0
_NEVER = 1 << 30  # collections of the middle generation between two full ones


def serve(
    args: EngineArgs,
    host: str,
    port: int,
    models: Sequence[str],
    tenants_file: Path | None,
    *,
    usage_ledger: Path | None,
    open_to_all: bool,
    max_body_bytes: int,
    on_ready: Callable[[str], None],
) -> None:
    """Serve HTTP until SIGINT or SIGTERM; ``on_ready`` hears the address when all is ready.

    The first signal lets what is open finish within ``args.drain_timeout_s``, a second one ends
    it. ``ValueError`` when the address cannot be used, or is not on loopback while everybody would
    be let in (no ``tenants_file`` and not ``open_to_all``). ``EngineDownError`` when the engine
    dies.
    """
    if tenants_file is None and not open_to_all and not is_loopback(host):
        raise ValueError(
            f"host {host} can be reached by others: give --tenants FILE with their API keys, or "
            "--open-to-all to let everybody in"
        )
    tenants = Tenants.anonymous() if tenants_file is None else Tenants.from_file(tenants_file)
    tracing = Tracing.from_environment()
    listener = _listen(host, port)
    ledger = None if usage_ledger is None else Ledger(usage_ledger)
    with listener, asyncio.Runner(loop_factory=_new_loop) as runner:
        engine = AsyncEngine(args)
        gateway = Gateway(
            engine,
            models,
            tenants,
            max_body_bytes=max_body_bytes,
            ledger=ledger,
            tracing=tracing,
        )
        server = _Server(engine, gateway, tenants)
        runner.run(server.run(listener, on_ready))


class _RareCollections:
    """Full garbage collections once a minute.

    One looks through all that belongs to open streams, 0.2 s for a thousand of them, and with many
    that come and go Python would do so every three seconds. What was made until now stays, and is
    not looked through at all.
    """

    def __init__(self) -> None:
        gc.collect()
        gc.freeze()
        gc.set_threshold(*gc.get_threshold()[:2], _NEVER)
        self._next = time.monotonic() + _FULL_COLLECTION_S

    def look(self) -> None:
        """Collect when it is time to."""
        if time.monotonic() >= self._next:
            gc.collect()
            self._next = time.monotonic() + _FULL_COLLECTION_S


class _HttpServer(uvicorn.Server):
    """Leaves signals to ``_Server``: the engine has to be stopped before the last answer."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Server:
    def __init__(self, engine: AsyncEngine, gateway: Gateway, tenants: Tenants) -> None:
        self._engine = engine
        self._service = Service(engine)
        self._accounts = gateway.accounts
        self._tenants = tenants
        BoundedProtocol.max_connections = raise_descriptor_limit()
        self._http = _HttpServer(
            uvicorn.Config(
                gateway,
                http=BoundedProtocol,
                log_level="warning",
                access_log=False,
                lifespan="off",
                ws="none",
                timeout_keep_alive=KEEP_ALIVE_S,
            )
        )

    async def run(self, listener: socket.socket, on_ready: Callable[[str], None]) -> None:
        try:
            if not await self._service.start():
                return
            serving = asyncio.ensure_future(self._http.serve(sockets=[listener]))
            await self._http.listening.wait()
            host, port = listener.getsockname()[:2]
            collections = _RareCollections()

            def look() -> None:
                self._tenants.reload_if_changed()
                collections.look()

            on_ready(f"http://{f'[{host}]' if ':' in host else host}:{port}")
            try:
                await self._service.watch(look)
            finally:
                await self._end(serving)
        finally:
            await self._engine.stop()
            await self._accounts.finish()

    async def _end(self, serving: asyncio.Future[None]) -> None:
        """Take no more, let what is open finish within the time there is, and tell the rest.

        The engine is what ends requests, so each client hears it with the reason, in its answer or
        as the last event of its stream; then the connections have a moment to send that.
        """
        self._http.should_exit = True
        await self._service.drain()
        await asyncio.wait((serving,), timeout=_LAST_ANSWERS_S)
        for connection in list(self._http.server_state.connections):
            connection.transport.abort()
        self._http.force_exit = True
        await serving


def _new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:  # not made for Windows
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


def _listen(host: str, port: int) -> socket.socket:
    """Take the port before the engine is loaded, so that a used one is known at once."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        reason = error.strerror or error
        raise ValueError(f"cannot listen at {host} port {port}: {reason}") from error
    return listener
