"""Lint: the one finding that matters, by name, once."""

from __future__ import annotations

import numpy as np
import pytest
from graph_models import branch_with_capture, build, node, two_convs, value
from onnx import TensorProto, numpy_helper

from edgeds.graph.lint import lint_model

FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64


def found(model, name):
    return [(f.level, f.message) for f in lint_model(model) if f.node == name]


def test_clean_model_has_only_the_note_on_dynamic_dims():
    findings = lint_model(two_convs())
    assert [(f.node, f.level) for f in findings] == [("x", "info")]
    assert "N" in findings[0].message


def test_b08_slice_ends_are_harmless_and_factors_are_not():
    nodes = [
        node("Slice", ["ids", "start", "end", "axis"], ["s"], "slice"),
        node("Mul", ["s", "big"], ["m"], "mul"),
        node("Mod", ["m", "p"], ["r"], "mod"),
        node("Add", ["r", "big"], ["y"], "add"),
    ]
    weights = {"start": [1], "end": [2**63 - 1], "axis": [0], "big": 2**33, "p": 1000003}
    weights = {key: np.asarray(number, np.int64) for key, number in weights.items()}
    model = build(nodes, [value("ids", [6], INT64)], [value("y", None, INT64)], weights)
    assert [level for level, _ in found(model, "end")] == ["info"]
    assert [level for level, _ in found(model, "big")] == ["warning"]
    assert "'mul'" in found(model, "big")[0][1]
    assert found(model, "p") == []


def test_b08_constant_nodes_count_too():
    big = numpy_helper.from_array(np.int64([-(2**40)]), "v")
    nodes = [node("Constant", [], ["c"], "k", value=big), node("Add", ["ids", "c"], ["y"], "add")]
    model = build(nodes, [value("ids", [1], INT64)], [value("y", None, INT64)])
    assert [level for level, _ in found(model, "c")] == ["warning"]


def test_b64_half_precision_overflow():
    nodes = [
        node("Pow", ["x", "two"], ["sq"], "square"),
        node("ReduceMean", ["sq"], ["m"], "mean", axes=[-1]),
        node("Add", ["m", "mask"], ["y"], "add"),
    ]
    weights = {"two": np.float32(2), "mask": np.float32([-1e12])}
    model = build(nodes, [value("x", [2, 8])], [value("y", None)], weights)
    assert found(model, "mean")[0][0] == "warning"
    assert "'add'" in found(model, "mask")[0][1]
    for fill, level in ((np.inf, "warning"), (np.nan, "error"), (65504.0, None)):
        model.graph.initializer[1].CopyFrom(numpy_helper.from_array(np.float32([fill]), "mask"))
        assert [item for item, _ in found(model, "mask")] == ([level] if level else [])


def test_operators_that_tensorrt_lacks():
    nodes = [
        node("NonZero", ["x"], ["i"], "find"),
        node("Plugin", ["x"], ["p"], "mine", domain="vendor"),
        node("TopK", ["x", "k"], ["v", "w"], "top"),
    ]
    model = build(
        nodes,
        [value("x", [5000])],
        [value("i", [1, "k"], INT64), value("p", [5000]), value("v", [4000]), value("w", [4000], INT64)],
        {"k": np.array([4000])},
        extra_opsets=[("vendor", 1)],
    )
    assert found(model, "find")[0][0] == "warning"
    assert found(model, "mine")[0] == (
        "error",
        "operator vendor.Plugin is not ONNX: TensorRT needs a plugin of that name",
    )
    assert "3840" in found(model, "top")[0][1]


def test_nodes_in_branches_are_seen():
    model = branch_with_capture()
    model.graph.node[1].attribute[1].g.node.append(node("NonZero", ["a"], ["nz"], "deep"))
    assert found(model, "deep")[0][0] == "warning"
    assert found(model, "choose")[0][0] == "info"


@pytest.mark.parametrize(
    ("opset", "level"), [(8, "warning"), (13, None), (17, None), (19, "info"), (21, "warning"), (26, "warning")]
)
def test_opset_by_tensorrt_version(opset, level):
    assert [item for item, _ in found(two_convs(opset=opset), "model")] == ([level] if level else [])


