"""Shared memory for tensors that one process writes and another reads.

The arena is memory without a name, given to child processes as an open file: nothing can be left
behind, and no other process can open it. Its pages are taken when it is made, so that a full
machine is an error then and no signal later.

A region begins with a header, its generation, which the writer puts there when the rest is written.
A reader that expects another generation gets ``StaleRegion`` and not another image's embeddings.
"""

from __future__ import annotations

import contextlib
import errno
import math
import mmap
import os
import re
import struct
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from deepinfer.wire.messages import Part

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Tensor = npt.NDArray[np.float32]

HEADER_BYTES = 16
"""The front of a region; ``EncodedImage.num_bytes`` and ``Region.length`` count it."""

ALIGNMENT = 64
"""Offsets and lengths that an owner hands out are multiples of it."""

_HELD = re.compile(r"^(?:anon|rss|shmem) (\d+)$", re.MULTILINE)
_HEADER = struct.Struct("<QQ")
_UNWRITTEN = 0
_FOLDER = "/dev/shm"
_CONTAINER_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


class Region(Part):
    """A piece of the arena, in bytes; ``generation`` is above zero and never used twice."""

    offset: int
    length: int
    generation: int


class StaleRegion(Exception):
    """A region does not hold what its reader expects: it was not written, or given to another."""


class Arena:
    """One process's view of the shared memory. ``fileno`` goes to children by inheritance."""

    def __init__(self, fileno: int) -> None:
        self.fileno = fileno
        self.size = os.fstat(fileno).st_size
        self._memory = mmap.mmap(fileno, self.size)

    @classmethod
    def create(cls, size: int) -> Arena:
        """Make an arena of ``size`` bytes, which no child inherits unless it is passed on.

        ``OSError`` says that the machine has not that much memory left.
        """
        # Asked first: an unnamed file has no size limit of its own, and to allocate until nothing
        # is left would end other processes before it ends in an error.
        if size > (free := _free_bytes()):
            raise OSError(errno.ENOMEM, f"no shared memory of {size} bytes, {free} are free")
        fileno = _unnamed_file()
        try:
            os.posix_fallocate(fileno, 0, size)
            return cls(fileno)
        except OSError as error:
            os.close(fileno)
            raise OSError(
                error.errno, f"no shared memory of {size} bytes: {error.strerror}"
            ) from error

    @classmethod
    def attach(cls, fileno: int) -> Arena:
        """Open the arena whose descriptor this process inherited."""
        return cls(fileno)

    def write(self, region: Region, array: Tensor) -> int:
        """Copy a tensor into a region that this process owns; return the bytes used of it.

        ``ValueError`` when it does not fit.
        """
        import numpy as np  # late: who only names regions starts without it

        self._check(region)
        data = np.ascontiguousarray(array, np.float32)
        used = HEADER_BYTES + data.nbytes
        if used > region.length:
            raise ValueError(f"{used} bytes do not fit into a region of {region.length}")
        # Unwritten first: a writer that is killed half way leaves no region that reads as whole.
        _HEADER.pack_into(self._memory, region.offset, _UNWRITTEN, 0)
        into = np.frombuffer(self._memory, np.float32, data.size, region.offset + HEADER_BYTES)
        into[:] = data.reshape(-1)
        _HEADER.pack_into(self._memory, region.offset, region.generation, data.nbytes)
        return used

    def read(self, region: Region) -> Tensor:
        """Return the flat tensor in a region: a view of the memory, read-only.

        ``StaleRegion`` when another generation, or none, stands there.
        """
        import numpy as np

        self._check(region)
        generation, num_bytes = _HEADER.unpack_from(self._memory, region.offset)
        if generation != region.generation:
            raise StaleRegion(
                f"the region at {region.offset} holds generation {generation}, "
                f"not {region.generation}"
            )
        if num_bytes % 4 or HEADER_BYTES + num_bytes > region.length:
            raise StaleRegion(f"the region at {region.offset} says it holds {num_bytes} bytes")
        start = region.offset + HEADER_BYTES
        view = np.frombuffer(self._memory, np.float32, num_bytes // 4, start)
        view.flags.writeable = False
        return view

    def close(self) -> None:
        """Let go of the memory once no view of it is left; it is gone when all processes have."""
        os.close(self.fileno)

    def _check(self, region: Region) -> None:
        if (
            region.generation <= _UNWRITTEN
            or region.offset < 0
            or region.offset % ALIGNMENT
            or region.length < HEADER_BYTES
            or region.offset + region.length > self.size
        ):
            raise ValueError(f"{region} is no region of an arena of {self.size} bytes")


def _unnamed_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("deepinfer-arena", os.MFD_CLOEXEC)
    fileno, path = tempfile.mkstemp(dir=_FOLDER if os.path.isdir(_FOLDER) else None)
    os.unlink(path)
    return fileno


def _free_bytes() -> float:
    """Bytes that can be taken without anything being pushed out: of the machine, of a container."""
    free = math.inf
    with contextlib.suppress(OSError):
        found = re.search(r"MemAvailable:\s*(\d+) kB", Path("/proc/meminfo").read_text())
        free = int(found[1]) * 1024 if found else free
    for limit in map(Path, _CONTAINER_LIMITS):
        # No such file, or "max": no limit. What is cached of files makes room when it must.
        with contextlib.suppress(OSError, ValueError):
            held = _HELD.findall(limit.with_name("memory.stat").read_text())
            free = min(free, max(0, int(limit.read_text()) - sum(map(int, held))))
    return free
