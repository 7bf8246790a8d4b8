"""Matrix products of int8 weights, and rows gathered out of such weights.

    out[t, n] = bias + (sum over k of xq[t, k] * wq[n, k]) * (sx[t] * sw[n])

Both factors are rotated in blocks of 64 along K (``hadamard``), which leaves their product as it
is, then rounded to -127 … 127 with one float32 scale for each output channel and each token.
Measured on SmolLM2-135M, KL from float32 in nats: 0.0055, of which the weights alone are 0.003.
Without the rotation 0.09, or 0.010 with a scale for every 64 activations of a token.

The integer sum is exact, so every CPU gives the same bits, and a token's result cannot depend on
its batch. A token with a value that is not finite gives NaN throughout.

Weights [N, K] are packed once, plus 128, into uint8 panels [P][K / 4][COLUMNS][4], K padded to a
multiple of 64: four k of sixteen columns are 64 bytes, one register of AVX-512 or two of AVX2, or a
line of a tile register, which many rows are multiplied by where there are such registers.
"""

# Compiled functions are typed by numba, for the arrays they are called with.
# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="call-arg,var-annotated"

from __future__ import annotations

import numpy as np
from numba import njit

from deepinfer.gpu_worker.kernels.byte_product import COLUMNS, planned, run_unit
from deepinfer.gpu_worker.kernels.elementwise import normed_row
from deepinfer.gpu_worker.kernels.fork_join import fork_join
from deepinfer.gpu_worker.kernels.hadamard import BLOCK, rotate_block
from deepinfer.gpu_worker.kernels.int8_tile import (
    ACTIVATION_TAIL,
    tile,
)
from deepinfer.gpu_worker.kernels.linear_int8_tiles import multiply_by_tiles
from deepinfer.gpu_worker.kernels.round_int8 import rotate_row, round_row, store_tail
from deepinfer.gpu_worker.kernels.settings import INNER, JIT
from deepinfer.gpu_worker.kernels.tile_registers import HAS_TILES
from deepinfer.gpu_worker.kernels.vectors import on_lines
from deepinfer.gpu_worker.memory import Arena

MAX_DEPTH = 2**24 // 127 // BLOCK * BLOCK
"""Terms of which a float32 holds the sum of xq exactly, and an int32 that of the products."""

# Activations a unit quantises: some microseconds of work.
_UNIT_ELEMENTS = 16384
# Rows from which tile registers are faster for all sizes of matrices; both give the same bits. For
# fewer the time is that of reading the weights.
_TILE_ROWS = 64


