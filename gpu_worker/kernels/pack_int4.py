"""Weights to int4: a scale and a minimum for every 32 along K, found by least squares.

Each group of 32 weights becomes codes q of 0 … 15 and float16 d and m with ``w ≈ d * q + m``
(ggml's Q4_1; Q4_0 is the case m = -8 d). Where a group has such a form already it is found again.
"""

# Compiled functions are typed by numba, for the arrays they are called with.
# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="call-arg,var-annotated,misc"

from __future__ import annotations

import numpy as np
from numba import njit
from numba.extending import intrinsic

from deepinfer.gpu_worker.kernels.byte_product import COLUMNS
from deepinfer.gpu_worker.kernels.fork_join import fork_join
from deepinfer.gpu_worker.kernels.micro_kernel_int4 import CODE_BYTES, GROUP, WEIGHT_BYTES
from deepinfer.gpu_worker.kernels.settings import INNER, JIT
from deepinfer.gpu_worker.kernels.vectors import (
    LANES,
    add16,
    div16,
    float32x16,
    fma16,
    load16,
    load_scalar,
    max16,
    mul16,
    splat16,
    store16,
    sub16,
)
from deepinfer.gpu_worker.memory import Arena

# Adding and subtracting 1.5 * 2**23 rounds to the nearest integer.
_SHIFT = np.float32(12582912.0)
_TILE = GROUP * LANES


@intrinsic
def _where_less(typingctx, x, y, a, b):
    """``a`` where ``x < y`` and ``b`` elsewhere, lane by lane."""

    def codegen(context, builder, signature, args):
        return builder.select(builder.fcmp_ordered("<", args[0], args[1]), args[2], args[3])

    return float32x16(float32x16, float32x16, float32x16, float32x16), codegen


@njit(**INNER)
def _load_tile(source, row, group, tile):
    """Sixteen rows of a group as ``tile`` [32][16]; beyond its ends the last value again."""
    rows, depth = source.shape
    for lane in range(LANES):
        at = min(row + lane, rows - 1) * depth
        for k in range(GROUP):
            tile[k * LANES + lane] = load_scalar(source, at + min(group * GROUP + k, depth - 1))


@njit(**INNER)
def _least_squares(tile, scales, minima):
    """Scales and minima of 16 groups at once.

    For each of some assumed spacings the weights are rounded to codes, and d and m follow from the
    codes by linear regression; the least error wins (as in llama.cpp's ``make_qkx2_quants``). A
    group that is d * q + m is met exactly by one of the spacings (its range) / 8 … 15: where fewer
    codes span the range, so do twice as many.
    """
    zero, shift, top = splat16(np.float32(0)), splat16(_SHIFT), splat16(np.float32(15))
    size = splat16(np.float32(GROUP))
    low = high = load16(tile, 0)
    for at in range(LANES, _TILE, LANES):
        x = load16(tile, at)
        low = _where_less(x, low, x, low)
        high = max16(high, x)
    # Measured from the minimum, so that the errors are no small differences of large numbers.
    total = squares = zero
    for at in range(0, _TILE, LANES):
        x = sub16(load16(tile, at), low)
        store16(tile, at, x)
        total = add16(total, x)
        squares = fma16(x, x, squares)
    extent = max16(sub16(high, low), splat16(np.float32(1e-30)))
    # What stays where the errors overflow, and is refused for it.
    best, best_scale, best_minimum = splat16(np.float32(np.inf)), div16(extent, top), zero
    for candidate in range(27):
        steps = 8.0 + candidate if candidate < 6 else 14.0 + 0.1 * (candidate - 6)
        factor = div16(splat16(np.float32(steps)), extent)
        q_sum = q_squares = q_x = zero
        for at in range(0, _TILE, LANES):
            x = load16(tile, at)
            q = sub16(fma16(x, factor, shift), shift)
            q = _where_less(q, top, q, top)
            q_sum = add16(q_sum, q)
            q_squares = fma16(q, q, q_squares)
            q_x = fma16(q, x, q_x)
        # Zero where all codes are equal, and at least 31 elsewhere.
        spread = sub16(mul16(size, q_squares), mul16(q_sum, q_sum))
        slope = sub16(mul16(size, q_x), mul16(q_sum, total))
        slope = div16(slope, max16(spread, splat16(np.float32(1))))
        offset = div16(sub16(total, mul16(slope, q_sum)), size)
        error = sub16(squares, add16(mul16(slope, q_x), mul16(offset, total)))
        best_scale = _where_less(error, best, slope, best_scale)
        best_minimum = _where_less(error, best, offset, best_minimum)
        best = _where_less(error, best, error, best)
    store16(scales, 0, best_scale)
    # A NaN loses every comparison above; here it comes back.
    store16(minima, 0, add16(add16(best_minimum, low), mul16(total, zero)))


