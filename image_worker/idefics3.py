"""Idefics3 and SmolVLM: a picture in square tiles and once as a whole, SigLIP, pixel shuffle.

Equal to transformers' Idefics3ImageProcessorPil, Idefics3Processor and Idefics3Model.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tokenizers
from PIL import Image

from deepinfer.image_worker.errors import Deadline
from deepinfer.image_worker.layers import Array, LayerNorm, Linear, Team, attention, gelu_tanh
from deepinfer.image_worker.model import Column, Encoded, check_rows
from deepinfer.image_worker.processor import (
    Normalizer,
    Pixels,
    edge,
    read_processor,
    resampling,
)
from deepinfer.wire.checkpoint import Checkpoint
from deepinfer.wire.model_folder import Fields, ModelError, read_json

_FAKE, _IMAGE, _GLOBAL = "<fake_token_around_image>", "<image>", "<global-img>"
_MAX_EDGE = 4096
_ROWS_AT_ONCE = 4096
_MAX_SIZE = 1 << 16

_PROCESSOR_DEFAULTS: dict[str, Any] = {
    "size": {"longest_edge": 4 * 364},
    "max_image_size": {"longest_edge": 364},
    "do_image_splitting": True,
    "resample": Image.Resampling.LANCZOS,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
_VISION_DEFAULTS: dict[str, Any] = {
    "hidden_size": 1152,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_channels": 3,
    "image_size": 224,
    "patch_size": 32,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
}


class Tiles(NamedTuple):
    """A picture's parts, all of one size, the whole one last; ``rows`` is 0 when it is alone."""

    tiles: list[Pixels]
    rows: int
    columns: int


@dataclass(frozen=True, slots=True)
class Processor:
    """Cuts a picture into tiles. ``longest_edge`` is ``None`` when pictures keep their size."""

    normalizer: Normalizer
    resample: Image.Resampling
    longest_edge: int | None
    tile_edge: int
    split: bool

    @classmethod
    def read(cls, folder: Path) -> Processor:
        """Read the folder's image processor."""
        fields = read_processor(folder, _PROCESSOR_DEFAULTS)
        return cls(
            normalizer=Normalizer.read(fields),
            resample=resampling(fields),
            longest_edge=edge(fields, "size", "longest_edge") if fields.flag("do_resize") else None,
            tile_edge=edge(fields, "max_image_size", "longest_edge"),
            split=fields.flag("do_image_splitting"),
        )

    @property
    def max_tiles(self) -> int:
        """No picture becomes more."""
        if not self.split:
            return 1
        # The shorter edge is made even, which may add a pixel.
        longest = min(self.longest_edge or _MAX_EDGE, _MAX_EDGE) + 1
        return math.ceil(longest / self.tile_edge) ** 2 + 1

    def __call__(self, image: Image.Image) -> Tiles:
        """Resize and cut an RGB picture."""
        edge = self.tile_edge
        if self.longest_edge is not None:
            image = self._resized(image, *_within(*image.size, self.longest_edge))
        if not self.split:
            return Tiles([np.asarray(self._resized(image, edge, edge))], 0, 0)
        image = self._resized(image, *_multiples(*image.size, edge))
        columns, rows = image.width // edge, image.height // edge
        if columns == rows == 1:
            return Tiles([np.asarray(image)], 0, 0)
        pixels = np.asarray(image)
        tiles = [
            pixels[row * edge : (row + 1) * edge, column * edge : (column + 1) * edge]
            for row in range(rows)
            for column in range(columns)
        ]
        tiles.append(np.asarray(self._resized(image, edge, edge)))
        return Tiles(tiles, rows, columns)

    def _resized(self, image: Image.Image, width: int, height: int) -> Image.Image:
        return image.resize((width, height), self.resample)


