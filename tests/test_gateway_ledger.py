"""What a request used is in the file once it was written, whatever happens to process and disk."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import resource
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import msgspec
import pytest

from deepinfer import AsyncEngine
from deepinfer.frontend.gateway import ledger as ledger_module
from deepinfer.frontend.gateway.app import Gateway
from deepinfer.frontend.gateway.ledger import MAX_PENDING, Ledger, Usage
from deepinfer.frontend.gateway.tenants import Tenants
from support.patience import PATIENCE_S
from support.scripted_engine import ScriptedFolder

NOON = datetime(2026, 1, 2, 12, 0, 0, 250_000, tzinfo=UTC)


def usage(request_id: str, **fields: object) -> Usage:
    entry = {
        "time": NOON,
        "tenant": "acme",
        "request_id": request_id,
        "endpoint": "/v1/completions",
        "model": "smollm2-135m",
        "prompt_tokens": 20,
        "cached_tokens": 16,
        "completion_tokens": 5,
        "finish_reason": "stop",
        "finish_detail": "eos",
        "queue_ms": 0.0,
        "total_ms": 120.5,
    }
    return Usage(**(entry | fields))


def ids(path: Path) -> list[str]:
    return [msgspec.json.decode(line, type=Usage).request_id for line in path.open("rb")]


@pytest.fixture
def syncs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of the file at each sync."""
    done: list[int] = []
    real = os.fdatasync

    def counted(file: int) -> None:
        real(file)
        done.append(os.fstat(file).st_size)

    monkeypatch.setattr(ledger_module.os, "fdatasync", counted)
    return done


def test_an_entry_is_one_line_of_json_as_documented(tmp_path: Path) -> None:
    """USG: what the ledger holds of a request."""
    path = tmp_path / "usage.jsonl"
    ledger = Ledger(path)
    ledger.write(usage("a", finish_detail='stop_string:"\n'))
    ledger.write(usage("b", time=NOON.astimezone(timezone(timedelta(hours=5, minutes=30)))))
    first, second = (json.loads(line) for line in path.read_text().splitlines())
    assert list(first) == list(Usage.__struct_fields__)
    assert first["time"] == second["time"] == "2026-01-02T12:00:00.250000Z"
    assert first["finish_detail"] == 'stop_string:"\n' and first["cached_tokens"] == 16
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    ledger.close()


def test_a_time_without_a_zone_is_refused() -> None:
    with pytest.raises(ValueError, match="time"):
        usage("a", time=datetime(2026, 1, 2))


def test_half_a_surrogate_pair_does_not_lose_the_entry(tmp_path: Path) -> None:
    path = tmp_path / "usage.jsonl"
    ledger = Ledger(path)
    ledger.write(usage("a", finish_detail="stop_string:\ud800"))
    ledger.close()
    assert ids(path) == ["a"] and "stop_string:?" in path.read_text()


# ---- a kill -----------------------------------------------------------------------------------

WRITER = """
import json, os, sys
from datetime import UTC, datetime
from deepinfer.frontend.gateway.ledger import Ledger, Usage
path, run, every = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
ledger = Ledger(path, fsync_every_s=every)
number = 0
while True:
    name = f"{run}-{number}"
    ledger.write(Usage(time=datetime.now(UTC), tenant="acme", request_id=name, endpoint="e",
                       model="m" * (number % 300), prompt_tokens=1, cached_tokens=0,
                       completion_tokens=number, finish_reason="stop", finish_detail="eos",
                       queue_ms=0.0, total_ms=1.0))
    os.write(1, name.encode() + b"\\n")
    number += 1
"""


@pytest.mark.process
def test_nothing_that_was_acknowledged_is_lost_when_the_process_is_killed(tmp_path: Path) -> None:
    """Killed in the middle of a storm of entries, again and again, with each way to sync."""
    path = tmp_path / "usage.jsonl"
    acknowledged: list[str] = []
    for run, (every, count) in enumerate([("1.0", 3000), ("null", 1), ("0", 50), ("0.001", 777)]):
        command = [sys.executable, "-c", WRITER, str(path), str(run), every]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
            assert child.stdout is not None
            for _ in range(count):
                acknowledged.append(child.stdout.readline().decode().strip())
            child.kill()
            # What was acknowledged before the kill and not read yet counts as well.
            acknowledged += [line.decode().strip() for line in child.stdout if line.endswith(b"\n")]
        assert child.returncode == -9
    assert path.read_bytes().endswith(b"\n")
    written = ids(path)
    assert len(written) == len(set(written))
    assert len(acknowledged) >= 3828
    known = set(acknowledged)
    assert [name for name in written if name in known] == acknowledged
    # At most one entry of each run was written and not acknowledged any more.
    assert len(written) - len(acknowledged) <= 4


