"""Differential runner: the same requests under every way of running them, held to one reference.

The real model serves random requests (``support.random_requests``) in engines that differ in six
factors, and each result must equal that of the request run *alone*: one request at a time in a
synchronous engine with a roomy pool and without a prefix cache. Compared are token ids, text, log
probabilities (every bit), prompt log probabilities, finish reason and detail, error and usage. A
request that was ended by a preemption (the stop policy) must be a true prefix of its reference.

From Python::

    report = run(folder, dtype="float32", runs=504, configurations=covering(strength=2))
    assert not report.differences

From a shell, in the repository's root::

    PYTHONPATH=tests python -m support.differential --runs 1000 --distinct 1000
    PYTHONPATH=tests python -m support.differential --strength 6 --dtype bfloat16
    PYTHONPATH=tests python -m support.differential --configurations 5 --only 17,23

As few engines are started as it takes for any levels of ``--strength`` factors to meet in one of
them: 8 for two factors, all 96 for six. A difference names the configuration and the request by
number; the last line above repeats just these.

Nothing is forgiven: the kernels compute a row the same way whatever stands beside it, in float32
and in bfloat16, so there are no near-ties to look away from and no deterministic mode to pay for.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from itertools import chain, combinations, product, repeat
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from deepinfer import LLM, AsyncEngine, Completion, EngineArgs, RequestOutput, SamplingParams
from deepinfer.frontend.pull import pull
from deepinfer.frontend.text_stream import TextStream
from deepinfer.frontend.tokenizer import Tokenizer
from deepinfer.wire.config import KV_CACHE_DTYPES, QUANTIZATIONS
from support.random_requests import RandomRequest, RandomRequests
from support.scripted_engine import process_of
from support.streams import check_stream, end, text, tokens

MAX_MODEL_LEN = 64
MAX_TOKENS = (1, 14)
PREEMPTED = ("insufficient_system_resource", "preempted")


def _plain(number: int, num_prompt: int, max_tokens: int) -> RandomRequest:
    prompt = [300 + 7 * i - number for i in range(num_prompt)]
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    return RandomRequest(number, prompt, params)


# What random requests come to depends on when each arrives and on when a worker is killed. These
# see to it that every configuration goes through what it is named after: two that start together
# and outgrow the small pool, and one that finds in the prefix cache what it left there itself.
_GROWING, _AGAIN = [_plain(-1, 8, 40), _plain(-2, 8, 40)], [_plain(-3, 20, 2)]
ENCORE = (_GROWING, _AGAIN, _AGAIN)


class Configuration(NamedTuple):
    """One way of running the engine; a level of each factor."""

    schedule: str
    prefill: str
    cache: str
    pool: str
    delivery: str
    worker: str

    @property
    def number(self) -> int:
        """Its place in ``CONFIGURATIONS``."""
        return CONFIGURATIONS.index(self)

    def __str__(self) -> str:
        return f"configuration {self.number} ({', '.join(self)})"

    def args(self, model: Mapping[str, Any]) -> EngineArgs:
        roomy = self.pool == "roomy"
        return EngineArgs(
            **model,
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=24,
            async_scheduling=self.schedule == "overlap",
            max_num_batched_tokens=2048 if self.prefill == "whole" else 16,
            enable_prefix_caching=self.cache == "cached",
            # In blocks of one token, so that short outputs need many, and little more room
            # than for the longest request: rows come in, grow and push each other out.
            block_size=4 if roomy else 1,
            num_kv_blocks=1024 if roomy else 9 * MAX_MODEL_LEN // 8,
            stop_preempted_request=self.pool == "stop",
        )


CONFIGURATIONS = [
    Configuration(*levels)
    for levels in product(
        ("sync", "overlap"),
        ("whole", "chunked"),
        ("uncached", "cached"),
        ("roomy", "recompute", "stop"),
        ("stream", "final"),
        ("undisturbed", "killed"),
    )
]


def covering(strength: int) -> list[Configuration]:
    """Return few configurations in which any levels of ``strength`` different factors meet."""

    def meetings(configuration: Configuration) -> set[tuple[str, ...]]:
        return set(combinations(configuration, strength))

    missing = set().union(*map(meetings, CONFIGURATIONS))
    chosen: list[Configuration] = []
    while missing:
        best = max(CONFIGURATIONS, key=lambda c: (len(meetings(c) & missing), -c.number))
        missing -= meetings(best)
        chosen.append(best)
    return chosen


@dataclass
class Result:
    """What one completion of a request came to."""

    token_ids: list[int]
    text: str
    finish: tuple[str, str]
    error: str
    prompt_len: int
    num_output_tokens: int
    logprobs: list[dict[int, float]] | None
    prompt_logprobs: list[dict[int, float] | None] | None
    smaller: list[float] | None
    """``sum_smaller_probs`` of each token; only streams have it."""
    cached_tokens: int
    num_preemptions: int

    @classmethod
    def of_stream(cls, outs: list[RequestOutput], params: SamplingParams) -> Result:
        check_stream(outs)
        new = [out for i, out in enumerate(outs) if out.num_output_tokens == i + 1]
        logprobs = smaller = None
        if params.logprobs is not None:
            smaller = [out.sum_smaller_probs for out in new]
            logprobs = [
                {out.token_id: out.token_logprobs}
                | dict(zip(out.top_token_ids, out.top_logprobs, strict=True))
                for out in new
            ]
        return cls(
            token_ids=tokens(outs),
            text=text(outs),
            finish=end(outs),
            error=outs[-1].error,
            prompt_len=outs[-1].prompt_len,
            num_output_tokens=outs[-1].num_output_tokens,
            logprobs=logprobs,
            prompt_logprobs=outs[0].prompt_logprobs,
            smaller=smaller,
            cached_tokens=outs[-1].cached_tokens,
            num_preemptions=outs[-1].num_preemptions,
        )

    @classmethod
    def of_completion(cls, completion: Completion) -> Result:
        return cls(
            token_ids=completion.token_ids,
            text=completion.text,
            finish=(completion.finish_reason, completion.finish_detail),
            error=completion.error,
            prompt_len=len(completion.prompt_token_ids),
            num_output_tokens=len(completion.token_ids),
            logprobs=completion.logprobs,
            prompt_logprobs=completion.prompt_logprobs,
            smaller=None,
            cached_tokens=completion.metrics.cached_tokens,
            num_preemptions=completion.metrics.num_preemptions,
        )


@dataclass
class Block:
    """The requests that one engine served, and what was not as it should be."""

    configuration: Configuration
    numbers: list[int]
    stats: dict[str, float]
    seconds: float
    ended_early: int = 0
    differences: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        stats = self.stats
        preemptions = f"{stats['preemptions']:.0f} recomputed, {self.ended_early} ended early"
        return (
            f"{self.configuration}: {len(self.numbers)} requests from number {self.numbers[0]} "
            f"in {self.seconds:.1f} s; preempted: {preemptions}; "
            f"cached tokens: {stats['cached_tokens']:.0f} of {stats['prompt_tokens']:.0f}; "
            f"rows voided: {stats['voided_rows']:.0f}; "
            f"workers lost: {stats['worker_restarts']:.0f}; differences: {len(self.differences)}"
        )


@dataclass
class Report:
    """All blocks of a run."""

    blocks: list[Block] = field(default_factory=list)

    @property
    def differences(self) -> list[str]:
        return [difference for block in self.blocks for difference in block.differences]

    @property
    def num_runs(self) -> int:
        return sum(len(block.numbers) for block in self.blocks)


class Reference:
    """What requests must yield: each run alone, one after the other, in the plainest engine."""

    def __init__(self, folder: Path, model: Mapping[str, Any]) -> None:
        self._args = EngineArgs(
            **model,
            max_model_len=MAX_MODEL_LEN,
            num_kv_blocks=64,
            async_scheduling=False,
            enable_prefix_caching=False,
        )
        self._tokenizer = Tokenizer.from_folder(folder)
        self._results: dict[int, list[Result]] = {}

    def learn(self, requests: Sequence[RandomRequest]) -> None:
        """Run these requests."""

        async def one_by_one() -> None:
            async with AsyncEngine(self._args) as engine:
                for request in requests:
                    self._results[request.number] = await stream(engine, request)

        asyncio.run(one_by_one())

    def difference(
        self, request: RandomRequest, results: list[Result], configuration: Configuration
    ) -> str | None:
        """Say what is wrong with the results of a request, ``None`` when nothing is."""
        expected = self._results[request.number]
        if len(results) != len(expected):
            return f"{len(results)} completions instead of {len(expected)}"
        for index, (got, whole) in enumerate(zip(results, expected, strict=True)):
            wanted = whole
            if configuration.pool == "stop" and got.finish == PREEMPTED:
                if len(got.token_ids) >= len(whole.token_ids):
                    return f"completion {index} was preempted after its last token"
                wanted = self._beginning(whole, request.params, got)
            # What a request costs depends on its company, within these bounds.
            found = _cost_difference(got, configuration) or _first_difference(got, wanted)
            if found:
                return f"completion {index}: {found}"
        return None

    def _beginning(self, whole: Result, params: SamplingParams, got: Result) -> Result:
        """Return the reference, cut where a preemption ended the request."""
        count = len(got.token_ids)
        stream = TextStream(self._tokenizer, params)
        prompt_logprobs = whole.prompt_logprobs
        if prompt_logprobs is not None and not count:
            # It did not even see the end of its prompt.
            seen = got.prompt_logprobs or []
            prompt_logprobs = [
                entry if i < len(seen) and seen[i] is not None else None
                for i, entry in enumerate(prompt_logprobs)
            ]
        return replace(
            whole,
            token_ids=whole.token_ids[:count],
            text="".join(map(stream.push, whole.token_ids[:count])) + stream.finish(),
            finish=PREEMPTED,
            error="",
            num_output_tokens=count,
            logprobs=None if whole.logprobs is None else whole.logprobs[:count],
            smaller=None if whole.smaller is None else whole.smaller[:count],
            prompt_logprobs=prompt_logprobs,
        )


def _first_difference(got: Result, wanted: Result) -> str | None:
    for name in (spec.name for spec in fields(Result)):
        if name in ("cached_tokens", "num_preemptions"):
            continue
        mine, theirs = getattr(got, name), getattr(wanted, name)
        if mine == theirs or (name == "smaller" and mine is None):
            continue
        if isinstance(mine, list) and isinstance(theirs, list):
            place = next(
                (i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b),
                min(len(mine), len(theirs)),
            )
            mine, theirs = mine[place : place + 1], theirs[place : place + 1]
            name = f"{name}[{place}]"
        return f"{name} is {mine!r}, alone {theirs!r}\n  got  {got}\n  want {wanted}"
    return None


def _cost_difference(got: Result, configuration: Configuration) -> str | None:
    cached = got.cached_tokens
    if configuration.cache == "uncached" and cached:
        return f"{cached} cached tokens without a cache"
    if not 0 <= cached < got.prompt_len:
        return f"{cached} cached tokens of a prompt of {got.prompt_len}"
    if got.num_preemptions and configuration.pool != "recompute":
        return f"{got.num_preemptions} recomputes in a {configuration.pool} pool"
    return None


async def stream(engine: AsyncEngine, request: RandomRequest) -> list[Result]:
    """Run a request and return its completions."""
    outs: list[list[RequestOutput]] = [[] for _ in range(request.params.n)]
    async for out in engine.generate(request.prompt, request.params):
        outs[out.index].append(out)
    return [Result.of_stream(own, request.params) for own in outs]


def _streams(
    args: EngineArgs, groups: Sequence[Sequence[RandomRequest]], kill_after_s: float | None
) -> tuple[list[list[Result]], dict[str, float]]:
    async def serve() -> tuple[list[list[Result]], dict[str, float]]:
        results: list[list[Result]] = []
        async with AsyncEngine(args) as engine:
            for group, after_s in zip(groups, _only_first(kill_after_s), strict=False):
                with worker_killed(args, after_s):
                    results += await asyncio.gather(*(stream(engine, r) for r in group))
            return results, await engine.stats()

    return asyncio.run(serve())


def _finals(
    args: EngineArgs, groups: Sequence[Sequence[RandomRequest]], kill_after_s: float | None
) -> tuple[list[list[Result]], dict[str, float]]:
    results: list[list[Result]] = []
    with LLM(**msgspec.structs.asdict(args)) as llm:
        for group, after_s in zip(groups, _only_first(kill_after_s), strict=False):
            with worker_killed(args, after_s):
                completions = iter(
                    llm.generate(
                        [request.prompt for request in group],
                        [request.params for request in group],
                        progress=False,
                    )
                )
            results += [
                [Result.of_completion(next(completions)) for _ in range(request.params.n)]
                for request in group
            ]
        return results, llm.stats()


def _only_first(kill_after_s: float | None) -> Iterator[float | None]:
    return chain([kill_after_s], repeat(None))


@contextmanager
def worker_killed(args: EngineArgs, after_s: float | None) -> Iterator[None]:
    """Kill the worker once, when it has computed for ``after_s`` more CPU seconds.

    CPU time is progress: on a busy machine as on an idle one the blow falls amid the requests.
    """
    if after_s is None:
        yield
        return
    worker = process_of(args.worker_module)
    over = threading.Event()

    def used() -> float:
        times = worker.cpu_times()
        return times.user + times.system

    def watch() -> None:
        start = used()
        while not over.wait(0.01):
            if used() - start >= after_s:
                worker.kill()
                return

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()


def run_block(
    configuration: Configuration,
    requests: Sequence[RandomRequest],
    reference: Reference,
    model: Mapping[str, Any],
) -> Block:
    """Serve the requests, all at once, and then ``ENCORE`` by one engine.

    The reference must know them.
    """
    args = configuration.args(model)
    rng = random.Random(requests[0].number)
    kill_after_s = None
    if configuration.worker == "killed":
        # A request takes some 0.1 s of CPU time: the blow falls while most are open.
        kill_after_s = rng.uniform(0.1, 0.1 + 0.02 * len(requests))
    serve = _streams if configuration.delivery == "stream" else _finals
    started = time.monotonic()
    groups = [requests, *ENCORE]
    served = [request for group in groups for request in group]
    results, stats = serve(args, groups, kill_after_s)
    block = Block(
        configuration,
        [request.number for request in requests],
        stats,
        time.monotonic() - started,
        ended_early=sum(own.finish == PREEMPTED for result in results for own in result),
    )
    for request, result in zip(served, results, strict=True):
        found = reference.difference(request, result, configuration)
        if found:
            block.differences.append(f"{configuration}, {request}:\n  {found}")
    held = stats["blocks_total"] - stats["blocks_free"] - stats["blocks_cached"]
    left = {name: stats[name] for name in ("live", "running", "waiting", "prefilling")}
    if held or any(left.values()):
        block.differences.append(f"{configuration}: {held:.0f} blocks held when idle, {left}")
    return block


def run(
    folder: Path,
    *,
    dtype: str,
    runs: int,
    distinct: int | None = None,
    configurations: Sequence[Configuration],
    only: Sequence[int] | None = None,
    seed: int = 1,
    **options: str,
) -> Report:
    """Serve ``runs`` requests, an equal share by each configuration, and print as it goes.

    ``distinct``: how many different requests there are, ``runs`` when not given; each is run under
    several configurations then. ``only``: numbers of the requests that every configuration serves
    instead. ``options``: fields of ``EngineArgs`` that say how all engines hold the model.
    """
    model = {"model": str(folder), "dtype": dtype, **options}
    share = -(-runs // len(configurations))
    count = min(distinct or runs, runs)
    source = RandomRequests(
        Tokenizer.from_folder(folder),
        max_model_len=MAX_MODEL_LEN,
        max_tokens=MAX_TOKENS,
        several=True,
        seed=seed,
    )
    numbers = [
        list(only) if only is not None else [n % count for n in range(first, first + share)]
        for first in range(0, share * len(configurations), share)
    ]
    needed = sorted({number for own in numbers for number in own})
    started = time.monotonic()
    reference = Reference(folder, model)
    reference.learn([*(source[number] for number in needed), *_GROWING, *_AGAIN])
    seconds = time.monotonic() - started
    print(f"{dtype}: {len(needed)} requests alone in {seconds:.1f} s", flush=True)
    report = Report()
    for configuration, own in zip(configurations, numbers, strict=True):
        block = run_block(configuration, [source[n] for n in own], reference, model)
        report.blocks.append(block)
        print(block, *block.differences, sep="\n", flush=True)
    print(
        f"{dtype}: {report.num_runs} runs of {len(needed)} requests under {len(configurations)} "
        f"configurations in {time.monotonic() - started:.1f} s: "
        f"{len(report.differences)} differences, none forgiven",
        flush=True,
    )
    return report


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m support.differential")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--quantization", default="none", choices=QUANTIZATIONS)
    parser.add_argument("--kv-cache-dtype", default="auto", choices=KV_CACHE_DTYPES)
    parser.add_argument("--runs", type=int, default=500)
    parser.add_argument("--distinct", type=int, help="different requests; as many as runs")
    parser.add_argument("--strength", type=int, default=2, choices=range(1, 7))
    parser.add_argument("--configurations", help="numbers of configurations; then no strength")
    parser.add_argument("--only", help="numbers of the requests, for every configuration")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    if options.configurations:
        configurations = [CONFIGURATIONS[int(n)] for n in options.configurations.split(",")]
    else:
        configurations = covering(options.strength)
    report = run(
        pull(options.model).resolve(),
        dtype=options.dtype,
        runs=options.runs,
        distinct=options.distinct,
        configurations=configurations,
        only=[int(n) for n in options.only.split(",")] if options.only else None,
        seed=options.seed,
        quantization=options.quantization,
        kv_cache_dtype=options.kv_cache_dtype,
    )
    sys.exit(1 if report.differences else 0)


if __name__ == "__main__":
    main()
