"""Token ids to text, one by one.

``tokenizers`` decodes a whole list through a chain of decoders. Here each of them is a stage that
passes on what can no longer change and keeps the rest, so that the deltas joined are exactly what
the whole list decodes to, in time linear in its length. (``tokenizers.decoders.DecodeStream`` drops
the tail, raises on some byte runs, loses or adds characters where a decoder looks at positions, and
takes quadratic time on bytes that never become a character.)
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Protocol

from tokenizers import decoders

from deepinfer.frontend.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"


class Detokenizer:
    """The text of one output, as it grows.

    For every list of ids ``"".join(map(push, ids)) + finish()`` equals
    ``tokenizer.decode(ids, skip_special_tokens)``. Held back is only what the next token can
    change: at most 3 bytes of an unfinished character or, where bytes have tokens of their own
    (byte fallback), the run of byte tokens that is valid so far, since one invalid byte turns the
    whole run into replacement characters.

    ``ValueError`` when the tokenizer has a decoder that no generative model uses (CTC, …).
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._piece = tokenizer.piece
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._stages = _stages_of(tokenizer)

    def push(self, token_id: int) -> str:
        """Return the text that is certain now and was not before; often empty."""
        if token_id in self._skipped:
            return ""
        piece = self._piece(token_id)
        if piece is None:
            return ""
        pieces = [piece]
        for stage in self._stages:
            pieces = stage.push(pieces)
        return "".join(pieces)

    def finish(self) -> str:
        """Return the rest: what an unfinished character decodes to when nothing follows."""
        pieces: list[str] = []
        for stage in self._stages:
            pieces = stage.push(pieces) + stage.finish()
        return "".join(pieces)


def bytes_of_token(tokenizer: Tokenizer, token_id: int) -> bytes:
    """The bytes one token stands for in the middle of a text, special tokens too.

    Together, those of an output are the UTF-8 of its text, but for what a decoder does to the whole
    (a leading space taken off). Empty for ids outside the vocabulary.
    """
    piece = tokenizer.piece(token_id)
    if piece is None:
        return b""
    decoder = tokenizer.backend.decoder
    kinds = _kinds(json.loads(decoder.__getstate__())) if decoder is not None else []
    if token_id in tokenizer.special_ids or decoder is None:
        return piece.encode()
    if "ByteLevel" in kinds:
        return _bytes_of_piece(piece)
    if "ByteFallback" in kinds and (byte := _ByteFallback.byte(piece)) is not None:
        return byte
    before = decoder.decode(["a"])
    text: str = decoder.decode(["a", piece])
    return text.removeprefix(before).encode()


def _kinds(spec: dict[str, Any]) -> list[str]:
    """The types of a decoder's parts."""
    return [part["type"] for part in spec.get("decoders", [spec])]


class _Stage(Protocol):
    def push(self, pieces: list[str]) -> list[str]: ...

    def finish(self) -> list[str]: ...


def _stages_of(tokenizer: Tokenizer) -> list[_Stage]:
    decoder = tokenizer.backend.decoder
    if decoder is None:
        return [_ByPosition(lambda piece: piece, lambda piece: " " + piece)]
    spec = json.loads(decoder.__getstate__())
    stages: list[_Stage] = []
    # After Fuse or ByteLevel the pieces are parts of one text rather than one text per token.
    one_text = False
    for part in spec["decoders"] if spec["type"] == "Sequence" else [spec]:
        kind = part["type"]
        if kind == "ByteLevel" and not one_text:
            stages.append(_ByteLevel())
            one_text = True
        elif kind == "ByteFallback" and not one_text:
            stages.append(_ByteFallback())
        elif kind == "Fuse":
            one_text = True
        elif kind == "Strip" and part["stop"] == 0:
            stages.append(_StripStart(part["content"], part["start"], one_text))
        elif kind == "Replace" and _replaces_a_string(part, one_text):
            stages.append(_Replace(part["pattern"]["String"], part["content"]))
        elif kind in ("Metaspace", "WordPiece") and not one_text:
            decode = _decode_alone(part)
            # A decoder that tells the first token from the others takes "" for a first one.
            stages.append(
                _ByPosition(lambda p, d=decode: d([p]), lambda p, d=decode: d(["", p]))  # type: ignore[misc]
            )
        else:
            raise ValueError(f"the tokenizer's decoder has a part that cannot stream: {part}")
    return stages


def _replaces_a_string(part: dict[str, Any], one_text: bool) -> bool:
    pattern = part["pattern"].get("String")
    # A longer pattern could lie across two parts of one text.
    return bool(pattern) and (len(pattern) == 1 or not one_text)


