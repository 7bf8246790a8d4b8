"""A model folder gives the logits that transformers gives, however its tokens are batched."""

from __future__ import annotations

import json
import shutil
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.gpu_worker.backend import RaggedBatch
from deepinfer.gpu_worker.cpu_backend import CpuBackend
from deepinfer.gpu_worker.llama import Model
from deepinfer.gpu_worker.model_config import (
    ARCHITECTURES,
    ROPE_TYPES,
    load_model_config,
    parse_model_config,
)
from deepinfer.gpu_worker.rope import rope_tables
from deepinfer.wire.model_folder import ModelError
from support.checkpoints import (
    MAX_POSITIONS,
    VARIANTS,
    VOCAB_SIZE,
    make_checkpoint,
    one_torch_thread,
    reference_model,
)
from support.ragged_rows import RaggedRows
from support.torch_backend import TorchBackend

BLOCK_SIZE = 4
NUM_BLOCKS = 64
# Lengths around block borders, and longer than every window and original rope length in use.
LENGTHS = (91, 1, 16, 33)
BACKENDS = ("torch", "cpu")


@cache
def backend_named(name):
    return TorchBackend() if name == "torch" else CpuBackend(num_threads=2)


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """variant name -> its checkpoint folder, made on first use."""
    root = tmp_path_factory.mktemp("checkpoints")

    @cache
    def folder(variant):
        return make_checkpoint(variant, root / variant)

    return folder


@pytest.fixture(scope="session")
def expected(folders):
    """variant name -> [(token ids, transformers' logits [len, vocab])] for each of LENGTHS."""

    @cache
    def logits(variant):
        reference = reference_model(folders(variant))
        rng = np.random.default_rng(7)
        sequences = [rng.integers(0, VOCAB_SIZE, n).astype(np.int32) for n in LENGTHS]
        with torch.no_grad():
            return [
                (ids, reference(torch.from_numpy(ids[None]).long()).logits[0].numpy())
                for ids in sequences
            ]

    return logits


@pytest.fixture(autouse=True, scope="module")
def calm_torch():
    with one_torch_thread():
        yield


def run_steps(model, sequences, steps):
    """Run the steps, each a dict row -> tokens to add; return each row's logits so far."""
    rows = RaggedRows(model, len(sequences))
    logits = [[np.empty((0, VOCAB_SIZE), np.float32)] for _ in sequences]
    for step in steps:
        begin = list(rows.lengths)
        tokens = {row: sequences[row][begin[row] : begin[row] + n] for row, n in step.items()}
        for row, out in rows.step(tokens).items():
            logits[row].append(out)
    return [np.concatenate(parts) for parts in logits]


def whole_prompts():
    return [dict(enumerate(LENGTHS))]


def chunks_and_decodes():
    """Prompts in chunks mixed with other rows' single tokens, to the end of every sequence."""
    left = dict(enumerate(LENGTHS))
    steps = []
    for number in range(200):
        sizes = {row: min(n, (13, 1, 1, 5)[(row + number) % 4]) for row, n in left.items() if n}
        if not sizes:
            return steps
        steps.append(sizes)
        left = {row: n - sizes.get(row, 0) for row, n in left.items()}
    raise AssertionError("the schedule does not end")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("schedule", [whole_prompts, chunks_and_decodes])
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_are_those_of_transformers(folders, expected, variant, schedule, backend):
    model = Model.load(folders(variant), backend_named(backend), "float32")
    model.attach_cache(NUM_BLOCKS, BLOCK_SIZE)
    rows = expected(variant)
    for got, (_, want) in zip(
        run_steps(model, [ids for ids, _ in rows], schedule()), rows, strict=True
    ):
        assert np.abs(got - want).max() < 1e-4


