"""Small tokenizers of every decoder family, made in the process: no files, no network."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from deepinfer.frontend.tokenizer import Tokenizer

SPECIALS = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
CORPUS = [
    "the quick brown fox jumps over the lazy dog, doesn't it? user assistant system",
    "héllo wörld 你好世界 日本語 😀👨‍👩‍👧 नमस्ते สวัสดี <|im_ end|> 0123456789",
    "def f(x):\n    return x  # comment\n\tif x: pass",
]

CHATML = (
    "{% for message in messages %}"
    "{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are helpful.<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
ALTERNATING = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}"
    "{% endif %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' ~ message.content | trim ~ ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}"
    "{{ ' ' ~ message['content'].strip() ~ eos_token }}"
    "{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}"
    "{% endfor %}"
)
TOOLS = (
    "{%- if tools %}\n    {{- '<|im_start|>system\n# Tools' }}\n"
    "    {%- for tool in tools %}{{- '\n' }}{{- tool | tojson }}{%- endfor %}\n"
    "    {{- '<|im_end|>\n' }}\n{%- endif %}\n" + CHATML
)
# Text on both sides that, with the right words between, would spell a special token.
JOINING = (
    "{% for message in messages %}{{ '<|im_' ~ message.content | trim ~ 'end|>' }}{% endfor %}"
)
VISION = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ '<image>' }}{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{{ '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TEMPLATES = {
    "chatml": CHATML,
    "alternating": ALTERNATING,
    "tools": TOOLS,
    "joining": JOINING,
    "vision": VISION,
}


def _byte_level() -> tokenizers.Tokenizer:
    """Like GPT-2, Llama 3, Qwen, SmolLM2."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=SPECIALS,
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS * 3, trainer)
    backend.add_tokens(["<tool>", "  spaced  "])
    return backend


def _byte_fallback_model() -> models.BPE:
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    for byte in range(256):
        vocab[f"<0x{byte:02X}>"] = len(vocab)
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he"), ("▁", "▁"), ("你", "好"), ("l", "l")]
    chars = "▁abcdefghijklmnopqrstuvwxyzINST.,?!'[]/<>|_0123456789\nY你好é"
    for piece in [*chars, *("".join(pair) for pair in merges)]:
        vocab.setdefault(piece, len(vocab))
    return models.BPE(
        vocab=vocab, merges=merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True
    )


def _byte_fallback() -> tokenizers.Tokenizer:
    """Like Llama 2 and Mistral: a leading space is added and stripped again."""
    backend = tokenizers.Tokenizer(_byte_fallback_model())
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens(["<unk>", *SPECIALS])
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", backend.token_to_id("<s>"))]
    )
    return backend


def _byte_fallback_metaspace() -> tokenizers.Tokenizer:
    """Like newer Llama 2 files: a prefix space only at the start of the whole text."""
    backend = _byte_fallback()
    backend.normalizer = None
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    return backend


def _byte_fallback_plain() -> tokenizers.Tokenizer:
    """Like Gemma: nothing is added or stripped."""
    backend = tokenizers.Tokenizer(_byte_fallback_model())
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    backend.add_special_tokens(["<unk>", *SPECIALS])
    return backend


def _unigram() -> tokenizers.Tokenizer:
    """Like T5: Metaspace on both sides."""
    backend = tokenizers.Tokenizer(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=300, special_tokens=["<unk>", *SPECIALS], unk_token="<unk>", show_progress=False
    )
    backend.train_from_iterator(CORPUS * 3, trainer)
    return backend


def _word_piece() -> tokenizers.Tokenizer:
    """Like BERT: cleans up spaces before punctuation."""
    backend = tokenizers.Tokenizer(models.WordPiece(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(
        vocab_size=300, special_tokens=["<unk>", *SPECIALS], show_progress=False
    )
    backend.train_from_iterator(CORPUS * 3, trainer)
    return backend


def _words() -> tokenizers.Tokenizer:
    """Whole words, and no decoder at all."""
    words = ["<unk>", *SPECIALS, *sorted({word for line in CORPUS for word in line.split()})]
    backend = tokenizers.Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>")
    )
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(["<unk>", *SPECIALS])
    return backend


_MAKERS = {
    "byte_level": _byte_level,
    "byte_fallback": _byte_fallback,
    "byte_fallback_metaspace": _byte_fallback_metaspace,
    "byte_fallback_plain": _byte_fallback_plain,
    "unigram": _unigram,
    "word_piece": _word_piece,
    "words": _words,
}
FAMILIES = sorted(_MAKERS)


@cache
def small_tokenizer(family: str, template: str | None = None) -> Tokenizer:
    """Return the tokenizer of a family, with one of ``TEMPLATES``."""
    templates = {"default": TEMPLATES[template]} if template else {}
    named = {"bos_token": "<s>", "eos_token": "</s>"}
    return Tokenizer(_MAKERS[family](), named, templates)


def scripted_tokenizer(pieces: list[str]) -> Tokenizer:
    """Return a tokenizer whose id ``i`` decodes to ``pieces[i]`` and whose last id is ``</s>``."""
    backend = tokenizers.Tokenizer(
        models.WordLevel({piece: i for i, piece in enumerate([*pieces, "</s>"])})
    )
    backend.decoder = decoders.Fuse()
    return Tokenizer(backend, {"eos_token": "</s>"})


def save_folder(family: str, template: str, folder: Path) -> Path:
    """Write a tokenizer as the model folder that transformers writes."""
    folder.mkdir(parents=True, exist_ok=True)
    _MAKERS[family]().save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": {"content": "</s>", "special": True, "__type": "AddedToken"},
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(TEMPLATES[template])
    return folder


def add_special(folder: Path, token: str) -> None:
    """Give the tokenizer of a folder one more special token."""
    file = str(folder / "tokenizer.json")
    backend = tokenizers.Tokenizer.from_file(file)
    backend.add_special_tokens([token])
    backend.save(file)
