"""What the machine can do: the measure that kernels are held against."""

# Compiled functions are typed by numba, for the arrays they are called with.
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from deepinfer.gpu_worker.kernels.byte_dot import HOST, Dot
from deepinfer.gpu_worker.kernels.fork_join import ThreadTeam, fork_join
from deepinfer.gpu_worker.kernels.micro_kernel import HAS_BF16_DOT, emit_dot
from deepinfer.gpu_worker.kernels.tile_registers import (
    HAS_TILES,
    TILE,
    begin_tiles,
    end_tiles,
    multiply_four,
)
from deepinfer.gpu_worker.kernels.vectors import (
    LANES,
    VECTOR,
    VECTOR_I32,
    add16,
    emit_fma,
    float32x16,
    load16,
    splat16,
    store16,
)

# numba comes after the kernels' settings.
from numba import njit  # isort: skip
from numba.extending import intrinsic  # isort: skip

COLD_BYTES = 160 << 20
"""More than the caches hold."""
_ROUNDS = 100_000
_UNIT_FLOATS = 16384


class Peaks(NamedTuple):
    """Of all threads together: operations a second by what they multiply, "float32", "bfloat16" or
    "int8", and bytes a second from memory.

    Where a machine has no instruction that sums products of a kind, its rate is that of float32.
    """

    operations: dict[str, float]
    bandwidth: float


NOT_MEASURED = Peaks({}, 0.0)


def _summing(emit: Any) -> Any:
    """An intrinsic that adds products of the bits of ``x``, whatever they are, to ``total``."""

    @intrinsic
    def dot(typingctx, total, x):
        def codegen(context, builder, signature, args):
            return emit(builder, *args)

        return float32x16(float32x16, float32x16), codegen

    return dot


def _emit_pairs(builder: Any, total: Any, x: Any) -> Any:
    pairs = builder.bitcast(x, VECTOR_I32)
    return emit_dot(builder, total, pairs, pairs)


def _emit_bytes(builder: Any, total: Any, x: Any) -> Any:
    dot = Dot(builder, HOST, bits=8)
    four = builder.bitcast(x, dot.bytes)
    (total,) = dot.add([builder.bitcast(total, VECTOR_I32)], [four], four)
    return builder.bitcast(total, VECTOR)


def _rounds_of(step: Any) -> Any:
    """A loop of all threads over ``total = step(total, 1)``, in six chains at once."""

    @njit(nogil=True)
    def chains(arguments, unit):
        rounds, out = arguments
        one = splat16(np.float32(1))
        a = b = c = d = e = f = one
        for _ in range(rounds):
            a = step(a, one)
            b = step(b, one)
            c = step(c, one)
            d = step(d, one)
            e = step(e, one)
            f = step(f, one)
        store16(out, unit * LANES, add16(add16(add16(a, b), add16(c, d)), add16(e, f)))

    @njit(nogil=True)
    def run(control, rounds, out, units):
        fork_join(control, chains, (rounds, out), units)

    return run


_multiply_adds = _rounds_of(_summing(lambda builder, total, x: emit_fma(builder, x, x, total)))
_bfloat16_dots = _rounds_of(_summing(_emit_pairs))
_int8_dots = _rounds_of(_summing(_emit_bytes))
_TILE_ROUNDS = 4096


@njit(nogil=True)
def _tile_products_unit(arguments, unit):
    begin_tiles(TILE)
    for _ in range(arguments[0]):
        multiply_four()
    end_tiles()


@njit(nogil=True)
def _tile_products(control, rounds, units):
    fork_join(control, _tile_products_unit, (rounds,), units)


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
    vectors = units * _ROUNDS * 6

    def rate(loop: Any, products: int) -> float:
        """Operations a second of a loop over vectors of so many products and as many sums."""
        (duration,) = best_of(lambda i: loop(control, _ROUNDS, out, units))
        return vectors * 2 * products / duration

    float32 = rate(_multiply_adds, LANES)
    if HAS_TILES:
        # Of bytes an instruction takes twice as many as of bfloat16, and as long.
        (duration,) = best_of(lambda i: _tile_products(control, _TILE_ROUNDS, units))
        bfloat16 = units * _TILE_ROUNDS * 4 * TILE * TILE * 2 * (2 * LANES) / duration
        int8 = 2 * bfloat16
    else:
        bfloat16 = rate(_bfloat16_dots, 2 * LANES) if HAS_BF16_DOT else float32
        int8 = rate(_int8_dots, 4 * LANES) if HOST == "vnni" else float32
    operations = {"float32": float32, "bfloat16": bfloat16, "int8": int8}
    data = np.ones(COLD_BYTES // 4, np.float32)
    pieces = len(data) // _UNIT_FLOATS
    (duration,) = best_of(lambda i: _read_all(control, data, _UNIT_FLOATS, out, pieces))
    return Peaks(operations, data.nbytes / duration)
