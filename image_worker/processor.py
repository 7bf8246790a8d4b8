"""What image processors of all families share: their configuration, resizing, normalising.

The reference is transformers' Pillow backend. Pictures stay 8-bit through every resize, so what
scaling and normalising make of a number is one of 256 values: they are looked up.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from deepinfer.wire.checks import shown
from deepinfer.wire.model_folder import Fields, read_json

Pixels = npt.NDArray[np.uint8]
"""[height, width, 3]"""

_DEFAULTS = {
    "do_resize": True,
    "do_rescale": True,
    "do_normalize": True,
    "rescale_factor": 1 / 255,
}


def read_processor(folder: Path, defaults: dict[str, Any]) -> Fields:
    """The fields of a folder's image processor, in the newer or the older of its two files."""
    nested = folder / "processor_config.json"
    name = "preprocessor_config.json"
    found = read_json(nested).get("image_processor") if nested.exists() else None
    if found is None:
        found = read_json(folder / name)
    else:
        name = "processor_config.json: image_processor"
    fields = Fields(found if isinstance(found, dict) else {}, {**_DEFAULTS, **defaults}, name)
    # Null means the default, as for transformers.
    fields.raw = {key: value for key, value in fields.raw.items() if value is not None}
    return fields


def edge(fields: Fields, name: str, key: str) -> int:
    """A length in pixels out of an object such as ``{"longest_edge": 512}``."""
    return fields.nested(name, {}).integer(key, 1, 1 << 31)


@dataclass(frozen=True, slots=True)
class Normalizer:
    """``table`` [3, 256]: the number that stands for each value of each colour."""

    table: npt.NDArray[np.float32]

    @classmethod
    def read(cls, fields: Fields) -> Normalizer:
        """Compute the table as the processor computes: scaled in float64, then in float32."""
        values: Any = np.arange(256, dtype=np.uint8)
        if fields.flag("do_rescale"):
            values = values.astype(np.float64) * fields.number("rescale_factor", 0.0, 1e9)
        table = np.tile(values.astype(np.float32), (3, 1))
        if fields.flag("do_normalize"):
            mean = np.array(_colours(fields, "image_mean"), np.float32)[:, None]
            table = (table - mean) / np.array(_colours(fields, "image_std"), np.float32)[:, None]
        return cls(table)

    def patches(self, pixels: Pixels, size: int, merge: int = 1) -> npt.NDArray[np.float32]:
        """The normalised patches of a picture, [patches, 3 * size * size], colours outermost.

        Row by row; with ``merge``, squares of that many patches each way are together. What is left
        over at the right and at the bottom is left out.
        """
        step = size * merge
        rows, columns = pixels.shape[0] // step, pixels.shape[1] // step
        cut = pixels[: rows * step, : columns * step]
        parts = cut.reshape(rows, merge, size, columns, merge, size, 3)
        ordered = parts.transpose(0, 3, 1, 4, 6, 2, 5).reshape(-1, 3, size * size)
        out = np.empty(ordered.shape, np.float32)
        for colour in range(3):
            np.take(self.table[colour], ordered[:, colour], out=out[:, colour], mode="clip")
        return out.reshape(len(out), -1)


def resampling(fields: Fields) -> Image.Resampling:
    """The filter of the processor's resizes."""
    return Image.Resampling(fields.integer("resample", 0, 5))


def _colours(fields: Fields, name: str) -> list[float]:
    value = fields.get(name)
    numbers = value if isinstance(value, list) else [value] * 3
    low_open = name == "image_std"
    if len(numbers) != 3:
        raise fields.error(f"{name} must be three numbers, got {shown(value)}")
    low = 0.0 if low_open else -1e9
    return [
        Fields({name: number}, {}, fields.source).number(name, low, 1e9, low_open=low_open)
        for number in numbers
    ]
