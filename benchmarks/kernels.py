"""How near the CPU kernels come to what the machine can do.

Measures the machine first (multiply-adds of all threads, bytes read from memory), then the matrix
products of SmolLM2-135M, and one of a larger model, for 1 to 2,048 rows beside torch's in float32
(MKL's sgemm on most machines), attention, and what a launch costs. Weights of up to 64 rows are
read cold, as a decode step reads them: many copies take turns, more than the caches hold. Times are
the best of several, and of ours and torch's in turns, so that other programs of the machine matter
less.

    python benchmarks/kernels.py [--threads 2] [--no-torch] [--only peaks,linear,attention,launch]
"""

from __future__ import annotations

import argparse
import copy
import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from deepinfer.gpu_worker.backend import KVCache, RaggedBatch
from deepinfer.gpu_worker.cpu_backend import CpuBackend
from deepinfer.gpu_worker.kernels.fork_join import fork_join
from deepinfer.gpu_worker.machine_peaks import COLD_BYTES, Peaks, best_of, measure_peaks

# numba comes after the kernels' settings.
from numba import njit  # isort: skip

SHAPES = ((576, 960), (576, 576), (576, 3072), (1536, 576), (2048, 5632), (576, 49152))
DTYPES = ("bfloat16", "float32", "int8", "int4")
ROWS = (1, 2, 3, 8, 32, 64, 128, 512, 2048)
COLD_ROWS = 64


@njit(nogil=True)
def _nothing(arguments, unit):
    pass


@njit(nogil=True)
def launch(control, units):
    fork_join(control, _nothing, (units,), units)


