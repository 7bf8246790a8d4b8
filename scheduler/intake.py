"""What a client may ask for: every check that turns an ``AddRequest`` away before it is a sequence.

A frontend checks most of this itself; a raw client is not trusted to.
"""

from __future__ import annotations

import math

import numpy as np

from deepinfer.wire.checks import shown
from deepinfer.wire.columns import unpack_int32
from deepinfer.wire.messages import (
    MAX_IMAGE_BYTES,
    MAX_IMAGE_URL_CHARS,
    MAX_IMAGES,
    MAX_REQUEST_ID_CHARS,
    MAX_SALT_CHARS,
    MAX_USER_ID_CHARS,
    MAX_WEIGHT,
    MIN_WEIGHT,
    AddRequest,
)

MAX_PRIORITY = 1_000_000
MAX_HELD_BYTES = 512 << 20
"""Files of images that requests without an end may hold, before others with images are refused."""
MAX_KEY = (1 << 32) - 1


class BadRequest(ValueError):
    """A field of a request is not acceptable."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


def check_request(add: AddRequest, vocab_size: int) -> None:
    """Raise ``BadRequest`` naming the first field that is not acceptable, its value and limit."""
    _within("key", add.key, 0, MAX_KEY)
    if not add.request_id:
        raise BadRequest("request_id", "request_id must not be empty")
    _short("request_id", add.request_id, MAX_REQUEST_ID_CHARS)
    _short("user_id", add.user_id, MAX_USER_ID_CHARS)
    _short("salt", add.salt, MAX_SALT_CHARS)
    _within("priority", add.priority, -MAX_PRIORITY, MAX_PRIORITY)
    _within("weight", add.weight, MIN_WEIGHT, MAX_WEIGHT)
    if add.timeout_ms is not None and not (math.isfinite(add.timeout_ms) and add.timeout_ms > 0):
        raise BadRequest(
            "timeout_ms", f"timeout_ms must be finite and above 0, got {add.timeout_ms}"
        )
    if not add.prompt:
        raise BadRequest("prompt", "prompt must hold at least one token")
    _check_tokens("prompt", add.prompt, vocab_size)
    _check_tokens("output", add.output, vocab_size)
    _check_params(add, vocab_size)


def check_images(add: AddRequest, placeholder: int, *, urls: bool, why: str = "") -> None:
    """Raise ``BadRequest`` unless each placeholder in the prompt has its image.

    ``placeholder`` is -1 when the engine takes none, ``why`` not, if that is known; ``urls`` says
    whether images may be fetched.
    """
    if placeholder < 0:
        raise BadRequest("images", "images are not taken by this engine" + (why and f": {why}"))
    if len(add.images) > MAX_IMAGES:
        raise BadRequest(
            "images", f"images may be at most {MAX_IMAGES} in a request, got {len(add.images)}"
        )
    if (size := sum(len(image.data) for image in add.images)) > MAX_IMAGE_BYTES:
        raise BadRequest(
            "images", f"images may have at most {MAX_IMAGE_BYTES} bytes together, got {size}"
        )
    for index, image in enumerate(add.images):
        if not image.url:
            continue
        _short(f"images[{index}].url", image.url, MAX_IMAGE_URL_CHARS)
        if image.data:
            raise BadRequest("images", f"images[{index}] must be data or a URL, got both")
        if not urls:
            raise BadRequest(
                "images", f"images[{index}] is a URL, and this engine fetches none: see image_urls"
            )
    if add.images and add.params.prompt_logprobs is not None:
        raise BadRequest("prompt_logprobs", "prompt_logprobs cannot be had for images")
    positions = np.flatnonzero(unpack_int32(add.prompt) == placeholder).tolist()
    if positions != [image.position for image in add.images]:
        raise BadRequest(
            "images",
            f"images must stand where the prompt has the token {placeholder}: {len(add.images)} "
            f"images for {len(positions)} of it",
        )


def _check_params(add: AddRequest, vocab_size: int) -> None:
    params = add.params
    try:
        params.check_vocabulary(vocab_size)
    except ValueError as error:
        raise BadRequest(str(error).partition(" ")[0], str(error)) from error
    if params.seed is None:
        raise BadRequest("seed", "seed must be set; a client draws one when its user gave none")
    if params.n != 1:
        raise BadRequest("n", f"n must be 1 in a single request, got {params.n}")
    for word in params.bad_words or ():
        if isinstance(word, str):
            raise BadRequest(
                "bad_words", f"bad_words must be lists of token ids, got {shown(word)}"
            )
    if len(add.output) // 4 > params.max_tokens:
        raise BadRequest(
            "output",
            f"output may hold at most max_tokens = {params.max_tokens} tokens, "
            f"got {len(add.output) // 4}",
        )


def _check_tokens(field: str, column: bytes, vocab_size: int) -> None:
    if len(column) % 4:
        raise BadRequest(field, f"{field} must be an int32 column, got {len(column)} bytes")
    if not column:
        return
    ids = unpack_int32(column)
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocab_size:
        raise BadRequest(
            field,
            f"{field} must hold token ids in 0 to {vocab_size - 1}, got {low if low < 0 else high}",
        )


def _short(field: str, text: str, limit: int) -> None:
    if len(text) > limit:
        raise BadRequest(field, f"{field} may have at most {limit} characters, got {len(text)}")


def _within(field: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise BadRequest(field, f"{field} must be between {low} and {high}, got {value}")
