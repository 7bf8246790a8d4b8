"""How long another process has said nothing."""

from __future__ import annotations

import time

_SLACK_S = 0.5


class Silence:
    """Seconds since a peer was heard, of the time in which this process could hear it.

    ``seconds`` is asked for about every ``interval_s``. Where much more went by between two
    questions, this process was stopped (Ctrl-Z, a paused machine) or did something else, and the
    peer was perhaps stopped with it: that time counts for half a second.
    """

    def __init__(self, interval_s: float) -> None:
        self._longest_s = interval_s + _SLACK_S
        self.heard()

    def heard(self) -> None:
        """The peer said something, just now."""
        self._since = self._asked = time.monotonic()

    def seconds(self) -> float:
        """Return how long it has been silent."""
        now = time.monotonic()
        if now - self._asked > self._longest_s:
            self._since += now - self._asked - _SLACK_S
        self._asked = now
        return now - self._since
