"""Equalisation and smooth-quant (issue 5 part 5): exact in float, smaller outliers, nothing else touched."""

import numpy as np
import pytest
from compress_models import FLOAT, Net, relative, run
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import numpy_helper

from edgeds.compress.seams import equalize, find_seams
from edgeds.compress.smoothquant import product_error, smooth, smooth_factors
from edgeds.graph.view import GraphView


def uneven(rng, size, spread=2.0):
    return np.exp(rng.normal(0, spread, size)).astype(np.float32)


def conv_chain(seed=0, act="Relu", depthwise=False):
    net = Net(seed=seed)
    x = net.input("x", ["n", 3, 10, 10])
    scale = uneven(net.rng, 8)
    first = net.rng.normal(size=(8, 3, 3, 3)).astype(np.float32) * scale[:, None, None, None]
    a = net.op("Conv", x, net.w(value=first), net.w(value=net.rng.normal(size=8).astype(np.float32) * scale))
    a = net.op(act, a) if act else a
    if depthwise:
        a = net.op("Relu", net.op("Conv", a, net.w(8, 1, 3, 3), net.w(8), group=8))
    second = net.rng.normal(size=(6, 8, 3, 3)).astype(np.float32) / scale[None, :, None, None]
    net.output(net.op("Conv", a, net.w(value=second), net.w(6)), ["n", 6, "h", "w"])
    return net.model()


def post_norm_block(seed=0, spread=2.0):
    """LayerNorm -> three projections and a shortcut, as BERT has it; then LayerNorm -> one projection only."""
    net = Net(seed=seed)
    x = net.input("x", ["n", 5, 16])
    h = net.op("LayerNormalization", x, net.w(value=uneven(net.rng, 16, spread)), net.w(16))
    parts = [net.op("Add", net.op("MatMul", h, net.w(16, 16)), net.w(16)) for _ in range(3)]
    mixed = net.op("Add", net.op("Add", net.op("Mul", parts[0], parts[1]), parts[2]), h)
    h2 = net.op("LayerNormalization", mixed, net.w(value=uneven(net.rng, 16, spread)), net.w(16))
    net.output(net.op("Add", net.op("MatMul", h2, net.w(16, 4)), net.w(4)), ["n", 5, 4])
    return net.model()


def feeds(model, seed=1, count=3):
    rng = np.random.default_rng(seed)
    shape = [2 if not dim.dim_value else dim.dim_value for dim in model.graph.input[0].type.tensor_type.shape.dim]
    return [{"x": rng.normal(size=shape).astype(np.float32)} for _ in range(count)]


def same(a, b, samples):
    for sample in samples:
        assert relative(run(a, sample)[0], run(b, sample)[0]) < 1e-5


@pytest.mark.parametrize("act", ["Relu", "LeakyRelu", "Identity", "MaxPool"])
def test_equalisation_is_exact_and_evens_the_ranges(act):
    model = conv_chain(act=act if act != "MaxPool" else None) if act != "MaxPool" else pooled()
    moved = equalize(model)
    assert len(moved.seams) == 1
    same(model, moved.model, feeds(model))
    weights = [numpy_helper.to_array(i) for i in moved.model.graph.initializer if len(i.dims) == 4]
    first = next(w for w in weights if w.shape[1] == 3)
    second = next(w for w in weights if w.shape[1] == 8)
    np.testing.assert_allclose(np.abs(first).max(axis=(1, 2, 3)), np.abs(second).max(axis=(0, 2, 3)), rtol=1e-2)


def pooled():
    net = Net(seed=4)
    x = net.input("x", ["n", 3, 10, 10])
    a = net.op("MaxPool", net.op("Conv", x, net.w(8, 3, 3, 3), net.w(8)), kernel_shape=[2, 2])
    net.output(net.op("Conv", a, net.w(6, 8, 1, 1)), ["n", 6, "h", "w"])
    return net.model()


def test_equalisation_runs_through_depthwise_convolutions():
    model = conv_chain(depthwise=True)
    moved = equalize(model)
    assert len(moved.seams) == 2
    same(model, moved.model, feeds(model))


@pytest.mark.parametrize("act", ["Sigmoid", "HardSwish", "Tanh", "Clip"])
def test_activations_that_do_not_scale_are_left_alone(act):
    model = conv_chain(act=act)
    assert equalize(model).seams == ()


def test_a_tensor_that_somebody_else_reads_is_left_alone():
    net = Net(seed=4)
    x = net.input("x", ["n", 3, 8, 8])
    a = net.op("Relu", net.op("Conv", x, net.w(8, 3, 1, 1)))
    net.output(net.op("Conv", a, net.w(6, 8, 1, 1)), ["n", 6, 8, 8])
    net.output(net.op("Sigmoid", a), ["n", 8, 8, 8])
    assert equalize(net.model()).seams == ()


def test_a_shared_weight_is_left_alone():
    net = Net(seed=4)
    x = net.input("x", ["n", 4, 8, 8])
    weight = net.w(4, 4, 1, 1)
    net.output(net.op("Conv", net.op("Relu", net.op("Conv", x, weight)), weight), ["n", 4, 8, 8])
    assert equalize(net.model()).seams == ()


