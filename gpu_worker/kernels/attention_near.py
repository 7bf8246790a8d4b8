"""Attention of many queries: their products with keys and values that were made ready, and weights.

A span is copied into the panels that a matrix product takes, pairs of bfloat16 or float32, and
serves all rows of a tile out of the L1 and L2 caches.
"""

# Compiled functions are typed by numba, for the arrays they are called with.
# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="call-arg,var-annotated"

from __future__ import annotations

from typing import Any

from numba import njit, types
from numba.extending import intrinsic, overload

from deepinfer.gpu_worker.kernels.attention_runs import run_terms
from deepinfer.gpu_worker.kernels.attention_tiles import emit_paired, emit_shuffle
from deepinfer.gpu_worker.kernels.attention_units import DIRECT_ROWS, part_of
from deepinfer.gpu_worker.kernels.micro_kernel import (
    WIDE_REGISTERS,
    emit_dot,
    emit_rounded,
    make_near_tiles,
)
from deepinfer.gpu_worker.kernels.settings import INNER
from deepinfer.gpu_worker.kernels.tile_registers import (
    HAS_TILES,
    TILE,
    begin_tiles,
    end_tiles,
    pair_tiles,
)
from deepinfer.gpu_worker.kernels.vectors import (
    LANES,
    VECTOR,
    VECTOR_I16,
    VECTOR_I32,
    emit_coarse_exp2,
    emit_exp2,
    emit_load,
    emit_pointer,
    float32x16,
    index,
    same_int,
)

# Compiled functions must see them as globals: numba cannot cache one that captures them.
_NEAR_PANELS = 4 if WIDE_REGISTERS else 1
_near_tiles = make_near_tiles([(r, p + 1) for p in range(_NEAR_PANELS) for r in range(1, 7)])


def near_product(
    x: Any, w: Any, w_at: Any, panel: Any, panels: Any, count: Any, out: Any, out_at: Any,
    out_row: Any, share: Any, seen: Any, over_keys: Any,
) -> None:  # fmt: skip
    """Rows ``x`` [rows, K] times panels of ``w`` that are ready, ``panel`` elements each.

    The first token, of ``share`` rows, sees ``seen`` keys, each later one one more. Keys are what
    the sum runs over, or else the columns of ``w``; those that no row of a block sees may be left
    out. ``count`` terms are summed; up to the next multiple of ``run_terms`` x has zeros and w has
    finite numbers.
    """


@overload(near_product, jit_options={**INNER}, inline="never")
def _near_product_of(
    x, w, w_at, panel, panels, count, out, out_at, out_row, share, seen, over_keys
):
    way = _product_by_tiles if HAS_TILES and x.dtype == types.uint16 else _product_by_vectors
    return lambda x, w, w_at, panel, panels, count, out, out_at, out_row, share, seen, over_keys: (
        way(x, w, w_at, panel, panels, count, out, out_at, out_row, share, seen, over_keys)
    )


