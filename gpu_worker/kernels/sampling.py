"""The largest of a row of logits, drawing a token from it, and its log probabilities.

Each row is worked on by itself, its sums in one fixed order, so that a result never depends on the
rows beside it or on the number of threads.

Sorting a whole vocabulary for ``top_k`` and ``top_p`` costs milliseconds. Here the largest logit of
each group of ``GROUP`` tokens is noted while the row is weighed; groups that lie below a threshold
are passed over whole, and the few tokens that remain are partitioned, not sorted.
"""

# numba's decorators hide the types of what they compile.
# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="call-arg,var-annotated"
from __future__ import annotations

import math

import numpy as np
from numba import njit

from deepinfer.gpu_worker.kernels.fork_join import fork_join
from deepinfer.gpu_worker.kernels.settings import JIT
from deepinfer.gpu_worker.kernels.vectors import (
    LANES,
    add16,
    exp16,
    load16,
    max16,
    max_of16,
    mul16,
    splat16,
    store16,
    sub16,
    sum16,
)

GROUP = 4 * LANES

# Further below the best than this a token has no weight in float32 (the exponential gives 0).
_FARTHEST = 88.0


# Below every logit that is a number; the larger of the two is finite unless the logit is not.
_LOWEST = np.float32(-3.0e38)


@njit(**JIT)
def _largest_unit(arguments, n):
    logits, tokens, peaks = arguments
    row = logits[n]
    zero, lowest = splat16(np.float32(0)), splat16(_LOWEST)
    poison = zero
    peak, best = np.float32(-np.inf), 0
    whole = len(row) // GROUP * GROUP
    for at in range(0, whole, GROUP):
        group = load16(row, at)
        for i in range(0, GROUP, LANES):
            logit = load16(row, at + i)
            group = max16(group, logit)
            # Nothing times 0 is 0 but what is finite.
            poison = add16(poison, mul16(max16(logit, lowest), zero))
        largest = max_of16(group)
        if largest > peak:
            peak, best = largest, at
    token = best
    while token < whole and row[token] != peak and token < best + GROUP:
        token += 1
    poisoned = sum16(poison) != 0
    for i in range(whole, len(row)):
        poisoned |= not row[i] < np.inf
        if row[i] > peak:
            peak, token = row[i], i
    tokens[n] = token
    peaks[n] = np.nan if poisoned else peak


@njit(**JIT)
def largest(control, logits, tokens, peaks):
    """Find the largest logit of each row, the first of equals.

    - ``control``: of a ``ThreadTeam``.
    - ``logits`` float32 [S, V].
    - ``tokens`` int32 [S] gets its index, any for a row with NaN or infinity.
    - ``peaks`` float32 [S] gets the logit, NaN for a row with NaN or infinity. One of which all
      logits are -inf has that.

    True when all of ``peaks`` are finite.
    """
    fork_join(control, _largest_unit, (logits, tokens, peaks), len(tokens))
    finite = True
    for peak in peaks:
        finite &= math.isfinite(peak)
    return finite


@njit(**JIT)
def _weigh(row, peak, rate, weights, sums, best):
    """Set ``weights = exp((row - peak) * rate)``, padded with 0 to whole groups; return their sum.

    ``sums`` float64 and ``best`` float32 get the weight and the largest logit of each group.
    """
    top = splat16(peak)
    factor = splat16(rate)
    total = 0.0
    last = len(sums) - 1
    tail = np.full(GROUP, np.float32(-np.inf))
    for i in range(last * GROUP, len(row)):
        tail[i - last * GROUP] = row[i]
    for group in range(len(sums)):
        source, at = (row, group * GROUP) if group < last else (tail, 0)
        largest = load16(source, at)
        weight = splat16(np.float32(0))
        for i in range(0, GROUP, LANES):
            logit = load16(source, at + i)
            largest = max16(largest, logit)
            value = exp16(mul16(sub16(logit, top), factor))
            store16(weights, group * GROUP + i, value)
            weight = add16(weight, value)
        sums[group] = sum16(weight)
        best[group] = max_of16(largest)
        total += sums[group]
    return total


@njit(**JIT)
def _pick(weights, count, target):
    """Index at which the running sum first exceeds ``target``, else the last that has weight."""
    running = 0.0
    chosen = 0
    for i in range(count):
        if weights[i] > 0:
            chosen = i
            running += weights[i]
            if running > target:
                break
    return chosen


