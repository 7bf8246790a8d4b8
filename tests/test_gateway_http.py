"""The HTTP interface in its details: bytes that a well-behaved client never sends or looks at."""

from __future__ import annotations

import base64
import json
import pickle
import socket
import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from deepinfer.frontend.gateway.server import serve
from support.patience import PATIENCE_S
from support.scripted_engine import ScriptedFolder
from support.served import Served, events, post, served

pytestmark = pytest.mark.process

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
MESSAGES = [{"role": "user", "content": "hello"}]
HEADERS = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[Served]:
    with served(ScriptedFolder(tmp_path_factory.mktemp("model"))) as server:
        yield server


@pytest.fixture(scope="module")
def http(server: Served) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=PATIENCE_S) as client:
        yield client


def error(answer: httpx.Response, status: int) -> dict[str, Any]:
    """The error object of an answer that must have this status."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    body = answer.json()
    assert body.keys() == {"error"}
    assert body["error"].keys() == {"message", "type", "param", "code"}
    message = body["error"]["message"]
    assert message and "\n" not in message and "Traceback" not in message
    assert len(message) < 1000
    return body["error"]


def prompt_for(path: str) -> dict[str, Any]:
    return {"messages": MESSAGES} if path == CHAT else {"prompt": "hello"}


def length_of_prompt(server: Served, path: str) -> int:
    tokenizer = server.folder.tokenizer
    return len(tokenizer.render_chat(MESSAGES) if path == CHAT else tokenizer.encode("hello"))


def still_right(server: Served) -> None:
    """The engine answers as ever."""
    ids = server.folder.tokenizer.encode("after all that")
    answer = post(server, TEXT, prompt=ids, max_tokens=5, temperature=0)
    wanted = server.folder.tokenizer.decode(server.folder.reference(ids, 5))
    assert answer.json()["choices"][0]["text"] == wanted


# ---- streams ------------------------------------------------------------------------------------


def ends_by(server: Served) -> dict[str, tuple[dict[str, Any], str]]:
    stop = server.folder.script["eos_token_id"]
    return {
        "eos first": ({"allowed_token_ids": [stop]}, "stop"),
        "stop token": ({"stop_token_ids": [40], "allowed_token_ids": [40]}, "stop"),
        "stop string": ({"stop": ["A"], "allowed_token_ids": [41, 36, 37, 38]}, "stop"),
        "length": ({"ignore_eos": True}, "length"),
    }


@pytest.mark.parametrize("kind", ["eos first", "stop token", "stop string", "length"])
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("path", [TEXT, CHAT])
@pytest.mark.parametrize("usage", [True, False, None])
def test_every_choice_of_a_stream_ends_once(http, server, path, n, kind, usage) -> None:
    """FIN-01, USG-01: one finish_reason a choice, nothing after it, then usage, then [DONE]."""
    fields, reason = ends_by(server)[kind]
    body = {**prompt_for(path), "max_tokens": 40, "temperature": 0, "n": n, "seed": 1, **fields}
    options = {} if usage is None else {"stream_options": {"include_usage": usage}}
    answer = http.post(path, json={**body, "stream": True, **options})
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/event-stream")
    *chunks, last = events(answer.text)
    assert last == "[DONE]" and "[DONE]" not in chunks
    assert len({chunk["id"] for chunk in chunks}) == 1

    whole = http.post(path, json=body).json()
    if usage:
        final = chunks.pop()
        assert final["choices"] == [] and final["usage"] == whole["usage"] | {
            "prompt_tokens_details": final["usage"]["prompt_tokens_details"]
        }
        assert all(chunk["usage"] is None for chunk in chunks)
    else:
        assert all("usage" not in chunk for chunk in chunks)
    spent = whole["usage"]
    assert spent["prompt_tokens"] == length_of_prompt(server, path)
    assert spent["total_tokens"] == spent["prompt_tokens"] + spent["completion_tokens"]
    assert spent["prompt_tokens_details"]["cached_tokens"] <= spent["prompt_tokens"]

    for choice in whole["choices"]:
        own = [part for chunk in chunks for part in chunk["choices"]
               if part["index"] == choice["index"]]  # fmt: skip
        reasons = [part["finish_reason"] for part in own]
        assert reasons == [None] * (len(own) - 1) + [reason], "content after the end"
        assert own[-1]["stop_reason"] == choice["stop_reason"]
        if path == CHAT:
            assert own[0]["delta"] == {"role": "assistant", "content": ""}
            assert all("role" not in part["delta"] for part in own[1:])
            text = "".join(part["delta"].get("content", "") for part in own)
            assert text == choice["message"]["content"]
        else:
            assert "".join(part["text"] for part in own) == choice["text"]
        assert choice["finish_reason"] == reason


def test_usage_counts_what_the_cache_had(http, server) -> None:
    """USG-01: cached tokens are a part of the prompt's, which stay as they are."""
    prompt = [(11 * i) % 190 + 7 for i in range(50)]
    first, again = (
        http.post(TEXT, json={"prompt": prompt, "max_tokens": 2, "n": 3}).json()["usage"]
        for _ in range(2)
    )
    assert (first["prompt_tokens"], first["completion_tokens"]) == (50, 6)
    assert again["prompt_tokens_details"]["cached_tokens"] == 48
    assert again["prompt_tokens"] == 50


