"""Sixteen float32 side by side, as a value inside compiled functions.

LLVM lowers ``<16 x float>`` to two AVX2 registers or one of AVX-512. Every operation is exact IEEE
lane by lane, and the two that cross lanes (``sum16``, ``max_of16``) use a fixed tree, so results
are the same on either. Arrays are addressed by a flat offset in elements; a uint16 array holds
bfloat16, and an int8 or int32 array integers.
"""

# Compiled functions are typed by numba, for the arrays they are called with.
# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="call-arg,var-annotated,misc"

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

from deepinfer.gpu_worker.kernels.settings import INNER

LANES = 16
_LINE = 64
I1 = ir.IntType(1)
I8 = ir.IntType(8)
I16 = ir.IntType(16)
I32 = ir.IntType(32)
I64 = ir.IntType(64)
F32 = ir.FloatType()
VECTOR = ir.VectorType(F32, LANES)
VECTOR_I8 = ir.VectorType(I8, LANES)
VECTOR_I16 = ir.VectorType(I16, LANES)
VECTOR_I32 = ir.VectorType(I32, LANES)
VECTOR_I1 = ir.VectorType(I1, LANES)


class _Float32x16(types.Type):
    def __init__(self) -> None:
        super().__init__(name="float32x16")


float32x16 = _Float32x16()


@register_model(_Float32x16)
class _Float32x16Model(models.PrimitiveModel):
    def __init__(self, manager: Any, fe_type: Any) -> None:
        super().__init__(manager, fe_type, VECTOR)


# ---- pieces of IR, shared with the micro-kernel -------------------------------------------------


def same(value: float) -> ir.Constant:
    """A constant float vector with ``value`` in every lane."""
    return ir.Constant(VECTOR, [float(value)] * LANES)


def same_int(value: int) -> ir.Constant:
    """A constant int32 vector with ``value`` in every lane."""
    return ir.Constant(VECTOR_I32, [value] * LANES)


def index(value: int) -> ir.Constant:
    """A constant int64: an offset or a count."""
    return ir.Constant(I64, value)


def emit_pointer(context: Any, builder: Any, array_type: Any, array: Any, offset: Any) -> Any:
    """Pointer to element ``offset`` of a C-contiguous array."""
    return builder.gep(context.make_array(array_type)(context, builder, array).data, [offset])


def emit_load(builder: Any, pointer: Any, element: Any) -> Any:
    """Sixteen elements as floats; bfloat16 is the upper half of a float32."""
    if element == types.float32:
        return builder.load(builder.bitcast(pointer, VECTOR.as_pointer()), align=4)
    if element == types.int8:
        integers = builder.load(builder.bitcast(pointer, VECTOR_I8.as_pointer()), align=1)
        return builder.sitofp(builder.sext(integers, VECTOR_I32), VECTOR)
    if element == types.int32:
        integers = builder.load(builder.bitcast(pointer, VECTOR_I32.as_pointer()), align=4)
        return builder.sitofp(integers, VECTOR)
    bits = builder.load(builder.bitcast(pointer, VECTOR_I16.as_pointer()), align=2)
    bits = builder.shl(builder.zext(bits, VECTOR_I32), same_int(16))
    return builder.bitcast(bits, VECTOR)


def emit_store(builder: Any, pointer: Any, element: Any, value: Any) -> None:
    """Store sixteen floats, rounded to nearest even where the array holds bfloat16 or int8.

    To int8 they must be finite and at most 127.
    """
    if element == types.float32:
        builder.store(value, builder.bitcast(pointer, VECTOR.as_pointer()), align=4)
        return
    if element == types.int8:
        signature = ir.FunctionType(VECTOR, [VECTOR])
        rint = cgutils.get_or_insert_function(builder.module, signature, "llvm.rint.v16f32")
        integers = builder.fptosi(builder.call(rint, [value]), VECTOR_I8)
        builder.store(integers, builder.bitcast(pointer, VECTOR_I8.as_pointer()), align=1)
        return
    half = emit_bfloat16(builder, value)
    builder.store(half, builder.bitcast(pointer, VECTOR_I16.as_pointer()), align=2)


