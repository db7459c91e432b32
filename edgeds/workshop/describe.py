"""The manifest of a new bundle: what the model is, how it was calibrated, where it comes from."""

from __future__ import annotations

import datetime
import logging
import platform
from collections.abc import Mapping, Sequence
from importlib import metadata as packages
from pathlib import Path
from typing import Any

from onnx import ModelProto

from edgeds import __version__
from edgeds.bundle import Manifest
from edgeds.compress.quantize import QuantizeReport
from edgeds.files import sha256_file
from edgeds.graph.io import input_specs, output_specs
from edgeds.pipelines.yolo.layout import layout_to_json
from edgeds.specs import Resolution, to_json
from edgeds.workshop.detector import DetectorSetup, model_metadata
from edgeds.workshop.planning import PlannedParts

log = logging.getLogger("edgeds.workshop")


def build_manifest(
    model: ModelProto,
    *,
    source: Path,
    task: str,
    models: dict[str, str],
    setup: DetectorSetup | None,
    names: dict[int, str],
    max_batch: int,
    calibration: dict[str, Any] | None,
    accuracy: dict[str, Any] | None,
    planned: PlannedParts,
    speedup: float | None,
) -> Manifest:
    """Everything but the list of files, which ``write_bundle`` fills in. ``model`` is the float model of ``source``."""
    inputs = input_specs(model)
    fixed_batch = inputs[0].shape[0] if setup is not None else None
    return Manifest(
        task=task,
        models=models,
        inputs=inputs,
        outputs=output_specs(model),
        preprocess=to_json(setup.preprocess) if setup is not None else None,
        preprocess_digest=setup.preprocess.digest() if setup is not None else None,
        head=layout_to_json(setup.layout) if setup is not None else None,
        names=setup.names if setup is not None else names,
        buckets=setup.sizes if setup is not None else (),
        max_batch=fixed_batch if isinstance(fixed_batch, int) else max_batch,
        precision="int8" if calibration is not None else "float",
        calibration=calibration,
        accuracy=accuracy or None,
        target=planned.target,
        budget=planned.budget,
        plan=planned.plan,
        predicted=planned.predicted,
        license=model_metadata(model).get("license", "").strip() or "unknown",
        provenance={
            "edgeds": __version__,
            "source": source.name,
            "source_sha256": sha256_file(source),
            "created_utc": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "python": platform.python_version(),
            "cpu_int8_speedup": speedup,
            **{name: packages.version(name) for name in ("onnx", "onnxruntime", "numpy")},
        },
    )


def describe_calibration(report: QuantizeReport, *, notes: Sequence[str]) -> dict[str, Any]:
    """The identity of the calibration and what was noticed about it."""
    return {
        "method": report.method,
        "samples": report.samples,
        "set_digest": report.set_digest,
        "shapes": report.shapes,
        "int8_flops_share": report.int8_flops_share,
        "float_nodes": to_json(report.float_nodes),
        "notes": [*report.notes, *notes],
    }


def note_uncalibrated(sizes: Sequence[Resolution], shapes: Mapping[str, int]) -> list[str]:
    """One note, also logged, for every resolution to be served that no calibration sample had (report B47).

    ``shapes`` is what the calibration set read: ``"images=1x3x480x640"`` to the number of runs.
    """
    seen = {tuple(key.rpartition("=")[2].split("x")[-2:]) for key in shapes}
    notes = [
        f"size {size} is served but no calibration sample had it; its INT8 ranges come from other sizes, add images "
        "of that shape"
        for size in sizes
        if (str(size.height_px), str(size.width_px)) not in seen
    ]
    for note in notes:
        log.warning("%s", note)
    return notes
