"""A GGUF file becomes the model folder it was made from, or a ValueError that says why not."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from tokenizers import Tokenizer

from deepinfer.frontend.gguf_convert import convert_gguf
from deepinfer.frontend.gguf_model import llama3_divisors
from deepinfer.frontend.safetensors_writer import to_bfloat16
from support import tiny_gguf
from support.tiny_gguf import Q

ARCHITECTURES = ("llama", "qwen2", "qwen3")


def converted(path: Path) -> Path:
    folder = path.parent / "converted"
    folder.mkdir()
    convert_gguf(path, folder)
    return folder


def read_weights(folder: Path) -> dict[str, np.ndarray]:
    """The folder's weights as float32, by name."""
    with safe_open(folder / "model.safetensors", "pt") as file:
        return {name: file.get_tensor(name).float().numpy() for name in file.keys()}  # noqa: SIM118


def as_bfloat16(values: np.ndarray) -> np.ndarray:
    """Nearest bfloat16, by torch."""
    import torch

    return torch.from_numpy(np.array(values, np.float32)).bfloat16().float().numpy()


def read_json(path: Path) -> dict:
    return json.loads(path.read_text())


# ---- weights ----------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("kind", [Q.F32, Q.F16, Q.BF16])
def test_float_weights_come_back_exactly(tmp_path: Path, arch: str, kind: Q) -> None:
    """Names, shapes, row order and values are those of the checkpoint the GGUF was made from."""
    weights = tiny_gguf.random_weights(arch, tied=arch == "llama")
    tiny_gguf.write_gguf(tmp_path / "m.gguf", arch, weights, kind)
    result = read_weights(converted(tmp_path / "m.gguf"))
    assert result.keys() == weights.keys()
    for name, weight in weights.items():
        if kind is Q.F16 and weight.ndim == 2:
            weight = weight.astype(np.float16)
        np.testing.assert_array_equal(result[name], as_bfloat16(weight), err_msg=name)


@pytest.mark.parametrize("arch", ["llama", "qwen2"])
@pytest.mark.parametrize("kind", tiny_gguf.QUANTIZED)
def test_quantised_weights_come_back_within_half_a_step(tmp_path: Path, arch: str, kind: Q) -> None:
    weights = tiny_gguf.random_weights(arch)
    tiny_gguf.write_gguf(tmp_path / "m.gguf", arch, weights, kind)
    result = read_weights(converted(tmp_path / "m.gguf"))
    levels = {Q.Q8_0: 256, Q.Q5_0: 32, Q.Q5_1: 32, Q.Q4_0: 16, Q.Q4_1: 16}[kind]
    for name, weight in weights.items():
        if weight.ndim == 1:
            np.testing.assert_array_equal(result[name], as_bfloat16(weight), err_msg=name)
            continue
        blocks = weight.reshape(-1, 32)
        reach = 2 * np.abs(blocks).max(axis=1, keepdims=True)
        # A whole step, as the largest value of Q4_0 and Q5_0 can lie one off the last level; the
        # second term is bfloat16's own rounding.
        allowed = reach / (levels - 1) * 1.05 + reach / 256
        assert np.all(np.abs(result[name].reshape(-1, 32) - blocks) <= allowed), name


@pytest.mark.parametrize("kind", tiny_gguf.K_QUANTS)
def test_k_quants_are_unpacked_in_the_right_rows(tmp_path: Path, kind: Q) -> None:
    weights = tiny_gguf.random_weights("llama")
    stored = tiny_gguf.write_gguf(tmp_path / "m.gguf", "llama", weights, kind)
    result = read_weights(converted(tmp_path / "m.gguf"))
    heads = {"q_proj": tiny_gguf.HEADS, "k_proj": tiny_gguf.KV_HEADS}
    for name, weight in weights.items():
        if weight.ndim == 1:
            continue
        expected = as_bfloat16(gguf.dequantize(stored[name], kind))
        got = result[name]
        for part, count in heads.items():
            if part in name:
                got = tiny_gguf.permuted(got, count)
        np.testing.assert_array_equal(got, expected, err_msg=name)