def bench_linear(backend: CpuBackend, peaks: Peaks, torch_too: bool) -> None:
    """One line for each shape, dtype and number of rows."""
    rng = np.random.default_rng(0)
    for depth, width in SHAPES:
        for dtype in DTYPES:
            weights = rng.standard_normal((width, depth)).astype(np.float32)
            held = weights if dtype == "float32" else (weights.view(np.uint32) >> 16)
            held = held if dtype == "float32" else held.astype(np.uint16)
            quantization = dtype if dtype in ("int8", "int4") else "none"
            packed = backend.pack_linear([held], None, quantization)
            num_bytes = packed.panels.nbytes
            peak = peaks.operations[packed.arithmetic] / 1e9
            bandwidth = peaks.bandwidth / 1e9
            # Copied, for quantising a matrix takes longer than that.
            copies = [copy.deepcopy(packed) for _ in range(-(-COLD_BYTES // num_bytes))]
            theirs = torch_copies(weights) if torch_too else []
            for rows in ROWS:
                if rows > COLD_ROWS and width > 16384:
                    continue
                x = rng.standard_normal((rows, depth)).astype(np.float32)
                out = np.empty((rows, width), np.float32)
                turns = -(-len(copies) // rows) if rows <= COLD_ROWS else 1

                def call(i: int, x=x, out=out, copies=copies, rows=rows, turns=turns) -> None:
                    for turn in range(i * turns, i * turns + turns):
                        weight = copies[turn % len(copies) if rows <= COLD_ROWS else 0]
                        backend.linear(x, weight, out)

                calls: list[Callable[[int], object]] = [call]
                if torch_too:
                    calls.append(torch_linear(x, theirs, turns))
                best, *others = (duration / turns for duration in best_of(*calls))
                flops = 2 * rows * depth * width / best / 1e9
                moved = num_bytes / best / 1e9
                line = (
                    f"{depth:5}→{width:<5} {dtype:8} rows {rows:4}: {best * 1e6:9.1f} µs "
                    f"{flops:6.1f} GFLOP/s ({flops / peak:4.0%}) "
                    f"{moved:5.1f} GB/s ({moved / bandwidth:4.0%})"
                )
                for other in others:
                    line += f"   torch {other * 1e6:9.1f} µs: {other / best:5.2f} times ours"
                print(line, flush=True)


def torch_copies(weights: np.ndarray) -> list[Any]:
    """As many copies for torch as it takes to read them cold."""
    import torch

    matrix = torch.from_numpy(weights)
    return [matrix.clone() for _ in range(-(-COLD_BYTES // weights.nbytes))]


def torch_linear(x: np.ndarray, copies: list[Any], turns: int) -> Callable[[int], None]:
    """The same products by torch, in float32 whatever we store the weights in."""
    import torch

    given = torch.from_numpy(x)
    product = torch.nn.functional.linear

    def call(i: int) -> None:
        with torch.inference_mode():
            for turn in range(i * turns, i * turns + turns):
                product(given, copies[turn % len(copies) if len(x) <= COLD_ROWS else 0])

    return call


def bench_attention(backend: CpuBackend, peak: float) -> None:
    """Decode of 1 and 64 rows, and prefill of one prompt, with SmolLM2's 9 query and 3 kv heads."""
    heads, kv_heads, dim, block_size = 9, 3, 64, 16
    for rows, context, tokens in (
        (1, 128, 1),
        (1, 2048, 1),
        (64, 300, 1),
        (1, 512, 512),
        (1, 2048, 2048),
    ):
        blocks = -(-context // block_size)
        cache = KVCache(1, rows * blocks, block_size, kv_heads, dim, "bfloat16")
        cache.layers[0].keys[:] = 0x3F00
        cache.layers[0].values[:] = 0x3F00
        last = np.arange(context - tokens, context)
        batch = RaggedBatch(
            token_ids=np.zeros(rows * tokens, np.int32),
            positions=np.tile(last, rows).astype(np.int32),
            q_start=np.arange(0, rows * tokens + 1, tokens, dtype=np.int32),
            slots=np.arange(rows, dtype=np.int32),
            lengths=np.full(rows, context, np.int32),
            block_tables=np.arange(rows * blocks, dtype=np.int32).reshape(rows, blocks),
            logit_index=np.zeros(0, np.int32),
        )
        qkv = np.ones((rows * tokens, (heads + 2 * kv_heads) * dim), np.float32)
        out = np.empty((rows * tokens, heads * dim), np.float32)
        layer = cache.layers[0]

        def call(_: int, qkv=qkv, layer=layer, batch=batch, out=out) -> None:
            backend.attention(qkv, layer, batch, 0.125, 0, out)

        (best,) = best_of(call)
        seen = rows * (tokens * (context - tokens) + tokens * (tokens + 1) / 2)
        flops = 4 * seen * heads * dim / best / 1e9
        print(
            f"attention {rows:3} rows of {tokens:4} tokens, context {context:4}: "
            f"{best * 1e6:9.1f} µs {flops:6.1f} GFLOP/s ({flops / peak:4.0%})",
            flush=True,
        )


def bench_launch(backend: CpuBackend) -> None:
    """A kernel without work, back to back and after pauses in which helpers fall asleep."""
    launch(backend._control, 1)
    for units in (1, 16):
        for pause in (0.0, 20e-6, 500e-6):
            times = []
            for _ in range(1000):
                start = time.perf_counter()
                launch(backend._control, units)
                end = time.perf_counter()
                times.append(end - start)
                while time.perf_counter() - end < pause:
                    pass
            median, late = np.percentile(times, (50, 99)) * 1e6
            print(
                f"launch {units:2} units, {pause * 1e6:3.0f} µs apart: "
                f"median {median:5.1f} µs, p99 {late:.1f} µs"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--no-torch", action="store_true")
    parser.add_argument("--only", default="linear,attention,launch")
    args = parser.parse_args()
    backend = CpuBackend(args.threads)
    if not args.no_torch:
        # Its threads would go on spinning while ours compute.
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
        import torch

        torch.set_num_threads(backend.num_threads)
    peaks = measure_peaks(backend.team)
    for name, rate in peaks.operations.items():
        print(f"{backend.num_threads} threads: {rate / 1e9:.1f} GFLOP/s {name}")
    print(f"{peaks.bandwidth / 1e9:.1f} GB/s read from memory")
    if "launch" in args.only:
        bench_launch(backend)
    if "attention" in args.only:
        bench_attention(backend, peaks.operations["bfloat16"] / 1e9)
    if "linear" in args.only:
        bench_linear(backend, peaks, not args.no_torch)
    backend.close()


if __name__ == "__main__":
    main()
