"""``SamplingParams``: what one request asks of the sampler and when it wants to stop."""

from __future__ import annotations

import math
from collections.abc import Collection

import msgspec

from deepinfer.wire.checks import check_float, check_int, check_length, shown

MAX_N = 128
MAX_LOGPROBS = 20
MAX_STOPS = 64
MAX_STOP_CHARS = 1024
MAX_STOP_TOKEN_IDS = 256
MAX_BAD_WORDS = 512
MAX_BAD_WORD_TOKENS = 64
MAX_LOGIT_BIAS = 1024
MAX_ALLOWED_TOKEN_IDS = 262_144
MAX_TOKENS = 1 << 24
_MAX_ID = (1 << 31) - 1

# Below this a temperature is taken as greedy: dividing by it would overflow float32.
GREEDY_BELOW = 1e-5


class SamplingParams(
    msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True, forbid_unknown_fields=True
):
    """Sampling and stop parameters of one request.

    Every field is checked when the object is made: a value out of range raises ``ValueError``
    that names the field, the value and the limit. Ids are checked against a model's vocabulary by
    :meth:`check_vocabulary`, at the frontend and again at the scheduler.

    - ``max_tokens``: output tokens at most, at least 1.
    - ``min_tokens``: no stop rule fires, and no EOS or stop id is sampled, before this many.
    - ``temperature``: 0 (or below 1e-5) is greedy.
    - ``top_p`` in (0, 1]; ``top_k`` 0 or -1 is off; ``min_p`` in [0, 1].
    - ``n``: how many independent completions of the prompt.
    - ``seed``: the same seed gives the same tokens in any company; ``None`` draws one.
    - ``stop``: strings that end the text, at most 64 of at most 1,024 characters.
    - ``presence_penalty``, ``frequency_penalty`` in [-2, 2], over output tokens;
      ``repetition_penalty`` in [0.01, 100], over prompt and output tokens (1 is off).
    - ``logit_bias``: token id to an addend in [-100, 100].
    - ``allowed_token_ids``: when given, only these may be sampled.
    - ``bad_words``: strings (or lists of token ids) that may not be generated.
    - ``logprobs``: how many most likely tokens to report beside the chosen one, 0 to 20.
    - ``prompt_logprobs``: the same for each prompt token.
    - ``golden_token_ids``: outputs forced one by one (teacher forcing); then sampling goes on.
    """

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    n: int = 1
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str | list[int]] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    structured_output: dict[str, object] | None = None
    skip_special_tokens: bool = True
    golden_token_ids: list[int] | None = None

    def __post_init__(self) -> None:
        check_int("max_tokens", self.max_tokens, 1, MAX_TOKENS)
        check_int("min_tokens", self.min_tokens, 0, MAX_TOKENS)
        if self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens must be at most max_tokens = {self.max_tokens}, got {self.min_tokens}"
            )
        check_float("temperature", self.temperature, 0.0, math.inf)
        check_float("top_p", self.top_p, 0.0, 1.0, low_open=True)
        check_int("top_k", self.top_k, -1, _MAX_ID)
        check_float("min_p", self.min_p, 0.0, 1.0)
        check_int("n", self.n, 1, MAX_N)
        if self.seed is not None:
            check_int("seed", self.seed, -(1 << 63), (1 << 64) - 1)
        self._check_stops()
        check_float("presence_penalty", self.presence_penalty, -2.0, 2.0)
        check_float("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        check_float("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        self._check_ids()
        self._check_bad_words()
        for field in ("logprobs", "prompt_logprobs"):
            value = getattr(self, field)
            if value is not None:
                check_int(field, value, 0, MAX_LOGPROBS)
        for field in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens"):
            if not isinstance(getattr(self, field), bool):
                raise ValueError(f"{field} must be a bool, got {shown(getattr(self, field))}")
        if self.structured_output is not None:
            raise ValueError("structured_output is not supported by this version")

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken at every step."""
        return self.temperature < GREEDY_BELOW

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """``stop`` as a tuple, empty when there is none."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise ``ValueError`` naming the field when a token id is not in ``[0, vocab_size)``."""
        fields: list[tuple[str, Collection[int] | None]] = [
            ("stop_token_ids", self.stop_token_ids),
            ("logit_bias", self.logit_bias),
            ("allowed_token_ids", self.allowed_token_ids),
            ("golden_token_ids", self.golden_token_ids),
        ]
        fields += [("bad_words", w) for w in self.bad_words or () if not isinstance(w, str)]
        for field, ids in fields:
            if ids and (highest := max(ids)) >= vocab_size:
                raise ValueError(
                    f"{field} must hold token ids below the vocabulary size {vocab_size}, "
                    f"got {highest}"
                )

    def _check_stops(self) -> None:
        if self.stop is not None and not isinstance(self.stop, str | list):
            raise ValueError(f"stop must be a string or a list of strings, got {shown(self.stop)}")
        stops = self.stop_strings
        check_length("stop", stops, MAX_STOPS)
        for text in stops:
            if not isinstance(text, str) or not text:
                raise ValueError(f"stop must hold non-empty strings, got {shown(text)}")
            if len(text) > MAX_STOP_CHARS:
                raise ValueError(
                    f"stop strings may have at most {MAX_STOP_CHARS} characters, got {len(text)}"
                )

    def _check_ids(self) -> None:
        _check_id_list("stop_token_ids", self.stop_token_ids, MAX_STOP_TOKEN_IDS)
        _check_id_list("allowed_token_ids", self.allowed_token_ids, MAX_ALLOWED_TOKEN_IDS)
        _check_id_list("golden_token_ids", self.golden_token_ids, MAX_ALLOWED_TOKEN_IDS)
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise ValueError("allowed_token_ids must not be empty")
        if self.logit_bias is not None:
            if not isinstance(self.logit_bias, dict):
                raise ValueError(
                    f"logit_bias must map token ids to numbers, got {shown(self.logit_bias)}"
                )
            check_length("logit_bias", self.logit_bias, MAX_LOGIT_BIAS)
            for token_id, bias in self.logit_bias.items():
                check_int("logit_bias token id", token_id, 0, _MAX_ID)
                check_float("logit_bias", bias, -100.0, 100.0)

    def _check_bad_words(self) -> None:
        if self.bad_words is None:
            return
        if not isinstance(self.bad_words, list):
            raise ValueError(f"bad_words must be a list, got {shown(self.bad_words)}")
        check_length("bad_words", self.bad_words, MAX_BAD_WORDS)
        for word in self.bad_words:
            if isinstance(word, str):
                if not word or len(word) > MAX_STOP_CHARS:
                    raise ValueError(
                        f"bad_words must hold strings of 1 to {MAX_STOP_CHARS} characters, "
                        f"got {shown(word)}"
                    )
            else:
                _check_id_list("bad_words", word, MAX_BAD_WORD_TOKENS)
                if not word:
                    raise ValueError("bad_words must not hold an empty list")


def _check_id_list(field: str, ids: list[int] | None, limit: int) -> None:
    if ids is None:
        return
    if not isinstance(ids, list):
        raise ValueError(f"{field} must be a list of token ids, got {shown(ids)}")
    check_length(field, ids, limit)
    # Each id by itself only where one is wrong: a list may hold a quarter of a million.
    if not set(map(type, ids)) <= {int} or (ids and not 0 <= min(ids) <= max(ids) <= _MAX_ID):
        for token_id in ids:
            check_int(field, token_id, 0, _MAX_ID)
