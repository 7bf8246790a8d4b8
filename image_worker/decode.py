"""From the bytes of a file to an RGB picture, with everything checked that can be before decoding.

As transformers' ``load_image`` does it: turned upright as EXIF says, then Pillow's ``convert`` to
RGB, which leaves transparency out. Of an animation or a file of several pictures, the first.
"""

from __future__ import annotations

import struct
import warnings
from io import BytesIO
from typing import NamedTuple

from PIL import Image, ImageOps, UnidentifiedImageError

from deepinfer.image_worker.errors import Deadline, ImageError

FORMATS = ("JPEG", "PNG", "GIF", "WEBP", "BMP")
"""What a file may hold; its content decides and no name or declared type."""

MAX_PIXELS = 40_000_000
BYTES_PER_PIXEL = 16
"""What decoding takes at most: Pillow's four for the decoded picture, for the upright one and for
the RGB one, and a margin for the decoder's own."""

# An ordinary progressive file has ten. Each makes the decoder walk over the whole picture again.
_MAX_JPEG_SCANS = 256
_JPEG_SCAN = b"\xff\xda"

# Pillow's own limit; this one is checked before and says what it is.
Image.MAX_IMAGE_PIXELS = None


class Size(NamedTuple):
    """Of a picture, in pixels."""

    width: int
    height: int


def decode(data: bytes, deadline: Deadline, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """Return the upright RGB picture; ``ImageError`` says why there is none."""
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        # The decoder takes memory for the canvas as soon as it is opened.
        _check_pixels(_webp_size(data), max_pixels)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of odd metadata; what matters is an error
            return _decoded(data, deadline, max_pixels)
    except ImageError:
        raise
    except UnidentifiedImageError:
        raise ImageError(f"it is no image that can be read: {', '.join(FORMATS)}") from None
    except MemoryError:
        raise ImageError("decoding it takes too much memory") from None
    except Exception as error:
        # Pillow's decoders raise nearly anything for a damaged file: OSError, SyntaxError,
        # ValueError, IndexError, struct.error, zlib.error, …
        raise ImageError("it is damaged or cut off") from error


def _decoded(data: bytes, deadline: Deadline, max_pixels: int) -> Image.Image:
    image: Image.Image = Image.open(_Watched(data, deadline), formats=FORMATS)
    _check_pixels(Size(*image.size), max_pixels)
    if image.format == "PNG":
        # Checksums of every part, which decoding looks at for some only. It uses up the object.
        image.verify()
        image = Image.open(_Watched(data, deadline), formats=FORMATS)
    elif image.format in ("JPEG", "MPO") and data.count(_JPEG_SCAN) > _MAX_JPEG_SCANS:
        raise ImageError(f"it has more than {_MAX_JPEG_SCANS} scans")
    image.load()
    deadline.check()
    upright = ImageOps.exif_transpose(image)
    del image
    return upright.convert("RGB")


def _check_pixels(size: Size, max_pixels: int) -> None:
    if size.width < 1 or size.height < 1:
        raise ImageError(f"it has {size.width} x {size.height} pixels")
    if size.width * size.height > max_pixels:
        raise ImageError(
            f"it has {size.width} x {size.height} pixels, the limit is {max_pixels} altogether"
        )


def _webp_size(data: bytes) -> Size:
    """The canvas a WebP file's first part declares (RFC 9649)."""
    kind, part = data[12:16], data[20:30]
    if len(part) < 10:
        raise ImageError("it is damaged or cut off")
    if kind == b"VP8X":
        return Size(
            1 + int.from_bytes(part[4:7], "little"), 1 + int.from_bytes(part[7:10], "little")
        )
    if kind == b"VP8L":
        (bits,) = struct.unpack_from("<I", part, 1)
        return Size(1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF))
    width, height = struct.unpack_from("<HH", part, 6)
    return Size(width & 0x3FFF, height & 0x3FFF)


class _Watched(BytesIO):
    """A file that is not read past the deadline: Pillow decodes in pieces."""

    def __init__(self, data: bytes, deadline: Deadline) -> None:
        super().__init__(data)
        self._deadline = deadline

    def read(self, size: int | None = -1, /) -> bytes:
        self._deadline.check()
        return super().read(size)
