"""Products with int4 weights are the sums they are said to be, to the bit, in any company."""

from __future__ import annotations

import llvmlite.binding as llvm
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.gpu_worker.cpu_backend import CpuBackend
from deepinfer.gpu_worker.kernels.byte_dot import lowerings_of
from deepinfer.gpu_worker.kernels.byte_product import COLUMNS
from deepinfer.gpu_worker.kernels.micro_kernel_int4 import emit_half, make_tile
from deepinfer.gpu_worker.kernels.vectors import emit_pointer, float32x16, store16

# numba comes after the kernels' settings.
from numba import njit, types  # isort: skip
from numba.extending import intrinsic  # isort: skip

BACKEND = CpuBackend(2)
ALONE = CpuBackend(1)
LOWERINGS = lowerings_of(llvm.get_host_cpu_features())


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def bfloat16(values: np.ndarray) -> np.ndarray:
    """Values cut to bfloat16, as uint16."""
    return (np.ascontiguousarray(values, np.float32).view(np.uint32) >> 16).astype(np.uint16)


def unpacked(panels: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes int32 [N, G, 32], and scales and minima float32 [N, G], N padded to a panel."""
    count, groups, _ = panels.shape
    both = panels[..., : 16 * COLUMNS].reshape(count, groups, 4, COLUMNS, 4)
    codes = np.stack((both & 15, both >> 4), axis=4)  # panel, group, run, column, half, i
    codes = codes.transpose(0, 3, 1, 2, 4, 5).reshape(-1, groups, 32).astype(np.int32)
    halves = np.ascontiguousarray(panels[..., 16 * COLUMNS :]).view(np.float16).astype(np.float32)
    halves = halves.reshape(count, groups, 2, COLUMNS).transpose(2, 0, 3, 1)
    return codes, *halves.reshape(2, -1, groups)


def dequantised(packed) -> np.ndarray:
    """The weights that the packed form stands for, float32 [N, K]."""
    codes, scales, minima = unpacked(packed.panels)
    values = scales[..., None] * codes + minima[..., None]
    return values.reshape(len(values), -1)[: packed.out_features, : packed.in_features]


def fma(x: np.ndarray, y: np.ndarray, z: np.ndarray) -> np.ndarray:
    # Wide enough that rounding twice is rounding once.
    return (x.astype(np.longdouble) * y + z).astype(np.float32)


def reference(x: np.ndarray, packed) -> np.ndarray:
    """The product in the kernel's order of operations, float32 [T, N]."""
    codes, scales, minima = unpacked(packed.panels)
    padded = np.zeros((len(x), codes.shape[1] * 32), np.float32)
    padded[:, : x.shape[1]] = x
    padded = padded.reshape(len(x), -1, 32)
    largest = np.abs(padded).max(-1)
    s = largest / np.float32(127)
    inverse = np.divide(np.float32(127), largest, out=np.zeros_like(largest), where=largest > 0)
    xq = np.rint(padded * inverse[..., None]).astype(np.int32)
    out = np.tile(packed.bias[: len(codes)], (len(x), 1))
    for g in range(codes.shape[1]):
        dot = (xq[:, g] @ codes[:, g].T).astype(np.float32) * s[:, g, None]
        total = xq[:, g].sum(-1).astype(np.float32) * s[:, g]
        out = fma(minima[:, g], total[:, None], fma(scales[:, g], dot, out))
    return out[:, : packed.out_features]


@settings(max_examples=80, deadline=None)
@given(
    rows=st.one_of(st.integers(1, 13), st.integers(100, 200)),
    depth=st.integers(1, 150),
    width=st.integers(1, 150),
    biased=st.booleans(),
    add=st.booleans(),
)
def test_linear_is_the_sum_it_says_to_the_bit(rows, depth, width, biased, add):
    rng = np.random.default_rng(rows * depth * width)
    x, out = normal(rng, rows, depth), normal(rng, rows, width)
    x[:, depth // 2 :] *= 50
    weights, bias = normal(rng, width, depth), normal(rng, width)
    cut = width // 3
    parts = [weights[:cut], weights[cut:]] if cut else [weights]
    packed = BACKEND.pack_linear(parts, bias if biased else None, "int4")
    expected = reference(x, packed) + out if add else reference(x, packed)
    BACKEND.linear(x, packed, out, add=add)
    assert out.tobytes() == expected.tobytes()


@settings(max_examples=80, deadline=None)
@given(
    rows=st.integers(2, 200),
    depth=st.integers(1, 150),
    width=st.integers(1, 150),
    add=st.booleans(),
    data=st.data(),
)
def test_a_row_is_bitwise_the_same_alone_and_in_any_company(rows, depth, width, add, data):
    rng = np.random.default_rng(rows)
    x, together = normal(rng, rows, depth), normal(rng, rows, width)
    packed = BACKEND.pack_linear([bfloat16(normal(rng, width, depth))], None, "int4")
    first = data.draw(st.integers(0, rows - 1))
    last = data.draw(st.integers(first + 1, min(rows, first + 13)))
    apart = together[first:last].copy()
    BACKEND.linear(x, packed, together, add=add)
    data.draw(st.sampled_from((BACKEND, ALONE))).linear(x[first:last], packed, apart, add=add)
    assert apart.tobytes() == together[first:last].tobytes()


def test_many_rows_are_cut_into_chunks_without_a_trace():
    rows, depth, width = 300, 1001, 613  # several chunks and panels, and none of them even
    rng = np.random.default_rng(0)
    x, together = normal(rng, rows, depth), np.empty((rows, width), np.float32)
    packed = BACKEND.pack_linear([normal(rng, width, depth)], normal(rng, width), "int4")
    alone = np.empty_like(together)
    BACKEND.linear(x, packed, together)
    for row in range(rows):
        BACKEND.linear(x[row : row + 1], packed, alone[row : row + 1])
    assert alone.tobytes() == together.tobytes()
    assert together[::50].tobytes() == reference(x[::50], packed).tobytes()


def test_linear_writes_nothing_beyond_its_columns():
    packed = BACKEND.pack_linear([np.ones((37, 8), np.float32)], None, "int4")
    for rows in (3, 100):
        guarded = np.full((rows + 2, 37), 7.0, np.float32)
        BACKEND.linear(np.ones((rows, 8), np.float32), packed, guarded[1:-1])
        np.testing.assert_allclose(guarded[1:-1], 8, rtol=1e-6)
        assert (guarded[[0, -1]] == 7).all()


def test_an_empty_batch_is_no_work():
    packed = BACKEND.pack_linear([np.ones((16, 8), np.float32)], None, "int4")
    BACKEND.linear(np.empty((0, 8), np.float32), packed, np.empty((0, 16), np.float32))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 40, 69])
