"""Rotation of vectors before they are rounded to few bits (QuaRot, Ashkboos et al. 2024).

A few activations are many times larger than the rest, and a scale that reaches them leaves few
levels to the others. Times a Hadamard matrix H (entries 1 and -1, H @ H.T = 64 * I) each value is
spread over all of its block of 64; and since ``(x @ H) @ (w @ H).T == 64 * (x @ w.T)``, weights
rotated once when they are packed leave nothing to undo. The 6 stages of the fast transform are
sums and differences in a fixed order, so every CPU gives the same bits.
"""

# Compiled functions are typed by numba, for the arrays they are called with.
# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="call-arg,var-annotated,misc"

from __future__ import annotations

from llvmlite import ir
from numba import njit
from numba.extending import intrinsic

from deepinfer.gpu_worker.kernels.settings import INNER
from deepinfer.gpu_worker.kernels.vectors import (
    LANES,
    VECTOR,
    VECTOR_I32,
    add16,
    emit_fma,
    float32x16,
    load16,
    store16,
    sub16,
)

BLOCK = 64
"""Values that are rotated together."""


@intrinsic
def _rotate16(typingctx, x):
    """Times the Hadamard matrix of 16: pairs of lanes 1, 2, 4 and 8 apart to sum and difference."""

    def codegen(context, builder, signature, args):
        (x,) = args
        undefined = ir.Constant(VECTOR, ir.Undefined)
        for stride in (1, 2, 4, 8):
            other = [lane ^ stride for lane in range(LANES)]
            swapped = builder.shuffle_vector(x, undefined, ir.Constant(VECTOR_I32, other))
            # The upper lane of a pair becomes lower - upper. Its product with 1 or -1 is exact.
            signs = [-1.0 if lane & stride else 1.0 for lane in range(LANES)]
            x = emit_fma(builder, x, ir.Constant(VECTOR, signs), swapped)
        return x

    return float32x16(float32x16), codegen


@njit(**INNER)
def rotate_block(source, source_at, target, target_at):
    """64 floats at ``source_at`` times H, written to ``target_at``; the places may be the same."""
    a = _rotate16(load16(source, source_at))
    b = _rotate16(load16(source, source_at + LANES))
    c = _rotate16(load16(source, source_at + 2 * LANES))
    d = _rotate16(load16(source, source_at + 3 * LANES))
    e, f, g, h = add16(a, b), sub16(a, b), add16(c, d), sub16(c, d)
    store16(target, target_at, add16(e, g))
    store16(target, target_at + LANES, add16(f, h))
    store16(target, target_at + 2 * LANES, sub16(e, g))
    store16(target, target_at + 3 * LANES, sub16(f, h))
