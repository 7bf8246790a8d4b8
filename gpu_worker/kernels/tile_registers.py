"""The processor's tile registers (Intel AMX): 16 rows times 16 columns in one instruction.

A tile of activations holds 16 rows of 64 bytes, one of weights 64 bytes for each of 16 columns, and
what it adds to 16 x 16 sums are 32 products of bfloat16, or 64 of bytes, for each of them. Weights
lie in memory as the vector units take them: four bytes of one column beside those of the next.

For each sum, ``tdpbf16ps`` adds up the 16 even products of a tile in ascending order, and the odd
ones, adds the two, and adds that to what was there; denormals count as zero (Intel Architecture
Instruction Set Extensions Programming Reference, chapter 3). Rows do not touch each other, so how
many of them there are cannot change a bit, but another instruction would: what is to be the same in
any company takes this one for a single row too. Sums of bytes are exact.

The eight registers are 0 to 3 for sums, and 4 to 7 for activations and weights.
"""

# Compiled functions are typed by numba, for the arrays they are called with.
# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="call-arg,var-annotated"

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir

from deepinfer.gpu_worker.kernels.settings import tiles_are_lent
from deepinfer.gpu_worker.kernels.vectors import (
    I8,
    I64,
    emit_choice,
    emit_pointer,
    emit_prefetch,
    index,
)

# numba comes after the kernels' settings.
from numba import types  # isort: skip
from numba.core import cgutils  # isort: skip
from numba.extending import intrinsic  # isort: skip

TILE = 16
"""Rows, and columns, of a tile of sums."""
RUN_BYTES = 64
"""Of a row of activations, and of 16 columns of weights, in a tile."""
_NEEDS = ("amx-tile", "amx-bf16", "amx-int8", "avx512bf16", "avx512vnni")


def available(features: Mapping[str, bool]) -> bool:
    """Whether a machine with these features has tile registers, and the system lends them."""
    return all(features.get(need) for need in _NEEDS) and tiles_are_lent()


HAS_TILES = available(llvm.get_host_cpu_features())

_POINTER = I8.as_pointer()
_CONFIG_BYTES = 64


def _configuration(rows: int) -> bytes:
    """``LDTILECFG``'s operand: of tiles 0 to 4 only some rows exist, of 5 to 7 all."""
    config = bytearray(_CONFIG_BYTES)
    config[0] = 1  # the palette
    for tile in range(8):
        config[16 + 2 * tile] = RUN_BYTES
        config[48 + tile] = rows if tile < 5 else TILE
    return bytes(config)


_CONFIGURATIONS = b"".join(_configuration(rows) for rows in range(1, TILE + 1))


def _call(builder: Any, name: str, *args: Any) -> None:
    kind = ir.FunctionType(ir.VoidType(), [arg.type for arg in args])
    builder.call(cgutils.get_or_insert_function(builder.module, kind, f"llvm.x86.{name}"), args)


def _register(number: int) -> ir.Constant:
    return ir.Constant(I8, number)


@intrinsic
def begin_tiles(typingctx, rows):
    """Let the tiles of this thread have ``rows`` rows, 1 to 16; all are zero afterwards.

    Some hundred cycles, and a larger state to keep for the thread until ``end_tiles``.
    """

    def codegen(context, builder, signature, args):
        data = ir.Constant(ir.ArrayType(I8, len(_CONFIGURATIONS)), bytearray(_CONFIGURATIONS))
        table = cgutils.global_constant(builder, "tile_configurations", data)
        at = builder.mul(builder.sub(args[0], index(1)), index(_CONFIG_BYTES))
        _call(builder, "ldtilecfg", builder.gep(builder.bitcast(table, _POINTER), [at]))
        return context.get_dummy_value()

    return types.void(types.int64), codegen


