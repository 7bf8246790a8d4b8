"""A stop string ends the text at the same character however the text arrives."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from deepinfer.frontend.stop_strings import StopMatcher
from deepinfer.frontend.text_stream import TextStream
from deepinfer.wire.params import SamplingParams
from support.small_tokenizers import scripted_tokenizer, small_tokenizer

LETTERS = st.text(alphabet="ab", max_size=24)
STOPS = st.lists(st.text(alphabet="ab", min_size=1, max_size=5), min_size=1, max_size=4)


def reference(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """The definition, by brute force: complete first, then longest."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


def longest_beginning(text: str, stops: list[str]) -> int:
    """How many characters at the end of ``text`` begin a stop string without being one."""
    proper = {stop[:k] for stop in stops for k in range(1, len(stop))}
    return max((k for k in range(len(text) + 1) if text[len(text) - k :] in proper), default=0)


def pieces_of(text: str, cuts: list[int]) -> list[str]:
    bounds = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    return [text[a:b] for a, b in pairwise(bounds)]


@given(text=LETTERS, stops=STOPS, include=st.booleans(), cuts=st.lists(st.integers(0, 99)))
@settings(max_examples=500, deadline=None)
@example(text="aab", stops=["ab", "b"], include=False, cuts=[1, 2])
def test_text_ends_at_the_first_stop_string_for_every_way_of_cutting(
    text: str, stops: list[str], include: bool, cuts: list[int]
) -> None:
    matcher = StopMatcher(stops, include)
    passed, matched = "", None
    for piece in pieces_of(text, cuts):
        more, stop = matcher.push(piece)
        passed += more
        matched = matched or stop
        assert reference(text, stops, include)[0].startswith(passed)
    if matched is None:
        passed += matcher.finish()
    assert (passed, matched) == reference(text, stops, include)
    assert matcher.matched == matched
    assert matcher.push("more") == ("", None) or matched is None