def test_dead_channels_stay_finite():
    net = Net(seed=4)
    x = net.input("x", ["n", 3, 8, 8])
    first, second = net.rng.normal(size=(8, 3, 1, 1)), net.rng.normal(size=(6, 8, 1, 1))
    first[2], second[:, 5] = 0, 0
    a = net.op("Relu", net.op("Conv", x, net.w(value=first.astype(np.float32))))
    net.output(net.op("Conv", a, net.w(value=second.astype(np.float32))), ["n", 6, 8, 8])
    model = net.model()
    moved = equalize(model)
    assert all(np.isfinite(numpy_helper.to_array(i)).all() for i in moved.model.graph.initializer)
    same(model, moved.model, feeds(model))


def test_smoothing_a_transformer_is_exact_with_and_without_new_nodes():
    model = post_norm_block()
    samples = feeds(model)
    whole = smooth(model, samples, alpha=0.5)
    assert whole.added == 1, "the first norm also feeds the shortcut, the second is free"
    assert len(whole.seams) == 2
    same(model, whole.model, feeds(model, seed=9))
    free = smooth(model, samples, alpha=0.5, insert=False)
    assert free.added == 0
    assert len(free.seams) == 1
    same(model, free.model, feeds(model, seed=9))


def test_smoothing_shrinks_the_outliers_of_what_is_rounded():
    model = post_norm_block()
    samples = feeds(model)
    smoothed = smooth(model, samples).model
    view = GraphView(smoothed)
    tensors = {seam.tensor for seam in find_seams(view)}
    muls = [node.output[0] for node in view.nodes if node.name.endswith("_Smooth")]
    assert set(muls) <= tensors

    def spread(given, tensor):
        probe = GraphView(given).model
        probe.graph.output.append(type(probe.graph.output[0])(name=tensor))
        value = np.abs(run(probe, samples[0])[-1]).reshape(-1, 16).max(axis=0)
        return value.max() / np.median(value)

    before = GraphView(model).nodes[0].output[0]
    assert spread(smoothed, muls[0]) < 0.5 * spread(model, before)


@given(st.integers(0, 10_000), st.floats(0.0, 1.0))
@settings(max_examples=20, deadline=None)
def test_any_strength_is_exact(seed, alpha):
    model = post_norm_block(seed=seed, spread=1.0)
    same(model, smooth(model, feeds(model), alpha=alpha).model, feeds(model, seed=9))


def test_gemm_with_and_without_transposed_weights():
    for transposed in (0, 1):
        net = Net(seed=6)
        x = net.input("x", ["n", 5])
        a = net.op("Relu", net.op("Gemm", x, net.w(*((7, 5) if transposed else (5, 7))), net.w(7), transB=transposed))
        net.output(net.op("Gemm", a, net.w(*((3, 7) if transposed else (7, 3))), transB=transposed), ["n", 3], FLOAT)
        model = net.model()
        moved = equalize(model)
        assert len(moved.seams) == 1
        same(model, moved.model, feeds(model))


def test_each_seam_chooses_its_own_strength_and_the_products_get_more_exact():
    rng = np.random.default_rng(2)
    rows = rng.normal(size=(64, 32)).astype(np.float32) * uneven(rng, 32, 1.5)
    weight = rng.normal(size=(32, 24)).astype(np.float32) * 0.2
    net = Net(seed=1)
    x = net.op("Tanh", net.input("x", ["n", 32]))
    scaled = net.op("Mul", x, net.w(value=np.abs(rows).max(axis=0)))
    net.output(net.op("MatMul", scaled, net.w(value=weight)), ["n", 24])
    model = net.model()
    samples = [{"x": rng.normal(size=(64, 32)).astype(np.float32)} for _ in range(3)]
    moved = smooth(model, samples)
    assert moved.added == 1
    same(model, moved.model, samples)
    factors = smooth_factors(np.abs(rows).max(axis=0), np.abs(weight).max(axis=1), 0.9)
    assert product_error(rows / factors, weight * factors[:, None]) < 0.5 * product_error(rows, weight)


def test_even_channels_are_left_alone():
    net = Net(seed=1)
    x = net.op("Tanh", net.input("x", ["n", 32]))
    net.output(net.op("MatMul", x, net.w(32, 24)), ["n", 24])
    model = net.model()
    rng = np.random.default_rng(2)
    moved = smooth(model, [{"x": rng.normal(size=(64, 32)).astype(np.float32)} for _ in range(3)])
    assert (moved.seams, moved.added) == ((), 0)


def test_a_model_without_linear_layers_has_nothing_to_smooth():
    model = conv_chain()
    assert smooth(model, feeds(model)).seams == ()
    assert smooth(post_norm_block(), []).seams == ()


def test_values_that_are_not_finite_are_left_alone():
    model = post_norm_block()
    bad = feeds(model)
    bad[0]["x"][:] = np.nan
    assert smooth(model, bad).seams == ()
