"""How calls end: clients that leave, a server that stops, an engine that dies or is full."""

from __future__ import annotations

import asyncio
import json
import queue
import random
import signal
import threading
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx
import openai
import pytest

from deepinfer import AsyncEngine
from deepinfer.frontend.gateway import calls
from support.scripted_engine import ScriptedFolder
from support.served import MODEL, PATIENCE_S, Served, events, eventually, in_process, served

pytestmark = pytest.mark.process

TEXT = "/v1/completions"
CHAT = "/v1/chat/completions"


@pytest.fixture
def folder(tmp_path) -> ScriptedFolder:
    return ScriptedFolder(tmp_path / "model")


def ask(prompt: list[int], max_tokens: int, **more: Any) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, **more}


def wanted(folder: ScriptedFolder, prompt: list[int], max_tokens: int) -> str:
    return folder.tokenizer.decode(folder.reference(prompt, max_tokens))


def text_of(stream: str) -> str:
    chunks = events(stream)
    assert chunks[-1] == "[DONE]", chunks[-1]
    return "".join(chunk["choices"][0]["text"] for chunk in chunks[:-1])


@contextmanager
def open_stream(server: Served, body: dict[str, Any]) -> Any:
    with (
        httpx.Client(base_url=server.url, timeout=PATIENCE_S) as http,
        http.stream("POST", TEXT, json={**body, "stream": True}) as answer,
    ):
        assert answer.status_code == 200
        yield answer.iter_text()


# ---- clients that leave -------------------------------------------------------------------------


@pytest.mark.slow
async def test_three_hundred_clients_hang_up_in_every_way(folder) -> None:
    """ABT-03: nothing runs for them afterwards, and the next one is served as ever."""
    rng = random.Random(5)
    ways = ["after the first event", "before the first byte", "in the queue", "while it is whole",
            "half-close", "reset", "in the head", "in the body"]  # fmt: skip
    async with AsyncEngine(folder.args(max_num_seqs=8)) as engine, in_process(engine) as url:
        host, port = url.removeprefix("http://").split(":")

        async def hang_up(number: int) -> None:
            way = ways[number % len(ways)]
            body = ask([number % 190 + 5], 900, stream=way != "while it is whole")
            content = json.dumps(body).encode()
            head = (f"POST {TEXT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
                    f"content-length: {len(content)}\r\n\r\n").encode()  # fmt: skip
            reader, writer = await asyncio.open_connection(host, int(port))
            match way:
                case "in the head":
                    writer.write(head[: rng.randrange(1, len(head))])
                case "in the body":
                    writer.write(head + content[: rng.randrange(len(content))])
                case _:
                    writer.write(head + content)
            await writer.drain()
            if way == "after the first event":
                await reader.readuntil(b"data: ")
            elif way != "before the first byte":
                await asyncio.sleep(rng.random() / 20)
            if way == "half-close":
                writer.write_eof()
                assert await reader.read() is not None
            elif way == "reset":
                writer.transport.abort()
            writer.close()

        await asyncio.gather(*map(hang_up, range(300)))

        async def quiet() -> bool:
            stats = await engine.stats()
            return not any(stats[name] for name in ("live", "running", "waiting", "prefilling"))

        await eventually(quiet)
        stats, health = await engine.stats(), await engine.health()
        assert stats["blocks_free"] + stats["blocks_cached"] == stats["blocks_total"]
        async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as http:
            done = await http.post(TEXT, json=ask([5, 6], 20))
        assert done.json()["choices"][0]["text"] == wanted(folder, [5, 6], 20)
        assert (await engine.health())["steps"] - health["steps"] <= 25, "something else ran"


async def test_the_story_says_who_left(folder) -> None:
    """ABT-03 as an operator sees it."""
    with served(folder) as server:
        with folder.held(after=1), open_stream(server, ask([5], 900)) as parts:
            request_id = json.loads(next(parts).split("\n")[0].removeprefix("data: "))["id"]
        async with httpx.AsyncClient(base_url=server.url, timeout=PATIENCE_S) as http:
            last: dict[str, Any] = {}

            async def ended() -> bool:
                story = (await http.get(f"/v1/requests/{request_id}/story")).json()
                last.update(story["events"][-1])
                return last["event"] == "ended"

            await eventually(ended)
        assert last["detail"]["reason"] == "abort", last


# ---- a server that stops ------------------------------------------------------------------------


def test_sigterm_lets_a_stream_finish_and_takes_no_more(folder) -> None:
    with served(folder) as server, ExitStack() as hold:
        hold.enter_context(folder.held(after=1))
        with open_stream(server, ask([5], 50)) as parts:
            text = next(parts)
            server.process.send_signal(signal.SIGTERM)
            wait_until_refused(server)
            hold.close()
            text += "".join(parts)
        assert server.process.wait(PATIENCE_S) == 0
        assert text_of(text) == wanted(folder, [5], 50)


