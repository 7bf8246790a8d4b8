"""What a conversation must look like, and how its strings are kept from speaking as the template.

A template writes control tokens such as ``<|im_end|>`` around the messages. A message that merely
spells one must stay text, or any user could end his turn and begin another's. ``SpecialGuard``
puts a sentinel character inside each spelled special token before the template sees it. What the
template itself writes has no sentinel and still becomes a control token; the tokenizer removes the
sentinels after it has looked for control tokens.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from deepinfer.frontend.chat_template import PromptError
from deepinfer.frontend.images import NEXT
from deepinfer.wire.checks import shown

SENTINEL = "\ufdd1"
"""A Unicode noncharacter: reserved for a program's own use, never part of text."""

MAX_DEPTH = 32
IMAGE = "image"
"""The type of an image part, as templates know it."""

_ROLE = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_JSON_SCALARS = (str, int, float, bool, type(None))


def check_messages(
    messages: object, *, images: bool = False, as_parts: bool = False
) -> list[dict[str, Any]]:
    """Return a copy of a conversation in the form templates expect.

    Each message is a dict with a ``role`` and a ``content``: a string, or a list of
    ``{"type": "text", "text": …}`` parts, and, for a model that takes ``images``, image parts (see
    ``inline_images``). Templates get strings, the texts of parts joined by newlines; or lists of
    parts everywhere, where there is an image or the template wants them (``as_parts``). An
    assistant message with ``tool_calls`` may go without content. Fields that are ``None`` are left
    out. ``PromptError`` names the message and the field otherwise.
    """
    if not isinstance(messages, list | tuple):
        raise PromptError(f"messages must be a list of messages, got {shown(messages)}")
    if not messages:
        raise PromptError("messages must not be empty")
    checked = [
        _check_message(f"messages[{i}]", message, images) for i, message in enumerate(messages)
    ]
    contents = [message["content"] for message in checked if "content" in message]
    as_parts |= any(part["type"] == IMAGE for content in contents for part in content)
    for message in checked:
        if "content" in message and not as_parts:
            message["content"] = "\n".join(part["text"] for part in message["content"])
    return checked


def inline_images(messages: list[Any]) -> list[Any]:
    """Return the images of a conversation that was checked, in their order.

    An image part is OpenAI's ``{"type": "image_url", "image_url": {"url": …}}``, or
    ``{"type": "image", "image": …}`` with anything that is an image in ``multi_modal_data``; one
    without is the next of those: ``NEXT``.
    """
    found = []
    for message in messages:
        content = message.get("content")
        for part in content if isinstance(content, list | tuple) else ():
            if part["type"] == "image_url":
                given = part["image_url"]
                found.append(given["url"] if isinstance(given, dict) else given)
            elif part["type"] == IMAGE:
                found.append(part.get("image", NEXT))
    return found


def text_length(messages: Sequence[Any]) -> int:
    """Return how many characters of text the contents of a conversation have, at least."""
    length = 0
    for message in messages:
        content = message.get("content") if isinstance(message, dict) else None
        for part in content if isinstance(content, list | tuple) else [{"text": content}]:
            text = part.get("text") if isinstance(part, dict) else None
            length += len(text) if isinstance(text, str) else 0
    return length


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


def _check_message(where: str, message: object, images: bool) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise PromptError(f"{where} must be a dict with role and content, got {shown(message)}")
    fields = {key: value for key, value in message.items() if value is not None}
    role = fields.get("role")
    # A role is copied between the template's own characters, so it may not bring others.
    if not isinstance(role, str) or not _ROLE.fullmatch(role):
        raise PromptError(f"{where}.role must be a short word such as 'user', got {shown(role)}")
    if "content" in fields:
        fields["content"] = _check_content(f"{where}.content", fields["content"], images)
    elif role != "assistant" or not fields.get("tool_calls"):
        raise PromptError(f"{where}.content must be a string, got None")
    check_plain(where, fields)
    return fields


def _check_content(where: str, content: object, images: bool) -> list[dict[str, str]]:
    """Return the parts of a message; images have nothing but their place."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list | tuple):
        raise PromptError(f"{where} must be a string, got {shown(content)}")
    parts = []
    for i, part in enumerate(content):
        if not isinstance(part, dict) or not isinstance(part.get("type"), str):
            raise PromptError(f"{where}[{i}] must be a dict with a type, got {shown(part)}")
        if part["type"] == "text":
            if not isinstance(part.get("text"), str):
                text = shown(part.get("text"))
                raise PromptError(f"{where}[{i}].text must be a string, got {text}")
            parts.append({"type": "text", "text": part["text"]})
        elif images and part["type"] in (IMAGE, "image_url"):
            _check_image(f"{where}[{i}]", part)
            parts.append({"type": IMAGE})
        else:
            takes = "text and images" if images else "text"
            raise PromptError(
                f"{where}[{i}] has type {shown(part['type'])}, but this model takes {takes} only"
            )
    return parts


def _check_image(where: str, part: dict[str, Any]) -> None:
    if part["type"] != "image_url":
        return
    given = part.get("image_url")
    url = given.get("url") if isinstance(given, dict) else given
    if not isinstance(url, str):
        raise PromptError(f"{where}.image_url must be an object with a url, got {shown(given)}")


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
        if isinstance(value, dict) and value.get("type") in ("text", IMAGE) and len(value) < 3:
            # A part of a content: a template looks for its type by name.
            return {key: self.guarded(v) if key == "text" else v for key, v in value.items()}
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
