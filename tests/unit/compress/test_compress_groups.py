"""Coupled channels and their removal on ONNX graphs (issue 5 part 1): reports B15, B16, B18, B19, B20, B26, B27."""

import time

import numpy as np
import onnx
import pytest
from compress_models import Net, relative, run
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import numpy_helper
from prune_models import NETS, c2f, feeds_of, finish, start, twins

from edgeds.compress.channels import prune_channels
from edgeds.compress.choose import choose_units
from edgeds.compress.groups import find_groups
from edgeds.compress.importance import score_groups
from edgeds.compress.shape_fold import fold_shapes
from edgeds.errors import ModelError, SpecError
from edgeds.graph.view import GraphView


def analysed(model, **options):
    view = GraphView(fold_shapes(model))
    return view.model, find_groups(view, **options)


def masked(model, groups, keep):
    """The same model with the columns that read removed channels set to zero: what pruning has to reproduce."""
    view = GraphView(model)
    nodes = {node.name: node for node in view.nodes}
    gone = {(index, unit) for index, units in keep.items() for unit in set(range(groups.groups[index].size)) - {*units}}
    for group in groups.groups:
        read = any(member.role == "consumer" for member in group.members)
        for member in group.members:
            if member.role != ("consumer" if read else "producer"):
                continue
            name = nodes[member.node].input[member.index]
            weight = np.moveaxis(view.constant(name).copy(), member.axis, 0)
            weight[[place for place, unit in enumerate(member.units) if (group.index, unit) in gone]] = 0
            view.set_constant(name, np.moveaxis(weight, 0, member.axis))
    return view.model


def weights(model):
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}


