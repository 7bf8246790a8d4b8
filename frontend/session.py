"""The client's side of a connection as a state machine: no sockets, no clock, no tasks.

Whoever owns the I/O (``AsyncEngine``, ``Client``, ``LLMEngine``) sends what ``outbox`` holds and
feeds ``receive`` with what arrives.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from deepinfer.frontend.chat_messages import inline_images, text_length
from deepinfer.frontend.errors import (
    EngineBusyError,
    EngineDownError,
    EngineError,
    PromptTooLongError,
)
from deepinfer.frontend.images import image_refs, images_of, in_order
from deepinfer.frontend.outputs import RequestOutput
from deepinfer.frontend.text_stream import TextStream
from deepinfer.frontend.tokenizer import Tokenizer
from deepinfer.wire.checks import check_float, check_int, shown
from deepinfer.wire.columns import pack_int32, unpack_int32, unpack_uint32
from deepinfer.wire.messages import (
    MAX_REQUEST_ID_CHARS,
    MAX_SALT_CHARS,
    MAX_USER_ID_CHARS,
    MAX_WEIGHT,
    MIN_WEIGHT,
    Abort,
    AddRequest,
    End,
    EngineDown,
    EngineInfo,
    ImageRef,
    OutputBatch,
    Refused,
    RowExtra,
    StopMatched,
    ToClient,
)
from deepinfer.wire.params import SamplingParams

Prompt = str | Sequence[int] | Sequence[dict[str, Any]]

_SEED_STEP = 0x9E3779B97F4A7C15  # odd, so the n seeds of a request differ


class PreparedPrompt(NamedTuple):
    """A prompt that passed every check, as token ids, with the parameters that go with it."""

    text: str | None
    token_ids: list[int]
    """With one placeholder for each image."""
    params: SamplingParams
    images: list[ImageRef] = []


class Request:
    """One user's request: ``n`` samples of one prompt. ``owner`` belongs to the I/O side."""

    __slots__ = ("open_samples", "owner", "prompt", "request_id", "samples")

    def __init__(self, request_id: str, prompt: PreparedPrompt) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.samples: list[_Sample] = []
        self.open_samples = 0
        self.owner: Any = None


class _Sample:
    """One sequence of the scheduler, as this side sees it.

    ``add`` is what asked for it and ``token_ids`` what it brought so far: together they are all
    that another scheduler needs to go on with it.
    """

    __slots__ = (
        "add",
        "aborted_by",
        "cached_tokens",
        "index",
        "key",
        "name",
        "num_preemptions",
        "prompt_logprobs",
        "prompt_tokens",
        "request",
        "stream",
        "submitted_at",
        "token_ids",
    )

    add: AddRequest
    submitted_at: float

    def __init__(self, request: Request, index: int, key: int, stream: TextStream | None) -> None:
        self.request = request
        self.index = index
        self.key = key
        self.name = request.request_id if index == 0 else f"{request.request_id}#{index}"
        self.stream = stream
        self.token_ids: list[int] = []
        self.aborted_by: str | None = None
        self.cached_tokens = 0
        self.num_preemptions = 0
        self.prompt_tokens = len(request.prompt.token_ids)
        wants = request.prompt.params.prompt_logprobs is not None
        self.prompt_logprobs: list[dict[int, float] | None] | None = (
            [None] * len(request.prompt.token_ids) if wants else None
        )


Event = tuple[Request, RequestOutput | EngineError | ValueError]


