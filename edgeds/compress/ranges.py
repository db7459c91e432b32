"""Ranges of activation tensors: collecting them over a calibration set, and the table kept beside the model."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import ModelProto

from edgeds import __version__
from edgeds.compress.observers import TensorHistogram, find_threshold
from edgeds.errors import CalibrationError, SpecError
from edgeds.files import read_json, write_json
from edgeds.graph.proto import clone_model, one_line
from edgeds.graph.session import open_session, runtime_errors
from edgeds.progress import track
from edgeds.specs import from_json, to_json

SCHEMA = 1
SAMPLED_ELEMENTS = 8192
"""Values per tensor and run that enter the histogram (minimum and maximum are taken over all)."""


@dataclass(frozen=True, kw_only=True)
class TensorRange:
    """One tensor: ``threshold`` maps to 127. ``note`` says why it cannot be quantized, None when it can."""

    threshold: float
    minimum: float
    maximum: float
    count: int
    note: str | None = None

    @property
    def scale(self) -> float:
        """Step of symmetric int8; a tensor that was always zero gets a harmless positive one."""
        return (self.threshold if self.threshold > 0 else 1.0) / 127


@dataclass(frozen=True, kw_only=True)
class RangeKey:
    """What a table belongs to; any difference makes it foreign."""

    model_sha256: str
    set_sha256: str
    method: str
    percentile: float
    sampled_elements: int | None
    tool: str = f"edgeds {__version__}"

    @property
    def digest(self) -> str:
        return hashlib.sha256("\n".join(f"{k}={v}" for k, v in sorted(to_json(self).items())).encode()).hexdigest()


@dataclass(frozen=True, kw_only=True)
class RangeTable:
    """Ranges by tensor name, with what they were measured on."""

    key: RangeKey
    samples: int
    shapes: dict[str, int] = field(default_factory=dict)
    tensors: dict[str, TensorRange] = field(default_factory=dict)
    chosen: str = ""
    """The method the ranges come from; differs from ``key.method`` when that is ``auto``."""
    schema: int = SCHEMA


def collect_ranges(
    model: ModelProto,
    tensors: Sequence[str],
    calibration: Iterable[dict[str, np.ndarray]],
    *,
    method: str = "percentile",
    percentile: float = 99.99,
    sampled_elements: int | None = SAMPLED_ELEMENTS,
    threads: int | None = None,
    quiet: bool = False,
) -> dict[str, TensorRange]:
    """Run the model over the set once and find each tensor's range.

    Only the named tensors are computed and read; one run's values are in memory at a time. Tensors that hold NaN or
    infinity, or that never hold a value, come back with a ``note``. Raises CalibrationError for an empty set and
    ModelError when the model cannot run on a sample.
    """
    histograms, unusable = collect_histograms(
        model, tensors, calibration, sampled_elements=sampled_elements, threads=threads, quiet=quiet
    )
    return {
        name: range_of(histogram, method, percentile=percentile, note=unusable.get(name))
        for name, histogram in histograms.items()
    }


def collect_histograms(
    model: ModelProto,
    tensors: Sequence[str],
    calibration: Iterable[dict[str, np.ndarray]],
    *,
    sampled_elements: int | None = SAMPLED_ELEMENTS,
    threads: int | None = None,
    quiet: bool = False,
) -> tuple[dict[str, TensorHistogram], dict[str, str]]:
    """Run the model over the set once: a histogram per tensor, and why a tensor cannot have a range (by name).

    Raises as ``collect_ranges`` does.
    """
    if not tensors:
        return {}, {}
    session = open_session(_observed(model, tensors), threads=threads)
    names = [value.name for value in session.get_outputs()]
    needed = {value.name for value in session.get_inputs()}
    histograms = {name: TensorHistogram() for name in names}
    unusable: dict[str, str] = {}
    runs = 0
    total = getattr(calibration, "expected", None)

    def add(values: list[Any]) -> None:
        for name, value in zip(names, values, strict=True):
            if isinstance(value, np.ndarray) and value.dtype.kind == "f":
                histograms[name].update(value, max_elements=sampled_elements)
            else:  # shape inference did not know the type; the values do
                unusable[name] = f"holds {getattr(value, 'dtype', type(value).__name__)} values"

    # Counting overlaps with reading the next sample, which stays on the caller's thread; it ends before the next run,
    # so that the values of one run only are in memory.
    with ThreadPoolExecutor(1, thread_name_prefix="edgeds-ranges") as pool:
        counting: Future[None] | None = None
        for feeds in track(calibration, what="calibrating", total=total, unit="sample", quiet=quiet):
            if counting is not None:
                counting.result()
            given = {name: array for name, array in feeds.items() if name in needed}
            counting = pool.submit(add, run_feeds(session, names, given))
            runs += 1
        if counting is not None:
            counting.result()
    if not runs:
        raise CalibrationError("the calibration set holds no samples")
    return histograms, unusable


def run_feeds(session: Any, names: Sequence[str] | None, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    """Run a session; what ONNX Runtime refuses becomes a CalibrationError that states the shapes fed."""
    try:
        return session.run(list(names) if names is not None else None, feeds)
    except runtime_errors() as error:
        shapes = ", ".join(f"{name} {array.dtype}{list(array.shape)}" for name, array in feeds.items())
        raise CalibrationError(f"the model does not run on calibration data ({shapes}): {one_line(error)}") from error


def range_of(
    histogram: TensorHistogram, method: str, *, percentile: float = 99.99, note: str | None = None
) -> TensorRange:
    """The range of one tensor; ``note`` says why it has none, beyond what the histogram shows itself."""
    if note is not None:
        pass
    elif histogram.non_finite:
        note = f"holds NaN or infinity on calibration data ({histogram.non_finite} values)"
    elif histogram.count == 0:
        note = "never held a value on calibration data"
    seen = histogram.count > 0
    return TensorRange(
        threshold=float(find_threshold(histogram, method, percentile=percentile)) if seen else 0.0,
        minimum=histogram.minimum if seen else 0.0,
        maximum=histogram.maximum if seen else 0.0,
        count=histogram.count,
        note=note,
    )


def _observed(model: ModelProto, tensors: Sequence[str]) -> ModelProto:
    """The model with the named tensors as its only outputs, so that nothing behind them is computed."""
    observed = clone_model(model)
    del observed.graph.output[:]
    for name in tensors:
        observed.graph.output.append(onnx.ValueInfoProto(name=name))
    return observed


def save_ranges(table: RangeTable, path: Path) -> None:
    """Write the table as JSON, atomically."""
    write_json(path, to_json(table))


def load_ranges(path: Path) -> RangeTable:
    """Read a table; SpecError when it is damaged or of another schema."""
    data = read_json(path)
    if isinstance(data, dict) and data.get("schema") != SCHEMA:
        raise SpecError(f"{path}: schema {data.get('schema')!r}, this version reads {SCHEMA}")
    return from_json(RangeTable, data, where=str(path))
