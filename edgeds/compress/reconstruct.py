"""Re-solve the weights of layers whose inputs were pruned, so that they give what the dense model gave. No training.

Layer by layer, inputs first: minimise ||X W'^T - Y||^2 + ridge * ||W' - W||^2 with X from the pruned model as re-solved
so far and Y from the dense model (He et al. 2017, equation 4; the pull is towards the old weights instead of zero, so
that a direction which calibration never showed keeps its weight). The ridge, relative to the mean of the Gram diagonal,
is the best of a few on held-out samples; a layer that is not better there than before keeps its weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import islice

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto

from edgeds.compress.batchnorm import restat_batchnorm
from edgeds.compress.calibset import Feeds
from edgeds.compress.moments import LinearLayer, Moments, collect_moments, find_layer
from edgeds.errors import CalibrationError, SpecError
from edgeds.graph.proto import attributes
from edgeds.graph.view import GraphView
from edgeds.progress import track

RIDGES = (1e-4, 1e-3, 1e-2, 1e-1)
_SMALLEST_GAIN = 1e-4


@dataclass(frozen=True, kw_only=True)
class LayerFit:
    """One layer: squared error relative to the target's energy on held-out samples, before and after.

    ``ridge`` is None when the old weights stay, and ``reason`` then says why.
    """

    node: str
    before: float | None
    after: float | None
    ridge: float | None
    reason: str | None = None


@dataclass(frozen=True, kw_only=True)
class ReconstructReport:
    """``model`` with the new weights, and what happened to each layer that was to be fitted."""

    model: ModelProto
    layers: tuple[LayerFit, ...]
    samples: int
    batchnorms: tuple[str, ...] = ()
    """BatchNormalization nodes whose statistics were estimated anew."""


def reconstruct(
    dense: ModelProto,
    pruned: ModelProto,
    mapping: Mapping[str, NDArray[np.int64]],
    feeds: Iterable[Feeds],
    *,
    samples: int = 48,
    every_layer: bool = True,
    threads: int | None = 2,
    seed: int = 0,
    quiet: bool = False,
) -> ReconstructReport:
    """Fit the Conv, Gemm and MatMul layers of ``pruned`` to what they gave in ``dense``.

    ``mapping`` gives the kept output channels of layers that also lost outputs, by the name of the output tensor or of
    the weight. ``every_layer=False`` fits only those that read fewer channels than before: faster, and less comes
    back, since later layers can also make up for what earlier ones approximate. Every fourth
    sample is held out. Raises SpecError for a bad count, CalibrationError for fewer than two samples.
    """
    if isinstance(samples, bool) or samples < 2:
        raise SpecError(f"samples: expected at least 2 (one is held out), got {samples!r}")
    kept = list(islice(feeds, samples))
    if len(kept) < 2:
        raise CalibrationError(f"reconstruction needs at least two samples, got {len(kept)}: one of them is held out")
    count = len(kept)
    if count < 4:
        kept = [*kept[:1] * (4 - count), *kept]  # the last, which differs from the others, is the one held out
    before, view = GraphView(dense, copy=False), GraphView(pruned)
    old = {node.output[0]: node for node in before.nodes if node.output}
    chosen = []
    for node in view.nodes:
        twin = old.get(node.output[0]) if node.output else None
        if node.op_type in ("Conv", "Gemm", "MatMul") and twin is not None and len(twin.input) > 1:
            a, b = before.constant(twin.input[1]), view.constant(node.input[1])
            if a is not None and b is not None and (every_layer or _lost_inputs(a, b, node)):
                chosen.append(node.name)
    fits = []
    names = {node.name: node for node in view.nodes}
    for name in track(chosen, what="reconstructing", unit="layer", quiet=quiet):
        layer = find_layer(view, names[name])
        if isinstance(layer, str):
            fits.append(LayerFit(node=name, before=None, after=None, ridge=None, reason=layer))
            continue
        channels = _channels(layer, before, view, mapping)
        if isinstance(channels, str):
            fits.append(LayerFit(node=name, before=None, after=None, ridge=None, reason=channels))
            continue
        fit, held = collect_moments(
            view.model, layer, kept, targets=(dense, channels), seed=seed, threads=threads, quiet=True
        )
        fits.append(_refit(view, layer, fit, held))
    norms = restat_batchnorm(before, view, mapping, kept, threads=threads)
    return ReconstructReport(model=view.finish(), layers=tuple(fits), samples=count, batchnorms=norms)


def _lost_inputs(a: NDArray[np.float32], b: NDArray[np.float32], node: NodeProto) -> bool:
    if node.op_type == "Conv":
        return a.shape[1:] != b.shape[1:]
    axis = 1 if attributes(node).get("transB", 0) else -2 if a.ndim > 1 else 0
    return a.ndim != b.ndim or a.shape[axis] != b.shape[axis]


def _channels(
    layer: LinearLayer, dense: GraphView, pruned: GraphView, mapping: Mapping[str, NDArray[np.int64]]
) -> NDArray[np.int64] | str | None:
    twin = dense.producer(layer.y)
    a = dense.constant(twin.input[1]) if twin is not None else None
    b = pruned.constant(layer.weight)
    if a is None or b is None:
        return "its weights are not a constant of both models"
    axis = 0 if layer.op == "Conv" or layer.attrs.get("transB", 0) else 1
    if a.shape[axis] == b.shape[axis]:
        return None
    for name in (layer.y, layer.weight):
        if name in mapping and len(mapping[name]) == b.shape[axis]:
            return np.asarray(mapping[name], np.int64)
    return "the mapping does not say which of its outputs were kept"


def _refit(view: GraphView, layer: LinearLayer, fit: Moments | None, held: Moments | None) -> LayerFit:
    if fit is None or held is None:
        return LayerFit(node=layer.node, before=None, after=None, ridge=None, reason="NaN or infinity on the samples")
    weight = view.constant(layer.weight)
    bias = view.constant(layer.bias) if layer.bias is not None else None
    if weight is None:
        raise SpecError(f"node {layer.node!r}: its weight {layer.weight!r} is not a constant")
    matrix = layer.matrix(weight)
    last = np.zeros(matrix.shape[:2]) if bias is None else bias.astype(np.float64).reshape(matrix.shape[:2])
    old = np.concatenate([matrix, last[..., None]], axis=2)
    energy = max(held.square, np.finfo(np.float64).tiny)
    before = held.error(old) / energy
    tried = [(held.error(new) / energy, ridge, new) for ridge in RIDGES for new in [solve(fit, old, ridge, bias)]]
    after, ridge, new = min(tried, key=lambda item: item[0])
    if not after < before * (1 - _SMALLEST_GAIN) or not np.isfinite(new).all():
        reason = "no better on held-out samples"
        return LayerFit(node=layer.node, before=before, after=before, ridge=None, reason=reason)
    view.set_constant(layer.weight, layer.unmatrix(new[..., :-1], weight))
    if layer.bias is not None and bias is not None:
        view.set_constant(layer.bias, new[..., -1].reshape(bias.shape).astype(bias.dtype))
    return LayerFit(node=layer.node, before=before, after=after, ridge=ridge)


def solve(
    fit: Moments, old: NDArray[np.float64], ridge: float, bias: NDArray[np.float32] | None
) -> NDArray[np.float64]:
    """Weights (G, O/G, K+1) of least squared error with a pull of ``ridge`` towards ``old``; no bias: it stays zero."""
    size = old.shape[2] if bias is not None else old.shape[2] - 1
    gram = fit.gram[:, :size, :size]
    scale = np.maximum(np.trace(gram, axis1=1, axis2=2) / size, np.finfo(np.float64).tiny)
    pull = (ridge * scale)[:, None, None]
    eye = np.eye(size)
    start = old[..., :size]
    right = fit.cross[:, :size] + pull * start.transpose(0, 2, 1)
    new = old.copy()
    new[..., :size] = np.linalg.solve(gram + pull * eye, right).transpose(0, 2, 1)
    return new
