"""Small models for the float16 tests, and a reference that really rounds to float16 after every node."""

from __future__ import annotations

import numpy as np
from graph_models import build, node, value, weight
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

INT64 = TensorProto.INT64


def exact(model, feeds):
    """Outputs as numpy computes them in each node's own type: onnxruntime's CPU kernels would hide an overflow."""
    with np.errstate(all="ignore"):
        return ReferenceEvaluator(model).run(None, feeds)


def const(array, dtype=np.float32):
    return np.asarray(array, dtype)


def spelled_layer_norm(x, out, tag, weights, *, size):
    """LayerNorm as nodes: mean, centre, square, mean, eps, root, divide, scale, shift."""
    weights |= {
        f"{tag}_two": const(2.0),
        f"{tag}_eps": const(1e-12),
        f"{tag}_g": np.ones(size, np.float32),
        f"{tag}_b": np.zeros(size, np.float32),
    }
    n = lambda op, ins, o, **attrs: node(op, ins, [f"{tag}_{o}"], f"{tag}/{op}_{o}", **attrs)  # noqa: E731
    return [
        n("ReduceMean", [x], "mean", axes=[-1]),
        n("Sub", [x, f"{tag}_mean"], "centred"),
        n("Pow", [f"{tag}_centred", f"{tag}_two"], "squares"),
        n("ReduceMean", [f"{tag}_squares"], "variance", axes=[-1]),
        n("Add", [f"{tag}_variance", f"{tag}_eps"], "safe"),
        n("Sqrt", [f"{tag}_safe"], "root"),
        n("Div", [f"{tag}_centred", f"{tag}_root"], "unit"),
        n("Mul", [f"{tag}_unit", f"{tag}_g"], "scaled"),
        node("Add", [f"{tag}_scaled", f"{tag}_b"], [out], f"{tag}/shift"),
    ]


def encoder(*, size=32, heads=2, length="S", vocabulary=50, spelled=False, mask_value=-3.4028235e38) -> object:
    """A MiniLM-like layer: embeddings, masked attention, GELU by Erf, two LayerNorms."""
    depth = size // heads
    w = {
        "table": weight(vocabulary, size, seed=1),
        "one": const(1.0),
        "least": const(mask_value),
        "factor": const(np.sqrt(depth)),
        "axes": np.array([1, 2], np.int64),
        "split": np.array([0, 0, heads, depth], np.int64),
        "join": np.array([0, 0, size], np.int64),
        "sqrt2": const(np.sqrt(2)),
        "half": const(0.5),
        "w_up": weight(size, 4 * size, seed=7),
        "w_down": weight(4 * size, size, seed=8),
    }
    nodes = [
        node("Gather", ["table", "ids"], ["embedded"], "embed"),
        node("Cast", ["mask"], ["mask_f"], "mask/cast", to=TensorProto.FLOAT),
        node("Unsqueeze", ["mask_f", "axes"], ["mask_4"], "mask/unsqueeze"),
        node("Sub", ["one", "mask_4"], ["hidden"], "mask/invert"),
        node("Mul", ["hidden", "least"], ["bias"], "mask/scale"),
    ]
    for index, (name, perm) in enumerate((("q", [0, 2, 1, 3]), ("k", [0, 2, 3, 1]), ("v", [0, 2, 1, 3]))):
        w[f"w_{name}"] = weight(size, size, seed=2 + index)
        nodes += [
            node("MatMul", ["embedded", f"w_{name}"], [f"{name}1"], f"{name}/project"),
            node("Reshape", [f"{name}1", "split"], [f"{name}2"], f"{name}/heads"),
            node("Transpose", [f"{name}2"], [f"{name}3"], f"{name}/swap", perm=perm),
        ]
    nodes += [
        node("MatMul", ["q3", "k3"], ["raw"], "scores"),
        node("Div", ["raw", "factor"], ["scaled"], "scores/scale"),
        node("Add", ["scaled", "bias"], ["masked"], "scores/mask"),
        node("Softmax", ["masked"], ["shares"], "scores/softmax", axis=-1),
        node("MatMul", ["shares", "v3"], ["mixed"], "mix"),
        node("Transpose", ["mixed"], ["mixed2"], "mix/swap", perm=[0, 2, 1, 3]),
        node("Reshape", ["mixed2", "join"], ["mixed3"], "mix/join"),
        node("Add", ["mixed3", "embedded"], ["residual"], "residual"),
    ]
    if spelled:
        nodes += spelled_layer_norm("residual", "normed", "norm1", w, size=size)
    else:
        w |= {"g1": np.ones(size, np.float32), "b1": np.zeros(size, np.float32)}
        nodes.append(node("LayerNormalization", ["residual", "g1", "b1"], ["normed"], "norm1", axis=-1))
    nodes += [
        node("MatMul", ["normed", "w_up"], ["up"], "up"),
        node("Div", ["up", "sqrt2"], ["up2"], "gelu/div"),
        node("Erf", ["up2"], ["erf"], "gelu/erf"),
        node("Add", ["erf", "one"], ["erf1"], "gelu/add"),
        node("Mul", ["up", "erf1"], ["gate"], "gelu/mul"),
        node("Mul", ["gate", "half"], ["gelu"], "gelu/half"),
        node("MatMul", ["gelu", "w_down"], ["out"], "down"),
    ]
    inputs = [value("ids", ["B", length], INT64), value("mask", ["B", length], INT64)]
    return build(nodes, inputs, [value("out", ["B", length, size])], w)


