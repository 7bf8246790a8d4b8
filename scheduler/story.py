"""What happened to a request and why, bounded for one request and for all of them."""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from deepinfer.wire.messages import StoryEvent

MAX_EVENTS = 64
"""Events kept of one request: the first ones, then only how many more there were, and its end."""

MAX_FINISHED = 1000
"""Finished requests whose stories are kept, the latest ones."""

Detail = str | int | float


class Whose(NamedTuple):
    """Whose a request is."""

    request_id: str
    user_id: str
    client_key: bytes
    """That its client has proved; empty where the endpoint asks for none."""


class Story:
    """The events of one request."""

    __slots__ = ("_arrival", "_events", "_left_out", "whose")

    def __init__(self, arrival: float, whose: Whose) -> None:
        self.whose = whose
        self._arrival = arrival
        self._events: list[tuple[float, str, Whose | None, dict[str, Detail]]] = []
        self._left_out = 0

    def tell(
        self, now: float, event: str, by: Whose | str | None = None, /, **detail: Detail
    ) -> None:
        """Add an event at ``now`` (seconds, the clock of the arrival).

        ``by`` is the cause. Of another request that is its id, and the event has ``by_user`` where
        that is another user's; what else is told of it has a name that begins with ``by_`` too.
        """
        # The last two places are for "and n more" and the end.
        if len(self._events) >= MAX_EVENTS - 2 and event != "ended":
            self._left_out += 1
            return
        other = by if isinstance(by, Whose) else None
        if other is not None and other.user_id != self.whose.user_id:
            detail = {"by_user": other.user_id, **detail}
        if by is not None:
            detail = {"by": by.request_id if isinstance(by, Whose) else by, **detail}
        self._events.append((now, event, other, detail))

    def events(self, reader: bytes | None = None) -> list[StoryEvent]:
        """Return the events, with a line that says how many were left out.

        A ``reader``, a client by its key, is told nothing of other clients' requests.
        """
        told = []
        for at, event, other, detail in self._events:
            each = StoryEvent(at_ms=(at - self._arrival) * 1e3, event=event, detail=detail)
            foreign = reader is not None and other is not None and other.client_key != reader
            told.append(each.without_other("another client's request") if foreign else each)
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
    """The stories of the latest finished requests, by request id and the key of the client."""

    def __init__(self) -> None:
        self._finished: OrderedDict[tuple[str, bytes], Story] = OrderedDict()

    def __len__(self) -> int:
        return len(self._finished)

    def keep(self, story: Story) -> None:
        """Keep a finished request's story; an earlier one of the same id makes way."""
        place = story.whose.request_id, story.whose.client_key
        self._finished.pop(place, None)
        self._finished[place] = story
        if len(self._finished) > MAX_FINISHED:
            self._finished.popitem(last=False)

    def find(self, request_id: str, reader: bytes | None = None) -> Story | None:
        """Return the story of a finished request, ``None`` when it is unknown or forgotten.

        A ``reader`` finds only what belongs to this key; without one it is the latest of all.
        """
        if reader is not None:
            return self._finished.get((request_id, reader))
        latest = reversed(self._finished.values())
        return next((story for story in latest if story.whose.request_id == request_id), None)
