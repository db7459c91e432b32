"""Small models for the simulated device, made with onnx.helper."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

WEIGHT = np.random.default_rng(0).normal(size=(4, 3, 3, 3)).astype(np.float32)


def save(path: Path, nodes: Sequence, inputs: Sequence, outputs: Sequence, inits: Sequence = ()) -> Path:
    import onnx
    from onnx import helper

    graph = helper.make_graph(list(nodes), "g", list(inputs), list(outputs), list(inits))
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(model)
    onnx.save(model, str(path))
    return path


def value(name: str, dtype: str, shape: Sequence):
    from onnx import TensorProto, helper

    return helper.make_tensor_value_info(name, getattr(TensorProto, dtype), shape)


def conv_model(path: Path) -> Path:
    """x [N,3,H,W] -> y = Relu(Conv(x)) [N,4,H,W] and m = mean over channels and pixels [N,1,1,1]."""
    from onnx import helper, numpy_helper

    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["c"], ["y"]),
        helper.make_node("ReduceMean", ["x"], ["m"], axes=[1, 2, 3]),
    ]
    outputs = [value("y", "FLOAT", ["N", 4, "H", "W"]), value("m", "FLOAT", ["N", 1, 1, 1])]
    return save(path, nodes, [value("x", "FLOAT", ["N", 3, "H", "W"])], outputs, [numpy_helper.from_array(WEIGHT, "w")])


def add_model(path: Path) -> Path:
    """a [N,4] + b [N,4] -> s [N,4]."""
    from onnx import helper

    ends = [value(name, "FLOAT", ["N", 4]) for name in "abs"]
    return save(path, [helper.make_node("Add", ["a", "b"], ["s"])], ends[:2], ends[2:])


def nonzero_model(path: Path) -> Path:
    """x [n] -> places [k,1] of the non-zero elements (k depends on the data) and total [1]."""
    from onnx import helper

    nodes = [
        helper.make_node("NonZero", ["x"], ["t"]),
        helper.make_node("Transpose", ["t"], ["places"]),
        helper.make_node("ReduceSum", ["x"], ["total"]),
    ]
    outputs = [value("places", "INT64", ["k", 1]), value("total", "FLOAT", [1])]
    return save(path, nodes, [value("x", "FLOAT", ["n"])], outputs)


def reshape_model(path: Path) -> Path:
    """x [n] reshaped to the values of ``size`` [2], which the CPU reads."""
    from onnx import helper

    inputs = [value("x", "FLOAT", ["n"]), value("size", "INT64", [2])]
    return save(path, [helper.make_node("Reshape", ["x", "size"], ["y"])], inputs, [value("y", "FLOAT", ["a", "b"])])


CONV_PROFILES = [
    {"x": ((1, 3, 8, 8), (2, 3, 8, 8), (4, 3, 8, 8))},
    {"x": ((1, 3, 8, 8), (2, 3, 16, 16), (4, 3, 32, 32))},
]
