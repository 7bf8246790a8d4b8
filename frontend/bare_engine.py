"""``deepinfer engine`` and who asks it: an engine that runs by itself behind an endpoint."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable

from deepinfer.frontend.client import Client
from deepinfer.frontend.engine import AsyncEngine
from deepinfer.frontend.errors import EngineDownError, EngineError
from deepinfer.frontend.service import Service
from deepinfer.wire.checks import shown
from deepinfer.wire.config import EngineArgs
from deepinfer.wire.messages import StoryEvent
from deepinfer.wire.sockets import check_free, listens

_ANSWER_S = 5.0


def serve_forever(
    args: EngineArgs, on_ready: Callable[[], None], on_drain: Callable[[int], None]
) -> None:
    """Run an engine at ``args.endpoint`` until SIGINT or SIGTERM.

    The first signal drains it: what is open may finish within ``args.drain_timeout_s``, and
    ``on_drain`` hears how many requests that are. A second one ends it at once. ``ValueError`` when
    another engine listens there, ``EngineDownError`` when the engine dies.
    """
    assert args.endpoint is not None
    scheme, _, path = args.endpoint.partition("://")
    if scheme == "ipc":
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    check_free(args.endpoint)
    asyncio.run(_serve(args, on_ready, on_drain))


async def _serve(
    args: EngineArgs, on_ready: Callable[[], None], on_drain: Callable[[int], None]
) -> None:
    engine = AsyncEngine(args)
    service = Service(engine)
    try:
        if not await service.start():
            return
        on_ready()
        await service.watch()
        with contextlib.suppress(EngineError):  # one that is lost just now has nothing to tell
            if (live := int((await engine.stats())["live"])) > 0:
                on_drain(live)
        await service.drain()
    finally:
        await engine.stop()


def fetch_story(endpoint: str, request_id: str, **keys: str | None) -> list[StoryEvent]:
    """Ask the engine at ``endpoint`` what happened to a request.

    The id is the request's own, or that of an answer of a gateway without tenants. ``ValueError``
    when the engine does not know it; else as :func:`engine_at`.
    """

    async def ask() -> list[StoryEvent]:
        async with engine_at(endpoint, **keys) as client:
            with contextlib.suppress(KeyError):
                return await client.trace(request_id)
            return await client.trace(f"/{request_id}")  # as the gateway calls it

    try:
        return asyncio.run(ask())
    except KeyError:
        raise ValueError(
            f"no story of request {shown(request_id)}; "
            "one of a gateway with tenants is called TENANT/ID"
        ) from None


@contextlib.asynccontextmanager
async def engine_at(
    endpoint: str, *, server_key: str | None = None, secret_key: str | None = None
) -> AsyncIterator[Client]:
    """Connect to a running engine, for somebody who looks in.

    ``EngineDownError`` when nobody answers (at once for an ipc endpoint where nobody listens, else
    after a few seconds) or the keys are wrong.
    """
    client = Client(
        endpoint, server_key=server_key, secret_key=secret_key, silence_limit_s=_ANSWER_S
    )
    start_one = f"start one with `deepinfer engine --endpoint {endpoint}`"
    if endpoint.startswith("ipc://") and not listens(endpoint):
        raise EngineDownError(f"no engine answers at {endpoint}; {start_one}")
    try:
        await client.start()
    except EngineDownError:
        await client.stop()
        if client.refused:
            raise
        nobody = f"no engine answers at {endpoint}{client.hint}; {start_one}"
        raise EngineDownError(nobody) from None
    async with client:
        yield client
