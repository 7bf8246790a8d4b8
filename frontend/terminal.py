"""Answers streamed to a terminal: one of them, or a conversation."""

from __future__ import annotations

import contextlib
import itertools
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from deepinfer.frontend.llm_engine import LLMEngine
from deepinfer.frontend.outputs import RequestOutput
from deepinfer.wire.params import SamplingParams

if TYPE_CHECKING:
    from deepinfer.frontend.session import Prompt

_LEAVE = ("/exit", "/quit")


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer: its text, its last output (``None``: cut short), and how fast it came."""

    text: str
    last: RequestOutput | None
    first_after_s: float = 0.0
    """From the request to the first output."""
    rest_s: float = 0.0
    """From the first output to the last."""
    rest_tokens: int = 0
    """Tokens that came after the first output."""

    def summary(self) -> str:
        """How the answer ended and how fast it came, for people."""
        assert self.last is not None, "the answer was cut short"
        parts = [f"{self.last.num_output_tokens} tokens", f"first after {self.first_after_s:.2f} s"]
        # Apart from the wait for the first token: that is the prompt's cost, not the answer's.
        if self.rest_tokens:
            parts.append(f"then {self.rest_tokens / max(self.rest_s, 1e-6):.1f} tok/s")
        return ", ".join([*parts, f"ended by {self.last.finish_detail}"])


class Terminal:
    """Streams the engine's answers to ``write``, which gets pieces of text."""

    def __init__(self, engine: LLMEngine, write: Callable[[str], None] | None = None) -> None:
        self._engine = engine
        self._write = write if write is not None else _write_stdout
        self._numbers = itertools.count(1)

    def can_chat(self) -> bool:
        """Whether the model has a chat template."""
        return self._engine.tokenizer.has_chat_template

    def answer(self, prompt: Prompt, params: SamplingParams) -> Answer:
        """Stream one completion.

        Ctrl-C ends this answer alone: what came so far is returned, with no last output.
        """
        request_id = f"answer-{next(self._numbers)}"
        pieces: list[str] = []
        started = time.monotonic()
        first: tuple[float, int] | None = None
        self._engine.add_request(request_id, prompt, params)
        try:
            while True:
                for output in self._engine.step():
                    first = first or (time.monotonic(), output.num_output_tokens)
                    self._write(output.text)
                    pieces.append(output.text)
                    if output.finished:
                        at, tokens = first
                        return Answer(
                            text="".join(pieces),
                            last=output,
                            first_after_s=at - started,
                            rest_s=time.monotonic() - at,
                            rest_tokens=output.num_output_tokens - tokens,
                        )
        except KeyboardInterrupt:
            self._engine.drop_request(request_id)
            return Answer("".join(pieces), None)
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
                said = self.answer(messages, params).text
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
    return input(">>> " if sys.stdin.isatty() else "")


def _write_stdout(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
