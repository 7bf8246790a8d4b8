"""Writes a .safetensors file of bfloat16 tensors piece by piece.

The format (https://huggingface.co/docs/safetensors): the header's length as a little-endian
uint64, the header as JSON, then the tensors' bytes in the order of the header. Shapes are known
before any weight is, so the header goes first and no more than one piece is ever in memory.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

_BYTES = 2


def write_bfloat16(
    path: Path,
    shapes: Mapping[str, tuple[int, ...]],
    pieces: Iterable[tuple[str, Iterator[NDArray[np.float32]]]],
) -> None:
    """Write ``pieces`` (per tensor its values in C order, float32, in any cut) rounded to bfloat16.

    The tensors must come in the order of ``shapes``.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, shape in shapes.items():
        end = at + math.prod(shape) * _BYTES
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)))
        file.write(text)
        start = file.tell()
        for name, values in pieces:
            assert file.tell() - start == header[name]["data_offsets"][0], name
            for piece in values:
                file.write(to_bfloat16(piece).data)
        assert file.tell() - start == at


def to_bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Round float32 to the nearest bfloat16, ties to even, as uint16 bits; NaN stays NaN."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> 16) & np.uint32(1))) >> 16
    # Rounding up could carry a NaN's mantissa into infinity or past it: set the quiet bit instead.
    is_nan = (bits & np.uint32(0x7FFF_FFFF)) > np.uint32(0x7F80_0000)
    return np.where(is_nan, (bits >> 16) | np.uint32(0x40), rounded).astype("<u2")
