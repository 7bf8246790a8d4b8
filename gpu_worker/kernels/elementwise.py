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
    load_scalar,
    max16,
    max_of16,
    mul16,
    splat16,
    store16,
    store_scalar,
    sub16,
    sum16,
)

# Elements a unit handles: a few microseconds of work, well above what starting it costs.
_UNIT_ELEMENTS = 16384


@njit(**INNER)
def _load_tail(x, at, count, other):
    """The last ``count`` < 16 elements of a row as a vector, ``other`` in the lanes behind them."""
    lanes = np.empty(LANES, np.float32)
    for i in range(LANES):
        lanes[i] = load_scalar(x, at + i) if i < count else other
    return load16(lanes, 0)


@njit(**INNER)
def inverse_rms(x, at, count, eps):
    """``1 / sqrt(mean(x**2) + eps)`` of ``count`` elements from flat offset ``at``."""
    squares = splat16(np.float32(0))
    whole = count - count % LANES
    for i in range(0, whole, LANES):
        value = load16(x, at + i)
        squares = fma16(value, value, squares)
    if whole < count:
        value = _load_tail(x, at + whole, count - whole, np.float32(0))
        squares = fma16(value, value, squares)
    mean = sum16(squares) / np.float32(count)
    return np.float32(1) / np.float32(math.sqrt(mean + np.float32(eps)))


@njit(**INNER)
def scale_row(x, at, count, scale, weight, out, out_at):
    """``out = x * scale * weight`` for one row."""
    factor = splat16(scale)
    whole = count - count % LANES
    for i in range(0, whole, LANES):
        value = mul16(mul16(load16(x, at + i), factor), load16(weight, i))
        store16(out, out_at + i, value)
    for i in range(whole, count):
        value = (load_scalar(x, at + i) * scale) * load_scalar(weight, i)
        store_scalar(out, out_at + i, value)


@njit(**INNER)
def _rms_norm_unit(arguments, unit):
    x, weight, eps, out, rows = arguments
    total, width = x.shape
    for t in range(unit * rows, min(unit * rows + rows, total)):
        scale = inverse_rms(x, t * width, width, eps)
        scale_row(x, t * width, width, scale, weight, out, t * width)


@njit(**JIT)
def rms_norm(control, x, weight, eps, out):
    """See ``Backend.rms_norm``."""
    total, width = x.shape
    rows = max(1, _UNIT_ELEMENTS // width)
    fork_join(control, _rms_norm_unit, (x, weight, eps, out, rows), -(-total // rows))


@njit(**INNER)
def _silu_mul_unit(arguments, unit):
    gate_up, out, rows = arguments
    total, width = out.shape
    one = splat16(np.float32(1))
    zero = splat16(np.float32(0))
    whole = width - width % LANES
    for t in range(unit * rows, min(unit * rows + rows, total)):
        at = t * 2 * width
        for i in range(0, whole, LANES):
            gate = load16(gate_up, at + i)
            sigmoid_inverse = add16(one, exp16(sub16(zero, gate)))
            value = mul16(div16(gate, sigmoid_inverse), load16(gate_up, at + width + i))
            store16(out, t * width + i, value)
        if whole < width:
            count = width - whole
            gate = _load_tail(gate_up, at + whole, count, np.float32(0))
            up = _load_tail(gate_up, at + width + whole, count, np.float32(0))
            value = mul16(div16(gate, add16(one, exp16(sub16(zero, gate)))), up)
            lanes = np.empty(LANES, np.float32)
            store16(lanes, 0, value)
            for i in range(count):
                out[t, whole + i] = lanes[i]


@njit(**JIT)
def silu_mul(control, gate_up, out):
    """See ``Backend.silu_mul``."""
    total, width = out.shape
    # An exponential and a division make an element about four times as dear as a norm's.
    rows = max(1, _UNIT_ELEMENTS // 4 // width)
    fork_join(control, _silu_mul_unit, (gate_up, out, rows), -(-total // rows))


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
        peak = max16(peak, _load_tail(logits, at + whole, width - whole, low))
    top = max_of16(peak)
    # A row that is -inf throughout has no finite reference; exp(-inf) is 0 with any.
    base = splat16(np.float32(0) if top == low else top)
    total = splat16(np.float32(0))
    for i in range(0, whole, LANES):
        total = add16(total, exp16(sub16(load16(logits, at + i), base)))
    if whole < width:
        tail = _load_tail(logits, at + whole, width - whole, low)
        weights = exp16(sub16(tail, base))
        total = add16(total, keep16(weights, 0, width - whole, np.float32(0)))
    largest[row] = top
    log_sum[row] = np.float32(math.log(sum16(total))) + (np.float32(0) if top == low else top)


@njit(**JIT)
def softmax_stats(control, logits, largest, log_sum):
    """See ``Backend.log_softmax_stats``."""
    fork_join(control, _softmax_stats_unit, (logits, largest, log_sum), logits.shape[0])