@njit(**INNER)
def _product_by_vectors(
    x, w, w_at, panel, panels, count, out, out_at, out_row, share, seen, over_keys
):
    rows, x_row = x.shape
    blocks = -(-rows // DIRECT_ROWS)
    parts = -(-panels // _NEAR_PANELS)
    p = 0
    for i in range(parts):
        many = part_of(panels, parts, i)
        row = 0
        for block in range(blocks):
            size = part_of(rows, blocks, block)
            last = max(0, seen + (row + size - 1) // share)
            if over_keys or last > p * LANES:
                terms = min(count, last + last % 2) if over_keys else count
                _near_tiles(
                    x, row * x_row, x_row, w, w_at + p * panel, panel, terms,
                    out, out_at + row * out_row + p * LANES, out_row,
                    (many - 1) * DIRECT_ROWS + size - 1,
                )  # fmt: skip
            row += size
        p += many


@njit(**INNER)
def _product_by_tiles(
    x, w, w_at, panel, panels, count, out, out_at, out_row, share, seen, over_keys
):
    rows, x_row = x.shape
    begin_tiles(min(rows, TILE))
    for row in range(0, rows, 2 * TILE):
        end = min(row + 2 * TILE, rows)
        # Where less than a tile is left, the rows before are computed once more.
        tall = 1 if end - row <= TILE else 2
        top = max(0, end - tall * TILE)
        last = max(0, seen + (end - 1) // share)
        terms, columns = count, panels
        if over_keys:
            terms = max(1, min(count, last))
        else:
            columns = min(panels, -(-last // LANES))
        p = 0
        while p < columns:
            left = columns - p
            wide = 4 if left >= 4 and tall == 1 else 2 if left >= 2 else 1
            pair_tiles(
                x, top * x_row, x_row, end - TILE - top, w, w_at + p * panel, panel,
                -(-terms // run_terms(x)), None, 0, 0,
                out, out_at + top * out_row + p * LANES, out_row, 0, 0, (tall - 1) * 3 + wide // 2,
            )  # fmt: skip
            p += wide
    end_tiles()


@intrinsic
def store_two(typingctx, near, offset, cached, first, second):
    """Write vectors ``first`` and ``second`` of a cache to ``near``, ready for a product.

    A float32 ``near`` gets one after the other, one of bfloat16 sixteen pairs.
    """

    def codegen(context, builder, signature, args):
        near_type, _, cached_type, *_ = signature.args
        target = emit_pointer(context, builder, near_type, args[0], args[1])
        pointers = [
            emit_pointer(context, builder, cached_type, args[2], offset) for offset in args[3:]
        ]
        if near_type.dtype == types.float32:
            for u, pointer in enumerate(pointers):
                value = emit_load(builder, pointer, cached_type.dtype)
                place = builder.gep(target, [index(u * LANES)])
                builder.store(value, builder.bitcast(place, VECTOR.as_pointer()), align=4)
        else:
            pairs = emit_paired(builder, *pointers, cached_type.dtype)
            builder.store(pairs, builder.bitcast(target, VECTOR_I32.as_pointer()), align=4)
        return context.get_dummy_value()

    i64 = types.int64
    return types.void(near, i64, cached, i64, i64), codegen


@intrinsic
def store_rounded16(typingctx, array, offset, value):
    """Write to elements ``offset`` to ``offset + 15``, float32 or by ``emit_rounded``."""

    def codegen(context, builder, signature, args):
        array_type = signature.args[0]
        pointer = emit_pointer(context, builder, array_type, args[0], args[1])
        if array_type.dtype == types.float32:
            builder.store(args[2], builder.bitcast(pointer, VECTOR.as_pointer()), align=4)
        else:
            half = emit_rounded(builder, args[2])
            builder.store(half, builder.bitcast(pointer, VECTOR_I16.as_pointer()), align=2)
        return context.get_dummy_value()

    return types.void(array, types.int64, float32x16), codegen


_ONES = same_int(0x3F803F80)


@intrinsic
def weigh32(typingctx, scores, at, peak, weights, offset, total):
    """Write 2 to the power of 32 scores from ``at`` on, less ``peak``; return their sums' total.

    The total is that of the weights as they are written, rounded.
    """

    def codegen(context, builder, signature, args):
        scores, at, peak, weights, offset, total = args
        s_type, w_type = signature.args[0], signature.args[3]
        differences = []
        for u in range(2):
            place = builder.add(at, index(u * LANES))
            pointer = emit_pointer(context, builder, s_type, scores, place)
            differences.append(builder.fsub(emit_load(builder, pointer, s_type.dtype), peak))
        target = emit_pointer(context, builder, w_type, weights, offset)
        if w_type.dtype == types.float32:
            for u, difference in enumerate(differences):
                weight = emit_exp2(builder, difference)
                place = builder.gep(target, [index(u * LANES)])
                builder.store(weight, builder.bitcast(place, VECTOR.as_pointer()), align=4)
                total = builder.fadd(total, weight)
            return total
        halves = [
            emit_rounded(builder, emit_coarse_exp2(builder, difference))
            for difference in differences
        ]
        both = emit_shuffle(builder, *halves, list(range(2 * LANES)))
        builder.store(both, builder.bitcast(target, both.type.as_pointer()), align=2)
        return emit_dot(builder, total, builder.bitcast(both, VECTOR_I32), _ONES)

    i64 = types.int64
    return float32x16(scores, i64, float32x16, weights, i64, float32x16), codegen
