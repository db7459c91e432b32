"""What a user may choose about detections, and the values a model implies when nobody chose."""

from __future__ import annotations

import math
from dataclasses import dataclass

from edgeds.errors import SpecError
from edgeds.pipelines.yolo.layout import HeadLayout
from edgeds.pipelines.yolo.metadata import YoloMetadata
from edgeds.preproc import ImagePreprocess
from edgeds.specs import Resolution, TensorSpec

DEFAULT_SIDE_PX = {"classify": 224, "obb": 1024}


@dataclass(frozen=True, kw_only=True)
class DetectOptions:
    """Thresholds. The default suppression is class-aware: boxes of different classes never remove each other.

    ``conf`` lowest score; ``iou`` overlap above which the weaker box goes; ``max_det`` detections per image;
    ``agnostic`` lets all classes compete; ``multi_label`` returns a box once per class above ``conf`` (for mAP).
    """

    conf: float = 0.25
    iou: float = 0.7
    max_det: int = 300
    agnostic: bool = False
    multi_label: bool = False

    def __post_init__(self) -> None:
        for name in ("conf", "iou"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
                raise SpecError(f"{name} {value!r}: must be a number from 0 to 1")
            if math.isnan(value):
                raise SpecError(f"{name}: must be a number from 0 to 1, got nan")
        if isinstance(self.max_det, bool) or not isinstance(self.max_det, int) or not 1 <= self.max_det <= 30_000:
            raise SpecError(f"max_det {self.max_det!r}: must be a whole number from 1 to 30000")


def default_preprocess(layout: HeadLayout, *, metadata: YoloMetadata, input_spec: TensorSpec) -> ImagePreprocess:
    """The preprocessing a model of this layout was trained with. Raises SpecError for an input that is no image.

    YOLO: RGB (or gray for a one-channel input, report B90), 0..1, letterbox with 114. YOLOX: BGR, 0..255. Classifiers:
    centre crop; those of YOLOv5 normalise with the ImageNet statistics.
    """
    shape = input_spec.shape
    channels = shape[1] if len(shape) == 4 else None
    if isinstance(channels, int) and channels not in (1, 3):
        hint = "; the input looks channels-last, export it as NCHW" if shape[-1] in (1, 3) else ""
        raise SpecError(f"input {input_spec}: expected an image [N, 1 or 3, H, W]{hint}")
    if len(shape) != 4:
        raise SpecError(f"input {input_spec}: expected an image [N, 1 or 3, H, W]")
    order = "gray" if 1 in (channels, metadata.channels) else "rgb"
    stride = metadata.stride or max(layout.strides)
    if layout.task == "classify":
        imagenet = metadata.generation == "v5"
        return ImagePreprocess(
            mode="crop",
            channels=order,  # type: ignore[arg-type]
            mean=(0.485, 0.456, 0.406) if imagenet else (0.0, 0.0, 0.0),
            std=(0.229, 0.224, 0.225) if imagenet else (1.0, 1.0, 1.0),
            stride=1,
        )
    if layout.family in ("yolox", "yolox_decoded"):
        return ImagePreprocess(channels="gray" if order == "gray" else "bgr", scale=1.0, stride=stride)
    return ImagePreprocess(channels=order, stride=stride)  # type: ignore[arg-type]


def default_buckets(
    layout: HeadLayout, *, metadata: YoloMetadata, input_spec: TensorSpec, stride: int
) -> tuple[Resolution, ...]:
    """One bucket: the model's fixed size, else the size it was exported at, else 640 (rounded up to the stride)."""
    fixed = fixed_resolution(input_spec)
    if fixed is not None:
        return (fixed,)
    side = DEFAULT_SIDE_PX.get(layout.task, 640)
    size = metadata.size or (side, side)
    dims = []
    for axis, value in zip((2, 3), size, strict=True):
        dim = input_spec.shape[axis]
        dims.append(dim if isinstance(dim, int) else -(-value // stride) * stride)
    return (Resolution(*dims),)


def fixed_resolution(input_spec: TensorSpec) -> Resolution | None:
    """Height and width of an NCHW input when both are numbers."""
    height, width = input_spec.shape[2], input_spec.shape[3]
    return Resolution(height, width) if isinstance(height, int) and isinstance(width, int) else None
