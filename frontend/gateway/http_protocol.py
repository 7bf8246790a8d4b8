"""uvicorn's HTTP protocol, with bounds on what one connection may cost.

uvicorn bounds neither the size of a request's head nor the time a request or a reader may take,
tells only the last of several pipelined requests that the client left, and takes the body of a
request that asks for another protocol for a request of its own. All of that is one connection's
state, so it is kept here and not in the handlers.
"""

from __future__ import annotations

import asyncio
import resource
from http import HTTPStatus
from typing import Any

import httptools
import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from deepinfer.frontend.gateway.errors import ApiError, unavailable

MAX_HEAD_BYTES = 64 << 10
"""Request line and headers."""
MAX_PIPELINED = 32
"""Requests that wait behind the one that is answered."""
HEAD_S = 30.0
"""How long the head of a request may take, the first one from the connection on."""
BODY_S = 120.0
"""How long its body may take after that."""
UNREAD_S = 60.0
"""How long a client may leave its socket full without reading a byte."""
LINGER_S = 2.0
"""How long what a refused client still sends is read and dropped, so that it reads why: a
connection that is closed with something unread is reset."""
KEEP_ALIVE_S = 75
"""How long a connection is kept for a further request: longer than clients keep theirs (5 s for
httpx, 4 s for Node.js), so that no request meets a closing connection."""

_TOO_MANY = unavailable("too many connections are open", 1.0)
_HEAD_TOO_LARGE = ApiError(
    431, f"the head of a request may have at most {MAX_HEAD_BYTES} bytes", code="head_too_large"
)
_MALFORMED = ApiError(400, "this is not a valid HTTP/1.1 request", code="malformed_http")
_TOO_SLOW = ApiError(408, "the request did not arrive in time", code="request_timeout")

_SPARE_DESCRIPTORS = 128


