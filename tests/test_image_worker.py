"""The image worker's process: what it answers, what it survives, how it ends."""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deepinfer.image_worker.decode import decode
from deepinfer.image_worker.errors import Deadline
from deepinfer.image_worker.fetch import Fetcher
from deepinfer.image_worker.layers import Team
from deepinfer.image_worker.model import load
from deepinfer.image_worker.reader import ImageReader
from deepinfer.wire.arena import HEADER_BYTES, Arena, Region, StaleRegion
from deepinfer.wire.columns import unpack_int32
from deepinfer.wire.image_jobs import (
    ImageDone,
    ImageJob,
    ImageWorkerFailed,
    ImageWorkerReady,
    StopImageWorker,
)
from deepinfer.wire.messages import ImageRef
from support.image_worker import ImageWorker, image_worker
from support.pictures import (
    bmp_size,
    gif_screen,
    gradient,
    hostile_files,
    png,
    png_bomb,
    saved,
    sound_files,
    webp_canvas,
)
from support.vision_checkpoints import FAMILIES, make_vision_checkpoint, picture

pytestmark = pytest.mark.process

LIMIT = 1 << 30
MEGABYTE = 1 << 20


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {
        family: make_vision_checkpoint(family, tmp_path_factory.mktemp(family))
        for family in FAMILIES
    }


@pytest.fixture(scope="module")
def sockets() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="di-") as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def worker(folders: dict[str, Path], sockets: Path) -> Iterator[ImageWorker]:
    """One worker for many jobs: whatever they are, it is there for the next one."""
    with image_worker(folders["idefics3"], sockets) as started:
        yield started


def assert_alive(worker: ImageWorker) -> None:
    done = worker.job(saved(picture(40, 30), "PNG"))
    assert done.encoded is not None, done.error
    assert worker.child.poll() is None


@pytest.mark.parametrize("family", FAMILIES)
def test_an_image_becomes_what_the_model_makes_of_it(
    folders: dict[str, Path], sockets: Path, family: str
) -> None:
    model = load(folders[family], folders[family], Team(1))
    with image_worker(folders[family], sockets) as worker:
        assert isinstance(worker.first, ImageWorkerReady)
        assert worker.first.placeholder == model.placeholder
        for size in ((300, 200), (10, 90)):
            data = saved(picture(*size), "JPEG")
            region = worker.region()
            encoded = worker.job(data, region).encoded
            assert encoded is not None
            wanted = model.encode(decode(data, Deadline(60)), LIMIT, Deadline(60))
            assert encoded.digest == hashlib.blake2b(data, digest_size=16).digest()
            assert unpack_int32(encoded.tokens).tolist() == wanted.tokens.tolist()
            assert unpack_int32(encoded.runs).reshape(-1, 2).tolist() == wanted.runs.tolist()
            assert encoded.grid == wanted.grid
            assert encoded.num_bytes == HEADER_BYTES + wanted.embeddings.nbytes
            used = Region(region.offset, encoded.num_bytes, region.generation)
            found = worker.arena.read(used).reshape(wanted.embeddings.shape)
            np.testing.assert_allclose(found, wanted.embeddings, atol=2e-5)
            with pytest.raises(StaleRegion):
                worker.arena.read(Region(region.offset, region.length, region.generation + 1))


def test_the_same_picture_becomes_the_same_to_the_bit(worker: ImageWorker) -> None:
    data = saved(picture(300, 200), "PNG")
    found = []
    for _ in range(2):
        region = worker.region()
        assert worker.job(data, region).encoded is not None
        found.append(worker.arena.read(region).tobytes())
    assert found[0] == found[1]


@pytest.mark.parametrize("name", sound_files())
def test_odd_files_work(worker: ImageWorker, name: str) -> None:
    done = worker.job(sound_files()[name])
    assert done.encoded is not None, done.error


