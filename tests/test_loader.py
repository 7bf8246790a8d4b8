"""A safetensors file is read exactly, or refused with an error that names it."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from deepinfer.gpu_worker.llama import Model
from deepinfer.wire.checkpoint import Checkpoint, SafetensorsFile, float32_to_bfloat16
from deepinfer.wire.model_folder import ModelError
from support.checkpoints import make_checkpoint
from support.torch_backend import TorchBackend

RUN_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def safetensors_bytes(header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


@pytest.mark.parametrize("run_dtype", RUN_DTYPES)
@pytest.mark.parametrize("file_dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_dtype_is_converted_as_torch_does(tmp_path, file_dtype, run_dtype):
    # More elements than one conversion slice, and values where rounding has to decide ties.
    generator = torch.Generator().manual_seed(1)
    tensor = torch.randn(1100, 1000, generator=generator).to(file_dtype)
    tensor[0, :4] = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, torch.inf, 2.0**-14]).to(file_dtype)
    save_file({"w": tensor}, tmp_path / "model.safetensors")
    got = Checkpoint(tmp_path).weight("w", (1100, 1000), run_dtype)
    want = tensor.to(RUN_DTYPES[run_dtype])
    want = want.view(torch.int16).numpy().view(np.uint16) if run_dtype == "bfloat16" else want
    assert np.array_equal(got, np.asarray(want))


@example([0x7F800001, 0x7FFFFFFF, 0xFF800001, 0x7F7FFFFF])  # NaNs and the largest number
@given(st.lists(st.integers(0, 2**32 - 1), min_size=1))
def test_bfloat16_rounding_is_torchs_for_every_float(bits):
    array = np.array(bits, np.uint32).view(np.float32)
    want = torch.from_numpy(array.copy()).bfloat16().view(torch.int16).numpy().view(np.uint16)
    got = float32_to_bfloat16(array)
    number = ~np.isnan(array)
    assert np.array_equal(got[number], want[number])
    assert ((got[~number] & 0x7FFF) > 0x7F80).all(), "a NaN became a number"


def test_tensors_need_not_be_aligned(tmp_path):
    header = {"byte": entry("U8", (1,), (0, 1)), "w": entry("F32", (2,), (1, 9))}
    for padding in range(4):
        text = json.dumps(header).encode() + b" " * padding
        data = b"\x01" + np.array([1.5, -2.0], np.float32).tobytes()
        (tmp_path / "model.safetensors").write_bytes(safetensors_bytes(text, data))
        weight = Checkpoint(tmp_path).weight("w", (2,), "float32")
        assert weight.flags.aligned and weight.tolist() == [1.5, -2.0]


def test_matching_dtypes_are_views_of_the_file(tmp_path):
    save_file({"w": torch.ones(4, 8, dtype=torch.bfloat16)}, tmp_path / "model.safetensors")
    weight = Checkpoint(tmp_path).weight("w", (4, 8), "bfloat16")
    assert not weight.flags.owndata and not weight.flags.writeable


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "truncated"),
        (b"\x01\x00\x00", "truncated"),
        ((1 << 62).to_bytes(8, "little") + b"{}", "truncated: the header needs"),
        (safetensors_bytes(b"{"), "not valid JSON"),
        (safetensors_bytes(b"\xff\xff"), "not valid JSON"),
        (safetensors_bytes(b"[" * 100_000), "not valid JSON"),
        (safetensors_bytes(b"[]"), "must be an object"),
        (safetensors_bytes({"w": 1}), "'w' must be described by an object"),
        (safetensors_bytes({"w": {"shape": [2], "data_offsets": [0, 8]}}), "'w' has no dtype"),
        (safetensors_bytes({"w": entry(shape=[-2])}, bytes(8)), "'w' has a bad shape"),
        (safetensors_bytes({"w": entry(shape=[2.0])}, bytes(8)), "'w' has a bad shape"),
        (safetensors_bytes({"w": entry(shape=[1] * 99)}, bytes(4)), "'w' has a bad shape"),
        (safetensors_bytes({"w": entry(offsets=[8, 0])}, bytes(8)), "'w' has bad data_offsets"),
        (safetensors_bytes({"w": entry(offsets=[0])}, bytes(8)), "'w' has bad data_offsets"),
        (safetensors_bytes({"w": entry(offsets=[0, 1 << 70])}), "'w' has bad data_offsets"),
        (safetensors_bytes({"w": entry()}, bytes(7)), "truncated: tensor 'w' ends at"),
        (safetensors_bytes({"w": entry(shape=[3])}, bytes(8)), "8 bytes, which does not fit F32"),
        (safetensors_bytes({"w": entry(shape=[1 << 32, 1 << 32])}, bytes(8)), "does not fit F32"),
        (safetensors_bytes({"w": entry()}, bytes(9)), "describes .* bytes, the file has"),
        (safetensors_bytes({"w": entry(offsets=[1, 9])}, bytes(9)), "follows a hole"),
        (safetensors_bytes({"w": entry(), "x": entry()}, bytes(8)), "overlaps another"),
    ],
    ids=lambda value: value if isinstance(value, str) else "file",
)
def test_a_broken_file_is_refused_with_its_name(tmp_path, content, message):
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=message) as caught:
        Checkpoint(tmp_path)
    assert str(path) in str(caught.value)


def test_a_huge_header_is_refused_unread(tmp_path):
    path = tmp_path / "model.safetensors"
    with path.open("wb") as file:
        file.write((100_000_001).to_bytes(8, "little"))
        file.truncate(8 + 100_000_001)  # sparse: takes no disk
    with pytest.raises(ModelError, match="above the limit 100000000"):
        Checkpoint(tmp_path)


def test_an_unusable_dtype_is_refused_by_name(tmp_path):
    save_file({"w": torch.ones(2, dtype=torch.int8)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match="tensor w has dtype I8; supported are BF16, F16, F32"):
        Checkpoint(tmp_path).weight("w", (2,), "float32")


@settings(max_examples=400, deadline=None)
@given(data=st.data())
def test_damaged_bytes_are_read_in_bounds_or_refused(tmp_path_factory, data):
    header = {
        "__metadata__": {"format": "pt"},
        "a": entry("BF16", (3, 2), (0, 12)),
        "b": entry("F32", (0, 5), (12, 12)),
        "c": entry("F16", (4,), (12, 20)),
    }
    good = bytearray(safetensors_bytes(header, bytes(range(20))))
    for _ in range(data.draw(st.integers(0, 3))):
        good[data.draw(st.integers(0, len(good) - 1))] = data.draw(st.integers(0, 255))
    end = data.draw(st.sampled_from([len(good), len(good), data.draw(st.integers(0, len(good)))]))
    path = tmp_path_factory.getbasetemp() / "damaged.safetensors"
    path.write_bytes(good[:end])
    try:
        file = SafetensorsFile(path)
        arrays = [file.view(name)[1] for name in file.tensors]
    except ModelError:
        return
    assert sum(array.nbytes for array in arrays) <= 20
    for array in arrays:
        array.tobytes()  # touches every byte


# the folder


@pytest.fixture(scope="session")
def sharded(tmp_path_factory):
    return make_checkpoint("qwen2", tmp_path_factory.mktemp("qwen2"), shard_size="100KB")


@pytest.fixture
def folder(sharded, tmp_path):
    """A copy that a test may damage."""
    return shutil.copytree(sharded, tmp_path / "model")


def load(folder):
    return Model.load(folder, TorchBackend(), "float32")


def rewrite_index(folder, change):
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    change(index)
    path.write_text(json.dumps(index))


def test_a_folder_without_weights_says_what_it_looked_for(folder):
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    with pytest.raises(ModelError, match=r"neither model\.safetensors nor"):
        load(folder)


def test_a_missing_shard_is_named(folder):
    shard = sorted(folder.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(ModelError, match=shard.name):
        load(folder)


def test_a_missing_tensor_is_named(folder):
    rewrite_index(folder, lambda index: index["weight_map"].pop("model.norm.weight"))
    with pytest.raises(ModelError, match=r"tensor model\.norm\.weight is missing"):
        load(folder)


def test_an_index_entry_without_its_tensor_is_named(folder):
    rewrite_index(
        folder,
        lambda index: index["weight_map"].update(ghost=index["weight_map"]["model.norm.weight"]),
    )
    with pytest.raises(ModelError, match="tensor 'ghost' of the index is missing"):
        load(folder)


@pytest.mark.parametrize("name", ["../outside", "/etc/passwd", "", "..", "a\0b", 7, None])
def test_an_index_cannot_reach_outside_the_folder(folder, name):
    rewrite_index(folder, lambda index: index["weight_map"].update({"model.norm.weight": name}))
    with pytest.raises(ModelError, match=r"index\.json|cannot be read"):
        load(folder)


@pytest.mark.parametrize("weight_map", [None, [], {}, "x"])
def test_an_index_without_a_map_is_refused(folder, weight_map):
    rewrite_index(folder, lambda index: index.update(weight_map=weight_map))
    with pytest.raises(ModelError, match="weight_map must map"):
        load(folder)


def change_config(folder, **changes):
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**raw, **changes}))


def test_a_wrong_shape_is_named_with_both_shapes(folder):
    change_config(folder, vocab_size=212)
    with pytest.raises(
        ModelError, match=r"embed_tokens\.weight has shape \[211, 64\].*\[212, 64\]"
    ):
        load(folder)


def test_weights_the_config_does_not_know_are_refused(folder):
    change_config(folder, num_hidden_layers=2, layer_types=None)
    with pytest.raises(ModelError, match=r"12 tensors have no place.*model\.layers\.2\."):
        load(folder)


def test_a_tied_head_stored_twice_is_ignored(folder):
    change_config(folder, tie_word_embeddings=True)
    model = load(folder)
    assert model.head is model.embedding
