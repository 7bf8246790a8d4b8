"""What the machine can do: the measure that kernels are held against."""

# Compiled functions are typed by numba, for the arrays they are called with.
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from deepinfer.gpu_worker.kernels.fork_join import ThreadTeam, fork_join
from deepinfer.gpu_worker.kernels.vectors import (
    LANES,
    add16,
    fma16,
    load16,
    splat16,
    store16,
)

# numba comes after the kernels' settings.
from numba import njit  # isort: skip

COLD_BYTES = 160 << 20
"""More than the caches hold."""
_ROUNDS = 100_000
_UNIT_FLOATS = 16384


class Peaks(NamedTuple):
    """Of all threads together: float32 operations a second, and bytes a second from memory."""

    flops: float
    bandwidth: float


NOT_MEASURED = Peaks(0.0, 0.0)


@njit(nogil=True)
def _multiply_add(arguments, unit):
    rounds, out = arguments
    factor, term = splat16(np.float32(1.0000001)), splat16(np.float32(1e-9))
    a = b = c = d = e = f = factor
    for _ in range(rounds):
        a = fma16(a, factor, term)
        b = fma16(b, factor, term)
        c = fma16(c, factor, term)
        d = fma16(d, factor, term)
        e = fma16(e, factor, term)
        f = fma16(f, factor, term)
    store16(out, unit * LANES, add16(add16(add16(a, b), add16(c, d)), add16(e, f)))


@njit(nogil=True)
def _multiply_add_all(control, rounds, out, units):
    fork_join(control, _multiply_add, (rounds, out), units)


@njit(nogil=True)
def _read(arguments, unit):
    data, size, out = arguments
    zero = splat16(np.float32(0))
    a = b = c = d = zero
    for i in range(unit * size, unit * size + size, 4 * LANES):
        a = add16(a, load16(data, i))
        b = add16(b, load16(data, i + LANES))
        c = add16(c, load16(data, i + 2 * LANES))
        d = add16(d, load16(data, i + 3 * LANES))
    store16(out, unit * LANES, add16(add16(a, b), add16(c, d)))


@njit(nogil=True)
def _read_all(control, data, size, out, units):
    fork_join(control, _read, (data, size, out), units)


def best_of(*calls: Callable[[int], object], seconds: float = 0.6, least: int = 4) -> list[float]:
    """Shortest time of each ``call(i)``, in turns for i = 0, 1, … within about ``seconds``."""
    shortest = [float("inf")] * len(calls)
    begun, i = time.perf_counter(), 0
    while i <= least or time.perf_counter() - begun < seconds:
        for which, call in enumerate(calls):
            start = time.perf_counter()
            call(i)
            duration = time.perf_counter() - start
            if i > 0:
                shortest[which] = min(shortest[which], duration)
        i += 1
    return shortest


def measure_peaks(team: ThreadTeam) -> Peaks:
    """Measure multiply-adds in registers, and reads of memory, with all threads of the team."""
    out = np.zeros(4096 * LANES, np.float32)
    units = 8 * team.num_threads
    control = team.control
    (duration,) = best_of(lambda i: _multiply_add_all(control, _ROUNDS, out, units))
    flops = units * _ROUNDS * 6 * 2 * LANES / duration
    data = np.ones(COLD_BYTES // 4, np.float32)
    pieces = len(data) // _UNIT_FLOATS
    (duration,) = best_of(lambda i: _read_all(control, data, _UNIT_FLOATS, out, pieces))
    return Peaks(flops, data.nbytes / duration)
