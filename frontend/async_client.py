"""What ``AsyncEngine`` and ``Client`` have in common: requests over one connection in a loop."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from deepinfer.frontend.connection import HEARTBEAT_S, LOSSES_ALLOWED, TAKEN_FOR_GONE
from deepinfer.frontend.errors import EngineBusyError, EngineDownError, EngineError
from deepinfer.frontend.inbox import Inbox, Readers
from deepinfer.frontend.loop_connection import LoopConnection
from deepinfer.frontend.outputs import RequestOutput
from deepinfer.wire.messages import (
    Answer,
    Call,
    ClientHeartbeat,
    EngineDown,
    EngineInfo,
    EngineView,
    Forgotten,
    Hello,
    StoryEvent,
    ToClient,
    Welcome,
)
from deepinfer.wire.params import SamplingParams
from deepinfer.wire.recorder import Recorder, timed

if TYPE_CHECKING:
    from deepinfer.frontend.session import Event, PreparedPrompt, Prompt, Session
    from deepinfer.frontend.tokenizer import Tokenizer

log = logging.getLogger("deepinfer.frontend")

_CALL_TIMEOUT_S = 10.0
# Up to here tokenising takes less time than handing it to another thread is worth.
_TOKENISE_INLINE_CHARS = 4096


class AsyncClient:
    """Requests to one engine from one asyncio loop.

    Starts by itself with the first call; ``async with`` starts and stops it. ``RuntimeError`` when
    it is used from another loop than the one it was started in.
    """

    def __init__(self, *, tokenizer: str | None = None, seed: int | None = None) -> None:
        self._tokenizer_path = tokenizer
        self._seed = seed
        self._loop: asyncio.AbstractEventLoop | None = None
        self._connection: LoopConnection | None = None
        self._session: Session | None = None
        self._readers: Readers
        self._recorder: Recorder | None = None
        self._starting: asyncio.Task[None] | None = None
        self._welcome: asyncio.Future[Welcome] | None = None
        self._connected = False
        self._forgotten = False
        self._alarm = asyncio.Event()
        self._over = asyncio.Event()
        self._losses = 0
        self._beating: asyncio.Task[None] | None = None
        self._calls: dict[int, asyncio.Future[Answer]] = {}
        self._call_ids = itertools.count()
        self._dead = ""

    # ---- life -------------------------------------------------------------------------------

    async def start(self) -> None:
        """Connect and wait until the engine is ready; ``EngineDownError`` says why it is not."""
        if self._dead:
            raise EngineDownError(self._dead)
        if self._starting is None and self._session is None:
            self._loop = asyncio.get_running_loop()
            self._readers = Readers()
            self._starting = asyncio.ensure_future(self._start())
            # Its callers may all be cancelled before they look at its error.
            self._starting.add_done_callback(lambda task: task.cancelled() or task.exception())
        self._check_loop()
        if (starting := self._starting) is None:
            return
        # Waited for and not awaited: one caller's cancellation must not stop the start others
        # wait for, and a start that ``stop`` cancels is no cancellation of theirs.
        await asyncio.wait((starting,))
        if starting.cancelled():
            raise EngineDownError(self._dead or "the start was cancelled")
        starting.result()

    async def stop(self) -> None:
        """Disconnect. Open requests end with an error here and are aborted in the engine.

        When the loop it was started in is closed, another one may do this.
        """
        if not self._loop_is_closed():
            self._check_loop()
        # Said at once: whoever comes while this waits must not start anew.
        self._dead = self._dead or "stop() was called"
        if self._starting is not None and not self._loop_is_closed():
            self._starting.cancel()
            await asyncio.wait((self._starting,))
        self._starting = None
        await self._close(self._dead)

    async def __aenter__(self) -> Self:
        try:
            await self.start()
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.stop()

    # ---- requests ---------------------------------------------------------------------------

    async def generate(
        self,
        prompt: Prompt | PreparedPrompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        user_id: str = "",
        priority: int = 0,
        multi_modal_data: dict[str, Any] | None = None,
        *,
        timeout_s: float | None = None,
        weight: float = 1.0,
        cache_salt: str = "",
        has_left: Callable[[], bool] | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield one ``RequestOutput`` per new token; the last one has ``finished=True``.

        ``prompt`` is a string, a list of token ids, a list of chat messages, or what
        :meth:`prepare` made of one of them and the parameters. Closing or cancelling the iterator
        aborts the request. Raises ``ValueError`` for bad input before anything is sent,
        ``EngineBusyError`` when the queue is full or the engine does not read, ``EngineDownError``
        when the engine is gone. ``timeout_s`` ends the request with the detail ``deadline``.

        Under ``EngineArgs(policy="fair")`` all requests of one ``user_id``, by whichever client,
        share what is that tenant's; ``weight`` (0.001 to 1000) is the tenant's part beside others,
        and that of its latest request counts. Requests reuse each other's prompt beginnings in the
        KV cache only when their ``cache_salt`` (at most 256 characters) is the same: give tenants
        different ones where none may find out by the time a prompt takes what others asked.

        Where the iterator is closed early because ``has_left()``, that is, whom you serve went
        away, the request's end and story say ``disconnect`` instead of ``client_abort``.

        ``multi_modal_data={"image": [...]}`` are images for a model that takes some: the bytes of a
        file, a ``data:`` or ``http(s):`` URL, a PIL image, or a uint8 array [H, W, 3]. The prompt
        holds the model's placeholder once for each, or is a list of chat messages with an image
        part for each; such a part may also bring its own image.
        """
        batches = self.generate_batches(
            prompt,
            sampling_params,
            request_id,
            user_id,
            priority,
            multi_modal_data,
            timeout_s=timeout_s,
            weight=weight,
            cache_salt=cache_salt,
            has_left=has_left,
        )
        async with aclosing(batches):
            async for outputs in batches:
                for output in outputs:
                    yield output

    async def generate_batches(
        self,
        prompt: Prompt | PreparedPrompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        user_id: str = "",
        priority: int = 0,
        multi_modal_data: dict[str, Any] | None = None,
        *,
        timeout_s: float | None = None,
        weight: float = 1.0,
        cache_salt: str = "",
        has_left: Callable[[], bool] | None = None,
    ) -> AsyncGenerator[list[RequestOutput], None]:
        """Do as :meth:`generate`, but yield all outputs that wait, at most 128, as one list.

        Cheaper for who passes them on: a reader that is behind gets more at a time.
        """
        from deepinfer.frontend.session import PreparedPrompt

        if isinstance(prompt, PreparedPrompt):
            if multi_modal_data:
                raise ValueError("multi_modal_data is for prepare(), not for what it made")
            await self.start()
            prepared = prompt
        else:
            prepared = await self.prepare(prompt, sampling_params, multi_modal_data)
        self._check_room()
        session = self._live_session()
        # From here to the first await nothing can be cancelled: the request is either not begun
        # or owned by the ``finally`` below.
        request = session.add(
            request_id if request_id is not None else uuid.uuid4().hex,
            prepared,
            time.monotonic(),
            user_id=user_id,
            priority=priority,
            timeout_s=timeout_s,
            weight=weight,
            cache_salt=cache_salt,
        )
        inbox = request.owner = Inbox(self._readers)
        try:
            self._flush()
            while request.open_samples or not inbox.empty:
                yield await inbox.take()
        finally:
            if request.open_samples:
                left = has_left is not None and has_left()
                session.abandon(request, "disconnect" if left else "client_abort")
                self._flush()
            inbox.closed.set()

    async def prepare(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        multi_modal_data: dict[str, Any] | None = None,
    ) -> PreparedPrompt:
        """Check and tokenise a prompt without sending it, a long one in another thread.

        ``ValueError`` names what is wrong.
        """
        await self.start()
        session = self._live_session()
        if not multi_modal_data and _is_short(prompt, sampling_params):
            return session.prepare(prompt, sampling_params)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(
            None, session.prepare, prompt, sampling_params, multi_modal_data
        )

    async def abort(self, request_id: str) -> bool:
        """End a request; its iterator gets a last output with the reason ``abort``.

        Returns once the engine has ended it; ``False`` when no such request runs here.
        """
        self._check_loop()
        request = self._session.get(request_id) if self._session is not None else None
        if request is None or self._session is None:
            return False
        self._session.abort(request)
        self._flush()
        await request.owner.closed.wait()
        return True

    async def stats(self) -> dict[str, float]:
        """Gauges and counters of the engine."""
        return (await self._call("stats")).numbers

    async def tenants(self) -> dict[str, dict[str, float]]:
        """Return what the engine knows of its tenants, by ``user_id``.

        ``weight``; ``served_tokens`` (computed for it since it is remembered, prompt and output);
        ``counter`` (those divided by the weight and lifted after idling; the smallest goes first
        under the fair policy); ``running`` and ``waiting`` requests. At most 256 tenants: those
        with open requests first, then those served most.
        """
        answer = await self._call("tenants")
        if answer.error:
            raise EngineError(answer.error)
        told: dict[str, dict[str, float]] = {name: {} for name in answer.texts.values()}
        for key, value in answer.numbers.items():
            number, _, name = key.partition(".")
            told[answer.texts[number]][name] = value
        return told

    async def health(self) -> dict[str, Any]:
        """Whether the engine makes progress: ``ok``, ``cause``, the last step and its age.

        ``down`` says that it will not come back; without it a lost process is being replaced.
        """
        try:
            answer = await self._call("health")
        except EngineError as error:
            return {"ok": False, "cause": str(error), "down": isinstance(error, EngineDownError)}
        numbers = {**answer.numbers, "ok": bool(answer.numbers["ok"]), "down": False}
        return {**answer.texts, **numbers}

    async def trace(self, request_id: str) -> list[StoryEvent]:
        """What happened to a request, in order; ``KeyError`` when the engine does not know it."""
        answer = await self._call("story", request_id)
        if answer.error:
            raise KeyError(answer.error)
        return answer.story

    async def view(self) -> EngineView:
        """What the engine does just now: its requests, KV blocks, users and latest steps.

        Ages are counted to the moment of the view, and the nanoseconds of steps are of the clock
        that ``now_ns`` was read from, so a reader needs no clock of the engine's machine. Bounded,
        and made only when asked: see ``EngineView``.
        """
        answer = await self._call("view")
        if answer.view is None:
            raise EngineError(answer.error)
        return answer.view

    @property
    def info(self) -> EngineInfo:
        """What the engine said of itself when it was ready; ``EngineDownError`` before."""
        return self._live_session().info

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer, once started."""
        return self._session.tokenizer if self._session is not None else None

    # ---- inside -----------------------------------------------------------------------------

    def _address(self, *, same_engine: bool) -> tuple[str, bytes]:
        """Return the endpoint to connect to and an identity that was not used before.

        Starts an engine where it is our own, unless it is the ``same_engine`` as before.
        """
        raise NotImplementedError

    def _connect(self, endpoint: str, identity: bytes) -> LoopConnection:
        return LoopConnection(endpoint, identity, self._on_message)

    def _check_loop(self) -> None:
        if self._loop is not None and self._loop is not asyncio.get_running_loop():
            raise RuntimeError(
                f"this {type(self).__name__} was started in another event loop and works only "
                "there; make one in each loop"
            )

    def _loop_is_closed(self) -> bool:
        return self._loop is not None and self._loop.is_closed()

    def _check_room(self) -> None:
        """Refuse a new request that would only wait in this process's memory."""
        if self._connected and self._connection is not None and self._connection.stalled:
            # What came while the app kept the loop busy counts.
            self._connection.read()
            if self._connection.stalled:
                raise EngineBusyError("the engine does not read: too much waits for it already")

    async def _start(self) -> None:
        try:
            endpoint, identity = self._address(same_engine=False)
            self._welcome = asyncio.get_running_loop().create_future()
            # Nobody awaits it where the tokenizer is broken too.
            self._welcome.add_done_callback(lambda future: future.cancelled() or future.exception())
            self._connection = self._connect(endpoint, identity)
            self._beating = asyncio.ensure_future(self._beat())
            path = self._tokenizer_path
            # While the engine starts: it takes half as long as that.
            tokenizer = await asyncio.to_thread(_load_tokenizer, path) if path else None
            welcome = await self._welcome
            if not path:
                tokenizer = await asyncio.to_thread(_load_tokenizer, welcome.info.tokenizer)
            from deepinfer.frontend.session import Session

            self._session = Session(welcome.info, tokenizer, self._seed)
            self._receive = timed(self._recorder, "outputs", self._session.receive)
        except BaseException as error:
            if self._connection is not None:
                await self._close(str(error) or "the start was cancelled")
            raise
        finally:
            self._starting = None

    async def _close(self, cause: str) -> None:
        """Leave nothing behind; everyone who still waits learns why."""
        if not self._loop_is_closed():  # nobody waits in a closed loop
            if self._beating is not None:
                self._beating.cancel()
            self._fail(cause)
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    async def _beat(self) -> None:
        """Say hello until welcomed, then send a heartbeat every second, and watch the engine."""
        while True:
            assert self._connection is not None
            self._connection.send(ClientHeartbeat() if self._connected else Hello())
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._alarm.wait(), HEARTBEAT_S)
            self._alarm.clear()
            if self._dead or self._connection is None:
                return
            # Where the app kept the loop busy, what came meanwhile must count before silence does.
            self._connection.read()
            cause = self._cause_of_death(self._connection.silence.seconds())
            same_engine = not cause
            cause = cause or self._loss() or (TAKEN_FOR_GONE if self._forgotten else "")
            refusal = self._refusal()
            # What the engine said before it went counts, too: streams go on, or end, by it.
            while (cause or refusal) and self._connection is not None and self._connection.behind:
                await asyncio.sleep(0)
            if refusal:
                self._fail(refusal)
            elif cause and self._connection is not None:
                self._connect_again(cause, same_engine=same_engine)
            if self._dead:
                return

    def _cause_of_death(self, silent_s: float) -> str:
        """Say why the engine counts as gone, or return an empty string."""
        raise NotImplementedError

    def _refusal(self) -> str:
        """Say why the engine takes no connection of this client, or return an empty string."""
        return ""

    def _loss(self) -> str:
        """Say that the connection ended, though the engine may live, or return an empty string."""
        return ""

    def _connect_again(self, cause: str, *, same_engine: bool) -> None:
        """Go on at another scheduler or as another client, unless that failed too often.

        What is open is submitted again with the welcome.
        """
        assert self._connection is not None
        self._losses += 1
        never_ready = self._session is None and not same_engine
        if never_ready or self._dead or self._losses > LOSSES_ALLOWED:
            self._fail(cause)
            return
        log.warning("%s; connecting again", cause)
        self._connected = self._forgotten = False
        self._connection.close(linger_s=0)
        self._connection = None
        for waiting in self._calls.values():
            if not waiting.done():
                waiting.set_exception(EngineBusyError(f"{cause}; connecting again"))
        try:
            self._connection = self._connect(*self._address(same_engine=same_engine))
        except (ValueError, OSError) as error:
            self._fail(f"{cause}; starting another failed: {error}")

    def _on_welcome(self, message: Welcome) -> None:
        self._connected = True
        self._losses = 0
        if self._welcome is not None and not self._welcome.done():
            self._welcome.set_result(message)
        elif self._session is not None:
            self._deliver(self._session.resubmit(message.info, time.monotonic()))

    def _flush(self) -> None:
        session = self._live_session()
        outbox, session.outbox = session.outbox, []
        if self._connected:  # else all that is open is submitted again with the next welcome
            assert self._connection is not None
            self._connection.send_all(outbox)

    def _live_session(self) -> Session:
        if self._dead or self._session is None:
            raise EngineDownError(self._dead or "the client is not started")
        return self._session

    def _on_message(self, message: ToClient) -> None:
        match message:
            case Welcome() if not self._connected:
                self._on_welcome(message)
            case Answer():
                waiting = self._calls.pop(message.call_id, None)
                if waiting is not None and not waiting.done():
                    waiting.set_result(message)
            case EngineDown():
                self._fail(message.message)
            case Forgotten():
                self._forgotten = True
                self._alarm.set()
            case _ if self._session is not None:
                self._deliver(self._receive(message))

    def _deliver(self, events: list[Event]) -> None:
        for request, item in events:
            request.owner.put(item, closed=request.open_samples == 0)
        self._readers.wake()
        if self._session is not None and self._session.outbox and not self._dead:
            self._flush()

    def _fail(self, cause: str) -> None:
        """The engine is gone: everyone who waits for it learns why, once."""
        self._dead = self._dead or cause
        self._over.set()
        error = EngineDownError(self._dead)
        if self._welcome is not None and not self._welcome.done():
            self._welcome.set_exception(error)
        for waiting in self._calls.values():
            if not waiting.done():
                waiting.set_exception(error)
        self._calls.clear()
        if self._session is not None:
            self._deliver(self._session.fail_all(error))

    async def _call(self, what: str, request_id: str = "") -> Answer:
        await self.start()
        self._live_session()
        if not self._connected or self._connection is None:
            raise EngineBusyError("the connection to the engine is being made again")
        call_id = next(self._call_ids)
        future = self._calls[call_id] = asyncio.get_running_loop().create_future()
        try:
            self._connection.send(Call(call_id, what, request_id))
            return await asyncio.wait_for(future, _CALL_TIMEOUT_S)
        except TimeoutError:
            raise EngineError(f"the engine did not answer {what} in {_CALL_TIMEOUT_S} s") from None
        finally:
            self._calls.pop(call_id, None)


def _is_short(prompt: Prompt, params: SamplingParams | None) -> bool:
    """Whether a prompt is prepared faster than it is handed to another thread."""
    if not isinstance(prompt, str | list) or len(prompt) > _TOKENISE_INLINE_CHARS:
        return False
    chars = len(prompt)
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], dict):
        texts = [text for message in prompt[:33] if isinstance(message, dict)
                 for text in message.values()]  # fmt: skip
        if len(prompt) > 32 or not all(isinstance(text, str) for text in texts):
            return False
        chars += sum(map(len, texts))
    if isinstance(params, SamplingParams) and params.bad_words:
        chars += sum(map(len, params.bad_words))
    return chars <= _TOKENISE_INLINE_CHARS


def _load_tokenizer(folder: str) -> Tokenizer | None:
    """Read the tokenizer of a folder, ``None`` where it has none.

    Imports what is needed to use it as well: that takes long, and is done while an engine starts.
    """
    import deepinfer.frontend.session  # noqa: F401
    from deepinfer.frontend.tokenizer import Tokenizer

    return Tokenizer.from_folder(folder) if (Path(folder) / "tokenizer.json").is_file() else None
