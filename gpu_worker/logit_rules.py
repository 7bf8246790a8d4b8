"""What a request's parameters do to its logits before a token is chosen.

The order is fixed and the same for every request (it is vLLM's):

1. ``allowed_token_ids``: all others are banned (their logit becomes -inf).
2. ``bad_words``: the last token of a word is banned where the outputs end with its beginning.
3. ``min_tokens``: EOS and stop ids are banned before that many outputs, also under ``ignore_eos``.
4. ``logit_bias``: added.
5. ``repetition_penalty`` over prompt and outputs: a positive logit is divided, others multiplied.
6. ``frequency_penalty`` times the count, and ``presence_penalty``, over the outputs: subtracted.

Temperature, ``min_p``, ``top_k`` and ``top_p`` follow in the sampler, in this order.

Nothing is remembered between steps: each rule looks at the tokens so far. A recomputed, resumed or
overlapped sequence therefore needs no state to be rebuilt, and the newest token is never missing.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from deepinfer.wire.columns import Int32
from deepinfer.wire.params import SamplingParams

_BANNED = np.float32(-np.inf)


class LogitRules:
    """The rules of one request, with its ids as arrays.

    Raises ``ValueError`` when an id lies outside the vocabulary or a bad word is still a string.
    """

    __slots__ = (
        "_allowed",
        "_bad_words",
        "_bias",
        "_bias_ids",
        "_frequency",
        "_min_tokens",
        "_num_prompt",
        "_presence",
        "_repetition",
        "_stop_ids",
    )

    def __init__(
        self,
        params: SamplingParams,
        num_prompt: int,
        eos_token_ids: Iterable[int],
        vocab_size: int,
    ) -> None:
        params.check_vocabulary(vocab_size)
        self._num_prompt = num_prompt
        self._allowed = None if params.allowed_token_ids is None else _ids(params.allowed_token_ids)
        self._bad_words: list[tuple[Int32, int]] = []
        for word in params.bad_words or ():
            if isinstance(word, str):
                raise ValueError(f"bad_words must hold token ids in the worker, got {word[:80]!r}")
            self._bad_words.append((_ids(word[:-1]), word[-1]))
        self._min_tokens = params.min_tokens
        self._stop_ids = _ids([*eos_token_ids, *(params.stop_token_ids or ())])
        bias = params.logit_bias or {}
        self._bias_ids = _ids(bias)
        self._bias = np.fromiter(bias.values(), dtype=np.float32, count=len(bias))
        self._repetition = np.float32(params.repetition_penalty)
        self._frequency = np.float32(params.frequency_penalty)
        self._presence = np.float32(params.presence_penalty)

    @property
    def lasting(self) -> bool:
        """Whether a rule other than ``min_tokens`` is set: one that never ends."""
        return bool(
            self._allowed is not None
            or self._bad_words
            or len(self._bias)
            or self._repetition != 1
            or self._frequency
            or self._presence
        )

    @property
    def min_tokens(self) -> int:
        """Outputs before which EOS and stop ids are banned."""
        return self._min_tokens

    def apply(self, logits: npt.NDArray[np.float32], tokens: Int32) -> None:
        """Change ``logits`` float32[vocab] in place, given all tokens so far."""
        outputs = tokens[self._num_prompt :]
        if self._allowed is not None:
            kept = logits[self._allowed]
            logits.fill(_BANNED)
            logits[self._allowed] = kept
        for beginning, last in self._bad_words:
            if _ends_with(outputs, beginning):
                logits[last] = _BANNED
        if len(outputs) < self._min_tokens:
            logits[self._stop_ids] = _BANNED
        if len(self._bias):
            logits[self._bias_ids] += self._bias
        if self._repetition != 1:
            # A token seen twice is written twice with the same value, so that no set is needed.
            seen = logits[tokens]
            logits[tokens] = np.where(seen > 0, seen / self._repetition, seen * self._repetition)
        if self._frequency or self._presence:
            seen_ids, counts = np.unique(outputs, return_counts=True)
            logits[seen_ids] -= self._frequency * counts.astype(np.float32) + self._presence


def _ids(values: Iterable[int]) -> Int32:
    return np.fromiter(values, dtype=np.int32)


def _ends_with(tokens: Int32, ending: Int32) -> bool:
    count = len(ending)
    return len(tokens) >= count and bool(np.array_equal(tokens[len(tokens) - count :], ending))
