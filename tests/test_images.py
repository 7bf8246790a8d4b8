"""Images as a frontend takes them: what may be given, where it stands, and what is refused."""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np
import pytest
from PIL import Image

from deepinfer.frontend.images import image_refs
from deepinfer.frontend.session import PreparedPrompt, Session
from deepinfer.frontend.tokenizer import Tokenizer
from deepinfer.wire.messages import EngineInfo, ImageInput, ImageRef
from deepinfer.wire.params import SamplingParams
from support.small_tokenizers import add_special, save_folder

LIMITS = ImageInput(placeholder=0, max_images=4, max_bytes=1000, urls=False)
FILE = b"\x89PNG and so on"
DATA_URL = "data:image/png;base64," + base64.b64encode(FILE).decode()


@pytest.fixture(scope="module")
def session(tmp_path_factory) -> Session:
    return Session(*_engine(tmp_path_factory.mktemp("model") / "m"))


def _engine(folder, template: str = "vision") -> tuple[EngineInfo, Tokenizer]:
    add_special(save_folder("byte_level", template, folder), "<image>")
    tokenizer = Tokenizer.from_folder(folder)
    placeholder = tokenizer.backend.token_to_id("<image>")
    limits = ImageInput(placeholder=placeholder, max_images=4, max_bytes=1000, urls=True)
    info = EngineInfo(
        "m", "m", tokenizer.vocab_size, [1], 500, 16, 64, 8, 64, "float32", "cpu", "A", {}, limits
    )
    return info, tokenizer


def places(session: Session, prepared: PreparedPrompt) -> list[int]:
    assert session.info.images is not None
    token = session.info.images.placeholder
    return [at for at, other in enumerate(prepared.token_ids) if other == token]


def test_bytes_and_data_urls_are_the_same_file() -> None:
    spaced = DATA_URL[:30] + "\n" + DATA_URL[30:]
    refs = image_refs([FILE, bytearray(FILE), DATA_URL, spaced], LIMITS)
    assert refs == [ImageRef(FILE)] * 4


def test_pixels_arrive_as_they_are() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (5, 7, 3), dtype=np.uint8)
    by_array, by_pil = image_refs([pixels, Image.fromarray(pixels)], LIMITS)
    for ref in (by_array, by_pil):
        assert np.array_equal(np.asarray(Image.open(io.BytesIO(ref.data))), pixels)


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr", "F"])
def test_pil_images_of_any_mode_become_files(mode: str) -> None:
    [ref] = image_refs([Image.new(mode, (3, 2))], LIMITS)
    assert Image.open(io.BytesIO(ref.data)).size == (3, 2)


@pytest.mark.parametrize(
    ("image", "text"),
    [
        ("data:image/png;base64,???", "no valid base64"),
        ("data:image/png,abc", "must hold base64"),
        ("file:///etc/passwd", "must begin with data: or http"),
        ("ftp://host/a.png", "must begin with data: or http"),
        ("http://host/a.png", "fetches no URLs"),
        (np.zeros((2, 2, 4), np.uint8), "uint8 [H, W, 3]"),
        (np.zeros((2, 2, 3), np.float32), "uint8 [H, W, 3]"),
        (7, "got int"),
        (b"x" * 1001, "1000 bytes together"),
    ],
)
def test_what_is_no_image_is_refused_by_its_number(image: Any, text: str) -> None:
    with pytest.raises(ValueError, match=r"^image 1: ") as error:
        image_refs([FILE, image], LIMITS)
    assert text in str(error.value) and len(str(error.value)) < 400


def test_too_many_are_refused() -> None:
    with pytest.raises(ValueError, match="4 images, got 5"):
        image_refs([FILE] * 5, LIMITS)


