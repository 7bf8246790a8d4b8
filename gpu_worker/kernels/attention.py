"""Causal attention of ragged rows over the paged cache.

Softmax is computed online (Milakov & Gimelshein 2018; FlashAttention, Dao et al. 2022) over
*spans* of whole KV blocks, about 128 positions each, in ascending order from position 0. Within
a span scores and weighted values are sums in ascending order (see ``micro_kernel``). A query
therefore meets the same operations in the same order whichever queries share its tile: spans and
keys it may not see contribute an exact zero and leave its running maximum alone.
"""

# Compiled functions are typed by numba, for the arrays they are called with.
# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="call-arg,var-annotated"

from __future__ import annotations

import numpy as np
from numba import njit

from deepinfer.gpu_worker.kernels.fork_join import fork_join
from deepinfer.gpu_worker.kernels.micro_kernel import (
    out_1x1,
    out_1x2,
    out_2x1,
    out_2x2,
    out_3x1,
    out_3x2,
    out_4x1,
    out_5x1,
    out_6x1,
    zero_1x1,
    zero_1x2,
    zero_2x1,
    zero_2x2,
    zero_3x1,
    zero_3x2,
    zero_4x1,
    zero_5x1,
    zero_6x1,
)
from deepinfer.gpu_worker.kernels.settings import INNER, JIT
from deepinfer.gpu_worker.kernels.vectors import (
    LANES,
    add16,
    exp16,
    keep16,
    load16,
    max16,
    max_of16,
    mul16,
    splat16,
    store16,
    sub16,
    sum16,
)

_SPAN_TOKENS = 128
_AHEAD_TOKENS = 64
# Query rows (tokens times heads of a group) a tile holds: enough to use a loaded key or value
# often, few enough for scores and sums to stay in the L1 cache.
_TILE_ROWS = 30
# Below every score, yet finite: the difference of two such must be 0, not NaN.
_LOWEST = np.float32(-1e30)


