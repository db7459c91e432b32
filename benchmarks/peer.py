"""The peer of the calibration benchmarks: onnxruntime's quantize_static in the recipe that TensorRT accepts.

Int8 activations and weights with zero-point 0, per-channel weights, float bias, Conv and MatMul only: its defaults
(uint8, asymmetric, int32 bias) are refused by TensorRT's parser.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from edgeds.progress import track

PEER = "onnxruntime quantize_static"


def quantize_with_peer(
    model: Path,
    feeds: Iterable[dict[str, np.ndarray]],
    out: Path,
    *,
    method: str,
    total: int,
    percentile: float | None = None,
    quiet: bool = False,
) -> None:
    """Calibrate ``model`` over ``feeds`` with MinMax, Entropy or Percentile and write ``out``."""
    from onnxruntime.quantization import (
        CalibrationDataReader,
        CalibrationMethod,
        QuantFormat,
        QuantType,
        quantize_static,
    )

    source: Iterator[dict[str, np.ndarray]] = track(
        feeds, what=f"peer {method}", total=total, unit="sample", quiet=quiet
    )

    class Reader(CalibrationDataReader):  # type: ignore[misc]
        def get_next(self) -> dict[str, np.ndarray] | None:
            return next(source, None)

    extra: dict[str, Any] = {"ActivationSymmetric": True, "WeightSymmetric": True, "QuantizeBias": False}
    if percentile is not None:
        extra["CalibPercentile"] = percentile
    with _quiet_log(), contextlib.redirect_stdout(sys.stderr):  # it prints its statistics
        quantize_static(
            str(model),
            str(out),
            Reader(),
            quant_format=QuantFormat.QDQ,
            activation_type=QuantType.QInt8,
            weight_type=QuantType.QInt8,
            per_channel=True,
            op_types_to_quantize=["Conv", "MatMul"],
            calibrate_method=CalibrationMethod[method],
            extra_options=extra,
        )


@contextlib.contextmanager
def _quiet_log() -> Iterator[None]:
    """It advises, once per call, to pre-process the model."""
    logger = logging.getLogger()
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)
