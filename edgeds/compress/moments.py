"""Second moments of what layers read, in constant memory: X^T X, X^T Y, sums and counts over calibration samples.

A layer is seen as y = W x + b with x one patch (convolution, positions drawn by a seeded generator) or one row (Gemm,
MatMul). X carries a last column of ones, so that the bias is one more weight and the moments hold the means. Targets Y
may come from another model, which is how a pruned layer is fitted to the dense one (He et al. 2017, "Channel Pruning
for Accelerating Very Deep Neural Networks", equation 4).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto

from edgeds.compress.calibset import Feeds
from edgeds.compress.ranges import run_feeds
from edgeds.graph.proto import attributes, node_inputs
from edgeds.graph.session import open_session
from edgeds.graph.sort import live_nodes
from edgeds.graph.view import GraphView
from edgeds.progress import track

POSITIONS = 256
"""Patches taken from one sample: neighbours are so alike that more of them say little."""


@dataclass(frozen=True, kw_only=True)
class Moments:
    """Per group g: ``gram`` (G, K+1, K+1), ``cross`` (G, K+1, O/G), ``square`` the sum of Y squared; float64.

    ``rows`` is how many patches were summed. Not normalised.
    """

    gram: NDArray[np.float64]
    cross: NDArray[np.float64]
    square: float
    rows: int

    def __add__(self, other: Moments) -> Moments:
        return Moments(
            gram=self.gram + other.gram,
            cross=self.cross + other.cross,
            square=self.square + other.square,
            rows=self.rows + other.rows,
        )

    def error(self, weights: NDArray[np.float64]) -> float:
        """Sum of squared differences between X W^T and Y for ``weights`` (G, O/G, K+1)."""
        fitted = np.einsum("gok,gkl,gol->", weights, self.gram, weights, optimize=True)
        return max(float(fitted - 2 * np.einsum("gok,gko->", weights, self.cross) + self.square), 0.0)


@dataclass(frozen=True, kw_only=True)
class LinearLayer:
    """A Conv, Gemm or MatMul with weights of its own. ``bias`` is the tensor's name, None without one."""

    node: str
    op: str
    x: str
    y: str
    weight: str
    bias: str | None
    groups: int
    attrs: dict[str, Any]

    def matrix(self, weight: NDArray[Any]) -> NDArray[np.float64]:
        """The weight as (groups, outputs per group, K)."""
        if self.op != "Conv":
            weight = weight if self.attrs.get("transB", 0) else weight.T
        return weight.astype(np.float64).reshape(self.groups, weight.shape[0] // self.groups, -1)

    def unmatrix(self, matrix: NDArray[Any], like: NDArray[Any]) -> NDArray[Any]:
        """Back from ``matrix`` to the shape and dtype of ``like``."""
        flat = matrix.reshape(-1, matrix.shape[-1])
        if self.op == "Conv":
            return flat.reshape(like.shape).astype(like.dtype)
        return (flat if self.attrs.get("transB", 0) else flat.T).astype(like.dtype)


def find_layer(view: GraphView, node: NodeProto) -> LinearLayer | str:
    """The layer that a node is, or why its weights cannot be solved for."""
    attrs = attributes(node)
    weight = view.constant(node.input[1]) if len(node.input) > 1 else None
    if weight is None or view.producer(node.input[1]) is not None:
        return "its weights are not a constant of the file"
    if weight.dtype not in (np.float32, np.float64, np.float16):
        return f"its weights are {weight.dtype}"
    bias = node.input[2] if len(node.input) > 2 and node.input[2] else None
    for name in (node.input[1], *([bias] if bias else [])):
        if len(view.consumers(name)) != 1 or view.used_in_subgraph(name) or list(node.input).count(name) > 1:
            return f"another layer shares its {name!r}"
    if bias is not None and (not view.is_constant(bias) or view.producer(bias) is not None):
        return "its bias is not a constant of the file"
    if node.op_type == "Conv":
        if attrs.get("auto_pad", b"NOTSET") not in (b"NOTSET", "NOTSET", b"VALID", "VALID"):
            return "its padding is given by auto_pad"
    elif weight.ndim != 2:
        return f"its weights have {weight.ndim} axes"
    elif attrs.get("transA", 0) or attrs.get("alpha", 1.0) != 1.0 or attrs.get("beta", 1.0) != 1.0:
        return "its Gemm has transA, alpha or beta"
    return LinearLayer(
        node=node.name,
        op=node.op_type,
        x=node.input[0],
        y=node.output[0],
        weight=node.input[1],
        bias=bias,
        groups=int(attrs.get("group", 1)) if node.op_type == "Conv" else 1,
        attrs={**attrs, "kernel": weight.shape[2:]},
    )


def truncated(model: ModelProto, outputs: Iterable[str]) -> ModelProto:
    """The part of a model that computes these tensors, which become its only outputs."""
    names = list(dict.fromkeys(outputs))
    part = ModelProto(ir_version=model.ir_version, opset_import=model.opset_import, functions=model.functions)
    part.graph.name = model.graph.name
    part.graph.node.extend(live_nodes(list(model.graph.node), outputs=names))
    needed = {name for node in part.graph.node for name in node_inputs(node)} | set(names)
    spare = {tensor.name for tensor in model.graph.initializer} - needed
    part.graph.input.extend(item for item in model.graph.input if item.name not in spare)
    part.graph.initializer.extend(tensor for tensor in model.graph.initializer if tensor.name in needed)
    part.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
    return part


def patches(layer: LinearLayer, x: NDArray[Any], *, positions: NDArray[np.int64], spatial: tuple[int, ...]) -> Any:
    """Rows (len(positions), groups, K + 1) that the layer multiplies at flat ``positions`` of its output."""
    if layer.op != "Conv":
        rows = x.reshape(-1, x.shape[-1])[positions][:, None]
    else:
        rank = len(layer.attrs["kernel"])
        strides = layer.attrs.get("strides") or [1] * rank
        dilations = layer.attrs.get("dilations") or [1] * rank
        pads = layer.attrs.get("pads") or [0] * (2 * rank)
        x = np.pad(x, [(0, 0), (0, 0), *((pads[i], pads[i + rank]) for i in range(rank))])
        sample, *at = np.unravel_index(positions, (x.shape[0], *spatial))
        columns = [
            _gather(x, sample, [at[i] * strides[i] + tap[i] * dilations[i] for i in range(rank)])
            for tap in np.ndindex(*layer.attrs["kernel"])
        ]
        rows = np.stack(columns, axis=-1).reshape(len(positions), layer.groups, -1)
    ones = np.ones((*rows.shape[:2], 1), rows.dtype)
    return np.concatenate([rows, ones], axis=2)


def _gather(x: NDArray[Any], sample: Any, at: list[Any]) -> NDArray[Any]:
    index = (sample, slice(None), *at)
    picked: NDArray[Any] = x[index]
    return picked


def measure(
    layer: LinearLayer, x: NDArray[Any], y: NDArray[Any], *, rng: np.random.Generator, count: int = POSITIONS
) -> Moments:
    """Moments of one sample: ``x`` what the layer reads, ``y`` what it should give (its output shape)."""
    spatial = y.shape[2:] if layer.op == "Conv" else ()
    rows_y = np.moveaxis(y, 1, -1).reshape(-1, y.shape[1]) if layer.op == "Conv" else y.reshape(-1, y.shape[-1])
    total = rows_y.shape[0]
    chosen = rng.choice(total, count, replace=False) if total > count else np.arange(total)
    a = patches(layer, x, positions=chosen, spatial=spatial).astype(np.float32).transpose(1, 0, 2)
    t = rows_y[chosen].astype(np.float32).reshape(len(chosen), layer.groups, -1).transpose(1, 0, 2)
    a_t = a.transpose(0, 2, 1)
    return Moments(
        gram=(a_t @ a).astype(np.float64),
        cross=(a_t @ t).astype(np.float64),
        square=float(np.square(t, dtype=np.float64).sum()),
        rows=len(chosen),
    )


def collect_moments(
    model: ModelProto,
    layer: LinearLayer,
    feeds: Iterable[Feeds],
    *,
    targets: tuple[ModelProto, NDArray[np.int64] | None] | None = None,
    seed: int = 0,
    threads: int | None = None,
    quiet: bool = False,
) -> tuple[Moments | None, Moments | None]:
    """Moments of one layer over the samples to fit on, and over every fourth sample, which is held out.

    ``targets`` is the model whose tensor of the same name says what the layer should give, and which of its channels
    (None: all); by default the layer's own output. Raises CalibrationError for samples that do not run.
    """
    source, channels = targets if targets is not None else (model, None)
    readers = [(open_session(truncated(m, [t]), threads=threads), t) for m, t in ((model, layer.x), (source, layer.y))]
    rng = np.random.default_rng(seed)
    sums: list[Moments | None] = [None, None]
    for index, sample in enumerate(track(feeds, what=f"moments of {layer.node}", quiet=quiet)):
        x, y = (_run(session, name, sample) for session, name in readers)
        if channels is not None:
            y = np.take(y, channels, axis=1 if layer.op == "Conv" else -1)
        if not (np.isfinite(x).all() and np.isfinite(y).all()):
            continue
        part = index % 4 == 3
        found = measure(layer, x, y, rng=rng)
        known = sums[part]
        sums[part] = found if known is None else known + found
    return sums[0], sums[1]


def _run(session: Any, name: str, sample: Feeds) -> NDArray[Any]:
    needed = {item.name for item in session.get_inputs()}
    if name in sample:
        return np.asarray(sample[name])
    value: NDArray[Any] = run_feeds(session, [name], {key: array for key, array in sample.items() if key in needed})[0]
    return value
