"""One image's share of the network outputs to a Result: decode, suppress, map back to the source image."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeds.errors import ModelError
from edgeds.pipelines.yolo.decode import Candidates, decode, decode_scores
from edgeds.pipelines.yolo.layout import HeadLayout
from edgeds.pipelines.yolo.masks import Masks
from edgeds.pipelines.yolo.options import DetectOptions
from edgeds.pipelines.yolo.result import Result, corners_of
from edgeds.pipelines.yolo.suppress import nms
from edgeds.preproc import Placement

FloatArray = NDArray[np.float32]


def results_from_outputs(
    outputs: Mapping[str, NDArray[Any]],
    layout: HeadLayout,
    *,
    placements: list[Placement],
    names: Mapping[int, str],
    options: DetectOptions,
) -> list[Result]:
    """Results of a batch, one per placement (all with one target). Raises ModelError for outputs that do not fit."""
    if not placements:
        return []
    if layout.task == "classify":
        probs = decode_scores(outputs, layout)
        _check_count(probs.shape[0], placements)
        return [
            Result(names=names, task="classify", size=place.source, probs=row.copy())
            for row, place in zip(probs, placements, strict=True)
        ]
    found = decode(
        outputs,
        layout,
        input_size=placements[0].target,
        conf=options.conf,
        multi_label=options.multi_label,
    )
    _check_count(len(found), placements)
    prototypes = outputs.get(layout.proto) if layout.proto else None
    if layout.proto and (prototypes is None or prototypes.ndim != 4 or prototypes.shape[1] != layout.mask_coefficients):
        raise ModelError(f"output {layout.proto!r} is not [N, {layout.mask_coefficients}, h, w] mask prototypes")
    return [
        _result(
            _suppress(candidates, layout, options),
            layout,
            placement=place,
            names=names,
            prototypes=prototypes[index] if prototypes is not None else None,
        )
        for index, (candidates, place) in enumerate(zip(found, placements, strict=True))
    ]


def _suppress(found: Candidates, layout: HeadLayout, options: DetectOptions) -> Candidates:
    if not layout.needs_nms:
        return found.take(np.arange(min(found.conf.size, options.max_det)))
    keep = nms(
        found.boxes,
        found.conf,
        classes=None if options.agnostic else found.cls,
        iou=options.iou,
        max_det=options.max_det,
    )
    return found.take(keep)


def _result(
    found: Candidates,
    layout: HeadLayout,
    *,
    placement: Placement,
    names: Mapping[int, str],
    prototypes: FloatArray | None,
) -> Result:
    obb = keypoints = masks = None
    if layout.task == "obb":
        obb = _oriented_to_source(found.boxes, placement)
        corners = corners_of(obb)
        boxes = np.concatenate([corners.min(axis=1), corners.max(axis=1)], axis=1)
        limits = np.array([placement.source.width_px, placement.source.height_px] * 2, np.float32)
        boxes = np.clip(boxes, 0, limits)
    else:
        boxes = placement.boxes_to_source(found.boxes, clip=True)
    if layout.task == "pose":
        keypoints = found.extra.reshape(-1, layout.keypoints, layout.keypoint_dims).copy()
        keypoints[..., :2] = placement.to_source(keypoints[..., :2])
    if layout.task == "segment" and prototypes is not None:
        masks = Masks(found.extra, prototypes=prototypes, boxes_xyxy=boxes, placement=placement)
    return Result(
        names=names,
        task=layout.task,
        size=placement.source,
        xyxy=boxes,
        conf=found.conf,
        cls=found.cls,
        masks=masks,
        keypoints=keypoints,
        obb=obb,
    )


def _oriented_to_source(xywhr: FloatArray, placement: Placement) -> FloatArray:
    """Map centre, and each half axis as a vector, since the two gains may differ; the angle stays in (-pi, pi]."""
    gains = np.array([placement.gain_x, placement.gain_y], np.float32)
    cos, sin = np.cos(xywhr[:, 4]), np.sin(xywhr[:, 4])
    along = np.stack([cos, sin], axis=1) * xywhr[:, 2:3] / gains
    across = np.stack([-sin, cos], axis=1) * xywhr[:, 3:4] / gains
    centre = placement.to_source(xywhr[:, :2])
    width, height = np.hypot(along[:, 0], along[:, 1]), np.hypot(across[:, 0], across[:, 1])
    angle = np.where(width > 0, np.arctan2(along[:, 1], along[:, 0]), xywhr[:, 4])
    return np.column_stack([centre, width, height, angle]).astype(np.float32)


def _check_count(got: int, placements: list[Placement]) -> None:
    if got != len(placements):
        raise ModelError(
            f"the engine returned {got} images for a batch of {len(placements)}; check its batch dimension"
        )
