"""Small models for the graph tests, built here; every builder returns a new model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64


def value(name, dims, elem=FLOAT):
    return helper.make_tensor_value_info(name, elem, dims)


def build(nodes, inputs, outputs, weights=None, *, opset=17, ir=8, metadata=None, extra_opsets=()) -> ModelProto:
    tensors = [numpy_helper.from_array(np.asarray(array), name) for name, array in (weights or {}).items()]
    graph = helper.make_graph(list(nodes), "test", list(inputs), list(outputs), tensors)
    opsets = [helper.make_opsetid("", opset), *(helper.make_opsetid(d, v) for d, v in extra_opsets)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=ir)
    if metadata:
        helper.set_model_props(model, metadata)
    return model


def node(op, inputs, outputs, name="", **attrs) -> NodeProto:
    return helper.make_node(op, inputs, outputs, name, **attrs)


def weight(*shape, seed=0, dtype=np.float32, scale=0.3):
    return (np.random.default_rng(seed).standard_normal(shape) * scale).astype(dtype)


def two_convs(*, opset=17, ir=8, metadata=None) -> ModelProto:
    """x [N,3,12,12] -> Conv 64 -> Relu -> Conv 16; 44 KiB of weights."""
    nodes = [
        node("Conv", ["x", "w1"], ["a"], "c1"),
        node("Relu", ["a"], ["b"], "r1"),
        node("Conv", ["b", "w2"], ["y"], "c2"),
    ]
    weights = {"w1": weight(64, 3, 3, 3), "w2": weight(16, 64, 3, 3, seed=1)}
    return build(
        nodes,
        [value("x", ["N", 3, 12, 12])],
        [value("y", ["N", 16, 8, 8])],
        weights,
        opset=opset,
        ir=ir,
        metadata=metadata,
    )


def hidden_weights() -> ModelProto:
    """B01: weights behind Constant, float16 + Cast, and Identity; one node without a name."""
    nodes = [
        node("Constant", [], ["w1"], "k1", value=numpy_helper.from_array(weight(8, 3, 3, 3), "v")),
        node("Conv", ["x", "w1"], ["a"], "conv1", pads=[1] * 4),
        node("Relu", ["a"], ["ar"]),
        node("Cast", ["w2h"], ["w2"], "cast", to=FLOAT),
        node("Conv", ["ar", "w2"], ["b"], "conv2", pads=[1] * 4),
        node("Identity", ["w3i"], ["w3"], "same"),
        node("Conv", ["b", "w3"], ["y"], "conv3"),
    ]
    weights = {"w2h": weight(8, 8, 3, 3, seed=2, dtype=np.float16), "w3i": weight(4, 8, 1, 1, seed=3)}
    return build(nodes, [value("x", ["N", 3, 16, 16])], [value("y", ["N", 4, 16, 16])], weights, opset=13)


def branch_with_capture() -> ModelProto:
    """B09: the weight of the outer Conv, and a scale, are read inside an If branch through the outer scope."""
    then_branch = helper.make_graph(
        [
            node("Conv", ["a", "w"], ["t0"], "inner", pads=[1] * 4),
            node("Mul", ["t0", "scale"], ["t1"], "inner_scale"),
        ],
        "then",
        [],
        [value("t1", None)],
    )
    else_branch = helper.make_graph([node("Identity", ["a"], ["e1"], "pass")], "else", [], [value("e1", None)])
    nodes = [
        node("Conv", ["x", "w"], ["a"], "outer", pads=[1] * 4),
        node("If", ["flag"], ["y"], "choose", then_branch=then_branch, else_branch=else_branch),
    ]
    return build(
        nodes,
        [value("x", ["N", 4, 8, 8]), value("flag", [], TensorProto.BOOL)],
        [value("y", ["N", 4, 8, 8])],
        {"w": weight(4, 4, 3, 3), "scale": np.float32(0.5)},
        opset=13,
    )


def old_squeeze() -> ModelProto:
    """B04: opset 11, Squeeze with its axes as an attribute."""
    nodes = [
        node("Conv", ["x", "w"], ["c"], "conv"),
        node("Relu", ["c"], ["r"], "relu"),
        node("GlobalAveragePool", ["r"], ["p"], "gap"),
        node("Squeeze", ["p"], ["s"], "squeeze", axes=[2, 3]),
        node("Gemm", ["s", "fw"], ["y"], "fc", transB=1),
    ]
    weights = {"w": weight(8, 3, 3, 3), "fw": weight(5, 8, seed=1)}
    return build(nodes, [value("x", ["N", 3, 12, 12])], [value("y", ["N", 5])], weights, opset=11, ir=6)


def strided_heads() -> ModelProto:
    """B91: predictions at strides 8, 16, 32; their number follows from the image size."""
    nodes = []
    weights = {"s": np.array([0, 6, -1])}
    for stride in (8, 16, 32):
        weights[f"w{stride}"] = weight(6, 3, stride, stride, seed=stride, scale=0.05)
        nodes.append(node("Conv", ["images", f"w{stride}"], [f"c{stride}"], f"conv{stride}", strides=[stride, stride]))
        nodes.append(node("Reshape", [f"c{stride}", "s"], [f"r{stride}"], f"flat{stride}"))
    nodes.append(node("Concat", ["r8", "r16", "r32"], ["output0"], "cat", axis=2))
    return build(nodes, [value("images", ["N", 3, "H", "W"])], [value("output0", ["N", 6, "A"])], weights)


def static_detector(*, size=64, anchors=False, reshape=None) -> ModelProto:
    """A static export: batch 1, size x size, fixed Reshape targets; ``anchors`` adds stored anchor points."""
    cells = (size // 8) ** 2
    nodes = [
        node("Conv", ["images", "w"], ["c"], "conv", strides=[8, 8]),
        node("Reshape", ["c", "shape"], ["r"], "flat"),
    ]
    weights = {"w": weight(6, 3, 8, 8, scale=0.05), "shape": np.array(reshape or [1, 6, cells])}
    last = "r"
    if anchors:
        weights["grid"] = weight(1, 6, cells, seed=4)
        nodes.append(node("Add", ["r", "grid"], ["g"], "place"))
        last = "g"
    nodes.append(node("Sigmoid", [last], ["output0"], "sig"))
    return build(nodes, [value("images", [1, 3, size, size])], [value("output0", [1, 6, cells])], weights)


def save_external(folder: Path, *, links=False) -> Path:
    """``two_convs`` as m.onnx with m.onnx.data; with ``links`` both are links to hash-named blobs (B13)."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "m.onnx"
    onnx.save(two_convs(), path, save_as_external_data=True, location="m.onnx.data", size_threshold=0)
    if links:
        blobs = folder.parent / "blobs"
        blobs.mkdir(exist_ok=True)
        for index, name in enumerate(("m.onnx", "m.onnx.data")):
            (folder / name).rename(blobs / f"{index:064x}")
            (folder / name).symlink_to(Path("..") / "blobs" / f"{index:064x}")
    return path


def run(model, feeds, **options):
    """Outputs of a model as a list, through plain onnxruntime with optimisations off (an independent reference)."""
    import onnxruntime

    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = 1
    settings.log_severity_level = 4
    settings.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    source = model if isinstance(model, str) else model.SerializeToString()
    return onnxruntime.InferenceSession(source, settings, providers=["CPUExecutionProvider"]).run(None, feeds)


def image(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
