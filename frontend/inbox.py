"""Where the outputs of a request wait for whoever iterates over them."""

from __future__ import annotations

import asyncio
from collections import deque

from deepinfer.frontend.outputs import RequestOutput

MAX_BATCH = 128
"""Outputs that are taken at once: what is done with them must not keep the loop long."""

WOKEN_PER_TURN = 64
"""Readers that go on in one turn of the loop, for the same reason."""


class Readers:
    """Wakes the readers of one loop in order, so many a turn.

    With more of them, and less time, they come by turns and find more in their inboxes.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._more_next_turn = False

    def add(self, reader: asyncio.Future[None]) -> None:
        """Wake this one with the next ``wake``, or a later turn."""
        self._waiting.append(reader)

    def wake(self) -> None:
        """Wake those that may go on in this turn; the others follow by themselves."""
        if not self._more_next_turn:
            self._wake_some()

    def _wake_some(self) -> None:
        for _ in range(min(WOKEN_PER_TURN, len(self._waiting))):
            reader = self._waiting.popleft()
            if not reader.done():  # else it was cancelled
                reader.set_result(None)
        self._more_next_turn = bool(self._waiting)
        if self._more_next_turn:
            self._loop.call_soon(self._wake_some)


class Inbox:
    """Outputs of one request between the connection and whoever iterates.

    What a slow reader leaves here is bounded by the ``max_tokens`` of its request.
    """

    def __init__(self, readers: Readers) -> None:
        self._readers = readers
        self.closed = asyncio.Event()
        """Set when the last item came, or nobody reads any more."""
        self._outputs: deque[RequestOutput] = deque()
        self._error: Exception | None = None
        self._reader: asyncio.Future[None] | None = None

    @property
    def empty(self) -> bool:
        """Whether ``take`` would have nothing."""
        return not self._outputs and self._error is None

    def put(self, item: RequestOutput | Exception, *, closed: bool) -> None:
        """Add an output; after an error nothing comes. The reader is woken by ``Readers.wake``."""
        if isinstance(item, Exception):
            self._error = item
        else:
            self._outputs.append(item)
        if closed:
            self.closed.set()
        if self._reader is not None:
            self._readers.add(self._reader)
            self._reader = None

    async def take(self) -> list[RequestOutput]:
        """Return what waits, the oldest first, as soon as there is something.

        Raises the error that came, when no output waits before it. There is one reader.
        """
        outputs = self._outputs
        if not outputs:
            if self._error is None:
                self._reader = asyncio.get_running_loop().create_future()
                await self._reader
            if not outputs and self._error is not None:
                error, self._error = self._error, None
                raise error
        if len(outputs) > MAX_BATCH:
            return [outputs.popleft() for _ in range(MAX_BATCH)]
        taken = list(outputs)
        outputs.clear()
        return taken
