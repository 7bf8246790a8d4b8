"""The inner loop behind products of int4 weights with int8 activations.

Weights lie in groups of 32 along K, with a scale d and a minimum m for each group and column;
activations in groups of 32 with a scale s (ggml's Q4_1 and Q8_1). Of a group g only exact integers
depend on how it is computed: ``dot = sum of q * xq``, and ``sum`` of xq. What is left is float32 in
a fixed order, so results are bitwise the same for any rows, tiles, threads or instructions:

    out = bias;  for g = 0, 1, …:  out = fma(m, s * sum, fma(d, s * dot, out))

A block of weights is a panel's columns of one group: four runs of 4 bytes for each column, then d
and m as float16. In run j, byte i of column c holds in its low half k = 8 j + i, in its high half
k = 8 j + 4 + i. So a load of 64 bytes serves 16 columns times 8 k's, and a mask and a shift make of
it two vectors of which each 32-bit lane meets the same four activations.
A block of activations is 40 bytes: xq as int8 [32], then s and s * sum as float32.
"""

# Compiled functions are typed by numba, for the arrays they are called with.
# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="call-arg,var-annotated"

from __future__ import annotations

import platform
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from deepinfer.gpu_worker.kernels.byte_dot import HOST, RUN, Dot
from deepinfer.gpu_worker.kernels.byte_product import COLUMNS, for_rows
from deepinfer.gpu_worker.kernels.micro_kernel import in_register
from deepinfer.gpu_worker.kernels.vectors import (
    F32,
    I1,
    I8,
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
CODE_BYTES = GROUP * COLUMNS // 2
WEIGHT_BYTES = CODE_BYTES + 2 * 2 * COLUMNS
ACTIVATION_BYTES = GROUP + 2 * 4

_LARGEST = 127


_NATIVE_HALF = bool(llvm.get_host_cpu_features().get("f16c")) or platform.machine() in (
    "aarch64",
    "arm64",
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


def make_tile(columns: int, lowering: str) -> Any:
    """Make the intrinsic for 1 to ``ROWS`` rows and ``columns``, a multiple of 16.

    Its arguments; offsets and strides in elements of the array:

    - ``x``, ``x_at``, ``x_row``: blocks of activations (uint8), one behind the other in a row.
    - ``w``, ``w_at``, ``groups``: blocks of weights (uint8), likewise, and how many, at least one.
    - ``following``, ``stride``: where the weights lie that should be in the cache next; it asks for
      as many lines as it uses itself, ``stride`` apart.
    - ``bias``, ``n``: where the sums begin.
    - ``out``, ``out_at``, ``out_row``, ``add``: where the result goes, and whether what is there is
      added to it.
    - ``rows``: how many; for each there is code of its own.
    """
    code_bytes = GROUP * columns // 2
    weight_bytes = code_bytes + 2 * 2 * columns
    vectors = columns // LANES

    def emit(context, builder, signature, args, rows):
        x, x_at, x_row, w, w_at, groups, following, stride = args[:8]
        bias, n, out, out_at, out_row, add = args[8:]
        names = {"x": 0, "w": 3, "bias": 8, "out": 10}
        kinds = {name: signature.args[i] for name, i in names.items()}

        def place(name: str, array: Any, at: Any, stride: Any, i: int) -> Any:
            at = builder.add(at, builder.mul(stride, index(i)))
            return emit_pointer(context, builder, kinds[name], array, at)

        cells = [(r, c) for r in range(rows) for c in range(vectors)]
        x_rows = [in_register(builder, place("x", x, x_at, x_row, r)) for r in range(rows)]
        panel = in_register(builder, place("w", w, w_at, stride, 0))
        ask = in_register(builder, place("w", w, following, stride, 0))
        dot = Dot(builder, lowering, 4)
        begins = [
            emit_load(builder, place("bias", bias, n, index(LANES), c), types.float32)
            for _, c in cells
        ]
        # With AVX2 the float sums lie in memory between groups, where LLVM cannot tell that it
        # might keep them in registers: those are all in use for the integer sums, and its own
        # choice of what to put aside took 4 rows a fifth more time.
        in_memory = lowering == "avx2"
        if in_memory:
            room = cgutils.alloca_once(builder, ir.ArrayType(VECTOR, len(cells)))
            room = in_register(builder, builder.bitcast(room, VECTOR.as_pointer()))
            slots = [builder.gep(room, [index(i)]) for i in range(len(cells))]
            for pointer, value in zip(slots, begins, strict=True):
                builder.store(value, pointer, align=4)

        before = builder.block
        body = builder.append_basic_block("groups")
        after = builder.append_basic_block("summed")
        builder.branch(body)
        builder.position_at_end(body)
        group = builder.phi(I64)
        group.add_incoming(index(0), before)
        fetched = builder.phi(ask.type)
        fetched.add_incoming(ask, before)
        asked = fetched
        phis = [] if in_memory else [builder.phi(VECTOR) for _ in cells]
        for phi, value in zip(phis, begins, strict=False):
            phi.add_incoming(value, before)
        at_x = builder.mul(group, index(ACTIVATION_BYTES))
        activations = [builder.gep(pointer, [at_x]) for pointer in x_rows]
        block = builder.gep(panel, [builder.mul(group, index(weight_bytes))])
        for _ in range(weight_bytes // 64):
            emit_prefetch(builder, asked, level=2)
            asked = builder.gep(asked, [stride])
        dots = [dot.begin() for _ in cells]
        for run in range(GROUP // 8):
            codes = [
                dot.codes(builder.gep(block, [index((run * vectors + c) * RUN)]))
                for c in range(vectors)
            ]
            for half in range(2):
                k = index(8 * run + 4 * half)
                for r in range(rows):
                    four = dot.activations(builder.gep(activations[r], [k]))
                    for c in range(vectors):
                        i = r * vectors + c
                        dots[i] = dot.add(dots[i], codes[c][half], four)
        ends = []
        for c in range(vectors):
            first = code_bytes + 2 * LANES * c
            scales, minima = (
                emit_half(builder, builder.gep(block, [index(at)]), _NATIVE_HALF)
                for at in (first, first + 2 * columns)
            )
            for r in range(rows):
                i = r * vectors + c
                pair = builder.gep(activations[r], [index(GROUP)])
                pair = builder.bitcast(pair, F32.as_pointer())
                scale, total = (
                    emit_splat(builder, builder.load(builder.gep(pair, [index(j)]), align=4))
                    for j in (0, 1)
                )
                held = builder.load(slots[i], align=4) if in_memory else phis[i]
                product = builder.fmul(builder.sitofp(dot.end(dots[i]), VECTOR), scale)
                value = emit_fma(builder, minima, total, emit_fma(builder, scales, product, held))
                if in_memory:
                    builder.store(value, slots[i], align=4)
                else:
                    ends.append((phis[i], value))
        more = builder.add(group, index(1))
        group.add_incoming(more, builder.block)
        fetched.add_incoming(asked, builder.block)
        for phi, value in ends:
            phi.add_incoming(value, builder.block)
        sums = dict(ends)
        builder.cbranch(builder.icmp_signed("<", more, groups), body, after)

        builder.position_at_end(after)
        for i, (r, c) in enumerate(cells):
            value = builder.load(slots[i], align=4) if in_memory else sums[phis[i]]
            target = builder.gep(place("out", out, out_at, out_row, r), [index(LANES * c)])
            vector = builder.bitcast(target, VECTOR.as_pointer())
            with builder.if_else(builder.trunc(add, I1)) as (then, otherwise):
                with then:
                    old = emit_load(builder, target, types.float32)
                    builder.store(builder.fadd(value, old), vector, align=4)
                with otherwise:
                    builder.store(value, vector, align=4)

    def codegen(context, builder, signature, args):
        *args, rows = args
        for_rows(builder, rows, lambda r: emit(context, builder, signature, args, r))
        return context.get_dummy_value()

    i64 = types.int64

    @intrinsic
    def tile(
        typingctx, x, x_at, x_row, w, w_at, groups, following, stride,
        bias, n, out, out_at, out_row, add, rows,
    ):  # fmt: skip
        return types.void(
            x, i64, i64, w, i64, i64, i64, i64,
            bias, i64, out, i64, i64, types.boolean, i64,
        ), codegen  # fmt: skip

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


# Compiled functions must see it as a global: numba cannot cache one that captures it.
tile = make_tile(COLUMNS, HOST)
