"""Where Q/DQ goes, on graphs that broke other tools; every output passes ``check_quantized`` and is compared."""

import numpy as np
import onnx
import pytest
from compress_models import (
    FLOAT,
    HALF,
    INT64,
    Net,
    image_feeds,
    pairs,
    quantize,
    reads_quantized,
    relative,
    run,
    worst_error,
)
from onnx import helper, numpy_helper

from edgeds.errors import ModelError, SpecError


def simple(*, opset=17, cout=4):
    net = Net(opset=opset)
    x = net.conv(net.input("x", ["N", 3, 16, 16]), 3, 8, label="first")
    net.output(net.conv(x, 8, cout, 1, act=None, label="last"))
    return net


def nodes_of(model, op):
    return [node for node in model.graph.node if node.op_type == op]


def test_residual_blocks_b51(tmp_path):
    """B51: BN folded; no pair between Conv and its Relu or Add; shortcut paired, main branch not; one Q per tensor."""
    net = Net(opset=13)

    def conv_bn(x, cin, cout, k, label, stride=1):
        y = net.op("Conv", x, net.w(cout, cin, k, k), label=label, pads=[k // 2] * 4, strides=[stride] * 2)
        scale = [net.w(value=(1 + 0.2 * net.rng.random(cout)).astype(np.float32)) for _ in range(2)]
        return net.op("BatchNormalization", y, scale[0], net.w(cout), net.w(cout), scale[1])

    x = net.input("x", ["N", 3, 16, 16])
    t0 = net.op("Relu", conv_bn(x, 3, 8, 3, "c0"))
    t1 = net.op("Relu", conv_bn(t0, 8, 8, 3, "c1"))
    t2 = net.op("Relu", net.op("Add", conv_bn(t1, 8, 8, 3, "c2"), t0, label="add1"))
    t3 = net.op("Relu", conv_bn(t2, 8, 12, 3, "c3", 2))
    main, shortcut = conv_bn(t3, 12, 12, 3, "c4"), conv_bn(t2, 8, 12, 1, "c5", 2)
    t4 = net.op("Relu", net.op("Add", main, shortcut, label="add2"))
    y = net.op("Gemm", net.op("Flatten", net.op("GlobalAveragePool", t4)), net.w(5, 12), transB=1, label="fc")
    net.output(y, ["N", 5])
    report, model = quantize(tmp_path, net.model(), image_feeds())
    assert not nodes_of(model, "BatchNormalization")
    assert set(pairs(model).values()) == {1}  # one Q per tensor, the graph input included
    assert "x" in pairs(model)
    made = {output: node for node in model.graph.node for output in node.output}
    for relu in nodes_of(model, "Relu"):
        assert made[relu.input[0]].op_type in ("Conv", "Add")
    for label in ("add1", "add2"):
        assert [reads_quantized(model, net.names[label], index) for index in (0, 1)].count(True) == 1
    assert reads_quantized(model, net.names["add1"], 1)
    assert made[model.graph.output[0].name].op_type == "Gemm"
    assert report.quantized_nodes == 7
    assert report.int8_flops_share == 1.0
    assert worst_error(net.model(), model, image_feeds()) < 0.05


def test_weights_behind_constant_nodes_b01(tmp_path):
    """B01: weights from a Constant node, half precision + Cast, and Identity are all quantized."""
    net = Net(opset=13)
    rng = np.random.default_rng(0)
    values = [rng.normal(0, 0.3, shape).astype(np.float32) for shape in ((8, 3, 3, 3), (8, 8, 3, 3), (4, 8, 1, 1))]
    net.nodes.append(helper.make_node("Constant", [], ["k"], "k", value=numpy_helper.from_array(values[0])))
    half = net.op("Cast", net.w(value=values[1].astype(np.float16)), to=FLOAT)
    x = net.op("Relu", net.op("Conv", net.input("x", ["N", 3, 16, 16]), "k"))
    x = net.op("Relu", net.op("Conv", x, half))
    net.output(net.op("Conv", x, net.op("Identity", net.w(value=values[2]))), ["N", 4, 12, 12])
    report, model = quantize(tmp_path, net.model(), image_feeds())
    assert (report.quantized_nodes, report.float_nodes) == (3, ())
    assert worst_error(net.model(), model, image_feeds()) < 0.05


@pytest.mark.parametrize("opset", [11, 12])
def test_old_opsets_are_upgraded_b04_b19(tmp_path, opset):
    """B04, B19: per-channel needs opset 13; Squeeze's axes move to an input, grouped Convs stay per channel."""
    net = Net(opset=opset)
    x = net.conv(net.input("x", ["N", 4, 16, 16]), 4, 8, group=2)
    x = net.op("Concat", x, net.conv(x, 8, 8, group=4), axis=1)
    x = net.op("Squeeze", net.op("Unsqueeze", net.op("GlobalAveragePool", x), axes=[0]), axes=[0, 3, 4])
    net.output(net.op("Gemm", x, net.w(16, 3), net.w(3)), ["N", 3])
    feeds = image_feeds((2, 4, 16, 16))
    report, model = quantize(tmp_path, net.model(), feeds)
    assert model.opset_import[0].version == 13
    assert report.quantized_nodes == 3
    assert worst_error(net.model(), model, feeds) < 0.05


def test_weights_in_a_side_file_b05(tmp_path, monkeypatch):
    """B05: read beside the model from another working folder; the output does not need the input's side file."""
    folder = tmp_path / "input"
    folder.mkdir()
    onnx.save(simple().model(), folder / "m.onnx", save_as_external_data=True, location="w.bin", size_threshold=0)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out").mkdir()
    _, model = quantize(tmp_path / "out", folder / "m.onnx", image_feeds())
    (folder / "w.bin").unlink()
    assert worst_error(simple().model(), tmp_path / "out" / "m.int8.onnx", image_feeds()) < 0.05
    assert not any(tensor.external_data for tensor in model.graph.initializer)


def test_a_branch_that_reads_an_outer_weight_b09(tmp_path):
    """B09: the branch keeps the float weight, the outer Conv gets int8, both branches run."""
    net = Net()
    x, flag = net.input("x", ["N", 3, 8, 8]), net.input("flag", [], onnx.TensorProto.BOOL)
    weight = net.w(3, 3, 1, 1)
    y = net.op("Conv", x, weight, label="outer")
    inner = [helper.make_node("Conv", [y, weight], ["b0"], "inner")], [helper.make_node("Relu", [y], ["b1"], "r")]
    graphs = [
        helper.make_graph(nodes, f"g{i}", [], [helper.make_tensor_value_info(f"b{i}", FLOAT, None)])
        for i, nodes in enumerate(inner)
    ]
    net.output(net.op("If", flag, then_branch=graphs[0], else_branch=graphs[1]))

    def feeds(seed):
        x = np.random.default_rng(seed).normal(size=(2, 3, 8, 8)).astype(np.float32)
        return {"x": x, "flag": np.array(seed % 2 == 0)}

    report, model = quantize(tmp_path, net.model(), feeds)
    assert report.quantized_nodes == 1
    assert [item.reason for item in report.float_nodes] == ["Conv inside a control-flow body"]
    assert worst_error(net.model(), model, feeds) < 0.05


@pytest.mark.parametrize(("group", "cin", "cout"), [(1, 6, 10), (2, 6, 10), (6, 6, 6)])
def test_transposed_convolutions_b28(tmp_path, group, cin, cout):
    """B28: the output channels lie on axis 1; grouped ones share one scale and the report says so."""
    net = Net()
    x = net.op("ConvTranspose", net.input("x", ["N", cin, 8, 8]), net.w(cin, cout // group, 3, 3), net.w(cout),
               group=group, strides=[2, 2], output_padding=[1, 1])  # fmt: skip
    net.output(net.op("Relu", x))
    feeds = image_feeds((2, cin, 8, 8))
    report, model = quantize(tmp_path, net.model(), feeds)
    axes = [a.i for node in nodes_of(model, "DequantizeLinear") for a in node.attribute if a.name == "axis"]
    assert axes == ([1] if group == 1 else [])
    assert any("grouped ConvTranspose" in note for note in report.notes) == (group > 1)
    assert worst_error(net.model(), model, feeds) < 0.05


@pytest.mark.parametrize("trans_b", [0, 1])
def test_square_gemm_with_row_scales_b29(tmp_path, trans_b):
    """B29: 8x8 with output scales 1..1000; a wrong axis loads and gives wrong numbers, so every column is compared."""
    net = Net()
    weight = np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32)
    scales = np.geomspace(1, 1000, 8).astype(np.float32)
    weight = weight * (scales[:, None] if trans_b else scales[None])
    net.output(net.op("Gemm", net.input("x", ["N", 8]), net.w(value=weight), transB=trans_b, alpha=0.5))
    feeds = image_feeds((4, 8))
    _, model = quantize(tmp_path, net.model(), feeds)
    a, b = run(net.model(), feeds(101))[0], run(model, feeds(101))[0]
    assert max(relative(a[:, c], b[:, c]) for c in range(8)) < 0.05


def test_matmul_weights_of_other_ranks_b30(tmp_path):
    """B30: rank 3, rank 1, a constant on the left, and no weight at all; what is not per channel is named."""
    net = Net()
    x = net.op("MatMul", net.input("x", ["N", 4, 8]), net.w(4, 8, 6))
    y = net.op("MatMul", net.w(5, 4), x)
    y = net.op("MatMul", y, net.op("Transpose", y, perm=[0, 2, 1]))
    net.output(net.op("MatMul", y, net.w(5)))
    feeds = image_feeds((4, 4, 8))
    report, model = quantize(tmp_path, net.model(), feeds)
    assert report.quantized_nodes == 4
    assert sum("one weight scale for the tensor" in note for note in report.notes) == 3
    assert worst_error(net.model(), model, feeds) < 0.25  # a product with itself doubles every error


def test_dead_channels_b31(tmp_path):
    """B31: zero and denormal channels, an all-zero weight, an activation that is always zero: zero stays zero."""
    net = Net()
    w1 = np.random.default_rng(0).normal(0, 0.3, (4, 3, 3, 3)).astype(np.float32)
    w1[0], w1[1] = 0, 1e-41
    a = net.op("Conv", net.input("x", ["N", 3, 8, 8]), net.w(value=w1))
    bias = np.array([0.5, -1, 2, 0], np.float32)
    c = net.op("Conv", a, net.w(value=np.zeros((4, 4, 1, 1), np.float32)), net.w(value=bias))
    never = net.op("Relu", net.op("Conv", a, net.w(4, 4, 1, 1), net.w(value=np.full(4, -1e3, np.float32))))
    net.output(net.op("Conv", net.op("Add", c, never), net.w(2, 4, 1, 1), net.w(2)))
    net.output(net.op("Conv", never, net.w(2, 4, 1, 1), net.w(2)))
    net.output(c)
    feeds = image_feeds((2, 3, 8, 8))
    _, model = quantize(tmp_path, net.model(), feeds)
    out = run(model, feeds(101))
    np.testing.assert_array_equal(out[2], np.broadcast_to(bias[None, :, None, None], out[2].shape))
    assert worst_error(net.model(), model, feeds) < 0.05


def test_gemm_biases_that_broadcast_b33(tmp_path):
    """B33: biases (1,), (1, 5) and (); alpha, beta and transA are honoured."""
    net = Net()
    x = net.op("Transpose", net.input("x", ["N", 12]), perm=[1, 0])
    x = net.op("Gemm", x, net.w(8, 12), net.w(1), transA=1, transB=1, alpha=2.0, beta=0.5)
    x = net.op("Gemm", x, net.w(8, 5), net.w(1, 5))
    net.output(net.op("Gemm", x, net.w(5, 1), net.w(value=np.float32(0.7))))
    feeds = image_feeds((4, 12))
    report, model = quantize(tmp_path, net.model(), feeds)
    assert report.quantized_nodes == 3
    assert worst_error(net.model(), model, feeds) < 0.05


def concat_net():
    net = Net()
    x = net.conv(net.input("x", ["N", 3, 16, 16]), 3, 4)
    y = net.conv(net.op("Concat", x, axis=1), 4, 4)
    up = net.op("Resize", net.op("MaxPool", y, kernel_shape=[2, 2], strides=[2, 2]), "",
                net.w(value=np.array([1, 1, 2, 2], np.float32)), mode="nearest")  # fmt: skip
    net.output(net.conv(net.op("Concat", up, x, axis=1, label="cat"), 8, 2, 1, act=None))
    return net


def test_concat_pool_and_resize_keep_one_scale_b37(tmp_path):
    """B37: a Concat of one input is nothing special; pool and resize have no pair of their own."""
    net = concat_net()
    _, model = quantize(tmp_path, net.model(), image_feeds())
    made = {output: node for node in model.graph.node for output in node.output}
    for op in ("MaxPool", "Resize"):
        assert made[nodes_of(model, op)[0].input[0]].op_type != "DequantizeLinear"
    assert worst_error(net.model(), model, image_feeds()) < 0.05


def test_concat_before_and_after_give_the_same_numbers_b52(tmp_path):
    """B52: the switch moves the pairs to the inputs of the Concat at the scale of its output."""
    net = concat_net()
    _, after = quantize(tmp_path, net.model(), image_feeds(), name="after")
    _, before = quantize(tmp_path, net.model(), image_feeds(), name="before", concat="before")
    assert [reads_quantized(before, net.names["cat"], i) for i in (0, 1)] == [True, True]
    assert not any(reads_quantized(after, net.names["cat"], i) for i in (0, 1))
    a, b = (run(model, image_feeds()(9), optimize=False)[0] for model in (after, before))
    np.testing.assert_array_equal(a, b)


def test_integer_arithmetic_is_left_alone_b40(tmp_path):
    """B40: MatMul, Add and Concat on int64 are not candidates; the reshape they compute still works."""
    net = Net()
    x = net.input("x", ["N", 3, 8, 8])
    rows = net.op("Gather", net.op("Shape", x), net.ints(0))
    doubled = net.op("MatMul", net.op("Add", rows, net.ints(0)), net.w(value=np.array([[1]], np.int64)))
    shape = net.op("Concat", doubled, net.ints(-1), axis=0)
    net.output(net.op("Gemm", net.op("Reshape", x, shape), net.w(192, 4)))
    feeds = image_feeds((2, 3, 8, 8))
    report, model = quantize(tmp_path, net.model(), feeds)
    assert (report.quantized_nodes, report.float_nodes) == (1, ())
    assert set(pairs(model)) == {nodes_of(model, "QuantizeLinear")[0].input[0]}
    assert worst_error(net.model(), model, feeds) < 0.05


def test_dedicated_pairs_b55(tmp_path):
    """B55: three consumers, a pair each; names stay unique and both optimisation modes load (see check_quantized)."""
    net = Net()
    x = net.conv(net.input("x", ["N", 3, 8, 8]), 3, 4)
    for _ in range(3):
        net.output(net.conv(x, 4, 2, 1, act=None))
    _, shared = quantize(tmp_path, net.model(), image_feeds((1, 3, 8, 8)), name="one", keep_tail=False)
    _, own = quantize(tmp_path, net.model(), image_feeds((1, 3, 8, 8)), name="own", keep_tail=False, dedicated=True)
    assert sorted(pairs(shared).values()) == [1, 1]
    assert sorted(pairs(own).values()) == [1, 3]
    for a, b in zip(*(run(m, image_feeds((1, 3, 8, 8))(5), optimize=False) for m in (shared, own)), strict=True):
        np.testing.assert_array_equal(a, b)


def test_tied_weights(tmp_path):
    """Two Convs share one int8 weight; a Gather beside a MatMul keeps reading the float table."""
    net = Net()
    weight = net.w(3, 3, 3, 3)
    x = net.input("x", ["N", 3, 16, 16])
    y = net.op("Relu", net.op("Conv", x, weight, pads=[1] * 4))
    net.output(net.op("Conv", y, weight))
    _, model = quantize(tmp_path, net.model(), image_feeds())
    assert (
        sum(tensor.data_type == onnx.TensorProto.INT8 and len(tensor.dims) == 4 for tensor in model.graph.initializer)
        == 1
    )
    net = Net()
    table = net.w(20, 8)
    x = net.op("Gather", table, net.input("ids", ["N", "L"], INT64))
    net.output(net.op("MatMul", x, net.op("Transpose", table, perm=[1, 0])))
    ids = lambda seed: {"ids": np.random.default_rng(seed).integers(0, 20, (2, 6))}  # noqa: E731
    _, model = quantize(tmp_path, net.model(), ids, name="tied")
    assert worst_error(net.model(), model, ids) < 0.05


@pytest.mark.parametrize("rank", [1, 3])
def test_convolutions_of_other_ranks(tmp_path, rank):
    net = Net()
    x = net.input("x", ["N", 4, *[8] * rank])
    y = net.op("Relu", net.op("Conv", x, net.w(4, 1, *[3] * rank), net.w(4), group=4, pads=[1] * 2 * rank))
    net.output(net.op("Conv", y, net.w(3, 4, *[1] * rank)))
    feeds = image_feeds((2, 4, *[8] * rank))
    report, model = quantize(tmp_path, net.model(), feeds, cpu_out=tmp_path / "cpu.onnx")
    assert report.quantized_nodes == 2
    assert worst_error(net.model(), model, feeds) < 0.05
    assert worst_error(net.model(), tmp_path / "cpu.onnx", feeds) < 0.1


def test_half_precision_b53(tmp_path):
    """B53: float16 Q/DQ needs opset 19, so the model is raised to it; scales are normal float16 numbers."""
    net = Net(dtype=np.float16)
    x = net.conv(net.input("x", ["N", 3, 16, 16], HALF), 3, 8)
    net.output(net.conv(x, 8, 4, 1, act=None), ["N", 4, 16, 16], HALF)
    feeds = image_feeds(dtype=np.float16)
    report, model = quantize(tmp_path, net.model(), feeds, cpu_out=tmp_path / "cpu.onnx")
    assert model.opset_import[0].version == 19
    assert report.quantized_nodes == 2
    assert worst_error(net.model(), model, feeds) < 0.05
    assert worst_error(net.model(), tmp_path / "cpu.onnx", feeds) < 0.05


def test_selections_follow_the_users_names_b14(tmp_path):
    """B14: an excluded Gemm keeps its name and stays float; unknown names get a suggestion before calibration."""
    net = Net(opset=11)
    x = net.op("Relu", net.op("Gemm", net.input("x", ["N", 8]), net.w(8, 8), net.w(8), label="a"))
    net.output(net.op("Gemm", x, net.w(8, 4), net.w(4), label="b"), ["N", 4])
    feeds = image_feeds((4, 8))
    report, model = quantize(tmp_path, net.model(), feeds, exclude=(net.names["b"],))
    assert [(item.node, item.reason) for item in report.float_nodes] == [(net.names["b"], "excluded by the user")]
    assert not reads_quantized(model, net.names["b"], 0)
    assert reads_quantized(model, net.names["a"], 0)
    never = lambda seed: pytest.fail("calibration must not start")  # noqa: E731
    with pytest.raises(SpecError, match=f"nearest: {net.names['b']}"):
        quantize(tmp_path, net.model(), never, samples=0, exclude=(net.names["b"] + "x",))
    with pytest.raises(SpecError, match=r"give a sequence of names, \('MatMul',\)"):
        quantize(tmp_path, net.model(), never, samples=0, op_types="MatMul")
    with pytest.raises(SpecError, match="cannot be quantized"):
        quantize(tmp_path, net.model(), never, samples=0, op_types=("Matmul",))


def test_nothing_to_quantize(tmp_path):
    net = Net()
    net.output(net.op("Add", net.input("x", ["N", 4]), net.w(4)))
    with pytest.raises(ModelError, match="no Conv, ConvTranspose, Gemm or MatMul"):
        quantize(tmp_path, net.model(), image_feeds((2, 4)))
    net = Net()
    net.output(net.op("MatMul", net.input("x", ["N", 4], INT64), net.w(value=np.eye(4, dtype=np.int64))), elem=INT64)
    with pytest.raises(ModelError, match="nothing to quantize"):
        quantize(tmp_path, net.model(), lambda seed: {"x": np.ones((2, 4), np.int64)}, samples=1)
    net = Net(dtype=np.float64)
    x = net.input("x", ["N", 4], onnx.TensorProto.DOUBLE)
    net.output(net.op("MatMul", x, net.w(4, 4)), elem=onnx.TensorProto.DOUBLE)
    with pytest.raises(ModelError, match="computes in float64"):
        quantize(tmp_path, net.model(), image_feeds((2, 4), dtype=np.float64))


def test_an_int8_model_is_refused(tmp_path):
    quantize(tmp_path, simple().model(), image_feeds())
    with pytest.raises(ModelError, match="already quantized"):
        quantize(tmp_path, tmp_path / "m.int8.onnx", image_feeds(), name="again")


def test_non_finite_weights_and_activations_stay_float(tmp_path):
    net = Net()
    x = net.conv(net.input("x", ["N", 3, 8, 8]), 3, 4, label="good")
    bad = np.random.default_rng(0).normal(size=(2, 4, 1, 1)).astype(np.float32)
    bad[0, 0] = np.inf
    net.output(net.op("Conv", x, net.w(value=bad), label="bad"))
    masked = net.op("Where", net.op("Greater", x, net.w(value=np.float32(0))), x, net.w(value=np.float32(-np.inf)))
    net.output(net.op("Conv", masked, net.w(2, 4, 1, 1), label="masked"))
    report, _ = quantize(tmp_path, net.model(), image_feeds((1, 3, 8, 8)), keep_tail=False)
    reasons = {item.node: item.reason for item in report.float_nodes}
    assert "holds NaN or infinity" in reasons[net.names["bad"]]
    assert "NaN or infinity on calibration data" in reasons[net.names["masked"]]
