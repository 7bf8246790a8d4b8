"""A model with images gives what transformers gives, however its prompts are cut and batched."""

from __future__ import annotations

import json
import shutil
from functools import cache

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from deepinfer.gpu_worker.cpu_backend import CpuBackend
from deepinfer.gpu_worker.llama import Model
from deepinfer.gpu_worker.model_config import ModelError, parse_model_config
from deepinfer.gpu_worker.runner import PlanError
from deepinfer.wire.columns import pack_int32
from deepinfer.wire.params import SamplingParams
from deepinfer.wire.steps import ImageSpan
from support.checkpoints import one_torch_thread
from support.runner_driver import GREEDY, RunnerDriver
from support.torch_backend import TorchBackend
from support.vision_prompts import (
    FAMILIES,
    IMAGE_TOKEN,
    NEVER_SAMPLED,
    Pictures,
    Prompt,
    VisionReference,
    make_vision_checkpoint,
    smollm2_with_encoder,
)

BLOCK_SIZE = 4
NUM_BLOCKS = 256
NUM_OUTPUTS = 32
# One of each kind of text model, and of positions.
KINDS = ("idefics3", "qwen2_5_vl")
# All logits of the prompt are wanted.
ALL_LOGITS = SamplingParams(
    temperature=0.0,
    max_tokens=1000,
    prompt_logprobs=0,
    logit_bias=dict.fromkeys(NEVER_SAMPLED, -100.0),
)


@pytest.fixture(autouse=True, scope="module")
def calm_torch():
    with one_torch_thread():
        yield


@cache
def backend_named(name):
    # One thread: two wait for one another on a busy machine, and change nothing.
    return TorchBackend() if name == "torch" else CpuBackend(num_threads=1)


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """family -> its checkpoint folder, made on first use."""
    root = tmp_path_factory.mktemp("vision")

    @cache
    def folder(family):
        return make_vision_checkpoint(family, root / family)

    return folder


@pytest.fixture(scope="session")
def references(folders):
    return cache(lambda family: VisionReference(folders(family)))


@pytest.fixture(scope="session")
def pictures():
    return Pictures()


@pytest.fixture(scope="session")
def prompts(references):
    """family -> prompts: pictures of several sizes, at the beginning, side by side, at the end."""

    @cache
    def of(family):
        picture = references(family).picture
        wide, tall, small = picture((2, 3), 1), picture((4, 1), 2), picture((1, 1), 3)
        return {
            "one": Prompt.of([5, 6, 7], wide, [8, 9, 10]),
            "several": Prompt.of(tall, [11, 12], small, wide, [13, 14, 15, 16, 17]),
            "text": Prompt.of([21, 22, 23, 24, 25, 26, 27]),
            "last": Prompt.of([31, 32], small, [33], tall),
            "twice": Prompt.of([41], wide, [42], wide, [43]),
        }

    return of


class Watched:
    """A model that keeps the logits of every (slot, position)."""

    def __init__(self, model):
        self.model = model
        self.logits = {}
        self.vocab_size = model.vocab_size
        self.hidden_size = model.hidden_size
        self.rope_axes = model.rope_axes

    def forward(self, batch):
        logits = self.model.forward(batch)
        rows = np.searchsorted(batch.q_start, batch.logit_index, side="right") - 1
        slots, positions = batch.slots[rows], batch.positions[batch.logit_index]
        for slot, position, line in zip(slots.tolist(), positions.tolist(), logits, strict=True):
            self.logits[slot, position] = line.copy()
        return logits


class Engine:
    """A runner over a fresh cache; ``logits_of`` a row are those of all its computed tokens."""

    def __init__(self, folder, pictures, backend="cpu", dtype="float32", kv_cache_dtype=None):
        model = Model.load(folder, backend_named(backend), dtype, kv_cache_dtype=kv_cache_dtype)
        model.attach_cache(NUM_BLOCKS, BLOCK_SIZE)
        self.watched = Watched(model)
        self.pictures = pictures
        self.driver = RunnerDriver(
            self.watched,
            num_blocks=NUM_BLOCKS,
            block_size=BLOCK_SIZE,
            max_model_len=model.max_model_len,
            eos_token_ids=(2,),
            arena=pictures.arena,
        )

    def add(self, prompt, params=ALL_LOGITS, **options):
        return self.driver.add(prompt.tokens, params, images=self.pictures.spans(prompt), **options)

    def logits_of(self, row, first=0):
        count = len(row.prompt) + len(row.outputs) - 1
        return np.stack([self.watched.logits[row.slot, at] for at in range(first, count)])


