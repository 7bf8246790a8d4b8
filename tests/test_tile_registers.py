"""Products by the processor's tile registers: the instructions, and every bit of what they give."""

from __future__ import annotations

import llvmlite.binding as llvm
import numpy as np
import pytest
from llvmlite import ir

from deepinfer.gpu_worker.backend import RMSNorm
from deepinfer.gpu_worker.cpu_backend import CpuBackend
from deepinfer.gpu_worker.kernels import tile_registers
from deepinfer.gpu_worker.kernels.int8_tile import ACTIVATION_TAIL
from deepinfer.gpu_worker.kernels.linear_int8 import multiply_by_vectors
from deepinfer.gpu_worker.kernels.linear_int8_tiles import multiply_by_tiles
from deepinfer.gpu_worker.kernels.tile_registers import HAS_TILES, emit_sums

# numba comes after the kernels' settings.
from numba import njit  # isort: skip

I64 = ir.IntType(64)
POINTER = ir.IntType(8).as_pointer()
needs_tiles = pytest.mark.skipif(not HAS_TILES, reason="this machine has no tile registers")


@pytest.mark.parametrize(
    ("instruction", "shape"),
    [("tdpbf16ps", (1, 1)), ("tdpbf16ps", (1, 4)), ("tdpbf16ps", (2, 2))]
    + [("tdpbsud", (1, 2)), ("tdpbsud", (2, 2))],
)
def test_the_inner_loop_is_one_product_a_pair_of_tiles_and_one_load_a_tile(instruction, shape):
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    module = ir.Module()
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [POINTER] * 6 + [I64] * 5), "sum")
    builder = ir.IRBuilder(function.append_basic_block())
    high, wide = shape
    x, (*w, fetch) = function.args[:high], function.args[6 - wide - 1 : 6]
    x_stride, w_stride, w_step, steps, asked = function.args[6:]
    emit_sums(
        builder, shape, instruction, x, x_stride, w, w_stride, w_step, steps, fetch, asked
    )  # fmt: skip
    builder.ret_void()
    target = llvm.Target.from_triple("x86_64-unknown-linux-gnu")
    machine = target.create_target_machine(
        cpu="sapphirerapids", features="+amx-tile,+amx-bf16,+amx-int8"
    )
    assembly = machine.emit_assembly(llvm.parse_assembly(str(module)))
    assert assembly.count(instruction) == high * wide
    assert assembly.count("tileloadd") == high + wide


def test_tiles_are_used_where_the_processor_has_them_and_the_system_lends_them(monkeypatch):
    features = dict.fromkeys(("amx-tile", "amx-bf16", "amx-int8", "avx512bf16", "avx512vnni"), True)
    monkeypatch.setattr(tile_registers, "tiles_are_lent", lambda: True)
    assert tile_registers.available(features)
    for feature in features:
        assert not tile_registers.available(features | {feature: False})
    monkeypatch.setattr(tile_registers, "tiles_are_lent", lambda: False)
    assert not tile_registers.available(features)


