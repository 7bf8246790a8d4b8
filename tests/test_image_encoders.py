"""Processors and encoders are equal to transformers': tokens, pixel values, embeddings."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image

from deepinfer.image_worker.errors import Deadline, ImageError
from deepinfer.image_worker.idefics3 import position_ids
from deepinfer.image_worker.layers import Team, attention, erf
from deepinfer.image_worker.model import Encoded, VisionModel, load
from deepinfer.image_worker.qwen2_5_vl import Grid, window_order
from deepinfer.wire.model_folder import ModelError
from support.checkpoints import one_torch_thread
from support.vision_checkpoints import (
    FAMILIES,
    make_vision_checkpoint,
    picture,
    reference_model,
    reference_processor,
)

NO_LIMIT = 1 << 30
IDEFICS3_SIZES = [
    (96, 96), (32, 32), (1, 1), (97, 40), (40, 97), (500, 301), (31, 500), (20000, 1), (1, 20000),
    (33, 32), (640, 480),
]  # fmt: skip
QWEN_SIZES = [(56, 56), (1, 1), (1, 200), (200, 1), (300, 200), (113, 640), (640, 480), (29, 28)]
SIZES = {"idefics3": IDEFICS3_SIZES, "qwen2_5_vl": QWEN_SIZES}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {
        family: make_vision_checkpoint(family, tmp_path_factory.mktemp(family))
        for family in FAMILIES
    }


def loaded(folder: Path, num_threads: int = 2) -> VisionModel:
    return load(folder, folder, Team(num_threads))


def encoded(model: VisionModel, image: Image.Image) -> Encoded:
    return model.encode(image, NO_LIMIT, Deadline(600))


def tiles_of(reference: dict[str, Any], edge: int) -> np.ndarray:
    """The pixel values of transformers' processor as patches, [tiles, patches, numbers]."""
    pixels = np.asarray(reference["pixel_values"])[0]
    tiles, _, height, width = pixels.shape
    parts = pixels.reshape(tiles, 3, height // edge, edge, width // edge, edge)
    return parts.transpose(0, 2, 4, 1, 3, 5).reshape(tiles, -1, 3 * edge * edge)


@pytest.mark.parametrize("size", IDEFICS3_SIZES, ids=str)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"do_image_splitting": False},
        {"size": {"longest_edge": 65}},
        {"do_resize": False, "resample": 3},
        {"image_mean": [0.1, 0.2, 0.3], "image_std": [0.4, 0.5, 0.6], "rescale_factor": 0.01},
        {"do_normalize": False},
    ],
    ids=["plain", "whole", "odd edge", "as it is", "colours", "not normalised"],
)
def test_idefics3_pixels_are_exactly_those_of_transformers(
    tmp_path: Path, size: tuple[int, int], changes: dict[str, Any]
) -> None:
    if "do_resize" in changes:
        size = (min(size[0], 500), min(size[1], 500))  # there are hundreds of tiles otherwise
    from deepinfer.image_worker.idefics3 import Processor

    settings = {"size": {"longest_edge": 96}, "max_image_size": {"longest_edge": 32}, **changes}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
    reference = reference_processor("idefics3", tmp_path)(
        picture(*size), return_row_col_info=True, return_tensors="np"
    )
    processor = Processor.read(tmp_path)
    tiles, rows, columns = processor(picture(*size))
    assert ([[rows]], [[columns]]) == (reference["rows"], reference["cols"])
    assert len(tiles) <= processor.max_tiles or "do_resize" in changes
    ours = np.stack([processor.normalizer.patches(tile, 4) for tile in tiles])
    np.testing.assert_array_equal(ours, tiles_of(reference, 4))


