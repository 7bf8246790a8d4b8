"""Causal attention of ragged rows over the paged cache.

Positions are taken in *spans* of whole KV blocks, about 128 positions each, counted from position
0. Every span is computed for itself: scores, their peak, weights, the sum of the weights and the
weighted values, each sum in ascending order. The spans of a query are then merged one by one in
ascending order (online softmax: Milakov & Gimelshein 2018; FlashAttention, Dao et al. 2022). So a
query meets the same operations in the same order whichever queries share its tile and whichever
thread computed a span, and a long context can be split among threads (Flash-Decoding, Dao et al.
2023).

Tiles of few queries read the cache as it lies. Tiles of many first bring a span into the form that
a matrix product takes, which then serves all of them out of the L1 and L2 caches.

Both products have float32 operands where the cache is float32 or the machine cannot multiply pairs
of bfloat16. Elsewhere queries and weights are rounded to bfloat16, as cached numbers are or, from
int8, become without loss; sums, peaks and the softmax are float32 in any case. Where there are tile
registers, tiles of many queries are multiplied by them, and tiles of few by multiply-adds that give
the same bits (``attention_runs``).
"""

# Compiled functions are typed by numba, for the arrays they are called with.
# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="call-arg,var-annotated"

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import njit, types
from numba.extending import overload

from deepinfer.gpu_worker.kernels.attention_near import (
    near_product,
    store_rounded16,
    store_two,
    weigh32,
)
from deepinfer.gpu_worker.kernels.attention_runs import (
    begin_runs,
    end_runs,
    factors_of,
    fill_factors,
    run_terms,
)
from deepinfer.gpu_worker.kernels.attention_tiles import (
    direct_panels,
    direct_scores,
    direct_values,
)
from deepinfer.gpu_worker.kernels.attention_units import (
    DIRECT_ROWS,
    FIRST,
    HEAD,
    HEADS,
    LAST,
    PART,
    ROW,
    TOKEN,
    TOKENS,
    WIDE,
    plan_tiles,
    plan_units,
    span_of,
)
from deepinfer.gpu_worker.kernels.fork_join import fork_join, num_threads
from deepinfer.gpu_worker.kernels.micro_kernel import HAS_BF16_DOT
from deepinfer.gpu_worker.kernels.settings import INNER, JIT
from deepinfer.gpu_worker.kernels.vectors import (
    LANES,
    add16,
    exp2_16,
    fma16,
    keep16,
    load16,
    load_scalar,
    max16,
    max_of16,
    mul16,
    on_lines,
    splat16,
    store16,
    store_scalar,
    sub16,
    sum16,
)

# Below every score, yet finite: the difference of two such must be 0, not NaN.
_LOWEST = np.float32(-1e38)
_LOG2_E = math.log2(math.e)


@njit(**INNER)
def _direct_sums(weights, w_at, stride, values, shift, places, count, out, o_at, width, soon, rows):
    """Weighted sums of ``count`` (even) values for 1 to 6 query rows; ``width`` columns.

    On the way the following keys are asked for: ``soon`` is all that ``direct_values`` is told
    of them.
    """
    panels = direct_panels(weights, rows)
    keys, blocks, block_stride, block_shift, size, asked = soon
    column = 0
    while column < width:
        many = column + panels * LANES <= width
        shape = rows - 1 if many else DIRECT_ROWS + rows - 1
        direct_values(
            weights, w_at, stride, values, shift, places, count, column, out, o_at, width,
            keys, blocks, block_stride, block_shift, size, asked + column * count, shape,
        )  # fmt: skip
        column += LANES * panels if many else LANES


@njit(**INNER)
def _seen(position, base, count, window):
    """The keys of a span that a query at ``position`` sees: from the first up to the last."""
    last = max(0, min(position + 1 - base, count))
    first = max(0, position - window + 1 - base) if window > 0 else np.int64(0)
    return min(first, last), last


@njit(**INNER)
def _finite(part, at, count):
    """Whether none of ``count`` elements from ``at`` on, a multiple of 16, is NaN or infinite."""
    zero = splat16(np.float32(0))
    total = zero
    for i in range(at, at + count, LANES):
        total = fma16(load16(part, i), zero, total)
    return sum16(total) == 0


