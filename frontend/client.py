"""``Client``: requests to an engine that runs elsewhere."""

from __future__ import annotations

import os
import uuid
from pathlib import Path

from deepinfer.frontend.async_client import AsyncClient
from deepinfer.frontend.loop_connection import LoopConnection
from deepinfer.frontend.model_cache import cache_home
from deepinfer.wire.curve import client_keys
from deepinfer.wire.messages import Goodbye
from deepinfer.wire.sockets import check_endpoint


def default_endpoint() -> str:
    """Where ``deepinfer engine`` listens, and its clients look, when nothing else is said."""
    return f"ipc://{cache_home() / 'engine.sock'}"


class Client(AsyncClient):
    """The methods of ``AsyncEngine`` over a running engine's endpoint.

    ``endpoint`` is ``ipc://PATH`` or ``tcp://HOST:PORT``; not given, ``$DEEPINFER_ENDPOINT`` or
    where ``deepinfer engine`` listens by itself. An engine with ``curve_keys``, and any host but
    this one, needs ``server_key``, its public key, and ``secret_key``, the client's own: each as
    Z85 or as the path of a file of ``deepinfer keys``. ``tokenizer`` is a folder with
    tokenizer.json; the engine's own is used when it lies on this machine. Without one, prompts are
    token ids and outputs have no text.

    A connection that ends is made again at once, and open streams go on. An engine silent for
    longer than ``silence_limit_s`` counts as gone: the client connects again, for one that takes
    its place, and gives up with ``EngineDownError`` after five times that long (after once, where
    it never heard one); at once where the engine refuses its key.
    """

    def __init__(
        self,
        endpoint: str | None = None,
        *,
        tokenizer: str | None = None,
        server_key: str | Path | None = None,
        secret_key: str | Path | None = None,
        silence_limit_s: float = 10.0,
    ) -> None:
        self._endpoint = endpoint or os.environ.get("DEEPINFER_ENDPOINT") or default_endpoint()
        self._keys = client_keys(server_key, secret_key)
        check_endpoint(self._endpoint, secured=self._keys is not None)
        super().__init__(tokenizer=tokenizer)
        self._silence_limit_s = silence_limit_s
        self.refused = ""
        """Why the engine takes no connection of this client; empty unless it said so."""
        self.hint = ""
        """What may be the reason that it says nothing; for the end of an error message."""

    async def _close(self, cause: str) -> None:
        if self._connection is not None and not self._loop_is_closed():
            self._connection.send(Goodbye())
        await super()._close(cause)

    def _address(self, *, same_engine: bool) -> tuple[str, bytes]:
        # A new one for each connection. It is secret: who knew it could take its place.
        return self._endpoint, uuid.uuid4().hex.encode()

    def _connect(self, endpoint: str, identity: bytes) -> LoopConnection:
        return LoopConnection(
            endpoint, identity, self._on_message, keys=self._keys, on_trouble=self._alarm.set
        )

    def _cause_of_death(self, silent_s: float) -> str:
        if silent_s <= self._silence_limit_s:
            return ""
        watch = self._connection.watch if self._connection is not None else None
        if watch is not None and watch.closed_early:
            # ZeroMQ's server does so at keys that do not fit, before it could say why.
            self.hint = "; what listens there hangs up: " + (
                "is server_key the key of that engine, and does it have keys?"
                if self._keys is not None
                else "an engine with keys needs server_key and secret_key"
            )
        return f"no word from an engine at {self._endpoint} for {silent_s:.1f} s{self.hint}"

    def _refusal(self) -> str:
        watch = self._connection.watch if self._connection is not None else None
        if watch is not None and watch.refused:
            self.refused = f"the engine at {self._endpoint} refuses this client: {watch.refused}"
        return self.refused

    def _loss(self) -> str:
        watch = self._connection.watch if self._connection is not None else None
        if watch is not None and watch.lost:
            return f"the connection to the engine at {self._endpoint} was lost"
        return ""
