"""The runner: what a row gets does not depend on chunking, company, timing or its past."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.gpu_worker.kernels import sampling
from deepinfer.gpu_worker.kernels.fork_join import ThreadTeam
from deepinfer.gpu_worker.runner import MAX_PROMPT_LOGIT_ROWS, PlanError, Runner
from deepinfer.gpu_worker.sampler import NOT_FINITE
from deepinfer.wire.arena import ALIGNMENT, Arena, Region
from deepinfer.wire.columns import pack_int32, unpack_int32
from deepinfer.wire.params import SamplingParams
from deepinfer.wire.steps import ImageSpan, RowAdmit, StepPlan
from support.runner_driver import GREEDY, RunnerDriver
from support.scripted_model import ScriptedModel, hash_chain, with_images

VOCAB = 30
PARAMS = [
    GREEDY,
    SamplingParams(seed=5, max_tokens=1000, logprobs=2),
    SamplingParams(seed=-9, temperature=0.7, top_p=0.9, max_tokens=1000),
    SamplingParams(seed=6, top_k=5, repetition_penalty=1.3, max_tokens=1000),
    SamplingParams(temperature=0.0, frequency_penalty=0.7, min_tokens=3, max_tokens=1000),
    SamplingParams(seed=7, bad_words=[[3], [4, 5]], logit_bias={9: 1.5}, max_tokens=1000),
]
prompts = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=20)


def driver(model=None, *, block_size=4, num_blocks=64, seed=0, max_num_seqs=8, **model_args):
    model = model or ScriptedModel(VOCAB, num_blocks, block_size, **model_args)
    return RunnerDriver(
        model,
        max_num_seqs=max_num_seqs,
        num_blocks=num_blocks,
        block_size=block_size,
        max_model_len=model.max_model_len,
        seed=seed,
    )


def alone(prompt, params=GREEDY, num_outputs=8, **fields):
    """What a sequence gets when it runs by itself with its prompt in one piece."""
    engine = driver(**fields)
    row = engine.add(prompt, params)
    engine.run(num_outputs)
    return row


# ---- the same output whatever the company -------------------------------------------------------


def test_a_lone_greedy_row_is_the_models_own_continuation():
    model = ScriptedModel(VOCAB, 64, 4)
    engine = driver(model)
    row = engine.add([5, 6, 7])
    engine.run(20, chunk_size=2)
    assert row.outputs == model.continuation([5, 6, 7], 20)


@given(st.data(), st.sampled_from([1, 3, 16]), st.integers(0, 1000))
@settings(max_examples=60, deadline=None)
def test_company_and_chunking_change_nothing(data, block_size, seed):
    sequences = data.draw(
        st.lists(st.tuples(prompts, st.sampled_from(PARAMS)), min_size=1, max_size=5)
    )
    engine = driver(block_size=block_size, num_blocks=400, seed=seed)
    waiting, rows = list(sequences), []
    while waiting or any(len(row.outputs) < 6 for row in rows):
        if waiting and not data.draw(st.booleans(), "no one joins"):
            rows.append(engine.add(*waiting.pop(0)))
        chunks = {row: row.left - data.draw(st.integers(0, row.left), "held back") for row in rows}
        engine.step({row: size for row, size in chunks.items() if size})
    for row, (prompt, params) in zip(rows, sequences, strict=True):
        reference = alone(prompt, params, len(row.outputs))
        assert row.outputs == reference.outputs
        assert row.logprobs == reference.logprobs


@given(prompts, st.sampled_from(PARAMS), st.integers(1, 7), st.integers(1, 9))
@settings(max_examples=60, deadline=None)
def test_a_recomputed_row_continues_as_if_nothing_had_happened(prompt, params, done, chunk_size):
    reference = alone(prompt, params, 10)
    engine = driver(seed=3)
    bystander = engine.add([1, 2, 3])
    first = engine.add(prompt, params)
    engine.run(done)
    before = first.outputs[:done]
    engine.release(first)
    again = engine.add(prompt, params, outputs=before)
    engine.run(10, chunk_size=chunk_size)
    assert again.outputs[:10] == reference.outputs
    assert again.logprobs[: 10 - done] == reference.logprobs[done:]
    assert bystander.outputs == alone([1, 2, 3], num_outputs=len(bystander.outputs)).outputs


def test_a_batch_is_made_anew_only_when_a_row_comes_or_goes():
    batches = []

    class Noting(ScriptedModel):
        def forward(self, batch):
            batches.append((batch, sorted(batch.positions.tolist())))
            return super().forward(batch)

    engine = driver(Noting(VOCAB, 64, 4))
    engine.add([5, 6, 7])
    engine.run(4)
    other = engine.add([8])
    engine.step(chunk_size=1)
    engine.step()
    engine.release(other)
    engine.step()
    assert [positions for _, positions in batches] == [
        *([0, 1, 2], [3], [4], [5], [0, 6], [1, 7], [8])
    ]
    made = [batch for batch, _ in batches]
    assert made[1] is made[2] is made[3]
    assert len({id(batch) for batch in made}) == 5


def test_threads_change_nothing():
    team = ThreadTeam(2)
    outputs = []
    for threads in (None, team):
        runner = Runner(
            ScriptedModel(VOCAB, 64, 4),
            max_num_seqs=8,
            max_model_len=64,
            num_blocks=64,
            block_size=4,
            team=threads,
        )
        admitted = [
            admit(slot=slot, tokens=[slot + 1], params=params) for slot, params in enumerate(PARAMS)
        ]
        chunks = pack_int32([n for slot in range(len(PARAMS)) for n in (slot, 1)])
        first = runner.execute(StepPlan(0, admitted=admitted, chunks=chunks))
        rest = [runner.execute(StepPlan(step)) for step in range(1, 4)]
        outputs.append([(r.slots, r.tokens, r.logprobs) for r in (first, *rest)])
    team.close()
    assert outputs[0] == outputs[1]


# ---- sampling over a sequence's life ------------------------------------------------------------


def test_a_strong_penalty_joins_late_and_never_repeats():
    engine = driver(seed=2)
    calm = engine.add([4, 4])
    engine.step(chunk_size=9)
    engine.step()
    strong = SamplingParams(temperature=0.0, repetition_penalty=100.0, max_tokens=1000)
    penalised = engine.add([1, 2], strong)
    engine.run(20)
    seen = [*penalised.prompt, *penalised.outputs]
    assert len(set(seen)) == len(seen)
    assert calm.outputs == alone([4, 4], num_outputs=len(calm.outputs)).outputs


def test_a_bad_word_of_two_tokens_never_appears():
    plain = alone([7, 7], num_outputs=12, next_token=lambda context: 5 + len(context) % 2)
    assert [6, 5] in [plain.outputs[i : i + 2] for i in range(11)]
    params = SamplingParams(temperature=0.0, bad_words=[[6, 5]], max_tokens=1000)
    row = alone([7, 7], params, 12, next_token=lambda context: 5 + len(context) % 2)
    assert 6 in row.outputs and 5 in row.outputs
    assert [6, 5] not in [row.outputs[i : i + 2] for i in range(11)]


def test_no_stop_before_min_tokens():
    params = SamplingParams(temperature=0.0, min_tokens=4, stop_token_ids=[11], max_tokens=1000)
    row = alone([7], params, 6, next_token=lambda context: 0 if len(context) % 2 else 11)
    assert not {0, 11} & set(row.outputs[:4])
    assert row.outputs[4:] == [0, 11]


def test_golden_tokens_come_first_and_count_as_outputs():
    params = SamplingParams(temperature=0.0, golden_token_ids=[9, 8, 7], max_tokens=1000)
    row = alone([1], params, 6)
    assert row.outputs[:3] == [9, 8, 7]
    assert row.outputs[3:] == ScriptedModel(VOCAB).continuation([1, 9, 8, 7], 3)


# ---- prompt log probabilities -------------------------------------------------------------------


def prompt_entries(row):
    """All entries as (position, ids, logprobs), which must follow each other without a gap."""
    entries = []
    for part in row.prompt_logprobs:
        for i, (ids, values) in enumerate(zip(part.token_ids, part.logprobs, strict=True)):
            entries.append((part.start + i, ids, values))
    return entries


@given(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=24), st.integers(0, 3))
@settings(max_examples=20, deadline=None)
def test_prompt_logprobs_are_the_same_for_every_chunk_size(prompt, count):
    params = SamplingParams(temperature=0.0, prompt_logprobs=count, max_tokens=1000)
    model = ScriptedModel(VOCAB)
    expected = []
    for position in range(1, len(prompt)):
        logits = model.logits(np.array(prompt[:position], np.int32)).astype(np.float64)
        reference = logits - np.log(np.exp(logits).sum())
        ids = [prompt[position], *np.argsort(-reference, kind="stable")[:count].tolist()]
        expected.append((position, ids, pytest.approx(reference[ids].tolist(), abs=1e-5)))
    outputs = alone(prompt).outputs
    for chunk_size in range(1, len(prompt) + 1):
        engine = driver()
        row = engine.add(prompt, params)
        company = engine.add([3, 2, 1])
        engine.run(8, chunk_size=chunk_size)
        assert prompt_entries(row) == expected
        assert row.outputs[:8] == outputs
        assert not company.prompt_logprobs


@given(st.integers(1, 14), st.integers(1, 14), st.integers(0, 4))
@settings(deadline=None)
def test_prompt_logprobs_begin_where_they_are_still_wanted(start, chunk_size, num_outputs):
    prompt = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]
    params = SamplingParams(temperature=0.0, prompt_logprobs=1, max_tokens=1000)
    whole = prompt_entries(alone(prompt, params))
    outputs = alone(prompt).outputs
    engine = driver()
    row = engine.add(prompt, params, outputs=outputs[:num_outputs], prompt_logprobs_start=start)
    engine.run(8, chunk_size=chunk_size)
    assert prompt_entries(row) == [entry for entry in whole if entry[0] >= start]
    assert row.outputs[:8] == outputs


def test_prompt_logprobs_of_a_long_chunk_hold_few_logits_at_once():
    shapes = []
    model = ScriptedModel(
        VOCAB, 64, 16, on_forward=lambda batch: shapes.append(len(batch.logit_index))
    )
    engine = driver(model, block_size=16)
    params = SamplingParams(temperature=0.0, prompt_logprobs=0, max_tokens=1000)
    row = engine.add([i % VOCAB for i in range(700)], params)
    engine.step(chunk_size=700)
    assert len(prompt_entries(row)) == 699
    assert max(shapes) == MAX_PROMPT_LOGIT_ROWS
    assert len(row.outputs) == 1


# ---- rows that fail, and what comes after -------------------------------------------------------


def poison(first_token, at_length, until=1000):
    def on_logits(context, row):
        if context[0] == first_token and at_length <= len(context) < until:
            row[3] = np.nan

    return on_logits


@pytest.mark.parametrize("at_length", [3, 5])
def test_a_row_that_fails_takes_no_one_along(at_length):
    engine = driver(on_logits=poison(29, at_length))
    healthy = engine.add([5, 5, 5], PARAMS[2])
    sick = engine.add([29, 1, 2])
    engine.run(8)
    assert sick.failure == NOT_FINITE
    assert len(sick.outputs) == at_length - 3
    assert healthy.outputs[:8] == alone([5, 5, 5], PARAMS[2]).outputs
    engine.release(sick)
    heir = engine.add([8, 8])
    assert heir.slot == sick.slot
    engine.run(8)
    assert heir.outputs[:8] == alone([8, 8]).outputs


def test_a_failed_row_takes_part_in_nothing_until_it_is_released():
    batches = []
    engine = driver(on_logits=poison(29, 3), on_forward=lambda b: batches.append(b.slots.tolist()))
    engine.add([5, 5, 5])
    sick = engine.add([29, 1, 2])
    engine.step(chunk_size=9)
    assert sick.failure
    engine.step()
    engine.step()
    assert [sick.slot in slots for slots in batches] == [True, False, False]


def test_not_finite_prompt_logits_fail_the_row():
    engine = driver(on_logits=poison(29, 2, until=3))
    params = SamplingParams(temperature=0.0, prompt_logprobs=1, max_tokens=1000)
    sick, healthy = engine.add([29, 1, 2, 3], params), engine.add([5])
    engine.run(3, chunk_size=4)
    assert sick.failure == NOT_FINITE and not sick.prompt_logprobs and not sick.outputs
    assert healthy.outputs == alone([5], num_outputs=3).outputs


@pytest.mark.parametrize(
    "prompt, params, message",
    [
        ([1, VOCAB], GREEDY, f"below the vocabulary size {VOCAB}, got {VOCAB}"),
        ([1, -1], GREEDY, "got -1"),
        ([1], SamplingParams(), "seed"),
        ([1], SamplingParams(temperature=0, bad_words=["word"]), "bad_words"),
        ([1], SamplingParams(temperature=0, logit_bias={VOCAB: 1.0}), "logit_bias"),
    ],
)
def test_a_row_that_cannot_be_admitted_fails_alone(prompt, params, message):
    engine = driver()
    healthy = engine.add([5])
    sick = engine.add(prompt, params)
    engine.step({healthy: 1, sick: len(prompt)})
    assert message in sick.failure
    engine.run(4)
    assert not sick.outputs
    assert healthy.outputs == alone([5], num_outputs=4).outputs


def test_an_exception_of_the_model_is_not_hidden():
    def explode(batch):
        raise MemoryError("no more")

    engine = driver(on_forward=explode)
    engine.add([1])
    with pytest.raises(MemoryError, match="no more"):
        engine.step(chunk_size=1)


# ---- plans --------------------------------------------------------------------------------------


def test_a_finished_row_is_computed_once_more_and_its_blocks_serve_the_next_in_the_same_plan():
    # With overlap a step is planned before the scheduler saw the end in the one before. Blocks and
    # slot go to the next sequence at once, because steps are executed in order.
    engine = driver(num_blocks=4, max_num_seqs=1)
    first = engine.add([5, 6, 7])
    engine.run(3)
    engine.step()  # planned already when it finished with its third token
    engine.release(first)
    heir = engine.add([8, 9, 10, 11, 12])
    assert heir.slot == first.slot and set(heir.blocks) <= {0, 1, 2, 3}
    engine.run(8, chunk_size=2)
    assert heir.outputs == alone([8, 9, 10, 11, 12]).outputs


def test_a_prompt_of_the_limit_yields_one_token_and_a_longer_one_is_an_impossible_plan():
    engine = driver(max_model_len=12)
    row = engine.add(list(range(12)))
    engine.step(chunk_size=12)
    assert len(row.outputs) == 1
    engine.release(row)
    engine.add(list(range(13)))
    with pytest.raises(PlanError, match="13 tokens, the limit is 12"):
        engine.step(chunk_size=13)


def test_a_slot_may_grow_by_several_blocks_in_one_plan():
    runner = new_runner()
    runner.execute(StepPlan(0, admitted=[admit(slot=1, blocks=[5])], chunks=pack_int32([1, 3])))
    runner.execute(StepPlan(1, grown=pack_int32([1, 7, 1, 3, 1, 6])))
    for step in range(2, 12):
        runner.execute(StepPlan(step))
    assert runner._table.block_tables[1, :4].tolist() == [5, 7, 3, 6]
    assert runner._table.tokens(1)[3:].tolist() == ScriptedModel(VOCAB).continuation([1, 2, 3], 12)


def test_the_next_step_needs_nothing_but_its_number():
    runner = new_runner()
    admitted = [admit(slot=2, tokens=[1], epoch=70), admit(slot=0, tokens=[2], epoch=80)]
    runner.execute(StepPlan(4, admitted=admitted, chunks=pack_int32([2, 1, 0, 1])))
    result = runner.execute(StepPlan(9))
    assert result.step == 9
    assert unpack_int32(result.slots).tolist() == [0, 2]
    assert unpack_int32(result.epochs).tolist() == [80, 70]
    assert not result.counts
    assert 0 < result.started_ns <= result.ended_ns


def test_a_plan_without_rows_computes_nothing():
    model = ScriptedModel(VOCAB, 16, 4)
    result = new_runner(model).execute(StepPlan(0))
    assert (result.slots, result.tokens, result.failed) == (b"", b"", [])
    assert model.num_forwards == 0


def new_runner(model=None):
    model = model or ScriptedModel(VOCAB, 16, 4)
    return Runner(model, max_num_seqs=3, max_model_len=40, num_blocks=16, block_size=4)


def admit(slot=0, tokens=(1, 2, 3), blocks=None, params=GREEDY, **fields):
    blocks = [slot * 2 + i for i in range(-(-len(tokens) // 4))] if blocks is None else blocks
    return RowAdmit(
        **{
            "slot": slot,
            "epoch": 1,
            "tokens": pack_int32(tokens),
            "num_prompt": len(tokens),
            "num_cached": 0,
            "blocks": pack_int32(blocks),
            "params": params,
            **fields,
        }
    )


WANTS_PROMPT = SamplingParams(temperature=0.0, prompt_logprobs=1)


@pytest.mark.parametrize(
    "plan, message",
    [
        ({"admitted": [admit(slot=3)]}, "no slot 3"),
        ({"admitted": [admit(slot=-1)]}, "no slot -1"),
        ({"admitted": [admit(slot=1)]}, "the slot is taken"),
        ({"admitted": [admit(tokens=())]}, "0 tokens"),
        ({"admitted": [admit(tokens=[1] * 41)]}, "41 tokens, the limit is 40"),
        ({"admitted": [admit(blocks=[])]}, "0 blocks for 3 tokens"),
        ({"admitted": [admit(blocks=[16])]}, "no block 16"),
        ({"admitted": [admit(blocks=[-1])]}, "no block -1"),
        ({"admitted": [admit(blocks=list(range(12)))]}, "12 blocks"),
        ({"admitted": [admit(num_cached=3)]}, "num_cached 3 of 3"),
        ({"admitted": [admit(num_cached=-1)]}, "num_cached -1"),
        ({"admitted": [admit(num_prompt=0)]}, "num_prompt 0"),
        ({"admitted": [admit(num_prompt=4)]}, "num_prompt 4"),
        ({"admitted": [admit(num_cached=1, params=WANTS_PROMPT)]}, "1 tokens are cached"),
        ({"released": pack_int32([0])}, "slot 0 is empty"),
        ({"released": pack_int32([1, 1])}, "slot 1 is empty"),
        ({"released": pack_int32([7])}, "no slot 7"),
        ({"released": b"abc"}, "released"),
        ({"grown": pack_int32([1])}, "no pairs"),
        ({"grown": pack_int32([0, 2])}, "slot 0 is empty"),
        ({"grown": pack_int32([1, 16])}, "no block 16"),
        ({"grown": pack_int32([1, 2] * 11)}, "full block table"),
        ({"chunks": pack_int32([0, 1])}, "slot 0 is empty"),
        ({"chunks": pack_int32([1, 0])}, "chunk of 0 tokens"),
        ({"chunks": pack_int32([1, 6])}, "chunk of 6 tokens for slot 1, which has 5"),
        ({"chunks": pack_int32([1, 1, 1, 1])}, "named twice"),
        ({"chunks": pack_int32([2, 1])}, "decodes"),
        ({"step": 1}, "step 1 after step 1"),
        ({"step": 0}, "step 0 after step 1"),
    ],
)
def test_an_impossible_plan_is_refused(plan, message):
    runner = new_runner()
    rows = [admit(slot=1, tokens=[1] * 6, blocks=[9, 8]), admit(slot=2, tokens=[1])]
    runner.execute(StepPlan(1, admitted=rows, chunks=pack_int32([1, 1, 2, 1])))
    with pytest.raises(PlanError, match=message):
        runner.execute(StepPlan(**{"step": 2, **plan}))


def test_a_decode_row_without_a_block_for_its_token_is_an_impossible_plan():
    runner = new_runner()
    runner.execute(StepPlan(0, admitted=[admit()], chunks=pack_int32([0, 3])))
    runner.execute(StepPlan(1))
    with pytest.raises(PlanError, match=r"without a block for a token: \[0\]"):
        runner.execute(StepPlan(2))


def test_nothing_is_compiled_after_the_warm_up():
    engine = driver()
    engine.runner.warm_up()
    prompt_logprobs = SamplingParams(seed=1, prompt_logprobs=2, logprobs=2, max_tokens=1000)
    for params in [*PARAMS, prompt_logprobs]:
        engine.add([5, 6, 7], params)
    engine.run(3, chunk_size=2)
    # One kind of arguments each, the one that the warm-up compiled for.
    assert len(sampling.draw.signatures) == len(sampling.logprobs.signatures) == 1


# ---- the equipment ------------------------------------------------------------------------------


def test_no_random_choice_ends_a_scripted_request():
    """Tests hold such requests open; an end by chance would fail one run in hundreds."""
    model = ScriptedModel(VOCAB, eos_token_ids=[0])
    rows = np.array([model.logits(np.array([i, 3], np.int32)) for i in range(200)], np.float64)
    weights = np.exp(rows)
    assert (weights[:, 0] / weights.sum(1) < 1e-30).all()


def test_the_scripted_model_notices_a_wrong_block_table():
    engine = driver()
    row = engine.add([1, 2, 3, 4, 5])
    engine.step(chunk_size=9)
    table = engine.runner._table
    table.block_tables[row.slot, 0] = engine.free_blocks[0]
    with pytest.raises(AssertionError, match="never written"):
        engine.step()


def test_a_hash_chain_brings_eos_as_often_as_asked():
    next_token = hash_chain(VOCAB, 0, eos_odds=4)
    got = [next_token(np.array([i, 7], np.int32)) for i in range(400)]
    assert 60 < got.count(0) < 140
    without = hash_chain(VOCAB, 0)
    assert 0 not in [without(np.array([i, 7], np.int32)) for i in range(400)]


# ---- images -------------------------------------------------------------------------------------


@given(st.data(), st.integers(1, 9), st.sampled_from([1, 3]))
@settings(max_examples=60, deadline=None)
def test_a_row_sees_its_own_images_however_it_is_cut(data, chunk_size, rope_axes):
    """Several rows with several images of one size, each in its own place."""
    arena = Arena.create(1 << 16)
    model = ScriptedModel(VOCAB, 400, 4, rope_axes=rope_axes)
    engine = RunnerDriver(model, num_blocks=400, block_size=4, arena=arena)
    expected = {}
    for number in range(data.draw(st.integers(1, 4))):
        prompt = data.draw(st.lists(st.integers(1, VOCAB - 1), min_size=20, max_size=30))
        images, spans = {}, []
        for at in sorted(data.draw(st.sets(st.sampled_from([0, 5, 10, 16])))):
            lines = np.full((4, model.hidden_size), number + at / 100, np.float32)
            lines[:, 0] = range(4)
            region = Region(ALIGNMENT * 2 * (4 * number + len(spans)), ALIGNMENT * 2, 1)
            arena.write(region, lines)
            # The second and third line stand apart, where an image may be in several runs.
            runs = (0, 4) if rope_axes == 3 else (0, 1, 1, 3)
            grid = (1, 2, 2) if rope_axes == 3 else ()
            spans.append(ImageSpan(position=at, runs=pack_int32(runs), region=region, grid=grid))
            images[at] = lines
        row = engine.add(prompt, images=spans)
        expected[row] = model.continuation(with_images(prompt, images), 6)
        if data.draw(st.booleans(), "a step between"):
            engine.step(chunk_size=chunk_size)
    engine.run(6, chunk_size)
    arena.close()
    for row, outputs in expected.items():
        assert row.outputs[:6] == outputs
