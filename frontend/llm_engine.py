"""``LLMEngine``: an engine of one's own for plain code, driven by ``step``."""

from __future__ import annotations

import itertools
import logging
import time
from typing import TYPE_CHECKING, Any

from deepinfer.frontend.connection import (
    HEARTBEAT_S,
    LOSSES_ALLOWED,
    TAKEN_FOR_GONE,
    Connection,
)
from deepinfer.frontend.engine_process import EngineProcess
from deepinfer.frontend.errors import EngineDownError, EngineError
from deepinfer.frontend.outputs import RequestOutput
from deepinfer.wire.config import EngineArgs
from deepinfer.wire.messages import (
    Answer,
    Call,
    ClientHeartbeat,
    EngineDown,
    Forgotten,
    Hello,
    StoryEvent,
    ToClient,
    Welcome,
)
from deepinfer.wire.params import SamplingParams
from deepinfer.wire.recorder import Recorder, timed

if TYPE_CHECKING:
    from deepinfer.frontend.session import PreparedPrompt, Prompt

log = logging.getLogger("deepinfer.frontend")

_POLL_S = 0.1
_CALL_TIMEOUT_S = 10.0


class EngineLostError(EngineDownError):
    """The scheduler went away without a word; another may do better."""


class LLMEngine:
    """Add requests, then call :meth:`step` while :meth:`has_unfinished_requests`.

    The engine computes by itself between the calls; ``step`` waits for and returns what it made.
    After :meth:`close`, and when the engine is gone for good, whatever asks it for something raises
    ``EngineDownError``.
    """

    def __init__(self, args: EngineArgs | None = None) -> None:
        self.args = args if args is not None else EngineArgs()
        self._connection: Connection | None = None
        self._outputs: list[RequestOutput] = []
        self._refusals: list[Exception] = []
        self._next_beat = 0.0
        self._call_ids = itertools.count()
        self._down = ""
        folder = self.args.profile
        self._recorder = Recorder(folder, "frontend") if folder is not None else None
        self._process = EngineProcess(self.args)
        try:
            # While the engine starts: these modules and the tokenizer take half as long as that.
            from deepinfer.frontend.session import Session
            from deepinfer.frontend.tokenizer import Tokenizer

            self.tokenizer = Tokenizer.from_folder(self._process.tokenizer)
            self.info = self._connect(self._process.identity).info
            """What the engine said of itself when it was ready."""
        except BaseException:
            self._end_processes()
            raise
        self._session = Session(self.info, self.tokenizer, self.args.seed)
        self._receive = timed(self._recorder, "outputs", self._session.receive)
        self._add = timed(self._recorder, "add request", self._session.add)

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | None = None,
        multi_modal_data: dict[str, Any] | None = None,
        *,
        user_id: str = "",
        priority: int = 0,
        timeout_s: float | None = None,
        weight: float = 1.0,
        cache_salt: str = "",
    ) -> None:
        """Send a request; ``ValueError`` when the prompt, the parameters or the id are bad.

        ``multi_modal_data`` and the keywords mean the same as in ``AsyncEngine.generate``.
        Waits while the engine does not read and much was sent to it already.
        """
        prepared = self.prepare(prompt, params, multi_modal_data)
        self.add_prepared(
            request_id,
            prepared,
            user_id=user_id,
            priority=priority,
            timeout_s=timeout_s,
            weight=weight,
            cache_salt=cache_salt,
        )

    def prepare(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        multi_modal_data: dict[str, Any] | None = None,
    ) -> PreparedPrompt:
        """Check and tokenise a prompt without sending it."""
        self._live_connection()
        return self._session.prepare(prompt, params, multi_modal_data)

    def add_prepared(
        self,
        request_id: str,
        prompt: PreparedPrompt,
        *,
        user_id: str = "",
        priority: int = 0,
        timeout_s: float | None = None,
        weight: float = 1.0,
        cache_salt: str = "",
    ) -> None:
        """Send a request made by :meth:`prepare`; ``ValueError`` when the id is in use."""
        while self._live_connection().stalled:
            self._take(self._next_message())
        self._add(
            request_id,
            prompt,
            time.monotonic(),
            user_id=user_id,
            priority=priority,
            timeout_s=timeout_s,
            weight=weight,
            cache_salt=cache_salt,
        )
        self._flush()

    def abort_request(self, request_id: str) -> bool:
        """End a request; a later ``step`` returns its last output. ``False`` when unknown."""
        self._live_connection()
        request = self._session.get(request_id)
        if request is None:
            return False
        self._session.abort(request)
        self._flush()
        return True

    def drop_request(self, request_id: str) -> None:
        """End a request whose outputs nobody wants any more: ``step`` returns none of them.

        No error when it is over, or the engine is.
        """
        request = self._session.get(request_id)
        if request is not None:
            self._session.abandon(request)
            self._flush()

    def has_unfinished_requests(self) -> bool:
        """Whether ``step`` still has something to tell; ``False`` once the engine is closed."""
        return len(self._session) > 0 or bool(self._outputs or self._refusals)

    def step(self) -> list[RequestOutput]:
        """Wait for the next outputs and return them; an empty list when nothing runs.

        Raises ``EngineDownError`` when the engine is gone, ``EngineBusyError`` or ``ValueError``
        when it refused a request; outputs of other requests come with the next call then.
        """
        while not self._outputs and not self._refusals and len(self._session):
            self._take(self._next_message())
        # More may have arrived while we waited for the first.
        while (message := self._live_connection().receive()) is not None:
            self._take(message)
        if self._refusals:
            raise self._refusals.pop(0)
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
        """End the engine's processes; nothing more comes of the requests that are open."""
        self._down = self._down or "the engine was closed"
        self._session.fail_all(EngineDownError(self._down))
        self._outputs.clear()
        self._refusals.clear()
        self._end_processes()

    def _end_processes(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
        self._process.stop()
        if self._recorder is not None:
            self._recorder.write()

    def __enter__(self) -> LLMEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _connect(self, identity: bytes) -> Welcome:
        """Connect to the scheduler and wait until the engine is ready."""
        connection = Connection(self._process.endpoint, identity, watched_every_s=_POLL_S)
        self._connection = connection
        connection.send(Hello())
        while True:
            connection.wait(_POLL_S)
            match connection.receive():
                case Welcome() as message:
                    return message
                case EngineDown(message=text):
                    raise EngineDownError(text)
            if cause := self._cause_of_death(connection):
                raise EngineLostError(cause)

    def _cause_of_death(self, connection: Connection) -> str:
        if cause := self._process.cause_of_death():
            return cause
        # What came while nobody listened was read before this, so the silence is the engine's.
        silent_s = connection.silence.seconds()
        if silent_s > self._process.silence_limit_s(connection.heard):
            return f"the scheduler was silent for {silent_s:.1f} s"
        return ""

    def _next_message(self) -> ToClient | None:
        """Wait a little for a message; ``EngineDownError`` when the engine is gone for good."""
        connection = self._live_connection()
        if (now := time.monotonic()) >= self._next_beat:
            # A scheduler that has taken us for gone says so only to who speaks.
            connection.send(ClientHeartbeat())
            self._next_beat = now + HEARTBEAT_S
        if connection.wait(_POLL_S):
            return connection.receive()
        if cause := self._cause_of_death(connection):
            self._connect_again(cause, same_engine=False)
        return None

    def _connect_again(self, cause: str, *, same_engine: bool) -> None:
        """Go on with every open request from the tokens it has.

        As another client of the ``same_engine``, or else with another scheduler.
        """
        try:
            welcome = self._new_welcome(cause, same_engine)
        except BaseException as error:
            self._down = str(error) or f"{cause}; connecting again was interrupted"
            self.close()
            raise
        for _, item in self._session.resubmit(welcome.info, time.monotonic()):
            assert isinstance(item, RequestOutput)
            self._outputs.append(item)
        self._flush()

    def _new_welcome(self, cause: str, same_engine: bool) -> Welcome:
        for _ in range(LOSSES_ALLOWED):
            self._live_connection().close(linger_s=0)
            log.warning("%s; connecting again", cause)
            if same_engine:
                identity = self._process.new_identity()
            else:
                self._process.kill()
                self._process = EngineProcess(self.args)
                identity = self._process.identity
            try:
                return self._connect(identity)
            except EngineLostError as error:
                cause, same_engine = str(error), False
        raise EngineDownError(cause)

    def _take(self, message: ToClient | None) -> None:
        match message:
            case None:
                return
            case Forgotten():
                self._connect_again(TAKEN_FOR_GONE, same_engine=True)
                return
            case EngineDown(message=text):
                self._session.receive(message)
                raise EngineDownError(text)
        for _, item in self._receive(message):
            if isinstance(item, Exception):
                self._refusals.append(item)
            else:
                self._outputs.append(item)
        if self._session.outbox:
            self._flush()

    def _call(self, what: str, request_id: str = "") -> Answer:
        call = Call(next(self._call_ids), what, request_id)
        asked: Connection | None = None
        deadline = time.monotonic() + _CALL_TIMEOUT_S
        while time.monotonic() < deadline:
            connection = self._live_connection()
            if connection is not asked:  # the first time, and when it was made again meanwhile
                connection.send(call)
                asked = connection
            message = self._next_message()
            if isinstance(message, Answer) and message.call_id == call.call_id:
                return message
            self._take(message)
        raise EngineError(f"the engine did not answer {what} in {_CALL_TIMEOUT_S} s")

    def _flush(self) -> None:
        outbox, self._session.outbox = self._session.outbox, []
        self._live_connection().send_all(outbox)

    def _live_connection(self) -> Connection:
        if self._connection is None:
            raise EngineDownError(self._down)
        return self._connection
