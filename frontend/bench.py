"""``deepinfer bench``: one workload on a whole engine, and how fast it went.

The names of the figures are those of ``vllm bench``.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterator, Sequence

import msgspec

from deepinfer.frontend.errors import EngineError
from deepinfer.frontend.llm_engine import LLMEngine
from deepinfer.frontend.profile_report import TraceFile, profile_table
from deepinfer.wire.checks import check_int
from deepinfer.wire.params import SamplingParams
from deepinfer.wire.profile import Profile


class Workload(msgspec.Struct, frozen=True):
    """Requests of random token ids that all arrive at once; greedy, EOS ignored."""

    input_len: int
    output_len: int
    num_prompts: int

    def __post_init__(self) -> None:
        for field in self.__struct_fields__:
            check_int(field, getattr(self, field), 1, 1 << 20)


class BenchResult(msgspec.Struct, kw_only=True):
    """What a workload took. ``ttft`` is the time from a request's submission to its first token,
    ``tpot`` the time from there to its last token over the tokens after the first (0 without any).
    """

    model: str
    dtype: str
    quantization: str
    kv_cache_dtype: str
    start_s: dict[str, float]
    """Seconds of each phase of the worker's start."""
    completed: int
    duration: float
    """Seconds from the first submission to the last token."""
    total_input_tokens: int
    total_output_tokens: int
    request_throughput: float
    output_throughput: float
    """Output tokens a second."""
    total_token_throughput: float
    median_ttft_ms: float
    p99_ttft_ms: float
    median_tpot_ms: float
    p99_tpot_ms: float
    profile: Profile | None = None
    trace: TraceFile | None = None

    def lines(self) -> Iterator[str]:
        """Yield the table that people read."""
        start = ", ".join(f"{phase} {seconds:.2f}" for phase, seconds in self.start_s.items())
        setting = self.dtype
        if self.quantization != "none":
            setting += f", {self.quantization} weights"
        if self.kv_cache_dtype != "auto":
            setting += f", {self.kv_cache_dtype} KV cache"
        yield f"model                      {self.model} ({setting})"
        yield f"start of the worker (s)    {start}"
        yield f"requests                   {self.completed}"
        yield f"input tokens               {self.total_input_tokens}"
        yield f"output tokens              {self.total_output_tokens}"
        yield f"duration (s)               {self.duration:.2f}"
        yield f"requests/s                 {self.request_throughput:.2f}"
        yield f"output tokens/s            {self.output_throughput:.2f}"
        yield f"all tokens/s               {self.total_token_throughput:.2f}"
        yield f"{'':26} {'median':>10} {'p99':>10}"
        for name, middle, late in (
            ("time to first token (ms)", self.median_ttft_ms, self.p99_ttft_ms),
            ("time per output token (ms)", self.median_tpot_ms, self.p99_tpot_ms),
        ):
            yield f"{name:26} {middle:10.2f} {late:10.2f}"
        if self.profile is not None:
            yield from profile_table(self.profile)
        if self.trace is not None:
            yield ""
            yield f"trace of {self.trace.spans} spans: {self.trace.path}"
            if self.trace.dropped:
                yield f"not in it, for want of room: {self.trace.dropped} spans"


def run_workload(engine: LLMEngine, workload: Workload, seed: int = 0) -> BenchResult:
    """Run a workload to its end.

    ``ValueError`` when a request is longer than the engine's limit, ``EngineError`` when one fails.
    """
    info = engine.info
    if workload.input_len + workload.output_len > info.max_model_len:
        raise ValueError(
            f"input_len and output_len must be at most {info.max_model_len} together, "
            f"got {workload.input_len} and {workload.output_len}"
        )
    ids = random.Random(seed)
    params = SamplingParams(temperature=0, max_tokens=workload.output_len, ignore_eos=True)
    submitted: dict[str, float] = {}
    first: dict[str, float] = {}
    last: dict[str, float] = {}
    tokens = 0
    prompts = [
        [ids.randrange(info.vocab_size) for _ in range(workload.input_len)]
        for _ in range(workload.num_prompts)
    ]
    start = time.monotonic()
    for number, prompt in enumerate(prompts):
        submitted[f"bench-{number}"] = time.monotonic()
        engine.add_request(f"bench-{number}", prompt, params)
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.error or output.finish_reason not in ("", "length"):
                raise EngineError(
                    f"{output.request_id} ended: {output.finish_detail} {output.error}".rstrip()
                )
            tokens += 1
            last[output.request_id] = now = time.monotonic()
            first.setdefault(output.request_id, now)
    duration = time.monotonic() - start
    ttft = [1e3 * (first[name] - submitted[name]) for name in submitted]
    steps = max(1, workload.output_len - 1)
    tpot = [1e3 * (last[name] - first[name]) / steps for name in submitted]
    inputs = workload.input_len * workload.num_prompts
    return BenchResult(
        model=engine.args.model,
        dtype=info.dtype,
        quantization=engine.args.quantization,
        kv_cache_dtype=engine.args.kv_cache_dtype,
        start_s=info.start_s,
        completed=len(last),
        duration=duration,
        total_input_tokens=inputs,
        total_output_tokens=tokens,
        request_throughput=len(last) / duration,
        output_throughput=tokens / duration,
        total_token_throughput=(inputs + tokens) / duration,
        median_ttft_ms=_quantile(ttft, 0.5),
        p99_ttft_ms=_quantile(ttft, 0.99),
        median_tpot_ms=_quantile(tpot, 0.5),
        p99_tpot_ms=_quantile(tpot, 0.99),
    )


def _quantile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that at least ``share`` of the values do not exceed."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]
