"""Where compiled kernels are kept between starts. Must be imported before numba."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import sys
import time
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

KEPT_DAYS = 30
"""What is kept on disk and was not used for so long may be removed."""


@cache
def _source_digest() -> str:
    """Digest of the kernel sources, read once.

    numba renews a cached function when its own file changes, not when a file it calls into does, so
    the sources as a whole name the folder.
    """
    digest = hashlib.sha256(version("numba").encode())
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


@cache
def tiles_are_lent() -> bool:
    """Whether the system lets this process use tile registers (AMX); it asks for all threads."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return False
    arch_prctl, request_permission, tile_data = 158, 0x1023, 18
    return bool(ctypes.CDLL(None).syscall(arch_prctl, request_permission, tile_data) == 0)


def home() -> Path:
    """The folder of everything that is kept on disk."""
    home = os.environ.get("DEEPINFER_HOME") or "~/.cache/deepinfer"
    return Path(home).expanduser()


def cache_folder() -> Path:
    """Folder of the compiled kernels of this version.

    Of a processor with tile registers they use them, which a process that has none must not.
    """
    return home() / "kernels" / (_source_digest() + ("-tiles" if tiles_are_lent() else ""))


def discard_compiled() -> None:
    """Remove the compiled kernels of this version from disk."""
    shutil.rmtree(cache_folder(), ignore_errors=True)


def remove_unused() -> None:
    """Note that this version's kernels are used, and remove those of versions that are not."""
    own = cache_folder()
    oldest = time.time() - KEPT_DAYS * 86_400
    try:
        os.utime(own)
        for folder in own.parent.iterdir():
            if folder.stat().st_mtime < oldest:
                shutil.rmtree(folder, ignore_errors=True)
    except OSError:
        pass  # kept elsewhere, not writable, or removed by another process meanwhile


# Where the folder cannot be written numba falls back to one it finds for itself.
os.environ.setdefault("NUMBA_CACHE_DIR", str(cache_folder()))

JIT: dict[str, Any] = {"nogil": True, "cache": True, "error_model": "numpy", "boundscheck": False}
"""Options of every compiled function. Never fastmath: it would let sums change their order."""

INNER = {**JIT, "cache": False, "no_cpython_wrapper": True, "no_cfunc_wrapper": True}
"""Options of functions that only compiled ones call; their code is cached with the caller's."""
