"""What a YOLO pipeline returns for one image."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeds.errors import InputError, SpecError
from edgeds.files import atomic_path
from edgeds.imagefile import ImageU8, import_cv2, read_image, to_bgr
from edgeds.pipelines.yolo.masks import Masks
from edgeds.specs import Resolution

FloatArray = NDArray[np.float32]


@dataclass(frozen=True, kw_only=True, eq=False)
class Result:
    """Detections of one image, best first, coordinates in pixels of the source image.

    ``xyxy`` float32 [n, 4], clipped to the image; ``conf`` float32 [n]; ``cls`` int64 [n]; ``names`` class number to
    label. By task: ``masks`` (see ``Masks``), ``keypoints`` float32 [n, K, 2 or 3] (x, y, visibility), ``obb``
    float32 [n, 5] (centre-x, centre-y, width, height, radians; ``xyxy`` is its upright bounding box), ``probs``
    float32 [classes] of a classifier. ``error`` is set, and everything else empty, when the image could not be used.
    """

    names: Mapping[int, str]
    task: str = "detect"
    size: Resolution | None = None
    xyxy: FloatArray = field(default_factory=lambda: np.zeros((0, 4), np.float32))
    conf: FloatArray = field(default_factory=lambda: np.zeros(0, np.float32))
    cls: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    masks: Masks | None = None
    keypoints: FloatArray | None = None
    obb: FloatArray | None = None
    probs: FloatArray | None = None
    source: str = ""
    image: ImageU8 | None = None
    path: Path | None = None
    error: InputError | None = None
    timings_ms: Mapping[str, float] = field(default_factory=dict)

    def __len__(self) -> int:
        return int(self.conf.size)

    def __bool__(self) -> bool:
        return True  # an image without objects is still a result

    @property
    def ok(self) -> bool:
        return self.error is None

    @property
    def corners(self) -> FloatArray | None:
        """Corners of the oriented boxes, float32 [n, 4, 2], in order around the box; None for other tasks."""
        return None if self.obb is None else corners_of(self.obb)

    def label(self, index: int) -> str:
        """The name of detection ``index``; the class number where the model has no name for it."""
        return self.names.get(int(self.cls[index]), str(int(self.cls[index])))

    def top_classes(self, count: int = 5) -> list[tuple[int, str, float]]:
        """(class, label, probability) of a classifier, most likely first."""
        if self.probs is None:
            return []
        order = np.argsort(-self.probs, kind="stable")[:count]
        return [(int(i), self.names.get(int(i), str(int(i))), float(self.probs[i])) for i in order]

    def plot(self, image: NDArray[Any] | None = None) -> ImageU8:
        """A copy of the image (BGR) with everything drawn on it; ``image`` replaces the one that was processed."""
        from edgeds.pipelines.yolo.draw import draw_result

        pixels = to_bgr(image) if image is not None else self._pixels()
        return draw_result(self, pixels.copy())

    def save(self, path: str | Path) -> Path:
        """Write ``plot()`` as an image, the format by the suffix; atomic. Raises SpecError for another format."""
        cv2 = import_cv2("writing images")
        path = Path(path)
        suffix = path.suffix.lower()
        if suffix not in (".jpg", ".jpeg", ".png", ".bmp", ".webp"):
            raise SpecError(f"{path}: choose a name that ends in .jpg, .png, .bmp or .webp")
        done, data = cv2.imencode(suffix, self.plot())
        if not done:
            raise InputError(f"{path}: the picture could not be encoded as {suffix}")
        with atomic_path(path) as temporary:
            temporary.write_bytes(data.tobytes())
        return path

    def to_json(self) -> dict[str, Any]:
        """Plain values: ``source``, ``size`` [height, width], ``detections``, and ``classes`` or ``error``."""
        out: dict[str, Any] = {"source": self.source, "task": self.task}
        if self.size is not None:
            out["size"] = [self.size.height_px, self.size.width_px]
        out["detections"] = [self._detection(index) for index in range(len(self))]
        if self.probs is not None:
            out["classes"] = [{"cls": c, "label": n, "conf": round(p, 6)} for c, n, p in self.top_classes()]
        if self.error is not None:
            out["error"] = str(self.error)
        return out

    def _detection(self, index: int) -> dict[str, Any]:
        out: dict[str, Any] = {
            "xyxy": _rounded(self.xyxy[index]),
            "conf": round(float(self.conf[index]), 6),
            "cls": int(self.cls[index]),
            "label": self.label(index),
        }
        if self.obb is not None:
            out["xywhr"] = [round(float(value), 5) for value in self.obb[index]]
            out["corners"] = [_rounded(point) for point in corners_of(self.obb[index : index + 1])[0]]
        if self.keypoints is not None:
            out["keypoints"] = [_rounded(point) for point in self.keypoints[index]]
        if self.masks is not None:
            out["polygons"] = [[_rounded(point) for point in line] for line in self.masks.polygons(index)]
        return out

    def _pixels(self) -> ImageU8:
        if self.image is not None:
            return self.image
        if self.path is not None:
            return read_image(self.path)
        if self.error is not None:
            raise self.error
        raise InputError("this result kept no image; pass the one to draw on: plot(image)")


def corners_of(xywhr: FloatArray) -> FloatArray:
    """Corners [n, 4, 2] of oriented boxes [n, 5]."""
    centre = xywhr[:, None, :2]
    cos, sin = np.cos(xywhr[:, 4]), np.sin(xywhr[:, 4])
    along = np.stack([cos, sin], axis=1) * xywhr[:, 2:3] / 2
    across = np.stack([-sin, cos], axis=1) * xywhr[:, 3:4] / 2
    offsets = np.stack([along + across, along - across, -along - across, -along + across], axis=1)
    return np.asarray(centre + offsets, np.float32)


def _rounded(values: FloatArray) -> list[float]:
    return [round(float(value), 3) for value in values]
