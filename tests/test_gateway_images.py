"""Image parts over HTTP: answered, refused by their number, and counted as they are."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from deepinfer import AsyncEngine
from support.scripted_engine import ScriptedFolder
from support.scripted_images import picture
from support.served import PATIENCE_S, events, in_process

pytestmark = pytest.mark.process


@pytest.fixture
async def folder(tmp_path: Path) -> ScriptedFolder:
    return ScriptedFolder(tmp_path / "model", images=True)


@pytest.fixture
async def client(folder: ScriptedFolder) -> AsyncIterator[httpx.AsyncClient]:
    async with (
        AsyncEngine(folder.args()) as engine,
        in_process(engine) as url,
        httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as client,
    ):
        yield client


def part(data: bytes | str) -> dict[str, Any]:
    url = data if isinstance(data, str) else "data:image/png;base64," + _base64(data)
    return {"type": "image_url", "image_url": {"url": url}}


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def body(*parts: dict[str, Any] | str, **fields: Any) -> dict[str, Any]:
    content = [{"type": "text", "text": p} if isinstance(p, str) else p for p in parts]
    messages = [{"role": "user", "content": content}]
    return {"messages": messages, "max_tokens": 6, "temperature": 0, "ignore_eos": True, **fields}


async def test_pictures_are_answered_and_counted_with_all_their_tokens(folder, client) -> None:
    pictures = [picture(1, 5), picture(2)]
    ask = body("see", part(pictures[0]), "and", part(pictures[1]), return_token_ids=True)
    answer = (await client.post("/v1/chat/completions", json=ask)).json()
    ids = answer["choices"][0]["prompt_token_ids"]
    assert answer["choices"][0]["token_ids"] == folder.reference(ids, 6, pictures)
    usage = answer["usage"]
    assert usage["prompt_tokens"] == len(folder.whole_prompt(ids, pictures)) > len(ids)
    ask |= {"stream": True, "stream_options": {"include_usage": True}}
    streamed = await client.post("/v1/chat/completions", json=ask)
    last = events(streamed.text)[-2]
    assert last["usage"]["prompt_tokens"] == usage["prompt_tokens"]
    counted = (await client.get("/metrics")).text
    total = 2 * usage["prompt_tokens"]
    line = next(x for x in counted.splitlines() if x.startswith("deepinfer_prompt_tokens_total{"))
    assert float(line.split()[-1]) == total


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "bad",
    [
        b"text as PNG",
        b"",
        "data:image/png;base64,?!",
        "data:image/png;base64,",
        "http://127.0.0.1:1/secret",
        "file:///etc/passwd",
    ],
)
async def test_a_picture_that_cannot_be_had_is_400_by_its_number(client, bad, stream) -> None:
    """IMG-01: before any byte of a stream."""
    ask = body("see", part(picture(1)), part(bad), stream=stream)
    answer = await client.post("/v1/chat/completions", json=ask)
    assert answer.status_code == 400, answer.text
    assert answer.headers["content-type"] == "application/json"
    error = answer.json()["error"]
    assert "image 1" in error["message"], error
    good = await client.post("/v1/chat/completions", json=body("see", part(picture(1))))
    assert good.status_code == 200


async def test_spelled_placeholders_stay_text_and_counts_must_match(folder, client) -> None:
    """IMG-04."""
    ask = body("<image> is", part(picture(1)), "<image>", return_token_ids=True)
    answer = (await client.post("/v1/chat/completions", json=ask)).json()
    ids = answer["choices"][0]["prompt_token_ids"]
    assert ids.count(folder.placeholder) == 1
    assert answer["choices"][0]["token_ids"] == folder.reference(ids, 6, [picture(1)])
    for prompt in ("<image>", [5, folder.placeholder]):
        answer = await client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 4})
        assert answer.status_code == 400, answer.text
        assert "once for each image" in answer.json()["error"]["message"]
    told = (await client.post("/tokenize", json={"messages": ask["messages"]})).json()
    assert told["tokens"].count(folder.placeholder) == 1


async def test_too_many_pictures_are_refused_at_once(client) -> None:
    answer = await client.post("/v1/chat/completions", json=body(*[part(picture(1))] * 65))
    assert answer.status_code == 400 and "64 images, got 65" in answer.json()["error"]["message"]
