"""Model and calibration images in, bundle out: quantize, check, describe, write."""

from __future__ import annotations

import difflib
import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from onnx import ModelProto

from edgeds.bundle import write_bundle
from edgeds.compress.calibset import CalibrationSet, holds_images, open_calibration
from edgeds.compress.quantize import DEFAULT_METHOD, DEFAULT_PERCENTILE
from edgeds.errors import SpecError
from edgeds.graph.io import input_specs, load_model
from edgeds.pipelines.yolo.metadata import TASKS, parse_names
from edgeds.report.datasets import DetectionDataset
from edgeds.specs import Budget, Resolution
from edgeds.workshop.describe import build_manifest, describe_calibration, note_uncalibrated
from edgeds.workshop.detector import DetectorSetup, describe_detector
from edgeds.workshop.measure import check_drop, measure_accuracy, open_labels, shared_images
from edgeds.workshop.outfolder import claim_folder, writing_errors
from edgeds.workshop.parts import (
    FLOAT_NAME,
    BundleParts,
    bundle_entries,
    count_parts,
    float_parts,
    quantize_parts,
    work_folder,
)
from edgeds.workshop.planning import parse_target, plan_parts

log = logging.getLogger("edgeds.workshop")


def create_bundle(
    model: str | Path,
    *,
    out: str | Path,
    task: str,
    calib: Any = None,
    sizes: Sequence[Resolution] = (),
    max_batch: int = 8,
    method: str = DEFAULT_METHOD,
    percentile: float = DEFAULT_PERCENTILE,
    samples: int | None = None,
    names: Mapping[int, str] | Sequence[str] | None = None,
    head: str | Mapping[str, Any] | None = None,
    float_only: bool = False,
    evaluate: str | Path | None = None,
    split: str | None = None,
    max_drop: float | None = None,
    target: str | None = None,
    budget: Budget | None = None,
    replace: bool = False,
    quiet: bool = False,
) -> Path:
    """Quantize ``model`` over ``calib`` and pack it with all that serving needs; returns the bundle's folder.

    ``task`` is a YOLO task (detect, segment, pose, obb, classify: preprocessing, head and names are read from the
    model, what is given wins) or any other word for a model that is fed arrays. ``calib`` is what
    ``compress.open_calibration`` takes. With ``evaluate`` (a labelled folder, of it the ``split``) the accuracy of the
    float and the INT8 model is measured and stored; above ``max_drop`` points (of 100) of mAP50-95 lost, nothing is
    written. ``target`` (``NAME`` or ``NAME@MODE``) is its board: the plan within ``budget`` is stored in the bundle.
    ``replace`` gives up an older bundle at ``out``, which stays until the new one is complete.

    Raises SpecError for arguments that do not fit, ModelError, CalibrationError, and BundleError when ``out`` cannot
    be written or another process writes it; nothing is left behind on failure.
    """
    _check_task(task, calib=calib, sizes=sizes, head=head, evaluate=evaluate)
    _check_options(calib, float_only=float_only, max_batch=max_batch)
    _check_measuring(evaluate, split=split, max_drop=max_drop, float_only=float_only)
    board, source, folder_out = parse_target(target, budget=budget), Path(model), Path(out)
    with claim_folder(folder_out, replace=replace, ours=bundle_entries(folder_out), what="a bundle"):
        loaded = load_model(source)
        setup = describe_detector(source, task=task, head=head, names=names, sizes=sizes) if task in TASKS else None
        dataset = open_labels(Path(evaluate), split=split, setup=setup) if evaluate is not None and setup else None
        calibration = None if float_only else _open_set(loaded, calib, setup, samples)
        with work_folder() as folder:
            parts = float_parts(loaded, folder, name="model.onnx" if float_only else FLOAT_NAME)
            if calibration is not None:
                quantize_parts(parts, source, calibration, folder, method=method, percentile=percentile, quiet=quiet)
                _note_calibration(parts, calibration, setup)
            if dataset is not None and setup is not None:
                _measure(parts, setup, dataset, calib=calib, max_drop=max_drop, quiet=quiet)
            cost = count_parts(parts, shapes=_cost_shapes(loaded, setup))
            served = setup.sizes if setup is not None else ()
            planned = plan_parts(
                board, cost=cost, accuracy=parts.accuracy, budget=budget, sizes=served, max_batch=max_batch
            )
            manifest = build_manifest(
                loaded,
                source=source,
                task=task,
                models=parts.models,
                setup=setup,
                names=parse_names(names) if names is not None else {},
                max_batch=max_batch,
                calibration=describe_calibration(parts.report, notes=parts.notes) if parts.report else None,
                accuracy=parts.accuracy,
                planned=planned,
                speedup=parts.speedup,
            )
            with writing_errors(folder_out):
                return write_bundle(folder_out, files=parts.files, manifest=manifest, replace=replace)


