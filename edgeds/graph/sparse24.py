"""Which layers have 2:4 sparse weights: of four neighbours along the input channels, at least two are zero.

TensorRT's sparse tensor cores want the pattern along axis C of a KCRS convolution weight and along the summed axis of a
matrix product. A quantized layer is judged by its stored INT8 values, which are what the device computes with.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto

from edgeds.graph.proto import attributes
from edgeds.graph.view import GraphView


@dataclass(frozen=True, kw_only=True)
class Sparse24:
    """One Conv, Gemm or MatMul with constant weights. ``reason`` says why it is not 2:4, None when it is."""

    node: str
    op: str
    weight: str
    zeros_share: float
    is_24: bool
    reason: str | None


def summed_axis(node: NodeProto, weight: NDArray[Any]) -> int | None:
    """Axis of the weight that the layer sums over, None where 2:4 has no meaning (not a Conv, Gemm or MatMul)."""
    if node.op_type == "Conv":
        return 1
    if node.op_type == "Gemm" and weight.ndim == 2:
        return 1 if attributes(node).get("transB", 0) else 0
    if node.op_type == "MatMul" and weight.ndim >= 2:
        return weight.ndim - 2
    return None


def groups_of_four(weight: NDArray[Any], axis: int) -> NDArray[Any]:
    """The weight as (..., C / 4, 4) with ``axis`` last; C must be a multiple of four."""
    moved = np.moveaxis(weight, axis, -1)
    return moved.reshape(*moved.shape[:-1], moved.shape[-1] // 4, 4)


def check_24(model: ModelProto) -> tuple[Sparse24, ...]:
    """Judge every Conv, Gemm and MatMul of the main graph whose weights are constant, in graph order."""
    view = GraphView(model, copy=False)
    found = []
    for node in view.nodes:
        if node.op_type not in ("Conv", "Gemm", "MatMul") or len(node.input) < 2:
            continue
        name = _stored(view, node.input[1])
        weight = view.constant(name)
        axis = summed_axis(node, weight) if weight is not None else None
        if weight is not None and axis is not None and weight.size:
            found.append(_judge(node, name, weight, axis=axis))
    return tuple(found)


def _stored(view: GraphView, name: str) -> str:
    """The stored integers behind DequantizeLinear, and the float weight behind QuantizeLinear, else the name itself."""
    for op in ("DequantizeLinear", "QuantizeLinear"):
        producer = view.producer(name)
        if producer is not None and producer.op_type == op:
            name = producer.input[0]
    return name


def _judge(node: NodeProto, name: str, weight: NDArray[Any], *, axis: int) -> Sparse24:
    channels = weight.shape[axis]
    reason = None
    if channels % 4:
        reason = f"{channels} input channels are not a multiple of 4"
    else:
        zeros = (groups_of_four(weight, axis) == 0).sum(axis=-1)
        dense = int((zeros < 2).sum())
        if dense:
            reason = f"{dense} of {zeros.size} groups of four hold more than two weights"
    return Sparse24(
        node=node.name,
        op=node.op_type,
        weight=name,
        zeros_share=float((weight == 0).mean()),
        is_24=reason is None,
        reason=reason,
    )
