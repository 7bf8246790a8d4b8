"""A request's result does not depend on its company: batch, chunks, cache, preemption."""

from __future__ import annotations

import asyncio
import math
import random
from itertools import product
from pathlib import Path

import pytest

from deepinfer import LLM, AsyncEngine, LLMEngine, RequestOutput, SamplingParams
from support.scripted_engine import ScriptedFolder
from support.streams import check_stream, end, outputs, tokens

pytestmark = pytest.mark.process


@pytest.fixture
def folder(tmp_path: Path) -> ScriptedFolder:
    return ScriptedFolder(tmp_path / "model")


def params_of_many_kinds(rng: random.Random, vocab_size: int) -> SamplingParams:
    """Random parameters whose result is a function of the request alone."""
    fields: dict[str, object] = {"max_tokens": rng.randrange(1, 30), "seed": rng.getrandbits(40)}
    kind = rng.randrange(8)
    if kind == 0:
        fields["temperature"] = 0
    if kind == 1:
        fields |= {"top_k": rng.randrange(1, 20), "top_p": rng.uniform(0.3, 1)}
    if kind == 2:
        fields |= {"repetition_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": 0.7}
    if kind == 3:
        fields |= {"bad_words": [[rng.randrange(vocab_size), 5], [7]], "min_tokens": 1}
    if kind == 4:
        fields |= {"logprobs": rng.randrange(5), "prompt_logprobs": rng.randrange(4)}
    if kind == 5:
        fields |= {"allowed_token_ids": list(range(10, 60)), "min_p": 0.1}
    if kind == 6:
        fields |= {"stop_token_ids": rng.sample(range(vocab_size), 20), "ignore_eos": True}
    if kind == 7:
        fields |= {"logit_bias": {9: 5.0, 11: -100.0}, "stop": ["a", "th"]}
    return SamplingParams(**fields)


def comparable(outs: list[RequestOutput]) -> list[tuple]:
    return [
        (o.token_id, o.text, o.finish_reason, o.finish_detail, o.token_logprobs, o.top_token_ids)
        for o in outs
    ] + [outs[0].prompt_logprobs]


async def run_all(
    folder: ScriptedFolder, engine: AsyncEngine, requests: list
) -> list[list[RequestOutput]]:
    """Run requests of which none has begun before all are there."""
    with folder.held():
        tasks = [asyncio.create_task(outputs(engine, *request)) for request in requests]
        while (await engine.stats())["live"] < len(requests):
            await asyncio.sleep(0)
    return await asyncio.gather(*tasks)


SETTINGS = list(product([False, True], [8, 256], [False, True], [True, False]))


@pytest.mark.slow
async def test_every_setting_gives_each_request_what_it_gets_alone(folder) -> None:
    """PRE-01, PEN-01 and LP-01, overlap on and off."""
    rng = random.Random(1)
    vocab_size = folder.script["vocab_size"]
    shared = [rng.randrange(1, vocab_size) for _ in range(20)]
    requests = []
    for i in range(40):
        own = [rng.randrange(1, vocab_size) for _ in range(rng.randrange(1, 40))]
        requests.append(((shared if i % 2 else []) + own, params_of_many_kinds(rng, vocab_size)))
    async with AsyncEngine(folder.args(enable_prefix_caching=False)) as engine:
        alone = [comparable(await outputs(engine, *request)) for request in requests]
    for overlap, budget, caching, roomy in SETTINGS:
        args = folder.args(
            async_scheduling=overlap,
            max_num_batched_tokens=budget,
            enable_prefix_caching=caching,
            # Small blocks, so that what is left free for rows to grow is soon used up.
            num_kv_blocks=4096 if roomy else 110,
            block_size=1,
            stop_preempted_request=False,
        )
        async with AsyncEngine(args) as engine:
            results = [comparable(outs) for outs in await run_all(folder, engine, requests)]
            stats = await engine.stats()
            assert (stats["preemptions"] > 0) == (not roomy)
        for request, expected, got in zip(requests, alone, results, strict=True):
            assert got == expected, (overlap, budget, caching, roomy, request)