def emit_bfloat16(builder: Any, value: Any) -> Any:
    """Sixteen floats as bfloat16, rounded to nearest even."""
    bits = builder.bitcast(value, VECTOR_I32)
    odd = builder.and_(builder.lshr(bits, same_int(16)), same_int(1))
    rounded = builder.add(bits, builder.add(odd, same_int(0x7FFF)))
    # Rounding could carry a NaN's payload into the sign; it must stay a NaN to be noticed.
    nan = builder.fcmp_unordered("uno", value, value)
    rounded = builder.select(nan, same_int(0x7FC00000), rounded)
    return builder.trunc(builder.lshr(rounded, same_int(16)), VECTOR_I16)


def emit_splat(builder: Any, scalar: Any) -> Any:
    """The scalar in every lane."""
    undefined = ir.Constant(VECTOR, ir.Undefined)
    first = builder.insert_element(undefined, scalar, ir.Constant(I32, 0))
    return builder.shuffle_vector(first, undefined, same_int(0))


def emit_fma(builder: Any, x: Any, y: Any, z: Any) -> Any:
    """``x * y + z`` with one rounding, whatever the optimiser would have preferred."""
    signature = ir.FunctionType(VECTOR, [VECTOR] * 3)
    fma = cgutils.get_or_insert_function(builder.module, signature, "llvm.fma.v16f32")
    return builder.call(fma, [x, y, z])


def emit_prefetch(builder: Any, pointer: Any, level: int = 1, write: bool = False) -> None:
    """Ask for the cache line at ``pointer`` in the L1 or L2 cache; never faults."""
    pointer = builder.bitcast(pointer, ir.IntType(8).as_pointer())
    signature = ir.FunctionType(ir.VoidType(), [pointer.type, I32, I32, I32])
    prefetch = cgutils.get_or_insert_function(builder.module, signature, "llvm.prefetch.p0")
    use, keep, data = (ir.Constant(I32, value) for value in (int(write), 4 - level, 1))
    builder.call(prefetch, [pointer, use, keep, data])


def emit_choice(builder: Any, value: Any, count: int, emit: Callable[[int], None]) -> None:
    """Write code that does ``emit(n)`` where the int64 ``value`` is n, from 0 to ``count - 1``."""
    after = builder.append_basic_block("after")
    blocks = [builder.append_basic_block(f"choice{n}") for n in range(count)]
    switch = builder.switch(value, blocks[0])
    for n, block in enumerate(blocks):
        switch.add_case(index(n), block)
        builder.position_at_end(block)
        emit(n)
        builder.branch(after)
    builder.position_at_end(after)


def emit_mask(builder: Any, first: Any, last: Any) -> Any:
    """Lanes i with ``first <= i < last`` (int64 scalars)."""
    clamped = []
    for bound in (first, last):
        low = builder.icmp_signed("<", bound, ir.Constant(I64, 0))
        high = builder.icmp_signed(">", bound, ir.Constant(I64, LANES))
        bound = builder.select(low, ir.Constant(I64, 0), bound)
        bound = builder.select(high, ir.Constant(I64, LANES), bound)
        scalar = builder.trunc(bound, I32)
        undefined = ir.Constant(VECTOR_I32, ir.Undefined)
        vector = builder.insert_element(undefined, scalar, ir.Constant(I32, 0))
        clamped.append(builder.shuffle_vector(vector, undefined, same_int(0)))
    lane = ir.Constant(VECTOR_I32, list(range(LANES)))
    return builder.and_(
        builder.icmp_signed(">=", lane, clamped[0]), builder.icmp_signed("<", lane, clamped[1])
    )


