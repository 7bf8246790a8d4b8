"""Images as users give them, made into what travels to an engine: files and URLs.

Nothing is decoded here: that is for the image workers, where a picture can do no harm.
"""

from __future__ import annotations

import base64
import binascii
import io
from collections.abc import Sequence
from typing import Any

import numpy as np

from deepinfer.wire.checks import shown
from deepinfer.wire.messages import MAX_IMAGE_URL_CHARS, ImageInput, ImageRef

NEXT = object()
"""In a conversation's images: the next one of ``multi_modal_data``."""

_SPACE = b" \t\r\n"


def images_of(multi_modal_data: object) -> list[Any]:
    """Return the images in ``{"image": [...]}``; one alone may stand there without a list."""
    if multi_modal_data is None:
        return []
    if not isinstance(multi_modal_data, dict) or not multi_modal_data.keys() <= {"image"}:
        got = shown(multi_modal_data)
        if isinstance(multi_modal_data, dict):
            got = f"the key {shown(next(key for key in multi_modal_data if key != 'image'))}"
        raise ValueError(f'multi_modal_data must be a dict such as {{"image": [...]}}, got {got}')
    images = multi_modal_data.get("image", [])
    return list(images) if isinstance(images, list | tuple) else [images]


def in_order(inline: Sequence[Any], given: list[Any]) -> list[Any]:
    """Return the images of a conversation, with those of ``multi_modal_data`` in their places."""
    wanted = sum(image is NEXT for image in inline)
    if wanted != len(given):
        raise ValueError(
            f"multi_modal_data must hold an image for each image part without one: {wanted} parts, "
            f"{len(given)} images"
        )
    left = iter(given)
    return [next(left) if image is NEXT else image for image in inline]


def image_refs(images: Sequence[Any], limits: ImageInput) -> list[ImageRef]:
    """Return what is sent for images; their positions are not set.

    An image is the bytes of a file, a ``data:`` or ``http(s):`` URL, a PIL image, or a uint8 array
    [H, W, 3]. ``ValueError`` names the image that is none, or the limit.
    """
    if len(images) > limits.max_images:
        raise ValueError(f"a request may have {limits.max_images} images, got {len(images)}")
    refs: list[ImageRef] = []
    size = 0
    for index, image in enumerate(images):
        try:
            refs.append(_ref(image, limits))
        except ValueError as error:
            raise ValueError(f"image {index}: {error}") from error
        size += len(refs[-1].data)
        if size > limits.max_bytes:
            raise ValueError(
                f"image {index}: the images of a request may have {limits.max_bytes} bytes together"
            )
    return refs


def _ref(image: Any, limits: ImageInput) -> ImageRef:
    if image is None:
        return ImageRef()  # the engine ends the request by what it has for images that failed
    if isinstance(image, bytes | bytearray | memoryview):
        return ImageRef(bytes(image))
    if isinstance(image, str):
        return _from_url(image, limits)
    if isinstance(image, np.ndarray):
        if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3 or not image.size:
            raise ValueError(
                f"an array must be uint8 [H, W, 3], got {image.dtype} {list(image.shape)}"
            )
        from PIL import Image  # only who has arrays needs it

        return ImageRef(_png(Image.fromarray(image)))
    if type(image).__module__.partition(".")[0] == "PIL" and hasattr(image, "save"):
        return ImageRef(_png(image))
    raise ValueError(
        "it must be the bytes of a file, a data: or http(s): URL, a PIL image or a uint8 array, "
        f"got {type(image).__name__}"
    )


def _from_url(url: str, limits: ImageInput) -> ImageRef:
    scheme = url[:6].lower()
    if scheme.startswith("data:"):
        return ImageRef(_from_data_url(url))
    if not scheme.startswith(("http:", "https:")):
        raise ValueError(f"a URL must begin with data: or http(s):, got {shown(url)}")
    if not limits.urls:
        raise ValueError("this engine fetches no URLs (image_urls): send a data: URL")
    if len(url) > MAX_IMAGE_URL_CHARS:
        raise ValueError(f"a URL may have {MAX_IMAGE_URL_CHARS} characters, got {len(url)}")
    return ImageRef(url=url)


def _from_data_url(url: str) -> bytes:
    head, comma, payload = url.partition(",")
    if not comma or not head.lower().endswith(";base64"):
        raise ValueError("a data: URL must hold base64: data:image/png;base64,…")
    try:
        return base64.b64decode(payload.encode("ascii").translate(None, _SPACE), validate=True)
    except (binascii.Error, UnicodeEncodeError):
        raise ValueError("its data: URL is no valid base64") from None


def _png(image: Any) -> bytes:
    """Return a picture as a file, every pixel as it is."""
    file = io.BytesIO()
    if image.mode not in ("1", "L", "LA", "I;16", "P", "RGB", "RGBA"):
        image = image.convert("RGB")
    image.save(file, "PNG", compress_level=1)
    return file.getvalue()