async def test_the_stop_policy_ends_a_preempted_request_with_a_true_prefix(folder) -> None:
    """PRE-01 in stop mode."""
    args = folder.args(num_kv_blocks=24, block_size=4, stop_preempted_request=True)
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    prompts = [[i + 1, 2, 3, 4] for i in range(8)]
    async with AsyncEngine(args) as engine:
        results = await run_all(folder, engine, [(prompt, params) for prompt in prompts])
    preempted = 0
    for prompt, outs in zip(prompts, results, strict=True):
        got = tokens(outs)
        assert got == folder.reference(prompt, 60)[: len(got)]
        if end(outs) == ("insufficient_system_resource", "preempted"):
            preempted += 1
        else:
            assert end(outs)[0] == "length"
    assert preempted > 0


async def test_penalties_and_bad_words_see_every_token_also_across_a_recompute(folder) -> None:
    """PEN-01."""
    strong = SamplingParams(repetition_penalty=100, max_tokens=60, ignore_eos=True, seed=4)
    words = [[a, b] for a in range(20, 40) for b in range(60, 70)][:200]
    banned = SamplingParams(bad_words=words, max_tokens=60, ignore_eos=True, seed=5)
    plain = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    args = folder.args(num_kv_blocks=40, block_size=4, stop_preempted_request=False)
    prompt = [3, 4, 5]
    async with AsyncEngine(args) as engine:
        filler = [([i, i], plain) for i in range(10, 14)]
        results = await run_all(
            folder, engine, [(prompt, plain), (prompt, strong), (prompt, banned), *filler]
        )
        assert (await engine.stats())["preemptions"] > 0
        a, b, c = (tokens(outs) for outs in results[:3])
        assert a == folder.reference(prompt, 60)
        assert len(set(b + prompt)) == len(b) + len(prompt)
        pairs = list(zip(c, c[1:], strict=False))
        assert not [pair for pair in pairs if list(pair) in words]
        assert tokens(await outputs(engine, prompt, strong)) == b
        assert tokens(await outputs(engine, prompt, banned)) == c


# ---- log probabilities --------------------------------------------------------------------------


async def test_prompt_logprobs_are_whole_and_equal_with_cache_and_chunks(folder) -> None:
    """LP-01."""
    rng = random.Random(2)
    prompts = [[rng.randrange(1, 200) for _ in range(n)] for n in (1, 2, 15, 16, 17, 33)]
    async with AsyncEngine(folder.args(enable_prefix_caching=False)) as engine:
        expected = {}
        for prompt, k in product(prompts, (0, 1, 5)):
            params = SamplingParams(prompt_logprobs=k, max_tokens=1, temperature=0)
            [out] = await outputs(engine, prompt, params)
            assert out.prompt_logprobs is not None
            assert len(out.prompt_logprobs) == len(prompt)
            assert out.prompt_logprobs[0] is None
            for token_id, entry in zip(prompt[1:], out.prompt_logprobs[1:], strict=True):
                assert token_id in entry
                assert len(entry) in (k, k + 1) if k else len(entry) == 1
                assert all(value <= 0 for value in entry.values())
            expected[tuple(prompt), k] = out.prompt_logprobs
    for budget in (8, 64):
        async with AsyncEngine(folder.args(max_num_batched_tokens=budget)) as engine:
            await outputs(engine, [*prompts[-1][:20], 9, 9, 9], SamplingParams(max_tokens=1))
            for _, prompt, k in product(range(2), prompts, (0, 1, 5)):
                params = SamplingParams(prompt_logprobs=k, max_tokens=1, temperature=0)
                [out] = await outputs(engine, prompt, params)
                assert out.prompt_logprobs == expected[tuple(prompt), k], (budget, k, len(prompt))


