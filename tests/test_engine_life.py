"""The life of an engine as its app sees it: started, stopped, closed, used from a wrong place."""

from __future__ import annotations

import asyncio
import inspect
import signal
import threading
from collections.abc import AsyncIterator, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from deepinfer import LLM, AsyncEngine, Client, LLMEngine, SamplingParams
from deepinfer.frontend.errors import EngineBusyError, EngineDownError
from support.patience import PATIENCE_S
from support.scripted_engine import ScriptedFolder, engine_processes, process_of
from support.streams import token_ids, tokens

pytestmark = pytest.mark.process

SHORT = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
ENDLESS = SamplingParams(temperature=0, max_tokens=1000, ignore_eos=True)


@pytest.fixture
def folder(tmp_path: Path) -> ScriptedFolder:
    return ScriptedFolder(tmp_path / "model")


async def test_stop_tells_those_who_wait_for_the_start_and_cancels_nobody(folder) -> None:
    engine = AsyncEngine(folder.args())
    waiting = [asyncio.create_task(token_ids(engine, [1, 2], SHORT)) for _ in range(3)]
    waiting += [asyncio.create_task(engine.start()), asyncio.create_task(engine.stats())]
    while not engine_processes():
        await asyncio.sleep(0)
    waiting[0].cancel()  # the others go on waiting
    await asyncio.sleep(0)
    await engine.stop()
    ends = await asyncio.gather(*waiting, return_exceptions=True)
    assert isinstance(ends[0], asyncio.CancelledError)
    for end in ends[1:]:
        assert isinstance(end, EngineDownError)
        assert "stop() was called" in str(end)
    assert not engine_processes()


async def test_an_engine_stopped_before_its_start_began_says_so(folder) -> None:
    engine = AsyncEngine(folder.args())
    waiting = asyncio.create_task(engine.start())
    stopping = asyncio.create_task(engine.stop())
    with pytest.raises(EngineDownError, match=r"stop\(\) was called"):
        await waiting
    await stopping
    for call in (engine.start(), engine.stats(), token_ids(engine, [1], SHORT)):
        with pytest.raises(EngineDownError, match=r"stop\(\) was called"):
            await call
    assert not engine_processes()