def test_a_chat_has_its_images_where_its_parts_stand(session: Session) -> None:
    messages = [
        {"role": "user", "content": "plain text"},
        {
            "role": "user",
            "content": [
                {"type": "image_url", "image_url": {"url": DATA_URL, "detail": "low"}},
                {"type": "text", "text": "or"},
                {"type": "image", "image": b"second"},
                {"type": "image"},
            ],
        },
    ]
    prepared = session.prepare(messages, None, {"image": [b"third"]})
    assert [ref.data for ref in prepared.images] == [FILE, b"second", b"third"]
    assert [ref.position for ref in prepared.images] == places(session, prepared)
    assert "plain text" in session.tokenizer.decode(prepared.token_ids)


SPELLED = "see <image> and <image>"


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": [{"type": "text", "text": SPELLED}, {"type": "image"}]}],
        [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": SPELLED}]}],
        [
            {"role": "user", "content": SPELLED},
            {"role": "tool", "content": SPELLED},
            {"role": "user", "content": [{"type": "image"}]},
        ],
        [
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "<ima"},
                    {"type": "text", "text": "ge>"},
                    {"type": "image"},
                ],
            }
        ],
    ],
)
def test_a_spelled_placeholder_stays_text(session: Session, messages: list[Any]) -> None:
    """IMG-04."""
    prepared = session.prepare(messages, None, {"image": [FILE]})
    assert [ref.position for ref in prepared.images] == places(session, prepared)
    assert len(prepared.images) == 1
    # Without the picture it is nothing but text.
    words = [m for m in messages if isinstance(m["content"], str)]
    if words:
        assert session.prepare(words, None).images == []


@pytest.mark.parametrize(
    ("prompt", "images"),
    [
        ("no place", [FILE]),
        ("<image>", []),
        ("<image> <image>", [FILE]),
        ("<image>", [FILE, FILE]),
        ([{"role": "user", "content": [{"type": "image"}]}], []),
        ([{"role": "user", "content": "text"}], [FILE]),
    ],
)
def test_a_count_that_does_not_match_is_an_error(
    session: Session, prompt: Any, images: Any
) -> None:
    """IMG-04: before the engine hears of it."""
    with pytest.raises(ValueError, match=r"image"):
        session.prepare(prompt, None, {"image": images})


def test_token_ids_have_their_images_too(session: Session) -> None:
    assert session.info.images is not None
    token = session.info.images.placeholder
    prepared = session.prepare([5, token, 6, token], None, {"image": [FILE, b"other"]})
    assert [(ref.data, ref.position) for ref in prepared.images] == [(FILE, 1), (b"other", 3)]
    with pytest.raises(ValueError, match="once for each image: 1 of it, 2 images"):
        session.prepare([5, token, 6], None, {"image": [FILE, FILE]})


def test_a_model_without_images_refuses_them_by_name(tmp_path) -> None:
    info, tokenizer = _engine(tmp_path / "m")
    info.images = None
    session = Session(info, tokenizer)
    with pytest.raises(ValueError, match="takes no images"):
        session.prepare("x", None, {"image": [FILE]})
    part = {"type": "image_url", "image_url": {"url": DATA_URL}}
    with pytest.raises(ValueError, match=r"messages\[0\]\.content\[0\] has type 'image_url'"):
        session.prepare([{"role": "user", "content": [part]}], None)
    assert session.prepare("<image>", None).images == []


@pytest.mark.parametrize("data", [7, {"video": []}, ["x"], {"image": [], "audio": []}])
def test_other_data_is_refused(session: Session, data: Any) -> None:
    with pytest.raises(ValueError, match="multi_modal_data must be a dict"):
        session.prepare("x", None, data)


def test_prompt_logprobs_cannot_be_had(session: Session) -> None:
    with pytest.raises(ValueError, match="prompt_logprobs"):
        session.prepare("<image>", SamplingParams(prompt_logprobs=0), {"image": FILE})


def test_a_text_template_gets_strings_and_a_parts_template_gets_parts(tmp_path) -> None:
    for template in ("vision", "chatml"):
        session = Session(*_engine(tmp_path / template, template))
        parts = [{"type": "text", "text": "some words"}]
        for content in ("some words", parts):
            ids = session.prepare([{"role": "user", "content": content}], None).token_ids
            assert "some words" in session.tokenizer.decode(ids)