def test_an_empty_prompt_list_of_usage_options_is_checked(http) -> None:
    got = http.post(TEXT, json={"prompt": "a", "stream_options": {"include_usage": True}})
    assert error(got, 400)["param"] == "stream_options"


# ---- refusals -----------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [TEXT, CHAT])
def test_too_long_is_told_before_the_stream(http, server, path: str, stream: bool) -> None:
    """ERR-01: 400 with the limit and what was asked for, and the engine goes on."""
    tokenizer = server.folder.tokenizer
    long = "ab" * 800
    body = {"prompt": long} if path == TEXT else {"messages": [{"role": "user", "content": long}]}
    ids = tokenizer.encode(long) if path == TEXT else tokenizer.render_chat(body["messages"])
    assert len(ids) > 1024
    got = error(http.post(path, json={**body, "stream": stream}), 400)
    assert got["code"] == "context_length_exceeded" and got["type"] == "invalid_request_error"
    assert "1024" in got["message"] and str(len(ids)) in got["message"]

    length = length_of_prompt(server, path)
    got = http.post(path, json={**prompt_for(path), "stream": stream, "max_tokens": 1024})
    got = error(got, 400)
    assert (got["code"], got["param"]) == ("context_length_exceeded", "max_tokens")
    assert all(str(n) in got["message"] for n in (1024, length, length + 1024))
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: still_right(server), range(8)))


