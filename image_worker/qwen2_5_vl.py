"""Qwen2.5-VL: a picture in its own proportions, window attention, patches merged by fours.

Equal to transformers' Qwen2VLImageProcessorPil and Qwen2_5_VisionTransformerPretrainedModel. Both
frames of a patch are the picture itself, so the two halves of the patch embedding are added once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from deepinfer.image_worker.errors import Deadline, ImageError
from deepinfer.image_worker.layers import Array, Linear, RMSNorm, Team, attention, gelu, silu
from deepinfer.image_worker.model import Column, Encoded, check_rows
from deepinfer.image_worker.processor import (
    Normalizer,
    Pixels,
    edge,
    read_processor,
    resampling,
)
from deepinfer.wire.checkpoint import Checkpoint
from deepinfer.wire.model_folder import Fields

_MAX_RATIO = 200
_MAX_SIZE = 1 << 16
_EPSILON = 1e-6

_PROCESSOR_DEFAULTS: dict[str, Any] = {
    "size": {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280},
    "resample": Image.Resampling.BICUBIC,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "patch_size": 14,
    "merge_size": 2,
    "temporal_patch_size": 2,
}
_VISION_DEFAULTS: dict[str, Any] = {
    "depth": 32,
    "hidden_size": 3584,
    "hidden_act": "silu",
    "intermediate_size": 3420,
    "num_heads": 16,
    "in_channels": 3,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "window_size": 112,
    "out_hidden_size": 3584,
    "fullatt_block_indexes": [7, 15, 23, 31],
    "rope_parameters": {},
}


@dataclass(frozen=True, slots=True)
class Processor:
    """Resizes a picture to whole groups of patches, within bounds on its pixels."""

    normalizer: Normalizer
    resample: Image.Resampling
    min_pixels: int
    max_pixels: int
    patch_edge: int
    merge: int
    frames: int

    @classmethod
    def read(cls, folder: Path) -> Processor:
        """Read the folder's image processor; the older form has ``min_pixels`` beside ``size``."""
        fields = read_processor(folder, _PROCESSOR_DEFAULTS)
        if not fields.flag("do_resize"):
            raise fields.error("do_resize must be true")
        old = {"shortest_edge": "min_pixels", "longest_edge": "max_pixels"}
        low, high = (
            fields.integer(name, 1, 1 << 31) if name in fields.raw else edge(fields, "size", key)
            for key, name in old.items()
        )
        return cls(
            normalizer=Normalizer.read(fields),
            resample=resampling(fields),
            min_pixels=low,
            max_pixels=high,
            patch_edge=fields.integer("patch_size", 1, 1024),
            merge=fields.integer("merge_size", 1, 64),
            frames=fields.integer("temporal_patch_size", 1, 64),
        )

    @property
    def max_rows(self) -> int:
        """No picture becomes more merged patches."""
        factor = self.patch_edge * self.merge
        # One line of groups, when the proportions are at their limit; and the smallest picture,
        # whose edges are both rounded up.
        line = math.isqrt(self.max_pixels * _MAX_RATIO) // factor + 1
        smallest = self.min_pixels / factor**2
        rounded_up = smallest + math.sqrt(smallest * _MAX_RATIO) + math.sqrt(smallest) + 2
        return max(self.max_pixels // factor**2, line, int(rounded_up))

    def __call__(self, image: Image.Image) -> Pixels:
        """Resize an RGB picture; ``ImageError`` when its proportions are out of bounds."""
        return np.asarray(image.resize(self.size_of(*image.size), self.resample))

    def size_of(self, width: int, height: int) -> tuple[int, int]:
        """The size of a picture after resizing (``smart_resize``)."""
        if max(width, height) / min(width, height) > _MAX_RATIO:
            raise ImageError(
                f"it has {width} x {height} pixels: one edge is more than {_MAX_RATIO} times the "
                "other"
            )
        factor = self.patch_edge * self.merge
        new_height = round(height / factor) * factor
        new_width = round(width / factor) * factor
        if new_height * new_width > self.max_pixels:
            beta = math.sqrt(height * width / self.max_pixels)
            new_height = max(factor, math.floor(height / beta / factor) * factor)
            new_width = max(factor, math.floor(width / beta / factor) * factor)
        elif new_height * new_width < self.min_pixels:
            beta = math.sqrt(self.min_pixels / (height * width))
            new_height = math.ceil(height * beta / factor) * factor
            new_width = math.ceil(width * beta / factor) * factor
        return new_width, new_height


class Grid(NamedTuple):
    """Patches of a picture, up and across."""

    height: int
    width: int


@dataclass(frozen=True, slots=True)
class _Layer:
    norm1: RMSNorm
    qkv: Linear
    out: Linear
    norm2: RMSNorm
    gate: Linear
    up: Linear
    down: Linear
    full: bool


class Encoder:
    """The vision tower; patches come with those of one group together."""

    def __init__(self, config: dict[str, Any], checkpoint: Checkpoint, team: Team) -> None:
        whole = Fields(config, {"vision_config": None}, "config.json")
        fields = whole.nested("vision_config", _VISION_DEFAULTS)
        if fields.get("hidden_act") != "silu" or fields.get("in_channels") != 3:
            raise fields.error("hidden_act must be silu and in_channels 3")
        self._team = team
        self._size = size = fields.integer("hidden_size", 1, _MAX_SIZE)
        self._inner = inner = fields.integer("intermediate_size", 1, _MAX_SIZE)
        self._num_heads = fields.integer("num_heads", 1, size)
        self.patch_edge = patch = fields.integer("patch_size", 1, 1024)
        self.frames = frames = fields.integer("temporal_patch_size", 1, 64)
        self.merge = merge = fields.integer("spatial_merge_size", 1, 64)
        self._window = fields.integer("window_size", 1, 1 << 16) // merge // patch
        self.hidden_size = hidden = fields.integer("out_hidden_size", 1, _MAX_SIZE)
        if size % self._num_heads or size // self._num_heads % 4 or not self._window:
            raise fields.error(
                f"hidden_size {size} must be a multiple of 4 for each of num_heads, and a window "
                "hold a group of patches"
            )
        rope = fields.nested("rope_parameters", {"rope_theta": 10000.0})
        half = size // self._num_heads // 2
        exponents = np.arange(0, half, 2, dtype=np.float32) / np.float32(half)
        base = np.float32(rope.number("rope_theta", 0.0, 1e12, low_open=True))
        self._frequencies = np.float32(1) / base**exponents
        full = fields.get("fullatt_block_indexes")
        if not isinstance(full, list):
            raise fields.error("fullatt_block_indexes must be a list")
        prefix = "visual" if checkpoint.has("visual.patch_embed.proj.weight") else "model.visual"

        def weight(name: str, *shape: int) -> Array:
            return checkpoint.weight(f"{prefix}.{name}", shape, "float32")

        def linear(name: str, out: int, into: int) -> Linear:
            return Linear(weight(f"{name}.weight", out, into), weight(f"{name}.bias", out))

        def norm(name: str) -> RMSNorm:
            return RMSNorm(weight(f"{name}.weight", size), _EPSILON)

        embedding = weight("patch_embed.proj.weight", size, 3, frames, patch, patch)
        self._embedding = Linear(embedding.sum(2).reshape(size, -1))
        self._layers = [
            _Layer(
                norm1=norm(f"blocks.{number}.norm1"),
                qkv=linear(f"blocks.{number}.attn.qkv", 3 * size, size),
                out=linear(f"blocks.{number}.attn.proj", size, size),
                norm2=norm(f"blocks.{number}.norm2"),
                gate=linear(f"blocks.{number}.mlp.gate_proj", inner, size),
                up=linear(f"blocks.{number}.mlp.up_proj", inner, size),
                down=linear(f"blocks.{number}.mlp.down_proj", size, inner),
                full=number in full,
            )
            for number in range(fields.integer("depth", 0, 1024))
        ]
        group = size * merge * merge
        self._last_norm = norm("merger.ln_q")
        self._merge_up = linear("merger.mlp.0", group, group)
        self._merge_down = linear("merger.mlp.2", hidden, group)

    def workspace_bytes(self, rows: int) -> int:
        """Memory for a picture of so many merged rows, the embeddings among it."""
        patches = rows * self.merge**2
        numbers = 3 * self.patch_edge**2
        group = self._size * self.merge**2
        of_thread = 1 << 24 | 256 * 4 * 4 * max(self._inner, group)
        return (
            4 * patches * (2 * numbers + 7 * self._size)
            + 4 * rows * 2 * self.hidden_size
            + self._team.num_threads * of_thread
        )

    def __call__(self, patches: Array, grid: Grid, deadline: Deadline) -> Array:
        """Embeddings [groups, hidden size] of patches [count, numbers], group by group."""
        team, unit = self._team, self.merge**2
        count = len(patches)
        order, windows = window_order(grid, self.merge, self._window)
        by_window = (order[:, None] * unit + np.arange(unit)).reshape(-1)
        cos, sin = self._rotation(grid, by_window)
        states = np.empty((count, self._size), np.float32)

        def embed(rows: slice) -> None:
            states[rows] = self._embedding(patches[by_window[rows]])

        team.rows(embed, count)
        query, key, value = np.empty((3, count, self._size), np.float32)
        lengths = [length * unit for length in windows]
        for layer in self._layers:
            deadline.check()

            def before(rows: slice, layer: _Layer = layer) -> None:
                mixed = layer.qkv(layer.norm1(states[rows])).reshape(-1, 3, self._size)
                self._rotate(mixed[:, 0], cos[rows], sin[rows], query[rows])
                self._rotate(mixed[:, 1], cos[rows], sin[rows], key[rows])
                value[rows] = mixed[:, 2]

            team.rows(before, count)
            segments = [count] if layer.full else lengths
            seen = attention(team, query, key, value, self._num_heads, segments)

            def after(rows: slice, layer: _Layer = layer, seen: Array = seen) -> None:
                states[rows] += layer.out(seen[rows])
                normed = layer.norm2(states[rows])
                inner = silu(layer.gate(normed))
                inner *= layer.up(normed)
                states[rows] += layer.down(inner)

            team.rows(after, count)
        deadline.check()
        out = np.empty((count // unit, self.hidden_size), np.float32)

        def merge(rows: slice) -> None:
            normed = self._last_norm(states[rows.start * unit : rows.stop * unit])
            groups = gelu(self._merge_up(normed.reshape(rows.stop - rows.start, -1)))
            out[order[rows]] = self._merge_down(groups)

        team.rows(merge, count // unit)
        return out

    def _rotation(self, grid: Grid, by_window: Column) -> tuple[Array, Array]:
        """Cosines and sines [patches, 1, half a head]: of the height's angles, the width's."""
        merge = self.merge
        parts = (grid.height // merge, merge, grid.width // merge, merge)
        places = np.indices(grid).reshape(2, *parts).swapaxes(2, 3).reshape(2, -1)
        angles = places[:, by_window, None].astype(np.float32) * self._frequencies
        both = np.concatenate([angles[0], angles[1]], -1)[:, None]
        return np.cos(both), np.sin(both)

    def _rotate(self, values: Array, cos: Array, sin: Array, out: Array) -> None:
        heads = values.reshape(len(values), self._num_heads, 2, -1)
        into = out.reshape(heads.shape)
        first, second = heads[:, :, 0], heads[:, :, 1]
        into[:, :, 0] = first * cos - second * sin
        into[:, :, 1] = second * cos + first * sin


def window_order(grid: Grid, merge: int, window: int) -> tuple[Column, list[int]]:
    """The groups of patches window by window, and how many of them each window has."""
    rows, columns = grid.height // merge, grid.width // merge
    groups = np.arange(rows * columns, dtype=np.int32).reshape(rows, columns)
    row_cuts = [*range(0, rows, window), rows]
    column_cuts = [*range(0, columns, window), columns]
    windows = [
        groups[top:bottom, left:right].reshape(-1)
        for top, bottom in pairwise(row_cuts)
        for left, right in pairwise(column_cuts)
    ]
    return np.concatenate(windows), [len(part) for part in windows]


class Qwen2_5VL:  # noqa: N801
    """``VisionModel`` of the family."""

    def __init__(self, processor: Processor, encoder: Encoder, placeholder: int) -> None:
        self.processor = processor
        self.encoder = encoder
        self.placeholder = placeholder
        self.hidden_size = encoder.hidden_size
        self.max_rows = processor.max_rows

    @classmethod
    def load(
        cls,
        config: dict[str, Any],
        folder: Path,
        tokenizer_folder: Path,
        checkpoint: Checkpoint,
        team: Team,
    ) -> Qwen2_5VL:
        """Read the family's part of a model folder; its tokenizer has no say in it."""
        placeholder = Fields(config, {"image_token_id": 151655}, "config.json").integer(
            "image_token_id", 0, 1 << 31
        )
        processor = Processor.read(folder)
        encoder = Encoder(config, checkpoint, team)
        theirs = (processor.patch_edge, processor.merge, processor.frames)
        ours = (encoder.patch_edge, encoder.merge, encoder.frames)
        if theirs != ours:
            raise Fields({}, {}, "preprocessor_config.json").error(
                f"patch_size, merge_size and temporal_patch_size are {theirs}, "
                f"those of config.json {ours}"
            )
        return cls(processor, encoder, placeholder)

    def encode(self, image: Image.Image, max_rows: int, deadline: Deadline) -> Encoded:
        """Resize and encode; all tokens are the placeholder's own."""
        merge, patch = self.encoder.merge, self.encoder.patch_edge
        width, height = self.processor.size_of(*image.size)
        check_rows(width * height // (merge * patch) ** 2, max_rows)
        pixels = self.processor(image)
        grid = Grid(pixels.shape[0] // patch, pixels.shape[1] // patch)
        patches = self.processor.normalizer.patches(pixels, patch, merge)
        embeddings = self.encoder(patches, grid, deadline)
        rows = len(embeddings)
        return Encoded(
            tokens=np.full(rows, self.placeholder, np.int32),
            runs=np.array([[0, rows]], np.int32),
            grid=(1, grid.height // merge, grid.width // merge),
            embeddings=embeddings,
        )

    def workspace_bytes(self, rows: int) -> int:
        """That of the encoder and the resized picture, three times."""
        pixels = rows * (self.encoder.merge * self.encoder.patch_edge) ** 2
        return self.encoder.workspace_bytes(rows) + 3 * 4 * pixels
