"""A Hugging Face tokenizer out of the vocabulary in a GGUF file's metadata.

Two kinds are in use with the models we serve: byte-level BPE (``gpt2``), where a name in
``tokenizer.ggml.pre`` says how text is cut before the merges, and SentencePiece BPE (``llama``),
where pieces carry scores instead of merges.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from deepinfer.wire.checks import check_int, shown

# Token types of tokenizer.ggml.token_type.
_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 2, 3, 4, 6

# Far above any real token; bounds the work of finding the pairs that make one.
_MAX_TOKEN_CHARS = 1024

# How each vocabulary cuts text, as its own tokenizer.json says it.
_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|{_LETTERS}|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_CONTRACTIONS}|{_LETTERS}|\p{{N}}|{_REST}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# llama.cpp's rule for a file that does not say how its vocabulary cuts text.
_DEFAULT = (
    r"[\p{P}\$\+<=>\^~\|]+",
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
    r"\p{N}+",
    r"[0-9][0-9][0-9]",
)


@dataclass(frozen=True, slots=True)
class _Split:
    """A pre-tokenizer by name: GPT-2's own expression when ``regexes`` is empty."""

    regexes: tuple[str, ...] = ()
    single_digits: bool = False
    nfc: bool = False
    whole_words: bool = False  # a word that is a token stays one, whatever the merges say
    add_bos: bool = False


_GPT2_DIGITS = _Split(single_digits=True)
_LLAMA_BPE = _Split((_LLAMA3,), whole_words=True, add_bos=True)
_PRE_TOKENIZERS = {
    "default": _Split(_DEFAULT),
    "gpt-2": _Split(),
    "smollm": _GPT2_DIGITS,
    "starcoder": _GPT2_DIGITS,
    "refact": _GPT2_DIGITS,
    "llama-bpe": _LLAMA_BPE,
    "llama3": _LLAMA_BPE,
    "llama-v3": _LLAMA_BPE,
    "tekken": _Split((_TEKKEN,), whole_words=True, add_bos=True),
    "qwen2": _Split((_QWEN2,), nfc=True),
    "deepseek-r1-qwen": _Split((_QWEN2,), nfc=True),
}

# Control tokens that end an answer beside the file's EOS, as the models' own
# generation_config.json list them; a GGUF file names one EOS only.
_END_TOKENS = {
    "llama": ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"),
    "qwen2": ("<|im_end|>", "<|endoftext|>"),
    "qwen3": ("<|im_end|>", "<|endoftext|>"),
}


@dataclass(frozen=True, slots=True)
class TokenizerParts:
    """``tokenizer``, the object for tokenizer_config.json, and the ids that matter to the model."""

    tokenizer: Tokenizer
    config: dict[str, Any]
    bos_token_id: int | None
    eos_token_ids: list[int]


def read_tokenizer(metadata: Mapping[str, Any], vocab_size: int) -> TokenizerParts:
    """Build the tokenizer; ``ValueError`` names a key that is missing, broken or not supported.

    ``vocab_size``: rows of the embedding, the upper limit of token ids.
    """
    vocabulary = _Vocabulary(metadata, vocab_size)
    if vocabulary.kind == "gpt2":
        tokenizer, add_bos = _byte_level(vocabulary)
    else:
        tokenizer, add_bos = _sentencepiece(vocabulary), True
    tokenizer.add_special_tokens(vocabulary.added(_CONTROL, _UNKNOWN))
    tokenizer.add_tokens(vocabulary.added(_USER_DEFINED))

    bos, eos = vocabulary.special_id("bos"), vocabulary.special_id("eos")
    add_bos = vocabulary.flag("add_bos_token", add_bos) and bos is not None
    add_eos = vocabulary.flag("add_eos_token", False) and eos is not None
    if add_bos or add_eos:
        first = vocabulary.tokens[bos] if add_bos and bos is not None else None
        last = vocabulary.tokens[eos] if add_eos and eos is not None else None
        tokenizer.post_processor = _surround(vocabulary, first, last)
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "add_bos_token": add_bos,
        "add_eos_token": add_eos,
    }
    for name in ("bos", "eos", "unknown", "padding"):
        if (token_id := vocabulary.special_id(name)) is not None:
            short = {"unknown": "unk", "padding": "pad"}.get(name, name)
            config[f"{short}_token"] = vocabulary.tokens[token_id]
    template = metadata.get("tokenizer.chat_template")
    if template is not None:
        if not isinstance(template, str):
            raise ValueError(f"tokenizer.chat_template must be a string, got {shown(template)}")
        config["chat_template"] = template
    return TokenizerParts(tokenizer, config, bos, vocabulary.end_ids())


