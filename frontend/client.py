"""``Client``: requests to an engine that runs elsewhere."""

from __future__ import annotations

import uuid

from deepinfer.frontend.async_client import AsyncClient
from deepinfer.wire.messages import Goodbye
from deepinfer.wire.sockets import check_endpoint


class Client(AsyncClient):
    """The methods of ``AsyncEngine`` over a running engine's endpoint.

    ``endpoint`` is ``ipc://PATH`` or ``tcp://127.0.0.1:PORT``. ``tokenizer`` is a folder with
    tokenizer.json; the engine's own is used when it lies on this machine. Without one, prompts are
    token ids and outputs have no text. An engine silent for longer than ``silence_limit_s`` counts
    as gone: the client connects again, for one that takes its place, and gives up with
    ``EngineDownError`` after five times that long (after once, where it never heard one).
    """

    def __init__(
        self,
        endpoint: str,
        *,
        tokenizer: str | None = None,
        server_key: str | None = None,
        secret_key: str | None = None,
        silence_limit_s: float = 10.0,
    ) -> None:
        check_endpoint(endpoint)
        if server_key is not None or secret_key is not None:
            raise ValueError("server_key and secret_key are not supported by this version")
        super().__init__(tokenizer=tokenizer)
        self._endpoint = endpoint
        self._silence_limit_s = silence_limit_s

    async def _close(self, cause: str) -> None:
        if self._connection is not None and not self._loop_is_closed():
            self._connection.send(Goodbye())
        await super()._close(cause)

    def _address(self, *, same_engine: bool) -> tuple[str, bytes]:
        return self._endpoint, uuid.uuid4().hex.encode()

    def _cause_of_death(self, silent_s: float) -> str:
        if silent_s > self._silence_limit_s:
            return f"no word from an engine at {self._endpoint} for {silent_s:.1f} s"
        return ""
