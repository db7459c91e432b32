"""Which numbers sit where in a YOLO output: metadata first, shapes second, an error where both leave a choice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from edgeds.errors import SpecError
from edgeds.pipelines.yolo.metadata import TASKS, YoloMetadata, parse_metadata
from edgeds.pipelines.yolo.shapes import OutputShapes, Reading, boxes_per_cell, pick_outputs
from edgeds.specs import TensorSpec, from_json, to_json

Family = Literal["v8", "v5", "v5_raw", "end2end", "yolox", "yolox_decoded", "classify"]
FAMILIES: tuple[str, ...] = get_args(Family)
ALIASES = {"v7": "v5", "v6": "v5", "v9": "v8", "v11": "v8", "v12": "v8", "v10": "end2end", "v26": "end2end"}
ALIASES |= {"yolo" + name: family for name, family in ALIASES.items()} | {"yolo11": "v8", "yolo26": "end2end"}
ALIASES |= {"yolov5": "v5", "yolov8": "v8", "v7_raw": "v5_raw"}

# Published with the models: width, height in pixels of the three boxes of each level (strides 8, 16, 32).
ANCHORS_V5 = ((10, 13, 16, 30, 33, 23), (30, 61, 62, 45, 59, 119), (116, 90, 156, 198, 373, 326))
ANCHORS_V7 = ((12, 16, 19, 36, 40, 28), (36, 75, 76, 55, 72, 146), (142, 110, 192, 243, 459, 401))

_HINT = "pass head= (--head) with the family: " + ", ".join(FAMILIES)


@dataclass(frozen=True, kw_only=True)
class HeadLayout:
    """How to read the outputs of one model. ``to_json`` of it is what a bundle's manifest stores as ``head``.

    Families, ``A`` candidate boxes, boxes in pixels of the network input:
    ``v8`` [N, 4+nc+extra, A] centre-x, centre-y, width, height, class scores (also transposed: ``rows_first`` False);
    ``v5`` [N, A, 5+nc+extra] the same with objectness before the scores; ``v5_raw`` one output per level before the
    sigmoid, with ``anchors`` in pixels; ``end2end`` [N, M, 6+extra] x1, y1, x2, y2, score, class, no NMS needed;
    ``yolox`` [N, A, 5+nc] grid offsets and log sizes; ``yolox_decoded`` the same in pixels; ``classify`` [N, nc].
    ``classes`` is 0 where an end2end output does not tell. Extra: mask coefficients, keypoints (``keypoints`` x
    ``keypoint_dims``) or one angle in radians.
    """

    family: Family
    task: Literal["detect", "segment", "pose", "obb", "classify"] = "detect"
    classes: int
    output: str
    rows_first: bool = True
    proto: str | None = None
    mask_coefficients: int = 0
    keypoints: int = 0
    keypoint_dims: int = 0
    levels: tuple[str, ...] = ()
    anchors: tuple[tuple[float, ...], ...] = ()
    strides: tuple[int, ...] = (8, 16, 32)

    @property
    def extra(self) -> int:
        """Values per box after the scores."""
        if self.task == "obb":
            return 1
        return self.mask_coefficients + self.keypoints * self.keypoint_dims

    @property
    def needs_nms(self) -> bool:
        return self.family not in ("end2end", "classify")


def choose_layout(
    metadata: Mapping[str, str],
    outputs: Sequence[TensorSpec],
    *,
    override: str | Mapping[str, Any] | HeadLayout | None = None,
    input_spec: TensorSpec | None = None,
    classes: int | None = None,
) -> HeadLayout:
    """Decide the layout of a model from its metadata, output shapes and (for counts of boxes) its input shape.

    ``override`` is a family name, a complete layout (object or its JSON), or some of its keys (``family``, ``task``,
    ``classes``, ``anchors``, ``strides``, ``keypoints``, ``keypoint_dims``). ``classes`` is the number of names the
    caller has. Raises SpecError, listing the options, when more than one reading fits, and when none does.
    """
    if isinstance(override, HeadLayout):
        return _check_outputs(override, outputs)
    if isinstance(override, Mapping) and {"family", "classes", "output"} <= set(override):
        return _check_outputs(from_json(HeadLayout, override, where="head"), outputs)
    wanted: dict[str, Any] = {"family": override} if isinstance(override, str) else dict(override or {})
    allowed = {"family", "task", "classes", "anchors", "strides", "keypoints", "keypoint_dims"}
    if unknown := sorted(set(wanted) - allowed):
        raise SpecError(f"head: unknown key {unknown[0]!r}; known keys: {', '.join(sorted(allowed))}")
    anchors = wanted.pop("anchors", None) or (ANCHORS_V7 if wanted.get("family") == "v7_raw" else ANCHORS_V5)
    family = _family_name(wanted.pop("family", None))
    known = parse_metadata(metadata)
    if "task" in wanted and wanted["task"] not in TASKS:
        raise SpecError(f"head: task {wanted['task']!r} is not one of {', '.join(TASKS)}")
    if {"keypoints", "keypoint_dims"} <= set(wanted):
        known = replace(known, keypoint_shape=(wanted["keypoints"], wanted["keypoint_dims"]))
    known = replace(known, task=wanted.get("task") or known.task)
    classes = wanted.get("classes", classes if classes is not None else (len(known.names) if known.names else None))
    if classes is not None and (not isinstance(classes, int) or classes < 1):
        raise SpecError(f"head: classes {classes!r} must be a positive whole number")
    shapes = pick_outputs(outputs, input_spec)
    options = _options(shapes, known, classes, family)
    if len(options) != 1:
        raise SpecError(_explain(outputs, options, known, classes))
    layout = options[0]
    if layout.family == "v5_raw":
        layout = replace(layout, anchors=_check_anchors(anchors, len(layout.levels)))
    if wanted.get("strides"):
        layout = replace(layout, strides=tuple(int(value) for value in wanted["strides"]))
    return layout


def layout_to_json(layout: HeadLayout) -> dict[str, Any]:
    """The plain form that ``choose_layout(override=...)`` reads back to an equal layout."""
    plain: dict[str, Any] = to_json(layout)
    return plain


def _family_name(name: Any) -> str | None:
    if name is None:
        return None
    family = ALIASES.get(str(name), str(name))
    if family not in FAMILIES:
        raise SpecError(f"head: unknown family {name!r}; choose one of {', '.join(FAMILIES)}")
    return family


def _options(shapes: OutputShapes, known: YoloMetadata, classes: int | None, family: str | None) -> list[HeadLayout]:
    """Every reading that agrees with what is known."""
    if shapes.scores is not None:
        count = shapes.scores.shape[1]
        fits = known.task in (None, "classify") and family in (None, "classify") and isinstance(count, int)
        if not fits or not isinstance(count, int) or classes not in (None, count):
            return []
        return [HeadLayout(family="classify", task="classify", classes=count, output=shapes.scores.name)]
    if shapes.levels:
        return _raw_options(shapes, classes, family)
    found = [option for reading in shapes.readings for option in _read(reading, shapes, known, classes, family)]
    if not found and classes is not None and len(shapes.readings) == 1 and shapes.readings[0].boxes in range(5, 1000):
        # Fewer boxes than values per box: only a known class count can tell.
        found = _read(shapes.readings[0].swapped(), shapes, known, classes, family)
    return found


def _read(
    reading: Reading, shapes: OutputShapes, known: YoloMetadata, classes: int | None, family: str | None
) -> list[HeadLayout]:
    found: list[HeadLayout] = []
    for candidate in [family] if family is not None else _families_of(reading, shapes, known):
        if candidate == "end2end":
            found += _end_to_end(reading, shapes, known, classes)
        elif candidate in ("v8", "v5", "yolox", "yolox_decoded"):
            found += _dense(candidate, reading, shapes, known, classes)
    return found


def _families_of(reading: Reading, shapes: OutputShapes, known: YoloMetadata) -> list[str]:
    """Families that fit the order of the axes and the number of boxes (None: it depends on the input size)."""
    if known.end2end:
        return ["end2end"]
    if reading.rows_first:
        return ["v8"]
    if known.generation == "v10":
        return ["end2end"]
    if reading.boxes is not None and reading.boxes <= 1000 and shapes.input_is_dynamic:
        # A count that does not follow the input size cannot be one box per grid cell.
        return ["end2end"]
    if reading.boxes is not None and shapes.input_hw is not None:
        per_cell = boxes_per_cell(reading.boxes, shapes.input_hw)
        if per_cell == 3:
            return ["v5"]
        if per_cell == 1:
            return ["v8", "yolox"] if known.generation is None else ["v8"]
        if reading.boxes <= 1000:
            return ["end2end"]
    if known.generation is not None:
        return ["v5"] if known.generation in ("v5", "v6", "v7") else ["v8"]
    # YOLOX exports carry no metadata at all; those of v5 name their classes.
    return ["v8", "v5", "end2end"] if known.names or known.stride else ["v8", "v5", "yolox", "end2end"]


def _dense(
    family: str, reading: Reading, shapes: OutputShapes, known: YoloMetadata, classes: int | None
) -> list[HeadLayout]:
    """Layouts of [box, objectness?, scores, extra] that agree with the number of values."""
    if reading.rows_first and family != "v8":
        return []
    rest = reading.values - (4 if family == "v8" else 5)
    proto = shapes.proto
    masks = int(proto.shape[1]) if proto is not None and isinstance(proto.shape[1], int) else 0
    task = known.task or ("segment" if masks else "detect")
    base = HeadLayout(
        family=family,  # type: ignore[arg-type]
        classes=1,
        output=shapes.boxes_name,
        rows_first=reading.rows_first,
    )
    if task == "classify" or (task == "segment") != bool(masks):
        return []
    if task == "segment" and proto is not None:
        base = replace(base, task="segment", proto=proto.name, mask_coefficients=masks)
    elif task == "obb":
        base = replace(base, task="obb")
    elif task == "pose":
        shape = known.keypoint_shape or (_keypoint_shape(rest - classes) if classes is not None else None)
        if shape is None:
            return []
        base = replace(base, task="pose", keypoints=shape[0], keypoint_dims=shape[1])
    elif known.task is None and classes is None and (family, rest) == ("v8", 52):
        return [replace(base, classes=52), replace(base, task="pose", keypoints=17, keypoint_dims=3)]
    count = rest - base.extra
    return [replace(base, classes=count)] if count >= 1 and classes in (None, count) else []


def _keypoint_shape(values: int) -> tuple[int, int] | None:
    """Keypoints x (3 or 2) when only one of them divides; both dividing is a choice that needs ``kpt_shape``."""
    by_three, by_two = values > 0 and values % 3 == 0, values > 0 and values % 2 == 0
    if by_three and by_two:
        raise SpecError(
            f"pose output: {values} keypoint values are {values // 3} x 3 or {values // 2} x 2; "
            "pass head= with keypoints and keypoint_dims"
        )
    return (values // 3, 3) if by_three else (values // 2, 2) if by_two else None


def _end_to_end(reading: Reading, shapes: OutputShapes, known: YoloMetadata, classes: int | None) -> list[HeadLayout]:
    """Layouts of [x1, y1, x2, y2, score, class, extra]; the values do not tell how many classes there are (0)."""
    if reading.rows_first or reading.values < 6:
        return []
    extra = reading.values - 6
    proto = shapes.proto
    task = known.task or ("segment" if proto is not None else "detect")
    layout = HeadLayout(family="end2end", classes=classes or 0, output=shapes.boxes_name, rows_first=False)
    if task == "segment" and proto is not None and proto.shape[1] == extra:
        return [replace(layout, task="segment", proto=proto.name, mask_coefficients=extra)]
    if task == "pose" and (shape := known.keypoint_shape or _keypoint_shape(extra)) and shape[0] * shape[1] == extra:
        return [replace(layout, task="pose", keypoints=shape[0], keypoint_dims=shape[1])]
    if task == "obb" and extra == 1:
        return [replace(layout, task="obb")]
    return [layout] if task == "detect" and extra == 0 else []


def _raw_options(shapes: OutputShapes, classes: int | None, family: str | None) -> list[HeadLayout]:
    if family not in (None, "v5_raw"):
        return []
    counts = set()
    for spec in shapes.levels:
        values = spec.shape[-1] if len(spec.shape) == 5 else spec.shape[1]
        if not isinstance(values, int):
            return []
        if len(spec.shape) == 4:
            if values % 3 or (classes is None and family is None):
                return []
            values //= 3
        counts.add(values - 5)
    if len(counts) != 1 or (count := counts.pop()) < 1 or classes not in (None, count):
        return []
    names = tuple(spec.name for spec in shapes.levels)
    return [HeadLayout(family="v5_raw", classes=count, output=names[0], rows_first=False, levels=names)]


def _check_anchors(anchors: Any, levels: int) -> tuple[tuple[float, ...], ...]:
    try:
        rows = tuple(tuple(float(value) for value in row) for row in anchors)
    except (TypeError, ValueError) as error:
        raise SpecError(f"head: anchors must be rows of numbers, got {anchors!r}"[:300]) from error
    if len(rows) != levels or any(len(row) != 6 or min(row) <= 0 for row in rows):
        raise SpecError(
            f"head: anchors need {levels} rows (smallest stride first) of three widths and heights in pixels"
        )
    return rows


def _check_outputs(layout: HeadLayout, outputs: Sequence[TensorSpec]) -> HeadLayout:
    names = {spec.name for spec in outputs}
    for name in (layout.output, layout.proto, *layout.levels):
        if name is not None and name not in names:
            raise SpecError(f"head: the model has no output {name!r}; it has {', '.join(sorted(names))}")
    return layout


def _explain(
    outputs: Sequence[TensorSpec], options: Sequence[HeadLayout], known: YoloMetadata, classes: int | None
) -> str:
    shown = "; ".join(str(spec) for spec in outputs)
    if options:
        choices = " or ".join(
            f"{option.family} {option.task} with {option.classes or 'unstated'} classes" for option in options
        )
        return f"outputs [{shown}] fit more than one YOLO layout: {choices}; {_HINT}, or the class names"
    facts = [f"task {known.task}"] if known.task else []
    facts += [f"{classes} classes"] if classes is not None else []
    facts += [f"keypoints {known.keypoint_shape}"] if known.keypoint_shape else []
    stated = f" with {', '.join(facts)}" if facts else ""
    return f"outputs [{shown}] fit no known YOLO layout{stated}; check the class names and the task, or {_HINT}"