@intrinsic
def end_tiles(typingctx):
    """Give the tiles of this thread back."""

    def codegen(context, builder, signature, args):
        _call(builder, "tilerelease")
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def multiply_four(typingctx):
    """Multiply what the tiles hold, four times: what the machine does at best."""

    def codegen(context, builder, signature, args):
        for i in range(4):
            _call(builder, "tdpbf16ps", _register(i), _register(4 + i // 2), _register(6 + i % 2))
        return context.get_dummy_value()

    return types.void(), codegen


def emit_sums(
    builder: Any,
    shape: tuple[int, int],
    instruction: str,
    x_rows: list[Any],
    x_stride: Any,
    weights: list[Any],
    w_stride: Any,
    w_step: Any,
    steps: Any,
    fetch: Any,
    asked: Any,
) -> None:
    """Add the products of ``shape`` tiles to their sums, for ``steps`` runs of activations.

    ``x_rows`` and ``weights`` are pointers to the first tile of each row and column of tiles,
    strides are between the lines of a tile and ``w_step`` from one run to the next, in bytes.
    At each step ``asked`` lines from ``fetch`` on are asked for, into the L2 cache.
    """
    high, wide = shape
    before = builder.block
    body = builder.append_basic_block("sum")
    ask = builder.append_basic_block("ask")
    on = builder.append_basic_block("on")
    after = builder.append_basic_block("summed")
    builder.branch(body)

    builder.position_at_end(body)
    step = builder.phi(I64)
    step.add_incoming(index(0), before)
    fetched = builder.phi(_POINTER)
    fetched.add_incoming(fetch, before)
    x_at = builder.mul(step, index(RUN_BYTES))
    w_at = builder.mul(step, w_step)
    # In an order in which each waits for one tile that was not there before.
    first = 4
    for c in range(wide):
        w_tile = (6 + c % 2) if high == 2 else 5 + c % 3
        _call(builder, "tileloadd64", _register(w_tile), builder.gep(weights[c], [w_at]), w_stride)
        for r in range(high):
            if c == 0:
                place = builder.gep(x_rows[r], [x_at])
                _call(builder, "tileloadd64", _register(first + r), place, x_stride)
            sums = _register(r * wide + c)
            _call(builder, instruction, sums, _register(first + r), _register(w_tile))
    end = builder.gep(fetched, [builder.mul(asked, index(RUN_BYTES))])
    builder.cbranch(builder.icmp_unsigned("<", fetched, end), ask, on)

    builder.position_at_end(ask)
    line = builder.phi(_POINTER)
    line.add_incoming(fetched, body)
    emit_prefetch(builder, line, level=2)
    following = builder.gep(line, [index(RUN_BYTES)])
    line.add_incoming(following, ask)
    builder.cbranch(builder.icmp_unsigned("<", following, end), ask, on)

    builder.position_at_end(on)
    done = builder.add(step, index(1))
    step.add_incoming(done, on)
    fetched.add_incoming(end, on)
    builder.cbranch(builder.icmp_signed("<", done, steps), body, after)
    builder.position_at_end(after)


def make_tiles(instruction: str, shapes: list[tuple[int, int]], line: int) -> Any:
    """Make an intrinsic that computes ``shapes[shape]`` tiles of products by ``instruction``.

    A shape is one or two tiles of rows, and one to four or one or two of columns; ``line`` is the
    bytes of weights from one line of a tile to the next, and an instruction's 16 lines come before
    those of the next. The arguments, all offsets and strides in elements:

    - ``x``, ``x_at``, ``x_row``, ``second``: activations, where the first row begins, the stride
      between rows, and how many rows below it the second tile begins.
    - ``w``, ``w_at``, ``w_tile``, ``steps``: weights, where the first tile's begin, the stride
      between tiles of columns, and how many times 64 bytes of a row are summed.
    - ``start``, ``start_at``, ``start_row``: what the sums begin with, laid out like ``out``; a
      row that all share has stride 0. Where ``start`` is None they begin at 0.
    - ``out``, ``out_at``, ``out_row``: where the sums go, float32 or int32; tiles of columns are 16
      apart there.
    - ``fetch``, ``asked``: weights that should be in the cache next, and how many lines of them to
      ask for at each step.
    """

    def codegen(context, builder, signature, args):
        x, x_at, x_row, second, w, w_at, w_tile, steps = args[:8]
        start, start_at, start_row, out, out_at, out_row, fetch, asked, shape = args[8:]
        kinds = {
            name: signature.args[i] for name, i in {"x": 0, "w": 4, "start": 8, "out": 11}.items()
        }

        def place(name: str, array: Any, at: Any, stride: Any, count: Any) -> Any:
            at = builder.add(at, builder.mul(stride, count))
            pointer = emit_pointer(context, builder, kinds[name], array, at)
            return builder.bitcast(pointer, _POINTER)

        def emit(n: int) -> None:
            high, wide = shapes[n]
            rows = [index(0), second][:high]
            cells = [(r, c) for r in range(high) for c in range(wide)]

            def sums(name: str, array: Any, at: Any, stride: Any, call: str) -> None:
                for i, (r, c) in enumerate(cells):
                    here = place(name, array, builder.add(at, index(TILE * c)), stride, rows[r])
                    _call(builder, call, _register(i), here, builder.mul(stride, index(4)))

            if kinds["start"] == types.none:
                for i in range(len(cells)):
                    _call(builder, "tilezero", _register(i))
            else:
                sums("start", start, start_at, start_row, "tileloadd64")
            emit_sums(
                builder,
                shapes[n],
                instruction,
                [place("x", x, x_at, x_row, row) for row in rows],
                builder.mul(x_row, index(kinds["x"].dtype.bitwidth // 8)),
                [place("w", w, w_at, w_tile, index(c)) for c in range(wide)],
                index(line),
                index(TILE * line),
                steps,
                place("w", w, fetch, index(0), index(0)),
                asked,
            )
            sums("out", out, out_at, out_row, "tilestored64")

        emit_choice(builder, shape, len(shapes), emit)
        return context.get_dummy_value()

    i64 = types.int64

    @intrinsic
    def tiles(
        typingctx, x, x_at, x_row, second, w, w_at, w_tile, steps,
        start, start_at, start_row, out, out_at, out_row, fetch, asked, shape,
    ):  # fmt: skip
        return types.void(
            x, i64, i64, i64, w, i64, i64, i64,
            start, i64, i64, out, i64, i64, i64, i64, i64,
        ), codegen  # fmt: skip

    return tiles


# Compiled functions must see it as a global: numba cannot cache one that captures it.
_PAIR_SHAPES = [(1, 1), (1, 2), (1, 4), (2, 1), (2, 2)]
pair_tiles = make_tiles("tdpbf16ps", _PAIR_SHAPES, RUN_BYTES)
"""Of bfloat16. Rows x columns of tiles are shape ``(rows - 1) * 3 + columns // 2``."""
