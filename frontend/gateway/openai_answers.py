"""Answers in the forms of the OpenAI API, whole and as the chunks of a stream."""

from __future__ import annotations

import codecs
from typing import Any

import msgspec

from deepinfer.frontend.gateway.errors import ApiError, unavailable
from deepinfer.frontend.gateway.token_texts import LOWEST_LOGPROB, TokenTexts
from deepinfer.frontend.outputs import RequestOutput
from deepinfer.frontend.session import PreparedPrompt

Json = dict[str, Any]


class Usage(msgspec.Struct):
    """Tokens of one HTTP request. A prompt counts once, whatever ``n`` is."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0

    def body(self) -> Json:
        """Return OpenAI's usage object."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


class _Choice:
    """What one choice has come to so far."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.begun = False
        self.num_tokens = 0
        self.texts: list[str] = []
        self.token_ids: list[int] = []
        self.logprobs: list[Any] = []
        self.text_offset = 0
        # A character whose bytes are several tokens begins where the first of them does.
        self.characters = codecs.getincrementaldecoder("utf-8")("replace")
        self.end: Json = {"finish_reason": None}


class Answers:
    """Turns the outputs of the ``n`` choices of each prompt into objects for the client.

    ``take`` is called with every output. It returns the choices of the chunks that a stream sends
    now, and remembers what ``whole`` needs. A choice is ``prompt_index * n + output.index``.
    ``with_ids`` adds the ids of the tokens, as vLLM does. ``with_usage``: a stream ends with its
    usage.
    """

    name = ""
    chunk_name = ""

    def __init__(
        self,
        request_id: str,
        model: str,
        created: int,
        prompts: list[PreparedPrompt],
        texts: TokenTexts,
        *,
        with_ids: bool,
        with_usage: bool,
    ) -> None:
        self.request_id = request_id
        self.model = model
        self.with_usage = with_usage
        self._head = {"id": request_id, "created": created, "model": model}
        self._prompts = prompts
        self._texts = texts
        self._with_ids = with_ids
        self._n = prompts[0].params.n
        self._with_logprobs = prompts[0].params.logprobs is not None
        self._choices = [_Choice(index) for index in range(self._n * len(prompts))]
        self._cached = [0] * len(prompts)
        # Chunks differ in their choice alone; all but the last have ``usage: null`` where one ends.
        self._encode = msgspec.json.Encoder().encode
        head = {**self._head, "object": self.chunk_name, "choices": []}
        self._chunk_begin = self._encode(head).removesuffix(b"]}")
        self._chunk_end = b'],"usage":null}' if with_usage else b"]}"
        self.usage = Usage(sum(len(prompt.token_ids) for prompt in prompts))

    def take(self, prompt: int, output: RequestOutput) -> list[Json]:
        """Add an output of a prompt; ``ApiError`` when it is the end by a failure."""
        choice = self._choices[prompt * self._n + output.index]
        if output.finished and output.finish_reason not in ("stop", "length"):
            raise _failure(output)
        is_token = self._count(prompt, choice, output)
        chunks = [] if choice.begun else self._begin(choice, prompt, output)
        choice.begun = True
        logprobs = None
        if is_token and self._with_logprobs:
            logprobs = self._logprobs(choice, output)
        ids = [output.token_id] if is_token and self._with_ids else []
        if output.text or logprobs is not None or ids:
            delta = self._delta(choice.index, output.text, logprobs)
            chunks.append({**delta, "token_ids": ids} if self._with_ids else delta)
        choice.token_ids += ids
        choice.texts.append(output.text)
        if output.finished:
            choice.end = {"finish_reason": output.finish_reason, "stop_reason": _matched(output)}
            chunks.append(self._last(choice.index) | choice.end)
        return chunks

    def whole(self) -> Json:
        """Return the complete answer."""
        choices = [self._whole(choice) | choice.end for choice in self._choices]
        if self._with_ids:
            for choice, body in zip(self._choices, choices, strict=True):
                body["token_ids"] = choice.token_ids
                body["prompt_token_ids"] = self._prompts[choice.index // self._n].token_ids
        return {**self._head, "object": self.name, "choices": choices, "usage": self.usage.body()}

    def chunk(self, choice: Json) -> bytes:
        """Return one chunk of a stream."""
        return self._chunk_begin + self._encode(choice) + self._chunk_end

    def usage_chunk(self) -> bytes:
        """Return the last chunk of a stream whose usage was asked for."""
        usage = self._encode(self.usage.body())
        return self._chunk_begin + b'],"usage":' + usage + b"}"

    def _count(self, prompt: int, choice: _Choice, output: RequestOutput) -> bool:
        """Count an output; return whether it is a token: an end without one repeats the last."""
        new = output.num_output_tokens - choice.num_tokens
        self.usage.completion_tokens += new
        choice.num_tokens += new
        if output.cached_tokens > self._cached[prompt]:
            self.usage.cached_tokens += output.cached_tokens - self._cached[prompt]
            self._cached[prompt] = output.cached_tokens
        return new > 0

    def _begin(self, choice: _Choice, prompt: int, output: RequestOutput) -> list[Json]:
        """Return what comes before a choice's first token."""
        raise NotImplementedError

    def _logprobs(self, choice: _Choice, output: RequestOutput) -> Json | None:
        """Return the log probabilities of an output's token, and keep them for the whole."""
        raise NotImplementedError

    def _delta(self, index: int, text: str, logprobs: Json | None) -> Json:
        raise NotImplementedError

    def _last(self, index: int) -> Json:
        raise NotImplementedError

    def _whole(self, choice: _Choice) -> Json:
        raise NotImplementedError


