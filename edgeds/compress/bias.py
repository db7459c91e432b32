"""Bias correction: quantization shifts the mean output of each channel; the bias takes the shift back.

For one layer the shift is known in closed form from channel means alone: with inputs x, quantized inputs x', weights W
and quantized weights W', the expected change of the output is ``sum_k (W' E[x'_k] - W E[x_k])`` (Nagel et al. 2019,
"Data-Free Quantization Through Weight Equalization and Bias Correction", section 4.2, with measured means).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from onnx import ModelProto, NodeProto

from edgeds.compress.calibset import Feeds
from edgeds.compress.placement import NodePlan, QdqPlan
from edgeds.compress.ranges import TensorRange, run_feeds
from edgeds.compress.weights import quantize_weight
from edgeds.graph.proto import attributes
from edgeds.graph.session import open_session
from edgeds.graph.view import GraphView


def correct_biases(
    model: ModelProto,
    plan: QdqPlan,
    ranges: Mapping[str, TensorRange],
    feeds: Sequence[Feeds],
    *,
    threads: int | None = None,
) -> ModelProto:
    """Return the float model with the bias of every quantized convolution moved against its expected shift.

    ``model`` is the float model that ``plan`` belongs to; the corrected biases are meant for its quantized form only.
    Convolutions without a constant bias, and biases shared with other nodes, are left alone.
    """
    view = GraphView(model)
    nodes = {node.name: node for node in view.nodes}
    chosen = [item for item in plan.nodes if _is_correctable(view, nodes[item.node], item)]
    tensors = list(dict.fromkeys(item.activations[0] for item in chosen))
    if not tensors or not feeds:
        return model
    means = _channel_means(model, tensors, ranges, feeds, threads=threads)
    for item in chosen:
        node = nodes[item.node]
        weight, bias = view.constant(node.input[1]), view.constant(node.input[2])
        assert weight is not None
        assert bias is not None
        before, after = means[item.activations[0]]
        group = attributes(node).get("group", 1)
        quantized = quantize_weight(weight, 0).dequantized()
        shift = _expected(quantized, after, group) - _expected(weight, before, group)
        if np.isfinite(shift).all():
            view.set_constant(node.input[2], (bias - shift).astype(bias.dtype))
    return view.finish()


def _is_correctable(view: GraphView, node: NodeProto, item: NodePlan) -> bool:
    if node.op_type != "Conv" or 0 not in item.activations or len(node.input) < 3 or not node.input[2]:
        return False
    own = len(view.consumers(node.input[2])) == 1 and not view.used_in_subgraph(node.input[2])
    return own and view.producer(node.input[2]) is None and view.is_constant(node.input[2])


def _channel_means(
    model: ModelProto,
    tensors: list[str],
    ranges: Mapping[str, TensorRange],
    feeds: Sequence[Feeds],
    *,
    threads: int | None,
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Per tensor: mean over everything but axis 1, as it is and after quantization (float64)."""
    session = open_session(model, outputs=[name for name in tensors if name not in _outputs(model)], threads=threads)
    needed = {value.name for value in session.get_inputs()}
    sums: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    for sample in feeds:
        fed = {name: array for name, array in sample.items() if name in needed}
        for name, value in zip(tensors, run_feeds(session, tensors, fed), strict=True):
            scale = np.float32(ranges[name].scale)
            rounded = np.clip(np.rint(value / scale), -128, 127) * scale
            axes = (0, *range(2, value.ndim))
            pair = value.mean(axis=axes, dtype=np.float64), rounded.mean(axis=axes, dtype=np.float64)
            known = sums.get(name)
            sums[name] = pair if known is None else (known[0] + pair[0], known[1] + pair[1])
    return {name: (before / len(feeds), after / len(feeds)) for name, (before, after) in sums.items()}


def _outputs(model: ModelProto) -> set[str]:
    return {value.name for value in model.graph.output}


def _expected(weight: np.ndarray, means: np.ndarray, group: int) -> np.ndarray:
    """Mean output per channel of a convolution without bias whose input channels have these means (borders ignored)."""
    summed = weight.reshape(*weight.shape[:2], -1).sum(axis=2, dtype=np.float64)
    outputs, inputs = summed.shape
    grouped = summed.reshape(group, outputs // group, inputs)
    return np.einsum("goi,gi->go", grouped, means.reshape(group, inputs)).reshape(outputs)