@njit(**INNER)
def _scores(queries, keys, at, ahead, dim, scores, target, stride, rows):
    """Scores of all query rows against one lane group of keys."""
    done = 0
    blocks = -(-rows // 6)
    for block in range(blocks):
        size = rows // blocks + (1 if block < rows % blocks else 0)
        q = done * dim
        o = target + done * stride
        if size == 6:
            zero_6x1(queries, q, dim, keys, at, 0, LANES, ahead, 0, dim, scores, o, stride)
        elif size == 5:
            zero_5x1(queries, q, dim, keys, at, 0, LANES, ahead, 0, dim, scores, o, stride)
        elif size == 4:
            zero_4x1(queries, q, dim, keys, at, 0, LANES, ahead, 0, dim, scores, o, stride)
        elif size == 3:
            zero_3x1(queries, q, dim, keys, at, 0, LANES, ahead, 0, dim, scores, o, stride)
        elif size == 2:
            zero_2x1(queries, q, dim, keys, at, 0, LANES, ahead, 0, dim, scores, o, stride)
        else:
            zero_1x1(queries, q, dim, keys, at, 0, LANES, ahead, 0, dim, scores, o, stride)
        done += size


@njit(**INNER)
def _scores_of_two(queries, keys, at, gap, ahead, skew, dim, scores, o, stride, size):
    """Scores of 1 to 3 query rows against two lane groups, ``gap`` apart.

    Few rows leave the multiply-adds waiting for each other; the order of each sum is the same.
    """
    if size == 3:
        zero_3x2(queries, 0, dim, keys, at, gap, LANES, ahead, skew, dim, scores, o, stride)
    elif size == 2:
        zero_2x2(queries, 0, dim, keys, at, gap, LANES, ahead, skew, dim, scores, o, stride)
    else:
        zero_1x2(queries, 0, dim, keys, at, gap, LANES, ahead, skew, dim, scores, o, stride)


@njit(**INNER)
def _block_and_later(block_tables, slot, position, end, block_size):
    """The block of ``position``, and the one to fetch while it is in use.

    Blocks lie anywhere in memory, so the hardware sees no run that it could fetch ahead.
    """
    later = min(position + _AHEAD_TOKENS, end - 1)
    return (
        np.int64(block_tables[slot, position // block_size]),
        np.int64(block_tables[slot, later // block_size]),
    )


@njit(**INNER)
def _score_span(
    queries, dim, rows,
    keys, key_size, kv_heads, kv_head,
    block_tables, slot, base, count, end, block_size,
    scores, stride, groups,
):  # fmt: skip
    """Scores of all query rows against the keys of a span; ``groups`` [3, n] is scratch."""
    found = 0
    for offset in range(0, count, block_size):
        block, later = _block_and_later(block_tables, slot, base + offset, end, block_size)
        for group in range(0, min(block_size, count - offset), LANES):
            groups[0, found] = (block * kv_heads + kv_head) * key_size + group * dim
            groups[1, found] = (later - block) * kv_heads * key_size
            groups[2, found] = offset + group
            found += 1
    i = 0
    while i < found:
        at, ahead, target = groups[0, i], groups[1, i], groups[2, i]
        if rows <= 3 and i + 1 < found and groups[2, i + 1] == target + LANES:
            gap = groups[0, i + 1] - at
            skew = groups[1, i + 1] - ahead
            _scores_of_two(
                queries, keys, at, gap, ahead, skew, dim, scores, target, stride, rows
            )  # fmt: skip
            i += 2
        else:
            _scores(queries, keys, at, ahead, dim, scores, target, stride, rows)
            i += 1


@njit(**INNER)
def _weighted_values(weights, at, stride, values, v, ahead, dim, count, sums, rows):
    """Add ``count`` values, weighted, to the sums of all query rows; ``dim`` is padded."""
    if rows <= 3:
        size = rows
        pairs = dim // (2 * LANES)
        for d in range(0, pairs * 2 * LANES, 2 * LANES):
            if size == 3:
                out_3x2(
                    weights, at, stride, values, v + d, LANES, dim, ahead, 0, count, sums, d, dim
                )
            elif size == 2:
                out_2x2(
                    weights, at, stride, values, v + d, LANES, dim, ahead, 0, count, sums, d, dim
                )
            else:
                out_1x2(
                    weights, at, stride, values, v + d, LANES, dim, ahead, 0, count, sums, d, dim
                )
        first = pairs * 2 * LANES
    else:
        first = 0
    done = 0
    blocks = -(-rows // 6)
    for block in range(blocks):
        size = rows // blocks + (1 if block < rows % blocks else 0)
        w = at + done * stride
        for d in range(first, dim, LANES):
            o = done * dim + d
            if size == 6:
                out_6x1(weights, w, stride, values, v + d, 0, dim, ahead, 0, count, sums, o, dim)
            elif size == 5:
                out_5x1(weights, w, stride, values, v + d, 0, dim, ahead, 0, count, sums, o, dim)
            elif size == 4:
                out_4x1(weights, w, stride, values, v + d, 0, dim, ahead, 0, count, sums, o, dim)
            elif size == 3:
                out_3x1(weights, w, stride, values, v + d, 0, dim, ahead, 0, count, sums, o, dim)
            elif size == 2:
                out_2x1(weights, w, stride, values, v + d, 0, dim, ahead, 0, count, sums, o, dim)
            else:
                out_1x1(weights, w, stride, values, v + d, 0, dim, ahead, 0, count, sums, o, dim)
        done += size


@njit(**INNER)
def _softmax_span(scores, at, count, first, last, peaks, totals, sums, row, padded):
    """Turn one row's scores of a span into weights, and rescale what the row has summed so far.

    The row sees keys ``first <= i < last`` of the span's ``count``, 0 <= last <= count.
    """
    # Whole vectors of seen keys need no mask; at most two vectors of a span are mixed.
    begin = max(0, first) // LANES * LANES
    whole = -(-max(0, first) // LANES) * LANES
    until = max(whole, last // LANES * LANES)
    end = -(-last // LANES) * LANES
    low = np.float32(-np.inf)
    high = splat16(low)
    for i in range(begin, whole, LANES):
        high = max16(high, keep16(load16(scores, at + i), first - i, last - i, low))
    for i in range(whole, until, LANES):
        high = max16(high, load16(scores, at + i))
    for i in range(until, end, LANES):
        high = max16(high, keep16(load16(scores, at + i), first - i, last - i, low))
    peak = max(peaks[row], max_of16(high))
    total = load16(totals, row * LANES)
    if peak != peaks[row]:
        shrink = exp16(splat16(peaks[row] - peak))
        total = mul16(total, shrink)
        for d in range(0, padded, LANES):
            store16(sums, row * padded + d, mul16(load16(sums, row * padded + d), shrink))
        peaks[row] = peak
    base = splat16(peak)
    none = splat16(np.float32(0))
    for i in range(0, begin, LANES):
        store16(scores, at + i, none)
    for i in range(begin, end, LANES):
        weight = exp16(sub16(load16(scores, at + i), base))
        if i < whole or i >= until:
            weight = keep16(weight, first - i, last - i, np.float32(0))
        total = add16(total, weight)
        store16(scores, at + i, weight)
    for i in range(end, count, LANES):
        store16(scores, at + i, none)
    store16(totals, row * LANES, total)


@njit(**INNER)
def _attention_unit(arguments, unit):
    (
        qkv, keys, values, positions, slots, block_tables, tiles, scale, window, block_size, out,
    ) = arguments  # fmt: skip
    kv_heads = keys.shape[1]
    groups = keys.shape[2]
    dim = keys.shape[3]
    padded = values.shape[3]
    heads = out.shape[1] // dim
    share = heads // kv_heads
    # Late tiles see the most keys: they go first, so that no thread ends alone with a long one.
    tile = tiles.shape[0] - 1 - unit // kv_heads
    kv_head = unit % kv_heads
    slot = slots[tiles[tile, 0]]
    token = tiles[tile, 1]
    tokens = tiles[tile, 2]
    rows = tokens * share

    span_blocks = max(1, _SPAN_TOKENS // block_size)
    span = span_blocks * block_size
    value_size = block_size * padded
    stride = span + LANES  # the last lane group may reach past the span
    queries = np.empty(rows * dim, np.float32)
    scores = np.empty(rows * stride, np.float32)
    lane_groups = np.empty((3, span_blocks * groups), np.int64)
    sums = np.zeros(rows * padded, np.float32)
    totals = np.zeros(rows * LANES, np.float32)
    peaks = np.full(rows, _LOWEST, np.float32)
    for r in range(rows):
        head = kv_head * share + r % share
        for i in range(dim):
            queries[r * dim + i] = qkv[token + r // share, head * dim + i] * np.float32(scale)

    position = positions[token]
    end = position + tokens
    start = max(0, position - window + 1) if window > 0 else 0
    for base in range(start // span * span, end, span):
        count = min(span, end - base)
        _score_span(
            queries, dim, rows,
            keys, groups * dim * LANES, kv_heads, kv_head,
            block_tables, slot, base, count, end, block_size,
            scores, stride, lane_groups,
        )  # fmt: skip
        for r in range(rows):
            here = position + r // share
            first = here - window + 1 - base if window > 0 else np.int64(0)
            last = max(0, min(here + 1 - base, count))
            first = min(first, last)
            _softmax_span(scores, r * stride, count, first, last, peaks, totals, sums, r, padded)
        for offset in range(0, count, block_size):
            block, later = _block_and_later(block_tables, slot, base + offset, end, block_size)
            value_at = (block * kv_heads + kv_head) * value_size
            ahead = (later - block) * kv_heads * value_size
            _weighted_values(
                scores, offset, stride, values, value_at, ahead, padded,
                min(block_size, count - offset), sums, rows,
            )  # fmt: skip
    for r in range(rows):
        head = kv_head * share + r % share
        total = sum16(load16(totals, r * LANES))
        for i in range(dim):
            out[token + r // share, head * dim + i] = sums[r * padded + i] / total


@njit(**JIT)
def attention(
    control, qkv, keys, values, positions, q_start, slots, block_tables,
    scale, window, block_size, out,
):  # fmt: skip
    """See ``Backend.attention``."""
    kv_heads = keys.shape[1]
    share = out.shape[1] // keys.shape[3] // kv_heads
    most = max(1, _TILE_ROWS // share)
    rows = slots.shape[0]
    count = 0
    for r in range(rows):
        count += -(-(q_start[r + 1] - q_start[r]) // most)
    tiles = np.empty((count, 3), np.int64)  # row, first token, tokens
    tile = 0
    for r in range(rows):
        for token in range(q_start[r], q_start[r + 1], most):
            tiles[tile, 0] = r
            tiles[tile, 1] = token
            tiles[tile, 2] = min(most, q_start[r + 1] - token)
            tile += 1
    arguments = (
        qkv, keys, values, positions, slots, block_tables, tiles, scale, window, block_size, out,
    )  # fmt: skip
    fork_join(control, _attention_unit, arguments, count * kv_heads)