def test_a_prompt_that_fills_the_context_yields_one_token(http) -> None:
    """LIM-02: the same whether the token was asked for or not, and two are too many."""
    prompt = [(3 * i) % 190 + 7 for i in range(1024)]
    for more in ({}, {"max_tokens": 1}):
        done = http.post(TEXT, json={"prompt": prompt, **more}).json()
        assert done["usage"]["completion_tokens"] == 1
    got = error(http.post(TEXT, json={"prompt": prompt, "max_tokens": 2}), 400)
    assert got["code"] == "context_length_exceeded"
    assert error(http.post(TEXT, json={"prompt": [*prompt, 7]}), 400)["param"] == "prompt"


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": None}],
        [{"role": "user"}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        [{"role": "bad role!", "content": "x"}],
        [{"role": "tool", "content": {"a": 1}}],
        [{"content": "x"}],
        ["text"],
        [None],
        [[]],
        [5, 6],
        [],
        [{"role": "user", "content": "\ufdd1"}],
        [{"role": "user", "content": "x", "extra": [[[[]]]] * 3, "tool_calls": 5}, 7],
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_bad_conversations(http, messages: list, stream: bool) -> None:
    """ERR-02: 400 in one line that names the message, before the stream opens."""
    got = error(http.post(CHAT, json={"messages": messages, "stream": stream}), 400)
    assert got["type"] == "invalid_request_error"
    assert got["param"] == "messages"


def test_what_the_template_refuses(tmp_path) -> None:
    """ERR-02: the template's own words, and no field that the request does not have."""
    folder = ScriptedFolder(tmp_path / "model")
    (folder.path / "chat_template.jinja").write_text(
        "{% if messages[0]['role'] != 'user' %}{{ raise_exception('only user turns may begin') }}"
        "{% endif %}{{ messages[0]['content'] }}"
    )
    with served(folder) as server:
        got = post(server, CHAT, messages=[{"role": "system", "content": "x"}], stream=True)
        got = error(got, 400)
        assert "only user turns may begin" in got["message"] and got["param"] is None
        assert post(server, CHAT, messages=MESSAGES, max_tokens=1).status_code == 200


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (TEXT, {"prompt": ""}, "prompt"),
        (TEXT, {"prompt": [""]}, "prompt"),
        (TEXT, {"prompt": [[]]}, "prompt"),
        (TEXT, {"prompt": []}, "prompt"),
        (TEXT, {"prompt": None}, "prompt"),
        (TEXT, {"prompt": ["a", 1]}, "prompt"),
        (TEXT, {"prompt": [1, "a"]}, "prompt"),
        (TEXT, {"prompt": [[1], "a"]}, "prompt"),
        (TEXT, {"prompt": [1.5]}, "prompt"),
        (TEXT, {"prompt": [True]}, "prompt"),
        (TEXT, {"prompt": [-1]}, "prompt"),
        (TEXT, {"prompt": [10**30]}, "prompt"),
        (TEXT, {"prompt": {"a": 1}}, "prompt"),
        (TEXT, {"prompt": ["a"] * 257}, "prompt"),
        (TEXT, {"prompt": ["a"] * 5, "n": 128}, "n"),
        (TEXT, {"prompt": [[["a"]]]}, "prompt"),
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {"messages": "hello"}, "messages"),
        (TEXT, {"max_tokens": 0}, "max_tokens"),
        (CHAT, {"max_tokens": 0}, "max_tokens"),
        (CHAT, {"max_completion_tokens": 0}, "max_tokens"),
        (TEXT, {"max_tokens": 0, "echo": True, "logprobs": 0}, "max_tokens"),
        (TEXT, {"max_tokens": -1}, "max_tokens"),
        (TEXT, {"max_tokens": 10**40}, "max_tokens"),
        (TEXT, {"max_tokens": 1.5}, "max_tokens"),
        (TEXT, {"max_tokens": "5"}, "max_tokens"),
        (TEXT, {"max_tokens": True}, "max_tokens"),
        (CHAT, {"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens"),
        (TEXT, {"temperature": -0.1}, "temperature"),
        (TEXT, {"temperature": "hot"}, "temperature"),
        (TEXT, {"temperature": [1]}, "temperature"),
        (TEXT, {"top_p": 0}, "top_p"),
        (TEXT, {"top_p": 1.5}, "top_p"),
        (TEXT, {"top_k": -2}, "top_k"),
        (TEXT, {"n": 0}, "n"),
        (TEXT, {"n": 10**6}, "n"),
        (TEXT, {"seed": 2**64}, "seed"),
        (TEXT, {"stop": [""]}, "stop"),
        (TEXT, {"stop": ["a"] * 65}, "stop"),
        (TEXT, {"stop": 5}, "stop"),
        (TEXT, {"stop": ["x" * 2000]}, "stop"),
        (TEXT, {"logprobs": 21}, "logprobs"),
        (TEXT, {"logprobs": -1}, "logprobs"),
        (CHAT, {"logprobs": 5}, "logprobs"),
        (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        (CHAT, {"top_logprobs": 2}, "top_logprobs"),
        (TEXT, {"logit_bias": {"a": 1}}, "logit_bias"),
        (TEXT, {"logit_bias": {"-1": 1}}, "logit_bias"),
        (TEXT, {"logit_bias": {"5": 101}}, "logit_bias"),
        (TEXT, {"logit_bias": {"99999": 1}}, "logit_bias"),
        (TEXT, {"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
        (TEXT, {"stop_token_ids": [99999]}, "stop_token_ids"),
        (TEXT, {"stop_token_ids": [2**63]}, "stop_token_ids"),
        (TEXT, {"allowed_token_ids": []}, "allowed_token_ids"),
        (TEXT, {"bad_words": [""]}, "bad_words"),
        (TEXT, {"bad_words": [5]}, "bad_words"),
        (TEXT, {"min_tokens": 20, "max_tokens": 10}, "min_tokens"),
        (TEXT, {"presence_penalty": 3}, "presence_penalty"),
        (TEXT, {"best_of": 5}, "best_of"),
        (TEXT, {"suffix": "x"}, "suffix"),
        (TEXT, {"stream": "yes"}, "stream"),
        (TEXT, {"stream": True, "stream_options": {"colour": True}}, "colour"),
        (TEXT, {"stream": True, "stream_options": []}, "stream_options"),
        (TEXT, {"colour": 1}, "colour"),
        (TEXT, {"colour\n\u0000": 1}, "colour\n\u0000"),
        (TEXT, {"messages": MESSAGES}, "messages"),
        (TEXT, {"model": 5}, "model"),
        ("/tokenize", {"prompt": "a", "messages": MESSAGES}, "prompt"),
        ("/tokenize", {}, "prompt"),
        ("/detokenize", {"tokens": [99999]}, "prompt"),
        ("/detokenize", {"tokens": ["a"]}, "tokens"),
        ("/detokenize", {"tokens": []}, "prompt"),
    ],
)  # fmt: skip
def test_values_out_of_range_name_their_field(http, path: str, fields: dict, param: str) -> None:
    """LIM-01, VAL-01, VAL-02 over HTTP."""
    base = {TEXT: {"prompt": "a"}, CHAT: {"messages": MESSAGES}}.get(path, {})
    assert error(http.post(path, json={**base, **fields}), 400)["param"] == param


@pytest.mark.parametrize("stream", [False, True])
def test_prompts_and_answers_of_the_least_length(http, server, stream: bool) -> None:
    """LIM-01: nothing to begin with is refused, one token is one, and a neighbour notices nothing.

    The tokenizer has no token that begins a text: an empty prompt would be no token at all.
    """
    tokenizer = server.folder.tokenizer
    assert tokenizer.encode("") == []
    empty = [{"prompt": each} for each in ("", [""], [[]], [], None, ["a", ""], [[5], []])]
    zero = [0, -1, -(2**63)]
    refused = [(TEXT, body) for body in [*empty, {}]] + [(CHAT, {"messages": []}), (CHAT, {})]
    refused += [(TEXT, {"prompt": "a", "max_tokens": count}) for count in zero]
    refused += [
        (TEXT, {"prompt": "a", "max_tokens": count, "echo": True, "logprobs": 1}) for count in zero
    ]
    refused += [
        (CHAT, {"messages": MESSAGES, name: count})
        for name in ("max_tokens", "max_completion_tokens")
        for count in zero
    ]

    def answer(path: str, **body: Any) -> tuple[list[str], list[str | None]]:
        """The texts of a call's choice, piece by piece, and its finish reasons."""
        got = http.post(path, json={**body, "temperature": 0, "stream": stream})
        assert got.status_code == 200, got.text
        parts = events(got.text)[:-1] if stream else [got.json()]
        choices = [part["choices"][0] for part in parts]
        if path == TEXT:
            texts = [choice["text"] for choice in choices]
        else:
            said = [choice["delta" if stream else "message"] for choice in choices]
            texts = [each.get("content", "") for each in said]
        return texts, [choice["finish_reason"] for choice in choices]

    def reference(prompt: list[int], count: int) -> str:
        return tokenizer.decode(server.folder.reference(prompt, count))

    with ThreadPoolExecutor(1) as pool:
        neighbour = pool.submit(answer, TEXT, prompt=[5, 6], max_tokens=900)
        for path, body in refused:
            got = error(http.post(path, json={**body, "stream": stream}), 400)
            assert got["type"] == "invalid_request_error"
            assert got["param"] in ("prompt", "messages", "max_tokens"), body
        space = tokenizer.encode(" ")
        texts, reasons = answer(TEXT, prompt=" ", max_tokens=1)
        assert "".join(texts) == reference(space, 1) and reasons[-1] == "length"
        texts, _ = answer(TEXT, prompt=" ", max_tokens=1, echo=True, logprobs=1)
        assert "".join(texts) == " " + reference(space, 1)
        texts, _ = answer(TEXT, prompt=" ", max_tokens=None)
        assert "".join(texts) == reference(space, 16), "OpenAI's default"
        chat = tokenizer.render_chat(MESSAGES)
        texts, reasons = answer(CHAT, messages=MESSAGES, max_tokens=1)
        assert "".join(texts) == reference(chat, 1) and reasons[-1] == "length"
        texts, reasons = answer(CHAT, messages=MESSAGES, max_tokens=None)
        assert "".join(texts) == reference(chat, 1024 - len(chat)) and reasons[-1] == "length"
        texts, reasons = neighbour.result()
        assert "".join(texts) == reference([5, 6], 900) and reasons[-1] == "length"


class Sentinel:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (open, (self.path, "w"))


def test_pickles_and_strangers_find_nothing(http, server, tmp_path) -> None:
    """SEC-01: one loopback port and sockets in private folders, and no body is executed."""
    listening, sockets = [], []
    processes = [psutil.Process(server.process.pid)]
    processes += processes[0].children(recursive=True)
    for process in processes:
        for each in process.net_connections("all"):
            if each.status == psutil.CONN_LISTEN:
                listening.append((each.laddr.ip, each.laddr.port))
            elif each.family == socket.AF_UNIX and str(each.laddr).startswith("/"):
                sockets.append(Path(each.laddr))
    assert listening == [server.address], "nothing listens beyond this machine"
    assert sockets
    for path in sockets:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    sentinel = tmp_path / "sentinel"
    evil = pickle.dumps(Sentinel(str(sentinel)))
    for path in (TEXT, CHAT, "/tokenize", "/detokenize"):
        for kind in ("application/json", "application/octet-stream", "application/x-pickle"):
            got = http.post(path, content=evil, headers={"content-type": kind})
            error(got, 400 if kind == "application/json" else 415)
        text = base64.b64encode(evil).decode()
        chat = {"messages": [{"role": "user", "content": text}]}
        got = http.post(path, json=chat if path == CHAT else {"prompt": text})
        assert got.status_code in (200, 400)
    still_right(server)
    assert not sentinel.exists()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.org"])
def test_an_address_beyond_this_machine_needs_keys_or_a_word(server, host: str) -> None:
    """SEC-01: it is refused before anything starts."""
    with pytest.raises(ValueError, match="can be reached by others: give --tenants"):
        serve(
            server.folder.args(), host, 0, ["m"], None,
            usage_ledger=None, open_to_all=False, max_body_bytes=1, on_ready=pytest.fail,
        )  # fmt: skip


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b"1",
        b'"text"',
        b'{"prompt": "a"} trailing',
        b'{"prompt": "a", "temperature": NaN}',
        b'{"prompt": "a", "temperature": Infinity}',
        b'{"prompt": "a", "temperature": -Infinity}',
        b'{"prompt": "a", "temperature": 1e999}',
        b'{"prompt": "a", "max_tokens": 1e999}',
        b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}",
        b'{"prompt": "a", "metadata": {"x": ' + b"9" * 5000 + b"}}",
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "\\udc00 x"}',
        b'{"prompt": "\xff\xfe"}',
        b'{"prompt": "\xed\xa0\x80"}',
        b'\xef\xbb\xbf{"prompt": "a"}',
        b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"metadata": ' + b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b"}",
        b'{"prompt": [' + b"[]," * 100_000 + b"[]]}",
        b'{"prompt": [' + b'"a",' * 100_000 + b'"a"]}',
        b'{"prompt": "a", "metadata": {' + b",".join(b'"%d":1' % i for i in range(99_999)) + b"}}",
        "{'prompt': 'a'}".encode("utf-16"),
    ],
)
def test_bodies_that_are_no_request(http, server, body: bytes) -> None:
    for path in (TEXT, CHAT, "/tokenize", "/detokenize"):
        error(http.post(path, content=body, headers=HEADERS), 400)
    still_right(server)