def test_what_is_not_finite_spoils_its_own_row_and_no_other(bad, place):
    rng = np.random.default_rng(3)
    packed = BACKEND.pack_linear([normal(rng, 40, 70)], normal(rng, 40), "int4")
    x = normal(rng, 9, 70)
    clean, spoilt = np.empty((9, 40), np.float32), np.empty((9, 40), np.float32)
    BACKEND.linear(x, packed, clean)
    x[4, place] = bad
    BACKEND.linear(x, packed, spoilt)
    assert not np.isfinite(spoilt[4]).any()
    others = np.arange(9) != 4
    assert spoilt[others].tobytes() == clean[others].tobytes()


def test_rows_of_zeros_and_of_the_smallest_numbers_give_the_bias():
    rng = np.random.default_rng(4)
    bias, out = normal(rng, 40), np.empty((2, 40), np.float32)
    packed = BACKEND.pack_linear([normal(rng, 40, 70)], bias, "int4")
    x = np.zeros((2, 70), np.float32)
    x[1] = np.float32(1e-45)
    BACKEND.linear(x, packed, out)
    assert out.tobytes() == np.stack((bias, bias)).tobytes()


def test_embed_returns_what_the_codes_stand_for():
    rng = np.random.default_rng(1)
    weights = bfloat16(normal(rng, 101, 70))
    weights.flags.writeable = False
    table = BACKEND.pack_linear([weights[:50], weights[50:]], None, "int4")
    ids = np.array([100, 0, 49, 50, 50], np.int32)
    out = np.empty((5, 70), np.float32)
    BACKEND.embed(ids, table, out)
    np.testing.assert_allclose(out, dequantised(table)[ids], rtol=1e-6, atol=1e-7)


# ---- from weights to codes ----------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 1000), symmetric=st.booleans(), levels=st.integers(2, 16))
def test_weights_that_have_an_int4_form_keep_their_values(seed, symmetric, levels):
    """Q4_1 and Q4_0 files, also where a group does not use all of its codes."""
    rng = np.random.default_rng(seed)
    scales = rng.uniform(0.01, 1, (33, 3, 1)).astype(np.float16).astype(np.float32)
    minima = -8 * scales if symmetric else normal(rng, 33, 3, 1).astype(np.float16)
    codes = rng.integers(0, levels, (33, 3, 32)) + (16 - levels) // 2
    weights = (scales * codes + minima).astype(np.float32).reshape(33, 96)
    packed = BACKEND.pack_linear([weights], None, "int4")
    np.testing.assert_allclose(
        dequantised(packed).reshape(33, 3, 32),
        weights.reshape(33, 3, 32),
        # d * q and m are each exact to float16: half a unit in the last of 11 bits.
        atol=float((np.abs(minima) + 15 * scales).max()) * 2.0**-11,
        rtol=0,
    )


