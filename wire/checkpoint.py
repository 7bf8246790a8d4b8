"""The tensors of a model folder: safetensors files, mapped into memory and checked.

The format (https://github.com/huggingface/safetensors#format): eight bytes little-endian header
length, a JSON object from tensor name to dtype, shape and byte range, then the bytes. The header
is read here because the official numpy interface cannot represent bfloat16, and the mapping keeps
the file from being copied into memory a second time beside the packed weights.
"""

from __future__ import annotations

import json
import mmap
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from deepinfer.wire.checks import shown
from deepinfer.wire.model_folder import ModelError, read_json

Array = npt.NDArray[Any]

_MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_MAX_DIMENSIONS = 16
_CONVERT_ELEMENTS = 1 << 20
_DTYPES: dict[str, Any] = {"BF16": np.uint16, "F16": np.float16, "F32": np.float32}


@dataclass(frozen=True, slots=True)
class _Tensor:
    """Where one tensor lies: ``begin`` and ``end`` are byte offsets in the mapped file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class SafetensorsFile:
    """One memory-mapped .safetensors file; opening it checks the whole header.

    Raises ``ModelError`` naming the file, and the tensor where one is at fault.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                # An empty file cannot be mapped; the message for a short header fits it too.
                size = file.seek(0, 2)
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else b""
        except OSError as error:
            raise ModelError(f"{path}: cannot be read: {error.strerror}") from error
        self.tensors = self._read_header()

    def view(self, name: str) -> tuple[str, Array]:
        """File dtype and read-only array of a tensor; BF16 comes as uint16, without a copy."""
        tensor = self.tensors[name]
        if tensor.dtype not in _DTYPES:
            raise self._error(
                f"tensor {name} has dtype {tensor.dtype}; supported are {', '.join(_DTYPES)}"
            )
        flat = np.frombuffer(
            self._map, _DTYPES[tensor.dtype], count=prod(tensor.shape), offset=tensor.begin
        )
        # The format does not promise alignment, and kernels compiled for aligned data rely on it.
        return tensor.dtype, np.require(flat, requirements="A").reshape(tensor.shape)

    def _read_header(self) -> dict[str, _Tensor]:
        length = int.from_bytes(self._map[:8], "little")
        start = 8 + length
        if len(self._map) < 8 or start > len(self._map):
            raise self._error(f"truncated: the header needs {start} bytes, has {len(self._map)}")
        if length > _MAX_HEADER_BYTES:
            raise self._error(f"header of {length} bytes is above the limit {_MAX_HEADER_BYTES}")
        try:
            header = json.loads(self._map[8:start])
        except (ValueError, RecursionError) as error:
            raise self._error(f"header is not valid JSON: {error}") from error
        if not isinstance(header, dict):
            raise self._error(f"header must be an object, got {shown(header)}")
        header.pop("__metadata__", None)
        tensors = {name: self._entry(name, value, start) for name, value in header.items()}

        # The format allows neither holes nor overlaps, so the ranges must tile the data exactly.
        end = start
        for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end)):
            if tensor.begin != end:
                raise self._error(f"tensor {shown(name)} overlaps another or follows a hole")
            end = tensor.end
        if end != len(self._map):
            raise self._error(f"the header describes {end} bytes, the file has {len(self._map)}")
        return tensors

    def _entry(self, name: str, value: Any, start: int) -> _Tensor:
        if not isinstance(value, dict):
            raise self._error(f"tensor {shown(name)} must be described by an object")
        dtype: Any = value.get("dtype")
        shape: Any = value.get("shape")
        offsets: Any = value.get("data_offsets")
        if not isinstance(dtype, str):
            raise self._error(f"tensor {shown(name)} has no dtype")
        if not _is_sizes(shape):
            raise self._error(f"tensor {shown(name)} has a bad shape")
        if not _is_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
            raise self._error(f"tensor {shown(name)} has bad data_offsets")
        begin, end = start + offsets[0], start + offsets[1]
        if end > len(self._map):
            raise self._error(
                f"truncated: tensor {shown(name)} ends at byte {end}, the file has {len(self._map)}"
            )
        # Python's integers cannot overflow, so a shape made to wrap around is caught here.
        if dtype in _DTYPES and prod(shape) * np.dtype(_DTYPES[dtype]).itemsize != end - begin:
            raise self._error(
                f"tensor {shown(name)} has {end - begin} bytes, which does not fit {dtype} {shape}"
            )
        return _Tensor(dtype, tuple(shape), begin, end)

    def _error(self, message: str) -> ModelError:
        return ModelError(f"{self.path}: {message}")


