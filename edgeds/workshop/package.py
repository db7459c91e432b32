"""Model and calibration images in, bundle out: quantize, check, describe, write."""

from __future__ import annotations

import contextlib
import difflib
import io
import json
import logging
import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from onnx import ModelProto

from edgeds.bundle import write_bundle
from edgeds.bundle.manifest import MANIFEST_NAME
from edgeds.bundle.temporary import TemporaryFolder
from edgeds.compress.calibset import CalibrationSet, Feeds, holds_images, open_calibration
from edgeds.compress.quantize import DEFAULT_METHOD, DEFAULT_PERCENTILE, QuantizeReport, quantize_model
from edgeds.errors import SpecError
from edgeds.graph.cost import count_cost
from edgeds.graph.io import input_specs, load_model, save_model
from edgeds.graph.session import open_session
from edgeds.pipelines.yolo.metadata import TASKS, parse_names
from edgeds.progress import stage
from edgeds.report.datasets import DetectionDataset
from edgeds.specs import Budget, Resolution, to_json
from edgeds.workshop.describe import build_manifest, describe_calibration, note_uncalibrated
from edgeds.workshop.detector import DetectorSetup, describe_detector
from edgeds.workshop.halfmodels import NAMES as HALF_NAMES
from edgeds.workshop.halfmodels import make_half_models
from edgeds.workshop.measure import check_drop, measure_accuracy, measure_speedup, open_labels, shared_images
from edgeds.workshop.outfolder import claim_folder, writing_errors
from edgeds.workshop.planning import parse_target, plan_parts

log = logging.getLogger("edgeds.workshop")

FLOAT_NAME = "variants/float.onnx"
MAX_GOLDEN_BYTES = 256 << 20
"""Golden samples are there to compare a device with; very large ones are left out."""

Files = dict[str, Path | bytes]


@dataclass
class _Parts:
    """What goes into the bundle, gathered before anything is written."""

    files: Files
    models: dict[str, str]
    report: QuantizeReport | None = None
    notes: list[str] = field(default_factory=list)
    accuracy: dict[str, Any] = field(default_factory=dict)
    speedup: float | None = None

    def path(self, variant: str) -> Path:
        """Where the file of a model variant lies before it is packed."""
        content = self.files[self.models[variant]]
        assert isinstance(content, Path)
        return content


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
    with claim_folder(folder_out, replace=replace, ours=_bundle_entries(folder_out), what="a bundle"):
        loaded = load_model(source)
        setup = describe_detector(source, task=task, head=head, names=names, sizes=sizes) if task in TASKS else None
        dataset = open_labels(Path(evaluate), split=split, setup=setup) if evaluate is not None and setup else None
        calibration = None if float_only else _open_set(loaded, calib, setup, samples)
        with _work_folder() as folder:
            parts = _float_parts(loaded, folder, name="model.onnx" if float_only else FLOAT_NAME)
            if calibration is not None:
                _quantize(parts, source, calibration, folder, method=method, percentile=percentile, quiet=quiet)
                _note_calibration(parts, calibration, setup)
            if dataset is not None and setup is not None:
                _measure(parts, setup, dataset, calib=calib, max_drop=max_drop, quiet=quiet)
            cost = _count(parts, shapes=_cost_shapes(loaded, setup))
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


def _count(parts: _Parts, *, shapes: Any) -> dict[str, Any]:
    """Per-layer costs of what the device runs, also put among the files."""
    model = load_model(parts.path("int8" if "int8" in parts.models else "float"))
    cost: dict[str, Any] = to_json(count_cost(model, shapes))
    parts.files["cost.json"] = _json_bytes(cost)
    return cost


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


def _bundle_entries(out: Path) -> set[str]:
    """What an older bundle at ``out`` may hold at its top; nothing when there is no manifest."""
    with writing_errors(out):
        return {item.name for item in out.iterdir()} if (out / MANIFEST_NAME).is_file() else set()


@contextlib.contextmanager
def _work_folder() -> Iterator[Path]:
    """A temporary folder; what the file system refuses (it may be small) ends in one sentence that names it."""
    with writing_errors(Path(tempfile.gettempdir())), contextlib.ExitStack() as stack:
        folder = TemporaryFolder()  # its kind is removed by the next run when this one is killed
        stack.callback(folder.remove)
        yield folder.root


def _open_set(model: ModelProto, calib: Any, setup: DetectorSetup | None, samples: int | None) -> CalibrationSet:
    return open_calibration(
        calib,
        model_inputs=input_specs(model),
        preprocess=setup.preprocess if setup is not None else None,
        resolution=setup.sizes if setup is not None else None,
        limit=samples,
    )


