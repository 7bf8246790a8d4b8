"""Sums of attention by multiply-adds that have every bit of those by tile registers.

A tile instruction takes a *run* of 32 terms: it adds up the even products in ascending order, and
the odd ones, adds the two, and adds that to the sum (``tile_registers``). Products of bfloat16 are
exact in float32, so multiply-adds give the same sums, in two registers for each, while denormals
count as zero. What a product begins with is here: queries and weights rounded to bfloat16, in
uint16, or *factors*, the same numbers as the bits of float32, in uint32, if they are multiplied so.
"""

# Compiled functions are typed by numba, for the arrays they are called with.
# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="call-arg,var-annotated"

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic, overload

from deepinfer.gpu_worker.kernels.settings import INNER
from deepinfer.gpu_worker.kernels.tile_registers import HAS_TILES
from deepinfer.gpu_worker.kernels.vectors import (
    I8,
    I32,
    LANES,
    VECTOR,
    emit_load,
    index,
    load16,
    same,
    store16,
)

RUN = 32
_FLUSH = 1 << 15 | 1 << 6
"""Of the control and status register: denormal results, and denormal operands, are zero."""


def _in_runs(rounded: Any) -> bool:
    """Whether products of queries or weights of a type are summed in runs."""
    return bool(HAS_TILES and rounded.dtype == types.uint16)


def run_terms(rounded: Any) -> Any:
    """Terms that products of ``rounded`` with what is ready take at once; an overload."""


@overload(run_terms, jit_options={**INNER})
def _run_terms_of(rounded):
    terms = RUN if _in_runs(rounded) else 2
    return lambda rounded: terms


def factors_of(rounded: Any) -> Any:
    """Factors in place of ``rounded``, not filled, or, without tile registers, itself."""


@overload(factors_of, jit_options={**INNER})
def _factors_of(rounded):
    if _in_runs(rounded):
        return lambda rounded: np.empty(rounded.size, np.uint32)
    return lambda rounded: rounded


def fill_factors(factors: Any, rounded: Any, at: Any, count: Any) -> None:
    """Fill ``count`` factors, rounded up to whole vectors, from ``at`` on; an overload."""


@overload(fill_factors, jit_options={**INNER})
def _fill_factors_of(factors, rounded, at, count):
    if factors.dtype == rounded.dtype:
        return lambda factors, rounded, at, count: None
    return lambda factors, rounded, at, count: _fill(factors.view(np.float32), rounded, at, count)


@njit(**INNER)
def _fill(factors, rounded, at, count):
    for i in range(at, at + count, LANES):
        store16(factors, i, load16(rounded, i))


def _call_on_word(builder: Any, name: str, word: Any) -> None:
    """Store the control and status register to a place in memory, or load it from there."""
    pointer = builder.bitcast(word, I8.as_pointer())
    kind = ir.FunctionType(ir.VoidType(), [pointer.type])
    builder.call(
        cgutils.get_or_insert_function(builder.module, kind, f"llvm.x86.sse.{name}"), [pointer]
    )


@intrinsic
def begin_runs(typingctx, rounded):
    """Let denormals be zero where products are summed in runs; return what ``end_runs`` takes."""

    def codegen(context, builder, signature, args):
        if not _in_runs(signature.args[0]):
            return ir.Constant(I32, 0)
        word = cgutils.alloca_once(builder, I32)
        _call_on_word(builder, "stmxcsr", word)
        before = builder.load(word)
        builder.store(builder.or_(before, ir.Constant(I32, _FLUSH)), word)
        _call_on_word(builder, "ldmxcsr", word)
        return before

    return types.int32(rounded), codegen


@intrinsic
def end_runs(typingctx, rounded, before):
    """Let denormals be what they were before ``begin_runs``."""

    def codegen(context, builder, signature, args):
        if _in_runs(signature.args[0]):
            word = cgutils.alloca_once(builder, I32)
            builder.store(args[1], word)
            _call_on_word(builder, "ldmxcsr", word)
        return context.get_dummy_value()

    return types.void(rounded, types.int32), codegen


