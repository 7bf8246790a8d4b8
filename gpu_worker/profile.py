"""Where a step's time goes: each kernel's calls, and how near they come to the machine's peaks.

``ProfilingBackend`` stands around any backend and ``ProfilingRunner`` in the runner's place; an
engine that is not profiled uses neither. What the profile itself costs, some microseconds a call,
is a part of its own (``profiling``), so that no kernel is charged with it.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from deepinfer.gpu_worker.backend import (
    Backend,
    Float32,
    Int32,
    KVLayer,
    RaggedBatch,
    RMSNorm,
    Stored,
)
from deepinfer.gpu_worker.machine_peaks import NOT_MEASURED, Peaks
from deepinfer.gpu_worker.runner import Index, Runner
from deepinfer.wire.columns import unpack_int32
from deepinfer.wire.profile import Profile, StepKind, StepPart
from deepinfer.wire.recorder import Recorder
from deepinfer.wire.steps import StepPlan, StepResult

_LAYER_WEIGHTS = ("qkv", "output", "gate_up", "down")


def packed_bytes(weight: object) -> int:
    """Bytes of a packed weight, however it is packed: those of all arrays of the dataclass."""
    assert dataclasses.is_dataclass(weight)
    values = (getattr(weight, field.name) for field in dataclasses.fields(weight))
    return sum(value.nbytes for value in values if isinstance(value, np.ndarray))


class StepProfile:
    """Sums up the parts of steps, apart for steps with and without prefill, and records spans."""

    def __init__(self, peaks: Peaks = NOT_MEASURED) -> None:
        self.peaks = peaks
        self.recorder: Recorder | None = None
        """Nothing is counted before there is one: warming up is no part of a step."""
        self._weights: dict[int, tuple[str, int]] = {}
        self._parts: dict[str, dict[str, StepPart]] = {"decode": {}, "prefill": {}}
        self._steps = {"decode": 0, "prefill": 0}
        self._kind = "decode"
        self._named_ns = 0
        self._ended_ns = 0

    def name_weights(self, model: Any) -> None:
        """Learn what the matrices of a ``llama.Model`` are for, and their bytes."""
        for layer in model.layers:
            for role in _LAYER_WEIGHTS:
                weight = getattr(layer, role)
                self._weights[id(weight)] = (role, packed_bytes(weight))
        self._weights[id(model.head)] = ("head", packed_bytes(model.head))

    def weight(self, weight: object) -> tuple[str, int]:
        """Return a matrix's role and bytes."""
        return self._weights.get(id(weight)) or ("linear", packed_bytes(weight))

    def call(
        self,
        name: str,
        started_ns: int,
        ended_ns: int,
        moved_bytes: float,
        operations: float,
        arithmetic: str = "float32",
    ) -> None:
        """Count a call; times are ``time.monotonic_ns``. What passed since is the profile's own.

        ``arithmetic`` is what the operations multiply, a key of ``Peaks.operations``.
        """
        if self.recorder is None:
            return
        floor_s = 0.0
        if self.peaks.bandwidth:
            peak = self.peaks.operations[arithmetic]
            floor_s = max(moved_bytes / self.peaks.bandwidth, operations / peak)
        self._add(name, ended_ns - started_ns, floor_s)
        self.recorder.span(name, started_ns, ended_ns, {})
        done_ns = time.monotonic_ns()
        self._add("profiling", done_ns - ended_ns, 0.0)
        self._named_ns += done_ns - started_ns

    def step(self, plan: StepPlan, result: StepResult, idle_before: bool) -> None:
        """Count a step when it is done. ``idle_before``: there was nothing to compute before it."""
        assert self.recorder is not None
        length_ns = result.ended_ns - result.started_ns
        if self._ended_ns and not idle_before:
            self._add("between steps", result.started_ns - self._ended_ns, 0.0)
        self._add("rest", length_ns - self._named_ns, 0.0)
        self._steps[self._kind] += 1
        self.recorder.span(
            f"{self._kind} step", result.started_ns, result.ended_ns, {"step": plan.step}
        )
        self._ended_ns = result.ended_ns

    def begin(self, plan: StepPlan) -> None:
        """Count what follows for the kind of this step."""
        self._kind = "prefill" if plan.chunks else "decode"
        self._named_ns = 0

    def report(self) -> Profile:
        """Return the sums so far."""
        kinds = []
        for kind, by_name in self._parts.items():
            parts = sorted(by_name.values(), key=lambda part: -part.total_ms)
            total = sum(part.total_ms for part in parts)
            for part in parts:
                part.share = part.total_ms / total
            if self._steps[kind]:
                kinds.append(StepKind(kind, self._steps[kind], total, parts))
        return Profile(self.peaks.operations, self.peaks.bandwidth, kinds)

    def _add(self, name: str, duration_ns: int, floor_s: float) -> None:
        parts = self._parts[self._kind]
        part = parts.get(name)
        if part is None:
            part = parts[name] = StepPart(name)
        part.calls += 1
        part.total_ms += duration_ns / 1e6
        part.floor_ms += floor_s * 1e3


