"""The int8 products are exact in their integers, and a token's result is its own."""

from __future__ import annotations

import llvmlite.binding as llvm
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.gpu_worker.cpu_backend import CpuBackend
from deepinfer.gpu_worker.kernels.byte_dot import lowerings_of
from deepinfer.gpu_worker.kernels.int8_tile import make_tile
from deepinfer.gpu_worker.kernels.linear_int8 import MAX_DEPTH

# numba comes after the kernels' settings.
from numba import njit  # isort: skip

BACKEND = CpuBackend(2)
ALONE = CpuBackend(1)
LOWERINGS = lowerings_of(llvm.get_host_cpu_features())
F = np.float32


def rotated(values):
    """Blocks of 64 along K, padded with zeros, times the Hadamard matrix: in the kernel's order."""
    rows, depth = values.shape
    wide = np.zeros((rows, -(-depth // 64) * 64), F)
    wide[:, :depth] = values
    for stride in (1, 2, 4, 8, 16, 32):
        low, high = wide.reshape(-1, 2, stride).swapaxes(0, 1)
        wide = np.stack((low + high, low - high), 1)
    return wide.reshape(rows, -1)


def quantised(values):
    """Integers and scales of each row of a finite float32 matrix, rotated."""
    wide = rotated(values)
    peak = np.abs(wide).max(1, keepdims=True)
    inverse = np.divide(F(127), peak, out=np.zeros_like(peak), where=peak > 0)
    return np.rint(wide * inverse).astype(np.int64), peak / F(127)


def fma(x, y, z):
    # Wide enough that rounding twice is rounding once.
    return (x.astype(np.longdouble) * y + z).astype(F)


def reference(x, weights, bias, out, add):
    """What ``linear`` must give to the bit."""
    xq, sx = quantised(x)
    wq, sw = quantised(weights)
    value = fma((xq @ wq.T).astype(F), sx * (sw.T / F(64)), bias)
    return value + out if add else value


def case(rows, depth, width):
    rng = np.random.default_rng(rows * depth * width)
    x, weights, bias, out = (
        rng.standard_normal(shape).astype(F)
        for shape in ((rows, depth), (width, depth), width, (rows, width))
    )
    return x, weights, bias, out


@settings(max_examples=150, deadline=None)
@given(
    rows=st.one_of(st.integers(1, 13), st.integers(120, 200)),
    depth=st.one_of(st.integers(1, 70), st.integers(510, 530)),
    width=st.integers(1, 150),
    biased=st.booleans(),
    add=st.booleans(),
)
def test_linear_is_the_scaled_integer_product_to_the_bit(rows, depth, width, biased, add):
    x, weights, bias, out = case(rows, depth, width)
    x[rows // 2] = 0
    weights[width // 2] = 0
    cut = width // 3
    parts = [weights[:cut], weights[cut:]] if cut else [weights]
    packed = BACKEND.pack_linear(parts, bias if biased else None, "int8")
    expected = reference(x, weights, bias * F(biased), out, add)
    BACKEND.linear(x, packed, out, add=add)
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("sign", [1, -1])
def test_the_largest_sums_fit(sign):
    for depth in (64, 576, 11_008, MAX_DEPTH):
        x, weights = np.zeros((7, depth), F), np.zeros((3, depth), F)
        # A row of the Hadamard matrix: rotated, all of its block is at the peak.
        x[:, ::64], weights[:, ::64] = 1, sign
        packed = BACKEND.pack_linear([weights], None, "int8")
        out = np.empty((7, 3), F)
        BACKEND.linear(x, packed, out)
        np.testing.assert_allclose(out, sign * depth // 64, rtol=1e-6)
    with pytest.raises(ValueError, match="at most"):
        BACKEND.pack_linear([np.ones((1, MAX_DEPTH + 1), F)], None, "int8")


@settings(max_examples=60, deadline=None)
@given(rows=st.integers(2, 200), depth=st.integers(1, 90), add=st.booleans(), data=st.data())
def test_a_row_is_bitwise_the_same_alone_and_in_any_company(rows, depth, add, data):
    x, weights, bias, together = case(rows, depth, 77)
    packed = BACKEND.pack_linear([weights], bias, "int8")
    first = data.draw(st.integers(0, rows - 1))
    last = data.draw(st.integers(first + 1, min(rows, first + 13)))
    apart = together[first:last].copy()
    BACKEND.linear(x, packed, together, add=add)
    data.draw(st.sampled_from((BACKEND, ALONE))).linear(x[first:last], packed, apart, add=add)
    assert apart.tobytes() == together[first:last].tobytes()


@pytest.mark.parametrize("rows", [1, 3, 5, 6, 150])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 33])
def test_a_value_that_is_not_finite_spoils_its_own_row_alone(rows, bad, place):
    x, weights, bias, out = case(rows, 35, 50)
    packed = BACKEND.pack_linear([weights], bias, "int8")
    expected = reference(x, weights, bias, out, False)
    x[rows - 1, place] = bad
    BACKEND.linear(x, packed, out)
    assert np.isnan(out[-1]).all()
    np.testing.assert_array_equal(out[:-1], expected[:-1])


# Whole blocks of rows, some more, and some less, of which those that are left are computed twice.
@pytest.mark.parametrize("rows", [1, 5, 16, 17, 31, 32, 33, 48, 49, 70, 129, 600])
@pytest.mark.parametrize(("depth", "width"), [(64, 64), (50, 37), (1250, 112), (130, 15)])
def test_every_number_of_rows_is_the_scaled_integer_product_to_the_bit(rows, depth, width):
    x, weights, bias, _ = case(rows, depth, width)
    packed = BACKEND.pack_linear([weights], bias, "int8")
    for add in (False, True):
        before = np.random.default_rng(1).standard_normal((rows + 2, width)).astype(F)
        after = before.copy()
        BACKEND.linear(x, packed, after[1:-1], add=add)
        expected = reference(x, weights, bias, before[1:-1], add)
        np.testing.assert_array_equal(after[1:-1], expected)
        np.testing.assert_array_equal(after[[0, -1]], before[[0, -1]])


@pytest.mark.parametrize("rows", [16, 33, 70, 129])
@pytest.mark.parametrize("width", [32, 37, 80])
def test_gated_rows_are_those_of_a_row_alone(rows, width):
    x, weights, bias, _ = case(rows, 130, 2 * width)
    parts = [weights[:width], weights[width:]]
    packed = BACKEND.pack_linear(parts, bias, "int8", gated=True)
    before = np.zeros((rows + 2, width), F)
    after = before.copy()
    BACKEND.linear(x, packed, after[1:-1])
    alone = np.empty((rows, width), F)
    for t in range(rows):
        BACKEND.linear(x[t : t + 1], packed, alone[t : t + 1])
    assert after[1:-1].tobytes() == alone.tobytes()
    assert not after[[0, -1]].any()
    gate, up = np.split(reference(x, weights, bias, None, False), 2, axis=1)
    np.testing.assert_allclose(alone, gate / (1 + np.exp(-gate)) * up, rtol=1e-5, atol=1e-6)


def test_embed_returns_the_dequantised_rows():
    _, weights, _, _ = case(1, 27, 101)
    packed = BACKEND.pack_linear([weights[:50], weights[50:]], None, "int8")
    ids = np.array([100, 0, 49, 50, 50], np.int32)
    out = np.empty((5, 27), F)
    BACKEND.embed(ids, packed, out)
    integers, scales = quantised(weights)
    expected = rotated(integers.astype(F) * (scales / F(64)))
    np.testing.assert_array_equal(out, expected[ids, :27])
    assert np.abs(out - weights[ids]).max() < 0.02 * np.abs(weights).max()


def test_one_large_activation_leaves_the_others_their_levels():
    rng = np.random.default_rng(5)
    x, weights = rng.standard_normal((3, 576)).astype(F), rng.standard_normal((80, 576)).astype(F)
    x[:, 100] = 300
    out = np.empty((3, 80), F)
    BACKEND.linear(x, BACKEND.pack_linear([weights], None, "int8"), out)
    ours = np.abs(out - x @ weights.T).mean()
    step = np.abs(x).max(1, keepdims=True) / F(127)
    plain = np.abs((np.rint(x / step) * step - x) @ weights.T).mean()
    assert ours < plain / 2


def test_bfloat16_weights_are_quantised_as_the_numbers_they_are():
    x, weights, bias, out = case(9, 40, 33)
    bits = (weights.view(np.uint32) >> 16).astype(np.uint16)
    rounded = (bits.astype(np.uint32) << 16).view(F)
    BACKEND.linear(x, BACKEND.pack_linear([bits], bias, "int8"), out)
    np.testing.assert_array_equal(out, reference(x, rounded, bias, out, False))


# ---- instructions -------------------------------------------------------------------------------


@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize(("rows", "columns"), [(1, 16), (1, 32), (4, 16), (6, 32)])
def test_a_tile_is_the_exact_integer_sum_with_any_instructions(rows, columns, lowering):
    tile = make_tile(columns, lowering)

    @njit
    def compute(x, w, sw, bias, out, depth):
        tile(
            x, 0, x.shape[1], depth, w, 0, 0, 64, sw, bias, 0, out, 0, columns, True, rows
        )  # fmt: skip

    depth = 64
    rng = np.random.default_rng(8)
    x = rng.integers(-127, 128, (rows, depth)).astype(np.int8)
    w = rng.integers(1, 256, (depth // 4, columns, 4)).astype(np.uint8)
    x[0], w[:, 0] = 127, 255
    x[-1, ::2], w[:, 1] = -127, 1
    shapes = (rows, 1), columns, columns, (rows, columns)
    sx, sw, bias, before = (rng.standard_normal(shape).astype(F) for shape in shapes)
    after = before.copy()
    sums = x.sum(1, dtype=np.int32, keepdims=True)
    block = np.hstack([array.view(np.uint8) for array in (x, sx, sums)])
    compute(block, w, sw, bias, after, depth)
    wide = w.swapaxes(0, 1).reshape(columns, depth).astype(np.int64) - 128
    value = fma((x.astype(np.int64) @ wide.T).astype(F), sx * sw, bias)
    np.testing.assert_array_equal(after, value + before)
