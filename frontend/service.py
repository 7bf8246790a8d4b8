"""An engine that a command serves until a signal comes."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable

from deepinfer.frontend.engine import AsyncEngine
from deepinfer.frontend.errors import EngineDownError

_CHECK_S = 0.5


class Service:
    """Starts an engine, watches it, and drains it at SIGINT or SIGTERM.

    The first signal asks it to stop, what is open may finish; a second one ends it at once.
    """

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._stopped, self._hurried = asyncio.Event(), asyncio.Event()

    async def start(self) -> bool:
        """Start the engine and listen to signals; false when one came before it was ready."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal)
        start = asyncio.ensure_future(self._engine.start())
        await _first(start, self._stopped)
        if not start.done():
            start.cancel()
            return False
        await start
        return True

    async def watch(self, at_each_look: Callable[[], object] = lambda: None) -> None:
        """Return when a signal came; ``EngineDownError`` when the engine is gone for good."""
        while not self._stopped.is_set():
            at_each_look()
            health = await self._engine.health()
            if health["down"]:
                raise EngineDownError(str(health["cause"]))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopped.wait(), _CHECK_S)

    async def drain(self) -> None:
        """Let what is open finish within the time there is, or until a second signal; stop."""
        draining = asyncio.ensure_future(self._engine.stop(drain=True))
        await _first(draining, self._hurried)
        await self._engine.stop()
        await draining

    def _on_signal(self) -> None:
        (self._hurried if self._stopped.is_set() else self._stopped).set()


async def _first(future: asyncio.Future[None], event: asyncio.Event) -> None:
    """Wait for the one or the other."""
    waiting = asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait((future, waiting), return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiting.cancel()