def test_a_second_signal_ends_what_is_open_with_a_word(folder) -> None:
    with served(folder, "--drain-timeout-s", "600") as server:
        with folder.held(after=1), open_stream(server, ask([5], 900)) as parts:
            text = next(parts)
            server.process.send_signal(signal.SIGTERM)
            wait_until_refused(server)
            server.process.send_signal(signal.SIGTERM)
            text += "".join(parts)
        last = events(text)[-1]
        assert last["error"]["type"] == "service_unavailable_error", last
        assert server.process.wait(PATIENCE_S) == 0


@pytest.mark.parametrize("stream", [True, False])
def test_the_end_of_the_drain_ends_the_rest_with_a_word(folder, stream: bool) -> None:
    with served(folder, "--drain-timeout-s", "0.2") as server, folder.held(after=1):
        answers: list[httpx.Response] = []
        thread = threading.Thread(
            target=lambda: answers.append(
                httpx.post(server.url + TEXT, json=ask([5], 900, stream=stream), timeout=PATIENCE_S)
            )
        )
        thread.start()
        while not stepped(server):
            pass
        server.process.send_signal(signal.SIGTERM)
        thread.join()
        assert server.process.wait(PATIENCE_S) == 0
    (answer,) = answers
    if stream:
        assert answer.status_code == 200
        told = events(answer.text)[-1]["error"]
    else:
        assert answer.status_code == 503 and int(answer.headers["retry-after"]) >= 1
        told = answer.json()["error"]
    assert "shutdown" in told["message"] and told["type"] == "service_unavailable_error"


def stepped(server: Served) -> bool:
    return httpx.get(server.url + "/health", timeout=PATIENCE_S).json()["steps"] > 0


def wait_until_refused(server: Served) -> None:
    while True:
        try:
            server.connect().close()
        except ConnectionRefusedError:
            return
        except ConnectionResetError:
            pass  # it was in the queue of a listener that was just closed


# ---- an engine that is full ---------------------------------------------------------------------


def test_a_full_queue_is_a_rate_limit_error(folder) -> None:
    """Some of ten are refused as retryable at once; the others wait and are served."""
    refused: queue.Queue[openai.RateLimitError] = queue.Queue()
    texts: dict[int, str] = {}
    with served(folder, "--max-num-seqs", "1", "--max-queue-len", "2") as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0)

        def complete(number: int) -> None:
            try:
                done = client.completions.create(model=MODEL, **ask([number], 3))
                texts[number] = done.choices[0].text
            except openai.RateLimitError as error:
                refused.put(error)

        with client:
            with folder.held():
                threads = [threading.Thread(target=complete, args=(n,)) for n in range(5, 15)]
                for thread in threads:
                    thread.start()
                error = refused.get(timeout=PATIENCE_S)
            for thread in threads:
                thread.join()
    assert int(error.response.headers["retry-after"]) >= 1
    assert error.code == "rate_limit_exceeded"
    assert texts == {number: wanted(folder, [number], 3) for number in texts}
    assert len(texts) >= 2 and len(texts) + refused.qsize() + 1 == 10


# ---- an engine that dies ------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("module", ["support.scripted_worker", "deepinfer.scheduler"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=lambda n: n.name)
async def test_streams_go_on_when_a_process_dies_or_hangs(tmp_path, module, number) -> None:
    """PROC-01: /health says so meanwhile, and every stream ends with the tokens it should."""
    folder = ScriptedFolder(tmp_path / "model", step_ms=15)
    with served(folder) as server:
        async with httpx.AsyncClient(base_url=server.url, timeout=PATIENCE_S) as http:

            async def stream(prompt: list[int]) -> str:
                return (await http.post(TEXT, json=ask(prompt, 150, stream=True))).text

            streams = [asyncio.ensure_future(stream([n])) for n in range(5, 13)]

            async def healthy(steps: int = 0) -> bool:
                got = await http.get("/health")
                assert got.status_code == (200 if got.json()["ok"] else 503)
                return got.status_code == 200 and got.json()["steps"] > steps

            async def unhealthy() -> bool:
                return not await healthy(-1)

            await eventually(lambda: healthy(20))
            server.child(module).send_signal(number)
            await eventually(unhealthy)
            await eventually(lambda: healthy(-1))
            done = await http.post(TEXT, json=ask([99], 5))
            assert done.json()["choices"][0]["text"] == wanted(folder, [99], 5)
            for n, text in zip(range(5, 13), await asyncio.gather(*streams), strict=True):
                assert text_of(text) == wanted(folder, [n], 150)