@pytest.mark.process
@pytest.mark.parametrize("stream", [False, True])
async def test_who_has_the_whole_answer_finds_it_in_the_ledger(
    tmp_path: Path, stream: bool
) -> None:
    """However soon after the answer the process is killed."""
    path = tmp_path / "usage.jsonl"
    body = json.dumps({"prompt": [5], "max_tokens": 3, "stream": stream}).encode()
    request = {
        "type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
    }  # fmt: skip
    incoming: asyncio.Queue[dict[str, object]] = asyncio.Queue()
    incoming.put_nowait({"type": "http.request", "body": body})
    entries: list[int] = []

    async def send(message: dict[str, Any]) -> None:
        sent = message.get("body", b"")
        if (b"[DONE]" if stream else b'"usage"') in sent:
            entries.append(len(ids(path)))

    async with AsyncEngine(ScriptedFolder(tmp_path / "model").args()) as engine:
        gateway = Gateway(engine, ["m"], Tenants.anonymous(), ledger=Ledger(path))
        await gateway(request, incoming.get, send)
        await gateway.accounts.finish()
    assert entries == [1]


def test_a_line_cut_short_by_a_loss_of_power_stays_alone(tmp_path: Path) -> None:
    path = tmp_path / "usage.jsonl"
    ledger = Ledger(path)
    ledger.write(usage("a"))
    ledger.write(usage("b"))
    ledger.close()
    os.truncate(path, path.stat().st_size - 40)
    ledger = Ledger(path)
    ledger.write(usage("c"))
    ledger.write(usage("d"))
    ledger.close()
    lines = path.read_bytes().splitlines()
    assert len(lines) == 4
    with pytest.raises(msgspec.DecodeError):
        msgspec.json.decode(lines.pop(1))
    assert [json.loads(line)["request_id"] for line in lines] == ["a", "c", "d"]


# ---- a file that is moved, a disk that is full --------------------------------------------------


def test_a_renamed_or_deleted_file_is_followed_by_a_new_one(tmp_path: Path) -> None:
    path, rotated = tmp_path / "usage.jsonl", tmp_path / "usage.jsonl.1"
    ledger = Ledger(path, fsync_every_s=None)
    before = len(os.listdir("/proc/self/fd"))
    ledger.write(usage("a"))
    path.rename(rotated)
    ledger.write(usage("b"))
    ledger.write(usage("c"))
    assert (ids(rotated), ids(path)) == (["a"], ["b", "c"])
    path.unlink()
    ledger.write(usage("d"))
    assert ids(path) == ["d"]
    os.truncate(path, 0)  # as copytruncate of logrotate does
    ledger.write(usage("e"))
    assert ids(path) == ["e"]
    assert len(os.listdir("/proc/self/fd")) == before
    ledger.close()


