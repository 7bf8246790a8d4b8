"""The arena: a tensor goes from one process to another, and never another image's tensor."""

from __future__ import annotations

import errno
import os
import subprocess
import sys

import numpy as np
import pytest

from deepinfer.wire.arena import ALIGNMENT, HEADER_BYTES, Arena, Region, StaleRegion


@pytest.fixture
def arena():
    made = Arena.create(1 << 20)
    yield made
    made.close()


def test_another_process_reads_what_was_written(arena: Arena) -> None:
    values = np.arange(12, dtype=np.float32).reshape(3, 4) / 7
    region = Region(offset=128, length=1024, generation=9)
    assert arena.write(region, values) == HEADER_BYTES + values.nbytes
    code = (
        "import sys\n"
        "from deepinfer.wire.arena import Arena, Region\n"
        "arena = Arena.attach(int(sys.argv[1]))\n"
        "print(arena.read(Region(offset=128, length=1024, generation=9)).tolist())\n"
    )
    output = subprocess.run(
        [sys.executable, "-c", code, str(arena.fileno)],
        pass_fds=(arena.fileno,),
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert output.strip() == str(values.reshape(-1).tolist())


def test_a_view_is_read_only(arena: Arena) -> None:
    region = Region(offset=0, length=64, generation=1)
    arena.write(region, np.ones(4, np.float32))
    with pytest.raises(ValueError):
        arena.read(region)[0] = 2


def test_a_region_of_another_generation_is_stale(arena: Arena) -> None:
    old = Region(offset=0, length=256, generation=1)
    with pytest.raises(StaleRegion):
        arena.read(old)
    arena.write(old, np.ones(4, np.float32))
    arena.write(Region(offset=0, length=256, generation=2), np.zeros(4, np.float32))
    with pytest.raises(StaleRegion, match="generation 2, not 1"):
        arena.read(old)


def test_a_region_shrunk_to_what_is_used_reads_the_same(arena: Arena) -> None:
    values = np.arange(5, dtype=np.float32)
    used = arena.write(Region(offset=64, length=4096, generation=3), values)
    assert (arena.read(Region(offset=64, length=used, generation=3)) == values).all()
    with pytest.raises(StaleRegion):
        arena.read(Region(offset=64, length=used - 1, generation=3))


def test_what_does_not_fit_is_not_written(arena: Arena) -> None:
    region = Region(offset=64, length=HEADER_BYTES + 16, generation=1)
    arena.write(Region(offset=64, length=1024, generation=5), np.ones(8, np.float32))
    with pytest.raises(ValueError, match="do not fit"):
        arena.write(region, np.zeros(5, np.float32))
    assert (arena.read(Region(offset=64, length=1024, generation=5)) == 1).all()


@pytest.mark.parametrize(
    "offset, length, generation",
    [
        (-ALIGNMENT, 128, 1),
        (1, 128, 1),
        (0, HEADER_BYTES - 1, 1),
        (0, (1 << 20) + 1, 1),
        (1 << 20, 128, 1),
        (0, 128, 0),
    ],
)
def test_what_is_no_region_is_refused(
    arena: Arena, offset: int, length: int, generation: int
) -> None:
    region = Region(offset=offset, length=length, generation=generation)
    with pytest.raises(ValueError, match="no region"):
        arena.write(region, np.ones(1, np.float32))
    with pytest.raises(ValueError, match="no region"):
        arena.read(region)


def test_a_full_machine_is_an_error_before_anything_is_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Never the real call: were the check gone, it would take all memory of the machine.
    monkeypatch.setattr(os, "posix_fallocate", lambda *_: pytest.fail("it allocates"))
    with pytest.raises(OSError, match="no shared memory") as failed:
        Arena.create(1 << 50)
    assert failed.value.errno == errno.ENOMEM


def test_a_refused_allocation_leaves_no_open_file(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="no shared memory"):
        Arena.create(1 << 20)
    assert len(os.listdir("/proc/self/fd")) == before


def test_it_has_no_name_to_leave_behind(arena: Arena) -> None:
    assert "deleted" in os.readlink(f"/proc/self/fd/{arena.fileno}")
