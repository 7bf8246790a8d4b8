"""The one inner loop behind every matrix product: R rows times C panels of 16 columns.

    out[r, c, 0:16] = start + sum over k of x[r, k] * w[c, k, 0:16]        k = 0, 1, 2, …

Each output element has an accumulator register of its own and is summed over k in ascending
order, one fused multiply-add after the other. Which R and C serve it, and which rows stand beside
it, cannot change a bit of it: this is what makes the engine's results independent of the batch.
R and C only decide how many independent chains hide the latency of a multiply-add and how often
a loaded weight is used; R * C <= 6 keeps the 12 AVX2 accumulators, two weight registers and
a broadcast in 16.
"""

# Compiled functions are typed by numba, for the arrays they are called with.
# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="call-arg,var-annotated"

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from deepinfer.gpu_worker.kernels.vectors import (
    I1,
    I32,
    I64,
    LANES,
    VECTOR,
    VECTOR_I1,
    emit_fma,
    emit_load,
    emit_mask,
    emit_pointer,
    emit_prefetch,
    emit_splat,
    index,
    same,
)


def _tile(rows: int, panels: int, start: str, partial: bool = False, fetch: bool = True) -> Any:
    """Make the intrinsic for ``rows`` x ``panels``.

    Its arguments, all offsets and strides in elements:

    - ``x``, ``x_at``, ``x_row``: where row 0 begins and the stride between rows.
    - ``w``, ``w_at``, ``w_panel``, ``w_k``: where panel 0 begins, strides of panels and of k.
    - ``w_ahead``, ``w_skew``: how far beyond the weights in use lie those that should be in the
      cache next; for panel c this is ``w_ahead + c * w_skew``.
    - ``count``: terms of the sum.
    - ``out``, ``out_at``, ``out_row``: where the result goes; panels are 16 elements apart there.
    - ``bias``, ``bias_at``, ``add`` with start "bias": the sum begins at a float32 vector common to
      all rows, and is added to ``out`` where ``add`` is true.
    - ``columns``, with ``partial``: write only this many of the panel's 16 columns.

    Without ``fetch`` the weights are in the cache already and nothing is fetched ahead.

    With start "zero" the sum begins at 0, with "out" at what ``out`` holds.
    """

    def codegen(context, builder, signature, args):
        x, x_at, x_row, w, w_at, w_panel, w_k = args[:7]
        w_ahead, w_skew, count, out, out_at, out_row = args[7:13]
        x_type, w_type, out_type = (signature.args[i] for i in (0, 3, 10))
        x_rows = [
            emit_pointer(
                context, builder, x_type, x, builder.add(x_at, builder.mul(x_row, index(r)))
            )
            for r in range(rows)
        ]
        if panels == 1:
            x_rows = [in_register(builder, row) for row in x_rows]
        w_panels = [
            emit_pointer(
                context, builder, w_type, w, builder.add(w_at, builder.mul(w_panel, index(c)))
            )
            for c in range(panels)
        ]
        cells = [(r, c) for r in range(rows) for c in range(panels)]
        targets = {}
        for r, c in cells:
            at = builder.add(out_at, builder.add(builder.mul(out_row, index(r)), index(LANES * c)))
            targets[r, c] = emit_pointer(context, builder, out_type, out, at)

        def begin(r: int, c: int) -> Any:
            if start == "zero":
                return same(0.0)
            if start == "out":
                return emit_load(builder, targets[r, c], types.float32)
            at = builder.add(args[14], index(LANES * c))
            pointer = emit_pointer(context, builder, signature.args[13], args[13], at)
            return emit_load(builder, pointer, types.float32)

        def broadcast(pointer: Any) -> Any:
            return emit_splat(builder, builder.load(pointer, align=4))

        def loop(first: Any, last: Any, step: int, begins: list[Any]) -> list[Any]:
            """Accumulate k = first … last-1, ``step`` at a time."""
            before = builder.block
            body = builder.append_basic_block("sum")
            after = builder.append_basic_block("summed")
            builder.cbranch(builder.icmp_signed("<", first, last), body, after)
            builder.position_at_end(body)
            k = builder.phi(I64)
            k.add_incoming(first, before)
            sums = [builder.phi(VECTOR) for _ in cells]
            for phi, value in zip(sums, begins, strict=True):
                phi.add_incoming(value, before)
            current: list[Any] = list(sums)
            lines = step * LANES * (4 if w_type.dtype == types.float32 else 2) // 64
            for line in range(lines if fetch else 0):
                # Where w_k is LANES these are all lines of the step, elsewhere some of them.
                at = builder.mul(builder.add(k, index(line * step // lines)), w_k)
                for c, pointer in enumerate(w_panels):
                    skewed = builder.add(w_ahead, builder.mul(w_skew, index(c)))
                    emit_prefetch(builder, builder.gep(pointer, [builder.add(at, skewed)]))
            for u in range(step):
                at = builder.add(k, index(u))
                w_at_k = builder.mul(at, w_k)
                # Whichever are fewer, values of x or weights, wait in registers for all the others.
                values = [builder.gep(p, [at]) for p in x_rows]
                weights = [builder.gep(p, [w_at_k]) for p in w_panels]
                if rows < panels:
                    values = [broadcast(pointer) for pointer in values]
                    for c, pointer in enumerate(weights):
                        weight = emit_load(builder, pointer, w_type.dtype)
                        for r in range(rows):
                            i = r * panels + c
                            current[i] = emit_fma(builder, values[r], weight, current[i])
                else:
                    weights = [emit_load(builder, p, w_type.dtype) for p in weights]
                    for r, pointer in enumerate(values):
                        value = broadcast(pointer)
                        for c in range(panels):
                            i = r * panels + c
                            current[i] = emit_fma(builder, value, weights[c], current[i])
            following = builder.add(k, index(step))
            k.add_incoming(following, builder.block)
            for phi, value in zip(sums, current, strict=True):
                phi.add_incoming(value, builder.block)
            builder.cbranch(builder.icmp_signed("<", following, last), body, after)
            end = builder.block
            builder.position_at_end(after)
            results = [builder.phi(VECTOR) for _ in cells]
            for phi, value, done in zip(results, begins, current, strict=True):
                phi.add_incoming(value, before)
                phi.add_incoming(done, end)
            return results

        # Longer steps spend less on the loop itself, but with several panels LLVM then loads
        # weights so early that the sums no longer fit in registers.
        unroll = 4 if panels == 1 else 2
        whole = builder.sub(count, builder.srem(count, index(unroll)))
        sums = loop(index(0), whole, unroll, [begin(r, c) for r, c in cells])
        sums = loop(whole, count, 1, sums)

        if start != "bias":
            for cell, value in zip(cells, sums, strict=True):
                _store(builder, targets[cell], value)
            return context.get_dummy_value()
        mask = emit_mask(builder, index(0), args[16]) if partial else None
        add = args[15]
        for cell, value in zip(cells, sums, strict=True):
            with builder.if_else(builder.trunc(add, I1)) as (then, otherwise):
                with then:
                    held = _load_masked(builder, targets[cell], mask)
                    _store(builder, targets[cell], builder.fadd(value, held), mask)
                with otherwise:
                    _store(builder, targets[cell], value, mask)
        return context.get_dummy_value()

    i64 = types.int64

    def place(x: Any, w: Any, out: Any) -> list[Any]:
        return [x, i64, i64, w, i64, i64, i64, i64, i64, i64, out, i64, i64]

    if start != "bias":

        @intrinsic
        def tile(
            typingctx, x, x_at, x_row, w, w_at, w_panel, w_k, w_ahead, w_skew,
            count, out, out_at, out_row,
        ):  # fmt: skip
            return types.void(*place(x, w, out)), codegen

        return tile

    if not partial:

        @intrinsic
        def tile_bias(
            typingctx, x, x_at, x_row, w, w_at, w_panel, w_k, w_ahead, w_skew,
            count, out, out_at, out_row,
            bias, bias_at, add,
        ):  # fmt: skip
            return types.void(*place(x, w, out), bias, i64, types.boolean), codegen

        return tile_bias

    @intrinsic
    def tile_partial(
        typingctx, x, x_at, x_row, w, w_at, w_panel, w_k, w_ahead, w_skew,
            count, out, out_at, out_row,
        bias, bias_at, add, columns,
    ):  # fmt: skip
        return types.void(*place(x, w, out), bias, i64, types.boolean, i64), codegen

    return tile_partial


def in_register(builder: Any, pointer: Any) -> Any:
    """The same pointer, of which the optimiser does not know how it came about.

    Knowing the common stride of the rows, it would keep two or three registers and work out the
    addresses of the other rows from them at every step: a tenth of all instructions, and measured
    on a busy machine, 6 to 10 % of the time.
    """
    kind = ir.FunctionType(pointer.type, [pointer.type])
    return builder.asm(kind, "", "=r,0", [pointer], False)


def _store(builder: Any, pointer: Any, value: Any, mask: Any = None) -> None:
    vector_pointer = builder.bitcast(pointer, VECTOR.as_pointer())
    if mask is None:
        builder.store(value, vector_pointer, align=4)
        return
    signature = ir.FunctionType(ir.VoidType(), [VECTOR, vector_pointer.type, I32, VECTOR_I1])
    store = cgutils.get_or_insert_function(builder.module, signature, "llvm.masked.store.v16f32.p0")
    builder.call(store, [value, vector_pointer, ir.Constant(I32, 4), mask])


def _load_masked(builder: Any, pointer: Any, mask: Any) -> Any:
    if mask is None:
        return emit_load(builder, pointer, types.float32)
    vector_pointer = builder.bitcast(pointer, VECTOR.as_pointer())
    signature = ir.FunctionType(VECTOR, [vector_pointer.type, I32, VECTOR_I1, VECTOR])
    load = cgutils.get_or_insert_function(builder.module, signature, "llvm.masked.load.v16f32.p0")
    return builder.call(load, [vector_pointer, ir.Constant(I32, 4), mask, same(0.0)])


@intrinsic
def prefetch(typingctx, array, offset):
    """Ask for the cache line of element ``offset``; beyond the array's end it is harmless."""

    def codegen(context, builder, signature, args):
        emit_prefetch(builder, emit_pointer(context, builder, signature.args[0], *args))
        return context.get_dummy_value()

    return types.void(array, types.int64), codegen


# Compiled functions must see each tile as a global: numba cannot cache one that captures it.
bias_1x1 = _tile(1, 1, "bias")
bias_1x2 = _tile(1, 2, "bias")
bias_1x4 = _tile(1, 4, "bias")
bias_2x1 = _tile(2, 1, "bias")
bias_2x3 = _tile(2, 3, "bias")
bias_3x1 = _tile(3, 1, "bias")
bias_3x2 = _tile(3, 2, "bias")
bias_4x1 = _tile(4, 1, "bias")
bias_5x1 = _tile(5, 1, "bias")
bias_6x1 = _tile(6, 1, "bias")
near_1x1 = _tile(1, 1, "out", fetch=False)
near_2x1 = _tile(2, 1, "out", fetch=False)
near_3x1 = _tile(3, 1, "out", fetch=False)
near_4x1 = _tile(4, 1, "out", fetch=False)
near_5x1 = _tile(5, 1, "out", fetch=False)
near_6x1 = _tile(6, 1, "out", fetch=False)
partial_1x1 = _tile(1, 1, "bias", partial=True)
zero_1x1 = _tile(1, 1, "zero", fetch=False)
zero_2x1 = _tile(2, 1, "zero", fetch=False)
zero_3x1 = _tile(3, 1, "zero", fetch=False)
zero_4x1 = _tile(4, 1, "zero", fetch=False)
zero_5x1 = _tile(5, 1, "zero", fetch=False)
zero_6x1 = _tile(6, 1, "zero", fetch=False)
