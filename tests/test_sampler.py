"""The sampler: distributions, filters, rules, log probabilities, and rows that fail alone."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.gpu_worker.kernels.fork_join import ThreadTeam
from deepinfer.gpu_worker.logit_rules import LogitRules
from deepinfer.gpu_worker.random_uniform import mix64, seed_state, uniforms
from deepinfer.gpu_worker.sampler import ALL_BANNED, NOT_FINITE, Sampler
from deepinfer.wire.params import SamplingParams

EOS = 0
NO_TOKENS = np.zeros(0, np.int32)


def sample(logits, params, *, tokens=None, num_prompt=0, slots=None, sampler=None):
    """Sample each row of ``logits`` with its own parameters and tokens so far."""
    logits = np.array(logits, np.float32)
    rows = len(logits)
    tokens = [np.array(t, np.int32) for t in tokens] if tokens else [NO_TOKENS] * rows
    slots = list(range(rows)) if slots is None else slots
    sampler = sampler or Sampler(logits.shape[1], [EOS], max(slots) + 1)
    for slot, one in zip(slots, params, strict=True):
        sampler.admit(slot, one, num_prompt)
    history = dict(zip(slots, tokens, strict=True))
    counts = np.array([len(t) - num_prompt for t in tokens])
    return sampler.sample(logits, np.array(slots), counts, history.__getitem__)


def greedy(**fields):
    return SamplingParams(temperature=0.0, max_tokens=1000, **fields)


def distribution(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """The distribution by its definition, in float64 and with whole sorts."""
    scaled = np.asarray(logits, np.float64) / temperature
    probs = np.exp(scaled - scaled.max())
    order = np.lexsort((np.arange(len(probs)), -scaled))
    keep = int((probs >= min_p).sum())
    if top_k > 0:
        keep = min(keep, top_k)
    kept = probs[order[:keep]]
    if top_p < 1:
        keep = int(np.searchsorted(np.cumsum(kept), top_p * kept.sum())) + 1
    out = np.zeros(len(probs))
    out[order[:keep]] = probs[order[:keep]]
    return out / out.sum()


def random_logits(seed, *shape, scale=2.0):
    return (np.random.default_rng(seed).standard_normal(shape) * scale).astype(np.float32)


# ---- random numbers ---------------------------------------------------------------------------


def test_the_mix_is_splitmix64():
    states = np.arange(3, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    assert [hex(v) for v in mix64(states).tolist()] == [
        "0xe220a8397b1dcdaf",
        "0x6e789e6aa1b965f4",
        "0x6c45d188009454f",
    ]


@given(st.integers(-(1 << 63), (1 << 64) - 1))
def test_a_seed_counts_modulo_2_to_64(seed):
    assert seed_state(seed) == seed_state(seed % (1 << 64))


def test_uniforms_are_uniform_over_seeds_and_over_positions():
    by_seed = uniforms(np.array([seed_state(s) for s in range(20_000)]), np.zeros(20_000, np.int64))
    by_position = uniforms(np.full(20_000, seed_state(7)), np.arange(20_000))
    for values in (by_seed, by_position):
        assert values.min() >= 0 and values.max() < 1
        counts = np.histogram(values, bins=50, range=(0, 1))[0]
        assert ((counts - 400) ** 2 / 400).sum() < 110  # chi-square, 49 degrees, p = 1e-6
    assert abs(np.corrcoef(by_seed[:-1], by_seed[1:])[0, 1]) < 0.03


# ---- the distribution -------------------------------------------------------------------------

FILTERS = [
    {},
    {"temperature": 0.6},
    {"temperature": 3.0},
    {"top_k": 5},
    {"top_k": 150},
    {"top_p": 0.7},
    {"top_p": 0.99},
    {"min_p": 0.1},
    {"temperature": 1.5, "top_k": 20, "top_p": 0.8},
    {"temperature": 2.0, "min_p": 0.05, "top_p": 0.9},
    {"min_p": 0.02, "top_k": 12, "top_p": 0.9},
]


@pytest.mark.parametrize("fields", FILTERS, ids=str)
@pytest.mark.parametrize("vocab_size", [20, 200])
def test_frequencies_are_those_of_the_distribution(fields, vocab_size):
    rows, rounds = 500, 40
    one = random_logits(vocab_size, vocab_size)
    sampler = Sampler(vocab_size, [EOS], rows)
    for slot in range(rows):
        sampler.admit(slot, SamplingParams(seed=slot, max_tokens=100, **fields), 0)
    counts = np.zeros(vocab_size)
    for position in range(rounds):
        logits = np.repeat(one[None], rows, axis=0)
        positions = np.full(rows, position)
        got = sampler.sample(logits, np.arange(rows), positions, lambda slot: NO_TOKENS)
        counts += np.bincount(got.tokens, minlength=vocab_size)
    expected = distribution(one, **fields) * rows * rounds
    assert counts[expected == 0].sum() == 0
    # Rare tokens are put together, as the chi-square test asks for.
    rare = expected < 10
    observed = np.append(counts[~rare], counts[rare].sum())
    wanted = np.append(expected[~rare], expected[rare].sum())
    used = wanted > 0
    chi2 = ((observed - wanted)[used] ** 2 / wanted[used]).sum()
    degrees = int(used.sum()) - 1
    # Wilson-Hilferty: the cube root of chi-square over its degrees is nearly normal; 5 sigma.
    spread = 2 / (9 * max(degrees, 1))
    assert (chi2 / max(degrees, 1)) ** (1 / 3) < 1 - spread + 5 * math.sqrt(spread)


@given(
    st.integers(0, 1 << 32),
    st.integers(1, 300),
    st.sampled_from([0.1, 1.0, 8.0]),
    st.integers(0, 320),
    st.floats(0.01, 1.0),
    st.floats(0.0, 1.0),
)
@settings(max_examples=300, deadline=None)
def test_only_kept_tokens_are_drawn(seed, vocab_size, temperature, top_k, top_p, min_p):
    # Whole logits give many ties, which rank by id; far-off ones are banned.
    logits = np.round(random_logits(seed, vocab_size))
    logits[logits < -3] = -np.inf
    logits[seed % vocab_size] = 3
    fields = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    params = [SamplingParams(seed=s, **fields) for s in range(8)]
    got = sample(np.repeat(logits[None], 8, axis=0), params)
    # A hair more than top_p: float32 and float64 may differ about the last token.
    wide = {**fields, "top_p": min(1.0, top_p + 1e-5), "min_p": min_p * (1 - 1e-5)}
    assert not got.failed
    assert (distribution(logits, **wide)[got.tokens] > 0).all()


@given(st.integers(0, 1 << 32), st.integers(1, 200), st.floats(1e-4, 50.0))
@settings(deadline=None)
def test_top_k_1_and_a_tiny_top_p_are_greedy(seed, vocab_size, temperature):
    logits = np.repeat(np.round(random_logits(seed, 1, vocab_size) * 4) / 4, 3, axis=0)
    base = {"temperature": temperature, "seed": seed}
    params = [
        greedy(),
        SamplingParams(top_k=1, **base),
        SamplingParams(top_p=1e-9, **base),
    ]
    assert sample(logits, params).tokens.tolist() == [int(np.argmax(logits[0]))] * 3


@pytest.mark.parametrize("vocab_size", [1, 63, 64, 65, 200])
@pytest.mark.parametrize("threads", [1, 2])
def test_greedy_takes_the_first_of_equals(vocab_size, threads):
    rng = np.random.default_rng(vocab_size)
    logits = rng.integers(-3, 3, (30, vocab_size)).astype(np.float32)
    logits[0] = -3.5
    team = ThreadTeam(threads)
    sampler = Sampler(vocab_size, [], len(logits), team)
    got = sample(logits, [greedy()] * len(logits), sampler=sampler)
    team.close()
    assert got.tokens.tolist() == logits.argmax(axis=1).tolist()


@pytest.mark.parametrize("temperature", [1e-300, 1e-5, 1e-4, 1e30, 1e300])
def test_extreme_temperatures_choose_an_allowed_token(temperature):
    params = SamplingParams(temperature=temperature, seed=3, allowed_token_ids=[2, 70])
    got = sample(random_logits(1, 1, 100), [params])
    assert not got.failed
    assert got.tokens[0] in (2, 70)


def test_the_company_changes_nothing():
    logits = random_logits(5, 40, 333)
    choices = [{**fields, "seed": 90 + n} for n, fields in enumerate(FILTERS * 3)]
    params = [SamplingParams(logprobs=3, **fields) for fields in choices]
    params += [greedy(logit_bias={5: 3.0}), greedy(), greedy(presence_penalty=1.0)] * 2
    logits = logits[: len(params)]
    tokens = [[7, 8, 9, 9]] * len(params)
    together = sample(logits, params, tokens=tokens)
    for order in (list(range(len(params)))[::-1], list(range(0, len(params), 3))):
        part = sample(
            logits[order],
            [params[i] for i in order],
            tokens=[tokens[i] for i in order],
            slots=order,
        )
        assert part.tokens.tolist() == together.tokens[order].tolist()
        for row, i in enumerate(order):
            assert part.logprobs.get(row) == together.logprobs.get(i)


# ---- rules ------------------------------------------------------------------------------------


def ruled(logits, tokens=(), num_prompt=0, **fields):
    """The logits after the rules."""
    out = np.array(logits, np.float32)
    rules = LogitRules(SamplingParams(max_tokens=100, **fields), num_prompt, [EOS], len(out))
    rules.apply(out, np.array(tokens, np.int32))
    return out.tolist()


def test_bias_comes_before_penalties_and_penalties_multiply_before_they_subtract():
    got = ruled(
        [0.0, -1.0, -4.0, 3.0],
        tokens=[3, 1, 1, 2],
        num_prompt=1,
        logit_bias={1: 3.0},
        repetition_penalty=2.0,
        frequency_penalty=0.25,
        presence_penalty=0.5,
    )
    assert got == [
        0.0,
        2.0 / 2 - 2 * 0.25 - 0.5,  # biased to 2, which is positive: divided
        -4.0 * 2 - 0.25 - 0.5,  # negative: multiplied
        3.0 / 2,  # only in the prompt: no presence or frequency
    ]


def test_a_bias_cannot_bring_back_a_banned_token():
    assert ruled([0.0, 1.0], allowed_token_ids=[0], logit_bias={1: 100.0}) == [0.0, -math.inf]


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_eos_and_stop_ids_are_banned_up_to_min_tokens(ignore_eos):
    fields = {"min_tokens": 2, "stop_token_ids": [2], "ignore_eos": ignore_eos}
    early = ruled([9.0, 1.0, 8.0], tokens=[1, 1, 1], num_prompt=2, **fields)
    assert early == [-math.inf, 1.0, -math.inf]
    assert ruled([9.0, 1.0, 8.0], tokens=[1, 1, 1, 1], num_prompt=2, **fields) == [9.0, 1.0, 8.0]


def test_min_tokens_is_over_when_it_is_over():
    got = sample([[9.0, 1.0]] * 2, [greedy(min_tokens=2)] * 2, tokens=[[1], [1, 1]])
    assert got.tokens.tolist() == [1, 0]


def test_an_eos_id_only_the_tokenizer_knows_does_no_harm():
    sampler = Sampler(2, [1, 500], 1)
    assert sample([[0.0, 9.0]], [greedy(min_tokens=1)], sampler=sampler).tokens.tolist() == [0]


def test_bad_words_look_at_outputs_only():
    words = [[4], [1, 2, 3]]
    flat = [0.0] * 5
    assert ruled(flat, tokens=[1, 2], num_prompt=0, bad_words=words)[3:] == [-math.inf, -math.inf]
    assert ruled(flat, tokens=[1, 2], num_prompt=1, bad_words=words)[3:] == [0.0, -math.inf]
    assert ruled(flat, tokens=[2, 1, 2], num_prompt=1, bad_words=words)[3:] == [-math.inf] * 2
    assert ruled(flat, tokens=[2], num_prompt=0, bad_words=words)[3:] == [0.0, -math.inf]


@given(st.integers(0, 1 << 32), st.sets(st.integers(0, 99), min_size=1), st.booleans())
@settings(deadline=None)
def test_only_allowed_tokens_are_chosen(seed, allowed, at_random):
    fields = {"temperature": 5.0 if at_random else 0.0, "seed": seed}
    params = SamplingParams(allowed_token_ids=sorted(allowed), **fields)
    assert sample(random_logits(seed, 1, 100), [params]).tokens[0] in allowed


def test_golden_tokens_are_forced_and_then_sampling_goes_on():
    params = greedy(golden_token_ids=[3, 1], logprobs=0, allowed_token_ids=[2])
    logits = random_logits(3, 3, 4)
    got = sample(logits, [params] * 3, tokens=[[], [3], [3, 1]])
    assert got.tokens.tolist() == [3, 1, 2]
    reference = np.log(distribution(logits[0]))
    assert got.logprobs[0].logprob == pytest.approx(reference[3], abs=1e-5)


@pytest.mark.parametrize(
    "fields",
    [
        {"logit_bias": {9: 1.0}},
        {"stop_token_ids": [9], "min_tokens": 1},
        {"allowed_token_ids": [9]},
        {"bad_words": [[9]]},
        {"bad_words": [[9, 1]]},
        {"golden_token_ids": [9]},
    ],
    ids=str,
)
def test_the_last_id_of_the_vocabulary_is_accepted_and_the_next_refused(fields):
    Sampler(10, [EOS], 1).admit(0, greedy(**fields), 1)
    field = next(iter(fields))
    with pytest.raises(ValueError, match=field):
        Sampler(9, [EOS], 1).admit(0, greedy(**fields), 1)


def test_what_the_frontend_must_have_resolved_is_refused():
    with pytest.raises(ValueError, match="bad_words"):
        Sampler(9, [EOS], 1).admit(0, greedy(bad_words=["word"]), 1)
    with pytest.raises(ValueError, match="seed"):
        Sampler(9, [EOS], 1).admit(0, SamplingParams(), 1)


def test_a_slot_keeps_nothing_of_its_former_owner():
    logits = random_logits(8, 1, 50)
    former = SamplingParams(
        temperature=2.0,
        top_k=3,
        seed=1,
        logit_bias={4: 50.0},
        min_tokens=9,
        logprobs=2,
        golden_token_ids=[4, 4],
    )
    sampler = Sampler(50, [EOS], 1)
    sample(logits, [former], sampler=sampler)
    sampler.release(0)
    got = sample(logits, [greedy()], sampler=sampler)
    assert got.tokens.tolist() == [int(np.argmax(logits))]
    assert got.logprobs == {}


# ---- rows that fail ---------------------------------------------------------------------------


@pytest.mark.parametrize("fields", [{}, {"logit_bias": {1: 1.0}}, {"allowed_token_ids": [1]}])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("poison", [np.nan, -np.nan, np.inf])
def test_a_row_whose_logits_are_not_finite_fails_alone(poison, temperature, fields):
    logits = random_logits(2, 5, 100)
    healthy = [SamplingParams(temperature=t, seed=4, logprobs=1) for t in (0.0, 1.0)] * 2
    alone = sample(logits[[0, 1, 3, 4]], healthy, slots=[0, 1, 3, 4])
    logits[2, 40] = poison
    sick = SamplingParams(temperature=temperature, seed=4, logprobs=1, **fields)
    got = sample(logits, [*healthy[:2], sick, *healthy[2:]])
    assert got.failed == {2: NOT_FINITE}
    assert got.tokens[[0, 1, 3, 4]].tolist() == alone.tokens.tolist()
    assert sorted(got.logprobs) == [0, 1, 3, 4]


@pytest.mark.parametrize("at", [0, 40, 64, 99])
@pytest.mark.parametrize("poison", [np.nan, -np.nan, np.inf])
def test_one_logit_anywhere_fails_a_greedy_row(poison, at):
    logits = random_logits(2, 3, 100)
    expected = logits.argmax(axis=1)
    logits[1, at] = poison
    logits[2, at] = -np.inf
    expected[2] = logits[2].argmax()
    got = sample(logits, [greedy()] * 3)
    assert got.failed == {1: NOT_FINITE}
    assert got.tokens[[0, 2]].tolist() == expected[[0, 2]].tolist()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_with_every_token_banned_fails_alone(temperature):
    banned = SamplingParams(
        temperature=temperature, seed=1, allowed_token_ids=[EOS], min_tokens=1, max_tokens=4
    )
    got = sample([[1.0, 2.0, 0.0]] * 2, [banned, greedy()])
    assert got.failed == {0: ALL_BANNED}
    assert got.failed[0].startswith("every token is banned")
    assert got.tokens[1] == 1


def test_a_row_whose_rules_raise_fails_alone():
    got = sample(
        random_logits(1, 2, 9),
        [greedy(repetition_penalty=2.0), greedy(logit_bias={3: 99.0})],
        tokens=[[12], [1]],  # an id outside the vocabulary, which no checked request has
    )
    assert list(got.failed) == [0]
    assert "IndexError" in got.failed[0]
    assert got.tokens[1] == 3


# ---- log probabilities ------------------------------------------------------------------------


@given(st.integers(0, 1 << 32), st.integers(1, 150), st.integers(0, 20), st.booleans())
@settings(deadline=None)
def test_logprobs_are_the_raw_log_softmax(seed, vocab_size, count, ties):
    logits = random_logits(seed, 1, vocab_size, scale=4.0)
    if ties:
        logits = np.round(logits)
    params = SamplingParams(
        seed=seed, logprobs=count, temperature=3.0, top_k=5, logit_bias={0: 5.0}
    )
    got = sample(logits, [params])
    entry, chosen = got.logprobs[0], got.tokens[0]
    exact = logits[0].astype(np.float64)
    reference = exact - exact.max()
    reference -= np.log(np.exp(reference).sum())
    assert entry.logprob == pytest.approx(reference[chosen], abs=1e-5)
    smaller = np.exp(reference[exact < exact[chosen]]).sum()
    assert entry.sum_smaller_probs == pytest.approx(smaller, abs=1e-6)
    ranked = np.lexsort((np.arange(vocab_size), -exact))[:count]
    assert entry.top_token_ids == ranked.tolist()
    assert entry.top_logprobs == pytest.approx(reference[ranked].tolist(), abs=1e-5)
    assert all(value <= 0 for value in [entry.logprob, *entry.top_logprobs])


def test_rows_ask_for_different_numbers_of_logprobs():
    params = [greedy(logprobs=count) for count in (0, 3, 20)] + [greedy()]
    got = sample(random_logits(1, 4, 10), params)
    assert sorted(got.logprobs) == [0, 1, 2]
    assert [len(got.logprobs[row].top_token_ids) for row in range(3)] == [0, 3, 10]


def test_a_token_the_model_itself_excludes_has_logprob_minus_infinity():
    got = sample([[0.0, -np.inf]], [greedy(golden_token_ids=[1], logprobs=2)])
    assert got.logprobs[0].logprob == -math.inf
    assert got.logprobs[0].top_logprobs == [0.0, -math.inf]
