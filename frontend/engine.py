"""``AsyncEngine``: an engine of one's own inside an asyncio app."""

from __future__ import annotations

import asyncio
import os

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

    async def _close(self, cause: str) -> None:
        await super()._close(cause)
        process, self._process = self._process, None
        if process is not None:
            self._unwatch()
            await asyncio.get_running_loop().run_in_executor(None, process.stop)

    def _address(self) -> tuple[str, bytes]:
        if self._process is not None:
            self._unwatch()
            self._process.kill()
        self._process = EngineProcess(self.args)
        self._end_of_process = self._process.end_descriptor()
        asyncio.get_running_loop().add_reader(self._end_of_process, self._alarm.set)
        return self._process.endpoint, self._process.identity

    def _unwatch(self) -> None:
        asyncio.get_running_loop().remove_reader(self._end_of_process)
        os.close(self._end_of_process)

    def _cause_of_death(self, silent_s: float) -> str:
        assert self._process is not None and self._connection is not None
        if cause := self._process.cause_of_death():
            return cause
        if silent_s > self._process.silence_limit_s(self._connection.heard):
            self._process.kill()
            return f"the scheduler was silent for {silent_s:.1f} s"
        return ""