def _emit_exp(builder: Any, x: Any) -> Any:
    """Write exp(x) as 2**n * exp(r), |r| <= ln(2)/2, with the Taylor series to the 7th power.

    The series is cut below 6e-9 of the result; rounding dominates. exp(0) is exactly 1, what
    underflows is exactly 0, a NaN stays one. No conversion to int: that of a NaN is undefined.
    """
    x = builder.select(builder.fcmp_ordered(">", x, same(89.0)), same(89.0), x)
    tiny = builder.fcmp_ordered("<", x, same(-87.3))
    # Adding 1.5 * 2**23 leaves round(x / ln 2) in the low bits of the mantissa.
    shift = same(12582912.0)
    shifted = emit_fma(builder, x, same(math.log2(math.e)), shift)
    n = builder.fsub(shifted, shift)
    # ln 2 in two parts, the first short enough for n * part to be exact.
    r = emit_fma(builder, n, same(-0.693359375), x)
    r = emit_fma(builder, n, same(0.693359375 - math.log(2)), r)
    series = same(1 / math.factorial(7))
    for power in range(6, -1, -1):
        series = emit_fma(builder, series, r, same(1 / math.factorial(power)))
    exponent = builder.add(builder.bitcast(shifted, VECTOR_I32), same_int(127))
    scale = builder.bitcast(builder.shl(exponent, same_int(23)), VECTOR)
    return builder.select(tiny, same(0.0), builder.fmul(series, scale))


def emit_exp2(builder: Any, x: Any) -> Any:
    """Write 2**x, x <= 0, as 2**n * 2**r, |r| <= 1/2, with the minimax polynomial of degree 5.

    The relative error is below 2e-7. 2**0 is exactly 1, what underflows exactly 0, and a NaN stays
    one.
    """
    tiny = builder.fcmp_ordered("<", x, same(-126.0))
    series, exponent = _emit_exp2_parts(builder, x, 127, _EXP2)
    power = builder.fmul(series, builder.bitcast(exponent, VECTOR))
    return builder.select(tiny, same(0.0), power)


def emit_coarse_exp2(builder: Any, x: Any) -> Any:
    """Write 2**x, x <= 0, with a relative error of 1e-4, for what is rounded to bfloat16.

    2**0 is exactly 1, what is rounded to zero by ``emit_dot`` or below 2**-127 may be 0, and a NaN
    of bfloat16 stays one. Like ``emit_exp2``, with the polynomial of degree 3 that is 1 at 0.
    """
    # The exponent of the result must not fall below 0. Where x is a NaN it is what is chosen.
    x = builder.select(builder.fcmp_ordered(">", same(-127.0), x), same(-127.0), x)
    series, exponent = _emit_exp2_parts(builder, x, 0, _COARSE_EXP2)
    return builder.bitcast(builder.add(builder.bitcast(series, VECTOR_I32), exponent), VECTOR)


def _emit_exp2_parts(
    builder: Any, x: Any, bias: int, coefficients: tuple[float, ...]
) -> tuple[Any, Any]:
    """The polynomial in r = x - round(x), and round(x) + ``bias`` where a float's exponent is."""
    # Leaves round(x) + bias in the low bits of the mantissa.
    shift = same(12582912.0 + bias)
    shifted = builder.fadd(x, shift)
    r = builder.fsub(x, builder.fsub(shifted, shift))
    series = same(coefficients[0])
    for coefficient in coefficients[1:]:
        series = emit_fma(builder, series, r, same(coefficient))
    return series, builder.shl(builder.bitcast(shifted, VECTOR_I32), same_int(23))


# Of 2**r, highest power first.
_COARSE_EXP2 = (0.05500878052226562, 0.2422108295294781, 0.6932829290439609, 1.0)
_EXP2 = (
    0.001326472731307149,
    0.009671512991189957,
    0.05550733581185341,
    0.24022242426872253,
    0.6931470036506653,
    1.0,
)


def _emit_fold(builder: Any, x: Any, combine: Callable[[Any, Any, Any], Any]) -> Any:
    """Combine the upper half of the lanes with the lower until one is left."""
    width = LANES
    while width > 1:
        width //= 2
        undefined = ir.Constant(x.type, ir.Undefined)
        index = ir.VectorType(I32, width)
        low = builder.shuffle_vector(x, undefined, ir.Constant(index, list(range(width))))
        high = builder.shuffle_vector(
            x, undefined, ir.Constant(index, list(range(width, 2 * width)))
        )
        x = combine(builder, low, high)
    return builder.extract_element(x, ir.Constant(I32, 0))


