"""An image worker process, driven as the scheduler drives it: over its socket, and its arena."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import zmq

from deepinfer.wire.arena import Arena, Region
from deepinfer.wire.children import Child
from deepinfer.wire.codec import Codec
from deepinfer.wire.config import EngineArgs, WorkerConfig
from deepinfer.wire.image_jobs import (
    FromImageWorker,
    ImageDone,
    ImageJob,
    ImageWorkerHeartbeat,
    ImageWorkerHello,
)
from deepinfer.wire.messages import ImageRef

_WAIT_MS = 120_000
_IDENTITY = b"image-worker-1"


class ImageWorker:
    """Starts the process for a model folder; ``first`` is what it says after its hello."""

    def __init__(
        self, model: Path, socket_folder: Path, arena_bytes: int, arena: bool = True, **args: Any
    ) -> None:
        self.arena = Arena.create(arena_bytes)
        self._codec = Codec(FromImageWorker)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.LINGER, 0)
        endpoint = f"ipc://{socket_folder}/worker"
        self._router.bind(endpoint)
        config = WorkerConfig(
            args=EngineArgs(model=str(model), **args),
            endpoint=endpoint,
            identity=_IDENTITY,
            arena_fd=self.arena.fileno if arena else None,
        )
        self.child = Child("deepinfer.image_worker", config, pass_fds=(self.arena.fileno,))
        self.heartbeats: list[ImageWorkerHeartbeat] = []
        self._jobs = 0
        self._generation = 0
        assert isinstance(self.receive(), ImageWorkerHello)
        self.first = self.receive()

    def receive(self) -> Any:
        """The next message that is no heartbeat; those are kept apart."""
        while self._router.poll(_WAIT_MS):
            identity, frame = self._router.recv_multipart()
            message = self._codec.decode(frame)
            if not isinstance(message, ImageWorkerHeartbeat):
                assert identity == _IDENTITY
                return message
            self.heartbeats.append(message)
        raise AssertionError(f"no answer; the worker {self.child.describe_exit()}")

    def send(self, message: Any) -> None:
        self._router.send_multipart([_IDENTITY, self._codec.encode(message)])

    def send_frame(self, frame: bytes) -> None:
        self._router.send_multipart([_IDENTITY, frame])

    def region(self, length: int | None = None) -> Region:
        """A region at the front of the arena, of a new generation."""
        self._generation += 1
        return Region(
            offset=0, length=length or self.first.max_region_bytes, generation=self._generation
        )

    def start(self, image: ImageRef, region: Region | None = None, timeout_s: float = 60.0) -> int:
        self._jobs += 1
        self.send(ImageJob(self._jobs, image, region or self.region(), timeout_s))
        return self._jobs

    def job(self, data: bytes, region: Region | None = None, timeout_s: float = 60.0) -> ImageDone:
        """Have one file read, and wait for it."""
        number = self.start(ImageRef(data=data), region, timeout_s)
        done = self.receive()
        assert isinstance(done, ImageDone) and done.job == number
        assert (done.encoded is None) == bool(done.error)
        return done

    def memory_peak(self) -> int:
        """The most memory of its own that the process has had, in bytes."""
        status = Path(f"/proc/{self.child.pid}/status").read_text()
        (line,) = (line for line in status.splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024

    def process(self) -> psutil.Process:
        return psutil.Process(self.child.pid)

    def wait_exit(self) -> int:
        """The exit status, once it has ended by itself."""
        os.waitid(os.P_PID, self.child.pid, os.WEXITED | os.WNOWAIT)
        status = self.child.poll()
        assert status is not None
        return status

    def close(self) -> None:
        self.child.stop(0.0)
        self._router.close()
        self._context.term()
        self.arena.close()


@contextmanager
def image_worker(
    model: Path, socket_folder: Path, arena_bytes: int = 8 << 20, **args: Any
) -> Iterator[ImageWorker]:
    """A worker that is gone at the end."""
    worker = ImageWorker(model, socket_folder, arena_bytes, **args)
    try:
        yield worker
    finally:
        worker.close()