@st.composite
def schedules(draw):
    left = dict(enumerate(LENGTHS))
    steps = []
    for _ in range(draw(st.integers(1, 12))):
        rows = draw(st.lists(st.sampled_from([r for r in left if left[r]] or [0]), unique=True))
        step = {row: draw(st.integers(1, left[row])) for row in rows if left[row]}
        if step:
            steps.append(step)
            left = {row: n - step.get(row, 0) for row, n in left.items()}
    return steps


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=25, deadline=None)
@given(steps=schedules())
def test_any_schedule_gives_the_same_logits(folders, expected, backend, steps):
    variant = "qwen3-layer-types"
    model = Model.load(folders(variant), backend_named(backend), "float32")
    model.attach_cache(NUM_BLOCKS, BLOCK_SIZE)
    rows = expected(variant)
    for got, (_, want) in zip(run_steps(model, [ids for ids, _ in rows], steps), rows, strict=True):
        assert not len(got) or np.abs(got - want[: len(got)]).max() < 1e-4


@pytest.mark.parametrize("backend", BACKENDS)
def test_only_the_wanted_logits_are_returned(folders, expected, backend):
    model = Model.load(folders("llama"), backend_named(backend), "float32")
    model.attach_cache(NUM_BLOCKS, BLOCK_SIZE)
    ids, want = expected("llama")[0]
    batch = RaggedBatch(
        token_ids=ids,
        positions=np.arange(len(ids), dtype=np.int32),
        q_start=np.array([0, len(ids)], np.int32),
        slots=np.zeros(1, np.int32),
        lengths=np.array([len(ids)], np.int32),
        block_tables=np.arange(NUM_BLOCKS, dtype=np.int32)[None],
        logit_index=np.array([0, 7, len(ids) - 1], np.int32),
    )
    got = model.forward(batch)
    assert got.shape == (3, VOCAB_SIZE)
    assert np.abs(got - want[batch.logit_index]).max() < 1e-4
    batch.logit_index = batch.logit_index[:0]
    assert model.forward(batch).shape == (0, VOCAB_SIZE)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_bfloat16_model_is_the_rounded_model(folders, expected, backend, tmp_path):
    """Weights rounded to bfloat16 and run in float32 differ only by the cache's rounding."""
    rounded = make_checkpoint("qwen2-tied", tmp_path / "bf16", dtype=torch.bfloat16)
    ids, _ = expected("qwen2-tied")[0]
    with torch.no_grad():
        want = reference_model(rounded)(torch.from_numpy(ids[None]).long()).logits[0].numpy()
    model = Model.load(folders("qwen2-tied"), backend_named(backend), "bfloat16")
    model.attach_cache(NUM_BLOCKS, BLOCK_SIZE)
    got = run_steps(model, [ids], [{0: len(ids)}])[0]
    # Norms and biases stay float32 in one and were rounded in the other, like keys and values.
    assert np.abs(got - want).max() < 0.05
    assert np.abs(got - want).max() > 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_warming_up_leaves_no_trace(folders, expected, backend):
    model = Model.load(folders("mistral-window"), backend_named(backend), "float32")
    model.attach_cache(NUM_BLOCKS, BLOCK_SIZE)
    model.warm_up()
    ids, want = expected("mistral-window")[0]
    assert np.abs(run_steps(model, [ids], [{0: len(ids)}])[0] - want).max() < 1e-4


def test_shards_are_one_model(folders, tmp_path):
    single = Model.load(folders("qwen2"), TorchBackend(), "float32")
    folder = make_checkpoint("qwen2", tmp_path / "sharded", shard_size="100KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    sharded = Model.load(folder, TorchBackend(), "float32")
    assert torch.equal(single.head.weight, sharded.head.weight)
    for one, other in zip(single.layers, sharded.layers, strict=True):
        assert torch.equal(one.qkv.weight, other.qkv.weight)
        assert torch.equal(one.down.weight, other.down.weight)


def test_a_model_says_what_it_is(folders):
    model = Model.load(folders("llama-rope-yarn"), TorchBackend(), "bfloat16")
    assert model.architecture == "LlamaForCausalLM"
    assert (model.vocab_size, model.max_model_len) == (VOCAB_SIZE, MAX_POSITIONS)
    assert model.eos_token_ids == (2,)
    assert model.num_blocks == 0
    model.attach_cache(5, 16)
    assert model.num_blocks == 5
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in model.cache.layers)
    assert held == 5 * model.kv_bytes_per_block(16)


