"""How requests end, seen by a user: stop strings, stop ids, EOS, limits, and bad input."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from deepinfer import AsyncEngine, Client, SamplingParams
from support.curve import KeyFolder, free_endpoint
from support.scripted_engine import ScriptedFolder
from support.streams import end, outputs, text, token_ids, tokens

pytestmark = [pytest.mark.process, pytest.mark.asyncio(loop_scope="module")]

LIMIT = 16
NEIGHBOUR = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> ScriptedFolder:
    return ScriptedFolder(tmp_path_factory.mktemp("scripted"))


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["embedded", "client"])
async def engine(
    request, folder: ScriptedFolder, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[AsyncEngine | Client]:
    """An engine of the app's own, or one that is reached over tcp, with keys."""
    if request.param == "embedded":
        async with AsyncEngine(folder.args()) as engine:
            yield engine
        return
    keys, endpoint = KeyFolder(tmp_path_factory.mktemp("keys") / "keys"), free_endpoint()
    async with (
        AsyncEngine(folder.args(endpoint=endpoint, curve_keys=str(keys.path))),
        Client(endpoint, **keys.client("one")) as client,
    ):
        yield client


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["sync-4", "async-16"])
async def small_engine(request, folder: ScriptedFolder) -> AsyncIterator[AsyncEngine]:
    kind, budget = request.param.split("-")
    args = folder.args(
        max_model_len=LIMIT,
        max_num_batched_tokens=int(budget),
        async_scheduling=kind == "async",
        block_size=4,
    )
    async with AsyncEngine(args) as engine:
        yield engine


def saying(folder: ScriptedFolder, pieces: list[str], **fields) -> SamplingParams:
    """Parameters that force these pieces of text, each tokenised by itself."""
    ids = [i for piece in pieces for i in folder.tokenizer.encode(piece, add_special_tokens=False)]
    return SamplingParams(golden_token_ids=ids, **{"max_tokens": len(ids), **fields})


SPLITS = [["AB", "CD", "EF", "GH"], ["A", "BCDEFGH"], ["ABCDE", "FGH"], list("ABCDEFGH")]


@pytest.mark.parametrize("pieces", SPLITS, ids="|".join)
@pytest.mark.parametrize(("include", "expected"), [(False, "ABC"), (True, "ABCDEFG")])
async def test_a_stop_string_cuts_the_text_wherever_tokens_divide_it(
    engine, folder, pieces, include, expected
) -> None:
    params = saying(folder, pieces, stop=["DEFG"], include_stop_str_in_output=include)
    outs = await outputs(engine, [5, 6], params)
    assert text(outs) == expected
    assert all(expected.startswith(text(outs[:i])) for i in range(len(outs)))
    assert end(outs) == ("stop", "stop_string:DEFG")


async def test_text_held_back_for_a_stop_string_is_released_at_another_end(engine, folder) -> None:
    eos = folder.tokenizer.eos_token_id
    ids = folder.tokenizer.encode("UNO DUE TRE", add_special_tokens=False)
    params = SamplingParams(golden_token_ids=[*ids, eos], max_tokens=100, stop=["TRE\nXX"])
    outs = await outputs(engine, [5, 6], params)
    assert (text(outs), end(outs)) == ("UNO DUE TRE", ("stop", "eos"))
    params = SamplingParams(golden_token_ids=ids, max_tokens=len(ids), stop=["TRE\nXX"])
    outs = await outputs(engine, [5, 6], params)
    assert (text(outs), end(outs)) == ("UNO DUE TRE", ("length", "max_tokens"))


