"""Smooth outliers before they are rounded: large channels of an activation shrink, the weights behind them grow.

SmoothQuant (Xiao et al. 2022, arXiv:2211.10438) divides channel j by ``max|x_j|^a / max|w_j|^(1-a)``. One strength
``a`` does not fit all: in MiniLM 0.5 behind every GELU turns 16.1 dB at the output into 10.6, and 0.9 gains 10 dB in
those layers. So every seam chooses its own, by the error that rounding makes in the products it feeds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto

from edgeds.compress.calibset import Feeds
from edgeds.compress.ranges import run_feeds
from edgeds.compress.seams import Moved, Seam, bounded, find_seams, reader_weights, scale_seam
from edgeds.compress.weights import QMAX, quantize_weight
from edgeds.graph.session import open_session
from edgeds.graph.view import GraphView
from edgeds.progress import track

STRENGTHS = (0.5, 0.65, 0.8, 0.9, 1.0)
_CLIPS = (1.0, 0.75, 0.55, 0.4)
"""Shares of the largest magnitude that the rounded range may cover."""
_ROWS = 256
_COLUMNS = 512
"""So many rows of the activation and columns of the weights are enough to rank strengths."""
_WORTH = 1.26
"""A seam is left alone unless the error power falls by more than this factor (1 dB)."""

Matrix = NDArray[np.floating]


@dataclass(frozen=True, kw_only=True)
class SeamSample:
    """What a seam carries: ``rows`` [rows, channels] sampled, ``amplitude`` [channels] the largest over all."""

    rows: Matrix
    amplitude: Matrix


def smooth(
    model: ModelProto,
    feeds: Sequence[Feeds],
    *,
    alpha: float | None = None,
    insert: bool = True,
    threads: int | None = None,
    quiet: bool = True,
) -> Moved:
    """Smaller outliers in what linear layers read, judged on ``feeds``; the same function to float rounding.

    ``alpha`` is the strength for all seams, None the best one for each (possibly none). ``insert=False`` leaves alone
    what needs a Mul. Seams of convolutions are left to ``equalize``.
    """
    view = GraphView(model)
    seams = [seam for seam in find_seams(view) if seam.axis == -1 and (seam.makers or insert)]
    samples = _sample(view.model, seams, feeds, threads=threads) if seams and feeds else {}
    changed, added = [], 0
    for seam in track(seams, what="smoothing", total=len(seams), quiet=quiet):
        if seam.tensor not in samples:
            continue
        weight = reader_weights(view, seam)
        strengths = STRENGTHS if alpha is None else (alpha,)
        factors = _choose(samples[seam.tensor], weight, strengths, forced=alpha is not None)
        if factors is not None:
            added += scale_seam(view, seam, factors)
            changed.append(seam.tensor)
    return Moved(model=view.finish(), seams=tuple(changed), added=added)


def _choose(sample: SeamSample, weight: Matrix, strengths: Sequence[float], *, forced: bool) -> Matrix | None:
    """The factors of the strength with the least error; None when leaving the seam alone is about as good."""
    found = [smooth_factors(sample.amplitude, np.abs(weight).max(axis=1), alpha) for alpha in strengths]
    if forced:
        return found[0]
    columns = np.linspace(0, weight.shape[1] - 1, min(weight.shape[1], _COLUMNS)).astype(int)
    part = weight[:, columns].astype(np.float32)
    plain = product_error(sample.rows, part)
    errors = [product_error(sample.rows / factors, part * factors[:, None]) for factors in found]
    best = int(np.argmin(errors))
    return found[best] if errors[best] * _WORTH < plain else None


def smooth_factors(amplitude: Matrix, weights: Matrix, alpha: float) -> Matrix:
    """Divisors [channels] from the largest activations and weights; geometric mean one, dead channels one."""
    usable = (amplitude > 0) & (weights > 0)
    factors = np.ones(amplitude.shape, np.float64)
    factors[usable] = amplitude[usable].astype(np.float64) ** alpha / weights[usable].astype(np.float64) ** (1 - alpha)
    if usable.any():
        factors[usable] /= np.exp(np.mean(np.log(factors[usable])))
    return bounded(factors, usable).astype(np.float32)


def product_error(rows: Matrix, weight: Matrix) -> float:
    """Error power of ``rows @ weight`` when both are rounded to INT8, at the best of a few ranges of the rows."""
    rounded = quantize_weight(weight, 1).dequantized()
    exact = rows @ weight
    largest = float(np.abs(rows).max(initial=0.0))
    if largest == 0.0:
        return 0.0
    errors = []
    for share in _CLIPS:
        step = np.float32(largest * share / QMAX)
        taken = np.clip(np.rint(rows / step), -QMAX - 1, QMAX) * step
        errors.append(float(np.square(taken @ rounded - exact, dtype=np.float64).sum()))
    return min(errors)


def _sample(
    model: ModelProto, seams: Sequence[Seam], feeds: Sequence[Mapping[str, np.ndarray]], *, threads: int | None
) -> dict[str, SeamSample]:
    """Rows and amplitudes of every seam whose values are finite, in memory that does not grow with the feeds."""
    names = [seam.tensor for seam in seams]
    outputs = {value.name for value in model.graph.output}
    session = open_session(model, outputs=[name for name in names if name not in outputs], threads=threads)
    needed = {value.name for value in session.get_inputs()}
    rng = np.random.default_rng(0)
    share = -(-_ROWS // len(feeds))
    rows: dict[str, list[Matrix]] = {name: [] for name in names}
    amplitude: dict[str, Matrix] = {}
    for feed in feeds:
        values = run_feeds(session, names, {name: array for name, array in feed.items() if name in needed})
        for name, value in zip(names, values, strict=True):
            flat = value.reshape(-1, value.shape[-1]).astype(np.float32)
            if not len(flat):
                continue
            rows[name].append(flat[rng.choice(len(flat), min(share, len(flat)), replace=False)])
            largest = np.abs(flat).max(axis=0)
            amplitude[name] = np.maximum(amplitude[name], largest) if name in amplitude else largest
    return {
        name: SeamSample(rows=np.concatenate(rows[name]), amplitude=largest)
        for name, largest in amplitude.items()
        if np.isfinite(largest).all()
    }
