"""Constant folding and BatchNormalization folding keep the numbers and the names."""

from __future__ import annotations

import numpy as np
import pytest
from graph_models import branch_with_capture, build, hidden_weights, image, node, run, value, weight
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto

from edgeds.graph.fold import fold_batchnorm, fold_constants


def same(model, folded, feeds, *, tolerance=1e-5):
    for want, have in zip(run(model, feeds), run(folded, feeds), strict=True):
        np.testing.assert_allclose(have, want, rtol=tolerance, atol=tolerance)


def test_b01_hidden_weights_become_initializers():
    model = hidden_weights()
    before = model.SerializeToString()
    folded = fold_constants(model)
    assert [n.op_type for n in folded.graph.node] == ["Conv", "Relu", "Conv", "Conv"]
    assert [n.name for n in folded.graph.node if n.op_type == "Conv"] == ["conv1", "conv2", "conv3"]
    stored = {t.name: t.data_type for t in folded.graph.initializer}
    assert stored == {"w1": TensorProto.FLOAT, "w2": TensorProto.FLOAT, "w3": TensorProto.FLOAT}
    same(model, folded, {"x": image(2, 3, 16, 16)})
    assert model.SerializeToString() == before


def test_chains_fold_and_growth_is_bounded():
    nodes = [
        node("Transpose", ["w"], ["t"], "tr"),
        node("Reshape", ["t", "s"], ["r"], "rs"),
        node("Expand", ["r", "huge"], ["e"], "grow"),
        node("ReduceSum", ["e", "axes"], ["z"], "sum", keepdims=0),
        node("MatMul", ["x", "r"], ["m"], "mm"),
        node("Add", ["m", "z"], ["y"], "add"),
    ]
    weights = {"w": weight(4, 6), "s": np.array([6, 4]), "huge": np.array([1 << 22, 6, 4]), "axes": np.array([0, 1])}
    folded = fold_constants(build(nodes, [value("x", ["N", 6])], [value("y", ["N", 4])], weights))
    assert [n.name for n in folded.graph.node] == ["grow", "sum", "mm", "add"]


def test_random_quantize_and_output_nodes_stay():
    nodes = [
        node("RandomNormal", [], ["noise"], "noise", shape=[2]),
        node("QuantizeLinear", ["w", "s", "z"], ["q"], "q"),
        node("DequantizeLinear", ["q", "s", "z"], ["d"], "dq"),
        node("Add", ["x", "d"], ["y"], "add"),
        node("Neg", ["w"], ["neg"], "neg"),
        node("Add", ["noise", "x"], ["n"], "noisy"),
    ]
    weights = {"w": weight(2), "s": np.float32(0.1), "z": np.int8(0)}
    outputs = [value("y", [2]), value("neg", [2]), value("n", [2])]
    folded = fold_constants(build(nodes, [value("x", [2])], outputs, weights))
    assert {n.name for n in folded.graph.node} == {"noise", "q", "dq", "add", "neg", "noisy"}


def test_captured_constants_fold_without_breaking_the_branch():
    model = branch_with_capture()
    model.graph.initializer[1].name = "half"
    model.graph.node.insert(0, node("Identity", ["half"], ["scale"], "same"))
    folded = fold_constants(model)
    assert [n.name for n in folded.graph.node] == ["outer", "choose"]
    for flag in (True, False):
        same(model, folded, {"x": image(1, 4, 8, 8), "flag": np.array(flag)})


def bn_weights(channels, *, seed=3):
    generator = np.random.default_rng(seed)
    return {
        "g": (1 + 0.2 * generator.standard_normal(channels)).astype(np.float32),
        "b": generator.standard_normal(channels).astype(np.float32),
        "m": generator.standard_normal(channels).astype(np.float32),
        "v": (0.1 + generator.random(channels)).astype(np.float32),
    }