async def test_a_character_cut_in_its_middle_reads_as_the_full_decode(engine, folder) -> None:
    ids = folder.tokenizer.encode("ab😀", add_special_tokens=False)
    assert len(ids) >= 5, "the emoji takes several tokens"
    params = SamplingParams(golden_token_ids=ids, max_tokens=len(ids) - 1)
    outs = await outputs(engine, [5, 6], params)
    assert text(outs) == folder.tokenizer.decode(ids[:-1])
    assert outs[-1].num_output_tokens == len(ids) - 1
    clean = await outputs(engine, [5, 6], saying(folder, ["xyz"]))
    assert text(clean) == "xyz"


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("kind", ["eos", "stop_string", "stop_token", "max_tokens", "empty"])
async def test_every_sample_ends_exactly_once_with_the_rule_that_fired(
    engine, folder, kind, n
) -> None:
    """FIN-01 and USG-01, by the Python client."""
    eos = folder.tokenizer.eos_token_id
    abc = folder.tokenizer.encode("abc", add_special_tokens=False)
    common = {"n": n, "max_tokens": len(abc) + 2, "temperature": 0}
    params, expected = {
        "eos": (SamplingParams(golden_token_ids=[*abc, eos], **common), ("stop", "eos")),
        "empty": (SamplingParams(golden_token_ids=[eos], **common), ("stop", "eos")),
        "stop_string": (
            SamplingParams(golden_token_ids=abc, stop="c", **common),
            ("stop", "stop_string:c"),
        ),
        "stop_token": (
            SamplingParams(golden_token_ids=abc, stop_token_ids=[abc[-1]], **common),
            ("stop", f"stop_token:{abc[-1]}"),
        ),
        "max_tokens": (SamplingParams(**common), ("length", "max_tokens")),
    }[kind]
    outs = [out async for out in engine.generate([5, 6], params)]
    for index in range(n):
        own = [out for out in outs if out.index == index]
        assert [out.finished for out in own] == [False] * (len(own) - 1) + [True]
        assert end(own) == expected
        assert {out.prompt_len for out in own} == {2}
        assert own[-1].num_output_tokens == len(own)
        assert all(out.cached_tokens <= out.prompt_len for out in own)
    if kind == "empty":
        assert text(outs) == ""


async def test_min_tokens_holds_off_eos_and_stop_strings(engine, folder) -> None:
    eos = folder.tokenizer.eos_token_id
    a, b = folder.tokenizer.encode("ab", add_special_tokens=False)
    golden = [a, eos, b, a, a, b, a]
    params = SamplingParams(golden_token_ids=golden, min_tokens=5, max_tokens=20, stop="b")
    outs = await outputs(engine, [5, 6], params)
    assert tokens(outs) == golden[:6]
    assert end(outs) == ("stop", "stop_string:b")


# ---- lengths ------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", range(12, LIMIT + 1))
async def test_prompt_and_output_never_exceed_the_limit(small_engine, folder, length) -> None:
    params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
    prompt = list(range(3, 3 + length))
    outs = await outputs(small_engine, prompt, params)
    expected = max(1, LIMIT - length)
    assert tokens(outs) == folder.reference(prompt, expected)
    assert end(outs) == ("length", "max_model_len")


async def test_a_prompt_above_the_limit_is_refused_by_name(small_engine, folder) -> None:
    """ERR-01, by the Python client: before anything is sent, with the limit and the count."""
    neighbour = asyncio.create_task(token_ids(small_engine, [4, 5], NEIGHBOUR))
    with pytest.raises(ValueError, match="prompt has 17 tokens, the limit is 16"):
        await outputs(small_engine, list(range(17)))
    with pytest.raises(ValueError, match="prompt has 1000000 tokens, the limit is 16"):
        await outputs(small_engine, [1] * 1_000_000)
    with pytest.raises(ValueError, match="characters, more than the limit"):
        await outputs(small_engine, "a" * 1_000_000)
    assert await neighbour == folder.reference([4, 5], 12)


# ---- bad input ----------------------------------------------------------------------------------


