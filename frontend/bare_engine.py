"""``deepinfer engine`` and who asks it: an engine that runs by itself behind an endpoint."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable

from deepinfer.frontend.client import Client
from deepinfer.frontend.engine import AsyncEngine
from deepinfer.frontend.errors import EngineDownError, EngineError
from deepinfer.frontend.model_cache import cache_home
from deepinfer.wire.config import EngineArgs
from deepinfer.wire.messages import StoryEvent
from deepinfer.wire.sockets import check_endpoint, check_free, listens

_CHECK_S = 0.5
_ANSWER_S = 5.0


def default_endpoint() -> str:
    """Where ``deepinfer engine`` listens, and its clients look, when nothing else is said."""
    return f"ipc://{cache_home() / 'engine.sock'}"


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
    stopped, hurried = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(
            number, lambda: hurried.set() if stopped.is_set() else stopped.set()
        )
    first, second = (asyncio.ensure_future(event.wait()) for event in (stopped, hurried))
    engine = AsyncEngine(args)
    try:
        # A signal must also end an engine that is still loading.
        start = asyncio.ensure_future(engine.start())
        await asyncio.wait((start, first), return_when=asyncio.FIRST_COMPLETED)
        if not start.done():
            start.cancel()
            return
        await start
        on_ready()
        while not stopped.is_set():
            health = await engine.health()
            if health["down"]:
                raise EngineDownError(str(health["cause"]))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stopped.wait(), _CHECK_S)
        with contextlib.suppress(EngineError):  # one that is lost just now has nothing to tell
            if (live := int((await engine.stats())["live"])) > 0:
                on_drain(live)
        draining = asyncio.ensure_future(engine.stop(drain=True))
        await asyncio.wait((draining, second), return_when=asyncio.FIRST_COMPLETED)
        await engine.stop()
        await draining
    finally:
        first.cancel()
        second.cancel()
        await engine.stop()


def fetch_story(endpoint: str, request_id: str) -> list[StoryEvent]:
    """Ask the engine at ``endpoint`` what happened to a request.

    ``ValueError`` when it does not know the request, ``EngineDownError`` when nobody answers: at
    once for an ipc endpoint where nobody listens, else after a few seconds.
    """
    check_endpoint(endpoint)
    nobody = EngineDownError(
        f"no engine answers at {endpoint}; start one with `deepinfer engine --endpoint {endpoint}`"
    )
    if endpoint.startswith("ipc://") and not listens(endpoint):
        raise nobody

    async def ask() -> list[StoryEvent]:
        async with Client(endpoint, silence_limit_s=_ANSWER_S) as client:
            return await client.trace(request_id)

    try:
        return asyncio.run(ask())
    except KeyError as error:
        raise ValueError(str(error.args[0])) from None
    except EngineDownError:
        raise nobody from None
