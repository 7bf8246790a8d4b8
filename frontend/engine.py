"""``AsyncEngine``: an engine of one's own inside an asyncio app."""

from __future__ import annotations

import asyncio
import os
import time

from deepinfer.frontend.async_client import AsyncClient
from deepinfer.frontend.engine_process import EngineProcess
from deepinfer.frontend.errors import EngineBusyError
from deepinfer.wire.checks import shown
from deepinfer.wire.config import EngineArgs
from deepinfer.wire.messages import Drain, Welcome
from deepinfer.wire.recorder import Recorder

_LAST_WORDS_S = 5.0


class AsyncEngine(AsyncClient):
    """Starts a private engine (scheduler and workers) and sends it requests.

    ::

        async with AsyncEngine(EngineArgs(model="smollm2-135m")) as engine:
            async for out in engine.generate("Hello", SamplingParams(max_tokens=64)):
                print(out.text, end="")

    The engine's processes end with :meth:`stop`, or with this process, however it ends.
    """

    def __init__(self, args: EngineArgs | None = None) -> None:
        if args is not None and not isinstance(args, EngineArgs):
            raise TypeError(f"args must be EngineArgs(model=…, …), got {shown(args)}")
        self.args = args if args is not None else EngineArgs()
        super().__init__(seed=self.args.seed)
        if self.args.profile is not None:
            self._recorder = Recorder(self.args.profile, "frontend")
        self._process: EngineProcess | None = None
        self._drain_until: float | None = None
        self._ending: asyncio.Future[None] | None = None

    async def stop(self, *, drain: bool = False) -> None:
        """End the engine and its processes; ``EngineDownError`` ends what is still open here.

        With ``drain`` everything that was accepted, of all clients, may first finish within
        ``drain_timeout_s``, while new requests are refused with ``EngineBusyError``. A drain that
        began goes on though its caller is cancelled; ``stop()`` without ``drain`` ends it.
        """
        if drain and self._session is not None and not self._dead and not self._loop_is_closed():
            self._check_loop()
            if self._drain_until is None:
                self._drain_until = time.monotonic() + self.args.drain_timeout_s
                self._send_drain()
            await self._over.wait()
        await super().stop()

    def _check_room(self) -> None:
        if self._drain_until is not None:
            raise EngineBusyError(
                "the engine shuts down; ask another, or this one later", closing=True
            )
        super()._check_room()

    def _on_welcome(self, message: Welcome) -> None:
        super()._on_welcome(message)
        self._send_drain()

    def _send_drain(self) -> None:
        """Ask for the end behind all requests: also a scheduler that took the place of another."""
        if self._drain_until is not None and self._connected and self._connection is not None:
            self._connection.send(Drain(max(0.0, self._drain_until - time.monotonic())))

    async def _close(self, cause: str) -> None:
        await super()._close(cause)
        process, self._process = self._process, None
        if process is not None:
            self._unwatch()
            self._ending = asyncio.get_running_loop().run_in_executor(None, process.stop)
        if self._ending is not None:
            # Also where an earlier caller was cancelled.
            await asyncio.shield(self._ending)
        if self._recorder is not None:
            self._recorder.write()

    def _address(self, *, same_engine: bool) -> tuple[str, bytes]:
        if self._process is not None:
            if same_engine:
                return self._process.endpoint, self._process.new_identity()
            self._unwatch()
            self._process.kill()
        self._process = EngineProcess(self.args)
        self._tokenizer_path = str(self._process.tokenizer)
        self._end_of_process = self._process.end_descriptor()
        asyncio.get_running_loop().add_reader(self._end_of_process, self._on_process_end)
        return self._process.endpoint, self._process.identity

    def _on_process_end(self) -> None:
        self._alarm.set()
        # Readable from now on for good.
        asyncio.get_running_loop().remove_reader(self._end_of_process)

    def _unwatch(self) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._end_of_process)
        os.close(self._end_of_process)

    def _cause_of_death(self, silent_s: float) -> str:
        assert self._process is not None and self._connection is not None
        if cause := self._process.cause_of_death():
            if self._drain_until is not None and self._process.finished():
                # Each open request was given its end; the last ones may be on their way still.
                while self._session and self._connection.wait(_LAST_WORDS_S):
                    self._connection.drain()
                self._dead = "the engine was stopped"
            return cause
        if silent_s > self._process.silence_limit_s(self._connection.heard):
            self._process.kill()
            return f"the scheduler was silent for {silent_s:.1f} s"
        return ""