@njit(**INNER)
def _fit_unit(arguments, unit):
    source, fitted = arguments
    rows = source.shape[0]
    row = unit * LANES
    tile = np.empty(_TILE, np.float32)
    scales, minima = np.empty(LANES, np.float32), np.empty(LANES, np.float32)
    for group in range(fitted.shape[1]):
        _load_tile(source, row, group, tile)
        _least_squares(tile, scales, minima)
        for lane in range(min(LANES, rows - row)):
            fitted[row + lane, group, 0] = scales[lane]
            fitted[row + lane, group, 1] = minima[lane]


@njit(**JIT)
def _fit(control, source, fitted):
    fork_join(control, _fit_unit, (source, fitted), -(-source.shape[0] // LANES))


@njit(**INNER)
def _encode_unit(arguments, unit):
    source, fitted, bits, panels, columns = arguments
    rows = source.shape[0]
    row = unit * LANES
    tile = np.empty(_TILE, np.float32)
    scales, minima = np.ones(LANES, np.float32), np.zeros(LANES, np.float32)
    zero, shift, top = splat16(np.float32(0)), splat16(_SHIFT), splat16(np.float32(15))
    for group in range(fitted.shape[1]):
        _load_tile(source, row, group, tile)
        for lane in range(min(LANES, rows - row)):
            # Without a scale there is but the minimum, and any code will do.
            scale = fitted[row + lane, group, 0]
            scales[lane] = scale if scale != 0 else np.float32(1)
            minima[lane] = fitted[row + lane, group, 1]
        for at in range(0, _TILE, LANES):
            q = div16(sub16(load16(tile, at), load16(minima, 0)), load16(scales, 0))
            q = _where_less(q, top, q, top)
            q = _where_less(zero, q, q, zero)
            store16(tile, at, sub16(add16(q, shift), shift))
        for lane in range(min(LANES, rows - row)):
            panel, column = divmod(columns[row + lane], COLUMNS)
            block = panels[panel, group]
            for k in range(0, GROUP, 8):
                for i in range(4):
                    low = np.uint8(tile[(k + i) * LANES + lane])
                    high = np.uint8(tile[(k + 4 + i) * LANES + lane])
                    block[k // 2 * COLUMNS + 4 * column + i] = low | high << 4
            for which in range(2):
                at = CODE_BYTES + 2 * (which * COLUMNS + column)
                block[at] = bits[row + lane, group, which] & 0xFF
                block[at + 1] = bits[row + lane, group, which] >> 8


@njit(**JIT)
def _encode(control, source, fitted, bits, panels, columns):
    arguments = (source, fitted, bits, panels, columns)
    fork_join(control, _encode_unit, arguments, -(-source.shape[0] // LANES))


def packed_int4(
    control: int, parts: list[np.ndarray], columns: list[np.ndarray], arena: Arena
) -> np.ndarray:
    """Panels uint8 [P, ceil(K / 32), WEIGHT_BYTES] of ``parts`` [N_i, K], in ``columns``.

    The parts are float32 or bfloat16 as uint16 and are read one after the other; nothing of them is
    kept. ``ValueError`` when a weight does not fit in float16.
    """
    depth = parts[0].shape[1]
    total = columns[-1][-1] + 1
    groups = -(-depth // GROUP)
    panels = arena.zeros((-(-total // COLUMNS), groups, WEIGHT_BYTES), np.uint8)
    for part, places in zip(parts, columns, strict=True):
        # One layout for the compiled function; only an odd one (unaligned, strided) is copied.
        source = np.require(part, requirements=["C", "A"])
        fitted = np.empty((part.shape[0], groups, 2), np.float32)
        _fit(control, source, fitted)
        with np.errstate(over="ignore"):
            halves = fitted.astype(np.float16)
        if not np.isfinite(halves).all():
            raise ValueError("quantization int4 needs weights within float16's 65504, and no NaN")
        bits = halves.view(np.uint16)
        _encode(control, source, halves.astype(np.float32), bits, panels, places)
    return panels
