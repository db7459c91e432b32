"""``edgeds sparsify`` (issue 5 part 3): file written, JSON, limits, wrong use."""

import json

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from edgeds.cli.main import main


@pytest.fixture
def model(tmp_path):
    weight = np.random.default_rng(0).normal(size=(64, 32)).astype(np.float32)
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"], name="fc")],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [4, 64])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [4, 32])],
        [numpy_helper.from_array(weight, "w")],
    )
    path = tmp_path / "m.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


def test_it_writes_the_model_and_inspect_names_the_layer(model, tmp_path, capsys):
    out, calib = tmp_path / "s.onnx", tmp_path / "calib"
    calib.mkdir()
    for index in range(8):
        np.savez(calib / f"{index}.npz", x=np.random.default_rng(index).normal(size=(4, 64)).astype(np.float32))
    assert main(["sparsify", str(model), "--calib", str(calib), "--out", str(out), "--max-error", "1", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["method"], data["sparse_2_4"]) == ("second-order", ["fc"])
    assert main(["inspect", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["sparse_2_4"] == ["fc"]


def test_a_limit_that_no_layer_meets_fails_and_writes_nothing(model, tmp_path, capsys):
    out = tmp_path / "s.onnx"
    assert main(["sparsify", str(model), "--out", str(out), "--max-error", "0.001"]) == 1
    assert "above the limit" in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.parametrize("extra", [["--method", "second-order"], ["--size", "320"], ["--max-error", "nan"]])
def test_wrong_use_exits_with_2(model, tmp_path, extra):
    assert main(["sparsify", str(model), "--out", str(tmp_path / "s.onnx"), *extra]) == 2