def test_a_full_group_of_a_q4_1_file_gives_back_its_scale_and_minimum():
    rng = np.random.default_rng(5)
    scales = rng.uniform(0.01, 1, (32, 4)).astype(np.float16)
    minima = (-rng.uniform(4, 12, (32, 4)) * scales).astype(np.float16)
    codes = rng.integers(0, 16, (32, 4, 32))
    codes[..., 3], codes[..., 17] = 0, 15
    wide = [a.astype(np.float32)[..., None] for a in (scales, minima)]
    weights = (wide[0] * codes + wide[1]).astype(np.float32).reshape(32, 128)
    packed = BACKEND.pack_linear([weights], None, "int4")
    got_codes, got_scales, got_minima = unpacked(packed.panels)
    assert (got_codes == codes).all()
    assert (got_scales == scales).all() and (got_minima == minima).all()


def test_other_weights_come_nearer_than_by_rounding_between_their_extremes():
    rng = np.random.default_rng(6)
    weights = normal(rng, 64, 256)
    groups = weights.reshape(64, 8, 32)
    low, high = groups.min(-1, keepdims=True), groups.max(-1, keepdims=True)
    step = (high - low) / 15
    plain = np.square(np.rint((groups - low) / step) * step + low - groups).mean()
    packed = BACKEND.pack_linear([weights], None, "int4")
    ours = np.square(dequantised(packed) - weights).mean()
    assert ours < 0.9 * plain


def test_a_constant_group_is_its_constant():
    weights = np.full((16, 64), 0.375, np.float32)
    weights[:, 32:] = 0
    packed = BACKEND.pack_linear([weights], None, "int4")
    assert (dequantised(packed) == weights).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e30])
def test_weights_that_float16_cannot_hold_are_refused(bad):
    weights = np.ones((20, 40), np.float32)
    weights[17, 35] = bad
    with pytest.raises(ValueError, match="int4"):
        BACKEND.pack_linear([weights], None, "int4")


# ---- instructions -------------------------------------------------------------------------------


@pytest.mark.parametrize(("rows", "columns"), [(1, 16), (4, 16), (6, 32)])
def test_this_machines_instructions_give_the_bits_of_plain_arithmetic(rows, columns):
    rng = np.random.default_rng(7)
    weights = rng.integers(0, 256, (3, 20 * columns)).astype(np.uint8)
    halves = normal(rng, 3, 2 * columns).astype(np.float16)
    weights[:, 16 * columns :] = halves.view(np.uint8)
    blocks = np.empty((rows, 3, 40), np.uint8)
    blocks[..., :32] = rng.integers(-127, 128, (rows, 3, 32)).astype(np.int8).view(np.uint8)
    blocks[..., 32:] = normal(rng, rows, 3, 2).view(np.uint8).reshape(rows, 3, 8)
    bias = normal(rng, columns)
    results = {}
    for lowering in LOWERINGS:
        tile = make_tile(columns, lowering)

        @njit
        def compute(x, w, bias, out, tile=tile):
            tile(x, 0, 120, w, 0, 3, 0, 64, bias, 0, out, 0, columns, False, rows)

        out = np.empty((rows, columns), np.float32)
        compute(blocks, weights, bias, out)
        results[lowering] = out.tobytes()
    assert len(set(results.values())) == 1


def test_float16_is_widened_the_same_with_and_without_an_instruction():
    @intrinsic
    def widen(typingctx, array, offset):
        def codegen(context, builder, signature, args):
            pointer = emit_pointer(context, builder, signature.args[0], *args)
            return emit_half(builder, pointer, native=False)

        return float32x16(array, types.int64), codegen

    @njit
    def widen_all(array, out):
        for i in range(0, len(out), 16):
            store16(out, i, widen(array, 2 * i))

    bits = np.arange(1 << 16, dtype=np.uint16)
    bits = bits[np.isfinite(bits.view(np.float16))]
    out = np.empty(len(bits), np.float32)
    widen_all(bits.view(np.uint8), out)
    assert out.tobytes() == bits.view(np.float16).astype(np.float32).tobytes()
