"""Lint rules for Q/DQ: only the form that every TensorRT from 8.5 to 11 and TensorRT-RTX takes is free of findings.

That form: int8 with an explicit zero point of zeros, constant positive scale, activations per tensor, weights per
output channel, bias in float. Sources: TensorRT's operator documentation and builds with TensorRT-RTX 1.7.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from onnx import NodeProto

from edgeds.graph.findings import Finding, LintContext
from edgeds.graph.proto import attributes
from edgeds.graph.view import GraphView

_INTEGER_OPS = frozenset({"QLinearConv", "QLinearMatMul", "ConvInteger", "MatMulInteger", "DynamicQuantizeLinear"})


def lint_qdq(context: LintContext) -> Iterator[Finding]:
    """Zero points, types, scales and axes of QuantizeLinear and DequantizeLinear, and integer-operator forms."""
    for node in context.view.nodes:
        if node.op_type in _INTEGER_OPS:
            yield Finding(
                node=node.name,
                level="error",
                message=f"TensorRT has no {node.op_type}; quantize with QuantizeLinear/DequantizeLinear pairs (int8)",
            )
        elif node.op_type in ("QuantizeLinear", "DequantizeLinear"):
            yield from _zero_point(context.view, node)
            yield from _scale(context.view, node)


def _zero_point(view: GraphView, node: NodeProto) -> Iterator[Finding]:
    name = node.input[2] if len(node.input) > 2 else ""
    source = view.dtype(node.input[0])
    if node.op_type == "DequantizeLinear" and source is not None and source == np.int32:
        yield Finding(
            node=node.name,
            level="error",
            message=f"dequantizes the int32 tensor {node.input[0]!r} (a quantized bias); TensorRT refuses it, "
            "keep the bias in float",
        )
        return
    if not name:
        if source is not None and source.name == "int8":
            text = "has no zero point; TensorRT 8.5 wants an explicit int8 zero point of 0"
            yield Finding(node=node.name, level="warning", message=text)
        else:
            yield Finding(
                node=node.name,
                level="error",
                message="has no zero point: ONNX then means uint8, TensorRT reads int8; add an int8 zero point of 0",
            )
        return
    dtype = view.dtype(name)
    if dtype is not None and dtype == np.uint8:
        yield Finding(
            node=node.name,
            level="error",
            message="quantizes to uint8; TensorRT refuses it or silently reads int8. Use int8 with zero point 0",
        )
        return
    if dtype is not None and dtype.name not in ("int8", "int4", "float8_e4m3fn", "float4_e2m1fn"):
        yield Finding(
            node=node.name, level="error", message=f"quantizes to {dtype.name}, which TensorRT does not take; use int8"
        )
        return
    value = view.constant(name)
    if value is None:
        yield Finding(node=node.name, level="error", message=f"zero point {name!r} is computed; it must be constant")
    elif np.any(np.asarray(value, np.float32) != 0):
        yield Finding(
            node=node.name,
            level="error",
            message=f"zero point {name!r} is not 0; TensorRT takes symmetric quantization only",
        )


def _scale(view: GraphView, node: NodeProto) -> Iterator[Finding]:
    name = node.input[1]
    value = view.constant(name)
    if value is None:
        yield Finding(
            node=node.name,
            level="warning",
            message=f"scale {name!r} is computed; before TensorRT 11 it must be constant",
        )
        return
    numbers = np.asarray(value, np.float64)
    if not np.all(np.isfinite(numbers)) or np.any(numbers <= 0):
        yield Finding(
            node=node.name, level="error", message=f"scale {name!r} holds values that are not positive and finite"
        )
    if numbers.ndim == 0 or numbers.size == 1:
        return
    attrs = attributes(node)
    if attrs.get("block_size"):
        return
    shape = view.shape(node.input[0])
    axis = int(attrs.get("axis", 1))
    if "axis" not in attrs:
        yield Finding(
            node=node.name,
            level="error",
            message="has one scale per channel but no axis: ONNX then means axis 1, older TensorRT axis 0; write it",
        )
    elif shape is not None and not -len(shape) <= axis < len(shape):
        yield Finding(node=node.name, level="error", message=f"axis {axis} does not exist in shape {list(shape)}")
    elif shape is not None and isinstance(shape[axis], int) and shape[axis] != numbers.size:
        yield Finding(
            node=node.name,
            level="error",
            message=f"{numbers.size} scales along axis {axis}, which has {shape[axis]} channels",
        )
    if not _is_weight(view, node):
        yield Finding(
            node=node.name,
            level="error",
            message="quantizes an activation per channel; TensorRT takes one scale per activation tensor",
        )
    else:
        yield from _weight_axis(view, node, axis=axis, rank=len(shape) if shape is not None else None)


def _is_weight(view: GraphView, node: NodeProto) -> bool:
    name = node.input[0]
    if view.is_constant(name):
        return True
    above = view.producer(name)
    return above is not None and above.op_type == "QuantizeLinear" and view.is_constant(above.input[0])


def _weight_axis(view: GraphView, node: NodeProto, *, axis: int, rank: int | None) -> Iterator[Finding]:
    if node.op_type != "DequantizeLinear" or rank is None or not node.output:
        return
    for reader in view.consumers(node.output[0]):
        if len(reader.input) < 2 or reader.input[1] != node.output[0]:
            continue
        want = {"Conv": 0, "ConvTranspose": 1, "MatMul": rank - 1}.get(reader.op_type)
        if reader.op_type == "Gemm":
            want = 0 if attributes(reader).get("transB", 0) else 1
        if want is not None and axis % rank != want:
            yield Finding(
                node=node.name,
                level="error",
                message=f"scales of the weight of {reader.name!r} run along axis {axis}; "
                f"the output channels of {reader.op_type} are axis {want}",
            )
