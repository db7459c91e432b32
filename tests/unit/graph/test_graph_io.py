"""Loading and saving: side files, bad files, versions, metadata."""

from __future__ import annotations

import os
import random

import numpy as np
import onnx
import pytest
from graph_models import branch_with_capture, build, image, node, run, save_external, two_convs, value, weight
from onnx import TensorProto, helper, numpy_helper

from edgeds.errors import EdgedsError, ModelError
from edgeds.graph import io, session, versions
from edgeds.graph.io import (
    input_specs,
    load_model,
    open_session,
    output_specs,
    parse_names,
    read_metadata,
    save_model,
    verify_model_file,
)


def write(path, model):
    path.write_bytes(model.SerializeToString())
    return path


def external(location="m.data", *, offset=None, length=None, dims=(4, 4)):
    tensor = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=dims, data_location=TensorProto.EXTERNAL)
    for key, text in (("location", location), ("offset", offset), ("length", length)):
        if text is not None:
            tensor.external_data.add(key=key, value=str(text))
    graph = helper.make_graph(
        [node("Gemm", ["x", "w"], ["y"], "fc")], "g", [value("x", ["N", 4])], [value("y", ["N", 4])], [tensor]
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)


def test_b05_side_file_is_found_from_any_directory(tmp_path, monkeypatch):
    path = save_external(tmp_path / "model")
    monkeypatch.chdir("/")
    model = load_model(path)
    x = image(1, 3, 12, 12)
    np.testing.assert_array_equal(run(model, {"x": x})[0], run(two_convs(), {"x": x})[0])
    monkeypatch.chdir(path.parent)
    assert load_model("m.onnx") == model


@pytest.mark.parametrize("limit", [0, 1 << 30])
def test_b05_output_does_not_need_the_input(tmp_path, limit):
    """Both forms, one file and a pair, survive the removal of the source and a move of the pair."""
    path = save_external(tmp_path / "model")
    out = save_model(load_model(path), tmp_path / "out" / "n.onnx", inline_limit_bytes=limit)
    for item in path.parent.iterdir():
        item.unlink()
    names = sorted(item.name for item in out.parent.iterdir())
    assert names == (["n.onnx", "n.onnx.data"] if limit == 0 else ["n.onnx"])
    moved = out.parent.rename(tmp_path / "elsewhere") / "n.onnx"
    x = image(2, 3, 12, 12)
    want = run(two_convs(), {"x": x})[0]
    np.testing.assert_array_equal(run(str(moved), {"x": x})[0], want)
    np.testing.assert_array_equal(run(load_model(moved), {"x": x})[0], want)


@pytest.mark.parametrize(
    "where", ["../secret.bin", "/etc/hostname", "a/../../secret.bin", "C:\\secret.bin", "", "..\\s"]
)
def test_b06_location_outside_the_folder_is_refused_before_reading(tmp_path, where):
    (tmp_path / "secret.bin").write_bytes(bytes(64))
    (tmp_path / "model").mkdir()
    path = write(tmp_path / "model" / "m.onnx", external(where, length=64))
    for check in (load_model, verify_model_file, open_session):
        with pytest.raises(ModelError, match="'w'"):
            check(path)


def test_b06_link_out_of_the_folder_is_refused(tmp_path):
    (tmp_path / "secret.bin").write_bytes(bytes(64))
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "m.data").symlink_to(tmp_path / "secret.bin")
    with pytest.raises(ModelError, match=r"'w'.*outside the model's folder"):
        load_model(write(folder / "m.onnx", external()))


def test_b06_device_and_folder_as_side_file_are_refused(tmp_path):
    (tmp_path / "m.data").mkdir()
    with pytest.raises(ModelError, match="not a regular file"):
        load_model(write(tmp_path / "m.onnx", external()))
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ModelError, match="not a regular file"):
        load_model(write(tmp_path / "m.onnx", external("pipe")))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"offset": 4, "length": 64}, "has 64 bytes"),
        ({"offset": 1 << 40}, "has 64 bytes"),
        ({"length": 32}, "does not match shape"),
        ({"length": 1 << 50}, "does not match shape"),
        ({"offset": -1}, "not a whole number"),
        ({"length": "many"}, "not a whole number"),
        ({"dims": (4, -4)}, "negative dimension"),
        ({"dims": (1 << 20, 1 << 20)}, "has 64 bytes"),
    ],
)
def test_b06_offset_and_length_must_fit_file_and_shape(tmp_path, fields, message):
    (tmp_path / "m.data").write_bytes(bytes(64))
    with pytest.raises(ModelError, match=message):
        load_model(write(tmp_path / "m.onnx", external(**fields)))


