"""Model and calibration images in, bundle out: quantize, check, describe, write."""

from __future__ import annotations

import datetime
import io
import json
import platform
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata as packages
from pathlib import Path
from typing import Any

import numpy as np

from edgeds import __version__
from edgeds.bundle import Manifest, write_bundle
from edgeds.compress.calibset import CalibrationSet, Feeds, open_calibration
from edgeds.compress.quantize import DEFAULT_METHOD, DEFAULT_PERCENTILE, QuantizeReport, quantize_model
from edgeds.errors import CalibrationError, SpecError
from edgeds.files import sha256_file
from edgeds.graph.cost import count_cost
from edgeds.graph.io import input_specs, load_model, output_specs, save_model
from edgeds.graph.session import open_session
from edgeds.pipelines.yolo.layout import layout_to_json
from edgeds.pipelines.yolo.metadata import TASKS
from edgeds.specs import Resolution, to_json
from edgeds.workshop.detector import DetectorSetup, describe_detector

MODEL_NAMES = {"int8": "model.onnx", "cpu_int8": "model.cpu.onnx", "float": "variants/float.onnx"}


@dataclass(frozen=True)
class _Parts:
    """What goes into the bundle, gathered before anything is written."""

    files: dict[str, Path | bytes]
    models: dict[str, str]
    golden: dict[str, np.ndarray]
    report: QuantizeReport | None = None
    accuracy: dict[str, Any] = field(default_factory=dict)


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
    max_drop: float | None = None,
    target: str | None = None,
    replace: bool = False,
    quiet: bool = False,
) -> Path:
    """Quantize ``model`` over ``calib`` and pack it with all that serving needs; returns the bundle's folder.

    ``task`` is a YOLO task (detect, segment, pose, obb, classify: preprocessing, head and names are read from the
    model, what is given wins) or any other word for a model that is fed arrays. ``calib`` is what
    ``compress.open_calibration`` takes. With ``evaluate`` (a labelled folder) the accuracy of the float and the INT8
    model is measured and stored; above ``max_drop`` points (of 100) of mAP50-95 lost, nothing is written.
    ``target`` names the board the bundle is meant for; it is recorded as given.

    Raises SpecError, ModelError or CalibrationError; nothing is left behind on failure.
    """
    source, folder_out = Path(model), Path(out)
    _check_arguments(folder_out, calib, float_only=float_only, replace=replace, evaluate=evaluate, max_drop=max_drop)
    setup = None
    if task in TASKS:
        setup = describe_detector(source, task=task, head=head, names=names, sizes=sizes)
    elif sizes or head is not None:
        raise SpecError(f"--size and --head belong to the tasks {', '.join(TASKS)}; {task!r} is fed arrays")
    with tempfile.TemporaryDirectory(prefix="edgeds-") as folder:
        if float_only:
            parts = _float_parts(source, Path(folder))
        else:
            calibration = _open_set(source, calib, setup, samples)
            parts = _int8_parts(source, calibration, Path(folder), method=method, percentile=percentile, quiet=quiet)
        if evaluate is not None and setup is not None:
            parts.accuracy.update(measure_accuracy(parts, setup, Path(evaluate), quiet=quiet))
            _check_drop(parts.accuracy, max_drop)
        manifest = _manifest(source, task, setup, parts, names=names, max_batch=max_batch, target=target)
        cost = count_cost(load_model(_content_path(parts)), _cost_shapes(source, setup))
        parts.files["cost.json"] = _json_bytes(to_json(cost))
        if parts.golden:
            parts.files["golden.npz"] = _npz_bytes(parts.golden)
        return write_bundle(folder_out, files=parts.files, manifest=manifest, replace=replace)