@njit(**INNER)
def _values_apart(
    weights, stride, values, shift, places, position, tokens, share, base, count, window, part,
    part_at, width, soon,
):  # fmt: skip
    """Weighted sums of a tile again, token by token, of what each token sees and nothing else.

    What a row does not see has weight 0, and 0 times a NaN would be NaN.
    """
    own = np.empty_like(places)
    for token in range(tokens):
        first, last = _seen(position + token, base, count, window)
        begin, end = token * share, (token + 1) * share
        if first == last:
            part[part_at + begin * width : part_at + end * width] = 0
            continue
        own[:] = places
        own[:first] = places[first]
        own[last:] = places[first]
        for r in range(begin, end, DIRECT_ROWS):
            _direct_sums(
                weights, r * stride, stride, values, shift, own, count + count % 2,
                part, part_at + r * width, width, soon, min(DIRECT_ROWS, end - r),
            )  # fmt: skip


@njit(**INNER)
def _peaks(
    scores, s_at, stride, position, tokens, share, base, count, window, scaled, columns, part, p
):
    """Write the peaks of a tile's rows to ``part`` from ``p`` on.

    On the way scores are scaled, and become -inf where they share a vector with those of seen
    keys but are none.
    """
    low = np.float32(-np.inf)
    for token in range(tokens):
        first, last = _seen(position + token, base, count, window)
        begin, end = first // LANES * LANES, -(-last // LANES) * LANES
        for r in range(token * share, (token + 1) * share):
            at = s_at + r * stride
            if scaled:
                for i in range(begin, end, LANES):
                    store16(scores, at + i, mul16(load16(scores, at + i), load16(columns, i)))
            # At most two vectors of a span are mixed.
            if begin < first:
                mixed = keep16(load16(scores, at + begin), first - begin, last - begin, low)
                store16(scores, at + begin, mixed)
            if last < end:
                i = end - LANES
                store16(scores, at + i, keep16(load16(scores, at + i), first - i, last - i, low))
            if (end - begin) % (2 * LANES):
                store16(scores, at + end, splat16(low))  # for ``_weights``, which takes twice 16
            high = splat16(_LOWEST)
            for i in range(begin, end, LANES):
                high = max16(high, load16(scores, at + i))
            part[p + r] = max_of16(high)


