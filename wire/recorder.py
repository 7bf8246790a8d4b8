"""Spans of time that a process records while it is profiled, for a trace that Perfetto shows.

All processes of a machine share ``CLOCK_MONOTONIC`` (``time.monotonic_ns``), so their files merge
into one trace without any adjustment. The format is Chrome's Trace Event Format ("X" is a complete
span, "M" names a process or thread): https://ui.perfetto.dev opens it.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import ParamSpec, TypeVar

import msgspec

from deepinfer.wire.profile import Profile

MAX_SPANS = 1 << 17
"""Spans that a process keeps, the first ones; later ones are only counted.

Some 13 megabytes on disk, written well within the time that a stopped process is given.
"""

P = ParamSpec("P")
R = TypeVar("R")


class Span(msgspec.Struct, tag_field="ph", tag="X", gc=False):
    """Something that took time. ``ts`` and ``dur`` are microseconds of ``CLOCK_MONOTONIC``."""

    name: str
    ts: float
    dur: float
    pid: int
    tid: int
    args: dict[str, int] = {}


class Name(msgspec.Struct, tag_field="ph", tag="M", gc=False):
    """The name of a process or of one of its threads."""

    name: str
    pid: int
    tid: int
    args: dict[str, str]


class ProcessTrace(msgspec.Struct):
    """The file of one process. Only a device worker has a ``profile``."""

    process: str
    dropped: int
    profile: Profile | None
    traceEvents: list[Span | Name]  # noqa: N815


class Recorder:
    """Collects the spans of this process and writes them to a file in ``folder`` at its end."""

    def __init__(self, folder: str, process: str, max_spans: int = MAX_SPANS) -> None:
        self.dropped = 0
        self.profile: Callable[[], Profile | None] = lambda: None
        """Called at the end for what else the file shall hold."""
        self._folder = Path(folder)
        self._process = process
        self._max_spans = max_spans
        self._spans: list[Span] = []
        self._pid = os.getpid()
        self._tid = threading.get_native_id()
        self._written = False
        self._writing = threading.Lock()
        # Now, so that a folder that cannot be written to fails the start and not the end.
        self._folder.mkdir(parents=True, exist_ok=True)

    def span(self, name: str, started_ns: int, ended_ns: int, args: dict[str, int]) -> None:
        """Record a span of ``time.monotonic_ns`` of the thread that made the recorder."""
        if len(self._spans) == self._max_spans:
            self.dropped += 1
            return
        duration_us = (ended_ns - started_ns) / 1000
        self._spans.append(Span(name, started_ns / 1000, duration_us, self._pid, self._tid, args))

    def write(self) -> None:
        """Write the file, once: a second caller only waits for the first."""
        with self._writing:
            if self._written:
                return
            self._written = True
            names = [
                Name("process_name", self._pid, self._tid, {"name": self._process}),
                Name("thread_name", self._pid, self._tid, {"name": "main"}),
            ]
            events: list[Span | Name] = [*names, *self._spans]
            trace = ProcessTrace(self._process, self.dropped, self.profile(), events)
            path = self._folder / f"{self._process}-{self._pid}.spans.json"
            unfinished = path.with_suffix(".partial")
            unfinished.write_bytes(msgspec.json.encode(trace))
            unfinished.rename(path)


def timed(recorder: Recorder | None, name: str, function: Callable[P, R]) -> Callable[P, R]:
    """Return ``function`` with a span around each call; itself when nothing is recorded."""
    if recorder is None:
        return function
    record = recorder.span

    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        started = time.monotonic_ns()
        try:
            return function(*args, **kwargs)
        finally:
            record(name, started, time.monotonic_ns(), {})

    return call


def clear(folder: Path) -> None:
    """Remove the files of an earlier run, which ``merge`` would take for this one's."""
    for path in folder.glob("*.spans.json"):
        path.unlink()


def read(folder: Path) -> list[ProcessTrace]:
    """Read the files of all processes that wrote one."""
    decoder = msgspec.json.Decoder(ProcessTrace)
    return [decoder.decode(path.read_bytes()) for path in sorted(folder.glob("*.spans.json"))]


def merge(traces: Iterable[ProcessTrace], target: Path) -> None:
    """Write the spans of all processes as one trace for Perfetto."""
    events = [event for trace in traces for event in trace.traceEvents]
    target.write_bytes(msgspec.json.encode({"traceEvents": events, "displayTimeUnit": "ms"}))
