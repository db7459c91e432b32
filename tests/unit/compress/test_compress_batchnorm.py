"""BatchNorm statistics after pruning (issue 5 part 1): a shifted input gives the dense output again."""

import numpy as np
import onnxruntime as ort
from compress_models import Net
from onnx import helper, numpy_helper

from edgeds.compress.batchnorm import restat_batchnorm
from edgeds.compress.reconstruct import reconstruct
from edgeds.graph.view import GraphView


def build():
    net = Net(seed=2)
    net.input("x", [1, 4, 8, 8])
    weight = net.w(6, 4, 1, 1)
    y = net.op("Conv", "x", weight)
    stats = [net.w(value=np.full(6, v, np.float32)) for v in (1.0, 0.5, 0.1, 2.0)]
    net.output(net.op("BatchNormalization", y, *stats, label="bn"))
    tensors = [numpy_helper.from_array(array, name) for name, array in net.weights.items()]
    graph = helper.make_graph(net.nodes, "g", net.inputs, net.outputs, tensors)
    return net, helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), weight, stats, y


def run(model, x):
    return ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"]).run(None, {"x": x})[0]


def feeds():
    rng = np.random.default_rng(0)
    return [{"x": rng.normal(1, 1, (1, 4, 8, 8)).astype(np.float32)} for _ in range(8)]


def test_statistics_follow_a_scaled_input():
    net, dense, weight, stats, _ = build()
    view = GraphView(dense)
    view.set_constant(weight, view.constant(weight) * np.float32(0.5))
    assert restat_batchnorm(GraphView(dense), view, {}, feeds()) == (net.names["bn"],)
    np.testing.assert_allclose(view.constant(stats[3]), np.full(6, 0.5), rtol=1e-4)
    x = feeds()[0]["x"]
    before, after = run(dense, x), run(view.finish(), x)
    np.testing.assert_allclose(after.std((0, 2, 3)), before.std((0, 2, 3)), rtol=1e-3)
    np.testing.assert_allclose(
        np.mean([run(dense, f["x"]).mean((0, 2, 3)) for f in feeds()], 0),
        np.mean([run(view.model, f["x"]).mean((0, 2, 3)) for f in feeds()], 0),
        atol=1e-3,
    )


def test_pruned_channels_are_matched_through_the_mapping():
    net, dense, weight, stats, y = build()
    keep = np.array([0, 2, 5])
    view = GraphView(dense)
    view.set_constant(weight, view.constant(weight)[keep])
    for name in stats:
        view.set_constant(name, view.constant(name)[keep])
    pruned = view.finish()
    report = reconstruct(dense, pruned, {y: keep}, feeds(), quiet=True)
    assert report.batchnorms == (net.names["bn"],)
    x = feeds()[0]["x"]
    np.testing.assert_allclose(run(report.model, x), run(dense, x)[:, keep], atol=1e-4)
    assert reconstruct(dense, pruned, {}, feeds(), quiet=True).batchnorms == ()
