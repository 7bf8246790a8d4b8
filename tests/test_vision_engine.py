"""Whole engines with real encoders: what transformers makes of the same pictures and prompts."""

from __future__ import annotations

import asyncio
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from deepinfer import AsyncEngine, EngineArgs, SamplingParams
from deepinfer.frontend.tokenizer import Tokenizer
from deepinfer.image_worker.errors import Deadline
from deepinfer.image_worker.layers import Team
from deepinfer.image_worker.model import load
from support.checkpoints import one_torch_thread
from support.vision_checkpoints import (
    FAMILIES,
    make_vision_checkpoint,
    picture,
    reference_model,
    reference_processor,
)

pytestmark = [pytest.mark.process, pytest.mark.slow]

PLACEHOLDERS = {
    "idefics3": "<image>",
    "qwen2_5_vl": "<|vision_start|><|image_pad|><|vision_end|>",
}
NUM_TOKENS = 32
Prompt = tuple[str, list[Image.Image]]
# A picture is written where the text has {}.
PROMPTS: list[Prompt] = [
    ("What is in {}?", [picture(70, 40)]),
    ("No picture here.", []),
    ("{} and {}: which is larger?", [picture(40, 70), picture(96, 90)]),
    ("{} and {}: which is larger?", [picture(96, 90), picture(40, 70)]),
    ("{}", [picture(300, 31, seed=3)]),
    ("Twice the same: {}{}", [picture(33, 32)] * 2),
]


class Reference:
    """transformers with its own processor, one request at a time."""

    def __init__(self, family: str, folder: Path) -> None:
        self.family = family
        self.tokenizer = Tokenizer.from_folder(folder)
        self.ours = load(folder, folder, Team(1))  # what tokens a picture becomes, tested elsewhere
        self.processor = reference_processor(family, folder)
        self.model = reference_model(folder)
        self.placeholder = self.model.config.image_token_id

    def banned(self) -> list[int]:
        """Tokens that would end a request, or that transformers takes for a piece of a picture."""
        return [1, self.placeholder]

    def tokens(self, prompt: Prompt) -> list[int]:
        """The prompt as the model sees it."""
        text, pictures = prompt
        left = iter(pictures)
        found: list[int] = []
        for token in self.tokenizer.encode(text.replace("{}", PLACEHOLDERS[self.family])):
            if token == self.placeholder:
                found += self.ours.encode(next(left), 1 << 30, Deadline(60)).tokens.tolist()
            else:
                found.append(token)
        return found

    def greedy(self, prompt: Prompt) -> list[int]:
        ids = torch.tensor([self.tokens(prompt)])
        inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if prompt[1]:
            batch = prompt[1] if self.family == "qwen2_5_vl" else [prompt[1]]
            inputs |= self.processor(images=batch, return_tensors="pt")
            if self.family == "qwen2_5_vl":
                inputs["mm_token_type_ids"] = (ids == self.placeholder).int()
        with one_torch_thread(), torch.no_grad():
            found = self.model.generate(
                **inputs,
                do_sample=False,
                max_new_tokens=NUM_TOKENS,
                min_new_tokens=NUM_TOKENS,
                eos_token_id=None,
                suppress_tokens=self.banned(),
            )
        tokens: list[int] = found[0, ids.shape[1] :].tolist()
        return tokens


def file_of(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


@pytest.mark.parametrize("family", FAMILIES)
async def test_answers_are_those_of_transformers(tmp_path: Path, family: str) -> None:
    """All at once, twice: the second time pictures and prompts are found where they are kept.

    A step takes few tokens, so that chunks end within pictures.
    """
    folder = make_vision_checkpoint(family, tmp_path)
    reference = Reference(family, folder)
    params = SamplingParams(
        max_tokens=NUM_TOKENS,
        temperature=0,
        ignore_eos=True,
        bad_words=[[token] for token in reference.banned()],
    )
    args = EngineArgs(
        model=str(folder),
        dtype="float32",
        num_kv_blocks=512,
        max_num_batched_tokens=24,
        num_threads=1,
        weight_cache=False,
    )
    async with AsyncEngine(args) as engine:

        async def ask(prompt: Prompt) -> tuple[list[int], int]:
            text, pictures = prompt
            data = {"image": [file_of(image) for image in pictures]} if pictures else None
            spelled = text.replace("{}", PLACEHOLDERS[family])
            tokens: list[int] = []
            async for out in engine.generate(spelled, params, multi_modal_data=data):
                tokens.append(out.token_id)
            return tokens, out.prompt_len

        wanted = [(reference.greedy(p), len(reference.tokens(p))) for p in PROMPTS]
        for _ in range(2):
            got = await asyncio.gather(*map(ask, PROMPTS))
            assert got == wanted
        stats = await engine.stats()
    assert wanted[2] != wanted[3], "swapped pictures have to show"
    assert stats["image_cache_hits"] >= len(PROMPTS)
