"""What a model folder's config.json says, read into one small checked dataclass."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from deepinfer.wire.checks import check_int, shown
from deepinfer.wire.model_folder import Fields, ModelError, read_json

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
_MAX_POSITIONS = 1 << 24

# Positions of a plane's angle: of the frame, the row and the column of a patch.
_ROPE_AXES = 3

# What transformers assumes for a key that config.json leaves out; the keys not named here
# (hidden_size and the like) have no sensible default and must be present.
_COMMON_DEFAULTS: dict[str, Any] = {
    "head_dim": None,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "use_sliding_window": False,
    "sliding_window": None,
    "layer_types": None,
    "eos_token_id": None,
}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {"num_key_value_heads": None},
    "MistralForCausalLM": {"num_key_value_heads": 8, "sliding_window": 4096},
    "Qwen2ForCausalLM": {
        "num_key_value_heads": 32,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
    "Qwen3ForCausalLM": {
        "num_key_value_heads": 32,
        "head_dim": 128,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
}
# Older versions of transformers leave out of a text_config all that is as its class has it.
_LLAMA_TEXT = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "max_position_embeddings": 2048,
}
_QWEN2_5_VL_TEXT = {
    "vocab_size": 152064,
    "hidden_size": 8192,
    "intermediate_size": 29568,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "mrope_section": [16, 24, 24],
    "sliding_window": 4096,
    "max_window_layers": 80,
}


@dataclass(frozen=True, slots=True)
class _VisionLanguage:
    """A model with images: its text model is one of the others, described in ``text_config``.

    - ``model_types``: what text_config may say it is.
    - ``text_weights``: how the names of the text model's tensors begin, one of them.
    - ``encoder_weights``: how those begin that the image worker reads.
    """

    text: str
    model_types: tuple[str, ...]
    defaults: dict[str, Any]
    text_weights: tuple[str, ...]
    encoder_weights: tuple[str, ...]


_IDEFICS3 = _VisionLanguage(
    "LlamaForCausalLM",
    ("llama",),
    _LLAMA_TEXT,
    ("model.text_model",),
    ("model.vision_model", "model.connector"),
)
_VISION: dict[str, _VisionLanguage] = {
    "Idefics3ForConditionalGeneration": _IDEFICS3,
    "SmolVLMForConditionalGeneration": _IDEFICS3,
    "Qwen2_5_VLForConditionalGeneration": _VisionLanguage(
        "Qwen2ForCausalLM",
        ("qwen2_5_vl", "qwen2_5_vl_text"),
        _QWEN2_5_VL_TEXT,
        ("model.language_model", "model"),
        ("model.visual", "visual"),
    ),
}
ARCHITECTURES = (*_DEFAULTS, *_VISION)


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding: ``kind`` is one of ``ROPE_TYPES``; rope.py has the formulas.

    ``sections``: planes that the position in each of three axes turns, first to last; empty where
    a position is one number.
    """

    kind: str
    theta: float
    factor: float = 1.0
    original_max_positions: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    sections: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape and options of a decoder.

    ``windows`` has one entry per layer: the number of last positions a token sees, itself
    included; 0 is all of them. ``max_model_len`` counts tokens, prompt and output.

    ``text_weights`` are the possible beginnings of the decoder's tensor names, ``encoder_weights``
    those of tensors that are no part of it. With ``head_may_be_missing`` the output head is the
    embedding when the checkpoint has none.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tied_embeddings: bool
    windows: tuple[int, ...]
    rope: RopeConfig
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    text_weights: tuple[str, ...] = ("model",)
    encoder_weights: tuple[str, ...] = ()
    head_may_be_missing: bool = False


def load_model_config(folder: Path) -> ModelConfig:
    """Read ``config.json`` (and the EOS ids of ``generation_config.json``) in ``folder``.

    Raises ``ModelError`` for a missing, mistyped or unsupported field.
    """
    config = parse_model_config(read_json(folder / "config.json"))
    generation = folder / "generation_config.json"
    if not generation.exists():
        return config
    # Chat models often name their end-of-turn token only here, so both files count.
    fields = Fields(read_json(generation), {"eos_token_id": None}, generation.name)
    eos_token_ids = config.eos_token_ids + _token_ids(fields, config.vocab_size)
    return replace(config, eos_token_ids=tuple(dict.fromkeys(eos_token_ids)))


def parse_model_config(raw: dict[str, Any]) -> ModelConfig:
    """Turn the object of a config.json into a ``ModelConfig``; ``ModelError`` if it cannot be."""
    architecture = _architecture(raw)
    if architecture in _VISION:
        return _vision_language(raw, architecture, _VISION[architecture])
    fields = Fields(raw, {**_COMMON_DEFAULTS, **_DEFAULTS[architecture]}, "config.json")
    return _decoder(fields, architecture)


