"""Rows of matrices to int8: rotated, then rounded with one scale for the row."""

# Compiled functions are typed by numba, for the arrays they are called with.
# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="call-arg,var-annotated,misc"

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from deepinfer.gpu_worker.kernels.hadamard import BLOCK, rotate_block
from deepinfer.gpu_worker.kernels.settings import INNER
from deepinfer.gpu_worker.kernels.vectors import (
    F32,
    I8,
    I32,
    LANES,
    VECTOR,
    VECTOR_I32,
    add16,
    emit_pointer,
    float32x16,
    index,
    load16,
    load_scalar,
    mul16,
    same,
    same_int,
    splat16,
    sum16,
)

# A row of nothing larger than this counts as zero: the inverse of its scale would overflow.
_SMALLEST = np.float32(2.0**-100)


@intrinsic
def _max_magnitude16(typingctx, magnitudes, x):
    """The larger of ``magnitudes`` and ``|x|``, lane by lane; infinity and NaN are the largest."""

    def codegen(context, builder, signature, args):
        # As integers, magnitudes are in the order of their bits.
        held, new = (builder.bitcast(value, VECTOR_I32) for value in args)
        new = builder.and_(new, same_int(0x7FFFFFFF))
        larger = builder.select(builder.icmp_unsigned(">", new, held), new, held)
        return builder.bitcast(larger, VECTOR)

    return float32x16(float32x16, float32x16), codegen


@intrinsic
def _largest_magnitude(typingctx, magnitudes):
    def codegen(context, builder, signature, args):
        kind = ir.FunctionType(I32, [VECTOR_I32])
        name = "llvm.vector.reduce.umax.v16i32"
        reduce = cgutils.get_or_insert_function(builder.module, kind, name)
        return builder.bitcast(builder.call(reduce, [builder.bitcast(args[0], VECTOR_I32)]), F32)

    return types.float32(float32x16), codegen


@intrinsic
def _store_rounded16(typingctx, rounded, at, values):
    """Store floats of at most 127 as int8, rounded half to even, and return them so rounded."""

    def codegen(context, builder, signature, args):
        pointer = emit_pointer(context, builder, signature.args[0], args[0], args[1])
        # A float near 1.5 * 2**23 has no fraction bits; its low bits are then the integer.
        shifted = builder.fadd(args[2], same(1.5 * 2**23))
        narrow = builder.trunc(builder.bitcast(shifted, VECTOR_I32), ir.VectorType(I8, LANES))
        builder.store(narrow, builder.bitcast(pointer, narrow.type.as_pointer()), align=1)
        return builder.fsub(shifted, same(1.5 * 2**23))

    return float32x16(rounded, types.int64, float32x16), codegen


@intrinsic
def store_tail(typingctx, rounded, at, scale, total):
    """Write a float32 and an int32 to bytes ``at`` … ``at + 7`` of an array of bytes."""

    def codegen(context, builder, signature, args):
        pointer = emit_pointer(context, builder, signature.args[0], args[0], args[1])
        builder.store(args[2], builder.bitcast(pointer, F32.as_pointer()), align=4)
        pointer = builder.gep(pointer, [index(4)])
        builder.store(args[3], builder.bitcast(pointer, I32.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(rounded, types.int64, types.float32, types.int32), codegen


@njit(**INNER)
def rotate_row(source, row, rotated):
    """Row ``row`` of ``source`` [n, K], padded with zeros, block after block times H.

    Returns the largest magnitude; where a value is not finite, infinity or NaN.
    """
    depth = source.shape[1]
    at = row * depth
    whole = depth - depth % BLOCK
    for k in range(0, whole, BLOCK):
        rotate_block(source, at + k, rotated, k)
    if whole < depth:
        for k in range(whole, whole + BLOCK):
            rotated[k] = load_scalar(source, at + k) if k < depth else np.float32(0)
        rotate_block(rotated, whole, rotated, whole)
    magnitudes = splat16(np.float32(0))
    for k in range(0, len(rotated), LANES):
        magnitudes = _max_magnitude16(magnitudes, load16(rotated, k))
    return _largest_magnitude(magnitudes)


@njit(**INNER)
def round_row(rotated, peak, rounded, at):
    """Write a row whose largest magnitude is ``peak`` as integers from -127 to 127.

    Returns their scale, which is NaN where ``peak`` is not finite, and their sum.
    """
    if not (_SMALLEST <= peak < np.inf):
        for k in range(0, len(rotated), LANES):
            _store_rounded16(rounded, at + k, splat16(np.float32(0)))
        return peak * np.float32(0), np.int32(0)
    factor = splat16(np.float32(127) / peak)
    total = splat16(np.float32(0))
    for k in range(0, len(rotated), LANES):
        value = _store_rounded16(rounded, at + k, mul16(load16(rotated, k), factor))
        total = add16(total, value)
    # Integers of less than 2**24, exact in any order.
    return peak / np.float32(127), np.int32(sum16(total))
