"""Instance masks, kept as coefficients and computed at source size on demand: 300 full masks would be gigabytes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeds.imagefile import import_cv2
from edgeds.preproc import Placement

BoolArray = NDArray[np.bool_]
FloatArray = NDArray[np.float32]


class Masks:
    """Masks of one image, one per detection.

    ``masks[i]`` is bool [H, W] at source size, ``masks.crop(i)`` only the part inside the box, ``masks.data`` all of
    them as bool [n, H, W] (large), ``masks.polygons(i)`` outlines in source pixels.
    """

    def __init__(
        self, coefficients: FloatArray, *, prototypes: FloatArray, boxes_xyxy: FloatArray, placement: Placement
    ) -> None:
        """``coefficients`` [n, K], ``prototypes`` [K, h, w] over the network input, ``boxes_xyxy`` in source pixels."""
        self._coefficients = coefficients
        # A copy: the caller's array is a view of a whole batch.
        self._prototypes = np.array(prototypes, np.float32, order="C")
        self._boxes = boxes_xyxy
        self._placement = placement

    def __len__(self) -> int:
        return int(self._coefficients.shape[0])

    def __getitem__(self, index: int) -> BoolArray:
        source = self._placement.source
        full = np.zeros((source.height_px, source.width_px), bool)
        left, top, part = self.crop(index)
        full[top : top + part.shape[0], left : left + part.shape[1]] = part
        return full

    def __iter__(self) -> Iterator[BoolArray]:
        return (self[index] for index in range(len(self)))

    @property
    def data(self) -> BoolArray:
        source = self._placement.source
        return np.array(list(self), bool).reshape(len(self), source.height_px, source.width_px)

    def crop(self, index: int) -> tuple[int, int, BoolArray]:
        """(left, top, mask) of the whole pixels that the box touches; the mask is empty for an empty box."""
        cv2 = import_cv2("instance masks")
        place = self._placement
        x1, y1, x2, y2 = (float(value) for value in self._boxes[index])
        left, top = max(int(np.floor(x1)), 0), max(int(np.floor(y1)), 0)
        right, bottom = min(int(np.ceil(x2)), place.source.width_px), min(int(np.ceil(y2)), place.source.height_px)
        if right <= left or bottom <= top:
            return left, top, np.zeros((0, 0), bool)
        logits = np.tensordot(self._coefficients[index], self._prototypes, axes=1).astype(np.float32)
        # Source pixel centre -> network input -> prototype cell, the same placement as for the boxes (report B80).
        cell_x = logits.shape[1] / place.target.width_px
        cell_y = logits.shape[0] / place.target.height_px
        step = (place.gain_x * cell_x, place.gain_y * cell_y)
        start_x = ((left + 0.5) * place.gain_x + place.left_px) * cell_x - 0.5
        start_y = ((top + 0.5) * place.gain_y + place.top_px) * cell_y - 0.5
        matrix = np.array([[step[0], 0, start_x], [0, step[1], start_y]])
        flags = cv2.INTER_LINEAR | cv2.WARP_INVERSE_MAP
        size = (right - left, bottom - top)
        sampled = cv2.warpAffine(logits, matrix, size, flags=flags, borderMode=cv2.BORDER_REPLICATE)
        return left, top, np.asarray(sampled) > 0

    def polygons(self, index: int, *, tolerance_px: float = 0.5) -> list[FloatArray]:
        """Outer outlines, float32 [points, 2] in source pixels, largest first; holes are not listed."""
        cv2 = import_cv2("mask outlines")
        left, top, part = self.crop(index)
        if not part.any():
            return []
        found: Any = cv2.findContours(part.astype(np.uint8), cv2.RETR_EXTERNAL, cv2.CHAIN_APPROX_SIMPLE)[-2]
        outlines = [cv2.approxPolyDP(outline, tolerance_px, True).reshape(-1, 2) for outline in found]
        outlines = [outline for outline in outlines if len(outline) >= 3]
        outlines.sort(key=lambda outline: -cv2.contourArea(outline))
        # Contours run through pixel centres; coordinates here are continuous.
        origin = np.array([left + 0.5, top + 0.5], np.float32)
        return [outline.astype(np.float32) + origin for outline in outlines]
