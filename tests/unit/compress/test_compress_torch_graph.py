"""The ONNX graph as a trainable function (issue 5 part 4): parity with ONNX Runtime, Q/DQ, export to the same graph."""

import numpy as np
import onnx
import pytest
from compress_models import FLOAT, Net, image_feeds, quantize, run
from onnx import numpy_helper
from prune_models import NETS, feeds_of

torch = pytest.importorskip("torch")

from edgeds.compress.torch_graph import TorchGraph  # noqa: E402
from edgeds.errors import ModelError  # noqa: E402
from edgeds.graph.io import load_model  # noqa: E402
from edgeds.graph.view import GraphView  # noqa: E402


def torch_run(model, feeds, want=None):
    graph = TorchGraph(model)
    names = want or [item.name for item in model.graph.output]
    with torch.no_grad():
        found = graph.run({name: torch.from_numpy(array) for name, array in feeds.items()}, want=names)
    return [found[name].numpy() for name in names]


def check(model, feeds, tolerance=1e-5):
    expected = run(model, feeds, optimize=False)
    found = torch_run(model, feeds)
    for a, b in zip(expected, found, strict=True):
        assert a.shape == b.shape
        np.testing.assert_allclose(b, a, rtol=tolerance, atol=tolerance * max(1.0, float(np.abs(a).max())))


@pytest.mark.parametrize("name", sorted(NETS))
def test_networks_of_every_kind_give_what_onnxruntime_gives(name):
    model = NETS[name](0)
    if name == "half":
        pytest.skip("float16 convolutions are slow and differ by rounding on CPUs")
    if any(item.op_type in ("If", "Loop", "NonMaxSuppression") for item in model.graph.node):
        with pytest.raises(ModelError, match="does not support the operator"):
            torch_run(model, feeds_of(model))
        return
    check(model, feeds_of(model), 1e-4)


IMAGE = (2, 4, 9, 10)


def one_op(kind, *weights, shape=IMAGE, opset=17, outputs=1, **attributes):
    """A model of one operator over ``x``; weights are arrays, strings are attributes' business."""
    net = Net(seed=1, opset=opset)
    x = net.input("x", list(shape))
    made = net.op(kind, x, *[net.w(value=value) if value is not None else "" for value in weights], **attributes)
    net.output(made)
    return net.model()


RNG = np.random.default_rng(3)


def w(*shape):
    return RNG.normal(0, 0.5, shape).astype(np.float32)


def i(*values):
    return np.asarray(values, np.int64)