@njit(**JIT)
def pack_panels(source, panels, scales, columns):
    """Quantise ``source`` [n, K] into ``columns`` [n] of ``panels``, with their scales."""
    rotated = np.empty(panels.shape[1] * 4, np.float32)
    quantised = np.empty(panels.shape[1] * 4, np.int8)
    for n in range(source.shape[0]):
        peak = rotate_row(source, n, rotated)
        scale, _ = round_row(rotated, peak, quantised, 0)
        # H @ H.T = BLOCK * I
        scales[columns[n]] = scale / np.float32(BLOCK)
        panel = panels[columns[n] // COLUMNS]
        lane = columns[n] % COLUMNS
        for k in range(len(quantised)):
            panel[k // 4, lane, k % 4] = np.int32(quantised[k]) + 128


@njit(**JIT)
def gather_rows(panels, scales, ids, out):
    """``out[t] = W[ids[t]]`` as float32."""
    depth = out.shape[1]
    row = np.empty(panels.shape[1] * 4, np.float32)
    for t in range(ids.shape[0]):
        panel = panels[ids[t] // COLUMNS]
        lane = ids[t] % COLUMNS
        for k in range(len(row)):
            row[k] = np.float32(np.int32(panel[k // 4, lane, k % 4]) - 128) * scales[ids[t]]
        # H is symmetric, so what it did it also takes back.
        for k in range(0, len(row), BLOCK):
            rotate_block(row, k, row, k)
        out[t] = row[:depth]


@njit(**INNER)
def _quantise_rows(arguments, unit):
    x, norm, eps, quantised, rows = arguments
    padded = quantised.shape[1] - ACTIVATION_TAIL
    normed = np.empty((1, x.shape[1]), np.float32)
    rotated = np.empty(padded, np.float32)
    for t in range(unit * rows, min(unit * rows + rows, x.shape[0])):
        at = t * quantised.shape[1]
        if norm.size:
            normed_row(x, t, norm, eps, normed, 0)
            peak = rotate_row(normed, 0, rotated)
        else:
            peak = rotate_row(x, t, rotated)
        scale, total = round_row(rotated, peak, quantised, at)
        store_tail(quantised, at + padded, scale, total)


# Inlined before types are inferred: as a call it made 64 rows 1 % and 500 rows 2 % slower.
@njit(**INNER, inline="always")
def _tile(x, row, rows, weights, panel, following, stride, bias, out, at, add):
    """``rows`` (1 to 6) rows times one tile's panels."""
    panels, scales = weights
    x_row = x.shape[1]
    x_at = row * x_row
    depth = x_row - ACTIVATION_TAIL
    w_at = panel * depth * COLUMNS
    n = panel * COLUMNS
    width = out.shape[1]
    tile(
        x, x_at, x_row, depth, panels, w_at, following, stride,
        scales, bias, n, out, at, width, add, rows,
    )  # fmt: skip


@njit(**INNER)
def _unit(arguments, unit):
    run_unit(_tile, arguments, unit)


@njit(**INNER)
def multiply_by_vectors(control, x, panels, scales, bias, gated, out, add):
    """``Backend.linear`` of rows that are rounded already, uint8 [T, K + ACTIVATION_TAIL]."""
    depth, weights = panels.shape[1] * 4, (panels, scales)
    arguments, units = planned(control, x, depth, weights, bias, gated, out, add)
    fork_join(control, _unit, arguments, units)


_multiply = multiply_by_tiles if HAS_TILES else multiply_by_vectors


@njit(**JIT)
def linear(control, x, norm, eps, panels, scales, bias, gated, out, add):
    """See ``Backend.linear``; ``norm`` is empty for none, panels are as ``packed``."""
    rows, depth = x.shape
    if rows == 0:
        return
    padded = panels.shape[1] * 4
    row = padded + ACTIVATION_TAIL
    quantised = on_lines(rows * row, np.uint8).reshape((rows, row))
    share = max(1, _UNIT_ELEMENTS // depth)
    fork_join(control, _quantise_rows, (x, norm, eps, quantised, share), -(-rows // share))
    if rows < _TILE_ROWS:
        multiply_by_vectors(control, quantised, panels, scales, bias, gated, out, add)
    else:
        _multiply(control, quantised, panels, scales, bias, gated, out, add)


def packed(
    parts: list[np.ndarray], columns: list[np.ndarray], arena: Arena
) -> tuple[np.ndarray, np.ndarray]:
    """Panels and scales [P * COLUMNS] of ``parts`` [N_i, K], in ``columns``.

    The parts are read once. ``ValueError`` when K is more than ``MAX_DEPTH``.
    """
    depth = parts[0].shape[1]
    if depth > MAX_DEPTH:
        raise ValueError(f"int8 weights take at most {MAX_DEPTH} inputs, got {depth}")
    num_panels = -(-(columns[-1][-1] + 1) // COLUMNS)
    panels = arena.zeros((num_panels, -(-depth // BLOCK) * BLOCK // 4, COLUMNS, 4), np.uint8)
    scales = np.zeros(num_panels * COLUMNS, np.float32)
    for part, places in zip(parts, columns, strict=True):
        pack_panels(np.require(part, requirements=["C", "A"]), panels, scales, places)
    return panels, scales
