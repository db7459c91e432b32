"""Opset upgrades keep the meaning; shape inference with numbers, names and unknown dims."""

from __future__ import annotations

import numpy as np
import pytest
from graph_models import (
    branch_with_capture,
    build,
    image,
    node,
    old_squeeze,
    run,
    strided_heads,
    two_convs,
    value,
    weight,
)
from onnx import TensorProto, helper

from edgeds.errors import ModelError, SpecError
from edgeds.graph import opset as opset_module
from edgeds.graph.io import output_specs
from edgeds.graph.opset import require_opset
from edgeds.graph.shapes import assume_input_shapes, infer_shapes


def test_b04_real_upgrade_moves_axes_to_an_input():
    model = old_squeeze()
    before = model.SerializeToString()
    raised = require_opset(model, 13)
    assert raised.opset_import[0].version == 13
    assert raised.ir_version == 6
    squeeze = next(n for n in raised.graph.node if n.op_type == "Squeeze")
    assert squeeze.name == "squeeze"
    assert len(squeeze.input) == 2
    x = image(4, 3, 12, 12)
    np.testing.assert_allclose(run(raised, {"x": x})[0], run(model, {"x": x})[0], rtol=1e-5, atol=1e-6)
    assert model.SerializeToString() == before


CASES = {
    "softmax over the flattened rest": (10, [node("Softmax", ["x"], ["y"], "n", axis=1)], [2, 3, 4], {}),
    "softmax default axis": (11, [node("Softmax", ["x"], ["y"], "n")], [2, 3, 4], {}),
    "log softmax": (11, [node("LogSoftmax", ["x"], ["y"], "n", axis=1)], [2, 3, 4], {}),
    "unsqueeze": (11, [node("Unsqueeze", ["x"], ["y"], "n", axes=[0, 2])], [2, 3], {}),
    "reduce sum": (11, [node("ReduceSum", ["x"], ["y"], "n", axes=[1], keepdims=0)], [2, 3], {}),
    "reduce mean": (11, [node("ReduceMean", ["x"], ["y"], "n", axes=[-1])], [2, 3], {}),
    "split": (11, [node("Split", ["x"], ["y", "z"], "n", axis=1, split=[1, 3])], [2, 4], {}),
    "clip with attributes": (9, [node("Clip", ["x"], ["y"], "n", min=-0.5, max=0.5)], [2, 4], {}),
    "clip with one bound": (9, [node("Clip", ["x"], ["y"], "n", min=0.0)], [2, 4], {}),
    "pad with attributes": (9, [node("Pad", ["x"], ["y"], "n", pads=[0, 1, 0, 2], value=3.0)], [2, 4], {}),
    "slice with attributes": (9, [node("Slice", ["x"], ["y"], "n", axes=[1], starts=[1], ends=[9])], [2, 4], {}),
    "dropout": (11, [node("Dropout", ["x"], ["y"], "n", ratio=0.5)], [2, 4], {}),
    "top k": (9, [node("TopK", ["x"], ["y", "z"], "n", k=2)], [2, 4], {}),
    "upsample": (9, [node("Upsample", ["x", "s"], ["y"], "n", mode="nearest")], [1, 2, 3, 3], {"s": [1, 1, 2, 2]}),
    "upsample linear": (
        9,
        [node("Upsample", ["x", "s"], ["y"], "n", mode="linear")],
        [1, 2, 3, 3],
        {"s": [1, 1, 2, 2]},
    ),
    "resize nearest 10": (10, [node("Resize", ["x", "s"], ["y"], "n")], [1, 2, 3, 3], {"s": [1, 1, 1.5, 3]}),
    "resize 10": (10, [node("Resize", ["x", "s"], ["y"], "n", mode="linear")], [1, 2, 3, 3], {"s": [1, 1, 2, 2]}),
}


@pytest.mark.parametrize("target", [13, 17, 19])
@pytest.mark.parametrize("name", CASES)
def test_b04_known_changes_keep_the_numbers(name, target):
    """Each op whose form changed: the upgraded model gives the old model's numbers."""
    opset, nodes, shape, scales = CASES[name]
    weights = {key: np.float32(numbers) for key, numbers in scales.items()}
    outputs = [value(out, None, TensorProto.UNDEFINED) for out in nodes[0].output]
    for item in outputs:
        is_index = nodes[0].op_type == "TopK" and item.name == "z"
        item.type.tensor_type.elem_type = TensorProto.INT64 if is_index else TensorProto.FLOAT
    model = build(nodes, [value("x", shape)], outputs, weights, opset=opset, ir=6)
    raised = require_opset(model, target)
    x = image(*shape)
    for want, have in zip(run(model, {"x": x}), run(raised, {"x": x}), strict=True):
        np.testing.assert_allclose(have, want, rtol=1e-5, atol=1e-6)
    assert raised.opset_import[0].version == target
    assert "n" in {item.name for item in raised.graph.node}


def test_large_weights_metadata_and_names_pass_through():
    model = two_convs(opset=11, ir=6, metadata={"stride": "32"})
    raised = require_opset(model, 17)
    assert {p.key: p.value for p in raised.metadata_props} == {"stride": "32"}
    assert [n.name for n in raised.graph.node] == ["c1", "r1", "c2"]
    assert [i.name for i in raised.graph.input] == ["x"]
    x = image(1, 3, 12, 12)
    np.testing.assert_allclose(run(raised, {"x": x})[0], run(model, {"x": x})[0], rtol=1e-5, atol=1e-6)


