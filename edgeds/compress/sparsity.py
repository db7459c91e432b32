"""2:4 sparse weights: of four neighbouring input channels at most two keep a weight, as sparse tensor cores need.

"magnitude" keeps the two largest of four. "second-order" also moves the weights that stay, so that the output on
calibration samples changes least (Frantar and Alistarh 2023, "SparseGPT", section 3: for each column the error of what
is removed, divided by the diagonal of the inverse Hessian's Cholesky factor, is spread over the columns that follow).
Nothing is rescaled, and biases stay. Sparsify before quantizing: symmetric INT8 keeps zeros at zero.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto

from edgeds.compress.calibset import Feeds
from edgeds.compress.moments import LinearLayer, Moments, collect_moments, find_layer
from edgeds.errors import ModelError, SpecError
from edgeds.graph.sparse24 import check_24, groups_of_four
from edgeds.graph.view import GraphView
from edgeds.progress import track

__all__ = ["METHODS", "SparseLayer", "SparsityReport", "check_24", "second_order_24", "sparsify"]

METHODS = ("magnitude", "second-order")
_DAMPING = 0.01
"""Share of the mean diagonal added to the Hessian, as SparseGPT does."""


@dataclass(frozen=True, kw_only=True)
class SparseLayer:
    """One layer. ``error`` is the squared change of its output relative to its energy on samples (held out when there
    are four or more); without samples, that of its weights. ``reason`` says why it was left dense, None when sparse.
    """

    node: str
    op: str
    error: float | None
    reason: str | None


@dataclass(frozen=True, kw_only=True)
class SparsityReport:
    """The sparse model and what happened to every Conv, Gemm and MatMul with constant weights."""

    model: ModelProto
    method: str
    layers: tuple[SparseLayer, ...]

    @property
    def sparse(self) -> tuple[str, ...]:
        """Names of the layers that are now 2:4."""
        return tuple(layer.node for layer in self.layers if layer.reason is None)


def sparsify(
    model: ModelProto,
    feeds: Iterable[Feeds] = (),
    *,
    method: str = "magnitude",
    max_error: float = 0.01,
    min_weights: int = 1024,
    exclude: Iterable[str] = (),
    threads: int | None = 2,
    seed: int = 0,
    quiet: bool = False,
) -> SparsityReport:
    """Make layers 2:4 along their input channels; leave those dense that would change by more than ``max_error``.

    Layers are taken in graph order, each seeing inputs of the model as it is by then. Raises SpecError for bad options
    (second-order without samples, unknown nodes), ModelError for a quantized model.
    """
    kept, skipped = list(feeds), set(exclude)
    view = GraphView(model)
    _check(view, kept, method=method, max_error=max_error, skipped=skipped)
    nodes = [node for node in view.nodes if node.op_type in ("Conv", "Gemm", "MatMul")]
    layers = []
    for node in track(nodes, what="2:4 sparsity", unit="layer", quiet=quiet):
        if len(node.input) < 2 or view.constant(node.input[1]) is None:
            continue
        layer = find_layer(view, node)
        reason = layer if isinstance(layer, str) else _unsuitable(view, layer, min_weights=min_weights)
        reason = "excluded" if node.name in skipped else reason
        if isinstance(layer, str) or reason is not None:
            layers.append(SparseLayer(node=node.name, op=node.op_type, error=None, reason=reason))
            continue
        fit, held = None, None
        if kept:
            fit, held = collect_moments(view.model, layer, kept, seed=seed, threads=threads, quiet=True)
        layers.append(_sparsify_layer(view, layer, fit, held or fit, method=method, max_error=max_error))
    return SparsityReport(model=view.finish(), method=method, layers=tuple(layers))


def _check(view: GraphView, kept: list[Feeds], *, method: str, max_error: float, skipped: set[str]) -> None:
    if method not in METHODS:
        raise SpecError(f"method {method!r}: choose from {', '.join(METHODS)}")
    if not 0 < max_error <= 1:
        raise SpecError(f"max_error {max_error!r}: expected above 0 and at most 1 (a share of the output's energy)")
    if method == "second-order" and not kept:
        raise SpecError("second-order sparsity needs calibration samples; give some or use magnitude")
    if any(node.op_type == "DequantizeLinear" for node in view.nodes):
        raise ModelError("the model is quantized already; sparsify its float original and quantize that")
    unknown = sorted(skipped - {node.name for node in view.nodes})
    if unknown:
        raise SpecError(f"there is no node {unknown[0]!r} to exclude")


def _unsuitable(view: GraphView, layer: LinearLayer, *, min_weights: int) -> str | None:
    weight = view.constant(layer.weight)
    if weight is None or not np.isfinite(weight).all():
        return "its weights hold NaN or infinity"
    channels = weight.shape[1] if layer.op == "Conv" else layer.matrix(weight).shape[2]
    if channels % 4 or channels == 0:
        return f"its {channels} input channels are not a multiple of 4"
    if weight.size < min_weights:
        return f"its {weight.size} weights are fewer than {min_weights}"
    return None


def _sparsify_layer(
    view: GraphView, layer: LinearLayer, fit: Moments | None, held: Moments | None, *, method: str, max_error: float
) -> SparseLayer:
    weight = view.constant(layer.weight)
    if weight is None:
        raise ModelError(f"node {layer.node!r}: its weight {layer.weight!r} is not a constant")
    if method == "second-order" and fit is None:
        reason = "its inputs hold NaN or infinity on the samples"
        return SparseLayer(node=layer.node, op=layer.op, error=None, reason=reason)
    matrix = layer.matrix(weight)
    taps = matrix.shape[2] // (weight.shape[1] if layer.op == "Conv" else matrix.shape[2])
    order = _channel_order(matrix.shape[2], taps)
    by_four = matrix[..., order]
    new = np.empty_like(by_four)
    for group in range(layer.groups):
        if method == "magnitude" or fit is None:
            new[group] = by_four[group] * keep_24(np.abs(by_four[group]))
        else:
            hessian = fit.gram[group, :-1, :-1][np.ix_(order, order)]
            new[group] = second_order_24(by_four[group], hessian)
    back = np.empty_like(new)
    back[..., order] = new
    error = _error(matrix, back, held)
    if not error <= max_error:
        reason = f"its output would change by {error:.3g} of its energy, above the limit {max_error:g}"
        return SparseLayer(node=layer.node, op=layer.op, error=error, reason=reason)
    view.set_constant(layer.weight, layer.unmatrix(back, weight))
    return SparseLayer(node=layer.node, op=layer.op, error=error, reason=None)


def _channel_order(columns: int, taps: int) -> NDArray[np.int64]:
    """Columns reordered so that four neighbours are the same kernel tap of four neighbouring channels."""
    order: NDArray[np.int64] = np.arange(columns).reshape(-1, 4, taps).transpose(0, 2, 1).reshape(-1)
    return order


def _error(old: NDArray[np.float64], new: NDArray[np.float64], held: Moments | None) -> float:
    """Squared change of the output over its energy about zero, without the bias; of the weights without samples."""
    change = new - old
    if held is None:
        return float(np.square(change).sum() / max(np.square(old).sum(), np.finfo(np.float64).tiny))
    gram = held.gram[:, :-1, :-1]
    moved, energy = (float(np.einsum("gok,gkl,gol->", w, gram, w, optimize=True)) for w in (change, old))
    return max(moved, 0.0) / max(energy, np.finfo(np.float64).tiny)


def keep_24(score: NDArray[np.float64]) -> NDArray[np.bool_]:
    """True for the two highest scores of every four along the last axis (ties: the first ones)."""
    fours = groups_of_four(score, -1)
    rank = np.argsort(np.argsort(-fours, axis=-1, kind="stable"), axis=-1, kind="stable")
    kept: NDArray[np.bool_] = (rank < 2).reshape(score.shape)
    return kept


def second_order_24(weight: NDArray[np.float64], hessian: NDArray[np.float64]) -> NDArray[np.float64]:
    """2:4 form of ``weight`` (outputs, K) that changes ``weight @ x`` least, given ``hessian`` = sum of x x^T (K, K).

    Inputs that were always zero keep their weights' magnitude choice. float64 throughout.
    """
    weight, size = weight.copy(), weight.shape[1]
    damped = hessian + np.eye(size) * max(_DAMPING * float(np.trace(hessian)) / size, np.finfo(np.float64).tiny)
    damped /= float(np.trace(damped)) / size
    upper = np.linalg.cholesky(np.linalg.inv(damped)).T
    for start in range(0, size, 4):
        block = slice(start, start + 4)
        keep = keep_24(np.square(weight[:, block] / np.diagonal(upper)[block]))
        for offset in range(4):
            column = start + offset
            lost = np.where(keep[:, offset], 0.0, weight[:, column])
            weight[:, column:] -= np.outer(lost / upper[column, column], upper[column, column:])
            weight[~keep[:, offset], column] = 0.0
    return weight
