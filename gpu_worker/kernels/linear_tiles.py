"""Products of bfloat16 by tile registers; weights, activations and results as in ``linear``."""

# Compiled functions are typed by numba, for the arrays they are called with.
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

import numpy as np

from deepinfer.gpu_worker.kernels.fork_join import fork_join, num_threads
from deepinfer.gpu_worker.kernels.settings import INNER
from deepinfer.gpu_worker.kernels.shares import even_share, if_float32, part_of_unit, write_gated
from deepinfer.gpu_worker.kernels.tile_registers import (
    TILE,
    begin_tiles,
    end_tiles,
    pair_tiles,
)
from deepinfer.gpu_worker.kernels.vectors import (
    LANES,
    add16,
    load16,
    load_scalar,
    on_lines,
    store16,
    store_scalar,
)

from numba import njit  # isort: skip  (after the kernels' settings)

TERMS = 32
"""Of a sum in one instruction."""
# Rows of a unit, whose part of x stays in the L2 cache.
_CHUNK_ROWS = 128
# Terms of a sum between two stops: two panels of so many stay in the L1 cache, beside x.
_BLOCK_TERMS = 576


@njit(**INNER)
def _write(sums, at, stride, out, row, rows, column, columns, add):
    """Some rows of sums to ``out``, from a column on, or added to what is there."""
    width = out.shape[1]
    whole = columns - columns % LANES
    for r in range(rows):
        here, o = at + r * stride, (row + r) * width + column
        for c in range(0, whole, LANES):
            value = load16(sums, here + c)
            if add:
                value = add16(value, load16(out, o + c))
            store16(out, o + c, value)
        for c in range(whole, columns):
            value = load_scalar(sums, here + c)
            if add:
                value += load_scalar(out, o + c)
            store_scalar(out, o + c, value)


@njit(**INNER)
def _unit(arguments, unit):
    """Some rows times some panels, in blocks of K; between these the sums lie in memory."""
    x, panels, bias, gated, out, add, chunk, width, threads = arguments
    depth = x.shape[1]
    size = panels[0].size
    first, last, begin, rows = part_of_unit(
        unit, x.shape[0], panels.shape[0], chunk, width, threads
    )
    if not rows:
        return
    # Two tiles of rows by two panels, or one by four: each tile that is loaded serves two products.
    high = 2 if rows > TILE else 1
    most = 2 if rows > TILE else 4
    blocks = -(-rows // (high * TILE))
    stride = most * LANES
    aside = on_lines(blocks * high * TILE * stride, np.float32).reshape(-1, stride)
    direct = if_float32(out, aside)
    biases = bias.reshape((1, bias.size))
    block_terms = TERMS * even_share(depth // TERMS, _BLOCK_TERMS // TERMS)
    begin_tiles(min(rows, TILE))
    p = first
    while p < last:
        count = min(most, last - p)
        if count == 3:
            count = 2
        columns = min(count * LANES, out.shape[1] - p * LANES)
        for k in range(0, depth, block_terms):
            terms = min(block_terms, depth - k)
            ends = k + terms == depth
            whole = ends and not gated and not add and columns == count * LANES
            # While some panels are at work the next are fetched, by each block of rows its part.
            # One tile of rows reads as fast as memory goes, and 10 to 30 % slower with this.
            asked = -(-TILE * count // blocks) if high == 2 else 0
            fetch = (p + count) * size + k * LANES * count
            for block in range(blocks):
                row = block * high * TILE
                end = min(row + high * TILE, rows)
                # Where less than a tile is left, the rows before are computed once more.
                tall = 1 if end - row <= TILE else high
                top = max(0, end - tall * TILE)
                second = end - TILE - top
                aside_at = row * stride
                start, start_at, start_row = biases, p * LANES, 0
                if k > 0:
                    start, start_at, start_row = aside, aside_at, stride
                target, target_at, target_row = aside, aside_at, stride
                if whole:
                    target, target_row = direct, out.shape[1]
                    target_at = (begin + top) * target_row + p * LANES
                pair_tiles(
                    x, (begin + top) * depth + k, depth, second,
                    panels, p * size + k * LANES, size, terms // TERMS,
                    start, start_at, start_row, target, target_at, target_row,
                    fetch, asked, (tall - 1) * 3 + count // 2,
                )  # fmt: skip
                fetch += asked * (terms // TERMS) * 2 * LANES
                if ends and not whole:
                    sums = (row + row - top) * stride
                    if gated:
                        write_gated(
                            aside, sums, stride, out, begin + row, end - row,
                            p // 2 * LANES, count // 2,
                        )  # fmt: skip
                    else:
                        _write(
                            aside, sums, stride, out, begin + row, end - row,
                            p * LANES, columns, add,
                        )  # fmt: skip
        p += count
    end_tiles()


@njit(**INNER)
def multiply_by_tiles(control, x, panels, bias, gated, out, add):
    """``Backend.linear`` of x uint16 [T, K] and panels, both padded with zeros to whole tiles."""
    rows = x.shape[0]
    num_panels = panels.shape[0]
    chunk = TILE * even_share(-(-rows // TILE), _CHUNK_ROWS // TILE)
    chunks = -(-rows // chunk)
    width = 4 * max(1, min(4, num_panels * chunks // 128))
    if rows < 8 and num_panels > 64:
        width = 8
    units = -(-num_panels // width) * chunks
    threads = min(num_threads(control), units)
    arguments = (x, panels, bias, gated, out, add, chunk, width, threads)
    fork_join(control, _unit, arguments, -(-units // threads) * threads)
