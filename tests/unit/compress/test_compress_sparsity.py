"""2:4 sparsity (issue 5 part 3): pattern, second order against magnitude, per-layer choice, Q/DQ, bad input."""

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from compress_models import Net
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import helper, numpy_helper

from edgeds.compress.calibset import open_calibration
from edgeds.compress.quantize import quantize_model
from edgeds.compress.sparsity import check_24, keep_24, second_order_24, sparsify
from edgeds.errors import ModelError, SpecError
from edgeds.graph.io import input_specs, load_model


def build(*, channels=16, group=1):
    net = Net(seed=5)
    x = net.input("x", [1, channels, 10, 10])
    a = net.op("Relu", net.op("Conv", x, net.w(32, channels // group, 3, 3), net.w(32), label="a", group=group))
    net.output(net.op("Conv", a, net.w(8, 32, 1, 1), net.w(8), label="b"))
    tensors = [numpy_helper.from_array(array, name) for name, array in net.weights.items()]
    graph = helper.make_graph(net.nodes, "g", net.inputs, net.outputs, tensors)
    return net, helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def feeds(count, *, channels=16, seed=0):
    rng = np.random.default_rng(seed)
    mix = rng.normal(size=(channels, 6))
    draw = [np.einsum("ck,khw->chw", mix, rng.normal(size=(6, 10, 10)))[None] for _ in range(count)]
    return [{"x": item.astype(np.float32)} for item in draw]


def run(model, x):
    return ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"]).run(None, {"x": x})[0]


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 6), st.integers(1, 5), st.integers(0, 1000))
def test_exactly_the_two_largest_of_four_stay(rows, blocks, seed):
    score = np.random.default_rng(seed).integers(0, 3, (rows, blocks * 4)).astype(float)
    kept = keep_24(score).reshape(-1, 4)
    assert (kept.sum(1) == 2).all()
    fours = score.reshape(-1, 4)
    for four, mask in zip(fours, kept, strict=True):
        assert four[mask].min() >= four[~mask].max()


def test_second_order_changes_the_output_less_than_magnitude():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(500, 8)) @ rng.normal(size=(8, 32)) + 0.1 * rng.normal(size=(500, 32))
    weight = rng.normal(size=(12, 32))
    sparse = second_order_24(weight, x.T @ x)
    assert ((sparse.reshape(-1, 4) == 0).sum(1) >= 2).all()
    plain = weight * keep_24(np.abs(weight))
    lost = [np.square(x @ (w - weight).T).sum() for w in (sparse, plain)]
    assert lost[0] < 0.4 * lost[1]


def test_second_order_with_independent_inputs_is_magnitude():
    weight = np.random.default_rng(1).normal(size=(6, 16))
    np.testing.assert_allclose(second_order_24(weight, np.eye(16)), weight * keep_24(np.abs(weight)), atol=1e-12)


@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("method", ["magnitude", "second-order"])
def test_layers_become_24_and_second_order_is_closer_on_unseen_samples(method, group):
    net, model = build(group=group)
    report = sparsify(model, feeds(8), method=method, max_error=1, min_weights=1, quiet=True)
    assert report.sparse == (net.names["a"], net.names["b"])
    assert all(item.is_24 for item in check_24(report.model))
    x = feeds(1, seed=0)[0]["x"]
    if method == "second-order":
        plain = sparsify(model, max_error=1, min_weights=1, quiet=True).model
        errors = [np.square(run(m, x) - run(model, x)).sum() for m in (report.model, plain)]
        assert errors[0] < errors[1]


def test_layers_are_left_dense_by_name_size_error_and_channel_count():
    net, model = build()
    left = {item.node: item.reason for item in sparsify(model, max_error=1, quiet=True).layers}
    assert left[net.names["a"]] is None
    assert "256 weights" in left[net.names["b"]]
    assert sparsify(model, max_error=1, exclude=[net.names["a"]], quiet=True).sparse == ()
    tight = sparsify(model, max_error=1e-6, quiet=True)
    assert "above the limit" in tight.layers[0].reason
    _, model = build(channels=6)
    assert "6 input channels" in sparsify(model, quiet=True).layers[0].reason


def test_zeros_stay_zero_through_quantization(tmp_path):
    _, model = build()
    path = tmp_path / "sparse.onnx"
    onnx.save(sparsify(model, max_error=1, min_weights=1, quiet=True).model, path)
    specs = input_specs(load_model(path))
    calibration = open_calibration(feeds(4), model_inputs=specs, preprocess=None)
    out = tmp_path / "int8.onnx"
    quantize_model(path, calibration, out=out, quiet=True)
    checked = check_24(load_model(out))
    assert [item.is_24 for item in checked] == [True, True]
    with pytest.raises(ModelError, match="quantized already"):
        sparsify(load_model(out), quiet=True)


def test_bad_options_are_refused():
    _, model = build()
    for options in ({"method": "best"}, {"method": "second-order"}, {"max_error": 0}, {"exclude": ["no such node"]}):
        with pytest.raises(SpecError):
            sparsify(model, quiet=True, **options)
