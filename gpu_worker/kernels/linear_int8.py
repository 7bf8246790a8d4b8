"""Matrix products of int8 weights, and rows gathered out of such weights.

    out[t, n] = (sum over k of xq[t, k] * wq[n, k]) * (sx[t] * sw[n]) + bias[n]

Weights have one float32 scale for each output channel, ``max|w| / 127``. Activations are integers
too, with one scale for each token, ``max|x| / limit``: as many levels as an int32 sum of K products
can hold (29,356 either way for K = 576, 11,009 for K = 1,536), because the int16 instructions take
them at the price of int8. Measured on SmolLM2-135M, KL from float32 in nats: 0.006 with the weights
alone quantised, 0.09 with activations in int8, 0.015 with those in int8 for each 64 k.

The integer sum is exact, so every CPU gives the same bits, and a token's result cannot depend on
its batch. A token with a value that is not finite gives NaN throughout.

Weights [N, K] are packed once into panels [ceil(N / 16)][K / 4][16][4], K padded with zeros to a
multiple of 8: four k of sixteen columns are 64 bytes, one register of AVX-512 or two of AVX2.
"""

# Compiled functions are typed by numba, for the arrays they are called with.
# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="call-arg,var-annotated"

from __future__ import annotations

import numpy as np
from numba import njit

from deepinfer.gpu_worker.kernels.fork_join import fork_join
from deepinfer.gpu_worker.kernels.int8_tile import (
    load_sums16,
    store_quantised16,
    tile_1x1,
    tile_1x4,
    tile_2x1,
    tile_3x1,
    tile_4x1,
    tile_5x1,
    tile_6x1,
    widen_four,
)
from deepinfer.gpu_worker.kernels.linear import even_share
from deepinfer.gpu_worker.kernels.micro_kernel import prefetch
from deepinfer.gpu_worker.kernels.settings import INNER, JIT
from deepinfer.gpu_worker.kernels.vectors import (
    LANES,
    add16,
    fma16,
    load16,
    load_scalar,
    max16,
    max_of16,
    mul16,
    splat16,
    store16,
    sub16,
    sum16,
)

MAX_DEPTH = (2**31 - 1) // 127**2 // 8 * 8
"""Terms that an int32 sum holds with at least the levels of int8."""

# Above so many rows it pays to widen weights once and not with every use; a tile that widens for
# itself has no registers for more than five.
_DIRECT_ROWS = 5
# Rows of a unit, and terms of a sum between two stops: 16 KB of int16 weights stay in the L1 cache.
_CHUNK_ROWS = 128
_BLOCK_TERMS = 512
_AHEAD_BYTES = 2048
# Activations a unit quantises: some microseconds of work.
_UNIT_ELEMENTS = 16384
# A row of nothing larger than this counts as zero: the inverse of its scale would overflow.
_SMALLEST = np.float32(2.0**-100)
# A float32 near this has no fraction bits: adding it rounds half to even.
_ROUNDER = np.float32(1.5 * 2**23)


