"""What happened to a request and why, bounded for one request and for all of them."""

from __future__ import annotations

from collections import OrderedDict

from deepinfer.wire.messages import StoryEvent

MAX_EVENTS = 64
"""Events kept of one request: the first ones, then only how many more there were, and its end."""

MAX_FINISHED = 1000
"""Finished requests whose stories are kept, the latest ones."""

Detail = str | int | float


class Story:
    """The events of one request."""

    __slots__ = ("_arrival", "_events", "_left_out")

    def __init__(self, arrival: float) -> None:
        self._arrival = arrival
        self._events: list[tuple[float, str, dict[str, Detail]]] = []
        self._left_out = 0

    def tell(self, now: float, event: str, **detail: Detail) -> None:
        """Add an event at ``now`` (seconds, the clock of the arrival)."""
        # The last two places are for "and n more" and the end.
        if len(self._events) >= MAX_EVENTS - 2 and event != "ended":
            self._left_out += 1
            return
        self._events.append((now, event, detail))

    def events(self) -> list[StoryEvent]:
        """Return the events, with a line that says how many were left out."""
        told = [
            StoryEvent(at_ms=(at - self._arrival) * 1e3, event=event, detail=detail)
            for at, event, detail in self._events
        ]
        if self._left_out:
            more = StoryEvent(
                at_ms=told[MAX_EVENTS - 3].at_ms, event="and more", detail={"n": self._left_out}
            )
            told.insert(MAX_EVENTS - 2, more)
        return told

    def text(self) -> str:
        """Return the story in one line, for error messages."""
        return "; ".join(
            f"{event.at_ms:.1f} ms {event.event} {event.detail or ''}".rstrip()
            for event in self.events()
        )


class StoryShelf:
    """The stories of the latest finished requests, by request id."""

    def __init__(self) -> None:
        self._finished: OrderedDict[str, Story] = OrderedDict()

    def __len__(self) -> int:
        return len(self._finished)

    def keep(self, request_id: str, story: Story) -> None:
        """Keep a finished request's story; an earlier one of the same id makes way."""
        self._finished.pop(request_id, None)
        self._finished[request_id] = story
        if len(self._finished) > MAX_FINISHED:
            self._finished.popitem(last=False)

    def find(self, request_id: str) -> Story | None:
        """Return the story of a finished request, ``None`` when it is unknown or forgotten."""
        return self._finished.get(request_id)
