"""OpenTelemetry spans of requests: one a call, with its story as events."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from deepinfer.wire.messages import StoryEvent

if TYPE_CHECKING:
    from deepinfer.frontend.gateway.accounts import Record

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")


class Tracing:
    """Exports spans over OTLP/HTTP, from a thread of its own and in batches.

    Where to and how much of it is OpenTelemetry's own configuration: its environment variables.
    Attributes follow its semantic conventions for generative AI.
    """

    def __init__(self) -> None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        resource = Resource.create({SERVICE_NAME: os.environ.get("OTEL_SERVICE_NAME", "deepinfer")})
        self._provider = TracerProvider(resource=resource)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        self._tracer = self._provider.get_tracer("deepinfer.gateway")
        self._propagator = TraceContextTextMapPropagator()

    @classmethod
    def from_environment(cls) -> Tracing | None:
        """Return a tracing where an endpoint is configured; ``ValueError`` without the packages."""
        if not any(os.environ.get(name) for name in _ENDPOINTS):
            return None
        try:
            return cls()
        except ImportError as error:
            raise ValueError(
                f"{_ENDPOINTS[0]} is set, but OpenTelemetry is not installed ({error}): "
                "pip install 'deepinfer[otel]'"
            ) from error

    def export(
        self,
        record: Record,
        headers: Mapping[str, str],
        stories: Iterable[list[StoryEvent]],
    ) -> None:
        """Make the span of a call that is over; its parent is that of a ``traceparent`` header."""
        from opentelemetry.trace import SpanKind, Status, StatusCode

        operation = "chat" if "chat" in record.endpoint else "text_completion"
        usage = record.usage
        attributes: dict[str, Any] = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "deepinfer",
            "gen_ai.request.model": record.model,
            "gen_ai.response.id": record.request_id,
            "gen_ai.usage.input_tokens": usage.prompt_tokens,
            "gen_ai.usage.output_tokens": usage.completion_tokens,
            "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
            "gen_ai.response.finish_reasons": record.finish_reasons,
            "deepinfer.tenant": record.tenant,
            "deepinfer.finish_details": record.finish_details,
            "http.route": record.endpoint,
            "http.response.status_code": record.status,
        }
        if record.first_token is not None:
            attributes["gen_ai.server.time_to_first_token"] = record.first_token - record.began
        span = self._tracer.start_span(
            f"{operation} {record.model}",
            context=self._propagator.extract(headers),
            kind=SpanKind.SERVER,
            attributes=attributes,
            start_time=record.began_ns,
        )
        for story in stories:
            for event in story:
                at = record.began_ns + int(event.at_ms * 1e6)
                span.add_event(event.event, dict(event.detail), timestamp=at)
        if record.status >= 500:
            span.set_status(Status(StatusCode.ERROR))
        span.end(record.began_ns + int(record.seconds * 1e9))

    def close(self) -> None:
        """Export what waits."""
        self._provider.shutdown()
