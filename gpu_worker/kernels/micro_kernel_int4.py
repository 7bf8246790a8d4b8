"""The inner loop behind products of int4 weights with int8 activations.

Weights lie in groups of 32 along K, with a scale d and a minimum m for each group and column;
activations in groups of 32 with a scale s (ggml's Q4_1 and Q8_1). Of a group g only exact integers
depend on how it is computed: ``dot = sum of q * xq``, and ``sum`` of xq. What is left is float32 in
a fixed order, so results are bitwise the same for any rows, tiles, threads or instructions:

    out = bias;  for g = 0, 1, …:  out = fma(m, s * sum, fma(d, s * dot, out))

A block of weights is 16 columns of one group, 320 bytes: four times 64 bytes of codes, then d and
m as float16 [16] each. Byte 4 c + i of 64-byte run j holds column c: in its low half
k = 8 j + i, in its high half k = 8 j + 4 + i. So one load serves 16 columns times 8 k's, and a mask
and a shift make of it two vectors of which each 32-bit lane meets the same four activations.
A block of activations is 40 bytes: xq as int8 [32], then s and s * sum as float32.
"""

# Compiled functions are typed by numba, for the arrays they are called with.
# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="call-arg,var-annotated"

from __future__ import annotations

import platform
from collections.abc import Mapping
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from deepinfer.gpu_worker.kernels.micro_kernel import in_register
from deepinfer.gpu_worker.kernels.vectors import (
    F32,
    I1,
    I8,
    I16,
    I32,
    I64,
    LANES,
    VECTOR,
    VECTOR_I16,
    VECTOR_I32,
    emit_fma,
    emit_load,
    emit_pointer,
    emit_prefetch,
    emit_splat,
    float32x16,
    index,
    same,
    same_int,
)

GROUP = 32
"""Terms of a sum that share a scale."""
CODE_BYTES = GROUP * LANES // 2
WEIGHT_BYTES = CODE_BYTES + 2 * 2 * LANES
ACTIVATION_BYTES = GROUP + 2 * 4

_RUN = 4 * LANES
_LARGEST = 127


def lowering_for(features: Mapping[str, bool]) -> str:
    """Which instructions ``Dot`` uses on a machine: "vnni", "avx2" or "generic"."""
    if all(features.get(name) for name in ("avx512vnni", "avx512bw", "avx512vl")):
        return "vnni"
    return "avx2" if features.get("avx2") else "generic"


_FEATURES = llvm.get_host_cpu_features()
_HOST = lowering_for(_FEATURES)
_NATIVE_HALF = bool(_FEATURES.get("f16c")) or platform.machine() in ("aarch64", "arm64")