def test_a_lower_length_limit_is_kept_and_a_higher_one_refused(folders):
    assert Model.load(folders("llama"), TorchBackend(), "float32", 100).max_model_len == 100
    for length in (0, MAX_POSITIONS + 1):
        with pytest.raises(ModelError, match=f"max_model_len .* {MAX_POSITIONS}, got {length}"):
            Model.load(folders("llama"), TorchBackend(), "float32", length)


def test_an_unknown_dtype_is_refused(folders):
    with pytest.raises(ModelError, match="dtype must be one of float32, bfloat16, got 'int3'"):
        Model.load(folders("llama"), TorchBackend(), "int3")


# config.json


def config_with(folders, variant="llama", **changes):
    raw = json.loads((folders(variant) / "config.json").read_text())
    raw.update(changes)
    return {key: value for key, value in raw.items() if value != "drop"}


@pytest.mark.parametrize(
    ("variant", "changes", "message"),
    [
        ("llama", {"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel.*" + ARCHITECTURES[0]),
        ("llama", {"architectures": "drop"}, "architectures is missing; supported"),
        ("llama", {"architectures": "Llama"}, "architectures must be a list"),
        ("llama", {"hidden_size": "drop"}, "hidden_size is missing"),
        ("llama", {"hidden_size": "64"}, "hidden_size must be an integer"),
        ("llama", {"hidden_size": True}, "hidden_size must be an integer"),
        ("llama", {"hidden_size": 63, "head_dim": None}, "hidden_size 63 .* num_attention_heads 4"),
        ("llama", {"head_dim": 17}, "head_dim must be even"),
        ("llama", {"vocab_size": 0}, "vocab_size must be between 1"),
        ("llama", {"vocab_size": 1 << 40}, "vocab_size must be between 1"),
        ("llama", {"num_hidden_layers": -1}, "num_hidden_layers must be between"),
        ("llama", {"num_key_value_heads": 3}, "num_attention_heads 4 is not a multiple"),
        ("llama", {"num_key_value_heads": 8}, "num_key_value_heads must be between 1 and 4"),
        ("llama", {"rms_norm_eps": "small"}, "rms_norm_eps must be a number"),
        ("llama", {"rms_norm_eps": 10**400}, "rms_norm_eps"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act must be silu, got 'gelu'"),
        ("llama", {"attention_bias": 1}, "attention_bias must be true or false"),
        ("llama", {"tie_word_embeddings": None}, "tie_word_embeddings must be true or false"),
        ("llama", {"quantization_config": {"bits": 4}}, "quantization_config is not supported"),
        ("llama", {"eos_token_id": [2, VOCAB_SIZE]}, f"eos_token_id must be .* {VOCAB_SIZE - 1}"),
        ("llama", {"eos_token_id": "</s>"}, "eos_token_id must be an integer"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic"}}, "dynamic.*" + ROPE_TYPES[-1]),
        ("llama", {"rope_parameters": [1]}, "rope_parameters must be an object"),
        ("llama", {"rope_parameters": {"rope_type": "linear"}}, "rope_parameters: factor is miss"),
        ("llama", {"rope_parameters": {"rope_theta": "big"}}, "rope_theta must be a number"),
        ("llama", {"rope_parameters": {"sliding_attention": {}}}, "differ between layers"),
        ("llama", {"rope_scaling": {"type": "longrope"}}, "rope_scaling.rope_type is 'longrope'"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        (
            "llama",
            {"rope_scaling": {"type": "llama3", "factor": 8}},
            "rope_scaling: low_freq_factor is missing",
        ),
        ("mistral", {"sliding_window": 0}, "sliding_window must be between 1"),
        ("qwen2-window", {"use_sliding_window": "yes"}, "use_sliding_window must be true or false"),
        ("qwen2-window", {"layer_types": ["full_attention"]}, "layer_types must list one kind"),
        ("qwen2-window", {"layer_types": ["linear_attention"] * 3}, "layer_types has 'linear_att"),
    ],
)
def test_a_bad_config_is_refused_by_name(folders, variant, changes, message):
    with pytest.raises(ModelError, match=message):
        parse_model_config(config_with(folders, variant, **changes))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=6,
)


VISION_ARCHITECTURES = [name for name in ARCHITECTURES if "Conditional" in name]
MODEL_TYPES = st.sampled_from(["llama", "qwen2_5_vl_text"])


@settings(max_examples=600, deadline=None)
@given(data=st.data())
def test_any_config_parses_or_is_a_model_error(folders, data):
    raw = config_with(folders, data.draw(st.sampled_from(["qwen2-window", "llama-rope-yarn"])))
    vision = data.draw(st.sampled_from([None, *VISION_ARCHITECTURES]))
    if vision is not None:
        rope = {**raw["rope_parameters"], "mrope_section": [2, 3, 3]}
        text = {**raw, "rope_parameters": rope, "model_type": data.draw(MODEL_TYPES)}
        raw = {"architectures": [vision], "text_config": text}
        if data.draw(st.booleans()):
            raw, text["architectures"] = text, [vision]
    raw = _spoilt(raw, data)
    try:
        config = parse_model_config(raw)
    except ModelError:
        return
    assert len(config.windows) == config.num_layers
    assert sum(config.rope.sections) in (0, config.head_dim // 2)
    cos, sin = rope_tables(config.rope, config.head_dim, 8)
    assert cos.dtype == sin.dtype == np.float32
    assert np.isfinite(cos).all() and np.isfinite(sin).all()


def _spoilt(raw, data):
    """The object with one of its values, or of one in it, replaced."""
    key = data.draw(st.sampled_from([*raw, "rope_scaling", "quantization_config"]))
    if isinstance(raw.get(key), dict) and data.draw(st.booleans()):
        return {**raw, key: _spoilt(raw[key], data)}
    return {**raw, key: data.draw(JSON)}


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff\xfe\x00", b"[" * 100_000, None])
def test_a_broken_config_file_is_a_model_error(tmp_path, content):
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ModelError, match=r"config\.json"):
        load_model_config(tmp_path)


@pytest.mark.parametrize("variant", ["llama", "llama-rope-llama3", "llama-rope-yarn"])
def test_both_spellings_of_rope_mean_the_same(folders, variant):
    raw = config_with(folders, variant)
    old = {key: value for key, value in raw.items() if key != "rope_parameters"}
    rope = dict(raw["rope_parameters"])
    old["rope_theta"] = rope.pop("rope_theta")
    kind = rope.pop("rope_type")
    old["rope_scaling"] = None if kind == "default" else {**rope, "type": kind}
    assert parse_model_config(old) == parse_model_config(raw)


def test_window_layers_are_counted_as_newer_files_list_them(folders):
    listed = config_with(folders, "qwen2-window")
    assert listed["layer_types"] == ["full_attention", *["sliding_attention"] * 2]
    counted = parse_model_config(config_with(folders, "qwen2-window", layer_types="drop"))
    assert counted == parse_model_config(listed)
    assert counted.windows == (0, 7, 7)


def test_yarn_switched_on_by_hand_extends_the_length(folders):
    rope = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": MAX_POSITIONS}
    config = parse_model_config(config_with(folders, rope_scaling=rope))
    assert config.max_model_len == 4 * MAX_POSITIONS


@pytest.mark.parametrize(
    ("config_eos", "generation_eos", "ids"),
    [
        (2, [2, 7], (2, 7)),
        ([5, 4], 3, (5, 4, 3)),
        (None, 9, (9,)),
        (None, None, ()),
        (1, None, (1,)),
    ],
)
def test_eos_ids_of_both_files_count(folders, tmp_path, config_eos, generation_eos, ids):
    raw = config_with(folders, eos_token_id=config_eos)
    (tmp_path / "config.json").write_text(json.dumps(raw))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": generation_eos}))
    assert load_model_config(tmp_path).eos_token_ids == ids


def test_a_missing_generation_config_is_no_error(folders, tmp_path):
    shutil.copy(folders("llama") / "config.json", tmp_path)
    assert load_model_config(tmp_path).eos_token_ids == (2,)
