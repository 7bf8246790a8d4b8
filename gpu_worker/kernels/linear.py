"""Matrix products with packed weights, and rows gathered out of them.

Weights [N, K] are packed once into panels [ceil(N / 16)][K][16], padded with zero columns: the
micro-kernel then reads them front to back, whatever the number of rows it serves.
"""

# Compiled functions are typed by numba, for the arrays they are called with.
# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="call-arg,var-annotated"

from __future__ import annotations

import numpy as np
from numba import njit

from deepinfer.gpu_worker.kernels.fork_join import fork_join
from deepinfer.gpu_worker.kernels.micro_kernel import (
    bias_1x1,
    bias_1x2,
    bias_1x4,
    bias_2x1,
    bias_2x3,
    bias_3x1,
    bias_3x2,
    bias_4x1,
    bias_5x1,
    bias_6x1,
    near_1x1,
    near_2x1,
    near_3x1,
    near_4x1,
    near_5x1,
    near_6x1,
    partial_1x1,
    prefetch,
)
from deepinfer.gpu_worker.kernels.settings import INNER, JIT
from deepinfer.gpu_worker.kernels.vectors import LANES, add16, load16, load_scalar, store16

# Up to so many rows the time to fetch the weights counts too: it hides best behind multiply-adds
# that take them as they come. With more rows it pays to prepare them first.
_DIRECT_ROWS = 64
# Rows of a unit: enough to make little of preparing its weights, few enough for their part of x to
# stay in the L2 cache.
_CHUNK_ROWS = 128
# Terms of a sum between two stops: 24 KB of float32 weights, which stay in the L1 cache beside x.
_BLOCK_TERMS = 384
# Weights come from memory in long runs, yet the hardware alone fetches them too late to keep it
# busy. Measured with cold weights, 1 to 64 rows: 10 to 25 % less time in the median. Panels lie one
# behind the other, so this reaches into the next one; beyond the array's end it is harmless.
_AHEAD_BYTES = 2048


@njit(**JIT)
def pack_panels(source, panels, first):
    """Copy ``source`` [n, K] into columns ``first`` … ``first + n - 1`` of ``panels``."""
    rows, depth = source.shape
    for n in range(rows):
        panel = (first + n) // LANES
        lane = (first + n) % LANES
        for k in range(depth):
            panels[panel, k, lane] = source[n, k]


