"""Pictures per second of the image worker's processor and encoder, beside transformers'.

Both in one process, on the same pictures and the same number of threads, turn by turn: a picture
by the one, then by the other. The model has the sizes of SmolVLM-256M's vision side (SigLIP-B/16 at
512 pixels) or of a narrow Qwen2.5-VL tower, with random weights: their values do not change the
time. Before it measures it checks that both give the same embeddings.

Run it alone on the machine: ``python benchmarks/image_worker.py``.
"""

from __future__ import annotations

import os

os.environ["OPENBLAS_NUM_THREADS"] = "1"  # as the worker does it, before numpy is imported

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from deepinfer.image_worker.errors import Deadline
from deepinfer.image_worker.layers import Team
from deepinfer.image_worker.model import load
from support.vision_checkpoints import (
    make_vision_checkpoint,
    picture,
    reference_model,
    reference_processor,
)

SHAPES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "idefics3": (
        {
            "hidden_size": 768,
            "intermediate_size": 3072,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
            "image_size": 512,
            "patch_size": 16,
        },
        {"size": {"longest_edge": 512}, "max_image_size": {"longest_edge": 512}},
    ),
    "qwen2_5_vl": (
        {
            "depth": 12,
            "hidden_size": 768,
            "intermediate_size": 2048,
            "num_heads": 12,
            "fullatt_block_indexes": [5, 11],
        },
        {"size": {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 384}},
    ),
}
NO_LIMIT = 1 << 30


def measure(family: str, sizes: list[tuple[int, int]], rounds: int, threads: int) -> dict[str, Any]:
    vision, processor = SHAPES[family]
    torch.set_num_threads(threads)
    with tempfile.TemporaryDirectory() as name:
        folder = make_vision_checkpoint(family, Path(name), vision=vision, processor=processor)
        model = load(folder, folder, Team(threads))
        theirs = reference_model(folder, attention="sdpa")
        their_processor = reference_processor(family, folder)
    seconds = {"deepinfer": 0.0, "transformers": 0.0}
    rows, error = 0, 0.0
    for turn in range(rounds + 1):
        for size in sizes if turn else sizes[:1]:  # the first is to warm up
            image = picture(*size)
            start = time.perf_counter()
            ours = model.encode(image, NO_LIMIT, Deadline(3600)).embeddings
            between = time.perf_counter()
            inputs = their_processor(image, return_tensors="pt")
            with torch.no_grad():
                found = theirs.model.get_image_features(**inputs, return_dict=True)
            reference = torch.cat(list(found.pooler_output)).numpy()
            end = time.perf_counter()
            error = max(error, float(np.abs(ours - reference).max() / np.abs(reference).max()))
            if turn:
                rows += len(ours)
                seconds["deepinfer"] += between - start
                seconds["transformers"] += end - between
    pictures = rounds * len(sizes)
    return {
        "family": family,
        "threads": threads,
        "pictures": pictures,
        "tokens": rows,
        "relative_error": error,
        **{f"{name}_pictures_per_s": pictures / spent for name, spent in seconds.items()},
        "ratio": seconds["transformers"] / seconds["deepinfer"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--family", choices=list(SHAPES), action="append")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    options = parser.parse_args()
    for family in options.family or SHAPES:
        found = measure(family, [(640, 480), (480, 640)], options.rounds, options.threads)
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
