"""Memory for packed weights: zeroed, aligned, apart, in pieces that the system can map at large."""

from __future__ import annotations

import numpy as np

from deepinfer.gpu_worker.kernels.arena import Arena


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