FILTERS = [{}, {"top_k": 1}, {"top_p": 0.5}, {"logit_bias": {7: 50.0}}, {"temperature": 5.0}]


async def test_logprobs_are_sorted_complete_and_raw_whatever_filters_apply(folder) -> None:
    """LP-02, by the Python client."""
    async with AsyncEngine(folder.args()) as engine:
        for k, fields in product([0, 1, 5, 20], FILTERS):
            params = SamplingParams(logprobs=k, max_tokens=10, seed=3, ignore_eos=True, **fields)
            check_logprobs(await outputs(engine, [5, 6, 7], params), k)


def check_logprobs(outs: list[RequestOutput], k: int) -> None:
    for out in outs:
        assert len(out.top_token_ids) == len(out.top_logprobs) == k
        assert len(set(out.top_token_ids)) == k
        assert out.top_logprobs == sorted(out.top_logprobs, reverse=True)
        assert all(value <= 0 for value in [*out.top_logprobs, out.token_logprobs])
        assert 0 <= out.sum_smaller_probs <= 1 - math.exp(out.token_logprobs) + 1e-5
        if out.token_id in out.top_token_ids:
            at = out.top_token_ids.index(out.token_id)
            assert out.top_logprobs[at] == out.token_logprobs
        elif k:
            assert out.token_logprobs <= out.top_logprobs[-1]


# ---- LLM ----------------------------------------------------------------------------------------


def test_llm_keeps_input_order_and_a_bad_item_leaves_nothing_behind(folder) -> None:
    llm_args = {"worker_module": "support.scripted_worker"}
    greedy = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    with LLM(str(folder.path), **llm_args) as llm:
        prompts = [[i + 1, 2] for i in range(50)]
        completions = llm.generate(prompts, greedy, progress=False)
        assert [c.prompt_token_ids for c in completions] == prompts
        assert [c.token_ids for c in completions] == [folder.reference(p, 6) for p in prompts]
        with pytest.raises(ValueError, match="prompt 2: prompt must not be empty"):
            llm.generate(["a", "b", "", "c"], greedy, progress=False)
        with pytest.raises(ValueError, match="prompt 1: .*stop_token_ids"):
            bad = SamplingParams(stop_token_ids=[10**6])
            llm.generate(["a", "b"], [greedy, bad], progress=False)
        assert llm.stats()["live"] == 0
        two = llm.generate(["a", "b"], SamplingParams(n=2, max_tokens=3, seed=1), progress=False)
        assert [(c.prompt, c.index) for c in two] == [("a", 0), ("a", 1), ("b", 0), ("b", 1)]
        [chat] = llm.chat([{"role": "user", "content": "hi"}], greedy, progress=False)
        assert chat.finish_reason == "length"
        [scored] = llm.generate("abc", SamplingParams(logprobs=2, prompt_logprobs=1, max_tokens=2))
        assert [len(entry) in (2, 3) for entry in scored.logprobs] == [True, True]
        assert list(scored.logprobs[0])[0] == scored.token_ids[0]
        assert len(scored.prompt_logprobs) == len(scored.prompt_token_ids)


def test_step_returns_every_output_once(folder) -> None:
    with LLMEngine(folder.args()) as engine:
        params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
        with folder.held():
            for i in range(20):
                engine.add_request(f"r{i}", [i + 1, 3], params)
            engine.add_request("gone", [1], SamplingParams(max_tokens=1000, ignore_eos=True))
            assert engine.abort_request("gone")
            engine.stats()  # answered when the abort has been read
        streams: dict[str, list[RequestOutput]] = {}
        while engine.has_unfinished_requests():
            for out in engine.step():
                streams.setdefault(out.request_id, []).append(out)
        assert engine.step() == []
        for outs in streams.values():
            check_stream(outs)
        for i in range(20):
            assert tokens(streams[f"r{i}"]) == folder.reference([i + 1, 3], 9)
        assert end(streams["gone"]) == ("abort", "client_abort")
