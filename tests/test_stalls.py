"""Somebody does not read for a long time: an app its outputs, or a scheduler its requests."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from deepinfer import AsyncEngine, Client, LLMEngine, RequestOutput, SamplingParams
from deepinfer.frontend import connection
from deepinfer.frontend.errors import EngineBusyError
from deepinfer.wire.messages import Call
from support.patience import PATIENCE_S
from support.scripted_engine import ScriptedFolder, process_of
from support.streams import check_stream, token_ids, tokens

pytestmark = pytest.mark.process

SHORT = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
ENDLESS = SamplingParams(temperature=0, max_tokens=16_000, ignore_eos=True)

STREAM = SamplingParams(temperature=0, max_tokens=4000, ignore_eos=True, logprobs=1)
# Answers of a kilobyte each: more than ZeroMQ and the scheduler hold for who does not read.
QUESTIONS = 25_000


@pytest.fixture
def folder(tmp_path: Path) -> ScriptedFolder:
    return ScriptedFolder(tmp_path / "model", max_model_len=16_384)


def wait_until_forgotten(endpoint: str) -> None:
    """Block this thread, and with it the loop it runs, until the engine gave its owner up."""

    async def watch() -> None:
        async with Client(endpoint) as client, asyncio.timeout(PATIENCE_S):
            while not (await client.stats())["ended_slow_reader"]:
                pass

    with ThreadPoolExecutor() as other_thread:
        other_thread.submit(asyncio.run, watch()).result()


def ask_much(owner: AsyncEngine | LLMEngine) -> None:
    """Ask for what the scheduler can hardly hold, and read none of it."""
    for number in range(QUESTIONS):
        owner._connection.send(Call(1_000_000 + number, "stats"))


async def test_an_app_that_did_not_read_for_long_goes_on_with_its_own_scheduler(
    folder, tmp_path
) -> None:
    endpoint = f"ipc://{tmp_path}/engine"
    async with AsyncEngine(folder.args(endpoint=endpoint)) as engine:
        scheduler = process_of("deepinfer.scheduler")
        outs: list[RequestOutput] = []
        stream = engine.generate([5, 6], STREAM)
        with folder.held(after=5):
            while len(outs) < 5:
                outs.append(await anext(stream))
            ask_much(engine)
            wait_until_forgotten(endpoint)
        outs += [out async for out in stream]
        check_stream(outs)
        assert tokens(outs) == folder.reference([5, 6], 4000)
        assert all(len(out.top_logprobs) == 1 for out in outs)
        assert process_of("deepinfer.scheduler").pid == scheduler.pid
        # Its new identity is watched like any client's: only its heartbeats keep it there.
        assert (await engine.health())["ok"]


def test_llm_engine_goes_on_with_its_own_scheduler_after_a_long_pause(folder, tmp_path) -> None:
    endpoint = f"ipc://{tmp_path}/engine"
    args = folder.args(endpoint=endpoint, heartbeat_timeout_s=2)
    with LLMEngine(args) as engine:
        scheduler = process_of("deepinfer.scheduler")
        with folder.held(after=5):
            engine.add_request("r", [5, 6], STREAM)
            outs = engine.step()
            ask_much(engine)
            wait_until_forgotten(endpoint)
        while engine.has_unfinished_requests():
            outs += engine.step()
        check_stream(outs)
        assert tokens(outs) == folder.reference([5, 6], 4000)
        assert engine.stats()["live"] == 0
        assert process_of("deepinfer.scheduler").pid == scheduler.pid


async def stop_reading(engine: AsyncEngine) -> psutil.Process:
    """Stop the scheduler and fill what the system holds for it."""
    scheduler = process_of("deepinfer.scheduler")
    scheduler.suspend()
    for number in range(30):
        filler = token_ids(engine, [1] * 16_000, SHORT, request_id=f"filler{number}")
        await walk_away({f"filler{number}": asyncio.create_task(filler)}, engine)
    return scheduler


async def walk_away(tasks: dict[str, asyncio.Task], engine: AsyncEngine) -> None:
    """Cancel consumers, by the id of their request, once it was sent."""
    for request_id, task in tasks.items():
        while engine._session.get(request_id) is None:
            await asyncio.sleep(0)
        task.cancel()
    ends = await asyncio.gather(*tasks.values(), return_exceptions=True)
    assert all(isinstance(end, asyncio.CancelledError) for end in ends)


async def test_aborts_sent_while_the_scheduler_is_stopped_arrive_when_it_continues(folder) -> None:
    async with AsyncEngine(folder.args(heartbeat_timeout_s=100)) as engine:
        count = 1500
        streams = {
            f"r{i}": token_ids(engine, [1 + i % 200, 1 + i // 200], ENDLESS, request_id=f"r{i}")
            for i in range(count)
        }
        tasks = {name: asyncio.create_task(stream) for name, stream in streams.items()}
        async with asyncio.timeout(PATIENCE_S):
            while (await engine.stats())["live"] < count:
                pass
        scheduler = await stop_reading(engine)
        await walk_away(tasks, engine)
        scheduler.resume()
        async with asyncio.timeout(PATIENCE_S):
            while (stats := await engine.stats())["live"]:
                pass
        assert stats["ended_client_abort"] == count + 30
        assert await token_ids(engine, [7, 8], SHORT) == folder.reference([7, 8], 8)


async def test_requests_that_nobody_reads_are_refused_until_somebody_does(
    folder, monkeypatch
) -> None:
    monkeypatch.setattr(connection, "_MAX_UNHEARD_BYTES", 1 << 20)
    async with AsyncEngine(folder.args(heartbeat_timeout_s=100)) as engine:
        scheduler = process_of("deepinfer.scheduler")
        scheduler.suspend()
        with pytest.raises(EngineBusyError, match="does not read"):
            async with asyncio.timeout(PATIENCE_S):
                while True:
                    stream = engine.generate([1] * 16_000, SHORT)
                    task = asyncio.ensure_future(anext(stream))
                    while not len(engine._session) and not task.done():
                        await asyncio.sleep(0)
                    task.cancel()
                    await asyncio.gather(task, return_exceptions=True)
                    if not task.cancelled():
                        task.result()
        scheduler.resume()
        async with asyncio.timeout(PATIENCE_S):
            while True:
                try:
                    got = await token_ids(engine, [7, 8], SHORT)
                    break
                except EngineBusyError:
                    await asyncio.sleep(0)
        assert got == folder.reference([7, 8], 8)


def test_llm_engine_waits_to_add_a_request_that_nobody_would_read(folder, monkeypatch) -> None:
    monkeypatch.setattr(connection, "_MAX_UNHEARD_BYTES", 1 << 20)
    monkeypatch.setattr(connection, "_STALL_S", 0.0)
    with LLMEngine(folder.args(heartbeat_timeout_s=100)) as engine:
        scheduler = process_of("deepinfer.scheduler")
        scheduler.suspend()
        continued = threading.Timer(1.0, scheduler.resume)
        sent = 0
        while not engine._connection.stalled:
            engine.add_request(f"r{sent}", [1] * 16_000, SHORT)
            sent += 1
        continued.start()
        engine.add_request("last", [7, 8], SHORT)
        assert not engine._connection.stalled
        assert sent * 64_000 < 4 << 20
        last = []
        while engine.has_unfinished_requests():
            last += [out for out in engine.step() if out.request_id == "last"]
        assert tokens(last) == folder.reference([7, 8], 8)
