"""The one inner loop behind matrix products: R rows times C panels of 16 columns.

    out[r, c, 0:16] = start + sum over k of x[r, k] * w[c, k, 0:16]        k = 0, 1, 2, …

Each output element has an accumulator register of its own and is summed over k in ascending order.
Which R and C serve it, and which rows stand beside it, cannot change a bit of it: this is what
makes the engine's results independent of the batch. R and C only decide how many independent
chains hide the latency of a multiply-add and how often a loaded weight is used: up to 6 x 1 keeps
the sums, weights and a broadcast in the 16 registers of AVX2, up to 6 x 4 in the 32 of AVX-512.

Weights come in one of two forms, each a panel of 16 columns:

- float32 [K][16], taken term by term with a fused multiply-add;
- bfloat16 [K/2][16][2], pairs of terms side by side. Where x is bfloat16 as well, a pair is one
  instruction (``vdpbf16ps`` of AVX-512) that adds both products to the sum, rounding after each.
  Where x is float32, a shift and a mask widen the pair for two multiply-adds.
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

from deepinfer.gpu_worker.kernels.vectors import (
    I1,
    I32,
    I64,
    LANES,
    VECTOR,
    VECTOR_I16,
    VECTOR_I32,
    emit_bfloat16,
    emit_choice,
    emit_fma,
    emit_load,
    emit_pointer,
    emit_prefetch,
    emit_splat,
    index,
    same,
    same_int,
)

_FEATURES = llvm.get_host_cpu_features()
HAS_BF16_DOT = bool(_FEATURES.get("avx512bf16"))
"""Whether this machine multiplies pairs of bfloat16 in one instruction."""
WIDE_REGISTERS = bool(_FEATURES.get("avx512f"))
"""Whether a vector is one register of 32, not two of 16."""


class _BFloat(ir.Type):  # type: ignore[misc]
    """LLVM's bfloat, which llvmlite lacks."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


_PAIRS = ir.VectorType(_BFloat(), 2 * LANES)


def emit_widened_pairs(builder: Any, pairs: Any) -> list[Any]:
    """The first and the second of sixteen pairs of bfloat16, as floats."""
    first = builder.shl(pairs, same_int(16))
    second = builder.and_(pairs, same_int(-0x10000))
    return [builder.bitcast(half, VECTOR) for half in (first, second)]


def emit_dot(builder: Any, total: Any, x: Any, w: Any, native: bool = HAS_BF16_DOT) -> Any:
    """``total + x[2i] * w[2i] + x[2i+1] * w[2i+1]``, of sixteen pairs of bfloat16 each.

    The instruction takes the odd product first and counts denormals as zero; without it they
    are two multiply-adds in the same order.
    """
    if native:
        signature = ir.FunctionType(VECTOR, [VECTOR, _PAIRS, _PAIRS])
        name = "llvm.x86.avx512bf16.dpbf16ps.512"
        dot = cgutils.get_or_insert_function(builder.module, signature, name)
        return builder.call(dot, [total, *(builder.bitcast(v, _PAIRS) for v in (x, w))])
    (x_first, x_second), (w_first, w_second) = (emit_widened_pairs(builder, v) for v in (x, w))
    total = emit_fma(builder, x_second, w_second, total)
    return emit_fma(builder, x_first, w_first, total)


def emit_rounded(builder: Any, value: Any, native: bool = HAS_BF16_DOT) -> Any:
    """Sixteen floats as bfloat16, rounded to nearest even; denormals may become zero."""
    if native:
        half = builder.fptrunc(value, ir.VectorType(_BFloat(), LANES))
        return builder.bitcast(half, VECTOR_I16)
    return emit_bfloat16(builder, value)


def emit_pairs(builder: Any, pointer: Any) -> Any:
    """Sixteen pairs of bfloat16, as int32."""
    return builder.load(builder.bitcast(pointer, VECTOR_I32.as_pointer()), align=4)


def emit_splat_pair(builder: Any, pointer: Any) -> Any:
    """One pair of bfloat16 in every lane, as int32."""
    pair = builder.load(builder.bitcast(pointer, I32.as_pointer()), align=4)
    undefined = ir.Constant(VECTOR_I32, ir.Undefined)
    first = builder.insert_element(undefined, pair, ir.Constant(I32, 0))
    return builder.shuffle_vector(first, undefined, same_int(0))


