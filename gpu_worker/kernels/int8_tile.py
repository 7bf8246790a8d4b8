"""The inner loop of int8 matrix products: R rows times C panels of 16 columns, summed as int32.

    sums[r, c, 0:16] += sum over k of x[r, k] * w[c, k, 0:16]

Integer sums are exact, so their order, and which instructions form them, cannot change a bit. Two
products of int16 and their sum are one instruction (``vpmaddwd``). int8 weights of four k
are widened by shifts, which leaves weights 0 and 2, and 1 and 3, side by side; hence ``x`` holds
four k in the order 0, 2, 1, 3. Where many rows use the same weights, ``widen_four`` prepares them.

Four k take four elements of a row of ``x`` and 64 of a panel.
"""

# Compiled functions are typed by numba, for the arrays they are called with.
# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="call-arg,var-annotated"

from __future__ import annotations

from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from deepinfer.gpu_worker.kernels.micro_kernel import in_register
from deepinfer.gpu_worker.kernels.vectors import (
    I16,
    I32,
    I64,
    LANES,
    VECTOR,
    VECTOR_I32,
    emit_pointer,
    emit_prefetch,
    float32x16,
    index,
    same,
)

_HAS_AVX2 = bool(llvm.get_host_cpu_features().get("avx2"))

_WORDS = ir.VectorType(I16, 2 * LANES)
_HALF_WORDS = ir.VectorType(I16, LANES)
_HALF_SUMS = ir.VectorType(I32, LANES // 2)
_EIGHT = ir.Constant(_WORDS, [8] * 2 * LANES)


def _shuffle(builder: Any, a: Any, b: Any, lanes: list[int]) -> Any:
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(I32, len(lanes)), lanes))


