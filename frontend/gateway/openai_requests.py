"""Requests of the OpenAI API, checked, and the ``SamplingParams`` they stand for.

Every parameter is either honoured, refused by name, or listed in ``_Request`` as one that changes
nothing here. What OpenAI does not have (``top_k``, ``min_p``, ``ignore_eos``, …) goes by the names
of ``SamplingParams``.
"""

from __future__ import annotations

import re
from typing import Any, TypeVar

import msgspec

from deepinfer.frontend.gateway.errors import ApiError, bad_request
from deepinfer.wire.checks import check_int, check_length, shown
from deepinfer.wire.params import MAX_LOGIT_BIAS, MAX_LOGPROBS, SamplingParams

MAX_PROMPTS = 256
"""Prompts of one completion request."""

MAX_PARTS = 1 << 16
"""Strings, arrays and objects in the JSON of one request: 12,000 messages, say."""

MAX_CHOICES = 512
"""Prompts times ``n`` of one request."""

_NO_PARTS = bytes(set(range(256)) - set(b'"[{'))

# Fields that go into ``SamplingParams`` under their own name.
_OWN_NAMES = (
    "temperature",
    "top_p",
    "n",
    "seed",
    "stop",
    "presence_penalty",
    "frequency_penalty",
    "top_k",
    "min_p",
    "repetition_penalty",
    "min_tokens",
    "ignore_eos",
    "stop_token_ids",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "bad_words",
    "allowed_token_ids",
)


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """``include_usage``: one more chunk at the end says how many tokens were used."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class _Request(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What both kinds of request share."""

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # Not OpenAI's, but of most servers.
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    priority: int | None = None
    return_token_ids: bool | None = None
    # Who asks is known by the key; nothing is stored and there is one tier of service.
    user: str | None = None
    store: bool | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with its usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    def _params(self, **others: Any) -> SamplingParams:
        if self.stream_options is not None and not self.stream:
            raise bad_request("stream_options is only for stream = true", "stream_options")
        fields = {name: value for name in _OWN_NAMES if (value := getattr(self, name)) is not None}
        if self.logit_bias is not None:
            check_length("logit_bias", self.logit_bias, MAX_LOGIT_BIAS)
            fields["logit_bias"] = {_token_id(key): v for key, v in self.logit_bias.items()}
        return SamplingParams(**fields, **others)


