"""Weight-only INT8 or INT4 of any ONNX model: matrix products keep float activations, their weights take less room.

For what loses too much with INT8 activations, or is bound by reading its weights. Nothing has to be calibrated; samples
make INT4 better, since what rounding a column loses is made up for by those that follow (``weightonly.py``).
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from onnx import ModelProto

from edgeds.compress.llm_weights import (
    CPU_GROUP,
    INT4_OPSET,
    PER_CHANNEL,
    TENSORRT_GROUP,
    Rounding,
    linear_layers,
    quantize_weights,
    to_cpu_form,
    to_tensorrt_form,
)
from edgeds.compress.prune import check_place
from edgeds.compress.verify import compare_models
from edgeds.errors import CalibrationError, ModelError, SpecError
from edgeds.graph.io import load_model, save_model
from edgeds.graph.opset import require_opset
from edgeds.graph.proto import weight_bytes
from edgeds.graph.view import GraphView

BITS = {"int8": 8, "int4": 4}
DEFAULT_SAMPLES = 64
CHECKED = 4


@dataclass(frozen=True, kw_only=True)
class WeightsReport:
    """What ``quantize_weights_only`` did. ``left``: layers that stay float, and why. ``sqnr_db`` of the worst output on
    the first samples; None without samples, or without an error."""

    model: str
    cpu_model: str | None
    weights: str
    group: int | None
    layers: int
    left: tuple[tuple[str, str], ...]
    compensated: bool
    samples: int
    weights_bytes_float: int
    weights_bytes: int
    sqnr_db: float | None
    seconds: float


def quantize_weights_only(
    path: str | Path,
    *,
    out: str | Path,
    weights: str,
    cpu_out: str | Path | None = None,
    group: int | None = None,
    calibration: Iterable[Mapping[str, Any]] | None = None,
    samples: int = DEFAULT_SAMPLES,
    threads: int | None = None,
    quiet: bool = False,
) -> WeightsReport:
    """Write ``out`` with DequantizeLinear in front of every MatMul with a constant matrix, and ``cpu_out`` for ONNX
    Runtime (MatMulNBits).

    ``weights``: int8 (per output channel; on CPUs in groups of 32 inputs) or int4 (groups of ``group`` inputs, 64, on
    CPUs 32 with zero-points). ``calibration``: at most ``samples`` feeds of the model, for int4. Nothing is written on
    failure. Raises SpecError, ModelError (also when there is no such layer), CalibrationError.
    """
    started = time.perf_counter()
    if weights not in BITS:
        raise SpecError(f"--weights {weights!r}: choose from {', '.join(BITS)}")
    if group is not None and weights == "int8":
        raise SpecError("--group is for int4; int8 has a scale for each output channel")
    source, place = Path(path), Path(out).absolute()
    check_place(source, place)
    if cpu_out is not None:
        check_place(source, Path(cpu_out).absolute())
    bits = BITS[weights]
    device = Rounding(bits=bits, head_bits=bits, group=PER_CHANNEL if bits == 8 else group or TENSORRT_GROUP)
    cpu = Rounding(bits=bits, head_bits=bits, group=CPU_GROUP if group is None else group, symmetric=bits == 8)
    model = load_model(source)
    if not linear_layers(GraphView(model, copy=False)):
        raise ModelError(f"{source}: has no MatMul with a constant matrix of float32, so there are no weights to round")
    feeds = [] if calibration is None else [dict(feed) for feed in islice(calibration, samples)]
    if calibration is not None and not feeds:
        raise CalibrationError("the calibration set holds no samples")
    base = require_opset(model, INT4_OPSET) if bits == 4 else model
    rounded, cpu_rounded = quantize_weights(
        base, (device, cpu), samples=feeds if feeds and bits == 4 else None, threads=threads, quiet=quiet
    )
    made = to_tensorrt_form(base, rounded)
    _save(made, place, to_cpu_form(base, cpu_rounded) if cpu_out is not None else None, cpu_out)
    checked = compare_models(model, made, feeds[:CHECKED]) if feeds else None
    return WeightsReport(
        model=str(place),
        cpu_model=None if cpu_out is None else str(Path(cpu_out).absolute()),
        weights=weights,
        group=device.group or None,
        layers=len(rounded.weights),
        left=rounded.left,
        compensated=bool(feeds) and bits == 4,
        samples=len(feeds),
        weights_bytes_float=weight_bytes(model),
        weights_bytes=weight_bytes(made),
        sqnr_db=None if checked is None else checked.sqnr_db,
        seconds=round(time.perf_counter() - started, 2),
    )


def _save(made: ModelProto, place: Path, cpu: ModelProto | None, cpu_out: str | Path | None) -> None:
    if cpu is not None and cpu_out is not None:
        save_model(cpu, Path(cpu_out).absolute())
    save_model(made, place)
