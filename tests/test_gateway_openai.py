"""The official ``openai`` client against ``deepinfer serve`` over the scripted model."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import openai
import pytest
from openai.types.chat import ChatCompletion

from support.patience import PATIENCE_S
from support.scripted_engine import ScriptedFolder
from support.served import MODEL, Served, served

pytestmark = pytest.mark.process

PROMPT = "the quick brown fox"
CHAT = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[Served]:
    with served(ScriptedFolder(tmp_path_factory.mktemp("model"))) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{server.url}/v1", api_key="unused", max_retries=0, timeout=PATIENCE_S
    ) as client:
        yield client


def reference(server: Served, prompt: str | list, count: int) -> str:
    tokenizer = server.folder.tokenizer
    ids = tokenizer.encode(prompt) if isinstance(prompt, str) else tokenizer.render_chat(prompt)
    return tokenizer.decode(server.folder.reference(ids, count))


def eos(server: Served) -> int:
    return server.folder.script["eos_token_id"]


def test_models(client) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    model = client.models.retrieve(MODEL)
    assert (model.id, model.object, model.owned_by) == (MODEL, "model", "deepinfer")
    assert model.max_model_len == 1024


def test_a_completion(client, server) -> None:
    done = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=8, temperature=0)
    (choice,) = done.choices
    assert (choice.text, choice.finish_reason) == (reference(server, PROMPT, 8), "length")
    assert done.object == "text_completion" and done.model == MODEL
    assert done.id.startswith("cmpl-") and done._request_id == done.id
    prompt_tokens = len(server.folder.tokenizer.encode(PROMPT))
    usage = done.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (prompt_tokens, 8)
    assert usage.total_tokens == prompt_tokens + 8


def test_a_chat(client, server) -> None:
    done = client.chat.completions.create(
        model=MODEL, messages=CHAT, max_completion_tokens=8, temperature=0
    )
    (choice,) = done.choices
    assert choice.message.role == "assistant" and choice.message.refusal is None
    assert choice.message.content == reference(server, CHAT, 8)
    assert choice.finish_reason == "length" and done.object == "chat.completion"
    assert done.usage.prompt_tokens == len(server.folder.tokenizer.render_chat(CHAT))


def test_a_chat_without_max_tokens_may_fill_the_context(client, server) -> None:
    done = client.chat.completions.create(model=MODEL, messages=CHAT, temperature=0)
    assert done.choices[0].finish_reason == "length"
    assert done.usage.total_tokens == 1024


@pytest.mark.parametrize("kind", ["completion", "chat"])
def test_n_choices_of_several_kinds_of_prompts(client, server, kind: str) -> None:
    """n = 2: the choices differ, the seed makes them the same again, and greedy ones are alike."""

    def texts(**params: object) -> list[str]:
        if kind == "chat":
            done = client.chat.completions.create(
                model=MODEL, messages=CHAT, max_tokens=12, n=2, **params
            )
            found = [choice.message.content for choice in done.choices]
        else:
            done = client.completions.create(
                model=MODEL, prompt=PROMPT, max_tokens=12, n=2, **params
            )
            found = [choice.text for choice in done.choices]
        assert [choice.index for choice in done.choices] == [0, 1]
        assert done.usage.completion_tokens == 24
        return found

    first = texts(seed=7)
    assert first[0] != first[1]
    assert texts(seed=7) == first
    assert texts(temperature=0) == [reference(server, CHAT if kind == "chat" else PROMPT, 12)] * 2


@pytest.mark.parametrize("stream", [False, True])
def test_several_prompts_with_n_choices_each(client, server, stream: bool) -> None:
    """Choice ``prompt * n + i`` belongs to the prompt; strings and id lists give the same."""
    prompts = [PROMPT, "hello", "lazy dog"]
    tokenizer = server.folder.tokenizer
    wanted = [reference(server, prompt, 6) for prompt in prompts for _ in range(2)]
    for given in (prompts, [tokenizer.encode(prompt) for prompt in prompts]):
        done = client.completions.create(
            model=MODEL, prompt=given, max_tokens=6, n=2, temperature=0, stream=stream,
            **({"stream_options": {"include_usage": True}} if stream else {}),
        )  # fmt: skip
        if stream:
            texts = [""] * 6
            chunks = list(done)
            for chunk in chunks:
                for choice in chunk.choices:
                    texts[choice.index] += choice.text
            usage = chunks[-1].usage
        else:
            texts, usage = [choice.text for choice in done.choices], done.usage
        assert texts == wanted
        assert usage.completion_tokens == 36
        assert usage.prompt_tokens == sum(len(tokenizer.encode(prompt)) for prompt in prompts)


def test_one_list_of_ids_is_one_prompt(client, server) -> None:
    ids = server.folder.tokenizer.encode(PROMPT)
    done = client.completions.create(model=MODEL, prompt=ids, max_tokens=5, temperature=0)
    assert [choice.text for choice in done.choices] == [reference(server, PROMPT, 5)]


def test_a_streamed_completion_equals_the_whole(client, server) -> None:
    chunks = list(
        client.completions.create(
            model=MODEL, prompt=PROMPT, max_tokens=20, temperature=0, stream=True
        )
    )
    assert "".join(chunk.choices[0].text for chunk in chunks) == reference(server, PROMPT, 20)
    assert {chunk.id for chunk in chunks} == {chunks[0].id}
    assert {chunk.object for chunk in chunks} == {"text_completion"}


async def test_the_async_client_streams_many_chats_at_once(server) -> None:
    chats = [[{"role": "user", "content": f"hello {number}"}] for number in range(20)]

    async def answer(client: openai.AsyncOpenAI, chat: list) -> str:
        stream = await client.chat.completions.create(
            model=MODEL, messages=chat, max_tokens=30, temperature=0, stream=True
        )
        parts = []
        async for chunk in stream:
            parts.append(chunk.choices[0].delta.content or "")
        return "".join(parts)

    async with openai.AsyncOpenAI(
        base_url=f"{server.url}/v1", api_key="unused", max_retries=0, timeout=PATIENCE_S
    ) as client:
        texts = await asyncio.gather(*(answer(client, chat) for chat in chats))
        whole = await client.chat.completions.create(
            model=MODEL, messages=chats[0], max_tokens=30, temperature=0
        )
    assert texts == [reference(server, chat, 30) for chat in chats]
    assert whole.choices[0].message.content == texts[0]


def test_the_stream_helper_accumulates_the_same_answer(client, server) -> None:
    full = reference(server, CHAT, 30)
    with client.chat.completions.stream(
        model=MODEL, messages=CHAT, max_tokens=30, temperature=0, logprobs=True, stop=full[10:12]
    ) as stream:
        done = stream.until_done().get_final_completion()
    assert isinstance(done, ChatCompletion)
    assert done.choices[0].message.content == full[: full.index(full[10:12])]
    assert done.choices[0].finish_reason == "stop"
    assert len(done.choices[0].logprobs.content) >= 5


@pytest.mark.parametrize("asked", [0, 1, 5, 20])
def test_chat_logprobs(client, server, asked: int) -> None:
    """LP-02: exactly so many alternatives, also where their texts are alike."""
    done = client.chat.completions.create(
        model=MODEL, messages=CHAT, max_tokens=8, temperature=0, logprobs=True, top_logprobs=asked
    )
    (choice,) = done.choices
    entries = choice.logprobs.content
    assert len(entries) == 8
    joined = b"".join(bytes(entry.bytes) for entry in entries)
    assert joined.decode("utf-8", "replace") == choice.message.content
    for entry in entries:
        assert len(entry.top_logprobs) == asked
        values = [top.logprob for top in entry.top_logprobs]
        assert values == sorted(values, reverse=True) and all(value <= 0 for value in values)
        if asked:
            assert (entry.token, entry.logprob) == (
                entry.top_logprobs[0].token, entry.top_logprobs[0].logprob
            )  # fmt: skip


@pytest.mark.parametrize("asked", [0, 1, 5, 20])
def test_completion_logprobs(client, asked: int) -> None:
    """LP-02: as many names as tokens, though several tokens are parts of characters."""
    done = client.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=8, temperature=0, logprobs=asked
    )
    logprobs = done.choices[0].logprobs
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.text_offset) == 8
    for token, value, top in zip(
        logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True
    ):
        assert len(top) == max(asked, 1)  # the token itself is always there
        assert token in {name.split("<token")[0] for name in top}
        assert value == max(top.values()) <= 0


def test_a_banned_token_has_openais_lowest_logprob(client, server) -> None:
    """LP-02: minus infinity, which JSON cannot write, comes as -9999."""
    done = client.chat.completions.create(
        model=MODEL, messages=CHAT, max_tokens=1, logprobs=True, top_logprobs=5,
        extra_body={"allowed_token_ids": [70, 71]},
    )  # fmt: skip
    (entry,) = done.choices[0].logprobs.content
    values = [top.logprob for top in entry.top_logprobs]
    assert len(values) == 5 and all(-9999 <= value <= 0 for value in values)


@pytest.mark.parametrize("length", [15, 16, 17, 33])
def test_echo_with_the_logprobs_of_the_prompt(client, server, length: int) -> None:
    """LP-01: one entry a prompt token, the first empty, and the same from the cache."""
    prompt = [(7 * i) % 200 + 5 for i in range(length)]

    def echoed(n: int = 1) -> list:
        done = client.completions.create(
            model=MODEL, prompt=prompt, max_tokens=1, temperature=0, logprobs=1, echo=True, n=n
        )
        return [choice.logprobs for choice in done.choices]

    first, again = echoed()[0], echoed()[0]
    client.completions.create(model=MODEL, prompt=prompt[: length // 2] + [9], max_tokens=1)
    assert first == again == echoed(n=2)[1]
    assert len(first.tokens) == length + 1
    assert first.token_logprobs[0] is None and first.top_logprobs[0] is None
    assert all(value <= 0 for value in first.token_logprobs[1:])
    assert first.text_offset[0] == 0 and first.text_offset == sorted(first.text_offset)


@pytest.mark.parametrize("stream", [False, True])
def test_echo_puts_the_prompt_before_the_text(client, server, stream: bool) -> None:
    done = client.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=4, temperature=0, echo=True, stream=stream
    )
    text = "".join(chunk.choices[0].text for chunk in (done if stream else [done]))
    assert text == PROMPT + reference(server, PROMPT, 4)


def test_the_offsets_of_tokens_lead_into_the_text(client) -> None:
    """A character of several tokens stands at one place, whatever its parts look like alone."""
    prompt = "héllo 你好 😀!"
    done = client.completions.create(
        model=MODEL, prompt=prompt, max_tokens=1, logprobs=0, echo=True, temperature=0
    )
    logprobs = done.choices[0].logprobs
    for token, at in zip(logprobs.tokens[:-1], logprobs.text_offset[:-1], strict=True):
        if "�" not in token:
            assert prompt[at : at + len(token)] == token
    assert logprobs.text_offset[-1] == len(prompt)


def test_stop_strings(client, server) -> None:
    """STOP-01: nothing of the stop string is sent, in a stream and at once."""
    full = reference(server, PROMPT, 30)
    stop = full[9:12]
    cut = full[: full.index(stop)]
    whole = client.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=30, temperature=0, stop=[stop]
    )
    assert whole.choices[0].text == cut
    assert (whole.choices[0].finish_reason, whole.choices[0].stop_reason) == ("stop", stop)
    sent = ""
    for chunk in client.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=30, temperature=0, stop=stop, stream=True
    ):
        sent += chunk.choices[0].text
        assert cut.startswith(sent)
    assert sent == cut
    kept = client.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=30, temperature=0, stop=stop,
        extra_body={"include_stop_str_in_output": True},
    )  # fmt: skip
    assert kept.choices[0].text == cut + stop


@pytest.mark.parametrize(
    ("fields", "reason", "matched"),
    [
        ({"extra_body": {"stop_token_ids": [40], "allowed_token_ids": [40]}}, "stop", 40),
        ({"extra_body": {"allowed_token_ids": "eos"}}, "stop", None),
        ({"logit_bias": {"41": 100}}, "length", None),
    ],
)
def test_how_an_answer_ends(client, server, fields: dict, reason: str, matched: object) -> None:
    extra = dict(fields.get("extra_body", {}))
    if extra.get("allowed_token_ids") == "eos":
        extra["allowed_token_ids"] = [eos(server)]
    done = client.chat.completions.create(
        model=MODEL, messages=CHAT, max_tokens=3, temperature=0, **{**fields, "extra_body": extra}
    )
    (choice,) = done.choices
    assert (choice.finish_reason, choice.stop_reason) == (reason, matched)
    if reason == "stop":
        assert choice.message.content == "" and done.usage.completion_tokens == 1
    else:
        assert choice.message.content == server.folder.tokenizer.decode([41, 41, 41])


@pytest.mark.parametrize("kind", ["completion", "chat"])
def test_the_ids_of_the_tokens(client, server, kind: str) -> None:
    """What vLLM's clients ask for, llama-benchy among them: also of tokens without a text."""
    tokenizer = server.folder.tokenizer
    ids = tokenizer.encode(PROMPT) if kind == "completion" else tokenizer.render_chat(CHAT)
    wanted = server.folder.reference(ids, 20)
    create, given = (
        (client.completions.create, {"prompt": PROMPT})
        if kind == "completion"
        else (client.chat.completions.create, {"messages": CHAT})
    )
    ask = {"model": MODEL, "max_tokens": 20, "temperature": 0, **given}
    extra = {"extra_body": {"return_token_ids": True}}
    (choice,) = create(**ask, **extra).choices
    assert (choice.token_ids, choice.prompt_token_ids) == (wanted, ids)
    streamed = []
    for chunk in create(**ask, **extra, stream=True):
        streamed += getattr(chunk.choices[0], "token_ids", None) or []
    assert streamed == wanted
    assert "token_ids" not in create(**ask).choices[0].model_dump()