@given(text=LETTERS, stops=STOPS)
@settings(max_examples=300, deadline=None)
def test_only_what_may_become_a_stop_string_is_held_back(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    passed, matched = matcher.push(text)
    if matched is None:
        assert passed == text[: len(text) - longest_beginning(text, stops)]


@given(before=LETTERS, after=LETTERS, stops=STOPS)
@settings(max_examples=300, deadline=None)
def test_unarmed_text_completes_no_stop_string_but_may_begin_one(
    before: str, after: str, stops: list[str]
) -> None:
    matcher = StopMatcher(stops)
    passed, stop = matcher.push(before, armed=False)
    assert stop is None
    assert passed == before[: len(before) - longest_beginning(before, stops)]
    more, matched = matcher.push(after)
    text = before + after
    ends = [
        (end, stop)
        for end in range(len(before) + 1, len(text) + 1)
        for stop in sorted(stops, key=len, reverse=True)
        if text[:end].endswith(stop)
    ]
    if ends:
        end, stop = ends[0]
        assert matched == stop
        assert passed + more == text[: end - len(stop)]
    else:
        assert matched is None
        assert passed + more + matcher.finish() == text


def test_many_long_stop_strings_share_one_pass() -> None:
    stops = ["a" * 1023 + chr(0x4E00 + i) for i in range(64)]
    matcher = StopMatcher(stops)
    passed = "".join(matcher.push("a")[0] for _ in range(5000))
    assert len(passed) == 5000 - 1023
    more, matched = matcher.push("b" + stops[7])
    assert (matched, passed + more) == (stops[7], "a" * 5000 + "b")


def run(pieces: list[str], *, eos: bool = False, **params: object) -> TextStream:
    tokenizer = scripted_tokenizer(list(dict.fromkeys(pieces)))
    stream = TextStream(tokenizer, SamplingParams(max_tokens=100, **params))
    ids = [tokenizer.backend.token_to_id(piece) for piece in pieces]
    if eos:
        ids.append(tokenizer.eos_token_id)
    deltas, used = [], 0
    for used, token_id in enumerate(ids, start=1):
        deltas.append(stream.push(token_id, is_stop_token=eos and used == len(ids)))
        if stream.stop is not None:
            break
    deltas.append(stream.finish())
    stream.deltas, stream.used = deltas, used  # type: ignore[attr-defined]
    return stream


@pytest.mark.parametrize("case", ["STOP-01"])
@pytest.mark.parametrize("include", [False, True])
@given(cuts=st.lists(st.integers(0, 8), max_size=8))
@settings(max_examples=40, deadline=None)
def test_a_stop_string_over_several_tokens_never_leaks(
    case: str, include: bool, cuts: list[int]
) -> None:
    pieces = [piece for piece in pieces_of("ABCDEFGH", cuts) if piece]
    stream = run(pieces, stop=["DEFG"], include_stop_str_in_output=include)
    text = "ABCDEFG" if include else "ABC"
    assert "".join(stream.deltas) == text
    assert all(text.startswith("".join(stream.deltas[:i])) for i in range(len(stream.deltas)))
    assert stream.stop == "DEFG"
    needed = next(i for i in range(len(pieces) + 1) if "DEFG" in "".join(pieces[:i]))
    assert stream.used == needed


@pytest.mark.parametrize("eos", [True, False])
def test_held_back_text_is_released_when_the_end_comes_by_another_rule(eos: bool) -> None:
    stream = run(["UNO", " DUE", " TRE"], eos=eos, stop=["TRE\nXX"])
    assert "".join(stream.deltas) == "UNO DUE TRE"
    assert stream.stop is None
    assert stream.used == 3 + eos


@pytest.mark.parametrize(
    ("min_tokens", "text", "stop"),
    [(0, "a", "X"), (2, "a", "X"), (3, "aXb", "X"), (4, "aXb", "X"), (5, "aXbXc", None)],
)
def test_a_stop_string_counts_from_min_tokens_on(
    min_tokens: int, text: str, stop: str | None
) -> None:
    stream = run(["a", "X", "b", "X", "c"], stop=["X"], min_tokens=min_tokens)
    assert ("".join(stream.deltas), stream.stop) == (text, stop)


def test_a_stop_string_that_begins_before_min_tokens_is_cut_whole() -> None:
    stream = run(["a", "X", "Y", "b"], stop=["XY"], min_tokens=3)
    assert ("".join(stream.deltas), stream.stop, stream.used) == ("a", "XY", 3)


@pytest.mark.parametrize(("include", "text"), [(False, "ab"), (True, "ab!")])
def test_the_text_of_a_stop_token_is_left_out_unless_included(include: bool, text: str) -> None:
    tokenizer = scripted_tokenizer(["a", "b", "!"])
    params = SamplingParams(stop_token_ids=[2], include_stop_str_in_output=include)
    stream = TextStream(tokenizer, params)
    pushed = stream.push(0) + stream.push(1) + stream.push(2, is_stop_token=True)
    assert pushed + stream.finish() == text


def test_a_stop_string_completed_by_the_last_bytes_still_ends_the_text() -> None:
    tokenizer = small_tokenizer("byte_fallback_plain")
    ids = tokenizer.encode("a😀")
    assert len(ids) == 5
    stream = TextStream(tokenizer, SamplingParams(stop="😀"))
    assert "".join(map(stream.push, ids)) + stream.finish() == "a"
    assert stream.stop == "😀"


@given(text=st.text(max_size=30), stop=st.text(min_size=1, max_size=3))
@settings(max_examples=200, deadline=None)
def test_streamed_text_equals_the_whole_text_cut_at_the_stop(text: str, stop: str) -> None:
    tokenizer = small_tokenizer("byte_level")
    ids = tokenizer.encode(text)
    stream = TextStream(tokenizer, SamplingParams(stop=stop))
    assert "".join(map(stream.push, ids)) + stream.finish() == tokenizer.decode(ids).split(stop)[0]
