"""Image to network input and back: the one copy that calibration, accuracy checks and serving share.

Coordinates are continuous: pixel ``i`` covers ``[i, i + 1)``, the image spans ``[0, width]``. In this convention
``cv2.resize`` maps ``x`` to exactly ``x * resized_w / source_w``, so the forward map is ``x' = x * gain_x + left_px``
and the inverse uses the same integers. The gains of the two axes differ a little, as the resized size is rounded.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from edgeds.errors import InputError, SpecError
from edgeds.imagefile import IMAGE_SUFFIXES, MAX_IMAGE_PIXELS, ImageU8, import_cv2, read_image, to_bgr
from edgeds.specs import Resolution, to_json

__all__ = [
    "IMAGE_SUFFIXES",
    "MAX_IMAGE_PIXELS",
    "ImagePreprocess",
    "Placement",
    "place_image",
    "prepare_batch",
    "prepare_image",
    "read_image",
    "to_bgr",
]

FloatArray = NDArray[np.float32]


@dataclass(frozen=True, kw_only=True)
class ImagePreprocess:
    """How pixels become network input: value = (pixel * scale - mean[c]) / std[c], channels in the stated order.

    ``letterbox`` keeps the aspect ratio and pads with ``pad_value`` (a pixel value, 0..255) on both sides, enlarging
    small images as YOLO does; ``stretch`` fills the target with two gains; ``crop`` scales the shorter side and cuts
    the centre, as classifiers are trained. ``gray`` uses the first mean and std only. ``stride`` is what both sides of
    an input resolution must divide by.
    """

    mode: Literal["letterbox", "stretch", "crop"] = "letterbox"
    pad_value: int = 114
    channels: Literal["rgb", "bgr", "gray"] = "rgb"
    scale: float = 1 / 255
    mean: tuple[float, float, float] = (0.0, 0.0, 0.0)
    std: tuple[float, float, float] = (1.0, 1.0, 1.0)
    stride: int = 32

    def __post_init__(self) -> None:
        if self.mode not in ("letterbox", "stretch", "crop"):
            raise SpecError(f"preprocess mode {self.mode!r}: choose letterbox, stretch or crop")
        if self.channels not in ("rgb", "bgr", "gray"):
            raise SpecError(f"preprocess channels {self.channels!r}: choose rgb, bgr or gray")
        if not 0 <= self.pad_value <= 255:
            raise SpecError(f"preprocess pad_value {self.pad_value}: must be a pixel value, 0 to 255")
        if not 1 <= self.stride <= 1024:
            raise SpecError(f"preprocess stride {self.stride}: must be 1 to 1024")
        if not (math.isfinite(self.scale) and self.scale > 0):
            raise SpecError(f"preprocess scale {self.scale}: must be positive and finite")
        for name, values in (("mean", self.mean), ("std", self.std)):
            if len(values) != 3 or not all(math.isfinite(value) for value in values):
                raise SpecError(f"preprocess {name} {values}: needs three finite numbers")
        if min(self.std) <= 0:
            raise SpecError(f"preprocess std {self.std}: must be positive")

    @property
    def channel_count(self) -> int:
        return 1 if self.channels == "gray" else 3

    def digest(self) -> str:
        """Hex SHA-256 over every parameter; equal objects give equal digests on every machine."""
        plain = to_json(self)
        plain["scale"] = float(self.scale)
        plain["mean"], plain["std"] = [float(v) for v in self.mean], [float(v) for v in self.std]
        return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Where a source image lies in the network input: ``x_target = x_source * gain_x + left_px``, y likewise.

    ``crop`` gives negative offsets. All inverses use exactly the integers that the forward step used.
    """

    gain_x: float
    gain_y: float
    left_px: int
    top_px: int
    source: Resolution
    target: Resolution

    def to_source(self, points_xy: NDArray[Any]) -> FloatArray:
        """Map points [..., 2] from network-input pixels to source pixels; float32, not clipped."""
        points = np.asarray(points_xy, np.float64)
        moved = (points - (self.left_px, self.top_px)) / (self.gain_x, self.gain_y)
        return moved.astype(np.float32)

    def to_target(self, points_xy: NDArray[Any]) -> FloatArray:
        """Map points [..., 2] from source pixels to network-input pixels; float32."""
        points = np.asarray(points_xy, np.float64)
        return (points * (self.gain_x, self.gain_y) + (self.left_px, self.top_px)).astype(np.float32)

    def boxes_to_source(self, xyxy: NDArray[Any], *, clip: bool = False) -> FloatArray:
        """Map boxes [..., 4] (x1, y1, x2, y2) to source pixels; with ``clip`` cut to the image's borders."""
        boxes = np.asarray(xyxy)
        moved = self.to_source(boxes.reshape(*boxes.shape[:-1], 2, 2))
        if clip:
            limits = np.array([self.source.width_px, self.source.height_px], np.float32)
            np.clip(moved, 0.0, limits, out=moved)
        return moved.reshape(boxes.shape)

    def boxes_to_target(self, xyxy: NDArray[Any]) -> FloatArray:
        """Map boxes [..., 4] from source pixels to network-input pixels."""
        boxes = np.asarray(xyxy)
        return self.to_target(boxes.reshape(*boxes.shape[:-1], 2, 2)).reshape(boxes.shape)

    @property
    def content_px(self) -> tuple[int, int, int, int]:
        """(left, top, right, bottom) of the source image inside the network input, whole pixels, cut to the input."""
        right = self.left_px + round(self.source.width_px * self.gain_x)
        bottom = self.top_px + round(self.source.height_px * self.gain_y)
        return (
            max(self.left_px, 0),
            max(self.top_px, 0),
            min(right, self.target.width_px),
            min(bottom, self.target.height_px),
        )


