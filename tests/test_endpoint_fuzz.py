"""A client that sends whatever it likes hurts nobody: random frames at an engine's endpoint."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import msgspec
import pytest
import zmq

from deepinfer import AsyncEngine, Client, SamplingParams
from deepinfer.wire.columns import pack_int32
from deepinfer.wire.curve import ClientKeys
from deepinfer.wire.messages import (
    AddRequest,
    Answer,
    Call,
    Forgotten,
    Hello,
    OutputBatch,
    ToClient,
)
from support.curve import KeyFolder, free_endpoint
from support.patience import PATIENCE_S
from support.random_frames import random_frames
from support.scripted_engine import ScriptedFolder, process_of
from support.streams import token_ids

pytestmark = pytest.mark.process

LAST_CALL = 1 << 40
LAST_KEY = (1 << 32) - 1


def send_frames(endpoint: str, keys: ClientKeys | None, count: int) -> set[str]:
    """Send them all and wait until the engine has taken the last; return what it answered."""
    answers: set[str] = set()
    answered = served = False
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.setsockopt(zmq.SNDHWM, 0)
        dealer.setsockopt(zmq.IDENTITY, os.urandom(16).hex().encode())
        if keys is not None:
            dealer.setsockopt(zmq.CURVE_SERVERKEY, keys.server)
            dealer.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)
            dealer.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
        dealer.connect(endpoint)
        for frames in random_frames(1, count):
            dealer.send_multipart(frames)
        add = AddRequest(LAST_KEY, "last", pack_int32([5]), SamplingParams(seed=0, max_tokens=1))
        calls = (Hello(), add, Call(LAST_CALL, "health"))
        last = [msgspec.msgpack.encode(message) for message in calls]
        for frame in last:
            dealer.send(frame)
        while True:
            assert dealer.poll(int(PATIENCE_S * 1000)), "the engine says nothing any more"
            message = msgspec.msgpack.decode(dealer.recv(), type=ToClient)
            answers.add(type(message).__name__)
            if isinstance(message, Forgotten):  # it was Goodbye, or too much to read
                for frame in last:
                    dealer.send(frame)
            if isinstance(message, Answer) and message.call_id == LAST_CALL:
                assert message.numbers["ok"]
                answered = True
            if isinstance(message, OutputBatch):
                served |= LAST_KEY in (end.key for end in message.ends)
            if answered and served:
                return answers


@pytest.mark.parametrize("secured", [False, True], ids=["plain", "with keys"])
@pytest.mark.parametrize("count", [3_000, pytest.param(100_000, marks=pytest.mark.slow)])
async def test_random_frames_hurt_nobody(tmp_path: Path, secured: bool, count: int) -> None:
    """SEC-01: also of a client that is let in."""
    folder = ScriptedFolder(tmp_path / "model")
    keys = KeyFolder(tmp_path / "keys")
    args = folder.args(
        endpoint=free_endpoint(),
        curve_keys=str(keys.path) if secured else None,
        stop_preempted_request=False,
    )
    params = SamplingParams(temperature=0, max_tokens=50, ignore_eos=True)
    own = keys.client("other") if secured else {}
    hostile = keys.raw("hostile") if secured else None
    async with AsyncEngine(args) as engine, Client(args.endpoint, **own) as other:
        scheduler = process_of("deepinfer.scheduler")
        flood = asyncio.create_task(asyncio.to_thread(send_frames, args.endpoint, hostile, count))
        streams = 0
        while not flood.done() or streams < 10:
            prompt = [1 + streams % 200, 7]
            for client in (other, engine):
                assert await token_ids(client, prompt, params) == folder.reference(prompt, 50)
            streams += 1
        assert {"Welcome", "Refused", "OutputBatch", "Answer"} <= await flood
        async with asyncio.timeout(PATIENCE_S):
            while (await engine.stats())["clients"] > 2:  # until the hostile one is let go
                await asyncio.sleep(0)
        stats = await engine.stats()
        assert stats["junk_frames"] > count / 4
        assert stats["accepted"] > count / 100
        assert stats["live"] == stats["worker_restarts"] == 0
        assert process_of("deepinfer.scheduler").pid == scheduler.pid
        assert (await engine.health())["ok"]
