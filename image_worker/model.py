"""The vision side of a model folder: what turns a picture into tokens and embeddings."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from PIL import Image

from deepinfer.image_worker.errors import Deadline, ImageError
from deepinfer.image_worker.layers import Array, Team
from deepinfer.wire.checkpoint import Checkpoint
from deepinfer.wire.checks import shown
from deepinfer.wire.model_folder import ModelError, read_json

Column = npt.NDArray[np.int32]


class Encoded(NamedTuple):
    """An image as the text model takes it; ``EncodedImage`` says what the parts are.

    - ``tokens`` [count], ``runs`` [runs, 2].
    - ``embeddings`` [rows, hidden size], of the tokens of all runs.
    """

    tokens: Column
    runs: Column
    grid: tuple[int, ...]
    embeddings: Array


class VisionModel(Protocol):
    """A family's processor and encoder."""

    placeholder: int
    hidden_size: int
    max_rows: int
    """No image becomes more rows of embeddings."""

    def encode(self, image: Image.Image, max_rows: int, deadline: Deadline) -> Encoded:
        """Turn an RGB picture into at most ``max_rows`` rows; ``ImageError`` when it cannot be."""

    def workspace_bytes(self, rows: int) -> int:
        """Memory that ``encode`` takes, at most, for an image that becomes so many rows."""


def check_rows(rows: int, max_rows: int) -> None:
    """Refuse an image that would become too many rows, before its encoder runs."""
    if rows > max_rows:
        raise ImageError(f"it becomes {rows} tokens, and the engine has room for {max_rows}")


def load(folder: Path, tokenizer_folder: Path, team: Team) -> VisionModel:
    """Read what a model's images need; ``ModelError`` for a model that takes none, or is broken."""
    from deepinfer.image_worker.idefics3 import Idefics3
    from deepinfer.image_worker.qwen2_5_vl import Qwen2_5VL

    families: dict[str, type[Idefics3] | type[Qwen2_5VL]] = {
        "Idefics3ForConditionalGeneration": Idefics3,
        "SmolVLMForConditionalGeneration": Idefics3,
        "Qwen2_5_VLForConditionalGeneration": Qwen2_5VL,
    }
    config = read_json(folder / "config.json")
    names = config.get("architectures")
    for name in names if isinstance(names, list) else []:
        if name in families:
            return families[name].load(config, folder, tokenizer_folder, Checkpoint(folder), team)
    raise ModelError(
        f"config.json: architectures is {shown(names)}; those that take images are "
        f"{', '.join(families)}"
    )