def _is_sizes(value: Any) -> bool:
    return (
        isinstance(value, list)
        and len(value) <= _MAX_DIMENSIONS
        and all(type(size) is int and 0 <= size < 1 << 63 for size in value)
    )


class Checkpoint:
    """All tensors of a model folder, in ``model.safetensors`` or in the shards its index names."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        index = folder / "model.safetensors.index.json"
        single = folder / "model.safetensors"
        self._files: dict[str, SafetensorsFile] = {}
        if single.exists():
            file = SafetensorsFile(single)
            self._files = dict.fromkeys(file.tensors, file)
        elif index.exists():
            self._files = _open_shards(folder, index)
        else:
            raise ModelError(
                f"{folder}: neither model.safetensors nor model.safetensors.index.json is there; "
                "only the safetensors format is supported"
            )
        self._unread = set(self._files)

    def has(self, name: str) -> bool:
        """Whether there is a tensor of this name."""
        return name in self._files

    def weight(self, name: str, shape: tuple[int, ...], dtype: str) -> Array:
        """A tensor in storage dtype: float32, or bfloat16 as uint16 (round to nearest even).

        A view of the file when it has that dtype already, else a converted copy. ``dtype`` is
        "float32" or "bfloat16". Raises ``ModelError`` when missing or of another shape.
        """
        if name not in self._files:
            raise ModelError(f"{self.folder}: tensor {name} is missing")
        file = self._files[name]
        if file.tensors[name].shape != shape:
            raise ModelError(
                f"{file.path}: tensor {name} has shape {list(file.tensors[name].shape)}, "
                f"config.json asks for {list(shape)}"
            )
        self._unread.discard(name)
        stored, array = file.view(name)
        return _converted(array, stored, dtype)

    def ignore(self, *names: str) -> None:
        """Mark tensors, there or not, as known to be of no use."""
        self._unread.difference_update(names)

    def ignore_below(self, *names: str) -> None:
        """Mark the tensors whose names begin with one of ``names`` and a dot: others read them."""
        below = tuple(f"{name}." for name in names)
        self.ignore(*(tensor for tensor in self._files if tensor.startswith(below)))

    def check_all_read(self) -> None:
        """Raise ``ModelError`` when a tensor was neither read nor ignored.

        Such a tensor means that config.json describes another model than the weights; running
        it would give wrong text without a word.
        """
        if self._unread:
            names = sorted(self._unread)
            file = self._files[names[0]]
            raise ModelError(
                f"{file.path}: {len(names)} tensors have no place in the model config.json "
                f"describes, for example {', '.join(shown(name) for name in names[:3])}"
            )


def _open_shards(folder: Path, index: Path) -> dict[str, SafetensorsFile]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{index}: weight_map must map tensor names to files")
    opened: dict[str, SafetensorsFile] = {}
    files = {}
    for name, shard in weight_map.items():
        # A shard must be a plain name, or an index could read any file of the machine.
        if not isinstance(shard, str) or Path(shard).name != shard or "\0" in shard:
            raise ModelError(f"{index}: {shown(shard)} is not a file name in the model folder")
        if shard not in opened:
            opened[shard] = SafetensorsFile(folder / shard)
        if name not in opened[shard].tensors:
            raise ModelError(f"{folder / shard}: tensor {shown(name)} of the index is missing")
        files[name] = opened[shard]
    return files


def _converted(array: Array, stored: str, dtype: str) -> Array:
    """``array`` in storage dtype, converted a slice at a time so that temporaries stay small."""
    if (stored, dtype) in (("F32", "float32"), ("BF16", "bfloat16")):
        return array
    source = array.reshape(-1)
    out = np.empty(source.size, np.float32 if dtype == "float32" else np.uint16)
    for begin in range(0, source.size, _CONVERT_ELEMENTS):
        part = source[begin : begin + _CONVERT_ELEMENTS]
        values = bfloat16_to_float32(part) if stored == "BF16" else part.astype(np.float32)
        out[begin : begin + part.size] = (
            values if dtype == "float32" else float32_to_bfloat16(values)
        )
    return out.reshape(array.shape)


def bfloat16_to_float32(bits: Array) -> Array:
    """Exact float32 values of bfloat16 numbers given as uint16; any shape."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def float32_to_bfloat16(values: Array) -> Array:
    """Nearest bfloat16 (ties to even) as uint16; NaN stays NaN; any shape."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    # Adding just under half of the cut-off part, plus one when the kept part is odd, rounds to
    # even. It would carry a NaN's mantissa into infinity, so those keep only a quiet bit.
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16
    quiet = (bits >> 16) | np.uint32(0x40)
    return np.where(np.isnan(values), quiet, rounded).astype(np.uint16)
