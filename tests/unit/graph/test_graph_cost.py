"""Cost per layer against hand counts, quantized models, unknown shapes; the zoo's detector."""

from __future__ import annotations

import numpy as np
import pytest
from graph_models import branch_with_capture, build, node, strided_heads, two_convs, value, weight
from onnx import TensorProto

from edgeds.errors import SpecError
from edgeds.graph.cost import count_cost
from edgeds.specs import to_json


def layer(cost, name):
    return next(item for item in cost.layers if item.node == name)


def test_convolutions_by_hand():
    cost = count_cost(two_convs(), {"x": (2, 3, 12, 12)})
    first = layer(cost, "c1")
    assert first.flops == 2 * (2 * 64 * 10 * 10) * (3 * 3 * 3)
    assert first.params == 64 * 27
    assert first.bytes_read == 4 * (2 * 3 * 144 + 64 * 27)
    assert first.bytes_written == 4 * 2 * 64 * 100
    assert first.int8_eligible
    assert first.precision == "float32"
    assert layer(cost, "r1").flops == 2 * 64 * 100
    assert cost.params == 64 * 27 + 16 * 64 * 9
    assert cost.int8_flops_share == 1.0
    assert cost.notes == ()


@pytest.mark.parametrize(
    ("make", "shape", "flops"),
    [
        (lambda: node("Conv", ["x", "w"], ["y"], "n", group=2), [1, 4, 8, 8], 2 * 6 * 36 * 2 * 9),
        (lambda: node("ConvTranspose", ["x", "w"], ["y"], "n", strides=[2, 2]), [1, 6, 8, 8], 2 * 6 * 64 * 2 * 9),
    ],
)
def test_grouped_and_transposed_convolutions_by_hand(make, shape, flops):
    model = build([make()], [value("x", shape)], [value("y", None)], {"w": weight(6, 2, 3, 3)})
    assert layer(count_cost(model), "n").flops == flops


def test_matrix_products_by_hand():
    nodes = [
        node("MatMul", ["x", "w"], ["a"], "mm"),
        node("MatMul", ["a", "at"], ["s"], "scores"),
        node("Softmax", ["s"], ["p"], "softmax"),
        node("Transpose", ["a"], ["at"], "tr", perm=[0, 2, 1]),
    ]
    nodes = [nodes[0], nodes[3], nodes[1], nodes[2]]
    model = build(nodes, [value("x", ["B", "S", 8])], [value("p", None)], {"w": weight(8, 12)})
    cost = count_cost(model, {"x": (2, 5, 8)})
    assert layer(cost, "mm").flops == 2 * 2 * 5 * 12 * 8
    assert layer(cost, "scores").flops == 2 * 2 * 5 * 5 * 12
    assert layer(cost, "softmax").flops == 5 * 2 * 5 * 5
    assert layer(cost, "tr").flops == 0
    gemm = build(
        [node("Gemm", ["x", "w"], ["y"], "fc", transA=1)], [value("x", [7, 3])], [value("y", None)], {"w": weight(7, 5)}
    )
    assert layer(count_cost(gemm), "fc").flops == 2 * 3 * 5 * 7


def quantized(*, second=True):
    """x -> Q/DQ -> Conv with int8 weight -> Relu -> (Q/DQ) -> Conv with int8 weight."""
    nodes, weights = [], {"zero": np.int8(0), "s": np.float32(0.02)}

    def pair(source, name):
        nodes.append(node("QuantizeLinear", [source, "s", "zero"], [f"{name}_q"], f"q_{name}"))
        nodes.append(node("DequantizeLinear", [f"{name}_q", "s", "zero"], [f"{name}_dq"], f"dq_{name}"))
        return f"{name}_dq"

    def stored(name, shape):
        weights[name] = np.ones(shape, np.int8)
        nodes.append(node("DequantizeLinear", [name, "s", "zero"], [f"{name}_f"], f"dq_{name}"))
        return f"{name}_f"

    nodes.append(node("Conv", [pair("x", "x"), stored("w1", (8, 3, 1, 1))], ["a"], "one"))
    nodes.append(node("Relu", ["a"], ["b"], "relu"))
    source = pair("b", "b") if second else "b"
    nodes.append(node("Conv", [source, stored("w2", (8, 8, 1, 1))], ["y"], "two"))
    return build(nodes, [value("x", [1, 3, 4, 4])], [value("y", None)], weights)


def test_b65_share_of_int8_flops_in_quantized_models():
    full = count_cost(quantized())
    assert full.is_quantized
    assert full.int8_flops_share == 1.0
    assert full.params == 8 * 3 + 8 * 8
    assert {item.precision for item in full.layers if item.op == "Conv"} == {"int8"}
    half = count_cost(quantized(second=False))
    assert half.int8_flops_share == pytest.approx(3 / 11)


