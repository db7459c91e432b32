"""What the workshop measures before a bundle is written: accuracy on labelled images, speed on this CPU."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from edgeds.errors import CalibrationError, MissingDependency
from edgeds.files import real_path
from edgeds.imagefile import IMAGE_SUFFIXES
from edgeds.pipelines.yolo import YoloPipeline
from edgeds.preproc import ImagePreprocess
from edgeds.report.accuracy import evaluate_detector
from edgeds.report.datasets import DetectionDataset, open_detection_dataset
from edgeds.specs import Resolution
from edgeds.workshop.detector import DetectorSetup, describe_detector
from edgeds.workshop.speed import compare_cpu_speed

log = logging.getLogger("edgeds.workshop")

SPEED_SECONDS = 1.0
"""About how long float and INT8 are compared for."""


def open_labels(data: Path, *, split: str | None, setup: DetectorSetup) -> DetectionDataset:
    """The labelled images to measure on, checked against the model's classes. Raises SpecError, MissingDependency."""
    if importlib.util.find_spec("pycocotools") is None:  # found out now, not after an hour of calibration
        raise MissingDependency("pycocotools", extra="workshop", purpose="measuring mAP")
    return open_detection_dataset(data, split=split, names=setup.names)


def measure_accuracy(
    models: Mapping[str, Path], *, setup: DetectorSetup, dataset: DetectionDataset, quiet: bool
) -> dict[str, Any]:
    """mAP (shares, 0 to 1) of each model on the same images: ``<label>_map50_95`` and ``<label>_map50``."""
    found: dict[str, Any] = {"data": dataset.root.name, "split": dataset.split, "images": len(dataset)}
    for label, path in models.items():
        with YoloPipeline.from_model(
            path, names=setup.names, head=setup.layout, preprocess=setup.preprocess, buckets=setup.sizes
        ) as pipeline:
            scores = evaluate_detector(pipeline, dataset, quiet=quiet)
        found |= {f"{label}_map50_95": scores["map50_95"], f"{label}_map50": scores["map50"]}
    return found


def detection_metric(
    model: str | Path,
    *,
    data: str | Path,
    split: str | None = None,
    size: Resolution | None = None,
    preprocess: ImagePreprocess | None = None,
) -> Callable[[Path], float]:
    """The function that measures mAP50-95 (points of 100) of a form of this YOLO over labelled images.

    Raises SpecError for a model that is not a known detector, and what opening the labels raises.
    """
    setup = describe_detector(model, sizes=(size,) if size is not None else (), preprocess=preprocess)
    dataset = open_labels(Path(data), split=split, setup=setup)

    def measure(path: Path) -> float:
        found = measure_accuracy({"tried": path}, setup=setup, dataset=dataset, quiet=True)
        return 100.0 * float(found["tried_map50_95"])

    return measure


def check_drop(accuracy: Mapping[str, Any], *, max_drop: float | None) -> None:
    """Raise CalibrationError when INT8 loses more than ``max_drop`` points (of 100) of mAP50-95."""
    if max_drop is None:
        return
    before, after = 100 * accuracy["float_map50_95"], 100 * accuracy["int8_map50_95"]
    if before - after > max_drop:
        raise CalibrationError(
            f"INT8 loses {before - after:.2f} points of mAP50-95 ({before:.2f} to {after:.2f}), more than the "
            f"{max_drop:g} allowed; try another --method or more calibration images"
        )


def shared_images(calib: Any, dataset: DetectionDataset) -> int:
    """How many of the labelled images also belong to the calibration set (by path, as far as paths are known)."""
    used: Iterable[Any] = ()
    if isinstance(calib, str | Path):
        used = (path for path in Path(calib).rglob("*") if path.suffix.lower() in IMAGE_SUFFIXES)
    elif isinstance(calib, list | tuple):
        used = (item for item in calib if isinstance(item, str | Path))
    known = {real_path(Path(path)) for path in used}
    return sum(real_path(sample.path) in known for sample in dataset.samples)


def measure_speedup(float_model: Path, cpu_model: Path, feeds: Mapping[str, np.ndarray]) -> float:
    """How many times faster the CPU form of the INT8 model is than float on this machine; below 1 it is logged."""
    ratio = round(compare_cpu_speed(float_model, cpu_model, feeds=feeds, seconds=SPEED_SECONDS), 3)
    if ratio < 1:
        log.warning(
            "the INT8 model is slower than the float model on this CPU (%.2f times its speed); run the bundle with "
            "--precision float here. This says nothing about a GPU",
            ratio,
        )
    return ratio
