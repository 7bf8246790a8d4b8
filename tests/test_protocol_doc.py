"""docs/protocol.md says what the code does: fields, order, types, defaults and limits."""

from __future__ import annotations

import re
import types
import typing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from deepinfer.scheduler import client_link, clients, intake, keyed_endpoint
from deepinfer.wire import codec, messages
from deepinfer.wire.messages import FromClient, Message, Part, ToClient
from deepinfer.wire.params import SamplingParams

PAGE = (Path(__file__).parent.parent / "docs" / "protocol.md").read_text()
STRUCTS = {
    struct.__name__: struct
    for struct in vars(messages).values()
    if isinstance(struct, type) and issubclass(struct, Message | Part)
} | {"SamplingParams": SamplingParams}
del STRUCTS["Message"], STRUCTS["Part"]

PLAIN = {
    int: "int",
    float: "float",
    str: "str",
    bytes: "bin",
    bool: "bool",
    object: "any",
    type(None): "nil",
}


def shown_type(kind: Any) -> str:
    if kind in PLAIN:
        return PLAIN[kind]
    parts = [shown_type(part) for part in typing.get_args(kind)]
    match typing.get_origin(kind):
        case types.UnionType | typing.Union:
            return " or ".join(parts)
        case builtins if builtins is list:
            return f"list of {parts[0]}"
        case builtins if builtins is dict:
            return f"map of {parts[0]} to {parts[1]}"
    return kind.__name__


def shown_default(field: msgspec.structs.FieldInfo) -> str:
    if field.required:
        return "required"
    value = field.default_factory() if field.default is msgspec.NODEFAULT else field.default
    match value:
        case None:
            return "nil"
        case bool():
            return str(value).lower()
        case str():
            return f'"{value}"'
        case b"":
            return "empty"
    return str(value)


def sections() -> dict[str, str]:
    parts = re.split(r"^### (\w+)\n", PAGE.split("\n## Limits")[0], flags=re.MULTILINE)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


def rows(text: str) -> list[list[str]]:
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_the_page_has_every_message_and_no_other() -> None:
    assert set(sections()) == set(STRUCTS)
    sent = {struct.__name__ for struct in typing.get_args(FromClient)}
    received = {struct.__name__ for struct in typing.get_args(ToClient)}
    there, here = PAGE.split("## From the client")[1].split("## From the engine")
    headings = [set(re.findall(r"^### (\w+)", part, re.MULTILINE)) for part in (there, here)]
    assert sent <= headings[0]
    assert received <= headings[1]


@pytest.mark.parametrize("name", STRUCTS)
def test_its_tables_are_the_structs(name: str) -> None:
    expected = [
        [field.encode_name, shown_type(field.type), shown_default(field)]
        for field in msgspec.structs.fields(STRUCTS[name])
    ]
    table = rows(sections()[name])
    assert [row[:3] for row in table] == expected
    assert all(len(row) == 4 and row[3] for row in table)
    assert bool(table) is not ("No fields." in sections()[name])


@pytest.mark.parametrize("name", STRUCTS)
def test_messages_are_arrays_that_begin_with_their_name(name: str) -> None:
    info = msgspec.inspect.type_info(STRUCTS[name])
    assert isinstance(info, msgspec.inspect.StructType)
    assert info.array_like is (name != "SamplingParams")
    assert info.tag == (name if issubclass(STRUCTS[name], Message) else None)
    assert info.forbid_unknown_fields


def test_its_limits_are_those_of_the_code() -> None:
    table = {what: int(limit.replace(",", "")) for what, limit in rows(PAGE.split("## Limits")[1])}
    assert table == {
        "bytes of a message to the engine": codec.MAX_REQUEST_BYTES,
        "bytes of a message to a client": codec.MAX_MESSAGE_BYTES,
        "clients of one engine": client_link.MAX_CLIENTS,
        "clients of one key": keyed_endpoint.MAX_CLIENTS_PER_KEY,
        "bytes that wait for a client that does not read": client_link.MAX_BACKLOG_BYTES,
        "images of a request": messages.MAX_IMAGES,
        "bytes of the images of a request": messages.MAX_IMAGE_BYTES,
        "characters of an image's url": messages.MAX_IMAGE_URL_CHARS,
        "characters of a request_id": messages.MAX_REQUEST_ID_CHARS,
        "characters of a user_id": messages.MAX_USER_ID_CHARS,
        "characters of a salt": intake.MAX_SALT_CHARS,
        "aborts of unknown keys that are remembered": clients.MAX_EARLY_ABORTS,
        "least bytes of an identity at an endpoint with keys": keyed_endpoint.MIN_IDENTITY_BYTES,
    }
    assert f"Protocol number: **{messages.PROTOCOL_VERSION}**" in PAGE


def test_the_ranges_it_gives_are_taken_and_no_more() -> None:
    """The numbers in the meanings of ``SamplingParams``, tried at both ends."""
    ranges: dict[str, tuple[list[Any], list[Any]]] = {
        "max_tokens": ([1, 16_777_216], [0, 16_777_217]),
        "temperature": ([0, 1e9], [-0.1]),
        "top_p": ([1e-9, 1], [0, 1.01]),
        "top_k": ([-1, 0], [-2]),
        "min_p": ([0, 1], [-0.1, 1.1]),
        "seed": ([-(2**63), 2**64 - 1], [-(2**63) - 1, 2**64]),
        "stop_token_ids": ([[1] * 256], [[1] * 257]),
        "presence_penalty": ([-2, 2], [-2.1, 2.1]),
        "frequency_penalty": ([-2, 2], [-2.1, 2.1]),
        "repetition_penalty": ([0.01, 100], [0, 101]),
        "logit_bias": ([{1: -100, 2: 100}, dict.fromkeys(range(1024), 1)], [{1: 101}]),
        "allowed_token_ids": ([[1] * 262_144], [[], [1] * 262_145]),
        "bad_words": ([[[1] * 64] * 512], [[[1] * 65], [[1]] * 513]),
        "logprobs": ([0, 20], [-1, 21]),
        "golden_token_ids": ([[1] * 262_144], [[1] * 262_145]),
    }
    decode = msgspec.msgpack.Decoder(SamplingParams).decode
    for field, (good, bad) in ranges.items():
        for value in good:
            decode(msgspec.msgpack.encode({field: value}))
        for value in bad:
            with pytest.raises((msgspec.ValidationError, OverflowError)):
                decode(msgspec.msgpack.encode({field: value}))
