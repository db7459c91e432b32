"""Greedy non-maximum suppression, by class or across classes, for upright and oriented boxes. float32 numpy.

Boxes of different classes are compared only by their class number; nothing is shifted, so large coordinates and many
classes cannot make boxes meet or lose precision.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float32]

_BLOCK = 256
_EPSILON = np.float32(1e-7)


def nms(
    boxes: NDArray[Any],
    scores: NDArray[Any],
    *,
    classes: NDArray[Any] | None = None,
    iou: float = 0.7,
    max_det: int = 300,
) -> NDArray[np.int64]:
    """Indices of the boxes that stay, best score first, at most ``max_det``.

    ``boxes`` [n, 4] xyxy or [n, 5] xywhr (radians). A box goes when its overlap with a better one that stays is more
    than ``iou``; with ``classes`` [n] only boxes of the same class compete, without it all do. Equal scores keep their
    order. Oriented boxes use the probabilistic IoU of Llerena et al., "Gaussian Bounding Boxes and Probabilistic
    Intersection-over-Union for Object Detection" (arXiv 2106.06072), as oriented YOLO models are trained with.
    """
    boxes = np.asarray(boxes, np.float32)
    if boxes.shape[0] == 0 or max_det < 1:
        return np.empty(0, np.int64)
    order = np.argsort(-np.asarray(scores, np.float32), kind="stable")
    groups = [order] if classes is None else _by_class(order, np.asarray(classes))
    rotated = boxes.shape[1] == 5
    form = _gaussians(boxes) if rotated else boxes
    overlap = probabilistic_iou if rotated else box_iou
    # No group can give more than max_det of the result, so each may stop there.
    kept = [group[_greedy(form[group], overlap, iou, max_det)] for group in groups]
    rank = np.empty(order.size, np.int64)
    rank[order] = np.arange(order.size)
    together = np.concatenate(kept)
    return together[np.argsort(rank[together])][:max_det]


def box_iou(first: FloatArray, second: FloatArray) -> FloatArray:
    """Intersection over union of xyxy boxes [n, 4] and [m, 4]: float32 [n, m]; 0 where both are empty."""
    left, right = first[:, None], second[None]
    width = np.minimum(left[..., 2], right[..., 2]) - np.maximum(left[..., 0], right[..., 0])
    height = np.minimum(left[..., 3], right[..., 3]) - np.maximum(left[..., 1], right[..., 1])
    shared = np.maximum(width, 0) * np.maximum(height, 0)
    union = _area(first)[:, None] + _area(second)[None] - shared
    return shared / np.maximum(union, _EPSILON)


def probabilistic_iou(first: FloatArray, second: FloatArray) -> FloatArray:
    """1 - Hellinger distance of the Gaussians [n, 5] and [m, 5] from ``_gaussians``: float32 [n, m]."""
    x1, y1, a1, b1, c1 = np.moveaxis(first[:, None], -1, 0)
    x2, y2, a2, b2, c2 = np.moveaxis(second[None], -1, 0)
    a, b, c = a1 + a2, b1 + b2, c1 + c2
    dx, dy = x1 - x2, y1 - y2
    determinant = np.maximum(a * b - c * c, _EPSILON)
    near = (a * dy * dy + b * dx * dx - 2 * c * dx * dy) / determinant / 4
    product = np.maximum(a1 * b1 - c1 * c1, 0) * np.maximum(a2 * b2 - c2 * c2, 0)
    shape = np.log(determinant / (4 * np.sqrt(product) + _EPSILON) + _EPSILON) / 2
    distance = np.sqrt(1 - np.exp(-np.clip(near + shape, 0, 100)) + _EPSILON)
    return 1 - distance


def _greedy(boxes: FloatArray, overlap: Any, limit: float, max_det: int) -> NDArray[np.int64]:
    """Positions that stay among boxes sorted best first.

    Works in blocks: what stays of a block is settled from its own small overlap matrix, then removes boxes from the
    rest in one array operation. This keeps memory at block x n and the Python loop short.
    """
    alive = np.ones(boxes.shape[0], bool)
    kept: list[int] = []
    start = 0
    while start < boxes.shape[0] and len(kept) < max_det:
        block = start + np.flatnonzero(alive[start:])[:_BLOCK]
        if block.size == 0:
            break
        inside = overlap(boxes[block], boxes[block]) > limit
        open_ = np.ones(block.size, bool)
        chosen = []
        for position in range(block.size):
            if open_[position]:
                chosen.append(position)
                open_[position:] &= ~inside[position, position:]
        kept += block[chosen].tolist()
        start = int(block[-1]) + 1
        rest = start + np.flatnonzero(alive[start:])
        if rest.size and len(kept) < max_det:
            alive[rest] = ~(overlap(boxes[block[chosen]], boxes[rest]) > limit).any(axis=0)
    return np.array(kept[:max_det], np.int64)


def _by_class(order: NDArray[Any], classes: NDArray[Any]) -> list[NDArray[Any]]:
    """Split sorted positions into one group per class, each still sorted."""
    labels = classes[order]
    grouped = np.argsort(labels, kind="stable")
    edges = np.flatnonzero(np.diff(labels[grouped])) + 1
    return [order[part] for part in np.split(grouped, edges)]


def _area(boxes: FloatArray) -> FloatArray:
    return np.maximum(boxes[:, 2] - boxes[:, 0], 0) * np.maximum(boxes[:, 3] - boxes[:, 1], 0)


def _gaussians(xywhr: FloatArray) -> FloatArray:
    """Centre and covariance (xx, yy, xy) of a uniform density over each oriented box: [n, 5]."""
    width, height = xywhr[:, 2] ** 2 / 12, xywhr[:, 3] ** 2 / 12
    cos, sin = np.cos(xywhr[:, 4]), np.sin(xywhr[:, 4])
    xx = width * cos**2 + height * sin**2
    yy = width * sin**2 + height * cos**2
    return np.stack([xywhr[:, 0], xywhr[:, 1], xx, yy, (width - height) * cos * sin], axis=1)