def _check_task(task: str, *, calib: Any, sizes: Any, head: Any, evaluate: Any) -> None:
    if not isinstance(task, str) or not task.strip():
        raise SpecError(f"--task {task!r}: say what the model does: {', '.join(TASKS)}, or a word of your own")
    if task in TASKS:
        if task == "classify" and evaluate is not None:
            raise SpecError("--eval measures boxes (mAP); a classifier has none")
        return
    near = difflib.get_close_matches(task.lower(), TASKS, n=1, cutoff=0.6)
    if near:
        raise SpecError(f"--task {task!r}: did you mean {near[0]!r}? The YOLO tasks are {', '.join(TASKS)}")
    if sizes or head is not None or evaluate is not None:
        raise SpecError(f"--size, --head and --eval belong to the tasks {', '.join(TASKS)}; {task!r} is fed arrays")
    if isinstance(calib, str | Path) and holds_images(calib):
        raise SpecError(f"{calib}: holds images, but the task {task!r} is fed arrays: give .npz, or a YOLO task")


def _check_options(calib: Any, *, float_only: bool, max_batch: int) -> None:
    if calib is None and not float_only:
        raise SpecError("calibration samples are needed for INT8; give --calib PATH, or --float-only to pack without")
    if calib is not None and float_only:
        raise SpecError("--float-only packs the model as it is; leave --calib out, or leave --float-only out for INT8")
    if isinstance(max_batch, bool) or not isinstance(max_batch, int) or not 1 <= max_batch <= 4096:
        raise SpecError(f"--max-batch {max_batch!r}: need a whole number from 1 to 4096")


def _check_measuring(evaluate: Any, *, split: str | None, max_drop: float | None, float_only: bool) -> None:
    if evaluate is None and (max_drop is not None or split is not None):
        flag = "--max-drop" if max_drop is not None else "--split"
        raise SpecError(f"{flag} needs labelled images to measure on; give --eval DIR")
    if max_drop is not None and not (math.isfinite(max_drop) and max_drop >= 0):
        raise SpecError(f"--max-drop {max_drop}: give points of mAP50-95, 0 or more (0.5 allows 45.0 to become 44.5)")
    if max_drop is not None and float_only:
        raise SpecError("--max-drop limits what INT8 loses; with --float-only there is no INT8")


def _open_set(model: ModelProto, calib: Any, setup: DetectorSetup | None, samples: int | None) -> CalibrationSet:
    return open_calibration(
        calib,
        model_inputs=input_specs(model),
        preprocess=setup.preprocess if setup is not None else None,
        resolution=setup.sizes if setup is not None else None,
        limit=samples,
    )


def _note_calibration(parts: BundleParts, calibration: CalibrationSet, setup: DetectorSetup | None) -> None:
    if setup is None:
        return
    parts.notes += note_uncalibrated(setup.sizes, calibration.shapes)
    if calibration.preprocess is None:
        note = "calibrated from arrays: whether they were prepared as serving prepares images was not checked"
        log.warning("%s", note)
        parts.notes.append(note)


def _measure(
    parts: BundleParts,
    setup: DetectorSetup,
    dataset: DetectionDataset,
    *,
    calib: Any,
    max_drop: float | None,
    quiet: bool,
) -> None:
    """Add the accuracy of what this machine runs: float, and the CPU form of INT8."""
    labels = {"float": "float", "int8": "cpu_int8"}
    measured = {label: parts.path(variant) for label, variant in labels.items() if variant in parts.models}
    parts.accuracy |= measure_accuracy(measured, setup=setup, dataset=dataset, quiet=quiet)
    shared = shared_images(calib, dataset)
    if shared:
        note = f"{shared} of the images that accuracy was measured on belong to the calibration set"
        log.warning("%s; the loss on other images may be larger", note)
        parts.notes.append(note)
    check_drop(parts.accuracy, max_drop=max_drop)


def _cost_shapes(model: ModelProto, setup: DetectorSetup | None) -> dict[str, tuple[int, ...]] | None:
    """Batch 1 at the largest size; None lets the counting choose and note its assumptions."""
    if setup is None:
        return None
    (spec,) = input_specs(model)
    size = max(setup.sizes, key=lambda item: item.pixels)
    batch = spec.shape[0] if isinstance(spec.shape[0], int) else 1
    return {spec.name: (batch, setup.preprocess.channel_count, size.height_px, size.width_px)}
