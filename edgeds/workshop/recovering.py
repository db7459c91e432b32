"""Train a pruned detector against the model it was made from, on images prepared as they are when it is served."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from edgeds.compress.recover import RecoverReport, recover_model
from edgeds.compress.recover_options import RecoverOptions
from edgeds.specs import Resolution
from edgeds.workshop.calibration import open_model_set


def recover_detector(
    model: str | Path,
    *,
    teacher: str | Path,
    out: str | Path,
    calib: Any,
    minutes: float,
    size: Resolution | None = None,
    quiet: bool = False,
) -> RecoverReport:
    """``minutes`` of self-distillation on the unlabelled images of ``calib`` (what ``open_model_set`` takes).

    Raises what ``recover_model`` and ``open_model_set`` raise; MissingDependency (extra ``train``) without torch.
    """
    samples = open_model_set(teacher, calib, size=size)
    options = RecoverOptions(minutes=minutes)
    return recover_model(model, teacher=teacher, samples=samples, out=out, options=options, quiet=quiet)