class CompletionRequest(_Request, kw_only=True):
    """``POST /v1/completions``."""

    prompt: str | list[Any]
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None
    suffix: str | None = None

    def prompts(self) -> list[str | list[int]]:
        """Return the prompts one by one; the ids are checked where they are used."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if not self.prompt or type(self.prompt[0]) is int:
            return [self.prompt]
        if len(self.prompt) > MAX_PROMPTS:
            raise bad_request(f"prompt may hold at most {MAX_PROMPTS}, got {len(self.prompt)}")
        kind = type(self.prompt[0])
        if kind not in (str, list) or any(type(prompt) is not kind for prompt in self.prompt):
            raise bad_request(
                "prompt must be a string, a list of strings, a list of token ids or a list of "
                "lists of token ids"
            )
        if (choices := len(self.prompt) * (self.n or 1)) > MAX_CHOICES:
            raise bad_request(f"n times prompts may be at most {MAX_CHOICES}, got {choices}")
        return self.prompt

    def params(self, max_tokens: int) -> SamplingParams:
        """Return the parameters; ``ValueError`` or ``ApiError`` names what cannot be served."""
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise bad_request("best_of is not supported, unless it equals n", "best_of")
        if self.suffix:
            raise bad_request("suffix is not supported", "suffix")
        prompt_logprobs = self.logprobs if self.echo else None
        return self._params(
            max_tokens=max_tokens, logprobs=self.logprobs, prompt_logprobs=prompt_logprobs
        )


class ChatRequest(_Request, kw_only=True):
    """``POST /v1/chat/completions``."""

    messages: list[Any]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: dict[str, Any] | None = None
    tools: list[Any] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    functions: list[Any] | None = None
    function_call: str | dict[str, Any] | None = None
    modalities: list[str] | None = None
    audio: dict[str, Any] | None = None
    prediction: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    verbosity: str | None = None
    web_search_options: dict[str, Any] | None = None

    @property
    def most_tokens(self) -> int | None:
        """How many tokens the answer may have, if that was said."""
        if self.max_completion_tokens is None:
            return self.max_tokens
        if self.max_tokens not in (None, self.max_completion_tokens):
            raise bad_request("max_tokens is the old name of max_completion_tokens: give one")
        return self.max_completion_tokens

    def params(self, max_tokens: int) -> SamplingParams:
        """Return the parameters; ``ValueError`` or ``ApiError`` names what cannot be served."""
        self._refuse_unsupported()
        if self.top_logprobs is not None:
            if not self.logprobs:
                raise bad_request("top_logprobs needs logprobs = true", "top_logprobs")
            check_int("top_logprobs", self.top_logprobs, 0, MAX_LOGPROBS)
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        return self._params(max_tokens=max_tokens, logprobs=logprobs)

    def _refuse_unsupported(self) -> None:
        if self.response_format is not None and self.response_format != {"type": "text"}:
            raise _unsupported("response_format", "structured output")
        if self.tools or self.tool_choice not in (None, "none", "auto"):
            raise _unsupported("tools" if self.tools else "tool_choice", "tool calls")
        if self.functions or self.function_call not in (None, "none", "auto"):
            raise _unsupported("functions" if self.functions else "function_call", "tool calls")
        if self.modalities not in (None, ["text"]) or self.audio is not None:
            raise _unsupported("modalities" if self.audio is None else "audio", "audio")
        for name in ("prediction", "reasoning_effort", "verbosity", "web_search_options"):
            if getattr(self, name) is not None:
                raise _unsupported(name, name.replace("_", " "))


def conversation(messages: list[Any]) -> list[dict[str, Any]]:
    """Return messages that are some; each is checked where the template is."""
    # A list of numbers would be taken for token ids, and an empty one for no tokens.
    if not messages or not isinstance(messages[0], dict):
        raise bad_request("messages must be a list of one or more objects with role and content")
    return messages


class TokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """``POST /tokenize``: the ids of a text or of a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Any] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True


class DetokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """``POST /detokenize``: the text of ids, special tokens included."""

    model: str | None = None
    tokens: list[int]


_Kind = TypeVar("_Kind")


def decode(body: bytes, kind: type[_Kind]) -> _Kind:
    """Return the request in a body; ``ApiError`` 400 names the field that is wrong."""
    if (parts := _count_parts(body)) > MAX_PARTS:
        raise ApiError(
            400, f"the body holds {parts} strings, arrays and objects or more, the limit is "
            f"{MAX_PARTS}"
        )  # fmt: skip
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        message = str(error)
        if (unknown := re.search("unknown field `(.*?)`", message, re.DOTALL)) is not None:
            name = unknown[1][:80]
            raise bad_request(f"unknown parameter: {shown(name)}", name) from None
        missing = re.search("missing required field `(.*?)`", message)
        path = re.search(r"at `\$\.([A-Za-z_]\w*)", message)
        name = missing[1] if missing else path[1] if path else None
        raise ApiError(400, message.replace("`", "'"), param=name) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, f"the body is not JSON: {error}") from None


def _count_parts(body: bytes) -> int:
    """Return how many strings, arrays and objects a JSON text holds, or enough to refuse it.

    Each becomes a Python object while nothing else in this process can run: 8 MB of ``[],[],[]``
    would take most of a second, where counting them takes a fiftieth of one.
    """
    if len(body) <= MAX_PARTS:
        return 0
    bare = body.replace(b"\\\\", b"").replace(b'\\"', b"").translate(None, _NO_PARTS)
    strings = bare.count(b'"') // 2
    if strings > MAX_PARTS:
        return strings
    return strings + sum(map(len, bare.split(b'"')[::2]))


def _token_id(key: str) -> int:
    if not re.fullmatch("[0-9]{1,10}", key):
        raise bad_request(f"logit_bias must have token ids as keys, got {shown(key)}")
    return int(key)


def _unsupported(field: str, what: str) -> ApiError:
    return bad_request(f"{field}: {what} is not supported by this version", field, "unsupported")
