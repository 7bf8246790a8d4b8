"""A loop that is slower than its engine: fair turns, answers at once, and nothing lost."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from deepinfer import AsyncEngine, SamplingParams
from deepinfer.frontend import inbox, loop_connection
from deepinfer.frontend.errors import EngineDownError
from deepinfer.frontend.inbox import Inbox, Readers
from deepinfer.frontend.loop_connection import LoopConnection
from deepinfer.frontend.outputs import RequestOutput
from deepinfer.wire.messages import Answer, OutputBatch, ToClient
from support.scripted_engine import ScriptedFolder, process_of
from support.streams import token_ids

OUTPUT = RequestOutput(request_id="a", prompt_len=1, token_id=1)


class Scripted(LoopConnection):
    """A connection on which messages of 10 bytes arrive when the test says so."""

    def __init__(self, folder: Path) -> None:
        self.arriving: list[ToClient] = []
        self.taken: list[ToClient] = []
        super().__init__(f"ipc://{folder}/nobody", b"me", self.taken.append)

    def receive(self) -> ToClient | None:
        self.frame_bytes = 10
        return self.arriving.pop(0) if self.arriving else None


@pytest.fixture
async def connection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """One message a turn is all it has time for."""
    monkeypatch.setattr(loop_connection, "_HAND_OVER_S", 0.0)
    connection = Scripted(tmp_path)
    yield connection
    connection.close()


async def test_an_answer_does_not_wait_behind_outputs(connection: Scripted) -> None:
    outputs = [OutputBatch(step=step) for step in range(5)]
    connection.arriving = [*outputs[:4], Answer(7), outputs[4]]
    connection.drain()
    assert connection.taken == [Answer(7), outputs[0]] and connection.behind
    for step in range(1, 5):
        # Between two of them the loop's other tasks have a turn.
        await asyncio.sleep(0)
        assert connection.taken[1:] == outputs[: step + 1]
    assert not connection.behind


async def test_what_somebody_read_is_handed_over_without_another_event(
    connection: Scripted,
) -> None:
    outputs = [OutputBatch(step=step) for step in range(3)]
    connection._loop.remove_reader(connection._descriptor)
    connection.arriving = list(outputs)
    connection.read()
    assert connection.behind and not connection.taken
    for _ in range(3):
        await asyncio.sleep(0)
    assert connection.taken == outputs and not connection.behind


async def test_a_closed_connection_hands_nothing_over_and_rests(
    connection: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection.arriving = [OutputBatch(step=step) for step in range(3)]
    connection.drain()
    connection.close()
    assert not connection.behind
    await asyncio.sleep(0)
    calls: list[object] = []
    monkeypatch.setattr(connection._loop, "call_soon", calls.append)
    connection.drain()
    monkeypatch.undo()
    assert not calls and len(connection.taken) == 1


async def test_what_is_read_ahead_is_bounded(
    connection: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop_connection, "_READ_AHEAD_BYTES", 30)
    connection.arriving = [OutputBatch(step=step) for step in range(100)]
    left = []
    while connection.arriving or connection.behind:
        connection.drain()
        left.append(len(connection.arriving))
    assert left == [max(0, 97 - turn) for turn in range(100)]
    assert [message.step for message in connection.taken] == list(range(100))


async def test_what_waits_is_handed_over_though_nothing_more_arrives(connection: Scripted) -> None:
    connection.arriving = [OutputBatch(step=step) for step in range(3)]
    connection.drain()
    while connection.wait(0):
        connection.drain()
    assert len(connection.taken) == 3


async def test_waiting_outputs_come_together_and_an_error_after_them() -> None:
    readers = Readers()
    box = Inbox(readers)
    waiting = asyncio.ensure_future(box.take())
    await asyncio.sleep(0)
    for _ in range(inbox.MAX_BATCH + 2):
        box.put(OUTPUT, closed=False)
    box.put(EngineDownError("gone"), closed=True)
    readers.wake()
    assert len(await waiting) == inbox.MAX_BATCH
    assert await box.take() == [OUTPUT] * 2
    with pytest.raises(EngineDownError, match="gone"):
        await box.take()
    assert box.empty


async def test_many_readers_go_on_by_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inbox, "WOKEN_PER_TURN", 2)
    readers = Readers()
    boxes = [Inbox(readers) for _ in range(7)]
    waiting = [asyncio.ensure_future(box.take()) for box in boxes]
    await asyncio.sleep(0)
    waiting[1].cancel()
    for _ in range(2):  # the second time, those that have not had their turn find two
        for box in boxes:
            box.put(OUTPUT, closed=False)
        readers.wake()
        await asyncio.sleep(0)
    answers = await asyncio.gather(*waiting, return_exceptions=True)
    assert isinstance(answers.pop(1), asyncio.CancelledError)
    assert list(map(len, answers)) == [1, 2, 2, 2, 2, 2]


@pytest.mark.process
async def test_streams_of_a_loop_that_is_behind_are_exact_also_when_the_scheduler_dies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop_connection, "_HAND_OVER_S", 0.0)
    folder = ScriptedFolder(tmp_path / "model")
    params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    prompts = [[3, 4, number] for number in range(5, 37)]
    async with AsyncEngine(folder.args()) as engine:
        asked = [asyncio.ensure_future(token_ids(engine, prompt, params)) for prompt in prompts]
        batches = engine.generate_batches([9, 9], params)
        own = [output.token_id for output in await anext(batches)]
        while not engine._connection.behind:
            engine._connection.wait(1.0)
            engine._connection.read()
        process_of("deepinfer.scheduler").kill()
        async for outputs in batches:
            own += [output.token_id for output in outputs]
        assert own == folder.reference([9, 9], 200)
        for prompt, answer in zip(prompts, await asyncio.gather(*asked), strict=True):
            assert answer == folder.reference(prompt, 200)