@njit(**JIT)
def pack_panels(source, panels, scales, first):
    """Quantise ``source`` [n, K] into columns ``first`` … of ``panels``, with their scales."""
    rows, depth = source.shape
    for n in range(rows):
        largest = np.float32(0)
        finite = True
        for k in range(depth):
            value = abs(load_scalar(source, n * depth + k))
            finite = finite and value < np.inf
            largest = max(largest, value)
        if not finite:
            scales[first + n] = np.float32(np.nan)
        elif largest >= _SMALLEST:
            inverse = np.float32(127) / largest
            scales[first + n] = largest / np.float32(127)
            panel = (first + n) // LANES
            lane = (first + n) % LANES
            for k in range(depth):
                value = load_scalar(source, n * depth + k) * inverse
                panels[panel, k // 4, lane, k % 4] = np.int8((value + _ROUNDER) - _ROUNDER)


@njit(**JIT)
def gather_rows(panels, scales, ids, out):
    """``out[t] = W[ids[t]]`` as float32."""
    for t in range(ids.shape[0]):
        panel = ids[t] // LANES
        lane = ids[t] % LANES
        for k in range(out.shape[1]):
            out[t, k] = np.float32(panels[panel, k // 4, lane, k % 4]) * scales[ids[t]]


@njit(**INNER)
def _quantise_unit(arguments, unit):
    """Write some rows of x as integers up to ``limit`` in the order of a tile, and their scales."""
    x, quantised, scales, limit, rows = arguments
    total, depth = x.shape
    padded = quantised.shape[1]
    whole = depth - depth % LANES
    zero = splat16(np.float32(0))
    for t in range(unit * rows, min(unit * rows + rows, total)):
        at = t * depth
        high = zero
        low = zero
        odd = zero
        for i in range(0, whole, LANES):
            value = load16(x, at + i)
            high = max16(high, value)
            low = max16(low, sub16(zero, value))
            # Zero times a value is zero unless that is not finite.
            odd = fma16(value, zero, odd)
        peak = max_of16(max16(high, low))
        broken = sum16(odd)
        for k in range(whole, depth):
            peak = max(peak, abs(x[t, k]))
            broken += x[t, k] * np.float32(0)
        inverse = np.float32(0)
        scales[t] = broken
        if broken == 0 and peak >= _SMALLEST:
            inverse = limit / peak
            scales[t] = peak / limit
        factor = splat16(inverse)
        for i in range(0, whole, LANES):
            store_quantised16(quantised, t * padded + i, mul16(load16(x, at + i), factor))
        if inverse > 0:
            for k in range(whole, depth):
                value = (x[t, k] * inverse + _ROUNDER) - _ROUNDER
                quantised[t, k // 4 * 4 + (k % 4 // 2 + k % 2 * 2)] = np.int16(value)
        else:
            for k in range(whole, depth):
                quantised[t, k // 4 * 4 + (k % 4 // 2 + k % 2 * 2)] = 0
        for k in range(depth, padded):
            quantised[t, k // 4 * 4 + (k % 4 // 2 + k % 2 * 2)] = 0


@njit(**INNER)
def _row_block(x, x_at, padded, weights, w_at, count, sums, at, rows):
    """Add ``count`` products to the sums of ``rows`` (1 to 6) rows and one panel."""
    ahead = _AHEAD_BYTES
    if rows == 6:
        tile_6x1(x, x_at, padded, weights, w_at, 0, ahead, count, sums, at)
    elif rows == 5:
        tile_5x1(x, x_at, padded, weights, w_at, 0, ahead, count, sums, at)
    elif rows == 4:
        tile_4x1(x, x_at, padded, weights, w_at, 0, ahead, count, sums, at)
    elif rows == 3:
        tile_3x1(x, x_at, padded, weights, w_at, 0, ahead, count, sums, at)
    elif rows == 2:
        tile_2x1(x, x_at, padded, weights, w_at, 0, ahead, count, sums, at)
    else:
        tile_1x1(x, x_at, padded, weights, w_at, 0, ahead, count, sums, at)


@njit(**INNER)
def _finish(sums, at, scale, weight_scales, bias, out, row, panel, add):
    """Scale one row's sums of a panel and write those of its columns that exist."""
    width = out.shape[1]
    column = panel * LANES
    factor = mul16(splat16(scale), load16(weight_scales, column))
    value = add16(mul16(load_sums16(sums, at), factor), load16(bias, column))
    if column + LANES <= width:
        o = row * width + column
        if add:
            value = add16(value, load16(out, o))
        store16(out, o, value)
        return
    lanes = np.empty(LANES, np.float32)
    store16(lanes, 0, value)
    for i in range(width - column):
        out[row, column + i] = lanes[i] + out[row, column + i] if add else lanes[i]


@njit(**INNER)
def _direct_unit(arguments, unit):
    """All rows, five at most, times some panels as they are stored."""
    x, scales, panels, weight_scales, bias, out, add, width = arguments
    rows, padded = x.shape
    size = padded * LANES
    last = min(unit * width + width, panels.shape[0])
    sums = np.empty(8 * LANES, np.int32)
    p = unit * width
    while p < last:
        sums[:] = 0
        count = 1
        if rows == 1 and p + 4 <= last:
            count = 4
            tile_1x4(x, 0, padded, panels, p * size, size, _AHEAD_BYTES // 2, padded, sums, 0)
        else:
            _row_block(x, 0, padded, panels, p * size, padded, sums, 0, rows)
        for c in range(count):
            for r in range(rows):
                at = (r + c) * LANES
                _finish(sums, at, scales[r], weight_scales, bias, out, r, p + c, add)
        p += count


@njit(**INNER)
def _blocked_unit(arguments, unit):
    """Some rows times some panels, in blocks of K that are widened once for all rows."""
    x, scales, panels, weight_scales, bias, out, add, chunk, width, block_terms = arguments
    padded = x.shape[1]
    groups = -(-panels.shape[0] // width)
    first = (unit % groups) * width
    last = min(first + width, panels.shape[0])
    begin = (unit // groups) * chunk
    rows = min(chunk, x.shape[0] - begin)
    blocks = -(-rows // 6)
    wide = np.empty(block_terms * LANES, np.int16)
    sums = np.zeros((last - first) * rows * LANES, np.int32)
    for k in range(0, padded, block_terms):
        terms = min(block_terms, padded - k)
        for p in range(first, last):
            w_at = (p * padded + k) * LANES
            # What comes next is fetched while these weights are at work.
            following = w_at + padded * LANES
            if p + 1 == last and k + terms < padded:
                following = (first * padded + k + terms) * LANES
            for i in range(0, terms * LANES, 4 * LANES):
                widen_four(panels, w_at + i, wide, i)
                prefetch(panels, following + i)
            row = 0
            for block in range(blocks):
                size = rows // blocks + (1 if block < rows % blocks else 0)
                at = ((p - first) * rows + row) * LANES
                x_at = (begin + row) * padded + k
                _row_block(x, x_at, padded, wide, 0, terms, sums, at, size)
                if k + terms == padded:
                    for r in range(begin + row, begin + row + size):
                        _finish(sums, at, scales[r], weight_scales, bias, out, r, p, add)
                        at += LANES
                row += size


@njit(**JIT)
def linear(control, x, panels, weight_scales, bias, out, add):
    """``out = x @ W.T + bias`` or ``out += …``; x [T, K], out [T, N], see ``packed``."""
    rows, depth = x.shape
    num_panels = panels.shape[0]
    if rows == 0:
        return
    padded = panels.shape[1] * 4
    limit = np.float32(min(32767, (2**31 - 1) // (127 * padded)))
    quantised = np.empty((rows, padded), np.int16)
    scales = np.empty(rows, np.float32)
    share = max(1, _UNIT_ELEMENTS // depth)
    fork_join(control, _quantise_unit, (x, quantised, scales, limit, share), -(-rows // share))
    if rows <= _DIRECT_ROWS:
        width = 8 if num_panels > 64 else 4
        arguments = (quantised, scales, panels, weight_scales, bias, out, add, width)
        fork_join(control, _direct_unit, arguments, -(-num_panels // width))
        return
    chunk = even_share(rows, _CHUNK_ROWS)
    chunks = -(-rows // chunk)
    width = max(1, min(8, num_panels * chunks // 32))
    block_terms = even_share(padded // 8, _BLOCK_TERMS // 8) * 8
    blocked = (
        quantised, scales, panels, weight_scales, bias, out, add, chunk, width, block_terms
    )  # fmt: skip
    fork_join(control, _blocked_unit, blocked, -(-num_panels // width) * chunks)


def packed(parts: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Panels and scales [ceil(N / 16) * 16] of the stacked ``parts``, each [N_i, K].

    The parts are read once. ``ValueError`` when K is more than ``MAX_DEPTH``.
    """
    depth = parts[0].shape[1]
    if depth > MAX_DEPTH:
        raise ValueError(f"int8 weights take at most {MAX_DEPTH} inputs, got {depth}")
    num_panels = -(-sum(part.shape[0] for part in parts) // LANES)
    panels = np.zeros((num_panels, -(-depth // 8) * 2, LANES, 4), np.int8)
    scales = np.zeros(num_panels * LANES, np.float32)
    first = 0
    for part in parts:
        pack_panels(np.require(part, requirements=["C", "A"]), panels, scales, first)
        first += part.shape[0]
    return panels, scales
