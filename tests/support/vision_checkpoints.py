"""Tiny random vision-language models with their processors, as transformers itself saves them."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
import transformers
from PIL import Image
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from support.small_tokenizers import save_folder

VOCAB_SIZE = 640
_TAGS = [f"<row_{row}_col_{column}>" for row in range(1, 3) for column in range(1, 7)]
_SPECIALS = {
    "idefics3": ["<fake_token_around_image>", "<image>", "<global-img>", "<end_of_utterance>"]
    + _TAGS,
    "qwen2_5_vl": ["<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>"],
}
_IMAGE = {"idefics3": "<image>", "qwen2_5_vl": "<|image_pad|>"}
FAMILIES = tuple(_SPECIALS)

_TEXT = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
}


def make_vision_checkpoint(
    family: str,
    folder: Path,
    *,
    dtype: torch.dtype = torch.float32,
    vision: dict[str, Any] | None = None,
    processor: dict[str, Any] | None = None,
    text: dict[str, Any] | None = None,
) -> Path:
    """Write a model folder: config, weights, tokenizer and image processor; return it.

    ``vision``, ``processor`` and ``text`` change the small default sizes. All weights are random,
    norms and biases too.
    """
    save_folder("byte_level", "chatml", folder)
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(_SPECIALS[family])
    tokenizer.save(str(folder / "tokenizer.json"))
    image_token = tokenizer.token_to_id(_IMAGE[family])
    torch.manual_seed(len(family))
    if family == "idefics3":
        config: Any = transformers.Idefics3Config(
            vision_config={
                "hidden_size": 48,
                "intermediate_size": 96,
                "num_hidden_layers": 3,
                "num_attention_heads": 3,
                "image_size": 32,
                "patch_size": 4,
                **(vision or {}),
            },
            text_config={"model_type": "llama", **_TEXT, **(text or {})},
            scale_factor=2,
            image_token_id=image_token,
            pad_token_id=1,
        )
        model: Any = transformers.Idefics3ForConditionalGeneration(config)
        image_processor: Any = Idefics3ImageProcessorPil(
            **{
                "size": {"longest_edge": 96},
                "max_image_size": {"longest_edge": 32},
                **(processor or {}),
            }
        )
    else:
        config = transformers.Qwen2_5_VLConfig(
            vision_config={
                "depth": 3,
                "hidden_size": 48,
                "intermediate_size": 96,
                "num_heads": 3,
                "out_hidden_size": 64,
                "fullatt_block_indexes": [1],
                **(vision or {}),
            },
            text_config={
                **_TEXT,
                **(text or {}),
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 10000.0,
                    "mrope_section": [2, 3, 3],
                },
            },
            image_token_id=image_token,
            video_token_id=tokenizer.token_to_id("<|video_pad|>"),
            vision_start_token_id=tokenizer.token_to_id("<|vision_start|>"),
            vision_end_token_id=tokenizer.token_to_id("<|vision_end|>"),
        )
        model = transformers.Qwen2_5_VLForConditionalGeneration(config)
        image_processor = Qwen2VLImageProcessorPil(
            **{
                "size": {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 64},
                **(processor or {}),
            }
        )
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            spread = 0.3 if parameter.ndim == 1 else 0.08
            parameter.normal_(mean=1.0 if "norm" in key or "ln_q" in key else 0.0, std=spread)
    model.to(dtype).save_pretrained(folder)
    image_processor.save_pretrained(folder)
    return folder


def reference_model(folder: Path, attention: str = "eager") -> Any:
    """transformers' own model of a folder in float32, in evaluation mode, with plain attention."""
    return transformers.AutoModelForImageTextToText.from_pretrained(
        folder, dtype=torch.float32, attn_implementation=attention
    ).eval()


def reference_processor(family: str, folder: Path) -> Any:
    """transformers' own image processor of a folder, its Pillow backend."""
    made = {"idefics3": Idefics3ImageProcessorPil, "qwen2_5_vl": Qwen2VLImageProcessorPil}
    return made[family].from_pretrained(folder)


@cache
def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    """A picture with edges, slopes and noise, so that no two filters make the same of it."""
    generator = np.random.default_rng([seed, width, height])
    rows, columns = np.mgrid[0:height, 0:width]
    slopes = np.stack([rows * 3 + columns, columns * 5, rows + columns * 2], -1) % 256
    pixels = slopes * 0.6 + generator.integers(0, 100, (height, width, 3))
    pixels[height // 3 : height // 2, width // 4 :] = generator.integers(0, 255, 3)
    return Image.fromarray(pixels.astype(np.uint8))
