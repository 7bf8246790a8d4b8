"""``AsyncEngine``: an engine of one's own inside an asyncio app."""

from __future__ import annotations

import asyncio

from deepinfer.frontend.async_client import AsyncClient
from deepinfer.frontend.engine_process import EngineProcess
from deepinfer.wire.config import EngineArgs


class AsyncEngine(AsyncClient):
    """Starts a private engine (scheduler and workers) and sends it requests.

    ::

        async with AsyncEngine(EngineArgs(model="smollm2-135m")) as engine:
            async for out in engine.generate("Hello", SamplingParams(max_tokens=64)):
                print(out.text, end="")

    The engine's processes end with :meth:`stop`, or with this process, however it ends.
    """

    def __init__(self, args: EngineArgs | None = None) -> None:
        self.args = args if args is not None else EngineArgs()
        super().__init__(seed=self.args.seed)
        self._process: EngineProcess | None = None

    async def stop(self) -> None:
        """End the engine. Open requests end with an error."""
        await super().stop()
        process, self._process = self._process, None
        if process is not None:
            await asyncio.get_running_loop().run_in_executor(None, process.stop)

    def _address(self) -> tuple[str, bytes]:
        self._process = EngineProcess(self.args)
        return self._process.endpoint, self._process.identity

    def _cause_of_death(self, silent_s: float) -> str:
        assert self._process is not None
        if cause := self._process.cause_of_death():
            return cause
        if silent_s > self.args.heartbeat_timeout_s and self._session is not None:
            self._process.kill()
            return f"the scheduler was silent for {silent_s:.1f} s"
        return ""