def place_image(source: Resolution, target: Resolution, *, mode: str = "letterbox") -> Placement:
    """Choose the resized size and offsets (whole pixels) of ``source`` in ``target``; pure arithmetic, no pixels."""
    ratio_x, ratio_y = target.width_px / source.width_px, target.height_px / source.height_px
    if mode == "stretch":
        width, height = target.width_px, target.height_px
    else:
        ratio = max(ratio_x, ratio_y) if mode == "crop" else min(ratio_x, ratio_y)
        width, height = max(1, round(source.width_px * ratio)), max(1, round(source.height_px * ratio))
    return Placement(
        gain_x=width / source.width_px,
        gain_y=height / source.height_px,
        left_px=(target.width_px - width) // 2,
        top_px=(target.height_px - height) // 2,
        source=source,
        target=target,
    )


def prepare_image(
    image: NDArray[Any],
    preprocess: ImagePreprocess,
    resolution: Resolution,
    *,
    out: FloatArray | None = None,
    where: str = "image",
) -> tuple[FloatArray, Placement]:
    """Turn one image (anything ``to_bgr`` takes) into network input.

    Returns a contiguous float32 array [C, H, W] (C = 1 for gray) and the placement that undoes it. ``out`` is written
    when given (same shape, float32, contiguous) and returned. Raises InputError for an image that cannot be used and
    SpecError for an ``out`` of the wrong shape.
    """
    cv2 = import_cv2("image preprocessing")
    pixels: NDArray[Any] = to_bgr(image, where=where)
    shape = (preprocess.channel_count, resolution.height_px, resolution.width_px)
    if out is None:
        out = np.empty(shape, np.float32)
    elif out.shape != shape or out.dtype != np.float32 or not out.flags.c_contiguous:
        raise SpecError(
            f"prepare_image: out must be contiguous float32 {list(shape)}, got {out.dtype} {list(out.shape)}"
        )
    if preprocess.channels == "gray":
        pixels = cv2.cvtColor(pixels, cv2.COLOR_BGR2GRAY)
    placement = place_image(Resolution(*pixels.shape[:2]), resolution, mode=preprocess.mode)
    canvas = _paint(pixels, placement, preprocess.pad_value)
    planes = [canvas] if canvas.ndim == 2 else list(cv2.split(canvas))
    if preprocess.channels == "rgb":
        planes.reverse()
    for index, (plane, table) in enumerate(zip(planes, _tables(preprocess), strict=False)):
        # A table look-up converts, scales and normalises in one pass, and gives each pixel value one exact result.
        cv2.LUT(plane, table, dst=out[index])
    return out, placement


def prepare_batch(
    images: Sequence[NDArray[Any]], preprocess: ImagePreprocess, resolution: Resolution
) -> tuple[FloatArray, list[Placement]]:
    """Prepare several images for one resolution: float32 [N, C, H, W] and one placement each."""
    if not images:
        raise InputError("prepare_batch: no images were given")
    batch = np.empty((len(images), preprocess.channel_count, resolution.height_px, resolution.width_px), np.float32)
    placements = [
        prepare_image(image, preprocess, resolution, out=batch[index], where=f"image {index}")[1]
        for index, image in enumerate(images)
    ]
    return batch, placements


def _paint(pixels: NDArray[Any], placement: Placement, pad_value: int) -> ImageU8:
    """Resize the source and put it on a canvas of the target size, uint8 [H, W] or [H, W, 3]."""
    cv2 = import_cv2()
    source, target = placement.source, placement.target
    width, height = round(source.width_px * placement.gain_x), round(source.height_px * placement.gain_y)
    if width * height > MAX_IMAGE_PIXELS:
        raise InputError(
            f"an image of {source} (height x width) is too narrow to crop to {target}; use letterbox, or cut it first"
        )
    resized = pixels
    if (width, height) != (source.width_px, source.height_px):
        resized = cv2.resize(pixels, (width, height), interpolation=cv2.INTER_LINEAR)
    cut_x, cut_y = max(-placement.left_px, 0), max(-placement.top_px, 0)
    resized = resized[cut_y : cut_y + target.height_px, cut_x : cut_x + target.width_px]
    height, width = resized.shape[:2]
    if (height, width) == (target.height_px, target.width_px):
        return np.ascontiguousarray(resized)
    left, top = max(placement.left_px, 0), max(placement.top_px, 0)
    border = (top, target.height_px - height - top, left, target.width_px - width - left)
    return cv2.copyMakeBorder(resized, *border, cv2.BORDER_CONSTANT, value=(pad_value,) * 3)


@lru_cache(maxsize=64)
def _tables(preprocess: ImagePreprocess) -> tuple[FloatArray, ...]:
    """Per channel, the float32 result of each of the 256 pixel values (computed in float64)."""
    values = np.arange(256, dtype=np.float64) * preprocess.scale
    tables = []
    for mean, std in zip(preprocess.mean, preprocess.std, strict=True):
        table = ((values - mean) / std).astype(np.float32)
        table.setflags(write=False)
        tables.append(table)
    return tuple(tables)
