"""The device worker's process: it loads a model and executes plans in order."""

from __future__ import annotations

import gc
import logging
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

from deepinfer.wire.arena import Arena
from deepinfer.wire.children import exit_with_parent, read_config
from deepinfer.wire.codec import MAX_STEP_BYTES
from deepinfer.wire.config import EngineArgs, WorkerConfig, cpu_set
from deepinfer.wire.recorder import Recorder
from deepinfer.wire.steps import (
    StepPlan,
    ToWorker,
    WorkerFailed,
    WorkerHeartbeat,
    WorkerHello,
    WorkerReady,
)
from deepinfer.wire.worker_shell import WorkerShell

log = logging.getLogger("deepinfer.gpu_worker")

_COMPILE_NOTICE_S = 3.0
_MAX_CACHE_BYTES = 4 << 30
_MEMORY_SHARE = 0.25


class LoadedModel(NamedTuple):
    """A model that is ready to run (see ``runner.StepModel``) and what its backend offers."""

    model: Any
    num_blocks: int
    team: Any = None
    """Threads that sampling may use (see ``kernels.fork_join``)."""
    profile: Any = None
    """The ``profile.StepProfile`` that the model's backend fills, if it does."""


LoadModel = Callable[[EngineArgs, dict[str, float]], LoadedModel]
"""Loads a model and attaches its KV cache; notes the seconds of each phase in the dict."""


def load_cpu_model(args: EngineArgs, phases: dict[str, float]) -> LoadedModel:
    """Load the model folder ``args.model`` for the CPU, with its KV cache, ready to run.

    Raises ``ValueError`` when the folder, the dtype or the sizes cannot be served.
    """
    clock = _PhaseClock(phases)
    if args.worker_cpus is not None:
        # Before threads start and memory is touched: both stay where they begin.
        _stay_on(cpu_set(args.worker_cpus))
    from deepinfer.gpu_worker.weight_cache import WeightCache

    dtype = "bfloat16" if args.dtype == "auto" else args.dtype
    # It reads while the imports below take their time.
    cache = WeightCache(args.model, dtype, args.quantization) if args.weight_cache else None
    from deepinfer.gpu_worker.backend import Backend
    from deepinfer.gpu_worker.cpu_backend import CpuBackend
    from deepinfer.gpu_worker.kernels.settings import remove_unused
    from deepinfer.gpu_worker.llama import Model

    clock.lap("import")
    cpu = CpuBackend(num_threads=args.num_threads)
    backend: Backend = cpu
    profile = None
    if args.profile is not None:
        from deepinfer.gpu_worker.machine_peaks import measure_peaks
        from deepinfer.gpu_worker.profile import ProfilingBackend, StepProfile

        profile = StepProfile(measure_peaks(cpu.team))
        backend = ProfilingBackend(cpu, profile)
        clock.lap("peaks")
    kv_dtype = dtype if args.kv_cache_dtype == "auto" else args.kv_cache_dtype
    model = Model.load(
        args.model, backend, dtype, args.max_model_len, kv_dtype, args.quantization, cache
    )
    if profile is not None:
        profile.name_weights(model)
    clock.lap("load")
    num_blocks = args.num_kv_blocks or _blocks_in_memory(args, model)
    model.attach_cache(num_blocks, args.block_size)
    clock.lap("cache")
    with _compile_notice():
        model.warm_up()
    remove_unused()
    clock.lap("compile")
    return LoadedModel(model, num_blocks, cpu.team, profile)


def _stay_on(cores: set[int]) -> None:
    """Keep this process on some cores: the threads it has, and those they start."""
    try:
        for thread in os.listdir("/proc/self/task"):
            os.sched_setaffinity(int(thread), cores)
    except OSError as error:
        there = sorted(os.sched_getaffinity(0))
        raise ValueError(f"worker_cpus names none of the cores there are: {there}") from error


@contextmanager
def _compile_notice() -> Iterator[None]:
    """Tell whoever waits what takes so long, if it does."""
    text = (
        "deepinfer: compiling kernels for this machine and these dtypes; the first start with them "
        "takes about a minute"
    )
    notice = threading.Timer(_COMPILE_NOTICE_S, lambda: print(text, file=sys.stderr, flush=True))
    notice.daemon = True
    notice.start()
    try:
        yield
    finally:
        notice.cancel()


