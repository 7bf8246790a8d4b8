"""What matrix products of all formats share: who does which part, and how gates are written."""

# Compiled functions are typed by numba, for the arrays they are called with.
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from typing import Any

from deepinfer.gpu_worker.kernels.elementwise import silu_mul16
from deepinfer.gpu_worker.kernels.settings import INNER
from deepinfer.gpu_worker.kernels.vectors import LANES, load16, store16, store_first16

# numba comes after the kernels' settings.
from numba import njit, types  # isort: skip
from numba.extending import overload  # isort: skip


@njit(**INNER)
def even_share(total, most):
    """The size of parts of at most ``most``, as equal as can be."""
    parts = -(-total // most)
    return -(-total // parts)


@njit(**INNER)
def _going_on(unit, units, threads):
    """Which unit to do for ``unit``, of as many for each thread; none from ``units`` on.

    Threads draw units in turns. In this order each of them goes on where it was, and finds the
    weights it has asked for already.
    """
    return unit % threads * -(-units // threads) + unit // threads


@njit(**INNER)
def part_of_unit(unit, rows, panels, chunk, width, threads):
    """Return which panels a unit takes, from a first up to a last, and which rows, from one on.

    Units of ``chunk`` rows and ``width`` panels are numbered as they are drawn; one that does not
    exist has no rows.
    """
    shares = -(-panels // width)
    units = shares * -(-rows // chunk)
    unit = _going_on(unit, units, threads)
    if unit >= units:
        return 0, 0, 0, 0
    first = (unit % shares) * width
    begin = (unit // shares) * chunk
    return first, min(first + width, panels), begin, min(chunk, rows - begin)


@njit(**INNER)
def write_gated(sums, at, stride, out, row, rows, column, pairs):
    """``silu(gate) * up`` to some rows of ``out``, from a column on, sixteen for each pair.

    ``sums`` has sixteen gates, then their ups, for each pair, from ``at`` on; rows are ``stride``
    apart.
    """
    width = out.shape[1]
    # One loop over whole vectors: calls cost more than what is computed here.
    for r in range(rows):
        for pair in range(pairs):
            here = at + r * stride + pair * 2 * LANES
            o = column + pair * LANES
            value = silu_mul16(load16(sums, here), load16(sums, here + LANES))
            if o + LANES <= width:
                store16(out, (row + r) * width + o, value)
            else:
                store_first16(out, (row + r) * width + o, width - o, value)


def if_float32(out: Any, other: Any) -> Any:
    """``out`` where it is float32: what tiles write to. An overload for compiled code."""


@overload(if_float32, jit_options={**INNER}, inline="never")
def _if_float32_of(out, other):
    if out.dtype == types.float32:
        return lambda out, other: out
    return lambda out, other: other
