"""Tenants of a whole engine, over sockets: weights, cache salts, and the numbers of each."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from deepinfer import AsyncEngine, Client, LLMEngine, SamplingParams
from support.scripted_engine import ScriptedFolder
from support.streams import outputs, token_ids

pytestmark = pytest.mark.process


@pytest.fixture
def folder(tmp_path: Path) -> ScriptedFolder:
    return ScriptedFolder(tmp_path / "model", max_model_len=4096)


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, ignore_eos=True, max_tokens=max_tokens)


async def test_another_tenant_gets_in_although_a_flood_holds_every_slot(
    folder: ScriptedFolder, tmp_path: Path
) -> None:
    """SCH-03: a tenant is its user_id, over whichever connection; its streams are as when alone."""
    endpoint = f"ipc://{tmp_path}/engine"
    args = folder.args(policy="fair", max_num_seqs=2, endpoint=endpoint)
    async with AsyncEngine(args) as engine, Client(endpoint) as client:
        with folder.held(after=20) as hold:
            flood = [
                asyncio.create_task(token_ids(engine, [5, 6 + i], greedy(2000), user_id="a"))
                for i in range(3)
            ]
            while (await engine.stats())["output_tokens"] < 20:
                pass
            assert (await engine.tenants())["a"]["running"] == 2
            prompt = [7, 8, 9]
            asked = asyncio.create_task(token_ids(client, prompt, greedy(5), user_id="b"))
            while not asked.done():
                hold.let_pass(1)
                await engine.stats()
            assert await asked == folder.reference(prompt, 5)
            told = await client.tenants()
            assert told["b"]["served_tokens"] == 8 and told["b"]["running"] == 0
            assert told["a"]["running"] == 2 and told["a"]["waiting"] == 1
        for i, task in enumerate(flood):
            assert await task == folder.reference([5, 6 + i], 2000)
        assert (await engine.stats())["preemptions"] >= 1
        told = await engine.tenants()
        assert told["a"]["served_tokens"] == 3 * 2002
        assert told["a"]["running"] == told["a"]["waiting"] == 0


async def test_floods_over_three_connections_are_served_by_the_weights_of_two_tenants(
    folder: ScriptedFolder, tmp_path: Path
) -> None:
    """SCH-03: A asks over two of them, then aborts half and stays charged for what ran."""
    endpoint = f"ipc://{tmp_path}/engine"
    args = folder.args(policy="fair", max_num_seqs=2, endpoint=endpoint)
    async with AsyncEngine(args) as engine, Client(endpoint) as again, Client(endpoint) as client:

        def ask(source: AsyncEngine | Client, user_id: str, number: int) -> asyncio.Task[list[int]]:
            weight = 3.0 if user_id == "a" else 1.0
            prompt = [5 + number % 90, 6 + number // 90] * 4
            return asyncio.create_task(
                token_ids(source, prompt, greedy(12), user_id=user_id, weight=weight)
            )

        with folder.held() as hold:
            b = [ask(client, "b", i) for i in range(20)]
            a = [ask((engine, again)[i % 2], "a", 20 + i) for i in range(100)]
            while (await engine.stats())["live"] < 120:
                pass
            told = await engine.tenants()
            while told["b"]["waiting"] > 10:
                hold.let_pass(20)  # a few requests, so that A is backlogged at the end as well
                told = await engine.tenants()
            assert told["a"]["waiting"] > 0
            served = {name: told[name]["served_tokens"] for name in "ab"}
            assert served["a"] / sum(served.values()) == pytest.approx(0.75, rel=0.2)
            assert served["b"] / sum(served.values()) == pytest.approx(0.25, rel=0.2)

            for task in a[::2]:
                task.cancel()
            ends = await asyncio.gather(*a[::2], return_exceptions=True)
        aborted = sum(isinstance(end, asyncio.CancelledError) for end in ends)
        assert 10 < aborted < 50
        assert (await engine.tenants())["a"]["served_tokens"] >= served["a"]

        while (told := await engine.tenants())["b"]["running"] + told["b"]["waiting"]:
            pass
        assert told["b"]["served_tokens"] == 20 * 20
        for i, task in enumerate(b):
            assert await task == folder.reference([5 + i, 6] * 4, 12)
        await asyncio.gather(*a[1::2])
        told = await engine.tenants()
        whole = 20 * (100 - aborted)
        assert whole <= told["a"]["served_tokens"] < whole + 20 * aborted


async def test_weight_and_cache_salt_reach_the_scheduler(folder: ScriptedFolder) -> None:
    prompt = [5] * 40
    async with AsyncEngine(folder.args()) as engine:
        cached = []
        for salt in ("", "", "mine", "mine", "yours"):
            outs = await outputs(
                engine, prompt, greedy(2), user_id="né", weight=2.5, cache_salt=salt
            )
            cached.append(outs[-1].cached_tokens)
        assert cached == [0, 32, 0, 32, 0]
        told = (await engine.tenants())["né"]
        assert told["weight"] == 2.5
        assert told["served_tokens"] == 3 * 42 + 2 * 10
        assert told["counter"] == pytest.approx(told["served_tokens"] / 2.5)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("weight", 0),
        ("weight", -1.0),
        ("weight", 1001),
        ("weight", float("nan")),
        ("weight", "1"),
        ("cache_salt", "x" * 257),
        ("cache_salt", None),
        ("cache_salt", "\ud800"),
    ],
)
def test_weights_and_salts_out_of_range_are_refused_by_name(
    engine: LLMEngine, field: str, value: object
) -> None:
    with pytest.raises(ValueError, match=field):
        engine.add_request("r", [5], greedy(1), **{field: value})
    assert not engine.has_unfinished_requests()


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory):
    folder = ScriptedFolder(tmp_path_factory.mktemp("engine") / "model")
    with LLMEngine(folder.args()) as engine:
        yield engine


def test_a_good_weight_and_salt_are_taken_by_plain_code_too(engine: LLMEngine) -> None:
    engine.add_request("r", [5] * 20, greedy(2), user_id="u", weight=3, cache_salt="s")
    outs = []
    while engine.has_unfinished_requests():
        outs += engine.step()
    assert outs[-1].finish_reason == "length"
