"""Every way a request can end: one table, and the stop rules that a new token is held against."""

from __future__ import annotations

from enum import Enum

from deepinfer.scheduler.sequence import Sequence, Status


class Ending(Enum):
    """One code path that ends a request: status, rule (the first part of the detail), when."""

    EOS = (Status.FINISHED_STOPPED, "eos", "an id of the model's EOS set, unless ignore_eos")
    STOP_TOKEN = (Status.FINISHED_STOPPED, "stop_token", "an id of stop_token_ids")
    STOP_STRING = (Status.FINISHED_STOPPED, "stop_string", "the frontend found a stop string")
    MODEL_LENGTH = (
        Status.FINISHED_LENGTH_CAPPED,
        "max_model_len",
        "prompt and output reached max_model_len",
    )
    CACHE_LENGTH = (
        Status.FINISHED_LENGTH_CAPPED,
        "kv_capacity",
        "prompt and output fill the whole KV cache",
    )
    MAX_TOKENS = (Status.FINISHED_LENGTH_CAPPED, "max_tokens", "max_tokens outputs")
    CLIENT_ABORT = (Status.FINISHED_ABORTED, "client_abort", "its client aborted it")
    DISCONNECT = (Status.FINISHED_ABORTED, "disconnect", "its client went away or fell silent")
    SLOW_READER = (Status.FINISHED_ABORTED, "slow_reader", "its client did not read its outputs")
    DEADLINE = (Status.FINISHED_ABORTED, "deadline", "its timeout passed")
    SHUTDOWN = (Status.FINISHED_ABORTED, "shutdown", "the engine shuts down")
    WORKER_FAILED = (
        Status.FINISHED_ABORTED,
        "worker_failed",
        "it killed its device workers, or there is none any more",
    )
    ROW_FAILED = (Status.FINISHED_ABORTED, "row_failed", "its row alone failed on the worker")
    PREEMPTED = (
        Status.FINISHED_PREEMPTED,
        "preempted",
        "no KV block was left, under the stop policy",
    )
    PROMPT_OVER_MODEL = (
        Status.FINISHED_IGNORED,
        "max_model_len",
        "a prompt longer than max_model_len",
    )
    PROMPT_OVER_CACHE = (
        Status.FINISHED_IGNORED,
        "kv_capacity",
        "a prompt longer than the whole KV cache",
    )

    IMAGE_FAILED = (
        Status.FINISHED_VE_FAILED,
        "image",
        "an image could not be fetched, decoded, fitted or encoded",
    )

    @property
    def status(self) -> Status:
        """The final status."""
        return self.value[0]

    @property
    def rule(self) -> str:
        """The rule's name in ``finish_detail``."""
        return self.value[1]

    @property
    def when(self) -> str:
        """What makes this path be taken, in one line."""
        return self.value[2]

    def detail(self, matched: object = None) -> str:
        """``finish_detail``: the rule, and what matched where there is something to name."""
        return self.rule if matched is None else f"{self.rule}:{matched}"


ABORT_RULES = {"client_abort": Ending.CLIENT_ABORT, "disconnect": Ending.DISCONNECT}
"""What a client may name in ``Abort.rule``."""

GONE_RULES = {"disconnect": Ending.DISCONNECT, "slow_reader": Ending.SLOW_READER}
"""Why a client counts as gone."""


class StopRules:
    """The rules that one engine holds every new token against, in this order.

    1. EOS, then the request's own stop ids, both only from ``min_tokens`` outputs on;
    2. the length limit: prompt and output reached ``max_model_len`` or the whole KV cache;
    3. ``max_tokens``.

    So a token that is EOS *and* the last one allowed ends its request as stopped. A prompt of
    exactly the limit yields one token: the limit is looked at after a token was appended.
    """

    def __init__(
        self, eos_token_ids: frozenset[int], max_model_len: int, cache_tokens: int
    ) -> None:
        self.eos_token_ids = eos_token_ids
        self.limit = min(max_model_len, cache_tokens)
        fits_model = max_model_len <= cache_tokens
        self._at_limit = Ending.MODEL_LENGTH if fits_model else Ending.CACHE_LENGTH
        self._over_limit = Ending.PROMPT_OVER_MODEL if fits_model else Ending.PROMPT_OVER_CACHE

    def last_length(self, sequence: Sequence) -> int:
        """Return the length at which the sequence ends at the latest."""
        n = sequence.num_prompt
        return min(n + sequence.params.max_tokens, max(self.limit, n + 1))

    def too_long(self, num_prompt: int) -> Ending | None:
        """Say how a prompt ends that can never be served."""
        return self._over_limit if num_prompt > self.limit else None

    def after_token(
        self, sequence: Sequence, token_id: int, length: int
    ) -> tuple[Ending, int | None] | None:
        """Hold a sequence of ``length`` tokens, the last of them ``token_id``, against the rules.

        Returns the ending and the id to name in the detail, or ``None`` when it goes on.
        """
        params = sequence.params
        num_output = length - sequence.num_prompt
        if num_output >= params.min_tokens:
            if not params.ignore_eos and token_id in self.eos_token_ids:
                return Ending.EOS, None
            if token_id in sequence.stop_ids:
                return Ending.STOP_TOKEN, token_id
        if length >= self.limit:
            return self._at_limit, None
        if num_output >= params.max_tokens:
            return Ending.MAX_TOKENS, None
        return None
