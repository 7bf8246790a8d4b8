"""Chaos runner: kills or stops random processes of a loaded engine.

    async with chaos(engine, random.Random(1), seconds=60, blows=12) as done:
        while not done.over: ...   # keep the engine loaded
    done.blows    # what was hit, and when

About every ``pause_s`` seconds the scheduler or the worker gets a SIGKILL or a SIGSTOP. Mostly a
blow waits until the engine has made progress since the one before (a step of the worker that runs
now), so what is tested is recovery and not patience; where recovery takes longer than the pause,
blows are rarer. Now and then one does not wait: then it meets a worker that is loading, a scheduler
that is just being connected to, or both hit at once. Of two in a row at least one waits.

``strays(mark)`` are the processes that engines left behind, wherever they hang in the tree.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import psutil

from deepinfer import AsyncEngine
from support.scripted_engine import engine_processes

IMPATIENT_ODDS = 0.3


class Blow(NamedTuple):
    """One signal sent: ``at_s`` seconds after the beginning, to a process of ``module``."""

    at_s: float
    module: str
    signal: str
    waited: bool
    """Whether the engine had made progress since the blow before."""


@dataclass
class Chaos:
    """What was hit, in order; ``over`` once there is no more to come."""

    blows: list[Blow] = field(default_factory=list)
    over: bool = False

    def __str__(self) -> str:
        kinds = sorted({(blow.module, blow.signal) for blow in self.blows})
        counts = {
            kind: sum((blow.module, blow.signal) == kind for blow in self.blows) for kind in kinds
        }
        told = ", ".join(f"{module} {name} {count}" for (module, name), count in counts.items())
        impatient = sum(not blow.waited for blow in self.blows)
        last = self.blows[-1].at_s if self.blows else 0.0
        return f"{len(self.blows)} blows in {last:.0f} s ({told}; {impatient} without waiting)"


@asynccontextmanager
async def chaos(
    engine: AsyncEngine, rng: random.Random, *, seconds: float, blows: int, pause_s: float = 2.0
) -> AsyncIterator[Chaos]:
    """Strike for ``seconds`` while the block runs, and until there were ``blows``.

    Without work the engine makes no progress, so there must be some until ``over``.
    """
    done = Chaos()
    task = asyncio.create_task(_strike(engine, rng, seconds, blows, pause_s, done))
    try:
        yield done
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def _strike(
    engine: AsyncEngine,
    rng: random.Random,
    seconds: float,
    blows: int,
    pause_s: float,
    done: Chaos,
) -> None:
    start = time.monotonic()
    modules = ("deepinfer.scheduler", engine.args.worker_module)
    waits = True
    try:
        while time.monotonic() - start < seconds or len(done.blows) < blows:
            earliest = time.monotonic() + rng.uniform(0.5, 1.5) * pause_s
            if waits:
                await _progress(engine)
            await asyncio.sleep(max(0.0, earliest - time.monotonic()))
            module = rng.choice(modules)
            number = rng.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP])
            for process in engine_processes():
                with contextlib.suppress(psutil.NoSuchProcess):
                    if module in process.cmdline():
                        process.send_signal(number)
                        at_s = time.monotonic() - start
                        done.blows.append(Blow(at_s, module, number.name, waits))
            waits = not waits or rng.random() > IMPATIENT_ODDS
    finally:
        done.over = True


async def _progress(engine: AsyncEngine) -> None:
    """Wait until the worker that runs now has ended a step."""
    seen: tuple[float, float] | None = None
    while True:
        health = await engine.health()
        if health["ok"]:
            pid, steps = health["worker_pid"], health["steps"]
            if seen is None or seen[0] != pid:
                seen = pid, steps
            elif steps > seen[1]:
                return
        assert not health["down"], health["cause"]
        await asyncio.sleep(0.05)


def strays(mark: str) -> list[psutil.Process]:
    """Other processes whose environment has a variable ``mark``, also those of dead parents."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if process != psutil.Process() and mark in process.environ():
                found.append(process)
    return found