def _emit_terms(
    builder: Any, x: list[Any], w: list[Any], kinds: tuple[Any, Any], sums: list[Any], native: bool
) -> list[Any]:
    """``sums`` after the one or two terms at these places of rows and panels."""
    x_kind, w_kind = kinds
    sums = list(sums)

    def add(values: list[Any], weights: list[Any], emit: Any) -> None:
        for r, value in enumerate(values):
            for c, weight in enumerate(weights):
                i = r * len(weights) + c
                sums[i] = emit(builder, value, weight, sums[i])

    def broadcast(offset: int) -> list[Any]:
        places = [builder.gep(pointer, [index(offset)]) for pointer in x]
        return [emit_splat(builder, builder.load(place, align=4)) for place in places]

    if w_kind == types.float32:
        add(broadcast(0), [emit_load(builder, pointer, w_kind) for pointer in w], emit_fma)
        return sums
    if x_kind == types.float32:
        for offset in range(2):
            # Loaded twice, for LLVM would keep the pairs in registers that the sums need.
            pairs = [emit_pairs(builder, in_register(builder, pointer)) for pointer in w]
            halves = [emit_widened_pairs(builder, pair)[offset] for pair in pairs]
            add(broadcast(offset), halves, emit_fma)
        return sums
    pairs = [emit_pairs(builder, pointer) for pointer in w]
    add(
        [emit_splat_pair(builder, pointer) for pointer in x],
        pairs,
        lambda builder, value, weight, total: emit_dot(builder, total, value, weight, native),
    )
    return sums


def _emit_tile(
    context: Any,
    builder: Any,
    arrays: tuple[Any, Any, Any],
    args: Any,
    shape: tuple[int, int],
    native: bool,
    ahead: Any = None,
    given: Any = None,
) -> None:
    """Emit a tile of a shape (rows, panels); ``arrays`` are the types of x, w and out.

    ``args`` are these, all offsets and strides in elements:

    - ``x``, ``x_at``, ``x_row``: where row 0 begins and the stride between rows.
    - ``w``, ``w_at``, ``w_panel``: where panel 0 begins and the stride between panels.
    - ``count``: terms of the sum, even where weights come in pairs.
    - ``out``, ``out_at``, ``out_row``: where the result goes; panels are 16 elements apart there.

    ``ahead`` is ``fetch`` and ``stride``: weights from ``fetch`` on should be in the cache next;
    for each line of weights in use the one ``stride`` elements further is asked for.

    The sums begin at 0, or where ``given`` says:

    - the type of ``start``, ``start``, ``start_at``, ``start_row``: laid out like ``out``; a bias
      that all rows share has stride 0.
    - ``add``: whether what ``out`` holds is added at the end.
    """
    rows, panels = shape
    x, x_at, x_row, w, w_at, w_panel, count, out, out_at, out_row = args
    x_type, w_type, out_type = arrays

    def place(array_type: Any, array: Any, at: Any, stride: Any, i: int) -> Any:
        at = builder.add(at, builder.mul(stride, index(i)))
        return in_register(builder, emit_pointer(context, builder, array_type, array, at))

    x_rows = [place(x_type, x, x_at, x_row, r) for r in range(rows)]
    w_panels = [place(w_type, w, w_at, w_panel, c) for c in range(panels)]

    def cells(array_type: Any, array: Any, at: Any, stride: Any) -> list[Any]:
        pointers = []
        for r in range(rows):
            for c in range(panels):
                here = builder.add(at, builder.add(builder.mul(stride, index(r)), index(LANES * c)))
                pointer = emit_pointer(context, builder, array_type, array, here)
                pointers.append(builder.bitcast(pointer, VECTOR.as_pointer()))
        return pointers

    targets = cells(out_type, out, out_at, out_row)
    begins = [same(0.0)] * len(targets)
    if given is not None:
        starts = cells(*given[:4])
        begins = [builder.load(pointer, align=4) for pointer in starts]
    terms = 1 if w_type.dtype == types.float32 else 2
    kinds = (x_type.dtype, w_type.dtype)
    weights = emit_pointer(context, builder, w_type, w, index(0))
    fetched = [] if ahead is None else [ahead[0]]

    def loop(first: Any, last: Any, step: int, begins: list[Any]) -> list[Any]:
        """Accumulate k = first … last-1, ``step`` at a time."""
        before = builder.block
        body = builder.append_basic_block("sum")
        after = builder.append_basic_block("summed")
        builder.cbranch(builder.icmp_signed("<", first, last), body, after)
        builder.position_at_end(body)
        k = builder.phi(I64)
        k.add_incoming(first, before)
        sums = [builder.phi(VECTOR) for _ in targets]
        for phi, value in zip(sums, begins, strict=True):
            phi.add_incoming(value, before)
        current: list[Any] = list(sums)
        if fetched:
            asked = asked_here = builder.phi(I64)
            asked_here.add_incoming(fetched[-1], before)
        for u in range(0, step, terms):
            at = builder.add(k, index(u))
            w_k = builder.mul(at, index(LANES))
            places = [builder.gep(p, [w_k]) for p in w_panels]
            for _ in places if fetched else ():
                # A term of one panel, or a pair of it, is a cache line.
                emit_prefetch(builder, builder.gep(weights, [asked]), level=2)
                asked = builder.add(asked, ahead[1])
            values = [builder.gep(p, [at]) for p in x_rows]
            current = _emit_terms(builder, values, places, kinds, current, native)
        following = builder.add(k, index(step))
        k.add_incoming(following, builder.block)
        for phi, value in zip(sums, current, strict=True):
            phi.add_incoming(value, builder.block)
        builder.cbranch(builder.icmp_signed("<", following, last), body, after)
        end = builder.block
        builder.position_at_end(after)
        results = [builder.phi(VECTOR) for _ in targets]
        for phi, value, done in zip(results, begins, current, strict=True):
            phi.add_incoming(value, before)
            phi.add_incoming(done, end)
        if fetched:
            asked_here.add_incoming(asked, end)
            asked_after = builder.phi(I64)
            asked_after.add_incoming(fetched[-1], before)
            asked_after.add_incoming(asked, end)
            fetched.append(asked_after)
        return results

    # Longer steps spend less on the loop itself, but with several panels LLVM then loads
    # weights so early that the sums no longer fit in registers.
    unroll = terms * (4 if rows * panels <= 8 else 2)
    whole = builder.sub(count, builder.srem(count, index(unroll)))
    sums = loop(index(0), whole, unroll, begins)
    sums = loop(whole, count, terms, sums)

    def finish(held: bool) -> None:
        for target, value in zip(targets, sums, strict=True):
            if held:
                value = builder.fadd(value, builder.load(target, align=4))
            builder.store(value, target, align=4)

    if given is None:
        finish(False)
        return
    with builder.if_else(builder.trunc(given[4], I1)) as (then, otherwise):
        with then:
            finish(True)
        with otherwise:
            finish(False)