@njit(**INNER)
def row_stride(span):
    """Elements from a row of scores or weights to the next: whole lines and at least a vector more.

    A lane group may reach past the span, and a vector of zeros follows the weights. 32 bfloat16 are
    a cache line.
    """
    return -(-(span + LANES) // (2 * LANES)) * 2 * LANES


@njit(**INNER)
def _weights(
    scores, s_at, weights, stride, position, tokens, share, base, count, window, scaled, columns,
    part, t, p,
):  # fmt: skip
    """Turn scores into weights relative to the peaks at ``p``; their sums go to ``t``, 16 a row."""
    none = splat16(np.float32(0))
    half = columns.size // 2
    for token in range(tokens):
        first, last = _seen(position + token, base, count, window)
        begin, end = first // LANES * LANES, -(-last // LANES) * LANES
        for r in range(token * share, (token + 1) * share):
            at = r * stride
            score = s_at + at
            peak = splat16(part[p + r])
            total = none
            for i in range(0, begin, LANES):
                store_rounded16(weights, at + i, none)
            if scaled:
                for i in range(begin, end, LANES):
                    weight = exp2_16(sub16(load16(scores, score + i), peak))
                    total = add16(total, weight)
                    weight = mul16(weight, load16(columns, half + i))
                    # The scale of a value that the row does not see may be NaN.
                    weight = keep16(weight, first - i, last - i, np.float32(0))
                    store_rounded16(weights, at + i, weight)
            else:
                # Of the rounded weights, so that rounding changes no sum of equal values.
                for i in range(begin, end, 2 * LANES):
                    total = weigh32(scores, score + i, peak, weights, at + i, total)
            # The values are taken in pairs: there may be one more than keys.
            for i in range(end, count, LANES):
                store_rounded16(weights, at + i, none)
            store_rounded16(weights, at + max(end, -(-count // LANES) * LANES), none)
            store16(part, t + r * LANES, total)


@njit(**INNER)
def _state_size(rows, width):
    return rows * (width + LANES) + -(-rows // LANES) * LANES


@njit(**INNER)
def _add_scaled(state, state_at, keep, part, part_at, take):
    total = mul16(load16(state, state_at), keep)
    store16(state, state_at, fma16(load16(part, part_at), take, total))


@njit(**INNER)
def _merge(state, state_at, part, part_at, rows, width):
    """Add what a span came to, to what the rows of a tile have summed so far.

    Both hold the weighted values [rows, width], the sums of the weights [rows, 16], and the peaks
    [rows, padded to 16] that the weights are relative to.
    """
    t = rows * width
    p = t + rows * LANES
    factors = np.empty(2 * LANES, np.float32)
    for first in range(0, rows, LANES):
        before, now = load16(state, state_at + p + first), load16(part, part_at + p + first)
        high = max16(before, now)
        store16(factors, 0, exp2_16(sub16(before, high)))
        store16(factors, LANES, exp2_16(sub16(now, high)))
        store16(state, state_at + p + first, high)
        for r in range(first, min(first + LANES, rows)):
            keep = splat16(factors[r - first])
            take = splat16(factors[LANES + r - first])
            for i in range(r * width, (r + 1) * width, LANES):
                _add_scaled(state, state_at + i, keep, part, part_at + i, take)
            i = t + r * LANES
            _add_scaled(state, state_at + i, keep, part, part_at + i, take)


@njit(**INNER)
def _clear(state, at, rows, width):
    """Nothing summed so far."""
    peaks = at + rows * (width + LANES)
    state[at:peaks] = 0
    state[peaks : at + _state_size(rows, width)] = _LOWEST


@njit(**INNER)
def _write(state, state_at, rows, width, share, dim, out, token, head):
    """Write the normalised sums of a tile's rows to where they belong."""
    whole = dim - dim % LANES
    for r in range(rows):
        factor = np.float32(1) / sum16(load16(state, state_at + rows * width + r * LANES))
        factors = splat16(factor)
        at = (token + r // share) * out.shape[1] + (head + r % share) * dim
        row = state_at + r * width
        for i in range(0, whole, LANES):
            store16(out, at + i, mul16(load16(state, row + i), factors))
        for i in range(whole, dim):
            store_scalar(out, at + i, state[row + i] * factor)


@njit(**INNER)
def _look_up(keys, values, block_tables, slot, base, count, block_size, table, places):
    """Fill in where the lane groups and values of a span lie; return how many groups it has.

    The span is positions ``base`` … ``base + count - 1``. Behind its groups ``table`` repeats the
    last. All places are those of head 0.
    """
    kv_heads, groups, dim = keys.shape[1], keys.shape[2], keys.shape[3]
    width = values.shape[3]
    found = 0
    for first in range(0, count, block_size):
        block = np.int64(block_tables[slot, (base + first) // block_size]) * kv_heads
        here = min(block_size, count - first)
        for group in range(0, here, LANES):
            table[0, found] = (block * groups + group // LANES) * dim * LANES
            table[1, found] = first + group
            found += 1
        for i in range(here):
            places[first + i] = (block * block_size + i) * width
    table[0, found:] = table[0, found - 1]
    table[1, found:] = table[1, found - 1]
    places[count] = places[count - 1]
    return found


@njit(**INNER)
def _blocks_of(unit, most, positions, slots, block_tables, span, block_size, blocks, found):
    """Write the first blocks of a unit, at most ``most``, behind the ``found`` of ``blocks``.

    Returns how many these are then.
    """
    first = unit[FIRST] * (span // block_size)
    end = min(unit[LAST] * span, positions[unit[TOKEN]] + unit[TOKENS])
    for column in range(first, min(first + most, -(-end // block_size))):
        blocks[found] = block_tables[slots[unit[ROW]], column]
        found += 1
    return found


@njit(**INNER)
def _load_scales(scales, block_tables, slot, base, count, block_size, kv_head, columns):
    """Fill ``columns`` [2, n] with the scales of a span's keys and values."""
    half = columns.size // 2
    for first in range(0, count, block_size):
        block = block_tables[slot, (base + first) // block_size]
        for i in range(min(block_size, count - first)):
            columns[first + i] = scales[0, block, kv_head, i]
            columns[half + first + i] = scales[1, block, kv_head, i]


@njit(**INNER)
def _softmax(
    scores, s_at, weights, stride, position, tokens, share, base, count, window, part, part_at,
    width, scaled, columns,
):  # fmt: skip
    """Turn the scores of a tile and a span into weights; ``part`` gets their sums and peaks.

    If ``scaled``, ``columns`` [2, n] has the scales of the keys and values.
    """
    t = part_at + tokens * share * width
    p = t + tokens * share * LANES
    _peaks(
        scores, s_at, stride, position, tokens, share, base, count, window, scaled, columns, part, p
    )  # fmt: skip
    _weights(
        scores, s_at, weights, stride, position, tokens, share, base, count, window, scaled,
        columns, part, t, p,
    )  # fmt: skip


@njit(**INNER)
def _scaled_queries(qkv, token, rows, share, kv_head, dim, scale, queries, at, stride):
    """Write the tile's queries of a key/value head, [rows, dim], ``stride`` apart, from ``at`` on.

    Row r is head r % share of a token. With log2(e) in the scale, weights are powers of 2.
    """
    factor = np.float32(scale * _LOG2_E)
    factors = splat16(factor)
    whole = dim - dim % LANES
    for r in range(rows):
        given = (token + r // share) * qkv.shape[1] + (kv_head * share + r % share) * dim
        for i in range(0, whole, LANES):
            store16(queries, at + r * stride + i, mul16(load16(qkv, given + i), factors))
        for i in range(whole, dim):
            value = load_scalar(qkv, given + i) * factor
            store_scalar(queries, at + r * stride + i, value)


@njit(**INNER)
def _direct_unit(arguments, unit, following):
    """A tile of 1 to 6 query rows, one or all key/value heads, some or all spans.

    While keys are multiplied, the values of their span are asked for, and while values are, the
    keys of the next span; in the end those that ``following`` begins with, which is the unit that
    this thread is likely to take next.
    """
    (
        qkv, keys, values, scales, positions, slots, block_tables, units, parts, scale, window,
        block_size, operands, out,
    ) = arguments  # fmt: skip
    kv_heads, groups, dim = keys.shape[1], keys.shape[2], keys.shape[3]
    width = values.shape[3]
    share = out.shape[1] // dim // kv_heads
    slot = slots[unit[ROW]]
    token, tokens = unit[TOKEN], unit[TOKENS]
    rows = tokens * share
    first_head, heads = unit[HEAD], unit[HEADS]
    scaled = scales.shape[1] > 0

    span = span_of(block_size)
    stride = row_stride(span) + 3 * LANES  # lane groups come four at a time
    blocks_a_span = span // block_size
    length = blocks_a_span * groups + 3  # a tile may reach past the end
    most = (unit[LAST] - unit[FIRST] + 1) * blocks_a_span
    # Few pieces of memory: a unit takes some 5 µs, a piece 50 ns.
    integers = np.empty(2 * length + span + 1 + most, np.int64)
    table = integers[: 2 * length].reshape((2, length))
    places = integers[2 * length : 2 * length + span + 1]
    blocks = integers[2 * length + span + 1 :]
    found = _blocks_of(unit, most, positions, slots, block_tables, span, block_size, blocks, 0)
    k_stride, v_stride = kv_heads * groups * dim * LANES, kv_heads * block_size * width
    k_size, v_size = heads * groups * dim * LANES, heads * block_size * width
    k_begin, v_begin = first_head * groups * dim * LANES, first_head * block_size * width
    k_asked, v_asked = min(found, blocks_a_span) * k_size, 0
    found = _blocks_of(
        following, blocks_a_span, positions, slots, block_tables, span, block_size, blocks, found
    )  # fmt: skip
    blocks = blocks[:found]
    size = _state_size(rows, width)
    each = rows * stride + 2 * size
    floats = on_lines(heads * each + 2 * stride, np.float32)
    columns = floats[heads * each :]
    queries_size = heads * rows * dim
    rounded = on_lines(queries_size + rows * stride, operands.dtype)
    weights = rounded[queries_size:]
    factors = factors_of(rounded)
    weight_factors = factors[queries_size:]
    for h in range(heads):
        _clear(floats, h * each, rows, width)
        _scaled_queries(
            qkv, token, rows, share, first_head + h, dim, scale, rounded, h * rows * dim, dim
        )  # fmt: skip
    fill_factors(factors, rounded, 0, queries_size)

    position = positions[token]
    step = direct_panels(factors, rows)
    end = min(unit[LAST] * span, position + tokens)
    for base in range(unit[FIRST] * span, end, span):
        count = min(span, position + tokens - base)
        found = _look_up(
            keys, values, block_tables, slot, base, count, block_size, table, places
        )  # fmt: skip
        # All heads of a block lie side by side. Read one block after the other they come from
        # memory half as fast again as read head by head.
        for g in range(0, found, step):
            for h in range(heads):
                direct_scores(
                    factors, h * rows * dim, dim, keys, k_begin + h * groups * dim * LANES,
                    table, length, g, floats, h * each + 2 * size, stride,
                    values, blocks, v_stride, v_begin, v_size, v_asked, rows,
                )  # fmt: skip
                v_asked += step * dim * LANES
        for h in range(heads):
            state = h * each
            part = state + size
            if scaled:
                _load_scales(
                    scales, block_tables, slot, base, count, block_size, first_head + h, columns
                )  # fmt: skip
            _softmax(
                floats, part + size, weights, stride, position, tokens, share, base, count, window,
                floats, part, width, scaled, columns,
            )  # fmt: skip
            for r in range(rows):
                fill_factors(weight_factors, weights, r * stride, count + count % 2)
            v_shift = v_begin + h * block_size * width
            soon = (keys, blocks, k_stride, k_begin, k_size, k_asked)
            _direct_sums(
                weight_factors, 0, stride, values, v_shift, places, count + count % 2, floats, part,
                width, soon, rows,
            )  # fmt: skip
            k_asked += count * width
            partly = window > 0 or base + count > position + 1
            if partly and not _finite(floats, part, rows * width):
                _values_apart(
                    weight_factors, stride, values, v_shift, places, position, tokens, share, base,
                    count, window, floats, part, width, soon,
                )  # fmt: skip
            if unit[PART] >= 0:
                index = unit[PART] + base // span - unit[FIRST]
                parts[index * kv_heads + first_head + h, :size] = floats[part : part + size]
            else:
                _merge(floats, state, floats, part, rows, width)
    if unit[PART] < 0:
        for h in range(heads):
            head = (first_head + h) * share
            _write(floats, h * each, rows, width, share, dim, out, token, head)


@njit(**INNER)
def _wide_unit(arguments, unit):
    """A tile of many query rows and one key/value head."""
    (
        qkv, keys, values, scales, positions, slots, block_tables, units, parts, scale, window,
        block_size, operands, out,
    ) = arguments  # fmt: skip
    kv_heads, groups, dim = keys.shape[1], keys.shape[2], keys.shape[3]
    width = values.shape[3]
    share = out.shape[1] // dim // kv_heads
    slot = slots[unit[ROW]]
    token, tokens, kv_head = unit[TOKEN], unit[TOKENS], unit[HEAD]
    rows = tokens * share
    scaled = scales.shape[1] > 0

    span = span_of(block_size)
    stride = row_stride(span)
    length = span // block_size * groups
    table = np.empty((2, length), np.int64)
    places = np.empty(span + 1, np.int64)
    columns = np.empty(2 * stride, np.float32)
    run = run_terms(operands)
    deep = -(-dim // run) * run
    queries = on_lines(rows * deep, operands.dtype).reshape(rows, deep)
    queries[:] = 0
    scores = on_lines(rows * stride, np.float32)
    weights = on_lines(rows * stride, operands.dtype).reshape(rows, stride)
    key_panel = deep * LANES
    value_panel = -(-span // run) * run * LANES
    near = on_lines(max(length * key_panel, width // LANES * value_panel), operands.dtype)
    part = on_lines(_state_size(rows, width), np.float32)
    state = on_lines(_state_size(rows, width), np.float32)
    _clear(part, 0, rows, width)
    _clear(state, 0, rows, width)
    _scaled_queries(qkv, token, rows, share, kv_head, dim, scale, queries, 0, deep)

    position = positions[token]
    end = position + tokens
    k_shift = kv_head * groups * dim * LANES
    v_shift = kv_head * block_size * width
    for base in range(unit[FIRST] * span, end, span):
        count = min(span, end - base)
        seen = position + 1 - base
        found = _look_up(
            keys, values, block_tables, slot, base, count, block_size, table, places
        )  # fmt: skip
        for g in range(found):
            for i in range(0, dim * LANES, 2 * LANES):
                at = table[0, g] + k_shift + i
                store_two(near, g * key_panel + i, keys, at, at + LANES)
            near[g * key_panel + dim * LANES : (g + 1) * key_panel] = 0
        if block_size % LANES == 0:
            near_product(
                queries, near, 0, key_panel, found, dim, scores, 0, stride, share, seen, False
            )  # fmt: skip
        else:
            # In ascending order: a group's scores overwrite what the one before has too many.
            for g in range(found):
                place = table[1, g]
                near_product(
                    queries, near, g * key_panel, key_panel, 1, dim, scores, place, stride,
                    share, seen - place, False,
                )  # fmt: skip
        if scaled:
            _load_scales(scales, block_tables, slot, base, count, block_size, kv_head, columns)
        _softmax(
            scores, 0, weights, stride, position, tokens, share, base, count, window, part, 0,
            width, scaled, columns,
        )  # fmt: skip
        for k in range(0, count, 2):
            first, second = places[k] + v_shift, places[k + 1] + v_shift
            for i in range(0, width, LANES):
                at = i // LANES * value_panel + k * LANES
                store_two(near, at, values, first + i, second + i)
        taken = -(-count // run) * run
        for at in range(0, width // LANES * value_panel, value_panel):
            near[at + (count + count % 2) * LANES : at + taken * LANES] = 0
        near_product(
            weights, near, 0, value_panel, width // LANES, count + count % 2, part, 0,
            width, share, seen, True,
        )  # fmt: skip
        partly = window > 0 or base + count > position + 1
        if partly and not _finite(part, 0, rows * width):
            factors = factors_of(weights)
            fill_factors(factors, weights, 0, rows * stride)
            _values_apart(
                factors, stride, values, v_shift, places, position, tokens, share, base, count,
                window, part, 0, width, (keys, table[0], 1, k_shift, key_panel, 0),
            )  # fmt: skip
        _merge(state, 0, part, 0, rows, width)
    _write(state, 0, rows, width, share, dim, out, token, kv_head * share)


@njit(**INNER)
def _attention_unit(arguments, number):
    arguments, threads = arguments
    units = arguments[7]
    # Late tiles see the most keys: they go first, so that no thread ends alone with a long one.
    index = units.shape[0] - 1 - number
    unit = units[index]
    mode = begin_runs(arguments[12])
    if unit[WIDE]:
        _wide_unit(arguments, unit)
    else:
        _direct_unit(arguments, unit, units[max(0, index - threads)])
    end_runs(arguments[12], mode)


@njit(**INNER)
def _merge_unit(arguments, number):
    """Merge the parts of a tile that was split, for one key/value head."""
    parts, split, width, kv_heads, share, dim, operands, out = arguments
    unit = split[number // kv_heads]
    kv_head = number % kv_heads
    rows = unit[TOKENS] * share
    state = np.empty(_state_size(rows, width), np.float32)
    mode = begin_runs(operands)
    _clear(state, 0, rows, width)
    for index in range(unit[PART], unit[PART] + unit[LAST] - unit[FIRST]):
        _merge(state, 0, parts[index * kv_heads + kv_head], 0, rows, width)
    _write(state, 0, rows, width, share, dim, out, unit[TOKEN], kv_head * share)
    end_runs(operands, mode)


def _operands(keys: Any) -> Any:
    """An empty array of the dtype that queries and weights have beside a cache of ``keys``."""


@overload(_operands, jit_options={**INNER}, inline="never")
def _operands_of(keys):
    if HAS_BF16_DOT and keys.dtype != types.float32:
        return lambda keys: np.empty(0, np.uint16)
    return lambda keys: np.empty(0, np.float32)


@njit(**JIT)
def attention_by(
    control, qkv, keys, values, scales, positions, q_start, slots, block_tables,
    scale, window, block_size, operands, out,
):  # fmt: skip
    """``attention`` whose products have operands of the dtype of ``operands``, an empty array."""
    kv_heads, dim, width = keys.shape[1], keys.shape[3], values.shape[3]
    share = out.shape[1] // dim // kv_heads
    tiles = plan_tiles(positions, q_start, slots.shape[0], share, span_of(block_size), window)
    threads = num_threads(control)
    units, split, num_parts = plan_units(tiles, kv_heads, threads)
    size = _state_size(DIRECT_ROWS, width)
    parts = on_lines(num_parts * kv_heads * size, np.float32).reshape(num_parts * kv_heads, size)
    arguments = (
        qkv, keys, values, scales, positions, slots, block_tables, units, parts, scale, window,
        block_size, operands, out,
    )  # fmt: skip
    fork_join(control, _attention_unit, (arguments, threads), units.shape[0])
    if split.shape[0]:
        merging = (parts, split, width, kv_heads, share, dim, operands, out)
        fork_join(control, _merge_unit, merging, split.shape[0] * kv_heads)


@njit(**JIT)
def attention(
    control, qkv, keys, values, scales, positions, q_start, slots, block_tables,
    scale, window, block_size, out,
):  # fmt: skip
    """See ``Backend.attention``."""
    attention_by(
        control, qkv, keys, values, scales, positions, q_start, slots, block_tables,
        scale, window, block_size, _operands(keys), out,
    )  # fmt: skip
