"""``LLMEngine``: an engine of one's own for plain code, driven by ``step``."""

from __future__ import annotations

import time

import zmq

from deepinfer.frontend.connection import Connection
from deepinfer.frontend.engine_process import EngineProcess
from deepinfer.frontend.errors import EngineBusyError, EngineDownError, EngineError
from deepinfer.frontend.outputs import RequestOutput
from deepinfer.frontend.session import PreparedPrompt, Prompt, Session
from deepinfer.frontend.tokenizer import Tokenizer
from deepinfer.wire.config import EngineArgs
from deepinfer.wire.messages import (
    Answer,
    Call,
    EngineDown,
    Hello,
    StoryEvent,
    ToClient,
    Welcome,
)
from deepinfer.wire.params import SamplingParams

_POLL_S = 0.1
_CALL_TIMEOUT_S = 10.0


class LLMEngine:
    """Add requests, then call :meth:`step` while :meth:`has_unfinished_requests`.

    The engine computes by itself between the calls; ``step`` waits for and returns what it made.
    """

    def __init__(self, args: EngineArgs | None = None) -> None:
        self.args = args if args is not None else EngineArgs()
        self._process = EngineProcess(self.args)
        self._connection: Connection | None = None
        try:
            self._connection = Connection(self._process.endpoint, self._process.identity)
            info = self._wait_until_ready(self._connection).info
        except BaseException:
            self.close()
            raise
        self.tokenizer = Tokenizer.from_folder(info.tokenizer)
        self._session = Session(info, self.tokenizer, self.args.seed)
        self._outputs: list[RequestOutput] = []
        self._last_heard = time.monotonic()

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        user_id: str = "",
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> None:
        """Send a request; ``ValueError`` when the prompt, the parameters or the id are bad."""
        prepared = self.prepare(prompt, params)
        self.add_prepared(
            request_id, prepared, user_id=user_id, priority=priority, timeout_s=timeout_s
        )

    def prepare(self, prompt: Prompt, params: SamplingParams | None = None) -> PreparedPrompt:
        """Check and tokenise a prompt without sending it."""
        return self._session.prepare(prompt, params)

    def add_prepared(
        self,
        request_id: str,
        prompt: PreparedPrompt,
        *,
        user_id: str = "",
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> None:
        """Send a request made by :meth:`prepare`; ``ValueError`` when the id is in use."""
        self._session.add(
            request_id, prompt, user_id=user_id, priority=priority, timeout_s=timeout_s
        )
        self._flush()

    def abort_request(self, request_id: str) -> bool:
        """End a request; a later ``step`` returns its last output. ``False`` when unknown."""
        request = self._session.get(request_id)
        if request is None:
            return False
        self._session.abort(request)
        self._flush()
        return True

    def drop_request(self, request_id: str) -> None:
        """End a request whose outputs nobody wants any more: ``step`` returns none of them."""
        request = self._session.get(request_id)
        if request is not None:
            self._session.abandon(request)
            self._flush()

    def has_unfinished_requests(self) -> bool:
        """Whether some request has not had its last output."""
        return len(self._session) > 0

    def step(self) -> list[RequestOutput]:
        """Wait for the next outputs and return them; an empty list when nothing runs.

        Raises ``EngineDownError`` when the engine is gone, ``EngineBusyError`` or ``ValueError``
        when it refused a request; outputs of other requests come with the next call then.
        """
        while not self._outputs and len(self._session):
            self._take(self._next_message())
        # More may have arrived while we waited for the first.
        while (message := self._live_connection().receive()) is not None:
            self._take(message)
        outputs, self._outputs = self._outputs, []
        return outputs

    def stats(self) -> dict[str, float]:
        """Gauges and counters of the engine."""
        return self._call("stats").numbers

    def trace(self, request_id: str) -> list[StoryEvent]:
        """What happened to a request, in order; ``KeyError`` when the engine does not know it."""
        answer = self._call("story", request_id)
        if answer.error:
            raise KeyError(answer.error)
        return answer.story

    def close(self) -> None:
        """End the engine's processes."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
            self._process.stop()
        elif self._process.cause_of_death() is None:
            self._process.stop()

    def __enter__(self) -> LLMEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _wait_until_ready(self, connection: Connection) -> Welcome:
        connection.send(Hello())
        deadline = time.monotonic() + self.args.start_timeout_s
        while time.monotonic() < deadline:
            connection.wait(_POLL_S)
            match message := connection.receive():
                case Welcome():
                    return message
                case EngineDown():
                    raise EngineDownError(message.message)
            if cause := self._process.cause_of_death():
                raise EngineDownError(cause)
        raise EngineDownError(f"the engine was not ready after {self.args.start_timeout_s:g} s")

    def _next_message(self) -> ToClient | None:
        """Wait a little for a message; ``EngineDownError`` when the engine is gone."""
        connection = self._live_connection()
        if connection.wait(_POLL_S):
            self._last_heard = time.monotonic()
            return connection.receive()
        silent_s = time.monotonic() - self._last_heard
        cause = self._process.cause_of_death()
        if cause is None and silent_s > self.args.heartbeat_timeout_s:
            # What came while nobody listened was read above, so the silence is the engine's.
            cause = f"the scheduler was silent for {silent_s:.1f} s"
            self._process.kill()
        if cause is not None:
            self._session.fail_all(EngineDownError(cause))
            raise EngineDownError(cause)
        return None

    def _take(self, message: ToClient | None) -> None:
        error: Exception | None = None
        for _, item in self._session.receive(message) if message is not None else ():
            if isinstance(item, Exception):
                error = error or item
            else:
                self._outputs.append(item)
        if self._session.outbox:
            self._flush()
        if error is not None:
            raise error

    def _call(self, what: str, request_id: str = "") -> Answer:
        self._live_connection().send(Call(0, what, request_id))
        deadline = time.monotonic() + _CALL_TIMEOUT_S
        while time.monotonic() < deadline:
            message = self._next_message()
            if isinstance(message, Answer):
                return message
            self._take(message)
        raise EngineError(f"the engine did not answer {what} in {_CALL_TIMEOUT_S} s")

    def _flush(self) -> None:
        connection = self._live_connection()
        outbox, self._session.outbox = self._session.outbox, []
        for message in outbox:
            try:
                connection.send(message)
            except zmq.Again:
                raise EngineBusyError("the engine does not read its messages") from None

    def _live_connection(self) -> Connection:
        if self._connection is None:
            raise EngineDownError("the engine was closed")
        return self._connection
