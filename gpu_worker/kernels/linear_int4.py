"""Matrix products with int4 weights, and rows gathered out of them.

Activations are rounded to int8 first, in groups of 32 as the weights are: a token's scales depend
on that token alone. ``micro_kernel_int4`` has the formats and the order of every sum.
"""

# Compiled functions are typed by numba, for the arrays they are called with.
# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="call-arg,var-annotated"

from __future__ import annotations

import numpy as np
from numba import njit

from deepinfer.gpu_worker.kernels.byte_product import COLUMNS, planned, run_unit
from deepinfer.gpu_worker.kernels.elementwise import normed_row
from deepinfer.gpu_worker.kernels.fork_join import fork_join
from deepinfer.gpu_worker.kernels.micro_kernel_int4 import (
    ACTIVATION_BYTES,
    CODE_BYTES,
    GROUP,
    WEIGHT_BYTES,
    load_half16,
    quantise_group,
    tile,
)
from deepinfer.gpu_worker.kernels.settings import INNER, JIT
from deepinfer.gpu_worker.kernels.vectors import LANES, on_lines, store16

# Rows of a unit that rounds activations.
_QUANTISED_ROWS = 8


@njit(**INNER)
def _quantise_rows(arguments, unit):
    x, norm, eps, blocks = arguments
    depth = x.shape[1]
    whole = depth // GROUP
    stride = blocks.shape[1]
    normed = np.empty((1, depth), np.float32)
    rest = np.zeros(GROUP, np.float32)
    for row in range(unit * _QUANTISED_ROWS, min(x.shape[0], (unit + 1) * _QUANTISED_ROWS)):
        source, t = x, row
        if norm.size:
            normed_row(x, row, norm, eps, normed, 0)
            source, t = normed, 0
        for group in range(whole):
            at = row * stride + group * ACTIVATION_BYTES
            quantise_group(source, t * depth + group * GROUP, blocks, at)
        if depth % GROUP:
            for k in range(depth % GROUP):
                rest[k] = source[t, whole * GROUP + k]
            quantise_group(rest, 0, blocks, row * stride + whole * ACTIVATION_BYTES)


@njit(**INNER, inline="always")
def _tile(x, row, rows, weights, panel, following, stride, bias, out, at, add):
    """``rows`` (1 to 6) rows times one tile's panels."""
    (panels,) = weights
    x_row = x.shape[1]
    x_at = row * x_row
    groups = panels.shape[1]
    size = groups * WEIGHT_BYTES
    w_at = panel * size
    n = panel * COLUMNS
    width = out.shape[1]
    tile(
        x, x_at, x_row, panels, w_at, groups, following, stride,
        bias, n, out, at, width, add, rows,
    )  # fmt: skip


@njit(**INNER)
def _unit(arguments, unit):
    run_unit(_tile, arguments, unit)


@njit(**JIT)
def linear_int4(control, x, norm, eps, panels, bias, gated, out, add):
    """See ``Backend.linear``; ``norm`` is empty for none, panels [P, G, …]."""
    rows = x.shape[0]
    if rows == 0:
        return
    groups = panels.shape[1]
    row = groups * ACTIVATION_BYTES
    blocks = on_lines(rows * row, np.uint8).reshape(rows, row)
    fork_join(control, _quantise_rows, (x, norm, eps, blocks), -(-rows // _QUANTISED_ROWS))
    depth = groups * GROUP
    arguments, units = planned(control, blocks, depth, (panels,), bias, gated, out, add)
    fork_join(control, _unit, arguments, units)


@njit(**JIT)
def gather_rows_int4(panels, ids, out):
    """``out[t] = W[ids[t]]`` as float32."""
    depth = out.shape[1]
    groups = panels.shape[1]
    scales, minima = np.empty(COLUMNS, np.float32), np.empty(COLUMNS, np.float32)
    for t in range(ids.shape[0]):
        panel, column = ids[t] // COLUMNS, ids[t] % COLUMNS
        for group in range(groups):
            at = (panel * groups + group) * WEIGHT_BYTES + CODE_BYTES
            for c in range(0, COLUMNS, LANES):
                store16(scales, c, load_half16(panels, at + 2 * c))
                store16(minima, c, load_half16(panels, at + 2 * (COLUMNS + c)))
            scale, minimum = scales[column], minima[column]
            block = panels[panel, group]
            for k in range(min(GROUP, depth - group * GROUP)):
                both = block[(k >> 3) * 4 * COLUMNS + 4 * column + (k & 3)]
                code = np.float32(both >> 4 if k & 4 else both & 15)
                out[t, group * GROUP + k] = scale * code + minimum