def test_brackets_and_quotes_inside_a_text_are_not_counted(http, server) -> None:
    """Only what becomes an object counts: text may hold any number of them."""
    text = '[{"\\' * 20_000
    got = error(http.post(TEXT, json={"prompt": text}), 400)
    assert (got["param"], got["code"]) == ("prompt", "context_length_exceeded")


def test_of_a_key_given_twice_the_last_one_counts(http) -> None:
    body = b'{"prompt": "a", "max_tokens": 99999, "max_tokens": 3}'
    assert http.post(TEXT, content=body, headers=HEADERS).json()["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize(
    "text",
    ["😀" * 20, "\u0000a\u0000", "\u202e\u200b\ufeff", "\ufdd2 \uffff", "e\u0301" * 30,
     "𐀀\U0010ffff", "<|im_end|>\n<|im_start|>system", " ", "\n\n\n", "\r\n\t"],
)  # fmt: skip
@pytest.mark.parametrize("path", [TEXT, CHAT])
def test_any_unicode_is_a_prompt(http, server, path: str, text: str) -> None:
    body = {"prompt": text} if path == TEXT else {"messages": [{"role": "user", "content": text}]}
    done = http.post(path, json={**body, "max_tokens": 6, "temperature": 0, "echo": True}
                     if path == TEXT else {**body, "max_tokens": 6, "temperature": 0})  # fmt: skip
    tokenizer = server.folder.tokenizer
    ids = tokenizer.encode(text) if path == TEXT else tokenizer.render_chat(body["messages"])
    wanted = tokenizer.decode(server.folder.reference(ids, 6))
    (choice,) = done.json()["choices"]
    assert (choice["text"] if path == TEXT else choice["message"]["content"]) == (
        text + wanted if path == TEXT else wanted
    )


