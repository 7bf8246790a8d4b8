"""How a device worker is started. Imports little: the first one is started before all else."""

from __future__ import annotations

import json
from pathlib import Path

from deepinfer.wire.children import Child
from deepinfer.wire.config import EngineArgs, WorkerConfig


def worker_endpoint(directory: str) -> str:
    """Where workers find the scheduler, whose private directory this is."""
    return f"ipc://{directory}/worker"


def worker_identity(generation: int) -> bytes:
    """Identity of the worker's socket; they are numbered from 1 on."""
    return b"worker-%d" % generation


def takes_images(args: EngineArgs) -> bool:
    """Whether the model has an encoder for images and the engine may use it.

    A model folder that cannot be read is the worker's to complain of.
    """
    if not args.num_image_workers:
        return False
    try:
        config = json.loads((Path(args.model) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(config, dict) and isinstance(config.get("vision_config"), dict)


def start_worker(
    args: EngineArgs, directory: str, generation: int, arena_fd: int | None = None
) -> Child:
    """Start a worker process, which says hello to ``worker_endpoint`` when it is there."""
    config = WorkerConfig(
        args=args,
        endpoint=worker_endpoint(directory),
        identity=worker_identity(generation),
        arena_fd=arena_fd,
    )
    return Child(args.worker_module, config, () if arena_fd is None else (arena_fd,))
