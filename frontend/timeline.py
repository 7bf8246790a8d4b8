"""A request's story as lines that a person reads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from deepinfer.wire.messages import StoryEvent


def timeline(events: Sequence[StoryEvent]) -> Iterator[str]:
    """Yield one line per event: milliseconds since the arrival, since the last event, what, why."""
    yield f"{'at ms':>12} {'+ms':>10}  event"
    before = 0.0
    for event in events:
        details = "  ".join(f"{name} {_shown(value)}" for name, value in event.detail.items())
        line = f"{event.at_ms:12.1f} {event.at_ms - before:10.1f}  {event.event:<14} {details}"
        yield line.rstrip()
        before = event.at_ms


def _shown(value: str | int | float) -> str:
    return f"{value:.1f}" if isinstance(value, float) else str(value)