def test_content_types(http) -> None:
    """A web page may post plain text to any address without asking; it may not post JSON."""
    body = b'{"prompt": "a", "max_tokens": 1}'
    for kind in ("application/json", "Application/JSON; charset=utf-8"):
        got = http.post(TEXT, content=body, headers={"content-type": kind})
        assert got.status_code == 200
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""):
        got = http.post(TEXT, content=body, headers={"content-type": kind})
        assert error(got, 415)["code"] == "unsupported_media_type"


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", TEXT, 405), ("PUT", TEXT, 405), ("DELETE", "/v1/models", 405),
        ("OPTIONS", TEXT, 405), ("PATCH", "/health", 405), ("POST", "/v1/models", 405),
        ("GET", "/", 404), ("POST", "/v1/embeddings", 404), ("GET", "/v1/models/other", 404),
        ("GET", "/v1/requests/none/story", 404), ("GET", "/../etc/passwd", 404),
        ("GET", "/%00", 404), ("GET", "/v1/models/%ff", 404), ("BREW", "/", 400),
    ],
)  # fmt: skip
def test_methods_and_paths(http, method: str, path: str, status: int) -> None:
    got = http.request(method, path)
    error(got, status)
    if status == 405:
        assert got.headers["allow"]


def test_head_has_the_headers_of_get(http) -> None:
    for path in ("/health", "/v1/models"):
        got = http.head(path)
        assert (got.status_code, got.content) == (200, b"")
        assert got.headers["content-type"] == "application/json"
    assert http.head(TEXT).status_code == 405


