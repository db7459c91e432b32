"""Boxes, labels, masks, keypoints and class lists on a picture."""

from __future__ import annotations

import colorsys
from typing import TYPE_CHECKING, Any

import numpy as np

from edgeds.imagefile import ImageU8, import_cv2

if TYPE_CHECKING:
    from edgeds.pipelines.yolo.result import Result

Color = tuple[int, int, int]

# Lines between the 17 COCO person keypoints (nose, eyes, ears, shoulders, elbows, wrists, hips, knees, ankles).
PERSON_LINES = (
    (15, 13), (13, 11), (16, 14), (14, 12), (11, 12), (5, 11), (6, 12), (5, 6), (5, 7),
    (6, 8), (7, 9), (8, 10), (0, 1), (0, 2), (1, 3), (2, 4), (3, 5), (4, 6),
)  # fmt: skip


def class_color(cls: int) -> Color:
    """A BGR colour per class: hues a golden-ratio step apart, so neighbouring numbers differ clearly."""
    hue = (0.58 + cls * 0.61803398875) % 1.0
    red, green, blue = colorsys.hsv_to_rgb(hue, 0.78 if cls % 2 else 0.92, 0.95 if cls % 3 else 0.78)
    return round(blue * 255), round(green * 255), round(red * 255)


def draw_result(result: Result, canvas: ImageU8) -> ImageU8:
    """Draw on ``canvas`` (BGR uint8, changed in place) and return it. The weakest first, so the best stay on top."""
    cv2 = import_cv2("drawing")
    width_px = max(2, round(min(canvas.shape[:2]) / 300))
    order = list(range(len(result)))[::-1]
    if result.masks is not None:
        for index in order:
            _tint(canvas, result, index)
    for index in order:
        color = class_color(int(result.cls[index]))
        if result.obb is not None and (corners := result.corners) is not None:
            outline = np.rint(corners[index]).astype(np.int32)
            cv2.polylines(canvas, [outline], True, color, width_px, cv2.LINE_AA)
        else:
            x1, y1, x2, y2 = (round(float(value)) for value in result.xyxy[index])
            cv2.rectangle(canvas, (x1, y1), (x2, y2), color, width_px, cv2.LINE_AA)
        if result.keypoints is not None:
            _draw_keypoints(canvas, result.keypoints[index], color, width_px)
    for index in order:
        text = f"{result.label(index)} {float(result.conf[index]):.2f}"
        corner = (round(float(result.xyxy[index, 0])), round(float(result.xyxy[index, 1])))
        _draw_label(canvas, text, corner, class_color(int(result.cls[index])), width_px)
    for row, (cls, name, share) in enumerate(result.top_classes()):
        height = _label_height(width_px)
        _draw_label(canvas, f"{name} {share:.2f}", (0, (row + 1) * height), class_color(cls), width_px)
    return canvas


def _tint(canvas: ImageU8, result: Result, index: int) -> None:
    if result.masks is None:
        return
    left, top, part = result.masks.crop(index)
    region = canvas[top : top + part.shape[0], left : left + part.shape[1]]
    color = np.array(class_color(int(result.cls[index])), np.float32)
    region[part] = (region[part] * 0.55 + color * 0.45).astype(np.uint8)


def _draw_keypoints(canvas: ImageU8, points: Any, color: Color, width_px: int) -> None:
    cv2 = import_cv2()
    shown = points[:, 2] > 0.5 if points.shape[1] == 3 else np.ones(len(points), bool)
    # A keypoint outside any image (a wild prediction) would overflow the drawing routines.
    shown &= np.isfinite(points).all(axis=1) & (np.abs(points[:, :2]) < 1e5).all(axis=1)
    places = [
        (round(float(x)), round(float(y))) if ok else None for (x, y), ok in zip(points[:, :2], shown, strict=True)
    ]
    for first, second in PERSON_LINES if len(points) == 17 else ():
        if (start := places[first]) and (end := places[second]):
            cv2.line(canvas, start, end, color, width_px, cv2.LINE_AA)
    for place in places:
        if place is not None:
            cv2.circle(canvas, place, width_px + 1, (255, 255, 255), -1, cv2.LINE_AA)
            cv2.circle(canvas, place, width_px + 1, color, max(1, width_px // 2), cv2.LINE_AA)


def _label_height(width_px: int) -> int:
    return 12 + 7 * width_px // 2


def _draw_label(canvas: ImageU8, text: str, corner: tuple[int, int], color: Color, width_px: int) -> None:
    """A filled box with text, its lower left at ``corner``, moved to stay inside the picture."""
    cv2 = import_cv2()
    # The built-in fonts know ASCII only; other letters would come out as question marks byte by byte.
    text = text.encode("ascii", "replace").decode()
    height = _label_height(width_px)
    scale = height / 32
    thickness = max(1, width_px // 2)
    (text_width, text_height), _ = cv2.getTextSize(text, cv2.FONT_HERSHEY_SIMPLEX, scale, thickness)
    box_width = text_width + height // 2
    left = min(max(corner[0], 0), max(canvas.shape[1] - box_width, 0))
    top = min(max(corner[1] - height, 0), max(canvas.shape[0] - height, 0))
    cv2.rectangle(canvas, (left, top), (left + box_width, top + height), color, -1)
    luminance = 0.114 * color[0] + 0.587 * color[1] + 0.299 * color[2]
    ink = (0, 0, 0) if luminance > 140 else (255, 255, 255)
    baseline = (left + height // 4, top + (height + text_height) // 2)
    cv2.putText(canvas, text, baseline, cv2.FONT_HERSHEY_SIMPLEX, scale, ink, thickness, cv2.LINE_AA)
