"""Bias correction: quantization shifts the mean output of each channel; the bias takes the shift back.

For one layer the shift is known in closed form from channel means alone: with inputs x, quantized inputs x', weights W
and quantized weights W', the expected change of the output is ``sum_k (W' E[x'_k] - W E[x_k])`` (Nagel et al. 2019,
"Data-Free Quantization Through Weight Equalization and Bias Correction", section 4.2, with measured means).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from onnx import ModelProto, NodeProto

from edgeds.compress.calibset import Feeds
from edgeds.compress.placement import NodePlan, QdqPlan
from edgeds.compress.ranges import TensorRange, run_feeds
from edgeds.compress.weights import quantize_weight
from edgeds.graph.proto import attributes
from edgeds.graph.session import open_session
from edgeds.graph.view import GraphView

Means = dict[tuple[str, int, float], tuple[np.ndarray, np.ndarray]]
"""Channel means (exact, rounded) by tensor, channel axis and scale: for many corrections on the same feeds."""


def correct_biases(
    model: ModelProto,
    plan: QdqPlan,
    ranges: Mapping[str, TensorRange],
    feeds: Sequence[Feeds],
    *,
    threads: int | None = None,
    known: Means | None = None,
) -> ModelProto:
    """Return the float model with the bias of every quantized layer moved against its expected shift.

    ``model`` is the float model that ``plan`` belongs to; the corrected biases are meant for its quantized form only.
    Layers without a constant bias of their own, and biases shared with other nodes, are left alone. ``known`` is filled
    with the means that were measured, and saves measuring those it holds.
    """
    view = GraphView(model)
    nodes = {node.name: node for node in view.nodes}
    chosen = [layer for item in plan.nodes if (layer := _correctable(view, nodes[item.node], item)) is not None]
    keys = list(dict.fromkeys((layer.tensor, layer.axis, ranges[layer.tensor].scale) for layer in chosen))
    if not keys or not feeds:
        return model
    known = {} if known is None else known
    known |= _channel_means(model, [key for key in keys if key not in known], feeds, threads=threads)
    for layer in chosen:
        weight, bias = view.constant(layer.weight), view.constant(layer.bias)
        assert weight is not None
        assert bias is not None
        before, after = known[layer.tensor, layer.axis, ranges[layer.tensor].scale]
        quantized = quantize_weight(weight, layer.output_axis).dequantized()
        shift = _expected(quantized, after, layer) - _expected(weight, before, layer)
        if np.isfinite(shift).all():
            view.set_constant(layer.bias, (bias - shift.reshape(bias.shape)).astype(bias.dtype))
    return view.finish()


@dataclass(frozen=True, kw_only=True)
class _Layer:
    """A layer whose bias can take a shift: its input, the channel axis there, and its constants."""

    tensor: str
    axis: int
    weight: str
    output_axis: int
    bias: str
    group: int = 1


def _correctable(view: GraphView, node: NodeProto, item: NodePlan) -> _Layer | None:
    if 0 not in item.activations or not view.is_constant(node.input[1]):
        return None
    options = attributes(node)
    if node.op_type == "Conv" and _is_own_bias(view, node, 2):
        group = options.get("group", 1)
        return _Layer(
            tensor=item.activations[0], axis=1, weight=node.input[1], output_axis=0, bias=node.input[2], group=group
        )
    plain = not options.get("transA", 0) and options.get("beta", 1.0) == options.get("alpha", 1.0) == 1.0
    if node.op_type == "Gemm" and plain and _is_own_bias(view, node, 2):
        output_axis, bias = (0 if options.get("transB", 0) else 1), node.input[2]
    elif node.op_type == "MatMul" and (found := _added_bias(view, node)):
        output_axis, bias = 1, found
    else:
        return None
    weight, added = view.constant(node.input[1]), view.constant(bias)
    if weight is None or added is None or weight.ndim != 2 or added.size != weight.shape[output_axis]:
        return None
    return _Layer(tensor=item.activations[0], axis=-1, weight=node.input[1], output_axis=output_axis, bias=bias)


def _added_bias(view: GraphView, node: NodeProto) -> str:
    """The constant that one Add right behind a MatMul adds along the last axis; empty when there is none of its own."""
    readers = view.consumers(node.output[0])
    if len(readers) != 1 or readers[0].op_type != "Add" or view.is_output(node.output[0]):
        return ""
    index = 1 if readers[0].input[0] == node.output[0] else 0
    value = view.constant(readers[0].input[index])
    if value is None or value.ndim == 0 or value.shape[-1] != value.size:
        return ""
    return readers[0].input[index] if _is_own_bias(view, readers[0], index) else ""


def _is_own_bias(view: GraphView, node: NodeProto, index: int) -> bool:
    if len(node.input) <= index or not node.input[index]:
        return False
    name = node.input[index]
    own = len(view.consumers(name)) == 1 and not view.used_in_subgraph(name)
    return own and view.producer(name) is None and view.is_constant(name)


def _channel_means(
    model: ModelProto, keys: list[tuple[str, int, float]], feeds: Sequence[Feeds], *, threads: int | None
) -> Means:
    """Per tensor, axis and scale: mean over everything but the axis, as it is and after quantization (float64)."""
    if not keys:
        return {}
    tensors = list(dict.fromkeys(name for name, _, _ in keys))
    session = open_session(model, outputs=[name for name in tensors if name not in _outputs(model)], threads=threads)
    needed = {value.name for value in session.get_inputs()}
    sums: Means = {}
    for sample in feeds:
        fed = {name: array for name, array in sample.items() if name in needed}
        values = dict(zip(tensors, run_feeds(session, tensors, fed), strict=True))
        for key in keys:
            value, scale = values[key[0]], np.float32(key[2])
            rounded = np.clip(np.rint(value / scale), -128, 127) * scale
            axes = tuple(axis for axis in range(value.ndim) if axis != key[1] % value.ndim)
            pair = value.mean(axis=axes, dtype=np.float64), rounded.mean(axis=axes, dtype=np.float64)
            sums[key] = pair if key not in sums else (sums[key][0] + pair[0], sums[key][1] + pair[1])
    return {key: (before / len(feeds), after / len(feeds)) for key, (before, after) in sums.items()}


def _outputs(model: ModelProto) -> set[str]:
    return {value.name for value in model.graph.output}


def _expected(weight: np.ndarray, means: np.ndarray, layer: _Layer) -> np.ndarray:
    """Mean output per channel of a layer without bias whose input channels have these means (borders ignored)."""
    if layer.axis == -1:
        by_output = weight if layer.output_axis == 0 else weight.T
        linear: np.ndarray = by_output.astype(np.float64) @ means
        return linear
    summed = weight.reshape(*weight.shape[:2], -1).sum(axis=2, dtype=np.float64)
    outputs, inputs = summed.shape
    grouped = summed.reshape(layer.group, outputs // layer.group, inputs)
    return np.einsum("goi,gi->go", grouped, means.reshape(layer.group, inputs)).reshape(outputs)