def range_detector() -> object:
    """Dynamic H and W: anchors from Shape, Range and Expand; boxes times stride, scores by Sigmoid, one Concat."""
    w = {
        "w": weight(16, 3, 8, 8, scale=0.05),
        "wb": weight(2, 16, 1, 1, seed=1),
        "ws": weight(3, 16, 1, 1, seed=2),
        "two": np.array(2, np.int64),
        "three": np.array(3, np.int64),
        "zero_f": const(0.0),
        "one_f": const(1.0),
        "half": const(0.5),
        "stride": const(8.0),
        "row": np.array([0], np.int64),
        "flat2": np.array([0, 2, -1], np.int64),
        "flat3": np.array([0, 3, -1], np.int64),
        "flat1": np.array([1, 1, -1], np.int64),
        "column": np.array([1], np.int64),
    }
    nodes = [
        node("Conv", ["images", "w"], ["f"], "stem", strides=[8, 8]),
        node("Relu", ["f"], ["r"], "act"),
        node("Conv", ["r", "wb"], ["b"], "box"),
        node("Conv", ["r", "ws"], ["s"], "score"),
        node("Reshape", ["b", "flat2"], ["b2"], "box/flat"),
        node("Reshape", ["s", "flat3"], ["s2"], "score/flat"),
        node("Shape", ["r"], ["shape"], "grid/shape"),
    ]
    for axis, name in (("two", "y"), ("three", "x")):
        nodes += [
            node("Gather", ["shape", axis], [f"{name}_n"], f"grid/{name}_size", axis=0),
            node("Cast", [f"{name}_n"], [f"{name}_f"], f"grid/{name}_cast", to=TensorProto.FLOAT),
            node("Range", ["zero_f", f"{name}_f", "one_f"], [f"{name}_r"], f"grid/{name}_range"),
            node("Add", [f"{name}_r", "half"], [f"{name}_c"], f"grid/{name}_centre"),
        ]
    nodes += [
        node("Unsqueeze", ["y_n", "row"], ["y_1"], "grid/y_1"),
        node("Unsqueeze", ["x_n", "row"], ["x_1"], "grid/x_1"),
        node("Concat", ["y_1", "x_1"], ["hw"], "grid/hw", axis=0),
        node("Unsqueeze", ["y_c", "column"], ["y_col"], "grid/y_col"),
        node("Expand", ["y_col", "hw"], ["y_grid"], "grid/y"),
        node("Expand", ["x_c", "hw"], ["x_grid"], "grid/x"),
        node("Reshape", ["y_grid", "flat1"], ["y_line"], "grid/y_line"),
        node("Reshape", ["x_grid", "flat1"], ["x_line"], "grid/x_line"),
        node("Concat", ["x_line", "y_line"], ["anchors"], "grid/anchors", axis=1),
        node("Add", ["b2", "anchors"], ["centres"], "decode/add"),
        node("Mul", ["centres", "stride"], ["pixels"], "decode/stride"),
        node("Sigmoid", ["s2"], ["p"], "decode/sigmoid"),
        node("Concat", ["pixels", "p"], ["output0"], "decode/join", axis=1),
    ]
    return build(nodes, [value("images", ["N", 3, "H", "W"])], [value("output0", ["N", 5, "A"])], w)


def qdq_conv(*, opset=13, weight_scale=None, activation_scale=0.05, shared=False) -> object:
    """x -> Q -> DQ -> Conv (int8 weights behind a DQ) -> Relu; ``shared`` adds a second Conv with the same weights."""
    channels = 4
    scale = const(np.full(channels, 0.004) if weight_scale is None else weight_scale)
    integers = np.random.default_rng(3).integers(-127, 128, (channels, 4, 3, 3)).astype(np.int8)
    w = {
        "xs": const(activation_scale),
        "xz": np.int8(0),
        "wq": integers,
        "wscale": scale,
        "wz": np.zeros(channels, np.int8),
        "bias": weight(channels, seed=5),
    }
    nodes = [
        node("QuantizeLinear", ["x", "xs", "xz"], ["xq"], "x_Q"),
        node("DequantizeLinear", ["xq", "xs", "xz"], ["xd"], "x_DQ"),
        node("DequantizeLinear", ["wq", "wscale", "wz"], ["wd"], "w_DQ", axis=0),
        node("Conv", ["xd", "wd", "bias"], ["c"], "conv", pads=[1] * 4),
        node("Relu", ["c"], ["y"], "relu"),
    ]
    outputs = [value("y", ["N", channels, 8, 8])]
    if shared:
        nodes.append(node("Conv", ["y", "wd"], ["z"], "conv2", pads=[1] * 4))
        outputs.append(value("z", ["N", channels, 8, 8]))
    return build(nodes, [value("x", ["N", 4, 8, 8])], outputs, w, opset=opset)


def make_half(model):
    """The same small model with every float tensor stored and declared in float16, as half-precision exports are."""
    from onnx import ModelProto, numpy_helper

    half = ModelProto()
    half.CopyFrom(model)
    for index, tensor in enumerate(half.graph.initializer):
        array = numpy_helper.to_array(tensor)
        if array.dtype == np.float32:
            half.graph.initializer[index].CopyFrom(numpy_helper.from_array(array.astype(np.float16), tensor.name))
    for item in (*half.graph.input, *half.graph.output):
        if item.type.tensor_type.elem_type == TensorProto.FLOAT:
            item.type.tensor_type.elem_type = TensorProto.FLOAT16
    return half


__all__ = [
    "INT64",
    "const",
    "encoder",
    "exact",
    "helper",
    "make_half",
    "qdq_conv",
    "range_detector",
    "spelled_layer_norm",
]
