"""Tiny random checkpoints of every supported architecture, made by transformers itself."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path

import torch
import transformers

VOCAB_SIZE = 211
MAX_POSITIONS = 256

_SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_POSITIONS,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 2,
    "bos_token_id": 1,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

# name -> (transformers' config class, what differs from _SHAPE)
VARIANTS: dict[str, tuple[str, dict]] = {
    "llama": ("LlamaConfig", {}),
    "llama-tied": ("LlamaConfig", {"tie_word_embeddings": True}),
    "llama-biases": ("LlamaConfig", {"attention_bias": True, "mlp_bias": True}),
    "llama-multi-head": ("LlamaConfig", {"num_key_value_heads": 4}),
    "llama-head-dim": ("LlamaConfig", {"head_dim": 24}),
    "llama-rope-linear": (
        "LlamaConfig",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.5}},
    ),
    "llama-rope-llama3": ("LlamaConfig", {"rope_parameters": _LLAMA3}),
    "llama-rope-yarn": ("LlamaConfig", {"rope_parameters": _YARN}),
    "llama-rope-yarn-mscale": (
        "LlamaConfig",
        {"rope_parameters": {**_YARN, "mscale": 0.7, "mscale_all_dim": 1.1, "beta_fast": 24.0}},
    ),
    "llama-rope-yarn-untruncated": (
        "LlamaConfig",
        {"rope_parameters": {**_YARN, "truncate": False, "attention_factor": 1.3}},
    ),
    "mistral": ("MistralConfig", {"sliding_window": None}),
    "mistral-window": ("MistralConfig", {"sliding_window": 11}),
    "qwen2": ("Qwen2Config", {}),
    "qwen2-tied": ("Qwen2Config", {"tie_word_embeddings": True}),
    "qwen2-window": (
        "Qwen2Config",
        {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3Config", {"head_dim": 32}),
    "qwen3-biases-tied": (
        "Qwen3Config",
        {"head_dim": 32, "attention_bias": True, "tie_word_embeddings": True},
    ),
    "qwen3-layer-types": (
        "Qwen3Config",
        {
            "head_dim": 16,
            "use_sliding_window": True,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
}


def make_checkpoint(
    variant: str, folder: Path, *, dtype=torch.float32, shard_size: str = "5GB"
) -> Path:
    """Write the variant's folder, as ``save_pretrained`` does, and return it.

    Every parameter is random, norms and biases too (transformers starts them at one and zero,
    where a forgotten bias or norm would not show).
    """
    name, changes = VARIANTS[variant]
    config = getattr(transformers, name)(**{**_SHAPE, **changes})
    torch.manual_seed(sorted(VARIANTS).index(variant))
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            spread = 0.3 if parameter.ndim == 1 else 0.08
            parameter.normal_(mean=1.0 if "norm" in key else 0.0, std=spread)
    model.to(dtype).save_pretrained(folder, max_shard_size=shard_size)
    return folder


def reference_model(folder: Path, dtype=torch.float32):
    """transformers' own model of a folder, in evaluation mode, with plain attention."""
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="eager"
    ).eval()


@contextmanager
def one_torch_thread():
    """On busy cores torch's threads wait for one another far longer than they compute."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
