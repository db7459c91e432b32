"""Sizes in exported transformers that can be folded, and the forms of exporters made plain."""

import numpy as np
import pytest
from compress_models import FLOAT, Net, run
from prune_models import finish

from edgeds.compress.shape_fold import fold_shapes
from edgeds.graph.view import GraphView


def both(model, **sizes):
    """The model and its folded form give the same at several sizes; return the folded form."""
    folded = fold_shapes(model)
    rng = np.random.default_rng(0)
    for batch, length in ((1, 3), (4, 9)):
        fed = {"x": rng.normal(size=(batch, length, 12)).astype(np.float32)}
        for a, b in zip(run(model, fed), run(folded, fed), strict=True):
            np.testing.assert_array_equal(a, b)
    return folded


def sizes(net, t, *parts):
    """A target of sizes: ("dim", axis) reads one, a number stands for itself."""
    made = [
        net.op("Unsqueeze", net.op("Gather", net.op("Shape", t), net.w(value=np.asarray(part[1])), axis=0), net.ints(0))
        if isinstance(part, tuple)
        else net.ints(part)
        for part in parts
    ]
    return net.op("Concat", *made, axis=0)


B, S = ("dim", 0), ("dim", 1)


def start():
    net = Net(seed=0)
    return net, net.input("x", ["b", "s", 12], FLOAT)


def kinds(model):
    return [node.op_type for node in model.graph.node]


def test_an_open_size_is_known_when_the_others_cancel():
    net, x = start()
    t = net.op("Reshape", x, sizes(net, x, B, S, -1, 4))
    heads = net.op("Unsqueeze", net.op("Gather", net.op("Shape", t), net.w(value=np.asarray(2)), axis=0), net.ints(0))
    folded = both(finish(net, net.op("Reshape", x, net.op("Concat", net.ints(-1), heads, axis=0))))
    view = GraphView(folded)
    last = view.producer(folded.graph.output[0].name)
    assert view.constant(last.input[1]).tolist() == [-1, 3]


def test_a_guard_against_minus_one_goes_where_none_can_be():
    net, x = start()
    t = net.op("Unsqueeze", x, net.ints(2))
    target = net.op("Reshape", sizes(net, x, B, S, 2, 12), net.ints(-1))
    test = net.op("Equal", target, net.ints(-1, -1, -1, -1))
    target = net.op("Where", test, net.ints(1, 1, 1, 1), target)
    assert "Where" not in kinds(both(finish(net, net.op("Expand", t, target))))


def test_a_guard_stays_where_a_size_is_minus_one():
    net, x = start()
    t = net.op("Unsqueeze", x, net.ints(2))
    target = net.op("Reshape", sizes(net, x, B, -1, 2, 12), net.ints(-1))
    test = net.op("Equal", target, net.ints(-1, -1, -1, -1))
    target = net.op("Where", test, net.ints(1, 1, 1, 1), target)
    assert "Where" in kinds(both(finish(net, net.op("Expand", t, target))))


@pytest.mark.parametrize("back", [(3, 4), (4, 3)])
def test_a_transpose_through_a_merged_axis_is_one_transpose(back):
    """As PyTorch writes the keys of scaled_dot_product_attention; only where the sizes come back as they were."""
    net, x = start()
    t = net.op("Transpose", net.op("Reshape", x, sizes(net, x, B, S, 3, 4)), perm=[0, 2, 1, 3])
    flat = net.op("Reshape", t, net.op("Concat", net.ints(-1), sizes(net, x, S), net.ints(4), axis=0))
    turned = net.op("Transpose", flat, perm=[0, 2, 1])
    folded = both(finish(net, net.op("Reshape", turned, sizes(net, x, B, *back, S))))
    assert kinds(folded).count("Transpose") == 2
    assert kinds(folded).count("Reshape") == (1 if back == (3, 4) else 3)


def test_a_shared_target_becomes_one_for_each_layer():
    net, x = start()
    target = sizes(net, x, B, S, 3, 4)
    a, b = net.op("Reshape", x, target), net.op("Reshape", net.op("Relu", x), target)
    folded = both(finish(net, a, b))
    readers = [node.input[1] for node in folded.graph.node if node.op_type == "Reshape"]
    assert len(set(readers)) == 2
