"""Which thread computes what of a step's attention: query rows in tiles, tiles in units.

A tile is some neighbouring tokens of one row with all query heads of a key/value head; a unit is
what one thread computes at a time: a tile, for one key/value head or all, over all its spans or
some. How tiles and units are cut changes no result, see ``attention``.
"""

# Compiled functions are typed by numba, for the arrays they are called with.
# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="call-arg,var-annotated"

from __future__ import annotations

import numpy as np
from numba import njit

from deepinfer.gpu_worker.kernels.settings import INNER

_SPAN_TOKENS = 128
DIRECT_ROWS = 6
"""Query rows (tokens times heads of a group) that one pass over the cached bytes can serve."""
# Query rows of a tile that copies: enough to make little of copying, few enough for their scores
# to stay in the L2 cache.
_TILE_ROWS = 126
# So many units for each thread are enough to even out their lengths.
_UNITS_A_THREAD = 8
# Columns of the table of units.
ROW, TOKEN, TOKENS, FIRST, LAST, HEAD, HEADS, PART, WIDE, _COLUMNS = range(10)


@njit(**INNER)
def span_of(block_size):
    """Positions of a span."""
    return max(1, _SPAN_TOKENS // block_size) * block_size


@njit(**INNER)
def part_of(total, parts, i):
    """The size of part ``i`` of ``parts`` that differ by at most one."""
    return total // parts + (1 if i < total % parts else 0)


@njit(**INNER)
def plan_tiles(positions, q_start, rows, share, span, window):
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
            size = part_of(tokens, number, i)
            position = np.int64(positions[token])
            seen = max(0, position - window + 1) if window > 0 else np.int64(0)
            tile = tiles[found]
            tile[ROW], tile[TOKEN], tile[TOKENS] = r, token, size
            tile[FIRST], tile[LAST] = seen // span, -(-(position + size) // span)
            tile[PART], tile[WIDE] = -1, size * share > DIRECT_ROWS
            token += size
            found += 1
    return tiles


@njit(**INNER)
def plan_units(tiles, kv_heads, threads):
    """The units of a step, the tiles of which spans are units of their own, and the parts of these.

    Memory is read best where a unit takes all heads. So tiles of few rows are a unit each, or some
    spans of them where tiles are few and long; only where contexts are short as well, each head is
    one. Tiles of many rows compute more than they read: each of their heads is a unit.
    """
    enough = _UNITS_A_THREAD * threads
    spans = 0
    for i in range(tiles.shape[0]):
        spans += tiles[i, LAST] - tiles[i, FIRST]
    most = spans if tiles.shape[0] >= enough else max(1, spans // enough)
    together = spans >= enough
    units = np.empty((tiles.shape[0] * kv_heads + spans // max(1, most), _COLUMNS), np.int64)
    split = np.empty(tiles.shape, np.int64)
    found = num_split = parts = 0
    for i in range(tiles.shape[0]):
        tile = tiles[i]
        if tile[WIDE] or not together:
            for head in range(kv_heads):
                units[found] = tile
                units[found, HEAD], units[found, HEADS] = head, 1
                found += 1
            continue
        first, last = tile[FIRST], tile[LAST]
        tile[HEADS] = kv_heads
        if last - first <= most:
            units[found] = tile
            found += 1
            continue
        tile[PART] = parts
        split[num_split] = tile
        num_split += 1
        for begin in range(first, last, most):
            unit = units[found]
            unit[:] = tile
            unit[FIRST], unit[LAST] = begin, min(begin + most, last)
            unit[PART] = parts + begin - first
            found += 1
        parts += last - first
    return units[:found], split[:num_split], parts
