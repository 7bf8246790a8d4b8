"""Answers streamed to a terminal: one of them, or a conversation."""

from __future__ import annotations

import contextlib
import itertools
import sys
import time
from collections.abc import Callable
from typing import Any

from deepinfer.frontend.llm_engine import LLMEngine
from deepinfer.frontend.outputs import RequestOutput
from deepinfer.frontend.session import Prompt
from deepinfer.wire.params import SamplingParams

_LEAVE = ("/exit", "/quit")


class Terminal:
    """Streams the engine's answers to ``write``, which gets pieces of text."""

    def __init__(self, engine: LLMEngine, write: Callable[[str], None] | None = None) -> None:
        self._engine = engine
        self._write = write if write is not None else _write_stdout
        self._numbers = itertools.count(1)

    def can_chat(self) -> bool:
        """Whether the model has a chat template."""
        return self._engine.tokenizer.has_chat_template

    def answer(self, prompt: Prompt, params: SamplingParams) -> tuple[str, RequestOutput | None]:
        """Stream one completion; return its text and its last output.

        Ctrl-C ends this answer alone: what came so far is returned, with ``None``.
        """
        request_id = f"answer-{next(self._numbers)}"
        pieces: list[str] = []
        try:
            self._engine.add_request(request_id, prompt, params)
            while True:
                for output in self._engine.step():
                    self._write(output.text)
                    pieces.append(output.text)
                    if output.finished:
                        return "".join(pieces), output
        except KeyboardInterrupt:
            self._engine.drop_request(request_id)
            return "".join(pieces), None
        finally:
            self._write("\n")

    def converse(self, params: SamplingParams, system: str | None, read: Callable[[], str]) -> None:
        """Talk until ``read`` raises ``EOFError`` or ``KeyboardInterrupt``, or returns /exit."""
        messages: list[dict[str, Any]] = []
        if system is not None:
            messages.append({"role": "system", "content": system})
        while True:
            try:
                text = read().strip()
            except (EOFError, KeyboardInterrupt):
                self._write("\n")
                return
            if text in _LEAVE:
                return
            if not text:
                continue
            messages.append({"role": "user", "content": text})
            try:
                said, _ = self.answer(messages, params)
            except ValueError as error:
                # Too long, most often: the conversation stays as it was before.
                self._write(f"error: {error}\n")
                messages.pop()
                continue
            messages.append({"role": "assistant", "content": said})


def read_line() -> str:
    """One line from the keyboard, with the arrow keys where the system has them."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (input() uses it once it is imported)
    return input(">>> ")


def summary(last: RequestOutput, started: float) -> str:
    """How an answer ended and how fast it came, for people; ``started`` is a monotonic time."""
    seconds = max(time.monotonic() - started, 1e-6)
    rate = last.num_output_tokens / seconds
    return f"{last.num_output_tokens} tokens, {rate:.1f} tok/s, ended by {last.finish_detail}"


def _write_stdout(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