def bad_prompts(vocab_size: int) -> list[object]:
    chat = {"role": "user", "content": "hi"}
    return [
        *("", [], None, 7, b"ab", [[]], [""], [None], [1.5], [True], {"a": 1}, "\ud800"),
        *([vocab_size], [-1], [2**63], [1, "x"]),
        *([{}], [{"role": "user"}], [{"role": "user", "content": None}], [chat, "x"]),
        [{"role": 7, "content": "hi"}],
    ]


async def test_a_bad_prompt_is_refused_and_disturbs_nobody(engine, folder) -> None:
    """LIM-01 and ERR-02, by the Python client: ``ValueError``, before anything is sent."""
    neighbour = asyncio.create_task(token_ids(engine, [4, 5], NEIGHBOUR))
    for prompt in bad_prompts(folder.script["vocab_size"]):
        with pytest.raises(ValueError, match=r"prompt|message|content|role|chat"):
            await outputs(engine, prompt)
    for max_tokens in (0, -1, None, 1.5):
        with pytest.raises(ValueError, match="max_tokens"):
            await outputs(engine, [4], SamplingParams(max_tokens=max_tokens, prompt_logprobs=1))
    assert len(await outputs(engine, " ", SamplingParams(max_tokens=1))) == 1
    assert await neighbour == folder.reference([4, 5], 12)
    assert (await engine.stats())["live"] == 0


@pytest.mark.parametrize(
    "field", ["stop_token_ids", "logit_bias", "allowed_token_ids", "bad_words", "golden_token_ids"]
)
async def test_ids_outside_the_vocabulary_are_refused_by_name(engine, folder, field) -> None:
    vocab_size = folder.script["vocab_size"]

    def params(token_id: int) -> SamplingParams:
        value = {"logit_bias": {token_id: 1.0}, "bad_words": [[token_id]]}.get(field, [token_id])
        return SamplingParams(max_tokens=2, **{field: value})

    assert len(await token_ids(engine, [4, 5], params(vocab_size - 1))) >= 1
    with pytest.raises(ValueError, match=f"{field} must hold token ids below"):
        await outputs(engine, [4, 5], params(vocab_size))


async def test_extreme_legal_values_are_served(engine, folder) -> None:
    greedy = folder.reference([4, 5], 12)
    for temperature in (1e-300, 1e-9, 0):
        params = SamplingParams(temperature=temperature, max_tokens=12, ignore_eos=True)
        assert await token_ids(engine, [4, 5], params) == greedy
    for fields in ({"top_p": 1e-9}, {"top_k": 1}, {"min_p": 1.0}, {"top_k": 10**9, "top_p": 1e-9}):
        params = SamplingParams(max_tokens=12, ignore_eos=True, **fields)
        assert await token_ids(engine, [4, 5], params) == greedy
    for fields in ({"temperature": 1e30}, {"top_k": 10**9}, {"seed": -(2**63)}):
        outs = await outputs(engine, [4, 5], SamplingParams(ignore_eos=True, **fields))
        assert end(outs) == ("length", "max_tokens")


async def test_a_request_that_bans_every_token_fails_alone(engine, folder) -> None:
    eos = folder.tokenizer.eos_token_id
    neighbour = asyncio.create_task(token_ids(engine, [4, 5], NEIGHBOUR))
    params = SamplingParams(allowed_token_ids=[eos], min_tokens=2, max_tokens=4)
    outs = await outputs(engine, [7, 8], params)
    assert end(outs)[1] == "row_failed"
    assert "banned" in outs[-1].error
    assert await neighbour == folder.reference([4, 5], 12)


@pytest.mark.parametrize("request_id", ["", "x" * 1_000_000, 7, "\ud800"])
async def test_a_bad_request_id_is_refused_by_name(engine, request_id) -> None:
    with pytest.raises(ValueError, match="request_id"):
        await outputs(engine, [1], request_id=request_id)


async def test_a_deadline_ends_a_request(engine, folder) -> None:
    with folder.held():
        outs = await outputs(engine, [1, 2], NEIGHBOUR, timeout_s=0.05)
    assert end(outs) == ("abort", "deadline")