@njit(**JIT)
def gather_rows(panels, ids, out):
    """``out[t] = W[ids[t]]`` as float32."""
    depth = panels.shape[1]
    for t in range(ids.shape[0]):
        at = (ids[t] // LANES) * depth * LANES + ids[t] % LANES
        for k in range(depth):
            out[t, k] = load_scalar(panels, at + k * LANES)


@njit(**INNER)
def _row_block(x, x_at, panels, panel, out, out_at, bias, add, rows, columns):
    """``rows`` (1 to 6) rows times one panel, of which ``columns`` exist."""
    depth = panels.shape[1]
    width = out.shape[1]
    w_at = panel * depth * LANES
    b_at = panel * LANES
    ahead = _AHEAD_BYTES // panels.itemsize
    if columns < LANES:
        for r in range(rows):
            partial_1x1(
                x, x_at + r * depth, depth, panels, w_at, 0, LANES, ahead, 0, depth,
                out, out_at + r * width, width, bias, b_at, add, columns,
            )  # fmt: skip
    elif rows == 6:
        bias_6x1(
            x, x_at, depth, panels, w_at, 0, LANES, ahead, 0, depth,
            out, out_at, width, bias, b_at, add,
        )  # fmt: skip
    elif rows == 5:
        bias_5x1(
            x, x_at, depth, panels, w_at, 0, LANES, ahead, 0, depth,
            out, out_at, width, bias, b_at, add,
        )  # fmt: skip
    elif rows == 4:
        bias_4x1(
            x, x_at, depth, panels, w_at, 0, LANES, ahead, 0, depth,
            out, out_at, width, bias, b_at, add,
        )  # fmt: skip
    elif rows == 3:
        bias_3x1(
            x, x_at, depth, panels, w_at, 0, LANES, ahead, 0, depth,
            out, out_at, width, bias, b_at, add,
        )  # fmt: skip
    elif rows == 2:
        bias_2x1(
            x, x_at, depth, panels, w_at, 0, LANES, ahead, 0, depth,
            out, out_at, width, bias, b_at, add,
        )  # fmt: skip
    else:
        bias_1x1(
            x, x_at, depth, panels, w_at, 0, LANES, ahead, 0, depth,
            out, out_at, width, bias, b_at, add,
        )  # fmt: skip


@njit(**INNER)
def _few_rows(x, panels, first, last, out, bias, add):
    """1 to 3 rows times panels ``first`` … ``last - 1``.

    One panel would leave the multiply-adds waiting for each other, so several go side by side; the
    order within each sum is the same.
    """
    rows, depth = x.shape
    width = out.shape[1]
    size = depth * LANES
    full = min(last, width // LANES)
    ahead = _AHEAD_BYTES // 2 // panels.itemsize
    p = first
    if rows == 1:
        while p + 4 <= full:
            bias_1x4(
                x, 0, depth, panels, p * size, size, LANES, ahead, 0, depth,
                out, p * LANES, width, bias, p * LANES, add,
            )  # fmt: skip
            p += 4
        while p + 2 <= full:
            bias_1x2(
                x, 0, depth, panels, p * size, size, LANES, ahead, 0, depth,
                out, p * LANES, width, bias, p * LANES, add,
            )  # fmt: skip
            p += 2
    elif rows == 2:
        while p + 3 <= full:
            bias_2x3(
                x, 0, depth, panels, p * size, size, LANES, ahead, 0, depth,
                out, p * LANES, width, bias, p * LANES, add,
            )  # fmt: skip
            p += 3
    else:
        while p + 2 <= full:
            bias_3x2(
                x, 0, depth, panels, p * size, size, LANES, ahead, 0, depth,
                out, p * LANES, width, bias, p * LANES, add,
            )  # fmt: skip
            p += 2
    while p < last:
        columns = min(LANES, width - p * LANES)
        _row_block(x, 0, panels, p, out, p * LANES, bias, add, rows, columns)
        p += 1


@njit(**INNER)
def _direct_unit(arguments, unit):
    """All rows times some panels, with the weights as they are stored."""
    x, panels, out, bias, add, width = arguments
    rows, depth = x.shape
    first = unit * width
    last = min(first + width, panels.shape[0])
    if rows <= 3:
        _few_rows(x, panels, first, last, out, bias, add)
        return
    # Blocks that differ by at most one row: 7 rows go as 4 + 3, not as 6 + a slow 1.
    blocks = -(-rows // 6)
    columns_all = out.shape[1]
    for p in range(first, last):
        columns = min(LANES, columns_all - p * LANES)
        row = 0
        for block in range(blocks):
            size = rows // blocks + (1 if block < rows % blocks else 0)
            out_at = row * columns_all + p * LANES
            _row_block(x, row * depth, panels, p, out, out_at, bias, add, size, columns)
            row += size


@njit(**INNER)
def _near_block(x, x_at, depth, weights, terms, sums, at, rows):
    """Add ``terms`` products to the sums of ``rows`` (1 to 6) rows and one panel."""
    if rows == 6:
        near_6x1(x, x_at, depth, weights, 0, 0, LANES, 0, 0, terms, sums, at, LANES)
    elif rows == 5:
        near_5x1(x, x_at, depth, weights, 0, 0, LANES, 0, 0, terms, sums, at, LANES)
    elif rows == 4:
        near_4x1(x, x_at, depth, weights, 0, 0, LANES, 0, 0, terms, sums, at, LANES)
    elif rows == 3:
        near_3x1(x, x_at, depth, weights, 0, 0, LANES, 0, 0, terms, sums, at, LANES)
    elif rows == 2:
        near_2x1(x, x_at, depth, weights, 0, 0, LANES, 0, 0, terms, sums, at, LANES)
    else:
        near_1x1(x, x_at, depth, weights, 0, 0, LANES, 0, 0, terms, sums, at, LANES)


@njit(**INNER)
def _finish(sums, at, out, row, column, columns, add):
    """Write one row's sums of a panel, of which ``columns`` exist, to where they belong."""
    o = row * out.shape[1] + column
    if columns < LANES:
        for i in range(columns):
            total = sums[at + i]
            out[row, column + i] = total + out[row, column + i] if add else total
    elif add:
        store16(out, o, add16(load16(sums, at), load16(out, o)))
    else:
        store16(out, o, load16(sums, at))


@njit(**INNER)
def even_share(total, most):
    """The size of parts of at most ``most``, as equal as can be."""
    parts = -(-total // most)
    return -(-total // parts)


@njit(**INNER)
def _blocked_unit(arguments, unit):
    """Some rows times some panels, in blocks of K (Goto & van de Geijn 2008).

    A block of weights is widened to float32 once and then serves all rows out of the L1 cache.
    Between blocks the sums lie in memory, which changes nothing: they are float32 in registers
    too, and the terms still come one by one in ascending order.
    """
    x, panels, out, bias, add, chunk, width, block_terms = arguments
    depth = x.shape[1]
    groups = -(-panels.shape[0] // width)
    first = (unit % groups) * width
    last = min(first + width, panels.shape[0])
    begin = (unit // groups) * chunk
    rows = min(chunk, x.shape[0] - begin)
    blocks = -(-rows // 6)
    line = 64 // panels.itemsize
    weights = np.empty(block_terms * LANES, np.float32)
    sums = np.empty((last - first) * rows * LANES, np.float32)
    for k in range(0, depth, block_terms):
        terms = min(block_terms, depth - k)
        share = -(-terms * LANES // (blocks * line)) * line
        for p in range(first, last):
            w_at = (p * depth + k) * LANES
            for i in range(0, terms * LANES, LANES):
                store16(weights, i, load16(panels, w_at + i))
            # What comes next is fetched bit by bit while these weights are at work.
            following = w_at + depth * LANES
            if p + 1 == last and k + terms < depth:
                following = (first * depth + k + terms) * LANES
            columns = min(LANES, out.shape[1] - p * LANES)
            row = 0
            for block in range(blocks):
                for i in range(block * share, (block + 1) * share, line):
                    prefetch(panels, following + i)
                size = rows // blocks + (1 if block < rows % blocks else 0)
                at = ((p - first) * rows + row) * LANES
                if k == 0:
                    for r in range(size):
                        store16(sums, at + r * LANES, load16(bias, p * LANES))
                x_at = (begin + row) * depth + k
                _near_block(x, x_at, depth, weights, terms, sums, at, size)
                # Here and not at the end, so that the writes go on behind the multiply-adds.
                if k + terms == depth:
                    for r in range(size):
                        s = at + r * LANES
                        _finish(sums, s, out, begin + row + r, p * LANES, columns, add)
                row += size


@njit(**JIT)
def linear(control, x, panels, bias, out, add):
    """``out = x @ W.T + bias`` or ``out += …``; x [T, K], panels [P, K, 16], out [T, N]."""
    rows, depth = x.shape
    num_panels = panels.shape[0]
    if rows == 0:
        return
    # Units of 10 µs or more, and some tens of them to even out a core that others use too.
    if rows <= _DIRECT_ROWS:
        if rows == 2:
            width = 6
        elif rows <= 3:
            width = 4 if num_panels > 64 else 2
        else:
            width = max(1, 32 // rows)
        units = -(-num_panels // width)
        fork_join(control, _direct_unit, (x, panels, out, bias, add, width), units)
    else:
        chunk = even_share(rows, _CHUNK_ROWS)
        chunks = -(-rows // chunk)
        width = max(1, min(8, num_panels * chunks // 32))
        units = -(-num_panels // width) * chunks
        block_terms = even_share(depth, _BLOCK_TERMS)
        arguments = (x, panels, out, bias, add, chunk, width, block_terms)
        fork_join(control, _blocked_unit, arguments, units)


def packed(parts: list[np.ndarray]) -> np.ndarray:
    """Panels of the stacked ``parts``, each [N_i, K] of one dtype; the parts are read once."""
    depth = parts[0].shape[1]
    total = sum(part.shape[0] for part in parts)
    panels = np.zeros((-(-total // LANES), depth, LANES), parts[0].dtype)
    first = 0
    for part in parts:
        # One layout for the compiled function; only an odd one (unaligned, strided) is copied.
        pack_panels(np.require(part, requirements=["C", "A"]), panels, first)
        first += part.shape[0]
    return panels
