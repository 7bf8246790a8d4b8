"""Text to token ids and back, and conversations to token ids.

A thin layer over the ``tokenizers`` package that reads a Hugging Face model folder. It gives the
same ids as transformers, with one difference on purpose: a special token that is merely spelled in
a message of a chat stays text (see ``chat_messages``). A plain text prompt is the whole prompt, in
the caller's hands, and its special tokens count, as everywhere.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import normalizers

from deepinfer.frontend.chat_messages import SENTINEL, SpecialGuard, check_messages, check_plain
from deepinfer.frontend.chat_template import ChatTemplate, PromptError

__all__ = ["PromptError", "Tokenizer"]

_NAMED_SPECIALS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


class Tokenizer:
    """A model's tokenizer and chat templates.

    ``named_specials`` maps names such as ``bos_token`` to tokens. ``templates`` maps names to
    template sources; ``default`` is the usual one, ``tool_use`` is taken when a chat has tools.
    All methods may be called from several threads.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        named_specials: dict[str, str] | None = None,
        templates: dict[str, str] | None = None,
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        named = dict(named_specials or {})
        added = backend.get_added_tokens_decoder()
        known = {token.content for token in added.values() if token.special}
        backend.add_special_tokens([token for token in named.values() if token not in known])

        added = backend.get_added_tokens_decoder()
        specials = {i: token.content for i, token in added.items() if token.special}
        self.special_ids = frozenset(specials)
        """Ids that ``skip_special_tokens`` leaves out of the text."""
        vocab = backend.get_vocab(with_added_tokens=True)
        self.vocab_size = 1 + max(vocab.values(), default=-1)
        """One above the highest id. The model's own vocabulary may be smaller or larger."""
        self.max_token_chars = max(map(len, vocab), default=1)
        """Characters of the longest entry: a text of C characters has C / this many tokens or more
        (normalisers that shorten a text aside)."""
        self.bos_token_id = self._id_of(named.get("bos_token"))
        self.eos_token_id = self._id_of(named.get("eos_token"))

        self._guard = SpecialGuard(specials.values())
        self._templates = {
            name: ChatTemplate(source, named) for name, source in (templates or {}).items()
        }
        self._guarded_backend: tokenizers.Tokenizer | None = None

    @classmethod
    def from_folder(cls, path: str | Path) -> Tokenizer:
        """Read ``tokenizer.json`` and, where present, the configs and templates beside it.

        ``ValueError`` names the file that is missing or broken. A broken template does not matter
        before the first chat.
        """
        folder = Path(path)
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise ValueError(f"no tokenizer.json in {folder}")
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the package raises bare Exceptions
            raise ValueError(f"{file} is not a tokenizer: {error}") from error
        config = _read_json(folder / "tokenizer_config.json")
        # special_tokens_map.json is what older folders have; the config wins.
        named = _named_specials(_read_json(folder / "special_tokens_map.json"))
        named.update(_named_specials(config))
        return cls(backend, named, _read_templates(folder, config))

    @property
    def has_chat_template(self) -> bool:
        """Whether ``render_chat`` can work at all."""
        return bool(self._templates)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a text, with the model's BOS and the like if ``add_special_tokens``.

        The empty text gives no ids, or only those added. ``PromptError`` when ``text`` is no valid
        Unicode string.
        """
        return self._encode(self.backend, text, add_special_tokens).ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of ids; those that are not in the vocabulary have none."""
        return self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def piece(self, token_id: int) -> str | None:
        """Return the vocabulary entry of an id, before decoding; ``None`` when there is none."""
        return self.backend.id_to_token(token_id)

    def render_chat(
        self,
        messages: object,
        add_generation_prompt: bool = True,
        *,
        images: bool = False,
        **extra: Any,
    ) -> list[int]:
        """Return the prompt ids of a conversation.

        ``messages`` as in ``chat_messages.check_messages``, with ``images`` where the model takes
        some: the template writes its placeholder for each. ``extra`` are further names for the
        template (``tools``, ``enable_thinking`` …), plain JSON data. No BOS is added but the
        template's own. ``PromptError`` (a ``ValueError``) says in one line what is wrong with the
        conversation or the template.
        """
        # What it is given is looked at first, whatever the template is.
        checked = check_messages(messages, images=images)
        for name, value in extra.items():
            check_plain(name, value)
        template = self._template(bool(extra.get("tools")))
        if template.wants_parts:
            checked = check_messages(messages, images=images, as_parts=True)
        text = template.render(
            self._guard.guarded(checked),
            add_generation_prompt=bool(add_generation_prompt),
            extra={name: self._guard.guarded(value) for name, value in extra.items()},
        )
        if SENTINEL in text:
            ids = self._encode_guarded(text)
        else:
            ids = self.encode(text, add_special_tokens=False)
        if not ids:
            raise PromptError("the chat template rendered this conversation to nothing")
        return ids

    def _template(self, with_tools: bool) -> ChatTemplate:
        names = ("tool_use", "default") if with_tools else ("default",)
        for name in names:
            if name in self._templates:
                return self._templates[name]
        raise PromptError("this model has no chat template; give the prompt as text or token ids")

    def _encode_guarded(self, text: str) -> list[int]:
        """Encode a rendered chat with sentinels in it.

        Control tokens are looked for in the raw text, where a sentinel breaks the spelled ones;
        then the normalizer takes the sentinels out of the rest. One pass, so that prefix spaces
        and merges come out as if there had been no sentinel.
        """
        if self._guarded_backend is None:
            backend = copy.deepcopy(self.backend)
            remove = normalizers.Replace(SENTINEL, "")
            own = backend.normalizer
            backend.normalizer = normalizers.Sequence([remove] if own is None else [remove, own])
            self._guarded_backend = backend
        encoding = self._encode(self._guarded_backend, text, add_special_tokens=False)
        # Some vocabularies reach a special id from plain text (a unigram piece, a token that is
        # looked for after normalization). Then no encoding of this text is safe.
        for token_id, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            if token_id in self.special_ids and SENTINEL in text[start:end]:
                spelled = text[start:end].replace(SENTINEL, "")
                raise PromptError(f"messages must not spell the special token {spelled!r}")
        return encoding.ids

    def _encode(
        self, backend: tokenizers.Tokenizer, text: str, add_special_tokens: bool
    ) -> tokenizers.Encoding:
        if not isinstance(text, str):
            raise PromptError(f"the prompt text must be a string, got {type(text).__name__}")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise PromptError(
                f"the prompt holds a lone surrogate at character {error.start}"
            ) from error
        return backend.encode(text, add_special_tokens=add_special_tokens)

    def _id_of(self, token: str | None) -> int | None:
        return None if token is None else self.backend.token_to_id(token)


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file} must hold a JSON object")
    return content


def _named_specials(config: dict[str, Any]) -> dict[str, str]:
    named = {}
    for name in _NAMED_SPECIALS:
        token = config.get(name)
        if isinstance(token, dict):
            token = token.get("content")
        if isinstance(token, str) and token:
            named[name] = token
    return named


def _read_templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Collect the templates; a file of its own wins over the configs."""
    templates: dict[str, str] = {}
    for found in (
        _read_json(folder / "chat_template.json").get("chat_template"),
        config.get("chat_template"),
    ):
        if isinstance(found, str):
            templates["default"] = found
        elif isinstance(found, list):
            for entry in found:
                if isinstance(entry, dict) and isinstance(entry.get("template"), str):
                    templates[str(entry.get("name"))] = entry["template"]
    files = [
        folder / "chat_template.jinja",
        *(folder / "additional_chat_templates").glob("*.jinja"),
    ]
    for file in files:
        if file.is_file():
            name = "default" if file.parent == folder else file.stem
            templates[name] = file.read_text(encoding="utf-8")
    return templates
