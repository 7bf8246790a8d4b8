"""The inner loop of int8 matrix products: R rows times a panel of columns.

    out[r, n] = bias[n] + (sum over k of xq[r, k] * wq[k, n]) * (sx[r] * sw[n])

The sum is an exact int32, so its order, and which instructions form it, cannot change a bit.
A row of activations is ``depth`` int8, then sx as float32 and the sum of xq as int32.
"""

# Compiled functions are typed by numba, for the arrays they are called with.
# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="call-arg,var-annotated"

from __future__ import annotations

from typing import Any

from numba import types
from numba.extending import intrinsic

from deepinfer.gpu_worker.kernels.byte_dot import HOST, RUN, Dot
from deepinfer.gpu_worker.kernels.byte_product import COLUMNS, for_rows
from deepinfer.gpu_worker.kernels.micro_kernel import in_register
from deepinfer.gpu_worker.kernels.vectors import (
    F32,
    I1,
    I32,
    I64,
    LANES,
    VECTOR,
    emit_fma,
    emit_load,
    emit_pointer,
    emit_prefetch,
    emit_splat,
    index,
)

STEP = 16
"""Terms of a sum between two looks at its end; K is padded to a multiple of them."""
ACTIVATION_TAIL = 64
"""Bytes after the values of a row: as many as make the next one begin on a cache line too."""


def make_tile(columns: int, lowering: str) -> Any:
    """Make the intrinsic for 1 to ``ROWS`` rows and ``columns``, a multiple of 16.

    Its arguments, all offsets and strides in elements:

    - ``x``, ``x_at``, ``x_row``, ``depth``: activations (uint8), where row 0 begins, the stride
      between rows, and how many terms a sum has, a multiple of ``STEP``.
    - ``w``, ``w_at``: weights (uint8 [depth / 4][columns][4]), and where they begin.
    - ``following``, ``stride``: where the weights lie that should be in the cache next; it asks for
      as many lines as it uses itself, ``stride`` apart.
    - ``sw``, ``bias``, ``n``: scales and biases of the columns, and which is the first.
    - ``out``, ``out_at``, ``out_row``, ``add``: where the result goes, and whether what is there is
      added to it.
    - ``rows``: how many; for each there is code of its own.
    """

    def emit(context, builder, signature, args, rows):
        x, x_at, x_row, depth, w, w_at, following, stride = args[:8]
        sw, bias, n, out, out_at, out_row, add = args[8:]
        names = {"x": 0, "w": 4, "sw": 8, "bias": 9, "out": 11}
        kinds = {name: signature.args[i] for name, i in names.items()}

        def place(name: str, array: Any, at: Any, stride: Any, i: int) -> Any:
            at = builder.add(at, builder.mul(stride, index(i)))
            return emit_pointer(context, builder, kinds[name], array, at)

        dot = Dot(builder, lowering, 8)
        vectors = columns // LANES
        cells = [(r, c) for r in range(rows) for c in range(vectors)]
        x_rows = [in_register(builder, place("x", x, x_at, x_row, r)) for r in range(rows)]
        ask = in_register(builder, place("w", w, following, stride, 0))
        panel = in_register(builder, place("w", w, w_at, stride, 0))

        before = builder.block
        body = builder.append_basic_block("sum")
        after = builder.append_basic_block("summed")
        builder.branch(body)
        builder.position_at_end(body)
        k = builder.phi(I64)
        k.add_incoming(index(0), before)
        fetched = builder.phi(ask.type)
        fetched.add_incoming(ask, before)
        asked = fetched
        phis = []
        for _ in cells:
            phis.append([builder.phi(dot.held) for _ in range(dot.parts)])
            for phi, zero in zip(phis[-1], dot.begin(), strict=True):
                phi.add_incoming(zero, before)
        totals: list[list[Any]] = list(phis)
        x_k = [builder.gep(pointer, [k]) for pointer in x_rows]
        w_k = builder.gep(panel, [builder.mul(k, index(columns))])
        for four in range(STEP // 4):
            weights = []
            for c in range(vectors):
                run = builder.gep(w_k, [index((four * vectors + c) * RUN)])
                emit_prefetch(builder, asked, level=2)
                asked = builder.gep(asked, [stride])
                weights.append(dot.weights(run))
            for r in range(rows):
                activations = dot.activations(builder.gep(x_k[r], [index(4 * four)]))
                for c in range(vectors):
                    i = r * vectors + c
                    totals[i] = dot.add(totals[i], weights[c], activations)
        more = builder.add(k, index(STEP))
        k.add_incoming(more, builder.block)
        fetched.add_incoming(asked, builder.block)
        for held, total in zip(phis, totals, strict=True):
            for phi, value in zip(held, total, strict=True):
                phi.add_incoming(value, builder.block)
        builder.cbranch(builder.icmp_signed("<", more, depth), body, after)

        builder.position_at_end(after)
        for (r, c), total in zip(cells, totals, strict=True):
            tail = builder.gep(x_rows[r], [depth])
            scale = builder.load(builder.bitcast(tail, F32.as_pointer()), align=4)
            tail = builder.gep(tail, [index(4)])
            row_sum = builder.load(builder.bitcast(tail, I32.as_pointer()), align=4)
            value = builder.sitofp(dot.end(total, row_sum), VECTOR)
            scales = emit_load(builder, place("sw", sw, n, index(LANES), c), types.float32)
            begin = emit_load(builder, place("bias", bias, n, index(LANES), c), types.float32)
            value = emit_fma(
                builder, value, builder.fmul(emit_splat(builder, scale), scales), begin
            )
            target = builder.gep(place("out", out, out_at, out_row, r), [index(LANES * c)])
            vector = builder.bitcast(target, VECTOR.as_pointer())
            with builder.if_else(builder.trunc(add, I1)) as (then, otherwise):
                with then:
                    held = emit_load(builder, target, types.float32)
                    builder.store(builder.fadd(value, held), vector, align=4)
                with otherwise:
                    builder.store(value, vector, align=4)

    def codegen(context, builder, signature, args):
        *args, rows = args
        for_rows(builder, rows, lambda r: emit(context, builder, signature, args, r))
        return context.get_dummy_value()

    i64 = types.int64

    @intrinsic
    def tile(
        typingctx, x, x_at, x_row, depth, w, w_at, following, stride,
        sw, bias, n, out, out_at, out_row, add, rows,
    ):  # fmt: skip
        return types.void(
            x, i64, i64, i64, w, i64, i64, i64,
            sw, bias, i64, out, i64, i64, types.boolean, i64,
        ), codegen  # fmt: skip

    return tile


# Compiled functions must see it as a global: numba cannot cache one that captures it.
tile = make_tile(COLUMNS, HOST)
