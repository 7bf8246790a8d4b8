"""Where compiled kernels are kept between starts. Must be imported before numba."""

from __future__ import annotations

import hashlib
import os
import shutil
from importlib.metadata import version
from pathlib import Path
from typing import Any


def _source_digest() -> str:
    """Digest of the kernel sources.

    numba renews a cached function when its own file changes, not when a file it calls into does, so
    the sources as a whole name the folder.
    """
    digest = hashlib.sha256(version("numba").encode())
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


def cache_folder() -> Path:
    """Folder of the compiled kernels of this version."""
    home = os.environ.get("DEEPINFER_HOME") or Path.home() / ".cache" / "deepinfer"
    return Path(home) / "kernels" / _source_digest()


def discard_compiled() -> None:
    """Remove the compiled kernels of this version from disk."""
    shutil.rmtree(cache_folder(), ignore_errors=True)


# Where the folder cannot be written numba falls back to one it finds for itself.
os.environ.setdefault("NUMBA_CACHE_DIR", str(cache_folder()))

JIT: dict[str, Any] = {"nogil": True, "cache": True, "error_model": "numpy", "boundscheck": False}
"""Options of every compiled function. Never fastmath: it would let sums change their order."""

INNER = {**JIT, "cache": False, "no_cpython_wrapper": True, "no_cfunc_wrapper": True}
"""Options of functions that only compiled ones call; their code is cached with the caller's."""
