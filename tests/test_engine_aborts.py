"""Aborts, cancels, vanished consumers, reused ids: nothing is left of a request that is gone."""

from __future__ import annotations

import asyncio
import copy
import gc
import random
import weakref
from collections.abc import AsyncIterator

import psutil
import pytest
import pytest_asyncio

from deepinfer import AsyncEngine, SamplingParams
from support.patience import PATIENCE_S
from support.scripted_engine import ScriptedFolder, engine_processes
from support.streams import end, outputs, text, token_ids, tokens

pytestmark = [pytest.mark.process, pytest.mark.asyncio(loop_scope="module")]

ENDLESS = SamplingParams(temperature=0, max_tokens=1000, ignore_eos=True)
SHORT = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> ScriptedFolder:
    return ScriptedFolder(tmp_path_factory.mktemp("scripted"), max_model_len=16_384)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(folder: ScriptedFolder) -> AsyncIterator[AsyncEngine]:
    async with AsyncEngine(folder.args()) as engine:
        yield engine


async def assert_quiet(engine: AsyncEngine) -> None:
    """Nothing runs, waits or holds a block, soon."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            stats = await engine.stats()
            busy = stats["live"] + stats["waiting"] + stats["running"] + stats["in_flight"]
            if not busy:
                break
    assert stats["blocks_free"] + stats["blocks_cached"] == stats["blocks_total"]
    assert len(engine._session) == 0
    assert not engine._session._samples
    assert not engine._session._names


async def test_requests_that_never_ran_end_with_abort_and_no_token(folder) -> None:
    """ABT-01."""
    async with AsyncEngine(folder.args(max_num_seqs=1)) as engine:
        # On a busy machine "a" would come to its end within these turns, and make room.
        with folder.held(after=1):
            stream = engine.generate([3, 4], ENDLESS, request_id="a")
            started = await anext(stream)
            for turn in range(20):
                queued = [
                    asyncio.create_task(outputs(engine, [5, 6, turn], SHORT, request_id=name))
                    for name in ("b", "c")
                ]
                while engine._session.get("c") is None:
                    await asyncio.sleep(0)
                before = (await engine.stats())["prompt_tokens"]
                assert await engine.abort("b")
                assert await engine.abort("c")
                for task in queued:
                    outs = await task
                    assert end(outs) == ("abort", "client_abort")
                    assert tokens(outs) == []
                assert (await engine.stats())["prompt_tokens"] == before
        await engine.abort("a")
        got = tokens([started] + [out async for out in stream])
        assert got == folder.reference([3, 4], len(got))
        await assert_quiet(engine)


async def test_three_hundred_consumers_that_walk_away_leave_nothing(engine, folder) -> None:
    """ABT-03."""
    rng = random.Random(5)

    async def walk_away(number: int) -> None:
        prompt = [rng.randrange(1, 200) for _ in range(rng.randrange(1, 40))]
        if number % 3 == 0:  # after the first output
            stream = engine.generate(prompt, ENDLESS)
            await anext(stream)
            await stream.aclose()
        elif number % 3 == 1:  # before or while the request is handed over
            task = asyncio.create_task(outputs(engine, prompt, ENDLESS))
            for _ in range(number % 7):
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        else:  # never read
            await engine.generate(prompt, ENDLESS).aclose()

    await asyncio.gather(*(walk_away(number) for number in range(300)))
    await assert_quiet(engine)
    assert await token_ids(engine, [9, 9], SHORT) == folder.reference([9, 9], 8)


async def test_a_cancel_at_any_moment_of_the_hand_over_leaves_nothing(engine, folder) -> None:
    """ABT-04."""
    prompt = "the quick brown fox " * 500
    process = psutil.Process()
    for round_ in range(600):
        if round_ == 100:
            gc.collect()
            before = process.memory_info().rss
        with folder.held():
            task = asyncio.create_task(outputs(engine, prompt, ENDLESS, request_id="same"))
            for _ in range(round_ % 51):
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
    gc.collect()
    assert process.memory_info().rss - before < 20 << 20
    await assert_quiet(engine)


async def test_an_iterator_that_is_dropped_aborts_its_request(engine) -> None:
    stream = engine.generate([1, 2], ENDLESS)
    await anext(stream)
    gone = weakref.ref(stream)
    del stream
    gc.collect()
    while gone() is not None:
        await asyncio.sleep(0)
    await assert_quiet(engine)


async def test_a_duplicate_live_id_is_refused_and_the_first_goes_on(engine, folder) -> None:
    """ID-01."""
    with folder.held():
        first = asyncio.create_task(token_ids(engine, [1, 2], SHORT, request_id="x"))
        while engine._session.get("x") is None:
            await asyncio.sleep(0)
        with pytest.raises(ValueError, match="request_id 'x' is in use"):
            await outputs(engine, [3, 4], SHORT, request_id="x")
    assert await first == folder.reference([1, 2], 8)


async def test_an_id_can_be_used_again_at_once_and_shows_nothing_of_before(engine, folder) -> None:
    """ID-01."""
    one = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    for i in range(400):
        prompt = [3 + i % 100, 4]
        assert await token_ids(engine, prompt, one, request_id="r") == folder.reference(prompt, 2)
        stream = engine.generate([200, 1], ENDLESS, request_id="r")
        await anext(stream)
        await stream.aclose()
        stopped = SamplingParams(
            golden_token_ids=folder.tokenizer.encode("xyz"), max_tokens=90, stop="z"
        )
        assert text(await outputs(engine, [5], stopped, request_id="r")) == "xy"
    await assert_quiet(engine)


async def test_streams_never_mix_and_outputs_never_change_afterwards(folder) -> None:
    """ISO-01."""
    # Small blocks, so that what is left free for rows to grow is soon used up.
    args = folder.args(
        num_kv_blocks=240, block_size=1, max_num_seqs=24, stop_preempted_request=False
    )
    rng = random.Random(11)
    async with AsyncEngine(args) as engine:
        idle = engine.generate([7, 7], ENDLESS)  # a consumer that reads one output and no more
        await anext(idle)

        async def one(number: int) -> None:
            prompt = [number + 1, *(rng.randrange(1, 200) for _ in range(rng.randrange(1, 30)))]
            count = rng.randrange(1, 40)
            params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
            seen, copies = [], []
            give_up = number % 5 == 4
            async for out in engine.generate(prompt, params, request_id=f"r{number % 40}"):
                seen.append(out)
                copies.append(copy.deepcopy(out))
                if give_up and len(seen) == count // 2:
                    break
            got = tokens(seen)
            assert got == folder.reference(prompt, count)[: len(got)]
            assert give_up or len(got) == count
            assert seen == copies

        for wave in range(2):
            await asyncio.gather(*(one(40 * wave + i) for i in range(40)))
        assert (await engine.stats())["preemptions"] > 0
        await idle.aclose()
        await assert_quiet(engine)


@pytest.mark.slow
async def test_memory_does_not_grow_with_the_number_of_requests(engine) -> None:
    """LEAK-01."""
    rng = random.Random(3)
    processes = [psutil.Process(), *engine_processes()]

    async def tiny(number: int) -> None:
        prompt = [rng.randrange(1, 200) for _ in range(rng.randrange(1, 6))]
        fields = [{}, {"stop": "zz"}, {"logprobs": 2}, {"seed": number}][number % 4]
        stream = engine.generate(prompt, SamplingParams(max_tokens=1, **fields))
        if number % 10 == 0:
            task = asyncio.ensure_future(anext(stream))
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        elif number % 10 == 1:
            with pytest.raises(ValueError, match="vocabulary"):
                await anext(engine.generate(prompt, SamplingParams(stop_token_ids=[10**6])))
        else:
            assert (await anext(stream)).finished
        await stream.aclose()

    async def many(count: int) -> list[int]:
        for start in range(0, count, 100):
            await asyncio.gather(*(tiny(start + i) for i in range(100)))
        await assert_quiet(engine)
        gc.collect()
        return [p.memory_info().rss for p in processes]

    await many(5_000)  # caches, pools and stories reach their bounds
    before = await many(1_000)
    files = [(p.num_fds(), p.num_threads()) for p in processes]
    count = 50_000
    after = await many(count)
    slopes = [(b - a) / count for a, b in zip(before, after, strict=True)]
    assert max(slopes) < 1024, slopes
    assert [(p.num_fds(), p.num_threads()) for p in processes] == files
