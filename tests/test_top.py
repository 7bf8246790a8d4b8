"""``deepinfer top``: what a running engine does, in a terminal."""

from __future__ import annotations

import asyncio
import io
import os
import pty
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from deepinfer import AsyncEngine, SamplingParams
from deepinfer.frontend.top import clean, duration, frame
from deepinfer.wire.messages import (
    EndedRequest,
    EngineInfo,
    EngineView,
    LiveRequest,
    StepTimes,
    UserShare,
)
from support.patience import PATIENCE_S
from support.scripted_engine import ScriptedFolder
from support.streams import outputs

STATS = {"running": 2, "waiting": 1, "prompt_tokens": 40, "cached_tokens": 10, "preemptions": 3,
         "worker_restarts": 1, "uptime_s": 75.0}  # fmt: skip
INFO = EngineInfo("models/tiny", "", 100, [2], 64, 16, 40, 8, 32, "bfloat16", "cpu", "x")
HOSTILE = "a\x1b[2J\r\n[red]b[/red]\x07\u202e"


def view(now_s: float, tokens: int, **fields: Any) -> EngineView:
    users = [UserShare("acme", 0, 0, 1, 4, tokens), UserShare(HOSTILE, 1, 1, 0, 2, 0)]
    known: dict[str, Any] = {"ok": True, "cause": "", "worker": "ready", "users": users}
    return EngineView(now_ns=int(now_s * 1e9), stats=STATS, **(known | fields))


def drawn(now: EngineView, before: EngineView, rows: int = 50, width: int = 110) -> str:
    console = Console(width=width, color_system=None, file=io.StringIO(), record=True)
    console.print(frame(now, before, INFO, rows))
    return console.export_text()


def live(name: str, status: str, user: str = "acme") -> LiveRequest:
    return LiveRequest(name, user, status, 30, 0, 12, 7, 20, 2, 0, 1, 1500.0)


def test_a_frame_shows_rates_progress_and_reasons() -> None:
    step = StepTimes(9, 0, 250_000, 300_000, 12_300_000, 12_400_000, 4, 0)
    now = view(12.0, 150, requests=[live("acme/r", "running"), live("p", "prefilling")],
               ended=[EndedRequest("acme/e", "acme", "stop", "eos", 3, 5, 900.0, 4000.0)],
               blocks_total=40, blocks_free=30, blocks_cached=4, steps=[step])  # fmt: skip
    lines = drawn(now, view(10.0, 100)).splitlines()
    text = "\n".join(re.sub(" +", " ", line).strip() for line in lines)
    assert "25.0 tok/s 2 of 8 1 6 of 40 12 ms 25% 3 1" in text
    assert re.search(r"r ■ acme running ⟲1 \S+ 7 / 20 2 1\.5 s", text), "without its tenant's name"
    assert re.search(r"p ■ acme prefilling ⟲1 \S+ 12 / 37 2 1\.5 s", text)
    assert re.search(r"■ acme 25\.0 █+ 100% 1 0 0 4", text)
    assert "e ■ acme stop eos 5 900 ms 4.0 s" in text
    assert "● healthy" in text and "up 1 min 15 s" in text
    assert "planned in 0.25 ms" in text


def test_a_frame_says_what_is_wrong() -> None:
    assert "the device worker is loading" in drawn(
        view(1.0, 0, ok=False, worker="starting"), view(1.0, 0)
    )
    stuck = view(1.0, 0, ok=False, cause="no step ended for 12.0 s")
    assert "✕ no step ended for 12.0 s" in drawn(stuck, stuck)
    assert "none yet" in drawn(stuck, stuck), "no step"


def test_what_clients_named_reaches_no_terminal_as_a_command() -> None:
    now = view(1.0, 0, requests=[live(HOSTILE, "waiting", HOSTILE)],
               ended=[EndedRequest(HOSTILE, "u", "abort", HOSTILE, 1, 1, 1.0, 1.0)])  # fmt: skip
    text = drawn(now, now, width=200)
    assert text.count("a\ufffd[2J\ufffd\ufffd[red]b[/red]\ufffd\ufffd") >= 4
    assert all(char.isprintable() or char == "\n" for char in text)
    assert clean("grün 日本") == "grün 日本"


def test_a_frame_fits_the_terminal_and_shows_who_waits() -> None:
    requests = [live(f"r{i}", "running") for i in range(40)]
    requests += [live(f"w{i}", "waiting") for i in range(40)]
    now = view(1.0, 0, requests=requests, left_out=5)
    text = drawn(now, now, rows=30)
    assert len(text.splitlines()) <= 30
    shown = re.findall(r"^([rw]\d+) ", text, re.M)
    assert "r0" in shown and "w0" in shown
    assert f"and {85 - len(shown)} more" in text