@given(st.lists(st.floats(width=32), min_size=1), st.data())
@example([float("nan"), float("inf"), -float("inf"), -0.0, 3.4e38], None)
def test_bfloat16_rounds_as_torch_does(values: list[float], data: st.DataObject) -> None:
    import torch

    floats = np.array(values, np.float32)
    ours = to_bfloat16(floats)
    theirs = torch.from_numpy(floats).bfloat16().view(torch.int16).numpy().view(np.uint16)
    numbers = ~np.isnan(floats)
    np.testing.assert_array_equal(ours[numbers], theirs[numbers])
    widened = (ours[~numbers].astype(np.uint32) << 16).view(np.float32)
    assert np.isnan(widened).all()


# ---- config -----------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_config_is_what_transformers_reads(tmp_path: Path, arch: str) -> None:
    from transformers import AutoConfig, GenerationConfig

    weights = tiny_gguf.random_weights(arch, tied=False)
    tiny_gguf.write_gguf(tmp_path / "m.gguf", arch, weights)
    folder = converted(tmp_path / "m.gguf")
    config = AutoConfig.from_pretrained(folder)
    assert config.model_type == arch
    assert config.hidden_size == tiny_gguf.HIDDEN
    assert config.num_hidden_layers == tiny_gguf.LAYERS
    assert config.num_key_value_heads == tiny_gguf.KV_HEADS
    assert config.head_dim == tiny_gguf.HEAD_DIM
    assert config.rms_norm_eps == 1e-5
    assert config.rope_parameters["rope_theta"] == 50_000.0
    assert config.vocab_size == len(tiny_gguf.byte_level_tokens())
    assert config.max_position_embeddings == 512
    assert not config.tie_word_embeddings
    expected = [2] if arch == "llama" else [2, 0]
    assert GenerationConfig.from_pretrained(folder).eos_token_id == expected


@pytest.mark.parametrize("tied", [True, False])
def test_embeddings_are_tied_when_the_file_has_no_output_matrix(tmp_path: Path, tied: bool) -> None:
    weights = tiny_gguf.random_weights("llama", tied=tied)
    tiny_gguf.write_gguf(tmp_path / "m.gguf", "llama", weights)
    folder = converted(tmp_path / "m.gguf")
    assert read_json(folder / "config.json")["tie_word_embeddings"] is tied
    assert ("lm_head.weight" in read_weights(folder)) is not tied


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, None),
        ({"llama.rope.scaling.type": "none"}, None),
        (
            {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0},
            {"rope_type": "linear", "factor": 4.0},
        ),
        (
            {
                "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.factor": 2.5,
                "llama.rope.scaling.original_context_length": 128,
            },
            {"rope_type": "yarn", "factor": 2.5, "original_max_position_embeddings": 128},
        ),
    ],
)
def test_rope_scaling_is_carried_over(tmp_path: Path, changes: dict, expected: dict | None) -> None:
    weights = tiny_gguf.random_weights("llama")
    tiny_gguf.write_gguf(tmp_path / "m.gguf", "llama", weights, changes=changes)
    assert read_json(converted(tmp_path / "m.gguf") / "config.json")["rope_scaling"] == expected


