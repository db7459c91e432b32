"""2:4 checker (issue 5 part 3): pattern along the summed axis, INT8 weights judged as stored, `edgeds inspect`."""

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper, save

from edgeds.graph.inspect import inspect_model
from edgeds.graph.sparse24 import check_24


def layer(op, weight, *, x_shape, quantized=False, **attrs):
    inits = [numpy_helper.from_array(weight, "w")]
    nodes, name = [], "w"
    if quantized:
        inits.append(numpy_helper.from_array(np.float32(0.1), "s"))
        nodes, name = [helper.make_node("DequantizeLinear", ["w", "s"], ["wf"], name="dq")], "wf"
    nodes.append(helper.make_node(op, ["x", name], ["y"], name="layer", **attrs))
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, x_shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        inits,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def pattern(shape, axis, dtype=np.float32):
    weight = np.ones(shape, dtype)
    moved = np.moveaxis(weight, axis, -1)
    moved[..., 1::4] = 0
    moved[..., 2::4] = 0
    return weight


@pytest.mark.parametrize("quantized", [False, True])
def test_conv_is_judged_along_its_input_channels(quantized):
    dtype = np.int8 if quantized else np.float32
    good = check_24(layer("Conv", pattern((4, 8, 3, 3), 1, dtype), x_shape=[1, 8, 6, 6], quantized=quantized))
    bad = check_24(layer("Conv", pattern((4, 8, 3, 4), 3, dtype), x_shape=[1, 8, 6, 6], quantized=quantized))
    assert [item.is_24 for item in (*good, *bad)] == [True, False]
    assert good[0].zeros_share == 0.5
    assert "hold more than two" in bad[0].reason


@pytest.mark.parametrize(("op", "axis", "attrs"), [("MatMul", 0, {}), ("Gemm", 0, {}), ("Gemm", 1, {"transB": 1})])
def test_products_are_judged_along_the_summed_axis(op, axis, attrs):
    assert check_24(layer(op, pattern((8, 8), axis), x_shape=[2, 8], **attrs))[0].is_24
    assert not check_24(layer(op, pattern((8, 8), 1 - axis), x_shape=[2, 8], **attrs))[0].is_24


def test_channel_counts_that_four_does_not_divide_are_named():
    (item,) = check_24(layer("Conv", np.zeros((4, 3, 1, 1), np.float32), x_shape=[1, 3, 6, 6]))
    assert not item.is_24
    assert "3 input channels" in item.reason


def test_inspect_lists_the_layers(tmp_path):
    path = tmp_path / "m.onnx"
    save(layer("Conv", pattern((4, 8, 3, 3), 1), x_shape=[1, 8, 6, 6]), path)
    assert inspect_model(path).to_json()["sparse_2_4"] == ["layer"]
