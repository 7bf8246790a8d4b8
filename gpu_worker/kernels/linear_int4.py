"""Matrix products with int4 weights, and rows gathered out of them.

Activations are rounded to int8 first, in groups of 32 as the weights are: a token's scales depend
on that token alone. ``micro_kernel_int4`` has the formats and the order of every sum.
"""

# Compiled functions are typed by numba, for the arrays they are called with.
# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="call-arg,var-annotated"

from __future__ import annotations

import numpy as np
from numba import njit

from deepinfer.gpu_worker.kernels.fork_join import fork_join
from deepinfer.gpu_worker.kernels.micro_kernel_int4 import (
    ACTIVATION_BYTES,
    CODE_BYTES,
    GROUP,
    WEIGHT_BYTES,
    int4_1,
    int4_2,
    int4_3,
    int4_4,
    load_half16,
    quantise_group,
)
from deepinfer.gpu_worker.kernels.settings import INNER, JIT
from deepinfer.gpu_worker.kernels.vectors import LANES, store16

# Measured for 8 to 128 rows: with 3 rows a fifth slower, with 5 or 6 the same or a little slower.
_TILE_ROWS = 4
# Activations of a unit's rows, which stay in the L2 cache while panel after panel meets them.
_CHUNK_BYTES = 160 << 10
# Rows of a unit that rounds activations.
_QUANTISED_ROWS = 8
# See ``linear``. Between 1024 and 12288 no distance was better beyond the noise of the machine.
_AHEAD_BYTES = 4096


@njit(**INNER)
def _quantise_rows(arguments, unit):
    x, blocks = arguments
    depth = x.shape[1]
    whole = depth // GROUP
    stride = blocks.shape[1]
    rest = np.zeros(GROUP, np.float32)
    for row in range(unit * _QUANTISED_ROWS, min(x.shape[0], (unit + 1) * _QUANTISED_ROWS)):
        for group in range(whole):
            at = row * stride + group * ACTIVATION_BYTES
            quantise_group(x, row * depth + group * GROUP, blocks, at)
        if depth % GROUP:
            for k in range(depth % GROUP):
                rest[k] = x[row, whole * GROUP + k]
            quantise_group(rest, 0, blocks, row * stride + whole * ACTIVATION_BYTES)


@njit(**INNER)
def _tile(blocks, x_at, panels, panel, out, out_at, width, bias, add, rows):
    """``rows`` (1 to 4) rows times one whole panel; rows of ``out`` are ``width`` apart."""
    x_row = blocks.shape[1]
    groups = panels.shape[1]
    w_at = panel * groups * WEIGHT_BYTES
    b_at = panel * LANES
    if rows == 4:
        int4_4(
            blocks, x_at, x_row, panels, w_at, _AHEAD_BYTES, groups,
            out, out_at, width, bias, b_at, add,
        )  # fmt: skip
    elif rows == 3:
        int4_3(
            blocks, x_at, x_row, panels, w_at, _AHEAD_BYTES, groups,
            out, out_at, width, bias, b_at, add,
        )  # fmt: skip
    elif rows == 2:
        int4_2(
            blocks, x_at, x_row, panels, w_at, _AHEAD_BYTES, groups,
            out, out_at, width, bias, b_at, add,
        )  # fmt: skip
    else:
        int4_1(
            blocks, x_at, x_row, panels, w_at, _AHEAD_BYTES, groups,
            out, out_at, width, bias, b_at, add,
        )  # fmt: skip


@njit(**INNER)
def _unit(arguments, unit):
    """Some rows times some panels."""
    blocks, panels, bias, out, add, chunk, width = arguments
    shares = -(-panels.shape[0] // width)
    first = (unit % shares) * width
    last = min(first + width, panels.shape[0])
    begin = (unit // shares) * chunk
    rows = min(chunk, blocks.shape[0] - begin)
    columns_all = out.shape[1]
    # Tiles that differ by at most one row: 5 rows go as 3 + 2, not as 4 + a slow 1.
    tiles = -(-rows // _TILE_ROWS)
    aside = np.empty((_TILE_ROWS, LANES), np.float32)
    for panel in range(first, last):
        columns = min(LANES, columns_all - panel * LANES)
        row = begin
        for tile in range(tiles):
            size = rows // tiles + (1 if tile < rows % tiles else 0)
            x_at = row * blocks.shape[1]
            if columns == LANES:
                out_at = row * columns_all + panel * LANES
                _tile(blocks, x_at, panels, panel, out, out_at, columns_all, bias, add, size)
            else:
                _tile(blocks, x_at, panels, panel, aside, 0, LANES, bias, False, size)
                for r in range(size):
                    for i in range(columns):
                        column = panel * LANES + i
                        total = aside[r, i]
                        out[row + r, column] = total + out[row + r, column] if add else total
            row += size


@njit(**JIT)
def linear_int4(control, x, panels, bias, out, add):
    """``out = x @ W.T + bias`` or ``out += …``; x [T, K], panels [P, G, 320], out [T, N]."""
    rows = x.shape[0]
    if rows == 0:
        return
    num_panels, groups = panels.shape[:2]
    blocks = np.empty((rows, groups * ACTIVATION_BYTES), np.uint8)
    fork_join(control, _quantise_rows, (x, blocks), -(-rows // _QUANTISED_ROWS))
    most = max(12, _CHUNK_BYTES // blocks.shape[1])
    chunks = -(-rows // most)
    chunk = -(-rows // chunks)
    # Units of 10 µs or more, and some tens of them to even out a core that others use too.
    width = max(1, min(num_panels * chunks // 32, 4096 // (groups * chunk) + 1))
    units = -(-num_panels // width) * chunks
    arguments = (blocks, panels, bias, out, add, chunk, width)
    fork_join(control, _unit, arguments, units)


@njit(**JIT)
def gather_rows_int4(panels, ids, out):
    """``out[t] = W[ids[t]]`` as float32."""
    depth = out.shape[1]
    groups = panels.shape[1]
    scales, minima = np.empty(LANES, np.float32), np.empty(LANES, np.float32)
    for t in range(ids.shape[0]):
        panel, column = ids[t] // LANES, ids[t] % LANES
        for group in range(groups):
            at = (panel * groups + group) * WEIGHT_BYTES + CODE_BYTES
            store16(scales, 0, load_half16(panels, at))
            store16(minima, 0, load_half16(panels, at + 2 * LANES))
            scale, minimum = scales[column], minima[column]
            block = panels[panel, group]
            for k in range(min(GROUP, depth - group * GROUP)):
                both = block[8 * (k & ~7) + 4 * column + (k & 3)]
                code = np.float32(both >> 4 if k & 4 else both & 15)
                out[t, group * GROUP + k] = scale * code + minimum