def test_b06_reference_inside_a_subgraph_is_checked_too(tmp_path):
    model = branch_with_capture()
    inner = model.graph.node[1].attribute[0].g.initializer.add()
    inner.CopyFrom(external("../x").graph.initializer[0])
    with pytest.raises(ModelError, match="outside the model's folder"):
        load_model(write(tmp_path / "m.onnx", model))


def test_missing_side_file_is_named(tmp_path):
    path = save_external(tmp_path)
    (tmp_path / "m.onnx.data").unlink()
    with pytest.raises(ModelError, match=r"m\.onnx\.data"):
        load_model(path)


def test_b13_links_into_one_cache_are_followed(tmp_path):
    path = save_external(tmp_path / "cache" / "snapshot", links=True)
    assert path.is_symlink()
    x = image(1, 3, 12, 12)
    np.testing.assert_array_equal(run(load_model(path), {"x": x})[0], run(two_convs(), {"x": x})[0])


def test_b13_link_to_a_file_outside_the_cache_is_refused(tmp_path):
    path = save_external(tmp_path / "cache" / "snapshot", links=True)
    side = path.with_name("m.onnx.data")
    secret = side.resolve().rename(tmp_path / "secret.bin")
    side.unlink()
    side.symlink_to(secret)
    with pytest.raises(ModelError, match="outside the model's folder and its cache"):
        load_model(path)