def _vision_language(
    raw: dict[str, Any], architecture: str, family: _VisionLanguage
) -> ModelConfig:
    """The text model's configuration; the image worker reads the encoder's."""
    # Files of Qwen2.5-VL that are older than text_config have its fields at the top.
    text = raw.get("text_config")
    if text is None:
        text = raw if family.text == "Qwen2ForCausalLM" else {}
    if not isinstance(text, dict):
        raise ModelError(f"config.json: text_config must be an object, got {shown(text)}")
    source = "config.json" if text is raw else "config.json: text_config"
    fields = Fields(text, {**_COMMON_DEFAULTS, **family.defaults}, source)
    if (model_type := text.get("model_type", family.model_types[0])) not in family.model_types:
        raise fields.error(f"model_type must be {family.model_types[0]}, got {shown(model_type)}")
    top = Fields(raw, _COMMON_DEFAULTS, "config.json")
    _check_unquantised(top)
    config = _decoder(fields, family.text)
    tied = top.flag("tie_word_embeddings")
    if family.text == "Qwen2ForCausalLM":
        tied = tied or config.tied_embeddings
    eos_token_ids = config.eos_token_ids + _token_ids(top, config.vocab_size)
    return replace(
        config,
        architecture=architecture,
        tied_embeddings=tied,
        head_may_be_missing=config.tied_embeddings,
        eos_token_ids=tuple(dict.fromkeys(eos_token_ids)),
        text_weights=family.text_weights,
        encoder_weights=family.encoder_weights,
    )


def _decoder(fields: Fields, architecture: str) -> ModelConfig:
    _check_unquantised(fields)
    if (hidden_act := fields.get("hidden_act")) != "silu":
        raise fields.error(f"hidden_act must be silu, got {shown(hidden_act)}")

    hidden_size = fields.integer("hidden_size", 1, 1 << 20)
    num_layers = fields.integer("num_hidden_layers", 1, 4096)
    num_heads = fields.integer("num_attention_heads", 1, 1 << 16)
    num_kv_heads = num_heads
    if fields.get("num_key_value_heads") is not None:
        num_kv_heads = fields.integer("num_key_value_heads", 1, num_heads)
    if num_heads % num_kv_heads:
        raise fields.error(
            f"num_attention_heads {num_heads} is not a multiple of "
            f"num_key_value_heads {num_kv_heads}"
        )
    if fields.get("head_dim") is not None:
        head_dim = fields.integer("head_dim", 2, 1 << 12)
    elif hidden_size % num_heads:
        raise fields.error(
            f"hidden_size {hidden_size} is not a multiple of num_attention_heads {num_heads} "
            "and head_dim is not given"
        )
    else:
        head_dim = hidden_size // num_heads
    if head_dim % 2:
        raise fields.error(f"head_dim must be even for rotary embeddings, got {head_dim}")

    vocab_size = fields.integer("vocab_size", 1, 1 << 24)
    max_positions = fields.integer("max_position_embeddings", 1, _MAX_POSITIONS)
    rope = _rope(fields, max_positions, head_dim)
    qwen2 = architecture == "Qwen2ForCausalLM"
    biased = architecture in ("LlamaForCausalLM", "Qwen3ForCausalLM") and fields.flag(
        "attention_bias"
    )
    return ModelConfig(
        architecture=architecture,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size", 1, 1 << 22),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        norm_eps=fields.number("rms_norm_eps", 0, 1),
        qkv_bias=biased or qwen2,
        output_bias=biased,
        mlp_bias=architecture == "LlamaForCausalLM" and fields.flag("mlp_bias"),
        qk_norm=architecture == "Qwen3ForCausalLM",
        tied_embeddings=fields.flag("tie_word_embeddings"),
        windows=_windows(fields, architecture, num_layers),
        rope=rope,
        max_model_len=_max_model_len(rope, max_positions),
        eos_token_ids=_token_ids(fields, vocab_size),
    )


def _check_unquantised(fields: Fields) -> None:
    if fields.raw.get("quantization_config") is not None:
        raise fields.error("quantization_config is not supported; use the unquantised model")


def _token_ids(fields: Fields, vocab_size: int) -> tuple[int, ...]:
    """The EOS ids, which config files give as null, one id or a list of ids."""
    value = fields.get("eos_token_id")
    ids = [] if value is None else value if isinstance(value, list) else [value]
    for token_id in ids:
        try:
            check_int("eos_token_id", token_id, 0, vocab_size - 1)
        except ValueError as error:
            raise fields.error(str(error)) from error
    return tuple(ids)


def _architecture(raw: dict[str, Any]) -> str:
    names = raw.get("architectures", [])
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ModelError(f"config.json: architectures must be a list of names, got {shown(names)}")
    for name in names:
        if name in ARCHITECTURES:
            return str(name)
    found = ", ".join(shown(name) for name in names[:4]) or "missing"
    raise ModelError(
        f"config.json: architectures is {found}; supported are {', '.join(ARCHITECTURES)}"
    )


