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
    partial_1x1,
)
from deepinfer.gpu_worker.kernels.settings import INNER, JIT
from deepinfer.gpu_worker.kernels.vectors import LANES, load_scalar

# Bytes of x that a unit goes through again and again: they should stay in the L2 cache.
_X_BYTES = 256 * 1024
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
def _linear_unit(arguments, unit):
    x, panels, out, bias, add, chunk, width = arguments
    rows, depth = x.shape
    num_panels = panels.shape[0]
    groups = -(-num_panels // width)
    first = (unit % groups) * width
    last = min(first + width, num_panels)
    if rows <= 3:
        _few_rows(x, panels, first, last, out, bias, add)
        return
    begin = (unit // groups) * chunk
    end = min(begin + chunk, rows)
    # Blocks that differ by at most one row: 7 rows go as 4 + 3, not as 6 + a slow 1.
    blocks = -(-(end - begin) // 6)
    small = (end - begin) // blocks
    bigger = (end - begin) % blocks
    columns_all = out.shape[1]
    for p in range(first, last):
        columns = min(LANES, columns_all - p * LANES)
        row = begin
        for block in range(blocks):
            size = small + 1 if block < bigger else small
            _row_block(
                x,
                row * depth,
                panels,
                p,
                out,
                row * columns_all + p * LANES,
                bias,
                add,
                size,
                columns,
            )
            row += size


@njit(**JIT)
def linear(control, x, panels, bias, out, add):
    """``out = x @ W.T + bias`` or ``out += …``; x [T, K], panels [P, K, 16], out [T, N]."""
    rows, depth = x.shape
    num_panels = panels.shape[0]
    if rows == 0:
        return
    # Units of about 10 µs, and at least a few per thread to even out a core that others use too.
    if rows <= 3:
        chunk = rows
        width = 4 if num_panels > 64 else 2
        width = 6 if rows == 2 else width
    else:
        chunk = max(24, _X_BYTES // (4 * depth)) // 6 * 6
        width = max(1, 32 // min(rows, chunk))
    units = -(-num_panels // width) * -(-rows // chunk)
    fork_join(control, _linear_unit, (x, panels, out, bias, add, chunk, width), units)


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