def emit_upper(builder: Any) -> Any:
    """The mask of ``emit_widened``, of which the optimiser does not know what it is.

    It would take another permutation, three times as slow.
    """
    kind = ir.FunctionType(I32, [I32])
    mask = builder.asm(kind, "", "=r,0", [ir.Constant(I32, 0xAAAAAAAA)], False)
    return builder.bitcast(mask, ir.VectorType(ir.IntType(1), 2 * LANES))


def emit_widened(builder: Any, pointer: Any, element: Any, half: int, upper: Any) -> Any:
    """The first or second 16 of 32 elements of a cache, side by side, as floats.

    Of bfloat16 they are one permutation, which leaves the lower halves of the floats zero.
    """
    if element != types.uint16:
        return emit_load(builder, builder.gep(pointer, [index(half * LANES)]), element)
    halves = ir.VectorType(ir.IntType(16), 2 * LANES)
    both = builder.load(builder.bitcast(pointer, halves.as_pointer()), align=2)
    kind = ir.FunctionType(halves, [halves, halves])
    name = "llvm.x86.avx512.permvar.hi.512"
    permute = cgutils.get_or_insert_function(builder.module, kind, name)
    lanes = ir.Constant(halves, [half * LANES + i // 2 for i in range(2 * LANES)])
    nothing = ir.Constant(halves, [0] * 2 * LANES)
    spread = builder.select(upper, builder.call(permute, [both, lanes]), nothing)
    return builder.bitcast(spread, VECTOR)


def emit_runs(
    builder: Any, count: Any, cells: int, step: Any, ahead: Any, twice: bool
) -> list[Any]:
    """Emit ``for k in range(0, count, 2)`` in runs; the sums begin at 0.

    ``step(k, even, odd)`` returns the sums of the even and of the odd terms after k and k + 1. At
    each step ``ahead`` asks for lines; if ``twice``, for those of two steps at once.
    """
    before = builder.block
    begins = builder.append_basic_block("run")
    after = builder.append_basic_block("summed")
    builder.branch(begins)
    builder.position_at_end(begins)

    def phis(values: list[Any]) -> list[Any]:
        """Values that begin as they are where the current block is come to from ``before``."""
        made = [builder.phi(value.type) for value in values]
        for phi, value in zip(made, values, strict=True):
            phi.add_incoming(value, before)
        return made

    begin, *totals = phis([index(0)] + [same(0.0)] * cells)
    asked = phis(ahead.begins)
    end = builder.add(begin, index(RUN))
    end = builder.select(builder.icmp_signed("<", end, count), end, count)
    even_steps = builder.and_(builder.sub(end, begin), index(-4))
    loops = [(2, builder.add(begin, even_steps)), (1, end)] if twice else [(1, end)]
    values = [begin] + [same(0.0)] * (2 * cells) + asked
    for steps, last in loops:
        before = builder.block
        body = builder.append_basic_block("sum")
        over = builder.append_basic_block("over")
        builder.cbranch(builder.icmp_signed("<", values[0], last), body, over)
        builder.position_at_end(body)
        made = phis(values)
        k, *rest = made
        even, odd, asked_here = rest[:cells], rest[cells : 2 * cells], rest[2 * cells :]
        asked_then = ahead.ask(*asked_here, steps)
        for _ in range(steps):
            even, odd = step(k, even, odd)
            k = builder.add(k, index(2))
        done = [k, *even, *odd, *asked_then]
        for phi, value in zip(made, done, strict=True):
            phi.add_incoming(value, body)
        builder.cbranch(builder.icmp_signed("<", k, last), body, over)
        builder.position_at_end(over)
        merged = phis(values)
        for phi, value in zip(merged, done, strict=True):
            phi.add_incoming(value, body)
        values = merged

    following, *rest = values
    even, odd, asked_then = rest[:cells], rest[cells : 2 * cells], rest[2 * cells :]
    sums = [
        builder.fadd(total, builder.fadd(x, y))
        for total, x, y in zip(totals, even, odd, strict=True)
    ]
    for phi, value in zip([begin, *totals, *asked], [following, *sums, *asked_then], strict=True):
        phi.add_incoming(value, builder.block)
    builder.cbranch(builder.icmp_signed("<", following, count), begins, after)
    builder.position_at_end(after)
    return sums