class ChatAnswers(Answers):
    """``chat.completion`` and ``chat.completion.chunk``."""

    name = "chat.completion"
    chunk_name = "chat.completion.chunk"

    def _begin(self, choice: _Choice, prompt: int, output: RequestOutput) -> list[Json]:
        delta = {"role": "assistant", "content": ""}
        return [{"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": None}]

    def _logprobs(self, choice: _Choice, output: RequestOutput) -> Json | None:
        entry = self._entry(output.token_id, output.token_logprobs)
        pairs = zip(output.top_token_ids, output.top_logprobs, strict=True)
        entry["top_logprobs"] = [self._entry(token, value) for token, value in pairs]
        choice.logprobs.append(entry)
        return {"content": [entry], "refusal": None}

    def _entry(self, token_id: int, logprob: float) -> Json:
        return {
            "token": self._texts.text_of(token_id),
            "logprob": max(logprob, LOWEST_LOGPROB),
            "bytes": list(self._texts.bytes_of(token_id)),
        }

    def _delta(self, index: int, text: str, logprobs: Json | None) -> Json:
        delta = {"content": text}
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None}

    def _last(self, index: int) -> Json:
        return {"index": index, "delta": {}, "logprobs": None}

    def _whole(self, choice: _Choice) -> Json:
        message = {"role": "assistant", "content": "".join(choice.texts), "refusal": None}
        logprobs = {"content": choice.logprobs, "refusal": None} if self._with_logprobs else None
        return {"index": choice.index, "message": message, "logprobs": logprobs}


class CompletionAnswers(Answers):
    """``text_completion``; ``echo`` puts the prompt before each of its completions."""

    name = chunk_name = "text_completion"

    def __init__(self, *args: Any, echo: bool, echoed: list[str], **options: Any) -> None:
        """``echoed`` are the texts of the prompts."""
        super().__init__(*args, **options)
        self._echo = echo
        self._echoed = echoed

    def _begin(self, choice: _Choice, prompt: int, output: RequestOutput) -> list[Json]:
        if not self._echo:
            return []
        text = self._echoed[prompt]
        choice.texts.append(text)
        logprobs = None
        if self._with_logprobs:
            entries = output.prompt_logprobs or []
            rows = [
                self._row(choice, token_id, entry[token_id] if entry else None, entry)
                for token_id, entry in zip(self._prompts[prompt].token_ids, entries, strict=True)
            ]
            choice.logprobs += rows
            logprobs = _columns(rows)
        return [self._delta(choice.index, text, logprobs)]

    def _logprobs(self, choice: _Choice, output: RequestOutput) -> Json | None:
        top = dict(zip(output.top_token_ids, output.top_logprobs, strict=True))
        entry = {output.token_id: output.token_logprobs} | top
        row = self._row(choice, output.token_id, output.token_logprobs, entry)
        choice.logprobs.append(row)
        return _columns([row])

    def _row(
        self, choice: _Choice, token_id: int, logprob: float | None, entry: dict[int, float] | None
    ) -> tuple[str, float | None, dict[str, float] | None, int]:
        text = self._texts.text_of(token_id)
        at = choice.text_offset
        choice.text_offset += len(choice.characters.decode(self._texts.bytes_of(token_id)))
        if logprob is None or entry is None:
            return text, None, None, at
        names = self._texts.distinct(list(entry))
        top = {
            name: max(value, LOWEST_LOGPROB)
            for name, value in zip(names, entry.values(), strict=True)
        }
        return text, max(logprob, LOWEST_LOGPROB), top, at

    def _delta(self, index: int, text: str, logprobs: Json | None) -> Json:
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": None}

    def _last(self, index: int) -> Json:
        return {"index": index, "text": "", "logprobs": None}

    def _whole(self, choice: _Choice) -> Json:
        logprobs = _columns(choice.logprobs) if self._with_logprobs else None
        return {"index": choice.index, "text": "".join(choice.texts), "logprobs": logprobs}


def _columns(rows: list[Any]) -> Json:
    names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    columns = zip(*rows, strict=True) if rows else [()] * len(names)
    return {name: list(column) for name, column in zip(names, columns, strict=True)}


def _matched(output: RequestOutput) -> str | int | None:
    """The stop string or the id of the stop token that ended a choice."""
    rule, _, matched = output.finish_detail.partition(":")
    if rule == "stop_token":
        return int(matched)
    return matched if rule == "stop_string" else None


def _failure(output: RequestOutput) -> ApiError:
    """What a client is told when a request ended otherwise than by a stop or its length."""
    reason, detail = output.finish_reason, output.finish_detail
    message = f"the request ended early: {reason} ({detail})"
    if output.error:
        message += f": {output.error}"
    if reason == "prompt_length_exceeded":
        return ApiError(400, message, code="context_length_exceeded", param="prompt")
    if reason == "image_failed":
        return ApiError(400, output.error or message, code=reason, param="messages")
    if reason == "structured_output_failed":
        return ApiError(400, message, code=reason)
    if detail.startswith("deadline"):
        return ApiError(504, message, kind="timeout_error", code="deadline")
    if detail.startswith("worker_failed"):
        return ApiError(500, message, kind="server_error", code="worker_failed")
    return unavailable(message, 1.0)