def _halves(builder: Any, vector: Any) -> list[Any]:
    """The lower and the upper half, each as wide as an AVX2 register."""
    count = vector.type.count
    undefined = ir.Constant(vector.type, ir.Undefined)
    return [
        _shuffle(builder, vector, undefined, list(range(first, first + count // 2)))
        for first in (0, count // 2)
    ]


def _emit_add_dot(builder: Any, total: Any, x: Any, w: Any) -> Any:
    """Add ``x[2i] * w[2i] + x[2i+1] * w[2i+1]`` of two <16 x i16> to a <8 x i32>."""
    if not _HAS_AVX2:
        undefined = ir.Constant(_HALF_WORDS, ir.Undefined)
        for lanes in (list(range(0, 16, 2)), list(range(1, 16, 2))):
            factors = [
                builder.sext(_shuffle(builder, v, undefined, lanes), _HALF_SUMS) for v in (x, w)
            ]
            total = builder.add(total, builder.mul(*factors))
        return total
    signature = ir.FunctionType(_HALF_SUMS, [_HALF_WORDS, _HALF_WORDS])
    dot = cgutils.get_or_insert_function(builder.module, signature, "llvm.x86.avx2.pmadd.wd")
    total = builder.add(total, builder.call(dot, [x, w]))
    # Sums may be added in any order, and the optimiser would choose one that takes more registers
    # than there are. It must not see that this is a sum, nor move it.
    return builder.asm(ir.FunctionType(_HALF_SUMS, [_HALF_SUMS]), "", "=x,0", [total], True)


def _load(builder: Any, pointer: Any, kind: Any) -> Any:
    return builder.load(builder.bitcast(pointer, kind.as_pointer()), align=4)


def _emit_widened(builder: Any, pointer: Any) -> list[Any]:
    """Weights 0 and 2, and weights 1 and 3, of four k as <32 x i16>."""
    raw = _load(builder, pointer, _WORDS)
    return [builder.ashr(builder.shl(raw, _EIGHT), _EIGHT), builder.ashr(raw, _EIGHT)]


def _emit_broadcast(builder: Any, pointer: Any) -> Any:
    """The two int16 at ``pointer``, over and over."""
    undefined = ir.Constant(_HALF_SUMS, ir.Undefined)
    value = builder.insert_element(undefined, _load(builder, pointer, I32), ir.Constant(I32, 0))
    value = builder.shuffle_vector(value, undefined, ir.Constant(_HALF_SUMS, [0] * 8))
    return builder.bitcast(value, _HALF_WORDS)


def _tile(rows: int, panels: int) -> Any:
    """Make the intrinsic for ``rows`` x ``panels``.

    Its arguments, all offsets and strides in elements:

    - ``x``, ``x_at``, ``x_row``: where row 0 begins and the stride between rows.
    - ``w``, ``w_at``, ``w_panel``: where panel 0 begins and the stride between panels.
    - ``ahead``: int8 weights so far beyond those in use should be in the cache next.
    - ``count``: terms of the sum, a multiple of 8, at least 8.
    - ``sums``, ``sums_at``: int32 [rows][panels][16], added to.
    """

    def codegen(context, builder, signature, args):
        x, x_at, x_row, w, w_at, w_panel, ahead, count, sums, sums_at = args
        x_type, w_type, sums_type = (signature.args[i] for i in (0, 3, 8))
        x_rows = []
        for r in range(rows):
            at = builder.add(x_at, builder.mul(x_row, index(r)))
            pointer = emit_pointer(context, builder, x_type, x, at)
            x_rows.append(in_register(builder, pointer))
        w_panels = []
        for c in range(panels):
            at = builder.add(w_at, builder.mul(w_panel, index(c)))
            w_panels.append(emit_pointer(context, builder, w_type, w, at))
        cells = [(r, c) for r in range(rows) for c in range(panels)]
        targets = []
        for i in range(2 * len(cells)):
            at = builder.add(sums_at, index(i * LANES // 2))
            pointer = emit_pointer(context, builder, sums_type, sums, at)
            targets.append(builder.bitcast(pointer, _HALF_SUMS.as_pointer()))
        begins = [builder.load(pointer, align=4) for pointer in targets]

        before = builder.block
        body = builder.append_basic_block("sum")
        after = builder.append_basic_block("summed")
        builder.branch(body)
        builder.position_at_end(body)
        k = builder.phi(I64)
        k.add_incoming(index(0), before)
        phis = [builder.phi(_HALF_SUMS) for _ in begins]
        for phi, value in zip(phis, begins, strict=True):
            phi.add_incoming(value, before)
        current: list[Any] = list(phis)
        for four in range(2):
            x_k = builder.add(k, index(4 * four))
            w_k = builder.mul(x_k, index(LANES))
            places = [builder.gep(pointer, [w_k]) for pointer in w_panels]
            values = [builder.gep(pointer, [x_k]) for pointer in x_rows]
            if w_type.dtype == types.int8:
                for place in places:
                    emit_prefetch(builder, builder.gep(place, [ahead]))
            if w_type.dtype == types.int8:
                pairs = [_emit_widened(builder, place) for place in places]
            else:
                pairs = [
                    [
                        _load(builder, builder.gep(place, [index(2 * LANES * pair)]), _WORDS)
                        for pair in range(2)
                    ]
                    for place in places
                ]
            for pair in range(2):
                weights = [_halves(builder, panel[pair]) for panel in pairs]
                for r, pointer in enumerate(values):
                    value = _emit_broadcast(builder, builder.gep(pointer, [index(2 * pair)]))
                    for c in range(panels):
                        for half in range(2):
                            i = 2 * (r * panels + c) + half
                            weight = weights[c][half]
                            current[i] = _emit_add_dot(builder, current[i], value, weight)
        following = builder.add(k, index(8))
        k.add_incoming(following, builder.block)
        for phi, value in zip(phis, current, strict=True):
            phi.add_incoming(value, builder.block)
        builder.cbranch(builder.icmp_signed("<", following, count), body, after)
        builder.position_at_end(after)
        for i, pointer in enumerate(targets):
            builder.store(current[i], pointer, align=4)
        return context.get_dummy_value()

    i64 = types.int64

    @intrinsic
    def tile(typingctx, x, x_at, x_row, w, w_at, w_panel, ahead, count, sums, sums_at):
        return types.void(x, i64, i64, w, i64, i64, i64, i64, sums, i64), codegen

    return tile


@intrinsic
def widen_four(typingctx, panels, at, wide, wide_at):
    """Write the 64 int8 weights of four k as int16, in the order a tile takes them."""

    def codegen(context, builder, signature, args):
        source = emit_pointer(context, builder, signature.args[0], args[0], args[1])
        target = emit_pointer(context, builder, signature.args[2], args[2], args[3])
        for pair, words in enumerate(_emit_widened(builder, source)):
            place = builder.gep(target, [index(2 * LANES * pair)])
            builder.store(words, builder.bitcast(place, _WORDS.as_pointer()), align=2)
        return context.get_dummy_value()

    return types.void(panels, types.int64, wide, types.int64), codegen


@intrinsic
def load_sums16(typingctx, sums, at):
    """Sixteen int32 as the nearest float32."""

    def codegen(context, builder, signature, args):
        pointer = emit_pointer(context, builder, signature.args[0], args[0], args[1])
        return builder.sitofp(_load(builder, pointer, VECTOR_I32), VECTOR)

    return float32x16(sums, types.int64), codegen


@intrinsic
def store_quantised16(typingctx, quantised, at, values):
    """Round floats of at most 32,767 half to even, and store them in the order of a tile."""

    def codegen(context, builder, signature, args):
        pointer = emit_pointer(context, builder, signature.args[0], args[0], args[1])
        # A float near 1.5 * 2**23 has no fraction bits; its low bits are then the integer. No
        # conversion to int: that of a NaN is undefined.
        shifted = builder.bitcast(builder.fadd(args[2], same(1.5 * 2**23)), VECTOR_I32)
        words = builder.trunc(shifted, _HALF_WORDS)
        order = [4 * four + k for four in range(LANES // 4) for k in (0, 2, 1, 3)]
        words = _shuffle(builder, words, ir.Constant(_HALF_WORDS, ir.Undefined), order)
        builder.store(words, builder.bitcast(pointer, _HALF_WORDS.as_pointer()), align=2)
        return context.get_dummy_value()

    return types.void(quantised, types.int64, float32x16), codegen


# Compiled functions must see each tile as a global: numba cannot cache one that captures it.
tile_1x1 = _tile(1, 1)
tile_1x4 = _tile(1, 4)
tile_2x1 = _tile(2, 1)
tile_3x1 = _tile(3, 1)
tile_4x1 = _tile(4, 1)
tile_5x1 = _tile(5, 1)
tile_6x1 = _tile(6, 1)
