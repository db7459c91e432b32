"""First-order importance (issue 5 part 1): exact where outputs are linear in a unit, BatchNorm, bad input."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from edgeds.compress.groups import find_groups
from edgeds.compress.importance import score_groups
from edgeds.compress.prune import PruneOptions, prune_model
from edgeds.errors import SpecError
from edgeds.graph.view import GraphView

pytest.importorskip("torch")
from edgeds.compress.taylor import taylor_scores


def build(nodes, weights, inputs, outputs):
    infos = [
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in side]
        for side in (inputs, outputs)
    ]
    tensors = [numpy_helper.from_array(value.astype(np.float32), name) for name, value in weights.items()]
    graph = helper.make_graph(nodes, "net", *infos, tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def convolutions(seed=0, *, norm=False):
    """Two convolutions of kernel 1 with a bias between: linear in each of the eight units."""
    rng = np.random.default_rng(seed)
    weights = {"w0": rng.normal(size=(8, 3, 1, 1)), "b0": rng.normal(size=8), "w1": rng.normal(size=(5, 8, 1, 1))}
    nodes = [helper.make_node("Conv", ["x", "w0", "b0"], ["a"], "c0")]
    last = "a"
    if norm:
        weights |= {"s": rng.uniform(0.1, 2, 8), "t": rng.normal(size=8), "m": np.zeros(8), "v": np.ones(8)}
        nodes.append(helper.make_node("BatchNormalization", ["a", "s", "t", "m", "v"], ["n"], "bn"))
        last = "n"
    nodes.append(helper.make_node("Conv", [last, "w1"], ["y"], "c1"))
    return build(nodes, weights, [("x", ["n", 3, 4, 4])], [("y", ["n", 5, 4, 4])]), weights


def samples(count=3):
    rng = np.random.default_rng(9)
    return [{"x": rng.normal(size=(1, 3, 4, 4)).astype(np.float32)} for _ in range(count)]


def effects(weights, feeds):
    """What each unit adds to the outputs, relative to them: root mean square over samples."""
    found = []
    for feed in feeds:
        hidden = np.einsum("oi,nihw->nohw", weights["w0"][..., 0, 0], feed["x"]) + weights["b0"][:, None, None]
        if "s" in weights:
            hidden = hidden / np.sqrt(1 + 1e-5) * weights["s"][:, None, None] + weights["t"][:, None, None]
        parts = hidden[:, None] * weights["w1"][None, :, :, 0, 0, None, None]  # [n, out, unit, h, w]
        norm = np.linalg.norm(parts.sum(axis=2))
        found.append(np.square(parts).sum(axis=(0, 1, 3, 4)) / norm**2)
    return np.sqrt(np.mean(found, axis=0))


@pytest.mark.parametrize("norm", [False, True])
def test_scores_are_the_change_of_the_outputs_where_they_are_linear(norm):
    model, weights = convolutions(norm=norm)
    groups = find_groups(GraphView(model, copy=False))
    feeds = samples()
    (group,) = groups.groups
    found = taylor_scores(model, groups, feeds, projections=600, quiet=True)[group.index]
    np.testing.assert_allclose(found, effects(weights, feeds), rtol=0.15)


def test_scores_repeat_and_a_dead_unit_scores_nothing():
    model, _ = convolutions()
    for tensor in model.graph.initializer:
        if tensor.name == "w1":
            value = numpy_helper.to_array(tensor).copy()
            value[:, 3] = 0
            tensor.CopyFrom(numpy_helper.from_array(value, "w1"))
    groups = find_groups(GraphView(model, copy=False))
    first, second = (score_groups(model, groups, method="taylor", feeds=samples(), quiet=True)[0] for _ in range(2))
    np.testing.assert_array_equal(first, second)
    assert first[3] == 0
    assert (np.delete(first, 3) > 0).all()


def test_pruning_by_it_removes_what_matters_least(tmp_path):
    model, weights = convolutions(seed=4)
    onnx.save(model, tmp_path / "m.onnx")
    options = PruneOptions(method="taylor", multiple=1, reconstruct=False)
    feeds = samples(8)
    report = prune_model(
        tmp_path / "m.onnx", out=tmp_path / "o.onnx", ratio=0.25, calibration=feeds, options=options, quiet=True
    )
    assert report.method == "taylor"
    kept = numpy_helper.to_array(next(t for t in onnx.load(tmp_path / "o.onnx").graph.initializer if t.name == "b0"))
    gone = {at for at, value in enumerate(weights["b0"].astype(np.float32)) if value not in kept}
    assert gone <= set(np.argsort(effects(weights, feeds))[:3])
    assert len(gone) == 2


def test_it_needs_samples():
    model, _ = convolutions()
    groups = find_groups(GraphView(model, copy=False))
    with pytest.raises(SpecError, match=r"method taylor .* give --calib"):
        score_groups(model, groups, method="taylor", quiet=True)
