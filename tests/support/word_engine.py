"""Stands in for ``LLMEngine``: answers with the prompt's words reversed, in an order of its own.

Prompts are checked as a real engine would (``ValueError``), so that what a caller does with good
and bad requests can be tested without processes or a model.
"""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

from deepinfer.frontend.outputs import RequestOutput
from deepinfer.frontend.session import PreparedPrompt
from deepinfer.wire.config import EngineArgs
from deepinfer.wire.params import SamplingParams

MAX_WORDS = 8


def words_of(prompt: Any) -> list[str]:
    """A string's words; the words of the last message; ids as words."""
    if isinstance(prompt, str):
        return prompt.split()
    if isinstance(prompt[0], dict):
        return ["chat:", *prompt[-1]["content"].split()]
    return [str(token_id) for token_id in prompt]


class WordEngine:
    """Each step gives one word of one open sample, chosen at random."""

    instances: list[WordEngine] = []

    def __init__(self, args: EngineArgs | None = None, *, seed: int = 0) -> None:
        self.args = args if args is not None else EngineArgs()
        self.tokenizer = SimpleNamespace(has_chat_template=True)
        self.open: dict[tuple[str, int], list[str]] = {}
        self.prompts: list[Any] = []
        self.params: list[SamplingParams] = []
        self.dropped: list[str] = []
        self.most_open = 0
        self.interrupt_after: int | None = None
        self.closed = False
        self._given: dict[tuple[str, int], int] = {}
        self._random = random.Random(seed)
        WordEngine.instances.append(self)

    def prepare(
        self, prompt: Any, params: SamplingParams | None = None, multi_modal_data: Any = None
    ) -> PreparedPrompt:
        if not isinstance(prompt, str | list) or not prompt:
            raise ValueError("prompt must not be empty")
        count = len(words_of(prompt))
        if count > MAX_WORDS:
            raise ValueError(f"prompt has {count} tokens, the limit is {MAX_WORDS}")
        return PreparedPrompt(prompt, [0] * count, params or SamplingParams())  # type: ignore[arg-type]

    def add_request(self, request_id: str, prompt: Any, params: SamplingParams) -> None:
        self.add_prepared(request_id, self.prepare(prompt, params))

    def add_prepared(self, request_id: str, prepared: PreparedPrompt) -> None:
        assert not any(name == request_id for name, _ in self.open), "the id is in use"
        self.prompts.append(prepared.text)
        self.params.append(prepared.params)
        for sample in range(prepared.params.n):
            words = words_of(prepared.text)[::-1][: prepared.params.max_tokens]
            self.open[request_id, sample] = words
        self.most_open = max(self.most_open, len(self.open))

    def drop_request(self, request_id: str) -> None:
        self.dropped.append(request_id)
        self.open = {key: words for key, words in self.open.items() if key[0] != request_id}

    def step(self) -> list[RequestOutput]:
        if not self.open:
            return []
        if self.interrupt_after is not None:
            self.interrupt_after -= 1
            if self.interrupt_after < 0:
                self.interrupt_after = None
                raise KeyboardInterrupt
        key = self._random.choice(list(self.open))
        words = self.open[key]
        word = words.pop(0)
        count = self._given[key] = self._given.get(key, 0) + 1
        if not words:
            del self.open[key], self._given[key]
        return [
            RequestOutput(
                request_id=key[0],
                index=key[1],
                prompt_len=3,
                token_id=1,
                text=word + (" " if words else ""),
                num_output_tokens=count,
                finished=not words,
                finish_reason="" if words else "stop",
                finish_detail="" if words else "eos",
            )
        ]

    def close(self) -> None:
        self.closed = True

    def __enter__(self) -> WordEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
