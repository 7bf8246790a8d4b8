"""The CPU backend: checks shapes and hands arrays to the compiled kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from deepinfer.gpu_worker.backend import (
    LANES,
    STORAGE,
    Float32,
    Int32,
    KVCache,
    KVLayer,
    RaggedBatch,
    RMSNorm,
    Stored,
)
from deepinfer.gpu_worker.kernels import (
    attention,
    elementwise,
    linear,
    linear_int4,
    linear_int8,
    linear_tiles,
    pack_int4,
    rope_cache,
)
from deepinfer.gpu_worker.kernels.fork_join import ThreadTeam, default_num_threads
from deepinfer.gpu_worker.kernels.micro_kernel import HAS_BF16_DOT
from deepinfer.gpu_worker.kernels.recording import Recording
from deepinfer.gpu_worker.memory import Arena

_NO_NORM = RMSNorm(np.zeros(0, np.float32), 0.0)
_NO_NORMS = np.zeros((2, 1), np.float32)


@dataclass(slots=True, frozen=True)
class PackedLinear:
    """Weights as panels (see ``kernels.linear``) and a bias for each column, zero if not given."""

    panels: Stored
    bias: Float32
    out_features: int
    in_features: int
    gated: bool

    @property
    def arithmetic(self) -> str:
        """See ``backend.Linear``."""
        return "float32" if self.panels.dtype == np.float32 else "bfloat16"

    @property
    def input_dtype(self) -> np.dtype[Any]:
        """See ``backend.Linear``; another x would have to be copied to complete its last tile."""
        pairs = HAS_BF16_DOT and self.in_features % linear_tiles.TERMS == 0
        return self.panels.dtype if pairs else STORAGE["float32"]


@dataclass(slots=True, frozen=True)
class Int4Linear:
    """Weights as uint8 blocks [P, ceil(K/32), …] (``micro_kernel_int4``) and a bias."""

    arithmetic: ClassVar = "int8"
    input_dtype: ClassVar = STORAGE["float32"]
    panels: Stored
    bias: Float32
    out_features: int
    in_features: int
    gated: bool


@dataclass(slots=True, frozen=True)
class Int8Linear:
    """Weights as uint8 panels [P, K/4, COLUMNS, 4] (``linear_int8``), their scales and a bias."""

    arithmetic: ClassVar = "int8"
    input_dtype: ClassVar = STORAGE["float32"]
    panels: Stored
    scales: Float32
    bias: Float32
    out_features: int
    in_features: int
    gated: bool


Packed = PackedLinear | Int8Linear | Int4Linear


class CpuBackend:
    """``Backend`` over numba kernels.

    ``num_threads`` is all cores of the process when None. One thread at a time should call it; a
    second one is served correctly but without helpers, unless the first is recording.
    """

    name = "cpu"

    def __init__(self, num_threads: int | None = None) -> None:
        self._team = ThreadTeam(num_threads or default_num_threads())
        self._control = self._team.control
        self.num_threads = self._team.num_threads
        self._arena = Arena()
        self._recording: Recording | None = None

    @property
    def team(self) -> ThreadTeam:
        """The threads the kernels run on, for others that compute between the model's steps."""
        return self._team

    def close(self) -> None:
        """End the helper threads; the backend then runs on the caller's thread alone."""
        self._team.close()

    def record(self, operations: Callable[[], None]) -> Callable[[], None]:
        """See ``Backend.record``; ``operations`` is called once, and nothing is computed yet."""
        recording = self._recording = Recording()
        try:
            operations()
        finally:
            self._recording = None
        return recording

    def _launch(self, kernel: Any, *arguments: Any) -> None:
        """Call a kernel, or take it down while recording."""
        if self._recording is None:
            kernel(*arguments)
        else:
            self._recording.add(kernel, arguments)

    def pack_linear(
        self,
        parts: Sequence[Stored],
        bias: Float32 | None = None,
        quantization: str = "none",
        gated: bool = False,
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
        if not first.shape[1]:
            raise ValueError("weights need at least one input")
        if first.dtype not in STORAGE.values():
            raise ValueError(f"weights must be float32 or bfloat16 as uint16, got {first.dtype}")
        sizes = [part.shape[0] for part in parts]
        if gated and (len(sizes) != 2 or sizes[0] != sizes[1]):
            raise ValueError(f"gated weights are two matrices of one size, got {sizes} rows")
        total = sum(sizes)
        columns = linear.columns_of(sizes, gated)
        # Whole panels of any format: of 16 columns, or of 32.
        padded = np.zeros(-(-(columns[-1][-1] + 1) // (2 * LANES)) * 2 * LANES, np.float32)
        if bias is not None:
            if bias.shape != (total,):
                raise ValueError(f"bias must have shape [{total}], got {list(bias.shape)}")
            padded[np.concatenate(columns)] = bias
        features = sizes[0] if gated else total, first.shape[1]
        if quantization == "int8":
            panels, scales = linear_int8.packed(list(parts), columns, self._arena)
            return Int8Linear(panels, scales, padded, *features, gated)
        if quantization == "int4":
            panels = pack_int4.packed_int4(self._control, list(parts), columns, self._arena)
            return Int4Linear(panels, padded, *features, gated)
        panels = linear.packed(self._control, list(parts), columns, self._arena)
        return PackedLinear(panels, padded, *features, gated)

    def embed(self, ids: Int32, table: Packed, out: Float32) -> None:
        """See ``Backend.embed``."""
        if isinstance(table, Int4Linear):
            self._launch(linear_int4.gather_rows_int4, table.panels, ids, out)
        elif isinstance(table, Int8Linear):
            self._launch(linear_int8.gather_rows, table.panels, table.scales, ids, out)
        else:
            self._launch(linear.gather_rows, table.panels, ids, out)

    def put_rows(self, x: Float32, at: int, out: Float32) -> None:
        """See ``Backend.put_rows``; no decode step has any, so it is not for recording."""
        assert self._recording is None
        out[at : at + len(x)] = x

    def take_rows(self, x: Stored, index: Int32, out: Stored) -> None:
        """See ``Backend.take_rows``."""
        self._launch(elementwise.take_rows, x, index, out)

    def linear(
        self,
        x: Stored,
        weight: Packed,
        out: Stored,
        add: bool = False,
        norm: RMSNorm | None = None,
    ) -> None:
        """See ``Backend.linear``."""
        # The kernels take sizes on trust; a wrong one would write outside the array.
        assert x.shape[1] == weight.in_features
        assert out.shape == (x.shape[0], weight.out_features)
        assert x.dtype == np.float32 or (x.dtype == weight.input_dtype and norm is None)
        assert x.flags.c_contiguous and out.flags.c_contiguous
        assert weight.gated or out.dtype == np.float32
        assert not (weight.gated and add)
        norm = norm or _NO_NORM
        before = self._control, x, norm.weight, norm.eps, weight.panels
        after = weight.bias, weight.gated, out, add
        if isinstance(weight, Int4Linear):
            self._launch(linear_int4.linear_int4, *before, *after)
        elif isinstance(weight, Int8Linear):
            self._launch(linear_int8.linear, *before, weight.scales, *after)
        else:
            self._launch(linear.linear, *before, *after)

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
        """See ``Backend.rope_and_cache``."""
        normed = q_norm is not None and k_norm is not None
        self._launch(
            rope_cache.rope_and_cache,
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
            lines,
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
        out: Stored,
    ) -> None:
        """See ``Backend.attention``."""
        self._launch(
            attention.attention,
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

    def log_softmax_stats(self, logits: Float32) -> tuple[Float32, Float32]:
        """See ``Backend.log_softmax_stats``."""
        largest = np.empty(logits.shape[0], np.float32)
        log_sum = np.empty(logits.shape[0], np.float32)
        elementwise.softmax_stats(self._control, logits, largest, log_sum)
        return largest, log_sum

    def warm_up(self, dtype: str) -> None:
        """Compile every kernel for ``dtype``, or load it from the disk cache."""
        storage = STORAGE[dtype]
        size = linear_tiles.TERMS
        one = np.ones(size, np.float32)
        weight = self.pack_linear([np.zeros((3 * LANES, size), storage)])
        x = np.zeros((1, size), np.float32)
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
        self.linear(x, weight, qkv)
        gate_up = self.pack_linear([np.zeros((size, size), storage)] * 2, gated=True)
        activated = np.zeros((1, size), gate_up.input_dtype)
        self.linear(x, gate_up, activated, norm=RMSNorm(one, 1e-5))
        self.linear(activated, weight, qkv)
        self.rope_and_cache(qkv, layer, batch, angles, angles, zero, one[:LANES], one[:LANES], 1e-5)
        self.attention(qkv, layer, batch, 1.0, 0, activated[:, :LANES])
        self.take_rows(activated, zero, activated.copy())
        self.log_softmax_stats(x)