def make_near_tiles(shapes: list[tuple[int, int]], native: bool = HAS_BF16_DOT) -> Any:
    """Make an intrinsic that is a tile of ``shapes[shape]``, its last argument; see ``_emit_tile``.

    Its weights are in a cache already, and its sums begin at 0.
    """

    def codegen(context, builder, signature, args):
        arrays = tuple(signature.args[i] for i in (0, 3, 7))

        def emit(n: int) -> None:
            _emit_tile(context, builder, arrays, args[:10], shapes[n], native)

        emit_choice(builder, args[10], len(shapes), emit)
        return context.get_dummy_value()

    i64 = types.int64

    @intrinsic
    def tiles(typingctx, x, x_at, x_row, w, w_at, w_panel, count, out, out_at, out_row, shape):
        return types.void(x, i64, i64, w, i64, i64, i64, out, i64, i64, i64), codegen

    return tiles


def make_tiles(shapes: list[tuple[int, int]], native: bool = HAS_BF16_DOT) -> Any:
    """Make an intrinsic that is a tile of ``shapes[shape]``, its last argument; see ``_emit_tile``.

    It asks for weights ``ahead``, and where its sums begin is ``given``.
    """

    def codegen(context, builder, signature, args):
        arrays = tuple(signature.args[i] for i in (0, 3, 7))
        given = (signature.args[12], *args[12:16])

        def emit(n: int) -> None:
            _emit_tile(
                context, builder, arrays, args[:10], shapes[n], native, args[10:12], given
            )  # fmt: skip

        emit_choice(builder, args[16], len(shapes), emit)
        return context.get_dummy_value()

    i64 = types.int64

    @intrinsic
    def tiles(
        typingctx, x, x_at, x_row, w, w_at, w_panel, count, out, out_at, out_row,
        fetch, stride, start, start_at, start_row, add, shape,
    ):  # fmt: skip
        return types.void(
            x, i64, i64, w, i64, i64, i64, out, i64, i64,
            i64, i64, start, i64, i64, types.boolean, i64,
        ), codegen  # fmt: skip

    return tiles


def in_register(builder: Any, pointer: Any) -> Any:
    """The same pointer, of which the optimiser does not know how it came about.

    Knowing the common stride of the rows, it would keep two or three registers and work out the
    addresses of the other rows from them at every step: a tenth of all instructions, and measured
    on a busy machine, 6 to 10 % of the time.
    """
    kind = ir.FunctionType(pointer.type, [pointer.type])
    return builder.asm(kind, "", "=r,0", [pointer], False)