def _within(width: int, height: int, longest: int) -> tuple[int, int]:
    """The size with this longest edge, the other one even; then at most ``_MAX_EDGE``."""
    ratio = width / height
    if width >= height:
        width, height = longest, int(longest / ratio)
        height = max(1, height + height % 2)
    else:
        width, height = int(longest * ratio), longest
        width = max(1, width + width % 2)
    ratio = width / height
    if width >= height and width > _MAX_EDGE:
        width, height = _MAX_EDGE, int(_MAX_EDGE / ratio)
    elif height > width and height > _MAX_EDGE:
        width, height = int(_MAX_EDGE * ratio), _MAX_EDGE
    return max(1, width), max(1, height)


def _multiples(width: int, height: int, edge: int) -> tuple[int, int]:
    """The size whose edges are multiples of a tile's, the longer one rounded up first."""
    ratio = width / height
    if width >= height:
        width = math.ceil(width / edge) * edge
        height = math.ceil(int(width / ratio) / edge) * edge
    else:
        height = math.ceil(height / edge) * edge
        width = math.ceil(int(height * ratio) / edge) * edge
    return width, height


class Prompt:
    """The tokens of an image: tags that say where each tile stands, around its embeddings."""

    def __init__(self, folder: Path, image_token: int, rows_of_tile: int) -> None:
        file = folder / "tokenizer.json"
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:
            raise ModelError(f"{file}: cannot be read: {error}") from error
        for token in (_FAKE, _IMAGE):
            if self._tokenizer.token_to_id(token) is None:
                raise ModelError(f"{file}: {token} is missing")
        if self._tokenizer.token_to_id(_IMAGE) != image_token:
            raise ModelError(f"{file}: {_IMAGE} is not the image_token_id of config.json")
        self._image_token = image_token
        self._rows_of_tile = rows_of_tile
        self.tokens = lru_cache(64)(self._tokens)

    def _tokens(self, rows: int, columns: int) -> tuple[Column, Column]:
        """The tokens of a picture of so many tiles, and the runs of those that are embeddings."""
        lines = [
            "".join(f"{_FAKE}<row_{row + 1}_col_{column + 1}>{_IMAGE}" for column in range(columns))
            + "\n"
            for row in range(rows)
        ]
        whole = ("\n" if rows else "") + f"{_FAKE}{_GLOBAL}{_IMAGE}{_FAKE}"
        text = "".join(lines) + whole
        found = np.array(self._tokenizer.encode(text, add_special_tokens=False).ids, np.int32)
        images = found == self._image_token
        repeats = np.where(images, self._rows_of_tile, 1)
        starts = (np.cumsum(repeats) - repeats)[images]
        runs = np.stack([starts, np.full_like(starts, self._rows_of_tile)], 1).astype(np.int32)
        return np.repeat(found, repeats), runs


@dataclass(frozen=True, slots=True)
class _Layer:
    norm1: LayerNorm
    query: Linear
    key: Linear
    value: Linear
    out: Linear
    norm2: LayerNorm
    up: Linear
    down: Linear