def _decode_alone(spec: dict[str, Any]) -> Callable[[list[str]], str]:
    decoder = decoders.Fuse()
    decoder.__setstate__(json.dumps(spec).encode())
    return decoder.decode


class _ByPosition:
    """Each piece alone, the first one by another rule."""

    def __init__(self, first: Callable[[str], str], later: Callable[[str], str]) -> None:
        self._rule = first
        self._later = later

    def push(self, pieces: list[str]) -> list[str]:
        decoded = []
        for piece in pieces:
            decoded.append(self._rule(piece))
            self._rule = self._later
        return decoded

    def finish(self) -> list[str]:
        return []


class _Replace:
    def __init__(self, pattern: str, content: str) -> None:
        self._pattern = pattern
        self._content = content

    def push(self, pieces: list[str]) -> list[str]:
        return [piece.replace(self._pattern, self._content) for piece in pieces]

    def finish(self) -> list[str]:
        return []


class _StripStart:
    """Takes up to ``limit`` leading characters ``content`` off each piece, or off the one text."""

    def __init__(self, content: str, limit: int, one_text: bool) -> None:
        self._content = content
        self._limit = limit
        self._left = limit
        self._one_text = one_text

    def push(self, pieces: list[str]) -> list[str]:
        return [self._strip(piece) for piece in pieces]

    def finish(self) -> list[str]:
        return []

    def _strip(self, piece: str) -> str:
        if not self._one_text:
            self._left = self._limit
        cut = 0
        while self._left and cut < len(piece) and piece[cut] == self._content:
            cut += 1
            self._left -= 1
        if cut < len(piece):
            self._left = 0
        return piece[cut:]


def _byte_of_char() -> dict[str, int]:
    """The byte that each character of a byte-level vocabulary stands for (GPT-2's table).

    Printable bytes stand for themselves, the others are numbered from U+0100 on.
    """
    table = {chr(b): b for b in (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))}
    others = (byte for byte in range(256) if chr(byte) not in table)
    return table | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_CHAR = _byte_of_char()


@lru_cache(maxsize=1 << 15)
def _bytes_of_piece(piece: str) -> bytes:
    try:
        return bytes([_BYTE_OF_CHAR[char] for char in piece])
    except KeyError:
        return piece.encode()  # an added token: its text as it is


@lru_cache(maxsize=1 << 15)
def _text_of_piece(piece: str) -> str | None:
    """The text of a piece whose bytes are whole characters."""
    try:
        return _bytes_of_piece(piece).decode()
    except UnicodeDecodeError:
        return None


class _ByteLevel:
    """Pieces spell bytes; the bytes of all pieces together are UTF-8."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, pieces: list[str]) -> list[str]:
        unfinished, _ = self._decoder.getstate()
        if not unfinished:
            texts = [text for piece in pieces if (text := _text_of_piece(piece)) is not None]
            if len(texts) == len(pieces):
                return texts
        return [self._decoder.decode(b"".join(map(_bytes_of_piece, pieces)))]

    def finish(self) -> list[str]:
        return [self._decoder.decode(b"", True)]


class _ByteFallback:
    """Pieces like ``<0xE4>`` are bytes.

    A run of them becomes text when the whole run is valid UTF-8, and otherwise one replacement
    character per byte; so a run is kept until it ends or is certainly invalid.
    """

    def __init__(self) -> None:
        self._start_run()

    def push(self, pieces: list[str]) -> list[str]:
        decoded: list[str] = []
        for piece in pieces:
            byte = self.byte(piece)
            if byte is None:
                decoded += self.finish()
                decoded.append(piece)
            elif self._invalid:
                decoded.append(_REPLACEMENT)
            else:
                decoded += self._push_byte(byte)
        return decoded

    def finish(self) -> list[str]:
        """End the run."""
        run = [] if self._invalid else self._flush()
        self._start_run()
        return run

    def _start_run(self) -> None:
        self._decode = codecs.getincrementaldecoder("utf-8")("strict").decode
        self._chars: list[str] = []
        self._num_bytes = 0
        self._invalid = False

    def _push_byte(self, byte: bytes) -> list[str]:
        self._num_bytes += 1
        try:
            self._chars.append(self._decode(byte))
        except UnicodeDecodeError:
            self._invalid = True
            return [_REPLACEMENT] * self._num_bytes
        return []

    def _flush(self) -> list[str]:
        try:
            self._decode(b"", True)
        except UnicodeDecodeError:
            return [_REPLACEMENT] * self._num_bytes
        return self._chars

    @staticmethod
    def byte(piece: str) -> bytes | None:
        """The byte that a piece like ``<0xE4>`` spells."""
        if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            try:
                return bytes.fromhex(piece[3:5])
            except ValueError:
                return None
        return None
