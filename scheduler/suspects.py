"""Finds the request that kills its workers.

A worker that dies may have died of a row it was computing, or of something else. Each death is a
*strike* against every row of the step it was in, unless that row got further than at any death
before: then it was computed well meanwhile and starts from one. A row with two strikes is
*suspected*. Suspects are let in one at a time, until their first token clears them, so the next
death names its cause: the suspect among the rows of the step.

So a request that nobody keeps company kills two workers, one in company three; then it ends alone.
"""

from __future__ import annotations

from collections.abc import Callable

from deepinfer.scheduler.sequence import Sequence

STRIKES = 2


def is_suspected(sequence: Sequence) -> bool:
    """Whether the sequence must not be computed together with another suspect."""
    return sequence.strikes >= STRIKES


def find_culprit(computing: list[Sequence], progress: Callable[[Sequence], int]) -> Sequence | None:
    """Note a worker's death against the rows of the step it was in.

    ``progress`` counts the positions of a sequence up to what that step computes. Returns the
    sequence that must be the cause, if one is.
    """
    accused = [sequence for sequence in computing if is_suspected(sequence)]
    for sequence in computing:
        position = progress(sequence)
        advanced = position > sequence.struck_at
        sequence.strikes = 1 if advanced else sequence.strikes + 1
        # The furthest ever: a recompute in smaller chunks may die at an earlier position.
        sequence.struck_at = max(position, sequence.struck_at)
    # Suspects come one at a time; one that had no company at all needs no further trial.
    if not accused and len(computing) == 1:
        accused = [sequence for sequence in computing if is_suspected(sequence)]
    guilty = [sequence for sequence in accused if is_suspected(sequence)]
    return guilty[0] if len(guilty) == 1 else None
