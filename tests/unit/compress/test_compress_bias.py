"""Bias correction of linear layers: the mean output of what is quantized is that of the float layer."""

import numpy as np
import pytest
from compress_models import Net, run

from edgeds.compress.bias import correct_biases
from edgeds.compress.placement import Selection, plan_placement
from edgeds.compress.qdq import insert_qdq
from edgeds.compress.ranges import TensorRange
from edgeds.compress.tail import EMPTY_TAIL
from edgeds.graph.view import GraphView


def linear(kind, *, shared=False):
    net = Net(seed=3)
    x = net.input("x", ["n", 7, 6] if kind == "MatMul" else ["n", 6])
    weight, bias = net.rng.normal(size=(6, 5)).astype(np.float32), net.w(5)
    if kind == "MatMul":
        y = net.op("Add", net.op("MatMul", x, net.w(value=weight)), bias)
    elif kind == "Gemm":
        y = net.op("Gemm", x, net.w(value=weight), bias)
    else:
        y = net.op("Gemm", x, net.w(value=np.ascontiguousarray(weight.T)), bias, transB=1)
    net.output(y, None)
    if shared:
        net.output(net.op("Mul", bias, net.w(value=np.float32(2))), [5])
    return net.model()


def plan_and_ranges(model, threshold):
    plan = plan_placement(GraphView(model), EMPTY_TAIL, Selection())
    found = TensorRange(threshold=threshold, minimum=0.0, maximum=4.0, count=10, note=None)
    return plan, dict.fromkeys(plan.tensors, found)


def feeds(kind):
    rng = np.random.default_rng(5)
    shape = (4, 7, 6) if kind == "MatMul" else (16, 6)
    return [{"x": np.abs(rng.normal(size=shape)).astype(np.float32)} for _ in range(3)]


@pytest.mark.parametrize("kind", ["MatMul", "Gemm", "transB"])
def test_the_mean_shift_of_clipping_is_taken_back(kind):
    model, samples = linear(kind), feeds(kind)
    plan, ranges = plan_and_ranges(model, 1.0)  # clips a third of the values
    mean = {}
    for name, base in (("float", None), ("plain", model), ("fixed", correct_biases(model, plan, ranges, samples))):
        built = model if base is None else insert_qdq(base, plan, ranges)
        mean[name] = np.mean([run(built, sample)[0].reshape(-1, 5).mean(axis=0) for sample in samples], axis=0)
    assert np.abs(mean["plain"] - mean["float"]).max() > 0.05
    np.testing.assert_allclose(mean["fixed"], mean["float"], atol=1e-4)


def test_means_are_measured_once(monkeypatch):
    model, samples = linear("Gemm"), feeds("Gemm")
    plan, ranges = plan_and_ranges(model, 1.0)
    known = {}
    first = correct_biases(model, plan, ranges, samples, known=known)
    assert len(known) == 1
    monkeypatch.setattr("edgeds.compress.bias.run_feeds", None)
    assert correct_biases(model, plan, ranges, samples, known=known) == first


def test_a_bias_that_others_read_stays():
    model, samples = linear("MatMul", shared=True), feeds("MatMul")
    plan, ranges = plan_and_ranges(model, 1.0)
    assert correct_biases(model, plan, ranges, samples) == model
