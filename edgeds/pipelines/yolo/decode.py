"""Network outputs to candidate boxes, before suppression. float32 numpy, vectorised, any number of boxes.

Formulas: YOLOv5/v7 boxes from Wang et al., "Scaled-YOLOv4" (2 sigmoid - 0.5 and (2 sigmoid)^2 times the anchor); YOLOX
from Ge et al., "YOLOX" (cell + offset, exponential sizes); v8 and later are already in pixels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeds.errors import ModelError
from edgeds.pipelines.yolo.layout import HeadLayout
from edgeds.pipelines.yolo.shapes import STRIDE_SETS, cells_of
from edgeds.specs import Resolution

FloatArray = NDArray[np.float32]

MAX_CANDIDATES = 30_000
"""Candidates per image that reach suppression; the best are kept. Bounds time and memory for any input."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Candidates:
    """One image's boxes above the threshold, in pixels of the network input, best first.

    ``boxes`` is xyxy float32 [n, 4], or xywhr [n, 5] (centre, size, radians) for oriented boxes; ``extra`` float32
    [n, E] holds mask coefficients or keypoints.
    """

    boxes: FloatArray
    conf: FloatArray
    cls: NDArray[np.int64]
    extra: FloatArray

    def take(self, index: NDArray[Any]) -> Candidates:
        return Candidates(boxes=self.boxes[index], conf=self.conf[index], cls=self.cls[index], extra=self.extra[index])