async def test_an_engine_that_cannot_come_back_ends_the_server_with_a_word(tmp_path) -> None:
    """PROC-01: open calls get an error with the cause, and the exit status tells."""
    folder = ScriptedFolder(tmp_path / "model")
    with served(folder) as server:
        async with httpx.AsyncClient(base_url=server.url, timeout=PATIENCE_S) as http:
            with folder.held(after=1):
                ask_stream = http.stream("POST", TEXT, json=ask([5], 900, stream=True))
                async with ask_stream as streamed:
                    parts = streamed.aiter_text()
                    text = await anext(parts)  # its first token
                    whole = asyncio.ensure_future(
                        http.post(TEXT, json=ask([6], 900), headers={"x-request-id": "whole"})
                    )

                    async def accepted() -> bool:
                        story = await http.get("/v1/requests/cmpl-whole/story")
                        return story.status_code == 200

                    await eventually(accepted)
                    script = {**folder.script, "fail_load": "the disk is gone"}
                    (folder.path / "scripted.json").write_text(json.dumps(script))
                    server.child("support.scripted_worker").kill()
                    text += "".join([part async for part in parts])
                answer = await whole
        told = events(text)[-1]["error"]
        assert "disk is gone" in told["message"] or "SIGKILL" in told["message"], told
        assert answer.status_code in (500, 503)
        assert answer.json()["error"]["type"] == told["type"]
        assert server.process.wait(PATIENCE_S) == 1
        assert "disk is gone" in server.errors()


async def test_a_request_that_kills_its_workers_ends_alone(tmp_path) -> None:
    """PROC-01: 500 for it, and the others' streams are exact."""
    folder = ScriptedFolder(tmp_path / "model", poison=200, step_ms=5)
    with served(folder) as server:
        client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0)
        async with client, httpx.AsyncClient(base_url=server.url, timeout=PATIENCE_S) as http:
            good = asyncio.ensure_future(http.post(TEXT, json=ask([5], 60, stream=True)))
            with pytest.raises(openai.InternalServerError) as caught:
                await client.completions.create(model=MODEL, **ask([9, 200, 9], 5))
            assert (caught.value.status_code, caught.value.code) == (500, "worker_failed")
            assert text_of((await good).text) == wanted(folder, [5], 60)


# ---- the loop -----------------------------------------------------------------------------------


@pytest.mark.slow
async def test_the_loop_stays_free_under_large_and_many_requests(folder) -> None:
    """LOOP-01: /health answers and a stream goes on exactly while large texts are refused."""
    with served(folder, "--max-body-bytes", str(32 << 20)) as server:
        async with httpx.AsyncClient(
            base_url=server.url, timeout=PATIENCE_S, limits=httpx.Limits(max_connections=300)
        ) as http:
            stream = asyncio.ensure_future(http.post(TEXT, json=ask([5], 1000, stream=True)))
            over = False
            times: list[float] = []

            async def poll() -> None:
                loop = asyncio.get_running_loop()
                while not over:
                    began = loop.time()
                    assert (await http.get("/health")).status_code == 200
                    times.append(loop.time() - began)
                    await asyncio.sleep(0.02)

            polling = asyncio.ensure_future(poll())
            large = json.dumps(
                {"messages": [{"role": "user", "content": "word " * (4 << 20)}]}
            ).encode()
            objects = b'{"messages": [' + b"{}," * (6 << 20) + b"{}]}"
            headers = {"content-type": "application/json"}
            answers = await asyncio.gather(
                *(http.post(CHAT, content=large, headers=headers) for _ in range(3)),
                *(http.post(CHAT, content=objects, headers=headers) for _ in range(3)),
                *(http.post(TEXT, json={"prompt": "ab " * 300, "max_tokens": 1})
                  for _ in range(200)),
            )  # fmt: skip
            over = True
            await polling
            assert [answer.status_code for answer in answers] == [400] * 6 + [200] * 200
            codes = [answer.json()["error"]["code"] for answer in answers[:3]]
            assert codes == ["context_length_exceeded"] * 3
            assert text_of((await stream).text) == wanted(folder, [5], 1000)
            assert times
            # How long they took is for benchmarks/gateway.py to say: others use this machine.


# ---- a stream that waits ------------------------------------------------------------------------


async def test_a_stream_that_waits_long_says_that_it_lives(folder, monkeypatch) -> None:
    """Comments, which clients skip; an error after them is the last event."""
    monkeypatch.setattr(calls, "_TICK_S", 0.05)
    monkeypatch.setattr(calls, "_SILENCE_S", 0.1)
    async with (
        AsyncEngine(folder.args()) as engine,
        in_process(engine) as url,
        httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as http,
    ):
        with ExitStack() as hold:
            hold.enter_context(folder.held())
            async with http.stream("POST", TEXT, json=ask([6], 30, stream=True)) as answer:
                assert answer.status_code == 200
                parts = answer.aiter_text()
                text = ""
                while text.count(": still working\n\n") < 3:
                    text += await anext(parts)
                assert "data:" not in text
                hold.close()
                async for part in parts:
                    text += part
        assert text_of(text) == wanted(folder, [6], 30)
