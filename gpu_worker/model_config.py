"""What a model folder's config.json says, read into one small checked dataclass."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from deepinfer.wire.checks import check_float, check_int, shown

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
_MAX_JSON_BYTES = 8 << 20
_MAX_POSITIONS = 1 << 24
_ABSENT: Any = object()

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
ARCHITECTURES = tuple(_DEFAULTS)


class ModelError(ValueError):
    """A model folder that cannot be served; the message names the file, the field and the limit."""


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding: ``kind`` is one of ``ROPE_TYPES``; rope.py has the formulas."""

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


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape and options of a decoder.

    ``windows`` has one entry per layer: the number of last positions a token sees, itself
    included; 0 is all of them. ``max_model_len`` counts tokens, prompt and output.
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


def load_model_config(folder: Path) -> ModelConfig:
    """Read ``config.json`` (and the EOS ids of ``generation_config.json``) in ``folder``.

    Raises ``ModelError`` for a missing, mistyped or unsupported field.
    """
    config = parse_model_config(read_json(folder / "config.json"))
    generation = folder / "generation_config.json"
    if not generation.exists():
        return config
    # Chat models often name their end-of-turn token only here, so both files count.
    fields = _Fields(read_json(generation), {"eos_token_id": None}, generation.name)
    eos_token_ids = config.eos_token_ids + fields.token_ids(config.vocab_size)
    return replace(config, eos_token_ids=tuple(dict.fromkeys(eos_token_ids)))


def parse_model_config(raw: dict[str, Any]) -> ModelConfig:
    """Turn the object of a config.json into a ``ModelConfig``; ``ModelError`` if it cannot be."""
    architecture = _architecture(raw)
    fields = _Fields(raw, {**_COMMON_DEFAULTS, **_DEFAULTS[architecture]}, "config.json")
    if raw.get("quantization_config") is not None:
        raise fields.error("quantization_config is not supported; use the unquantised model")
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
    rope = _rope(fields, max_positions)
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
        eos_token_ids=fields.token_ids(vocab_size),
    )


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in ``path``; ``ModelError`` when missing, oversized or not an object."""
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_JSON_BYTES + 1)
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from error
    if len(data) > _MAX_JSON_BYTES:
        raise ModelError(f"{path}: larger than {_MAX_JSON_BYTES} bytes")
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path}: must hold a JSON object, got {type(value).__name__}")
    return value


class _Fields:
    """One JSON object read field by field; every complaint names the file and the field."""

    def __init__(self, raw: dict[str, Any], defaults: dict[str, Any], source: str) -> None:
        self.raw = raw
        self.defaults = defaults
        self.source = source

    def error(self, message: str) -> ModelError:
        return ModelError(f"{self.source}: {message}")

    def get(self, name: str) -> Any:
        value = self.raw.get(name, self.defaults.get(name, _ABSENT))
        if value is _ABSENT:
            raise self.error(f"{name} is missing")
        return value

    def integer(self, name: str, low: int, high: int) -> int:
        value = self.get(name)
        try:
            check_int(name, value, low, high)
        except ValueError as error:
            raise self.error(str(error)) from error
        return int(value)

    def number(self, name: str, low: float, high: float, *, low_open: bool = False) -> float:
        value = self.get(name)
        try:
            check_float(name, value, low, high, low_open=low_open)
        except (ValueError, OverflowError) as error:
            raise self.error(f"{name}: {error}") from error
        return float(value)

    def flag(self, name: str) -> bool:
        value = self.get(name)
        if not isinstance(value, bool):
            raise self.error(f"{name} must be true or false, got {shown(value)}")
        return value

    def token_ids(self, vocab_size: int) -> tuple[int, ...]:
        """The EOS ids, which config files give as null, one id or a list of ids."""
        value = self.get("eos_token_id")
        ids = [] if value is None else value if isinstance(value, list) else [value]
        for token_id in ids:
            try:
                check_int("eos_token_id", token_id, 0, vocab_size - 1)
            except ValueError as error:
                raise self.error(str(error)) from error
        return tuple(ids)


def _architecture(raw: dict[str, Any]) -> str:
    names = raw.get("architectures", [])
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ModelError(f"config.json: architectures must be a list of names, got {shown(names)}")
    for name in names:
        if name in _DEFAULTS:
            return str(name)
    found = ", ".join(shown(name) for name in names[:4]) or "missing"
    raise ModelError(
        f"config.json: architectures is {found}; supported are {', '.join(ARCHITECTURES)}"
    )


def _windows(fields: _Fields, architecture: str, num_layers: int) -> tuple[int, ...]:
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


def _rope(fields: _Fields, max_positions: int) -> RopeConfig:
    """Rope settings from ``rope_parameters`` (newer files) or ``rope_scaling`` + ``rope_theta``."""
    raw = fields.raw
    # transformers gives the older spelling precedence when a file carries both.
    name = "rope_scaling" if raw.get("rope_scaling") else "rope_parameters"
    values = raw.get(name) or {}
    if not isinstance(values, dict):
        raise fields.error(f"{name} must be an object, got {shown(values)}")
    kind = values.get("rope_type", values.get("type", "default"))
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
        "rope_theta": raw.get("rope_theta") or 10000.0,
        "original_max_position_embeddings": max_positions,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": True,
        "mscale": 0.0,
        "mscale_all_dim": 0.0,
    }
    rope = _Fields(given, defaults, f"{fields.source}: {name}")
    theta = rope.number("rope_theta", 1, 1e15, low_open=True)
    if kind == "default":
        return RopeConfig(kind, theta)
    original = rope.integer("original_max_position_embeddings", 1, _MAX_POSITIONS)
    if kind == "yarn":
        defaults["factor"] = max(1.0, max_positions / original)
    factor = rope.number("factor", 1, 1e6)
    if kind == "linear":
        return RopeConfig(kind, theta, factor)
    if kind == "llama3":
        low_freq_factor = rope.number("low_freq_factor", 0, 1e6, low_open=True)
        high_freq_factor = rope.number("high_freq_factor", low_freq_factor, 1e6, low_open=True)
        return RopeConfig(kind, theta, factor, original, low_freq_factor, high_freq_factor)
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
    )


def _max_model_len(rope: RopeConfig, max_positions: int) -> int:
    """Tokens the model was made for.

    A yarn extension is often switched on by editing rope_scaling alone, with
    max_position_embeddings left at the original length; the extended length counts then.
    """
    if rope.kind != "yarn":
        return max_positions
    return min(_MAX_POSITIONS, max(max_positions, int(rope.original_max_positions * rope.factor)))