@njit(**JIT)
def _pick_of_all(weights, sums, target):
    """Like ``_pick``, group by group."""
    running = 0.0
    chosen = 0
    rest = 0.0
    for group in range(len(sums)):
        if sums[group] > 0:
            chosen = group
            rest = target - running
            running += sums[group]
            if running > target:
                break
    at = chosen * GROUP
    return at + _pick(weights[at : at + GROUP], GROUP, rest)


@njit(**JIT)
def _gather(row, weights, best, floor, ids):
    """Write the ids of logits of at least ``floor`` to ``ids``; return their count and weight."""
    count = 0
    total = 0.0
    for group in range(len(best)):
        if best[group] >= floor:
            for i in range(group * GROUP, min((group + 1) * GROUP, len(row))):
                if row[i] >= floor:
                    ids[count] = i
                    count += 1
                    total += weights[i]
    return count, total


@njit(**JIT)
def _keep_best(keys, ids, count, measure, target):
    """Bring the fewest best of ``ids[:count]`` that measure ``target`` to the front.

    Larger keys are better, then smaller ids. ``measure`` is indexed by id; with an empty one each
    token counts 1. Returns how many are kept: all when they do not reach the target. This is
    quickselect (C. A. R. Hoare, 1961), which looks at each token a few times only.
    """
    low, high = 0, count
    while low < high and target > 0:
        middle = (low + high) // 2
        pivot, key = ids[middle], keys[ids[middle]]
        ids[middle] = ids[high - 1]
        split = low
        better = 0.0
        for i in range(low, high - 1):
            token = ids[i]
            if keys[token] > key or (keys[token] == key and token < pivot):
                ids[i] = ids[split]
                ids[split] = token
                split += 1
                better += measure[token] if len(measure) else 1.0
        ids[high - 1] = ids[split]
        ids[split] = pivot
        if better >= target:
            high = split
        else:
            target -= better + (measure[pivot] if len(measure) else 1.0)
            low = split + 1
    return low


@njit(**JIT)
def _kth_largest(values, k):
    ids = np.arange(len(values)).astype(np.int32)
    _keep_best(values, ids, len(ids), np.empty(0, np.float32), k)
    least = values[ids[0]]
    for i in range(k):
        least = min(least, values[ids[i]])
    return least


@njit(**JIT)
def _gather_nucleus(row, weights, best, total, peak, rate, top_p, floor, ids):
    """Gather tokens that surely hold the nucleus; return their count, and the weight it is part of.

    A nucleus is mostly small, so the search begins near the best token and widens.
    """
    if floor > -np.inf:
        total = _gather(row, weights, best, floor, ids)[1]
    reach = 2.0
    count, inside = 0, 0.0
    while inside < top_p * total and reach < 4 * _FARTHEST:
        near = np.float32(peak - reach / rate)
        count, inside = _gather(row, weights, best, max(near, floor), ids)
        reach *= 2
    return count, total


@njit(**JIT)
def _draw_kept(row, weights, best, total, peak, rate, top_k, top_p, floor, uniform):
    """Draw from what ``floor``, then ``top_k``, then ``top_p`` keep.

    Equal logits rank by id. ``top_p`` keeps the fewest best tokens that hold at least that part of
    what the others left; the best token always stays.
    """
    ids = np.empty(len(row), np.int32)
    if top_k < len(row):
        if top_k <= len(best):
            # k groups have a logit that large, so the k-th best token is no smaller.
            floor = max(floor, _kth_largest(best, top_k))
        count = _gather(row, weights, best, floor, ids)[0]
        count = _keep_best(row, ids, count, np.empty(0, np.float32), top_k)
        total = 0.0
        for i in range(count):
            total += weights[ids[i]]
    elif top_p < 1:
        count, total = _gather_nucleus(row, weights, best, total, peak, rate, top_p, floor, ids)
    else:
        count, total = _gather(row, weights, best, floor, ids)
    if top_p < 1:
        count = _keep_best(row, ids, count, weights, top_p * total)
    kept = np.empty(count, np.float32)
    total = 0.0
    for i in range(count):
        kept[i] = weights[ids[i]]
        total += kept[i]
    return ids[_pick(kept, count, uniform * total)]