def raise_descriptor_limit() -> int:
    """Let this process open as many files as it may; return how many connections that allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        soft = hard
    return max(16, min(soft, 1 << 16) - _SPARE_DESCRIPTORS)


class BoundedProtocol(HttpToolsProtocol):
    """One connection. ``max_connections`` further ones are turned away with status 503."""

    max_connections = 1 << 16

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head_bytes = 0
        self._in_head = False
        self._refusal = _MALFORMED
        self._answering: RequestResponseCycle | None = None
        self._turned_away = False
        self._deadline: asyncio.TimerHandle | None = None
        self._reader: asyncio.TimerHandle | None = None

    # ---- the connection ---------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take a connection, or turn it away."""
        super().connection_made(transport)
        if len(self.connections) > self.max_connections:
            self._turn_away(_TOO_MANY)
        else:
            self._within(HEAD_S)

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the request that is being answered, also where others wait behind it."""
        self._within(None)
        self._stop_watching_reader()
        if (cycle := self._open_cycle) is not None:
            cycle.disconnected = True
            cycle.message_event.set()
        self.pipeline.clear()
        super().connection_lost(exc)

    # ---- what comes in ----------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        """Feed the parser, unless the head of a request has become too large."""
        if self.transport.is_closing() or self._turned_away:
            return
        began_before = self._in_head
        self._unset_keepalive_if_required()
        self._feed(data)
        if began_before and self._in_head:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self._turn_away(_HEAD_TOO_LARGE)

    def _feed(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            if self.parser.get_method() == b"CONNECT":
                self.send_400_response("")
                return
            self._feed(self._without_upgrade() + data[upgrade.args[0] :])
        except httptools.HttpParserError:
            self.send_400_response("")

    def _without_upgrade(self) -> bytes:
        """The head of a request again, that asks for another protocol no more.

        Who speaks no other protocol ignores that (RFC 9110, 7.8), but the parser takes what follows
        for the other one.
        """
        lines = [b"%s %s HTTP/%s" % (
            self.parser.get_method(), self.url, self.parser.get_http_version().encode()
        )]  # fmt: skip
        for name, value in self.headers:
            if name == b"connection":
                options = [option.strip() for option in value.split(b",")]
                value = b", ".join(each for each in options if each.lower() != b"upgrade")
            if name != b"upgrade":
                lines.append(name + b": " + value)
        self.parser = httptools.HttpRequestParser(self)
        return b"\r\n".join(lines) + b"\r\n\r\n"

    def on_message_begin(self) -> None:
        """The first byte of a request."""
        super().on_message_begin()
        self._in_head = True
        self._head_bytes = 0
        self._within(HEAD_S)

    def on_headers_complete(self) -> None:
        """The head of a request is there; only so many may wait for their turn."""
        self._in_head = False
        size = len(self.url) + sum(len(name) + len(text) for name, text in self.headers)
        if size > MAX_HEAD_BYTES:
            self._refusal = _HEAD_TOO_LARGE
        if size > MAX_HEAD_BYTES or len(self.pipeline) >= MAX_PIPELINED:
            raise ValueError("more than one connection may ask for")
        if self.parser.should_upgrade():
            return
        super().on_headers_complete()
        self._within(BODY_S)
        # uvicorn stops reading where requests wait; but who does not read does not see a client
        # leave.
        self.flow.resume_reading()

    def on_message_complete(self) -> None:
        """A request is complete."""
        if self.parser.should_upgrade():
            return
        super().on_message_complete()
        self._within(None)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answering = cycle
        super()._start_asgi_task(cycle, app)

    def send_400_response(self, msg: str) -> None:
        """Refuse what the parser, or a bound, did not let through."""
        self._turn_away(self._refusal)

    # ---- time -------------------------------------------------------------------------------

    def timeout_keep_alive_handler(self) -> None:
        """Leave a connection that nobody used; what it left unread is dropped."""
        self.transport.abort()

    @property
    def _open_cycle(self) -> RequestResponseCycle | None:
        """The request that is being answered."""
        cycle = self._answering
        return cycle if cycle is not None and not cycle.response_complete else None

    def _within(self, seconds: float | None) -> None:
        """What is expected now must come within so many seconds."""
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = (
            None if seconds is None else self.loop.call_later(seconds, self._too_late, seconds)
        )

    def _too_late(self, seconds: float) -> None:
        cycle = self._open_cycle
        if cycle is not None and not cycle.more_body:
            self._within(seconds)  # an earlier request is answered still, this one has to wait
        elif cycle is not None and cycle.response_started:
            self.transport.abort()
        else:
            self._turn_away(_TOO_SLOW)

    def _turn_away(self, error: ApiError) -> None:
        self._within(None)
        content = msgspec.json.encode(error.body())
        head = {
            "content-type": "application/json",
            "content-length": str(len(content)),
            "connection": "close",
            **error.headers(),
        }
        lines = [f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}"]
        lines += [f"{name}: {text}" for name, text in head.items()]
        self.transport.write("\r\n".join(lines).encode() + b"\r\n\r\n" + content)
        if self._open_cycle is not None:
            self.transport.close()  # what is still answered must not go on behind this
        else:
            self._turned_away = True
            self.transport.write_eof()
            self._deadline = self.loop.call_later(LINGER_S, self.transport.close)
        # A transport that closes waits for its reader for ever.
        self._reader = self.loop.call_later(UNREAD_S, self.transport.abort)

    # ---- readers ----------------------------------------------------------------------------

    def pause_writing(self) -> None:
        """The client does not read as fast as it is written to."""
        super().pause_writing()
        self._watch_reader()

    def resume_writing(self) -> None:
        """The client has read."""
        super().resume_writing()
        if not self.transport.is_closing():
            self._stop_watching_reader()

    def _watch_reader(self) -> None:
        unread = self.transport.get_write_buffer_size()
        self._reader = self.loop.call_later(UNREAD_S, self._check_reader, unread)

    def _check_reader(self, before: int) -> None:
        if self.transport.get_write_buffer_size() >= before:
            self.transport.abort()
        else:
            self._watch_reader()

    def _stop_watching_reader(self) -> None:
        if self._reader is not None:
            self._reader.cancel()
            self._reader = None