# ---- ids ----------------------------------------------------------------------------------------


def test_a_request_id_is_the_clients_own(http, server) -> None:
    """ID-01: in the answer, in its header and in the story; usable again at once."""
    headers = {"x-request-id": "mine.1"}
    for _ in range(50):
        done = http.post(TEXT, json={"prompt": "a", "max_tokens": 2}, headers=headers)
        assert done.json()["id"] == done.headers["x-request-id"] == "cmpl-mine.1"
    story = http.get("/v1/requests/cmpl-mine.1/story").json()
    assert story["id"] == "cmpl-mine.1"
    told = [event["event"] for event in story["events"]]
    assert (told[0], told[-1]) == ("arrived", "ended"), told
    for bad in ("", "a b", "a/b", "x" * 129, "x" * 20_000, b"\xe9"):
        got = http.post(TEXT, json={"prompt": "a"}, headers={"x-request-id": bad})
        assert error(got, 400)["param"] == "x-request-id"


def test_an_id_in_use_is_refused_and_the_first_goes_on(server) -> None:
    """ID-01: concurrent duplicates."""
    headers = {"x-request-id": "twice"}
    body = {"prompt": [5, 6, 7], "max_tokens": 9, "temperature": 0}
    with httpx.Client(base_url=server.url, timeout=PATIENCE_S, headers=headers) as http:
        with server.folder.held(after=1):
            stream = http.stream("POST", TEXT, json={**body, "stream": True})
            first = stream.__enter__()
            lines = first.iter_lines()
            text = json.loads(next(lines).removeprefix("data: "))["choices"][0]["text"]
            got = error(http.post(TEXT, json=body), 400)
            assert "in use" in got["message"]
            # The other kind of request has ids of its own.
            other = httpx.Client(base_url=server.url, timeout=PATIENCE_S, headers=headers)
        with other:
            assert other.post(CHAT, json={"messages": MESSAGES, "max_tokens": 1}).status_code == 200
        for line in lines:
            if line.startswith("data: {"):
                text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
        stream.__exit__(None, None, None)
        wanted = server.folder.tokenizer.decode(server.folder.reference([5, 6, 7], 9))
        assert text == wanted
        assert http.post(TEXT, json=body).json()["choices"][0]["text"] == wanted


# ---- tokens -------------------------------------------------------------------------------------


def test_tokenize_and_back(http, server) -> None:
    tokenizer = server.folder.tokenizer
    text = "héllo <s> 你好 😀"
    got = http.post("/tokenize", json={"prompt": text}).json()
    assert got == {"tokens": tokenizer.encode(text), "count": len(tokenizer.encode(text)),
                   "max_model_len": 1024}  # fmt: skip
    assert http.post("/detokenize", json={"tokens": got["tokens"]}).json() == {"prompt": text}
    chat = http.post("/tokenize", json={"messages": MESSAGES}).json()["tokens"]
    assert chat == tokenizer.render_chat(MESSAGES)
    bare = http.post("/tokenize", json={"messages": MESSAGES, "add_generation_prompt": False})
    assert bare.json()["tokens"] == tokenizer.render_chat(MESSAGES, add_generation_prompt=False)
    plain = http.post("/tokenize", json={"prompt": text, "add_special_tokens": False})
    assert plain.json()["tokens"] == tokenizer.encode(text, add_special_tokens=False)
