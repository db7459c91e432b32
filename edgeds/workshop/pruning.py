"""Prune a detector with the preprocessing that it is served with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from edgeds.compress.prune import PruneOptions, prune_model
from edgeds.compress.prune_report import PruneReport
from edgeds.specs import Resolution
from edgeds.workshop.calibration import open_model_set

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
    calibration = None if calib is None else open_model_set(model, calib, size=size, limit=samples)
    options = PruneOptions(samples=samples)
    return prune_model(model, out=out, ratio=ratio, calibration=calibration, options=options, quiet=quiet)
