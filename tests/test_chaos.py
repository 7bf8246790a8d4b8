"""Whatever process dies or hangs, whenever: every stream ends with exactly the tokens it should."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from deepinfer import AsyncEngine, EngineArgs, SamplingParams
from support.chaos import chaos
from support.scripted_engine import ScriptedFolder, engine_processes
from support.streams import check_stream, end, outputs, text, tokens

pytestmark = [pytest.mark.process, pytest.mark.slow]


def random_params(rng: random.Random, most: int) -> SamplingParams:
    kind = rng.randrange(4)
    fields: dict[str, object] = {}
    if kind == 0:
        fields = {"temperature": 0}
    elif kind == 1:
        fields = {"top_p": 0.9, "presence_penalty": 0.5, "repetition_penalty": 1.2}
    elif kind == 2:
        fields = {"stop": ["xyz", " the "], "min_tokens": 5}
    return SamplingParams(
        max_tokens=rng.randrange(most // 2, most), seed=rng.getrandbits(40), **fields
    )


async def survive(engine: AsyncEngine, requests: list, seconds: float, rng: random.Random) -> int:
    """Run the requests in peace, then under chaos; all must be equal. Return the blows."""

    async def all_of_them() -> list:
        return await asyncio.gather(*(outputs(engine, *request) for request in requests))

    expected = await all_of_them()
    async with chaos(engine, seconds, rng) as done:
        got = await all_of_them()
    for request, wanted, outs in zip(requests, expected, got, strict=True):
        check_stream(outs)
        assert (tokens(outs), text(outs), end(outs)) == (
            tokens(wanted),
            text(wanted),
            end(wanted),
        ), request
    stats = await engine.stats()
    assert stats["live"] == stats["running"] == stats["waiting"] == 0
    assert stats["blocks_free"] + stats["blocks_cached"] == stats["blocks_total"]
    return len(done.blows)


def shared_memory() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir()}


@pytest.mark.timeout(600)
async def test_scripted_streams_survive_chaos(tmp_path) -> None:
    rng = random.Random(7)
    folder = ScriptedFolder(tmp_path / "model", step_ms=25, max_model_len=2048)
    requests = [
        ([rng.randrange(1, 200) for _ in range(rng.randrange(1, 60))], random_params(rng, 300))
        for _ in range(100)
    ]
    before = shared_memory()
    args = folder.args(heartbeat_timeout_s=2, max_num_seqs=40, num_kv_blocks=400)
    args.stop_preempted_request = False
    async with AsyncEngine(args) as engine:
        assert await survive(engine, requests, 60, rng) >= 4
    assert not engine_processes()
    assert shared_memory() == before


@pytest.mark.model
@pytest.mark.timeout(900)
async def test_streams_of_the_real_model_survive_chaos(smollm2_folder) -> None:
    rng = random.Random(3)
    prompts = ["The sea is", "Once upon a time", "def fibonacci(n):", "The capital of France"]
    requests = [(rng.choice(prompts) + f" {i}", random_params(rng, 40)) for i in range(60)]
    args = EngineArgs(
        model=str(smollm2_folder),
        dtype="float32",
        heartbeat_timeout_s=3,
        max_num_seqs=32,
        num_kv_blocks=800,
        stop_preempted_request=False,
    )
    async with AsyncEngine(args) as engine:
        assert await survive(engine, requests, 30, rng) >= 2
    assert not engine_processes()