def size(model):
    return sum(array.size for array in weights(model).values() if array.dtype.kind == "f")


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("ratio", [0.25, 0.6, 0.95])
def test_pruned_equals_dense_with_zeroed_columns(name, ratio):
    model, groups = analysed(NETS[name](3))
    assert groups.groups
    keep = choose_units(groups, score_groups(model, groups), ratio=ratio, scope="uniform")
    pruned = prune_channels(model, keep, groups=groups).model
    onnx.checker.check_model(pruned, full_check=True)
    assert size(pruned) < size(model)
    feeds = feeds_of(model)
    for a, b in zip(run(masked(model, groups, keep), feeds), run(pruned, feeds), strict=True):
        assert a.shape == b.shape
        assert relative(a, b) < (5e-3 if a.dtype == np.float16 else 1e-5)


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(sorted(NETS)), st.integers(0, 50), st.floats(0.05, 0.95), st.sampled_from(["global", "uniform"]))
def test_b26_never_an_invalid_model(name, seed, ratio, scope):
    model, groups = analysed(NETS[name](seed))
    scores = score_groups(model, groups)
    keep = choose_units(groups, scores, ratio=ratio, scope=scope)
    again = choose_units(groups, score_groups(model, groups), ratio=ratio, scope=scope)
    assert {key: value.tolist() for key, value in keep.items()} == {k: v.tolist() for k, v in again.items()}
    assert all(len(units) >= 1 for units in keep.values())
    pruned = prune_channels(model, keep, groups=groups).model
    feeds = feeds_of(model)
    for a, b in zip(run(model, feeds), run(pruned, feeds), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
    for node in pruned.graph.node:
        group = next((item.i for item in node.attribute if item.name == "group"), 1)
        if node.op_type == "Conv" and group > 1:
            assert weights(pruned)[node.input[1]].shape[0] % group == 0


def reasons(groups, net):
    labels = {name: label for label, name in net.names.items()}
    return {labels.get(item.node, item.node): item.reason for item in groups.protected}


def test_b27_outputs_stay_through_reshape_and_concat():
    net, x = start(1, batch=1)
    t = net.conv(x, 3, 8, label="stem")
    box = net.reshape(net.conv(t, 8, 4, 1, act=None, label="box"), 0, 4, -1)
    cls = net.op("Sigmoid", net.reshape(net.conv(t, 8, 3, 1, act=None, label="cls"), 0, 3, -1))
    model = finish(net, net.op("Concat", box, cls, axis=1))
    _, groups = analysed(model)
    found = reasons(groups, net)
    assert set(found) == {"box", "cls"}
    assert all("graph output" in reason for reason in found.values())
    assert [group.producers for group in groups.groups] == [(net.names["stem"],)]


def test_b18_one_channel_conv_is_not_depthwise():
    model, groups = analysed(NETS["gate"](0))
    pruned = prune_channels(model, {0: np.arange(5)}, groups=groups).model
    convs = [node for node in pruned.graph.node if node.op_type == "Conv"]
    shapes = [weights(pruned)[node.input[1]].shape for node in convs]
    assert shapes == [(5, 3, 3, 3), (5, 1, 3, 3), (1, 5, 1, 1), (4, 5, 1, 1)]
    assert next(item.i for item in convs[1].attribute if item.name == "group") == 5


def test_b19_groups_go_whole():
    model, groups = analysed(NETS["grouped"](0))
    group = max(groups.groups, key=lambda item: item.channels)
    assert (group.size, group.channels) == (4, 6)
    pruned = prune_channels(model, {group.index: np.asarray([0, 1, 3])}, groups=groups).model
    shapes = [weights(pruned)[node.input[1]].shape for node in pruned.graph.node if node.op_type == "Conv"]
    assert shapes == [(6, 3, 3, 3), (12, 2, 3, 3), (4, 3, 1, 1), (6, 16, 1, 1)]


def test_b20_a_channel_is_a_block_of_columns():
    model, groups = analysed(NETS["flat"](0))
    conv = next(group for group in groups.groups if group.size == 4)
    pruned = prune_channels(model, {conv.index: np.asarray([0, 1, 3])}, groups=groups).model
    gemm = next(node for node in model.graph.node if node.op_type == "Gemm")
    want = np.delete(weights(model)[gemm.input[1]], np.arange(32, 48), axis=1)
    np.testing.assert_array_equal(weights(pruned)[gemm.input[1]], want)


def test_b16_split_halves_are_groups_of_their_own():
    _, groups = analysed(c2f(0))
    assert sorted(len(group.producers) for group in groups.groups) == [1, 1, 2]


def test_shared_weights_stay_shared():
    model, groups = analysed(twins(0))
    keep = choose_units(groups, score_groups(model, groups), ratio=0.5, scope="uniform")
    pruned = prune_channels(model, keep, groups=groups).model
    shared = [node.input[1] for node in pruned.graph.node if node.op_type == "Conv"]
    assert len(set(shared)) == len(shared) - 1


def test_a_constant_that_something_else_reads_is_copied():
    net, x = start(0)
    bias = net.w(8)
    t = net.op("Conv", x, net.w(8, 3, 3, 3), bias, pads=[1] * 4)
    model = finish(net, net.conv(t, 8, 3, act=None), net.op("Neg", bias))
    model, groups = analysed(model)
    pruned = prune_channels(model, {0: np.arange(4)}, groups=groups).model
    assert run(pruned, feeds_of(model))[1].shape == (8,)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("shuffled", "broken up"),
        ("branching", "branch or loop"),
        ("unknown", "DepthToSpace is not followed"),
        ("unknown", "normalised over its channels"),
    ],
)
def test_what_is_not_followed_is_named(name, words):
    _, groups = analysed(NETS[name](0))
    assert any(words in item.reason for item in groups.protected)


def test_batch_merged_with_channels_is_not_taken_for_channels():
    net, x = start(0)
    t = net.conv(x, 3, 8)
    merged = net.reshape(t, -1, 1, 8, 8)
    model = finish(net, net.conv(net.conv(merged, 1, 6), 6, 2, act=None))
    _, groups = analysed(model)
    assert [group.size for group in groups.groups] == [6]


def test_kept_by_name_and_pattern():
    net, x = start(0)
    model = finish(net, net.conv(net.conv(net.conv(x, 3, 8, label="a"), 8, 8, label="b"), 8, 4, act=None))
    _, groups = analysed(model, protect=[net.names["a"][:6] + "*"])
    assert [group.producers for group in groups.groups] == [(net.names["b"],)]
    assert "kept as asked" in reasons(groups, net)["a"]
    with pytest.raises(SpecError, match="no such node"):
        analysed(model, protect=["nothing"])


def test_a_quantized_model_is_refused():
    net, x = start(0)
    scale, zero = net.w(value=np.float32(0.1)), net.w(value=np.int8(0))
    q = net.op("DequantizeLinear", net.op("QuantizeLinear", x, scale, zero), scale, zero)
    model = finish(net, net.conv(q, 3, 8))
    with pytest.raises(ModelError, match="already quantized"):
        analysed(model)


