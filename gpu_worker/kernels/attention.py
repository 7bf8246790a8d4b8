"""Causal attention of ragged rows over the paged cache.

Positions are taken in *spans* of whole KV blocks, about 128 positions each, counted from position
0. Every span is computed for itself: scores, their peak, weights, the sum of the weights and the
weighted values, each sum in ascending order. The spans of a query are then merged one by one in
ascending order (online softmax: Milakov & Gimelshein 2018; FlashAttention, Dao et al. 2022). So a
query meets the same operations in the same order whichever queries share its tile and whichever
thread computed a span, and a long context can be split among threads (Flash-Decoding, Dao et al.
2023).

Tiles of few queries read the cache as it lies. Tiles of many first widen a span to float32, which
then serves all of them out of the L1 and L2 caches.
"""

# Compiled functions are typed by numba, for the arrays they are called with.
# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="call-arg,var-annotated"

from __future__ import annotations

import numpy as np
from numba import njit

from deepinfer.gpu_worker.kernels.attention_tiles import (
    AHEAD_GROUPS,
    scores_1x4,
    scores_2x2,
    scores_3x1,
    scores_4x1,
    scores_5x1,
    scores_6x1,
    weighted_1x1,
    weighted_1x4,
    weighted_2x1,
    weighted_2x2,
    weighted_3x1,
    weighted_4x1,
    weighted_5x1,
    weighted_6x1,
)
from deepinfer.gpu_worker.kernels.fork_join import fork_join, num_threads
from deepinfer.gpu_worker.kernels.micro_kernel import (
    zero_1x1,
    zero_2x1,
    zero_3x1,
    zero_4x1,
    zero_5x1,
    zero_6x1,
)
from deepinfer.gpu_worker.kernels.settings import INNER, JIT
from deepinfer.gpu_worker.kernels.vectors import (
    LANES,
    add16,
    exp16,
    fma16,
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
# Query rows (tokens times heads of a group) that one pass over the cached bytes can serve.
_DIRECT_ROWS = 6
# Query rows of a tile that widens: enough to make little of widening, few enough for their scores
# to stay in the L2 cache.
_TILE_ROWS = 60
# So many units for each thread are enough to even out their lengths.
_UNITS_A_THREAD = 8
# Below every score, yet finite: the difference of two such must be 0, not NaN.
_LOWEST = np.float32(-1e30)
# Columns of the table of units.
_ROW, _TOKEN, _TOKENS, _FIRST, _LAST, _HEAD, _HEADS, _PART, _WIDE, _COLUMNS = range(10)


@njit(**INNER)
def _direct_scores(queries, dim, keys, k_shift, values, v_shift, table, i, scores, stride, rows):
    """Scores of 1 to 6 query rows against lane group ``i``, or some more; return how many."""
    length = table.shape[1]
    if rows == 1:
        scores_1x4(
            queries, dim, keys, k_shift, values, v_shift, table, length, i, scores, stride
        )  # fmt: skip
        return 4
    if rows == 2:
        scores_2x2(
            queries, dim, keys, k_shift, values, v_shift, table, length, i, scores, stride
        )  # fmt: skip
        return 2
    if rows == 3:
        scores_3x1(
            queries, dim, keys, k_shift, values, v_shift, table, length, i, scores, stride
        )  # fmt: skip
    elif rows == 4:
        scores_4x1(
            queries, dim, keys, k_shift, values, v_shift, table, length, i, scores, stride
        )  # fmt: skip
    elif rows == 5:
        scores_5x1(
            queries, dim, keys, k_shift, values, v_shift, table, length, i, scores, stride
        )  # fmt: skip
    else:
        scores_6x1(
            queries, dim, keys, k_shift, values, v_shift, table, length, i, scores, stride
        )  # fmt: skip
    return 1


@njit(**INNER)
def _direct_values(weights, stride, values, shift, places, count, out, width, rows):
    """Weighted sums of ``count`` (even) values for 1 to 6 query rows; ``width`` columns."""
    d = 0
    if rows == 1:
        while d + 4 * LANES <= width:
            weighted_1x4(weights, stride, values, shift, places, count, d, out, width)
            d += 4 * LANES
    elif rows == 2:
        while d + 2 * LANES <= width:
            weighted_2x2(weights, stride, values, shift, places, count, d, out, width)
            d += 2 * LANES
    while d < width:
        if rows == 1:
            weighted_1x1(weights, stride, values, shift, places, count, d, out, width)
        elif rows == 2:
            weighted_2x1(weights, stride, values, shift, places, count, d, out, width)
        elif rows == 3:
            weighted_3x1(weights, stride, values, shift, places, count, d, out, width)
        elif rows == 4:
            weighted_4x1(weights, stride, values, shift, places, count, d, out, width)
        elif rows == 5:
            weighted_5x1(weights, stride, values, shift, places, count, d, out, width)
        else:
            weighted_6x1(weights, stride, values, shift, places, count, d, out, width)
        d += LANES


@njit(**INNER)
def _near_product(x, x_row, w, w_at, w_k, count, out, out_at, out_row, rows):
    """``rows`` rows of ``x`` times one panel of float32 numbers that lie in the caches."""
    done = 0
    blocks = -(-rows // 6)
    for block in range(blocks):
        size = rows // blocks + (1 if block < rows % blocks else 0)
        a = done * x_row
        o = out_at + done * out_row
        if size == 6:
            zero_6x1(x, a, x_row, w, w_at, 0, w_k, 0, 0, count, out, o, out_row)
        elif size == 5:
            zero_5x1(x, a, x_row, w, w_at, 0, w_k, 0, 0, count, out, o, out_row)
        elif size == 4:
            zero_4x1(x, a, x_row, w, w_at, 0, w_k, 0, 0, count, out, o, out_row)
        elif size == 3:
            zero_3x1(x, a, x_row, w, w_at, 0, w_k, 0, 0, count, out, o, out_row)
        elif size == 2:
            zero_2x1(x, a, x_row, w, w_at, 0, w_k, 0, 0, count, out, o, out_row)
        else:
            zero_1x1(x, a, x_row, w, w_at, 0, w_k, 0, 0, count, out, o, out_row)
        done += size


@njit(**INNER)
def _softmax_span(scores, at, count, first, last, part, t, p):
    """Turn one row's scores of a span into weights.

    The row sees keys ``first <= i < last`` of the span's ``count``, 0 <= last <= count. The sum of
    the weights goes to 16 lanes of ``part`` from ``t`` on, the scores' peak to ``p``.
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
    peak = max(_LOWEST, max_of16(high))
    base = splat16(peak)
    none = splat16(np.float32(0))
    total = none
    for i in range(0, begin, LANES):
        store16(scores, at + i, none)
    for i in range(begin, whole, LANES):
        weight = exp16(sub16(load16(scores, at + i), base))
        weight = keep16(weight, first - i, last - i, np.float32(0))
        total = add16(total, weight)
        store16(scores, at + i, weight)
    for i in range(whole, until, LANES):
        weight = exp16(sub16(load16(scores, at + i), base))
        total = add16(total, weight)
        store16(scores, at + i, weight)
    for i in range(until, end, LANES):
        weight = exp16(sub16(load16(scores, at + i), base))
        weight = keep16(weight, first - i, last - i, np.float32(0))
        total = add16(total, weight)
        store16(scores, at + i, weight)
    # One more than there are: the values are taken in pairs.
    for i in range(end, count + 1, LANES):
        store16(scores, at + i, none)
    store16(part, t, total)
    part[p] = peak


@njit(**INNER)
def _merge(state, part, rows, width):
    """Add what a span came to, to what the rows of a tile have summed so far.

    Both hold the weighted values [rows, width], the sums of the weights [rows, 16], and the peaks
    [rows] that the weights are relative to.
    """
    t = rows * width
    p = t + rows * LANES
    for r in range(rows):
        high = max(state[p + r], part[p + r])
        keep = exp16(splat16(state[p + r] - high))
        take = exp16(splat16(part[p + r] - high))
        state[p + r] = high
        for i in range(r * width, (r + 1) * width, LANES):
            store16(state, i, fma16(load16(part, i), take, mul16(load16(state, i), keep)))
        i = t + r * LANES
        store16(state, i, fma16(load16(part, i), take, mul16(load16(state, i), keep)))


@njit(**INNER)
def _clear(state, rows, width):
    """Nothing summed so far."""
    state[: rows * (width + LANES)] = 0
    state[rows * (width + LANES) :] = _LOWEST


@njit(**INNER)
def _state_size(rows, width):
    return rows * (width + LANES + 1)


@njit(**INNER)
def _write(state, rows, width, share, dim, out, token, head):
    """Write the normalised sums of a tile's rows to where they belong."""
    for r in range(rows):
        total = sum16(load16(state, rows * width + r * LANES))
        for i in range(dim):
            out[token + r // share, (head + r % share) * dim + i] = state[r * width + i] / total


@njit(**INNER)
def _look_up(keys, values, block_tables, slot, base, count, end, block_size, table, places):
    """Fill in where the lane groups and values of a span lie; return how many groups it has.

    The span is positions ``base`` … ``base + count - 1``; after its groups ``table`` goes on with
    those of the following positions before ``end``. All places are those of head 0.
    """
    kv_heads, groups, dim = keys.shape[1], keys.shape[2], keys.shape[3]
    width = values.shape[3]
    most = table.shape[1]
    found = inside = 0
    position = base
    while position < end and found < most:
        block = np.int64(block_tables[slot, position // block_size]) * kv_heads
        here = min(block_size, end - position)
        for group in range(0, here, LANES):
            if found < most:
                table[0, found] = (block * groups + group // LANES) * dim * LANES
                table[1, found] = position - base + group
                table[2, found] = (block * block_size + group) * width
                found += 1
        if position < base + count:
            inside = found
            for i in range(here):
                places[position - base + i] = (block * block_size + i) * width
        position += block_size
    for i in range(found, most):
        table[:, i] = table[:, found - 1]
    places[count] = places[count - 1]
    return inside


@njit(**INNER)
def _scale_rows(weights, stride, rows, scales, which, kv_head, places, width, count):
    """Multiply the columns of ``weights`` by the scales of the keys (0) or values (1)."""
    block_size = scales.shape[3]
    kv_heads = scales.shape[2]
    columns = np.zeros(-(-count // LANES) * LANES, np.float32)
    for k in range(count):
        line = places[k] // width
        columns[k] = scales[which, line // (kv_heads * block_size), kv_head, line % block_size]
    for r in range(rows):
        for k in range(0, count, LANES):
            at = r * stride + k
            store16(weights, at, mul16(load16(weights, at), load16(columns, k)))


@njit(**INNER)
def _softmax_rows(
    scores, stride, position, rows, share, base, count, window, part, width, scales, kv_head, places
):  # fmt: skip
    """Turn the scores of a tile and a span into weights; ``part`` gets their sums and peaks.

    Where keys and values have scales, the scores are multiplied by the ones before, the weights by
    the others afterwards.
    """
    if scales.shape[1] > 0:
        _scale_rows(scores, stride, rows, scales, 0, kv_head, places, width, count)
    for r in range(rows):
        here = position + r // share
        first = here - window + 1 - base if window > 0 else np.int64(0)
        last = max(0, min(here + 1 - base, count))
        first = min(first, last)
        t = rows * width + r * LANES
        p = rows * (width + LANES) + r
        _softmax_span(scores, r * stride, count, first, last, part, t, p)
    if scales.shape[1] > 0:
        _scale_rows(scores, stride, rows, scales, 1, kv_head, places, width, count)


@njit(**INNER)
def _scaled_queries(qkv, token, rows, share, kv_head, dim, scale, queries):
    """The tile's queries of a key/value head, [rows, dim]; row r is head r % share of a token."""
    for r in range(rows):
        head = kv_head * share + r % share
        for i in range(dim):
            queries[r * dim + i] = qkv[token + r // share, head * dim + i] * np.float32(scale)


@njit(**INNER)
def _direct_unit(arguments, unit):
    """A tile of 1 to 6 query rows, one or all key/value heads, some or all spans."""
    (
        qkv, keys, values, scales, positions, slots, block_tables, units, parts, scale, window,
        block_size, out,
    ) = arguments  # fmt: skip
    kv_heads, groups, dim = keys.shape[1], keys.shape[2], keys.shape[3]
    width = values.shape[3]
    share = out.shape[1] // dim // kv_heads
    slot = slots[unit[_ROW]]
    token, tokens = unit[_TOKEN], unit[_TOKENS]
    rows = tokens * share
    first_head, heads = unit[_HEAD], unit[_HEADS]

    span = _span(block_size)
    stride = span + 4 * LANES  # lane groups may reach past the span, and come four at a time
    length = span // block_size * groups + 4 + AHEAD_GROUPS
    # Few pieces of memory: a unit takes some 5 µs, a piece 50 ns.
    integers = np.empty(3 * length + span + 1, np.int64)
    table = integers[: 3 * length].reshape((3, length))
    places = integers[3 * length :]
    size = _state_size(rows, width)
    each = rows * (dim + stride) + 2 * size
    floats = np.empty(heads * each, np.float32)
    for h in range(heads):
        own = floats[h * each : (h + 1) * each]
        _clear(own[:size], rows, width)
        _scaled_queries(qkv, token, rows, share, first_head + h, dim, scale, own[2 * size :])

    position = positions[token]
    end = min(unit[_LAST] * span, position + tokens)
    for base in range(unit[_FIRST] * span, end, span):
        count = min(span, position + tokens - base)
        found = _look_up(
            keys, values, block_tables, slot, base, count, end, block_size, table, places
        )  # fmt: skip
        # All heads of a block lie side by side. Read one block after the other they come from
        # memory half as fast again as read head by head.
        g = 0
        while g < found:
            step = 1
            for h in range(heads):
                own = floats[h * each + 2 * size : (h + 1) * each]
                k_shift = (first_head + h) * groups * dim * LANES
                v_shift = (first_head + h) * block_size * width
                step = _direct_scores(
                    own, dim, keys, k_shift, values, v_shift, table, g,
                    own[rows * dim :], stride, rows,
                )  # fmt: skip
            g += step
        for h in range(heads):
            own = floats[h * each : (h + 1) * each]
            state, part, scores = own[:size], own[size : 2 * size], own[2 * size + rows * dim :]
            _softmax_rows(
                scores, stride, position, rows, share, base, count, window, part, width, scales,
                first_head + h, places,
            )  # fmt: skip
            v_shift = (first_head + h) * block_size * width
            _direct_values(
                scores, stride, values, v_shift, places, count + count % 2, part, width, rows
            )  # fmt: skip
            if unit[_PART] >= 0:
                index = unit[_PART] + base // span - unit[_FIRST]
                parts[index * kv_heads + first_head + h, :size] = part
            else:
                _merge(state, part, rows, width)
    if unit[_PART] < 0:
        for h in range(heads):
            state = floats[h * each : h * each + size]
            _write(state, rows, width, share, dim, out, token, (first_head + h) * share)


@njit(**INNER)
def _wide_unit(arguments, unit):
    """A tile of many query rows and one key/value head."""
    (
        qkv, keys, values, scales, positions, slots, block_tables, units, parts, scale, window,
        block_size, out,
    ) = arguments  # fmt: skip
    kv_heads, groups, dim = keys.shape[1], keys.shape[2], keys.shape[3]
    width = values.shape[3]
    share = out.shape[1] // dim // kv_heads
    slot = slots[unit[_ROW]]
    token, tokens, kv_head = unit[_TOKEN], unit[_TOKENS], unit[_HEAD]
    rows = tokens * share

    span = _span(block_size)
    stride = span + LANES
    length = span // block_size * groups
    table = np.empty((3, length), np.int64)
    places = np.empty(span + 1, np.int64)
    queries = np.empty(rows * dim, np.float32)
    scores = np.empty(rows * stride, np.float32)
    near_keys = np.empty(length * dim * LANES, np.float32)
    near_values = np.empty(span * width, np.float32)
    part = np.empty(_state_size(rows, width), np.float32)
    state = np.empty(_state_size(rows, width), np.float32)
    _clear(state, rows, width)
    _scaled_queries(qkv, token, rows, share, kv_head, dim, scale, queries)

    position = positions[token]
    end = position + tokens
    for base in range(unit[_FIRST] * span, end, span):
        count = min(span, end - base)
        found = _look_up(
            keys, values, block_tables, slot, base, count, end, block_size, table, places
        )  # fmt: skip
        k_shift = kv_head * groups * dim * LANES
        v_shift = kv_head * block_size * width
        for g in range(found):
            for i in range(0, dim * LANES, LANES):
                at = table[0, g] + k_shift + i
                store16(near_keys, g * dim * LANES + i, load16(keys, at))
        for k in range(count):
            for i in range(0, width, LANES):
                at = places[k] + v_shift + i
                store16(near_values, i * span + k * LANES, load16(values, at))
        for g in range(found):
            _near_product(
                queries, dim, near_keys, g * dim * LANES, LANES, dim,
                scores, table[1, g], stride, rows,
            )  # fmt: skip
        _softmax_rows(
            scores, stride, position, rows, share, base, count, window, part, width, scales,
            kv_head, places,
        )  # fmt: skip
        for d in range(0, width, LANES):
            _near_product(
                scores, stride, near_values, d * span, LANES, count, part, d, width, rows
            )  # fmt: skip
        _merge(state, part, rows, width)
    _write(state, rows, width, share, dim, out, token, kv_head * share)


@njit(**INNER)
def _attention_unit(arguments, number):
    units = arguments[7]
    # Late tiles see the most keys: they go first, so that no thread ends alone with a long one.
    unit = units[units.shape[0] - 1 - number]
    if unit[_WIDE]:
        _wide_unit(arguments, unit)
    else:
        _direct_unit(arguments, unit)


@njit(**INNER)
def _merge_unit(arguments, number):
    """Merge the parts of a tile that was split, for one key/value head."""
    parts, split, width, kv_heads, share, dim, out = arguments
    unit = split[number // kv_heads]
    kv_head = number % kv_heads
    rows = unit[_TOKENS] * share
    state = np.empty(_state_size(rows, width), np.float32)
    _clear(state, rows, width)
    for index in range(unit[_PART], unit[_PART] + unit[_LAST] - unit[_FIRST]):
        _merge(state, parts[index * kv_heads + kv_head], rows, width)
    _write(state, rows, width, share, dim, out, unit[_TOKEN], kv_head * share)


@njit(**INNER)
def _span(block_size):
    """Positions of a span."""
    return max(1, _SPAN_TOKENS // block_size) * block_size


@njit(**INNER)
def _tiles(positions, q_start, rows, share, span, window):
    """The tiles of a step; their spans are ``first`` … ``last - 1``. Heads and parts are open."""
    most = max(1, _TILE_ROWS // share)
    count = 0
    for r in range(rows):
        count += -(-(q_start[r + 1] - q_start[r]) // most)
    tiles = np.zeros((count, _COLUMNS), np.int64)
    found = 0
    for r in range(rows):
        tokens = q_start[r + 1] - q_start[r]
        # Tiles that differ by at most one token: a last one of a few rows would take as long.
        number = -(-tokens // most)
        token = np.int64(q_start[r])
        for i in range(number):
            size = tokens // number + (1 if i < tokens % number else 0)
            position = np.int64(positions[token])
            seen = max(0, position - window + 1) if window > 0 else np.int64(0)
            tile = tiles[found]
            tile[_ROW], tile[_TOKEN], tile[_TOKENS] = r, token, size
            tile[_FIRST], tile[_LAST] = seen // span, -(-(position + size) // span)
            tile[_PART], tile[_WIDE] = -1, size * share > _DIRECT_ROWS
            token += size
            found += 1
    return tiles


@njit(**INNER)
def _units(tiles, kv_heads, threads):
    """The units of a step, the tiles of which spans are units of their own, and the parts of these.

    Memory is read best where a unit takes all heads. So tiles of few rows are a unit each, or some
    spans of them where tiles are few and long; only where contexts are short as well, each head is
    one. Tiles of many rows compute more than they read: each of their heads is a unit.
    """
    enough = _UNITS_A_THREAD * threads
    spans = 0
    for i in range(tiles.shape[0]):
        spans += tiles[i, _LAST] - tiles[i, _FIRST]
    most = spans if tiles.shape[0] >= enough else max(1, spans // enough)
    together = spans >= enough
    units = np.empty((tiles.shape[0] * kv_heads + spans // max(1, most), _COLUMNS), np.int64)
    split = np.empty(tiles.shape, np.int64)
    found = num_split = parts = 0
    for i in range(tiles.shape[0]):
        tile = tiles[i]
        if tile[_WIDE] or not together:
            for head in range(kv_heads):
                units[found] = tile
                units[found, _HEAD], units[found, _HEADS] = head, 1
                found += 1
            continue
        first, last = tile[_FIRST], tile[_LAST]
        tile[_HEADS] = kv_heads
        if last - first <= most:
            units[found] = tile
            found += 1
            continue
        tile[_PART] = parts
        split[num_split] = tile
        num_split += 1
        for begin in range(first, last, most):
            unit = units[found]
            unit[:] = tile
            unit[_FIRST], unit[_LAST] = begin, min(begin + most, last)
            unit[_PART] = parts + begin - first
            found += 1
        parts += last - first
    return units[:found], split[:num_split], parts


@njit(**JIT)
def attention(
    control, qkv, keys, values, scales, positions, q_start, slots, block_tables,
    scale, window, block_size, out,
):  # fmt: skip
    """See ``Backend.attention``."""
    kv_heads, dim, width = keys.shape[1], keys.shape[3], values.shape[3]
    share = out.shape[1] // dim // kv_heads
    tiles = _tiles(positions, q_start, slots.shape[0], share, _span(block_size), window)
    units, split, num_parts = _units(tiles, kv_heads, num_threads(control))
    parts = np.empty((num_parts * kv_heads, _state_size(_DIRECT_ROWS, width)), np.float32)
    arguments = (
        qkv, keys, values, scales, positions, slots, block_tables, units, parts, scale, window,
        block_size, out,
    )  # fmt: skip
    fork_join(control, _attention_unit, arguments, units.shape[0])
    if split.shape[0]:
        merging = (parts, split, width, kv_heads, share, dim, out)
        fork_join(control, _merge_unit, merging, split.shape[0] * kv_heads)