def expected_of(reference, prompt, row):
    return reference.logits(prompt, row.outputs[:-1])


# ---- as transformers ----------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["cpu", "torch"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_greedy_tokens_are_those_of_transformers(
    folders, references, prompts, pictures, family, backend
):
    """All prompts in one batch: with pictures of several sizes, and without."""
    reference, cases = references(family), prompts(family)
    engine = Engine(folders(family), pictures, backend)
    rows = {name: engine.add(prompt) for name, prompt in cases.items()}
    engine.driver.run(NUM_OUTPUTS)
    for name, prompt in cases.items():
        row = rows[name]
        want = expected_of(reference, prompt, row)
        assert np.abs(engine.logits_of(row) - want).max() < 1e-4, name
        assert row.outputs == reference.greedy(prompt, NUM_OUTPUTS), name


@pytest.mark.model
def test_smollm2_with_a_random_encoder_is_what_transformers_makes_of_it(smollm2_folder, tmp_path):
    folder = smollm2_with_encoder(smollm2_folder, tmp_path)
    reference, pictures = VisionReference(folder), Pictures()
    picture = reference.picture((2, 2), 1)
    words = [504, 3575, 282, 4649, 314]
    prompts = [Prompt.of(words), Prompt.of(words[:2], picture, words[2:])]
    outputs = {}
    for name in (smollm2_folder, folder):
        engine = Engine(name, pictures)
        rows = [engine.add(prompt) for prompt in (prompts if name == folder else prompts[:1])]
        engine.driver.run(NUM_OUTPUTS)
        outputs[name] = [row.outputs for row in rows]
    assert outputs[smollm2_folder][0] == outputs[folder][0]
    for prompt, found in zip(prompts, outputs[folder], strict=True):
        assert found == reference.greedy(prompt, NUM_OUTPUTS)


# ---- the same bits whatever the company ---------------------------------------------------------


def whole(folder, pictures, prompt, num_outputs=4, **options):
    """A prompt in one piece and alone: its outputs, and the logits of all its tokens."""
    engine = Engine(folder, pictures, **options)
    row = engine.add(prompt)
    engine.driver.run(num_outputs)
    return row.outputs, engine.logits_of(row)


@pytest.mark.parametrize("name", ["one", "several", "last"])
@pytest.mark.parametrize("family", KINDS)
def test_a_chunk_may_end_anywhere(folders, prompts, pictures, family, name):
    folder, prompt = folders(family), prompts(family)[name]
    outputs, logits = whole(folder, pictures, prompt)
    engine = Engine(folder, pictures)
    for cut in range(1, len(prompt.tokens)):
        row = engine.add(prompt)
        engine.driver.step({row: cut})
        engine.driver.run(4)
        assert row.outputs == outputs, cut
        assert engine.logits_of(row).tobytes() == logits.tobytes(), cut
        engine.driver.release(row)


@pytest.mark.parametrize("chunk_size", [1, 2, 3, 7])
@pytest.mark.parametrize("family", KINDS)
def test_chunks_and_company_change_no_bit(folders, prompts, pictures, family, chunk_size):
    """Rows join one after the other, so that every step mixes chunks, decode rows and pictures."""
    folder, cases = folders(family), prompts(family)
    engine = Engine(folder, pictures)
    rows = []
    for prompt in cases.values():
        rows.append(engine.add(prompt))
        for _ in range(3):
            engine.driver.step(chunk_size=chunk_size)
    engine.driver.run(8, chunk_size)
    for (name, prompt), row in zip(cases.items(), rows, strict=True):
        outputs, logits = whole(folder, pictures, prompt, len(row.outputs))
        assert row.outputs == outputs, name
        assert engine.logits_of(row).tobytes() == logits.tobytes(), name


@pytest.mark.parametrize(
    ("dtype", "kv_cache_dtype"), [("bfloat16", "bfloat16"), ("float32", "int8")]
)
@pytest.mark.parametrize("family", KINDS)
def test_chunks_change_no_bit_of_a_rounded_cache(
    folders, prompts, pictures, family, dtype, kv_cache_dtype
):
    options = {"dtype": dtype, "kv_cache_dtype": kv_cache_dtype}
    prompt = prompts(family)["several"]
    outputs, logits = whole(folders(family), pictures, prompt, 8, **options)
    engine = Engine(folders(family), pictures, **options)
    row = engine.add(prompt)
    engine.driver.run(8, chunk_size=5)
    assert row.outputs == outputs
    assert engine.logits_of(row).tobytes() == logits.tobytes()


