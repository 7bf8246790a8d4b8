"""How long steps take: how long the next one may be left open, and how much prefill it may have."""

from __future__ import annotations

import math
from collections import deque

from deepinfer.wire.steps import StepResult

EARLY = 0.15
"""The part of a step that is left of it, as far as one knows, when the next one is planned."""

SPARE_S = 0.002
"""And so much besides: to plan, to send and to be woken late."""

FIRST_PREFILL = 128
"""Prefill tokens of a step before anything is known of how long they take."""

LEAST_PREFILL = 16
"""Prefill tokens that a step may have in any case, and as many as it has decode rows."""


class Pace:
    """Knows when the step that runs is about to end.

    A plan that was sent is settled: whoever comes after it waits for that step to be computed. So
    where newcomers matter the next plan is made as late as the worker can get it in time.

    Lengths are remembered by size, an eighth of an octave apart, and quicker to fall than to rise:
    a plan that is made too early costs a newcomer some time, one too late leaves the worker idle.
    After a step of a size that is new the next one is planned at once.

    With ``max_step_s`` it also limits how many prefill tokens a step has. A step takes some time
    whatever its prefill, and more the more of that there is. So ``prefill * max_step_s / length``
    lies between what there was and what would have been right, and the limit gets there in a few
    steps, without passing it, whatever a token costs just now.
    """

    def __init__(self, max_step_s: float | None = None) -> None:
        self._max_step_s = max_step_s
        self._prefill = float(FIRST_PREFILL)
        self._length_s: dict[int, float] = {}
        self._planned: deque[tuple[int, int, float]] = deque()
        self._began = 0.0

    @property
    def due(self) -> float:
        """When to plan the step behind the only one in flight."""
        length_s = self._length_s.get(self._planned[0][0], 0.0)
        return self._began + length_s * (1 - EARLY) - SPARE_S

    def prefill_limit(self, num_decode: int) -> float:
        """Return how many prefill tokens the next step may have beside so many decode tokens."""
        if self._max_step_s is None:
            return math.inf
        return max(int(self._prefill), LEAST_PREFILL, num_decode)

    def planned(self, num_decode: int, num_prefill: int, now: float) -> None:
        """A step was planned that computes so many tokens."""
        if not self._planned:
            self._began = now
        self._planned.append((_size(num_decode + num_prefill), num_prefill, now))

    def ended(self, result: StepResult, now: float) -> None:
        """The result of the oldest step was read, and the one behind it runs."""
        size, num_prefill, planned_at = self._planned.popleft()
        self._began = now
        # It is not believed to have run before it was planned.
        took_s = min((result.ended_ns - result.started_ns) / 1e9, now - planned_at)
        known_s = self._length_s.get(size, took_s)
        self._length_s[size] = min(took_s, known_s + (took_s - known_s) / 4)
        # The last tokens of a prompt tell little of what a whole chunk takes.
        if self._max_step_s is not None and 2 * num_prefill >= self._prefill:
            self._learn(num_prefill, self._max_step_s / max(took_s, 1e-6))

    def _learn(self, num_prefill: int, longer: float) -> None:
        """A step with so much prefill could have taken ``longer`` times as long as it did."""
        fits = num_prefill * min(max(longer, 0.25), 2.0)
        if longer < 1.0:
            self._prefill = min(self._prefill, max(fits, 1.0))
        elif num_prefill >= int(self._prefill):
            self._prefill += (fits - self._prefill) / 4

    def restart(self) -> None:
        """What was in flight is lost."""
        self._planned.clear()


def _size(num_tokens: int) -> int:
    octave = max(num_tokens.bit_length() - 4, 0)
    return 8 * octave + (num_tokens >> octave)
