"""The image worker's process: it loads an encoder and does one job after the other."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import resource
import time
from pathlib import Path

from deepinfer.image_worker.fetch import Fetcher
from deepinfer.image_worker.layers import Team
from deepinfer.image_worker.model import load
from deepinfer.image_worker.reader import ImageReader
from deepinfer.wire.arena import Arena
from deepinfer.wire.children import exit_with_parent
from deepinfer.wire.config import WorkerConfig
from deepinfer.wire.image_jobs import (
    ImageJob,
    ImageWorkerFailed,
    ImageWorkerHeartbeat,
    ImageWorkerHello,
    ImageWorkerReady,
    ToImageWorker,
)
from deepinfer.wire.worker_shell import WorkerShell

log = logging.getLogger("deepinfer.image_worker")

# Text goes first where both want a core, and images get all cores that text leaves.
_NICENESS = 10
_EXPENDABLE = "500"
_SLACK_BYTES = 256 << 20
_SLACK_BYTES_PER_THREAD = 64 << 20


class ImageWorkerProcess(WorkerShell):
    """Does the scheduler's jobs with an ``ImageReader``."""

    WORK, ACCEPTS = ImageJob, ToImageWorker
    HELLO, HEARTBEAT, FAILED = ImageWorkerHello, ImageWorkerHeartbeat, ImageWorkerFailed

    def _load(self) -> ImageWorkerReady:
        start = time.monotonic()
        args = self._config.args
        if self._config.arena_fd is None:
            raise ValueError("an image worker needs an arena")
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        team = Team(max(1, (cores or 1) // max(1, args.num_image_workers)))
        model = load(Path(args.model), Path(args.tokenizer or args.model), team)
        arena = Arena.attach(self._config.arena_fd)
        self._reader = ImageReader(model, arena, Fetcher(args.image_urls))
        slack = _SLACK_BYTES + team.num_threads * _SLACK_BYTES_PER_THREAD
        limit_growth(self._reader.max_job_bytes + slack)
        return ImageWorkerReady(
            placeholder=model.placeholder,
            max_region_bytes=self._reader.max_region_bytes,
            phases={"load": time.monotonic() - start},
        )

    def _work(self, message: ImageJob) -> None:
        self._begin(message.job)
        self._end(self._reader.read(message))


def limit_growth(num_bytes: int) -> None:
    """Let this process take so much more memory of its own; past that it gets a ``MemoryError``.

    Files and memory that are mapped and shared, the weights and the arena, do not count.
    """
    try:
        found = re.search(r"VmData:\s*(\d+) kB", Path("/proc/self/status").read_text())
    except OSError:
        return  # not Linux, where the limit would not count what is mapped
    if found is not None:
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        limit = int(found[1]) * 1024 + num_bytes
        if hard != resource.RLIM_INFINITY:
            limit = min(limit, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))


def main(config: WorkerConfig) -> None:
    """Run the worker that the scheduler configured through the lifeline."""
    exit_with_parent()
    logging.basicConfig(format="%(asctime)s %(name)s %(levelname)s %(message)s", level="WARNING")
    os.nice(_NICENESS)
    with contextlib.suppress(OSError):
        # On a machine that runs out of memory, the process that is easiest to replace.
        Path("/proc/self/oom_score_adj").write_text(_EXPENDABLE)
    ImageWorkerProcess(config).run()