BROKEN = {
    "cut jpeg": (saved(picture(200, 200), "JPEG")[:-128], "damaged or cut off"),
    "bad checksum": (png(4, 4, b"x")[:-20] + b"y" * 20, "damaged|no image"),
    "text": (b"text that says it is a picture.png", "no image that can be read"),
    "nothing": (b"", "it is empty"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_an_error_and_no_death(worker: ImageWorker, name: str) -> None:
    data, reason = BROKEN[name]
    region = worker.region()
    done = worker.job(data, region)
    assert re.search(reason, done.error)
    with pytest.raises(StaleRegion):
        worker.arena.read(region)
    assert_alive(worker)


def test_bombs_cost_neither_time_nor_memory(worker: ImageWorker) -> None:
    bombs = [
        png_bomb(40_000, 40_000 // 8),
        png(40_000, 40_000, b""),
        png(0x7FFFFFFF, 2, b""),
        webp_canvas(1 << 14, 1 << 14),
        gif_screen(65_535, 65_535),
        bmp_size(30_000, 30_000),
    ]
    assert_alive(worker)
    before = worker.memory_peak()
    for data in bombs:
        assert "the limit is 40000000 altogether" in worker.job(data, timeout_s=1.0).error
    assert worker.memory_peak() - before < 200 * MEGABYTE
    assert_alive(worker)


@pytest.mark.slow
def test_hostile_files_are_answered_one_and_all(worker: ImageWorker) -> None:
    assert_alive(worker)
    before = worker.memory_peak()
    errors = [worker.job(data, timeout_s=30.0).error for data in hostile_files(200, seed=66)]
    assert not [error for error in errors if "worker failed" in error]
    assert worker.memory_peak() - before < 400 * MEGABYTE
    assert_alive(worker)


def test_the_largest_picture_takes_no_more_memory_than_planned(
    worker: ImageWorker, folders: dict[str, Path]
) -> None:
    assert_alive(worker)
    before = worker.memory_peak()
    for kind in ("PNG", "JPEG"):
        done = worker.job(saved(gradient(8000, 5000), kind))
        assert done.encoded is not None, done.error
    assert worker.memory_peak() - before < 700 * MEGABYTE


def test_urls_are_not_fetched_unless_that_is_allowed(worker: ImageWorker) -> None:
    worker.start(ImageRef(url="http://127.0.0.1:1/"))
    assert "does not fetch images" in worker.receive().error
    worker.start(ImageRef(url="data:image/png;base64,AAA"))
    assert "not valid base64" in worker.receive().error


def test_allowed_urls_reach_nothing_inside(folders: dict[str, Path], sockets: Path) -> None:
    with image_worker(folders["idefics3"], sockets, image_urls=True) as worker:
        worker.start(ImageRef(url="http://127.0.0.1:1/"))
        assert "not on the open internet" in worker.receive().error


def test_what_does_not_fit_its_region_is_an_error(worker: ImageWorker) -> None:
    data = saved(picture(300, 200), "PNG")
    done = worker.job(data, worker.region(HEADER_BYTES + 64 * 4 * 15))
    assert "becomes 112 tokens, and the engine has room for 15" in done.error
    done = worker.job(data, Region(offset=worker.arena.size, length=1 << 16, generation=1))
    assert "the image worker failed on it" in done.error
    assert_alive(worker)


def test_a_job_ends_at_its_deadline(worker: ImageWorker) -> None:
    done = worker.job(saved(picture(300, 200), "PNG"), timeout_s=1e-6)
    assert "it took longer than 1e-06 s" in done.error
    assert_alive(worker)


def test_signals_of_a_terminal_are_the_parents_business(worker: ImageWorker) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        os.kill(worker.child.pid, number)
    assert_alive(worker)


def test_text_goes_first_where_both_want_a_core(worker: ImageWorker) -> None:
    assert worker.process().nice() == min(19, os.nice(0) + 10)


def test_it_leaves_when_told(folders: dict[str, Path], sockets: Path) -> None:
    with image_worker(folders["idefics3"], sockets) as worker:
        worker.send(StopImageWorker())
        assert worker.wait_exit() == 0


def test_it_ends_with_its_parent_in_the_middle_of_a_job(
    folders: dict[str, Path], sockets: Path
) -> None:
    with image_worker(folders["idefics3"], sockets) as worker:
        image = ImageRef(data=saved(gradient(3000, 2000), "JPEG"))
        for _ in range(50):
            worker.start(image)
        worker.child.stop(30.0)
        assert worker.child.poll() == 0


def test_junk_ends_it_with_a_word(folders: dict[str, Path], sockets: Path) -> None:
    with image_worker(folders["idefics3"], sockets) as worker:
        worker.send_frame(b"\xc1junk")
        assert isinstance(worker.receive(), ImageWorkerFailed)
        assert worker.wait_exit() == 0


def test_it_beats_from_the_start(worker: ImageWorker) -> None:
    assert_alive(worker)
    while len(worker.heartbeats) < 2:
        assert_alive(worker)
    assert worker.heartbeats[0].job == 0 and worker.heartbeats[0].busy_s == 0.0


def test_a_model_it_cannot_serve_is_a_failure_with_a_cause(
    folders: dict[str, Path], sockets: Path, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    cases: list[tuple[Path, str, dict[str, Any]]] = [
        (tmp_path, "those that take images are", {}),
        (tmp_path / "none", "cannot be read", {}),
        (folders["idefics3"], "image_arena_bytes is too small", {"arena_bytes": 512}),
        (folders["idefics3"], "needs an arena", {"arena": False}),
    ]
    for folder, reason, how in cases:
        with image_worker(folder, sockets, **how) as worker:
            assert isinstance(worker.first, ImageWorkerFailed)
            assert reason in worker.first.message
            assert worker.wait_exit() == 0


@pytest.mark.parametrize(
    "error, reason",
    [
        (MemoryError(), "takes too much memory"),
        (RuntimeError("of the model"), r"the image worker failed on it \(RuntimeError\)"),
    ],
)
def test_whatever_a_model_raises_is_an_answer(error: Exception, reason: str) -> None:
    class Broken:
        placeholder, hidden_size, max_rows = 1, 8, 10

        def encode(self, *_: object) -> Any:
            raise error

        def workspace_bytes(self, rows: int) -> int:
            return 0

    arena = Arena.create(1 << 16)
    try:
        reader = ImageReader(Broken(), arena, Fetcher(False))
        image = ImageRef(data=saved(picture(9, 9), "PNG"))
        done = reader.read(ImageJob(7, image, Region(0, 1024, 1), 60.0))
        assert isinstance(done, ImageDone) and done.job == 7
        assert re.search(reason, done.error)
    finally:
        arena.close()


def test_memory_past_the_bound_is_an_error_and_not_taken() -> None:
    code = (
        "from deepinfer.image_worker.process import limit_growth\n"
        "import numpy as np\n"
        "limit_growth(64 << 20)\n"
        "np.ones(4 << 20, np.uint8)\n"
        "try:\n"
        "    np.ones(256 << 20, np.uint8)\n"
        "except MemoryError:\n"
        "    print('refused')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "refused\n"
