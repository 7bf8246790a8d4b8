"""Where the time of a device worker's steps went, as the worker writes it down."""

from __future__ import annotations

import msgspec


class StepPart(msgspec.Struct):
    """One part of the steps of a kind: a kernel, the sampling, the time between steps, …

    ``floor_ms`` is the least that the machine could take for it: of each call the larger of bytes
    moved over the measured read bandwidth and operations over the measured peak. 0: none is known.
    """

    name: str
    calls: int = 0
    total_ms: float = 0.0
    share: float = 0.0
    """Of all time of this kind of steps."""
    floor_ms: float = 0.0


class StepKind(msgspec.Struct):
    """Steps of one kind, ``decode`` (of decode rows alone) or ``prefill``; largest part first."""

    kind: str
    steps: int
    total_ms: float
    parts: list[StepPart]


class Profile(msgspec.Struct):
    """Profile of one device worker. The peaks are 0 where they were not measured."""

    operations: dict[str, float]
    """Measured operations a second of all compute threads, by what they multiply."""
    bandwidth: float
    """Measured bytes a second that they read from memory."""
    kinds: list[StepKind]