def _windows(fields: Fields, architecture: str, num_layers: int) -> tuple[int, ...]:
    """Sliding window per layer, 0 where the layer sees everything."""
    full = (0,) * num_layers
    if architecture == "LlamaForCausalLM" or fields.get("sliding_window") is None:
        return full
    if architecture == "MistralForCausalLM":
        return (fields.integer("sliding_window", 1, _MAX_POSITIONS),) * num_layers
    if not fields.flag("use_sliding_window"):
        return full
    window = fields.integer("sliding_window", 1, _MAX_POSITIONS)
    kinds = fields.get("layer_types")
    if kinds is None:
        first = fields.integer("max_window_layers", 0, _MAX_POSITIONS)
        return tuple(window if layer >= first else 0 for layer in range(num_layers))
    known = {"full_attention": 0, "sliding_attention": window}
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise fields.error(f"layer_types must list one kind for each of {num_layers} layers")
    for kind in kinds:
        if not isinstance(kind, str) or kind not in known:
            raise fields.error(
                f"layer_types has {shown(kind)}; supported are {', '.join(sorted(known))}"
            )
    return tuple(known[kind] for kind in kinds)


def _rope(fields: Fields, max_positions: int, head_dim: int) -> RopeConfig:
    """Rope settings from ``rope_parameters`` (newer files) or ``rope_scaling`` + ``rope_theta``."""
    raw = fields.raw
    # transformers gives the older spelling precedence when a file carries both.
    name = "rope_scaling" if raw.get("rope_scaling") else "rope_parameters"
    values = raw.get(name) or {}
    if not isinstance(values, dict):
        raise fields.error(f"{name} must be an object, got {shown(values)}")
    kind = values.get("rope_type", values.get("type", "default"))
    sections: tuple[int, ...] = ()
    if "mrope_section" in fields.defaults:
        sections = _sections(fields, values, head_dim // 2)
        kind = "default" if kind == "mrope" else kind
    if not isinstance(kind, str) or kind not in ROPE_TYPES:
        raise fields.error(
            f"{name}.rope_type is {shown(kind)}; supported are {', '.join(ROPE_TYPES)}"
        )
    if any(isinstance(value, dict) for value in values.values()):
        raise fields.error(f"{name} that differ between layers are not supported")
    for holder in (raw, values):
        if holder.get("partial_rotary_factor") not in (None, 1):
            raise fields.error("partial_rotary_factor other than 1 is not supported")

    # A null value means the same as a missing one here.
    given = {key: value for key, value in values.items() if value is not None}
    # Top-level original_max_position_embeddings wins over the nested one, as in transformers.
    if raw.get("original_max_position_embeddings") is not None:
        given["original_max_position_embeddings"] = raw["original_max_position_embeddings"]
    defaults = {
        "rope_theta": raw.get("rope_theta") or fields.defaults.get("rope_theta", 10000.0),
        "original_max_position_embeddings": max_positions,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": True,
        "mscale": 0.0,
        "mscale_all_dim": 0.0,
    }
    rope = Fields(given, defaults, f"{fields.source}: {name}")
    theta = rope.number("rope_theta", 1, 1e15, low_open=True)
    if kind == "default":
        return RopeConfig(kind, theta, sections=sections)
    original = rope.integer("original_max_position_embeddings", 1, _MAX_POSITIONS)
    if kind == "yarn":
        defaults["factor"] = max(1.0, max_positions / original)
    factor = rope.number("factor", 1, 1e6)
    if kind == "linear":
        return RopeConfig(kind, theta, factor, sections=sections)
    if kind == "llama3":
        low_freq_factor = rope.number("low_freq_factor", 0, 1e6, low_open=True)
        high_freq_factor = rope.number("high_freq_factor", low_freq_factor, 1e6, low_open=True)
        return RopeConfig(
            kind, theta, factor, original, low_freq_factor, high_freq_factor, sections=sections
        )
    beta_slow = rope.number("beta_slow", 0, 1e6, low_open=True)
    return RopeConfig(
        kind,
        theta,
        factor,
        original,
        beta_fast=rope.number("beta_fast", beta_slow, 1e6),
        beta_slow=beta_slow,
        truncate=rope.flag("truncate"),
        attention_factor=(
            rope.number("attention_factor", 0, 1e6) if "attention_factor" in given else None
        ),
        mscale=rope.number("mscale", 0, 1e6),
        mscale_all_dim=rope.number("mscale_all_dim", 0, 1e6),
        sections=sections,
    )


def _sections(fields: Fields, values: dict[str, Any], planes: int) -> tuple[int, ...]:
    """How many of the ``planes`` turn by the position in each of the three axes."""
    sections = values.get("mrope_section", fields.defaults["mrope_section"])
    if (
        not isinstance(sections, list)
        or len(sections) != _ROPE_AXES
        or not all(type(size) is int and size >= 0 for size in sections)
        or sum(sections) != planes
    ):
        raise fields.error(
            f"mrope_section must be {_ROPE_AXES} numbers with the sum {planes}, "
            f"half of head_dim, got {shown(sections)}"
        )
    return tuple(sections)


def _max_model_len(rope: RopeConfig, max_positions: int) -> int:
    """Tokens the model was made for.

    A yarn extension is often switched on by editing rope_scaling alone, with
    max_position_embeddings left at the original length; the extended length counts then.
    """
    if rope.kind != "yarn":
        return max_positions
    return min(_MAX_POSITIONS, max(max_positions, int(rope.original_max_positions * rope.factor)))