def test_llama3_rope_scaling_is_found_from_its_factors(tmp_path: Path) -> None:
    """The divisors are computed by transformers; the config found from them gives them again."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    sizes = {"hidden_size": tiny_gguf.HIDDEN, "num_attention_heads": tiny_gguf.HEADS}
    plain = 50_000.0 ** -(np.arange(0, tiny_gguf.HEAD_DIM, 2) / tiny_gguf.HEAD_DIM)
    parameters = {**scaling, "rope_theta": 50_000.0}
    config = LlamaConfig(**sizes, head_dim=tiny_gguf.HEAD_DIM, rope_parameters=parameters)
    scaled = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")[0].numpy()
    factors = (plain / scaled).astype(np.float32)
    np.testing.assert_allclose(
        llama3_divisors(scaling, tiny_gguf.HEAD_DIM, 50_000.0), factors, rtol=1e-5
    )

    weights = tiny_gguf.random_weights("llama")
    path = tmp_path / "m.gguf"
    tiny_gguf.write_gguf(path, "llama", weights, extra_tensors={"rope_freqs.weight": factors})
    found = read_json(converted(path) / "config.json")["rope_scaling"]
    assert found.pop("rope_type") == scaling.pop("rope_type")
    assert found == pytest.approx(scaling, rel=1e-5)


# ---- refusals ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"general.architecture": "falcon"}, "falcon"),
        ({"llama.block_count": None}, "llama.block_count"),
        ({"llama.block_count": 3}, "blk.2.attn_norm.weight"),
        ({"llama.block_count": 1 << 31}, "block_count"),
        ({"llama.block_count": "two"}, "llama.block_count"),
        ({"llama.attention.head_count": 0}, "llama.attention.head_count"),
        ({"llama.attention.head_count_kv": 3}, "head_count_kv"),
        ({"llama.embedding_length": 512, "llama.rope.dimension_count": 64}, "token_embd"),
        ({"llama.rope.dimension_count": 16}, "llama.rope.dimension_count"),
        ({"llama.attention.layer_norm_rms_epsilon": None}, "layer_norm_rms_epsilon"),
        ({"llama.expert_count": 8}, "expert_count"),
        ({"llama.rope.scaling.type": "longrope"}, "longrope"),
        ({"general.alignment": 0}, "general.alignment"),
        ({"tensor:blk.1.ffn_up.weight": None}, "blk.1.ffn_up.weight"),
        ({"tensor:output_norm.weight": None}, "output_norm.weight"),
        ({"tensor:token_embd.weight": None}, "token_embd.weight"),
        ({"tokenizer.ggml.model": "bert"}, "bert"),
        ({"tokenizer.ggml.pre": "klingon"}, "klingon"),
        ({"tokenizer.ggml.tokens": ["a", "a"]}, "'a' twice"),
        ({"tokenizer.ggml.merges": ["h e", "zz y"]}, "zz y"),
        ({"tokenizer.ggml.merges": None}, "tokenizer.ggml.merges"),
        ({"tokenizer.ggml.token_type": [1]}, "tokenizer.ggml.token_type"),
        ({"tokenizer.ggml.eos_token_id": 70_000}, "eos_token_id"),
    ],
)
def test_a_file_we_cannot_serve_is_refused_by_name(
    tmp_path: Path, changes: dict, named: str
) -> None:
    weights = tiny_gguf.random_weights("llama")
    path = tmp_path / "broken-model.gguf"
    tiny_gguf.write_gguf(path, "llama", weights, changes=changes)
    with pytest.raises(ValueError, match=r"broken-model\.gguf: .*") as caught:
        converted(path)
    assert named in str(caught.value)
    assert not list((tmp_path / "converted").iterdir())


@pytest.mark.parametrize("name", ["rope_freqs.weight", "blk.0.attn_sinks.weight"])
def test_a_tensor_we_would_ignore_is_refused_by_name(tmp_path: Path, name: str) -> None:
    size = tiny_gguf.HEAD_DIM // 2
    extra = {name: np.linspace(1, 7, size, dtype=np.float32)}
    weights = tiny_gguf.random_weights("llama")
    tiny_gguf.write_gguf(tmp_path / "m.gguf", "llama", weights, extra_tensors=extra)
    with pytest.raises(ValueError, match=name):
        converted(tmp_path / "m.gguf")


def test_an_unsupported_tensor_type_is_refused_by_name(tmp_path: Path) -> None:
    weights = tiny_gguf.random_weights("llama")
    extra = {"blk.0.ids": np.arange(4, dtype=np.int32)}
    tiny_gguf.write_gguf(tmp_path / "m.gguf", "llama", weights, extra_tensors=extra)
    with pytest.raises(ValueError, match=r"blk\.0\.ids.* has type I32; supported are F32"):
        converted(tmp_path / "m.gguf")


@pytest.fixture(scope="module")
def small_file(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, int]:
    """A whole GGUF file and where its header ends."""
    path = tmp_path_factory.mktemp("gguf") / "m.gguf"
    tiny_gguf.write_gguf(path, "llama", tiny_gguf.random_weights("llama"), Q.Q8_0)
    data = path.read_bytes()
    return data, data.index(b"output_norm.weight") + 64


def convert_bytes(data: bytes, folder: Path) -> str:
    """Convert; the message when it is refused. Anything but ValueError goes through."""
    path = folder / "m.gguf"
    path.write_bytes(data)
    out = folder / "out"
    out.mkdir()
    try:
        convert_gguf(path, out)
    except ValueError as error:
        return str(error)
    return ""


@settings(max_examples=60)
@given(data=st.data())
def test_a_truncated_file_is_refused(
    small_file: tuple[bytes, int], tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    whole, header_end = small_file
    size = data.draw(st.integers(0, header_end) | st.integers(0, len(whole) - 33))
    assert convert_bytes(whole[:size], tmp_path_factory.mktemp("cut"))


@settings(max_examples=150)
@given(data=st.data())
def test_a_corrupted_header_is_refused_or_harmless(
    small_file: tuple[bytes, int], tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Whatever bytes change: a ValueError or a conversion, soon, and never anything else."""
    whole, header_end = small_file
    broken = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, 2500) | st.integers(0, header_end))
        new = data.draw(st.binary(min_size=1, max_size=8) | st.just(b"\xff" * 8))
        broken[at : at + len(new)] = new
    convert_bytes(bytes(broken), tmp_path_factory.mktemp("flip"))