class ProfilingBackend:
    """A ``Backend`` that counts the calls of another one.

    Bytes moved are weights, keys and values, and activations, each once in and once out;
    operations are those of the formulas (a multiplication and an addition are two). Rows that stay
    in the caches may so be faster than their floor.
    """

    def __init__(self, backend: Backend, profile: StepProfile) -> None:
        self._backend = backend
        self._profile = profile

    def __getattr__(self, name: str) -> Any:
        # What packs weights, and what only sampling calls: sampling is timed as a whole.
        return getattr(self._backend, name)

    def record(self, operations: Callable[[], None]) -> Callable[[], None]:
        """See ``Backend.record``; a replay could not be timed operation by operation."""
        return operations

    def embed(self, ids: Int32, table: Any, out: Float32) -> None:
        """See ``Backend.embed``."""
        started = time.monotonic_ns()
        self._backend.embed(ids, table, out)
        ended = time.monotonic_ns()
        row_bytes = self._profile.weight(table)[1] / table.out_features
        self._profile.call("embed", started, ended, len(ids) * row_bytes + out.nbytes, 0)

    def take_rows(self, x: Stored, index: Int32, out: Stored) -> None:
        """See ``Backend.take_rows``."""
        started = time.monotonic_ns()
        self._backend.take_rows(x, index, out)
        ended = time.monotonic_ns()
        self._profile.call("take_rows", started, ended, 2 * out.nbytes, 0)

    def linear(
        self, x: Stored, weight: Any, out: Stored, add: bool = False, norm: RMSNorm | None = None
    ) -> None:
        """See ``Backend.linear``; a norm or a gate is counted with the product it is part of."""
        started = time.monotonic_ns()
        self._backend.linear(x, weight, out, add, norm)
        ended = time.monotonic_ns()
        role, weight_bytes = self._profile.weight(weight)
        moved = weight_bytes + x.nbytes + (2 if add else 1) * out.nbytes
        operations = 2 * x.shape[1] * out.size * (2 if weight.gated else 1)
        self._profile.call(role, started, ended, moved, operations, weight.arithmetic)

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
        started = time.monotonic_ns()
        self._backend.rope_and_cache(qkv, layer, batch, cos, sin, lines, q_norm, k_norm, eps)
        ended = time.monotonic_ns()
        tokens = len(qkv)
        heads = qkv.shape[1] / layer.head_dim
        turned = tokens * (heads - layer.keys.shape[1]) * layer.head_dim
        normed = 4 * turned if q_norm is not None else 0
        # q is read and written, k and v are read and go to the cache.
        queries = 4 * tokens * (heads - 2 * layer.keys.shape[1]) * layer.head_dim
        moved = qkv.nbytes + queries + tokens * _token_bytes(layer)
        self._profile.call("rope_and_cache", started, ended, moved, 3 * turned + normed)

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
        started = time.monotonic_ns()
        self._backend.attention(qkv, layer, batch, scale, window, out)
        ended = time.monotonic_ns()
        seen = batch.positions + 1
        held = batch.lengths
        if window:
            # The first token of a row sees farthest back, its last one to the end.
            held = np.minimum(held, window - 1 + np.diff(batch.q_start))
            seen = np.minimum(seen, window)
        moved = int(held.sum()) * _token_bytes(layer) + 2 * out.nbytes
        # A product with each key and one with each value.
        operations = 4 * out.shape[1] * int(seen.sum())
        arithmetic = "float32" if layer.keys.dtype == np.float32 else "bfloat16"
        self._profile.call("attention", started, ended, moved, operations, arithmetic)


def _token_bytes(layer: KVLayer) -> int:
    """Bytes of one token's keys and values, and their scales, in a layer of the cache."""
    heads, head_dim = layer.keys.shape[1], layer.head_dim
    scales = 2 * heads * layer.scales.itemsize if layer.scales.size else 0
    return int(2 * heads * head_dim * layer.keys.itemsize + scales)


class ProfilingRunner(Runner):
    """A ``Runner`` that counts its steps and the sampling in them."""

    def __init__(self, profile: StepProfile, recorder: Recorder, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._profile = profile
        self._recorder = recorder

    def warm_up(self) -> None:
        """See ``Runner.warm_up``; what comes after it is counted."""
        super().warm_up()
        self._profile.recorder = self._recorder
        self._recorder.profile = self._profile.report

    def execute(self, plan: StepPlan) -> StepResult:
        """See ``Runner.execute``."""
        goes_on = int(self._table.occupied.sum()) > len(unpack_int32(plan.released))
        self._profile.begin(plan)
        result = super().execute(plan)
        self._profile.step(plan, result, idle_before=not goes_on)
        return result

    def _sample(self, slots: Index, logits: Float32, result: StepResult) -> None:
        started = time.monotonic_ns()
        super()._sample(slots, logits, result)
        ended = time.monotonic_ns()
        self._profile.call("sampling", started, ended, logits.nbytes, 0)
