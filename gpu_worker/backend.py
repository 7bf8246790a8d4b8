"""What a model asks of the device it runs on.

A model is written once, against ``Backend``. Shapes use T tokens of a step, R rows, L wanted
logits, HQ query heads, HK key/value heads, D head size, P table positions, V vocabulary.
Activations are C-contiguous float32 arrays (a leading slice ``scratch[:T]`` of a bigger one is
fine); weights and the KV cache are float32, or bfloat16 held as uint16 because numpy has no
bfloat16; the cache may be int8 as well.

Every operation is batch invariant: the bits of a token's result depend on that token's own inputs
and position, never on T, on the rows beside it, on how a prompt was cut into chunks or on the
number of threads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from deepinfer.gpu_worker.memory import Arena

Float32 = npt.NDArray[np.float32]
Int32 = npt.NDArray[np.int32]
Stored = npt.NDArray[Any]
"""A float32 array, or the bits of a bfloat16 array as uint16."""

LANES = 16
"""Keys of a block lie side by side in groups of this many, ready for one vector register row."""

STORAGE: dict[str, np.dtype[Any]] = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(np.uint16),
}
"""numpy dtype in which weights of a run dtype are held."""

KV_STORAGE = STORAGE | {"int8": np.dtype(np.int8)}
"""numpy dtype in which keys and values of a cache dtype are held."""


def padded_to_lanes(count: int) -> int:
    """``count`` rounded up to a whole number of lanes."""
    return -(-count // LANES) * LANES


_COLUMNS = (
    "token_ids",
    "positions",
    "q_start",
    "slots",
    "lengths",
    "block_tables",
    "logit_index",
    "rope",
)


@dataclass(slots=True)
class RaggedBatch:
    """The rows of one step: each brings the next q >= 1 tokens of its sequence.

    - ``token_ids`` int32 [T]; ``positions`` int32 [T], counted from 0.
    - ``q_start`` int32 [R+1]: row r owns tokens ``q_start[r]:q_start[r+1]``; their positions are
      consecutive and end at ``lengths[r] - 1``.
    - ``slots`` int32 [R]: the row's line in ``block_tables``.
    - ``lengths`` int32 [R]: tokens in the cache after this step, those of this step included.
    - ``block_tables`` int32 [S, B]: KV blocks of every slot, in order of position.
    - ``logit_index`` int32 [L]: the tokens (indices into T, ascending) whose logits are wanted.
    - ``images``: pieces of images, each the index of its first token in T and float32 lines [n, K]
      that take the place of these n tokens' embeddings.
    - ``rope`` int32 [A, T]: positions by which queries and keys are turned, where they are not
      ``positions``: one axis, or those of frame, row and column as soon as there are images.

    Arrays of another layout (read-only, strided, another integer type) are copied.
    """

    token_ids: Int32
    positions: Int32
    q_start: Int32
    slots: Int32
    lengths: Int32
    block_tables: Int32
    logit_index: Int32
    images: Sequence[tuple[int, Float32]] = ()
    rope: Int32 | None = None

    def __post_init__(self) -> None:
        # Compiled kernels exist for one layout; another would be compiled in the middle of a step.
        for name in _COLUMNS:
            array = getattr(self, name)
            if array is None:
                continue
            if array.dtype != np.int32 or not (array.flags.carray and array.flags.writeable):
                setattr(self, name, np.array(array, np.int32, order="C"))


@dataclass(slots=True)
class KVLayer:
    """Keys and values of one layer.

    - ``keys`` [blocks, HK, block_size rounded up to LANES / LANES, D, LANES]: token ``o`` of a
      block is lane ``o % LANES`` of group ``o // LANES``.
    - ``values`` [blocks, HK, block_size, D rounded up to LANES].
    - ``scales`` float32 [2, blocks, HK, block_size], empty unless the cache is int8: each key and
      each value vector is its integers times its own scale, those of keys first.

    What was never written, or belonged to an earlier owner of the block, is never read into a
    result.
    """

    keys: Stored
    values: Stored
    scales: Float32
    block_size: int
    head_dim: int


class KVCache:
    """Paged keys and values of all layers; the memory is touched only as blocks are written."""

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: str,
    ) -> None:
        """``dtype`` is a key of ``KV_STORAGE``; ``block_size`` is any number of tokens >= 1."""
        storage = KV_STORAGE[dtype]
        scaled = num_blocks if dtype == "int8" else 0
        groups = padded_to_lanes(block_size) // LANES
        arena = Arena()
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.layers = [
            KVLayer(
                keys=arena.zeros((num_blocks, num_kv_heads, groups, head_dim, LANES), storage),
                values=arena.zeros(
                    (num_blocks, num_kv_heads, block_size, padded_to_lanes(head_dim)), storage
                ),
                scales=np.zeros((2, scaled, num_kv_heads, block_size), np.float32),
                block_size=block_size,
                head_dim=head_dim,
            )
            for _ in range(num_layers)
        ]

    @staticmethod
    def bytes_per_block(
        num_layers: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: str
    ) -> int:
        """Bytes that one block takes over all layers, padding included."""
        keys = padded_to_lanes(block_size) * head_dim
        values = block_size * padded_to_lanes(head_dim)
        scales = 2 * block_size * 4 if dtype == "int8" else 0
        numbers = (keys + values) * int(KV_STORAGE[dtype].itemsize)
        return num_layers * num_kv_heads * (numbers + scales)


@dataclass(slots=True, frozen=True)
class RMSNorm:
    """``x / sqrt(mean(x**2) + eps) * weight`` along the last axis, ``weight`` float32 [K]."""

    weight: Float32
    eps: float


class Linear(Protocol):
    """A weight matrix in the backend's own form, made by ``pack_linear``."""

    @property
    def out_features(self) -> int:
        """Columns of a product with it: N, or N / 2 where it is gated."""

    @property
    def in_features(self) -> int:
        """K."""

    @property
    def arithmetic(self) -> str:
        """What products with it multiply: "float32", "bfloat16" or "int8"."""

    @property
    def gated(self) -> bool:
        """Whether it is a gate and an up matrix, see ``pack_linear``."""

    @property
    def input_dtype(self) -> np.dtype[Any]:
        """In what an x that only products with it read is kept best: float32 or uint16."""