@pytest.mark.parametrize("name", ["several", "last"])
@pytest.mark.parametrize("family", KINDS)
def test_a_cached_beginning_may_end_anywhere(folders, prompts, pictures, family, name):
    """Before, within and after a picture; the row that brought it is still there."""
    folder, prompt = folders(family), prompts(family)[name]
    engine = Engine(folder, pictures)
    first = engine.add(prompt)
    engine.driver.run(4)
    outputs, logits = first.outputs[:4], engine.logits_of(first)[: len(prompt.tokens) + 3]
    for num_blocks in range(1, (len(prompt.tokens) - 1) // BLOCK_SIZE + 1):
        start = num_blocks * BLOCK_SIZE
        row = engine.add(prompt, cached=(first, num_blocks), prompt_logprobs_start=start + 1)
        engine.driver.run(4)
        assert row.outputs[:4] == outputs, num_blocks
        found = engine.logits_of(row, start)[: len(logits) - start]
        assert found.tobytes() == logits[start:].tobytes(), num_blocks
        engine.driver.release(row)


@pytest.mark.parametrize("done", [0, 1, 9])
@pytest.mark.parametrize("family", KINDS)
def test_a_recomputed_row_goes_on(folders, prompts, pictures, family, done):
    prompt = prompts(family)["several"]
    outputs, _ = whole(folders(family), pictures, prompt, 16)
    engine = Engine(folders(family), pictures)
    row = engine.add(prompt, outputs=outputs[:done])
    engine.driver.run(16, chunk_size=6)
    assert row.outputs == outputs


# ---- whose picture it is ------------------------------------------------------------------------


@pytest.mark.parametrize("family", KINDS)
def test_two_pictures_of_one_size_are_never_taken_for_each_other(
    folders, references, pictures, family
):
    reference = references(family)
    one, two = reference.picture((2, 2), 1), reference.picture((2, 2), 2)
    prompts = [Prompt.of([5], a, [6], b, [7]) for a, b in ((one, two), (two, one)) * 4]
    engine = Engine(folders(family), pictures)
    rows = []
    for prompt in prompts:
        rows.append(engine.add(prompt))
        engine.driver.step(chunk_size=5)
    engine.driver.run(8, chunk_size=5)
    wants = [whole(folders(family), pictures, prompt, 24) for prompt in prompts[:2]]
    assert (
        np.abs(wants[0][1][: len(prompts[0].tokens)] - wants[1][1][: len(prompts[0].tokens)]).max()
        > 0.1
    )
    for at, (prompt, row) in enumerate(zip(prompts, rows, strict=True)):
        found = engine.logits_of(row)
        assert np.abs(found - expected_of(reference, prompt, row)).max() < 1e-4
        assert (
            found[: len(prompt.tokens)].tobytes()
            == wants[at % 2][1][: len(prompt.tokens)].tobytes()
        )


def test_text_that_spells_an_image_token_is_text(folders, references, pictures):
    """Only spans say what is an image."""
    tokens = [5, IMAGE_TOKEN, IMAGE_TOKEN, 6]
    engine = Engine(folders("idefics3"), pictures)
    row = engine.add(Prompt.of(tokens))
    engine.driver.run(1)
    want = references("idefics3").logits(Prompt.of(tokens), [])
    assert np.abs(engine.logits_of(row) - want).max() < 1e-4


def test_no_other_row_has_a_cost_or_a_rope_of_its_own(folders, prompts, pictures):
    """A batch without images has neither pieces nor positions beside those in the cache."""
    engine = Engine(folders("qwen2_5_vl"), pictures)
    batches = []
    forward = engine.watched.forward
    engine.watched.forward = lambda batch: batches.append(batch) or forward(batch)
    cases = prompts("qwen2_5_vl")
    engine.add(cases["text"], GREEDY)
    engine.driver.run(2)
    assert all(not batch.images and batch.rope is None for batch in batches)
    row = engine.add(cases["one"], GREEDY)
    engine.driver.run(4)
    assert len(batches[-1].rope) == 1
    # (2, 3) patches take three positions and six tokens.
    assert (batches[-1].rope[0] - batches[-1].positions).tolist() in ([0, -3], [-3, 0])
    engine.driver.release(row)
    engine.driver.run(8)
    assert batches[-1].rope is None


# ---- spans that cannot be -----------------------------------------------------------------------


def span_of(pictures, num_lines=6, *, position=1, runs=(0, 6), grid=(), generation=0, width=64):
    region = pictures.write(np.zeros((num_lines, width), np.float32))
    region.generation += generation
    return ImageSpan(position=position, runs=pack_int32(runs), region=region, grid=grid)


@pytest.mark.parametrize(
    ("family", "options", "message"),
    [
        ("idefics3", {"position": 5}, r"image 0: a run of 6 tokens at 5, .* 5 to 10"),
        ("idefics3", {"position": -1}, r"a run of 6 tokens at -1"),
        ("idefics3", {"position": 1 << 40}, r"a run of 6 tokens at 1099511627776"),
        ("idefics3", {"runs": ()}, "runs of 0 numbers"),
        ("idefics3", {"runs": (0, 6, 7)}, "runs of 3 numbers"),
        ("idefics3", {"runs": (0, 6, 6, 0)}, "a run of 0 tokens"),
        ("idefics3", {"runs": (0, 4, 3, 2)}, "a run of 2 tokens at 4, .* 5 to 10"),
        ("idefics3", {"runs": (4, 2, 0, 4)}, "a run of 4 tokens at 1"),
        ("idefics3", {"runs": (0, 5)}, "5 tokens, but 384 numbers"),
        ("idefics3", {"num_lines": 7}, "6 tokens, but 448 numbers"),
        ("idefics3", {"width": 63}, "6 tokens, but 378 numbers"),
        ("idefics3", {"generation": 1}, "holds generation"),
        ("idefics3", {"grid": (1, 2, 3)}, "positions are single numbers"),
        ("qwen2_5_vl", {}, r"do not fill grid \(\)"),
        ("qwen2_5_vl", {"grid": (1, 2, 2)}, r"do not fill grid \(1, 2, 2\)"),
        ("qwen2_5_vl", {"grid": (2, 3)}, "do not fill grid"),
        ("qwen2_5_vl", {"grid": (1, -2, -3)}, r"grid \(1, -2, -3\)"),
        ("qwen2_5_vl", {"grid": (1, 2, 3), "runs": (0, 3, 3, 3)}, "2 runs of 6 tokens"),
    ],
)
def test_an_impossible_span_is_refused(folders, family, options, message):
    pictures = Pictures()
    engine = Engine(folders(family), pictures)
    engine.driver.add(list(range(10)), images=[span_of(pictures, **options)])
    with pytest.raises(PlanError, match=message):
        engine.driver.step(chunk_size=10)


def test_images_that_overlap_or_are_out_of_order_are_refused(folders):
    for positions in ((1, 6), (7, 0)):
        pictures = Pictures()
        engine = Engine(folders("idefics3"), pictures)
        spans = [span_of(pictures, position=position) for position in positions]
        engine.driver.add(list(range(20)), images=spans)
        with pytest.raises(PlanError, match="image 1: a run of 6 tokens"):
            engine.driver.step(chunk_size=20)


def test_a_region_that_another_image_got_is_noticed_at_the_next_chunk(folders):
    pictures = Pictures()
    engine = Engine(folders("idefics3"), pictures)
    span = span_of(pictures)
    engine.driver.add(list(range(10)), images=[span])
    engine.driver.step(chunk_size=3)
    span.region.generation += 1
    pictures.arena.write(span.region, np.zeros((6, 64), np.float32))
    span.region.generation -= 1
    with pytest.raises(PlanError, match="embeddings are gone"):
        engine.driver.step(chunk_size=3)


def test_a_worker_without_an_arena_takes_no_images(folders):
    pictures = Pictures()
    engine = Engine(folders("idefics3"), pictures)
    driver = RunnerDriver(engine.watched)
    driver.add(list(range(10)), images=[span_of(pictures)])
    with pytest.raises(PlanError, match="has no arena"):
        driver.step(chunk_size=10)


# ---- the folder ---------------------------------------------------------------------------------


@pytest.fixture
def edited(folders, tmp_path):
    """A copy of a family's folder with its config.json and tensors changed."""

    def edit(family, change_config, change_tensors=lambda tensors: tensors):
        folder = shutil.copytree(folders(family), tmp_path / "model")
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(change_config(config)))
        tensors = change_tensors(load_file(folder / "model.safetensors"))
        save_file(tensors, folder / "model.safetensors")
        return folder

    return edit


