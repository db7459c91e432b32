"""``edgeds compare`` end to end on small models: JSON, exit codes, bundles, layers, refusals."""

from __future__ import annotations

import io
import json

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from edgeds.bundle import Manifest, write_bundle
from edgeds.cli.main import main
from edgeds.specs import TensorSpec


def model(*, factor=1.0, width=4, name="y"):
    """x [N, width] -> MatMul -> Tanh -> MatMul; ``factor`` scales the second weights."""
    generator = np.random.default_rng(0)
    first, second = (generator.standard_normal((width, width)).astype(np.float32) for _ in range(2))
    nodes = [
        helper.make_node("MatMul", ["x", "w1"], ["a"], "first"),
        helper.make_node("Tanh", ["a"], ["b"], "act"),
        helper.make_node("MatMul", ["b", "w2"], [name], "second"),
    ]
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes,
        "m",
        [value("x", TensorProto.FLOAT, ["N", width])],
        [value(name, TensorProto.FLOAT, ["N", width])],
        [numpy_helper.from_array(first, "w1"), numpy_helper.from_array(second * np.float32(factor), "w2")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@pytest.fixture
def files(tmp_path):
    onnx.save(model(), tmp_path / "a.onnx")
    onnx.save(model(factor=1.1), tmp_path / "b.onnx")
    onnx.save(model(width=5), tmp_path / "wide.onnx")
    return tmp_path


def bundle(folder, *, golden=True):
    spec = TensorSpec(name="x", dtype="float32", shape=("N", 4))
    manifest = Manifest(
        task="features",
        models={"int8": "model.onnx", "float": "variants/float.onnx"},
        inputs=(spec,),
        outputs=(TensorSpec(name="y", dtype="float32", shape=("N", 4)),),
        precision="int8",
        license="none",
    )
    files = {"model.onnx": model(factor=1.05).SerializeToString(), "variants/float.onnx": model().SerializeToString()}
    if golden:
        buffer = io.BytesIO()
        np.savez(buffer, **{f"input/{i}/x": np.full((1, 4), i + 1, np.float32) for i in range(3)})
        files["golden.npz"] = buffer.getvalue()
    return write_bundle(folder, files=files, manifest=manifest)


def compare(capsys, *arguments, json_wanted=True):
    code = main(["compare", *map(str, arguments), "--threads", "1", "-q", *(["--json"] if json_wanted else [])])
    captured = capsys.readouterr()
    return code, json.loads(captured.out) if json_wanted and captured.out else captured.out, captured.err


def test_equal_files_agree_and_others_exit_with_one(files, capsys):
    code, data, _ = compare(capsys, files / "a.onnx", files / "a.onnx", "--tolerance", "0")
    assert code == 0
    assert data["ok"] is True
    assert data["outputs"]["y"]["max_abs"] == 0.0
    assert data["outputs"]["y"]["cosine"] == pytest.approx(1.0)
    code, data, _ = compare(capsys, files / "a.onnx", files / "b.onnx", "--tolerance", "1e-3")
    assert code == 1
    assert data["ok"] is False
    assert 0 < data["outputs"]["y"]["max_abs"] < 10
    code, _, _ = compare(capsys, files / "a.onnx", files / "b.onnx", "--tolerance", "100")
    assert code == 0
    code, _, _ = compare(capsys, files / "a.onnx", files / "b.onnx", "--rel-tolerance", "0.2")
    assert code == 0


def test_text_for_people(files, capsys):
    code, text, _ = compare(
        capsys, files / "a.onnx", files / "b.onnx", "--layers", "--bisect", "--rel-tolerance", "0.01", json_wanted=False
    )
    assert code == 1
    assert "FAIL y: max" in text
    assert "same class" in text
    assert "layers: 3 shared tensors" in text
    assert "MatMul       second" in text
    assert "the outputs differ by more than the tolerance" in text


def test_layers_and_bisect_in_json(files, capsys):
    arguments = ("--layers", "--bisect", "--rel-tolerance", "0.01")
    code, data, _ = compare(capsys, files / "a.onnx", files / "b.onnx", *arguments)
    assert code == 1
    assert [item["node"] for item in data["layers"]] == ["first", "act", "second"]
    assert [item["ok"] for item in data["layers"]] == [True, True, False]
    assert data["bisect"]["first"]["node"] == "second"
    assert data["bisect"]["layers"] == 3
    code, data, _ = compare(capsys, files / "a.onnx", files / "a.onnx", *arguments)
    assert code == 0
    assert data["bisect"]["first"] is None


def test_bundle_variants_use_the_golden_samples(tmp_path, capsys):
    path = bundle(tmp_path / "m.bundle")
    code, data, _ = compare(capsys, f"{path}@float", f"{path}@int8", "--rel-tolerance", "0.1")
    assert code == 0
    assert data["samples"] == 3
    assert "golden samples" in data["inputs"]
    assert data["a"]["model"].endswith("@float")
    code, data, _ = compare(capsys, f"{path}@float", path, "--samples", "2")
    assert code == 1
    assert data["samples"] == 2
    code, data, _ = compare(capsys, f"{path}@float", f"{path}@float", "--random")
    assert "random samples" in data["inputs"]
    plain = bundle(tmp_path / "plain.bundle", golden=False)
    code, data, _ = compare(capsys, plain, plain)
    assert code == 0
    assert "random samples" in data["inputs"]


def test_data_from_arrays(files, capsys):
    np.savez(files / "feeds.npz", x=np.random.default_rng(1).standard_normal((5, 1, 4)).astype(np.float32))
    code, data, _ = compare(capsys, files / "a.onnx", files / "a.onnx", "--data", files / "feeds.npz", "--samples", "3")
    assert code == 0
    assert data["samples"] == 3
    assert data["inputs"].endswith("feeds.npz")
    code, _, error = compare(capsys, files / "a.onnx", files / "a.onnx", "--data", files / "feeds.npz", "--size", "32")
    assert code == 2
    assert "--size is for images" in error


def test_seeds_and_shapes_of_random_inputs(files, capsys):
    runs = [
        compare(capsys, files / "a.onnx", files / "b.onnx", "--seed", seed, "--input", "x:7x4", "--samples", "1")[1]
        for seed in (1, 1, 2)
    ]
    assert runs[0]["outputs"]["y"]["shape"] == [7, 4]
    assert runs[0]["outputs"] == runs[1]["outputs"] != runs[2]["outputs"]


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["a.onnx", "wide.onnx"], 2, "A and B cannot be compared: input 'x'"),
        (["a.onnx", "missing.onnx"], 1, "missing.onnx: no such file"),
        (["a.onnx", "a.onnx@float"], 2, "is a file, and variants are a bundle's"),
        (["a.onnx", "m.bundle@"], 2, "no variant after '@'"),
        (["a.onnx", "m.bundle@int4"], 1, "holds no model variant 'int4'; it holds float, int8"),
        (["a.onnx", "a.onnx", "--tolerance", "nan"], 2, "absolute tolerance nan"),
        (["a.onnx", "a.onnx", "--samples", "0"], 2, "--samples 0"),
        (["a.onnx", "a.onnx", "--input", "z:1x4"], 2, "no such input"),
        (["a.onnx", "a.onnx", "--size", "320"], 2, "--size is for images"),
        (["a.onnx", "a.onnx", "--data", "none", "--random"], 2, "leave out --random"),
        (["a.onnx", "a.onnx", "--data", "none"], 1, "no such file or folder"),
        (["a.onnx", "a.onnx", "--backend-b", "gpu9"], 2, "backend 'gpu9' is unknown"),
        (["a.onnx", "a.onnx", "--backend-b", "null", "--layers"], 2, "layers are compared between ONNX models"),
        (["a.onnx", "broken.onnx"], 1, "broken.onnx"),
    ],
)
def test_mistakes_are_one_sentence(files, capsys, monkeypatch, arguments, code, words):
    bundle(files / "m.bundle")
    (files / "broken.onnx").write_bytes(b"not a model")
    monkeypatch.chdir(files)
    got, out, error = compare(capsys, *arguments)
    assert got == code, error
    assert words in error
    assert "Traceback" not in error
    assert len(error.strip().splitlines()) == 1
    assert not out


def test_nan_is_reported_and_fails_whatever_the_tolerance(files, capsys):
    broken = model()
    broken.graph.initializer[1].CopyFrom(numpy_helper.from_array(np.full((4, 4), np.nan, np.float32), "w2"))
    onnx.save(broken, files / "nan.onnx")
    code, data, _ = compare(capsys, files / "a.onnx", files / "nan.onnx", "--tolerance", "1e9", "--samples", "1")
    assert code == 1
    assert data["outputs"]["y"]["nan_b"] == 4
    assert data["outputs"]["y"]["non_finite_positions"][0] == [0, 0, 0]
    code, text, _ = compare(capsys, files / "a.onnx", files / "nan.onnx", json_wanted=False)
    assert "NaN or infinity on one side only at 8 places" in text
