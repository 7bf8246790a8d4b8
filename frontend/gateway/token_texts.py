"""The text and the bytes of single tokens, for log probabilities."""

from __future__ import annotations

from functools import lru_cache

from deepinfer.frontend.detokenizer import bytes_of_token
from deepinfer.frontend.tokenizer import Tokenizer

# OpenAI's way to write minus infinity, which JSON lacks.
LOWEST_LOGPROB = -9999.0


class TokenTexts:
    """What tokens of a vocabulary look like one by one."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.bytes_of = lru_cache(maxsize=1 << 15)(self._bytes_of)

    def _bytes_of(self, token_id: int) -> bytes:
        return bytes_of_token(self._tokenizer, token_id)

    def text_of(self, token_id: int) -> str:
        """Return a token's text; bytes that are no whole character come as U+FFFD."""
        return self.bytes_of(token_id).decode("utf-8", "replace")

    def distinct(self, token_ids: list[int]) -> list[str]:
        """Return the texts of tokens, those that are alike with their ids, so that all differ."""
        texts = [self.text_of(token_id) for token_id in token_ids]
        return [
            text if texts.count(text) == 1 else f"{text}<token {token_id}>"
            for text, token_id in zip(texts, token_ids, strict=True)
        ]
