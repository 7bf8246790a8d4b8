"""What the processes of a profiled engine wrote, as one trace file and one table."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from deepinfer.frontend.errors import EngineError
from deepinfer.wire.profile import Profile
from deepinfer.wire.recorder import Span, merge, read


class TraceFile(msgspec.Struct):
    """The merged trace: where it lies, spans in it, and those that found no room."""

    path: str
    spans: int
    dropped: int


def gather(folder: Path) -> tuple[TraceFile, Profile]:
    """Merge the files of all processes into ``trace.json``, and find the device worker's profile.

    Of several workers, one having taken the place of another, it is the one with the most steps.
    ``EngineError`` when no worker has written its profile.
    """
    traces = read(folder)
    target = folder / "trace.json"
    merge(traces, target)
    profiles = [trace.profile for trace in traces if trace.profile is not None]
    if not profiles:
        raise EngineError(f"the device worker wrote no profile to {folder}")
    spans = sum(isinstance(event, Span) for trace in traces for event in trace.traceEvents)
    dropped = sum(trace.dropped for trace in traces)
    longest = max(profiles, key=lambda profile: sum(kind.steps for kind in profile.kinds))
    return TraceFile(str(target), spans, dropped), longest


def profile_table(profile: Profile) -> Iterator[str]:
    """Yield one table for decode steps and one for those with prefill."""
    if profile.bandwidth:
        yield ""
        rates = [f"{rate / 1e9:.1f} GFLOP/s {name}" for name, rate in profile.operations.items()]
        rates.append(f"{profile.bandwidth / 1e9:.1f} GB/s read from memory")
        yield "this machine: " + ", ".join(rates)
    for kind in profile.kinds:
        yield ""
        yield f"{kind.kind} steps: {kind.steps}, {kind.total_ms / kind.steps:.2f} ms each"
        yield f"{'':16} {'calls':>8} {'ms':>10} {'share':>7} {'floor ms':>10} {'floor speed':>12}"
        for part in kind.parts:
            floor = f"{part.floor_ms:10.2f} {part.floor_ms / part.total_ms:12.0%}"
            line = f"{part.name:16} {part.calls:8} {part.total_ms:10.2f} {part.share:7.1%}"
            yield f"{line} {floor}" if part.floor_ms else line
