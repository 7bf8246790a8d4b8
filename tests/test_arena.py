"""Memory for weights, KV cache and activations: on cache lines, in pieces mapped at large."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from numba import njit

from deepinfer.gpu_worker.backend import KV_STORAGE, KVCache
from deepinfer.gpu_worker.kernels.settings import JIT
from deepinfer.gpu_worker.kernels.vectors import on_lines as compiled_on_lines
from deepinfer.gpu_worker.memory import Arena, on_lines


def test_arrays_are_zeroed_aligned_and_apart():
    arena = Arena()
    shapes = [(3, 5, 16), (1,), (5 << 20,), (70 << 20,), (7, 64), (63 << 20,)]
    arrays = [arena.zeros(shape, np.uint8) for shape in shapes]
    arrays += [arena.zeros((9, 16), np.float32), arena.zeros((5,), np.uint16)]
    for at, array in enumerate(arrays):
        assert array.flags.carray and array.flags.writeable
        assert array.ctypes.data % 64 == 0
        assert not array.any()
        array[...] = at + 1
    for at, array in enumerate(arrays):
        assert (array == at + 1).all()


def test_small_arrays_share_a_piece():
    arena = Arena()
    first, second = arena.zeros((100,), np.uint8), arena.zeros((100,), np.uint8)
    assert second.ctypes.data - first.ctypes.data == 128
    piece = first.base
    while piece.base is not None:
        piece = piece.base
    assert piece.nbytes >= 64 << 20


def test_arrays_that_are_not_filled_begin_on_cache_lines_as_well():
    held = []
    for shape, dtype in itertools.product([(1,), (3, 577), (40_000, 9)], [np.float32, np.uint16]):
        for make in (on_lines, _compiled):
            array = make(shape, dtype)
            assert array.shape == shape and array.dtype == dtype and array.flags.carray
            assert array.ctypes.data % 64 == 0
            array[...] = len(held)
            held.append(array)
    assert all((array == number).all() for number, array in enumerate(held))


def _compiled(shape, dtype):
    return _made(math.prod(shape), np.dtype(dtype)).reshape(shape)


@njit(**{**JIT, "cache": False})
def _made(count, dtype):
    return compiled_on_lines(count, dtype)


@pytest.mark.parametrize("dtype", sorted(KV_STORAGE))
def test_every_head_of_a_cache_begins_on_a_cache_line(dtype):
    cache = KVCache(2, 5, 16, 3, 64, dtype)
    for layer in cache.layers:
        for array in (layer.keys, layer.values):
            assert array.ctypes.data % 64 == 0 and not array.any()
            assert array[0, 0].nbytes % 64 == 0
