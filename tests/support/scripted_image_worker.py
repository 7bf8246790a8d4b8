"""An image worker with a scripted encoder: ``EngineArgs(image_worker_module=…)``.

The process and its socket are the real ones; a file says what becomes of it (``scripted_images``),
or what happens to the process: ``crash``, ``hang`` (a job without end; it still beats) or
``freeze``. ``scripted.json`` in the model folder
configures it: ``image_ms`` is how long each image takes, ``images_fail`` an error to fail the start
with, ``hidden_size`` the numbers in a line of embeddings.
"""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np

from deepinfer.image_worker.process import ImageWorkerProcess
from deepinfer.wire.arena import ALIGNMENT, HEADER_BYTES, Arena
from deepinfer.wire.children import exit_with_parent, read_config
from deepinfer.wire.config import WorkerConfig
from deepinfer.wire.image_jobs import ImageDone, ImageJob, ImageWorkerReady
from support.scripted_images import MAX_LINES, content_of, encoded, line_of, num_lines


class ScriptedReader:
    """Does jobs by what their files say."""

    def __init__(self, arena: Arena, script: dict[str, Any]) -> None:
        self._arena = arena
        self._placeholder = script["placeholder"]
        self._hidden_size = hidden_size = script["hidden_size"]
        self._image_ms = script["image_ms"]
        room = HEADER_BYTES + MAX_LINES * hidden_size * 4
        self.max_region_bytes = -(-room // ALIGNMENT) * ALIGNMENT

    def read(self, job: ImageJob) -> ImageDone:
        """Do a job."""
        data = content_of(job.image)
        time.sleep(self._image_ms / 1000)
        match data.split():
            case [b"crash", *_]:
                os.kill(os.getpid(), signal.SIGKILL)
            case [b"freeze", *_]:
                os.kill(os.getpid(), signal.SIGSTOP)
            case [b"hang", *_]:
                while True:
                    time.sleep(1)
        try:
            image = encoded(data, 4 * self._hidden_size, self._placeholder)
        except ValueError as error:
            return ImageDone(job.job, error=str(error))
        lines = [line_of(data, line, self._hidden_size) for line in range(num_lines(data))]
        self._arena.write(job.region, np.stack(lines))
        return ImageDone(job.job, image)


class ScriptedImageWorker(ImageWorkerProcess):
    """The real process around a scripted reader."""

    def _load(self) -> ImageWorkerReady:
        script: dict[str, Any] = json.loads(
            (Path(self._config.args.model) / "scripted.json").read_text()
        )
        if script["images_fail"]:
            raise ValueError(script["images_fail"])
        assert self._config.arena_fd is not None
        arena = Arena.attach(self._config.arena_fd)
        reader = ScriptedReader(arena, script)
        self._reader = reader  # type: ignore[assignment]
        return ImageWorkerReady(script["placeholder"], reader.max_region_bytes, {})


if __name__ == "__main__":
    config = read_config(WorkerConfig)
    exit_with_parent()
    ScriptedImageWorker(config).run()
