"""Rotary embedding of queries and keys, and the write of keys and values into the cache."""

# Compiled functions are typed by numba, for the arrays they are called with.
# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="call-arg,var-annotated"

from __future__ import annotations

import numpy as np
from numba import njit

from deepinfer.gpu_worker.kernels.elementwise import inverse_rms, scale_row
from deepinfer.gpu_worker.kernels.fork_join import fork_join
from deepinfer.gpu_worker.kernels.settings import INNER, JIT
from deepinfer.gpu_worker.kernels.vectors import LANES, store_scalar

# Elements of qkv a unit handles.
_UNIT_ELEMENTS = 16384


@njit(**INNER)
def _rotate(qkv, token, at, half, cos, sin, position):
    """Rotate one head in place, dimension i with i + D/2."""
    for i in range(half):
        first = qkv[token, at + i]
        second = qkv[token, at + half + i]
        qkv[token, at + i] = first * cos[position, i] - second * sin[position, i]
        qkv[token, at + half + i] = second * cos[position, i] + first * sin[position, i]


@njit(**INNER)
def _to_integers(qkv, token, at, dim):
    """Divide a vector in place by a scale that makes its largest element ±127; return the scale.

    The scale of a vector with a NaN or an infinity is NaN: its integers mean nothing, and all that
    comes of it must be noticed.
    """
    largest = np.float32(0)
    nothing = np.float32(0)
    for i in range(dim):
        value = qkv[token, at + i]
        largest = max(largest, abs(value))
        nothing += value * np.float32(0)
    # Where 127 / largest would overflow, the integers and the scale are 0.
    if np.isnan(nothing) or largest < np.float32(1e-35):
        largest = np.float32(0)
    factor = np.float32(127) / largest if largest > 0 else np.float32(0)
    for i in range(dim):
        # Rounding may have made it a little more than 127; a NaN becomes some number.
        scaled = qkv[token, at + i] * factor
        qkv[token, at + i] = max(np.float32(-127), min(np.float32(127), scaled))
    return largest / np.float32(127) + nothing


@njit(**INNER)
def _row_of(q_start, token):
    """The row that owns a token: the last one that starts at or before it."""
    low = 0
    high = q_start.shape[0] - 1
    while high - low > 1:
        middle = (low + high) // 2
        if q_start[middle] <= token:
            low = middle
        else:
            high = middle
    return low


@njit(**INNER)
def _rope_unit(arguments, unit):
    (
        qkv, keys, values, scales, positions, q_start, slots, block_tables,
        cos, sin, norms, normed, eps, block_size, tokens,
    ) = arguments  # fmt: skip
    total, width = qkv.shape
    kv_heads = keys.shape[1]
    groups = keys.shape[2]
    dim = keys.shape[3]
    padded = values.shape[3]
    heads = width // dim - 2 * kv_heads
    first = unit * tokens
    row = _row_of(q_start, first)
    for t in range(first, min(first + tokens, total)):
        while q_start[row + 1] <= t:
            row += 1
        position = positions[t]
        for head in range(heads + kv_heads):
            if normed:
                which = 0 if head < heads else 1
                at = t * width + head * dim
                scale = inverse_rms(qkv, at, dim, eps)
                scale_row(qkv, at, dim, scale, norms[which], qkv, at)
            _rotate(qkv, t, head * dim, dim // 2, cos, sin, position)
        block = np.int64(block_tables[slots[row], position // block_size])
        within = position % block_size
        for head in range(kv_heads):
            key_at = heads * dim + head * dim
            group = (block * kv_heads + head) * groups + within // LANES
            lane = group * dim * LANES + within % LANES
            value_at = key_at + kv_heads * dim
            line = ((block * kv_heads + head) * block_size + within) * padded
            if scales.shape[1] > 0:
                scales[0, block, head, within] = _to_integers(qkv, t, key_at, dim)
                scales[1, block, head, within] = _to_integers(qkv, t, value_at, dim)
            for i in range(dim):
                store_scalar(keys, lane + i * LANES, qkv[t, key_at + i])
            for i in range(dim):
                store_scalar(values, line + i, qkv[t, value_at + i])


@njit(**JIT)
def rope_and_cache(
    control, qkv, keys, values, scales, positions, q_start, slots, block_tables,
    cos, sin, norms, normed, eps, block_size,
):  # fmt: skip
    """See ``Backend.rope_and_cache``; ``norms`` [2, D] are the weights of q and k if ``normed``."""
    total, width = qkv.shape
    tokens = max(1, _UNIT_ELEMENTS // width)
    arguments = (
        qkv, keys, values, scales, positions, q_start, slots, block_tables,
        cos, sin, norms, normed, eps, block_size, tokens,
    )  # fmt: skip
    fork_join(control, _rope_unit, arguments, -(-total // tokens))
