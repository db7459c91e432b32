"""Fold constant sub-expressions, and BatchNormalization into the layer before it.

Constants are evaluated by onnxruntime itself, one node at a time, so a folded value is the value the runtime would
have computed. Q/DQ nodes are never folded: they are the quantization.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, helper, numpy_helper

from edgeds.errors import ModelError
from edgeds.graph.nodes import constant_value
from edgeds.graph.proto import attributes, dims_of, is_standard, subgraphs
from edgeds.graph.session import open_session, runtime_errors
from edgeds.graph.shapes import infer_types
from edgeds.graph.view import GraphView

MAX_GROWTH_BYTES = 64 << 20
"""A fold pass may add at most this many bytes of constants beyond those it consumes."""

_NEVER = frozenset(
    {"RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Bernoulli", "Multinomial", "Dropout"}
    | {"QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear"}
)
_MAY_GROW = frozenset(
    {"Expand", "Tile", "ConstantOfShape", "Range", "Pad", "Resize", "Upsample", "OneHot", "EyeLike", "Gather"}
    | {"GatherND", "MatMul", "Gemm", "Einsum", "Conv", "ConvTranspose", "Concat", "Where", "Unique", "Compress"}
)


def fold_constants(model: ModelProto) -> ModelProto:
    """Replace nodes whose inputs are all constant by initializers of the same tensor names; returns a new model.

    Constant nodes become initializers. Left alone: random and Q/DQ nodes, other domains, nodes with subgraphs, nodes
    that make a graph output, what onnxruntime cannot evaluate, and results that would grow the model by more than
    64 MiB. Names of surviving nodes and tensors do not change.
    """
    view = GraphView(model)
    budget = MAX_GROWTH_BYTES
    folded: dict[str, NDArray[Any]] = {}
    opsets = [entry for entry in model.opset_import if entry.domain in ("", "ai.onnx")]
    if not opsets:
        return view.finish()
    for node in view.nodes:
        outputs = [name for name in node.output if name]
        if not _is_foldable(node) or any(view.is_output(name) for name in outputs):
            continue
        if node.op_type == "Constant":
            value = constant_value(node)
            values = [value] if value is not None else None
            growth: int | None = 0
        else:
            inputs = _constant_inputs(view, node, folded)
            if inputs is None:
                continue
            sizes = _output_sizes(node, inputs, opset=opsets[0].version, budget=budget)
            growth = None if sizes is None else max(0, sizes - sum(array.nbytes for array in inputs.values()))
            values = None if growth is None or growth > budget else _evaluate(node, inputs, opset=opsets[0].version)
        if values is None or growth is None:
            continue
        budget -= growth
        view.remove_node(node)
        for name, value in zip(outputs, values, strict=True):
            folded[name] = value
            view.store_constant(name, value)
    return view.finish()


def _is_foldable(node: NodeProto) -> bool:
    return is_standard(node) and node.op_type not in _NEVER and not subgraphs(node) and bool(node.output)


def _constant_inputs(
    view: GraphView, node: NodeProto, folded: dict[str, NDArray[Any]]
) -> dict[str, NDArray[Any]] | None:
    names = [name for name in node.input if name]
    if not names or not all(view.is_constant(name) for name in names):
        return None
    inputs: dict[str, NDArray[Any]] = {}
    for name in names:
        value = folded.get(name)
        value = view.constant(name) if value is None else value
        if value is None or value.dtype.kind == "O":
            return None
        inputs[name] = value
    return inputs


def _single(node: NodeProto, inputs: dict[str, NDArray[Any]], *, opset: int) -> ModelProto:
    """The node as a model of its own: small inputs as constants (so that shapes can be computed), large as inputs."""
    stored = [numpy_helper.from_array(value, name) for name, value in inputs.items() if value.nbytes <= 1024]
    fed = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(value.dtype), value.shape)
        for name, value in inputs.items()
        if value.nbytes > 1024
    ]
    outputs = [onnx.ValueInfoProto(name=name) for name in node.output if name]
    graph = helper.make_graph([node], "constant", fed, outputs, stored)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8 if opset < 21 else 10)


def _output_sizes(node: NodeProto, inputs: dict[str, NDArray[Any]], *, opset: int, budget: int) -> int | None:
    """Bytes of all outputs before computing them; None when they cannot be told and the op may grow."""
    types = infer_types(_single(node, inputs, opset=opset))
    total = 0
    for name in (name for name in node.output if name):
        dims = dims_of(types[name]) if name in types else None
        if dims is None or not all(isinstance(dim, int) for dim in dims):
            return None if node.op_type in _MAY_GROW else min(budget, sum(array.nbytes for array in inputs.values()))
        total += 8 * int(np.prod([int(dim) for dim in dims if isinstance(dim, int)], dtype=object))
    return total


def _evaluate(node: NodeProto, inputs: dict[str, NDArray[Any]], *, opset: int) -> list[NDArray[Any]] | None:
    model = _single(node, inputs, opset=opset)
    errors: tuple[type[Exception], ...] = (ModelError, *runtime_errors())
    try:
        session = open_session(model, threads=1)
        fed = {item.name: inputs[item.name] for item in session.get_inputs()}
        results = session.run(None, fed)
    except errors:
        # No CPU kernel for these types, or an expression that is wrong in itself: the node stays, and loading the
        # whole model will say so if it matters.
        return None
    return [np.asarray(value) for value in results] if all(isinstance(v, np.ndarray) for v in results) else None


def fold_batchnorm(model: ModelProto) -> ModelProto:
    """Fold inference BatchNormalization into the Conv, ConvTranspose or Gemm before it; returns a new model.

    w' = w * g / sqrt(var + eps), b' = (b - mean) * g / sqrt(var + eps) + beta (Ioffe & Szegedy 2015, section 3.1), in
    float64. Only where the layer's output has no other reader, all parameters are constant and the result is finite.
    The layer keeps its name and then produces the BatchNormalization's output tensor.
    """
    view = GraphView(model)
    for node in view.nodes:
        if node.op_type == "BatchNormalization" and is_standard(node):
            _fold_one(view, node)
    return view.finish()


def _fold_one(view: GraphView, norm: NodeProto) -> None:
    attrs = attributes(norm)
    layer = view.producer(norm.input[0])
    if layer is None or not is_standard(layer) or layer.op_type not in ("Conv", "ConvTranspose", "Gemm"):
        return
    middle = layer.output[0]
    alone = view.consumers(middle) == [norm] and not view.used_in_subgraph(middle) and not view.is_output(middle)
    if not alone or attrs.get("training_mode") or attrs.get("spatial", 1) != 1 or any(norm.output[1:]):
        return
    parameters = [view.constant(name) for name in norm.input[1:5]]
    weight = view.constant(layer.input[1])
    bias_name = layer.input[2] if len(layer.input) > 2 else ""
    bias = view.constant(bias_name) if bias_name else np.zeros((), np.float32)
    if weight is None or bias is None or weight.dtype.kind != "f":
        return
    gamma, beta, mean, variance = (np.asarray(p, np.float64) if p is not None else None for p in parameters)
    if gamma is None or beta is None or mean is None or variance is None:
        return
    with np.errstate(all="ignore"):
        scale = gamma / np.sqrt(variance + attrs.get("epsilon", 1e-5))
        layer_attrs = attributes(layer)
        shaped = _scale_for_weight(layer, layer_attrs, weight.shape, scale)
        if shaped is None or bias.size not in (1, scale.size):
            return
        bias64 = bias.astype(np.float64).reshape(-1) * (
            layer_attrs.get("beta", 1.0) if layer.op_type == "Gemm" else 1.0
        )
        new_weight = (weight.astype(np.float64) * shaped).astype(weight.dtype)
        new_bias = ((bias64 - mean) * scale + beta).astype(weight.dtype)
    if not (np.isfinite(new_weight).all() and np.isfinite(new_bias).all()):
        return
    for attribute in layer.attribute:
        if layer.op_type == "Gemm" and attribute.name == "beta":
            attribute.f = 1.0
    view.set_input(layer, 1, view.add_constant(f"{layer.input[1]}_bn", new_weight))
    view.set_input(layer, 2, view.add_constant(f"{bias_name or layer.name + '.bias'}_bn", new_bias))
    view.remove_node(norm)
    view.set_output(layer, middle, norm.output[0])


def _scale_for_weight(
    layer: NodeProto, attrs: dict[str, Any], shape: tuple[int, ...], scale: NDArray[np.float64]
) -> NDArray[np.float64] | None:
    """The per-channel scale, shaped to multiply the weight; None when the channel count does not fit."""
    if layer.op_type == "Conv":
        return scale.reshape(-1, *[1] * (len(shape) - 1)) if shape[0] == scale.size else None
    if layer.op_type == "Gemm":
        columns = shape[0] if attrs.get("transB", 0) else shape[1]
        if columns != scale.size:
            return None
        return scale[:, None] if attrs.get("transB", 0) else scale[None, :]
    group = int(attrs.get("group", 1))  # ConvTranspose: [C_in, M / group, ...], input channels grouped in blocks
    if shape[1] * group != scale.size or shape[0] % group:
        return None
    rows = np.repeat(scale.reshape(group, shape[1]), shape[0] // group, axis=0)
    return rows.reshape(shape[0], shape[1], *[1] * (len(shape) - 2))
