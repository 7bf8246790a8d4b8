"""Weights from the disk cache are the weights that were packed, or none at all."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import time
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deepinfer.gpu_worker import llama, weight_cache
from deepinfer.gpu_worker.cpu_backend import CpuBackend
from deepinfer.gpu_worker.llama import Model, Weights
from deepinfer.gpu_worker.process import load_cpu_model
from deepinfer.gpu_worker.weight_cache import WeightCache
from deepinfer.wire.config import EngineArgs
from support.checkpoints import make_checkpoint

FORMATS = [("float32", "none"), ("bfloat16", "none"), ("bfloat16", "int8"), ("bfloat16", "int4")]


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    root = tmp_path_factory.mktemp("checkpoints")
    return {name: make_checkpoint(name, root / name) for name in ("qwen2-tied", "qwen3")}


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("DEEPINFER_HOME", str(tmp_path / "home"))
    return tmp_path / "home" / "weights"


@pytest.fixture(scope="module")
def backend():
    backend = CpuBackend(num_threads=2)
    yield backend
    backend.close()


@pytest.fixture
def folder(checkpoints, tmp_path) -> Path:
    """A model folder that a test may change."""
    return shutil.copytree(checkpoints["qwen3"], tmp_path / "model")


def load(folder, backend, dtype="bfloat16", quantization="none") -> Model:
    """Load with the cache, and wait for what is written."""
    cache = WaitingCache(str(folder), dtype, quantization)
    return Model.load(folder, backend, dtype, quantization=quantization, cache=cache)


class WaitingCache(WeightCache):
    def store(self, weights: Weights) -> None:
        self._run_writer(weights)


def arrays_of(model: Model) -> list[np.ndarray]:
    arrays: list[np.ndarray] = []
    weights = Weights(model.embedding, model.layers, model.final_norm, model.head)
    weight_cache._described(weights, arrays)
    return arrays


def same(a: Model, b: Model) -> bool:
    pairs = zip(arrays_of(a), arrays_of(b), strict=True)
    return all(x.dtype == y.dtype and x.tobytes() == y.tobytes() for x, y in pairs)


def files(home) -> list[str]:
    return sorted(path.name for path in home.glob("*.weights"))


@pytest.fixture
def no_packing(monkeypatch):
    """Call it, and from then on nothing can be packed."""

    def refuse(*_):
        raise AssertionError("packed again")

    return lambda: monkeypatch.setattr(llama, "Checkpoint", refuse)


@pytest.mark.parametrize("dtype, quantization", FORMATS)
@pytest.mark.parametrize("variant", ["qwen2-tied", "qwen3"])
def test_the_second_load_has_the_same_weights_and_packs_nothing(
    checkpoints, home, backend, no_packing, variant, dtype, quantization
):
    first = load(checkpoints[variant], backend, dtype, quantization)
    no_packing()
    second = load(checkpoints[variant], backend, dtype, quantization)
    assert same(first, second)
    assert (second.head is second.embedding) == (variant == "qwen2-tied")
    for array in arrays_of(second):
        # As the kernels are compiled for; and the panels as the arena gives them.
        assert array.flags.carray and array.flags.writeable
        assert array.ctypes.data % 64 == 0


def test_an_array_may_cross_the_pieces_that_are_checked(
    folder, home, backend, monkeypatch, no_packing
):
    monkeypatch.setattr(weight_cache, "_PIECE_BYTES", 1 << 10)
    first = load(folder, backend)
    no_packing()
    assert same(first, load(folder, backend))


def test_arrays_may_have_any_size(folder, home, monkeypatch):
    monkeypatch.setattr(weight_cache, "_PIECE_BYTES", 128)
    odd = [np.arange(n, dtype=np.uint8) for n in (1, 7, 63, 65, 1000)]
    odd += [np.arange(n, dtype=np.float32).reshape(1, n) for n in (3, 99)]
    WaitingCache(str(folder), "float32", "none").store(Weights(odd[0], odd[1:], odd[2], None))
    found = WeightCache(str(folder), "float32", "none").weights()
    for stored, array in zip(
        [*odd, odd[2]], [found.embedding, *found.layers, found.final_norm], strict=True
    ):
        assert array.dtype == stored.dtype and (array == stored).all()
        assert array.shape == stored.shape and array.ctypes.data % 64 == 0
    assert found.head is None


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_a_damaged_file_is_not_used(folder, home, backend, data):
    good = load(folder, backend)
    (path,) = home.glob("*.weights")
    content = path.read_bytes()
    # The end, where the header is, as often as the rest.
    at = data.draw(st.integers(0, len(content) - 1) | st.integers(len(content) - 600, len(content)))
    kind = data.draw(st.sampled_from(["bit", "cut", "longer", "zeros", "text"]))
    if kind == "bit":
        at = min(at, len(content) - 1)
        changed = content[:at] + bytes([content[at] ^ 1 << data.draw(st.integers(0, 7))])
        changed += content[at + 1 :]
    elif kind == "cut":
        changed = content[:at]
    elif kind == "longer":
        changed = content + data.draw(st.binary(min_size=1, max_size=64))
    elif kind == "zeros":
        changed = content[:at] + bytes(min(4096, len(content) - at)) + content[at + 4096 :]
    else:
        changed = data.draw(st.binary(max_size=200))
    path.write_bytes(changed)
    cache = WeightCache(str(folder), "bfloat16", "none")
    if changed == content:
        assert cache.weights() is not None
    else:
        assert cache.weights() is None
    assert same(good, load(folder, backend))
    # Replaced by a good one.
    assert path.read_bytes() == content


def test_data_that_changed_places_is_noticed(folder, home, backend):
    load(folder, backend)
    (path,) = home.glob("*.weights")
    content = bytearray(path.read_bytes())
    content[:4096], content[4096:8192] = content[4096:8192], content[:4096]
    path.write_bytes(content)
    assert WeightCache(str(folder), "bfloat16", "none").weights() is None


def test_a_model_that_changes_while_it_is_packed_is_not_kept(folder, checkpoints, home, backend):
    """The files would be found by what lay there before, which may come back."""
    cache = WaitingCache(str(folder), "bfloat16", "none")
    folder.rename(folder.with_name("before"))
    shutil.copytree(checkpoints["qwen2-tied"], folder)
    Model.load(folder, backend, "bfloat16", cache=cache)
    assert files(home) == []


def test_strange_neighbours_of_a_model_stop_nobody(folder, home, backend, no_packing):
    (folder / "gone.safetensors").symlink_to("/nowhere/at/all")
    Path(os.fsdecode(bytes(folder) + b"/\xff.safetensors.index.safetensors")).mkdir()
    cache = WaitingCache(str(folder), "bfloat16", "none")
    weights = Weights(np.zeros(3, np.float32), [], np.zeros(3, np.float32), None)
    cache.store(weights)
    assert WeightCache(str(folder), "bfloat16", "none").weights() is not None


def test_a_pipe_in_place_of_the_file_is_not_waited_for(folder, home, backend):
    load(folder, backend)
    (path,) = home.glob("*.weights")
    path.unlink()
    os.mkfifo(path)
    assert WeightCache(str(folder), "bfloat16", "none").weights() is None


@pytest.mark.parametrize(
    "change",
    [
        {"size": 4 << 30},
        {"size": -1},
        {"arrays": [weight_cache._Array("<f4", [2], -64)]},
        {"arrays": [weight_cache._Array("<f4", [2], 1)]},
        {"arrays": [weight_cache._Array("<f4", [1 << 40], 0)]},
        {"arrays": [weight_cache._Array("<f4", [-2], 0)]},
        {"arrays": [weight_cache._Array("|O", [2], 0)]},
        {"arrays": [weight_cache._Array("(2,", [2], 0)]},
        {"tree": {"": ["os", "getpid"]}},
        {"tree": {"": ["no.such.module", "Weights"]}},
        {"tree": {"": [Weights.__module__, "Weights"], "embedding": None}},
        {"tree": {"array": 7}},
        {"tree": {"array": "x"}},
        {"tree": {"weights": 1}},
    ],
    ids=str,
)
def test_a_header_that_promises_what_is_not_there_is_refused(
    folder, home, backend, monkeypatch, change
):
    class Header(weight_cache._Header):
        def __post_init__(self):
            for name, value in change.items():
                setattr(self, name, value)

    weights = Weights(np.zeros(3, np.float32), [], np.zeros(3, np.float32), None)
    with monkeypatch.context() as patch:
        patch.setattr(weight_cache, "_Header", Header)
        WaitingCache(str(folder), "bfloat16", "none").store(weights)
    assert len(files(home)) == 1
    assert WeightCache(str(folder), "bfloat16", "none").weights() is None


def test_a_file_of_something_else_under_the_right_name_is_not_used(folder, home, backend):
    good = load(folder, backend)
    (path,) = home.glob("*.weights")
    load(folder, backend, quantization="int8")
    (other,) = set(home.glob("*.weights")) - {path}
    other.rename(path)
    assert WeightCache(str(folder), "bfloat16", "none").weights() is None
    assert same(good, load(folder, backend))


def test_a_changed_model_is_noticed_though_size_and_date_stay(folder, home, backend):
    first = load(folder, backend)
    path = folder / "model.safetensors"
    before = path.stat()
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = path.stat()
    assert (after.st_size, after.st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    assert not same(first, load(folder, backend))


def test_other_code_or_another_cpu_is_another_file(folder, home, monkeypatch, tmp_path):
    def name():
        return WeightCache(str(folder), "bfloat16", "none").path.name

    mine = name()
    assert name() == mine
    monkeypatch.setattr(weight_cache, "_cpu", lambda: "x86_64 flags: none")
    assert name() != mine
    monkeypatch.undo()
    monkeypatch.setenv("NUMBA_CPU_FEATURES", "-avx512f")
    assert name() != mine
    monkeypatch.undo()
    copy = shutil.copytree(Path(weight_cache.__file__).parent, tmp_path / "gpu_worker")
    (copy / "kernels" / "linear.py").open("a").write("\n")
    monkeypatch.setattr(weight_cache, "__file__", str(copy / "weight_cache.py"))
    assert name() != mine


def test_a_start_beside_one_that_writes_writes_nothing(folder, home, backend):
    home.mkdir(parents=True)
    with (home / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        load(folder, backend)
        assert files(home) == []
    load(folder, backend)
    assert len(files(home)) == 1


def test_what_a_killed_process_left_is_removed(folder, home, backend):
    home.mkdir(parents=True)
    (home / "model-0123-4567.partial").write_bytes(b"half")
    load(folder, backend)
    assert list(home.glob("*.partial")) == []
    assert len(files(home)) == 1


@pytest.mark.parametrize("begun", [False, True])
def test_a_full_disk_leaves_nothing_behind_and_stops_nobody(
    folder, home, backend, monkeypatch, begun
):
    """Full before it began, or while the file is written."""
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(1 << 40 if begun else 0))
    partial = []

    def full(_):
        partial.extend(home.glob("*.partial"))
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(weight_cache, "_digest", full)
        model = load(folder, backend)
    assert bool(partial) == begun
    assert [path.name for path in home.iterdir()] == [".lock"]
    assert same(model, load(folder, backend))


def test_a_home_that_cannot_be_written_stops_nobody(folder, home, backend):
    home.parent.write_text("a file where a folder should be")
    assert same(load(folder, backend), load(folder, backend))


def test_old_versions_and_unused_files_are_removed(folder, home, backend):
    folder = folder.rename(folder.with_name("model[v1]"))
    load(folder, backend)
    (current,) = files(home)
    setting = current.rsplit("-", 1)[0]
    now = time.time()
    for number in range(5):
        version = home / f"{setting}-{number:016x}.weights"
        version.write_bytes(b"")
        os.utime(version, (now - 60 * number, now - 60 * number))
    for name, days in (("other-1", 29), ("other-2", 31)):
        (home / f"{name}.weights").write_bytes(b"")
        os.utime(home / f"{name}.weights", (now - days * 86_400,) * 2)
    (home / current).unlink()
    load(folder, backend)
    kept = [f"{setting}-{number:016x}.weights" for number in range(2)]
    assert files(home) == sorted([current, *kept, "other-1.weights"])


def test_reading_a_file_counts_as_use(folder, home, backend):
    load(folder, backend)
    (path,) = home.glob("*.weights")
    os.utime(path, (1, 1))
    load(folder, backend)
    assert time.time() - path.stat().st_mtime < 3600


@pytest.mark.parametrize("wanted", [True, False])
def test_the_worker_keeps_its_weights_if_it_may(folder, home, monkeypatch, wanted):
    stored = []
    monkeypatch.setattr(WeightCache, "store", lambda self, weights: stored.append(weights))
    args = EngineArgs(model=str(folder), num_kv_blocks=8, weight_cache=wanted)
    loaded = load_cpu_model(args, {})
    loaded.team.close()
    assert len(stored) == wanted
