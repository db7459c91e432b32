"""Prune a detector with the preprocessing that it is served with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from edgeds.compress.calibset import open_calibration
from edgeds.compress.prune import PruneOptions, prune_model
from edgeds.compress.prune_report import PruneReport
from edgeds.graph.io import input_specs, load_model
from edgeds.specs import Resolution
from edgeds.workshop.detector import image_setup

DEFAULT_SAMPLES = 32


def prune_detector(
    model: str | Path,
    *,
    out: str | Path,
    ratio: float,
    calib: Any = None,
    size: Resolution | None = None,
    samples: int = DEFAULT_SAMPLES,
    quiet: bool = False,
) -> PruneReport:
    """Remove the share ``ratio`` of the removable channels of a YOLO and fit what is left on ``samples`` unlabelled
    images of ``calib`` (what ``open_calibration`` takes; None: no images, only weights are looked at).

    Raises what ``prune_model`` and ``open_calibration`` raise.
    """
    calibration = None
    if calib is not None:
        preprocess, resolution = image_setup(model, size=size, preprocess=None)
        specs = input_specs(load_model(model))
        calibration = open_calibration(
            calib, model_inputs=specs, preprocess=preprocess, resolution=resolution, limit=samples
        )
    options = PruneOptions(samples=samples)
    return prune_model(model, out=out, ratio=ratio, calibration=calibration, options=options, quiet=quiet)
