"""Compare a quantized model with its float original: SQNR per output and per layer, and score statistics."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from onnx import ModelProto

from edgeds.compress.calibset import Feeds
from edgeds.compress.ranges import run_feeds
from edgeds.errors import CalibrationError
from edgeds.graph.session import open_session

_ACTIVE_SHARE_KEPT = 0.1
"""A channel that keeps less than this share of its active values has collapsed."""


LOST_SQNR_DB = 3.0
"""Below this a layer's error power is more than half of its signal power: INT8 cannot hold its values."""


@dataclass(frozen=True, kw_only=True)
class ChannelStatistics:
    """One channel of one output before and after: mean magnitude and share of values that are not zero."""

    channel: int
    float_mean: float
    int8_mean: float
    float_active: float
    int8_active: float


@dataclass(frozen=True, kw_only=True)
class OutputComparison:
    """One graph output. ``sqnr_db`` = 10 log10(signal power / error power); None when there is no error to speak of."""

    name: str
    sqnr_db: float | None
    max_abs_error: float
    channels: tuple[ChannelStatistics, ...]
    changed_shapes: int = 0
    """Samples on which the output had another shape than in float (data-dependent selection) and was not compared."""


@dataclass(frozen=True, kw_only=True)
class LayerComparison:
    """Output of one quantized layer, with the error accumulated up to there."""

    node: str
    sqnr_db: float | None


@dataclass(frozen=True, kw_only=True)
class Comparison:
    outputs: tuple[OutputComparison, ...]
    layers: tuple[LayerComparison, ...]

    @property
    def sqnr_db(self) -> float | None:
        """SQNR of the worst output; None when no output shows an error."""
        known = [output.sqnr_db for output in self.outputs if output.sqnr_db is not None]
        return min(known) if known else None


class _Errors:
    """Running signal and error power of one tensor in float64."""

    def __init__(self) -> None:
        self.signal = self.error = self.worst = 0.0

    def add(self, reference: np.ndarray, value: np.ndarray) -> None:
        reference, value = np.asarray(reference, np.float64), np.asarray(value, np.float64)
        finite = np.isfinite(reference) & np.isfinite(value)
        reference, value = np.where(finite, reference, 0.0), np.where(finite, value, 0.0)
        difference = value - reference
        self.signal += float(np.square(reference).sum())
        self.error += float(np.square(difference).sum())
        self.worst = max(self.worst, float(np.abs(difference).max(initial=0.0)))

    @property
    def sqnr_db(self) -> float | None:
        if self.error == 0.0:
            return None
        return 10.0 * math.log10(max(self.signal, 1e-300) / self.error)


def compare_models(
    reference: ModelProto,
    quantized: ModelProto,
    feeds: Sequence[Feeds],
    *,
    layers: Sequence[tuple[str, str]] = (),
    threads: int | None = None,
) -> Comparison:
    """Run both models on the feeds. ``layers`` are (node name, output tensor) pairs present in both graphs.

    Raises CalibrationError when a quantized output turns non-finite, changes shape or dtype, or when the values of a
    channel collapse: detections that vanish are found here and not in the field.
    """
    outputs = [value.name for value in reference.graph.output]
    tensors = [tensor for _, tensor in layers if tensor not in outputs]
    sessions = [open_session(model, outputs=tensors, threads=threads) for model in (reference, quantized)]
    wanted = [*outputs, *tensors]
    errors = {name: _Errors() for name in wanted}
    statistics: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {}
    changed: dict[str, int] = {}
    for sample in feeds:
        needed = {value.name for value in sessions[0].get_inputs()}
        fed = {name: array for name, array in sample.items() if name in needed}
        before, after = (dict(zip(wanted, run_feeds(s, wanted, fed), strict=True)) for s in sessions)
        for name in wanted:
            if not isinstance(before[name], np.ndarray) or before[name].dtype.kind != "f":
                continue
            if name in outputs:
                _check_sane(name, before[name], after[name])
                statistics.setdefault(name, []).append(_channel_sums(before[name], after[name]))
            if before[name].shape == after[name].shape:
                errors[name].add(before[name], after[name])
            else:
                changed[name] = changed.get(name, 0) + 1
    compared = tuple(
        OutputComparison(
            name=name,
            sqnr_db=errors[name].sqnr_db,
            max_abs_error=errors[name].worst,
            channels=_channel_statistics(statistics[name]),
            changed_shapes=changed.get(name, 0),
        )
        for name in outputs
        if name in statistics
    )
    per_layer = tuple(LayerComparison(node=node, sqnr_db=errors[tensor].sqnr_db) for node, tensor in layers)
    return Comparison(outputs=compared, layers=per_layer)


