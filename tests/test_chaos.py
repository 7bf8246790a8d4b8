"""Whatever process dies or hangs, whenever: every stream ends with exactly the tokens it should."""

from __future__ import annotations

import asyncio
import random
import time
import uuid
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from deepinfer import AsyncEngine, EngineArgs, RequestOutput, SamplingParams
from deepinfer.frontend.tokenizer import Tokenizer
from support.chaos import chaos, strays
from support.patience import PATIENCE_S
from support.random_requests import RandomRequests
from support.scripted_engine import ScriptedFolder
from support.streams import check_stream, end, outputs, text, tokens

pytestmark = [pytest.mark.process, pytest.mark.slow]

Request = tuple[str | list[int], SamplingParams]


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


def substance(outs: list[RequestOutput]) -> tuple:
    """Everything of a stream that must be the same whatever died meanwhile."""
    check_stream(outs)
    logprobs = [(o.token_logprobs, o.sum_smaller_probs, o.top_token_ids) for o in outs]
    return tokens(outs), text(outs), end(outs), outs[-1].error, logprobs, outs[0].prompt_logprobs


async def in_peace(engine: AsyncEngine, requests: Sequence[Request], alone: int) -> list[tuple]:
    """What the requests must yield; the first ``alone`` of them were also run one by one."""
    together = await asyncio.gather(*(outputs(engine, *request) for request in requests))
    expected = [substance(outs) for outs in together]
    for request, wanted in zip(requests[:alone], expected, strict=False):
        assert substance(await outputs(engine, *request)) == wanted, request
    return expected


async def survive(
    engine: AsyncEngine,
    requests: Sequence[Request],
    expected: Sequence[tuple],
    rng: random.Random,
    *,
    at_once: int,
    seconds: float,
    blows: int,
) -> int:
    """Run every request, and again from the first while it lasts, under chaos.

    Each stream must equal what is expected. Returns how many there were.
    """
    started = 0

    async with (
        chaos(engine, rng, seconds=seconds, blows=blows) as done,
        asyncio.TaskGroup() as group,
    ):

        async def one_after_the_other() -> None:
            nonlocal started
            while started < len(requests) or not done.over:
                place = started % len(requests)
                started += 1
                got = substance(await outputs(engine, *requests[place]))
                assert got == expected[place], requests[place]

        for _ in range(at_once):
            group.create_task(one_after_the_other())
    stats = await engine.stats()
    left = {name: stats[name] for name in ("live", "running", "waiting", "prefilling")}
    assert not any(left.values()), left
    assert stats["blocks_free"] + stats["blocks_cached"] == stats["blocks_total"]
    print(f"{started} streams, {done}", *done.blows, sep="\n")
    return started


@pytest.fixture
def nothing_left(monkeypatch):
    """After the test no process of it runs, and nothing of it is left in /dev/shm."""
    mark = f"DEEPINFER_TEST_{uuid.uuid4().hex}"
    monkeypatch.setenv(mark, "1")
    before = shared_memory()
    yield
    _, alive = psutil.wait_procs(strays(mark), timeout=PATIENCE_S)
    assert not alive, alive
    # Others on this machine may have theirs there for a while.
    deadline = time.monotonic() + PATIENCE_S
    while (left := shared_memory() - before) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left


def shared_memory() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir()}


@pytest.mark.timeout(600)
async def test_scripted_streams_survive_chaos(tmp_path, nothing_left) -> None:
    rng = random.Random(7)
    folder = ScriptedFolder(tmp_path / "model", step_ms=25, max_model_len=2048)
    requests = [
        ([rng.randrange(1, 200) for _ in range(rng.randrange(1, 60))], random_params(rng, 300))
        for _ in range(100)
    ]
    args = folder.args(heartbeat_timeout_s=2, max_num_seqs=40, num_kv_blocks=400)
    args.stop_preempted_request = False
    async with AsyncEngine(args) as engine:
        expected = await in_peace(engine, requests, alone=0)
        await survive(engine, requests, expected, rng, at_once=100, seconds=45, blows=10)


@pytest.mark.model
@pytest.mark.timeout(900)
async def test_two_hundred_streams_of_the_real_model_survive_chaos(
    smollm2_folder, nothing_left
) -> None:
    rng = random.Random(3)
    source = RandomRequests(
        Tokenizer.from_folder(smollm2_folder), max_model_len=96, max_tokens=(10, 24)
    )
    requests = [(source[n].prompt, source[n].params) for n in range(200)]
    args = EngineArgs(
        model=str(smollm2_folder),
        # Kernels and libraries load in pieces that let nobody speak, slow machines for seconds.
        heartbeat_timeout_s=5,
        max_model_len=96,
        max_num_seqs=32,
        # A third of what 32 of the longest need: preemptions are part of the company.
        num_kv_blocks=64,
        stop_preempted_request=False,
    )
    async with AsyncEngine(args) as engine:
        expected = await in_peace(engine, requests, alone=12)
        count = await survive(engine, requests, expected, rng, at_once=64, seconds=60, blows=12)
    assert count >= 200
