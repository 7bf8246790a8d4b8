"""SCH-03 through the OpenAI API: a tenant is who bears the key, and weights share the engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from deepinfer.frontend.gateway.tenants import new_key
from support.scripted_engine import ScriptedFolder
from support.served import MODEL, PATIENCE_S, Served, eventually, served

pytestmark = pytest.mark.process

KEYS = {name: new_key() for name in ("a", "a again", "b", "root")}
TENANTS = f"""
[tenants.a]
keys = ["{KEYS["a"][1]}", "{KEYS["a again"][1]}"]
weight = 3

[tenants.b]
keys = ["{KEYS["b"][1]}"]

[tenants.root]
keys = ["{KEYS["root"][1]}"]
operator = true
"""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Served]:
    folder = ScriptedFolder(tmp_path / "model", max_model_len=4096)
    (tmp_path / "tenants.toml").write_text(TENANTS)
    flags = ["--policy", "fair", "--max-num-seqs", "2"]
    flags += ["--tenants", str(tmp_path / "tenants.toml")]
    flags += ["--usage-ledger", str(tmp_path / "usage.jsonl")]
    with served(folder, *flags) as server:
        yield server


@asynccontextmanager
async def client(server: Served, key: str) -> AsyncIterator[httpx.AsyncClient]:
    headers = {"authorization": f"Bearer {KEYS[key][0]}"}
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(
        base_url=server.url, headers=headers, timeout=PATIENCE_S, limits=limits
    ) as http:
        yield http


def complete(
    http: httpx.AsyncClient, prompt: list[int], max_tokens: int
) -> asyncio.Task[httpx.Response]:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
    body |= {"ignore_eos": True, "return_token_ids": True}
    return asyncio.ensure_future(http.post("/v1/completions", json=body))


async def engine(root: httpx.AsyncClient, name: str) -> int:
    lines = (await root.get("/metrics")).text.splitlines()
    [value] = [line.split()[1] for line in lines if line.startswith(f"deepinfer_engine_{name} ")]
    return int(float(value))


def ended(tmp_path: Path) -> list[str]:
    """Whose requests ended, in the order of their ends."""
    lines = (tmp_path / "usage.jsonl").read_text().splitlines()
    return [json.loads(line)["tenant"] for line in lines]


async def test_backlogged_keys_are_served_by_their_tenants_weights(
    server: Served, tmp_path: Path
) -> None:
    """Two keys of one tenant are one tenant, and who asked first does not matter."""
    each = 24
    async with (
        client(server, "b") as b,
        client(server, "a") as a,
        client(server, "a again") as again,
        client(server, "root") as root,
    ):

        async def all_are_in() -> bool:
            return await engine(root, "waiting_requests") >= 3 * each - 2

        with server.folder.held():
            tasks = [
                complete(http, [10 + i, 20 + n] * 4, 12)
                for n, http in enumerate((b, a, again))
                for i in range(each)
            ]
            await eventually(all_are_in)
        answers = await asyncio.gather(*tasks)
    assert [answer.status_code for answer in answers] == [200] * 3 * each
    # All requests are of one size. The first two entered the slots before there was a choice, and
    # after the 24 that follow both tenants have some waiting still.
    both = ended(tmp_path)[2:26]
    assert both.count("a") / len(both) == pytest.approx(0.75, rel=0.2)
    assert both.count("b") / len(both) == pytest.approx(0.25, rel=0.2)


async def test_a_key_in_a_flood_of_another_is_answered_while_that_runs(
    server: Served,
) -> None:
    prompt = [7, 8, 9]
    async with client(server, "a") as a, client(server, "b") as b, client(server, "root") as root:

        async def slots_are_taken() -> bool:
            return await engine(root, "waiting_requests") == 4

        flood = [complete(a, [5, 6 + i], 2000) for i in range(6)]
        await eventually(slots_are_taken)
        answer = (await complete(b, prompt, 5)).json()
        assert not any(task.done() for task in flood)
        assert answer["choices"][0]["token_ids"] == server.folder.reference(prompt, 5)
        for i, task in enumerate(flood):
            choice = (await task).json()["choices"][0]
            assert choice["token_ids"] == server.folder.reference([5, 6 + i], 2000)
