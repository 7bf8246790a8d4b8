"""Kills or stops random processes of a loaded engine.

    async with chaos(engine, seconds=60, rng=random.Random(1)) as done: ...

Between two blows the engine must make progress (a step), so what is tested is recovery and not
patience. ``done.blows`` says what was hit.
"""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import psutil

from deepinfer import AsyncEngine
from support.scripted_engine import engine_processes

MODULES = ("deepinfer.scheduler", "worker")


@dataclass
class Chaos:
    """What was hit: (module, signal name), in order."""

    blows: list[tuple[str, str]] = field(default_factory=list)


@asynccontextmanager
async def chaos(
    engine: AsyncEngine, seconds: float, rng: random.Random, pause_s: float = 2.0
) -> AsyncIterator[Chaos]:
    """Strike about every ``pause_s`` seconds while the block runs, at most for ``seconds``."""
    done = Chaos()
    task = asyncio.create_task(_strike(engine, time.monotonic() + seconds, rng, pause_s, done))
    try:
        yield done
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _strike(
    engine: AsyncEngine, until: float, rng: random.Random, pause_s: float, done: Chaos
) -> None:
    while time.monotonic() < until:
        await asyncio.sleep(rng.uniform(0.5, 1.5) * pause_s)
        await _wait_for_progress(engine)
        module = rng.choice(MODULES)
        number = rng.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP])
        for process in engine_processes():
            try:
                if any(module in part for part in process.cmdline()):
                    process.send_signal(number)
                    done.blows.append((module, number.name))
            except psutil.NoSuchProcess:
                continue


async def _wait_for_progress(engine: AsyncEngine) -> None:
    """Wait until a worker is there and a step of it has ended."""
    while True:
        health = await engine.health()
        if health["ok"] and health["steps"] > 0 and health["last_step_age_s"] < 1:
            return
        await asyncio.sleep(0.05)
