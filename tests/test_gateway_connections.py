"""Connections: pieces, pipelines, junk, slow clients and too many of them."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import httpx
import pytest

from deepinfer import AsyncEngine
from deepinfer.frontend.gateway import http_protocol
from support.patience import PATIENCE_S
from support.scripted_engine import ScriptedFolder
from support.served import Served, eventually, in_process, post, served

pytestmark = pytest.mark.process

TEXT = "/v1/completions"
HEADERS = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[Served]:
    with served(ScriptedFolder(tmp_path_factory.mktemp("model"))) as server:
        yield server


def still_right(server: Served) -> None:
    """The engine answers as ever."""
    ids = server.folder.tokenizer.encode("after all that")
    answer = post(server, TEXT, prompt=ids, max_tokens=5, temperature=0)
    wanted = server.folder.tokenizer.decode(server.folder.reference(ids, 5))
    assert answer.json()["choices"][0]["text"] == wanted


def raw_request(body: dict[str, Any], *headers: str, path: str = TEXT) -> bytes:
    content = json.dumps(body).encode()
    head = [f"POST {path} HTTP/1.1", "host: x", "content-type: application/json",
            f"content-length: {len(content)}", *headers]  # fmt: skip
    return "\r\n".join(head).encode() + b"\r\n\r\n" + content


def read_all(connection: socket.socket) -> bytes:
    parts = []
    while part := connection.recv(1 << 16):
        parts.append(part)
    return b"".join(parts)


def test_chunked_bodies_in_any_pieces(server) -> None:
    content = json.dumps({"prompt": "hello", "max_tokens": 2}).encode()
    with server.connect() as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b"transfer-encoding: chunked\r\nconnection: close\r\n\r\n"
        )
        for byte in content:
            connection.sendall(b"1\r\n%c\r\n" % byte)
        connection.sendall(b"0\r\n\r\n")
        assert read_all(connection).startswith(b"HTTP/1.1 200 ")


def test_an_endless_chunked_body_is_refused(server) -> None:
    """413 as soon as it is too large; the rest is read for a while, so that the answer arrives."""
    with server.connect() as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b"transfer-encoding: chunked\r\n\r\n"
        )
        piece = b"100000\r\n" + b"x" * (1 << 20) + b"\r\n"
        for _ in range(12):
            connection.sendall(piece)
        connection.sendall(b"0\r\n\r\n")
        answer = read_all(connection)
    assert answer.startswith(b"HTTP/1.1 413 ") and b"body_too_large" in answer


def test_who_waits_for_100_continue_is_told_at_once(server) -> None:
    with server.connect() as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b"expect: 100-continue\r\ncontent-length: 99999999\r\n\r\n"
        )
        answer = read_all(connection)
    assert answer.startswith(b"HTTP/1.1 413 ") and b"100 Continue" not in answer


def test_pipelined_requests_are_answered_in_order(server) -> None:
    with server.connect() as connection:
        requests = [{"prompt": [9], "max_tokens": count, "ignore_eos": True} for count in (5, 1, 3)]
        connection.sendall(
            b"".join(map(raw_request, requests[:2])) + raw_request(requests[2], "connection: close")
        )
        answer = read_all(connection)
    counts = [json.loads(line)["usage"]["completion_tokens"]
              for line in answer.split(b"\r\n") if line.startswith(b'{"id"')
              for line in [line.partition(b"HTTP/")[0]]]  # fmt: skip
    assert counts == [5, 1, 3]


UPGRADES = [
    ("connection: upgrade", "upgrade: h2c"),
    ("connection: keep-alive, Upgrade", "upgrade: websocket"),
    ("upgrade: h2c", "http2-settings: AAMAAABk", "connection: Upgrade, HTTP2-Settings"),
]


@pytest.mark.parametrize("headers", UPGRADES)
@pytest.mark.parametrize("pieces", [1, 2, 1000])
def test_who_asks_for_another_protocol_is_answered_in_this_one(server, headers, pieces) -> None:
    """Its body is no request, and what follows is one."""
    body = {"prompt": [9], "max_tokens": 3, "ignore_eos": True}
    inner = b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n"
    junk = raw_request({}, *headers).partition(b"\r\n\r\n")[0]
    junk = junk.replace(b"content-length: 2", b"content-length: %d" % len(inner))
    get = "\r\n".join(["GET /v1/models HTTP/1.1", "host: x", *headers]).encode() + b"\r\n\r\n"
    whole = b"".join((
        raw_request(body, *headers), junk + b"\r\n\r\n" + inner, get,
        raw_request(body, "connection: close"),
    ))  # fmt: skip
    with server.connect() as connection:
        size = -(-len(whole) // pieces)
        for at in range(0, len(whole), size):
            connection.sendall(whole[at : at + size])
        answer = read_all(connection)
    statuses = re.findall(rb"HTTP/1.1 (\d+)", answer)
    assert statuses == [b"200", b"400", b"200", b"200"]
    assert answer.count(b'"completion_tokens":3') == 2 and answer.count(b'"object":"list"') == 1


def test_a_tunnel_is_refused(server) -> None:
    with server.connect() as connection:
        connection.sendall(b"CONNECT other:443 HTTP/1.1\r\nhost: other:443\r\n\r\n")
        assert read_all(connection).startswith(b"HTTP/1.1 400 ")
    still_right(server)


def test_too_many_pipelined_requests(server) -> None:
    with server.connect() as connection, server.folder.held():
        connection.sendall(raw_request({"prompt": [9], "max_tokens": 1}) * 40)
        assert read_all(connection).startswith(b"HTTP/1.1 400 ")
    still_right(server)


@pytest.mark.parametrize("where", ["in one header", "in many", "in the path"])
def test_a_head_has_a_limit(server, where: str) -> None:
    line = {
        "in one header": b"GET /health HTTP/1.1\r\nx: ",
        "in many": b"GET /health HTTP/1.1\r\n" + b"x: yyyyyyyy\r\n" * 10_000,
        "in the path": b"GET /",
    }[where]
    for complete in (False, True):
        with server.connect() as connection:
            with pytest.raises(OSError) if not complete else nullcontext():
                connection.sendall(line + b"y" * 90_000)
                if complete:
                    connection.sendall(
                        b" HTTP/1.1\r\n\r\n" if where == "in the path" else b":\r\n\r\n"
                    )
                else:
                    while True:  # until the server has had enough
                        connection.sendall(b"y" * 65_536)
            if complete:
                assert read_all(connection).startswith(b"HTTP/1.1 431 ")
    still_right(server)


@pytest.mark.parametrize(
    "junk",
    [b"\x16\x03\x01\x02\x00\x01", b"\r\n" * 50 + b"junk\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n",
     b"POST /v1/completions HTTP/1.1\r\ncontent-length: -5\r\n\r\n",
     b"POST /v1/completions HTTP/1.1\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\n",
     b"POST /v1/completions HTTP/1.1\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n",
     b"POST /v1/completions HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n"],
)  # fmt: skip
def test_what_is_not_http(server, junk: bytes) -> None:
    with server.connect() as connection:
        connection.sendall(junk)
        connection.shutdown(socket.SHUT_WR)
        answer = read_all(connection)
    assert answer == b"" or answer.startswith(b"HTTP/1.1 4")
    still_right(server)


async def test_many_connections_at_once(server) -> None:
    """Each of 300 gets its own answer."""
    tokenizer = server.folder.tokenizer
    async with httpx.AsyncClient(
        base_url=server.url, timeout=PATIENCE_S, limits=httpx.Limits(max_connections=300)
    ) as http:

        async def one(number: int) -> None:
            prompt = [number % 190 + 5, number // 190 + 5]
            body = {"prompt": prompt, "max_tokens": 8, "temperature": 0}
            done = (await http.post(TEXT, json=body)).json()
            wanted = tokenizer.decode(server.folder.reference(prompt, 8))
            assert done["choices"][0]["text"] == wanted

        await asyncio.gather(*map(one, range(300)))


# ---- in this process, with short limits ---------------------------------------------------------


async def opened(url: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = url.removeprefix("http://").split(":")
    return await asyncio.open_connection(host, int(port))


async def answer_of(reader: asyncio.StreamReader) -> bytes:
    """All that comes until the server closes the connection."""
    async with asyncio.timeout(PATIENCE_S):
        return await reader.read()


async def test_a_slow_request_is_turned_away(tmp_path, monkeypatch) -> None:
    """A head or a body that drips, and a connection that says nothing, end with 408."""
    monkeypatch.setattr(http_protocol, "HEAD_S", 1.0)
    monkeypatch.setattr(http_protocol, "BODY_S", 1.0)
    begun = raw_request({"prompt": "hello"})
    async with AsyncEngine(ScriptedFolder(tmp_path).args()) as engine, in_process(engine) as url:
        for start in (b"", begun[:20], begun[:-1]):
            reader, writer = await opened(url)
            writer.write(start)
            answer = await answer_of(reader)
            assert answer.startswith(b"HTTP/1.1 408 ") and b"request_timeout" in answer
            writer.close()
        # Who is answered may take its time, also with a further request begun.
        reader, writer = await opened(url)
        body = {"prompt": [5], "max_tokens": 1000, "stream": True}
        writer.write(raw_request(body) + begun[:20])
        answer = await answer_of(reader)
        assert answer.startswith(b"HTTP/1.1 200 ") and b"[DONE]" in answer
        writer.close()
        assert (await engine.stats())["live"] == 0


async def test_a_reader_that_stops_loses_its_stream_and_nobody_else_waits(
    tmp_path, monkeypatch
) -> None:
    """ZMQ-01 over HTTP."""
    monkeypatch.setattr(http_protocol, "UNREAD_S", 0.5)
    folder = ScriptedFolder(tmp_path, max_model_len=60_000)
    async with (
        AsyncEngine(folder.args()) as engine,
        in_process(engine) as url,
        httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as http,
    ):
        reader, writer = await opened(url)
        sock = writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        reader._transport.pause_reading()  # type: ignore[attr-defined]
        body = {"prompt": [5], "max_tokens": 50_000, "stream": True, "logprobs": 20}
        writer.write(raw_request(body))
        await eventually(lambda: has(engine, "live", 1))
        while (await engine.stats())["live"]:
            done = await http.post(TEXT, json={"prompt": [6], "max_tokens": 5, "temperature": 0})
            wanted = folder.tokenizer.decode(folder.reference([6], 5))
            assert done.json()["choices"][0]["text"] == wanted
        assert (await engine.stats())["output_tokens"] < 50_000
        writer.close()


async def test_a_slow_reader_gets_everything(tmp_path, monkeypatch) -> None:
    """Who reads a little at a time is not taken for one who does not read."""
    # Long beside the moments in which this process has no core, short beside the whole answer.
    monkeypatch.setattr(http_protocol, "UNREAD_S", 2.0)
    folder = ScriptedFolder(tmp_path, max_model_len=4096)
    async with AsyncEngine(folder.args()) as engine, in_process(engine) as url:
        reader, writer = await opened(url)
        sock = writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        body = {"prompt": [5], "max_tokens": 3000, "stream": True, "temperature": 0, "logprobs": 5}
        writer.write(raw_request(body, "connection: close"))
        answer = b""
        while part := await reader.read(16_384):
            answer += part
            await asyncio.sleep(0.05)
        assert b"data: [DONE]" in answer
        assert answer.count(b'"text":') == 3001


async def has(engine: AsyncEngine, name: str, value: float) -> bool:
    return (await engine.stats())[name] == value


async def test_hanging_up_behind_a_pipelined_request_ends_the_first(tmp_path) -> None:
    """ABT-03: uvicorn tells only the last one."""
    folder = ScriptedFolder(tmp_path)
    async with AsyncEngine(folder.args()) as engine, in_process(engine) as url:
        for stream in (True, False):
            with folder.held(after=1):
                reader, writer = await opened(url)
                body = {"prompt": [5], "max_tokens": 900, "stream": stream}
                writer.write(raw_request(body) + raw_request({"prompt": [6]}))
                await eventually(lambda: has(engine, "live", 1))
                writer.transport.abort()
                await eventually(lambda: has(engine, "live", 0))
        assert (await engine.stats())["accepted"] == 2


async def test_connections_have_a_limit(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(http_protocol.BoundedProtocol, "max_connections", 3)
    async with AsyncEngine(ScriptedFolder(tmp_path).args()) as engine, in_process(engine) as url:
        held = [await opened(url) for _ in range(3)]
        reader, writer = await opened(url)
        answer = await answer_of(reader)
        assert answer.startswith(b"HTTP/1.1 503 ") and b"retry-after" in answer
        writer.close()
        for _, other in held:
            other.close()

        async def served_again() -> bool:
            async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as http:
                return (await http.get("/health")).status_code == 200

        await eventually(served_again)


async def test_bodies_together_have_a_limit(tmp_path) -> None:
    """Many clients with half a body each cannot fill the memory, and what they held is returned."""
    async with (
        AsyncEngine(ScriptedFolder(tmp_path).args()) as engine,
        in_process(engine, max_body_bytes=1000) as url,
    ):
        held = []
        for _ in range(70):
            reader, writer = await opened(url)
            writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n"
                         b"content-type: application/json\r\n\r\n" + b" " * 999)  # fmt: skip
            await writer.drain()
            held.append((reader, writer))
        async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as http:
            body = {"prompt": "a" * 100, "max_tokens": 1}

            async def refused() -> bool:
                got = await http.post(TEXT, json=body)
                return got.status_code == 503 and "retry-after" in got.headers

            async def taken() -> bool:
                return (await http.post(TEXT, json=body)).status_code == 200

            await eventually(refused)
            for _, writer in held:
                writer.close()
            await eventually(taken)
