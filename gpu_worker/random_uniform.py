"""Counter-based random numbers: one uniform for each (seed, output position), in any order.

A generator with a state would make a result depend on how often it was asked: after a preemption,
a failover or a discarded step the stream would be off by one. Here the number for output ``i`` is a
pure function of the seed and ``i``, so recomputing needs nothing but the tokens.

The function is the SplitMix64 sequence (G. L. Steele, D. Lea, C. H. Flood: "Fast splittable
pseudorandom number generators", OOPSLA 2014; constants of its ``mix64`` variant 13), which is a
counter times an odd constant put through a bijective mix. The seed goes through the same mix first,
so that neighbouring seeds (``n`` completions use ``seed + i``) start far apart in the sequence.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

UInt64 = npt.NDArray[np.uint64]

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MASK = (1 << 64) - 1


def mix64(values: UInt64) -> UInt64:
    """Return the SplitMix64 output function of each value (a bijection on 64 bits)."""
    z = values + _GAMMA
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def seed_state(seed: int) -> np.uint64:
    """Return the start of a seed's sequence; any integer, taken modulo 2**64."""
    return np.uint64(mix64(np.array([seed & _MASK], dtype=np.uint64))[0])


def uniforms(states: UInt64, positions: npt.NDArray[np.integer]) -> npt.NDArray[np.float64]:
    """Return one float64 in [0, 1) with 53 random bits for each pair of state and position.

    ``states``: uint64[N] from :func:`seed_state`; ``positions``: integers[N], 0 and above.
    """
    bits = mix64(states + positions.astype(np.uint64) * _GAMMA)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53
