"""Products of int8 by tile registers; weights, activations and results as in ``linear_int8``."""

# Compiled functions are typed by numba, for the arrays they are called with.
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

import numpy as np

from deepinfer.gpu_worker.kernels.byte_product import COLUMNS
from deepinfer.gpu_worker.kernels.elementwise import silu_mul16
from deepinfer.gpu_worker.kernels.fork_join import fork_join, num_threads
from deepinfer.gpu_worker.kernels.int8_tile import ACTIVATION_TAIL
from deepinfer.gpu_worker.kernels.settings import INNER
from deepinfer.gpu_worker.kernels.shares import even_share, if_float32, part_of_unit
from deepinfer.gpu_worker.kernels.tile_registers import (
    RUN_BYTES,
    TILE,
    begin_tiles,
    end_tiles,
    make_tiles,
)
from deepinfer.gpu_worker.kernels.vectors import (
    LANES,
    add16,
    fma16,
    load16,
    load_first16,
    mul16,
    on_lines,
    splat16,
    store_first16,
)

from numba import njit  # isort: skip  (after the kernels' settings)

# Activations of a unit's rows, which stay in the L2 cache beside its panels and the next unit's.
_CHUNK_BYTES = 512 << 10
# Most panels of a unit. A block of rows meets one after the other, and what it writes lies side by
# side in memory: panel by panel for all rows, lines shared by two panels were written twice.
_UNIT_PANELS = 8
# The least units, to even out a core that others use too.
_UNITS = 8

# Compiled functions must see it as a global: numba cannot cache one that captures it.
_tiles = make_tiles("tdpbsud", [(1, 2), (2, 2)], 4 * COLUMNS)


@njit(**INNER)
def _write(sums, at, x, row, rows, scales, bias, panel, gated, out, add):
    """Some rows of a panel's sums, from ``at`` on, to ``out``, as ``linear_int8`` says."""
    width = out.shape[1]
    row_scales = x.view(np.float32)
    place = (x.shape[1] - ACTIVATION_TAIL) // 4
    n = panel * COLUMNS
    left = width - n
    low_scale, high_scale = load16(scales, n), load16(scales, n + LANES)
    low_bias, high_bias = load16(bias, n), load16(bias, n + LANES)
    direct = if_float32(out, scales)
    for r in range(rows):
        here, o = at + r * COLUMNS, (row + r) * width + n
        scale = splat16(row_scales[row + r, place])
        low = fma16(load16(sums, here), mul16(scale, low_scale), low_bias)
        high = fma16(load16(sums, here + LANES), mul16(scale, high_scale), high_bias)
        if gated:
            o = panel * LANES
            store_first16(out, (row + r) * width + o, width - o, silu_mul16(low, high))
            continue
        if add:
            low = add16(low, load_first16(direct, o, left, np.float32(0)))
            high = add16(high, load_first16(direct, o + LANES, left - LANES, np.float32(0)))
        store_first16(direct, o, left, low)
        store_first16(direct, o + LANES, left - LANES, high)


@njit(**INNER)
def _unit(arguments, unit):
    """Some rows times some panels."""
    x, panels, scales, bias, gated, out, add, chunk, width, threads = arguments
    x_row = x.shape[1]
    depth = x_row - ACTIVATION_TAIL
    size = depth * COLUMNS
    first, last, begin, rows = part_of_unit(
        unit, x.shape[0], panels.shape[0], chunk, width, threads
    )
    if not rows:
        return
    # Two tiles of rows: each tile that is loaded serves two products.
    high = 2 if rows > TILE else 1
    blocks = -(-rows // (high * TILE))
    steps = depth // RUN_BYTES
    # Meanwhile the next weights are fetched: the next panel's, or, where several blocks of rows
    # meet the same panels, the next unit's, by each block its part.
    fetch = (first + 1 if blocks == 1 else last) * size
    asked = -(-(COLUMNS // LANES * TILE) // blocks)
    # Sums begin with what takes the 128 in each weight off again; they may wrap around meanwhile.
    offsets = high * TILE * COLUMNS
    sums = on_lines(2 * offsets, np.int32)
    row_sums = x.view(np.int32)[:, depth // 4 + 1]
    begin_tiles(min(rows, TILE))
    for block in range(blocks):
        row = block * high * TILE
        end = min(row + high * TILE, rows)
        # Where less than a tile is left, the rows before are computed once more.
        tall = 1 if end - row <= TILE else high
        top = max(0, end - tall * TILE)
        for r in range(end - top):
            here = offsets + r * COLUMNS
            sums[here : here + COLUMNS] = -128 * row_sums[begin + top + r]
        for panel in range(first, last):
            _tiles(
                x, (begin + top) * x_row, x_row, end - TILE - top,
                panels, panel * size, 4 * LANES, steps,
                sums, offsets, COLUMNS, sums, 0, COLUMNS, fetch, asked, tall - 1,
            )  # fmt: skip
            fetch += asked * steps * RUN_BYTES
            at = (row - top) * COLUMNS
            _write(sums, at, x, begin + row, end - row, scales, bias, panel, gated, out, add)
    end_tiles()


@njit(**INNER)
def multiply_by_tiles(control, x, panels, scales, bias, gated, out, add):
    """``Backend.linear`` of rows that are rounded already, uint8 [T, K + ACTIVATION_TAIL]."""
    rows, num_panels = x.shape[0], panels.shape[0]
    block = 2 * TILE
    chunk = block * even_share(-(-rows // block), max(4, _CHUNK_BYTES // (block * x.shape[1])))
    chunks = -(-rows // chunk)
    width = even_share(num_panels, max(1, min(_UNIT_PANELS, num_panels * chunks // _UNITS)))
    units = -(-num_panels // width) * chunks
    threads = min(num_threads(control), units)
    arguments = (x, panels, scales, bias, gated, out, add, chunk, width, threads)
    fork_join(control, _unit, arguments, -(-units // threads) * threads)
