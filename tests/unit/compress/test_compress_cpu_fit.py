"""The CPU form keeps the accuracy of the TensorRT form (B04, B31): one 8-bit output scale must not cost channels."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from edgeds.compress.calibset import open_calibration
from edgeds.compress.quantize import quantize_model
from edgeds.graph.io import input_specs, load_model, open_session


def small_and_large_channels(path, *, spread, conv_name="conv"):
    """Conv whose first channels are ``spread`` times smaller, then a pooled Gemm that makes up for it."""
    rng = np.random.default_rng(4)
    weight = rng.normal(0, 0.3, (8, 3, 3, 3))
    weight[:4] *= spread
    dense = rng.normal(0, 0.5, (5, 8))
    dense[:, :4] /= spread
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], conv_name),
        helper.make_node("Relu", ["c"], ["r"], "relu"),
        helper.make_node("GlobalAveragePool", ["r"], ["p"], "pool"),
        helper.make_node("Flatten", ["p"], ["f"], "flat"),
        helper.make_node("Gemm", ["f", "d"], ["y"], "fc", transB=1),
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 3, 12, 12])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", 5])],
        [numpy_helper.from_array(value.astype(np.float32), name) for name, value in (("w", weight), ("d", dense))],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=7), path)
    return path


def quantized(tmp_path, *, spread):
    path = small_and_large_channels(tmp_path / "m.onnx", spread=spread)
    rng = np.random.default_rng(0)
    samples = rng.normal(size=(8, 3, 12, 12)).astype(np.float32)
    calibration = open_calibration({"x": samples}, model_inputs=input_specs(load_model(path)), preprocess=None)
    report = quantize_model(
        path, calibration, out=tmp_path / "q.onnx", cpu_out=tmp_path / "cpu.onnx", method="minmax", quiet=True
    )
    feed = {"x": rng.normal(size=(4, 3, 12, 12)).astype(np.float32)}
    outputs = [open_session(tmp_path / name).run(None, feed)[0] for name in ("m.onnx", "q.onnx", "cpu.onnx")]
    errors = [np.linalg.norm(value - outputs[0]) / np.linalg.norm(outputs[0]) for value in outputs[1:]]
    return report, errors


@pytest.mark.parametrize("spread", [1e-3, 1e-2])
def test_small_channels_survive_in_the_cpu_form(tmp_path, spread):
    report, (int8_error, cpu_error) = quantized(tmp_path, spread=spread)
    assert cpu_error < 2 * int8_error + 0.02
    assert report.cpu_sqnr_db is not None
    assert report.cpu_sqnr_db >= min(20, report.sqnr_db - 3)


def test_what_computes_in_float_is_said(tmp_path):
    report, _ = quantized(tmp_path, spread=1e-3)
    assert any("CPU form: output of 1 convolutions" in note and note.endswith("conv") for note in report.notes)


def test_even_channels_stay_integer(tmp_path):
    report, (_, cpu_error) = quantized(tmp_path, spread=1.0)
    assert cpu_error < 0.1
    assert not any("CPU form" in note for note in report.notes)
    ops = [node.op_type for node in onnx.load(tmp_path / "cpu.onnx").graph.node]
    assert ops.count("DequantizeLinear") >= 3


@pytest.mark.parametrize("shape", ["deep", "diamonds"])
def test_deep_and_branching_graphs_are_followed_in_linear_time(tmp_path, shape):
    """2,000 layout operators in a row, or 40 places where paths part and meet again (2^40 paths)."""
    nodes = [helper.make_node("Conv", ["x", "w"], ["t0"], "conv")]
    count = 2000 if shape == "deep" else 40
    for index in range(count):
        source, target = f"t{index}", f"t{index + 1}"
        if shape == "deep":
            nodes.append(helper.make_node("MaxPool", [source], [target], kernel_shape=[1, 1]))
        else:
            halves = [f"{source}_a", f"{source}_b"]
            nodes += [helper.make_node("MaxPool", [source], [half], kernel_shape=[1, 1]) for half in halves]
            nodes.append(helper.make_node("Concat", halves, [f"{source}_c"], axis=1))
            nodes.append(helper.make_node("Slice", [f"{source}_c", "start", "end", "axis"], [target]))
    nodes.append(helper.make_node("Relu", [f"t{count}"], ["y"]))
    stored = {"w": np.ones((2, 3, 1, 1), np.float32)}
    stored |= {name: np.array([value]) for name, value in (("start", 0), ("end", 2), ("axis", 1))}
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 3, 8, 8])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(value, name) for name, value in stored.items()],
    )
    path = tmp_path / "m.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=7), path)
    samples = np.random.default_rng(0).normal(size=(2, 3, 8, 8)).astype(np.float32)
    calibration = open_calibration({"x": samples}, model_inputs=input_specs(load_model(path)), preprocess=None)
    report = quantize_model(path, calibration, out=tmp_path / "q.onnx", cpu_out=tmp_path / "cpu.onnx", quiet=True)
    assert report.quantized_nodes == 1
