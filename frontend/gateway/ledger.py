"""What each request used, one JSON line a request, in a file that a killed process leaves whole."""

from __future__ import annotations

import contextlib
import logging
import os
import stat
import threading
from collections import deque
from datetime import UTC, datetime

import msgspec

log = logging.getLogger("deepinfer.gateway")

MAX_PENDING = 10_000
"""Entries that are kept while the disk is full; the oldest is lost first."""


class Usage(msgspec.Struct, kw_only=True, frozen=True):
    """What one ended request used. With several completions the counts are their sums.

    ``time`` is when it ended, with a time zone; written as RFC 3339 in UTC.
    """

    time: datetime
    tenant: str
    request_id: str
    endpoint: str
    model: str
    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens that came from the prefix cache; among ``prompt_tokens``."""
    completion_tokens: int
    finish_reason: str
    finish_detail: str
    """The rule behind the reason; of several completions that of the last one."""
    queue_ms: float
    """In line in the gateway, before the engine had the request."""
    total_ms: float
    """From arrival to end."""

    def __post_init__(self) -> None:
        if self.time.tzinfo is None:
            raise ValueError("time must have a time zone")


class Ledger:
    """Appends one line for each request that ended.

    A line is one ``write(2)`` on an ``O_APPEND`` descriptor: once :meth:`write` returns the kernel
    has it, and no kill of this process can lose it or tear it. Against a loss of power it must be
    synced: in the background at most once in ``fsync_every_s`` seconds, what came in that time
    may be lost; with 0 before :meth:`write` returns; with ``None`` when the kernel likes to.

    Nothing that goes wrong with the file later ends a request. What could not be written is logged
    once, counted in ``failed``, kept in order (``pending``) and tried again with the next entry;
    of more than ``MAX_PENDING`` the oldest are ``lost``. What is pending dies with the process.

    ``path`` may be renamed at any time: the next line goes to a new file of that name. ``OSError``
    or ``ValueError`` when it cannot be opened at the start.
    """

    def __init__(self, path: str | os.PathLike[str], fsync_every_s: float | None = 1.0) -> None:
        self._path = os.fspath(path)
        self._every_s = fsync_every_s
        self.failed = 0
        self.lost = 0
        self._pending: deque[bytes] = deque()
        self._failing = False
        # Guards what the thread shares: the descriptor and whether anything is to be synced.
        self._lock = threading.Lock()
        self._unsynced = False
        self._closed = threading.Event()
        self._file = -1
        self._open()
        self._syncer: threading.Thread | None = None
        if fsync_every_s:
            self._syncer = threading.Thread(target=self._sync_loop, name="ledger", daemon=True)
            self._syncer.start()

    @property
    def pending(self) -> int:
        """Entries that are not in the file yet because it could not be written."""
        return len(self._pending)

    def write(self, entry: Usage) -> None:
        """Append an entry. Never raises for what is wrong with the file."""
        self._pending.append(_line(entry))
        try:
            self._follow_the_path()
            self._write_pending()
            if self._every_s == 0:
                self._sync()
        except (OSError, ValueError) as error:
            self._fail(error)
        else:
            if self._failing:
                self._failing = False
                log.warning("usage is written to %s again", self._path)

    def close(self) -> None:
        """Sync, unless the policy is never to, and close the file."""
        if self._file < 0:
            return
        self._closed.set()
        if self._syncer is not None:
            self._syncer.join()
        try:
            self._write_pending()
            if self._every_s is not None:
                self._sync()
        except OSError as error:
            self._fail(error)
        if self._pending:
            log.error("%d entries of usage could not be written: %s", self.pending, self._path)
        os.close(self._file)
        self._file = -1

    # ---- the file -----------------------------------------------------------------------------

    def _open(self) -> None:
        # For reading too: its last byte is looked at, and a pipe so opened is not waited for.
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        file = os.open(self._path, flags, 0o600)
        try:
            status = os.fstat(file)
            if not stat.S_ISREG(status.st_mode):
                raise ValueError(f"{self._path} is no regular file")
            size = status.st_size
            # A line that a loss of power cut short stays alone on its line.
            self._torn = size > 0 and os.pread(file, 1, size - 1) != b"\n"
            if self._every_s is not None:
                _sync_folder_of(self._path)
        except BaseException:
            os.close(file)
            raise
        self._identity = (status.st_dev, status.st_ino)
        with self._lock:
            old, self._file = self._file, file
        if old >= 0:
            os.close(old)

    def _follow_the_path(self) -> None:
        """Open the file anew when its name belongs to another one, or to none, by now."""
        try:
            status = os.stat(self._path)
        except FileNotFoundError:
            pass
        else:
            if (status.st_dev, status.st_ino) == self._identity:
                return
        if self._every_s is not None:
            self._sync()
        self._open()

    def _write_pending(self) -> None:
        while self._pending:
            self._append(self._pending[0])
            self._pending.popleft()
            self._unsynced = True

    def _append(self, line: bytes) -> None:
        data = b"\n" + line if self._torn else line
        written = os.write(self._file, data)
        if written < len(data):
            # The disk is full: what fitted becomes a broken line, the entry is written again.
            if written > 0:
                self._torn = data[written - 1 : written] != b"\n"
            raise OSError(f"only {written} of {len(data)} bytes were written to {self._path}")
        self._torn = False

    def _fail(self, error: Exception) -> None:
        self.failed += 1
        while len(self._pending) > MAX_PENDING:
            self._pending.popleft()
            self.lost += 1
        if not self._failing:
            self._failing = True
            log.error("usage cannot be written, and will be tried again: %s", error)

    # ---- to the disk --------------------------------------------------------------------------

    def _sync_loop(self) -> None:
        warned = False
        while not self._closed.wait(self._every_s):
            try:
                self._sync()
            except OSError as error:
                if not warned:
                    log.error("usage could not be synced to %s: %s", self._path, error)
                warned = True

    def _sync(self) -> None:
        """Bring what was written to the disk. The file may be exchanged meanwhile."""
        with self._lock:
            if not self._unsynced:
                return
            # Before the sync: what comes during it is for the next one.
            self._unsynced = False
            file = os.dup(self._file)
        try:
            os.fdatasync(file)
        finally:
            os.close(file)


def _line(entry: Usage) -> bytes:
    try:
        return msgspec.json.encode(_in_utc(entry)) + b"\n"
    except UnicodeEncodeError:  # half a surrogate pair, which JSON's escapes can smuggle in
        texts = {
            name: value.encode("utf-8", "replace").decode()
            for name, value in msgspec.structs.asdict(entry).items()
            if isinstance(value, str)
        }
        return msgspec.json.encode(_in_utc(msgspec.structs.replace(entry, **texts))) + b"\n"


def _in_utc(entry: Usage) -> Usage:
    if entry.time.tzinfo is UTC:
        return entry
    return msgspec.structs.replace(entry, time=entry.time.astimezone(UTC))


def _sync_folder_of(path: str) -> None:
    """Make sure that a new file's name survives a loss of power; some systems cannot."""
    with contextlib.suppress(OSError):
        folder = os.open(os.path.dirname(path) or ".", os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
