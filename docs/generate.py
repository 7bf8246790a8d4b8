"""Renews the parts of docs/lifecycle.md that follow from the code.

    python docs/generate.py

``tests/test_docs.py`` fails when they differ.
"""

from __future__ import annotations

import re
from pathlib import Path

from deepinfer.scheduler.lifecycle_doc import endings_table, state_diagram

PAGE = Path(__file__).parent / "lifecycle.md"


def page(text: str) -> str:
    """Return the page with its generated parts renewed."""
    for name, part in (("diagram", state_diagram()), ("ends", endings_table())):
        pattern = rf"(<!-- {name}: generated -->\n).*?(\n<!-- end -->)"
        text, found = re.subn(pattern, lambda m, p=part: m[1] + p + m[2], text, flags=re.DOTALL)
        assert found == 1, f"{PAGE.name} needs one place for {name}"
    return text


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
