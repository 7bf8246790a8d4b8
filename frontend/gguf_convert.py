"""Turns a GGUF file into a model folder: the only form in which the engine loads a model.

The folder is what Hugging Face would publish: config.json, generation_config.json,
tokenizer.json, tokenizer_config.json (with the chat template) and model.safetensors in bfloat16.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepinfer.frontend.gguf_file import GGUFFile
from deepinfer.frontend.gguf_model import WeightSource, read_config, weight_sources
from deepinfer.frontend.gguf_tokenizer import read_tokenizer
from deepinfer.frontend.model_cache import Progress, no_progress
from deepinfer.frontend.safetensors_writer import write_bfloat16

# Values dequantised at a time: a few tens of megabytes with the intermediate arrays.
_PIECE_VALUES = 1 << 21


def convert_gguf(path: Path, folder: Path, progress: Progress = no_progress) -> None:
    """Write the model in ``path`` into the existing, empty ``folder``.

    ``ValueError`` names the file and what is broken or not supported in it. Everything but the
    weights' values is checked before the first byte is written.
    """
    with GGUFFile(path) as gguf:
        try:
            config = read_config(gguf)
            sources = weight_sources(gguf, config)
            parts = read_tokenizer(gguf.metadata, config["vocab_size"])
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
        ids = {"bos_token_id": parts.bos_token_id}
        eos = parts.eos_token_ids
        _write_json(
            folder / "config.json", config | ids | {"eos_token_id": eos[0] if eos else None}
        )
        _write_json(folder / "generation_config.json", ids | {"eos_token_id": eos or None})
        _write_json(folder / "tokenizer_config.json", parts.config)
        (folder / "tokenizer.json").write_text(parts.tokenizer.to_str(), encoding="utf-8")
        write_bfloat16(
            folder / "model.safetensors",
            {name: source.shape for name, source in sources.items()},
            _weights(gguf, sources, progress),
        )


def _weights(
    gguf: GGUFFile, sources: dict[str, WeightSource], progress: Progress
) -> Iterator[tuple[str, Iterator[NDArray[np.float32]]]]:
    total = sum(math.prod(source.shape) for source in sources.values())
    done = 0
    for name, source in sources.items():
        progress("converting", done, total)
        yield name, _pieces(gguf, source)
        done += math.prod(source.shape)
    progress("converting", total, total)


def _pieces(gguf: GGUFFile, source: WeightSource) -> Iterator[NDArray[np.float32]]:
    tensor = gguf.tensors[source.gguf_name]
    if len(source.shape) == 1:
        values = gguf.read_rows(tensor, slice(None))[0]
        yield values[_row_order(source)] if source.heads else values
        return
    num_rows, columns = source.shape
    step = max(1, _PIECE_VALUES // columns)
    order = _row_order(source) if source.heads else None
    for start in range(0, num_rows, step):
        rows = slice(start, min(start + step, num_rows))
        # Rows are quantised one by one, so they can be put in order before they are unpacked.
        yield gguf.read_rows(tensor, rows if order is None else order[rows])


def _row_order(source: WeightSource) -> NDArray[np.intp]:
    """Where in the file each row of a Hugging Face q or k projection lies.

    llama.cpp rotates neighbouring pairs (0, 1), (2, 3), …; Hugging Face pairs dimension i of a head
    with i + head_dim / 2. The file's order per head is 0, half, 1, half + 1, ….
    """
    num_rows = source.shape[0]
    half = num_rows // source.heads // 2
    return np.arange(num_rows).reshape(source.heads, half, 2).swapaxes(1, 2).reshape(-1)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