def _emit_max(builder: Any, x: Any, y: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">", y, x), y, x)


# ---- operations for compiled functions ----------------------------------------------------------


@njit(**INNER)
def on_lines(count, dtype):
    """An array, not filled, that begins on a cache line: a vector across two takes twice the time.

    numba aligns what ``np.empty`` returns to 32 bytes, half of one.
    """
    whole = np.empty(count + _LINE, dtype)
    skip = np.int64(-whole.ctypes.data % _LINE) // whole.itemsize
    return whole[skip : skip + count]


@intrinsic
def load16(typingctx, array, offset):
    """Elements ``offset`` to ``offset + 15``."""

    def codegen(context, builder, signature, args):
        pointer = emit_pointer(context, builder, signature.args[0], args[0], args[1])
        return emit_load(builder, pointer, signature.args[0].dtype)

    return float32x16(array, types.int64), codegen


@intrinsic
def load_first16(typingctx, array, offset, count, other):
    """``count`` float32 from ``offset`` on, ``other`` behind them; no more than these is read."""

    def codegen(context, builder, signature, args):
        pointer = emit_pointer(context, builder, signature.args[0], args[0], args[1])
        pointer = builder.bitcast(pointer, VECTOR.as_pointer())
        kind = ir.FunctionType(VECTOR, [pointer.type, I32, VECTOR_I1, VECTOR])
        name = "llvm.masked.load.v16f32.p0"
        load = cgutils.get_or_insert_function(builder.module, kind, name)
        mask = emit_mask(builder, index(0), args[2])
        return builder.call(
            load, [pointer, ir.Constant(I32, 4), mask, emit_splat(builder, args[3])]
        )

    return float32x16(array, types.int64, types.int64, types.float32), codegen


@intrinsic
def store_first16(typingctx, array, offset, count, value):
    """Write the first ``count`` lanes, float32 or rounded to bfloat16, and nothing behind them."""

    def codegen(context, builder, signature, args):
        pointer = emit_pointer(context, builder, signature.args[0], args[0], args[1])
        value, name, align = args[3], "f32", 4
        if signature.args[0].dtype != types.float32:
            value, name, align = emit_bfloat16(builder, value), "i16", 2
        pointer = builder.bitcast(pointer, value.type.as_pointer())
        kind = ir.FunctionType(ir.VoidType(), [value.type, pointer.type, I32, VECTOR_I1])
        store = cgutils.get_or_insert_function(
            builder.module, kind, f"llvm.masked.store.v16{name}.p0"
        )
        mask = emit_mask(builder, index(0), args[2])
        builder.call(store, [value, pointer, ir.Constant(I32, align), mask])
        return context.get_dummy_value()

    return types.void(array, types.int64, types.int64, float32x16), codegen


@intrinsic
def fetch_to_write(typingctx, array, offset):
    """Ask for the cache line of element ``offset``, which is about to be written."""

    def codegen(context, builder, signature, args):
        pointer = emit_pointer(context, builder, signature.args[0], *args)
        emit_prefetch(builder, pointer, write=True)
        return context.get_dummy_value()

    return types.void(array, types.int64), codegen


@intrinsic
def store16(typingctx, array, offset, value):
    """Write to elements ``offset`` to ``offset + 15``."""

    def codegen(context, builder, signature, args):
        pointer = emit_pointer(context, builder, signature.args[0], args[0], args[1])
        emit_store(builder, pointer, signature.args[0].dtype, args[2])
        return context.get_dummy_value()

    return types.void(array, types.int64, float32x16), codegen


@intrinsic
def splat16(typingctx, scalar):
    """The scalar in every lane."""

    def codegen(context, builder, signature, args):
        return emit_splat(builder, args[0])

    return float32x16(types.float32), codegen


@intrinsic
def keep16(typingctx, x, first, last, other):
    """Lanes i with ``first <= i < last`` of ``x``, and ``other`` in the rest."""

    def codegen(context, builder, signature, args):
        mask = emit_mask(builder, args[1], args[2])
        return builder.select(mask, args[0], emit_splat(builder, args[3]))

    return float32x16(float32x16, types.int64, types.int64, types.float32), codegen


