"""``edgeds inspect`` and ``inspect_model``: keys, tables, engine files, wrong use."""

from __future__ import annotations

import argparse
import json
import struct

import pytest
from graph_models import hidden_weights, two_convs

from edgeds.cli import inspect as verb
from edgeds.errors import ModelError, SpecError
from edgeds.graph.inspect import inspect_model


def call(*arguments):
    parser = argparse.ArgumentParser()
    verb.add_arguments(parser)
    return verb.run(parser.parse_args([str(item) for item in arguments]))


@pytest.fixture
def path(tmp_path):
    target = tmp_path / "m.onnx"
    target.write_bytes(two_convs(metadata={"task": "detect", "names": "{0: 'a'}"}).SerializeToString())
    return target


def test_figures_have_the_same_names_in_python_and_json(path):
    info = inspect_model(path)
    data = info.to_json()
    for name in ("inputs", "outputs", "ops", "params", "flops", "bytes", "int8_flops_share", "lint"):
        value = getattr(info, name)
        assert value == data[name] or len(value) == len(data[name]), name
    assert info.flops == info.cost.flops > 0


def test_json_has_the_contract_keys_and_is_one_document(path, capsys):
    assert call(path, "--input", "x:2x3x12x12", "--json") == 0
    data = json.loads(capsys.readouterr().out)
    assert {"inputs", "outputs", "ops", "params", "flops", "bytes", "int8_flops_share", "lint"} <= set(data)
    assert data["inputs"] == [{"name": "x", "dtype": "float32", "shape": ["N", 3, 12, 12]}]
    assert data["ops"] == {"Conv": 2, "Relu": 1}
    assert data["cost_inputs"] == {"x": [2, 3, 12, 12]}
    assert set(data["lint"][0]) == {"node", "level", "message"}
    assert data["metadata"]["task"] == "detect"


def test_table_names_layers_and_findings(path, capsys):
    assert call(path) == 0
    text = capsys.readouterr().out
    for part in (
        "x: float32[Nx3x12x12]",
        "GFLOPs",
        "100.0% of the Conv and MatMul FLOPs can run in INT8",
        "c2",
        "lint",
    ):
        assert part in text


def test_unnamed_nodes_get_a_name_in_reports(tmp_path):
    path = tmp_path / "m.onnx"
    path.write_bytes(hidden_weights().SerializeToString())
    info = inspect_model(path)
    assert "Relu_2" in {layer.node for layer in info.cost.layers}
    assert info.cost.params == 8 * 27 + 8 * 8 * 9 + 4 * 8


def test_b60_engine_file_shows_its_metadata(tmp_path, capsys):
    header = json.dumps({"stride": 32, "task": "detect"}).encode()
    path = tmp_path / "m.engine"
    path.write_bytes(struct.pack("<i", len(header)) + header + b"ftrt" + bytes(1000))
    assert call(path, "--json") == 0
    data = json.loads(capsys.readouterr().out)
    assert data["kind"] == "tensorrt plan"
    assert data["plan_bytes"] == 1004
    assert data["metadata"] == {"stride": "32", "task": "detect"}
    assert call(path) == 0
    assert "TensorRT plan" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["x", "x:", ":1x3", "x:1x", "x:1xax3", "x:-1x3", "x:1,3"])
def test_malformed_shapes_are_named(path, text):
    with pytest.raises(SpecError, match="NAME:SHAPE"):
        call(path, "--input", text)


def test_repeated_and_unknown_inputs_are_named(path):
    with pytest.raises(SpecError, match="given twice"):
        call(path, "--input", "x:1x3x12x12", "--input", "x:2x3x12x12")
    with pytest.raises(SpecError, match="no such input"):
        call(path, "--input", "images:1x3x12x12")


def test_names_may_hold_colons():
    assert verb.parse_shapes(["serving:0:1x2"]) == {"serving:0": (1, 2)}


def test_missing_file_is_a_model_error(tmp_path):
    with pytest.raises(ModelError, match="No such file"):
        call(tmp_path / "none.onnx")
