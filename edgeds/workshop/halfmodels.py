"""The float16 forms that strongly typed TensorRT builds need: of the float model, and of what INT8 leaves in float."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from onnx import ModelProto

from edgeds.compress.quantize import prepare_float
from edgeds.compress.ranges import load_ranges
from edgeds.errors import ModelError
from edgeds.graph.amplitude import find_amplitudes
from edgeds.graph.io import load_model, save_model
from edgeds.graph.precision import convert_float16, peaks_of, verify_float16
from edgeds.progress import track

log = logging.getLogger("edgeds.workshop")

NAMES = {"float16": "variants/float16.onnx", "int8_fp16": "variants/int8_fp16.onnx"}

Feeds = Mapping[str, np.ndarray[Any, Any]]


@dataclass
class HalfModels:
    """Paths by variant name (one that could not be made is missing), what they cost, and notes for the manifest."""

    paths: dict[str, Path] = field(default_factory=dict)
    accuracy: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def make_half_models(
    float_path: Path,
    int8_path: Path,
    *,
    ranges: Path,
    feeds: Sequence[Feeds],
    folder: Path,
    quiet: bool = False,
) -> HalfModels:
    """Convert both models, with the magnitudes that calibration saw, and compare each with its origin on ``feeds``.

    A model that cannot be converted, or whose float16 form loses finite values, is left out with a note: the bundle
    serves without it, only FP16 builds are not possible. ``accuracy`` holds the largest absolute output difference.
    """
    made = HalfModels()
    for variant in track(NAMES, what="making float16 models", unit="model", quiet=quiet):
        try:
            reference = prepare_float(float_path)
            model = reference if variant == "float16" else load_model(int8_path)
            report = convert_float16(model, ranges=_peaks(reference, ranges, feeds))
            errors = verify_float16(model, report.model, feeds)
        except ModelError as error:
            made.notes.append(f"no {variant} model, so none can be built in FP16: {error}")
            log.warning("%s", made.notes[-1])
            continue
        made.paths[variant] = save_model(report.model, folder / NAMES[variant])
        made.accuracy[f"{variant}_max_abs"] = max(errors.values(), default=0.0)
        made.notes += [f"{variant}: {note}" for note in report.notes]
    return made


def _peaks(model: ModelProto, ranges: Path, feeds: Sequence[Feeds]) -> dict[str, float]:
    """Magnitudes of all tensors on the checked samples, and of those with a range on the whole calibration set."""
    peaks = find_amplitudes(model, feeds)
    for name, peak in peaks_of(load_ranges(ranges).tensors).items():
        if math.isfinite(peak):
            peaks[name] = max(peaks.get(name, 0.0), peak)
    return peaks
