"""``LLMEngine``: an engine of one's own for plain code, driven by ``step``."""

from __future__ import annotations

import logging
import time

import zmq

from deepinfer.frontend.connection import Connection
from deepinfer.frontend.engine_process import EngineProcess
from deepinfer.frontend.errors import EngineBusyError, EngineDownError, EngineError
from deepinfer.frontend.outputs import RequestOutput
from deepinfer.frontend.session import LOSSES_ALLOWED, PreparedPrompt, Prompt, Session
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

log = logging.getLogger("deepinfer.frontend")

_POLL_S = 0.1
_CALL_TIMEOUT_S = 10.0


class EngineLostError(EngineDownError):
    """The scheduler went away without a word; another may do better."""


class LLMEngine:
    """Add requests, then call :meth:`step` while :meth:`has_unfinished_requests`.

    The engine computes by itself between the calls; ``step`` waits for and returns what it made.
    """

    def __init__(self, args: EngineArgs | None = None) -> None:
        self.args = args if args is not None else EngineArgs()
        self._connection: Connection | None = None
        self._outputs: list[RequestOutput] = []
        self._losses = 0
        self._process = EngineProcess(self.args)
        try:
            info = self._connect().info
            self.tokenizer = Tokenizer.from_folder(info.tokenizer)
        except BaseException:
            self.close()
            raise
        self._session = Session(info, self.tokenizer, self.args.seed)

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
            request_id,
            prompt,
            time.monotonic(),
            user_id=user_id,
            priority=priority,
            timeout_s=timeout_s,
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

    def __enter__(self) -> LLMEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _connect(self) -> Welcome:
        """Connect to the scheduler and wait until the engine is ready."""
        connection = Connection(self._process.endpoint, self._process.identity)
        self._connection = connection
        connection.send(Hello())
        self._last_heard = time.monotonic()
        heard = False
        while True:
            if connection.wait(_POLL_S):
                heard, self._last_heard = True, time.monotonic()
            match connection.receive():
                case Welcome() as message:
                    return message
                case EngineDown(message=text):
                    raise EngineDownError(text)
            if cause := self._cause_of_death(heard):
                raise EngineLostError(cause)

    def _cause_of_death(self, heard: bool = True) -> str:
        if cause := self._process.cause_of_death():
            return cause
        # What came while nobody listened was read before this, so the silence is the engine's.
        silent_s = time.monotonic() - self._last_heard
        if silent_s > self._process.silence_limit_s(heard):
            return f"the scheduler was silent for {silent_s:.1f} s"
        return ""

    def _next_message(self) -> ToClient | None:
        """Wait a little for a message; ``EngineDownError`` when the engine is gone for good."""
        connection = self._live_connection()
        if connection.wait(_POLL_S):
            self._last_heard = time.monotonic()
            return connection.receive()
        if cause := self._cause_of_death():
            self._replace_engine(cause)
        return None

    def _replace_engine(self, cause: str) -> None:
        """Start another scheduler and go on with every open request from the tokens it has."""
        welcome = None
        while welcome is None:
            self._losses += 1
            self._live_connection().close(linger_s=0)
            self._process.kill()
            if self._losses > LOSSES_ALLOWED:
                self._connection = None
                self._session.fail_all(EngineDownError(cause))
                raise EngineDownError(cause)
            log.warning("%s; starting another", cause)
            self._process = EngineProcess(self.args)
            try:
                welcome = self._connect()
            except EngineLostError as error:
                cause = str(error)
        self._losses = 0
        for _, item in self._session.resubmit(welcome.info, time.monotonic()):
            assert isinstance(item, RequestOutput)
            self._outputs.append(item)
        self._flush()

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
