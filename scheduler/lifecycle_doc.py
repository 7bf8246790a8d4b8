"""The lifecycle as documentation, generated from the tables that the code runs by."""

from __future__ import annotations

from deepinfer.scheduler.ends import Ending
from deepinfer.scheduler.sequence import TRANSITIONS, Status


def state_diagram() -> str:
    """Return the transition table as a mermaid state diagram."""
    lines = ["```mermaid", "stateDiagram-v2", "    [*] --> WAITING"]
    for status, targets in TRANSITIONS.items():
        lines += [
            f"    {status.name} --> {target.name}"
            for target in sorted(targets, key=list(Status).index)
        ]
    lines += [f"    {status.name} --> [*]" for status in Status if status.finished]
    return "\n".join([*lines, "```"])


def endings_table() -> str:
    """Return every code path that ends a request as a markdown table."""
    lines = [
        "| path | status | finish_reason | finish_detail | when |",
        "|---|---|---|---|---|",
    ]
    named = {
        Ending.STOP_TOKEN: ":ID",
        Ending.STOP_STRING: ":TEXT",
        Ending.IMAGE_FAILED: ":INDEX: CAUSE",
    }
    for ending in Ending:
        detail = ending.rule + named.get(ending, "")
        lines.append(
            f"| {ending.name} | {ending.status.name} | {ending.status.reason} "
            f"| `{detail}` | {ending.when} |"
        )
    return "\n".join(lines)
