"""Random requests for the real model, by number: a number names the same request for ever.

    source = RandomRequests(tokenizer, max_model_len=64, max_tokens=(1, 14))
    request = source[17]   # request.prompt, request.params

Every kind of sampling and stop parameter occurs, alone and with others. Each request brings its
seed, so what it must yield depends on nothing else.
"""

from __future__ import annotations

import random
from typing import NamedTuple

from deepinfer import SamplingParams
from deepinfer.frontend.tokenizer import Tokenizer

# Beginnings that many prompts share, so that a prefix cache has something to find.
STEMS = (
    "The sea is calm tonight, the tide is full,",
    "def fibonacci(n):\n    if n < 2:\n        return n\n",
    "Once upon a time there was a little girl who lived in a village near the forest.",
    "Q: What is the capital of France?\nA: Paris.\nQ: What is the capital of Italy?\nA:",
)
TAILS = ("", " And then", " 1, 2, 3, 4,", "\n\n", " It was", " déjà vu 🙂", " however the", " x = ")
# What the model often says, so that stops and bans do happen.
FRAGMENTS = (" the", ",", ".", "\n", " a", "e ", " of", " and", "in", "s", " to", " I")


class RandomRequest(NamedTuple):
    """One request and the number it is made from."""

    number: int
    prompt: str | list[int]
    params: SamplingParams


class RandomRequests:
    """An endless sequence of requests.

    ``max_model_len``: no prompt is longer; a few are just that long. ``max_tokens``: the range of
    outputs asked for. ``several``: whether some ask for two completions (``n=2``).
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        max_model_len: int,
        max_tokens: tuple[int, int],
        several: bool = False,
        seed: int = 1,
    ) -> None:
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len
        self._max_tokens = max_tokens
        self._several = several
        self._seed = seed
        (self._eos,) = tokenizer.encode("<|im_end|>")
        self._common = [ids[0] for ids in map(tokenizer.encode, FRAGMENTS) if len(ids) == 1]

    def __getitem__(self, number: int) -> RandomRequest:
        rng = random.Random(f"{self._seed}/{number}")
        return RandomRequest(number, self._prompt(rng), self._params(rng))

    def _prompt(self, rng: random.Random) -> str | list[int]:
        kind = rng.random()
        if kind < 0.65:
            words = rng.choice(STEMS).split(" ")
            return " ".join(words[: rng.randrange(1, len(words) + 1)]) + rng.choice(TAILS)
        if kind < 0.70:
            length = self._max_model_len - rng.randrange(3)
        elif kind < 0.90:
            length = rng.randrange(1, 12)
        else:
            length = rng.randrange(12, self._max_model_len // 2)
        return [rng.randrange(20, 20_000) for _ in range(length)]

    def _params(self, rng: random.Random) -> SamplingParams:
        def sometimes(odds: float) -> bool:
            return rng.random() < odds

        most = rng.randint(*self._max_tokens)
        fields: dict[str, object] = {"max_tokens": most, "seed": rng.getrandbits(60)}
        if sometimes(0.35):
            fields["temperature"] = 0
        else:
            fields["temperature"] = rng.choice([0.4, 0.8, 1.0, 1.3])
            if sometimes(0.3):
                fields["top_p"] = rng.uniform(0.3, 1.0)
            if sometimes(0.3):
                fields["top_k"] = rng.randrange(1, 60)
            if sometimes(0.2):
                fields["min_p"] = rng.uniform(0.01, 0.2)
        if sometimes(0.2):
            fields["presence_penalty"] = rng.uniform(-2, 2)
        if sometimes(0.2):
            fields["frequency_penalty"] = rng.uniform(-2, 2)
        if sometimes(0.25):
            fields["repetition_penalty"] = rng.choice([0.8, 1.1, 1.5, 100])
        if sometimes(0.15):
            bias = {token: rng.uniform(-20, 20) for token in rng.sample(self._common, 3)}
            fields["logit_bias"] = bias | {self._eos: rng.uniform(0, 25)}
        if sometimes(0.1):
            allowed = rng.sample(range(20, 20_000), rng.choice([1, 5, 40]))
            fields["allowed_token_ids"] = [*allowed, *self._common[: rng.randrange(8)]]
        if sometimes(0.15):
            fields["bad_words"] = [*rng.sample(FRAGMENTS, 3), rng.sample(self._common, 2)]
        if sometimes(0.3):
            fields["stop"] = rng.sample(FRAGMENTS, rng.randrange(1, 3))
            fields["include_stop_str_in_output"] = sometimes(0.5)
        if sometimes(0.2):
            fields["stop_token_ids"] = rng.sample(self._common, 3)
        if sometimes(0.25):
            fields["min_tokens"] = rng.randint(0, most)
        if sometimes(0.3):
            fields["logprobs"] = rng.choice([0, 1, 3, 20])
        if sometimes(0.2):
            fields["prompt_logprobs"] = rng.choice([0, 2, 5])
        if sometimes(0.15):
            golden = [rng.choice(self._common) for _ in range(rng.randrange(1, 6))]
            fields["golden_token_ids"] = golden + [self._eos] * rng.randrange(2)
        fields["ignore_eos"] = sometimes(0.2)
        fields["skip_special_tokens"] = sometimes(0.8)
        if self._several and sometimes(0.05):
            fields["n"] = 2
        return SamplingParams(**fields)
