"""The int8 products are exact in their integers, and a token's result is its own."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.gpu_worker.cpu_backend import CpuBackend
from deepinfer.gpu_worker.kernels.linear_int8 import MAX_DEPTH

BACKEND = CpuBackend(2)
ALONE = CpuBackend(1)
F = np.float32


def quantised(values, limit):
    """Integers and scales of each row of a finite float32 matrix."""
    peak = np.abs(values).max(1, keepdims=True)
    inverse = np.divide(F(limit), peak, out=np.zeros_like(peak), where=peak > 0)
    return np.rint(values * inverse).astype(np.int64), peak / F(limit)


def reference(x, weights, bias, out, add):
    """What ``linear`` must give to the bit."""
    padded = -(-x.shape[1] // 8) * 8
    xq, sx = quantised(x, min(32767, (2**31 - 1) // (127 * padded)))
    wq, sw = quantised(weights, 127)
    value = (xq @ wq.T).astype(F) * (sx * sw.T) + bias
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
    expected = reference(x, weights, bias * biased, out, add)
    BACKEND.linear(x, packed, out, add=add)
    np.testing.assert_array_equal(out, expected)


def test_the_largest_sums_fit():
    for depth in (8, 576, 11_008, MAX_DEPTH):
        x, weights = np.ones((7, depth), F), -np.ones((3, depth), F)
        packed = BACKEND.pack_linear([weights], None, "int8")
        out = np.empty((7, 3), F)
        BACKEND.linear(x, packed, out)
        np.testing.assert_allclose(out, -depth, rtol=1e-6)
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


def test_embed_returns_the_dequantised_rows():
    _, weights, _, _ = case(1, 27, 101)
    packed = BACKEND.pack_linear([weights[:50], weights[50:]], None, "int8")
    ids = np.array([100, 0, 49, 50, 50], np.int32)
    out = np.empty((5, 27), F)
    BACKEND.embed(ids, packed, out)
    integers, scales = quantised(weights, 127)
    np.testing.assert_array_equal(out, (integers.astype(F) * scales)[ids])


def test_bfloat16_weights_are_quantised_as_the_numbers_they_are():
    x, weights, bias, out = case(9, 40, 33)
    bits = (weights.view(np.uint32) >> 16).astype(np.uint16)
    rounded = (bits.astype(np.uint32) << 16).view(F)
    BACKEND.linear(x, BACKEND.pack_linear([bits], bias, "int8"), out)
    np.testing.assert_array_equal(out, reference(x, rounded, bias, out, False))
