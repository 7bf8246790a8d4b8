"""The inner loops of attention for few queries, which read keys and values as they are cached.

Both sum in ascending order with one accumulator register for each output element, like
``micro_kernel``, and differ from it in where the cached side lies: blocks are anywhere in memory,
so its places come from a table.

The other side, queries or weights, decides how a product is computed. Where it is float32, cached
numbers are widened and take a multiply-add each. Where it is bfloat16, two rows of cached numbers,
neighbours along the sum, become sixteen pairs for ``emit_dot``. Where it is factors, cached numbers
are widened as well, and their sums have the bits of a tile register's (``attention_runs``).
"""

# Compiled functions are typed by numba, for the arrays they are called with.
# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="call-arg,var-annotated"

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic, overload

from deepinfer.gpu_worker.kernels.attention_runs import emit_runs, emit_upper, emit_widened
from deepinfer.gpu_worker.kernels.attention_units import DIRECT_ROWS
from deepinfer.gpu_worker.kernels.micro_kernel import (
    WIDE_REGISTERS,
    emit_dot,
    emit_splat_pair,
    emit_widened_pairs,
)
from deepinfer.gpu_worker.kernels.settings import INNER
from deepinfer.gpu_worker.kernels.vectors import (
    F32,
    I32,
    I64,
    LANES,
    VECTOR,
    VECTOR_I16,
    VECTOR_I32,
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

# Lane groups or panels that tiles of 1 to 6 rows take at once. Eight or more independent sums hide
# the latency of a multiply-add; twelve fill the registers of AVX2, twenty-four those of AVX-512.
DIRECT_PANELS = (4, 4, 4, 4, 4, 4) if WIDE_REGISTERS else (4, 2, 1, 1, 1, 1)
# In runs a sum takes two registers while it is added up.
RUN_PANELS = (4, 4, 2, 2, 2, 2)


def direct_panels(factors: Any, rows: Any) -> Any:
    """How many a tile of ``rows`` rows takes at once, where it has ``factors``; an overload."""


@overload(direct_panels, jit_options={**INNER})
def _direct_panels_of(factors, rows):
    if factors.dtype == types.uint32:
        return lambda factors, rows: RUN_PANELS[rows - 1]
    return lambda factors, rows: DIRECT_PANELS[rows - 1]


class _Ahead:
    """Asks for what a thread will read next of the other half of a cache, in the order it lies.

    ``args`` from ``first`` on are the cache, numbers of ``blocks``, elements from a block to the
    next and to the part of it that is wanted, elements of that part, and how many elements of
    these parts, one after the other, were asked for before. Behind the last block it is the last
    again. A step asks for ``elements`` more.

    Into the L2 cache, for the L1 can wait for fewer lines at a time: plain reads get 20 GB/s from
    memory and reads asked for so 30. Block by block, for memory is read best in long pieces.
    """

    def __init__(
        self, context: Any, builder: Any, signature: Any, args: Any, first: int, elements: int
    ) -> None:
        cached, blocks, self._stride, shift, self._size, at = args[first : first + 6]
        self._builder = builder
        cached_type, blocks_type = signature.args[first : first + 2]
        self._cached = emit_pointer(context, builder, cached_type, cached, shift)
        self._blocks = emit_pointer(context, builder, blocks_type, blocks, index(0))
        count = context.make_array(blocks_type)(context, builder, blocks).nitems
        self._last = builder.sub(count, index(1))
        self._elements = elements
        self._line = 64 // (cached_type.dtype.bitwidth // 8)
        block = builder.sdiv(at, self._size)
        self.begins = [self._in_range(block), builder.srem(at, self._size)]

    def _in_range(self, block: Any) -> Any:
        beyond = self._builder.icmp_signed(">", block, self._last)
        return self._builder.select(beyond, self._last, block)

    def ask(self, block: Any, within: Any, steps: int = 1) -> list[Any]:
        """Ask for the lines of some steps; return block and place of the next."""
        builder = self._builder
        number = builder.load(builder.gep(self._blocks, [block]))
        at = builder.add(builder.mul(number, self._stride), within)
        for i in range(0, steps * self._elements, self._line):
            emit_prefetch(builder, builder.gep(self._cached, [builder.add(at, index(i))]), level=2)
        within = builder.add(within, index(steps * self._elements))
        over = builder.icmp_signed(">=", within, self._size)
        following = self._in_range(builder.add(block, index(1)))
        return [
            builder.select(over, following, block),
            builder.select(over, index(0), within),
        ]


def _sum(builder: Any, count: Any, cells: int, step: Any, ahead: _Ahead) -> list[Any]:
    """Emit ``for k in range(0, count, 2)``; ``step(k, sums)`` returns the sums after k and k+1.

    At each step ``ahead`` asks for lines.
    """
    before = builder.block
    body, after = (builder.append_basic_block(name) for name in ("sum", "summed"))
    builder.branch(body)
    builder.position_at_end(body)
    k = builder.phi(I64)
    k.add_incoming(index(0), before)
    sums = [builder.phi(VECTOR) for _ in range(cells)]
    for phi in sums:
        phi.add_incoming(same(0.0), before)
    asked = [builder.phi(I64) for _ in ahead.begins]
    for phi, value in zip(asked, ahead.begins, strict=True):
        phi.add_incoming(value, before)
    asked_then = ahead.ask(*asked)
    done: list[Any] = step(k, list(sums))
    following = builder.add(k, index(2))
    k.add_incoming(following, builder.block)
    for phi, value in zip(sums + asked, done + asked_then, strict=True):
        phi.add_incoming(value, builder.block)
    builder.cbranch(builder.icmp_signed("<", following, count), body, after)
    builder.position_at_end(after)
    return done


def emit_paired(builder: Any, first: Any, second: Any, element: Any) -> Any:
    """Two vectors of a cache, given by their addresses, as sixteen pairs of bfloat16."""
    if element == types.int8:
        # Integers of a byte are bfloat16 as they are, in the upper halves of floats.
        halves = [
            builder.bitcast(emit_load(builder, pointer, element), VECTOR_I32)
            for pointer in (first, second)
        ]
        return builder.or_(builder.lshr(halves[0], same_int(16)), halves[1])
    halves = [
        builder.load(builder.bitcast(pointer, VECTOR_I16.as_pointer()), align=2)
        for pointer in (first, second)
    ]
    return builder.bitcast(emit_shuffle(builder, *halves, _INTERLEAVED), VECTOR_I32)


# Two rows of 16 as pairs.
_INTERLEAVED = [i // 2 + i % 2 * LANES for i in range(2 * LANES)]
# Two rows of 32 as twice 16 pairs, each quarter of a register for itself: this takes no port that
# multiplies. The first 16 pairs are columns 0-3, 8-11, 16-19 and 24-27, the other 16 the rest.
_UNPACKED = [
    [8 * q + 4 * half + i // 2 + i % 2 * 2 * LANES for q in range(4) for i in range(8)]
    for half in range(2)
]
# Back to columns 0-15 and 16-31.
_REPACKED = [
    [4 * (2 * half + q // 2) + i + q % 2 * LANES for q in range(4) for i in range(4)]
    for half in range(2)
]
# Even and odd columns of 32 back to columns 0-15 and 16-31.
_MERGED = [[half * 8 + i // 2 + i % 2 * LANES for i in range(LANES)] for half in range(2)]
_HALVES = ir.VectorType(ir.IntType(16), 2 * LANES)


def emit_shuffle(builder: Any, x: Any, y: Any, lanes: list[int]) -> Any:
    """The lanes of these numbers of two vectors behind one another."""
    mask = ir.Constant(ir.VectorType(I32, len(lanes)), lanes)
    return builder.shuffle_vector(x, y, mask)


def _emit_key_pairs(builder: Any, pointer: Any, element: Any) -> Any:
    """The pairs of two neighbouring dimensions of a lane group, which lie side by side."""
    if element == types.int8:
        return emit_paired(builder, pointer, builder.gep(pointer, [index(LANES)]), element)
    both = builder.load(builder.bitcast(pointer, _HALVES.as_pointer()), align=2)
    return builder.bitcast(emit_shuffle(builder, both, both, _INTERLEAVED), VECTOR_I32)


def _splits(panels: int, element: Any) -> bool:
    """Whether 32 values are taken as even and odd columns, which need no permutation each."""
    return bool(element == types.uint16) and panels % 2 == 0


def _unpacks(panels: int, element: Any) -> bool:
    """Whether ``_emit_value_pairs`` leaves columns for ``_REPACKED`` to put in order."""
    return bool(element != types.int8) and panels % 2 == 0


def _emit_value_pairs(
    builder: Any, first: Any, second: Any, panels: int, element: Any
) -> list[Any]:
    """The pairs of two values, by panels or as ``_UNPACKED`` has them."""
    if not _unpacks(panels, element):
        columns = [index(LANES * c) for c in range(panels)]
        return [
            emit_paired(builder, builder.gep(first, [c]), builder.gep(second, [c]), element)
            for c in columns
        ]
    pairs = []
    for c in range(0, panels, 2):
        places = (builder.gep(pointer, [index(LANES * c)]) for pointer in (first, second))
        x, y = (
            builder.load(builder.bitcast(place, _HALVES.as_pointer()), align=2) for place in places
        )
        for lanes in _UNPACKED:
            pairs.append(builder.bitcast(emit_shuffle(builder, x, y, lanes), VECTOR_I32))
    return pairs


def _add_floats(
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


def _add_vectors(
    builder: Any, values: list[Any], vectors: Iterable[Any], sums: list[Any]
) -> list[Any]:
    """``sums[r, c] += values[r] * vectors[c]``, values given by their addresses, as uint32."""
    splats = [
        emit_splat(builder, builder.load(builder.bitcast(pointer, F32.as_pointer())))
        for pointer in values
    ]
    panels = len(sums) // len(values)
    for c, vector in enumerate(vectors):
        for r, value in enumerate(splats):
            i = r * panels + c
            sums[i] = emit_fma(builder, value, vector, sums[i])
    return sums


def _add_pairs(builder: Any, values: list[Any], pairs: list[Any], sums: list[Any]) -> list[Any]:
    """``sums[r, c]`` plus the dots of a pair at ``values[r]`` and sixteen pairs ``pairs[c]``."""
    for r, pointer in enumerate(values):
        value = emit_splat_pair(builder, pointer)
        for c, pair in enumerate(pairs):
            i = r * len(pairs) + c
            sums[i] = emit_dot(builder, sums[i], value, pair)
    return sums


def _emit_scores(
    context: Any, builder: Any, signature: Any, args: Any, rows: int, groups: int
) -> None:
    (
        queries, q_at, dim, keys, k_shift, table, length, first, scores, s_at, stride, *_
    ) = args  # fmt: skip
    q_type, k_type, t_type, s_type = (signature.args[i] for i in (0, 3, 5, 8))

    def entry(line: int, c: int) -> Any:
        at = builder.add(builder.mul(length, index(line)), builder.add(first, index(c)))
        return builder.load(emit_pointer(context, builder, t_type, table, at))

    def keys_of(c: int) -> Any:
        at = builder.add(entry(0, c), k_shift)
        return emit_pointer(context, builder, k_type, keys, at)

    def query(r: int) -> Any:
        at = builder.add(q_at, builder.mul(dim, index(r)))
        return emit_pointer(context, builder, q_type, queries, at)

    places = [keys_of(c) for c in range(groups)]
    lines = [query(r) for r in range(rows)]

    def step(k: Any, sums: list[Any]) -> list[Any]:
        at = builder.mul(k, index(LANES))
        if q_type.dtype != types.float32:
            return _add_pairs(
                builder,
                [builder.gep(pointer, [k]) for pointer in lines],
                [_emit_key_pairs(builder, builder.gep(p, [at]), k_type.dtype) for p in places],
                sums,
            )
        for u in range(2):
            now = builder.add(k, index(u))
            place = builder.mul(now, index(LANES))
            sums = _add_floats(
                builder,
                [builder.gep(pointer, [now]) for pointer in lines],
                [builder.gep(pointer, [place]) for pointer in places],
                k_type.dtype,
                sums,
            )
        return sums

    def step_in_run(k: Any, even: list[Any], odd: list[Any]) -> tuple[list[Any], list[Any]]:
        at = builder.mul(k, index(LANES))
        here = [builder.gep(pointer, [at]) for pointer in places]
        done = []
        for u, sums in enumerate((even, odd)):
            values = [builder.gep(pointer, [builder.add(k, index(u))]) for pointer in lines]
            vectors = (emit_widened(builder, pointer, k_type.dtype, u, upper) for pointer in here)
            done.append(_add_vectors(builder, values, vectors, sums))
        return done[0], done[1]

    ahead = _Ahead(context, builder, signature, args, 11, 2 * LANES * groups)
    if q_type.dtype == types.uint32:
        upper = emit_upper(builder)
        sums = emit_runs(builder, dim, rows * groups, step_in_run, ahead, rows <= 3)
    else:
        sums = _sum(builder, dim, rows * groups, step, ahead)
    # Group by group: where blocks are short the next one's scores overwrite this one's excess.
    for c in range(groups):
        for r in range(rows):
            at = builder.add(entry(1, c), builder.mul(stride, index(r)))
            pointer = emit_pointer(context, builder, s_type, scores, builder.add(s_at, at))
            target = builder.bitcast(pointer, VECTOR.as_pointer())
            builder.store(sums[r * groups + c], target, align=4)


@intrinsic
def direct_scores(
    typingctx, queries, q_at, dim, keys, k_shift, table, length, first, scores, s_at, stride,
    values, blocks, block_stride, block_shift, size, asked, rows,
):  # fmt: skip
    """Scores of ``rows`` queries against ``direct_panels`` lane groups of keys.

    ``queries`` [rows, dim], dim even, from ``q_at`` on. ``table`` [2, n] int64 gives for each group
    where its keys [dim, 16] begin, ``k_shift`` to be added, and where its scores go; the groups are
    ``first`` and those after it. Row r's scores are ``stride`` elements behind those of row r - 1,
    row 0's at ``s_at``. As many values are asked for as there are keys, see ``_Ahead``.
    """

    def codegen(context, builder, signature, args):
        def emit(n: int) -> None:
            _emit_scores(context, builder, signature, args, n + 1, panels[n])

        panels = RUN_PANELS if signature.args[0].dtype == types.uint32 else DIRECT_PANELS
        emit_choice(builder, builder.sub(args[17], index(1)), DIRECT_ROWS, emit)
        return context.get_dummy_value()

    i64 = types.int64
    return types.void(
        queries, i64, i64, keys, i64, table, i64, i64, scores, i64, i64,
        values, blocks, i64, i64, i64, i64, i64,
    ), codegen  # fmt: skip


def _emit_weighted(
    context: Any, builder: Any, signature: Any, args: Any, rows: int, panels: int
) -> None:
    (
        weights, w_at, stride, values, shift, places, count, column, out, o_at, width, *_
    ) = args  # fmt: skip
    w_type, v_type, p_type, o_type = (signature.args[i] for i in (0, 3, 5, 8))
    paired = w_type.dtype == types.uint16
    in_runs = w_type.dtype == types.uint32

    def weights_of(r: int) -> Any:
        at = builder.add(w_at, builder.mul(stride, index(r)))
        return emit_pointer(context, builder, w_type, weights, at)

    lines = [weights_of(r) for r in range(rows)]
    base = emit_pointer(context, builder, v_type, values, builder.add(column, shift))
    where = emit_pointer(context, builder, p_type, places, index(0))

    def step(k: Any, sums: list[Any]) -> list[Any]:
        both = [
            builder.gep(base, [builder.load(builder.gep(where, [builder.add(k, index(u))]))])
            for u in range(2)
        ]
        if paired:
            return _add_pairs(
                builder,
                [builder.gep(pointer, [k]) for pointer in lines],
                _emit_value_pairs(builder, *both, panels, v_type.dtype),
                sums,
            )
        for u in range(2):
            sums = _add_floats(
                builder,
                [builder.gep(pointer, [builder.add(k, index(u))]) for pointer in lines],
                [builder.gep(both[u], [index(LANES * c)]) for c in range(panels)],
                v_type.dtype,
                sums,
            )
        return sums

    def step_in_run(k: Any, even: list[Any], odd: list[Any]) -> tuple[list[Any], list[Any]]:
        done = []
        for u, sums in enumerate((even, odd)):
            now = builder.add(k, index(u))
            value = builder.gep(base, [builder.load(builder.gep(where, [now]))])
            if _splits(panels, v_type.dtype):
                vectors = []
                for c in range(0, panels, 2):
                    place = builder.gep(value, [index(LANES * c)])
                    place = builder.bitcast(place, VECTOR_I32.as_pointer())
                    vectors += emit_widened_pairs(builder, builder.load(place, align=2))
            else:
                vectors = [
                    emit_load(builder, builder.gep(value, [index(LANES * c)]), v_type.dtype)
                    for c in range(panels)
                ]
            places = [builder.gep(pointer, [now]) for pointer in lines]
            done.append(_add_vectors(builder, places, vectors, sums))
        return done[0], done[1]

    ahead = _Ahead(context, builder, signature, args, 11, 2 * LANES * panels)
    if in_runs:
        sums = emit_runs(builder, count, rows * panels, step_in_run, ahead, rows <= 3)
    else:
        sums = _sum(builder, count, rows * panels, step, ahead)
    if paired and _unpacks(panels, v_type.dtype):
        for i in range(0, len(sums), 2):
            x, y = sums[i : i + 2]
            sums[i : i + 2] = [emit_shuffle(builder, x, y, lanes) for lanes in _REPACKED]
    if in_runs and _splits(panels, v_type.dtype):
        for i in range(0, len(sums), 2):
            x, y = sums[i : i + 2]
            sums[i : i + 2] = [emit_shuffle(builder, x, y, lanes) for lanes in _MERGED]
    for r in range(rows):
        for c in range(panels):
            at = builder.add(builder.mul(width, index(r)), index(LANES * c))
            at = builder.add(builder.add(at, column), o_at)
            pointer = emit_pointer(context, builder, o_type, out, at)
            target = builder.bitcast(pointer, VECTOR.as_pointer())
            builder.store(sums[r * panels + c], target, align=4)


@intrinsic
def direct_values(
    typingctx, weights, w_at, stride, values, shift, places, count, column, out, o_at, width,
    keys, blocks, block_stride, block_shift, size, asked, shape,
):  # fmt: skip
    """Weighted sums of 16 columns of values, times ``direct_panels`` or times one.

    The rows are ``shape + 1``; from 6 on ``shape - 5``, and the columns 16. ``weights`` row r
    begins at ``w_at + r * stride``; value k, of ``count`` (even), begins at ``places[k] + shift``,
    its columns at ``column`` behind that. The sums go to ``out`` from ``o_at + column`` on, row r
    ``width`` elements behind row r - 1. As many keys are asked for as there are values, see
    ``_Ahead``.
    """

    def codegen(context, builder, signature, args):
        def emit(n: int) -> None:
            panels = many[n] if n < DIRECT_ROWS else 1
            _emit_weighted(context, builder, signature, args, n % DIRECT_ROWS + 1, panels)

        many = RUN_PANELS if signature.args[0].dtype == types.uint32 else DIRECT_PANELS
        emit_choice(builder, args[17], 2 * DIRECT_ROWS, emit)
        return context.get_dummy_value()

    i64 = types.int64
    return types.void(
        weights, i64, i64, values, i64, places, i64, i64, out, i64, i64,
        keys, blocks, i64, i64, i64, i64, i64,
    ), codegen  # fmt: skip