def test_quantized_bytes_are_int8_where_the_engine_moves_int8():
    cost = count_cost(quantized())
    assert layer(cost, "one").bytes_read == 3 * 16 + 8 * 3
    assert layer(cost, "relu").bytes_written == 8 * 16
    assert layer(cost, "q_b").bytes_read == 0
    assert layer(cost, "q_x").bytes_read == 4 * 3 * 16
    assert layer(cost, "dq_b").bytes_written == 0
    assert all(item.flops == 0 for item in cost.layers if item.op.endswith("Linear"))


def test_shared_weights_count_once():
    nodes = [node("Conv", ["x", "w"], ["a"], "one"), node("Conv", ["a", "w"], ["y"], "two")]
    model = build(nodes, [value("x", [1, 4, 4, 4])], [value("y", None)], {"w": weight(4, 4, 1, 1)})
    assert count_cost(model).params == 16


def test_unknown_shapes_come_from_one_run():
    nodes = [
        node("NonZero", ["x"], ["i"], "find"),
        node("Shape", ["i"], ["s"], "shape"),
        node("ConstantOfShape", ["s"], ["z"], "zeros"),
        node("Range", ["lo", "n", "step"], ["r"], "range"),
        node("Relu", ["r"], ["y"], "relu"),
    ]
    weights = {"lo": np.float32(0), "step": np.float32(1)}
    inputs = [value("x", [3]), value("n", [])]
    model = build(nodes, inputs, [value("y", None), value("z", None)], weights)
    cost = count_cost(model)
    assert layer(cost, "relu").flops == 0
    assert count_cost(strided_heads(), {"images": (1, 3, 64, 64)}).notes == ()


def test_shapes_that_cannot_be_found_are_said():
    nodes = [node("Reshape", ["x", "s"], ["r"], "rs"), node("Relu", ["r"], ["y"], "relu")]
    model = build(nodes, [value("x", [4]), value("s", [3], TensorProto.INT64)], [value("y", None)])
    assert any("unknown shapes" in note for note in count_cost(model).notes)


def test_huge_shapes_allocate_nothing():
    cost = count_cost(two_convs(), {"x": (100_000, 3, 12, 12)})
    assert cost.flops > 1e11


def test_branches_count_the_costlier_one():
    cost = count_cost(branch_with_capture(), {"x": (1, 4, 8, 8)})
    assert layer(cost, "choose").flops == 2 * 4 * 64 * 36 + 4 * 64
    assert cost.params == 4 * 4 * 9


def test_wrong_input_name_is_a_spec_error():
    with pytest.raises(SpecError, match="no such input"):
        count_cost(two_convs(), {"images": (1, 3, 12, 12)})


def test_json_form_is_plain_and_the_model_is_untouched():
    model = two_convs()
    before = model.SerializeToString()
    data = to_json(count_cost(model))
    assert set(data) == {"inputs", "layers", "notes"}
    assert set(data["layers"][0]) == {
        *("node", "op", "flops", "params", "bytes_read", "bytes_written", "int8_eligible", "precision"),
        *("reads", "sparse_24", "elements"),
    }
    assert model.SerializeToString() == before


def test_edges_point_at_the_layers_that_made_the_inputs():
    layers = count_cost(two_convs()).layers
    assert layers[0].reads == ()
    assert all(index - 1 in one.reads for index, one in enumerate(layers) if index)
    assert all(source < index for index, one in enumerate(layers) for source in one.reads)


def test_elements_are_of_activations_alone():
    first = count_cost(two_convs(), {"x": (2, 3, 12, 12)}).layers[0]
    read, written = first.elements
    assert read == 2 * 3 * 12 * 12
    assert first.bytes_written == 4 * written


def test_half_precision_halves_the_bytes():
    nodes = [node("Conv", ["x", "w"], ["y"], "n")]
    model = build(
        nodes,
        [value("x", [1, 3, 4, 4], TensorProto.FLOAT16)],
        [value("y", None, TensorProto.FLOAT16)],
        {"w": weight(2, 3, 1, 1, dtype=np.float16)},
    )
    cost = count_cost(model)
    assert layer(cost, "n").bytes_read == 2 * (48 + 6)
    assert layer(cost, "n").precision == "float16"


@pytest.mark.zoo
def test_yolo11n_costs_what_its_authors_state():
    """6.5 GFLOPs and 2.6 M parameters at 640 (model card of YOLO11n)."""
    from edgeds.graph.io import load_model
    from edgeds.zoo import fetch_model

    cost = count_cost(load_model(fetch_model("yolo11n", quiet=True)), {"images": (1, 3, 640, 640)})
    assert cost.flops / 1e9 == pytest.approx(6.5, rel=0.03)
    assert cost.params / 1e6 == pytest.approx(2.6, rel=0.02)
