"""Floating-point operations of one node from its shapes. A multiply-accumulate counts as two."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from onnx import NodeProto

from edgeds.graph.proto import attributes

Shape = tuple[int, ...]

MATRIX_OPS = frozenset(
    {"Conv", "ConvTranspose", "Gemm", "MatMul", "QLinearConv", "QLinearMatMul", "ConvInteger", "MatMulInteger"}
)
"""Ops whose FLOPs the int8 share is taken over."""

FREE_OPS = frozenset({"Reshape", "Flatten", "Squeeze", "Unsqueeze", "Identity", "Shape", "Size", "Constant", "Dropout"})
"""Ops that move no data in a compiled engine: they rename or re-view a buffer."""

MOVE_OPS = frozenset(
    {"Transpose", "Concat", "Slice", "Split", "Gather", "GatherElements", "GatherND", "ScatterND", "ScatterElements"}
    | {"Pad", "Expand", "Tile", "Cast", "CastLike", "ConstantOfShape", "Range", "DepthToSpace", "SpaceToDepth"}
    | {"OneHot", "EyeLike", "NonZero", "Compress", "Where", "QuantizeLinear", "DequantizeLinear", "TensorScatter"}
    | {"If", "Loop", "Scan", "Scatter", "Upsample"}
)
"""Ops that move or convert data without arithmetic on it."""

_PER_ELEMENT = {
    **{"Softmax": 5, "LogSoftmax": 6, "Hardmax": 2, "BatchNormalization": 2, "LRN": 8},
    **{"LayerNormalization": 8, "InstanceNormalization": 8, "GroupNormalization": 8, "RMSNormalization": 6},
    **{"SimplifiedLayerNormalization": 6, "MeanVarianceNormalization": 8, "LpNormalization": 3, "RotaryEmbedding": 6},
}
"""Per element of the input: softmax is max, subtract, exp, sum, divide; norms are two passes plus scale and shift."""

_GLOBAL = frozenset({"GlobalAveragePool", "GlobalMaxPool", "GlobalLpPool", "ArgMax", "ArgMin", "TopK", "CumSum"})


def node_flops(node: NodeProto, inputs: Sequence[Shape | None], outputs: Sequence[Shape | None]) -> int:
    """FLOPs of one node; 0 for data movement, and where the shapes needed are unknown."""
    op = node.op_type
    out = _size(outputs[0]) if outputs else 0
    if op in FREE_OPS or op in MOVE_OPS:
        return 0
    if op in _EXACT:
        return _EXACT[op](node, inputs, outputs)
    if op in _PER_ELEMENT:
        return _PER_ELEMENT[op] * _size(inputs[0] if inputs else None)
    if op.startswith("Reduce") or op in _GLOBAL:
        return _size(inputs[0] if inputs else None)
    return out


def _size(shape: Shape | None) -> int:
    return math.prod(shape) if shape is not None else 0


def _at(shapes: Sequence[Shape | None], index: int) -> Shape | None:
    return shapes[index] if len(shapes) > index else None


def _conv(node: NodeProto, inputs: Sequence[Shape | None], outputs: Sequence[Shape | None]) -> int:
    weight = _at(inputs, 3 if node.op_type == "QLinearConv" else 1)
    return 2 * _size(_at(outputs, 0)) * math.prod(weight[1:]) if weight else 0


def _conv_transpose(node: NodeProto, inputs: Sequence[Shape | None], outputs: Sequence[Shape | None]) -> int:
    weight = _at(inputs, 1)  # [C_in, M / group, ...]: every input value meets M / group x kernel weights
    return 2 * _size(_at(inputs, 0)) * math.prod(weight[1:]) if weight else 0


def _gemm(node: NodeProto, inputs: Sequence[Shape | None], outputs: Sequence[Shape | None]) -> int:
    left = _at(inputs, 0)
    inner = 0 if not left or len(left) != 2 else left[0] if attributes(node).get("transA", 0) else left[1]
    return 2 * _size(_at(outputs, 0)) * inner


def _matmul(node: NodeProto, inputs: Sequence[Shape | None], outputs: Sequence[Shape | None]) -> int:
    left = _at(inputs, 0)
    return 2 * _size(_at(outputs, 0)) * left[-1] if left else 0


def _pool(node: NodeProto, inputs: Sequence[Shape | None], outputs: Sequence[Shape | None]) -> int:
    return _size(_at(outputs, 0)) * math.prod(attributes(node).get("kernel_shape", [1]))


def _resize(node: NodeProto, inputs: Sequence[Shape | None], outputs: Sequence[Shape | None]) -> int:
    mode = attributes(node).get("mode", b"nearest")
    return {b"nearest": 0, b"linear": 8, b"cubic": 32}.get(mode, 8) * _size(_at(outputs, 0))


def _grid_sample(node: NodeProto, inputs: Sequence[Shape | None], outputs: Sequence[Shape | None]) -> int:
    return 8 * _size(_at(outputs, 0))


def _attention(node: NodeProto, inputs: Sequence[Shape | None], outputs: Sequence[Shape | None]) -> int:
    query, key, out = _at(inputs, 0), _at(inputs, 1), _at(outputs, 0)
    if not query or not key or not out or len(query) not in (3, 4):
        return 0
    heads = query[1] if len(query) == 4 else int(attributes(node).get("q_num_heads", 1))
    rows, columns = query[-2], key[-2]
    return 2 * columns * (_size(query) + _size(out)) + 5 * query[0] * heads * rows * columns


def _recurrent(node: NodeProto, inputs: Sequence[Shape | None], outputs: Sequence[Shape | None]) -> int:
    data, weight, recurrence = _at(inputs, 0), _at(inputs, 1), _at(inputs, 2)
    if not data or not weight or not recurrence:
        return 0
    return 2 * data[0] * data[1] * (_size(weight) + _size(recurrence))


def _einsum(node: NodeProto, inputs: Sequence[Shape | None], outputs: Sequence[Shape | None]) -> int:
    equation = attributes(node).get("equation", b"").decode("utf-8", "replace").replace(" ", "")
    terms = equation.split("->")[0].split(",")
    sizes: dict[str, int] = {}
    for term, shape in zip(terms, inputs, strict=False):
        if shape is None or len(term) != len(shape) or "." in term:
            return 0
        sizes.update(zip(term, shape, strict=True))
    return (2 if len(terms) > 1 else 1) * math.prod(sizes.values())


_EXACT: dict[str, Callable[[NodeProto, Sequence[Shape | None], Sequence[Shape | None]], int]] = {
    **{"Conv": _conv, "QLinearConv": _conv, "ConvInteger": _conv, "ConvTranspose": _conv_transpose, "Gemm": _gemm},
    **{"MatMul": _matmul, "QLinearMatMul": _matmul, "MatMulInteger": _matmul, "Einsum": _einsum},
    **{"MaxPool": _pool, "AveragePool": _pool, "LpPool": _pool, "Resize": _resize, "GridSample": _grid_sample},
    **{"Attention": _attention, "LSTM": _recurrent, "GRU": _recurrent, "RNN": _recurrent},
}