@njit(**JIT)
def _draw_unit(arguments, n):
    logits, rows, peaks, temperatures, top_ks, top_ps, min_ps, uniforms, out = arguments
    row = logits[rows[n]]
    num_groups = (len(row) + GROUP - 1) // GROUP
    weights = np.empty(num_groups * GROUP, np.float32)
    sums = np.empty(num_groups, np.float64)
    best = np.empty(num_groups, np.float32)
    # A rate of 0 would make the weight of a banned token (-inf * 0) not a number.
    rate = np.float32(max(1.0 / temperatures[n], 1e-30))
    total = _weigh(row, peaks[n], rate, weights, sums, best)
    if top_ks[n] >= len(row) and top_ps[n] >= 1 and min_ps[n] == 0:
        out[n] = _pick_of_all(weights, sums, uniforms[n] * total)
        return
    floor = np.float32(-np.inf)
    if min_ps[n] > 0:
        floor = np.float32(peaks[n] + math.log(min_ps[n]) / rate)
    out[n] = _draw_kept(
        row, weights, best, total, peaks[n], rate, top_ks[n], top_ps[n], floor, uniforms[n]
    )


@njit(**JIT)
def draw(control, logits, rows, peaks, temperatures, top_k, top_p, min_p, uniforms, out):
    """Draw one token for each of some rows, by inverse CDF.

    - ``control``: of a ``ThreadTeam``.
    - ``logits`` float32 [S, V], no NaN, -inf for banned tokens; ``rows`` int64 [N].
    - ``peaks`` float32 [N]: the row's largest logit, finite; ``temperatures`` float64 [N], above 0.
    - ``top_k`` int64 [N] (V or above is off); ``top_p`` float64 [N] (1 is off); ``min_p`` float64
      [N] (0 is off).
    - ``uniforms`` float64 [N] in [0, 1); ``out`` int32 [N] gets the token ids.
    """
    arguments = (logits, rows, peaks, temperatures, top_k, top_p, min_p, uniforms, out)
    fork_join(control, _draw_unit, arguments, len(rows))


@njit(**JIT)
def _insert(value, token, count, ids, values):
    """Put a token into a list of ``count`` ordered ones, behind those that are as likely."""
    at = count
    while at > 0 and values[at - 1] < value:
        if at < len(values):
            values[at] = values[at - 1]
            ids[at] = ids[at - 1]
        at -= 1
    if at < len(values):
        values[at] = value
        ids[at] = token


@njit(**JIT)
def _best_tokens(row, best, ids, values):
    """Fill ``ids`` and ``values`` with the largest logits, the largest first, equal ones by id."""
    count = 0
    for group in range(len(best)):
        if count == len(ids) and best[group] <= values[count - 1]:
            continue
        for i in range(group * GROUP, min((group + 1) * GROUP, len(row))):
            if count < len(ids) or row[i] > values[count - 1]:
                _insert(row[i], i, count, ids, values)
                count = min(count + 1, len(ids))


@njit(**JIT)
def _logprobs_unit(arguments, n):
    logits, peaks, chosen, own, smaller, top_ids, top_logprobs = arguments
    row = logits[n]
    num_groups = (len(row) + GROUP - 1) // GROUP
    weights = np.empty(num_groups * GROUP, np.float32)
    sums = np.empty(num_groups, np.float64)
    best = np.empty(num_groups, np.float32)
    total = _weigh(row, peaks[n], np.float32(1), weights, sums, best)
    level = row[chosen[n]]
    below = 0.0
    for group in range(num_groups):
        if best[group] < level:
            below += sums[group]
        else:
            for i in range(group * GROUP, min((group + 1) * GROUP, len(row))):
                if row[i] < level:
                    below += weights[i]
    norm = peaks[n] + math.log(total)
    own[n] = min(level - norm, 0.0)
    smaller[n] = below / total
    if top_ids.shape[1]:
        values = top_logprobs[n]
        _best_tokens(row, best, top_ids[n], values)
        for rank in range(len(values)):
            values[rank] = min(values[rank] - norm, 0.0)


@njit(**JIT)
def logprobs(control, logits, peaks, chosen, own, smaller, top_ids, top_logprobs):
    """Log probabilities (``log_softmax``) of chosen tokens and of the most likely ones.

    - ``control``: of a ``ThreadTeam``.
    - ``logits`` float32 [N, V]; ``peaks`` float32 [N]: the row's largest logit, finite.
    - ``chosen`` int64 [N]; ``own`` float64 [N] gets its log probability, at most 0.
    - ``smaller`` float64 [N]: probability of all tokens strictly less likely than the chosen one.
    - ``top_ids`` int32 [N, K], ``top_logprobs`` float64 [N, K], K at most V: the most likely
      tokens, the best first, equal ones by id.
    """
    arguments = (logits, peaks, chosen, own, smaller, top_ids, top_logprobs)
    fork_join(control, _logprobs_unit, arguments, len(chosen))
