"""The local model cache: where models lie, and what a model's name stands for.

``$DEEPINFER_HOME`` (or ``~/.cache/deepinfer``) holds ``models/NAME``, a model folder or a link to
one, and ``converted/``, the folders that .gguf files were turned into. A folder appears under its
name complete or not at all.
"""

from __future__ import annotations

import difflib
import fcntl
import glob
import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from deepinfer.wire.checks import shown

Progress = Callable[[str, int, int], None]
"""Called with what is being done, how much of it is done, and how much there is (0: unknown)."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}(/[A-Za-z0-9][A-Za-z0-9._-]{0,127})?")
_DIGEST_BYTES = 1 << 20

# Part of every conversion's key: raise it when the converter writes something else than before.
_CONVERTER_VERSION = 1


def no_progress(stage: str, done: int, total: int) -> None:
    """Show nothing."""


def cache_home() -> Path:
    """``$DEEPINFER_HOME``, or ``~/.cache/deepinfer``."""
    home = os.environ.get("DEEPINFER_HOME")
    return Path(home).expanduser() if home else Path.home() / ".cache" / "deepinfer"


def models_folder() -> Path:
    """Where the cache keeps the models that have a name."""
    return cache_home() / "models"


def cached_folder(name: str) -> Path:
    """Where the model ``name`` lies (or would lie) in the cache; ``ValueError`` for a bad name.

    A Hugging Face id ``org/name`` is kept in one folder ``org--name``.
    """
    if not _NAME.fullmatch(name) or ".." in name:
        raise ValueError(
            f"model name must be letters, digits, '.', '_', '-' (and one '/'), got {shown(name)}"
        )
    return models_folder() / name.replace("/", "--")


def known_names() -> list[str]:
    """Names of the models in the cache, sorted."""
    try:
        folders = sorted(models_folder().iterdir())
    except FileNotFoundError:
        return []
    return [folder.name.replace("--", "/", 1) for folder in folders if is_model_folder(folder)]


def is_model_folder(path: Path) -> bool:
    """Whether ``path`` is a folder with a config.json."""
    # os.path, as it takes names that are too long or hold a zero byte for what is not there.
    return os.path.isfile(path / "config.json")


def resolve(model: str, progress: Progress = no_progress) -> Path:
    """The folder of a model: a folder with a config.json, a .gguf file, or a name in the cache.

    A .gguf file is converted into the cache when it is first seen or has changed. ``ValueError``
    says what was tried when nothing fits, and what is wrong with a broken file.
    """
    path = Path(os.path.expanduser(model))
    if is_model_folder(path):
        return path.resolve()
    if os.path.isfile(path):
        return converted_gguf(path, progress)
    if _NAME.fullmatch(model) and is_model_folder(cached := cached_folder(model)):
        return cached.resolve()
    if os.path.isdir(path):
        raise ValueError(f"model {shown(model)}: the folder has no config.json")
    names = known_names()
    raise ValueError(
        f"model {shown(model)} is no folder, no .gguf file and no name in the cache "
        f"{models_folder()} (there: {', '.join(names) if names else 'nothing yet'}); "
        f"{_advice(model, names)}"
    )


def _advice(model: str, cached: list[str]) -> str:
    """What to try instead of ``model``, which was not found."""
    # Imported late: that module builds on this one.
    from deepinfer.frontend.pull import KNOWN_MODELS

    if model in KNOWN_MODELS or ("/" in model and _NAME.fullmatch(model)):
        return f"`deepinfer pull {model[:80]}` may bring it"
    spelled = {name.lower(): name for name in (*KNOWN_MODELS, *cached)}
    close = difflib.get_close_matches(model[:128].lower(), spelled, n=1)
    if close:
        return f"did you mean {spelled[close[0]]}?"
    return f"`deepinfer pull` brings {', '.join(KNOWN_MODELS)} or a Hugging Face id (org/name)"


def converted_gguf(path: Path, progress: Progress = no_progress) -> Path:
    """The model folder that the .gguf file at ``path`` converts to, made if it is not there yet."""
    if path.suffix.lower() != ".gguf":
        raise ValueError(f"model file {shown(str(path))} must be a .gguf file or a model folder")
    # Imported late: most models are folders, and these modules take half a second.
    from deepinfer.frontend.gguf_convert import convert_gguf

    stem = re.sub(r"[^A-Za-z0-9._-]", "_", path.stem)[:80]
    target = cache_home() / "converted" / f"{stem}-{_gguf_key(path)}"
    return build_once(target, lambda folder: convert_gguf(path, folder, progress))


def build_once(target: Path, build: Callable[[Path], None]) -> Path:
    """Let ``build`` fill an empty folder and give it the name ``target``; nothing if that is there.

    Safe against other processes that do the same: one builds, the others wait and find it. When
    ``build`` raises or the process is killed, ``target`` does not appear; what was left behind is
    removed by the next try.
    """
    if is_model_folder(target):
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    prefix, suffix = f".{target.name}.", ".partial"
    # The kernel drops the lock when its holder dies, so there are no stale ones. Its file stays:
    # removing it would let a third process lock a new file while a second waits on the old one.
    with (target.parent / f".{target.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if is_model_folder(target):
            return target
        for leftover in target.parent.glob(f"{glob.escape(prefix)}*{suffix}"):
            shutil.rmtree(leftover, ignore_errors=True)
        partial = Path(tempfile.mkdtemp(suffix, prefix, target.parent))
        try:
            build(partial)
            partial.chmod(0o755)
            partial.rename(target)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
    return target


def _gguf_key(path: Path) -> str:
    """Changes when the file does, without reading all of it: size, time, head and tail."""
    status = path.stat()
    digest = hashlib.sha256(f"{_CONVERTER_VERSION} {status.st_size} {status.st_mtime_ns} ".encode())
    with path.open("rb") as file:
        digest.update(file.read(_DIGEST_BYTES))
        file.seek(max(0, status.st_size - _DIGEST_BYTES))
        digest.update(file.read(_DIGEST_BYTES))
    return digest.hexdigest()[:16]
