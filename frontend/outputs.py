"""What users get back: ``RequestOutput`` while a request runs, ``Completion`` when it is over."""

from __future__ import annotations

import msgspec


class RequestOutput(msgspec.Struct, kw_only=True, gc=False):
    """One new token of a request, or the end of one that ended without a new token.

    ``text`` is what this token adds: the texts of all outputs of a request, joined, are its
    completion. ``finish_reason`` is empty while the request runs; exactly one output has
    ``finished=True``. ``finish_detail`` is the rule that ended it, with what matched after a colon:
    ``eos``, ``stop_token:13``, ``stop_string:END``, ``max_tokens``, …
    """

    request_id: str
    prompt_len: int
    """Tokens of the prompt, those of its images too (from the first token on)."""
    token_id: int
    """The new token; the last one (or -1) when the request ended without a new token."""
    text: str = ""
    finish_reason: str = ""
    finish_detail: str = ""
    finished: bool = False
    index: int = 0
    """Which of the ``n`` completions this belongs to."""
    num_output_tokens: int = 0
    """Tokens generated so far, this one included."""
    max_num_batched_tokens: int = 0
    """The engine's token budget for one step."""
    token_logprobs: float = 0.0
    """Log probability of the token; 0.0, which says nothing, unless ``logprobs`` was asked for."""
    nextn_logprobs: float = 0.0
    """Log probability of the token by the draft head; 0 without one."""
    sum_smaller_probs: float = 0.0
    """Probability mass of the tokens that are less likely than this one; 0.0, which says nothing,
    unless ``logprobs`` was asked for."""
    top_logprobs: list[float] = []
    """Log probabilities of the most likely tokens, the largest first."""
    top_token_ids: list[int] = []
    """Ids that belong to ``top_logprobs``."""
    prompt_logprobs: list[dict[int, float] | None] | None = None
    """On the first output, when asked for: one entry a prompt token (token id to log probability),
    the first is ``None``."""
    draft_tok: int = 0
    """Drafted tokens of the step that brought this token."""
    accept_tok: int = 0
    """How many of them were accepted."""
    confidence_score: list[float] | None = None
    cached_tokens: int = 0
    """Prompt tokens that came from the prefix cache."""
    num_preemptions: int = 0
    error: str = ""
    """What went wrong, when the end is a failure."""


class Metrics(msgspec.Struct, kw_only=True, gc=False):
    """Times and counters of one completion."""

    ttft_ms: float = 0.0
    """From submission to the first token, milliseconds."""
    total_ms: float = 0.0
    """From submission to the end, milliseconds."""
    cached_tokens: int = 0
    num_preemptions: int = 0


class Completion(msgspec.Struct, kw_only=True, gc=False):
    """One finished completion."""

    request_id: str
    prompt: str | None
    """The prompt's text; ``None`` when it was given as token ids."""
    prompt_token_ids: list[int]
    """With one placeholder for each image."""
    text: str
    token_ids: list[int]
    finish_reason: str
    finish_detail: str
    logprobs: list[dict[int, float]] | None = None
    """One entry a generated token: token id to log probability, the chosen token first."""
    prompt_logprobs: list[dict[int, float] | None] | None = None
    metrics: Metrics
    index: int = 0
    """Which of the ``n`` completions of its prompt this is."""
    error: str = ""
