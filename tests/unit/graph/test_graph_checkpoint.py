"""Hugging Face checkpoints (issue 6 part 1): what is read, and one sentence for each way a folder can be wrong."""

import json
import struct

import numpy as np
import pytest
from checkpoints import write_safetensors

from edgeds.errors import ModelError
from edgeds.graph.checkpoint import open_checkpoint


def make(folder, tensors=None, config="{}"):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(config)
    write_safetensors(folder / "model.safetensors", tensors or {"a": np.ones((2, 3), np.float32)})
    return folder


def write_raw(folder, header, data=b""):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text("{}")
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)
    return folder


def refusal(folder):
    with pytest.raises(ModelError) as error:
        open_checkpoint(folder)
    assert "\n" not in str(error.value)
    assert str(folder) in str(error.value)
    return str(error.value)


def test_tensors_are_fresh_float32_and_integers_stay(tmp_path):
    values = {
        "half": np.float16([1.5, -2]),
        "double": np.float64([[0.1]]),
        "brain": ("BF16", np.float32([1.0, -0.5])),
        "count": np.int64([2**40]),
        "scalar": np.float32(3.0).reshape(()),
        "brain_scalar": ("BF16", np.float32(2.0).reshape(())),
        "empty": np.zeros((0, 4), np.float32),
    }
    with open_checkpoint(make(tmp_path / "m", values)) as checkpoint:
        assert set(checkpoint.names) == set(values)
        for name in values:
            found = checkpoint.tensor(name)
            assert isinstance(found, np.ndarray)
            assert found.dtype == (np.int64 if name == "count" else np.float32)
            assert found.shape == checkpoint.shape(name)
        assert checkpoint.tensor("count")[0] == 2**40
        assert checkpoint.tensor("brain").tolist() == [1.0, -0.5]
        assert checkpoint.tensor("brain_scalar") == 2.0
        checkpoint.tensor("half")[:] = 7
        assert checkpoint.tensor("half").tolist() == [1.5, -2.0], "each call reads the file"
        kept = checkpoint.tensor("double")
    assert kept[0, 0] == np.float32(0.1), "arrays outlive the checkpoint"


def test_bfloat16_is_read_as_ml_dtypes_rounds_it(tmp_path):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    exact = np.random.default_rng(0).normal(0, 100, 500).astype(ml_dtypes.bfloat16)
    folder = write_raw(
        tmp_path / "m", {"w": {"dtype": "BF16", "shape": [500], "data_offsets": [0, 1000]}}, exact.tobytes()
    )
    with open_checkpoint(folder) as checkpoint:
        np.testing.assert_array_equal(checkpoint.tensor("w"), exact.astype(np.float32))


def test_files_of_the_safetensors_package_are_read(tmp_path):
    library = pytest.importorskip("safetensors.numpy")
    values = {"w": np.random.default_rng(1).normal(size=(3, 5)).astype(np.float32), "n": np.arange(4)}
    make(tmp_path / "m")
    library.save_file(values, tmp_path / "m" / "model.safetensors", metadata={"format": "pt"})
    with open_checkpoint(tmp_path / "m") as checkpoint:
        assert set(checkpoint.names) == {"w", "n"}, "its __metadata__ is no tensor"
        for name, value in values.items():
            np.testing.assert_array_equal(checkpoint.tensor(name), value)


def test_a_missing_tensor_and_a_wrong_shape_are_named(tmp_path):
    with open_checkpoint(make(tmp_path / "m", {"layer.0.weight": np.ones((2, 3), np.float32)})) as checkpoint:
        with pytest.raises(ModelError, match=r"no tensor 'layer\.1\.weight'; it has layer\.0\.weight"):
            checkpoint.tensor("layer.1.weight")
        with pytest.raises(ModelError, match=r"\[2, 3\], but config\.json makes it \[3, 2\]"):
            checkpoint.tensor("layer.0.weight", (3, 2))


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"[" * 200_000, "not JSON"),
        (b"\xff\xfe{}", "not JSON"),
        ([1], "not an object"),
        ({"w": 3}, "no dtype, shape and data_offsets"),
        ({"w": {"dtype": "F32", "shape": 5, "data_offsets": [0, 4]}}, "no dtype, shape"),
        ({"w": {"dtype": "F32", "shape": [1]}}, "no dtype, shape"),
        ({"w": {"dtype": "F8_E4M3", "shape": [1], "data_offsets": [0, 1]}}, "F8_E4M3"),
        ({"w": {"dtype": "F32", "shape": [-1, -4], "data_offsets": [0, 16]}}, "has the shape"),
        ({"w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 12]}}, "does not fit its shape"),
        ({"w": {"dtype": "F32", "shape": [2**40, 2**40], "data_offsets": [0, 16]}}, "does not fit its shape"),
        ({"w": {"dtype": "F32", "shape": [8], "data_offsets": [0, 32]}}, "cut off"),
        ({"w": {"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]}}, "has the shape"),
    ],
)
def test_headers_that_lie_are_refused(tmp_path, header, message):
    assert message in refusal(write_raw(tmp_path / "m", header, b"\0" * 16))


def test_folders_that_are_none_and_configs_that_are_none(tmp_path):
    assert "no such folder" in refusal(tmp_path / "nowhere")
    file = tmp_path / "file"
    file.write_text("x")
    assert "no such folder" in refusal(file)
    for text in ("{", "[]", '{"a": NaN}', '{"a": 1, "a": 2}', "\x00"):
        assert "config.json" in refusal(make(tmp_path / "m", config=text))
    (tmp_path / "m" / "config.json").write_bytes(b'{"a": "\xff"}')
    assert "config.json" in refusal(tmp_path / "m")


def test_a_pickle_is_refused_with_the_way_out(tmp_path):
    folder = make(tmp_path / "m")
    (folder / "model.safetensors").unlink()
    assert "no model.safetensors" in refusal(folder)
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x02")
    assert "safe_serialization=True" in refusal(folder)


def test_an_index_that_is_wrong_is_named(tmp_path):
    folder = make(tmp_path / "m")
    index = folder / "model.safetensors.index.json"
    for text in ("{", "[]", '{"weight_map": {"a": 3}}', '{"weight_map": {"a": "/etc/passwd"}}'):
        index.write_text(text)
        refusal(folder)
    write_safetensors(folder / "b.safetensors", {"a": np.ones(1, np.float32)})
    index.write_text(json.dumps({"weight_map": {"a": "model.safetensors", "b": "b.safetensors"}}))
    assert "is also in" in refusal(folder)
