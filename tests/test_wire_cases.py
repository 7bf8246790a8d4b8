"""Cases of the lifecycle as clients of any language see them: frames over tcp, also with keys."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest

from deepinfer import AsyncEngine, SamplingParams
from deepinfer.wire.columns import pack_int32, unpack_int32, unpack_uint32
from deepinfer.wire.messages import (
    Answer,
    Call,
    ClientHeartbeat,
    End,
    Hello,
    OutputBatch,
    Refused,
    RowExtra,
    StopMatched,
    Welcome,
)
from support.curve import KeyFolder, RawClient, free_endpoint
from support.scripted_engine import ScriptedFolder
from support.streams import token_ids

pytestmark = pytest.mark.process

LIMIT = 256
NEIGHBOUR = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)


@dataclass
class Got:
    """What came for one key; after its end or refusal nothing may."""

    tokens: list[int] = field(default_factory=list)
    extras: list[RowExtra] = field(default_factory=list)
    cached: list[int] = field(default_factory=list)
    end: End | None = None
    refused: Refused | None = None

    @property
    def over(self) -> bool:
        return self.end is not None or self.refused is not None


class Peer:
    """A client that speaks the protocol by the book, and holds what comes against it."""

    def __init__(self, engine: AsyncEngine, raw: RawClient) -> None:
        self.engine = engine
        self.raw = raw
        self.got: dict[int, Got] = {}

    async def send(self, prompt: list[int], **params: Any) -> int:
        key = len(self.got)
        self.got[key] = Got()
        given = {"seed": 1, "temperature": 0} | params
        # A map as another language writes it: nothing here has checked it.
        add = ["AddRequest", key, f"r{key}", pack_int32(prompt), given]
        await self.raw.send(msgspec.msgpack.encode(add))
        return key

    async def until(self, *keys: int) -> list[Got]:
        """Read until these are over, and a little further: nothing may follow an end."""
        while not all(self.got[key].over for key in keys):
            self._take(await self.raw.receive(OutputBatch, Refused))
        await self.raw.send(Call(1, "health"))
        while not isinstance(
            message := await self.raw.receive(OutputBatch, Refused, Answer), Answer
        ):
            self._take(message)
        return [self.got[key] for key in keys]

    async def ask(self, prompt: list[int], **params: Any) -> Got:
        [got] = await self.until(await self.send(prompt, **params))
        return got

    def _take(self, message: msgspec.Struct) -> None:
        if isinstance(message, Refused):
            got = self.got[message.key]
            assert not got.over and not got.tokens
            got.refused = message
            return
        assert isinstance(message, OutputBatch)
        keys = unpack_uint32(message.keys).tolist()
        tokens = unpack_int32(message.tokens).tolist()
        counts = unpack_int32(message.counts).tolist() or [1] * len(keys)
        for key, count in zip(keys, counts, strict=True):
            assert not self.got[key].over, "tokens after the end"
            self.got[key].tokens += tokens[:count]
            del tokens[:count]
        assert not tokens
        for extra in message.extras:
            self.got[extra.key].extras.append(extra)
        for note in message.notes:
            self.got[note.key].cached.append(note.cached_tokens)
        for end in message.ends:
            assert not self.got[end.key].over, "it ended twice"
            self.got[end.key].end = end


@pytest.fixture
def folder(tmp_path: Path) -> ScriptedFolder:
    return ScriptedFolder(tmp_path / "model", max_model_len=LIMIT)


async def beat(raw: RawClient) -> None:
    while True:
        await asyncio.sleep(1)
        await raw.send(ClientHeartbeat())


@pytest.fixture(params=["plain", "with keys"])
async def peer(request, folder: ScriptedFolder, tmp_path: Path) -> AsyncIterator[Peer]:
    keys = KeyFolder(tmp_path / "keys") if request.param == "with keys" else None
    args = folder.args(endpoint=free_endpoint(), curve_keys=str(keys.path) if keys else None)
    async with AsyncEngine(args) as engine:
        raw = RawClient(args.endpoint, keys.raw("one") if keys else None)
        await raw.send(Hello())
        await raw.receive(Welcome)
        beating = asyncio.ensure_future(beat(raw))
        yield Peer(engine, raw)
        beating.cancel()
        stats = await engine.stats()
        assert stats["live"] == stats["waiting"] == stats["running"] == 0
        raw.close()


async def test_every_request_has_one_end_that_counts_its_tokens(peer, folder) -> None:
    """FIN-01 and USG-01: each way to end, alone and two at once; nothing follows an end."""
    eos = folder.tokenizer.eos_token_id
    cases: list[tuple[dict[str, Any], str, int]] = [
        ({"golden_token_ids": [40, 41, eos], "max_tokens": 9}, "eos", 3),
        ({"golden_token_ids": [eos], "max_tokens": 9}, "eos", 1),
        (
            {"golden_token_ids": [40, 41], "stop_token_ids": [41], "max_tokens": 9},
            "stop_token:41",
            2,
        ),
        ({"max_tokens": 7, "ignore_eos": True}, "max_tokens", 7),
        ({"max_tokens": 2000, "ignore_eos": True}, "max_model_len", LIMIT - 40),
    ]
    prompt = [(11 * i) % 190 + 7 for i in range(40)]
    for params, detail, count in cases:
        keys = [await peer.send(prompt, **params) for _ in range(2)]
        for got in await peer.until(*keys):
            assert got.end is not None and got.end.detail == detail
            reason = "length" if detail.startswith("max") else "stop"
            assert got.end.reason == reason
            assert got.end.num_output_tokens == len(got.tokens) == count
            assert got.cached[-1] == got.end.cached_tokens <= len(prompt)
    again = await peer.ask(prompt, max_tokens=1)
    assert again.end is not None and again.end.cached_tokens == 32, "two blocks of 16"


async def test_a_stop_string_that_the_client_finds_ends_once_and_counts_to_its_word(
    peer, folder
) -> None:
    """FIN-01 and USG-01: what was computed after the stop is not counted."""
    with folder.held(after=2):
        key = await peer.send([5, 6], max_tokens=500, ignore_eos=True)
        while not peer.got[key].tokens:
            peer._take(await peer.raw.receive(OutputBatch))
        await peer.raw.send(StopMatched(key, "word", 1))
    [got] = await peer.until(key)
    assert got.end is not None and (got.end.reason, got.end.detail) == ("stop", "stop_string:word")
    assert got.end.num_output_tokens == 1 and len(got.tokens) < 500


async def test_a_prompt_above_the_limit_ends_by_name_and_others_are_served(peer, folder) -> None:
    """ERR-01: at once, without a token; then eight ordinary ones are as they should be."""
    got = await peer.ask([7] * (LIMIT + 1), max_tokens=5)
    assert got.end is not None and got.tokens == []
    assert (got.end.status, got.end.reason) == ("FINISHED_IGNORED", "prompt_length_exceeded")
    assert (got.end.detail, got.end.num_output_tokens) == ("max_model_len", 0)
    keys = [await peer.send([7, n], max_tokens=20, ignore_eos=True) for n in range(8)]
    for n, got in enumerate(await peer.until(*keys)):
        assert got.tokens == folder.reference([7, n], 20)


async def test_empty_prompts_and_numbers_of_tokens_out_of_range_are_refused_by_name(
    peer, folder
) -> None:
    """LIM-01: at once, and a neighbour's stream is as it is alone."""
    neighbour = asyncio.ensure_future(token_ids(peer.engine, [4, 5], NEIGHBOUR))
    refusals: list[tuple[list[int], dict[str, Any], str]] = [
        ([], {}, "prompt"),
        ([], {"max_tokens": 1, "prompt_logprobs": 1}, "prompt"),
        ([folder.script["vocab_size"]], {}, "prompt"),
        ([-1], {}, "prompt"),
        ([5], {"max_tokens": 0}, "max_tokens"),
        ([5], {"max_tokens": 0, "prompt_logprobs": 1}, "max_tokens"),
        ([5], {"max_tokens": -1}, "max_tokens"),
        ([5], {"max_tokens": None}, "max_tokens"),
        ([5], {"max_tokens": 2**63}, "max_tokens"),
    ]
    for prompt, params, named in refusals:
        got = await peer.ask(prompt, **params)
        assert got.refused is not None, (prompt, params)
        assert (got.refused.code, got.refused.field) == ("invalid", named), got.refused
        assert "\n" not in got.refused.message and named in got.refused.message
    one = await peer.ask([5], max_tokens=1, ignore_eos=True)
    assert one.end is not None and (one.end.reason, one.end.detail) == ("length", "max_tokens")
    assert one.tokens == folder.reference([5], 1)
    assert await neighbour == folder.reference([4, 5], 200)