def flat(config):
    """The older spelling of Qwen2.5-VL: the text model's fields stand at the top."""
    text = config.pop("text_config")
    rope = text.pop("rope_parameters")
    for key in ("model_type", "architectures", "tie_word_embeddings", "layer_types"):
        text.pop(key, None)
    scaling = {"type": "mrope", "mrope_section": rope["mrope_section"]}
    return text | config | {"rope_theta": rope["rope_theta"], "rope_scaling": scaling}


def renamed(tensors):
    """As transformers 5 names them inside: the text model has a part of its own."""
    return {
        name.replace("model.", "model.language_model.", 1)
        if name.startswith("model.")
        else name.replace("visual.", "model.visual."): tensor
        for name, tensor in tensors.items()
    }


@pytest.mark.parametrize("changes", [(flat, lambda tensors: tensors), (dict, renamed)])
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen2_5_vl-tied"])
def test_older_and_newer_spellings_are_one_model(
    folders, prompts, pictures, edited, family, changes
):
    prompt = prompts(family)["one"]
    found = whole(edited(family, *changes), pictures, prompt)
    want = whole(folders(family), pictures, prompt)
    assert found[0] == want[0]
    assert found[1].tobytes() == want[1].tobytes()


def test_a_head_that_is_there_is_used_though_the_text_model_would_tie_it(edited):
    """As transformers 5 does: the text model's own tie_word_embeddings says nothing then."""

    def change(config):
        config["text_config"]["tie_word_embeddings"] = True
        return config | {"tie_word_embeddings": False}

    model = Model.load(edited("idefics3", change), TorchBackend(), "float32")
    assert model.head is not model.embedding


