"""The header of a GGUF file, read without trusting it.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Every count and offset is
held against the size of the file before it is used, so a broken file costs no more time or memory
than its own size and always ends in ``ValueError``.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType
from gguf.quants import dequantize
from numpy.typing import NDArray

from deepinfer.wire.checks import shown

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_MAX_DIMS = 4
_MAX_KEY_BYTES = 65_535

# Smallest possible entries: key length, key, type, value; name length, name, rank, dimension,
# type, offset. They bound the counts in the header by the bytes that are there.
_MIN_FIELD_BYTES = 8 + 4 + 1
_MIN_TENSOR_BYTES = 8 + 4 + 8 + 4 + 8

_SCALARS = {
    GGUFValueType.UINT8: "<B",
    GGUFValueType.INT8: "<b",
    GGUFValueType.UINT16: "<H",
    GGUFValueType.INT16: "<h",
    GGUFValueType.UINT32: "<I",
    GGUFValueType.INT32: "<i",
    GGUFValueType.FLOAT32: "<f",
    GGUFValueType.BOOL: "<?",
    GGUFValueType.UINT64: "<Q",
    GGUFValueType.INT64: "<q",
    GGUFValueType.FLOAT64: "<d",
}

# What llama.cpp's quantizer puts into a language model; the rest is integers and experiments.
SUPPORTED_TYPES = (
    *("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"),
    *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS"),
)


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """One tensor: ``shape`` in numpy order (rows first), ``offset`` from the start of the file."""

    name: str
    shape: tuple[int, ...]
    type: GGMLQuantizationType
    offset: int
    num_bytes: int


class GGUFFile:
    """A GGUF file, memory-mapped: its ``metadata`` and its ``tensors`` by name.

    Use as a context manager. Opening raises ``ValueError`` naming what is wrong with the file and
    ``OSError`` when it cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as file:
            if path.stat().st_size < 4:
                raise ValueError(f"{path}: not a GGUF file (shorter than its header)")
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, GGUFTensor] = {}
        try:
            self._read_header()
        except ValueError as error:
            self._map.close()
            raise ValueError(f"{path}: {error}") from None

    def __enter__(self) -> GGUFFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self._map.close()

    def read_rows(self, tensor: GGUFTensor, rows: slice | NDArray[np.intp]) -> NDArray[np.float32]:
        """The chosen rows as float32 ``[len(rows), columns]``; a vector is one row.

        The rows are copied, so that no array keeps the mapping open.
        """
        num_rows = math.prod(tensor.shape[:-1])
        stored = np.frombuffer(self._map, np.uint8, tensor.num_bytes, tensor.offset)
        chosen = np.array(stored.reshape(num_rows, -1)[rows])
        with np.errstate(all="ignore"):  # a block's scale may be inf or NaN; it stays one
            return np.asarray(dequantize(chosen, tensor.type), np.float32)

    def _read_header(self) -> None:
        if self._map[:4] != _MAGIC:
            raise ValueError(f"not a GGUF file (starts with {self._map[:4]!r})")
        cursor = _Cursor(self._map)
        cursor.at = 4
        version = cursor.number("<I")
        if version not in _VERSIONS:
            raise ValueError(f"GGUF version must be one of {_VERSIONS}, got {version}")
        num_tensors, num_fields = cursor.number("<Q"), cursor.number("<Q")
        cursor.check_count("tensor count", num_tensors, _MIN_TENSOR_BYTES)
        cursor.check_count("metadata count", num_fields, _MIN_FIELD_BYTES)
        for _ in range(num_fields):
            key = cursor.string("metadata key", _MAX_KEY_BYTES)
            if key in self.metadata:
                raise ValueError(f"metadata key {shown(key)} appears twice")
            self.metadata[key] = cursor.value(key)
        found = [_read_tensor(cursor) for _ in range(num_tensors)]
        self._place(found, cursor.at)

    def _place(self, found: list[GGUFTensor], header_end: int) -> None:
        """Turn offsets into the data section into offsets into the file, and check them."""
        alignment = self.metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or not 1 <= alignment <= 1 << 20:
            raise ValueError(f"general.alignment must be in 1..{1 << 20}, got {shown(alignment)}")
        start = -(-header_end // alignment) * alignment
        size = len(self._map)
        for tensor in found:
            end = start + tensor.offset + tensor.num_bytes
            if end > size:
                raise ValueError(
                    f"tensor {shown(tensor.name)} ends at byte {end} of a file of {size}: truncated"
                )
            if tensor.name in self.tensors:
                raise ValueError(f"tensor {shown(tensor.name)} appears twice")
            self.tensors[tensor.name] = GGUFTensor(
                tensor.name, tensor.shape, tensor.type, start + tensor.offset, tensor.num_bytes
            )
        # Tensors that share bytes would let a small file claim any amount of weights.
        end = start
        for tensor in sorted(self.tensors.values(), key=lambda tensor: tensor.offset):
            if tensor.offset < end:
                raise ValueError(f"tensor {shown(tensor.name)} overlaps another")
            end = tensor.offset + tensor.num_bytes


class _Cursor:
    """Reads little-endian values one after the other and never past the end."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.size = len(data)
        self.at = 0

    def number(self, fmt: str) -> Any:
        end = self.at + struct.calcsize(fmt)
        if end > self.size:
            raise ValueError(f"header ends at byte {self.size}: truncated")
        (value,) = struct.unpack_from(fmt, self.data, self.at)
        self.at = end
        return value

    def check_count(self, what: str, count: int, min_bytes: int) -> None:
        if count * min_bytes > self.size - self.at:
            raise ValueError(f"{what} {count} does not fit in the file's {self.size} bytes")

    def string(self, what: str, limit: int | None = None) -> str:
        length = self.number("<Q")
        if limit is not None and length > limit:
            raise ValueError(f"{what} of {length} bytes; at most {limit} are allowed")
        self.check_count(f"length of {what}", length, 1)
        raw = self.data[self.at : self.at + length]
        self.at += length
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            raise ValueError(f"{what} is not UTF-8: {shown(raw)}") from None

    def value_type(self, what: str) -> GGUFValueType:
        number = self.number("<I")
        try:
            return GGUFValueType(number)
        except ValueError:
            raise ValueError(f"{what} has unknown value type {number}") from None

    def value(self, key: str) -> Any:
        """A number, bool or string, or a list of them (arrays of arrays are not in use)."""
        what = f"metadata key {shown(key)}"
        kind = self.value_type(what)
        if kind in _SCALARS:
            return self.number(_SCALARS[kind])
        if kind is GGUFValueType.STRING:
            return self.string(what)
        kind = self.value_type(what)
        count = self.number("<Q")
        if kind is GGUFValueType.STRING:
            self.check_count(f"{what}: length", count, 8)
            return [self.string(what) for _ in range(count)]
        if kind not in _SCALARS:
            raise ValueError(f"{what} is an array of arrays, which is not supported")
        dtype = np.dtype(_SCALARS[kind])
        self.check_count(f"{what}: length", count, dtype.itemsize)
        values = np.frombuffer(self.data, dtype, count, self.at).tolist()
        self.at += count * dtype.itemsize
        return values


def _read_tensor(cursor: _Cursor) -> GGUFTensor:
    name = cursor.string("tensor name", _MAX_KEY_BYTES)
    what = f"tensor {shown(name)}"
    rank = cursor.number("<I")
    if not 1 <= rank <= _MAX_DIMS:
        raise ValueError(f"{what} must have 1 to {_MAX_DIMS} dimensions, got {rank}")
    # GGUF lists the fastest dimension first.
    shape = tuple(reversed([cursor.number("<Q") for _ in range(rank)]))
    if 0 in shape:
        raise ValueError(f"{what} has an empty dimension: {shape}")
    number = cursor.number("<I")
    try:
        kind = GGMLQuantizationType(number)
        block, block_bytes = GGML_QUANT_SIZES[kind]
    except (ValueError, KeyError):
        raise ValueError(f"{what} has unknown type {number}") from None
    if kind.name not in SUPPORTED_TYPES:
        raise ValueError(f"{what} has type {kind.name}; supported are {', '.join(SUPPORTED_TYPES)}")
    if shape[-1] % block:
        raise ValueError(f"{what}: rows of {shape[-1]} are no multiple of {kind.name}'s {block}")
    num_bytes = math.prod(shape) // block * block_bytes
    return GGUFTensor(name, shape, kind, cursor.number("<Q"), num_bytes)
