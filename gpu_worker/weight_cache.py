"""Packed weights, kept on disk between starts.

Packing SmolLM2-135M takes 0.15 to 0.6 s. A file of the result is read in a thread while the worker
imports its kernels, so it takes next to nothing. It is read and not mapped: what is mapped from a
file does not lie in huge pages, which are worth 4 to 11 % of a decode step (``kernels.arena``).

A file is: the arrays, each from a multiple of 64 bytes on; the header as msgpack; SHA-256 of the
header; its length (8 bytes, little-endian). A file that is damaged, or made from something else, is
taken for none.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import glob
import hashlib
import logging
import math
import mmap
import os
import platform
import shutil
import stat
import sys
import threading
import time
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np
import numpy.typing as npt

from deepinfer.gpu_worker.kernels.settings import KEPT_DAYS, home

log = logging.getLogger("deepinfer.gpu_worker")

_ALIGNMENT = 64
_END_BYTES = 32 + 8
_MAX_HEADER_BYTES = 64 << 20
# Larger than any place where a disk or a copy goes wrong, smaller than what may change places.
_SECTOR_BYTES = 512
# Few and large: after each of them the thread that reads waits for one that imports.
_PIECE_BYTES = 64 << 20
# Files of one model and setting: for versions that are used side by side.
_KEPT_VERSIONS = 3
_DTYPES = {np.dtype(kind).str for kind in (np.float32, np.uint16, np.uint8, np.int8)}
_MODEL_FILES = ("config.json", "model.safetensors.index.json", "*.safetensors")


class _Array(msgspec.Struct, array_like=True):
    dtype: str
    shape: list[int]
    offset: int


class _Header(msgspec.Struct):
    key: str
    tree: Any
    """A dataclass is ``{"": its module and name, field: value}``, an array ``{"array": index}``."""
    arrays: list[_Array]
    size: int
    """Bytes of all arrays, with what lies between them."""
    digests: list[bytes]
    """``_digest`` of every ``_PIECE_BYTES`` of that."""


class WeightCache:
    """The file for one model folder, dtype and quantization; begins to read it at once."""

    def __init__(self, model: str, dtype: str, quantization: str) -> None:
        self._folder = folder = Path(model).resolve()
        # What stays when the model or this package change: older files are found by it.
        setting = f"{os.fsencode(folder)!r} {dtype} {quantization} {_cpu()}"
        name = f"{folder.name[:100]}-{hashlib.sha256(setting.encode()).hexdigest()[:16]}"
        self._state = _state(folder)
        self._key = hashlib.sha256(f"{setting} {self._state}".encode()).hexdigest()
        self._glob = f"{glob.escape(name)}-*.weights"
        self.path = home() / "weights" / f"{name}-{self._key[:16]}.weights"
        self._read: tuple[_Header, list[npt.NDArray[Any]]] | None = None
        self._reader = threading.Thread(target=self._run_reader, name="weights", daemon=True)
        self._reader.start()

    def weights(self) -> Any:
        """Return what was stored, once it is read; ``None`` when there is nothing to be trusted.

        It consists of dataclasses of this package, lists, arrays and plain values, and its classes
        must have been imported.
        """
        self._reader.join()
        if self._read is None:
            return None
        header, arrays = self._read
        self._read = None
        try:
            return _built(header.tree, arrays)
        except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
            log.info("%s is not used: %r", self.path, error)
            return None

    def store(self, weights: Any) -> None:
        """Write ``weights``, which must not change any more, in a thread.

        Without a word where that is not possible: the next start packs again. Nor is it done where
        the model's files are not those any more that the file will be found by.
        """
        threading.Thread(target=self._run_writer, args=(weights,), daemon=True).start()

    # ---- reading --------------------------------------------------------------------------------

    def _run_reader(self) -> None:
        try:
            # Not to wait for a writer, should it be a pipe.
            descriptor = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            with os.fdopen(descriptor, "rb", buffering=0) as file:
                if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                    raise ValueError("no regular file")
                self._read = self._checked(file)
            os.utime(self.path)  # in use: not to be removed
        except FileNotFoundError:
            pass
        except (OSError, ValueError, MemoryError, RecursionError, msgspec.MsgspecError) as error:
            log.info("%s is not used: %s", self.path, error)

    def _checked(self, file: BinaryIO) -> tuple[_Header, list[npt.NDArray[Any]]]:
        """Read all of a file; ``ValueError`` unless each byte is what was written."""
        end = file.seek(0, os.SEEK_END) - _END_BYTES
        file.seek(max(0, end))
        digest, length = file.read(_END_BYTES - 8), int.from_bytes(file.read(8), "little")
        if length > min(end, _MAX_HEADER_BYTES):
            raise ValueError("truncated")
        file.seek(end - length)
        text = file.read(length)
        if hashlib.sha256(text).digest() != digest:
            raise ValueError("damaged")
        header = msgspec.msgpack.decode(text, type=_Header)
        if header.key != self._key:
            raise ValueError("made from something else")
        if header.size != end - length:
            raise ValueError("truncated")
        for array in header.arrays:
            if not _lies_within(array, header.size):
                raise ValueError("damaged")
        # One block of memory, so that it lies in huge pages.
        memory = np.zeros(header.size + _ALIGNMENT, np.uint8)
        memory = memory[-memory.ctypes.data % _ALIGNMENT :][: header.size]
        # Touched first: where the system does so, in ``readinto``, no other thread gets memory
        # meanwhile, and the imports take twice as long.
        memory[:: mmap.PAGESIZE] = 0
        file.seek(0)
        done = 0
        while done < header.size:
            count = file.readinto(memory[done:].data)  # type: ignore[attr-defined]
            if not count:
                raise ValueError("truncated")
            done += count
        pieces = range(0, header.size, _PIECE_BYTES)
        if [_digest(memory[at : at + _PIECE_BYTES]) for at in pieces] != header.digests:
            raise ValueError("damaged")
        return header, [
            np.ndarray(tuple(array.shape), array.dtype, memory.data, array.offset)
            for array in header.arrays
        ]

    # ---- writing --------------------------------------------------------------------------------

    def _run_writer(self, weights: Any) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with (self.path.parent / ".lock").open("w") as lock:
                # Whoever holds it writes; what is not written now is so by a later start.
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._clean()
                if _state(self._folder) != self._state:
                    raise OSError(f"{self._folder} changed meanwhile")
                self._write(weights)
        except OSError as error:
            log.info("the packed weights are not kept: %s", error)

    def _write(self, weights: Any) -> None:
        arrays: list[npt.NDArray[Any]] = []
        tree = _described(weights, arrays)
        places, size = [], 0
        for array in arrays:
            places.append(_Array(array.dtype.str, list(array.shape), size))
            size = _aligned(size + array.nbytes)
        if shutil.disk_usage(self.path.parent).free < 2 * size:
            raise OSError("the disk is nearly full")
        partial = self.path.with_suffix(".partial")
        try:
            with partial.open("w+b") as file:
                for array, place in zip(arrays, places, strict=True):
                    file.seek(place.offset)
                    file.write(np.ascontiguousarray(array).data)
                file.truncate(size)
                file.seek(0)
                digests = [
                    _digest(np.fromfile(file, np.uint8, min(_PIECE_BYTES, size - at)))
                    for at in range(0, size, _PIECE_BYTES)
                ]
                file.seek(size)
                text = msgspec.msgpack.encode(_Header(self._key, tree, places, size, digests))
                file.write(text + hashlib.sha256(text).digest() + len(text).to_bytes(8, "little"))
            partial.rename(self.path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise

    def _clean(self) -> None:
        """Remove what others left half written, old versions, and what nobody uses any more."""
        folder = self.path.parent
        for partial in folder.glob("*.partial"):
            _remove(partial)
        versions = sorted(folder.glob(self._glob), key=_last_used, reverse=True)
        oldest = time.time() - KEPT_DAYS * 86_400
        unused = [path for path in folder.glob("*.weights") if _last_used(path) < oldest]
        for path in {*versions[_KEPT_VERSIONS - 1 :], *unused} - {self.path}:
            _remove(path)


def _state(folder: Path) -> str:
    """Changes when the files of a model or the code that packs them do.

    The time of a file's last change of any kind (ctime) cannot be set, so that a file put in place
    of another one with its size and date is noticed as well.
    """
    digest = hashlib.sha256()
    for source in sorted(Path(__file__).parent.glob("**/*.py")):
        digest.update(source.read_bytes())
    for pattern in _MODEL_FILES:
        for file in sorted(folder.glob(pattern)):
            digest.update(os.fsencode(file.name))
            try:
                status = file.stat()
            except OSError:  # a link to nowhere is no file
                continue
            times = (status.st_mtime_ns, status.st_ctime_ns)
            digest.update(f" {status.st_size} {times} {status.st_ino} ".encode())
    return digest.hexdigest()


def _cpu() -> str:
    """What the CPU is and has, and what numba is told of it: packing depends on that."""
    try:
        with open("/proc/cpuinfo", "rb") as file:
            # The first core's lines alone: each one costs the kernel time.
            lines = file.read(8192).splitlines()
    except OSError:
        lines = []
    flags = next((line.decode() for line in lines if line.startswith(b"flags")), "")
    told = [os.environ.get(f"NUMBA_CPU_{name}", "") for name in ("NAME", "FEATURES")]
    return f"{platform.machine()} {flags} {told}"


def _described(value: Any, arrays: list[npt.NDArray[Any]]) -> Any:
    """``value`` as plain data; its arrays are appended to ``arrays``."""
    if isinstance(value, np.ndarray):
        arrays.append(value)
        return {"array": len(arrays) - 1}
    if isinstance(value, list):
        return [_described(item, arrays) for item in value]
    if dataclasses.is_dataclass(value):
        kind = type(value)
        fields = {
            field.name: _described(getattr(value, field.name), arrays)
            for field in dataclasses.fields(value)
        }
        return {"": [kind.__module__, kind.__name__]} | fields
    return value


def _built(tree: Any, arrays: list[npt.NDArray[Any]]) -> Any:
    """The value that ``_described`` described."""
    if isinstance(tree, list):
        return [_built(item, arrays) for item in tree]
    if isinstance(tree, dict):
        if "array" in tree:
            return arrays[tree["array"]]
        module, name = tree.pop("")
        kind = getattr(sys.modules[module], name)
        if not (isinstance(kind, type) and dataclasses.is_dataclass(kind)):
            raise ValueError(f"{module}.{name} is no dataclass")
        return kind(**{field: _built(value, arrays) for field, value in tree.items()})
    return tree


def _lies_within(array: _Array, size: int) -> bool:
    """Whether this is an array of plain numbers in a file of so many bytes."""
    if array.dtype not in _DTYPES or min(array.shape, default=0) < 0 or array.offset < 0:
        return False
    end = array.offset + math.prod(array.shape) * np.dtype(array.dtype).itemsize
    return array.offset % _ALIGNMENT == 0 and end <= size


def _digest(data: npt.NDArray[np.uint8]) -> bytes:
    """Digest of the sums of the 64-bit words of each sector: several times as fast as SHA-256.

    It is to find damage, and not intent: whoever may write this folder may write that of the
    compiled kernels, too.
    """
    whole = data.size // _SECTOR_BYTES * _SECTOR_BYTES
    sectors = data[:whole].view(np.uint64).reshape(-1, _SECTOR_BYTES // 8)
    sums = sectors.sum(axis=1, dtype=np.uint64)
    return hashlib.sha256(sums.tobytes() + data[whole:].tobytes()).digest()


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):  # gone meanwhile, or a folder that is none of ours
        path.unlink()


def _last_used(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:  # gone meanwhile
        return 0.0
