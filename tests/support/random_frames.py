"""Frames that a broken or hostile client may send: from pure noise to messages nearly right."""

from __future__ import annotations

import random
import typing
from collections.abc import Iterator
from typing import Any

import msgspec

from deepinfer.wire.columns import pack_int32
from deepinfer.wire.messages import (
    Abort,
    AddRequest,
    Call,
    ClientHeartbeat,
    Drain,
    FromClient,
    Goodbye,
    Hello,
    StopMatched,
    ToClient,
)
from deepinfer.wire.params import SamplingParams

NAMES = [struct.__name__ for union in (FromClient, ToClient) for struct in typing.get_args(union)]


def random_frames(seed: int, count: int) -> Iterator[list[bytes]]:
    """Yield messages of one or, rarely, several frames; the same ones for the same seed."""
    dice = random.Random(seed)
    kinds = (_noise, _value, _tagged, _damaged, _damaged, _valid)
    for _ in range(count):
        frames = [dice.choice(kinds)(dice)]
        if dice.random() < 0.05:
            frames += [dice.choice(kinds)(dice) for _ in range(dice.randint(1, 3))]
        yield frames


def _noise(dice: random.Random) -> bytes:
    return dice.randbytes(dice.choice((0, 1, 2, 10, 100, 1000)))


def _value(dice: random.Random) -> bytes:
    return msgspec.msgpack.encode(_anything(dice, 4))


def _tagged(dice: random.Random) -> bytes:
    fields = [_anything(dice, 3) for _ in range(dice.randint(0, 12))]
    return msgspec.msgpack.encode([dice.choice(NAMES), *fields])


def _damaged(dice: random.Random) -> bytes:
    frame = bytearray(_valid(dice))
    match dice.randrange(4):
        case 0:
            del frame[dice.randrange(len(frame)) :]
        case 1:
            frame += dice.randbytes(dice.randint(1, 20))
        case 2:
            for _ in range(dice.randint(1, 8)):
                frame[dice.randrange(len(frame))] = dice.randrange(256)
        case _:
            at = dice.randrange(len(frame))
            frame[at:at] = dice.randbytes(dice.randint(1, 4))
    return bytes(frame)


def _valid(dice: random.Random) -> bytes:
    key = dice.choice((0, 1, 2, dice.randrange(1 << 32)))
    params = SamplingParams(seed=dice.randrange(1 << 63), max_tokens=dice.randint(1, 5))
    prompt = pack_int32([dice.randrange(300) for _ in range(dice.randint(0, 20))])
    messages: list[msgspec.Struct] = [
        Hello(dice.choice((1, 1, 1, 2, -1))),
        ClientHeartbeat(),
        Abort(key, dice.choice(("client_abort", "disconnect", "else"))),
        StopMatched(key, "x", dice.randint(-5, 5)),
        Call(key, dice.choice(("stats", "health", "story", "else")), "r"),
        AddRequest(key, f"r{key}", prompt, params, timeout_ms=dice.choice((None, 0.0, 5.0, 1e9))),
        AddRequest(key, "", prompt, params, output=dice.randbytes(8), resubmitted=True),
        Drain(dice.choice((0.0, 1e9))),
    ]
    if dice.random() < 0.02:
        messages = [Goodbye()]
    return msgspec.msgpack.encode(dice.choice(messages))


def _anything(dice: random.Random, depth: int) -> Any:
    def several() -> int:
        return dice.randint(0, 4) if depth else 0

    match dice.randrange(9):
        case 0:
            return None
        case 1:
            return dice.random() < 0.5
        case 2:
            return dice.choice((0, 1, -1, dice.getrandbits(64), -dice.getrandbits(63)))
        case 3:
            return dice.choice((0.0, -1.5, 1e308, float("inf"), float("nan")))
        case 4:
            return dice.choice(("", "stats", "é" * 50, "x" * 2000, *NAMES))
        case 5:
            return dice.randbytes(dice.choice((0, 3, 4, 40)))
        case 6 | 7:
            return [_anything(dice, depth - 1) for _ in range(several())]
        case _:
            keys = (dice.choice(("seed", "n", "max_tokens", 7, b"k")) for _ in range(several()))
            return {key: _anything(dice, depth - 1) for key in keys}