def test_branches_upgrade_only_when_nothing_in_them_changed():
    raised = require_opset(branch_with_capture(), 17)
    feeds = {"x": image(1, 4, 8, 8), "flag": np.array(True)}
    np.testing.assert_allclose(run(raised, feeds)[0], run(branch_with_capture(), feeds)[0], rtol=1e-5)
    model = old_squeeze()
    inner = helper.make_graph([node("Squeeze", ["p"], ["i"], "inside", axes=[2, 3])], "b", [], [value("i", None)])
    model.graph.node[3].CopyFrom(node("If", ["flag"], ["s"], "if", then_branch=inner, else_branch=inner))
    model.graph.input.append(value("flag", [], TensorProto.BOOL))
    with pytest.raises(ModelError, match=r"'inside' \(Squeeze\).*opset 13"):
        require_opset(model, 13)


def test_an_unfaithful_conversion_is_refused(monkeypatch):
    model = old_squeeze()

    def broken(source, target):
        copy = type(source)()
        copy.CopyFrom(source)
        copy.graph.node[1].op_type = "Neg"
        del copy.graph.node[3].attribute[:]
        copy.opset_import[0].version = target
        return copy

    monkeypatch.setattr(opset_module.version_converter, "convert_version", broken)
    with pytest.raises(ModelError, match="not faithful"):
        require_opset(model, 13)


def test_newer_than_the_installed_onnx_is_refused():
    with pytest.raises(ModelError, match="upgrade onnx"):
        require_opset(two_convs(), 999)


def test_already_new_enough_is_a_copy():
    model = two_convs()
    same = require_opset(model, 13)
    assert same == model
    assert same is not model


@pytest.mark.parametrize(("height", "width", "rows"), [(640, 640, 8400), (384, 640, 5040), (320, 320, 2100)])
def test_b91_row_count_follows_the_image(height, width, rows):
    shaped = infer_shapes(strided_heads(), {"images": (2, 3, height, width)})
    assert output_specs(shaped)[0].shape == (2, 6, rows)


def test_equal_names_get_equal_sizes_and_conflicts_are_named():
    nodes = [node("Add", ["a", "b"], ["y"])]
    model = build(nodes, [value("a", ["N", 4]), value("b", ["N", 4])], [value("y", ["N", 4])])
    shaped = infer_shapes(model, {"a": (3, 4)})
    assert output_specs(shaped)[0].shape == (3, 4)
    with pytest.raises(SpecError, match=r"'N' is 2 here and 3 elsewhere"):
        infer_shapes(model, {"a": (3, 4), "b": (2, 4)})


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({"q": (1,)}, "no such input; it has x"),
        ({"x": (1, 3)}, "has 2 dims, the model wants 4"),
        ({"x": (1, 4, 12, 12)}, "fixes it to 3"),
        ({"x": (-1, 3, 12, 12)}, "whole number"),
        ({"x": (1.5, 3, 12, 12)}, "whole number"),
    ],
)
def test_shapes_that_do_not_fit_are_spec_errors(shapes, message):
    with pytest.raises(SpecError, match=message):
        infer_shapes(two_convs(), shapes)


def test_inference_without_shapes_keeps_names():
    assert output_specs(infer_shapes(strided_heads()))[0].shape[:2] == ("N", 6)


def test_defaults_come_from_metadata_and_are_said():
    model = strided_heads()
    assert assume_input_shapes(model).shapes == {"images": (1, 3, 640, 640)}
    helper.set_model_props(model, {"imgsz": "[320, 480]"})
    assumed = assume_input_shapes(model)
    assert assumed.shapes == {"images": (1, 3, 320, 480)}
    assert len(assumed.notes) == 3
    assert assume_input_shapes(model, {"images": (4, 3, 64, 64)}).shapes == {"images": (4, 3, 64, 64)}
    helper.set_model_props(model, {"imgsz": "__import__('os')"})
    assert assume_input_shapes(model).shapes["images"][2:] == (640, 640)


def test_sequence_defaults_share_names():
    inputs = [value(n, ["batch", "sequence"], TensorProto.INT64) for n in ("ids", "mask")]
    model = build([node("Add", ["ids", "mask"], ["y"])], inputs, [value("y", None, TensorProto.INT64)])
    assert assume_input_shapes(model).shapes == {"ids": (1, 128), "mask": (1, 128)}
    assert assume_input_shapes(model, {"ids": (2, 16)}).shapes == {"ids": (2, 16), "mask": (2, 16)}


def test_weights_are_not_serialised_for_inference(monkeypatch):
    """B07: what goes to the C++ side has no large weights in it."""
    from edgeds.graph import shapes as module

    seen = []
    real = module.onnx.shape_inference.infer_shapes
    monkeypatch.setattr(
        module.onnx.shape_inference, "infer_shapes", lambda m, **k: (seen.append(m.ByteSize()), real(m, **k))[1]
    )
    big = {"w": weight(300, 300)}
    model = build([node("MatMul", ["x", "w"], ["y"])], [value("x", ["N", 300])], [value("y", None)], big)
    assert output_specs(infer_shapes(model, {"x": (2, 300)}))[0].shape == (2, 300)
    assert max(seen) < 1000
