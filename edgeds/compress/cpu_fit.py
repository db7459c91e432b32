"""The CPU form, checked against the TensorRT form: convolutions whose 8-bit output costs accuracy compute in float.

ONNX Runtime's integer convolution rounds its output with one scale for all channels, which TensorRT does not. Where
channels differ by orders of magnitude (and the layer behind them makes up for it) the small ones would be lost.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from onnx import ModelProto

from edgeds.compress.calibset import Feeds
from edgeds.compress.cpu_variant import to_cpu_variant
from edgeds.compress.ranges import TensorRange, run_feeds
from edgeds.compress.verify import Comparison, check_scores, compare_models
from edgeds.errors import CalibrationError
from edgeds.graph.session import open_session
from edgeds.graph.view import GraphView

GOOD_SQNR_DB = 20.0
"""Outputs this close to float (an error of a tenth) are good enough, whatever the TensorRT form reaches."""

ALLOWED_LOSS_DB = 3.0
"""Below that the CPU form may be worse than the TensorRT form by a doubled error power."""

_CHANNEL_STEPS_DB = (10.0, 20.0, math.inf)
"""Rounds: convolutions with a channel below this go to float, until the outputs are good."""


@dataclass(frozen=True, kw_only=True)
class CpuFitted:
    """``float_convolutions``: names of those that compute in float on the quantized numbers."""

    model: ModelProto
    comparison: Comparison
    float_convolutions: tuple[str, ...] = ()


def fit_cpu_variant(
    reference: ModelProto,
    quantized: ModelProto,
    *,
    ranges: Mapping[str, TensorRange],
    feeds: Sequence[Feeds],
    target_db: float | None,
    threads: int | None = None,
) -> CpuFitted:
    """The CPU form of ``quantized`` whose outputs, compared with ``reference``, are about as good as its own.

    ``target_db`` is the SQNR that ``quantized`` reaches (None: exact). Raises CalibrationError as ``compare_models``
    and ``check_scores`` do when even float convolutions do not help.
    """
    needed_db = GOOD_SQNR_DB if target_db is None else min(GOOD_SQNR_DB, target_db - ALLOWED_LOSS_DB)
    first = to_cpu_variant(quantized, ranges)
    fitted = _tried(reference, first, (), feeds=feeds, threads=threads)
    if isinstance(fitted, CpuFitted) and _is_good(fitted, needed_db):
        return fitted
    worst_db = _worst_channels(quantized, first, feeds, threads=threads)
    tried: tuple[str, ...] = ()
    for limit_db in _CHANNEL_STEPS_DB:
        chosen = tuple(node for node, value in worst_db.items() if value < limit_db)
        if chosen == tried:
            continue
        tried = chosen
        model = to_cpu_variant(quantized, ranges, float_convolutions=frozenset(chosen))
        fitted = _tried(reference, model, chosen, feeds=feeds, threads=threads)
        if _is_good(fitted, needed_db):
            break
    if isinstance(fitted, CalibrationError):
        raise fitted
    return fitted


def _tried(
    reference: ModelProto, model: ModelProto, chosen: tuple[str, ...], *, feeds: Sequence[Feeds], threads: int | None
) -> CpuFitted | CalibrationError:
    try:
        comparison = compare_models(reference, model, feeds, threads=threads)
        check_scores(comparison)
    except CalibrationError as error:
        return error
    return CpuFitted(model=model, comparison=comparison, float_convolutions=chosen)


def _is_good(fitted: CpuFitted | CalibrationError, needed_db: float) -> bool:
    if isinstance(fitted, CalibrationError):
        return False
    reached = fitted.comparison.sqnr_db
    return reached is None or reached >= needed_db


def _worst_channels(
    quantized: ModelProto, cpu: ModelProto, feeds: Sequence[Feeds], *, threads: int | None
) -> dict[str, float]:
    """Convolution -> SQNR in dB of its worst channel after rounding its output as the CPU form does."""
    rounding = _output_rounding(quantized, cpu)
    if not rounding:
        return {}
    session = open_session(quantized, outputs=list(rounding), threads=threads)
    needed = {value.name for value in session.get_inputs()}
    power = {tensor: np.zeros((2, 0)) for tensor in rounding}
    for sample in feeds:
        fed = {name: array for name, array in sample.items() if name in needed}
        for tensor, value in zip(rounding, run_feeds(session, list(rounding), fed), strict=True):
            _, scale, zero_point = rounding[tensor]
            power[tensor] = _added(power[tensor], np.asarray(value, np.float64), scale=scale, zero_point=zero_point)
    return {rounding[tensor][0]: _lowest_db(sums) for tensor, sums in power.items()}


def _output_rounding(quantized: ModelProto, cpu: ModelProto) -> dict[str, tuple[str, float, int]]:
    """Convolution output -> (node, scale, zero-point), where the CPU form has an output rounding of its own."""
    before, after = GraphView(quantized, copy=False), GraphView(cpu, copy=False)
    found = {}
    for node in before.nodes:
        if node.op_type != "Conv":
            continue
        consumer = after.producer(node.output[0])
        if consumer is not None and consumer.op_type == "DequantizeLinear":
            scale, zero = after.constant(consumer.input[1]), after.constant(consumer.input[2])
            if scale is not None and zero is not None:
                found[node.output[0]] = (node.name, float(scale), int(zero))
    return found


def _added(sums: np.ndarray, value: np.ndarray, *, scale: float, zero_point: int) -> np.ndarray:
    """(signal, error) power by channel with one more sample; ``value`` is [N, C, ...]."""
    rounded = (np.clip(np.rint(value / scale) + zero_point, 0, 255) - zero_point) * scale
    axes = (0, *range(2, value.ndim))
    new = np.stack([np.square(value).sum(axis=axes), np.square(rounded - value).sum(axis=axes)])
    return new if not sums.size else sums + new


def _lowest_db(sums: np.ndarray) -> float:
    alive = (sums[0] > 0) & (sums[1] > 0)
    if not alive.any():
        return math.inf
    return float(10 * np.log10((sums[0][alive] / sums[1][alive]).min()))
