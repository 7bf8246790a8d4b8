"""Gaps between the tokens of text requests while image workers are killed and stopped.

    python benchmarks/image_kills.py [--reps 3] [--image-workers 1]

A whole engine with a model of SmolLM2-135M's text shape and a SigLIP encoder, random weights. Three
runs of 100 requests, twelve at a time, on one engine each: text alone (``text``), every second one
with a picture that none had before (``quiet``), and the same while a random image worker is killed
or stopped every second or so (``kills``). Text requests are the same in all of them. What an image
worker computes it takes from the same cores, so ``quiet`` is what ``kills`` is held against.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import random
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from deepinfer import AsyncEngine, EngineArgs, SamplingParams
from support.vision_checkpoints import make_vision_checkpoint, picture

REQUESTS = 100
AT_A_TIME = 12
TEXT = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
}
VISION = {
    "hidden_size": 384,
    "intermediate_size": 1536,
    "num_hidden_layers": 12,
    "num_attention_heads": 6,
    "image_size": 256,
    "patch_size": 16,
}
PROCESSOR = {"size": {"longest_edge": 256}, "max_image_size": {"longest_edge": 256}}
NEVER = [1]


def image_workers() -> list[psutil.Process]:
    return [
        process
        for process in psutil.Process().children(recursive=True)
        if any("image_worker" in part for part in process.cmdline())
    ]


async def harm(pick: random.Random) -> int:
    """Kill or stop a random image worker every second or so, until cancelled."""
    harmed = 0
    try:
        while True:
            await asyncio.sleep(0.5 + pick.random())
            victims = image_workers()
            if victims:
                how = pick.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP])
                pick.choice(victims).send_signal(how)
                harmed += 1
    except asyncio.CancelledError:
        return harmed


async def run(folder: Path, kind: str, seed: int, workers: int) -> dict[str, Any]:
    pick = random.Random(seed)
    gaps: list[float] = []
    ends: dict[str, int] = {}
    free = asyncio.Semaphore(AT_A_TIME)
    args = EngineArgs(
        model=str(folder), num_image_workers=workers, heartbeat_timeout_s=2, max_num_seqs=64
    )

    async def ask(engine: AsyncEngine, number: int) -> None:
        with_picture = number % 2 == 1
        if with_picture and kind == "text":
            return
        params = SamplingParams(
            temperature=0, max_tokens=16 if with_picture else 150, ignore_eos=True,
            logit_bias=dict.fromkeys(NEVER, -100.0),
        )  # fmt: skip
        extra: dict[str, Any] = {}
        prompt = f"Request {number} is about"
        if with_picture:
            data = io.BytesIO()
            picture(256, 192, seed=1000 * seed + number).save(data, "PNG")
            extra["multi_modal_data"] = {"image": [data.getvalue()]}
            prompt += "<image>"
        async with free:
            before, reason = None, ""
            async for output in engine.generate(prompt, params, **extra):
                now = time.perf_counter()
                if before is not None and not with_picture:
                    gaps.append(now - before)
                before, reason = now, output.finish_reason
        end = f"{'picture' if with_picture else 'text'}: {reason}"
        ends[end] = ends.get(end, 0) + 1

    async with AsyncEngine(args) as engine:
        began = time.perf_counter()
        harming = asyncio.ensure_future(harm(pick)) if kind == "kills" else None
        await asyncio.gather(*(ask(engine, number) for number in range(REQUESTS)))
        seconds = time.perf_counter() - began
        harmed = 0
        if harming is not None:
            harming.cancel()
            harmed = await harming
        stats = await engine.stats()
    gaps.sort()
    return {
        "run": kind, "seconds": round(seconds, 1), "harmed": harmed, "ends": ends,
        "image_worker_restarts": stats["image_worker_restarts"],
        "worker_restarts": stats["worker_restarts"],
        "gap_ms": {
            name: round(1000 * gaps[min(len(gaps) - 1, int(part * len(gaps)))], 1)
            for name, part in (("p50", 0.5), ("p95", 0.95), ("p99", 0.99), ("max", 1.0))
        } | {"mean": round(1000 * statistics.mean(gaps), 1)},
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--reps", type=int, default=3)
    parser.add_argument("--image-workers", type=int, default=1)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = make_vision_checkpoint(
            "idefics3", Path(name), dtype=torch.bfloat16, vision=VISION, processor=PROCESSOR,
            text=TEXT,
        )  # fmt: skip
        found: dict[str, list[dict[str, float]]] = {}
        for rep in range(args.reps):
            for kind in ("text", "quiet", "kills"):
                result = asyncio.run(run(folder, kind, rep, args.image_workers))
                print(json.dumps(result), flush=True)
                found.setdefault(kind, []).append(result["gap_ms"])
        for part in ("p50", "mean", "p95", "p99"):
            medians = {
                kind: statistics.median(gaps[part] for gaps in runs) for kind, runs in found.items()
            }
            print(json.dumps({
                "gap": part, "medians_ms": medians,
                "kills / quiet": round(medians["kills"] / medians["quiet"], 2),
                "quiet / text": round(medians["quiet"] / medians["text"], 2),
            }), flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
