"""COCO mean average precision of a detector, computed by pycocotools."""

from __future__ import annotations

import contextlib
import io
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from edgeds.errors import InputError, MissingDependency, SpecError
from edgeds.progress import track
from edgeds.report.datasets import DetectionDataset, Sample

if TYPE_CHECKING:
    from edgeds.pipelines.yolo import Result, YoloPipeline

CONF = 0.001
IOU = 0.7
MAX_DET = 300


def evaluate_detector(
    pipeline: YoloPipeline,
    dataset: DetectionDataset,
    *,
    limit: int | None = None,
    quiet: bool = False,
) -> dict[str, Any]:
    """Run a pipeline over a data set and measure boxes as COCO does (100 best per image count).

    Scores down to 0.001, suppression at 0.7, up to 300 detections, one box may count for several classes. Returns
    ``metric`` "map50_95" and its ``value``, ``map50_95``, ``map50``, ``map75``, ``per_class`` (label to map50_95,
    classes that occur), ``images``, ``objects``, ``seconds``. Raises InputError when an image cannot be read (a
    figure over fewer images would mislead), SpecError for a classifier and for classes the model does not have.
    """
    if pipeline.task == "classify":
        raise SpecError("this model classifies; mAP needs a model that finds boxes")
    names = pipeline.names
    samples = dataset.samples[:limit]
    highest = max((int(sample.cls.max()) for sample in samples if sample.cls.size), default=-1)
    if names and highest > max(names):
        raise SpecError(f"{dataset.root}: holds class {highest}, the model has {len(names)} classes")
    start = time.perf_counter()
    measured = pipeline.with_options(conf=CONF, iou=IOU, max_det=MAX_DET, multi_label=True)
    results = []
    paths = [sample.path for sample in samples]
    for result in track(measured.predict_each(paths), what="evaluating", total=len(paths), unit="image", quiet=quiet):
        if result.error is not None:
            raise InputError(f"{result.error}; remove the image or its entry, an average over the rest would mislead")
        results.append(slim(result))
    out = coco_map(samples, results, names={**dataset.names, **names})
    return {**out, "images": len(samples), "seconds": round(time.perf_counter() - start, 3)}


def slim(result: Result) -> Result:
    """The result without pixels and masks, so that a long evaluation stays small."""
    from dataclasses import replace

    return replace(result, image=None, masks=None, keypoints=None)


def coco_map(samples: Sequence[Sample], results: Sequence[Result], *, names: dict[int, str]) -> dict[str, Any]:
    """mAP of results against samples (same order); keys as in ``evaluate_detector`` without images and seconds."""
    try:
        from pycocotools.coco import COCO
        from pycocotools.cocoeval import COCOeval
    except ImportError as error:
        raise MissingDependency("pycocotools", extra="workshop", purpose="measuring mAP", cause=error) from error
    if not any(sample.cls.size for sample in samples):
        raise SpecError("the data set has no objects to find; mAP is not defined")
    classes = sorted({int(value) for sample in samples for value in sample.cls})
    with contextlib.redirect_stdout(io.StringIO()):  # the library prints its own report
        truth = COCO()
        truth.dataset = _truth(samples, results, classes)
        truth.createIndex()
        found = _detections(results, classes)
        scores: Any = COCOeval(truth, _detected(truth, found, COCO), "bbox")
        scores.evaluate()
        scores.accumulate()
    precision = scores.eval["precision"][:, :, :, 0, -1]  # [thresholds, recalls, classes], all areas, 100 detections
    return {
        "metric": "map50_95",
        "value": _mean(precision),
        "map50_95": _mean(precision),
        "map50": _mean(precision[0]),
        "map75": _mean(precision[5]),
        "objects": int(sum(sample.cls.size for sample in samples)),
        "per_class": {
            names.get(cls, str(cls)): _mean(precision[:, :, index])
            for index, cls in enumerate(classes)
            if (precision[:, :, index] > -1).any()
        },
    }


def _truth(samples: Sequence[Sample], results: Sequence[Result], classes: Sequence[int]) -> dict[str, Any]:
    images: list[dict[str, Any]] = []
    notes: list[dict[str, Any]] = []
    for index, (sample, result) in enumerate(zip(samples, results, strict=True), start=1):
        if result.size is None:
            raise InputError(f"{sample.path}: has no result")
        size = result.size
        images.append({"id": index, "width": size.width_px, "height": size.height_px})
        for row, (cls, box) in enumerate(zip(sample.cls, sample.boxes_px(size), strict=True)):
            width, height = float(box[2] - box[0]), float(box[3] - box[1])
            notes.append(
                {
                    "id": len(notes) + 1,
                    "image_id": index,
                    "category_id": int(cls),
                    "bbox": [float(box[0]), float(box[1]), width, height],
                    "area": float(sample.area_px[row]) if sample.area_px is not None else width * height,
                    "iscrowd": int(sample.crowd[row]) if sample.crowd is not None else 0,
                }
            )
    return {"images": images, "annotations": notes, "categories": [{"id": cls, "name": str(cls)} for cls in classes]}


def _detections(results: Sequence[Result], classes: Sequence[int]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Rows of image id, x, y, width, height, score, class; classes that never occur in the labels are left out."""
    parts = []
    for index, result in enumerate(results, start=1):
        count = len(result)
        boxes = result.xyxy.astype(np.float64)
        sizes = boxes[:, 2:] - boxes[:, :2]
        parts.append(np.column_stack([np.full(count, float(index)), boxes[:, :2], sizes, result.conf, result.cls]))
    rows = np.concatenate(parts) if parts else np.zeros((0, 7))
    return rows[np.isin(rows[:, 6], classes)]


def _detected(truth: Any, rows: np.ndarray[Any, np.dtype[np.float64]], coco: Any) -> Any:
    if len(rows):
        return truth.loadRes(rows)
    # loadRes cannot take an empty list; no detections at all is a valid (bad) result.
    empty = coco()
    empty.dataset = {"images": truth.dataset["images"], "annotations": [], "categories": truth.dataset["categories"]}
    empty.createIndex()
    return empty


def _mean(precision: np.ndarray[Any, np.dtype[Any]]) -> float:
    """Mean over what is defined (-1 marks classes without objects)."""
    valid = precision[precision > -1]
    return round(float(valid.mean()), 6) if valid.size else 0.0
