"""A recorded step computes what its operations compute one by one, to the last bit."""

from __future__ import annotations

import gc

import numpy as np
import pytest
from numba import njit

from deepinfer.gpu_worker.backend import RMSNorm
from deepinfer.gpu_worker.cpu_backend import CpuBackend
from deepinfer.gpu_worker.kernels import recording
from deepinfer.gpu_worker.kernels.settings import JIT
from deepinfer.gpu_worker.llama import Model
from support.checkpoints import VOCAB_SIZE, make_checkpoint
from support.ragged_rows import RaggedRows

PROMPTS = (9, 1, 23, 4)
STEPS = [
    dict(enumerate(PROMPTS)),
    {0: 1, 1: 1, 2: 1, 3: 1},
    {0: 1, 1: 30, 3: 2},  # larger than the first: the model's buffers grow
    {2: 1},
    {3: 1, 0: 1},
    {0: 1, 1: 1, 2: 1, 3: 1},
    {2: 1},
]


class Separate(CpuBackend):
    """Runs every operation by itself."""

    def record(self, operations):
        return operations


class Counting(CpuBackend):
    """Counts how often Python is asked for a product."""

    products = 0

    def linear(self, x, weight, out, add=False, norm=None):
        self.products += 1
        super().linear(x, weight, out, add, norm)


RECORDED = CpuBackend(2)
SEPARATE = Separate(2)


def load(folder, backend, dtype="float32", quantization="none", kv_cache_dtype=None):
    model = Model.load(
        folder, backend, dtype, kv_cache_dtype=kv_cache_dtype, quantization=quantization
    )
    model.attach_cache(64, 4)
    return model


def logits_of(model, steps):
    rows = RaggedRows(model, len(PROMPTS))
    rng = np.random.default_rng(1)
    got = []
    for step in steps:
        tokens = {row: rng.integers(0, VOCAB_SIZE, n).astype(np.int32) for row, n in step.items()}
        got += rows.step(tokens).values()
    return got


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dtype": "bfloat16"},
        {"dtype": "bfloat16", "quantization": "int8", "kv_cache_dtype": "int8"},
        {"dtype": "bfloat16", "quantization": "int4"},
        {"quantization": "int4", "kv_cache_dtype": "bfloat16"},
    ],
)
@pytest.mark.parametrize("variant", ["llama-biases", "qwen2-window", "qwen3-layer-types"])
def test_recorded_steps_are_the_separate_operations(tmp_path, variant, options):
    folder = make_checkpoint(variant, tmp_path / variant)
    got = logits_of(load(folder, RECORDED, **options), STEPS)
    expected = logits_of(load(folder, SEPARATE, **options), STEPS)
    for one, other in zip(got, expected, strict=True):
        assert one.tobytes() == other.tobytes()


def test_python_describes_the_step_of_so_many_rows_once(tmp_path):
    backend = Counting(2)
    model = load(make_checkpoint("llama", tmp_path / "llama"), backend)
    steps = [{0: 5, 1: 2}, *[{0: 1, 1: 1}] * 3]
    expected = logits_of(load(tmp_path / "llama", SEPARATE), steps)
    for products in (2, 4):
        got = logits_of(model, steps)
        assert [one.tobytes() for one in got] == [one.tobytes() for one in expected]
        assert backend.products == products * (4 * len(model.layers) + 1)
        model.attach_cache(64, 4)  # what was recorded reads the old one


def test_after_warm_up_no_number_of_rows_compiles_anything(tmp_path):
    model = load(make_checkpoint("qwen3", tmp_path / "qwen3"), RECORDED, "bfloat16", "int8")
    model.warm_up()
    before = len(recording._kept.signatures)
    assert before
    logits_of(model, STEPS)
    assert len(recording._kept.signatures) == before


def test_a_recording_keeps_its_arrays_and_reads_what_they_contain():
    inputs, result = np.ones((1, 64), np.float32), np.zeros((1, 64), np.float32)
    identity = RECORDED.pack_linear([np.eye(64, dtype=np.float32)])

    def operations():
        middle = np.zeros((1, 64), np.float32)
        norm = RMSNorm(np.full(64, 2, np.float32), 0.0)
        RECORDED.linear(inputs, identity, middle, norm=norm)
        RECORDED.take_rows(middle, np.zeros(1, np.int32), result)

    replay = RECORDED.record(operations)
    assert not result.any()
    gc.collect()
    for value, expected in ((1, 2), (-3, -2)):
        inputs[:] = value
        replay()
        assert (result == expected).all()
    assert not RECORDED.record(lambda: None)()


def test_a_kernel_that_fails_in_a_recording_is_noticed():
    @njit(**{**JIT, "cache": False})
    def check(array):
        if array[0] < 0:
            raise MemoryError("no memory")

    numbers = np.ones(1)
    calls = recording.Recording()
    calls.add(check, (numbers,))
    calls()
    numbers[0] = -1
    with pytest.raises(MemoryError, match="scratch memory"):
        calls()


def test_a_failure_while_recording_leaves_the_backend_computing():
    def operations():
        raise RuntimeError("wrong operations")

    with pytest.raises(RuntimeError):
        RECORDED.record(operations)
    out = np.zeros((1, 16), np.float32)
    identity = RECORDED.pack_linear([np.eye(16, dtype=np.float32)])
    RECORDED.linear(np.ones((1, 16), np.float32), identity, out)
    assert (out == 1).all()
