"""The workloads every engine is measured with: random token ids, greedy, EOS ignored.

A workload is a list of (prompt token ids, output tokens); all requests arrive at once.
"""

from __future__ import annotations

import random

LOW, HIGH = 100, 40_000
Workload = list[tuple[list[int], int]]


def _ids(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(LOW, HIGH) for _ in range(count)]


def batch(count: int = 64, seed: int = 0) -> Workload:
    """Mixed prompts of 16 to 512 tokens with 32 to 128 output tokens."""
    rng = random.Random(seed)
    requests = []
    for _ in range(count):
        prompt_len = rng.choice([16, 32, 64, 128, 256, 512])
        out = rng.choice([32, 64, 128])
        requests.append((_ids(rng, prompt_len), out))
    return requests


def single(prompt_len: int, seed: int = 1) -> Workload:
    """One stream of 128 tokens."""
    return [(_ids(random.Random(seed * 1000 + prompt_len), prompt_len), 128)]


def prefill(prompt_len: int = 2048, seed: int = 2) -> Workload:
    """One long prompt, one output token."""
    return [(_ids(random.Random(seed), prompt_len), 1)]


def shared(count: int = 32, prefix: int = 1024, own: int = 16, out: int = 32) -> Workload:
    """Prompts that begin with the same 1,024 tokens."""
    rng = random.Random(3)
    common = _ids(rng, prefix)
    return [(common + _ids(rng, own), out) for _ in range(count)]


WORKLOADS = {
    "BATCH64": batch,
    "SINGLE16": lambda: single(16),
    "SINGLE512": lambda: single(512),
    "PREFILL2048": prefill,
    "SHARED32": shared,
}
