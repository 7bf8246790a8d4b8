"""``LLM``: offline generation in a script."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from deepinfer.frontend.llm_engine import LLMEngine
from deepinfer.frontend.outputs import Completion, Metrics, RequestOutput
from deepinfer.wire.checks import shown
from deepinfer.wire.config import EngineArgs
from deepinfer.wire.params import SamplingParams

if TYPE_CHECKING:
    from deepinfer.frontend.session import PreparedPrompt, Prompt

ImageData = dict[str, Any]


class LLM:
    """A model for batches: prompts in, completions out, in input order.

    ``engine_args`` are the fields of ``EngineArgs``; preempted requests are recomputed unless
    ``stop_preempted_request=True`` is given. Calls from several threads take turns.
    """

    def __init__(self, model: str = "smollm2-135m", **engine_args: Any) -> None:
        engine_args.setdefault("stop_preempted_request", False)
        try:
            args = EngineArgs(model=model, **engine_args)
        except TypeError as error:
            raise ValueError(f"unknown engine argument: {error}") from error
        self._engine = LLMEngine(args)
        self._turn = threading.Lock()

    def generate(
        self,
        prompts: Prompt | Sequence[str | Sequence[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        multi_modal_data: ImageData | Sequence[ImageData | None] | None = None,
        *,
        progress: bool = True,
    ) -> list[Completion]:
        """Complete prompts (strings or lists of token ids; one or many).

        ``multi_modal_data`` is that of ``AsyncEngine.generate``, for each prompt one (or ``None``).
        With ``n > 1`` a prompt's completions stand one after the other. A bad item raises
        ``ValueError`` that names its index, before anything is sent.
        """
        return self._run(_as_list(prompts), sampling_params, multi_modal_data, progress)

    def chat(
        self,
        conversations: Sequence[dict[str, Any]] | Sequence[Sequence[dict[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        multi_modal_data: ImageData | Sequence[ImageData | None] | None = None,
        *,
        progress: bool = True,
    ) -> list[Completion]:
        """Answer conversations (lists of messages; one or many) through the chat template.

        Messages may have image parts, with their images or with those of ``multi_modal_data``.
        """
        if not isinstance(conversations, list | tuple):
            raise ValueError(
                "conversations must be a list of messages, or a list of such lists, "
                f"got {shown(conversations)}"
            )
        one = len(conversations) > 0 and isinstance(conversations[0], dict)
        several: list[Any] = [conversations] if one else list(conversations)
        for index, messages in enumerate(several):
            is_list = isinstance(messages, list | tuple)
            if not is_list or not all(isinstance(message, dict) for message in messages):
                raise ValueError(
                    f"conversation {index} must be a list of messages, got {shown(messages)}"
                )
        return self._run(several, sampling_params, multi_modal_data, progress)

    def stats(self) -> dict[str, float]:
        """Gauges and counters of the engine."""
        with self._turn:
            return self._engine.stats()

    def close(self) -> None:
        """End the engine's processes (they also end with this process)."""
        self._engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(
        self,
        prompts: list[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        multi_modal_data: ImageData | Sequence[ImageData | None] | None,
        progress: bool,
    ) -> list[Completion]:
        with self._turn:
            prepared = self._prepare(prompts, sampling_params, multi_modal_data)
            return self._run_in_turn(prepared, progress)

    def _run_in_turn(self, prepared: list[PreparedPrompt], progress: bool) -> list[Completion]:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
        )

        batch = _Batch(uuid.uuid4().hex[:12], prepared)
        console = Console(stderr=True)
        bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeElapsedColumn(),
            transient=True,
            console=console,
            disable=not progress or not console.is_terminal,
        )
        try:
            with bar:
                task = bar.add_task("requests", total=batch.total, rate="")
                batch.submit_some(self._engine)
                while batch.open:
                    for output in self._engine.step():
                        batch.take(output)
                    batch.submit_some(self._engine)
                    bar.update(task, completed=batch.done, rate=batch.rate())
        except BaseException:
            batch.abort(self._engine)
            raise
        return batch.completions()

    def _prepare(
        self,
        prompts: list[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        multi_modal_data: ImageData | Sequence[ImageData | None] | None,
    ) -> list[PreparedPrompt]:
        if isinstance(sampling_params, Sequence):
            if len(sampling_params) != len(prompts):
                raise ValueError(
                    f"sampling_params has {len(sampling_params)} entries for {len(prompts)} prompts"
                )
            params = list(sampling_params)
        else:
            params = [sampling_params or SamplingParams()] * len(prompts)
        if multi_modal_data is None:
            multi_modal_data = [None] * len(prompts)
        elif isinstance(multi_modal_data, dict):
            multi_modal_data = [multi_modal_data]
        if len(multi_modal_data) != len(prompts):
            raise ValueError(
                f"multi_modal_data has {len(multi_modal_data)} entries for {len(prompts)} prompts"
            )
        prepared = []
        for index, (prompt, own, images) in enumerate(
            zip(prompts, params, multi_modal_data, strict=True)
        ):
            try:
                prepared.append(self._engine.prepare(prompt, own, images))
            except ValueError as error:
                raise ValueError(f"prompt {index}: {error}") from error
        return prepared


class _Batch:
    """Requests of one call: which are to send, which are open, what they brought."""

    # Requests in the engine at a time: more would only lengthen its queue.
    _WINDOW = 1024

    def __init__(self, name: str, prompts: list[PreparedPrompt]) -> None:
        self._name = name
        self._prompts = prompts
        self._outputs: list[list[list[RequestOutput]]] = [
            [[] for _ in range(prompt.params.n)] for prompt in prompts
        ]
        self._ends: dict[tuple[int, int], float] = {}
        self._firsts: dict[tuple[int, int], float] = {}
        self._sent: list[float] = []
        self._started = time.monotonic()
        self._tokens = 0
        self.total = sum(prompt.params.n for prompt in prompts)
        self.done = 0
        self.open = len(prompts) > 0

    def submit_some(self, engine: LLMEngine) -> None:
        in_engine = sum(p.params.n for p in self._prompts[: len(self._sent)]) - self.done
        while len(self._sent) < len(self._prompts) and in_engine < self._WINDOW:
            prompt = self._prompts[len(self._sent)]
            # Noted first: an interrupt between the two must not leave a request behind.
            self._sent.append(time.monotonic())
            engine.add_prepared(self._id(len(self._sent) - 1), prompt)
            in_engine += prompt.params.n

    def take(self, output: RequestOutput) -> None:
        name, _, number = output.request_id.rpartition("-")
        if name != self._name:
            return  # a last word of an earlier call that was interrupted
        place = int(number), output.index
        self._outputs[place[0]][place[1]].append(output)
        self._tokens += 1
        now = time.monotonic()
        self._firsts.setdefault(place, now)
        if output.finished:
            self._ends[place] = now
            self.done += 1
            self.open = self.done < self.total

    def rate(self) -> str:
        return f"{self._tokens / max(time.monotonic() - self._started, 1e-3):.0f} tok/s"

    def abort(self, engine: LLMEngine) -> None:
        for index in range(len(self._sent)):
            engine.drop_request(self._id(index))

    def completions(self) -> list[Completion]:
        return [
            self._completion(index, sample, outputs)
            for index, samples in enumerate(self._outputs)
            for sample, outputs in enumerate(samples)
        ]

    def _id(self, index: int) -> str:
        return f"{self._name}-{index}"

    def _completion(self, index: int, sample: int, outputs: list[RequestOutput]) -> Completion:
        prompt, last = self._prompts[index], outputs[-1]
        # An end without a new token repeats the last one; only counted tokens are output.
        tokens = [o for i, o in enumerate(outputs) if o.num_output_tokens == i + 1]
        sent, place = self._sent[index], (index, sample)
        logprobs = None
        if prompt.params.logprobs is not None:
            logprobs = [_logprobs(output) for output in tokens]
        return Completion(
            request_id=last.request_id,
            prompt=prompt.text,
            prompt_token_ids=prompt.token_ids,
            text="".join(output.text for output in outputs),
            token_ids=[output.token_id for output in tokens],
            finish_reason=last.finish_reason,
            finish_detail=last.finish_detail,
            logprobs=logprobs,
            prompt_logprobs=outputs[0].prompt_logprobs,
            metrics=Metrics(
                ttft_ms=(self._firsts[place] - sent) * 1000,
                total_ms=(self._ends[place] - sent) * 1000,
                cached_tokens=last.cached_tokens,
                num_preemptions=last.num_preemptions,
            ),
            index=sample,
            error=last.error,
        )


def _logprobs(output: RequestOutput) -> dict[int, float]:
    top = zip(output.top_token_ids, output.top_logprobs, strict=True)
    return {output.token_id: output.token_logprobs, **dict(top)}


def _as_list(prompts: Any) -> list[Any]:
    one = isinstance(prompts, str)
    if isinstance(prompts, list | tuple) and prompts:
        one = isinstance(prompts[0], int | dict)
    if one:
        return [prompts]
    if not isinstance(prompts, list | tuple):
        raise ValueError(f"prompts must be a string or a list, got {shown(prompts)}")
    return list(prompts)
