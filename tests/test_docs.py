"""The documents say what the code does."""

from __future__ import annotations

import importlib.util
import re
import tomllib
from pathlib import Path

import pytest

from deepinfer.scheduler.ends import Ending

ROOT = Path(__file__).parent.parent


def generator():
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["lifecycle.md", "metrics.md"])
def test_the_generated_parts_of_a_page_match_the_code(name: str) -> None:
    text = (ROOT / "docs" / name).read_text()
    assert generator().page(name, text) == text, "run: python docs/generate.py"


@pytest.mark.parametrize("ending", Ending, ids=lambda ending: ending.name)
def test_every_ending_of_the_table_is_a_path_in_the_code(ending: Ending) -> None:
    sources = "".join(path.read_text() for path in (ROOT / "scheduler").glob("*.py"))
    uses = len(re.findall(rf"Ending\.{ending.name}\b", sources))
    assert uses >= 1, "an ending nothing can reach"


def test_every_link_between_the_documents_leads_somewhere() -> None:
    pages = [ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").glob("*.md")]
    for page in pages:
        for target in re.findall(r"\]\((?!http)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_every_package_folder_is_in_the_package_list() -> None:
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    listed = {setuptools["package-dir"][name] for name in setuptools["packages"]}
    found = {
        str(path.parent.relative_to(ROOT))
        for path in ROOT.glob("*/**/__init__.py")
        if path.relative_to(ROOT).parts[0] not in ("tests", "build", ".venv")
    }
    assert found == listed
