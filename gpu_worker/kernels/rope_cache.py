"""Rotary embedding of queries and keys, and the write of keys and values into the cache."""

# Compiled functions are typed by numba, for the arrays they are called with.
# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="call-arg,var-annotated"

from __future__ import annotations

import numpy as np
from numba import njit

from deepinfer.gpu_worker.kernels.elementwise import inverse_rms, scale_row
from deepinfer.gpu_worker.kernels.fork_join import fork_join
from deepinfer.gpu_worker.kernels.settings import INNER, JIT
from deepinfer.gpu_worker.kernels.vectors import (
    LANES,
    add16,
    fetch_to_write,
    load16,
    load_scalar,
    mul16,
    store16,
    store_scalar,
    sub16,
)

# Elements of qkv a unit handles.
_UNIT_ELEMENTS = 16384


@njit(**INNER)
def _rotate(qkv, start, heads, half, cos, sin, angle):
    """Rotate heads in place, dimension i with i + D/2; offsets count elements."""
    end = start + heads * 2 * half
    whole = half - half % LANES
    for i in range(0, whole, LANES):
        cosine, sine = load16(cos, angle + i), load16(sin, angle + i)
        for at in range(start + i, end, 2 * half):
            first, second = load16(qkv, at), load16(qkv, at + half)
            store16(qkv, at, sub16(mul16(first, cosine), mul16(second, sine)))
            store16(qkv, at + half, add16(mul16(second, cosine), mul16(first, sine)))
    for i in range(whole, half):
        cosine_i, sine_i = load_scalar(cos, angle + i), load_scalar(sin, angle + i)
        for at in range(start + i, end, 2 * half):
            one, two = load_scalar(qkv, at), load_scalar(qkv, at + half)
            store_scalar(qkv, at, one * cosine_i - two * sine_i)
            store_scalar(qkv, at + half, two * cosine_i + one * sine_i)


@njit(**INNER)
def _store_row(x, x_at, out, out_at, count):
    """Write ``count`` elements, rounded to what ``out`` holds."""
    whole = count - count % LANES
    for i in range(0, whole, LANES):
        store16(out, out_at + i, load16(x, x_at + i))
    for i in range(whole, count):
        store_scalar(out, out_at + i, load_scalar(x, x_at + i))


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
def _fetch_lines(keys, values, block, within, block_size):
    """Ask for the cache lines that a token's keys and values are going to be written to.

    Its keys alone go to a line for each two dimensions. Left to the stores, the lines would come
    from memory one after the other.
    """
    kv_heads, groups, dim = keys.shape[1], keys.shape[2], keys.shape[3]
    padded = values.shape[3]
    step = 64 // keys.itemsize
    for head in range(block * kv_heads, (block + 1) * kv_heads):
        at = (head * groups + within // LANES) * dim * LANES
        for i in range(at, at + dim * LANES, step):
            fetch_to_write(keys, i)
        at = (head * block_size + within) * padded
        for i in range(at, at + padded, step):
            fetch_to_write(values, i)


@njit(**INNER)
def _rope_unit(arguments, unit):
    (
        qkv, keys, values, scales, positions, q_start, slots, block_tables,
        cos, sin, lines, norms, normed, eps, block_size, tokens,
    ) = arguments  # fmt: skip
    total, width = qkv.shape
    kv_heads = keys.shape[1]
    groups = keys.shape[2]
    dim = keys.shape[3]
    padded = values.shape[3]
    heads = width // dim - 2 * kv_heads
    flat_keys = keys.reshape(keys.size)
    rounded = np.empty(dim, keys.dtype)
    first = unit * tokens
    row = next_row = _row_of(q_start, first)
    fetched = first
    for t in range(first, min(first + tokens, total)):
        while q_start[row + 1] <= t:
            row += 1
        position = positions[t]
        # Lines are asked for a token before their turn; tokens of a lane group share them.
        while fetched < min(t + 2, total):
            while q_start[next_row + 1] <= fetched:
                next_row += 1
            at = positions[fetched]
            within = at % block_size
            if within % LANES == 0 or q_start[next_row] == fetched or fetched == first:
                block = np.int64(block_tables[slots[next_row], at // block_size])
                _fetch_lines(keys, values, block, within, block_size)
            fetched += 1
        if normed:
            for head in range(heads + kv_heads):
                which = 0 if head < heads else 1
                at = t * width + head * dim
                scale = inverse_rms(qkv, at, dim, eps)
                scale_row(qkv, at, dim, scale, norms[which], qkv, at)
        half = dim // 2
        _rotate(qkv, t * width, heads + kv_heads, half, cos, sin, lines[t] * half)
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
            _store_row(qkv, t * width + key_at, rounded, 0, dim)
            for i in range(dim):
                flat_keys[lane + i * LANES] = rounded[i]
            _store_row(qkv, t * width + value_at, values, line, dim)


@njit(**JIT)
def rope_and_cache(
    control, qkv, keys, values, scales, positions, q_start, slots, block_tables,
    cos, sin, lines, norms, normed, eps, block_size,
):  # fmt: skip
    """See ``Backend.rope_and_cache``; ``norms`` [2, D] are the weights of q and k if ``normed``."""
    total, width = qkv.shape
    tokens = max(1, _UNIT_ELEMENTS // width)
    arguments = (
        qkv, keys, values, scales, positions, q_start, slots, block_tables,
        cos, sin, lines, norms, normed, eps, block_size, tokens,
    )  # fmt: skip
    fork_join(control, _rope_unit, arguments, -(-total // tokens))
