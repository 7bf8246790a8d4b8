"""Pictures without pixels, for tests of what is around an image worker.

A file says what it becomes: ``picture(7, lines=3)`` is the bytes ``picture 7 3``, and ``encoded``
what an image worker answers: three placeholders with a frame of zeros around them, in two runs
where there are enough. ``line_value(data, i)`` is the content of its ``i``-th line of embeddings.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from deepinfer.wire.arena import ALIGNMENT, HEADER_BYTES, Region
from deepinfer.wire.columns import pack_int32, unpack_int32
from deepinfer.wire.image_jobs import EncodedImage
from deepinfer.wire.messages import ImageRef
from deepinfer.wire.steps import ImageSpan

Float32 = npt.NDArray[np.float32]

PLACEHOLDER = 1
FRAME = 0
MAX_LINES = 6


def picture(number: int, lines: int = 3) -> bytes:
    """Return a file."""
    return b"picture %d %d" % (number, lines)


def content_of(ref: ImageRef) -> bytes:
    """Return a file, fetched where it is given by its URL, ``http://host/picture%207%203``."""
    return ref.data or ref.url.rpartition("/")[2].replace("%20", " ").encode()


def url_of(data: bytes) -> str:
    """Return a URL that a file can be fetched from."""
    return "http://pictures/" + data.decode().replace(" ", "%20")


def num_lines(data: bytes) -> int:
    """Return how many lines of embeddings a file has."""
    return int(data.split()[2])


def encoded(
    data: bytes, bytes_per_line: int = ALIGNMENT, placeholder: int = PLACEHOLDER
) -> EncodedImage:
    """Return what an image worker answers; ``ValueError`` when the file is none."""
    if not data.startswith(b"picture "):
        raise ValueError("no picture")
    lines = num_lines(data)
    counts = [lines] if lines < 4 else [2, lines - 2]
    tokens, runs = [FRAME], []
    for count in counts:
        runs += [len(tokens), count]
        tokens += [placeholder] * count + [FRAME]
    return EncodedImage(
        digest=blake2b(data, digest_size=16).digest(),
        tokens=pack_int32(tokens),
        runs=pack_int32(runs),
        grid=(),
        num_bytes=HEADER_BYTES + lines * bytes_per_line,
    )


def line_value(data: bytes, line: int) -> int:
    """Return what a line of embeddings holds: no token, and unlike any other line's."""
    digest = blake2b(b"%s line %d" % (data, line), digest_size=6).digest()
    return 1 << 50 | int.from_bytes(digest, "little")


def line_of(data: bytes, line: int, hidden_size: int) -> Float32:
    """Return a line of embeddings, like no other file's or line's."""
    digest = hashlib.shake_128(b"%s line %d" % (data, line)).digest(2 * hidden_size)
    return np.frombuffer(digest, "<u2").astype(np.float32)


def expanded(prompt: Sequence[int], pictures: Sequence[bytes]) -> tuple[list[int], list[int]]:
    """Return a prompt's tokens with those of its pictures, and what is computed for each.

    That is the token itself, or the line of embeddings that takes its place.
    """
    tokens: list[int] = []
    content: list[int] = []
    left = list(pictures)
    for token in prompt:
        if token != PLACEHOLDER or not left:
            tokens.append(token)
            content.append(token)
            continue
        data = left.pop(0)
        if not data.startswith(b"picture "):
            return list(prompt), list(prompt)  # it never comes so far
        image = encoded(data)
        own = unpack_int32(image.tokens).tolist()
        tokens += own
        values = iter(range(num_lines(data)))
        content += [line_value(data, next(values)) if t == PLACEHOLDER else t for t in own]
    return tokens, content


class CellArena:
    """An arena of cells of ``ALIGNMENT`` bytes: a region's first holds its generation."""

    def __init__(self, num_cells: int) -> None:
        self.cells = np.zeros(num_cells, np.int64)

    def begin(self, region: Region) -> None:
        """Write nonsense all over a region, as a worker does that has just been given it."""
        self._of(region)[:] = -region.generation

    def write(self, region: Region, data: bytes) -> None:
        """Write a picture's lines."""
        cells = self._of(region)
        lines = num_lines(data)
        assert lines < len(cells)
        cells[1 : 1 + lines] = [line_value(data, line) for line in range(lines)]
        cells[0] = region.generation

    def holds(self, region: Region) -> bool:
        """Whether a region still holds what was written there."""
        return int(self._of(region)[0]) == region.generation

    def read(self, span: ImageSpan) -> dict[int, int]:
        """Return what is computed at the positions of an image."""
        assert self.holds(span.region), f"{span.region} holds another generation"
        runs = unpack_int32(span.runs).reshape(-1, 2).tolist()
        places = [span.position + at for first, n in runs for at in range(first, first + n)]
        values = self._of(span.region)[1 : 1 + len(places)].tolist()
        return dict(zip(places, values, strict=True))

    def _of(self, region: Region) -> np.ndarray:
        first = region.offset // ALIGNMENT
        return self.cells[first : first + region.length // ALIGNMENT]