def test_wrong_units_are_refused():
    model, groups = analysed(NETS["concat_twice"](0))
    for keep in ({9: [0]}, {0: []}, {0: [-1]}, {0: [8]}):
        with pytest.raises(SpecError):
            prune_channels(model, {key: np.asarray(value, np.int64) for key, value in keep.items()}, groups=groups)


@pytest.mark.parametrize("batch", ["n", 2])
def test_sizes_computed_from_fixed_dims_become_constants(batch):
    net, x = start(0, batch=batch)
    t = net.conv(x, 3, 8)
    shape = net.op("Shape", t)
    first, channels, height = (net.op("Gather", shape, net.ints(place)) for place in range(3))
    target = net.op("Concat", first, net.op("Div", channels, net.ints(4)), net.ints(4), net.op("Mul", height, height))
    net.nodes[-1].attribute.append(onnx.helper.make_attribute("axis", 0))
    back = net.op("Concat", net.op("Gather", net.op("Shape", t), net.ints(0)), net.ints(8, 8, 8), axis=0)
    model = finish(net, net.conv(net.op("Reshape", net.op("Reshape", t, target), back), 8, 3, act=None))
    folded = fold_shapes(model)
    assert not any(node.op_type in ("Div", "Mul") for node in folded.graph.node)
    assert any(node.op_type == "Shape" for node in folded.graph.node) == (batch == "n")
    feeds = feeds_of(model)
    np.testing.assert_array_equal(run(model, feeds)[0], run(folded, feeds)[0])


def test_group_normalisation_as_exported_prunes_whole_groups():
    """Reshape to groups, InstanceNormalization, Reshape back to the shape of before."""
    net, x = start(0, batch=2)
    t = net.conv(x, 3, 8, act=None)
    g = net.op("InstanceNormalization", net.reshape(t, 0, 4, -1), net.w(value=np.ones(4, np.float32)), net.w(4))
    model = finish(net, net.conv(net.op("Reshape", g, net.op("Shape", t)), 8, 3, act=None))
    model, groups = analysed(model)
    assert [(group.size, group.unit) for group in groups.groups] == [(4, 2)]
    pruned = prune_channels(model, {0: np.asarray([0, 3])}, groups=groups).model
    feeds = feeds_of(model)
    want = run(masked(model, groups, {0: np.asarray([0, 3])}), feeds)[0]
    assert relative(want, run(pruned, feeds)[0]) < 1e-5


def test_weights_listed_as_inputs_get_their_new_shape():
    """Files before IR 4 list every weight among the inputs."""
    net, x = start(0, opset=12)
    model = finish(net, net.conv(net.conv(x, 3, 8), 8, 3, act=None))
    model.ir_version = 3
    for tensor in model.graph.initializer:
        model.graph.input.append(onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
    model, groups = analysed(model)
    pruned = prune_channels(model, {0: np.arange(5)}, groups=groups).model
    assert pruned.ir_version == 3
    onnx.checker.check_model(pruned, full_check=True)
    assert run(pruned, {"x": np.zeros((1, 3, 8, 8), np.float32)})[0].shape == (1, 3, 8, 8)


def test_mapping_names_kept_channels():
    model, groups = analysed(NETS["flat"](0))
    conv = next(group for group in groups.groups if group.size == 4)
    result = prune_channels(model, {conv.index: np.asarray([0, 3])}, groups=groups)
    first = next(node.output[0] for node in model.graph.node if node.op_type == "Conv")
    flat = next(node.output[0] for node in model.graph.node if node.op_type == "Flatten")
    assert (result.mapping[first].tolist(), result.axes[first]) == ([0, 3], 1)
    assert result.mapping[flat].tolist() == [*range(16), *range(48, 64)]


def test_400_nodes_in_two_seconds():
    net = Net(seed=0)
    t = net.conv(net.input("x", [1, 3, 8, 8]), 3, 16)
    for _ in range(80):
        a, b = net.op("Split", net.conv(t, 16, 16, 1, act="SiLU"), net.ints(8, 8), outputs=2, axis=1)
        t = net.op("Add", t, net.op("Concat", b, a, axis=1))
    model = finish(net, net.conv(t, 16, 4, act=None))
    assert len(model.graph.node) >= 400
    view = GraphView(model)
    started = time.perf_counter()
    groups = find_groups(view)
    assert time.perf_counter() - started < 2
    assert groups.groups