OPS = {
    "conv": ("Conv", [w(6, 4, 3, 3), w(6)], {"pads": [1, 1, 1, 1], "strides": [2, 1]}),
    "conv asymmetric": ("Conv", [w(6, 4, 3, 3)], {"pads": [0, 1, 2, 1]}),
    "conv dilated grouped": ("Conv", [w(8, 2, 3, 3)], {"dilations": [2, 2], "group": 2}),
    "conv same upper": ("Conv", [w(6, 4, 4, 4)], {"auto_pad": "SAME_UPPER", "strides": [2, 2]}),
    "conv same lower": ("Conv", [w(6, 4, 4, 4)], {"auto_pad": "SAME_LOWER", "strides": [2, 2]}),
    "conv transpose": ("ConvTranspose", [w(4, 5, 2, 2), w(5)], {"strides": [2, 2]}),
    "conv transpose padded": ("ConvTranspose", [w(4, 5, 3, 3)], {"strides": [2, 2], "pads": [1, 0, 1, 1]}),
    "conv transpose output padding": (
        "ConvTranspose",
        [w(4, 5, 3, 3)],
        {"strides": [2, 2], "pads": [1, 1, 1, 1], "output_padding": [1, 1]},
    ),
    "max pool": ("MaxPool", [], {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1]}),
    "max pool asymmetric": ("MaxPool", [], {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [0, 0, 1, 1]}),
    "max pool ceil": ("MaxPool", [], {"kernel_shape": [2, 2], "strides": [2, 2], "ceil_mode": 1}),
    "average pool": ("AveragePool", [], {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1]}),
    "average pool counted": ("AveragePool", [], {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1], "count_include_pad": 1}),
    "global average": ("GlobalAveragePool", [], {}),
    "global max": ("GlobalMaxPool", [], {}),
    "nearest": ("Resize", [None, np.float32([1, 1, 2, 2])], {"mode": "nearest", "nearest_mode": "floor"}),
    "nearest asymmetric": (
        "Resize",
        [None, np.float32([1, 1, 2, 1.5])],
        {"mode": "nearest", "coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"},
    ),
    "nearest sizes": ("Resize", [None, None, i(2, 4, 5, 7)], {"mode": "nearest"}),
    "linear": ("Resize", [None, np.float32([1, 1, 2, 2])], {"mode": "linear"}),
    "linear corners": (
        "Resize",
        [None, None, i(2, 4, 17, 21)],
        {"mode": "linear", "coordinate_transformation_mode": "align_corners"},
    ),
    "gemm": ("Gemm", [w(5, 7), w(5)], {"transB": 1, "alpha": 0.5, "beta": 2.0, "shape": (3, 7)}),
    "matmul": ("MatMul", [w(10, 6)], {}),
    "softmax": ("Softmax", [], {"axis": 1}),
    "log softmax": ("LogSoftmax", [], {"axis": -1}),
    "layer norm": ("LayerNormalization", [w(10), w(10)], {"epsilon": 1e-3}),
    "batch norm": ("BatchNormalization", [w(4), w(4), w(4), np.abs(w(4)) + 0.1], {}),
    "instance norm": ("InstanceNormalization", [w(4), w(4)], {}),
    "prelu": ("PRelu", [w(4, 1, 1)], {}),
    "leaky": ("LeakyRelu", [], {"alpha": 0.2}),
    "elu": ("Elu", [], {}),
    "hard sigmoid": ("HardSigmoid", [], {}),
    "hard swish": ("HardSwish", [], {}),
    "erf": ("Erf", [], {}),
    "clip": ("Clip", [np.float32(-0.5), np.float32(0.5)], {}),
    "clip above": ("Clip", [None, np.float32(0.5)], {}),
    "reduce mean": ("ReduceMean", [], {"axes": [2, 3]}),
    "reduce sum": ("ReduceSum", [i(-1)], {"keepdims": 0}),
    "reduce max": ("ReduceMax", [], {"axes": [1]}),
    "reduce all": ("ReduceMean", [], {}),
    "reduce l2": ("ReduceL2", [], {"axes": [3]}),
    "reduce prod": ("ReduceProd", [], {"axes": [3]}),
    "transpose": ("Transpose", [], {"perm": [0, 2, 3, 1]}),
    "transpose reversed": ("Transpose", [], {}),
    "flatten": ("Flatten", [], {"axis": 2}),
    "reshape": ("Reshape", [i(0, -1, 5)], {}),
    "squeeze": ("Squeeze", [i(1, -1)], {"shape": (3, 1, 4, 1)}),
    "unsqueeze": ("Unsqueeze", [i(0, -1)], {}),
    "slice": ("Slice", [i(1, -3), i(2**62, -1), i(2, 3)], {}),
    "slice backwards": ("Slice", [i(-1), i(-(2**62)), i(3), i(-2)], {}),
    "gather": ("Gather", [i(0, -1, 2)], {"axis": 1}),
    "gather scalar": ("Gather", [np.asarray(-2, np.int64)], {"axis": 3}),
    "expand": ("Expand", [i(2, 1, 4, 3)], {"shape": (1, 4, 1)}),
    "tile": ("Tile", [i(1, 2, 1, 2)], {}),
    "pad": ("Pad", [i(0, 0, 1, 2, 0, 0, 0, 1), np.float32(0.7)], {}),
    "pad reflect": ("Pad", [i(0, 0, 1, 2, 0, 0, 2, 1)], {"mode": "reflect"}),
    "pad edge": ("Pad", [i(0, 0, 1, 2, 0, 0, 2, 1)], {"mode": "edge"}),
    "depth to space": ("DepthToSpace", [], {"blocksize": 2}),
    "depth to space crd": ("DepthToSpace", [], {"blocksize": 2, "mode": "CRD"}),
    "space to depth": ("SpaceToDepth", [], {"blocksize": 2, "shape": (1, 3, 6, 8)}),
    "trilu": ("Trilu", [], {"upper": 0}),
    "cumsum": ("CumSum", [np.asarray(2, np.int64)], {}),
    "div": ("Div", [np.float32([3.0])], {}),
    "pow": ("Pow", [np.float32(2.0)], {}),
    "max": ("Max", [np.float32(0.1)], {}),
}


@pytest.mark.parametrize("name", sorted(OPS))
def test_single_operators_give_what_onnxruntime_gives(name):
    kind, weights, attributes = OPS[name]
    attributes = dict(attributes)
    shape = attributes.pop("shape", IMAGE)
    model = one_op(kind, *weights, shape=shape, **attributes)
    feeds = {"x": np.random.default_rng(7).normal(0, 1, shape).astype(np.float32)}
    check(model, feeds, 2e-5)


def test_softmax_before_opset_13_is_over_everything_behind_its_axis():
    model = one_op("Softmax", shape=(2, 3, 4), opset=11, axis=1)
    check(model, {"x": np.random.default_rng(0).normal(size=(2, 3, 4)).astype(np.float32)})


def test_split_in_equal_and_given_parts():
    net = Net(seed=2)
    x = net.input("x", [1, 7, 4])
    a, b = net.op("Split", x, net.ints(3, 4), outputs=2, axis=1)
    for tensor in (a, b):
        net.output(tensor)
    check(net.model(), {"x": np.random.default_rng(0).normal(size=(1, 7, 4)).astype(np.float32)})