def test_counts_beyond_the_file_are_refused_before_they_cost_anything(
    small_file: tuple[bytes, int], tmp_path: Path
) -> None:
    whole, _ = small_file
    huge = (1 << 60).to_bytes(8, "little")
    for at, what in ((8, "tensor count"), (16, "metadata count"), (24, "metadata key")):
        broken = whole[:at] + huge + whole[at + 8 :]
        folder = tmp_path / str(at)
        folder.mkdir()
        assert what in convert_bytes(broken, folder)


def test_tensors_that_share_bytes_are_refused(
    small_file: tuple[bytes, int], tmp_path: Path
) -> None:
    """Else a small file could claim, and make us write, any amount of weights."""
    whole, _ = small_file
    name = b"blk.1.ffn_up.weight"
    at = whole.index(name) + len(name) + 4 + 2 * 8 + 4
    assert whole[at : at + 8] != bytes(8)
    broken = whole[:at] + bytes(8) + whole[at + 8 :]
    assert "overlap" in convert_bytes(broken, tmp_path)


# ---- tokenizer --------------------------------------------------------------------------------


def test_control_tokens_are_special_and_the_rest_is_bytes(tmp_path: Path) -> None:
    tiny_gguf.write_gguf(tmp_path / "m.gguf", "llama", tiny_gguf.random_weights("llama"))
    folder = converted(tmp_path / "m.gguf")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.encode("<|im_start|>hello world<|im_end|>").tokens == [
        *("<|im_start|>", "hello", "Ġwor", "l", "d", "<|im_end|>")
    ]
    # Digits stand alone before the merges see them (smollm), though "1 2" is a merge.
    assert tokenizer.encode("12").tokens == ["1", "2"]
    assert tokenizer.decode(tokenizer.encode("<|im_start|>hé 👋<|im_end|>").ids) == "hé 👋"
    config = read_json(folder / "tokenizer_config.json")
    assert config["bos_token"] == "<|im_start|>"
    assert config["eos_token"] == "<|im_end|>"
    assert config["chat_template"] == "{{ messages[0]['content'] }}"


@settings(max_examples=200)
@given(text=st.text())
def test_every_text_survives_the_byte_level_tokenizer(
    text: str, small_tokenizer: Tokenizer
) -> None:
    ids = small_tokenizer.encode(text).ids
    assert small_tokenizer.decode(ids, skip_special_tokens=False) == text


@pytest.fixture(scope="module")
def small_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    tiny_gguf.write_gguf(folder / "m.gguf", "llama", tiny_gguf.random_weights("llama"))
    return Tokenizer.from_file(str(converted(folder / "m.gguf") / "tokenizer.json"))


@pytest.mark.parametrize(
    ("pre", "text", "words"),
    [
        ("gpt-2", "it's 1234 x", ["it", "'s", "Ġ1234", "Ġx"]),
        ("smollm", "it's 1234 x", ["it", "'s", "Ġ", "1", "2", "3", "4", "Ġx"]),
        ("qwen2", "IT'S 1234 x", ["IT", "'S", "Ġ", "1", "2", "3", "4", "Ġx"]),
        ("llama-bpe", "IT'S 1234 x", ["IT", "'S", "Ġ", "123", "4", "Ġx"]),
        ("tekken", "camelCase 12", ["camel", "Case", "Ġ", "1", "2"]),
    ],
)
def test_each_pre_tokenizer_cuts_as_its_model_did(
    tmp_path: Path, pre: str, text: str, words: list[str]
) -> None:
    changes = {"tokenizer.ggml.pre": pre}
    weights = tiny_gguf.random_weights("llama")
    tiny_gguf.write_gguf(tmp_path / "m.gguf", "llama", weights, changes=changes)
    tokenizer = Tokenizer.from_file(str(converted(tmp_path / "m.gguf") / "tokenizer.json"))
    assert [word for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text)] == words


