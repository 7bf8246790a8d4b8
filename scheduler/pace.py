"""How long steps take, and how long the next one may be left open while one runs."""

from __future__ import annotations

from collections import deque

from deepinfer.wire.steps import StepResult

EARLY = 0.15
"""The part of a step that is left of it, as far as one knows, when the next one is planned."""

SPARE_S = 0.002
"""And so much besides: to plan, to send and to be woken late."""


class Pace:
    """Knows when the step that runs is about to end.

    A plan that was sent is settled: whoever comes after it waits for that step to be computed. So
    where newcomers matter the next plan is made as late as the worker can get it in time.

    Lengths are remembered by size, an eighth of an octave apart, and quicker to fall than to rise:
    a plan that is made too early costs a newcomer some time, one too late leaves the worker idle.
    After a step of a size that is new the next one is planned at once.
    """

    def __init__(self) -> None:
        self._length_s: dict[int, float] = {}
        self._planned: deque[tuple[int, float]] = deque()
        self._began = 0.0

    @property
    def due(self) -> float:
        """When to plan the step behind the only one in flight."""
        length_s = self._length_s.get(self._planned[0][0], 0.0)
        return self._began + length_s * (1 - EARLY) - SPARE_S

    def planned(self, num_tokens: int, now: float) -> None:
        """A step was planned that computes so many tokens."""
        if not self._planned:
            self._began = now
        self._planned.append((_size(num_tokens), now))

    def ended(self, result: StepResult, now: float) -> None:
        """The result of the oldest step was read, and the one behind it runs."""
        size, planned_at = self._planned.popleft()
        self._began = now
        # It is not believed to have run before it was planned.
        took_s = min((result.ended_ns - result.started_ns) / 1e9, now - planned_at)
        known_s = self._length_s.get(size, took_s)
        self._length_s[size] = min(took_s, known_s + (took_s - known_s) / 4)

    def restart(self) -> None:
        """What was in flight is lost."""
        self._planned.clear()


def _size(num_tokens: int) -> int:
    octave = max(num_tokens.bit_length() - 4, 0)
    return 8 * octave + (num_tokens >> octave)
