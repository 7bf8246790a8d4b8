"""The inner loops of attention for few queries, which read keys and values as they are cached.

Both sum in ascending order with one accumulator register for each output element, like
``micro_kernel``, and differ from it in where the cached side lies: blocks are anywhere in memory,
so its places come from a table.
"""

# Compiled functions are typed by numba, for the arrays they are called with.
# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="call-arg,var-annotated"

from __future__ import annotations

from typing import Any

from numba import types
from numba.extending import intrinsic

from deepinfer.gpu_worker.kernels.vectors import (
    I64,
    LANES,
    VECTOR,
    emit_fma,
    emit_load,
    emit_pointer,
    emit_prefetch,
    emit_splat,
    index,
    same,
)

AHEAD_GROUPS = 4
"""How many lane groups of keys before their turn they are asked for; the table goes on so far."""


def _sum(builder: Any, count: Any, cells: int, step: Any) -> list[Any]:
    """Emit ``for k in range(0, count, 2)``; ``step(k, sums)`` returns the sums after k and k+1."""
    before = builder.block
    body, after = (builder.append_basic_block(name) for name in ("sum", "summed"))
    builder.branch(body)
    builder.position_at_end(body)
    k = builder.phi(I64)
    k.add_incoming(index(0), before)
    sums = [builder.phi(VECTOR) for _ in range(cells)]
    for phi in sums:
        phi.add_incoming(same(0.0), before)
    done: list[Any] = step(k, list(sums))
    following = builder.add(k, index(2))
    k.add_incoming(following, builder.block)
    for phi, value in zip(sums, done, strict=True):
        phi.add_incoming(value, builder.block)
    builder.cbranch(builder.icmp_signed("<", following, count), body, after)
    builder.position_at_end(after)
    return done


def _multiply_add(
    builder: Any, values: list[Any], weights: list[Any], element: Any, sums: list[Any]
) -> list[Any]:
    """``sums[r, c] += values[r] * weights[c][0:16]``, all given by their addresses."""
    loaded = [emit_load(builder, pointer, element) for pointer in weights]
    for r, pointer in enumerate(values):
        value = emit_splat(builder, builder.load(pointer, align=4))
        for c, weight in enumerate(loaded):
            i = r * len(loaded) + c
            sums[i] = emit_fma(builder, value, weight, sums[i])
    return sums


def _scores(rows: int, groups: int) -> Any:
    """Make the intrinsic for scores of ``rows`` queries against ``groups`` lane groups of keys.

    ``queries`` [rows, dim], dim even. ``table`` [3, n] int64 gives for each group where its keys
    [dim, 16] begin, where its scores go, and where its values begin; the groups are ``first`` and
    those after it. ``k_shift`` and ``v_shift`` are added to the places of keys and values. Row r's
    scores are ``stride`` elements behind those of row r - 1.
    """

    def codegen(context, builder, signature, args):
        queries, dim, keys, k_shift, values, v_shift, table, length, first, scores, stride = args
        q_type, k_type, v_type, t_type, s_type = (signature.args[i] for i in (0, 2, 4, 6, 9))

        def entry(line: int, c: int) -> Any:
            at = builder.add(builder.mul(length, index(line)), builder.add(first, index(c)))
            return builder.load(emit_pointer(context, builder, t_type, table, at))

        def keys_of(c: int) -> Any:
            at = builder.add(entry(0, c), k_shift)
            return emit_pointer(context, builder, k_type, keys, at)

        places = [keys_of(c) for c in range(groups)]
        later = [keys_of(c + AHEAD_GROUPS) for c in range(groups)]
        # Values are needed right after all scores of the span.
        soon = [
            emit_pointer(context, builder, v_type, values, builder.add(entry(2, c), v_shift))
            for c in range(groups)
        ]
        lines = [
            emit_pointer(context, builder, q_type, queries, builder.mul(dim, index(r)))
            for r in range(rows)
        ]

        def step(k: Any, sums: list[Any]) -> list[Any]:
            at = builder.mul(k, index(LANES))
            for pointer in (*later, *soon):
                emit_prefetch(builder, builder.gep(pointer, [at]))
            for u in range(2):
                now = builder.add(k, index(u))
                place = builder.mul(now, index(LANES))
                sums = _multiply_add(
                    builder,
                    [builder.gep(pointer, [now]) for pointer in lines],
                    [builder.gep(pointer, [place]) for pointer in places],
                    k_type.dtype,
                    sums,
                )
            return sums

        sums = _sum(builder, dim, rows * groups, step)
        # Group by group: where blocks are short the next one's scores overwrite this one's excess.
        for c in range(groups):
            for r in range(rows):
                at = builder.add(entry(1, c), builder.mul(stride, index(r)))
                pointer = emit_pointer(context, builder, s_type, scores, at)
                target = builder.bitcast(pointer, VECTOR.as_pointer())
                builder.store(sums[r * groups + c], target, align=4)
        return context.get_dummy_value()

    i64 = types.int64

    @intrinsic
    def scores_tile(
        typingctx,
        queries,
        dim,
        keys,
        k_shift,
        values,
        v_shift,
        table,
        length,
        first,
        scores,
        stride,
    ):
        arguments = (queries, i64, keys, i64, values, i64, table, i64, i64, scores, i64)
        return types.void(*arguments), codegen

    return scores_tile