class Session:
    """Requests of one client, by key and by id, and the messages that go out.

    ``seed`` is the base for the seeds of requests that bring none; random when ``None``.
    """

    def __init__(
        self, info: EngineInfo, tokenizer: Tokenizer | None, seed: int | None = None
    ) -> None:
        self.info = info
        self.tokenizer = tokenizer
        self.outbox: list[msgspec.Struct] = []
        self._samples: dict[int, _Sample] = {}
        self._requests: dict[str, Request] = {}
        self._names: set[str] = set()
        self._next_key = 0
        self._seeds = random.Random(seed)

    def __len__(self) -> int:
        """How many requests are open."""
        return len(self._requests)

    # ---- in ---------------------------------------------------------------------------------

    def prepare(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        multi_modal_data: dict[str, Any] | None = None,
    ) -> PreparedPrompt:
        """Check and tokenise a prompt; raise ``ValueError`` naming what is wrong.

        Changes nothing here, so long prompts may be prepared in another thread.
        """
        params = params if params is not None else SamplingParams()
        if not isinstance(params, SamplingParams):
            raise ValueError(f"sampling_params must be SamplingParams, got {shown(params)}")
        params.check_vocabulary(self.info.vocab_size)
        if params.bad_words:
            params = msgspec.structs.replace(params, bad_words=self._bad_word_ids(params.bad_words))
        if params.stop_strings and self.tokenizer is None:
            raise ValueError("stop needs a tokenizer, and this client has none")
        text, token_ids = self._tokenise(prompt)
        limit = self.info.max_model_len
        if not token_ids:
            raise ValueError("prompt must not be empty: it has no tokens")
        if len(token_ids) > limit:
            raise PromptTooLongError(f"prompt has {len(token_ids)} tokens, the limit is {limit}")
        images = self._images(prompt, token_ids, multi_modal_data)
        if images and params.prompt_logprobs is not None:
            raise ValueError("prompt_logprobs cannot be had for a prompt with images")
        return PreparedPrompt(text, token_ids, params, images)

    def add(
        self,
        request_id: str,
        prompt: PreparedPrompt,
        now: float,
        *,
        user_id: str = "",
        priority: int = 0,
        timeout_s: float | None = None,
        weight: float = 1.0,
        cache_salt: str = "",
    ) -> Request:
        """Open a request; its messages are in the outbox. ``ValueError`` when the id is live.

        ``now`` is in seconds of a monotonic clock.
        """
        _check_name("request_id", request_id, MAX_REQUEST_ID_CHARS - 8, empty_ok=False)
        _check_name("user_id", user_id, MAX_USER_ID_CHARS, empty_ok=True)
        check_int("priority", priority, -(1 << 31), (1 << 31) - 1)
        if timeout_s is not None:
            check_float("timeout_s", timeout_s, 0.0, 1e9, low_open=True)
        check_float("weight", weight, MIN_WEIGHT, MAX_WEIGHT)
        _check_name("cache_salt", cache_salt, MAX_SALT_CHARS, empty_ok=True)
        request = Request(request_id, prompt)
        params = prompt.params
        for index in range(params.n):
            stream = TextStream(self.tokenizer, params) if self.tokenizer is not None else None
            request.samples.append(_Sample(request, index, self._next_key + index, stream))
        if request_id in self._requests or any(s.name in self._names for s in request.samples):
            raise ValueError(f"request_id {shown(request_id)} is in use by a running request")
        self._next_key += params.n
        seed = params.seed if params.seed is not None else self._seeds.getrandbits(63)
        column = pack_int32(prompt.token_ids)
        self._requests[request_id] = request
        request.open_samples = params.n
        for sample in request.samples:
            self._samples[sample.key] = sample
            self._names.add(sample.name)
            # Stop strings are matched here, where the text is; the scheduler has no use for them.
            own = msgspec.structs.replace(
                params, n=1, stop=None, seed=(seed + sample.index * _SEED_STEP) & ((1 << 64) - 1)
            )
            sample.submitted_at = now
            sample.add = AddRequest(
                key=sample.key,
                request_id=sample.name,
                prompt=column,
                params=own,
                user_id=user_id,
                priority=priority,
                timeout_ms=None if timeout_s is None else timeout_s * 1000,
                salt=cache_salt,
                weight=float(weight),
                images=prompt.images,
            )
            self.outbox.append(sample.add)
        return request

    def get(self, request_id: str) -> Request | None:
        """Return the open request with this id."""
        return self._requests.get(request_id)

    def abort(self, request: Request, rule: str = "client_abort") -> None:
        """Ask the scheduler to end a request; its final outputs arrive through ``receive``."""
        for sample in request.samples:
            if sample.key in self._samples:
                sample.aborted_by = rule
                self.outbox.append(Abort(sample.key, rule))

    def abandon(self, request: Request, rule: str = "client_abort") -> None:
        """Abort a request nobody reads any more, and forget it at once."""
        self.abort(request, rule)
        for sample in request.samples:
            self._forget(sample)

    def resubmit(self, info: EngineInfo, now: float) -> list[Event]:
        """Ask another scheduler to go on with every open request, from the tokens it has.

        Replaces the outbox. Returns the ends of requests that were aborted while nobody was there
        to end them.
        """
        self.info = info
        self.outbox.clear()
        events: list[Event] = []
        for sample in list(self._samples.values()):
            if sample.aborted_by is not None:
                output = self._output(sample, sample.token_ids[-1] if sample.token_ids else -1)
                self._close(sample, output, "abort", sample.aborted_by)
                events.append((sample.request, output))
            else:
                self.outbox.append(_continuation(sample, now))
        return events

    def fail_all(self, error: EngineError) -> list[Event]:
        """Forget every open request, because the engine is gone; each gets the error once."""
        requests = list(self._requests.values())
        for request in requests:
            for sample in request.samples:
                self._forget(sample)
        return [(request, error) for request in requests]

    # ---- out --------------------------------------------------------------------------------

    def receive(self, message: ToClient) -> list[Event]:
        """Take one message and return what it means for which request, in order."""
        match message:
            case OutputBatch():
                return self._receive_batch(message)
            case Refused():
                return self._receive_refusal(message)
            case EngineDown():
                return self.fail_all(EngineDownError(message.message))
            case _:
                return []

    def _receive_batch(self, batch: OutputBatch) -> list[Event]:
        events: list[Event] = []
        for note in batch.notes:
            if (sample := self._samples.get(note.key)) is not None:
                sample.cached_tokens = note.cached_tokens
                sample.num_preemptions = note.num_preemptions
                sample.prompt_tokens = note.prompt_tokens
        extras = {extra.key: extra for extra in batch.extras}
        for extra in batch.extras:
            if extra.prompt_logprobs and (sample := self._samples.get(extra.key)) is not None:
                _note_prompt_logprobs(sample, extra)
        ends = {end.key: end for end in batch.ends}
        keys = unpack_uint32(batch.keys).tolist()
        tokens = unpack_int32(batch.tokens).tolist()
        counts = unpack_int32(batch.counts).tolist() if batch.counts else [1] * len(keys)
        position = 0
        for key, count in zip(keys, counts, strict=True):
            own = tokens[position : position + count]
            position += count
            if (sample := self._samples.get(key)) is not None:
                self._push(events, sample, own, extras.get(key), ends.pop(key, None))
        for key, end in ends.items():
            if (sample := self._samples.get(key)) is not None:
                events.append((sample.request, self._end_without_token(sample, end)))
        return events

    def _push(
        self,
        events: list[Event],
        sample: _Sample,
        tokens: list[int],
        extra: RowExtra | None,
        end: End | None,
    ) -> None:
        """Add one output a token; the last one carries the end, where there is one."""
        for i, token_id in enumerate(tokens):
            sample.token_ids.append(token_id)
            output = self._output(sample, token_id)
            if extra is not None:
                output.draft_tok = extra.draft_tokens
                output.accept_tok = extra.accepted_tokens
                if extra.logprobs:
                    entry = extra.logprobs[i]
                    output.token_logprobs = entry.logprob
                    output.sum_smaller_probs = entry.sum_smaller_probs
                    output.top_token_ids = entry.top_token_ids
                    output.top_logprobs = entry.top_logprobs
            events.append((sample.request, output))
            ends_here = end if end is not None and i == len(tokens) - 1 else None
            if (stream := sample.stream) is not None:
                output.text = stream.push(token_id, ends_here is not None and _by_token(ends_here))
                if (stop := stream.stop) is not None:
                    self._close(sample, output, "stop", f"stop_string:{stop}")
                    if end is None:
                        self.outbox.append(StopMatched(sample.key, stop, len(sample.token_ids)))
                    return
            if ends_here is not None:
                self._take_end(sample, output, ends_here)

    def _end_without_token(self, sample: _Sample, end: End) -> RequestOutput:
        sample.prompt_tokens = end.prompt_tokens
        output = self._output(sample, end.last_token_id)
        self._take_end(sample, output, end)
        return output

    def _output(self, sample: _Sample, token_id: int) -> RequestOutput:
        prompt_logprobs, sample.prompt_logprobs = sample.prompt_logprobs, None
        return RequestOutput(
            request_id=sample.request.request_id,
            prompt_len=sample.prompt_tokens,
            token_id=token_id,
            index=sample.index,
            num_output_tokens=len(sample.token_ids),
            max_num_batched_tokens=self.info.max_num_batched_tokens,
            prompt_logprobs=prompt_logprobs,
            cached_tokens=sample.cached_tokens,
            num_preemptions=sample.num_preemptions,
        )

    def _take_end(self, sample: _Sample, output: RequestOutput, end: End) -> None:
        reason, detail = end.reason, end.detail
        if sample.stream is not None:
            # What was held back as the possible beginning of a stop string belongs to the text,
            # unless the last bytes complete one.
            output.text += sample.stream.finish()
            if sample.stream.stop is not None and reason in ("stop", "length"):
                reason, detail = "stop", f"stop_string:{sample.stream.stop}"
        output.cached_tokens = end.cached_tokens
        output.num_preemptions = end.num_preemptions
        output.error = end.message
        self._close(sample, output, reason, detail)

    def _close(self, sample: _Sample, output: RequestOutput, reason: str, detail: str) -> None:
        output.finished = True
        output.finish_reason = reason
        output.finish_detail = detail
        self._forget(sample)

    def _forget(self, sample: _Sample) -> None:
        if self._samples.pop(sample.key, None) is None:
            return
        self._names.discard(sample.name)
        sample.request.open_samples -= 1
        if sample.request.open_samples == 0:
            del self._requests[sample.request.request_id]

    def _receive_refusal(self, refused: Refused) -> list[Event]:
        sample = self._samples.get(refused.key)
        if sample is None:
            return []
        self.abandon(sample.request)
        text = f"request {sample.request.request_id!r}: {refused.message}"
        error: EngineError | ValueError
        match refused.code:
            case "busy" | "shutdown":
                error = EngineBusyError(text, closing=refused.code == "shutdown")
            case "down":
                error = EngineDownError(text)
            case _:
                error = ValueError(text)
        return [(sample.request, error)]

    # ---- prompts ----------------------------------------------------------------------------

    def _tokenise(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        if isinstance(prompt, str):
            self._check_reach(len(prompt))
            return prompt, self._need_tokenizer().encode(prompt)
        if isinstance(prompt, np.ndarray):
            prompt = prompt.tolist()
        if not isinstance(prompt, list | tuple):
            raise ValueError(
                "prompt must be a string, a list of token ids or a list of chat messages, "
                f"got {shown(prompt)}"
            )
        if prompt and isinstance(prompt[0], dict):
            tokenizer = self._need_tokenizer()
            self._check_reach(text_length(prompt))
            return None, tokenizer.render_chat(list(prompt), images=self.info.images is not None)
        if len(prompt) > self.info.max_model_len:
            raise PromptTooLongError(
                f"prompt has {len(prompt)} tokens, the limit is {self.info.max_model_len}"
            )
        vocab_size = self.info.vocab_size
        for token_id in prompt:
            if type(token_id) is not int or not 0 <= token_id < vocab_size:
                raise ValueError(
                    f"prompt must hold token ids from 0 to {vocab_size - 1}, got {shown(token_id)}"
                )
        return None, list(prompt)

    def _check_reach(self, chars: int) -> None:
        """Refuse at once a text that is too long however well it tokenises."""
        longest = self._need_tokenizer().max_token_chars
        if chars > self.info.max_model_len * longest:
            raise PromptTooLongError(
                f"prompt has {chars} characters, more than the limit of "
                f"{self.info.max_model_len} tokens can hold"
            )

    def _images(
        self, prompt: Prompt, token_ids: list[int], multi_modal_data: dict[str, Any] | None
    ) -> list[ImageRef]:
        """Return the images of a prompt, each at the place of its placeholder."""
        images = images_of(multi_modal_data)
        limits = self.info.images
        if limits is None:
            if images:
                raise ValueError("multi_modal_data: this engine takes no images")
            return []
        if not isinstance(prompt, str) and isinstance(prompt[0], dict):
            images = in_order(inline_images(list(prompt)), images)
        token, places = limits.placeholder, token_ids.count(limits.placeholder)
        if places != len(images):
            spelled = self.tokenizer.piece(token) if self.tokenizer is not None else None
            raise ValueError(
                f"prompt must hold {spelled or 'the token'} (id {token}) once for each image: "
                f"{places} of it, {len(images)} images"
            )
        place = -1
        refs = image_refs(images, limits)
        for ref in refs:
            ref.position = place = token_ids.index(token, place + 1)
        return refs

    def _need_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise ValueError("prompt must be token ids: this client has no tokenizer")
        return self.tokenizer

    def _bad_word_ids(self, words: list[str | list[int]]) -> list[str | list[int]]:
        """Token ids of each word, as it stands at a beginning and after a space."""
        out: list[str | list[int]] = []
        for word in words:
            spellings = [word] if not isinstance(word, str) else self._spellings(word)
            out += [ids for ids in spellings if ids not in out]
        return out

    def _spellings(self, word: str) -> list[list[int]]:
        tokenizer = self._need_tokenizer()
        spellings = [tokenizer.encode(w, add_special_tokens=False) for w in (word, " " + word)]
        return [ids for ids in spellings if ids]


def _continuation(sample: _Sample, now: float) -> AddRequest:
    """Return the request as it stands now: what was delivered is not asked for again."""
    add = sample.add
    if sample.prompt_logprobs is None and add.params.prompt_logprobs is not None:
        params = msgspec.structs.replace(add.params, prompt_logprobs=None)
        add = msgspec.structs.replace(add, params=params)
    if add.timeout_ms is not None:
        left_ms = add.timeout_ms - (now - sample.submitted_at) * 1000
        add = msgspec.structs.replace(add, timeout_ms=max(left_ms, 1.0))
    return msgspec.structs.replace(add, output=pack_int32(sample.token_ids), resubmitted=True)


def _by_token(end: End) -> bool:
    """Whether the last token itself ended the request."""
    return end.detail.partition(":")[0] in ("eos", "stop_token")


def _note_prompt_logprobs(sample: _Sample, extra: RowExtra) -> None:
    if sample.prompt_logprobs is None:
        return
    for part in extra.prompt_logprobs:
        for i, (ids, values) in enumerate(zip(part.token_ids, part.logprobs, strict=True)):
            sample.prompt_logprobs[part.start + i] = dict(zip(ids, values, strict=True))


def _check_name(field: str, value: object, limit: int, *, empty_ok: bool) -> None:
    if not isinstance(value, str):
        raise ValueError(f"{field} must be a string, got {shown(value)}")
    if not value and not empty_ok:
        raise ValueError(f"{field} must not be empty")
    if len(value) > limit:
        raise ValueError(f"{field} may have at most {limit} characters, got {len(value)}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{field} must be valid Unicode: {error.reason}") from error
