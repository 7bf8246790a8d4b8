"""Matrix products with packed weights, and rows gathered out of them.

Weights [N, K] are packed once into panels of 16 columns, padded with zeros, which the micro-kernel
reads front to back whatever the number of rows it serves: float32 [ceil(N / 16)][K][16], bfloat16
[ceil(N / 16)][K / 2][16][2], K padded to a multiple of 32. On a machine that multiplies pairs of
bfloat16, activations are rounded to bfloat16 too before they meet such weights, and they are
multiplied by tile registers where it has them; sums are float32 in any case.

What stands around a product is part of it where its numbers are in a cache anyway: an RMSNorm
before it, and ``silu(gate) * up`` behind that of a gate and an up matrix. Their columns take turns
by sixteen (``columns_of``), so that whoever has computed a gate has its up too.
"""

# Compiled functions are typed by numba, for the arrays they are called with.
# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="call-arg,var-annotated"

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, types
from numba.extending import overload

from deepinfer.gpu_worker.kernels.elementwise import copied_row, normed_row
from deepinfer.gpu_worker.kernels.fork_join import fork_join, num_threads
from deepinfer.gpu_worker.kernels.linear_tiles import TERMS, multiply_by_tiles
from deepinfer.gpu_worker.kernels.micro_kernel import (
    HAS_BF16_DOT,
    WIDE_REGISTERS,
    make_tiles,
)
from deepinfer.gpu_worker.kernels.settings import INNER, JIT
from deepinfer.gpu_worker.kernels.shares import even_share, if_float32, part_of_unit, write_gated
from deepinfer.gpu_worker.kernels.tile_registers import HAS_TILES
from deepinfer.gpu_worker.kernels.vectors import LANES, load_scalar, on_lines, store_scalar
from deepinfer.gpu_worker.memory import Arena

# How many panels the tiles of 1, 2, … rows take at once and keep their sums in registers.
_TILE_PANELS = (4, 4, 4, 4, 4, 4) if WIDE_REGISTERS else (4, 2, 1, 1, 1, 1)
_TILE_ROWS = len(_TILE_PANELS)
# Rows of a unit: enough to make little of fetching its weights, few enough for their part of x to
# stay in the L2 cache.
_CHUNK_ROWS = 126
# Terms of a sum between two stops: the weights of a tile stay in the L2 cache, beside x.
_BLOCK_TERMS = 1536
# Activations that a unit of ``_prepared`` writes: some microseconds of work.
_UNIT_ELEMENTS = 16384


@njit(**INNER)
def _pack_unit(arguments, unit):
    """Fill the columns that come from sixteen rows of ``source``."""
    source, panels, columns = arguments
    rows, depth = source.shape
    odd = panels.shape[3] - 1
    begin = unit * LANES
    end = min(rows, begin + LANES)
    # A cache line of each row after the other: what they go to stays in the L1 cache meanwhile.
    line = 64 // panels.itemsize
    for start in range(0, depth, line):
        for n in range(begin, end):
            panel, lane = columns[n] // LANES, columns[n] % LANES
            for k in range(start, min(start + line, depth)):
                panels[panel, k >> odd, lane, k & odd] = source[n, k]