@contextmanager
def disk_of(size: int) -> Iterator[None]:
    """The kernel cuts short, then refuses, what would make a file larger (EFBIG, as ENOSPC)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("spare", [0, 1, 100])
def test_a_full_disk_ends_no_request_and_loses_no_entry(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, spare: int
) -> None:
    path = tmp_path / "usage.jsonl"
    ledger = Ledger(path, fsync_every_s=None)
    ledger.write(usage("a"))
    with disk_of(path.stat().st_size + spare):
        for name in "bcd":
            ledger.write(usage(name))
        assert (ledger.failed, ledger.pending, ledger.lost) == (3, 3, 0)
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    assert "usage.jsonl" in caplog.text or "File too large" in caplog.text
    ledger.write(usage("e"))
    ledger.write(usage("f"))
    assert (ledger.failed, ledger.pending) == (3, 0)
    ledger.close()
    lines = path.read_bytes().splitlines()
    if spare:
        broken = lines.pop(1)
        assert len(broken) == spare
    assert [json.loads(line)["request_id"] for line in lines] == list("abcdef")


def test_what_is_kept_for_a_full_disk_is_bounded_and_closing_tries_once_more(
    tmp_path: Path,
) -> None:
    path = tmp_path / "usage.jsonl"
    ledger = Ledger(path, fsync_every_s=None)
    with disk_of(0):
        for number in range(MAX_PENDING + 5):
            ledger.write(usage(str(number)))
        assert (ledger.pending, ledger.lost) == (MAX_PENDING, 5)
    ledger.close()
    assert ids(path) == [str(number) for number in range(5, MAX_PENDING + 5)]


def test_a_folder_that_went_away_is_waited_for(tmp_path: Path) -> None:
    folder = tmp_path / "usage"
    folder.mkdir()
    ledger = Ledger(folder / "usage.jsonl", fsync_every_s=None)
    folder.rename(tmp_path / "elsewhere")
    ledger.write(usage("a"))
    assert (ledger.failed, ledger.pending) == (1, 1)
    folder.mkdir()
    ledger.write(usage("b"))
    assert ids(folder / "usage.jsonl") == ["a", "b"]
    ledger.close()


def test_what_cannot_be_a_ledger_is_an_error_at_the_start(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="pipe is no regular file"):
        Ledger(tmp_path / "pipe")
    with pytest.raises(OSError):
        Ledger(tmp_path)
    with pytest.raises(FileNotFoundError):
        Ledger(tmp_path / "nowhere" / "usage.jsonl")


# ---- to the disk ------------------------------------------------------------------------------


def test_every_entry_is_on_the_disk_before_write_returns_when_asked(
    tmp_path: Path, syncs: list[int]
) -> None:
    path = tmp_path / "usage.jsonl"
    ledger = Ledger(path, fsync_every_s=0)
    for number in range(5):
        ledger.write(usage(str(number)))
        assert len(syncs) == number + 1 and syncs[-1] == path.stat().st_size
    ledger.close()


def test_without_a_sync_policy_nothing_is_synced(tmp_path: Path, syncs: list[int]) -> None:
    ledger = Ledger(tmp_path / "usage.jsonl", fsync_every_s=None)
    ledger.write(usage("a"))
    ledger.close()
    assert not syncs


def test_many_entries_share_one_sync_and_closing_makes_the_last(
    tmp_path: Path, syncs: list[int]
) -> None:
    path = tmp_path / "usage.jsonl"
    ledger = Ledger(path, fsync_every_s=3600)
    for number in range(100):
        ledger.write(usage(str(number)))
    assert not syncs
    ledger.close()
    assert syncs == [path.stat().st_size]
    ledger.close()


def test_entries_are_synced_in_the_background(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "usage.jsonl"
    synced, threads = threading.Event(), []
    size = 0

    def watched(file: int) -> None:
        threads.append(threading.current_thread())
        if os.fstat(file).st_size >= size > 0:
            synced.set()

    monkeypatch.setattr(ledger_module.os, "fdatasync", watched)
    ledger = Ledger(path, fsync_every_s=0.001)
    ledger.write(usage("a"))
    ledger.write(usage("b"))
    size = path.stat().st_size
    ledger.write(usage("c"))
    assert synced.wait(PATIENCE_S)
    assert threading.main_thread() not in threads
    ledger.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "ledger"]


def test_a_sync_that_fails_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "usage.jsonl"

    def broken(file: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(ledger_module.os, "fdatasync", broken)
    ledger = Ledger(path, fsync_every_s=0)
    ledger.write(usage("a"))
    ledger.write(usage("b"))
    assert ledger.failed == 2 and ids(path) == ["a", "b"]
    assert len(caplog.records) == 1
    ledger.close()


def test_the_documented_line_is_what_is_written(tmp_path: Path) -> None:
    page = (Path(__file__).parent.parent / "docs" / "gateway.md").read_text()
    [example] = re.findall(r"```json\n(.*?\n)```", page, re.DOTALL)
    path = tmp_path / "usage.jsonl"
    ledger = Ledger(path)
    ledger.write(usage("cmpl-1"))
    ledger.close()
    assert path.read_text() == example