def _check_arguments(
    target: Path,
    calib: Any,
    *,
    float_only: bool,
    replace: bool,
    evaluate: str | Path | None,
    max_drop: float | None,
) -> None:
    """Refuse before the long work what would only fail after it."""
    if calib is None and not float_only:
        raise SpecError("calibration samples are needed for INT8; give --calib PATH, or --float-only to pack without")
    if target.exists() and not replace and (not target.is_dir() or any(target.iterdir())):
        raise SpecError(f"{target} exists and is not an empty directory; choose another path or remove it first")
    if max_drop is not None and evaluate is None:
        raise SpecError("--max-drop needs labelled images to measure on; give --eval DIR")


def _open_set(source: Path, calib: Any, setup: DetectorSetup | None, samples: int | None) -> CalibrationSet:
    return open_calibration(
        calib,
        model_inputs=input_specs(load_model(source)),
        preprocess=setup.preprocess if setup is not None else None,
        resolution=setup.sizes if setup is not None else None,
        limit=samples,
    )


def _float_parts(source: Path, folder: Path) -> _Parts:
    files = _model_files(load_model(source), "model.onnx", folder)
    return _Parts(files=files, models={"float": "model.onnx"}, golden={})


def _int8_parts(
    source: Path, calibration: CalibrationSet, folder: Path, *, method: str, percentile: float, quiet: bool
) -> _Parts:
    report = quantize_model(
        source,
        calibration,
        out=folder / "model.onnx",
        cpu_out=folder / "model.cpu.onnx",
        method=method,
        percentile=percentile,
        quiet=quiet,
    )
    files: dict[str, Path | bytes] = {}
    models = dict(MODEL_NAMES)
    for name in ("model.onnx", "model.cpu.onnx"):
        files |= {path.name: path for path in folder.glob(f"{name}*") if path.name in (name, f"{name}.data")}
    files |= _model_files(load_model(source), models["float"], folder)
    files["ranges.json"] = Path(report.ranges)
    accuracy = {"sqnr_db": report.sqnr_db, "cpu_sqnr_db": report.cpu_sqnr_db}
    golden = _golden(report.checked_feeds, {"float": source, "int8": folder / "model.onnx"})
    return _Parts(files=files, models=models, golden=golden, report=report, accuracy=accuracy)


def _model_files(model: Any, name: str, folder: Path) -> dict[str, Path | bytes]:
    """Save a self-contained copy under its bundle name; external data, if any, is a file of the bundle too."""
    path = save_model(model, folder / "copy" / name)
    return {
        str(Path(name).parent / item.name) if "/" in name else item.name: item
        for item in path.parent.iterdir()
        if item.name in (path.name, f"{path.name}.data")
    }


def _golden(feeds: Sequence[Feeds], models: Mapping[str, Path]) -> dict[str, np.ndarray]:
    """``input/<sample>/<name>``, ``float/<sample>/<output>`` and ``int8/<sample>/<output>`` arrays."""
    arrays = {f"input/{index}/{name}": array for index, sample in enumerate(feeds) for name, array in sample.items()}
    for label, path in models.items():
        session = open_session(path)
        outputs = [value.name for value in session.get_outputs()]
        needed = {value.name for value in session.get_inputs()}
        for index, sample in enumerate(feeds):
            values = session.run(outputs, {name: array for name, array in sample.items() if name in needed})
            arrays |= {f"{label}/{index}/{name}": value for name, value in zip(outputs, values, strict=True)}
    return {name: array for name, array in arrays.items() if isinstance(array, np.ndarray)}


