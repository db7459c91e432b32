"""Move amplitude across the seams between layers without changing what the network computes.

A seam is a tensor that only layers with constant weights read. Its channels may be divided by any positive factors when
the readers' weights are multiplied by them; where the tensor's maker is a layer too (through activations that scale
with their input), the division costs nothing: it goes into the maker's weights. Where no maker can take the division,
a Mul does, as in a transformer whose normalised tensor also feeds the shortcut; TensorRT fuses it with the rounding
behind it. Here ``equalize`` chooses the factors so that the weight ranges of maker and reader become equal (Nagel et
al. 2019, arXiv:1906.04721); smoothquant.py chooses them by the outliers of the activations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from onnx import ModelProto, NodeProto

from edgeds.graph.view import GraphView

_PASS = {"Relu", "LeakyRelu", "Identity", "Dropout", "MaxPool", "AveragePool", "GlobalAveragePool", "GlobalMaxPool"}
"""Operators with f(s * x) = s * f(x) for s > 0 that keep channels where they are."""
_ROUNDS = 8
_LIMIT = 1e4
"""Factors stay within 1/limit .. limit, so that a nearly dead channel does not blow up its neighbour."""


@dataclass(frozen=True, kw_only=True)
class Seam:
    """``tensor`` and who reads it as (node, weight input); ``makers`` take a division, none: a Mul has to."""

    tensor: str
    axis: int
    readers: tuple[str, ...]
    makers: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Moved:
    """The changed model, and the tensors whose channels were scaled."""

    model: ModelProto
    seams: tuple[str, ...]
    added: int
    """Mul nodes inserted."""


def equalize(model: ModelProto) -> Moved:
    """Equal weight ranges on both sides of every free seam; the outputs stay as they were, to float rounding."""
    view = GraphView(model)
    seams = [seam for seam in find_seams(view) if seam.makers]
    for _ in range(_ROUNDS):
        largest = 0.0
        for seam in seams:
            made = _range_of(view, seam.makers, reads=False)
            read = _range_of(view, seam.readers, reads=True)
            factors = bounded(np.sqrt(made / np.where(read > 0, read, 1.0)), (made > 0) & (read > 0))
            scale_seam(view, seam, factors)
            largest = max(largest, float(np.abs(np.log(factors)).max(initial=0.0)))
        if largest < 1e-3:
            break
    return Moved(model=view.finish(), seams=tuple(seam.tensor for seam in seams), added=0)


def find_seams(view: GraphView) -> list[Seam]:
    """Every tensor that has readers with constant weights along its channels, in graph order."""
    found = []
    for node in view.nodes:
        for tensor in node.output:
            readers = [reader for reader in view.consumers(tensor) if _reads(view, reader, tensor)]
            if not tensor or not readers or view.used_in_subgraph(tensor):
                continue
            axes = {_read_axis(reader) for reader in readers}
            if len(axes) != 1 or len({len(_range_of(view, (r.name,), reads=True)) for r in readers}) != 1:
                continue
            whole = len(readers) == len(view.consumers(tensor)) and not view.is_output(tensor)
            axis = axes.pop()
            makers = _makers(view, tensor, axis) if whole else ()
            if makers or axis == -1:
                names = tuple(reader.name for reader in readers)
                found.append(Seam(tensor=tensor, axis=axis, readers=names, makers=makers))
    return found


def scale_seam(view: GraphView, seam: Seam, factors: np.ndarray) -> int:
    """Divide the seam's channels by ``factors`` and multiply its readers' weights; how many Mul nodes that added."""
    nodes = {node.name: node for node in view.nodes}
    for name in seam.readers:
        _scale_reader(view, nodes[name], factors)
    for name in seam.makers:
        _scale_maker(view, nodes[name], 1.0 / factors)
    if seam.makers:
        return 0
    dtype = view.dtype(seam.tensor) or np.dtype(np.float32)
    factor = view.add_constant(f"{seam.tensor}_smooth", (1.0 / factors).astype(dtype))
    smoothed = view.fresh_name(f"{seam.tensor}_smoothed")
    view.make_node("Mul", [seam.tensor, factor], [smoothed], name=f"{seam.tensor}_Smooth")
    for name in seam.readers:
        view.replace_input(nodes[name], seam.tensor, smoothed)
    return 1


def bounded(factors: np.ndarray, usable: np.ndarray) -> np.ndarray:
    """Factors within what is safe, one where a channel is not usable."""
    return np.clip(np.where(usable, factors, 1.0), 1.0 / _LIMIT, _LIMIT)


def _attribute(node: NodeProto, name: str, default: int) -> int:
    return next((item.i for item in node.attribute if item.name == name), default)


def _owns(view: GraphView, name: str) -> bool:
    """A float constant that one node reads: changing it changes nothing else."""
    value = view.constant(name) if name and view.is_constant(name) else None
    return value is not None and value.dtype == np.float32 and len(view.consumers(name)) == 1


def _reads(view: GraphView, node: NodeProto, tensor: str) -> bool:
    if node.op_type not in ("Conv", "Gemm", "MatMul") or node.input[0] != tensor or list(node.input).count(tensor) > 1:
        return False
    if node.op_type == "Gemm" and _attribute(node, "transA", 0):
        return False
    return _owns(view, node.input[1]) and (node.op_type != "MatMul" or len(_dims(view, node.input[1])) == 2)


def _dims(view: GraphView, name: str) -> tuple[int, ...]:
    value = view.constant(name)
    return () if value is None else value.shape


def _read_axis(node: NodeProto) -> int:
    return 1 if node.op_type == "Conv" else -1


def _makers(view: GraphView, tensor: str, axis: int) -> tuple[str, ...]:
    """Layers that can take a division of the tensor's channels; empty when there is none."""
    node = view.producer(tensor)
    while node is not None and node.op_type in _PASS:
        source = node.input[0]
        if len(view.consumers(source)) != 1 or view.is_output(source) or view.used_in_subgraph(source):
            return ()
        node = view.producer(source)
    if node is None:
        return ()
    if node.op_type == "LayerNormalization":
        last = _attribute(node, "axis", -1) == -1 and axis == -1
        return (node.name,) if last and all(_owns(view, name) for name in node.input[1:3]) else ()
    if node.op_type in ("Conv", "Gemm"):
        fits = (node.op_type == "Conv") == (axis == 1) or node.op_type == "Gemm"
        bias = len(node.input) < 3 or not node.input[2] or _owns(view, node.input[2])
        return (node.name,) if fits and bias and _owns(view, node.input[1]) else ()
    return ()