def widened(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def rounded(values: np.ndarray) -> np.ndarray:
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def summed(x: np.ndarray, w: np.ndarray, start: np.ndarray) -> np.ndarray:
    """``start + x @ w.T`` as ``tile_registers`` says that the instruction sums it up, float32."""
    x, w = (widened(values) for values in (x, w))
    total = np.broadcast_to(start, (len(x), len(w))).copy()
    for k in range(0, x.shape[1], 32):
        halves = np.zeros((2, *total.shape), np.float32)
        for term in range(k, min(k + 32, x.shape[1])):
            # Exact in float32, and so one rounding, that of the sum.
            halves[term % 2] += np.outer(x[:, term], w[:, term])
        total += halves[0] + halves[1]
    return total


@needs_tiles
@pytest.mark.parametrize("rows", [1, 5, 16, 17, 31, 32, 33, 40, 70, 129])
@pytest.mark.parametrize(("depth", "width"), [(64, 48), (50, 37), (1250, 112)])
def test_every_bit_is_what_the_instructions_are_said_to_give(rows, depth, width):
    """Also of rows that are computed twice, and of sums that lie in memory between two blocks."""
    rng = np.random.default_rng(rows)
    backend = CpuBackend(2)
    x, w = (
        rounded(rng.standard_normal(shape).astype(np.float32))
        for shape in ((rows, depth), (width, depth))
    )
    bias = rng.standard_normal(width).astype(np.float32)
    packed = backend.pack_linear([w], bias)
    for add in (False, True):
        before = rng.standard_normal((rows + 2, width)).astype(np.float32)
        guarded = before.copy()
        out = guarded[1:-1]
        backend.linear(widened(x), packed, out, add=add)
        expected = summed(x, w, bias)
        assert out.tobytes() == (before[1:-1] + expected if add else expected).tobytes()
        assert (guarded[[0, -1]] == before[[0, -1]]).all()
    backend.close()


@needs_tiles
def test_a_row_that_is_not_finite_leaves_its_neighbours_alone():
    rng = np.random.default_rng(0)
    backend = CpuBackend(2)
    x = rng.standard_normal((40, 64)).astype(np.float32)
    packed = backend.pack_linear([rounded(rng.standard_normal((48, 64)).astype(np.float32))])
    norm = RMSNorm(np.ones(64, np.float32), 1e-5)
    out, expected = np.empty((2, 40, 48), np.float32)
    backend.linear(x, packed, expected, norm=norm)
    x[20] = np.nan
    backend.linear(x, packed, out, norm=norm)
    assert np.isnan(out[20]).all()
    others = np.arange(40) != 20
    assert out[others].tobytes() == expected[others].tobytes()
    backend.close()


@njit
def multiply_int8(control, tiles, x, w, scales, bias, gated, out, add):
    if tiles:
        multiply_by_tiles(control, x, w, scales, bias, gated, out, add)
    else:
        multiply_by_vectors(control, x, w, scales, bias, gated, out, add)


@needs_tiles
@pytest.mark.parametrize("rows", [1, 5, 16, 17, 31, 32, 33, 48, 49, 70, 129])
@pytest.mark.parametrize(("depth", "panels"), [(64, 1), (576, 19), (1280, 3)])
def test_int8_products_are_those_by_vectors_to_the_bit(rows, depth, panels):
    """For any number of rows, whichever way is the faster for it."""
    rng = np.random.default_rng(rows)
    x = rng.integers(-127, 128, (rows, depth)).astype(np.int8)
    x[0] = 127
    tail = np.zeros((rows, ACTIVATION_TAIL // 4), np.float32)
    tail[:, 0] = rng.standard_normal(rows)
    tail[:, 1] = x.sum(1, dtype=np.int32).view(np.float32)
    x = np.hstack([x.view(np.uint8), tail.view(np.uint8)])
    w = rng.integers(1, 256, (panels, depth // 4, 32, 4)).astype(np.uint8)
    w[:, :, 1] = 255
    scales, bias = rng.standard_normal((2, panels * 32)).astype(np.float32)
    backend = CpuBackend(2)
    for gated, add, missing in (
        (False, False, 0),
        (False, True, 0),
        (False, True, 5),
        (False, False, 21),
        (True, False, 0),
        (True, False, 3),
    ):
        width = panels * (16 if gated else 32) - missing
        before = rng.standard_normal((rows + 2, width)).astype(np.float32)
        results = [before.copy(), before.copy()]
        for tiles, guarded in enumerate(results):
            out = guarded[1:-1]
            multiply_int8(backend._control, bool(tiles), x, w, scales, bias, gated, out, add)
        assert results[0].tobytes() == results[1].tobytes()
        assert (results[1][[0, -1]] == before[[0, -1]]).all()
        assert (results[1][1:-1] != before[1:-1]).any()
    backend.close()
