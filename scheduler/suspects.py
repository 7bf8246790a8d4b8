"""Finds the request that kills its workers.

A worker that dies may have died of a row it was computing, or of something else. Each death is a
*strike* against every row of the step it was in, unless that row got further than at any death
before: then it was computed well meanwhile and starts from one. A row with two strikes is
*suspected*. Suspects are let in one at a time, until their first token clears them, so a death
during such a *trial* points at one row. It takes three of them: workers that are killed from
outside die during somebody's trial now and then, but hardly three times in a row.

So a request in company kills five workers before it ends alone; when the engine has no other, two
deaths are enough.
"""

from __future__ import annotations

from collections.abc import Callable

from deepinfer.scheduler.sequence import Sequence

STRIKES = 2
TRIALS = 3


def is_suspected(sequence: Sequence) -> bool:
    """Whether the sequence must not be computed together with another suspect."""
    return sequence.strikes >= STRIKES


def find_culprit(
    computing: list[Sequence], progress: Callable[[Sequence], int], alone: bool
) -> Sequence | None:
    """Note a worker's death against the rows of the step it was in.

    ``progress`` counts the positions of a sequence up to what that step computes; ``alone`` says
    that the engine has no other request. Returns the sequence that must be the cause, if one is.
    """
    accused = [sequence for sequence in computing if is_suspected(sequence)]
    for sequence in computing:
        position = progress(sequence)
        advanced = position > sequence.struck_at
        sequence.strikes = 1 if advanced else sequence.strikes + 1
        # The furthest ever: a recompute in smaller chunks may die at an earlier position.
        sequence.struck_at = max(position, sequence.struck_at)
    needed = STRIKES if alone else STRIKES + TRIALS
    guilty = [seq for seq in (computing if alone else accused) if seq.strikes >= needed]
    return guilty[0] if guilty else None