@pytest.mark.parametrize(
    ("ms", "text"),
    [(0.42, "0.42 ms"), (310, "310 ms"), (3200, "3.2 s"), (243e3, "4 min 3 s"),
     (7.5e6, "2 h 5 min")],
)  # fmt: skip
def test_durations_are_for_people(ms: float, text: str) -> None:
    assert duration(ms) == text


def deepinfer(*argv: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "deepinfer", *argv]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)


@pytest.mark.process
async def test_one_look_at_a_running_engine_is_plain_text(tmp_path: Path) -> None:
    folder = ScriptedFolder(tmp_path / "m", step_ms=5, max_model_len=40_000)
    endpoint = f"ipc://{tmp_path}/engine"
    async with AsyncEngine(folder.args(endpoint=endpoint, max_num_seqs=1)) as engine:
        params = SamplingParams(max_tokens=30_000, temperature=0)
        streams = [
            asyncio.ensure_future(outputs(engine, [5] * 4, params, f"acme/{name}", user_id="acme"))
            for name in ("first", "second")
        ]
        while (await engine.stats())["output_tokens"] < 5:
            pass
        look = await asyncio.to_thread(
            deepinfer, "top", "--once", "--endpoint", endpoint, "--interval-s", "0.3"
        )
        assert (look.returncode, look.stderr) == (0, "")
        assert "\x1b" not in look.stdout
        assert re.search(r"^first +■ acme +running", look.stdout, re.M)
        assert re.search(r"^second +■ acme +waiting", look.stdout, re.M)
        rate = re.search(r"([\d.]+) tok/s", look.stdout)
        assert rate and float(rate[1]) > 0
        for name in ("first", "second"):
            await engine.abort(f"acme/{name}")
        await asyncio.gather(*streams)


def test_where_no_engine_runs_it_says_so(tmp_path: Path) -> None:
    look = deepinfer("top", "--once", "--endpoint", f"ipc://{tmp_path}/none")
    assert look.returncode == 1 and not look.stdout
    assert look.stderr.startswith(f"error: no engine answers at ipc://{tmp_path}/none; start one")
    look = deepinfer("top", "--endpoint", f"ipc://{tmp_path}/none")
    assert look.returncode == 2 and "--once" in look.stderr


@pytest.mark.process
@pytest.mark.parametrize("key", [b"q", b"\x03"], ids=["q", "ctrl-c"])
async def test_a_key_ends_it_and_gives_the_terminal_back(tmp_path: Path, key: bytes) -> None:
    import termios

    folder = ScriptedFolder(tmp_path / "m")
    endpoint = f"ipc://{tmp_path}/engine"
    async with AsyncEngine(folder.args(endpoint=endpoint)) as engine:
        await outputs(engine, [5] * 4, SamplingParams(max_tokens=3), "acme/done", user_id="acme")
        ours, theirs = pty.openpty()
        before = termios.tcgetattr(theirs)
        command = [sys.executable, "-m", "deepinfer", "top", "--endpoint", endpoint]
        process = subprocess.Popen(
            command, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
            env={**os.environ, "TERM": "xterm", "COLUMNS": "110", "LINES": "40"},
            preexec_fn=lambda: os.close(os.open(os.ttyname(0), os.O_RDWR)),
        )  # fmt: skip
        try:
            seen = b""
            while b"done" not in seen:
                seen += await asyncio.to_thread(os.read, ours, 65536)
            os.write(ours, key)
            reading = asyncio.to_thread(_drain, ours, process)
            status, rest = await asyncio.wait_for(reading, PATIENCE_S)
        finally:
            process.kill()
            process.wait()
        assert status == 0
        assert b"\x1b[?1049h" in seen and b"\x1b[?1049l" in seen + rest, (
            "the other screen, and back"
        )
        assert termios.tcgetattr(theirs)[3] == before[3]
        os.close(theirs)
        os.close(ours)


def _drain(descriptor: int, process: subprocess.Popen[bytes]) -> tuple[int, bytes]:
    """Read what a process writes to its terminal until it has ended."""
    import select

    rest = b""
    while process.poll() is None:
        if select.select([descriptor], [], [], 0.1)[0]:
            rest += os.read(descriptor, 65536)
    while select.select([descriptor], [], [], 0)[0]:
        rest += os.read(descriptor, 65536)
    return process.returncode, rest
