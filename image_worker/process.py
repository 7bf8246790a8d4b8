"""The image worker's shell: it loads an encoder, does one job after the other, and beats."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import resource
import threading
import time
from pathlib import Path
from typing import Any

import zmq

from deepinfer.image_worker.fetch import Fetcher
from deepinfer.image_worker.layers import Team
from deepinfer.image_worker.model import load
from deepinfer.image_worker.reader import ImageReader
from deepinfer.wire.actor import Actor
from deepinfer.wire.arena import Arena
from deepinfer.wire.children import exit_with_parent
from deepinfer.wire.codec import BadFrame, Codec
from deepinfer.wire.config import WorkerConfig
from deepinfer.wire.image_jobs import (
    ImageJob,
    ImageWorkerFailed,
    ImageWorkerHeartbeat,
    ImageWorkerHello,
    ImageWorkerReady,
    ToImageWorker,
)
from deepinfer.wire.sockets import connect_dealer

log = logging.getLogger("deepinfer.image_worker")

_HEARTBEAT_S = 1.0
# Text goes first where both want a core, and images get all cores that text leaves.
_NICENESS = 10
_EXPENDABLE = "500"
_SLACK_BYTES = 256 << 20
_SLACK_BYTES_PER_THREAD = 64 << 20


class ImageWorkerProcess:
    """Does the scheduler's jobs with an ``ImageReader``."""

    def __init__(self, config: WorkerConfig) -> None:
        self._config = config
        self._codec = Codec(ToImageWorker)
        self._reader: ImageReader | None = None
        self._actor = Actor()
        self._socket = connect_dealer(self._actor.context, config.endpoint, config.identity)
        self._actor.add_socket(self._socket, self._receive)
        self._job = 0
        self._busy_since: float | None = None

    def run(self) -> None:
        """Load, then do jobs until told to stop. The process ends with the scheduler."""
        self._send(ImageWorkerHello())
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()
        try:
            ready = self._load()
        except (ValueError, OSError, MemoryError, RuntimeError) as error:
            self._fail(error)
            return
        self._send(ready)
        self._actor.run()
        self._actor.close()

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

    def _receive(self, frames: list[bytes]) -> None:
        try:
            message = self._codec.decode(frames[-1])
        except BadFrame as error:
            # A job that was in it would be waited for.
            self._fail(error)
            return
        if not isinstance(message, ImageJob) or self._reader is None:
            self._actor.stop()
            return
        self._job = message.job
        self._busy_since = time.monotonic()
        done = self._reader.read(message)
        self._busy_since = None
        self._send(done)

    def _fail(self, error: Exception) -> None:
        text = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        self._send(ImageWorkerFailed(text[:2000]))
        self._actor.stop()
        self._actor.close()

    def _send(self, message: Any) -> None:
        self._socket.send(self._codec.encode(message))

    def _beat(self) -> None:
        """Beat from a thread and a socket of its own, so that a long job is no silence."""
        socket = connect_dealer(
            self._actor.context, self._config.endpoint, self._config.identity + b"-beat"
        )
        codec = Codec(ToImageWorker)
        while True:
            since = self._busy_since
            busy_s = 0.0 if since is None else time.monotonic() - since
            try:
                socket.send(codec.encode(ImageWorkerHeartbeat(self._job, busy_s)), zmq.NOBLOCK)
            except zmq.Again:
                pass  # the scheduler does not read; its own watchers deal with that
            except zmq.ZMQError:
                socket.close()
                return  # the context is closing
            time.sleep(_HEARTBEAT_S)


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