@njit(**JIT)
def pack_panels(control, source, panels, columns):
    """Copy ``source`` [n, K] into ``columns`` [n] of ``panels``."""
    fork_join(control, _pack_unit, (source, panels, columns), -(-source.shape[0] // LANES))


@njit(**JIT)
def gather_rows(panels, ids, out):
    """``out[t] = W[ids[t]]`` as float32."""
    terms = panels.shape[3]
    size = panels.shape[1] * LANES * terms
    for t in range(ids.shape[0]):
        at = (ids[t] // LANES) * size + ids[t] % LANES * terms
        for k in range(out.shape[1]):
            out[t, k] = load_scalar(panels, at + k // terms * LANES * terms + k % terms)


# Compiled functions must see it as a global: numba cannot cache one that captures it. First come
# tiles of 1, 2, … rows and the panels they take at once, then the same rows with one panel.
products = make_tiles(
    [(i + 1, panels) for i, panels in enumerate(_TILE_PANELS)]
    + [(i + 1, 1) for i in range(_TILE_ROWS)]
)


@njit(**INNER)
def _unit(arguments, unit):
    """Some rows times some panels, in blocks of K (Goto & van de Geijn 2008).

    Between blocks the sums lie in memory, which changes nothing: they are float32 in registers
    too, and the terms still come in ascending order.
    """
    x, panels, bias, gated, out, add, chunk, width, block_terms, threads = arguments
    depth = x.shape[1]
    size = panels[0].size
    first, last, begin, rows = part_of_unit(
        unit, x.shape[0], panels.shape[0], chunk, width, threads
    )
    if not rows:
        return
    # Tiles that differ by at most one row: 7 rows go as 4 + 3, not as 6 + a slow 1. Where there are
    # several, all take equally many panels.
    tiles = -(-rows // _TILE_ROWS)
    most = _TILE_PANELS[-(-rows // tiles) - 1]
    line = 64 // panels.itemsize
    stride = -(-line // tiles)
    # Between blocks of K, where not all columns of a panel exist, and until a gate has its up,
    # sums lie here.
    width_aside = max(most, 2) * LANES
    aside = on_lines(rows * width_aside, np.float32).reshape(rows, width_aside)
    direct = if_float32(out, aside)
    biases = bias.reshape((1, bias.size))
    p = first
    while p < last:
        count = most if p + most <= last else 1
        columns = min(count * LANES, out.shape[1] - p * LANES)
        for k in range(0, depth, block_terms):
            terms = min(block_terms, depth - k)
            ends = k + terms == depth
            whole = ends and not gated and columns == count * LANES
            # While some panels are at work the next are fetched, by each tile its part.
            fetch = (p + count) * size + k * LANES * count
            row = 0
            for tile in range(tiles):
                number = rows // tiles + (1 if tile < rows % tiles else 0)
                aside_at = row * width_aside + p * LANES % width_aside
                start, start_at, start_row = biases, p * LANES, 0
                if k > 0:
                    start, start_at, start_row = aside, aside_at, width_aside
                target, target_at, target_row = aside, aside_at, width_aside
                if whole:
                    target, target_row = direct, out.shape[1]
                    target_at = (begin + row) * target_row + p * LANES
                products(
                    x, (begin + row) * depth + k, depth, panels, p * size + k * LANES, size, terms,
                    target, target_at, target_row, fetch, stride,
                    start, start_at, start_row, add and whole,
                    number - 1 if count == most else _TILE_ROWS + number - 1,
                )  # fmt: skip
                fetch += terms * LANES // line * count * stride
                if ends and gated and (p + count) % 2 == 0:
                    pairs = max(count // 2, 1)
                    pair = (p + count) // 2 - pairs
                    at = row * width_aside + 2 * pair * LANES % width_aside
                    write_gated(
                        aside, at, width_aside, out, begin + row, number, pair * LANES, pairs
                    )
                elif ends and not gated and not whole:
                    for r in range(row, row + number):
                        o = (begin + r) * out.shape[1] + p * LANES
                        for i in range(columns):
                            total = aside[r, p * LANES % width_aside + i]
                            if add:
                                total += load_scalar(out, o + i)
                            store_scalar(out, o + i, total)
                row += number
        p += count


@njit(**INNER)
def _prepare_unit(arguments, unit):
    x, norm, eps, out, rows = arguments
    total, depth = x.shape
    for t in range(unit * rows, min(unit * rows + rows, total)):
        if norm.size:
            normed_row(x, t, norm, eps, out, t * out.shape[1])
        else:
            copied_row(x, t, out, t * out.shape[1])
        out[t, depth:] = 0


@njit(**INNER)
def _prepared(control, x, norm, eps, padded, like):
    """``x`` [T, K] normed, if at all, in another dtype, with zeros behind each row."""
    rows = max(1, _UNIT_ELEMENTS // padded)
    out = on_lines(x.shape[0] * padded, like.dtype).reshape(x.shape[0], padded)
    fork_join(control, _prepare_unit, (x, norm, eps, out, rows), -(-x.shape[0] // rows))
    return out


def _operand(control: Any, x: Any, norm: Any, eps: Any, panels: Any) -> Any:
    """``x`` in the form that a product with ``panels`` takes; an overload for compiled code."""


@overload(_operand, jit_options={**INNER}, inline="never")
def _operand_of(control, x, norm, eps, panels):
    if x.dtype != types.float32:
        return lambda control, x, norm, eps, panels: x
    if HAS_BF16_DOT and panels.dtype != types.float32:
        return lambda control, x, norm, eps, panels: _prepared(
            control, x, norm, eps, panels.shape[1] * 2, panels
        )

    def as_it_is(control, x, norm, eps, panels):
        padded = panels.shape[1] * panels.shape[3]
        if norm.size == 0 and x.shape[1] == padded:
            return x
        return _prepared(control, x, norm, eps, padded, x)

    return as_it_is


@njit(**JIT)
def linear(control, x, norm, eps, panels, bias, gated, out, add):
    """See ``Backend.linear``; ``norm`` is empty for none, panels are as ``packed``."""
    if x.shape[0] == 0:
        return
    _multiply(control, _operand(control, x, norm, eps, panels), panels, bias, gated, out, add)


def _multiply(control: Any, x: Any, panels: Any, bias: Any, gated: Any, out: Any, add: Any) -> None:
    """Multiply by tile registers, or by vectors; an overload for compiled code."""


@overload(_multiply, jit_options={**INNER}, inline="never")
def _multiply_of(control, x, panels, bias, gated, out, add):
    way = multiply_by_tiles if HAS_TILES and x.dtype != types.float32 else _multiply_by_vectors
    return lambda control, x, panels, bias, gated, out, add: way(
        control, x, panels, bias, gated, out, add
    )


@njit(**INNER)
def _multiply_by_vectors(control, operand, panels, bias, gated, out, add):
    rows, num_panels = operand.shape[0], panels.shape[0]
    # Units of 10 µs or more, and some tens of them to even out a core that others use too.
    chunk = _TILE_ROWS * even_share(-(-rows // _TILE_ROWS), _CHUNK_ROWS // _TILE_ROWS)
    chunks = -(-rows // chunk)
    width = 4 * max(1, min(4, num_panels * chunks // 128))
    if rows < 8 and num_panels > 64:
        width = 8
    shares = -(-num_panels // width)
    threads = num_threads(control)
    if chunks == 1 and rows >= 4 * _TILE_ROWS and -(-2 * shares // threads) % 2:
        # One thread would have a unit more than another: half as many rows each even that out.
        chunk = _TILE_ROWS * even_share(chunk // _TILE_ROWS, -(-chunk // _TILE_ROWS // 2))
        chunks = -(-rows // chunk)
    block_terms = 2 * even_share(-(-operand.shape[1] // 2), _BLOCK_TERMS // 2)
    units = shares * chunks
    threads = min(threads, units)
    arguments = (operand, panels, bias, gated, out, add, chunk, width, block_terms, threads)
    fork_join(control, _unit, arguments, -(-units // threads) * threads)


def columns_of(sizes: list[int], gated: bool) -> list[np.ndarray]:
    """Which column each row of parts of these sizes becomes, int64 [N_i] each.

    One part after the other, or, of a gate and an up matrix, sixteen of either in turns.
    """
    if gated:
        row = np.arange(sizes[0])
        return [row + row // LANES * LANES + part * LANES for part in range(2)]
    return np.split(np.arange(sum(sizes)), np.cumsum(sizes[:-1]))


def packed(
    control: int, parts: list[np.ndarray], columns: list[np.ndarray], arena: Arena
) -> np.ndarray:
    """Panels of ``parts`` [N_i, K] of one dtype, in ``columns``; the parts are read once."""
    depth = parts[0].shape[1]
    total = columns[-1][-1] + 1
    terms = 1 if parts[0].dtype == np.float32 else 2
    rows = depth if terms == 1 else -(-depth // TERMS) * TERMS // 2
    shape = (-(-total // LANES), rows, LANES, terms)
    panels = arena.zeros(shape, parts[0].dtype)
    # Whole pairs move as one number.
    unit = np.uint32 if terms == 2 and depth % 2 == 0 else parts[0].dtype
    target = panels.view(unit)
    for part, places in zip(parts, columns, strict=True):
        # One layout for the compiled function; only an odd one (unaligned, strided) is copied.
        source = np.require(np.require(part, requirements="C").view(unit), requirements=["C", "A"])
        pack_panels(control, source, target, places)
    return panels