class Backend(Protocol):
    """The operations a decoder consists of. ``out`` is overwritten and never aliases an input."""

    def pack_linear(
        self,
        parts: Sequence[Stored],
        bias: Float32 | None = None,
        quantization: str = "none",
        gated: bool = False,
    ) -> Any:
        """Pack weights [N_i, K], stacked in the order given, for ``linear`` and ``embed``.

        The parts share K and dtype (float32, or uint16 for bfloat16) and may be read-only or
        memory-mapped; they are read once and not kept. ``bias`` is float32 [sum of N_i].
        ``quantization`` is "none", "int8" (a scale for each output) or "int4" (groups
        of 32 along K); with both, activations are rounded to int8. ``gated`` says that the parts
        are a gate and an up matrix of one size, of which ``linear`` is to return
        ``silu(gate) * up``. ``ValueError`` when shapes or dtypes do not fit together.
        """

    def embed(self, ids: Int32, table: Any, out: Float32) -> None:
        """Write row ``ids[t]`` of a packed [V, K] matrix to ``out[t]``, [T, K]."""

    def put_rows(self, x: Float32, at: int, out: Float32) -> None:
        """``out[at + i] = x[i]``: embeddings that come from elsewhere. Never recorded."""

    def take_rows(self, x: Stored, index: Int32, out: Stored) -> None:
        """``out[i] = x[index[i]]``: the rows that go on to the logits, of one dtype."""

    def linear(
        self, x: Stored, weight: Any, out: Stored, add: bool = False, norm: RMSNorm | None = None
    ) -> None:
        """``out = norm(x) @ W.T + bias``, or ``out += …`` with ``add``; x [T, K], out [T, N].

        Gated weights have no ``add``, and ``out`` is [T, N / 2]: ``silu(gate) * up`` of the two
        halves of the product. It may be uint16 for bfloat16, and so may what ``attention`` returns
        and an x without a norm, where ``input_dtype`` of the weights that read it says so.
        """

    def rope_and_cache(
        self,
        qkv: Float32,
        layer: KVLayer,
        batch: RaggedBatch,
        cos: Float32,
        sin: Float32,
        lines: Int32,
        q_norm: Float32 | None,
        k_norm: Float32 | None,
        eps: float,
    ) -> None:
        """Normalise and rotate queries and keys, and store keys and values in the cache.

        ``qkv`` [T, (HQ + 2 HK) * D] holds the heads of q, then k, then v. Its q part is changed in
        place; its k and v parts may or may not be. ``q_norm`` and ``k_norm`` [D] are the weights of
        an RMSNorm per head (Qwen3), both or none. The rotation is the rotate-half form: dimension i
        is paired with i + D/2 and token t turned by line ``lines[t]`` of ``cos``, ``sin`` [P, D/2].
        """

    def attention(
        self,
        qkv: Float32,
        layer: KVLayer,
        batch: RaggedBatch,
        scale: float,
        window: int,
        out: Stored,
    ) -> None:
        """Causal grouped-query attention of the q part of ``qkv`` over the cache.

        Run after ``rope_and_cache`` of the same step. A token at position p sees positions
        ``max(0, p - window + 1)`` to p, or from 0 when ``window`` is 0. ``out`` [T, HQ * D].
        """

    def log_softmax_stats(self, logits: Float32) -> tuple[Float32, Float32]:
        """Largest value, and log of the sum of exponentials, of each row of [L, V]."""

    def record(self, operations: Callable[[], None]) -> Callable[[], None]:
        """Return a function that does what ``operations`` does, perhaps faster.

        ``operations`` does nothing but call ``embed`` to ``attention`` of this backend, each time
        with the same arrays, which live as long as the result and differ only in what they contain.
        So a backend may call it once and replay what it was asked for; one that gains nothing by it
        returns ``operations`` itself.
        """