def decode(
    outputs: Mapping[str, NDArray[Any]],
    layout: HeadLayout,
    *,
    input_size: Resolution,
    conf: float = 0.25,
    multi_label: bool = False,
    max_candidates: int = MAX_CANDIDATES,
) -> list[Candidates]:
    """Candidates of every image in a batch; ``outputs`` are the model's outputs with a leading batch axis.

    ``conf`` is a strict lower bound of the score. With ``multi_label`` a box counts once per class above it (as mAP is
    measured), else only with its best class. Rows with non-finite values are dropped. Raises ModelError when an output
    is missing or has another shape than the layout says.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        if layout.family == "v5_raw":
            images = _raw_levels(outputs, layout, input_size, conf)
        else:
            pred = _output(outputs, layout.output, rank=3)
            rows = pred if layout.rows_first else pred.transpose(0, 2, 1)
            _check_rows(rows, layout)
            images = list(rows)
        found = []
        for rows in images:
            if layout.family == "end2end":
                candidates = _end_to_end(rows, conf)
            else:
                candidates = _dense(rows, layout, input_size, conf, multi_label)
            found.append(_finish(candidates, layout, max_candidates))
    return found


def decode_scores(outputs: Mapping[str, NDArray[Any]], layout: HeadLayout) -> FloatArray:
    """Class probabilities [N, nc] of a classifier; a softmax is applied where the model ends in logits."""
    scores = _output(outputs, layout.output, rank=2)
    if scores.shape[1] != layout.classes:
        raise ModelError(f"output {layout.output!r} has {scores.shape[1]} scores, expected {layout.classes}")
    sums = scores.sum(axis=1)
    if scores.size and scores.min() >= 0 and np.abs(sums - 1).max() < 1e-2:
        return scores
    powers = np.exp(scores - scores.max(axis=1, keepdims=True))
    return (powers / powers.sum(axis=1, keepdims=True)).astype(np.float32)


def _output(outputs: Mapping[str, NDArray[Any]], name: str, *, rank: int) -> FloatArray:
    if name not in outputs:
        raise ModelError(f"the engine returned no output {name!r}; it returned {', '.join(outputs)}")
    array = np.asarray(outputs[name], np.float32)
    if array.ndim != rank:
        raise ModelError(f"output {name!r} has shape {list(array.shape)}, expected {rank} dimensions")
    return array


def _check_rows(rows: FloatArray, layout: HeadLayout) -> None:
    head = {"v8": 4, "end2end": 6}.get(layout.family, 5)
    want = head + layout.extra + (0 if layout.family == "end2end" else layout.classes)
    if rows.shape[1] != want:
        raise ModelError(
            f"output {layout.output!r} has {rows.shape[1]} values per box, the {layout.family} {layout.task} layout "
            f"with {layout.classes} classes has {want}; this model needs another head"
        )


def _dense(rows: FloatArray, layout: HeadLayout, input_size: Resolution, conf: float, multi_label: bool) -> Candidates:
    """Rows [values, A]: box, objectness (not in v8), class scores, extra."""
    first = 4 if layout.family == "v8" else 5
    if first == 5:
        # Both factors are at most one, so a box below the threshold by objectness alone cannot pass.
        near = np.flatnonzero(rows[4] > conf)
        boxes, values = near, rows[:, near]
        scores = values[5 : 5 + layout.classes] * values[4]
    else:
        boxes, values = np.arange(rows.shape[1]), rows
        scores = values[4 : 4 + layout.classes]
    if multi_label and layout.classes > 1:
        cls, index = np.nonzero(scores > conf)
        best = scores[cls, index]
    else:
        top = scores.max(axis=0) if scores.size else np.empty(0, np.float32)
        index = np.flatnonzero(top > conf)
        best = top[index]
        cls = scores[:, index].argmax(axis=0) if index.size else np.empty(0, np.int64)
    xywh = values[:4, index].T
    if layout.family == "yolox":
        xywh = _from_grid(xywh, boxes[index], layout, input_size, count=rows.shape[1])
    extra = values[first + layout.classes :, index].T
    return Candidates(boxes=xywh, conf=best, cls=cls.astype(np.int64), extra=extra)


def _end_to_end(rows: FloatArray, conf: float) -> Candidates:
    index = np.flatnonzero(rows[4] > conf)
    values = rows[:, index].T
    cls = values[:, 5]
    # Class numbers beyond any sensible list are padding or damage.
    values = values[np.isfinite(cls) & (cls > -0.5) & (cls < 1 << 20)]
    return Candidates(
        boxes=values[:, :4], conf=values[:, 4], cls=np.rint(values[:, 5]).astype(np.int64), extra=values[:, 6:]
    )


def _finish(found: Candidates, layout: HeadLayout, max_candidates: int) -> Candidates:
    """Corner or rotated form, finite rows only, best first, at most ``max_candidates``."""
    finite = np.isfinite(found.boxes).all(axis=1) & np.isfinite(found.conf) & np.isfinite(found.extra).all(axis=1)
    if not finite.all():
        found = found.take(np.flatnonzero(finite))
    if found.conf.size > max_candidates:
        found = found.take(np.argpartition(-found.conf, max_candidates)[:max_candidates])
    # Stable, so that equal scores keep the order of the boxes and results do not depend on the machine.
    found = found.take(np.argsort(-found.conf, kind="stable"))
    boxes, extra = found.boxes, found.extra
    if layout.task == "obb":
        boxes, extra = np.concatenate([boxes[:, :4], extra[:, :1]], axis=1), extra[:, 1:]
    elif layout.family != "end2end":
        half = boxes[:, 2:] * np.float32(0.5)
        boxes = np.concatenate([boxes[:, :2] - half, boxes[:, :2] + half], axis=1)
    return Candidates(
        boxes=np.ascontiguousarray(boxes), conf=found.conf, cls=found.cls, extra=np.ascontiguousarray(extra)
    )


def _raw_levels(
    outputs: Mapping[str, NDArray[Any]], layout: HeadLayout, input_size: Resolution, conf: float
) -> list[FloatArray]:
    """Raw levels [N, 3, H, W, 5+nc] (or channels first) to rows [5+nc, A'] per image, boxes under ``conf`` left out."""
    values = 5 + layout.classes
    levels = []
    for name in layout.levels:
        level = np.asarray(outputs[name], np.float32) if name in outputs else _output(outputs, name, rank=5)
        if level.ndim == 4 and level.shape[1] == 3 * values:
            level = level.reshape(level.shape[0], 3, values, *level.shape[2:]).transpose(0, 1, 3, 4, 2)
        if level.ndim != 5 or level.shape[1] != 3 or level.shape[4] != values:
            raise ModelError(f"output {name!r} has shape {list(level.shape)}, expected [N, 3, H, W, {values}]")
        levels.append(level)
    levels.sort(key=lambda level: -level.shape[2] * level.shape[3])
    images = []
    for image in range(levels[0].shape[0]):
        parts = [
            _raw_level(level[image], np.asarray(anchors, np.float32), input_size, conf)
            for level, anchors in zip(levels, layout.anchors, strict=True)
        ]
        images.append(np.ascontiguousarray(np.concatenate(parts).T))
    return images


def _raw_level(level: FloatArray, anchors: FloatArray, input_size: Resolution, conf: float) -> FloatArray:
    """One level of one image, [3, H, W, 5+nc] before the sigmoid, to [n, 5+nc] in pixels."""
    stride_y, stride_x = input_size.height_px / level.shape[1], input_size.width_px / level.shape[2]
    # Objectness is filtered before anything else is computed: most cells are background.
    box, row, column = np.nonzero(_sigmoid(level[..., 4]) > conf)
    picked = _sigmoid(level[box, row, column])
    cell = np.stack([column, row], axis=1).astype(np.float32)
    picked[:, :2] = (picked[:, :2] * 2 - 0.5 + cell) * np.array([stride_x, stride_y], np.float32)
    picked[:, 2:4] = (picked[:, 2:4] * 2) ** 2 * anchors.reshape(3, 2)[box]
    return picked


def _from_grid(
    xywh: FloatArray, index: NDArray[Any], layout: HeadLayout, input_size: Resolution, *, count: int
) -> FloatArray:
    """YOLOX: offsets from the cell corner in strides, sizes as the log of strides."""
    size = (input_size.height_px, input_size.width_px)
    strides = next((set_ for set_ in (layout.strides, *STRIDE_SETS) if cells_of(size, set_) == count), None)
    if strides is None:
        raise ModelError(
            f"output {layout.output!r} has {count} boxes, strides {layout.strides} at {input_size} give "
            f"{cells_of(size, layout.strides)}; pass head= with the model's strides"
        )
    cells = []
    for stride in strides:
        rows, columns = -(-size[0] // stride), -(-size[1] // stride)
        y, x = np.divmod(np.arange(rows * columns), columns)
        cells.append(np.stack([x, y, np.full_like(x, stride)], axis=1))
    grid = np.concatenate(cells).astype(np.float32)[index]
    step = grid[:, 2:]
    return np.concatenate([(xywh[:, :2] + grid[:, :2]) * step, np.exp(xywh[:, 2:]) * step], axis=1)


def _sigmoid(values: FloatArray) -> FloatArray:
    return (1 / (1 + np.exp(-np.clip(values, -80, 80)))).astype(np.float32, copy=False)
