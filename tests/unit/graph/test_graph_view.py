"""The editable view: uses through subgraphs, names, edits, order, types."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from graph_models import branch_with_capture, build, hidden_weights, image, node, run, two_convs, value, weight
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper

from edgeds.errors import ModelError
from edgeds.graph.view import GraphView


def test_reading_leaves_the_model_alone_and_finds_everything():
    model = two_convs()
    before = model.SerializeToString()
    view = GraphView(model)
    assert view.producer("a").name == "c1"
    assert view.producer("x") is None
    assert [n.name for n in view.consumers("a")] == ["r1"]
    assert view.is_output("y")
    assert view.is_input("x")
    assert view.constant("w1").shape == (64, 3, 3, 3)
    assert view.constant("a") is None
    assert view.shape("b") == ("N", 64, 10, 10)
    assert view.dtype("b") == np.float32
    assert view.dtype("no such tensor") is None
    view.add_constant("c", np.float32(1))
    assert model.SerializeToString() == before


def test_nodes_without_or_with_repeated_names_get_stable_unique_ones():
    nodes = [node("Relu", ["x"], ["a"]), node("Relu", ["a"], ["b"], "same"), node("Relu", ["b"], ["y"], "same")]
    model = build(nodes, [value("x", [1])], [value("y", [1])])
    names = [n.name for n in GraphView(model).nodes]
    assert names == ["Relu_0", "same", "same_1"]
    assert [n.name for n in GraphView(model).finish().graph.node] == names


def test_b09_uses_in_branches_count_and_survive():
    """Replacing the outer weight keeps the one that the branch reads; both branches run and match."""
    model = branch_with_capture()
    view = GraphView(model)
    assert view.used_in_subgraph("w")
    assert view.used_in_subgraph("scale")
    assert not view.used_in_subgraph("x")
    outer = view.producer("a")
    view.replace_input(outer, "w", view.add_constant("w_copy", view.constant("w")))
    result = view.finish()
    assert {"w", "w_copy", "scale"} <= {t.name for t in result.graph.initializer}
    for flag in (True, False):
        feeds = {"x": image(1, 4, 8, 8), "flag": np.array(flag)}
        np.testing.assert_allclose(run(result, feeds)[0], run(model, feeds)[0], rtol=1e-5, atol=1e-6)


def test_b09_order_holds_across_captures():
    """A node added after the If that feeds its branch is moved before it."""
    view = GraphView(branch_with_capture())
    view.make_node("Mul", ["w", view.add_constant("two", np.float32(2))], ["w_twice"], name="twice")
    view.replace_uses("w", "w_twice")
    view.replace_input(view.producer("w_twice"), "w_twice", "w")
    result = view.finish()
    assert [n.name for n in result.graph.node] == ["twice", "outer", "choose"]
    onnx.checker.check_model(result, full_check=True)


def test_b55_one_pair_per_consumer_has_unique_names():
    nodes = [node("Relu", ["x"], ["t"], "r")]
    nodes += [node("Conv", ["t", "w"], [f"y{i}"], f"conv{i}") for i in range(3)]
    outputs = [value(f"y{i}", ["N", 2, 4, 4]) for i in range(3)]
    model = build(nodes, [value("x", ["N", 3, 4, 4])], outputs, {"w": weight(2, 3, 1, 1)})
    view = GraphView(model)
    scale, zero = view.add_constant("scale", np.float32(0.05)), view.add_constant("zero", np.int8(0))
    for reader in view.consumers("t"):
        quantized, back = view.fresh_name("t_q"), view.fresh_name("t_dq")
        view.make_node("QuantizeLinear", ["t", scale, zero], [quantized], name="t_QuantizeLinear")
        view.make_node("DequantizeLinear", [quantized, scale, zero], [back], name="t_DequantizeLinear")
        view.replace_input(reader, "t", back)
    result = view.finish()
    names = [n.name for n in result.graph.node]
    assert len(names) == len(set(names)) == 10
    assert len(run(result, {"x": image(1, 3, 4, 4)})) == 3


def test_dead_nodes_initializers_and_stale_shapes_are_dropped():
    view = GraphView(two_convs())
    view.model.graph.value_info.append(value("gone", [1]))
    view.make_node("Neg", ["a"], ["unused"], name="n")
    view.add_constant("unused_weight", weight(2))
    result = view.finish()
    assert [n.name for n in result.graph.node] == ["c1", "r1", "c2"]
    assert {t.name for t in result.graph.initializer} == {"w1", "w2"}
    assert "gone" not in {v.name for v in result.graph.value_info}


def test_missing_tensor_and_cycle_are_named():
    view = GraphView(two_convs())
    view.remove_node(view.producer("a"))
    with pytest.raises(ModelError, match=r"'r1'.*'a'"):
        view.finish()
    view = GraphView(two_convs())
    view.replace_input(view.producer("a"), "x", "b")
    with pytest.raises(ModelError, match="cycle"):
        view.finish()


def test_two_producers_are_refused():
    view = GraphView(two_convs())
    with pytest.raises(ModelError, match="'a' already exists"):
        view.make_node("Relu", ["x"], ["a"])
    model = build(
        [node("Relu", ["x"], ["y"], "one"), node("Neg", ["x"], ["y"], "two")], [value("x", [1])], [value("y", [1])]
    )
    with pytest.raises(ModelError, match=r"'one'.*'two'"):
        GraphView(model)


def test_empty_optional_inputs_are_not_tensors():
    weights = {"scales": np.float32([1, 1, 2, 2])}
    model = build(
        [node("Resize", ["x", "", "scales"], ["y"], "up", mode="nearest")],
        [value("x", ["N", 1, 2, 2])],
        [value("y", ["N", 1, 4, 4])],
        weights,
    )
    view = GraphView(model)
    assert view.consumers("") == []
    assert view.shape("") is None
    view.finish()


def test_constants_keep_scalar_shape_and_every_attribute_form():
    nodes = [
        node("Constant", [], ["i"], value_int=3),
        node("Constant", [], ["f"], value_floats=[1.0, 2.0]),
        node("Cast", ["i"], ["c"], to=TensorProto.FLOAT),
        node("Mul", ["c", "f"], ["m"]),
        node("Add", ["m", "x"], ["y"]),
    ]
    view = GraphView(build(nodes, [value("x", [2])], [value("y", [2])]))
    assert view.constant("i").shape == ()
    assert view.constant("f").tolist() == [1.0, 2.0]
    assert view.constant(view.add_constant("s", np.int8(0))).shape == ()


def test_edits_before_and_after_type_lookup_agree():
    """Node objects stay usable after shapes were inferred in between."""
    view = GraphView(two_convs())
    first = view.producer("a")
    assert view.shape("a") == ("N", 64, 10, 10)
    view.replace_input(first, "w1", view.add_constant("w1b", weight(64, 3, 3, 3, seed=7)))
    assert view.shape("b") == ("N", 64, 10, 10)
    result = view.finish()
    assert result.graph.node[0].input[1] == "w1b"


def test_wrong_stored_shapes_do_not_block_an_edit():
    """Exporters that write clashing intermediate shapes: the hints go, the model stays."""
    model = two_convs()
    model.graph.value_info.append(value("a", [1, 2, 3]))
    result = GraphView(model).finish()
    assert "a" not in {v.name for v in result.graph.value_info}


def test_constant_node_weight_is_constant():
    view = GraphView(hidden_weights())
    assert view.is_constant("w1")
    assert not view.is_constant("w2")


@settings(max_examples=30, deadline=None)
@given(st.permutations(range(6)))
def test_any_node_order_is_sorted_and_computes_the_same(order):
    names = ["x", *(f"t{i}" for i in range(5)), "y"]
    nodes = [node(op, [a], [b], f"n{a}") for op, a, b in zip(["Relu", "Neg"] * 3, names, names[1:], strict=False)]
    straight = build(nodes, [value("x", [4])], [value("y", [4])])
    shuffled = build([nodes[i] for i in order], [value("x", [4])], [value("y", [4])])
    x = image(4)
    np.testing.assert_array_equal(run(GraphView(shuffled).finish(), {"x": x})[0], run(straight, {"x": x})[0])


def test_loop_bodies_are_walked():
    body = helper.make_graph(
        [node("Add", ["carry", "step"], ["next"], "grow"), node("Identity", ["more"], ["again"], "keep")],
        "body",
        [value("i", [], TensorProto.INT64), value("more", [], TensorProto.BOOL), value("carry", [2])],
        [value("again", [], TensorProto.BOOL), value("next", [2])],
    )
    model = build(
        [node("Loop", ["n", "", "x"], ["y"], "loop", body=body)],
        [value("x", [2]), value("n", [], TensorProto.INT64)],
        [value("y", [2])],
        {"step": np.float32([1, 2])},
    )
    view = GraphView(model)
    assert view.used_in_subgraph("step")
    result = view.finish()
    feeds = {"x": np.zeros(2, np.float32), "n": np.array(3)}
    assert run(result, feeds)[0].tolist() == [3, 6]
