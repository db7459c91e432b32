"""How far a quantized model is from its float original, as one figure that a search can compare.

Agreement in points of 100: ``100 x (1 - error power / signal power)`` of the worst output, so that 99 points are a
signal-to-noise ratio of 20 dB. An output that holds pixel boxes beside scores, as detectors have it, is judged as two
parts with equal weight: by power alone the boxes would hide every score. Integer outputs count the share of values that
differ.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto

from edgeds.compress.ranges import run_feeds
from edgeds.compress.verify import channel_axis
from edgeds.graph.session import open_session

WORST = -100.0
"""Agreement of an output with at least twice its signal as error, or with NaN: a dead model."""


class Judge:
    """The float model's outputs on a few feeds, against which quantized models are held."""

    def __init__(
        self, model: ModelProto, feeds: Sequence[Mapping[str, np.ndarray]], *, threads: int | None = None
    ) -> None:
        self._threads = threads
        self._names = [value.name for value in model.graph.output]
        session = open_session(model, threads=threads)
        needed = {value.name for value in session.get_inputs()}
        self._feeds = [{name: array for name, array in feed.items() if name in needed} for feed in feeds]
        self._expected = [run_feeds(session, self._names, feed) for feed in self._feeds]
        self._scores = [_score_channels([values[i] for values in self._expected]) for i in range(len(self._names))]

    def agreement(self, quantized: ModelProto) -> float:
        """Points of 100, down to ``WORST``; outputs whose shape depends on the data and changed are left out."""
        session = open_session(quantized, threads=self._threads)
        error = [np.zeros(2) for _ in self._names]
        signal = [np.zeros(2) for _ in self._names]
        for feed, expected in zip(self._feeds, self._expected, strict=True):
            for index, value in enumerate(run_feeds(session, self._names, feed)):
                before = expected[index]
                if not isinstance(before, np.ndarray) or np.shape(value) != before.shape:
                    continue
                if before.dtype.kind != "f":
                    error[index][0] += np.count_nonzero(before != value)
                    signal[index][0] += before.size
                    continue
                if np.isfinite(before).all() and not np.isfinite(value).all():
                    return WORST
                for part, (one, two) in enumerate(_split(before, value, self._scores[index])):
                    error[index][part] += np.square(two - one).sum()
                    signal[index][part] += np.square(one).sum()
        worst = max((_ratio(e, s) for e, s in zip(error, signal, strict=True)), default=0.0)
        return 100.0 * (1.0 - min(worst, 2.0))


def _ratio(error: NDArray[np.float64], signal: NDArray[np.float64]) -> float:
    used = (signal > 0) | (error > 0)
    if not used.any():
        return 0.0
    return float(np.mean(error[used] / np.maximum(signal[used], 1e-30)))


def _score_channels(samples: Sequence[np.ndarray]) -> tuple[int, NDArray[np.bool_]] | None:
    """Channel axis and which channels are scores (0 to 1 on every sample); None where not both kinds are there."""
    first = samples[0] if samples else None
    if not isinstance(first, np.ndarray) or first.dtype.kind != "f" or not first.size:
        return None
    axis = channel_axis(first.shape)
    if axis is None:
        return None
    low, high = np.full(first.shape[axis], np.inf), np.full(first.shape[axis], -np.inf)
    for sample in samples:
        if sample.ndim != first.ndim or sample.shape[axis] != first.shape[axis]:
            return None
        rows = np.moveaxis(sample, axis, 0).reshape(sample.shape[axis], -1)
        low, high = np.minimum(low, rows.min(axis=1)), np.maximum(high, rows.max(axis=1))
    scores = (low >= 0.0) & (high <= 1.0)
    return (axis, scores) if scores.any() and not scores.all() else None


def _split(
    before: np.ndarray, after: np.ndarray, scores: tuple[int, NDArray[np.bool_]] | None
) -> list[tuple[NDArray[np.float64], NDArray[np.float64]]]:
    """The two arrays in float64, as one part or as boxes and scores; values that are not finite count as equal."""
    finite = np.isfinite(before) & np.isfinite(after)
    one, two = (np.where(finite, array, 0.0).astype(np.float64) for array in (before, after))
    if scores is None:
        return [(one, two)]
    axis, chosen = scores
    return [(np.compress(mask, one, axis), np.compress(mask, two, axis)) for mask in (~chosen, chosen)]
