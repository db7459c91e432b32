"""Open the calibration set of a model file: images through the model's own preprocessing, arrays as they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from edgeds.compress.calibset import CalibrationSet, holds_images, open_calibration
from edgeds.errors import SpecError
from edgeds.graph.io import input_specs, load_model
from edgeds.preproc import ImagePreprocess
from edgeds.specs import Resolution
from edgeds.workshop.detector import image_setup


def open_model_set(
    model: str | Path,
    calib: Any,
    *,
    size: Resolution | None = None,
    preprocess: ImagePreprocess | None = None,
    limit: int | None = None,
) -> CalibrationSet:
    """Samples for ``model`` from a path, or from an iterable that holds images.

    Images are prepared as ``preprocess`` says (None: as the model does) and brought to ``size`` (None: the model's).
    Raises SpecError when either is given for a path that holds arrays, and what ``open_calibration`` raises.
    """
    if not isinstance(calib, str | Path) or holds_images(calib):
        preprocess, size = image_setup(model, size=size, preprocess=preprocess)
    elif size is not None or preprocess is not None:
        raise SpecError(f"--calib {calib}: --size and image options are for images; arrays are used as they are")
    specs = input_specs(load_model(model))
    return open_calibration(calib, model_inputs=specs, preprocess=preprocess, resolution=size, limit=limit)