def test_b07_pair_is_written_without_one_large_protobuf(tmp_path, monkeypatch):
    """The protobuf on disk holds no weights, so its size does not grow with them."""
    model = two_convs()
    path = save_model(model, tmp_path / "m.onnx", inline_limit_bytes=10_000)
    assert path.stat().st_size < 2_000
    assert (tmp_path / "m.onnx.data").stat().st_size >= 43_776
    monkeypatch.setattr(session, "INLINE_LIMIT_BYTES", 10_000)
    monkeypatch.setattr(io, "INLINE_LIMIT_BYTES", 10_000)
    x = image(1, 3, 12, 12)
    got = open_session(model, threads=1).run(None, {"x": x})[0]
    np.testing.assert_allclose(got, run(model, {"x": x})[0], rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_b07_more_than_two_gigabytes_of_weights(tmp_path):
    """A sparse 2.2 GB side file: load, infer shapes, count, run by path."""
    from edgeds.graph.cost import count_cost

    rows, columns = 1 << 20, 560
    model = external(length=rows * columns * 4, dims=(rows, columns))
    model.graph.node[0].CopyFrom(node("Gather", ["x", "w"][::-1], ["y"], "take"))
    model.graph.input[0].CopyFrom(value("x", ["N"], TensorProto.INT64))
    model.graph.output[0].CopyFrom(value("y", ["N", columns]))
    with (tmp_path / "m.data").open("wb") as stream:
        stream.seek(rows * columns * 4 - 4)
        stream.write(np.float32(7).tobytes())
    path = write(tmp_path / "m.onnx", model)
    loaded = load_model(path)
    assert count_cost(loaded, {"x": (3,)}).params == rows * columns
    out = open_session(loaded, threads=1).run(None, {"x": np.array([rows - 1])})[0]
    assert out[0, -1] == 7


def test_failed_save_keeps_the_old_pair_and_leaves_nothing(tmp_path, monkeypatch):
    path = save_model(two_convs(), tmp_path / "m.onnx", inline_limit_bytes=0)
    before = {item.name: item.read_bytes() for item in tmp_path.iterdir()}
    from pathlib import Path

    rename = Path.rename

    def broken(self, target):
        if self.name == "new.onnx":
            raise OSError(28, "No space left on device")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", broken)
    changed = two_convs()
    changed.graph.initializer[0].CopyFrom(numpy_helper.from_array(weight(64, 3, 3, 3, seed=9), "w1"))
    with pytest.raises(ModelError, match="No space left"):
        save_model(changed, path, inline_limit_bytes=0)
    assert {item.name: item.read_bytes() for item in tmp_path.iterdir()} == before


def test_interrupted_save_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(io, "write_external", lambda *a, **k: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        save_model(two_convs(), tmp_path / "m.onnx", inline_limit_bytes=0)
    assert list(tmp_path.iterdir()) == []


def test_saving_over_the_loaded_pair_is_safe(tmp_path):
    path = save_external(tmp_path)
    save_model(load_model(path), path, inline_limit_bytes=0)
    assert load_model(path).graph.initializer[1].raw_data == two_convs().graph.initializer[1].raw_data


def test_save_to_a_directory_is_refused(tmp_path):
    with pytest.raises(ModelError, match="directory"):
        save_model(two_convs(), tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("m.onnx", b"", "empty"),
        ("m.onnx", b"garbage that is no protobuf", "not an ONNX model"),
        ("m.onnx", bytes(100), "not an ONNX model"),
        ("m.pt", b"PK\x03\x04" + bytes(50), "zip archive"),
        ("m.onnx", b"PK\x03\x04" + bytes(50), "zip archive"),
        ("m.safetensors", b"\x10" + bytes(7) + b'{"a": 1}', "safetensors"),
        ("m.engine", b"ftrt" + bytes(50), "TensorRT engine"),
        ("m.onnx", b"vtrt" + bytes(50), "TensorRT engine"),
        ("m.onnx", b"GGUF" + bytes(50), "GGUF"),
        ("m.onnx", b"version https://git-lfs.github.com/spec/v1\n", "Git LFS"),
        ("m.onnx", b"<!DOCTYPE html>", "error page"),
    ],
)
def test_files_that_are_no_model_are_named_for_what_they_are(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ModelError, match=message):
        load_model(path)


def test_directory_and_missing_path_are_named(tmp_path):
    (tmp_path / "a.onnx").write_bytes(b"")
    with pytest.raises(ModelError, match=r"directory.*a\.onnx"):
        load_model(tmp_path)
    with pytest.raises(ModelError, match="No such file"):
        load_model(tmp_path / "none.onnx")
    with pytest.raises(ModelError, match="not a usable path"):
        load_model("a\0b.onnx")


def test_every_truncation_is_an_edgeds_error(tmp_path):
    data = two_convs().SerializeToString()
    path = tmp_path / "m.onnx"
    for cut in [*range(0, 60), *range(len(data) - 60, len(data)), *range(60, len(data), 1500)]:
        path.write_bytes(data[:cut])
        with pytest.raises(ModelError):
            load_model(path)


def test_damaged_bytes_never_escape_the_error_tree(tmp_path):
    """Random damage, UTF-8 included, either loads or is one of our errors."""
    from edgeds.graph.inspect import inspect_model

    base = branch_with_capture().SerializeToString()
    generator = random.Random(5)
    path = tmp_path / "m.onnx"
    messages = []
    for _ in range(150):
        data = bytearray(base)
        for _ in range(generator.choice([1, 2, 4])):
            data[generator.randrange(len(data))] = generator.choice([generator.randrange(256), 0xFF, 0x80, 0])
        path.write_bytes(data)
        try:
            inspect_model(path)
        except EdgedsError as error:
            messages.append(str(error))
    assert messages
    assert not [text for text in messages if "\n" in text]


def test_b03_newer_ir_is_named_and_lowered_on_request(tmp_path):
    limit = versions.runtime_ir_limit()
    path = write(tmp_path / "m.onnx", two_convs(ir=limit + 1))
    with pytest.raises(ModelError, match=rf"IR version {limit + 1} found, up to {limit} supported"):
        load_model(path)
    lowered = load_model(path, lower_ir=True)
    assert lowered.ir_version == limit
    open_session(lowered)


def test_b03_newer_ir_with_a_newer_feature_cannot_be_lowered(tmp_path, monkeypatch):
    monkeypatch.setattr(versions, "runtime_ir_limit", lambda: 9)
    model = two_convs(ir=10)
    model.graph.metadata_props.add(key="a", value="b")
    with pytest.raises(ModelError, match="features of version 10"):
        load_model(write(tmp_path / "m.onnx", model), lower_ir=True)


def test_b03_newer_opset_is_named(tmp_path):
    model = two_convs(opset=versions.opset_limit() + 1)
    with pytest.raises(ModelError, match=r"opset \d+ found"):
        load_model(write(tmp_path / "m.onnx", model))


@pytest.mark.parametrize(("ir", "opset"), [(6, 11), (8, 17), (9, 19)])
def test_b03_versions_are_kept(tmp_path, ir, opset):
    path = write(tmp_path / "m.onnx", two_convs(ir=ir, opset=opset))
    saved = onnx.load(save_model(load_model(path), tmp_path / "n.onnx"))
    assert (saved.ir_version, saved.opset_import[0].version) == (ir, opset)


def test_initializers_listed_as_inputs_are_constants(tmp_path):
    model = two_convs(ir=3, opset=9)
    model.graph.input.append(value("w1", [64, 3, 3, 3]))
    model.graph.input.append(value("w2", [16, 64, 3, 3]))
    assert [spec.name for spec in input_specs(model)] == ["x"]
    loaded = load_model(write(tmp_path / "m.onnx", model))
    assert [item.name for item in loaded.graph.input] == ["x"]
    assert loaded.ir_version == 4


def test_sparse_initializer_is_refused_by_name(tmp_path):
    model = two_convs()
    sparse = model.graph.sparse_initializer.add()
    sparse.values.CopyFrom(numpy_helper.from_array(np.float32([1]), "thin"))
    sparse.indices.CopyFrom(numpy_helper.from_array(np.array([0]), "at"))
    sparse.dims.extend([4])
    with pytest.raises(ModelError, match=r"'thin'.*sparse"):
        load_model(write(tmp_path / "m.onnx", model))


def test_local_functions_are_inlined(tmp_path):
    body = [node("Relu", ["a"], ["t"]), node("Mul", ["t", "w"], ["b"])]
    function = helper.make_function("own", "ScaledRelu", ["a", "w"], ["b"], body, [helper.make_opsetid("", 17)])
    big = weight(1, 400)
    model = build(
        [node("ScaledRelu", ["x", "w"], ["y"], "f", domain="own")],
        [value("x", ["N", 400])],
        [value("y", ["N", 400])],
        {"w": big},
        extra_opsets=[("own", 1)],
    )
    model.functions.append(function)
    loaded = load_model(write(tmp_path / "m.onnx", model))
    assert not loaded.functions
    x = image(2, 400)
    np.testing.assert_allclose(run(loaded, {"x": x})[0], np.maximum(x, 0) * big, rtol=1e-6)


def test_stored_values_must_fill_the_shape(tmp_path):
    model = two_convs()
    model.graph.initializer[1].dims[0] = 17
    with pytest.raises(ModelError, match=r"'w2'.*damaged"):
        load_model(write(tmp_path / "m.onnx", model))


def test_specs_keep_names_and_unknown_dims():
    model = build([node("Relu", ["x"], ["y"])], [value("x", ["N", None, 4])], [value("y", None)])
    assert input_specs(model)[0].shape == ("N", None, 4)
    assert str(input_specs(model)[0]) == "x: float32[Nx?x4]"
    assert output_specs(model)[0].dtype == "float32"


def test_open_session_exposes_tensors_and_names_what_is_missing(tmp_path):
    model = two_convs()
    before = model.SerializeToString()
    opened = open_session(model, outputs=["a", "y", "b"], threads=1)
    assert [item.name for item in opened.get_outputs()] == ["y", "a", "b"]
    assert model.SerializeToString() == before
    with pytest.raises(ModelError, match="'nothing'"):
        open_session(model, outputs=["nothing"])
    path = write(tmp_path / "m.onnx", model)
    assert [item.name for item in open_session(str(path), outputs=["a"]).get_outputs()] == ["y", "a"]


def test_session_failure_is_one_line_with_the_node():
    model = build(
        [node("MatMul", ["x", "w"], ["y"], "my_matmul")], [value("x", [2, 3])], [value("y", None)], {"w": weight(4, 5)}
    )
    with pytest.raises(ModelError, match="my_matmul") as caught:
        open_session(model)
    assert "\n" not in str(caught.value)


def test_metadata_of_onnx_and_names(tmp_path):
    model = two_convs(metadata={"names": "{0: 'person', 1: \"it's\"}", "stride": "32"})
    metadata = read_metadata(write(tmp_path / "m.onnx", model))
    assert metadata["stride"] == "32"
    assert parse_names(metadata["names"]) == {0: "person", 1: "it's"}


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ('{"0": "a", "1": "b"}', {0: "a", 1: "b"}),
        ("['a', 'b']", {0: "a", 1: "b"}),
        ("{3: 'ü'}", {3: "ü"}),
        ("{}", {}),
    ],
)
def test_names_in_every_usual_form(text, want):
    assert parse_names(text) == want


@pytest.mark.parametrize(
    "text",
    ["", "names", "3", "{'a': 'b'}", "{0: ['x']}", "__import__('os')", "{0: open('x')}", "[" * 5000, "x" * (2 << 20)],
)
def test_names_that_are_no_names_are_refused(text):
    with pytest.raises(ModelError, match="class names"):
        parse_names(text)


def test_outputs_without_a_shape_are_completed(tmp_path):
    model = build([node("Relu", ["x"], ["y"])], [value("x", ["N", 4])], [value("y", None)])
    assert output_specs(load_model(write(tmp_path / "m.onnx", model)))[0].shape == ("N", 4)
