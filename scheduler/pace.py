"""How long steps take: how long the next one may be left open, and how much prefill it may have."""

from __future__ import annotations

import math
from collections import deque
from typing import NamedTuple

from deepinfer.wire.steps import StepResult

EARLY = 0.15
"""The part of a step that is left of it, as far as one knows, when the next one is planned."""

SPARE_S = 0.002
"""And so much besides: to plan, to send and to be woken late."""

FIRST_PREFILL = 128
"""Prefill tokens of a step before anything is known of how long they take."""

LEAST_PREFILL = 16
"""Prefill tokens that a step may have in any case, and as many as it has decode rows."""


class PrefillLimit:
    """How many prefill tokens a step may have, so that it takes about ``max_s``.

    A step takes some time whatever its prefill, and more the more of that there is. So
    ``prefill * max_s / length`` lies between what there was and what would have been right, and the
    limit gets there in a few steps, without passing it, whatever a token costs just now.
    """

    def __init__(self, max_s: float) -> None:
        self._max_s = max_s
        self._tokens = float(FIRST_PREFILL)

    def tokens(self, num_decode: int) -> int:
        """Return the limit for a step with so many decode tokens."""
        return max(int(self._tokens), LEAST_PREFILL, num_decode)

    def learn(self, num_prefill: int, took_s: float) -> None:
        """A step with so much prefill took so long."""
        if 2 * num_prefill < self._tokens:
            return  # the last tokens of a prompt tell little of what a whole chunk takes
        longer = self._max_s / max(took_s, 1e-6)
        fits = num_prefill * min(max(longer, 0.25), 2.0)
        if longer < 1.0:
            self._tokens = min(self._tokens, max(fits, 1.0))
        elif num_prefill >= int(self._tokens):
            self._tokens += (fits - self._tokens) / 4


class _Planned(NamedTuple):
    size: int
    num_prefill: int
    light: bool
    at: float


class Pace:
    """Knows when the step that runs is about to end.

    A plan that was sent is settled: whoever comes after it waits for that step to be computed. So
    where newcomers matter the next plan is made as late as the worker can get it in time.

    Lengths are remembered by size, an eighth of an octave apart, and quicker to fall than to rise:
    a plan that is made too early costs a newcomer some time, one too late leaves the worker idle.
    After a step of a size that is new the next one is planned at once.

    With ``max_step_s`` it also limits prefill: to that time, and to twice as much in the steps that
    are kept for a light tenant's prompt. What is learned of one kind says little of the other:
    contexts are long in the first, and short in the second.
    """

    def __init__(self, max_step_s: float | None = None) -> None:
        self._limits = (
            {light: PrefillLimit(max_step_s * (2 if light else 1)) for light in (False, True)}
            if max_step_s is not None
            else {}
        )
        self._length_s: dict[int, float] = {}
        self._planned: deque[_Planned] = deque()
        self._began = 0.0

    @property
    def due(self) -> float:
        """When to plan the step behind the only one in flight."""
        length_s = self._length_s.get(self._planned[0].size, 0.0)
        return self._began + length_s * (1 - EARLY) - SPARE_S

    def prefill_limit(self, num_decode: int, light: bool) -> float:
        """Return how many prefill tokens a step may have beside so many decode tokens.

        ``light`` if it is kept for a light tenant's prompt.
        """
        return self._limits[light].tokens(num_decode) if self._limits else math.inf

    def planned(self, num_decode: int, num_prefill: int, light: bool, now: float) -> None:
        """A step was planned that computes so many tokens."""
        if not self._planned:
            self._began = now
        self._planned.append(_Planned(_size(num_decode + num_prefill), num_prefill, light, now))

    def ended(self, result: StepResult, now: float) -> None:
        """The result of the oldest step was read, and the one behind it runs."""
        planned = self._planned.popleft()
        self._began = now
        # It is not believed to have run before it was planned.
        took_s = min((result.ended_ns - result.started_ns) / 1e9, now - planned.at)
        known_s = self._length_s.get(planned.size, took_s)
        self._length_s[planned.size] = min(took_s, known_s + (took_s - known_s) / 4)
        if self._limits and planned.num_prefill:
            self._limits[planned.light].learn(planned.num_prefill, took_s)

    def restart(self) -> None:
        """What was in flight is lost."""
        self._planned.clear()


def _size(num_tokens: int) -> int:
    octave = max(num_tokens.bit_length() - 4, 0)
    return 8 * octave + (num_tokens >> octave)
