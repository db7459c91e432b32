"""Least-squares reconstruction after pruning (issue 5 part 1, second half) and the moments it rests on."""

import numpy as np
import onnxruntime as ort
import pytest
from compress_models import Net
from onnx import numpy_helper

from edgeds.compress.moments import LinearLayer, collect_moments, find_layer, measure
from edgeds.compress.reconstruct import reconstruct, solve
from edgeds.errors import CalibrationError, SpecError
from edgeds.graph.view import GraphView


def run(model, x):
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, {"x": x})[0]


def chain(*, group=1, bias=True, kernel=3, stride=1, shared=False):
    """conv (8 channels, correlated) -> relu -> conv -> relu -> conv."""
    net = Net(seed=3)
    x = net.input("x", ["n", 4, 12, 12])
    basis, mix = net.rng.normal(0, 1, (5, 4)), net.rng.uniform(0.2, 1, (8, 5))
    first = net.w(value=(mix @ basis).reshape(8, 4, 1, 1).astype(np.float32))
    a = net.op("Relu", net.op("Conv", x, first, net.w(8)))
    second = net.w(6, 8 // group, kernel, kernel)
    extra = [net.w(6)] if bias else []
    pad = kernel // 2
    out = net.op("Conv", a, second, *extra, label="two", group=group, pads=[pad] * 4, strides=[stride] * 2)
    if shared:
        net.output(net.op("Conv", a, second, pads=[pad] * 4))
    b = net.op("Relu", out)
    net.output(net.op("Conv", b, net.w(3, 6, 1, 1), net.w(3), label="three"))
    return net, first, second, out


def cut(net_model, first, second, keep):
    view = GraphView(net_model)
    view.set_constant(first, view.constant(first)[keep])
    conv = view.consumers(first)[0]
    view.set_constant(conv.input[2], view.constant(conv.input[2])[keep])
    view.set_constant(second, view.constant(second)[:, keep])
    del view.model.graph.value_info[:]
    return view.finish()


def feeds(count, seed=0):
    rng = np.random.default_rng(seed)
    return [{"x": rng.normal(0, 1, (1, 4, 12, 12)).astype(np.float32)} for _ in range(count)]


def model_of(net):
    from onnx import helper

    tensors = [numpy_helper.from_array(array, name) for name, array in net.weights.items()]
    graph = helper.make_graph(net.nodes, "g", net.inputs, net.outputs, tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("kernel", [1, 3])
def test_fitted_layers_come_closer_to_the_dense_outputs_on_unseen_samples(kernel, stride):
    net, first, second, _ = chain(kernel=kernel, stride=stride)
    dense = model_of(net)
    pruned = cut(dense, first, second, [0, 2, 3, 5, 6, 7])
    report = reconstruct(dense, pruned, {}, feeds(12), every_layer=False, quiet=True)
    x = feeds(4, seed=9)
    errors = [sum(np.square(run(m, f["x"]) - run(dense, f["x"])).sum() for f in x) for m in (pruned, report.model)]
    assert errors[1] < 0.35 * errors[0]
    assert [fit.node for fit in report.layers] == [net.names["two"]]
    assert report.layers[0].after < report.layers[0].before


def test_moments_are_those_of_the_patches_that_convolution_multiplies():
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(2, 6, 7, 5)).astype(np.float32), rng.normal(size=(4, 3, 3, 2)).astype(np.float32)
    net = Net()
    net.input("x", list(x.shape))
    attrs = {"group": 2, "pads": [1, 0, 2, 1], "strides": [2, 1], "dilations": [1, 2]}
    y = net.op("Conv", "x", net.w(value=w), net.w(4), **attrs)
    net.output(y)
    model = model_of(net)
    view = GraphView(model)
    layer = find_layer(view, view.nodes[0])
    assert isinstance(layer, LinearLayer)
    found = measure(layer, x, run(model, x), rng=rng, count=10**6)
    exact = np.concatenate([layer.matrix(w), view.constant(layer.bias).reshape(2, 2, 1)], axis=2)
    assert found.error(exact) < 1e-5 * found.square
    np.testing.assert_allclose(solve(found, exact * 0.5, 1e-12, w), exact, atol=1e-3)


def test_depthwise_and_biasless_layers_are_solved_too():
    for group, bias in ((2, False), (1, False)):
        net, _first, second, _ = chain(group=group, bias=bias)
        dense = model_of(net)
        view = GraphView(dense)
        view.set_constant(second, view.constant(second) * np.float32(0.5))
        report = reconstruct(dense, view.finish(), {}, feeds(12), quiet=True)
        fit = next(item for item in report.layers if item.node == net.names["two"])
        assert fit.after < 0.1 * fit.before


def test_products_are_fitted_in_both_layouts():
    for trans in (0, 1):
        net = Net(seed=1)
        net.input("x", ["n", 8])
        w = net.w(8, 4) if not trans else net.w(4, 8)
        net.output(net.op("Gemm", "x", w, net.w(4), label="fc", transB=trans))
        dense = model_of(net)
        view = GraphView(dense)
        view.set_constant(w, view.constant(w) * np.float32(0.3))
        rng = np.random.default_rng(0)
        data = [{"x": rng.normal(size=(16, 8)).astype(np.float32)} for _ in range(8)]
        report = reconstruct(dense, view.finish(), {}, data, quiet=True)
        np.testing.assert_allclose(run(report.model, data[0]["x"]), run(dense, data[0]["x"]), atol=5e-3)


def test_shared_weights_and_unmapped_outputs_keep_their_weights_and_say_why():
    net, first, second, _ = chain(shared=True)
    dense = model_of(net)
    report = reconstruct(dense, cut(dense, first, second, [0, 1, 2, 3, 4]), {}, feeds(8), every_layer=False, quiet=True)
    assert {fit.ridge for fit in report.layers} == {None}
    assert all("shares" in fit.reason for fit in report.layers)


def test_layers_that_are_already_right_keep_their_weights():
    net, *_ = chain()
    dense = model_of(net)
    report = reconstruct(dense, dense, {}, feeds(8), quiet=True)
    x = feeds(1, seed=5)[0]["x"]
    np.testing.assert_allclose(run(report.model, x), run(dense, x), atol=1e-5)
    assert reconstruct(dense, dense, {}, feeds(8), every_layer=False, quiet=True).layers == ()


def test_too_few_samples_are_refused_and_nan_is_left_out():
    net, first, second, _ = chain()
    dense = model_of(net)
    pruned = cut(dense, first, second, [0, 1, 2, 3, 4])
    with pytest.raises(CalibrationError, match="at least two"):
        reconstruct(dense, pruned, {}, feeds(1), quiet=True)
    with pytest.raises(SpecError):
        reconstruct(dense, pruned, {}, feeds(4), samples=1)
    bad = [{"x": np.full((1, 4, 12, 12), np.nan, np.float32)}] * 4
    (fit,) = reconstruct(dense, pruned, {}, bad, every_layer=False, quiet=True).layers
    assert "NaN" in fit.reason


def test_moments_do_not_depend_on_how_samples_are_split():
    net, *_ = chain()
    model = model_of(net)
    view = GraphView(model)
    layer = find_layer(view, next(node for node in view.nodes if node.name == net.names["two"]))
    fit, held = collect_moments(model, layer, feeds(8), quiet=True)
    assert (fit.rows, held.rows) == (6 * 144, 2 * 144)
    np.testing.assert_allclose((fit + held).gram, (held + fit).gram)