class _Vocabulary:
    """The checked ``tokenizer.ggml.*`` metadata."""

    def __init__(self, metadata: Mapping[str, Any], vocab_size: int) -> None:
        self.metadata = metadata
        self.kind = self.get("model")
        if self.kind not in ("gpt2", "llama"):
            raise ValueError(
                f"tokenizer.ggml.model is {shown(self.kind)}; supported are gpt2 and llama"
            )
        self.tokens: list[str] = self.column("tokens", str)
        if max(map(len, self.tokens), default=0) > _MAX_TOKEN_CHARS:
            raise ValueError(
                f"tokenizer.ggml.tokens has a token of more than {_MAX_TOKEN_CHARS} characters"
            )
        if not 0 < len(self.tokens) <= vocab_size:
            raise ValueError(
                f"tokenizer.ggml.tokens has {len(self.tokens)} tokens, the embedding {vocab_size}"
            )
        self.ids = {token: index for index, token in enumerate(self.tokens)}
        if len(self.ids) != len(self.tokens):
            twice = next(t for i, t in enumerate(self.tokens) if self.ids[t] != i)
            raise ValueError(f"tokenizer.ggml.tokens has {shown(twice)} twice")
        self.types: list[int] = [1] * len(self.tokens)
        if "tokenizer.ggml.token_type" in metadata:
            self.types = self.column("token_type", int, len(self.tokens))

    def get(self, name: str) -> Any:
        key = f"tokenizer.ggml.{name}"
        if key not in self.metadata:
            raise ValueError(f"metadata key {key} is missing")
        return self.metadata[key]

    def column(self, name: str, kind: type, length: int | None = None) -> list[Any]:
        values = self.get(name)
        if not isinstance(values, list) or not all(isinstance(value, kind) for value in values):
            raise ValueError(f"tokenizer.ggml.{name} must be an array of {kind.__name__}")
        if length is not None and len(values) != length:
            raise ValueError(f"tokenizer.ggml.{name} must have {length} entries, got {len(values)}")
        return values

    def flag(self, name: str, default: bool) -> bool:
        value = self.metadata.get(f"tokenizer.ggml.{name}", default)
        if not isinstance(value, bool):
            raise ValueError(f"tokenizer.ggml.{name} must be a bool, got {shown(value)}")
        return value

    def special_id(self, name: str) -> int | None:
        key = f"tokenizer.ggml.{name}_token_id"
        value = self.metadata.get(key)
        if value is not None:
            check_int(key, value, 0, len(self.tokens) - 1)
        return value

    def end_ids(self) -> list[int]:
        """EOS ids, the file's own EOS first."""
        ids = [self.special_id(name) for name in ("eos", "eot", "eom")]
        for token in _END_TOKENS.get(self.metadata.get("general.architecture", ""), ()):
            token_id = self.ids.get(token)
            if token_id is not None and self.types[token_id] == _CONTROL:
                ids.append(token_id)
        return list(dict.fromkeys(i for i in ids if i is not None))

    def added(self, *kinds: int) -> list[AddedToken]:
        """The tokens of these types, to be found in text before anything else."""
        special = _CONTROL in kinds
        return [
            AddedToken(token, special=special, normalized=False)
            for token, kind in zip(self.tokens, self.types, strict=True)
            if kind in kinds and token
        ]

    def merges(self) -> list[tuple[str, str]]:
        pairs = []
        for merge in self.column("merges", str):
            # The parts may begin with a space but contain none further on.
            cut = merge.find(" ", 1)
            pair = (merge[:cut], merge[cut + 1 :])
            if cut < 0 or any(part not in self.ids for part in (*pair, "".join(pair))):
                raise ValueError(f"tokenizer.ggml.merges has {shown(merge)}, not of two tokens")
            pairs.append(pair)
        return pairs


def _byte_level(vocabulary: _Vocabulary) -> tuple[Tokenizer, bool]:
    name = vocabulary.metadata.get("tokenizer.ggml.pre", "default")
    if not isinstance(name, str) or name not in _PRE_TOKENIZERS:
        raise ValueError(
            f"tokenizer.ggml.pre is {shown(name)}; supported are {', '.join(_PRE_TOKENIZERS)}"
        )
    split = _PRE_TOKENIZERS[name]
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocabulary.ids, merges=vocabulary.merges(), ignore_merges=split.whole_words
        )
    )
    if split.nfc:
        tokenizer.normalizer = normalizers.NFC()
    steps: list[Any] = []
    if split.single_digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    for regex in split.regexes:
        steps.append(pre_tokenizers.Split(Regex(regex), behavior="isolated"))
    add_prefix_space = vocabulary.flag("add_space_prefix", False)
    steps.append(
        pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space, use_regex=not split.regexes)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, split.add_bos


def _sentencepiece(vocabulary: _Vocabulary) -> Tokenizer:
    scores = vocabulary.column("scores", float, len(vocabulary.tokens))
    unknown = next(
        (t for t, k in zip(vocabulary.tokens, vocabulary.types, strict=True) if k == _UNKNOWN), None
    )
    if "tokenizer.ggml.merges" in vocabulary.metadata:
        merges = vocabulary.merges()
    else:
        merges = _merges_from_scores(vocabulary, scores)
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocabulary.ids,
            merges=merges,
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=_BYTE in vocabulary.types,
        )
    )
    steps: list[Any] = [normalizers.Replace(" ", "▁")]
    decoding: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if vocabulary.flag("add_space_prefix", True):
        # Always, as SentencePiece does it: also before a space, and after a special token.
        steps.insert(0, normalizers.Prepend("▁"))
        decoding.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.decoder = decoders.Sequence(decoding)
    return tokenizer


def _merges_from_scores(vocabulary: _Vocabulary, scores: Sequence[float]) -> list[tuple[str, str]]:
    """The pairs that make each piece, best score first: the order in which SentencePiece joins."""
    ids = vocabulary.ids
    ranked = []
    for index, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True)):
        if kind in (_CONTROL, _UNKNOWN, _BYTE):
            continue
        for cut in range(1, len(token)):
            if token[:cut] in ids and token[cut:] in ids:
                ranked.append((-scores[index], ids[token[:cut]], token[:cut], token[cut:]))
    ranked.sort()
    return [(left, right) for _, _, left, right in ranked]


def _surround(vocabulary: _Vocabulary, first: str | None, last: str | None) -> Any:
    """Post-processor that puts ``first`` before and ``last`` after a text."""
    before, after = [first] if first else [], [last] if last else []
    return processors.TemplateProcessing(
        single=[*before, "$A", *after],
        pair=[*before, "$A", *after, *before, "$B", *after],
        special_tokens=[(token, vocabulary.ids[token]) for token in (first, last) if token],
    )
