"""Tiny random models with images, made by transformers, and a prompt with pictures for each.

The image tokens' embeddings come from transformers' own encoder, as the image worker would put them
into the arena.
"""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors.torch import load_file

from deepinfer.wire.arena import ALIGNMENT, HEADER_BYTES, Arena, Region
from deepinfer.wire.columns import pack_int32
from deepinfer.wire.steps import ImageSpan

VOCAB_SIZE = 211
IMAGE_TOKEN = 205
BEFORE_IMAGE = 206
# One would end it, and transformers takes the other for a piece of an image.
NEVER_SAMPLED = [2, IMAGE_TOKEN]
MAX_POSITIONS = 512

_TEXT = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_POSITIONS,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 2,
    "bos_token_id": 1,
    "pad_token_id": 0,
}
_SIGLIP = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 7,
}
_TILE_TOKENS = (28 // 7) ** 2 // 2**2
_PATCH = 4
_QWEN_VISION = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "patch_size": _PATCH,
    "window_size": 16,
    "fullatt_block_indexes": [1],
    "out_hidden_size": _TEXT["hidden_size"],
}
_MERGE = 2
_MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}

FAMILIES = ("idefics3", "idefics3-tied", "smolvlm", "qwen2_5_vl", "qwen2_5_vl-tied")


def make_vision_checkpoint(family: str, folder: Path) -> Path:
    """Write the family's folder, as ``save_pretrained`` does, and return it."""
    name, _, tied = family.partition("-")
    both = {"image_token_id": IMAGE_TOKEN, "tie_word_embeddings": bool(tied)}
    if name == "qwen2_5_vl":
        config = transformers.Qwen2_5_VLConfig(
            text_config={**_TEXT, "rope_parameters": _MROPE}, vision_config=_QWEN_VISION, **both
        )
        model = transformers.Qwen2_5_VLForConditionalGeneration(config)
    else:
        kind = "Idefics3" if name == "idefics3" else "SmolVLM"
        config = getattr(transformers, f"{kind}Config")(
            text_config={**_TEXT, "model_type": "llama"}, vision_config=_SIGLIP, **both
        )
        model = getattr(transformers, f"{kind}ForConditionalGeneration")(config)
    generator = torch.Generator().manual_seed(FAMILIES.index(family))
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            # Every one is random: a bias or a norm that is forgotten shows.
            mean = 1.0 if "norm" in key or "ln_q" in key else 0.0
            spread = 0.3 if parameter.ndim == 1 else 0.12
            parameter.normal_(mean, spread, generator=generator)
    model.save_pretrained(folder)
    return folder