def check_scores(comparison: Comparison) -> None:
    """CalibrationError when a channel of an output lost nearly all of its active values (B36: all scores zero)."""
    for output in comparison.outputs:
        for channel in output.channels:
            lost = channel.int8_active < channel.float_active * _ACTIVE_SHARE_KEPT
            if channel.float_active > 0.01 and lost and channel.int8_mean < channel.float_mean * _ACTIVE_SHARE_KEPT:
                raise CalibrationError(
                    f"output '{output.name}', channel {channel.channel}: {channel.float_active:.0%} of its values are "
                    f"non-zero in float and {channel.int8_active:.0%} after quantization; keep the layers that "
                    "produce it in float with --exclude NODE"
                )


def lost_layers(comparison: Comparison) -> list[LayerComparison]:
    """The layers whose error is more than half of their signal, in graph order."""
    return [layer for layer in comparison.layers if layer.sqnr_db is not None and layer.sqnr_db < LOST_SQNR_DB]


def _check_sane(name: str, before: np.ndarray, after: np.ndarray) -> None:
    if after.dtype != before.dtype or after.ndim != before.ndim:
        raise CalibrationError(
            f"output '{name}' changed from {before.dtype}{before.shape} to {after.dtype}{after.shape}"
        )
    if np.isfinite(before).all() and not np.isfinite(after).all():
        raise CalibrationError(f"output '{name}' holds NaN or infinity after quantization and did not before")


def _channel_sums(before: np.ndarray, after: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows of (sum |x|, non-zero count, size) per channel."""
    return _sums(before), _sums(after)


def channel_axis(shape: tuple[int, ...]) -> int | None:
    """Where boxes and scores of a detector lie side by side: [N, 84, A] and [N, A, 85], NCHW, [N, 3, H, W, 85]."""
    if len(shape) < 3:
        return None
    if len(shape) == 3:
        return 1 if shape[1] <= shape[2] else 2
    return 1 if len(shape) == 4 else len(shape) - 1


def _sums(array: np.ndarray) -> np.ndarray:
    values = np.abs(np.asarray(array, np.float64))
    values = np.where(np.isfinite(values), values, 0.0)
    axis = channel_axis(values.shape)
    rows = values.reshape(1, values.size)
    if axis is not None:
        rows = np.moveaxis(values, axis, 0).reshape(values.shape[axis], values.size // max(values.shape[axis], 1))
    size = np.full(rows.shape[0], rows.shape[1], np.float64)
    return np.stack([rows.sum(axis=1), np.count_nonzero(rows, axis=1).astype(np.float64), size])


def _channel_statistics(pairs: list[tuple[np.ndarray, np.ndarray]]) -> tuple[ChannelStatistics, ...]:
    pairs = [pair for pair in pairs if pair[0].shape == pairs[0][0].shape == pair[1].shape]
    if not pairs:
        return ()
    before, after = np.sum([pair[0] for pair in pairs], axis=0), np.sum([pair[1] for pair in pairs], axis=0)
    return tuple(
        ChannelStatistics(
            channel=index,
            float_mean=float(before[0, index] / max(before[2, index], 1)),
            int8_mean=float(after[0, index] / max(after[2, index], 1)),
            float_active=float(before[1, index] / max(before[2, index], 1)),
            int8_active=float(after[1, index] / max(after[2, index], 1)),
        )
        for index in range(before.shape[1])
    )
