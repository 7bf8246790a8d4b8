"""Tiny random GGUF files, written with gguf's own writer from weights the test knows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.quants import quant_shape_to_byte_shape, quantize

HIDDEN = INNER = 256  # K-quants need rows of 256
HEADS, KV_HEADS, HEAD_DIM, LAYERS = 8, 2, 32, 2
CONTROL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w", "o r", "Ġw or", "1 2"]

Q = gguf.GGMLQuantizationType
# gguf can quantise to these; of the others a test can only make random blocks.
QUANTIZED = (Q.Q8_0, Q.Q4_0, Q.Q4_1, Q.Q5_0, Q.Q5_1)
K_QUANTS = (Q.Q2_K, Q.Q3_K, Q.Q4_K, Q.Q5_K, Q.Q6_K, Q.IQ4_NL, Q.IQ4_XS)


def byte_alphabet() -> list[str]:
    """The 256 characters that stand for bytes in GPT-2's vocabulary."""
    shown = [b for b in range(256) if 33 <= b <= 126 or 161 <= b <= 172 or b >= 174]
    hidden = [b for b in range(256) if b not in shown]
    spelled = {b: chr(b) for b in shown} | {b: chr(256 + i) for i, b in enumerate(hidden)}
    return [spelled[b] for b in range(256)]


def byte_level_tokens() -> list[str]:
    merged = [merge.replace(" ", "") for merge in MERGES]
    return [*CONTROL_TOKENS, *byte_alphabet(), *merged]


def random_weights(arch: str, *, tied: bool = True, seed: int = 0) -> dict[str, np.ndarray]:
    """Weights by Hugging Face name, float32, with values every float format can hold roughly."""
    rng = np.random.default_rng(seed)
    vocab = len(byte_level_tokens())
    queries, keys = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, HIDDEN)}
    for layer in range(LAYERS):
        names = {
            "input_layernorm.weight": (HIDDEN,),
            "self_attn.q_proj.weight": (queries, HIDDEN),
            "self_attn.k_proj.weight": (keys, HIDDEN),
            "self_attn.v_proj.weight": (keys, HIDDEN),
            "self_attn.o_proj.weight": (HIDDEN, queries),
            "post_attention_layernorm.weight": (HIDDEN,),
            "mlp.gate_proj.weight": (INNER, HIDDEN),
            "mlp.up_proj.weight": (INNER, HIDDEN),
            "mlp.down_proj.weight": (HIDDEN, INNER),
        }
        if arch == "qwen2":
            names |= {
                f"self_attn.{p}_proj.bias": (n,)
                for p, n in zip("qkv", (queries, keys, keys), strict=True)
            }
        if arch == "qwen3":
            names |= {f"self_attn.{p}_norm.weight": (HEAD_DIM,) for p in "qk"}
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in names.items()}
    shapes["model.norm.weight"] = (HIDDEN,)
    if not tied:
        shapes["lm_head.weight"] = (vocab, HIDDEN)
    return {n: rng.normal(0, 0.1, s).astype(np.float32) for n, s in shapes.items()}


def permuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """The row order of llama.cpp's converter: first and second half of a head, interleaved."""
    by_head = weight.reshape(heads, -1, *weight.shape[1:])
    half = by_head.shape[1] // 2
    out = np.empty_like(by_head)
    out[:, 0::2], out[:, 1::2] = by_head[:, :half], by_head[:, half:]
    return out.reshape(weight.shape)


def gguf_name(hf_name: str) -> str:
    """llama.cpp's name of a Hugging Face tensor."""
    architecture = gguf.MODEL_ARCH.QWEN3  # the largest of the maps
    names = gguf.get_tensor_name_map(architecture, LAYERS)
    found = names.get_name(hf_name, try_suffixes=(".weight", ".bias"))
    assert found is not None, hf_name
    return found


def metadata(arch: str) -> dict[str, Any]:
    """Every key the converter needs, by name; tests leave some out or change them."""
    tokens = byte_level_tokens()
    keys: dict[str, Any] = {
        "block_count": LAYERS,
        "context_length": 512,
        "embedding_length": HIDDEN,
        "feed_forward_length": INNER,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 50_000.0,
    }
    if arch == "qwen3":
        keys["attention.key_length"] = keys["attention.value_length"] = HEAD_DIM
    return {f"{arch}.{key}": value for key, value in keys.items()} | {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2" if arch.startswith("qwen") else "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] * 3 + [1] * (len(tokens) - 3),
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": "{{ messages[0]['content'] }}",
    }


def random_blocks(shape: tuple[int, ...], kind: Q, rng: np.random.Generator) -> np.ndarray:
    """Random stored bytes of a K-quant matrix whose scales are finite and small."""
    num_bytes = quant_shape_to_byte_shape(shape, kind)
    raw = rng.integers(0, 256, num_bytes, np.uint8)
    _, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = raw.reshape(-1, block_bytes)
    at = {Q.Q2_K: (80, 82), Q.Q3_K: (108,), Q.Q6_K: (208,)}.get(kind, (0, 2))
    for offset in at if kind not in (Q.IQ4_NL, Q.IQ4_XS) else (0,):
        scales = rng.uniform(1e-4, 1e-2, len(blocks)).astype(np.float16)
        blocks[:, offset : offset + 2] = scales.view(np.uint8).reshape(-1, 2)
    return blocks.reshape(num_bytes)


def write_gguf(
    path: Path,
    arch: str,
    weights: dict[str, np.ndarray],
    kind: Q = Q.F32,
    *,
    changes: dict[str, Any] | None = None,
    extra_tensors: dict[str, np.ndarray] | None = None,
) -> dict[str, np.ndarray]:
    """Write the model; matrices in ``kind``. Returns the stored arrays by Hugging Face name.

    ``changes`` to the metadata: a value replaces, ``None`` removes. A key ``tensor:NAME`` (GGUF
    name) set to ``None`` leaves that tensor out.
    """
    changes = changes or {}
    writer = gguf.GGUFWriter(path, changes.get("general.architecture", arch))
    for key, value in (metadata(arch) | changes).items():
        if value is None or key.startswith("tensor:") or key == "general.architecture":
            continue
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
        add |= {str: writer.add_string, list: writer.add_array}
        add[type(value)](key, value)
    rng = np.random.default_rng(1)
    stored: dict[str, np.ndarray] = {}
    for name, weight in weights.items():
        if arch == "llama" and (".q_proj." in name or ".k_proj." in name):
            weight = permuted(weight, HEADS if ".q_proj." in name else KV_HEADS)
        data, raw_type = weight, None
        if weight.ndim == 2:
            raw_type = kind
            random = kind in K_QUANTS
            data = random_blocks(weight.shape, kind, rng) if random else quantize(weight, kind)
        stored[name] = data
        if f"tensor:{gguf_name(name)}" not in changes:
            writer.add_tensor(gguf_name(name), data, raw_dtype=raw_type)
    for name, data in (extra_tensors or {}).items():
        writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return stored
