"""Fixtures for all tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from deepinfer.frontend.pull import pull

# Worker processes started by tests find ``support.scripted_worker`` there.
os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
)


@pytest.fixture(scope="session")
def smollm2_folder() -> Path:
    """Folder of the real SmolLM2-135M-Instruct, fetched into the model cache on first use."""
    return pull("smollm2-135m").resolve()
