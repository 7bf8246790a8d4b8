"""The images of a sequence: which of its tokens they are, their embeddings and their positions.

The embeddings stay in the arena and are read by the step that computes their tokens, so a chunk may
begin or end within an image, and a sequence that is computed again reads them again.

Positions in three axes follow Qwen2-VL (arXiv:2409.12191, section 2.1): a text token has its number
in each; an image's tokens have those of frame, row and column, counted from where the image begins;
and the text after it goes on one past the largest of them. So a sequence is shorter in positions
than in tokens, and its last ones are a constant number apart.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from deepinfer.gpu_worker.backend import Float32, Int32
from deepinfer.wire.arena import Arena, Region, StaleRegion
from deepinfer.wire.columns import unpack_int32
from deepinfer.wire.steps import ImageSpan


class PlanError(Exception):
    """A step plan that cannot be executed; fatal for the worker."""


@dataclass(slots=True, frozen=True)
class _Run:
    """Tokens ``first`` to ``end`` of a sequence: their embeddings begin at ``line`` of a region."""

    first: int
    end: int
    region: Region
    line: int


class ImageReader:
    """Checks images of sequences and reads their embeddings, float32 lines of ``hidden_size``.

    With ``rope_axes`` three, images have a grid: their tokens' positions need it.
    """

    def __init__(self, arena: Arena, hidden_size: int, rope_axes: int) -> None:
        self.rope_axes = rope_axes
        self._arena = arena
        self._hidden_size = hidden_size

    def admit(self, spans: Sequence[ImageSpan], num_tokens: int) -> RowImages:
        """Take the images of a sequence of ``num_tokens``; ``PlanError`` when one cannot be."""
        runs: list[_Run] = []
        grids: list[tuple[int, ...]] = []
        for index, span in enumerate(spans):
            try:
                runs += self._runs(span, runs[-1].end if runs else 0, num_tokens)
            except (ValueError, StaleRegion) as error:
                raise PlanError(f"image {index}: {error}") from error
            grids.append(span.grid)
        starts = [run.first for run in runs]
        rope = _positions(runs, grids) if self.rope_axes > 1 else np.zeros((0, 1), np.int32)
        return RowImages(self, runs, starts, rope)

    def lines(self, region: Region) -> Float32:
        """Return the embeddings in a region [lines, K], a view; ``StaleRegion`` if it has none."""
        return self._arena.read(region).reshape(-1, self._hidden_size)

    def _runs(self, span: ImageSpan, least: int, num_tokens: int) -> list[_Run]:
        """The runs of an image; ``ValueError`` unless they are in order within the tokens."""
        column = unpack_int32(span.runs)
        if not len(column) or len(column) % 2:
            raise ValueError(f"runs of {len(column)} numbers are no pairs")
        runs: list[_Run] = []
        line, least = 0, max(least, span.position)
        for offset, count in column.reshape(-1, 2).tolist():
            first = span.position + offset
            if offset < 0 or count < 1 or first < least or first + count > num_tokens:
                raise ValueError(
                    f"a run of {count} tokens at {first}, where it may lie in {least} to "
                    f"{num_tokens}"
                )
            least = first + count
            runs.append(_Run(first, least, span.region, line))
            line += count
        if self.rope_axes > 1:
            if len(runs) != 1 or len(span.grid) != self.rope_axes or prod(span.grid) != line:
                raise ValueError(f"{len(runs)} runs of {line} tokens do not fill grid {span.grid}")
            if min(span.grid) < 1:
                raise ValueError(f"grid {span.grid}")
        elif span.grid:
            raise ValueError(f"grid {span.grid}, but the model's positions are single numbers")
        found = self._arena.read(span.region).size
        if found != line * self._hidden_size:
            raise ValueError(f"{line} tokens, but {found} numbers in {span.region}")
        return runs


@dataclass(slots=True, frozen=True)
class RowImages:
    """The images of one slot's sequence.

    - ``starts``: where each run begins.
    - ``rope`` int32 [n, A]: positions of the tokens up to the last image's end, in each axis.
    """

    reader: ImageReader
    runs: list[_Run]
    starts: list[int]
    rope: Int32

    def pieces(self, position: int, count: int, at: int) -> list[tuple[int, Float32]]:
        """Embeddings of the ``count`` tokens from ``position`` on, as ``RaggedBatch.images``.

        ``at`` is the index in the batch of the token at ``position``. ``PlanError`` when a region
        was given to another image.
        """
        pieces = []
        for run in self.runs[max(0, bisect_right(self.starts, position) - 1) :]:
            first, end = max(run.first, position), min(run.end, position + count)
            if run.first >= position + count:
                break
            if first < end:
                try:
                    lines = self.reader.lines(run.region)
                except StaleRegion as error:
                    raise PlanError(f"an image's embeddings are gone: {error}") from error
                line = run.line - run.first
                pieces.append((at + first - position, lines[line + first : line + end]))
        return pieces

    def turn(self, positions: Int32) -> None:
        """Replace the consecutive ``positions`` [A, q] of tokens in the sequence by rotary ones."""
        first, end = int(positions[0, 0]), int(positions[0, -1]) + 1
        known = self.rope[first:end, : len(positions)].T
        positions += self.rope[-1].max() + 1 - len(self.rope)
        positions[:, : known.shape[1]] = known


def _positions(runs: Sequence[_Run], grids: Sequence[tuple[int, ...]]) -> Int32:
    """Positions [n, A] of all tokens up to the end of the last image, each of which is one run."""
    positions = np.empty((runs[-1].end, len(grids[0])), np.int32)
    token = position = 0
    for run, grid in zip(runs, grids, strict=True):
        text = run.first - token
        positions[token : run.first] = np.arange(position, position + text)[:, None]
        position += text
        positions[run.first : run.end] = position + np.indices(grid).reshape(len(grid), -1).T
        token, position = run.end, position + max(grid)
    return positions