@pytest.mark.parametrize(("text_ties", "loads"), [(True, True), (False, False)])
def test_a_missing_head_is_the_embedding_only_where_the_text_model_says_so(
    edited, text_ties, loads
):
    def change(config):
        config["text_config"]["tie_word_embeddings"] = text_ties
        return config | {"tie_word_embeddings": False}

    folder = edited("idefics3-tied", change)
    if loads:
        model = Model.load(folder, TorchBackend(), "float32")
        assert model.head is model.embedding
    else:
        with pytest.raises(ModelError, match=r"tensor lm_head\.weight is missing"):
            Model.load(folder, TorchBackend(), "float32")


def with_text(raw, **changes):
    text = {**raw["text_config"], **changes}
    return {**raw, "text_config": {key: value for key, value in text.items() if value != "drop"}}


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("idefics3", {"model_type": "mistral"}, "text_config: model_type must be llama, got 'mis"),
        ("idefics3", {"model_type": ["llama"]}, "model_type must be llama"),
        ("idefics3", {"hidden_size": "wide"}, "config.json: text_config: hidden_size must be an"),
        ("idefics3", {"quantization_config": {}}, "text_config: quantization_config"),
        ("qwen2_5_vl", {"rope_parameters": {"mrope_section": [2, 3, 4]}}, "with the sum 8"),
        ("qwen2_5_vl", {"rope_parameters": {"mrope_section": [8]}}, "must be 3 numbers"),
        ("qwen2_5_vl", {"rope_parameters": {"mrope_section": [9, -1, 0]}}, "must be 3 numbers"),
        ("qwen2_5_vl", {"rope_parameters": {"mrope_section": "all"}}, "must be 3 numbers"),
        # What it is when it is not given is for heads of 128.
        ("qwen2_5_vl", {"rope_parameters": {}}, "with the sum 8, half of head_dim"),
    ],
)
def test_a_bad_text_config_is_refused_by_name(folders, family, changes, message):
    raw = json.loads((folders(family) / "config.json").read_text())
    with pytest.raises(ModelError, match=message):
        parse_model_config(with_text(raw, **changes))


@pytest.mark.parametrize("text", [[], "llama", 3])
def test_a_text_config_that_is_no_object_is_refused(folders, text):
    raw = json.loads((folders("idefics3") / "config.json").read_text())
    with pytest.raises(ModelError, match="text_config must be an object"):
        parse_model_config(raw | {"text_config": text})


def test_what_a_text_config_leaves_out_is_as_its_class_has_it():
    """Versions 4 of transformers write only what differs."""
    raw = {"architectures": ["Idefics3ForConditionalGeneration"], "text_config": {}}
    config = parse_model_config(raw)
    assert (config.hidden_size, config.num_layers, config.vocab_size) == (4096, 32, 32000)
    raw = {"architectures": ["Qwen2_5_VLForConditionalGeneration"], "text_config": {}}
    config = parse_model_config(raw)
    assert (config.rope.theta, config.rope.sections) == (1e6, (16, 24, 24))
    assert (config.num_kv_heads, config.norm_eps) == (8, 1e-5)
