"""Layers of two forms of one network: matched by name, compared, and the first bad one found."""

from __future__ import annotations

import numpy as np
import pytest
from graph_models import branch_with_capture, build, image, node, run, two_convs, value, weight
from half_models import encoder, qdq_conv
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import ModelProto, numpy_helper

from edgeds.difference import Tolerance
from edgeds.errors import ModelError, SpecError
from edgeds.graph.bisect import compare_layers, find_first_break, match_layers
from edgeds.graph.precision import to_float16

TIGHT = Tolerance(relative=1e-3)


def chain(length=6, *, spoil=None, factor=1.5):
    """Convs and Relus in a row; ``spoil`` scales the weights of one Conv."""
    nodes, weights, last = [], {}, "x"
    for index in range(length):
        weights[f"w{index}"] = weight(4, 4, 3, 3, seed=index) * (factor if index == spoil else 1.0)
        nodes.append(node("Conv", [last, f"w{index}"], [f"c{index}"], f"conv{index}", pads=[1] * 4))
        nodes.append(node("Tanh", [f"c{index}"], [f"t{index}"], f"tanh{index}"))
        last = f"t{index}"
    return build(nodes, [value("x", ["N", 4, 8, 8])], [value(last, ["N", 4, 8, 8])], weights)


FEEDS = [{"x": image(1, 4, 8, 8, seed=seed)} for seed in range(2)]


def bisect(a, b, feeds=FEEDS, **options):
    options.setdefault("tolerance", TIGHT)
    return find_first_break(a, b, feeds, threads=1, quiet=True, **options)


@settings(max_examples=12, deadline=None)
@given(spoil=st.integers(0, 5), group_bytes=st.sampled_from([1, 4000, 1 << 30]))
def test_the_spoilt_layer_is_found_whatever_the_groups(spoil, group_bytes):
    a, b = chain(), chain(spoil=spoil)
    found = bisect(a, b, group_bytes=group_bytes)
    assert found.first is not None
    assert found.first.match.node == f"conv{spoil}"
    assert found.layers == 12
    if group_bytes == 1:
        assert found.checked == 2 * spoil + 1  # stops there
    # Errors that come from earlier layers do not count: every other layer is exact on its own.
    assert sum(not item.ok for item in found.worst) == 1


def test_accumulated_differences_start_at_the_spoilt_layer():
    layers = compare_layers(chain(), chain(spoil=2), FEEDS, tolerance=TIGHT, group_bytes=3000, threads=1, quiet=True)
    assert [item.match.tensor for item in layers] == [f"{kind}{i}" for i in range(6) for kind in "ct"]
    assert [item.ok for item in layers] == [True] * 4 + [False] * 8
    assert layers[0].difference.max_abs == 0.0


def test_equal_graphs_have_no_break():
    found = bisect(chain(), chain())
    assert found.first is None
    assert found.checked == found.layers == 12


def test_float16_forms_map_back_and_each_layer_is_close():
    a = encoder(spelled=True)
    feeds = [{"ids": np.arange(6)[None], "mask": np.ones((1, 6), np.int64)}]
    b = to_float16(a)
    matches = {item.tensor: item.other for item in match_layers(a, b)}
    assert matches["out"] in ("out", "out_float16")
    assert len(matches) > 25
    assert bisect(a, b, feeds, tolerance=Tolerance(relative=0.01)).first is None
    assert bisect(a, b, feeds, tolerance=Tolerance(relative=1e-6)).first is not None


def test_quantized_forms_are_judged_with_their_own_rounding():
    q = qdq_conv()
    stored = {tensor.name: numpy_helper.to_array(tensor) for tensor in q.graph.initializer}
    w = {"w": stored["wq"].astype(np.float32) * stored["wscale"][:, None, None, None], "bias": stored["bias"]}
    nodes = [node("Conv", ["x", "w", "bias"], ["c"], "conv", pads=[1] * 4), node("Relu", ["c"], ["y"], "relu")]
    shape = ["N", 4, 8, 8]
    a = build(nodes, [value("x", shape)], [value("y", shape)], w, opset=13)
    x = [{"x": image(1, 4, 8, 8)}]
    found = bisect(a, q, x, tolerance=Tolerance(relative=1e-4))
    assert found.first is not None
    assert found.first.match.node == "conv"
    want, got = run(a, x[0])[0], run(q, x[0])[0]
    assert found.first.difference.max_abs >= np.abs(want - got).max() * 0.99  # before the Relu
    assert bisect(a, q, x, tolerance=Tolerance(relative=0.2)).first is None


def test_layers_with_bodies_are_cut_too():
    a = branch_with_capture()
    b = ModelProto()
    b.CopyFrom(a)
    for tensor in b.graph.initializer:
        if tensor.name == "scale":
            tensor.CopyFrom(numpy_helper.from_array(np.float32(0.7), "scale"))
    feeds = [{"x": image(1, 4, 8, 8), "flag": np.array(True)}]
    found = bisect(a, b, feeds)
    assert found.first is not None
    assert found.first.match.node == "choose"


def test_nan_in_one_layer_is_a_break():
    b = chain()
    for tensor in b.graph.initializer:
        if tensor.name == "w3":
            tensor.CopyFrom(numpy_helper.from_array(np.full((4, 4, 3, 3), np.nan, np.float32), "w3"))
    found = bisect(chain(), b, tolerance=Tolerance(absolute=1e9))
    assert found.first is not None
    assert found.first.match.node == "conv3"
    assert found.worst[0].match.node == "conv3"


def test_graphs_without_shared_names_no_feeds_and_wrong_feeds_are_refused():
    renamed = two_convs()
    with pytest.raises(SpecError, match="share no tensor names"):
        match_layers(chain(), build([node("Relu", ["x"], ["other"])], [value("x", [1])], [value("other", [1])]))
    with pytest.raises(SpecError, match="no sample"):
        bisect(renamed, renamed, [])
    with pytest.raises(SpecError, match="dim 2 is 5, but the model fixes it to 12"):
        bisect(renamed, renamed, [{"x": image(1, 3, 5, 5)}])
    odd = build(
        [node("Reshape", ["x", "s"], ["y"], "r")], [value("x", ["N"])], [value("y", [2, 3])], {"s": np.array([2, 3])}
    )
    with pytest.raises(ModelError, match="does not run on the samples"):
        bisect(odd, odd, [{"x": image(5)}])
    with pytest.raises(SpecError, match="no array for input 'x'"):
        bisect(renamed, renamed, [{"y": image(1, 3, 12, 12)}])