def test_an_unsupported_operator_is_named_with_its_node():
    net = Net(seed=3)
    x = net.input("x", [1, 2, 8, 8])
    net.output(net.op("Conv", net.op("GlobalLpPool", x, label="odd"), net.w(3, 2, 1, 1)))
    with pytest.raises(ModelError, match=rf"'{net.names['odd']}' \(GlobalLpPool\).*does not support"):
        torch_run(net.model(), {"x": np.ones((1, 2, 8, 8), np.float32)})


def test_what_is_not_asked_for_is_not_computed():
    net = Net(seed=3)
    x = net.input("x", [1, 2, 8, 8])
    middle = net.op("Conv", x, net.w(3, 2, 1, 1))
    net.output(net.op("GlobalLpPool", middle))
    [found] = torch_run(net.model(), {"x": np.ones((1, 2, 8, 8), np.float32)}, want=[middle])
    assert found.shape == (1, 3, 8, 8)


def small_cnn(seed=5):
    net = Net(seed=seed)
    x = net.input("x", ["n", 3, 16, 16])
    a = net.op("Relu", net.op("Conv", x, net.w(8, 3, 3, 3), net.w(8), label="first"))
    b = net.op("Relu", net.op("Conv", a, net.w(8, 8, 3, 3), net.w(8), label="second"))
    net.output(net.op("Conv", b, net.w(4, 8, 1, 1), net.w(4), label="third"), ["n", 4, "h", "w"])
    return net.model()


def quantized_cnn(folder):
    quantize(folder, small_cnn(), image_feeds((1, 3, 16, 16)))
    [path] = [path for path in folder.glob("*.onnx") if path.name.endswith(".int8.onnx")]
    return load_model(path)


def test_quantized_graph_runs_as_onnxruntime_runs_it(tmp_path):
    """QAT trains what is deployed: the same rounding, half to even, the same scales."""
    quantized = quantized_cnn(tmp_path)
    feeds = image_feeds((1, 3, 16, 16))(0)
    expected = run(quantized, feeds, optimize=False)[0]
    found = torch_run(quantized, feeds)[0]
    step = np.abs(expected).max() / 127
    assert np.mean(np.abs(found - expected) > 1e-4) < 0.01, "more than single roundings on the edge differ"
    assert np.abs(found - expected).max() < 2 * step


def test_int8_weights_are_trained_through_their_rounding(tmp_path):
    quantized = quantized_cnn(tmp_path)
    feeds = image_feeds((1, 3, 16, 16))(0)
    graph = TorchGraph(quantized)
    name = next(
        item.name for item in quantized.graph.initializer if item.data_type == onnx.TensorProto.INT8 and item.dims
    )
    weight = graph.parameters[name]
    out = quantized.graph.output[0].name
    graph.run({"x": torch.from_numpy(feeds["x"])}, want=[out])[out].square().sum().backward()
    assert weight.grad is not None
    assert float(weight.grad.abs().sum()) > 0
    with torch.no_grad():
        weight.add_(weight.abs().max())  # beyond the range: clipped at 127
    written = {item.name: numpy_helper.to_array(item) for item in graph.export().graph.initializer}
    assert written[name].dtype == np.int8
    assert written[name].max() == 127
    [again] = torch_run(graph.export(), feeds)
    with torch.no_grad():
        [trained] = graph.run({"x": torch.from_numpy(feeds["x"])}, want=[out]).values()
    np.testing.assert_allclose(again, trained.numpy(), rtol=1e-4, atol=1e-4)


def test_export_keeps_the_graph_and_changes_only_weights():
    model = small_cnn()
    graph = TorchGraph(model)
    with torch.no_grad():
        for value in graph.parameters.values():
            value.mul_(0.5)
    written = graph.export()
    assert [node.name for node in written.graph.node] == [node.name for node in GraphView(model).nodes]
    assert written.graph.output[0].name == model.graph.output[0].name
    for before, after in zip(model.graph.initializer, written.graph.initializer, strict=True):
        np.testing.assert_allclose(numpy_helper.to_array(after), numpy_helper.to_array(before) * 0.5)


def test_decoding_constants_are_not_trained():
    """The bins of a distribution over distances look like a convolution's weights."""
    net = Net(seed=9)
    x = net.input("x", [1, 4, 4, 4])
    raw = net.op("Conv", x, net.w(8, 4, 1, 1), label="head")
    bins = net.op("Softmax", net.op("Reshape", raw, net.ints(1, 2, 4, 16)), axis=2)
    moved = net.op("Transpose", bins, perm=[0, 2, 1, 3])
    weights = net.w(value=np.arange(4, dtype=np.float32).reshape(1, 4, 1, 1))
    net.output(net.op("Conv", moved, weights), [1, 1, 2, 16], FLOAT)
    assert weights not in TorchGraph(net.model()).parameters


@pytest.mark.zoo
def test_yolo11n_gives_what_onnxruntime_gives():
    from edgeds.compress.quantize import prepare_float
    from edgeds.zoo import fetch_model

    model = prepare_float(fetch_model("yolo11n", quiet=True))
    feeds = {model.graph.input[0].name: np.random.default_rng(0).random((1, 3, 64, 64), dtype=np.float32)}
    check(model, feeds, 1e-4)
