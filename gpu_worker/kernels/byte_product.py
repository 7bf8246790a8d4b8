"""Matrix products of weights and activations in few bits: tiles of rows and panels, on all threads.

What a tile computes, and in which format, is the tile's own affair; here is decided which tiles
there are, in which order, and what is fetched from memory meanwhile.
"""

# Compiled functions are typed by numba, for the arrays they are called with.
# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="call-arg,var-annotated"

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit

from deepinfer.gpu_worker.kernels.byte_dot import HOST
from deepinfer.gpu_worker.kernels.fork_join import num_threads
from deepinfer.gpu_worker.kernels.settings import INNER
from deepinfer.gpu_worker.kernels.shares import even_share, part_of_unit, write_gated
from deepinfer.gpu_worker.kernels.vectors import LANES, emit_choice, index, on_lines

ROWS = 6
"""Most rows of a tile."""
COLUMNS = 2 * LANES if HOST == "vnni" else LANES
"""Columns of a panel and of a tile. 6 x 32 sums are 12 of the 32 registers of AVX-512: enough to
hide the latency of ``vpdpbusd``, with less than a load for each. It runs at the unit's peak, and so
do 4 x 32 and 6 x 64. AVX2 has 16 registers of half the size."""

# Columns of which the first half are gates and the second what they open.
_PAIR = 2 * LANES
# Activations of a unit's rows, which stay in the L2 cache while panel after panel meets them.
_CHUNK_BYTES = 160 << 10
# The least work of a unit, 10 µs or so: products where there are many rows, and where there are few
# bytes of weights, for each run of them begins with some waiting.
_UNIT_PRODUCTS = 1 << 21
_UNIT_BYTES = 48 << 10


def for_rows(builder: Any, rows: Any, emit: Callable[[int], None]) -> None:
    """Write code that does ``emit(n)`` where the int64 ``rows`` is n, from 1 to ``ROWS``."""
    emit_choice(builder, builder.sub(rows, index(1)), ROWS, lambda n: emit(n + 1))


# Inlined before types are inferred: a compiled function that hands on another one at run time, as
# an address, cannot be cached.
@njit(**INNER, inline="always")
def run_unit(tile, arguments, unit):
    """Some rows times some tiles of columns.

    ``tile(x, row, rows, weights, panel, following, stride, bias, out, at, add)`` computes up to
    ``ROWS`` rows of a panel and writes them to ``out`` from element ``at`` on. The weights at
    ``following`` and after should be in the cache next: the tile asks for one byte every ``stride``
    bytes there, for every 64 bytes that it uses itself.
    """
    x, weights, bias, gated, out, add, chunk, width, threads = arguments
    panels = weights[0]
    num_panels = panels.shape[0]
    size = panels.size // num_panels
    first, last, begin, rows = part_of_unit(unit, x.shape[0], num_panels, chunk, width, threads)
    if not rows:
        return
    columns_all = out.shape[1]
    # Blocks that differ by at most one row: 7 rows go as 4 + 3, not as 6 + a slow 1.
    blocks = -(-rows // ROWS)
    # While a panel is at work the next one is fetched, by each block of rows its part.
    stride = -(-64 // blocks)
    part = size // 64 * stride
    # Sums of columns that do not exist lie here too, and those of a gate until its up is there:
    # of all rows where these are in two panels.
    kept = ROWS if COLUMNS == _PAIR else rows
    aside = on_lines(kept * _PAIR, np.float32).reshape(kept, _PAIR)
    for panel in range(first, last):
        column = panel * COLUMNS
        columns = min(COLUMNS, columns_all - column)
        row = begin
        for block in range(blocks):
            count = rows // blocks + (1 if block < rows % blocks else 0)
            following = (panel + 1) * size + block * part
            if columns == COLUMNS and not gated:
                at = row * columns_all + column
                tile(x, row, count, weights, panel, following, stride, bias, out, at, add)
                row += count
                continue
            top = 0 if COLUMNS == _PAIR else row - begin
            at = top * _PAIR + column % _PAIR
            tile(x, row, count, weights, panel, following, stride, bias, aside, at, False)
            if not gated:
                for r in range(count):
                    for c in range(columns):
                        total = aside[top + r, column % _PAIR + c]
                        held = out[row + r, column + c]
                        out[row + r, column + c] = total + held if add else total
            elif (column + COLUMNS) % _PAIR == 0:
                pair = column // _PAIR * LANES
                write_gated(aside, top * _PAIR, _PAIR, out, row, count, pair, 1)
            row += count


@njit(**INNER)
def planned(control, x, depth, weights, bias, gated, out, add):
    """Return ``run_unit``'s arguments for a product, see ``Backend.linear``, and how many units
    there are.

    ``x`` uint8 [T, …] are activations of ``depth`` values, and ``weights`` is a tuple that begins
    with panels uint8 [P, …] of ``COLUMNS`` columns. ``bias`` has an element for each of them.
    """
    rows = x.shape[0]
    panels = weights[0]
    num_panels = panels.shape[0]
    chunk = even_share(rows, max(8 * ROWS, _CHUNK_BYTES // x.shape[1]))
    chunks = -(-rows // chunk)
    products = _UNIT_PRODUCTS // (chunk * depth * COLUMNS)
    least = 1 + min(products, _UNIT_BYTES // (panels.size // num_panels))
    # Some tens of units, to even out a core that others use too.
    width = max(least, num_panels * chunks // 32)
    if gated:
        width = -(-width // (_PAIR // COLUMNS)) * (_PAIR // COLUMNS)
    units = -(-num_panels // width) * chunks
    threads = min(num_threads(control), units)
    arguments = (x, weights, bias, gated, out, add, chunk, width, threads)
    return arguments, -(-units // threads) * threads
