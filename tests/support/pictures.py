"""Files of pictures: sound ones, odd ones and hostile ones."""

from __future__ import annotations

import io
import random
import struct
import zlib
from typing import Any

from PIL import Image

_ORIENTATION = 0x0112


def saved(image: Image.Image, kind: str, **options: Any) -> bytes:
    """The file of a picture."""
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def gradient(width: int, height: int, mode: str = "RGB") -> Image.Image:
    """A picture that compresses and has no two equal corners."""
    bands = [
        Image.linear_gradient("L").rotate(90 * turn).resize((width, height))
        for turn in range(len(mode))
    ]
    return Image.merge(mode, bands) if len(mode) > 1 else bands[0]


def turned(image: Image.Image, orientation: int) -> bytes:
    """A JPEG file that says how it is to be turned."""
    exif = Image.Exif()
    exif[_ORIENTATION] = orientation
    return saved(image, "JPEG", exif=exif)


def animated(kind: str, frames: int = 3, size: tuple[int, int] = (40, 30)) -> bytes:
    """An animation whose first frame is ``gradient``."""
    others = [Image.new("RGB", size, (50 * frame, 0, 0)) for frame in range(1, frames)]
    return saved(gradient(*size), kind, save_all=True, append_images=others)


def png(width: int, height: int, data: bytes, *, colour: int = 2, extra: bytes = b"") -> bytes:
    """A PNG file of these compressed bytes, whatever they hold, with ``extra`` chunks before."""
    header = struct.pack(">IIBBBBB", width, height, 8, colour, 0, 0, 0)
    start = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header)
    return start + extra + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def chunk(kind: bytes, data: bytes) -> bytes:
    """A chunk of a PNG file."""
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png_bomb(width: int, height: int) -> bytes:
    """A sound PNG file of one colour, made without its pixels at once."""
    packer = zlib.compressobj(9)
    rows = b"".join(packer.compress(bytes(1 + width)) for _ in range(height)) + packer.flush()
    return png(width, height, rows, colour=0)


def text_bomb() -> bytes:
    """A PNG file with a text chunk that unpacks to a hundred megabytes."""
    packed = zlib.compress(bytes(100 << 20), 9)
    extra = chunk(b"zTXt", b"Comment\0\0" + packed) + chunk(b"iCCP", b"name\0\0" + packed)
    return png(4, 4, zlib.compress(bytes(4 * 13)), extra=extra)


def jpeg_of_many_scans(count: int) -> bytes:
    """A progressive JPEG file whose last scan stands there again and again."""
    whole = saved(gradient(600, 400), "JPEG", progressive=True)
    start = whole.rindex(b"\xff\xda")
    return whole[:-2] + whole[start:-2] * count + whole[-2:]


def webp_canvas(width: int, height: int) -> bytes:
    """An animated WebP file that declares another canvas than it has."""
    whole = bytearray(animated("WEBP"))
    at = whole.index(b"VP8X") + 12
    whole[at : at + 6] = (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    return bytes(whole)


def gif_screen(width: int, height: int) -> bytes:
    """A GIF file that declares another screen than it has."""
    whole = bytearray(animated("GIF"))
    struct.pack_into("<HH", whole, 6, width, height)
    return bytes(whole)


def bmp_size(width: int, height: int) -> bytes:
    """A BMP file that declares another size than it has."""
    whole = bytearray(saved(gradient(20, 10), "BMP"))
    struct.pack_into("<ii", whole, 18, width, height)
    return bytes(whole)


def sound_files() -> dict[str, bytes]:
    """Odd files that are sound: what each decodes to is what Pillow makes of it."""
    palette = gradient(50, 40).convert("P", palette=Image.Palette.ADAPTIVE)
    files = {
        "jpeg": saved(gradient(64, 48), "JPEG"),
        "progressive": saved(gradient(64, 48), "JPEG", progressive=True),
        "cmyk": saved(gradient(60, 30, "CMYK"), "JPEG"),
        "grey": saved(gradient(33, 44, "L"), "PNG"),
        "grey and alpha": saved(gradient(33, 44, "LA"), "PNG"),
        "16 bit": saved(gradient(33, 44, "L").convert("I;16"), "PNG"),
        "1 bit": saved(gradient(33, 44, "L").convert("1"), "PNG"),
        "alpha": saved(gradient(33, 44, "RGBA"), "PNG"),
        "palette": saved(palette, "PNG"),
        "palette and alpha": saved(palette, "PNG", transparency=bytes(range(0, 250, 2))),
        "interlaced": saved(gradient(33, 44), "PNG"),
        "webp": saved(gradient(40, 40), "WEBP"),
        "webp lossless and alpha": saved(gradient(40, 40, "RGBA"), "WEBP", lossless=True),
        "bmp": saved(gradient(21, 10), "BMP"),
        "animated gif": animated("GIF"),
        "animated webp": animated("WEBP"),
        "animated png": animated("PNG"),
        "one pixel": saved(gradient(1, 1), "PNG"),
        "tall": saved(gradient(1, 20000), "PNG"),
        "wide": saved(gradient(20000, 1), "PNG"),
    }
    return files | {f"turned {way}": turned(gradient(50, 30), way) for way in range(1, 10)}


def hostile_files(count: int, seed: int) -> list[bytes]:
    """Files that are cut, changed, mixed or lie about themselves; the same for the same seed."""
    generator = random.Random(seed)
    sound = list(sound_files().values())
    liars = [
        png_bomb(40_000, 4_000),
        png(1 << 31, 1, b""),
        png(0x7FFFFFFF, 0x7FFFFFFF, zlib.compress(b"")),
        png(6000, 6000, zlib.compress(bytes(1000))),
        text_bomb(),
        jpeg_of_many_scans(1000),
        webp_canvas(1 << 14, 1 << 14),
        webp_canvas(1 << 24, 1 << 24),
        gif_screen(65_535, 65_535),
        gif_screen(5000, 5000),
        bmp_size(30_000, 30_000),
        bmp_size(5000, 5000),
        bmp_size(-5, -5),
        b"",
        b"GIF89a",
        b"\x89PNG\r\n\x1a\n",
        b"\xff\xd8\xff",
        b"RIFF\xff\xff\xff\xffWEBPVP8X",
        b"just some text, whatever its name says",
        b"<svg xmlns='http://www.w3.org/2000/svg'/>",
        b"%!PS-Adobe-3.0 EPSF-3.0\n",
        saved(gradient(30, 20), "TIFF"),
        saved(gradient(32, 32), "ICO"),
        saved(gradient(30, 20), "PPM"),
    ]

    def changed() -> bytes:
        data = bytearray(generator.choice(sound))
        way = generator.randrange(5)
        if way == 0:
            return bytes(data[: generator.randrange(len(data))])
        if way == 1:
            return bytes(data[: max(1, len(data) - 128)])
        if way == 2:
            other = generator.choice(sound)
            at = generator.randrange(min(len(data), len(other)))
            return bytes(data[:at]) + other[at:]
        reach = 64 if way == 3 else len(data)
        for _ in range(generator.randrange(1, 20)):
            data[generator.randrange(min(reach, len(data)))] = generator.randrange(256)
        return bytes(data)

    return liars + [changed() for _ in range(count - len(liars))]