def smollm2_with_encoder(smollm2_folder: Path, folder: Path) -> Path:
    """Write an Idefics3 folder of SmolLM2's weights and tokenizer and a small random encoder.

    The tokens that Idefics3 has and SmolLM2 has not come after SmolLM2's; their embeddings are
    random and short, so that text alone goes on as SmolLM2's.
    """
    text = json.loads((smollm2_folder / "config.json").read_text())
    first = text["vocab_size"]
    added = ["<fake_token_around_image>", "<image>", "<global-img>"]
    added += [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
    config = transformers.Idefics3Config(
        text_config=text | {"model_type": "llama", "vocab_size": first + 128},
        vision_config=_SIGLIP,
        image_token_id=first + added.index("<image>"),
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    model = transformers.Idefics3ForConditionalGeneration(config)
    weights = {
        name.replace("model.", "model.text_model.", 1): tensor
        for name, tensor in load_file(smollm2_folder / "model.safetensors").items()
    }
    embedding = "model.text_model.embed_tokens.weight"
    new = 1e-3 * torch.randn(128, text["hidden_size"])
    weights[embedding] = torch.cat([weights[embedding], new.to(weights[embedding].dtype)])
    assert not model.load_state_dict(weights, strict=False).unexpected_keys
    model.to(torch.bfloat16).save_pretrained(folder)
    for name in ("tokenizer_config.json", "generation_config.json"):
        shutil.copy(smollm2_folder / name, folder)
    tokenizer = json.loads((smollm2_folder / "tokenizer.json").read_text())
    like = tokenizer["added_tokens"][0]
    tokenizer["added_tokens"] += [
        like | {"id": first + i, "content": content} for i, content in enumerate(added)
    ]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


class VisionReference:
    """transformers' model of a folder, in float32 with plain attention."""

    def __init__(self, folder: Path) -> None:
        name = json.loads((folder / "config.json").read_text())["architectures"][0]
        self.model = getattr(transformers, name).from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        )
        self.model.eval()
        self.image_token = self.model.config.image_token_id
        self.grids = name.startswith("Qwen")

    def picture(self, size: tuple[int, int], seed: int) -> Picture:
        """A random picture of so many rows and columns, of tiles or merged patches."""
        rng = np.random.default_rng(seed)
        if self.grids:
            rows, columns = size[0] * _MERGE, size[1] * _MERGE
            shape = rows * columns, 3 * 2 * _PATCH**2
            pixels = torch.from_numpy(rng.standard_normal(shape, np.float32))
            grid = torch.tensor([[1, rows, columns]])
            tokens = [BEFORE_IMAGE, *[self.image_token] * math.prod(size), BEFORE_IMAGE + 1]
            runs = [1, math.prod(size)]
            with torch.no_grad():
                lines = self.model.get_image_features(pixels, grid).pooler_output[0]
            return Picture(tokens, runs, (1, *size), lines.numpy(), pixels, grid)
        tiles = math.prod(size)
        shape = 1, tiles, 3, _SIGLIP["image_size"], _SIGLIP["image_size"]
        pixels = torch.from_numpy(rng.standard_normal(shape, np.float32))
        tokens, runs = [], []
        for tile in range(tiles):
            # Another text before each tile, as its row and column are named there.
            tokens += [BEFORE_IMAGE, 100 + tile]
            runs += [len(tokens), _TILE_TOKENS]
            tokens += [self.image_token] * _TILE_TOKENS
        tokens.append(BEFORE_IMAGE)
        with torch.no_grad():
            lines = self.model.get_image_features(pixels).pooler_output[0]
        return Picture(tokens, runs, (), lines.numpy(), pixels, None)

    def inputs(self, prompt: Prompt, outputs: list[int] = ()) -> dict:
        """What the model is called with."""
        ids = torch.tensor([[*prompt.tokens, *outputs]])
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if prompt.pictures:
            pixels = [picture.pixels for picture in prompt.pictures]
            inputs["pixel_values"] = torch.cat(pixels, dim=0 if self.grids else 1)
            if self.grids:
                grids = [picture.pixel_grid for picture in prompt.pictures]
                inputs["image_grid_thw"] = torch.cat(grids)
                inputs["mm_token_type_ids"] = (ids == self.image_token).int()
        return inputs

    def greedy(self, prompt: Prompt, count: int) -> list[int]:
        """So many tokens, none of which ends it."""
        with torch.no_grad():
            found = self.model.generate(
                **self.inputs(prompt),
                do_sample=False,
                max_new_tokens=count,
                min_new_tokens=count,
                eos_token_id=None,
                suppress_tokens=NEVER_SAMPLED,
            )
        return found[0, len(prompt.tokens) :].tolist()

    def logits(self, prompt: Prompt, outputs: list[int]) -> np.ndarray:
        """Logits [tokens, vocabulary] of all tokens."""
        if self.grids:
            self.model.model.rope_deltas = None
        with torch.no_grad():
            return self.model(**self.inputs(prompt, outputs)).logits[0].numpy()


@dataclass(eq=False)
class Picture:
    """A picture as the image worker hands it over, and the pixels that transformers takes."""

    tokens: list[int]
    runs: list[int]
    grid: tuple[int, ...]
    lines: np.ndarray
    pixels: torch.Tensor
    pixel_grid: torch.Tensor | None


@dataclass(eq=False)
class Prompt:
    """Text and pictures: ``tokens`` are all of them, ``starts`` where each picture begins."""

    tokens: list[int] = field(default_factory=list)
    pictures: list[Picture] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, *parts: Picture | list[int]) -> Prompt:
        prompt = cls()
        for part in parts:
            if isinstance(part, Picture):
                prompt.pictures.append(part)
                prompt.starts.append(len(prompt.tokens))
                prompt.tokens += part.tokens
            else:
                prompt.tokens += part
        return prompt


class Pictures:
    """An arena with pictures in it, each once."""

    def __init__(self, num_bytes: int = 1 << 20) -> None:
        self.arena = Arena.create(num_bytes)
        self._regions: dict[int, Region] = {}
        self._kept: list[Picture] = []
        self._used = self._generation = 0

    def write(self, lines: np.ndarray) -> Region:
        """Put embeddings into a region of their own."""
        length = -(-(HEADER_BYTES + lines.nbytes) // ALIGNMENT) * ALIGNMENT
        self._generation += 1
        region = Region(self._used, length, self._generation)
        self._used += length
        self.arena.write(region, lines)
        return region

    def spans(self, prompt: Prompt) -> list[ImageSpan]:
        """The images of a prompt; equal pictures share a region."""
        spans = []
        for picture, start in zip(prompt.pictures, prompt.starts, strict=True):
            if id(picture) not in self._regions:
                self._kept.append(picture)
                self._regions[id(picture)] = self.write(picture.lines)
            spans.append(
                ImageSpan(
                    position=start,
                    runs=pack_int32(picture.runs),
                    region=self._regions[id(picture)],
                    grid=picture.grid,
                )
            )
        return spans
