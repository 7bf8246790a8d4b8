"""One HTTP call: its body within bounds, its answer whole or as server-sent events, its end.

A call whose client leaves is cancelled, whether it waits, computes or streams. (A client that does
not read is made to leave by ``http_protocol``.)
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec
from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from deepinfer.frontend.gateway.errors import ApiError, as_api_error, unavailable

log = logging.getLogger("deepinfer.gateway")

# How often a call is looked at, and how long a stream may be silent before a comment shows that it
# lives.
_TICK_S = 5.0
_SILENCE_S = 10.0

# A body that was refused is still read so long, so that its sender reads why.
_LINGER_S = 10.0
_JSON = "application/json"

_EVENT_STREAM = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would collect the events otherwise
)


class Call:
    """What a handler sees of a call. It answers once: ``reply`` or ``stream``."""

    def __init__(self, scope: Scope, body: bytes, send: Send) -> None:
        self.headers = Headers(scope=scope)
        self.path: str = scope["path"]
        self.path_params: dict[str, Any] = scope.get("path_params", {})
        self.body = body
        self.tenant = ""
        """Whose key it came with."""
        self.status = 0
        """The status that was sent; 0 before."""
        self.left = False
        """Whether the client hung up before it was answered."""
        self.answer_headers: dict[str, str] = {}
        """Further headers for the answer."""
        self._send = send
        self._streams = False
        self._over = False
        self._written_at = time.monotonic()
        # The comments come from another task than the answer.
        self._writing = asyncio.Lock()

    async def reply(
        self, content: object, status: int = 200, headers: dict[str, str] | None = None
    ) -> None:
        """Answer with one JSON object."""
        body = msgspec.json.encode(content)
        pairs = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        async with self._writing:
            await self._begin(status, pairs, headers)
            await self._write(body, more=False)

    async def stream(self, batches: AsyncIterator[list[bytes]]) -> None:
        """Answer with an event for each JSON object, and ``[DONE]``; a list is sent in one piece.

        Status and headers are sent with the first event, or when none came for a while: an error
        before it is answered with its own status, a later one becomes the last event.
        """
        self._streams = True
        async for batch in batches:
            if batch:
                await self._chunk(b"".join(map(_event, batch)))
        await self._chunk(_event(b"[DONE]"), last=True)

    async def fail(self, error: ApiError) -> None:
        """Answer with an error, in whichever way is still possible."""
        if self.status == 0:
            await self.reply(error.body(), error.status, error.headers())
        elif self._streams:
            await self._chunk(_event(msgspec.json.encode(error.body())), last=True)

    async def show_life(self) -> None:
        """Send a comment where a stream has long been silent.

        So proxies and clients do not take a request that waits for one that is lost.
        """
        silent_s = time.monotonic() - self._written_at
        if self._streams and silent_s > _SILENCE_S and not self._writing.locked():
            await self._chunk(b": still working\n\n")

    async def _chunk(self, chunk: bytes, *, last: bool = False) -> None:
        async with self._writing:
            if self._over:
                return
            if self.status == 0:
                await self._begin(200, list(_EVENT_STREAM), None)
            await self._write(chunk, more=not last)

    async def _begin(
        self, status: int, pairs: list[tuple[bytes, bytes]], headers: dict[str, str] | None
    ) -> None:
        self.status = status
        others = {**self.answer_headers, **(headers or {})}
        pairs += [(name.encode("latin-1"), text.encode("latin-1")) for name, text in others.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": pairs})

    async def _write(self, body: bytes, *, more: bool) -> None:
        self._over = not more
        await self._send({"type": "http.response.body", "body": body, "more_body": more})
        self._written_at = time.monotonic()


def _event(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"


Handler = Callable[[Call], Awaitable[None]]


class Bodies:
    """How large the bodies of all open calls may be, one by one and together."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.max_bytes_together = 64 * max_bytes
        self.held = 0

    async def read(self, headers: Headers, receive: Receive) -> bytes | None:
        """Return a body, ``None`` when the client left before it was complete.

        Whoever gets a body gives its bytes back (``held``) with the end of the call. ``ApiError``
        says that it is too much.
        """
        announced = headers.get("content-length", "")
        if announced.isdigit():
            self._check(int(announced[:20]), 0)
        parts: list[bytes] = []
        size = 0
        try:
            while (message := await receive())["type"] != "http.disconnect":
                part = message.get("body", b"")
                self._check(size + len(part), len(part))
                parts.append(part)
                size += len(part)
                self.held += len(part)
                if not message.get("more_body", False):
                    return b"".join(parts)
            self.held -= size
            return None
        except BaseException:
            self.held -= size
            raise

    def _check(self, size: int, more: int) -> None:
        if size > self.max_bytes:
            message = f"the body may have at most {self.max_bytes} bytes (--max-body-bytes)"
            raise ApiError(413, message, code="body_too_large")
        if self.held + more > self.max_bytes_together:
            raise unavailable("the bodies of too many requests are open already", 1.0)


class Endpoint:
    """The ASGI app of one handler, for JSON in bodies within bounds."""

    def __init__(self, handler: Handler, bodies: Bodies) -> None:
        self._handler = handler
        self._bodies = bodies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one call."""
        call = Call(scope, b"", send)
        try:
            _check_content_type(call.headers)
            body = await self._bodies.read(call.headers, receive)
        except ApiError as error:
            await _refuse(call, error, receive, send)
            return
        if body is None:
            return
        call.body = body
        try:
            await self._answer(call, receive)
        finally:
            self._bodies.held -= len(body)

    async def _answer(self, call: Call, receive: Receive) -> None:
        """Let the handler work until it has answered or the client left."""
        work = asyncio.ensure_future(self._work(call))
        gone = asyncio.ensure_future(_disconnect(receive))
        try:
            while not work.done() and not gone.done():
                await asyncio.wait(
                    (work, gone), timeout=_TICK_S, return_when=asyncio.FIRST_COMPLETED
                )
                if not work.done() and not gone.done():
                    await call.show_life()
        finally:
            call.left = gone.done() and not work.done()
            gone.cancel()
            work.cancel()
            await asyncio.wait((work,))

    async def _work(self, call: Call) -> None:
        try:
            await self._handler(call)
        except Exception as error:
            known = as_api_error(error)
            if known.code == "internal_error":
                log.error("a request failed", exc_info=error)
            await call.fail(known)


def _check_content_type(headers: Headers) -> None:
    """Refuse what a web page may send without its browser asking us first."""
    given = headers.get("content-type", "")
    if given.partition(";")[0].strip().lower() != _JSON:
        raise ApiError(415, f"content-type must be {_JSON}", code="unsupported_media_type")


async def _refuse(call: Call, error: ApiError, receive: Receive, send: Send) -> None:
    """Answer before the body was read, and end the connection.

    What is left of the body would be taken for the next request. It is read for a while and
    dropped: a connection that is closed with something unread is reset, and its sender might never
    read the answer.
    """
    content = msgspec.json.encode(error.body())
    pairs = {
        "content-type": _JSON,
        "content-length": str(len(content)),
        "connection": "close",
        **error.headers(),
    }
    headers = [(name.encode(), text.encode()) for name, text in pairs.items()]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": content, "more_body": True})
    # A client that waits for "100 Continue" is told to go on by a read.
    if "expect" not in call.headers:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LINGER_S):
                while (await receive()).get("more_body", False):
                    pass
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
