"""Child processes that never outlive their parent.

A child's standard input is its *lifeline*: the parent writes the child's configuration there and
keeps the pipe open. The pipe closes when the parent dies, however it dies, and a thread of the
child that waits on it ends the process. (``PR_SET_PDEATHSIG`` alone would not do: it fires when the
parent's *thread* ends, and an app may well start its engine from a thread.)
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import struct
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import IO, TypeVar

import msgspec

_HEADER = struct.Struct("<I")
_MAX_CONFIG_BYTES = 1 << 20
_LIFELINE_FD = 0
_PR_SET_PDEATHSIG = 1
_STDERR_FD = 2

# A process that the app forks must not hold the lifelines of the app's children.
_lifelines: weakref.WeakSet[IO[bytes]] = weakref.WeakSet()


def _let_go_after_fork() -> None:
    for lifeline in _lifelines:
        lifeline.close()


os.register_at_fork(after_in_child=_let_go_after_fork)

T = TypeVar("T", bound=msgspec.Struct)


class Child:
    """A process that runs ``python -m MODULE`` and dies with this one.

    It inherits the open files ``pass_fds``, under the same numbers.
    """

    def __init__(self, module: str, config: msgspec.Struct, pass_fds: tuple[int, ...] = ()) -> None:
        self.module = module
        # -P: a file of the app's folder that is named like a module must not take its place.
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", module],
            stdin=subprocess.PIPE,
            stdout=_STDERR_FD,
            pass_fds=pass_fds,
        )
        frame = msgspec.msgpack.encode(config)
        assert self._process.stdin is not None
        _lifelines.add(self._process.stdin)
        # A child that died at once shows up in poll(), with its exit status.
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(_HEADER.pack(len(frame)) + frame)
            self._process.stdin.flush()

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def poll(self) -> int | None:
        """Return the exit status, ``None`` while it runs. Reaps the process."""
        return self._process.poll()

    def kill(self) -> None:
        """End it at once and reap it."""
        self._process.kill()
        self._process.wait()
        self._close_lifeline()

    def finish(self, grace_s: float) -> None:
        """Ask it to finish (SIGUSR1); kill it after the grace time."""
        self._process.send_signal(signal.SIGUSR1)
        self._wait_or_kill(grace_s)

    def stop(self, grace_s: float) -> None:
        """Cut the lifeline, at which a child leaves whatever it does; kill it after the grace."""
        self._close_lifeline()
        self._wait_or_kill(grace_s)

    def describe_exit(self) -> str:
        """Say how the process ended, for an error message."""
        status = self._process.poll()
        if status is None:
            return "is running"
        if status >= 0:
            return f"exited with status {status}"
        try:
            return f"was killed by {signal.Signals(-status).name}"
        except ValueError:
            return f"was killed by signal {-status}"

    def _wait_or_kill(self, grace_s: float) -> None:
        try:
            self._process.wait(grace_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._close_lifeline()

    def _close_lifeline(self) -> None:
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()


def read_config(config_type: type[T]) -> T:
    """In a child: read the configuration that the parent sent."""
    header = _read_exactly(_HEADER.size)
    (size,) = _HEADER.unpack(header)
    if size > _MAX_CONFIG_BYTES:
        raise ValueError(f"a configuration of {size} bytes, the limit is {_MAX_CONFIG_BYTES}")
    return msgspec.msgpack.decode(_read_exactly(size), type=config_type)


def _read_exactly(size: int) -> bytes:
    data = b""
    while len(data) < size:
        piece = os.read(_LIFELINE_FD, size - len(data))
        if not piece:
            raise SystemExit("this process is started by the engine, not by hand")
        data += piece
    return data


def wake_when_orphaned() -> None:
    """In a child: get SIGCONT when the parent dies: a stopped process sees no pipe close."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGCONT)


def exit_with_parent(on_parent_gone: Callable[[], None] | None = None) -> None:
    """In a child: end this process when the lifeline closes, whatever the main thread does.

    ``on_parent_gone`` runs first, in the watching thread; when it returns or raises the process
    ends.
    """
    wake_when_orphaned()

    def watch() -> None:
        while os.read(_LIFELINE_FD, 64):
            pass
        try:
            if on_parent_gone is not None:
                on_parent_gone()
        finally:
            os._exit(0)

    threading.Thread(target=watch, name="lifeline", daemon=True).start()


def remove_directory(folder: Path) -> None:
    """Remove a private directory and what is in it; no error when it is gone already."""
    shutil.rmtree(folder, ignore_errors=True)