class Dot:
    """How to sum products of unsigned 4-bit codes and int8 activations; exact in all three ways.

    A run of 64 bytes is handled as ``parts`` vectors of ``width`` bytes.
    """

    def __init__(self, builder: Any, lowering: str) -> None:
        self.builder = builder
        self.lowering = lowering
        self.width = 32 if lowering == "avx2" else 64
        self.parts = _RUN // self.width
        self.bytes = ir.VectorType(I8, self.width)
        self.words = ir.VectorType(I32, self.width // 4)

    def begin(self) -> list[Any]:
        """Accumulators of one row and one panel, at zero."""
        held = ir.VectorType(I16, 16) if self.lowering == "avx2" else VECTOR_I32
        return [ir.Constant(held, [0] * 16)] * self.parts

    def codes(self, pointer: Any) -> tuple[list[Any], list[Any]]:
        """Low and high halves of the 64 bytes at ``pointer``, as bytes from 0 to 15."""
        builder = self.builder
        mask = ir.Constant(self.bytes, [15] * self.width)
        four = ir.Constant(self.words, [4] * (self.width // 4))
        low, high = [], []
        for part in range(self.parts):
            at = builder.gep(pointer, [index(part * self.width)])
            both = builder.load(builder.bitcast(at, self.bytes.as_pointer()), align=1)
            low.append(builder.and_(both, mask))
            shifted = builder.lshr(builder.bitcast(both, self.words), four)
            high.append(builder.and_(builder.bitcast(shifted, self.bytes), mask))
        return low, high

    def activations(self, pointer: Any) -> Any:
        """The four int8 at ``pointer`` in every 32-bit lane."""
        builder = self.builder
        four = builder.load(builder.bitcast(pointer, I32.as_pointer()), align=4)
        undefined = ir.Constant(self.words, ir.Undefined)
        first = builder.insert_element(undefined, four, ir.Constant(I32, 0))
        zeros = ir.Constant(ir.VectorType(I32, self.width // 4), [0] * (self.width // 4))
        return builder.bitcast(builder.shuffle_vector(first, undefined, zeros), self.bytes)

    def add(self, sums: list[Any], codes: list[Any], x: Any) -> list[Any]:
        """``sums`` with the products of one vector of codes added to them."""
        return [self._add(total, part, x) for total, part in zip(sums, codes, strict=True)]

    def _add(self, total: Any, codes: Any, x: Any) -> Any:
        builder = self.builder
        if self.lowering == "avx2":
            # A pair is at most 2 * 15 * 127 = 3810, so the 8 of a group fit in int16.
            pairs = self._call("llvm.x86.avx2.pmadd.ub.sw", total.type, codes, x)
            return self._in_this_order(builder.add(total, pairs))
        if self.lowering == "vnni":
            words = [builder.bitcast(value, VECTOR_I32) for value in (codes, x)]
            return self._call("llvm.x86.avx512.vpdpbusd.512", VECTOR_I32, total, *words)
        wide = ir.VectorType(I16, self.width)
        products = builder.mul(builder.zext(codes, wide), builder.sext(x, wide))
        for i in range(4):
            every = ir.Constant(VECTOR_I32, list(range(i, self.width, 4)))
            some = builder.shuffle_vector(products, products, every)
            total = builder.add(total, builder.sext(some, VECTOR_I32))
        return total

    def _in_this_order(self, value: Any) -> Any:
        """The same value; what goes through here is computed in the order of the source.

        Left to itself, LLVM sums up all of one part before the next, and runs out of registers
        for the activations that both need.
        """
        kind = ir.FunctionType(value.type, [value.type])
        return self.builder.asm(kind, "", "=x,0", [value], True)

    def end(self, sums: list[Any]) -> Any:
        """The sums of the 16 columns as int32."""
        if self.lowering != "avx2":
            return sums[0]
        half = ir.VectorType(I32, 8)
        ones = ir.Constant(ir.VectorType(I16, 16), [1] * 16)
        low, high = (self._call("llvm.x86.avx2.pmadd.wd", half, part, ones) for part in sums)
        return self.builder.shuffle_vector(low, high, ir.Constant(VECTOR_I32, list(range(LANES))))

    def _call(self, name: str, result: Any, *args: Any) -> Any:
        kind = ir.FunctionType(result, [arg.type for arg in args])
        return self.builder.call(
            cgutils.get_or_insert_function(self.builder.module, kind, name), args
        )


def emit_half(builder: Any, pointer: Any, native: bool) -> Any:
    """Sixteen finite float16 as floats, by the machine's own instruction or without one."""
    bits = builder.load(builder.bitcast(pointer, VECTOR_I16.as_pointer()), align=1)
    if native:
        halves = builder.bitcast(bits, ir.VectorType(ir.HalfType(), LANES))
        return builder.fpext(halves, VECTOR)
    # LLVM would call a library that is not there. The bits of a float16, moved to where those of a
    # float32 belong, are 2**112 times too small.
    wide = builder.zext(bits, VECTOR_I32)
    sign = builder.shl(builder.and_(wide, same_int(0x8000)), same_int(16))
    magnitude = builder.shl(builder.and_(wide, same_int(0x7FFF)), same_int(13))
    value = builder.fmul(builder.bitcast(magnitude, VECTOR), same(2.0**112))
    return builder.bitcast(builder.or_(builder.bitcast(value, VECTOR_I32), sign), VECTOR)


def make_tile(rows: int, lowering: str) -> Any:
    """Make the intrinsic for ``rows`` rows times one panel: whole sums, from bias to ``out``.

    Its arguments; offsets and strides in elements of the array:

    - ``x``, ``x_at``, ``x_row``: blocks of activations (uint8), one behind the other in a row.
    - ``w``, ``w_at``, ``w_ahead``: blocks of weights (uint8), likewise in a panel; how far beyond
      those in use lie the bytes that should be in the cache next.
    - ``groups``: blocks of a sum, at least one.
    - ``out``, ``out_at``, ``out_row``: where the result goes.
    - ``bias``, ``bias_at``, ``add``: where the sum begins, and whether ``out`` is added to it.
    """

    def codegen(context, builder, signature, args):
        x, x_at, x_row, w, w_at, w_ahead, groups = args[:7]
        out, out_at, out_row, bias, bias_at, add = args[7:]
        x_type, w_type, out_type, bias_type = (signature.args[i] for i in (0, 3, 7, 10))

        def place(array_type: Any, array: Any, at: Any, stride: Any, row: int) -> Any:
            at = builder.add(at, builder.mul(stride, index(row)))
            return emit_pointer(context, builder, array_type, array, at)

        x_rows = [in_register(builder, place(x_type, x, x_at, x_row, r)) for r in range(rows)]
        panel = emit_pointer(context, builder, w_type, w, w_at)
        dot = Dot(builder, lowering)

        # The float sums lie in memory between groups, where LLVM cannot tell that it might keep
        # them in registers: those of AVX2 are all in use for the integer sums, and its own choice
        # of what to put aside took 4 rows a fifth more time.
        room = cgutils.alloca_once(builder, ir.ArrayType(VECTOR, rows))
        room = in_register(builder, builder.bitcast(room, VECTOR.as_pointer()))
        sums = [builder.gep(room, [index(r)]) for r in range(rows)]
        begin = emit_pointer(context, builder, bias_type, bias, bias_at)
        for pointer in sums:
            builder.store(emit_load(builder, begin, types.float32), pointer, align=4)

        before = builder.block
        body = builder.append_basic_block("groups")
        after = builder.append_basic_block("summed")
        builder.branch(body)
        builder.position_at_end(body)
        group = builder.phi(I64)
        group.add_incoming(index(0), before)
        at_x = builder.mul(group, index(ACTIVATION_BYTES))
        activations = [builder.gep(pointer, [at_x]) for pointer in x_rows]
        block = builder.gep(panel, [builder.mul(group, index(WEIGHT_BYTES))])
        ahead = builder.gep(block, [w_ahead])
        for line in range(0, WEIGHT_BYTES, 64):
            emit_prefetch(builder, builder.gep(ahead, [index(line)]))
        dots = [dot.begin() for _ in range(rows)]
        for run in range(CODE_BYTES // _RUN):
            halves = dot.codes(builder.gep(block, [index(run * _RUN)]))
            for half, codes in enumerate(halves):
                k = index(8 * run + 4 * half)
                for r in range(rows):
                    four = dot.activations(builder.gep(activations[r], [k]))
                    dots[r] = dot.add(dots[r], codes, four)
        scales, minima = (
            emit_half(builder, builder.gep(block, [index(at)]), _NATIVE_HALF)
            for at in (CODE_BYTES, CODE_BYTES + 2 * LANES)
        )
        for r in range(rows):
            pair = builder.bitcast(builder.gep(activations[r], [index(GROUP)]), F32.as_pointer())
            scale, total = (
                emit_splat(builder, builder.load(builder.gep(pair, [index(i)]), align=4))
                for i in (0, 1)
            )
            product = builder.fmul(builder.sitofp(dot.end(dots[r]), VECTOR), scale)
            value = emit_fma(builder, scales, product, builder.load(sums[r], align=4))
            builder.store(emit_fma(builder, minima, total, value), sums[r], align=4)
        following = builder.add(group, index(1))
        group.add_incoming(following, builder.block)
        builder.cbranch(builder.icmp_signed("<", following, groups), body, after)

        builder.position_at_end(after)
        for r in range(rows):
            value = builder.load(sums[r], align=4)
            target = place(out_type, out, out_at, out_row, r)
            vector = builder.bitcast(target, VECTOR.as_pointer())
            with builder.if_else(builder.trunc(add, I1)) as (then, otherwise):
                with then:
                    held = emit_load(builder, target, types.float32)
                    builder.store(builder.fadd(value, held), vector, align=4)
                with otherwise:
                    builder.store(value, vector, align=4)
        return context.get_dummy_value()

    i64 = types.int64

    @intrinsic
    def tile(
        typingctx, x, x_at, x_row, w, w_at, w_ahead, groups,
        out, out_at, out_row, bias, bias_at, add,
    ):  # fmt: skip
        return types.void(
            x, i64, i64, w, i64, i64, i64, out, i64, i64, bias, i64, types.boolean
        ), codegen

    return tile


@intrinsic
def quantise_group(typingctx, x, x_at, blocks, at):
    """Make a block of activations of 32 float32: s = max |x| / 127, xq = x / s to nearest even.

    Where one of them is not finite s is NaN, and so is every sum it takes part in. Where all are
    below 1e-30 they count as zero: 1 / s could overflow.
    """

    def codegen(context, builder, signature, args):
        source = emit_pointer(context, builder, signature.args[0], args[0], args[1])
        block = emit_pointer(context, builder, signature.args[2], args[2], args[3])

        def reduce(name: str, vector: Any) -> Any:
            kind = ir.FunctionType(I32, [VECTOR_I32])
            function = cgutils.get_or_insert_function(builder.module, kind, name)
            return builder.call(function, [vector])

        values = [
            emit_load(builder, builder.gep(source, [index(i)]), types.float32) for i in (0, LANES)
        ]
        # Magnitudes in the order of their bits, above which come infinity and the NaNs.
        bits = [builder.and_(builder.bitcast(v, VECTOR_I32), same_int(0x7FFFFFFF)) for v in values]
        larger = builder.select(builder.icmp_unsigned(">", *bits), *bits)
        top = reduce("llvm.vector.reduce.umax.v16i32", larger)
        finite = builder.icmp_unsigned("<", top, ir.Constant(I32, 0x7F800000))
        largest = builder.bitcast(top, F32)
        counts = builder.fcmp_ordered(">=", largest, ir.Constant(F32, 1e-30))
        usable = builder.and_(finite, counts)
        scale = builder.fdiv(largest, ir.Constant(F32, float(_LARGEST)))
        inverse = builder.fdiv(ir.Constant(F32, float(_LARGEST)), largest)
        zero = ir.Constant(F32, 0.0)
        nan = ir.Constant(F32, float("nan"))
        scale = builder.select(usable, scale, builder.select(finite, zero, nan))
        # Where they are of no use the values become 0, since a NaN has no integer.
        kept = [builder.select(usable, v, same(0.0)) for v in values]
        inverse = emit_splat(builder, builder.select(usable, inverse, zero))
        total = same_int(0)
        rint = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(VECTOR, [VECTOR]), "llvm.rint.v16f32"
        )
        for i, value in enumerate(kept):
            rounded = builder.call(rint, [builder.fmul(value, inverse)])
            whole = builder.fptosi(rounded, VECTOR_I32)
            total = builder.add(total, whole)
            narrow = builder.trunc(whole, ir.VectorType(I8, LANES))
            target = builder.gep(block, [index(i * LANES)])
            builder.store(narrow, builder.bitcast(target, narrow.type.as_pointer()), align=1)
        total = builder.sitofp(reduce("llvm.vector.reduce.add.v16i32", total), F32)
        pair = builder.bitcast(builder.gep(block, [index(GROUP)]), F32.as_pointer())
        builder.store(scale, pair, align=4)
        second = builder.gep(pair, [index(1)])
        builder.store(builder.fmul(scale, total), second, align=4)
        return context.get_dummy_value()

    return types.void(x, types.int64, blocks, types.int64), codegen


@intrinsic
def load_half16(typingctx, array, offset):
    """Sixteen float16 at byte ``offset`` of a uint8 array."""

    def codegen(context, builder, signature, args):
        pointer = emit_pointer(context, builder, signature.args[0], *args)
        return emit_half(builder, pointer, _NATIVE_HALF)

    return float32x16(array, types.int64), codegen


# Compiled functions must see each tile as a global: numba cannot cache one that captures it.
int4_1 = make_tile(1, _HOST)
int4_2 = make_tile(2, _HOST)
int4_3 = make_tile(3, _HOST)
int4_4 = make_tile(4, _HOST)
