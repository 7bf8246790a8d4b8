"""How a device worker is started. Imports little: the first one is started before all else."""

from __future__ import annotations

from deepinfer.wire.children import Child
from deepinfer.wire.config import EngineArgs, WorkerConfig


def worker_endpoint(directory: str) -> str:
    """Where workers find the scheduler, whose private directory this is."""
    return f"ipc://{directory}/worker"


def worker_identity(generation: int) -> bytes:
    """Identity of the worker's socket; they are numbered from 1 on."""
    return b"worker-%d" % generation


def start_worker(args: EngineArgs, directory: str, generation: int) -> Child:
    """Start a worker process, which says hello to ``worker_endpoint`` when it is there."""
    config = WorkerConfig(
        args=args, endpoint=worker_endpoint(directory), identity=worker_identity(generation)
    )
    return Child(args.worker_module, config)
