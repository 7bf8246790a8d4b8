"""Cosine and sine tables of rotary position embeddings (Su et al., arXiv:2104.09864)."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np

from deepinfer.gpu_worker.backend import Float32, Int32
from deepinfer.gpu_worker.model_config import RopeConfig


def rope_tables(rope: RopeConfig, head_dim: int, max_len: int) -> tuple[np.ndarray, np.ndarray]:
    """Cosines and sines, float32 ``[max_len, head_dim / 2]`` each, attention scaling included.

    Angles are rounded to float32 before the cosine is taken: reference implementations multiply
    position and frequency in float32, and at a position of some ten thousand that rounding is
    larger than every other difference between two implementations.
    """
    frequencies = inverse_frequencies(rope, head_dim).astype(np.float32)
    angles = np.outer(np.arange(max_len, dtype=np.float32), frequencies)
    scaling = np.float32(attention_scaling(rope))
    return np.cos(angles) * scaling, np.sin(angles) * scaling


def axis_tables(
    cos: Float32, sin: Float32, positions: Int32, sections: tuple[int, ...]
) -> tuple[Float32, Float32]:
    """Cosines and sines, ``[T, head_dim / 2]`` each, of tokens with positions [3, T] in three axes.

    The first ``sections[0]`` planes are turned by the position in the first axis, the next by that
    in the second, the last by that in the third (Qwen2-VL, arXiv:2409.12191, section 2.1).
    """
    bounds = np.cumsum((0, *sections)).tolist()
    planes = [slice(*pair) for pair in pairwise(bounds)]
    chosen = list(zip(positions, planes, strict=True))
    return (
        np.concatenate([cos[at, part] for at, part in chosen], axis=1),
        np.concatenate([sin[at, part] for at, part in chosen], axis=1),
    )


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """Radians per position of each of the ``head_dim / 2`` planes, float64."""
    plain: np.ndarray = rope.theta ** (-np.arange(0, head_dim, 2) / head_dim)
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "llama3":
        return _llama3(rope, plain)
    if rope.kind == "yarn":
        return _yarn(rope, plain, head_dim)
    assert rope.kind == "default", rope.kind
    return plain


def attention_scaling(rope: RopeConfig) -> float:
    """Factor on cosines and sines; it raises the attention logits' temperature (YaRN, section 3.4).

    The variant with ``mscale`` and ``mscale_all_dim`` is DeepSeek-V2's (arXiv:2405.04434).
    """
    if rope.kind != "yarn":
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor

    def magnitude(mscale: float) -> float:
        return 0.1 * mscale * math.log(rope.factor) + 1.0

    if rope.mscale and rope.mscale_all_dim:
        return magnitude(rope.mscale) / magnitude(rope.mscale_all_dim)
    return magnitude(1.0)


def _llama3(rope: RopeConfig, plain: np.ndarray) -> np.ndarray:
    """Llama 3.1 (Meta's reference ``apply_scaling``): slow planes are stretched, fast ones kept.

    A plane is fast when it turns more than ``high_freq_factor`` times over the original length,
    slow below ``low_freq_factor`` turns; between the two the stretch fades linearly in turns.
    """
    turns = rope.original_max_positions * plain / (2 * math.pi)
    kept = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    return _blended(plain, plain / rope.factor, 1.0 - np.clip(kept, 0.0, 1.0))


def _yarn(rope: RopeConfig, plain: np.ndarray, head_dim: int) -> np.ndarray:
    """YaRN (Peng et al., arXiv:2309.00071, section 3.2, "NTK-by-parts").

    Planes turning more than ``beta_fast`` times over the original length are kept, those below
    ``beta_slow`` turns are stretched, and between the two the stretch fades linearly in the
    plane's index (as the authors' code does; the paper's text fades in the wavelength).
    """

    def plane_turning(turns: float) -> float:
        wavelengths = rope.original_max_positions / (turns * 2 * math.pi)
        return head_dim * math.log(wavelengths) / (2 * math.log(rope.theta))

    first, last = plane_turning(rope.beta_fast), plane_turning(rope.beta_slow)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    # 0.001: the authors' guard against a ramp of no width.
    width = last - first or 0.001
    stretched = np.clip((np.arange(head_dim // 2) - first) / width, 0.0, 1.0)
    return _blended(plain, plain / rope.factor, stretched)


def _blended(kept: np.ndarray, stretched: np.ndarray, share_stretched: np.ndarray) -> np.ndarray:
    blended: np.ndarray = kept * (1.0 - share_stretched) + stretched * share_stretched
    return blended
