"""Channels that always hold the same number: their readers' biases take them over, so that removing them is exact.

A layer's output whose weights are all zero is its bias everywhere, and stays one number through activations. What a
Conv without padding or a Gemm reads from it is a constant, which joins the bias; the columns that read it become zero.
The model computes what it did, and the channel now counts as dead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import NodeProto

from edgeds.compress.group_axes import Cut
from edgeds.compress.groups import Groups
from edgeds.graph.proto import attributes
from edgeds.graph.view import GraphView

Values = NDArray[np.float64]
"""One number per position along the channel axis, NaN where it varies or is not known."""

_UNARY: dict[str, Callable[[Values], Values]] = {
    "Relu": lambda x: np.maximum(x, 0),
    "Sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "Tanh": np.tanh,
    "Identity": lambda x: x,
    "Dropout": lambda x: x,
    "Abs": np.abs,
    "Neg": np.negative,
    "HardSwish": lambda x: x * np.clip(x / 6 + 0.5, 0, 1),
}
_PASSING = frozenset(
    ("MaxPool", "GlobalAveragePool", "GlobalMaxPool", "Reshape", "Flatten", "Transpose", "Squeeze", "Unsqueeze")
)


def absorb_constants(view: GraphView, groups: Groups) -> int:
    """Move constant channels into the biases of their readers, in place; return how many readings were moved.

    Only columns of weights that nothing else reads, and only where it is exact. Groups must be found anew after it.
    """
    values = _channel_values(view, groups)
    nodes = {node.name: node for node in view.nodes}
    return sum(
        _absorb(view, nodes[cut.node], cut, values[nodes[cut.node].input[0]])
        for cut in groups.cuts
        if cut.role == "consumer" and nodes[cut.node].input[0] in values
    )


def _channel_values(view: GraphView, groups: Groups) -> dict[str, Values]:
    """Known numbers of followed tensors, for tensors that have any."""
    found: dict[str, Values] = {}
    for node in view.nodes:
        if not node.output or node.output[0] not in groups.tracks:
            continue
        if node.op_type in ("Conv", "Gemm", "MatMul"):
            values = _of_layer(view, node, found)
        elif node.op_type == "Split":
            _of_split(groups, node, found)
            continue
        else:
            values = _of_operator(view, groups, node, found)
        track = groups.tracks[node.output[0]]
        if values is not None and values.size == track.ids.size and not np.isnan(values).all():
            found[node.output[0]] = values
    return found


def _of_layer(view: GraphView, node: NodeProto, found: dict[str, Values]) -> Values | None:
    weight = view.constant(node.input[1])
    if weight is None or weight.dtype.kind != "f":
        return None
    attrs = attributes(node)
    out_axis = 0 if node.op_type == "Conv" or attrs.get("transB", 0) else weight.ndim - 1
    rows = np.moveaxis(weight, out_axis, 0).reshape(weight.shape[out_axis], -1).astype(np.float64)
    bias = _bias(view, node, rows.shape[0])
    if bias is None:
        return None
    values = np.where((rows == 0).all(axis=1), bias, np.nan)
    given = found.get(node.input[0])
    group = attrs.get("group", 1)
    if node.op_type == "Conv" and group > 1 and weight.shape[1] == 1 and given is not None:
        source = np.repeat(given, rows.shape[0] // group)
        exact = (source == 0) | (not _pads(attrs))
        values = np.where(np.isnan(values) & exact, source * rows.sum(axis=1) + bias, values)
    return values


def _bias(view: GraphView, node: NodeProto, size: int) -> Values | None:
    """The bias as added (Gemm: times beta), None when it is computed or of another shape."""
    if len(node.input) < 3 or not node.input[2]:
        return np.zeros(size)
    bias = view.constant(node.input[2])
    if bias is None or bias.size not in (1, size):
        return None
    scale = float(attributes(node).get("beta", 1.0)) if node.op_type == "Gemm" else 1.0
    return np.broadcast_to(bias.reshape(-1).astype(np.float64) * scale, (size,)).copy()


def _pads(attrs: dict[str, Any]) -> bool:
    return any(attrs.get("pads", ())) or attrs.get("auto_pad", b"NOTSET") not in (b"NOTSET", b"VALID")


def _of_split(groups: Groups, node: NodeProto, found: dict[str, Values]) -> None:
    given = found.get(node.input[0])
    if given is None:
        return
    rewrite = next((item for item in groups.rewrites if item.node == node.name), None)
    start = 0
    for name, part in zip(node.output, rewrite.parts if rewrite is not None else (), strict=False):
        found[name] = given[start : start + part.size]
        start += part.size


def _of_operator(view: GraphView, groups: Groups, node: NodeProto, found: dict[str, Values]) -> Values | None:
    given = [found.get(name) for name in node.input]
    if node.op_type == "Concat":
        parts = []
        for name, values in zip(node.input, given, strict=True):
            track = groups.tracks.get(name)
            if track is None:
                return None  # its size along the axis is not needed often enough to look it up
            parts.append(np.full(track.ids.size, np.nan) if values is None else values)
        return np.concatenate(parts)
    if node.op_type in ("Add", "Mul") and all(name in groups.tracks for name in node.input):
        if given[0] is None or given[1] is None or given[0].size != given[1].size:
            return None
        return given[0] + given[1] if node.op_type == "Add" else given[0] * given[1]
    first = given[0] if given else None
    if first is None:
        return None
    if node.op_type == "BatchNormalization":
        constants = [view.constant(name) for name in node.input[1:5]]
        if any(item is None for item in constants):
            return None
        scale, shift, mean, variance = (np.asarray(item, np.float64) for item in constants)
        return scale * (first - mean) / np.sqrt(variance + float(attributes(node).get("epsilon", 1e-5))) + shift
    if node.op_type in _UNARY:
        return _UNARY[node.op_type](first)
    if node.op_type in _PASSING:
        return np.repeat(first, max(1, groups.tracks[node.output[0]].ids.size // first.size))
    return None


def _absorb(view: GraphView, node: NodeProto, cut: Cut, values: Values) -> int:
    weight, attrs = view.constant(node.input[1]), attributes(node)
    if weight is None or node.op_type not in ("Conv", "Gemm") or values.size != weight.shape[cut.axis]:
        return 0
    uses = sum(list(other.input).count(node.input[1]) for other in view.consumers(node.input[1]))
    if uses != 1 or view.producer(node.input[1]) is not None or view.used_in_subgraph(node.input[1]):
        return 0
    if attrs.get("group", 1) != 1 or attrs.get("alpha", 1.0) != 1.0 or attrs.get("beta", 1.0) != 1.0:
        return 0
    columns = np.moveaxis(weight, cut.axis, 0).reshape(values.size, -1)
    known = np.isfinite(values) & (cut.ids >= 0) & (columns != 0).any(axis=1) & np.isfinite(columns).all(axis=1)
    if _pads(attrs):
        known &= values == 0
    if not known.any():
        return 0
    moved = np.moveaxis(weight.astype(np.float64), cut.axis, -1)[..., known] @ values[known]
    if node.op_type == "Conv":
        moved = moved.reshape(moved.shape[0], -1).sum(axis=1)
    bias = _bias(view, node, moved.size)
    if bias is None:
        return 0
    if values[known].any():
        view.set_input(node, 2, view.add_constant(f"{node.name}_bias", (bias + moved).astype(weight.dtype)))
    changed = np.moveaxis(weight.copy(), cut.axis, 0)
    changed[known] = 0
    view.set_constant(node.input[1], np.ascontiguousarray(np.moveaxis(changed, 0, cut.axis)))
    return int(known.sum())
