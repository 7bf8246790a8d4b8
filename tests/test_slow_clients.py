"""ZMQ-01: clients that stop reading, stop altogether or ask for too much cost only themselves."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import zmq

from deepinfer import AsyncEngine, Client, SamplingParams
from deepinfer.frontend.errors import EngineBusyError
from deepinfer.wire.columns import pack_int32, unpack_int32, unpack_uint32
from deepinfer.wire.messages import (
    AddRequest,
    ClientHeartbeat,
    End,
    Hello,
    OutputBatch,
    ToClient,
)
from support.patience import PATIENCE_S
from support.scripted_engine import ScriptedFolder
from support.streams import token_ids

pytestmark = pytest.mark.process


@pytest.fixture
def folder(tmp_path: Path) -> ScriptedFolder:
    return ScriptedFolder(tmp_path / "model")


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, seed=0)


async def test_who_reads_late_gets_every_token_and_nobody_waits_for_it(folder, tmp_path) -> None:
    endpoint = f"ipc://{tmp_path}/engine"
    prompts = {key: [3, 4, key] for key in range(10)}
    # It sends no heartbeats while it reads.
    args = folder.args(endpoint=endpoint, heartbeat_timeout_s=1000)
    async with AsyncEngine(args) as engine:
        with zmq.Context() as context, context.socket(zmq.DEALER) as late:
            late.setsockopt(zmq.LINGER, 0)
            late.set_hwm(10)
            late.connect(endpoint)
            late.send(msgspec.msgpack.encode(Hello()))
            late.recv()
            for key, prompt in prompts.items():
                add = AddRequest(key, f"late-{key}", pack_int32(prompt), greedy(1000))
                late.send(msgspec.msgpack.encode(add))
            while (await engine.stats())["accepted"] < len(prompts):
                pass
            # Its 10,000 tokens come and pile up, and another client's stream goes on.
            while (await engine.stats())["live"]:
                assert await token_ids(engine, [7, 8], greedy(50)) == folder.reference([7, 8], 50)
                late.send(msgspec.msgpack.encode(ClientHeartbeat()))
            tokens: dict[int, list[int]] = {key: [] for key in prompts}
            ends: dict[int, End] = {}
            while len(ends) < len(prompts):
                assert await asyncio.to_thread(late.poll, int(PATIENCE_S * 1000)), "no more comes"
                message = msgspec.msgpack.decode(late.recv(), type=ToClient)
                if not isinstance(message, OutputBatch):
                    continue
                ids = unpack_int32(message.tokens).tolist()
                for key, token in zip(unpack_uint32(message.keys).tolist(), ids, strict=True):
                    assert key not in ends
                    tokens[key].append(token)
                ends |= {end.key: end for end in message.ends}
    for key, prompt in prompts.items():
        assert ends[key].detail == "max_tokens"
        assert tokens[key] == folder.reference(prompt, 1000)


async def test_a_burst_beyond_the_queue_is_refused_as_retryable_and_nothing_is_lost(
    folder, tmp_path
) -> None:
    endpoint = f"ipc://{tmp_path}/engine"
    async with (
        AsyncEngine(folder.args(endpoint=endpoint, max_queue_len=500)) as engine,
        Client(endpoint) as client,
    ):
        with folder.held():
            prompts = [[1 + i % 200, 1 + i // 200] for i in range(5000)]
            asked = [
                asyncio.create_task(token_ids(client, prompt, greedy(2))) for prompt in prompts
            ]
            while True:
                stats = await engine.stats()
                if stats["accepted"] + stats["refused"] == len(prompts):
                    break
        answers = await asyncio.gather(*asked, return_exceptions=True)
        assert stats["refused"] == sum(isinstance(a, EngineBusyError) for a in answers) > 0
        for prompt, answer in zip(prompts, answers, strict=True):
            if not isinstance(answer, EngineBusyError):
                assert answer == folder.reference(prompt, 2)
        stats = await engine.stats()
        assert stats["live"] == stats["waiting"] == stats["running"] == 0


STOPPED_APP = """
import asyncio, sys
from deepinfer import Client, SamplingParams
async def main():
    async with Client(sys.argv[1]) as client:
        params = SamplingParams(temperature=0, max_tokens=3000, ignore_eos=True)
        async for out in client.generate([3, 4], params):
            print(out.token_id, flush=True)
asyncio.run(main())
"""


async def test_a_stopped_client_is_let_go_and_takes_up_its_stream_when_it_continues(
    tmp_path,
) -> None:
    # Long enough for the engine to find out that nobody hears, which takes two seconds.
    folder = ScriptedFolder(tmp_path / "model", step_ms=2, max_model_len=4096)
    endpoint = f"ipc://{tmp_path}/engine"
    async with AsyncEngine(folder.args(endpoint=endpoint, heartbeat_timeout_s=2)) as engine:
        app = subprocess.Popen(
            [sys.executable, "-c", STOPPED_APP, endpoint], stdout=subprocess.PIPE, text=True
        )
        assert app.stdout is not None
        try:
            first = await asyncio.to_thread(app.stdout.readline)
            app.send_signal(signal.SIGSTOP)
            while not (await engine.stats())["ended_disconnect"]:
                assert await token_ids(engine, [7, 8], greedy(50)) == folder.reference([7, 8], 50)
            app.send_signal(signal.SIGCONT)
            rest = await asyncio.to_thread(app.stdout.read)
            assert await asyncio.to_thread(app.wait) == 0
        finally:
            app.kill()
            app.wait()
            app.stdout.close()
    assert [int(line) for line in (first + rest).split()] == folder.reference([3, 4], 3000)