def in_another_loop(call: Coroutine[Any, Any, Any]) -> BaseException | None:
    """Run a coroutine in a loop of another thread and return the error it ended with."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            asyncio.run(call)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return errors[0] if errors else None


async def test_use_from_another_loop_is_an_error_that_says_so(folder, tmp_path) -> None:
    endpoint = f"ipc://{tmp_path}/engine"
    async with AsyncEngine(folder.args(endpoint=endpoint)) as engine, Client(endpoint) as client:
        for used in (engine, client):
            stream = used.generate([3, 4], ENDLESS)
            got = [(await anext(stream)).token_id]
            for call in (
                used.start(),
                used.stats(),
                used.abort("x"),
                used.stop(),
                token_ids(used, [1, 2], SHORT),
            ):
                error = in_another_loop(call)
                assert isinstance(error, RuntimeError)
                assert f"this {type(used).__name__} was started in another" in str(error)
            got += [out.token_id async for out in stream]
            assert got == folder.reference([3, 4], 1000)


def test_an_engine_whose_loop_is_closed_can_still_be_stopped(folder) -> None:
    engine = AsyncEngine(folder.args())
    asyncio.run(engine.start())
    processes = engine_processes()
    assert len(processes) == 2
    with pytest.raises(RuntimeError, match="another event loop"):
        asyncio.run(token_ids(engine, [1, 2], SHORT))
    asyncio.run(engine.stop())
    _, alive = psutil.wait_procs(processes, PATIENCE_S)
    assert not alive
    with pytest.raises(EngineDownError, match="stop"):
        asyncio.run(token_ids(engine, [1, 2], SHORT))


def test_a_closed_llm_engine_has_nothing_open_and_says_that_it_is_closed(folder) -> None:
    with LLMEngine(folder.args()) as engine, folder.held(after=1):
        prepared = engine.prepare([1, 2], ENDLESS)
        engine.add_prepared("r", prepared)
        engine.step()
        assert engine.has_unfinished_requests()
    quiet = {"close": (), "drop_request": ("r",), "has_unfinished_requests": ()}
    refused = {
        "add_request": ("r2", [1, 2]),
        "add_prepared": ("r2", prepared),
        "prepare": ([1, 2],),
        "abort_request": ("r",),
        "step": (),
        "stats": (),
        "trace": ("r",),
    }
    public = inspect.getmembers(LLMEngine, inspect.isfunction)
    assert {name for name, _ in public if name[0] != "_"} == quiet.keys() | refused.keys()
    for name, arguments in refused.items():
        with pytest.raises(EngineDownError, match="the engine was closed"):
            getattr(engine, name)(*arguments)
    for name, arguments in quiet.items():
        assert not getattr(engine, name)(*arguments)


def test_outputs_beside_a_refusal_are_not_lost(folder) -> None:
    with LLMEngine(folder.args(max_queue_len=1, max_num_seqs=1)) as engine:
        with folder.held():
            for name in ("a", "b", "c", "d", "e"):
                engine.add_request(name, [1, 2], SHORT)
            # The answer to it comes after the refusals, and asking reads them.
            engine.stats()
        got: dict[str, list] = {}
        refusals = 0
        while engine.has_unfinished_requests():
            try:
                for out in engine.step():
                    got.setdefault(out.request_id, []).append(out)
            except RuntimeError as error:
                assert "request '" in str(error)
                refusals += 1
        assert refusals > 0
        assert refusals + len(got) == 5
        for outs in got.values():
            assert tokens(outs) == folder.reference([1, 2], 8)


@asynccontextmanager
async def busy_engine(
    folder: ScriptedFolder, params: SamplingParams, count: int = 1, **fields: Any
) -> AsyncIterator[tuple[AsyncEngine, list[asyncio.Task[list[int]]]]]:
    """An engine that was started by hand and is held, and its open streams: prompts ``[3, n]``."""
    engine = AsyncEngine(folder.args(**fields))
    await engine.start()
    with folder.held():
        streams = [asyncio.create_task(token_ids(engine, [3, n], params)) for n in range(count)]
        while (await engine.stats())["live"] < count:
            await asyncio.sleep(0)
        yield engine, streams


async def test_a_drained_engine_finishes_what_is_open_and_refuses_what_comes(folder) -> None:
    async with busy_engine(folder, SHORT, 20) as (engine, streams):
        stopping = asyncio.create_task(engine.stop(drain=True))
        await asyncio.sleep(0)
        with pytest.raises(EngineBusyError, match="shuts down"):
            await token_ids(engine, [1], SHORT)
        assert not stopping.done()
    for n, got in enumerate(await asyncio.gather(*streams)):
        assert got == folder.reference([3, n], 8)
    await stopping
    assert not engine_processes()
    with pytest.raises(EngineDownError):
        await token_ids(engine, [1], SHORT)


async def test_stop_ends_a_drain_that_goes_on(folder) -> None:
    async with busy_engine(folder, ENDLESS, drain_timeout_s=600) as (engine, (stream,)):
        draining = asyncio.create_task(engine.stop(drain=True))
        await asyncio.sleep(0)
        await engine.stop()
        await draining
        with pytest.raises(EngineDownError, match="stop"):
            await stream
    assert not engine_processes()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
async def test_nothing_is_lost_when_the_scheduler_is_in_a_drain(folder, how) -> None:
    async with busy_engine(folder, SHORT, 20, heartbeat_timeout_s=2) as (engine, streams):
        process_of("deepinfer.scheduler").send_signal(how)
        stopping = asyncio.create_task(engine.stop(drain=True))
        await asyncio.sleep(0)
    for n, got in enumerate(await asyncio.gather(*streams)):
        assert got == folder.reference([3, n], 8)
    await stopping
    assert not engine_processes()


async def test_a_drain_goes_on_when_who_waits_for_it_is_cancelled(folder) -> None:
    async with busy_engine(folder, SHORT) as (engine, (stream,)):
        impatient = asyncio.create_task(engine.stop(drain=True))
        patient = asyncio.create_task(engine.stop(drain=True))
        await asyncio.sleep(0)
        impatient.cancel()
        with pytest.raises(EngineBusyError, match="shuts down"):
            await token_ids(engine, [1], SHORT)
    assert await stream == folder.reference([3, 0], 8)
    await patient
    assert not engine_processes()
    with pytest.raises(EngineDownError, match="stopped"):
        await token_ids(engine, [1], SHORT)


async def test_a_cancelled_stop_frees_who_waits_for_the_drain(folder) -> None:
    async with busy_engine(folder, ENDLESS, drain_timeout_s=600) as (engine, (stream,)):
        draining = asyncio.create_task(engine.stop(drain=True))
        await asyncio.sleep(0)
        stopping = asyncio.create_task(engine.stop())
        await asyncio.sleep(0)
        stopping.cancel()
        await draining
        with pytest.raises(EngineDownError, match="stop"):
            await stream
    assert not engine_processes()


def test_threads_that_share_an_llm_take_turns(folder) -> None:
    with LLM(str(folder.path), worker_module="support.scripted_worker") as llm:

        def complete(i: int) -> list[int]:
            (completion,) = llm.generate([[3, i]], SHORT, progress=False)
            return completion.token_ids

        with ThreadPoolExecutor(8) as pool:
            results = list(pool.map(complete, range(40)))
    assert results == [folder.reference([3, i], 8) for i in range(40)]


def test_a_text_or_ids_in_the_place_of_messages_is_refused(folder) -> None:
    with LLM(str(folder.path), worker_module="support.scripted_worker") as llm:
        for wrong in ("Who are you?", {"role": "user", "content": "hi"}, ["hi"], [[1, 2]], 5, [5]):
            with pytest.raises(ValueError, match="must be a list of messages"):
                llm.chat(wrong, SHORT, progress=False)
        assert llm.chat([], SHORT, progress=False) == []


def test_a_model_name_in_the_place_of_engine_arguments_is_refused() -> None:
    with pytest.raises(TypeError, match="EngineArgs"):
        AsyncEngine("smollm2-135m")