def measure_accuracy(parts: _Parts, setup: DetectorSetup, data: Path, *, quiet: bool) -> dict[str, Any]:
    """mAP of the float model and of the INT8 model as this machine runs it, on the same images."""
    from edgeds.pipelines.yolo import YoloPipeline
    from edgeds.report.accuracy import evaluate_detector
    from edgeds.report.datasets import open_detection_dataset

    dataset = open_detection_dataset(data, names=setup.names)
    result: dict[str, Any] = {"data": data.name, "images": len(dataset)}
    for label, variant in (("float", "float"), ("int8", "cpu_int8")):
        if variant not in parts.models:
            continue
        path = parts.files[parts.models[variant]]
        assert isinstance(path, Path)
        with YoloPipeline.from_model(
            path, names=setup.names, head=setup.layout, preprocess=setup.preprocess, buckets=setup.sizes
        ) as pipeline:
            scores = evaluate_detector(pipeline, dataset, quiet=quiet)
        result |= {f"{label}_map50_95": scores["map50_95"], f"{label}_map50": scores["map50"]}
    return result


def _check_drop(accuracy: Mapping[str, Any], max_drop: float | None) -> None:
    if max_drop is None or "int8_map50_95" not in accuracy:
        return
    drop = 100.0 * (accuracy["float_map50_95"] - accuracy["int8_map50_95"])
    if drop > max_drop:
        raise CalibrationError(
            f"INT8 loses {drop:.2f} points of mAP50-95 ({100 * accuracy['float_map50_95']:.2f} to "
            f"{100 * accuracy['int8_map50_95']:.2f}), more than the {max_drop:g} allowed; try another --method or more "
            "calibration images"
        )


def _manifest(
    source: Path,
    task: str,
    setup: DetectorSetup | None,
    parts: _Parts,
    *,
    names: Mapping[int, str] | Sequence[str] | None,
    max_batch: int,
    target: str | None,
) -> Manifest:
    model = load_model(source)
    metadata = {entry.key: entry.value for entry in model.metadata_props}
    labels = dict(names) if isinstance(names, Mapping) else dict(enumerate(names or ()))
    report = parts.report
    return Manifest(
        task=task,
        models=parts.models,
        inputs=input_specs(model),
        outputs=output_specs(model),
        preprocess=to_json(setup.preprocess) if setup is not None else None,
        preprocess_digest=setup.preprocess.digest() if setup is not None else None,
        head=layout_to_json(setup.layout) if setup is not None else None,
        names=setup.names if setup is not None else labels,
        buckets=tuple(setup.sizes) if setup is not None else (),
        max_batch=max_batch,
        precision="int8" if report is not None else "float",
        calibration=_calibration(report) if report is not None else None,
        accuracy=parts.accuracy or None,
        target={"name": target} if target is not None else None,
        license=metadata.get("license") or "unknown",
        provenance={
            "edgeds": __version__,
            "source": source.name,
            "source_sha256": sha256_file(source),
            "created_utc": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "python": platform.python_version(),
            **{name: packages.version(name) for name in ("onnx", "onnxruntime", "numpy")},
        },
    )


def _calibration(report: QuantizeReport) -> dict[str, Any]:
    return {
        "method": report.method,
        "samples": report.samples,
        "set_digest": report.set_digest,
        "shapes": report.shapes,
        "int8_flops_share": report.int8_flops_share,
        "float_nodes": to_json(report.float_nodes),
    }


def _content_path(parts: _Parts) -> Path:
    path = parts.files[parts.models.get("int8", parts.models.get("float", ""))]
    assert isinstance(path, Path)
    return path


def _cost_shapes(source: Path, setup: DetectorSetup | None) -> dict[str, tuple[int, ...]] | None:
    """Batch 1 at the largest size; None lets the counting choose and note its assumptions."""
    if setup is None:
        return None
    (spec,) = input_specs(load_model(source))
    size = max(setup.sizes, key=lambda item: item.pixels)
    batch = spec.shape[0] if isinstance(spec.shape[0], int) else 1
    return {spec.name: (batch, setup.preprocess.channel_count, size.height_px, size.width_px)}


def _json_bytes(data: Any) -> bytes:
    return (json.dumps(data, indent=1, allow_nan=False) + "\n").encode()


def _npz_bytes(arrays: Mapping[str, np.ndarray]) -> bytes:
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)  # type: ignore[arg-type]
    return buffer.getvalue()