def test_errors_are_the_clients_exception_classes(client) -> None:
    def refused(kind: type[openai.APIStatusError], **fields: object) -> openai.APIStatusError:
        given = {"model": MODEL, "messages": CHAT, "max_tokens": 1, **fields}
        with pytest.raises(kind) as caught:
            client.chat.completions.create(**given)
        assert caught.value.body["message"]
        return caught.value

    bad = refused(openai.BadRequestError, temperature=-1)
    assert (bad.param, bad.type) == ("temperature", "invalid_request_error")
    assert bad.request_id and bad.request_id.startswith("chatcmpl-")
    assert refused(openai.BadRequestError, extra_body={"colour": 1}).param == "colour"
    assert refused(openai.NotFoundError, model="other").code == "model_not_found"
    long = refused(openai.BadRequestError, max_tokens=2000)
    assert long.code == "context_length_exceeded"
    large = refused(openai.APIStatusError, messages=[{"role": "user", "content": "x" * (9 << 20)}])
    assert (large.status_code, large.code) == (413, "body_too_large")
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model=MODEL, input="text")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tools", [{"type": "function", "function": {"name": "f"}}]),
        ("tool_choice", "required"),
        ("response_format", {"type": "json_object"}),
        ("reasoning_effort", "low"),
        ("modalities", ["text", "audio"]),
        ("functions", [{"name": "f"}]),
    ],
)
def test_what_is_not_supported_is_refused_by_name(client, field: str, value: object) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(
            model=MODEL, messages=CHAT, max_tokens=1, extra_body={field: value}
        )
    assert (caught.value.param, caught.value.code) == (field, "unsupported")


def test_what_changes_nothing_is_taken(client, server) -> None:
    done = client.chat.completions.create(
        model=MODEL, messages=CHAT, max_tokens=4, temperature=0, user="u", store=False,
        metadata={"a": "b"}, service_tier="auto", parallel_tool_calls=True,
        response_format={"type": "text"}, tool_choice="none", modalities=["text"],
    )  # fmt: skip
    assert done.choices[0].message.content == reference(server, CHAT, 4)
