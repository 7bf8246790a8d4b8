"""What each generating call came to: for the usage ledger, the metrics and the spans."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime

from deepinfer.frontend.gateway import ledger
from deepinfer.frontend.gateway.ledger import Ledger
from deepinfer.frontend.gateway.metrics import Metrics
from deepinfer.frontend.gateway.openai_answers import Usage
from deepinfer.frontend.gateway.tracing import Tracing
from deepinfer.frontend.outputs import RequestOutput
from deepinfer.wire.messages import StoryEvent

log = logging.getLogger("deepinfer.gateway")

CLIENT_LEFT = 499
"""The status that nginx gave to calls whose client left before the answer."""


@dataclass(slots=True)
class Record:
    """One call. Times are seconds of ``time.monotonic``; ``began_ns`` is the wall clock."""

    tenant: str
    endpoint: str
    request_id: str
    engine_ids: list[str]
    """The engine's ids of its prompts."""
    model: str
    usage: Usage
    prompt_tokens: list[int]
    """Of each prompt."""
    began: float = field(default_factory=time.monotonic)
    began_ns: int = field(default_factory=time.time_ns)
    queued_s: float | None = None
    """How long it waited for its tenant's turn; ``None`` when it was not let in."""
    first_token: float | None = None
    seconds: float = 0.0
    """From its arrival to its end."""
    status: int = 0
    """The HTTP status; for a stream that failed later, the one it would have had."""
    finish_reasons: list[str] = field(default_factory=list)
    finish_details: list[str] = field(default_factory=list)
    _last_tokens: dict[tuple[int, int], tuple[int, float]] = field(default_factory=dict)


class Accounts:
    """Keeps the records of calls while they run, and hands them on at their end.

    ``story`` asks the engine what happened to a request; only needed with ``tracing``.
    """

    def __init__(
        self,
        metrics: Metrics,
        story: Callable[[str], Awaitable[list[StoryEvent]]],
        usage_ledger: Ledger | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        self.metrics = metrics
        self._story = story
        self._ledger = usage_ledger
        self._tracing = tracing
        self._exports: set[asyncio.Task[None]] = set()

    def note(self, record: Record, prompt: int, output: RequestOutput) -> int:
        """Take in an output of a prompt; return how many tokens are to be paid for by it.

        That is one or none, and what the prompt turned out to have beyond what was known.
        """
        now = time.monotonic()
        choice = prompt, output.index
        count, last = record._last_tokens.get(choice, (0, now))
        new = output.num_output_tokens - count
        # The engine puts the tokens of an image in the place of its placeholder.
        grown = max(0, output.prompt_len - record.prompt_tokens[prompt])
        record.prompt_tokens[prompt] += grown
        record.usage.prompt_tokens += grown
        if new:
            record._last_tokens[choice] = output.num_output_tokens, now
            if count:
                self.metrics.token_gap(now - last)
            elif record.first_token is None:
                record.first_token = now
                self.metrics.first_token(now - record.began)
        if output.finished:
            record.finish_reasons.append(output.finish_reason)
            record.finish_details.append(output.finish_detail)
        return new + grown

    def close(self, record: Record, status: int, code: str, headers: Mapping[str, str]) -> None:
        """The call is over. ``code`` names the error, if it was one. The first time counts."""
        if record.status:
            return
        record.seconds = time.monotonic() - record.began
        record.status = status
        if record.queued_s is None:
            return
        if not record.finish_reasons:
            left = status == CLIENT_LEFT
            record.finish_reasons.append("abort" if left else "error")
            record.finish_details.append("disconnect" if left else code)
        usage = record.usage
        if record.first_token is None:
            # A prompt counts when it brought something.
            usage.prompt_tokens = 0
        self.metrics.request_seconds(record.seconds)
        self.metrics.tokens(
            record.tenant, usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens
        )
        if self._ledger is not None:
            self._ledger.write(_entry(record))
        if self._tracing is not None:
            task = asyncio.ensure_future(self._export(self._tracing, record, dict(headers)))
            self._exports.add(task)
            task.add_done_callback(self._exports.discard)

    async def _export(self, tracing: Tracing, record: Record, headers: dict[str, str]) -> None:
        stories = []
        for engine_id in record.engine_ids:
            try:
                stories.append(await self._story(engine_id))
            except Exception as error:  # a span without events is better than none
                log.debug("no story of %s: %s", engine_id, error)
        tracing.export(record, headers, stories)

    async def finish(self) -> None:
        """Wait for the last spans, and close what was written to."""
        if self._exports:
            await asyncio.wait(self._exports)
        if self._tracing is not None:
            await asyncio.to_thread(self._tracing.close)
        if self._ledger is not None:
            self._ledger.close()


def _entry(record: Record) -> ledger.Usage:
    usage = record.usage
    return ledger.Usage(
        time=datetime.now(UTC),
        tenant=record.tenant,
        request_id=record.request_id,
        endpoint=record.endpoint,
        model=record.model,
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.cached_tokens,
        completion_tokens=usage.completion_tokens,
        finish_reason=record.finish_reasons[-1],
        finish_detail=record.finish_details[-1],
        queue_ms=(record.queued_s or 0.0) * 1e3,
        total_ms=record.seconds * 1e3,
    )
