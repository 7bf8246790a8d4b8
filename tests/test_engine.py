"""Requests through real frontend, scheduler and worker processes, over a scripted model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from deepinfer import AsyncEngine, RequestOutput, SamplingParams
from support.scripted_engine import ScriptedFolder

pytestmark = [pytest.mark.process, pytest.mark.asyncio(loop_scope="module")]

GREEDY = SamplingParams(temperature=0, max_tokens=12)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> ScriptedFolder:
    return ScriptedFolder(tmp_path_factory.mktemp("scripted"), eos_odds=20)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(folder: ScriptedFolder) -> AsyncIterator[AsyncEngine]:
    async with AsyncEngine(folder.args(max_num_batched_tokens=64)) as engine:
        yield engine


async def collect(engine: AsyncEngine, *args, **kwargs) -> list[RequestOutput]:
    return [out async for out in engine.generate(*args, **kwargs)]


async def test_a_stream_holds_the_reference_tokens_and_ends_once(engine, folder) -> None:
    prompt = [5, 6, 7]
    outs = await collect(engine, prompt, GREEDY)
    assert [out.token_id for out in outs] == folder.reference(prompt, 12)
    assert [out.finished for out in outs] == [False] * (len(outs) - 1) + [True]
    assert [out.num_output_tokens for out in outs] == list(range(1, len(outs) + 1))
    assert all(out.finish_reason == "" for out in outs[:-1])
    assert outs[-1].finish_reason in ("stop", "length")


async def test_requests_in_company_equal_their_references(engine, folder) -> None:
    prompts = [[i, i + 1, *range(3, 3 + i)] for i in range(5, 45)]
    results = await asyncio.gather(*(collect(engine, prompt, GREEDY) for prompt in prompts))
    for prompt, outs in zip(prompts, results, strict=True):
        assert [out.token_id for out in outs] == folder.reference(prompt, 12)


async def test_joined_deltas_equal_the_decoded_ids(engine, folder) -> None:
    params = SamplingParams(max_tokens=200, seed=3, ignore_eos=True)
    outs = await collect(engine, "the quick brown fox", params)
    text = folder.tokenizer.decode([out.token_id for out in outs])
    assert "".join(out.text for out in outs) == text
    assert len(outs) == 200


async def test_each_of_n_samples_ends_once_and_equals_its_seed_alone(engine) -> None:
    params = SamplingParams(max_tokens=10, n=3, seed=11)
    outs = await collect(engine, [9, 8, 7], params)
    samples = [[out for out in outs if out.index == i] for i in range(3)]
    assert all(sum(out.finished for out in sample) == 1 for sample in samples)
    assert all(sample[-1].finished for sample in samples)
    alone = await collect(engine, [9, 8, 7], SamplingParams(max_tokens=10, seed=11))
    assert [out.token_id for out in samples[0]] == [out.token_id for out in alone]
    assert samples[0] != samples[1]


async def test_an_abort_ends_the_stream_with_its_reason(engine, folder) -> None:
    params = SamplingParams(max_tokens=900, ignore_eos=True)
    outs = []
    with folder.held(after=3):
        async for out in engine.generate([1, 2], params, request_id="to-abort"):
            outs.append(out)
            if len(outs) == 3:
                assert await engine.abort("to-abort")
    assert outs[-1].finished
    assert (outs[-1].finish_reason, outs[-1].finish_detail) == ("abort", "client_abort")
    assert sum(out.finished for out in outs) == 1
    assert not await engine.abort("to-abort")