def _weighted(rows: int, panels: int) -> Any:
    """Make the intrinsic for ``rows`` weighted sums of ``panels`` times 16 columns of values.

    ``weights`` row r begins at ``r * stride``; value k, of ``count`` (even), begins at
    ``places[k] + shift``, its columns at ``column`` behind that. The sums go to ``out`` from
    ``column`` on, row r ``width`` elements behind row r - 1.
    """

    def codegen(context, builder, signature, args):
        weights, stride, values, shift, places, count, column, out, width = args
        w_type, v_type, p_type, o_type = (signature.args[i] for i in (0, 2, 4, 7))
        lines = [
            emit_pointer(context, builder, w_type, weights, builder.mul(stride, index(r)))
            for r in range(rows)
        ]
        base = emit_pointer(context, builder, v_type, values, builder.add(column, shift))
        where = emit_pointer(context, builder, p_type, places, index(0))

        def step(k: Any, sums: list[Any]) -> list[Any]:
            for u in range(2):
                now = builder.add(k, index(u))
                place = builder.load(builder.gep(where, [now]))
                sums = _multiply_add(
                    builder,
                    [builder.gep(pointer, [now]) for pointer in lines],
                    [
                        builder.gep(base, [builder.add(place, index(LANES * c))])
                        for c in range(panels)
                    ],
                    v_type.dtype,
                    sums,
                )
            return sums

        sums = _sum(builder, count, rows * panels, step)
        for r in range(rows):
            for c in range(panels):
                at = builder.add(builder.mul(width, index(r)), index(LANES * c))
                pointer = emit_pointer(context, builder, o_type, out, builder.add(at, column))
                target = builder.bitcast(pointer, VECTOR.as_pointer())
                builder.store(sums[r * panels + c], target, align=4)
        return context.get_dummy_value()

    i64 = types.int64

    @intrinsic
    def weighted_tile(typingctx, weights, stride, values, shift, places, count, column, out, width):
        return types.void(weights, i64, values, i64, places, i64, i64, out, i64), codegen

    return weighted_tile


# Compiled functions must see each tile as a global: numba cannot cache one that captures it.
# Eight or more independent sums hide the latency of a multiply-add; twelve fill the registers.
scores_1x4 = _scores(1, 4)
scores_2x2 = _scores(2, 2)
scores_3x1 = _scores(3, 1)
scores_4x1 = _scores(4, 1)
scores_5x1 = _scores(5, 1)
scores_6x1 = _scores(6, 1)
weighted_1x4, weighted_1x1 = _weighted(1, 4), _weighted(1, 1)
weighted_2x2, weighted_2x1 = _weighted(2, 2), _weighted(2, 1)
weighted_3x1 = _weighted(3, 1)
weighted_4x1 = _weighted(4, 1)
weighted_5x1 = _weighted(5, 1)
weighted_6x1 = _weighted(6, 1)