@settings(max_examples=25, deadline=None)
@given(
    group=st.sampled_from([1, 2, 4]),
    transposed=st.booleans(),
    bias=st.booleans(),
    epsilon=st.sampled_from([1e-5, 1e-3, 0.1]),
    seed=st.integers(0, 100),
)
def test_b51_batchnorm_folds_into_conv(group, transposed, bias, epsilon, seed):
    """Any grouping, either direction: the same numbers, the name kept, no BatchNormalization left."""
    inputs, outputs = 8, 12
    shape = (inputs, outputs // group, 3, 2) if transposed else (outputs, inputs // group, 3, 2)
    weights = {"w": weight(*shape, seed=seed), **bn_weights(outputs, seed=seed)}
    names = ["x", "w"]
    if bias:
        weights["c"] = weight(outputs, seed=seed + 1)
        names.append("c")
    op = "ConvTranspose" if transposed else "Conv"
    nodes = [
        node(op, names, ["a"], "layer", group=group),
        node("BatchNormalization", ["a", "g", "b", "m", "v"], ["n"], "bn", epsilon=epsilon),
        node("Relu", ["n"], ["y"], "relu"),
    ]
    model = build(nodes, [value("x", ["N", inputs, 6, 6])], [value("y", ["N", outputs, None, None])], weights)
    folded = fold_batchnorm(model)
    assert [n.name for n in folded.graph.node] == ["layer", "relu"]
    same(model, folded, {"x": image(2, inputs, 6, 6, seed=seed)}, tolerance=2e-4)


@pytest.mark.parametrize("trans_b", [0, 1])
@pytest.mark.parametrize("bias", [None, (5,), (1,), (1, 5)])
def test_batchnorm_folds_into_gemm_with_alpha_and_beta(trans_b, bias):
    weights = {"w": weight(5, 8) if trans_b else weight(8, 5), **bn_weights(5)}
    names = ["x", "w"]
    if bias:
        weights["c"] = weight(*bias, seed=4)
        names.append("c")
    nodes = [
        node("Gemm", names, ["a"], "fc", transB=trans_b, alpha=0.5, beta=2.0),
        node("BatchNormalization", ["a", "g", "b", "m", "v"], ["y"], "bn"),
    ]
    model = build(nodes, [value("x", ["N", 8])], [value("y", ["N", 5])], weights)
    folded = fold_batchnorm(model)
    assert [n.name for n in folded.graph.node] == ["fc"]
    same(model, folded, {"x": image(3, 8)}, tolerance=2e-4)


@pytest.mark.parametrize("why", ["second reader", "graph output", "computed scale"])
def test_batchnorm_stays_where_folding_would_be_wrong(why):
    nodes = [
        node("Conv", ["x", "w"], ["a"], "conv"),
        node("BatchNormalization", ["a", "g", "b", "m", "v"], ["y"], "bn"),
    ]
    outputs, inputs = [value("y", None)], [value("x", ["N", 3, 4, 4])]
    weights = {"w": weight(6, 3, 1, 1), **bn_weights(6)}
    if why == "second reader":
        nodes.append(node("Neg", ["a"], ["z"], "neg"))
        outputs.append(value("z", None))
    elif why == "graph output":
        outputs.append(value("a", None))
    else:
        inputs.append(value("g", [6]))
        del weights["g"]
    folded = fold_batchnorm(build(nodes, inputs, outputs, weights))
    assert "bn" in {n.name for n in folded.graph.node}


def test_shared_weight_is_copied_not_changed():
    nodes = [
        node("Conv", ["x", "w"], ["a"], "one"),
        node("BatchNormalization", ["a", "g", "b", "m", "v"], ["n"], "bn"),
        node("Conv", ["x", "w"], ["c"], "two"),
        node("Add", ["n", "c"], ["y"], "add"),
    ]
    weights = {"w": weight(6, 3, 1, 1), **bn_weights(6)}
    model = build(nodes, [value("x", ["N", 3, 4, 4])], [value("y", None)], weights)
    folded = fold_batchnorm(model)
    assert "bn" not in {n.name for n in folded.graph.node}
    same(model, folded, {"x": image(1, 3, 4, 4)}, tolerance=1e-4)
