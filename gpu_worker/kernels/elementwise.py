"""Row-wise operations: normalisation, gated activation, row gathering, softmax statistics.

Sums run over sixteen lanes, element i in lane i % 16, and end in a fixed tree: the order depends on
the length of the row alone.
"""

# Compiled functions are typed by numba, for the arrays they are called with.
# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="call-arg,var-annotated"

from __future__ import annotations

import math

import numpy as np
from numba import njit

from deepinfer.gpu_worker.kernels.fork_join import fork_join
from deepinfer.gpu_worker.kernels.settings import INNER, JIT
from deepinfer.gpu_worker.kernels.vectors import (
    LANES,
    add16,
    div16,
    exp16,
    fma16,
    keep16,
    load16,
    load_first16,
    max16,
    max_of16,
    mul16,
    splat16,
    store16,
    store_first16,
    sub16,
    sum16,
)


# Inlined before types are inferred: as calls, they took longer than what they compute.
@njit(**INNER, inline="always")
def inverse_rms(x, at, count, eps):
    """``1 / sqrt(mean(x**2) + eps)`` of ``count`` elements from flat offset ``at``."""
    squares = splat16(np.float32(0))
    whole = count - count % LANES
    for i in range(0, whole, LANES):
        value = load16(x, at + i)
        squares = fma16(value, value, squares)
    if whole < count:
        value = load_first16(x, at + whole, count - whole, np.float32(0))
        squares = fma16(value, value, squares)
    mean = sum16(squares) / np.float32(count)
    return np.float32(1) / np.float32(math.sqrt(mean + np.float32(eps)))


@njit(**INNER, inline="always")
def scale_row(x, at, count, scale, weight, out, out_at):
    """``out = x * scale * weight`` for one row."""
    factor = splat16(scale)
    whole = count - count % LANES
    for i in range(0, whole, LANES):
        value = mul16(mul16(load16(x, at + i), factor), load16(weight, i))
        store16(out, out_at + i, value)
    if whole < count:
        rest = count - whole
        value = load_first16(x, at + whole, rest, np.float32(0))
        value = mul16(mul16(value, factor), load_first16(weight, whole, rest, np.float32(0)))
        store_first16(out, out_at + whole, rest, value)


@njit(**INNER)
def normed_row(x, row, norm, eps, out, at):
    """Write a row of x [T, K], normed by weights ``norm`` [K], to ``out`` from ``at`` on."""
    width = x.shape[1]
    scale = inverse_rms(x, row * width, width, eps)
    scale_row(x, row * width, width, scale, norm, out, at)


@njit(**INNER)
def copied_row(x, row, out, at):
    """Write a row of x [T, K] to ``out`` from element ``at`` on."""
    width = x.shape[1]
    whole = width - width % LANES
    for i in range(0, whole, LANES):
        store16(out, at + i, load16(x, row * width + i))
    if whole < width:
        rest = width - whole
        value = load_first16(x, row * width + whole, rest, np.float32(0))
        store_first16(out, at + whole, rest, value)


@njit(**INNER)
def silu_mul16(gate, up):
    """``gate / (1 + exp(-gate)) * up``, lane by lane."""
    inverse = add16(splat16(np.float32(1)), exp16(sub16(splat16(np.float32(0)), gate)))
    return mul16(div16(gate, inverse), up)


@njit(**JIT)
def take_rows(x, index, out):
    """``out[i] = x[index[i]]``."""
    for i in range(index.shape[0]):
        for k in range(x.shape[1]):
            out[i, k] = x[index[i], k]


@njit(**INNER)
def _softmax_stats_unit(arguments, row):
    logits, largest, log_sum = arguments
    width = logits.shape[1]
    at = row * width
    whole = width - width % LANES
    low = np.float32(-np.inf)
    peak = splat16(low)
    for i in range(0, whole, LANES):
        peak = max16(peak, load16(logits, at + i))
    if whole < width:
        peak = max16(peak, load_first16(logits, at + whole, width - whole, low))
    top = max_of16(peak)
    # A row that is -inf throughout has no finite reference; exp(-inf) is 0 with any.
    base = splat16(np.float32(0) if top == low else top)
    total = splat16(np.float32(0))
    for i in range(0, whole, LANES):
        total = add16(total, exp16(sub16(load16(logits, at + i), base)))
    if whole < width:
        tail = load_first16(logits, at + whole, width - whole, low)
        weights = exp16(sub16(tail, base))
        total = add16(total, keep16(weights, 0, width - whole, np.float32(0)))
    largest[row] = top
    log_sum[row] = np.float32(math.log(sum16(total))) + (np.float32(0) if top == low else top)


@njit(**JIT)
def softmax_stats(control, logits, largest, log_sum):
    """See ``Backend.log_softmax_stats``."""
    fork_join(control, _softmax_stats_unit, (logits, largest, log_sum), logits.shape[0])