def test_element_types():
    inputs = [value("d", [2], TensorProto.DOUBLE), value("s", [2], TensorProto.STRING)]
    outputs = [value("y", [2], TensorProto.DOUBLE), value("t", [2], TensorProto.STRING)]
    model = build([node("Neg", ["d"], ["y"], "neg"), node("Identity", ["s"], ["t"], "id")], inputs, outputs)
    assert found(model, "d")[0][0] == "warning"
    assert found(model, "s") == [("error", "is string, which TensorRT does not take")]


def qdq(*, zero=None, scale=0.1, axis=None, data=None, op="Conv", zero_input=True, activation_scale=0.1, opset=17):
    """x -> Q -> DQ -> op(weight through DQ)."""
    stored = np.ones((4, 3, 1, 1), np.int8) if data is None else data
    zero = np.zeros(np.shape(scale), np.int8) if zero is None else zero
    names = ["w", "ws", "wz"] if zero_input else ["w", "ws"]
    attrs = {} if axis is None else {"axis": axis}
    nodes = [
        node("QuantizeLinear", ["x", "s", "z"], ["q"], "q"),
        node("DequantizeLinear", ["q", "s", "z"], ["dq"], "dq"),
        node("DequantizeLinear", names, ["wf"], "dw", **attrs),
        node(op, ["dq", "wf"], ["y"], "layer"),
    ]
    weights = {
        "s": np.asarray(activation_scale, np.float32),
        "z": np.zeros(np.shape(activation_scale), np.int8),
        "w": stored,
        "ws": np.asarray(scale, np.float32),
        "wz": zero,
    }
    return build(nodes, [value("x", [1, 3, 2, 2])], [value("y", None)], weights, opset=opset)


def test_the_form_every_tensorrt_takes_is_clean():
    assert lint_model(qdq()) == []
    assert lint_model(qdq(scale=[0.1] * 4, axis=0)) == []


@pytest.mark.parametrize(
    ("options", "node_name", "level", "text"),
    [
        ({"zero": np.int8(3)}, "dw", "error", "not 0"),
        ({"data": np.ones((4, 3, 1, 1), np.uint8), "zero": np.uint8(0)}, "dw", "error", "uint8"),
        ({"data": np.ones((4, 3, 1, 1), np.int32), "zero": np.int32(0)}, "dw", "error", "bias"),
        ({"zero_input": False}, "dw", "warning", "no zero point"),
        ({"scale": 0.0}, "dw", "error", "not positive"),
        ({"scale": float("nan")}, "dw", "error", "not positive"),
        ({"scale": [0.1] * 4}, "dw", "error", "no axis"),
        ({"scale": [0.1] * 3, "axis": 1}, "dw", "error", "output channels of Conv are axis 0"),
        ({"scale": [0.1] * 3, "axis": 0}, "dw", "error", "which has 4 channels"),
        ({"scale": [0.1] * 4, "axis": 7}, "dw", "error", "does not exist"),
        ({"activation_scale": [0.1] * 3}, "q", "error", "activation per channel"),
    ],
)
def test_each_way_to_write_qdq_wrongly_is_named(options, node_name, level, text):
    assert any(item == level and text in message for item, message in found(qdq(**options), node_name))


def test_integer_operators_are_refused():
    model = build(
        [node("MatMulInteger", ["a", "b"], ["y"], "mm")],
        [value("a", [2, 2], TensorProto.INT8), value("b", [2, 2], TensorProto.INT8)],
        [value("y", None, TensorProto.INT32)],
    )
    assert found(model, "mm")[0][0] == "error"


def test_errors_come_first_and_the_model_is_untouched():
    model = qdq(zero=np.int8(3))
    model.graph.input.append(value("unused", ["N"]))
    before = model.SerializeToString()
    levels = [f.level for f in lint_model(model)]
    assert levels == sorted(levels, key=["error", "warning", "info"].index)
    assert model.SerializeToString() == before


def test_unused_constants_and_weights_are_quiet():
    model = two_convs()
    model.graph.initializer.append(numpy_helper.from_array(np.int64([2**40]), "unused"))
    assert found(model, "unused") == []
