"""What a conversation must look like, and how its strings are kept from speaking as the template.

A template writes control tokens such as ``<|im_end|>`` around the messages. A message that merely
spells one must stay text, or any user could end his turn and begin another's. ``SpecialGuard``
puts a sentinel character inside each spelled special token before the template sees it. What the
template itself writes has no sentinel and still becomes a control token; the tokenizer removes the
sentinels after it has looked for control tokens.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from deepinfer.frontend.chat_template import PromptError
from deepinfer.wire.checks import shown

SENTINEL = "\ufdd1"
"""A Unicode noncharacter: reserved for a program's own use, never part of text."""

MAX_DEPTH = 32

_ROLE = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_JSON_SCALARS = (str, int, float, bool, type(None))


def check_messages(messages: object) -> list[dict[str, Any]]:
    """Return a copy of a conversation for a text-only model, in the form templates expect.

    Each message is a dict with a ``role`` and a ``content``: a string, or a list of
    ``{"type": "text", "text": …}`` parts, which are joined by newlines. An assistant message with
    ``tool_calls`` may go without content. Fields that are ``None`` are left out. ``PromptError``
    names the message and the field otherwise.
    """
    if not isinstance(messages, list | tuple):
        raise PromptError(f"messages must be a list of messages, got {shown(messages)}")
    if not messages:
        raise PromptError("messages must not be empty")
    return [_check_message(f"messages[{i}]", message) for i, message in enumerate(messages)]


def check_plain(where: str, value: object, depth: int = 0) -> None:
    """Raise ``PromptError`` unless ``value`` is plain JSON data, at most 32 levels deep.

    Objects of other types would bring methods into the template's reach.
    """
    if depth > MAX_DEPTH:
        raise PromptError(f"{where} is nested deeper than {MAX_DEPTH} levels")
    if type(value) in _JSON_SCALARS:
        return
    if type(value) is list or type(value) is tuple:
        for i, item in enumerate(value):
            check_plain(f"{where}[{i}]", item, depth + 1)
    elif type(value) is dict:
        for key, item in value.items():
            if type(key) is not str:
                raise PromptError(f"{where} has a key that is no string: {shown(key)}")
            check_plain(f"{where}.{key[:40]}", item, depth + 1)
    else:
        raise PromptError(f"{where} must be plain JSON data, got {type(value).__name__}")


def _check_message(where: str, message: object) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise PromptError(f"{where} must be a dict with role and content, got {shown(message)}")
    fields = {key: value for key, value in message.items() if value is not None}
    role = fields.get("role")
    # A role is copied between the template's own characters, so it may not bring others.
    if not isinstance(role, str) or not _ROLE.fullmatch(role):
        raise PromptError(f"{where}.role must be a short word such as 'user', got {shown(role)}")
    if "content" in fields:
        fields["content"] = _joined_text(f"{where}.content", fields["content"])
    elif role != "assistant" or not fields.get("tool_calls"):
        raise PromptError(f"{where}.content must be a string, got None")
    check_plain(where, fields)
    return fields


def _joined_text(where: str, content: object) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        raise PromptError(f"{where} must be a string, got {shown(content)}")
    texts = []
    for i, part in enumerate(content):
        if not isinstance(part, dict) or not isinstance(part.get("type"), str):
            raise PromptError(f"{where}[{i}] must be a dict with a type, got {shown(part)}")
        if part["type"] != "text":
            raise PromptError(
                f"{where}[{i}] has type {shown(part['type'])}, but this model takes text only"
            )
        if not isinstance(part.get("text"), str):
            raise PromptError(f"{where}[{i}].text must be a string, got {shown(part.get('text'))}")
        texts.append(part["text"])
    return "\n".join(texts)


class SpecialGuard:
    """Breaks the special tokens that user strings spell.

    A sentinel goes behind the first character of each spelled special token, also of overlapping
    ones. It also goes to an edge of a string that could make a special token together with what
    the template writes beside it (``…<|im_`` before ``end|>``). Strings that spell none are not
    touched, so that templates see them as they are.

    Special tokens of one character cannot be broken and are not guarded.
    """

    def __init__(self, special_tokens: Iterable[str]) -> None:
        self._tokens = frozenset(token for token in special_tokens if len(token) > 1)
        self._prefixes = frozenset(t[:k] for t in self._tokens for k in range(1, len(t)))
        self._suffixes = frozenset(t[k:] for t in self._tokens for k in range(1, len(t)))
        lengths: dict[str, set[int]] = {}
        for token in self._tokens:
            lengths.setdefault(token[0], set()).add(len(token))
        self._lengths = {first: sorted(found) for first, found in lengths.items()}
        self._longest = max(map(len, self._tokens), default=0)
        firsts = "".join(map(re.escape, self._lengths))
        self._candidate = re.compile(f"[{firsts}]" if firsts else "(?!)")

    def guarded(self, value: Any) -> Any:
        """Return JSON data with the sentinels in it: in all strings, also the keys of dicts."""
        if isinstance(value, str):
            return self._guarded_text(value)
        if isinstance(value, dict):
            return {self._guarded_text(key): self.guarded(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.guarded(item) for item in value]
        return value

    def _guarded_text(self, text: str) -> str:
        if SENTINEL in text:
            raise PromptError("messages must not hold the noncharacter U+FDD1")
        cuts = [m.end() for m in self._candidate.finditer(text) if self._starts(text, m.start())]
        # The template may strip white space, so the edges are those of the stripped text.
        start = len(text) - len(text.lstrip())
        end = len(text.rstrip())
        reach = min(self._longest, end - start + 1)
        if any(text[start : start + k] in self._suffixes for k in range(1, reach)):
            cuts.insert(0, start)
        if any(text[end - k : end] in self._prefixes for k in range(1, reach)):
            cuts.append(end)
        if not cuts:
            return text
        cuts.sort()
        bounds = [0, *cuts, len(text)]
        return SENTINEL.join(text[a:b] for a, b in zip(bounds, bounds[1:], strict=False))

    def _starts(self, text: str, at: int) -> bool:
        return any(text[at : at + n] in self._tokens for n in self._lengths[text[at]])
