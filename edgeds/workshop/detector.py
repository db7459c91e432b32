"""What a detector needs around its graph: layout, preprocessing, names and sizes, from the model itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onnx import ModelProto

from edgeds.errors import SpecError
from edgeds.graph.io import input_specs, load_model, output_specs
from edgeds.pipelines.yolo.layout import HeadLayout, choose_layout
from edgeds.pipelines.yolo.metadata import YoloMetadata, parse_metadata, parse_names
from edgeds.pipelines.yolo.options import default_buckets, default_preprocess
from edgeds.preproc import ImagePreprocess
from edgeds.specs import Resolution, TensorSpec


@dataclass(frozen=True, kw_only=True)
class DetectorSetup:
    """All that calibration and the bundle's manifest say about a detector."""

    layout: HeadLayout
    preprocess: ImagePreprocess
    names: dict[int, str]
    sizes: tuple[Resolution, ...]


def model_metadata(model: ModelProto) -> dict[str, str]:
    """The model's metadata_props as a dict."""
    return {entry.key: entry.value for entry in model.metadata_props}


def describe_detector(
    model_path: str | Path,
    *,
    task: str | None = None,
    head: str | Mapping[str, Any] | None = None,
    names: Mapping[int, str] | Sequence[str] | None = None,
    sizes: Sequence[Resolution] = (),
    preprocess: ImagePreprocess | None = None,
) -> DetectorSetup:
    """Read a YOLO model's metadata and shapes; what is given wins. Raises SpecError when they do not decide."""
    model = load_model(model_path)
    metadata = model_metadata(model)
    known = parse_metadata(metadata)
    spec = _image_input(model, where=str(model_path))
    labels = parse_names(names) if names is not None else dict(known.names or {})
    override: Any = head
    if task is not None and not isinstance(head, Mapping):
        override = {"task": task, **({"family": head} if head is not None else {})}
    layout = choose_layout(
        metadata, output_specs(model), override=override, input_spec=spec, classes=len(labels) or None
    )
    if task is not None and layout.task != task:
        raise SpecError(f"{model_path}: --task {task}, but the model's outputs are those of a {layout.task} model")
    chosen = preprocess or default_preprocess(layout, metadata=known, input_spec=spec)
    buckets = tuple(dict.fromkeys(sizes)) or default_buckets(
        layout, metadata=known, input_spec=spec, stride=chosen.stride
    )
    _check_sizes(buckets, spec, chosen, where=str(model_path))
    return DetectorSetup(
        layout=layout,
        preprocess=chosen,
        names=labels or {index: f"class{index}" for index in range(layout.classes)},
        sizes=buckets,
    )


def image_setup(
    model_path: str | Path, *, size: Resolution | None, preprocess: ImagePreprocess | None
) -> tuple[ImagePreprocess, Resolution]:
    """Preprocessing and size to calibrate any image model with: a YOLO's own, else what is given or the defaults.

    Raises SpecError when neither the model nor the caller says a size.
    """
    model = load_model(model_path)
    metadata = model_metadata(model)
    spec = _image_input(model, where=str(model_path))
    known = parse_metadata(metadata)
    if preprocess is None and (known.task is not None or known.names is not None):
        setup = describe_detector(model_path, sizes=(size,) if size is not None else ())
        return setup.preprocess, setup.sizes[0]
    chosen = preprocess or _plain_preprocess(spec, known)
    height, width = spec.shape[2], spec.shape[3]
    if isinstance(height, int) and isinstance(width, int):
        fixed = Resolution(height, width)
        if size is not None and size != fixed:
            raise SpecError(f"{model_path}: input {spec} has the fixed size {fixed}; leave --size out or use {fixed}")
        return chosen, fixed
    if size is None:
        if known.size is None:
            raise SpecError(f"{model_path}: input {spec} has no fixed size; pass --size HxW")
        size = Resolution(*known.size)
    return chosen, size


def _plain_preprocess(spec: TensorSpec, known: YoloMetadata) -> ImagePreprocess:
    return ImagePreprocess(channels="gray" if spec.shape[1] == 1 else "rgb", stride=known.stride or 1)


def _image_input(model: ModelProto, *, where: str) -> TensorSpec:
    inputs = input_specs(model)
    if len(inputs) != 1 or len(inputs[0].shape) != 4 or not inputs[0].dtype.startswith("float"):
        listed = "; ".join(map(str, inputs))
        raise SpecError(f"{where}: images fit a model with one float input [N, C, H, W], this one has: {listed}")
    return inputs[0]


MAX_PIXELS = 4096 * 4096
"""Of one input image; activations take tens of times its memory."""


def _check_sizes(sizes: Sequence[Resolution], spec: TensorSpec, preprocess: ImagePreprocess, *, where: str) -> None:
    for size in sizes:
        if size.pixels > MAX_PIXELS:
            raise SpecError(f"{where}: size {size} has more than the {MAX_PIXELS:,} pixels a network input may have")
        for dim, pixels in zip(spec.shape[2:], (size.height_px, size.width_px), strict=True):
            if isinstance(dim, int) and dim != pixels:
                raise SpecError(f"{where}: size {size} does not fit the fixed input {spec}")
            if not isinstance(dim, int) and pixels % preprocess.stride:
                near = Resolution(
                    *(-(-side // preprocess.stride) * preprocess.stride for side in (size.height_px, size.width_px))
                )
                raise SpecError(
                    f"{where}: size {size} is not a multiple of the model's stride {preprocess.stride}; use {near}"
                )