@pytest.mark.parametrize(
    ("pre", "add_bos", "expected"),
    [("smollm", None, False), ("llama-bpe", None, True), ("llama-bpe", False, False)],
)
def test_bos_is_added_where_the_model_expects_it(
    tmp_path: Path, pre: str, add_bos: bool | None, expected: bool
) -> None:
    changes = {"tokenizer.ggml.pre": pre, "tokenizer.ggml.add_bos_token": add_bos}
    weights = tiny_gguf.random_weights("llama")
    tiny_gguf.write_gguf(tmp_path / "m.gguf", "llama", weights, changes=changes)
    tokenizer = Tokenizer.from_file(str(converted(tmp_path / "m.gguf") / "tokenizer.json"))
    assert (tokenizer.encode("hello").tokens[0] == "<|im_start|>") is expected


def sentencepiece_metadata() -> dict:
    """A small SentencePiece vocabulary with byte fallback; scores fall with the id, as trained."""
    pieces = ["▁", "▁t", "he", "▁the", "▁w", "or", "▁wor", "ld", "▁world", *"abcdehlortw"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    count = len(tokens)
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": None,
        "tokenizer.ggml.merges": None,
        "tokenizer.ggml.add_bos_token": None,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(i) for i in range(count - 259)],
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * (count - 259),
    }


@settings(max_examples=100)
@given(text=st.text("the world 123é👋\n"))
def test_sentencepiece_text_survives_with_byte_fallback(
    text: str, sentencepiece_folder: Path
) -> None:
    tokenizer = Tokenizer.from_file(str(sentencepiece_folder / "tokenizer.json"))
    encoding = tokenizer.encode(text)
    assert encoding.tokens[0] == "<s>"
    assert tokenizer.decode(encoding.ids) == text


@pytest.fixture(scope="module")
def sentencepiece_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("spm")
    weights = tiny_gguf.random_weights("llama")
    rows = np.zeros((300, tiny_gguf.HIDDEN), np.float32)
    weights["model.embed_tokens.weight"] = rows
    path = folder / "m.gguf"
    tiny_gguf.write_gguf(path, "llama", weights, changes=sentencepiece_metadata())
    return converted(path)


def test_sentencepiece_joins_the_best_scored_pieces_first(sentencepiece_folder: Path) -> None:
    tokenizer = Tokenizer.from_file(str(sentencepiece_folder / "tokenizer.json"))
    assert tokenizer.encode("the world").tokens == ["<s>", "▁the", "▁world"]
    assert tokenizer.encode("he é").tokens == ["<s>", "▁", "he", "▁", "<0xC3>", "<0xA9>"]


# ---- the real model ---------------------------------------------------------------------------


@pytest.mark.model
def test_smollm2_converts_to_its_own_config(smollm2_folder: Path) -> None:
    config = read_json(smollm2_folder / "config.json")
    expected = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 49_152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100_000.0,
        "rope_scaling": None,
        "tie_word_embeddings": True,
        "max_position_embeddings": 8192,
    }
    assert {name: config[name] for name in expected} == expected
    assert read_json(smollm2_folder / "generation_config.json")["eos_token_id"] == [2]


@pytest.mark.model
def test_smollm2_tokenises_as_published(smollm2_folder: Path) -> None:
    tokenizer = Tokenizer.from_file(str(smollm2_folder / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == 49_152
    # Every number is cut into digits, and no token is added around a text.
    assert tokenizer.encode("In 2024").tokens == ["In", "Ġ", "2", "0", "2", "4"]
    assert tokenizer.encode("<|im_start|>user\nHi<|im_end|>\n").ids[0] == 1
    assert tokenizer.encode("<|im_end|>").ids == [2]
    for text in ("Hello, world!", "naïve café — 你好 🙂🏽", "  def f(x):\n\treturn x\n\n", "I'm"):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
