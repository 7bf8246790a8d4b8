"""Errors a user of the engine can meet beside ``ValueError`` for bad input."""

from __future__ import annotations


class EngineError(RuntimeError):
    """The engine could not serve a request, though the request was fine."""


class EngineBusyError(EngineError):
    """Its queue is full or it is shutting down: the request may be sent again later.

    ``closing``: it is shutting down, so another engine is the better choice.
    """

    def __init__(self, message: str, *, closing: bool = False) -> None:
        super().__init__(message)
        self.closing = closing


class EngineDownError(EngineError):
    """The engine did not start, or it is gone; the message says why."""


class PromptTooLongError(ValueError):
    """A prompt has more tokens than the engine takes."""