def _blocks_in_memory(args: EngineArgs, model: Any) -> int:
    block_bytes = model.kv_bytes_per_block(args.block_size)
    if args.kv_cache_bytes is not None:
        num_blocks = args.kv_cache_bytes // block_bytes
        if num_blocks < 1:
            raise ValueError(
                f"kv_cache_bytes must be at least {block_bytes}, the size of one block, "
                f"got {args.kv_cache_bytes}"
            )
        return int(num_blocks)
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    budget = min(int(free * _MEMORY_SHARE), _MAX_CACHE_BYTES)
    useful = args.max_num_seqs * -(-model.max_model_len // args.block_size)
    return int(max(1, min(budget // block_bytes, useful)))


class WorkerProcess(WorkerShell):
    """Executes the scheduler's plans, in order, with a ``Runner``."""

    WORK, ACCEPTS = StepPlan, ToWorker
    HELLO, HEARTBEAT, FAILED = WorkerHello, WorkerHeartbeat, WorkerFailed
    MAX_BYTES = MAX_STEP_BYTES

    def __init__(
        self, config: WorkerConfig, load_model: LoadModel, recorder: Recorder | None = None
    ) -> None:
        super().__init__(config)
        self._recorder = recorder
        self._load_model = load_model

    def _load(self) -> WorkerReady:
        # Numba's modules and the compiled kernels are objects that stay: looking through them again
        # and again is an eighth of the imports' time, and takes 30 ms whenever it happens later.
        gc.disable()
        try:
            return self._load_untracked()
        except (EOFError, pickle.UnpicklingError) as error:
            from deepinfer.gpu_worker.kernels.settings import discard_compiled

            log.warning("the compiled kernels on disk are damaged (%s); removing them", error)
            discard_compiled()
            # The worker that takes this one's place compiles them anew.
            raise SystemExit(os.EX_TEMPFAIL) from error
        finally:
            gc.freeze()
            gc.enable()

    def _load_untracked(self) -> WorkerReady:
        args = self._config.args
        phases: dict[str, float] = {}
        model, num_blocks, team, profile = self._load_model(args, phases)
        clock = _PhaseClock(phases)
        arena = None if self._config.arena_fd is None else Arena.attach(self._config.arena_fd)
        # Late: it imports numba, and the loading of a model has something to do meanwhile.
        from deepinfer.gpu_worker.runner import Runner

        make_runner: Callable[..., Runner] = Runner
        if self._recorder is not None:
            from deepinfer.gpu_worker.profile import ProfilingRunner, StepProfile

            make_runner = partial(ProfilingRunner, profile or StepProfile(), self._recorder)
        self._runner = make_runner(
            model,
            max_num_seqs=min(args.max_num_seqs, args.max_num_batched_tokens),
            max_model_len=model.max_model_len,
            num_blocks=num_blocks,
            block_size=args.block_size,
            eos_token_ids=model.eos_token_ids,
            team=team,
            arena=arena,
        )
        self._runner.warm_up()
        clock.lap("sampling")
        return WorkerReady(
            vocab_size=model.vocab_size,
            eos_token_ids=list(model.eos_token_ids),
            max_model_len=model.max_model_len,
            num_blocks=num_blocks,
            dtype=model.dtype,
            device="cpu",
            architecture=model.architecture,
            phases=phases,
        )

    def _work(self, message: StepPlan) -> None:
        self._begin(message.step)
        try:
            result = self._runner.execute(message)
        except Exception as error:
            log.exception("step %d failed", message.step)
            self._fail(error)
            return
        self._end(result)


class _PhaseClock:
    def __init__(self, phases: dict[str, float]) -> None:
        self._phases = phases
        self._last = time.monotonic()

    def lap(self, phase: str) -> None:
        """Note the seconds since the last lap under this name."""
        now = time.monotonic()
        self._phases[phase] = now - self._last
        self._last = now


def main(load_model: LoadModel = load_cpu_model) -> None:
    """Run the worker that the scheduler configured through the lifeline."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the scheduler decides when its worker ends
    config = read_config(WorkerConfig)
    folder = config.args.profile
    recorder = Recorder(folder, "gpu_worker") if folder is not None else None
    exit_with_parent(on_parent_gone=recorder.write if recorder is not None else None)
    logging.basicConfig(format="%(asctime)s %(name)s %(levelname)s %(message)s", level="WARNING")
    try:
        WorkerProcess(config, load_model, recorder).run()
    finally:
        if recorder is not None:
            recorder.write()
