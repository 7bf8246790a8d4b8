"""Fixtures for all tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from hypothesis import HealthCheck, settings

from deepinfer.frontend.pull import pull

# Worker processes started by tests find ``support.scripted_worker`` there.
os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
)

# The same cases in every run, however slow the machine: whoever changes something is told of what
# that broke. ``pytest --hypothesis-profile=explore`` looks for cases that nobody has seen yet.
_ON_ANY_MACHINE = settings(
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.register_profile("fixed", _ON_ANY_MACHINE, derandomize=True)
settings.register_profile("explore", _ON_ANY_MACHINE)
settings.load_profile("fixed")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The slow ones first: at the end one of them would run long after the other worker is done."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


@pytest.fixture(scope="module", autouse=True)
def no_process_left() -> Iterator[None]:
    """A file whose tests leave a process fails itself, not the file whose tests count them."""
    before = set(psutil.Process().children(recursive=True))
    yield
    left = set(psutil.Process().children(recursive=True)) - before
    assert not left, [process.cmdline() for process in left]


@pytest.fixture(scope="session")
def smollm2_folder() -> Path:
    """Folder of the real SmolLM2-135M-Instruct, fetched into the model cache on first use."""
    return pull("smollm2-135m").resolve()
