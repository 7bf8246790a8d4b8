"""The CPU backend: checks shapes and hands arrays to the compiled kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from deepinfer.gpu_worker.backend import (
    LANES,
    STORAGE,
    Float32,
    Int32,
    KVCache,
    KVLayer,
    RaggedBatch,
    Stored,
)
from deepinfer.gpu_worker.kernels import (
    attention,
    elementwise,
    linear,
    linear_int4,
    linear_int8,
    pack_int4,
    rope_cache,
)
from deepinfer.gpu_worker.kernels.fork_join import ThreadTeam, default_num_threads

_NO_NORMS = np.zeros((2, 1), np.float32)


@dataclass(slots=True, frozen=True)
class PackedLinear:
    """Weights as panels [ceil(N/16), K, 16] and a bias [ceil(N/16)*16], zero if none was given."""

    panels: Stored
    bias: Float32
    out_features: int
    in_features: int


@dataclass(slots=True, frozen=True)
class Int4Linear:
    """Weights as blocks uint8 [ceil(N/16), ceil(K/32), 320] (``micro_kernel_int4``) and a bias."""

    panels: Stored
    bias: Float32
    out_features: int
    in_features: int


@dataclass(slots=True, frozen=True)
class Int8Linear:
    """Weights as int8 panels [ceil(N/16), K/4, 16, 4], K padded to 8, their scales and a bias."""

    panels: Stored
    scales: Float32
    bias: Float32
    out_features: int
    in_features: int


Packed = PackedLinear | Int8Linear | Int4Linear


class CpuBackend:
    """``Backend`` over numba kernels.

    ``num_threads`` is all cores of the process when None. One thread at a time should call it; a
    second one is served correctly but without helpers.
    """

    name = "cpu"

    def __init__(self, num_threads: int | None = None) -> None:
        self._team = ThreadTeam(num_threads or default_num_threads())
        self._control = self._team.control
        self.num_threads = self._team.num_threads

    @property
    def team(self) -> ThreadTeam:
        """The threads the kernels run on, for others that compute between the model's steps."""
        return self._team

    def close(self) -> None:
        """End the helper threads; the backend then runs on the caller's thread alone."""
        self._team.close()

    def pack_linear(
        self, parts: Sequence[Stored], bias: Float32 | None = None, quantization: str = "none"
    ) -> Packed:
        """See ``Backend.pack_linear``."""
        if not parts:
            raise ValueError("pack_linear needs at least one part")
        first = parts[0]
        for part in parts:
            if part.ndim != 2 or part.shape[1] != first.shape[1] or part.dtype != first.dtype:
                raise ValueError(
                    f"weights {part.dtype}{list(part.shape)} and {first.dtype}{list(first.shape)} "
                    "cannot be stacked: they must be matrices of one dtype and input size"
                )
        if first.dtype not in STORAGE.values():
            raise ValueError(f"weights must be float32 or bfloat16 as uint16, got {first.dtype}")
        total = sum(part.shape[0] for part in parts)
        padded = np.zeros(-(-total // LANES) * LANES, np.float32)
        if bias is not None:
            if bias.shape != (total,):
                raise ValueError(f"bias must have shape [{total}], got {list(bias.shape)}")
            padded[:total] = bias
        if quantization == "int8":
            panels, scales = linear_int8.packed(list(parts))
            return Int8Linear(panels, scales, padded, total, first.shape[1])
        if quantization == "int4":
            panels = pack_int4.packed_int4(self._control, list(parts))
            return Int4Linear(panels, padded, total, first.shape[1])
        return PackedLinear(linear.packed(list(parts)), padded, total, first.shape[1])

    def embed(self, ids: Int32, table: Packed, out: Float32) -> None:
        """See ``Backend.embed``."""
        if isinstance(table, Int4Linear):
            linear_int4.gather_rows_int4(table.panels, ids, out)
            return
        if isinstance(table, Int8Linear):
            linear_int8.gather_rows(table.panels, table.scales, ids, out)
            return
        linear.gather_rows(table.panels, ids, out)

    def take_rows(self, x: Float32, index: Int32, out: Float32) -> None:
        """See ``Backend.take_rows``."""
        elementwise.take_rows(x, index, out)

    def rms_norm(self, x: Float32, weight: Float32, eps: float, out: Float32) -> None:
        """See ``Backend.rms_norm``."""
        elementwise.rms_norm(self._control, x, weight, eps, out)

    def linear(self, x: Float32, weight: Packed, out: Float32, add: bool = False) -> None:
        """See ``Backend.linear``."""
        # The kernels take sizes on trust; a wrong one would write outside the array.
        assert x.shape[1] == weight.in_features
        assert out.shape == (x.shape[0], weight.out_features)
        if isinstance(weight, Int4Linear):
            linear_int4.linear_int4(self._control, x, weight.panels, weight.bias, out, add)
            return
        if isinstance(weight, Int8Linear):
            linear_int8.linear(
                self._control, x, weight.panels, weight.scales, weight.bias, out, add
            )
            return
        linear.linear(self._control, x, weight.panels, weight.bias, out, add)

    def rope_and_cache(
        self,
        qkv: Float32,
        layer: KVLayer,
        batch: RaggedBatch,
        cos: Float32,
        sin: Float32,
        q_norm: Float32 | None,
        k_norm: Float32 | None,
        eps: float,
    ) -> None:
        """See ``Backend.rope_and_cache``."""
        normed = q_norm is not None and k_norm is not None
        rope_cache.rope_and_cache(
            self._control,
            qkv,
            layer.keys,
            layer.values,
            layer.scales,
            batch.positions,
            batch.q_start,
            batch.slots,
            batch.block_tables,
            cos,
            sin,
            np.stack((q_norm, k_norm)) if normed else _NO_NORMS,  # type: ignore[arg-type]
            normed,
            eps,
            layer.block_size,
        )

    def attention(
        self,
        qkv: Float32,
        layer: KVLayer,
        batch: RaggedBatch,
        scale: float,
        window: int,
        out: Float32,
    ) -> None:
        """See ``Backend.attention``."""
        attention.attention(
            self._control,
            qkv,
            layer.keys,
            layer.values,
            layer.scales,
            batch.positions,
            batch.q_start,
            batch.slots,
            batch.block_tables,
            scale,
            window,
            layer.block_size,
            out,
        )

    def silu_mul(self, gate_up: Float32, out: Float32) -> None:
        """See ``Backend.silu_mul``."""
        elementwise.silu_mul(self._control, gate_up, out)

    def argmax(self, logits: Float32) -> Int32:
        """See ``Backend.argmax``."""
        # numpy's own is vectorised and has exactly the promised semantics.
        winners: Int32 = logits.argmax(axis=1).astype(np.int32)
        return winners

    def log_softmax_stats(self, logits: Float32) -> tuple[Float32, Float32]:
        """See ``Backend.log_softmax_stats``."""
        largest = np.empty(logits.shape[0], np.float32)
        log_sum = np.empty(logits.shape[0], np.float32)
        elementwise.softmax_stats(self._control, logits, largest, log_sum)
        return largest, log_sum

    def warm_up(self, dtype: str) -> None:
        """Compile every kernel for ``dtype``, or load it from the disk cache."""
        storage = STORAGE[dtype]
        one = np.ones(LANES, np.float32)
        weight = self.pack_linear([np.zeros((3 * LANES, LANES), storage)])
        x = np.zeros((1, LANES), np.float32)
        qkv = np.zeros((1, 3 * LANES), np.float32)
        angles = np.zeros((1, LANES // 2), np.float32)
        zero = np.zeros(1, np.int32)
        batch = RaggedBatch(
            token_ids=zero,
            positions=zero,
            q_start=np.array([0, 1], np.int32),
            slots=zero,
            lengths=np.ones(1, np.int32),
            block_tables=np.zeros((1, 1), np.int32),
            logit_index=zero,
        )
        layer = KVCache(1, 1, LANES, 1, LANES, dtype).layers[0]
        self.embed(zero, weight, x)
        self.take_rows(x, zero, x.copy())
        self.rms_norm(x, one, 1e-5, x.copy())
        self.linear(x, weight, qkv, add=False)
        self.rope_and_cache(qkv, layer, batch, angles, angles, one, one, 1e-5)
        self.attention(qkv, layer, batch, 1.0, 0, x)
        self.silu_mul(np.zeros((1, 2 * LANES), np.float32), x)
        self.log_softmax_stats(x)