@pytest.mark.parametrize("asked", [0, 1, 5, 20])
async def test_alternatives_are_as_many_as_asked_whatever_filters_apply(
    peer, folder, asked: int
) -> None:
    """LP-02: sorted, finite or of a banned token, raw under every filter."""
    filters: list[dict[str, Any]] = [
        {}, {"top_k": 1}, {"top_p": 0.5}, {"logit_bias": {7: 50.0}}, {"temperature": 5.0},
        {"golden_token_ids": [200] * 6},
    ]  # fmt: skip
    first = []
    for fields in filters:
        got = await peer.ask([5, 6, 7], max_tokens=6, ignore_eos=True, logprobs=asked, **fields)
        told = [each for extra in got.extras for each in extra.logprobs]
        assert len(told) == len(got.tokens) == 6
        for token, each in zip(got.tokens, told, strict=True):
            assert len(set(each.top_token_ids)) == len(each.top_logprobs) == asked
            assert each.top_logprobs == sorted(each.top_logprobs, reverse=True)
            assert all(value <= 0 for value in [each.logprob, *each.top_logprobs])
            if token in each.top_token_ids:
                assert each.logprob == each.top_logprobs[each.top_token_ids.index(token)]
            elif asked:
                assert each.logprob <= each.top_logprobs[-1]
        first.append((told[0].top_token_ids, told[0].top_logprobs))
    assert all(each == first[0] for each in first), "of the model, before any filter"


async def test_large_frames_and_many_requests_hold_nobody_up(peer, folder) -> None:
    """LOOP-01: a stream of another client goes on exactly, and the large ones are told why."""
    neighbour = asyncio.ensure_future(token_ids(peer.engine, [4, 5], NEIGHBOUR))
    large = [await peer.send([7] * 3_000_000, max_tokens=1) for _ in range(8)]
    many = [await peer.send([9, n], max_tokens=2, ignore_eos=True) for n in range(200)]
    for got in await peer.until(*large):
        assert got.end is not None and got.end.reason == "prompt_length_exceeded"
    for n, got in enumerate(await peer.until(*many)):
        assert got.tokens == folder.reference([9, n], 2)
    assert await neighbour == folder.reference([4, 5], 200)
    assert (await peer.engine.health())["ok"]
    # One above the limit of a frame is dropped and counted, like all that is no message.
    await peer.send([7] * 9_000_000)
    assert (await peer.ask([5], max_tokens=1)).end is not None
    assert (await peer.engine.stats())["junk_frames"] == 1
