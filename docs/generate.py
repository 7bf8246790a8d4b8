"""Renews the parts of docs/*.md that follow from the code.

    python docs/generate.py

``tests/test_docs.py`` fails when they differ.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from deepinfer.frontend.gateway.metrics import DEFINITIONS, Definition
from deepinfer.scheduler.lifecycle_doc import endings_table, state_diagram

DOCS = Path(__file__).parent


def metrics_table(definitions: Iterable[Definition]) -> str:
    """Return the metrics as a table: name, type, labels, meaning."""
    lines = ["| name | type | labels | meaning |", "|---|---|---|---|"]
    for each in definitions:
        meaning = each.help
        if each.buckets:
            meaning += f" Buckets: {', '.join(f'{bound:g}' for bound in each.buckets)} s."
        lines.append(f"| `{each.name}` | {each.kind} | {', '.join(each.labels)} | {meaning} |")
    return "\n".join(lines)


def parts() -> dict[str, dict[str, str]]:
    """Return the generated parts by page and name."""
    engine = [each for each in DEFINITIONS if each.name.startswith("deepinfer_engine_")]
    gateway = [each for each in DEFINITIONS if each not in engine]
    return {
        "lifecycle.md": {"diagram": state_diagram(), "ends": endings_table()},
        "metrics.md": {"gateway": metrics_table(gateway), "engine": metrics_table(engine)},
    }


def page(name: str, text: str) -> str:
    """Return a page with its generated parts renewed."""
    for part, content in parts()[name].items():
        pattern = rf"(<!-- {part}: generated -->\n).*?(\n<!-- end -->)"
        text, found = re.subn(
            pattern, lambda m, c=content: m[1] + c + m[2], text, flags=re.DOTALL
        )
        assert found == 1, f"{name} needs one place for {part}"
    return text


if __name__ == "__main__":
    for name in parts():
        path = DOCS / name
        path.write_text(page(name, path.read_text()))
