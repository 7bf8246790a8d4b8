"""Log probabilities in the form in which they travel.

They are raw: ``log_softmax`` of the model's own logits, before bans, penalties and temperature, so
that they mean the same whatever a request's parameters are. All are at most 0.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from deepinfer.gpu_worker.kernels import sampling
from deepinfer.wire.messages import PromptLogprobs, TokenLogprobs

Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]
Ids = npt.NDArray[np.integer]


def token_logprobs(control: int, logits: Float32, chosen: Ids, counts: Ids) -> list[TokenLogprobs]:
    """Return the log probabilities of one chosen token per row of raw logits [N, V].

    ``control``: of the ``ThreadTeam`` that computes. The rows' largest logits must be finite.
    ``counts`` [N]: how many most likely tokens to list beside it, equal ones by id. The chosen
    token is among them only if it belongs there.
    """
    if not len(chosen):
        return []
    peaks = logits.max(axis=1)
    own, smaller, top_ids, top = _log_softmax(control, logits, peaks, chosen, int(counts.max()))
    return [
        TokenLogprobs(
            float(own[n]), float(smaller[n]), top_ids[n, :count].tolist(), top[n, :count].tolist()
        )
        for n, count in enumerate(counts.tolist())
    ]


class PromptLogprobsOfChunk:
    """Collects the prompt log probabilities that one chunk of a prompt brings.

    ``control``: of the ``ThreadTeam`` that computes; ``start``: the first prompt position that it
    brings; ``count``: how many most likely tokens to list after the prompt's own.
    """

    def __init__(self, control: int, start: int, count: int) -> None:
        self._control = control
        self._start = start
        self._count = count
        self._token_ids: list[list[int]] = []
        self._logprobs: list[list[float]] = []

    def add(self, logits: Float32, followers: Ids) -> bool:
        """Take the logits [N, V] of the next N positions and the prompt tokens that follow them.

        False when logits are not finite.
        """
        peaks = logits.max(axis=1)
        if not np.isfinite(peaks).all():
            return False
        count = min(self._count, logits.shape[1])
        own, _, top_ids, top = _log_softmax(self._control, logits, peaks, followers, count)
        self._token_ids += np.column_stack([followers, top_ids]).tolist()
        self._logprobs += np.column_stack([own, top]).tolist()
        return True

    def message(self) -> PromptLogprobs:
        """Return what was collected."""
        return PromptLogprobs(self._start, self._token_ids, self._logprobs)


def _log_softmax(
    control: int, logits: Float32, peaks: Float32, chosen: Ids, count: int
) -> tuple[Float64, Float64, npt.NDArray[np.int32], Float64]:
    rows = len(chosen)
    own, smaller = np.empty(rows), np.empty(rows)
    top_ids, top = np.empty((rows, count), np.int32), np.empty((rows, count))
    sampling.logprobs(control, logits, peaks, chosen.astype(np.int64), own, smaller, top_ids, top)
    return own, smaller, top_ids, top
