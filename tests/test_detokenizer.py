"""Joined deltas are the full decode, never more and never less, in linear time."""

from __future__ import annotations

import sys
from functools import cache

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from deepinfer.frontend.detokenizer import Detokenizer
from deepinfer.frontend.tokenizer import Tokenizer
from support.small_tokenizers import FAMILIES, scripted_tokenizer, small_tokenizer


def deltas_of(tokenizer: Tokenizer, ids: list[int], skip: bool) -> list[str]:
    detokenizer = Detokenizer(tokenizer, skip)
    return [*map(detokenizer.push, ids), detokenizer.finish()]


def assert_exact(tokenizer: Tokenizer, ids: list[int], skip: bool) -> None:
    assert "".join(deltas_of(tokenizer, ids, skip)) == tokenizer.decode(ids, skip)


@pytest.mark.parametrize("family", FAMILIES)
@given(data=st.data(), skip=st.booleans())
@settings(max_examples=300, deadline=None)
def test_joined_deltas_equal_the_full_decode_of_any_ids(
    family: str, data: st.DataObject, skip: bool
) -> None:
    tokenizer = small_tokenizer(family)
    # A few ids beyond the vocabulary: models have padded rows, whose ids have no text.
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=40))
    assert_exact(tokenizer, ids, skip)


@pytest.mark.parametrize("family", FAMILIES)
@given(
    text=st.one_of(
        st.text(max_size=60),
        st.lists(
            st.sampled_from(
                ["😀", "👨‍👩‍👧", "e\u0301", "你", " ", "▁", "\ufffd", "क्ष", "<s>", "don't"]
            ),
            max_size=20,
        ).map("".join),
    ),
    cut=st.integers(0, 200),
)
@settings(max_examples=150, deadline=None)
def test_joined_deltas_equal_the_full_decode_of_text_cut_anywhere(
    family: str, text: str, cut: int
) -> None:
    tokenizer = small_tokenizer(family)
    assert_exact(tokenizer, tokenizer.encode(text)[:cut], skip=False)


BYTE_RUNS = [
    [0xF0, 0x9F, 0x98, 0x80],  # an emoji
    [0xF0, 0x9F],  # cut after two of its bytes
    [0x80] * 5,  # continuation bytes alone
    [0xED, 0xA0, 0x80],  # a surrogate
    [0xC0, 0x80],  # overlong
    [0xF4, 0x90, 0x80, 0x80],  # above U+10FFFF
    [0xE4, 0xBD, 0xA0, 0xFF],  # a character, then no character
    [0xEF, 0xBF, 0xBD],  # U+FFFD itself
]


@cache
def byte_table(tokenizer: Tokenizer) -> dict[int, int]:
    """The id of each byte, in a byte-level vocabulary or in one with byte fallback."""
    pieces = {f"<0x{byte:02X}>": byte for byte in range(256)}
    if tokenizer.backend.token_to_id("<0x00>") is None:
        # The byte-level alphabet in code point order: printable bytes first, then the others.
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
        others = [byte for byte in range(256) if byte not in printable]
        pieces = dict(zip(alphabet, printable + others, strict=True))
    return {byte: tokenizer.backend.token_to_id(piece) for piece, byte in pieces.items()}


def byte_ids(tokenizer: Tokenizer, run: list[int]) -> list[int]:
    return [byte_table(tokenizer)[byte] for byte in run]


@pytest.mark.parametrize("family", ["byte_level", "byte_fallback", "byte_fallback_plain"])
@given(runs=st.lists(st.sampled_from(BYTE_RUNS), max_size=6), letter=st.booleans())
@settings(max_examples=100, deadline=None)
def test_byte_runs_valid_and_invalid_are_exact(
    family: str, runs: list[list[int]], letter: bool
) -> None:
    tokenizer = small_tokenizer(family)
    ids = [i for run in runs for i in byte_ids(tokenizer, run) + tokenizer.encode("a") * letter]
    assert_exact(tokenizer, ids, skip=False)


@pytest.mark.parametrize("family", ["byte_level", "byte_fallback"])
def test_no_delta_holds_a_replacement_character_while_a_character_is_unfinished(
    family: str,
) -> None:
    tokenizer = small_tokenizer(family)
    emoji = byte_ids(tokenizer, [0xF0, 0x9F, 0x98, 0x80])
    for cut in range(1, 4):
        *pushed, rest = deltas_of(tokenizer, emoji[:cut], skip=True)
        assert "".join(pushed) == ""
        assert rest == tokenizer.decode(emoji[:cut]) != ""
    assert "".join(deltas_of(tokenizer, emoji, skip=True)) == "😀"


def test_a_finished_character_is_not_held_back() -> None:
    tokenizer = small_tokenizer("byte_level")
    detokenizer = Detokenizer(tokenizer)
    ids = byte_ids(tokenizer, [0xF0, 0x9F, 0x98, 0x80])
    assert [detokenizer.push(i) for i in ids] == ["", "", "", "😀"]


@pytest.mark.parametrize("family", ["byte_level", "byte_fallback"])
def test_undecodable_streams_cost_constant_work_and_memory_per_token(family: str) -> None:
    tokenizer = small_tokenizer(family)
    [continuation] = byte_ids(tokenizer, [0x80])
    detokenizer = Detokenizer(tokenizer)
    detokenizer.push(continuation)
    calls = 0

    def count(frame: object, event: str, arg: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    # Work is counted in calls, not seconds: nothing may be decoded twice, so the last thousand
    # tokens take as many as the first, and each gives its own character at once.
    counted = []
    for _ in range(20):
        calls = 0
        sys.setprofile(count)
        try:
            text = "".join([detokenizer.push(continuation) for _ in range(1000)])
        finally:
            sys.setprofile(None)
        assert text == "\ufffd" * 1000
        counted.append(calls)
    assert max(counted) - min(counted) <= 2
    assert detokenizer.finish() == ""


def test_a_special_token_is_text_only_when_asked_for() -> None:
    tokenizer = small_tokenizer("byte_level")
    ids = tokenizer.encode("the<|im_end|>")
    assert ids[-1] in tokenizer.special_ids
    assert "".join(deltas_of(tokenizer, ids, skip=True)) == "the"
    assert "".join(deltas_of(tokenizer, ids, skip=False)) == "the<|im_end|>"


def test_two_streams_of_one_tokenizer_do_not_mix() -> None:
    tokenizer = small_tokenizer("byte_level")
    cut = Detokenizer(tokenizer)
    for token_id in byte_ids(tokenizer, [0xF0, 0x9F]):
        cut.push(token_id)
    assert "".join(deltas_of(tokenizer, tokenizer.encode("the"), skip=True)) == "the"


def test_scripted_pieces_decode_to_themselves() -> None:
    tokenizer = scripted_tokenizer(["AB", " CD"])
    assert deltas_of(tokenizer, [0, 1, 2], skip=True) == ["AB", " CD", "", ""]


def test_a_decoder_that_cannot_stream_is_refused_by_name() -> None:
    backend = tokenizers.Tokenizer(models.WordLevel({"a": 0}))
    backend.decoder = decoders.CTC()
    with pytest.raises(ValueError, match="CTC"):
        Detokenizer(Tokenizer(backend))
