"""The CPU kernels compute what they say, and a token's result does not depend on its company."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.gpu_worker.backend import KVCache, RaggedBatch, RMSNorm
from deepinfer.gpu_worker.cpu_backend import CpuBackend
from deepinfer.gpu_worker.kernels import attention, attention_units, micro_kernel
from deepinfer.gpu_worker.kernels.fork_join import ThreadTeam
from deepinfer.gpu_worker.kernels.micro_kernel import HAS_BF16_DOT, make_tiles

from numba import njit  # isort: skip  (after the kernels' settings)

DTYPES = ("float32", "bfloat16")
CACHE_DTYPES = (*DTYPES, "int8")
# dtypes of queries and weights beside a cache.
OPERANDS = {
    "float32": (np.float32,),
    "bfloat16": (np.float32, np.uint16),
    "int8": (np.float32, np.uint16),
}
BACKEND = CpuBackend(2)
ALONE = CpuBackend(1)


def stored(values: np.ndarray, dtype: str) -> np.ndarray:
    """``values`` in the form weights are held in."""
    values = np.ascontiguousarray(values, np.float32)
    if dtype == "float32":
        return values
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def widened(values: np.ndarray) -> np.ndarray:
    """Stored values as float64."""
    if values.dtype == np.uint16:
        values = (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float64)


def operand(x: np.ndarray, dtype: str) -> np.ndarray:
    """``x`` as a product with weights of ``dtype`` takes it, in float64."""
    return widened(stored(x, dtype if HAS_BF16_DOT else "float32"))


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


# ---- linear -------------------------------------------------------------------------------------

shapes = st.tuples(st.integers(1, 13), st.integers(1, 70), st.integers(1, 150))


@settings(max_examples=150, deadline=None)
@given(shape=shapes, dtype=st.sampled_from(DTYPES), biased=st.booleans(), add=st.booleans())
def test_linear_is_the_matrix_product(shape, dtype, biased, add):
    rows, depth, width = shape
    rng = np.random.default_rng(rows * depth * width)
    x, bias, out = normal(rng, rows, depth), normal(rng, width), normal(rng, rows, width)
    weights = stored(normal(rng, width, depth), dtype)
    cut = width // 3
    parts = [weights[:cut], weights[cut:]] if cut else [weights]
    packed = BACKEND.pack_linear(parts, bias if biased else None)
    expected = operand(x, dtype) @ widened(weights).T + bias * biased + out * add
    BACKEND.linear(x, packed, out, add=add)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=2e-5)


SHAPES = [(1, 1), (1, 4), (2, 2), (3, 1), (5, 1), (6, 4)]


@pytest.mark.parametrize("native", [False, HAS_BF16_DOT])
@pytest.mark.parametrize(
    ("x_dtype", "w_dtype"),
    [("float32", "float32"), ("float32", "bfloat16"), ("bfloat16", "bfloat16")],
)
def test_tiles_of_every_kind_sum_products(x_dtype, w_dtype, native):
    """Both ways to multiply bfloat16, whichever of them this machine would choose."""
    tiles = make_tiles(SHAPES, native)

    @njit
    def run(x, w, out, start, add, shape):
        depth = x.shape[1]
        tiles(
            x, 0, depth, w, 0, w[0].size, depth, out, 0, out.shape[1], 64, 32, start, 0, 0, add,
            shape,
        )  # fmt: skip

    rng = np.random.default_rng(0)
    for depth in (2, 6, 50):
        x = stored(normal(rng, 6, depth), x_dtype)
        weights = stored(normal(rng, 64, depth), w_dtype)
        start = normal(rng, 64)
        panels = BACKEND.pack_linear([weights]).panels
        for shape, (rows, count) in enumerate(SHAPES):
            for add in (False, True):
                before = normal(rng, 6, 64)
                out = before.copy()
                run(x, panels, out, start, add, shape)
                expected = widened(x) @ widened(weights).T + start + before * add
                columns = 16 * count
                np.testing.assert_allclose(
                    out[:rows, :columns], expected[:rows, :columns], rtol=1e-5, atol=2e-5
                )
                np.testing.assert_array_equal(out[rows:], before[rows:])
                np.testing.assert_array_equal(out[:, columns:], before[:, columns:])


@settings(max_examples=100, deadline=None)
@given(
    rows=st.integers(2, 200),
    depth=st.one_of(st.integers(1, 90), st.integers(1530, 1545)),
    width=st.integers(1, 150),
    dtype=st.sampled_from(DTYPES),
    add=st.booleans(),
    data=st.data(),
)
def test_a_row_of_linear_is_bitwise_the_same_alone_and_in_any_company(
    rows, depth, width, dtype, add, data
):
    rng = np.random.default_rng(rows)
    x, together = normal(rng, rows, depth), normal(rng, rows, width)
    packed = BACKEND.pack_linear([stored(normal(rng, width, depth), dtype)], normal(rng, width))
    first = data.draw(st.integers(0, rows - 1))
    last = data.draw(st.integers(first + 1, min(rows, first + 13)))
    apart = together[first:last].copy()
    BACKEND.linear(x, packed, together, add=add)
    data.draw(st.sampled_from((BACKEND, ALONE))).linear(x[first:last], packed, apart, add=add)
    assert apart.tobytes() == together[first:last].tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("add", [False, True])
def test_many_rows_are_cut_into_chunks_and_blocks_without_a_trace(dtype, add):
    rows, depth, width = 300, 1001, 613  # several of each, and none of them even
    rng = np.random.default_rng(0)
    x, bias, together = normal(rng, rows, depth), normal(rng, width), normal(rng, rows, width)
    weights = stored(normal(rng, width, depth), dtype)
    packed = BACKEND.pack_linear([weights], bias)
    alone = together.copy()
    expected = operand(x, dtype) @ widened(weights).T + bias + together * add
    BACKEND.linear(x, packed, together, add=add)
    np.testing.assert_allclose(together, expected, rtol=1e-4, atol=1e-4)
    for row in range(rows):
        BACKEND.linear(x[row : row + 1], packed, alone[row : row + 1], add=add)
    assert alone.tobytes() == together.tobytes()


def test_linear_writes_nothing_beyond_its_columns():
    packed = BACKEND.pack_linear([np.ones((37, 8), np.float32)])
    for rows in (3, 100):
        guarded = np.full((rows + 2, 37), 7.0, np.float32)
        out = guarded[1:-1]
        BACKEND.linear(np.ones((rows, 8), np.float32), packed, out)
        assert (out == 8).all() and (guarded[[0, -1]] == 7).all()


def test_arrays_that_do_not_lie_row_by_row_are_refused():
    packed = BACKEND.pack_linear([np.ones((16, 8), np.float32)])
    rows, out = np.ones((4, 8), np.float32), np.empty((4, 16), np.float32)
    with pytest.raises(AssertionError):
        BACKEND.linear(np.asfortranarray(rows), packed, out)
    with pytest.raises(AssertionError):
        BACKEND.linear(rows, packed, np.empty((4, 32), np.float32)[:, ::2])


def test_an_empty_batch_is_no_work():
    packed = BACKEND.pack_linear([np.ones((16, 8), np.float32)])
    BACKEND.linear(np.empty((0, 8), np.float32), packed, np.empty((0, 16), np.float32))


@pytest.mark.parametrize("dtype", DTYPES)
def test_embed_returns_the_rows_that_were_packed(dtype):
    rng = np.random.default_rng(1)
    weights = stored(normal(rng, 101, 24), dtype)
    weights.flags.writeable = False
    table = BACKEND.pack_linear([weights[:50], weights[50:]])
    ids = np.array([100, 0, 49, 50, 50], np.int32)
    out = np.empty((5, 24), np.float32)
    BACKEND.embed(ids, table, out)
    assert (out == widened(weights)[ids]).all()


@pytest.mark.parametrize(
    ("parts", "bias", "word"),
    [
        ([np.ones((2, 3), np.float32), np.ones((2, 4), np.float32)], None, "stacked"),
        ([np.ones((2, 3), np.float32), np.ones((2, 3), np.uint16)], None, "stacked"),
        ([np.ones((2, 3), np.float16)], None, "float16"),
        ([np.ones((2, 0), np.float32)], None, "one input"),
        ([np.ones((2, 3), np.float32)], np.ones(3, np.float32), "bias"),
        ([], None, "part"),
    ],
)
def test_weights_that_do_not_fit_together_are_refused(parts, bias, word):
    with pytest.raises(ValueError, match=word):
        BACKEND.pack_linear(parts, bias)


def test_a_gate_has_an_up_matrix_of_its_size():
    parts = [np.ones((2, 3), np.float32), np.ones((4, 3), np.float32)]
    with pytest.raises(ValueError, match="gated"):
        BACKEND.pack_linear(parts, gated=True)


# ---- what stands around a product ---------------------------------------------------------------

FORMATS = (("float32", "none"), ("bfloat16", "none"), ("bfloat16", "int8"), ("bfloat16", "int4"))


def silu_mul(gate_up: np.ndarray) -> np.ndarray:
    gate, up = np.split(gate_up.astype(np.float64), 2, axis=1)
    with np.errstate(over="ignore"):
        return gate / (1 + np.exp(-gate)) * up


def identity(size: int):
    return BACKEND.pack_linear([np.eye(size, dtype=np.float32)])


@settings(max_examples=60, deadline=None)
@given(rows=st.integers(1, 130), width=st.integers(1, 200))
def test_a_norm_is_its_formula_and_each_row_its_own(rows, width):
    rng = np.random.default_rng(width)
    x, out, packed = normal(rng, rows, width), normal(rng, rows, width), identity(width)
    norm = RMSNorm(normal(rng, width), 1e-5)
    BACKEND.linear(x, packed, out, norm=norm)
    wide = x.astype(np.float64)
    expected = wide / np.sqrt((wide**2).mean(1, keepdims=True) + 1e-5) * norm.weight
    np.testing.assert_allclose(out, expected, rtol=2e-6, atol=1e-7)
    one = np.empty((1, width), np.float32)
    for row in range(0, rows, 7):
        ALONE.linear(x[row : row + 1], packed, one, norm=norm)
        assert one.tobytes() == out[row].tobytes()


@settings(max_examples=60, deadline=None)
@given(rows=st.integers(1, 13), width=st.integers(1, 100), spread=st.sampled_from((1, 30, 1000)))
def test_a_gate_is_its_formula_also_where_the_exponential_overflows(rows, width, spread):
    rng = np.random.default_rng(width)
    gate_up, out = normal(rng, rows, 2 * width) * spread, normal(rng, rows, width)
    parts = np.split(np.eye(2 * width, dtype=np.float32), 2)
    BACKEND.linear(gate_up, BACKEND.pack_linear(parts, gated=True), out)
    np.testing.assert_allclose(out, silu_mul(gate_up), rtol=1e-6, atol=1e-30)


@settings(max_examples=150, deadline=None)
@given(
    rows=st.integers(1, 150),
    depth=st.one_of(st.integers(1, 90), st.integers(1530, 1545)),
    width=st.integers(1, 150),
    stored_as=st.sampled_from(FORMATS),
    row=st.integers(0, 149),
)
def test_norm_and_gate_are_the_same_within_a_product_as_around_it(
    rows, depth, width, stored_as, row
):
    dtype, quantization = stored_as
    rng = np.random.default_rng(rows * depth * width)
    x, bias, norm = normal(rng, rows, depth), normal(rng, 2 * width), RMSNorm(normal(rng, depth), 1)
    parts = np.split(stored(normal(rng, 2 * width, depth), dtype), 2)
    normed, both = np.empty_like(x), np.empty((rows, 2 * width), np.float32)
    BACKEND.linear(x, identity(depth), normed, norm=norm)
    BACKEND.linear(normed, BACKEND.pack_linear(parts, bias, quantization), both)
    packed = BACKEND.pack_linear(parts, bias, quantization, gated=True)
    guarded = np.full((rows + 2, width), 7.0, np.float32)
    out = guarded[1:-1]
    BACKEND.linear(x, packed, out, norm=norm)
    np.testing.assert_allclose(out, silu_mul(both), rtol=1e-6, atol=1e-30)
    assert (guarded[[0, -1]] == 7).all()
    row %= rows
    alone = np.empty((1, width), np.float32)
    ALONE.linear(x[row : row + 1], packed, alone, norm=norm)
    assert alone.tobytes() == out[row].tobytes()
    if stored_as == ("bfloat16", "none"):
        halves = np.empty((rows, width), np.uint16)
        BACKEND.linear(x, packed, halves, norm=norm)
        assert (halves == stored(out, "bfloat16")).all()


@pytest.mark.parametrize("depth", [33, 64])
@pytest.mark.parametrize(("dtype", "quantization"), FORMATS)
def test_x_may_have_the_dtype_that_weights_prefer(dtype, quantization, depth):
    rng = np.random.default_rng(0)
    packed = BACKEND.pack_linear([stored(normal(rng, 40, depth), dtype)], None, quantization)
    kept = "bfloat16" if packed.input_dtype == np.uint16 else "float32"
    x = stored(normal(rng, 50, depth), kept)
    out, expected = np.empty((2, 50, 40), np.float32)
    BACKEND.linear(x, packed, out)
    BACKEND.linear(widened(x).astype(np.float32), packed, expected)
    assert out.tobytes() == expected.tobytes()


# ---- row-wise operations ------------------------------------------------------------------------


def test_log_softmax_stats_match_float64_also_with_banned_tokens():
    rng = np.random.default_rng(2)
    logits = normal(rng, 6, 1001) * 10
    logits[1, ::2] = -np.inf
    logits[2] = -80
    largest, log_sum = BACKEND.log_softmax_stats(logits)
    wide = logits.astype(np.float64)
    assert (largest == logits.max(1)).all()
    expected = wide.max(1) + np.log(np.exp(wide - wide.max(1, keepdims=True)).sum(1))
    np.testing.assert_allclose(log_sum, expected, rtol=1e-6)


# ---- attention ----------------------------------------------------------------------------------


def as_cached(vectors, dtype):
    """What a cache of this dtype makes of vectors along the last axis."""
    if dtype != "int8":
        return widened(stored(vectors, dtype))
    scales = np.abs(vectors).max(-1, keepdims=True) / 127
    return np.rint(vectors / scales) * scales


class Sequences:
    """A few sequences with random queries, keys and values, to be fed in any cut and company."""

    def __init__(self, seed, lengths, heads, kv_heads, dim, block_size, dtype, normed=False):
        rng = np.random.default_rng(seed)
        self.heads, self.kv_heads, self.dim = heads, kv_heads, dim
        self.block_size, self.dtype = block_size, dtype
        width = (heads + 2 * kv_heads) * dim
        self.qkv = [normal(rng, n, width) for n in lengths]
        angles = np.arange(max(lengths))[:, None] / 100 ** (np.arange(dim // 2) / (dim // 2))
        self.cos, self.sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
        self.norms = (normal(rng, dim), normal(rng, dim)) if normed else (None, None)
        blocks = [-(-n // block_size) for n in lengths]
        order = rng.permutation(sum(blocks) + 2).astype(np.int32)
        self.tables = np.zeros((len(lengths) + 1, max(blocks)), np.int32)
        for i, count in enumerate(blocks):
            self.tables[i + 1, :count] = order[sum(blocks[:i]) : sum(blocks[: i + 1])]
        self.num_blocks = len(order)

    def new_layer(self):
        """A cache whose every byte is NaN: nothing unwritten may show."""
        cache = KVCache(1, self.num_blocks, self.block_size, self.kv_heads, self.dim, self.dtype)
        layer = cache.layers[0]
        stale = {"float32": np.nan, "bfloat16": 0x7FC0, "int8": -128}[self.dtype]
        layer.scales[:] = np.nan
        layer.keys[:] = stale
        layer.values[..., : self.dim] = stale
        return layer

    def step(self, backend, layer, chunks, window=0, operands=None, out_dtype=np.float32):
        """Feed ``chunks`` (sequence, first, last); return each chunk's attention output.

        ``operands`` is the dtype of queries and weights, if not the one that suits this machine.
        """
        counts = [last - first for _, first, last in chunks]
        batch = RaggedBatch(
            token_ids=np.zeros(sum(counts), np.int32),
            positions=np.concatenate([np.arange(a, b) for _, a, b in chunks]).astype(np.int32),
            q_start=np.cumsum([0, *counts]).astype(np.int32),
            slots=np.array([s + 1 for s, _, _ in chunks], np.int32),
            lengths=np.array([b for _, _, b in chunks], np.int32),
            block_tables=self.tables,
            logit_index=np.zeros(0, np.int32),
        )
        qkv = np.concatenate([self.qkv[s][a:b] for s, a, b in chunks])
        tables = self.cos, self.sin, batch.positions
        backend.rope_and_cache(qkv, layer, batch, *tables, *self.norms, 1e-6)
        out = np.full((len(qkv), self.heads * self.dim), 0x7FC0, out_dtype)
        if operands is None:
            backend.attention(qkv, layer, batch, self.dim**-0.5, window, out)
        else:
            attention.attention_by(
                backend.team.control, qkv, layer.keys, layer.values, layer.scales,
                batch.positions, batch.q_start, batch.slots, batch.block_tables,
                self.dim**-0.5, window, layer.block_size, np.empty(0, operands), out,
            )  # fmt: skip
        return np.split(out, np.cumsum(counts)[:-1])

    def reference(self, s, window=0):
        """Attention of a whole sequence in float64, keys and values rounded as the cache does."""
        length, dim, half = len(self.qkv[s]), self.dim, self.dim // 2
        wide = self.qkv[s].astype(np.float64).reshape(length, -1, dim)
        q, k = wide[:, : self.heads], wide[:, self.heads : self.heads + self.kv_heads]
        v = wide[:, self.heads + self.kv_heads :]
        parts = []
        for x, weight in ((q, self.norms[0]), (k, self.norms[1])):
            if weight is not None:
                x = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * weight
            c, d = (t[:length, None].astype(np.float64) for t in (self.cos, self.sin))
            a, b = x[..., :half], x[..., half:]
            parts.append(np.concatenate((a * c - b * d, b * c + a * d), -1))
        q, k = parts[0], as_cached(parts[1], self.dtype)
        v = as_cached(v, self.dtype)
        group = self.heads // self.kv_heads
        k, v = k.repeat(group, 1), v.repeat(group, 1)
        scores = np.einsum("qhd,khd->hqk", q, k) * dim**-0.5
        seen = np.tril(np.ones((length, length), bool))
        if window:
            seen &= ~np.tril(np.ones((length, length), bool), -window)
        scores = np.where(seen, scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        return np.einsum("hqk,khd->qhd", weights, v).reshape(length, -1)


@pytest.mark.parametrize("dtype", CACHE_DTYPES)
@pytest.mark.parametrize("block_size", [1, 4, 16, 24, 32, 200])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"), [(9, 3, 64), (4, 4, 80), (7, 1, 128), (6, 2, 8), (2, 1, 34)]
)
@pytest.mark.parametrize("window", [0, 1, 37])
def test_attention_matches_float64(dtype, block_size, heads, kv_heads, dim, window):
    case = Sequences(3, [150, 1, 33], heads, kv_heads, dim, block_size, dtype, normed=dim == 128)
    chunks = [(0, 0, 150), (1, 0, 1), (2, 0, 33)]
    expected = [case.reference(s, window) for s, _, _ in chunks]
    for operands in OPERANDS[dtype]:
        outs = case.step(BACKEND, case.new_layer(), chunks, window, operands)
        # Elements whose rounding to int8 is a matter of the last bit may differ.
        exact = operands == np.float32 and dtype != "int8"
        tolerance = 2e-5 if exact else 2e-2
        for s, out in enumerate(outs):
            np.testing.assert_allclose(out, expected[s], atol=tolerance, rtol=tolerance)


def test_scratch_of_any_block_size_holds_what_is_written_behind_the_weights():
    """Spans of block sizes like 33 are no whole vectors; 13 elements too few ended workers."""
    for block_size in range(1, 300):
        span = attention_units.span_of.py_func(block_size)
        assert span % block_size == 0
        groups_end = span - block_size + (block_size - 1) // 16 * 16 + 16
        zeros_end = -(-span // 16) * 16 + 16
        assert attention.row_stride.py_func(span) >= max(groups_end, zeros_end)


def test_scores_far_below_zero_still_have_weights():
    case = Sequences(0, [3], 1, 1, 16, 16, "float32")
    case.cos[:], case.sin[:] = 1, 0
    case.qkv[0][:, :16], case.qkv[0][:, 16:32] = 1e16, -1e14
    (out,) = case.step(BACKEND, case.new_layer(), [(0, 0, 3)])
    values = case.qkv[0][:, 32:].astype(np.float64)
    expected = np.cumsum(values, axis=0) / np.arange(1, 4)[:, None]
    np.testing.assert_allclose(out, expected, atol=1e-5)


def test_this_machine_rounds_queries_and_weights_only_if_it_multiplies_pairs_of_bfloat16():
    case = Sequences(3, [150], 9, 3, 64, 16, "bfloat16")
    own, exact, rounded = (
        case.step(BACKEND, case.new_layer(), [(0, 0, 150)], 0, operands)[0]
        for operands in (None, np.float32, np.uint16)
    )
    assert own.tobytes() == (rounded if micro_kernel.HAS_BF16_DOT else exact).tobytes()
    assert rounded.tobytes() != exact.tobytes()


@settings(max_examples=80, deadline=None)
@given(
    data=st.data(),
    block_size=st.sampled_from((1, 4, 16, 24, 32)),
    shape=st.sampled_from(((9, 3, 64), (4, 4, 20), (7, 1, 16), (10, 2, 8))),
    dtype=st.sampled_from(CACHE_DTYPES),
    window=st.sampled_from((0, 0, 9, 140)),
)
def test_attention_is_bitwise_the_same_in_any_cut_and_company(
    data, block_size, shape, dtype, window
):
    operands = data.draw(st.sampled_from(OPERANDS[dtype]))
    lengths = data.draw(st.lists(st.integers(1, 300), min_size=1, max_size=4))
    case = Sequences(len(lengths), lengths, *shape, block_size, dtype, normed=shape[1] == 3)
    whole = [
        case.step(ALONE, case.new_layer(), [(s, 0, n)], window, operands)[0]
        for s, n in enumerate(lengths)
    ]
    layer = case.new_layer()
    done = [0] * len(lengths)
    while any(d < n for d, n in zip(done, lengths, strict=True)):
        chunks = []
        for s, length in enumerate(lengths):
            if done[s] < length and (s == 0 or data.draw(st.booleans())):
                count = data.draw(st.sampled_from((1, 2, 7, 40, 300)))
                chunks.append((s, done[s], min(length, done[s] + count)))
            elif done[0] >= lengths[0] and done[s] < length:
                chunks.append((s, done[s], length))
        for (s, first, last), out in zip(
            chunks, case.step(BACKEND, layer, chunks, window, operands), strict=True
        ):
            assert out.tobytes() == whole[s][first:last].tobytes()
            done[s] = last


@pytest.mark.parametrize("dim", [64, 40])
def test_attention_rounds_its_result_to_what_a_product_takes(dim):
    case = Sequences(3, [90, 20], 4, 2, dim, 16, "bfloat16")
    chunks = [(0, 0, 90), (1, 0, 20)]
    exact = case.step(BACKEND, case.new_layer(), chunks)
    rounded = case.step(BACKEND, case.new_layer(), chunks, out_dtype=np.uint16)
    for x, y in zip(exact, rounded, strict=True):
        assert y.tobytes() == stored(x, "bfloat16").tobytes()


def test_a_batch_takes_arrays_of_any_layout_and_keeps_those_that_fit():
    good = np.arange(4, dtype=np.int32)
    frozen = np.frombuffer(good.tobytes(), np.int32)
    tables = np.arange(12, dtype=np.int64).reshape(3, 4)[:, ::2]
    batch = RaggedBatch(good, frozen, good, good, good, tables, good[:0])
    assert batch.token_ids is good
    for held, brought in ((batch.positions, frozen), (batch.block_tables, tables)):
        assert held.dtype == np.int32 and held.flags.carray and (held == brought).all()


def test_the_cache_takes_the_bytes_it_says():
    for block_size, dim, dtype in product((1, 16, 20), (8, 64, 80), CACHE_DTYPES):
        cache = KVCache(3, 7, block_size, 2, dim, dtype)
        held = sum(
            layer.keys.nbytes + layer.values.nbytes + layer.scales.nbytes for layer in cache.layers
        )
        assert held == 7 * KVCache.bytes_per_block(3, block_size, 2, dim, dtype)


@pytest.mark.parametrize("dtype", CACHE_DTYPES)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("part", ["key", "value"])
@pytest.mark.parametrize(("chunk", "window"), [(40, 0), (40, 9), (3, 0), (3, 9), (1, 9)])
def test_what_is_not_finite_shows_in_all_that_see_it_and_nowhere_else(
    dtype, bad, part, chunk, window
):
    case = Sequences(5, [40, 40], 4, 2, 32, 16, dtype)
    at = (4 if part == "key" else 6) * 32
    case.qkv[0][20, at + 3] = bad
    layer, hits, spared = case.new_layer(), [], []
    for first in range(0, 40, chunk):
        last = min(40, first + chunk)
        outs = case.step(BACKEND, layer, [(0, first, last), (1, first, last)], window)
        hits.append(outs[0])
        spared.append(outs[1])
    hit = np.concatenate(hits).reshape(40, 4, 32)
    end = 20 + window if window else 40
    if dtype == "int8" or np.isnan(bad):
        assert np.isnan(hit[20:end, :2]).any(-1).all()
    assert np.isfinite(hit[:20]).all() and np.isfinite(hit[end:]).all()
    assert np.isfinite(hit[:, 2:]).all() and np.isfinite(np.concatenate(spared)).all()


def test_an_int8_cache_keeps_vectors_of_zeros_and_of_tiny_numbers():
    case = Sequences(6, [20], 4, 2, 32, 16, "int8")
    case.qkv[0][3, 4 * 32 :] = 0
    case.qkv[0][4, 4 * 32 :] = 1e-42
    (out,) = case.step(BACKEND, case.new_layer(), [(0, 0, 20)])
    case.qkv[0][4, 4 * 32 :] = 0
    (expected,) = case.step(BACKEND, case.new_layer(), [(0, 0, 20)])
    assert np.isfinite(out).all() and out.tobytes() == expected.tobytes()


# ---- threads ------------------------------------------------------------------------------------


def test_work_is_the_same_on_any_number_of_threads_and_from_two_at_once():
    import threading

    rng = np.random.default_rng(5)
    x, packed = normal(rng, 5, 64), BACKEND.pack_linear([normal(rng, 4096, 64)])
    expected = np.empty((5, 4096), np.float32)
    ALONE.linear(x, packed, expected)
    crowd = CpuBackend(5)
    wrong = []

    def compute():
        out = np.empty((5, 4096), np.float32)
        for _ in range(200):
            out[:] = 0
            crowd.linear(x, packed, out)
            if out.tobytes() != expected.tobytes():
                wrong.append(1)

    threads = [threading.Thread(target=compute) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    crowd.close()
    assert not wrong
    out = np.zeros((5, 4096), np.float32)
    crowd.linear(x, packed, out)  # closed: the caller computes alone
    assert out.tobytes() == expected.tobytes()


def test_a_thread_count_out_of_range_is_refused():
    with pytest.raises(ValueError, match="num_threads"):
        ThreadTeam(0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_after_warm_up_nothing_is_compiled(dtype):
    from deepinfer.gpu_worker.kernels import attention, elementwise, linear, rope_cache

    kernels = [
        linear.linear,
        linear.gather_rows,
        elementwise.take_rows,
        elementwise.softmax_stats,
        rope_cache.rope_and_cache,
        attention.attention,
    ]
    BACKEND.warm_up(dtype)
    before = [len(kernel.signatures) for kernel in kernels]
    case = Sequences(1, [40, 3], 4, 2, 32, 16, dtype)
    layer = case.new_layer()
    case.step(BACKEND, layer, [(0, 0, 39), (1, 0, 2)])
    case.step(BACKEND, layer, [(0, 39, 40), (1, 2, 3)], window=5)
    scratch = np.zeros((64, 256), np.float32)
    weights = stored(np.ones((256, 256)), dtype)
    weights.flags.writeable = False
    packed = BACKEND.pack_linear([weights[:100], weights[100:]], np.zeros(256, np.float32))
    BACKEND.embed(np.zeros(7, np.int32), packed, scratch[:7])
    BACKEND.linear(scratch[:7], packed, np.zeros((64, 256), np.float32)[:7], add=True)
    gate_up = BACKEND.pack_linear([weights[:128], weights[128:]], gated=True)
    activated = np.zeros((7, 128), gate_up.input_dtype)
    BACKEND.linear(scratch[:7], gate_up, activated, norm=RMSNorm(np.ones(256, np.float32), 1e-6))
    down = BACKEND.pack_linear([weights[:, :128]])
    BACKEND.linear(activated, down, scratch[:7], add=True)
    BACKEND.take_rows(scratch[:7], np.zeros(2, np.int32), scratch[7:9])
    BACKEND.log_softmax_stats(scratch[:3])
    assert [len(kernel.signatures) for kernel in kernels] == before