@pytest.mark.parametrize("size", QWEN_SIZES, ids=str)
@pytest.mark.parametrize(
    "changes",
    [{}, {"min_pixels": 28 * 28, "max_pixels": 28 * 28 * 5}, {"patch_size": 7, "merge_size": 3}],
    ids=["plain", "older form", "other patches"],
)
def test_qwen_pixels_are_exactly_those_of_transformers(
    tmp_path: Path, size: tuple[int, int], changes: dict[str, Any]
) -> None:
    from deepinfer.image_worker.qwen2_5_vl import Processor

    (tmp_path / "preprocessor_config.json").write_text(json.dumps(changes))
    reference = reference_processor("qwen2_5_vl", tmp_path)(picture(*size), return_tensors="np")
    processor = Processor.read(tmp_path)
    pixels = processor(picture(*size))
    patches = processor.normalizer.patches(pixels, processor.patch_edge, processor.merge)
    grid = [1, *(length // processor.patch_edge for length in pixels.shape[:2])]
    assert reference["image_grid_thw"].tolist() == [grid]
    theirs = reference["pixel_values"].reshape(len(patches), 3, 2, -1)
    for frame in range(2):
        np.testing.assert_array_equal(patches.reshape(len(patches), 3, -1), theirs[:, :, frame])
    assert len(patches) // processor.merge**2 <= processor.max_rows


@pytest.mark.parametrize("size", IDEFICS3_SIZES[:7], ids=str)
@pytest.mark.parametrize(
    "text", ["{}", "look at  {}\n", "a{}b{}\n\n", "{}{} <row_1_col_1> end"], ids=repr
)
def test_idefics3_tokens_are_those_of_transformers(
    folders: dict[str, Path], size: tuple[int, int], text: str
) -> None:
    folder = folders["idefics3"]
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    processor = transformers.Idefics3Processor(
        reference_processor("idefics3", folder), tokenizer, image_seq_len=16
    )
    spelled = text.replace("{}", "<image>")
    images = [picture(*size)] * text.count("{}")
    reference = processor(text=spelled, images=[images])["input_ids"][0]
    model = loaded(folder)
    ours: list[int] = []
    for token in tokenizer(spelled)["input_ids"]:
        if token == model.placeholder:
            result = encoded(model, images[0])
            ours += result.tokens.tolist()
            for start, count in result.runs.tolist():
                assert set(result.tokens[start : start + count]) == {model.placeholder}
            rows = int(result.runs[:, 1].sum())
            assert rows == (result.tokens == model.placeholder).sum() == len(result.embeddings)
        else:
            ours.append(token)
    assert ours == reference


def reference_embeddings(family: str, folder: Path, image: Image.Image) -> torch.Tensor:
    inputs = reference_processor(family, folder)(image, return_tensors="pt")
    inputs.pop("rows", None)
    inputs.pop("cols", None)
    with torch.no_grad(), one_torch_thread():
        features = reference_model(folder).model.get_image_features(**inputs, return_dict=True)
    return torch.cat(list(features.pooler_output))


def assert_close(ours: np.ndarray, theirs: torch.Tensor) -> None:
    """Within 1e-5 of the largest number, as float32 sums in another order differ."""
    reference = theirs.numpy()
    assert ours.shape == reference.shape
    assert np.abs(ours - reference).max() <= 1e-5 * max(1.0, np.abs(reference).max())


@pytest.mark.parametrize(
    "family, size", [(family, size) for family in FAMILIES for size in SIZES[family]], ids=str
)
def test_embeddings_are_those_of_transformers(
    folders: dict[str, Path], family: str, size: tuple[int, int]
) -> None:
    model = loaded(folders[family])
    result = encoded(model, picture(*size))
    assert len(result.embeddings) <= model.max_rows
    assert_close(result.embeddings, reference_embeddings(family, folders[family], picture(*size)))


@pytest.mark.parametrize(
    "family, vision, processor",
    [
        ("idefics3", {"image_size": 56, "patch_size": 8}, {"max_image_size": {"longest_edge": 32}}),
        ("idefics3", {"image_size": 24, "patch_size": 4}, {"max_image_size": {"longest_edge": 50}}),
        ("qwen2_5_vl", {"window_size": 56}, {}),
        ("qwen2_5_vl", {"spatial_merge_size": 1}, {"merge_size": 1}),
        ("qwen2_5_vl", {"fullatt_block_indexes": []}, {}),
    ],
)
@pytest.mark.parametrize("num_threads", [1, 3])
def test_embeddings_of_other_shapes_of_model(
    tmp_path: Path, family: str, vision: dict, processor: dict, num_threads: int
) -> None:
    folder = make_vision_checkpoint(family, tmp_path, vision=vision, processor=processor)
    result = encoded(loaded(folder, num_threads), picture(300, 170))
    assert_close(result.embeddings, reference_embeddings(family, folder, picture(300, 170)))


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_in_bfloat16_count_as_what_they_are(tmp_path: Path, family: str) -> None:
    folder = make_vision_checkpoint(family, tmp_path, dtype=torch.bfloat16)
    result = encoded(loaded(folder), picture(120, 100))
    assert_close(result.embeddings, reference_embeddings(family, folder, picture(120, 100)))


def test_a_picture_in_groups_of_tiles_is_the_same(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = encoded(loaded(folders["idefics3"]), picture(96, 96)).embeddings
    monkeypatch.setattr("deepinfer.image_worker.idefics3._ROWS_AT_ONCE", 64 * 4)
    parts = encoded(loaded(folders["idefics3"]), picture(96, 96)).embeddings
    assert_close(parts, torch.tensor(whole))


@pytest.mark.parametrize("side", [1, 2, 3, 7, 16, 27, 32, 64])
def test_positions_of_tiles_of_any_size_are_those_of_transformers(side: int) -> None:
    from transformers.models.idefics3.modeling_idefics3 import Idefics3VisionEmbeddings

    config = transformers.Idefics3Config(
        vision_config={"hidden_size": 1, "image_size": side, "patch_size": 1}
    ).vision_config
    embeddings = Idefics3VisionEmbeddings(config)
    with torch.no_grad():
        embeddings.patch_embedding.weight.zero_()
        embeddings.patch_embedding.bias.zero_()
        embeddings.position_embedding.weight[:, 0] = torch.arange(side * side)
        for edge in range(1, 70):
            pixels = torch.zeros(1, 3, edge, edge)
            mask = torch.ones(1, edge, edge, dtype=torch.bool)
            theirs = embeddings(pixels, mask)[0, :, 0].long().numpy()
            np.testing.assert_array_equal(position_ids(edge, side), theirs)


@pytest.mark.parametrize("grid", [(4, 4), (8, 8), (16, 10), (2, 30), (18, 22)], ids=str)
def test_windows_are_those_of_transformers(grid: tuple[int, int]) -> None:
    from transformers.vision_utils import get_vision_window_index

    theirs, borders = get_vision_window_index(torch.tensor([[1, *grid]]), 2, 112, 14)
    order, lengths = window_order(Grid(*grid), 2, 4)
    assert order.tolist() == theirs.tolist()
    assert [0, *np.cumsum(lengths) * 4] == borders.tolist()


def test_attention_in_pieces_is_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deepinfer.image_worker.layers._SCORES", 100)
    generator = np.random.default_rng(3)
    lengths = [7, 7, 7, 3, 3, 30, 7]
    query, key, value = generator.normal(size=(3, sum(lengths), 12)).astype(np.float32)
    ours = attention(Team(2), query, key, value, 3, lengths)
    start = 0
    for length in lengths:
        rows = slice(start, start + length)
        parts = (
            torch.tensor(a[rows]).view(length, 3, 4).transpose(0, 1) for a in (query, key, value)
        )
        theirs = torch.nn.functional.scaled_dot_product_attention(*parts)
        np.testing.assert_allclose(
            ours[rows], theirs.transpose(0, 1).reshape(length, 12), atol=2e-6
        )
        start += length


def test_erf_is_as_exact_as_float32() -> None:
    values = np.linspace(-6, 6, 20001, dtype=np.float32)
    assert np.abs(erf(values) - [math.erf(value) for value in values.tolist()]).max() < 5e-7


def test_what_would_be_too_many_tokens_is_refused_before_its_encoder_runs(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    for family in FAMILIES:
        model = loaded(folders[family])
        monkeypatch.setattr(model, "encoder", _Untouchable(model.encoder))
        with pytest.raises(ImageError, match="tokens, and the engine has room for 3"):
            model.encode(picture(640, 480), 3, Deadline(600))


class _Untouchable:
    def __init__(self, encoder: Any) -> None:
        self._encoder = encoder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._encoder, name)

    def __call__(self, *_: Any) -> Any:
        raise AssertionError("the encoder runs")


def test_qwen_refuses_proportions_that_its_processor_refuses(folders: dict[str, Path]) -> None:
    with pytest.raises(ImageError, match="more than 200 times the other"):
        encoded(loaded(folders["qwen2_5_vl"]), picture(1, 20000))


def test_the_encoder_stops_at_the_deadline(folders: dict[str, Path]) -> None:
    for family in FAMILIES:
        deadline = Deadline(600)
        monkey = iter([None, None])

        def check(moments: Any = monkey) -> None:
            if next(moments, "over") == "over":
                raise ImageError("it took longer")

        deadline.check = check  # type: ignore[method-assign]
        with pytest.raises(ImageError, match="it took longer"):
            loaded(folders[family]).encode(picture(96, 96), NO_LIMIT, deadline)


def test_a_model_without_images_says_so(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    with pytest.raises(ModelError, match="those that take images are Idefics3"):
        loaded(tmp_path)


@pytest.mark.parametrize(
    "file, key, value, message",
    [
        ("processor_config.json", "image_seq_len", 17, "image_seq_len is 17, the encoder makes 16"),
        ("config.json", "image_token_id", 5, "<image> is not the image_token_id"),
        ("config.json", "scale_factor", 3, "not a whole number of 3 patches"),
        ("config.json", "vision_config", {"hidden_act": "relu"}, "hidden_act must be"),
        ("config.json", "vision_config", 7, "heads do not divide"),
    ],
)
def test_a_folder_that_contradicts_itself_says_where(
    tmp_path: Path, file: str, key: str, value: Any, message: str
) -> None:
    folder = make_vision_checkpoint("idefics3", tmp_path)
    path = folder / file
    content = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**content, key: value}))
    with pytest.raises(ModelError, match=message):
        loaded(folder)