@intrinsic
def fma16(typingctx, x, y, z):
    """``x * y + z`` with one rounding."""

    def codegen(context, builder, signature, args):
        return emit_fma(builder, *args)

    return float32x16(float32x16, float32x16, float32x16), codegen


@intrinsic
def exp16(typingctx, x):
    """Exponential, relative error below 2e-7; above 88 it may be infinite already."""

    def codegen(context, builder, signature, args):
        return _emit_exp(builder, args[0])

    return float32x16(float32x16), codegen


@intrinsic
def exp2_16(typingctx, x):
    """``2**x`` for x <= 0, relative error below 2e-7; exactly 0 below 2**-126."""

    def codegen(context, builder, signature, args):
        return emit_exp2(builder, args[0])

    return float32x16(float32x16), codegen


@intrinsic
def sum16(typingctx, x):
    """Sum of the lanes, in a fixed tree."""

    def codegen(context, builder, signature, args):
        return _emit_fold(builder, args[0], lambda b, low, high: b.fadd(low, high))

    return types.float32(float32x16), codegen


@intrinsic
def max_of16(typingctx, x):
    """Largest lane."""

    def codegen(context, builder, signature, args):
        return _emit_fold(builder, args[0], _emit_max)

    return types.float32(float32x16), codegen


def _lanewise(name: str, emit: Callable[[Any, Any, Any], Any], doc: str) -> Any:
    def operation(typingctx, x, y):
        def codegen(context, builder, signature, args):
            return emit(builder, args[0], args[1])

        return float32x16(float32x16, float32x16), codegen

    operation.__name__ = operation.__qualname__ = name
    operation.__doc__ = doc
    return intrinsic(operation)


add16 = _lanewise("add16", lambda b, x, y: b.fadd(x, y), "Sum, lane by lane.")
sub16 = _lanewise("sub16", lambda b, x, y: b.fsub(x, y), "Difference, lane by lane.")
mul16 = _lanewise("mul16", lambda b, x, y: b.fmul(x, y), "Product, lane by lane.")
div16 = _lanewise("div16", lambda b, x, y: b.fdiv(x, y), "Quotient, lane by lane.")
max16 = _lanewise("max16", _emit_max, "Larger of two, lane by lane; the first where y is NaN.")


@intrinsic
def load_scalar(typingctx, array, offset):
    """One element as a float32."""

    def codegen(context, builder, signature, args):
        pointer = emit_pointer(context, builder, signature.args[0], args[0], args[1])
        value = builder.load(pointer)
        if signature.args[0].dtype == types.float32:
            return value
        bits = builder.shl(builder.zext(value, I32), ir.Constant(I32, 16))
        return builder.bitcast(bits, F32)

    return types.float32(array, types.int64), codegen


@intrinsic
def store_scalar(typingctx, array, offset, value):
    """Write one float32, rounded like ``store16``; to int8 a finite one of at most 127."""

    def codegen(context, builder, signature, args):
        element = signature.args[0].dtype
        pointer = emit_pointer(context, builder, signature.args[0], args[0], args[1])
        if element == types.float32:
            builder.store(args[2], pointer)
            return context.get_dummy_value()
        if element == types.int8:
            signature = ir.FunctionType(F32, [F32])
            rint = cgutils.get_or_insert_function(builder.module, signature, "llvm.rint.f32")
            builder.store(builder.fptosi(builder.call(rint, [args[2]]), I8), pointer)
            return context.get_dummy_value()
        bits = builder.bitcast(args[2], I32)
        odd = builder.and_(builder.lshr(bits, ir.Constant(I32, 16)), ir.Constant(I32, 1))
        rounded = builder.add(bits, builder.add(odd, ir.Constant(I32, 0x7FFF)))
        nan = builder.fcmp_unordered("uno", args[2], args[2])
        rounded = builder.select(nan, ir.Constant(I32, 0x7FC00000), rounded)
        half = builder.trunc(builder.lshr(rounded, ir.Constant(I32, 16)), I16)
        builder.store(half, pointer)
        return context.get_dummy_value()

    return types.void(array, types.int64, types.float32), codegen
