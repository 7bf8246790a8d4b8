"""Columns of numbers inside messages: little-endian bytes on the wire, numpy arrays in memory."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

Int32 = npt.NDArray[np.int32]
UInt32 = npt.NDArray[np.uint32]

# numpy would parse a name every time.
_INT32 = np.dtype("<i4")
_UINT32 = np.dtype("<u4")


def pack_int32(values: Iterable[int] | npt.NDArray[np.integer]) -> bytes:
    """Pack integers as an int32 column; ``OverflowError`` when one does not fit."""
    if isinstance(values, np.ndarray):
        return values.astype(_INT32, copy=False).tobytes()
    return np.fromiter(values, dtype=_INT32).tobytes()


def unpack_int32(column: bytes) -> Int32:
    """Return a read-only int32 view; ``ValueError`` when the length is no multiple of four."""
    return np.frombuffer(column, dtype=_INT32)


def pack_uint32(values: Iterable[int] | npt.NDArray[np.integer]) -> bytes:
    """Pack integers as a uint32 column."""
    if isinstance(values, np.ndarray):
        return values.astype(_UINT32, copy=False).tobytes()
    return np.fromiter(values, dtype=_UINT32).tobytes()


def unpack_uint32(column: bytes) -> UInt32:
    """Return a read-only uint32 view; ``ValueError`` when the length is no multiple of four."""
    return np.frombuffer(column, dtype=_UINT32)
