"""Compiled kernels on disk: versions that nobody uses any more are removed."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from deepinfer.gpu_worker.kernels import settings

DAY_S = 86_400


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DEEPINFER_HOME", str(tmp_path))
    return settings.cache_folder()


def test_only_versions_unused_for_a_month_are_removed(own: Path) -> None:
    now = time.time()
    for name, days in ((own.name, 40), ("recent", 29), ("old", 31)):
        folder = own.parent / name
        folder.mkdir(parents=True)
        (folder / "kernel.nbc").write_text("compiled")
        os.utime(folder, (now - days * DAY_S,) * 2)
    settings.remove_unused()
    assert sorted(path.name for path in own.parent.iterdir()) == sorted([own.name, "recent"])
    assert own.stat().st_mtime > now - DAY_S  # it counts as used today
    assert (own / "kernel.nbc").exists()


def test_kernels_that_are_kept_elsewhere_are_no_error(own: Path) -> None:
    settings.remove_unused()
    assert not own.parent.exists()
