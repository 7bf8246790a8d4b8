"""What vision encoders are made of, in float32 on the CPU.

Pictures are rows of patches. Everything but attention looks at one row at a time and attention at
one head of one segment, so the work is cut into pieces that fit a core's cache and given to a few
threads. Each runs its own matrix products: numpy lets go of the interpreter's lock there, and the
elementwise work, a third of the time, runs beside as well. A BLAS with threads of its own would
leave that part to one core.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float32]
Piece = TypeVar("Piece")

_ROWS = 256
_SCORES = 1 << 19
"""Attention scores in one piece: two megabytes."""


class Team:
    """Threads that share the pieces of a piece of work; with one, the caller does it all."""

    def __init__(self, num_threads: int) -> None:
        self.num_threads = num_threads
        self._pool = ThreadPoolExecutor(num_threads, "encoder") if num_threads > 1 else None

    def run(self, work: Callable[[Piece], None], pieces: Iterable[Piece]) -> None:
        """Call ``work`` with every piece, in any order; return when all are done."""
        done: Iterable[None] = (
            map(work, pieces) if self._pool is None else self._pool.map(work, pieces)
        )
        for _ in done:
            pass

    def rows(self, work: Callable[[slice], None], count: int) -> None:
        """Call ``work`` with slices that together are all of ``count`` rows."""
        block = min(_ROWS, -(-count // self.num_threads))
        self.run(work, (slice(row, min(row + block, count)) for row in range(0, count, block)))


class Linear(NamedTuple):
    """``weight`` [out, in] and ``bias`` [out], as torch stores them."""

    weight: Array
    bias: Array | None = None

    def __call__(self, values: Array) -> Array:
        """Apply it to rows, [count, in]."""
        out: Array = values @ self.weight.T
        if self.bias is not None:
            out += self.bias
        return out


class LayerNorm(NamedTuple):
    """Over the last axis, with a weight and a bias."""

    weight: Array
    bias: Array
    epsilon: float

    def __call__(self, values: Array) -> Array:
        """Apply it to rows, [count, in]."""
        out: Array = values - values.mean(-1, keepdims=True)
        variance = np.einsum("ij,ij->i", out, out)[:, None] / np.float32(out.shape[-1])
        out /= np.sqrt(variance + np.float32(self.epsilon))
        out *= self.weight
        out += self.bias
        return out


class RMSNorm(NamedTuple):
    """Over the last axis, with a weight."""

    weight: Array
    epsilon: float

    def __call__(self, values: Array) -> Array:
        """Apply it to rows, [count, in]."""
        squares = np.einsum("ij,ij->i", values, values)[:, None] / np.float32(values.shape[-1])
        out: Array = values / np.sqrt(squares + np.float32(self.epsilon))
        out *= self.weight
        return out


def gelu_tanh(values: Array) -> Array:
    """GELU in its tanh form, in place (torch's ``gelu_pytorch_tanh``)."""
    inner = values * values
    inner *= np.float32(0.044715)
    inner += np.float32(1)
    inner *= values
    inner *= np.float32(np.sqrt(2 / np.pi))
    np.tanh(inner, out=inner)
    inner += np.float32(1)
    inner *= np.float32(0.5)
    values *= inner
    return values


def gelu(values: Array) -> Array:
    """GELU with the error function, in place."""
    inner = erf(values * np.float32(np.sqrt(0.5)))
    inner += np.float32(1)
    inner *= np.float32(0.5)
    values *= inner
    return values


# A rational function that is the error function to float32's precision within ±4, beyond which
# that is ±1; the coefficients are those of Eigen's `erf` for floats.
_ERF_TOP = (
    -2.72614225801306e-10,
    2.77068142495902e-08,
    -2.10102402082508e-06,
    -5.69250639462346e-05,
    -7.34990630326855e-04,
    -2.95459980854025e-03,
    -1.60960333262415e-02,
)
_ERF_BOTTOM = (
    -1.45660718464996e-05,
    -2.13374055278905e-04,
    -1.68282697438203e-03,
    -7.37332916720468e-03,
    -1.42647390514189e-02,
)


def erf(values: Array) -> Array:
    """The error function."""
    clipped = np.clip(values, np.float32(-4), np.float32(4))
    squared = clipped * clipped
    out: Array = clipped * _polynomial(squared, _ERF_TOP)
    out /= _polynomial(squared, _ERF_BOTTOM)
    return out


def _polynomial(values: Array, coefficients: tuple[float, ...]) -> Array:
    out = np.full_like(values, coefficients[0])
    for coefficient in coefficients[1:]:
        out *= values
        out += np.float32(coefficient)
    return out


def silu(values: Array) -> Array:
    """``x * sigmoid(x)``, in place; it overflows to the right end, 0."""
    with np.errstate(over="ignore"):
        inner = np.exp(-values)
    inner += np.float32(1)
    values /= inner
    return values


def attention(
    team: Team,
    queries: Array,
    keys: Array,
    values: Array,
    num_heads: int,
    lengths: list[int],
) -> Array:
    """Attention without a mask within segments of rows that follow one another.

    Arrays are [rows, heads * size of a head]; ``lengths`` are the rows of each segment. Returns one
    of that shape.
    """
    head_size = queries.shape[1] // num_heads
    out = np.empty((queries.shape[0], num_heads * head_size), np.float32)
    scale = np.float32(head_size**-0.5)

    def of_piece(piece: tuple[slice, int, int, slice]) -> None:
        rows, count, head, block = piece
        columns = slice(head * head_size, (head + 1) * head_size)

        def segments(array: Array) -> Array:
            return array[rows, columns].reshape(count, -1, head_size)

        scores: Any = segments(queries)[:, block] * scale
        scores = scores @ segments(keys).transpose(0, 2, 1)
        scores -= scores.max(-1, keepdims=True)
        np.exp(scores, out=scores)
        # Divided after the product, which has fewer numbers than the scores.
        total = scores.sum(-1, keepdims=True)
        result = scores @ segments(values)
        result /= total
        segments(out)[:, block] = result

    team.run(of_piece, _attention_pieces(num_heads, lengths))
    return out


def _attention_pieces(
    num_heads: int, lengths: list[int]
) -> Iterable[tuple[slice, int, int, slice]]:
    """Rows of some segments of one length, how many these are, a head, rows within a segment."""
    start = 0
    for length, equal in groupby(lengths):
        left = sum(1 for _ in equal)
        at_once = max(1, _SCORES // (length * length))
        block = max(1, min(length, _SCORES // length))
        while left:
            count = min(at_once, left)
            rows = slice(start, start + count * length)
            for head in range(num_heads):
                for begin in range(0, length, block):
                    yield rows, count, head, slice(begin, min(begin + block, length))
            start += count * length
            left -= count