def _range_of(view: GraphView, names: Sequence[str], *, reads: bool) -> np.ndarray:
    """Largest weight per channel: of what the nodes read, or of what they make."""
    nodes = {node.name: node for node in view.nodes}
    ranges = []
    for name in names:
        node = nodes[name]
        weight = view.constant(node.input[1])
        if weight is None:
            continue
        if node.op_type == "LayerNormalization":
            ranges.append(np.abs(weight.astype(np.float64)))
            continue
        grouped = _input_major(node, weight) if reads else _output_major(node, weight)
        ranges.append(np.abs(grouped.astype(np.float64)).max(axis=1, initial=0.0))
    return np.max(ranges, axis=0)


def _input_major(node: NodeProto, weight: np.ndarray) -> np.ndarray:
    """Weights as [input channel, everything else]."""
    if node.op_type == "Conv":
        group = _attribute(node, "group", 1)
        split = weight.reshape(group, weight.shape[0] // group, *weight.shape[1:])
        moved = np.moveaxis(split, 2, 1)
        return moved.reshape(group * weight.shape[1], -1)
    if node.op_type == "Gemm" and _attribute(node, "transB", 0):
        return weight.T
    return weight


def _output_major(node: NodeProto, weight: np.ndarray) -> np.ndarray:
    if node.op_type == "Conv":
        return weight.reshape(weight.shape[0], -1)
    return weight if node.op_type == "Gemm" and _attribute(node, "transB", 0) else weight.T


def reader_weights(view: GraphView, seam: Seam) -> np.ndarray:
    """What the seam's channels are multiplied with, [channels, products of all readers]."""
    nodes = {node.name: node for node in view.nodes}
    found = []
    for name in seam.readers:
        weight = view.constant(nodes[name].input[1])
        if weight is not None:
            found.append(_input_major(nodes[name], weight))
    return np.concatenate(found, axis=1)


def _scale_reader(view: GraphView, node: NodeProto, factors: np.ndarray) -> None:
    weight = view.constant(node.input[1])
    if weight is None:
        return
    if node.op_type == "Conv":
        group = _attribute(node, "group", 1)
        per_group = factors.reshape(group, 1, weight.shape[1], *([1] * (weight.ndim - 2)))
        split = weight.reshape(group, weight.shape[0] // group, *weight.shape[1:])
        scaled = (split * per_group).reshape(weight.shape)
    elif node.op_type == "Gemm" and _attribute(node, "transB", 0):
        scaled = weight * factors
    else:
        scaled = weight * factors[:, None]
    view.set_constant(node.input[1], scaled.astype(weight.dtype))


def _scale_maker(view: GraphView, node: NodeProto, factors: np.ndarray) -> None:
    weight = view.constant(node.input[1])
    if weight is None:
        return
    if node.op_type == "Conv":
        scaled = weight * factors.reshape(-1, *([1] * (weight.ndim - 1)))
    elif node.op_type == "Gemm" and _attribute(node, "transB", 0):
        scaled = weight * factors[:, None]
    else:
        scaled = weight * factors
    view.set_constant(node.input[1], scaled.astype(weight.dtype))
    if len(node.input) > 2 and node.input[2]:
        bias = view.constant(node.input[2])
        if bias is not None:
            view.set_constant(node.input[2], (bias * factors).astype(bias.dtype))
