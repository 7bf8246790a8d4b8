"""What a GGUF file says about its model: the config.json it amounts to, and its tensors' names.

Keys and tensor names: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md and llama.cpp's
``convert_hf_to_gguf.py``, whose work this undoes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepinfer.frontend.gguf_file import GGUFFile
from deepinfer.wire.checks import check_float, check_int, shown

_MAX_SIZE = 1 << 31
ROPE_FACTORS = "rope_freqs.weight"


@dataclass(frozen=True, slots=True)
class Architecture:
    """How one GGUF architecture maps to a Hugging Face one.

    ``permuted``: llama.cpp stores the rows of q and k so that rotary pairs are neighbours.
    """

    hf_class: str
    model_type: str
    permuted: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False


ARCHITECTURES = {
    # Mistral's models (without a sliding window) are stored as llama, too.
    "llama": Architecture("LlamaForCausalLM", "llama", permuted=True),
    "qwen2": Architecture("Qwen2ForCausalLM", "qwen2", qkv_bias=True),
    "qwen3": Architecture("Qwen3ForCausalLM", "qwen3", qk_norm=True),
}


@dataclass(frozen=True, slots=True)
class WeightSource:
    """Where a tensor of the model folder comes from; rows are permuted per head if ``heads``."""

    gguf_name: str
    shape: tuple[int, ...]
    heads: int = 0


def architecture_of(metadata: Mapping[str, Any]) -> Architecture:
    """The architecture; ``ValueError`` names it when it is not supported."""
    name = _string(metadata, "general.architecture")
    if name not in ARCHITECTURES:
        raise ValueError(
            f"general.architecture is {shown(name)}; supported are {', '.join(ARCHITECTURES)}"
        )
    return ARCHITECTURES[name]


def read_config(gguf: GGUFFile) -> dict[str, Any]:
    """config.json in Hugging Face's form, without the token ids.

    ``ValueError`` names a metadata key that is missing, out of range or not supported.
    """
    metadata = gguf.metadata
    architecture = architecture_of(metadata)
    prefix = _string(metadata, "general.architecture")

    def integer(key: str, default: int | None = None) -> int:
        return _integer(metadata, f"{prefix}.{key}", default)

    if integer("expert_count", 0):
        raise ValueError(f"{prefix}.expert_count: mixture-of-experts models are not supported")
    hidden_size = integer("embedding_length")
    num_heads = integer("attention.head_count")
    num_kv_heads = integer("attention.head_count_kv", num_heads)
    if num_heads % num_kv_heads:
        raise ValueError(
            f"{prefix}.attention.head_count {num_heads} is no multiple of head_count_kv "
            f"{num_kv_heads}"
        )
    head_dim = integer("attention.key_length", max(1, hidden_size // num_heads))
    for key in ("attention.value_length", "rope.dimension_count"):
        if (value := integer(key, head_dim)) != head_dim:
            raise ValueError(f"{prefix}.{key} must equal the head size {head_dim}, got {value}")
    if integer("attention.sliding_window", 0):
        raise ValueError(f"{prefix}.attention.sliding_window is not supported")
    if head_dim % 2:
        raise ValueError(f"{prefix}: the head size must be even, got {head_dim}")
    theta = _number(metadata, f"{prefix}.rope.freq_base", 10_000.0)
    context = integer("context_length")
    config: dict[str, Any] = {
        "architectures": [architecture.hf_class],
        "model_type": architecture.model_type,
        "vocab_size": _embedding_rows(gguf),
        "hidden_size": hidden_size,
        "intermediate_size": integer("feed_forward_length"),
        "num_hidden_layers": integer("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": _number(metadata, f"{prefix}.attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": context,
        "rope_theta": theta,
        "rope_scaling": _rope_scaling(gguf, prefix, context, head_dim, theta),
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
        "torch_dtype": "bfloat16",
        "use_cache": True,
    }
    if architecture.model_type == "llama":
        config["attention_bias"] = "blk.0.attn_q.bias" in gguf.tensors
        config["mlp_bias"] = "blk.0.ffn_up.bias" in gguf.tensors
    return config


def weight_sources(gguf: GGUFFile, config: Mapping[str, Any]) -> dict[str, WeightSource]:
    """Hugging Face tensor name to its source, for exactly the tensors the config asks for.

    ``ValueError`` names a tensor that is missing, has another shape, or has no use.
    """
    num_layers = config["num_hidden_layers"]
    # Before any loop over layers: a header may claim billions of them.
    if num_layers > len(gguf.tensors):
        raise ValueError(f"block_count {num_layers} needs more tensors than {len(gguf.tensors)}")
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    sources = {"model.embed_tokens.weight": WeightSource("token_embd.weight", (vocab, hidden))}
    for layer in range(num_layers):
        for name, source in _layer_sources(config, layer).items():
            sources[f"model.layers.{layer}.{name}"] = source
    sources["model.norm.weight"] = WeightSource("output_norm.weight", (hidden,))
    if not config["tie_word_embeddings"]:
        sources["lm_head.weight"] = WeightSource("output.weight", (vocab, hidden))

    for source in sources.values():
        tensor = gguf.tensors.get(source.gguf_name)
        if tensor is None:
            raise ValueError(f"tensor {source.gguf_name} is missing")
        if tensor.shape != source.shape:
            raise ValueError(
                f"tensor {source.gguf_name} must have shape {source.shape}, got {tensor.shape}"
            )
    used = {source.gguf_name for source in sources.values()} | {ROPE_FACTORS}
    for name in gguf.tensors:
        if name not in used:
            raise ValueError(f"tensor {shown(name)} has no place in a {config['model_type']} model")
    return sources


def _layer_sources(config: Mapping[str, Any], layer: int) -> dict[str, WeightSource]:
    architecture = ARCHITECTURES[config["model_type"]]
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config["head_dim"]
    bias = config.get("attention_bias", False)
    mlp_bias = config.get("mlp_bias", False)
    sources: dict[str, WeightSource] = {}

    def add(
        hf: str, name: str, rows: int, columns: int, *, biased: bool = False, heads: int = 0
    ) -> None:
        heads = heads if architecture.permuted else 0
        name = f"blk.{layer}.{name}"
        sources[f"{hf}.weight"] = WeightSource(f"{name}.weight", (rows, columns), heads)
        if biased:
            sources[f"{hf}.bias"] = WeightSource(f"{name}.bias", (rows,), heads)

    def add_norm(hf: str, name: str, size: int) -> None:
        sources[f"{hf}.weight"] = WeightSource(f"blk.{layer}.{name}.weight", (size,))

    qkv_bias = bias or architecture.qkv_bias
    queries, keys = heads * head_dim, kv_heads * head_dim
    add_norm("input_layernorm", "attn_norm", hidden)
    add("self_attn.q_proj", "attn_q", queries, hidden, biased=qkv_bias, heads=heads)
    add("self_attn.k_proj", "attn_k", keys, hidden, biased=qkv_bias, heads=kv_heads)
    add("self_attn.v_proj", "attn_v", keys, hidden, biased=qkv_bias)
    add("self_attn.o_proj", "attn_output", hidden, queries, biased=bias)
    if architecture.qk_norm:
        add_norm("self_attn.q_norm", "attn_q_norm", head_dim)
        add_norm("self_attn.k_norm", "attn_k_norm", head_dim)
    add_norm("post_attention_layernorm", "ffn_norm", hidden)
    add("mlp.gate_proj", "ffn_gate", inner, hidden, biased=mlp_bias)
    add("mlp.up_proj", "ffn_up", inner, hidden, biased=mlp_bias)
    add("mlp.down_proj", "ffn_down", hidden, inner, biased=mlp_bias)
    return sources


def _rope_scaling(
    gguf: GGUFFile, prefix: str, context: int, head_dim: int, theta: float
) -> dict[str, Any] | None:
    metadata = gguf.metadata
    key = f"{prefix}.rope.scaling"
    original = _integer(metadata, f"{key}.original_context_length", 0)
    if ROPE_FACTORS in gguf.tensors:
        return _llama3_scaling(gguf, original or 8192, head_dim, theta)
    kind = metadata.get(f"{key}.type", "none")
    # Older files have the linear factor alone.
    linear = _number(metadata, f"{prefix}.rope.scale_linear", 1.0)
    factor = _number(metadata, f"{key}.factor", linear)
    if kind == "linear" or (f"{key}.type" not in metadata and factor != 1.0):
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        scaling: dict[str, Any] = {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": original or context,
        }
        if f"{key}.attn_factor" in metadata:
            # llama.cpp multiplies it with YaRN's own correction; transformers takes the product.
            own = 0.1 * math.log(max(factor, 1.0)) + 1.0
            scaling["attention_factor"] = own * _number(metadata, f"{key}.attn_factor")
        for name, hf_name in (("yarn_beta_fast", "beta_fast"), ("yarn_beta_slow", "beta_slow")):
            if f"{key}.{name}" in metadata:
                scaling[hf_name] = _number(metadata, f"{key}.{name}")
        return scaling
    if kind != "none":
        raise ValueError(f"{key}.type is {shown(kind)}; supported are none, linear, yarn")
    return None


def _llama3_scaling(gguf: GGUFFile, original: int, head_dim: int, theta: float) -> dict[str, Any]:
    """Llama 3's rope scaling, found again from the divisors of the frequencies that it came to."""
    tensor = gguf.tensors[ROPE_FACTORS]
    if tensor.shape != (head_dim // 2,):
        raise ValueError(
            f"tensor {ROPE_FACTORS} must have shape {(head_dim // 2,)}, got {tensor.shape}"
        )
    stored = gguf.read_rows(tensor, slice(None))[0]
    scaling: dict[str, Any] = {
        "rope_type": "llama3",
        "factor": float(stored.max()),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": original,
    }
    valid = scaling["factor"] >= 1.0  # false for NaN, too
    if not valid or not np.allclose(stored, llama3_divisors(scaling, head_dim, theta), rtol=1e-3):
        raise ValueError(f"tensor {ROPE_FACTORS} does not hold Llama 3's rope factors")
    return scaling


def llama3_divisors(scaling: Mapping[str, Any], head_dim: int, theta: float) -> NDArray[np.float64]:
    """Divisors ``[head_dim / 2]`` of the rotary frequencies under Llama 3's scaling.

    Formula: ``apply_scaling`` of https://github.com/meta-llama/llama-models (llama3/model.py):
    wavelengths shorter than ``original / high`` stay, those longer than ``original / low`` are
    stretched by ``factor``, and the frequencies between are interpolated.
    """
    frequencies = theta ** -(np.arange(0, head_dim, 2) / head_dim)
    turns = scaling["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return np.asarray(1.0 / ((1.0 - smooth) / scaling["factor"] + smooth))


def _embedding_rows(gguf: GGUFFile) -> int:
    tensor = gguf.tensors.get("token_embd.weight")
    if tensor is None:
        raise ValueError("tensor token_embd.weight is missing")
    return tensor.shape[0]


def _get(metadata: Mapping[str, Any], key: str) -> Any:
    if key not in metadata:
        raise ValueError(f"metadata key {key} is missing")
    return metadata[key]


def _string(metadata: Mapping[str, Any], key: str) -> str:
    value = _get(metadata, key)
    if not isinstance(value, str):
        raise ValueError(f"{key} must be a string, got {shown(value)}")
    return value


def _integer(metadata: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """An integer; 0 is allowed only where it is the default."""
    value = _get(metadata, key) if default is None else metadata.get(key, default)
    check_int(key, value, 0 if default == 0 else 1, _MAX_SIZE)
    return int(value)


def _number(metadata: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = _get(metadata, key) if default is None else metadata.get(key, default)
    check_float(key, value, 0.0, math.inf, low_open=True)
    # The file holds 1e-05 as a float32; its shortest spelling is the number that was meant.
    return float(str(np.float32(value)))
