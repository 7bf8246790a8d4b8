"""Decoding: odd files as transformers loads them, damaged and hostile ones as an error."""

from __future__ import annotations

import io
import tracemalloc
import zlib

import numpy as np
import pytest
from PIL import Image
from transformers.image_utils import load_image

from deepinfer.image_worker.decode import MAX_PIXELS, decode
from deepinfer.image_worker.errors import Deadline, ImageError
from support.pictures import (
    animated,
    bmp_size,
    chunk,
    gif_screen,
    gradient,
    hostile_files,
    jpeg_of_many_scans,
    png,
    png_bomb,
    saved,
    sound_files,
    text_bomb,
    turned,
    webp_canvas,
)


def decoded(data: bytes) -> Image.Image:
    return decode(data, Deadline(60))


def refused(data: bytes, match: str) -> None:
    with pytest.raises(ImageError, match=match):
        decoded(data)


@pytest.mark.filterwarnings("ignore:Palette images with Transparency")
@pytest.mark.parametrize("name", sound_files())
def test_an_odd_file_is_loaded_as_transformers_does(name: str) -> None:
    data = sound_files()[name]
    ours = decoded(data)
    assert ours.mode == "RGB"
    theirs = load_image(Image.open(io.BytesIO(data)))
    np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs))


def test_a_picture_is_turned_upright() -> None:
    assert decoded(turned(gradient(50, 30), 6)).size == (30, 50)


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG"])
def test_of_an_animation_the_first_frame_counts(kind: str) -> None:
    first = np.asarray(decoded(animated(kind))).astype(int)
    wanted = np.asarray(gradient(40, 30)).astype(int)
    assert np.abs(first - wanted).mean() < 12  # GIF has 256 colours, WebP loses a little


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "GIF", "WEBP", "BMP"])
@pytest.mark.parametrize("cut", [128, 1000])
def test_a_file_that_is_cut_off_is_an_error(kind: str, cut: int) -> None:
    noise = Image.effect_noise((200, 100), 90).convert("RGB")
    refused(saved(noise, kind)[:-cut], "damaged or cut off")


def test_a_wrong_checksum_is_an_error_wherever_it_is() -> None:
    whole = png(4, 4, zlib.compress(bytes(4 * 13)), extra=chunk(b"tEXt", b"a\0b"))
    decoded(whole)
    for kind in (b"IHDR", b"tEXt", b"IDAT"):
        at = whole.index(kind)
        end = at + 4 + int.from_bytes(whole[at - 4 : at], "big")
        broken = whole[:end] + bytes([whole[end] ^ 1]) + whole[end + 1 :]
        with pytest.raises(ImageError, match="damaged|no image that can be read"):
            decoded(broken)


@pytest.mark.parametrize(
    "data",
    [
        b"just text",
        b"\x89PNG\r\n\x1a\n",
        saved(gradient(30, 20), "TIFF"),
        saved(gradient(32, 32), "ICO"),
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n",
    ],
    ids=["text", "only a signature", "tiff", "ico", "postscript"],
)
def test_what_is_none_of_the_formats_says_which_there_are(data: bytes) -> None:
    refused(data, "no image that can be read: JPEG, PNG, GIF, WEBP, BMP")


@pytest.mark.parametrize(
    "data, match",
    [
        (png_bomb(40_000, 1001), "40000 x 1001 pixels, the limit is 40000000"),
        (png(40_000, 40_000, b""), "40000 x 40000 pixels"),
        (png(0x7FFFFFFF, 0x7FFFFFFF, b""), "2147483647 x 2147483647 pixels"),
        (webp_canvas(1 << 14, 1 << 14), "16384 x 16384 pixels"),
        (webp_canvas(1 << 24, 1 << 24), "16777216 x 16777216 pixels"),
        (gif_screen(65_535, 65_535), "65535 x 65535 pixels"),
        (bmp_size(30_000, 30_000), "30000 x 30000 pixels"),
        (jpeg_of_many_scans(300), "more than 256 scans"),
    ],
    ids=["png", "png header", "png 2**31", "webp", "webp 2**24", "gif", "bmp", "scans"],
)
def test_a_bomb_is_refused_from_its_header(data: bytes, match: str) -> None:
    tracemalloc.start()
    try:
        refused(data, match)
        assert tracemalloc.get_traced_memory()[1] < 8 * len(data) + (1 << 20)
    finally:
        tracemalloc.stop()


def test_packed_text_is_not_unpacked_without_a_limit() -> None:
    data = text_bomb()
    tracemalloc.start()
    try:
        refused(data, "damaged|no image")
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()


def test_the_limit_itself_is_allowed() -> None:
    data = saved(gradient(100, 100), "PNG")
    assert decode(data, Deadline(5), max_pixels=10_000).size == (100, 100)
    with pytest.raises(ImageError, match="100 x 100 pixels, the limit is 9999"):
        decode(data, Deadline(5), max_pixels=9_999)
    assert MAX_PIXELS >= 24_000_000, "photographs"


def test_decoding_ends_at_the_deadline() -> None:
    deadline = Deadline(1e-9)
    with pytest.raises(ImageError, match="longer than"):
        decode(saved(gradient(64, 64), "JPEG"), deadline)


def test_hostile_files_are_pictures_or_errors() -> None:
    outcomes = {"picture": 0, "error": 0}
    for data in hostile_files(200, seed=6):
        try:
            assert decode(data, Deadline(20)).mode == "RGB"
            outcomes["picture"] += 1
        except ImageError:
            outcomes["error"] += 1
    assert min(outcomes.values()) > 10, outcomes