def _quantize(
    parts: _Parts,
    source: Path,
    calibration: CalibrationSet,
    folder: Path,
    *,
    method: str,
    percentile: float,
    quiet: bool,
) -> None:
    """Add the INT8 models, their ranges, golden samples and what was measured of them."""
    parts.models = {"int8": "model.onnx", "cpu_int8": "model.cpu.onnx", **parts.models}
    parts.report = quantize_model(
        source,
        calibration,
        out=folder / "model.onnx",
        cpu_out=folder / "model.cpu.onnx",
        method=method,
        percentile=percentile,
        quiet=quiet,
    )
    for name in ("model.onnx", "model.cpu.onnx"):
        parts.files |= _with_side_file(folder / name, name)
    parts.files["ranges.json"] = Path(parts.report.ranges)
    parts.accuracy |= {"sqnr_db": parts.report.sqnr_db, "cpu_sqnr_db": parts.report.cpu_sqnr_db}
    feeds = parts.report.checked_feeds
    with stage("running golden samples", quiet=quiet):
        golden = _golden(feeds, {"float": parts.path("float"), "int8": parts.path("int8")})
        if golden:
            parts.files["golden.npz"] = _npz_bytes(golden)
    with stage("timing INT8 against float", quiet=quiet):
        parts.speedup = measure_speedup(parts.path("float"), parts.path("cpu_int8"), feeds[0])
    half = make_half_models(
        parts.path("float"),
        parts.path("int8"),
        ranges=Path(parts.report.ranges),
        feeds=feeds,
        folder=folder / "half",
        quiet=quiet,
    )
    for variant, path in half.paths.items():
        parts.models[variant] = HALF_NAMES[variant]
        parts.files |= _with_side_file(path, HALF_NAMES[variant])
    parts.accuracy |= half.accuracy
    parts.notes += half.notes


def _note_calibration(parts: _Parts, calibration: CalibrationSet, setup: DetectorSetup | None) -> None:
    if setup is None:
        return
    parts.notes += note_uncalibrated(setup.sizes, calibration.shapes)
    if calibration.preprocess is None:
        note = "calibrated from arrays: whether they were prepared as serving prepares images was not checked"
        log.warning("%s", note)
        parts.notes.append(note)


def _measure(
    parts: _Parts, setup: DetectorSetup, dataset: DetectionDataset, *, calib: Any, max_drop: float | None, quiet: bool
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


def _float_parts(model: ModelProto, folder: Path, *, name: str) -> _Parts:
    """A self-contained copy under its name in the bundle."""
    return _Parts(files=_with_side_file(save_model(model, folder / "copy" / name), name), models={"float": name})


def _with_side_file(path: Path, name: str) -> Files:
    side = path.with_name(f"{path.name}.data")
    return {name: path, **({f"{name}.data": side} if side.exists() else {})}  # weights above 1 GiB lie beside it


def _golden(feeds: Sequence[Feeds], models: Mapping[str, Path]) -> dict[str, np.ndarray]:
    """``input/<sample>/<name>``, ``float/<sample>/<output>`` and ``int8/<sample>/<output>`` arrays."""
    sessions = {label: open_session(path) for label, path in models.items()}
    golden: dict[str, np.ndarray] = {}
    left = MAX_GOLDEN_BYTES
    for index, sample in enumerate(feeds):
        arrays = {f"input/{index}/{name}": array for name, array in sample.items()}
        for label, session in sessions.items():
            outputs = [value.name for value in session.get_outputs()]
            needed = {value.name for value in session.get_inputs()}
            values = session.run(outputs, {name: array for name, array in sample.items() if name in needed})
            arrays |= {f"{label}/{index}/{name}": value for name, value in zip(outputs, values, strict=True)}
        left -= sum(array.nbytes for array in arrays.values() if isinstance(array, np.ndarray))
        if left < 0:
            break
        # Only plain numbers are read back: text and sequences are left out.
        golden |= {name: a for name, a in arrays.items() if isinstance(a, np.ndarray) and a.dtype.kind in "biufc"}
    return golden


def _cost_shapes(model: ModelProto, setup: DetectorSetup | None) -> dict[str, tuple[int, ...]] | None:
    """Batch 1 at the largest size; None lets the counting choose and note its assumptions."""
    if setup is None:
        return None
    (spec,) = input_specs(model)
    size = max(setup.sizes, key=lambda item: item.pixels)
    batch = spec.shape[0] if isinstance(spec.shape[0], int) else 1
    return {spec.name: (batch, setup.preprocess.channel_count, size.height_px, size.width_px)}


def _json_bytes(data: Any) -> bytes:
    return (json.dumps(data, indent=1, allow_nan=False) + "\n").encode()


def _npz_bytes(arrays: Mapping[str, np.ndarray]) -> bytes:
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)  # type: ignore[arg-type]
    return buffer.getvalue()