class Encoder:
    """SigLIP over the patches of tiles, then pixel shuffle and a projection to the text model."""

    def __init__(
        self, config: dict[str, Any], checkpoint: Checkpoint, tile_edge: int, team: Team
    ) -> None:
        whole = Fields(config, {"scale_factor": 2}, "config.json")
        fields = whole.nested("vision_config", _VISION_DEFAULTS)
        if fields.get("hidden_act") != "gelu_pytorch_tanh" or fields.get("num_channels") != 3:
            raise fields.error("hidden_act must be gelu_pytorch_tanh and num_channels 3")
        self._team = team
        self._size = size = fields.integer("hidden_size", 1, _MAX_SIZE)
        self._inner = inner = fields.integer("intermediate_size", 1, _MAX_SIZE)
        self._num_heads = fields.integer("num_attention_heads", 1, size)
        self.patch_edge = patch = fields.integer("patch_size", 1, 1024)
        self._scale = scale = whole.integer("scale_factor", 1, 64)
        side = fields.integer("image_size", patch, _MAX_EDGE) // patch
        self._edge = tile_edge // patch
        if size % self._num_heads or not self._edge or self._edge % scale:
            raise fields.error(
                f"{self._num_heads} heads do not divide {size}, or a tile of {tile_edge} pixels is "
                f"not a whole number of {scale} patches of {patch}"
            )
        text = whole.nested("text_config", {"hidden_size": 4096})
        self.hidden_size = hidden = text.integer("hidden_size", 1, _MAX_SIZE)
        self.rows_of_tile = (self._edge // scale) ** 2

        def weight(name: str, *shape: int) -> Array:
            return checkpoint.weight(f"model.{name}", shape, "float32")

        def linear(name: str, out: int, into: int) -> Linear:
            name = f"vision_model.{name}"
            return Linear(weight(f"{name}.weight", out, into), weight(f"{name}.bias", out))

        epsilon = fields.number("layer_norm_eps", 0.0, 1.0)

        def norm(name: str) -> LayerNorm:
            name = f"vision_model.{name}"
            return LayerNorm(weight(f"{name}.weight", size), weight(f"{name}.bias", size), epsilon)

        embeddings = "vision_model.embeddings"
        self._embedding = Linear(
            weight(f"{embeddings}.patch_embedding.weight", size, 3, patch, patch).reshape(size, -1),
            weight(f"{embeddings}.patch_embedding.bias", size),
        )
        positions = weight(f"{embeddings}.position_embedding.weight", side * side, size)
        self._positions = positions[position_ids(self._edge, side)]
        self._layers = [
            _Layer(
                norm1=norm(f"{layer}.layer_norm1"),
                query=linear(f"{layer}.self_attn.q_proj", size, size),
                key=linear(f"{layer}.self_attn.k_proj", size, size),
                value=linear(f"{layer}.self_attn.v_proj", size, size),
                out=linear(f"{layer}.self_attn.out_proj", size, size),
                norm2=norm(f"{layer}.layer_norm2"),
                up=linear(f"{layer}.mlp.fc1", inner, size),
                down=linear(f"{layer}.mlp.fc2", size, inner),
            )
            for layer in (
                f"encoder.layers.{number}"
                for number in range(fields.integer("num_hidden_layers", 0, 1024))
            )
        ]
        self._last_norm = norm("post_layernorm")
        projection = "connector.modality_projection.proj.weight"
        self._projection = Linear(weight(projection, hidden, size * scale * scale))

    @property
    def tiles_at_once(self) -> int:
        """So many tiles together keep all threads busy and take little memory."""
        return max(1, _ROWS_AT_ONCE // self._edge**2)

    def workspace_bytes(self) -> int:
        """Memory for one group of tiles."""
        rows = self.tiles_at_once * self._edge**2
        patches = 3 * self.patch_edge**2
        of_thread = 1 << 24 | 256 * 4 * 3 * self._inner
        return 4 * rows * (2 * patches + 6 * self._size) + self._team.num_threads * of_thread

    def __call__(self, patches: Array, deadline: Deadline) -> Array:
        """Embeddings [tiles, rows of a tile, hidden size] of patches [tiles, patches, numbers]."""
        team, tiles, of_tile = self._team, patches.shape[0], self._edge**2
        count = tiles * of_tile
        flat = patches.reshape(count, -1)
        states = np.empty((count, self._size), np.float32)

        def embed(rows: slice) -> None:
            states[rows] = self._embedding(flat[rows])
            states[rows] += self._positions[np.arange(rows.start, rows.stop) % of_tile]

        team.rows(embed, count)
        query, key, value = np.empty((3, count, self._size), np.float32)
        for layer in self._layers:
            deadline.check()

            def before(rows: slice, layer: _Layer = layer) -> None:
                normed = layer.norm1(states[rows])
                query[rows] = layer.query(normed)
                key[rows] = layer.key(normed)
                value[rows] = layer.value(normed)

            team.rows(before, count)
            seen = attention(team, query, key, value, self._num_heads, [of_tile] * tiles)

            def after(rows: slice, layer: _Layer = layer, seen: Array = seen) -> None:
                states[rows] += layer.out(seen[rows])
                normed = layer.norm2(states[rows])
                states[rows] += layer.down(gelu_tanh(layer.up(normed)))

            team.rows(after, count)
        deadline.check()
        return self._connect(self._last_norm(states).reshape(tiles, of_tile, -1))

    def _connect(self, states: Array) -> Array:
        """Squares of patches become one row each, which is projected."""
        scale, tiles = self._scale, len(states)
        edge = self._edge // scale
        squares = states.reshape(tiles, edge, scale, edge, scale, self._size)
        shuffled = squares.transpose(0, 1, 3, 2, 4, 5).reshape(tiles * edge * edge, -1)
        return self._projection(shuffled).reshape(tiles, edge * edge, -1)


def position_ids(edge: int, side: int) -> Column:
    """The learned position of each patch of a tile of ``edge`` patches, of ``side`` each way.

    As fractions of the tile, in float32 as torch computes them: where they round, so must these.
    """
    step = np.float32(1) / np.float32(edge)
    fractions = np.minimum(np.arange(edge, dtype=np.float32) * step, np.float32(1 - 1e-6))
    boundaries = np.arange(1 / side, 1.0, 1 / side).astype(np.float32)
    buckets = np.searchsorted(boundaries, fractions, side="right")
    ids: Column = (buckets[:, None] * side + buckets[None, :]).reshape(-1).astype(np.int32)
    return ids


class Idefics3:
    """``VisionModel`` of the family."""

    def __init__(
        self, processor: Processor, prompt: Prompt, encoder: Encoder, placeholder: int
    ) -> None:
        self.processor = processor
        self.prompt = prompt
        self.encoder = encoder
        self.placeholder = placeholder
        self.hidden_size = encoder.hidden_size
        self.max_rows = processor.max_tiles * encoder.rows_of_tile

    @classmethod
    def load(
        cls,
        config: dict[str, Any],
        folder: Path,
        tokenizer_folder: Path,
        checkpoint: Checkpoint,
        team: Team,
    ) -> Idefics3:
        """Read the family's part of a model folder."""
        fields = Fields(config, {"image_token_id": 128257}, "config.json")
        placeholder = fields.integer("image_token_id", 0, 1 << 31)
        processor = Processor.read(folder)
        encoder = Encoder(config, checkpoint, processor.tile_edge, team)
        _check_rows_of_tile(folder, encoder.rows_of_tile)
        prompt = Prompt(tokenizer_folder, placeholder, encoder.rows_of_tile)
        return cls(processor, prompt, encoder, placeholder)

    def encode(self, image: Image.Image, max_rows: int, deadline: Deadline) -> Encoded:
        """Cut, encode group by group, and say where each tile's embeddings belong."""
        tiles, rows, columns = self.processor(image)
        encoder = self.encoder
        check_rows(len(tiles) * encoder.rows_of_tile, max_rows)
        out = np.empty((len(tiles), encoder.rows_of_tile, self.hidden_size), np.float32)
        for start in range(0, len(tiles), encoder.tiles_at_once):
            group = slice(start, start + encoder.tiles_at_once)
            patches = [
                self.processor.normalizer.patches(tile, encoder.patch_edge) for tile in tiles[group]
            ]
            out[group] = encoder(np.stack(patches), deadline)
        tokens, runs = self.prompt.tokens(rows, columns)
        return Encoded(tokens, runs, (), out.reshape(-1, self.hidden_size))

    def workspace_bytes(self, rows: int) -> int:
        """A group of tiles, the resized picture three times, and the embeddings."""
        pixels = self.processor.max_tiles * self.processor.tile_edge**2
        return self.encoder.workspace_bytes() + 3 * 4 * pixels + 4 * rows * self.hidden_size


def _check_rows_of_tile(folder: Path, rows: int) -> None:
    """The processor writes as many tokens as it is told; the encoder makes what it makes."""
    path = folder / "processor_config.json"
    told = read_json(path).get("image_seq_len") if path.exists() else None
    if told is not None and told != rows:
        raise ModelError(f"{path}: image_seq_len is {told}, the encoder makes {rows} of a tile")
