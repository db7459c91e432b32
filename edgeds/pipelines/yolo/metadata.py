"""What a YOLO export says about itself: the text values in ONNX metadata or in the header of an engine file."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edgeds.errors import SpecError

TASKS = ("detect", "segment", "pose", "obb", "classify")
_MAX_TEXT = 1 << 20


@dataclass(frozen=True, kw_only=True)
class YoloMetadata:
    """The values used here, parsed; None means that the export does not state it."""

    task: str | None = None
    names: Mapping[int, str] | None = None
    stride: int | None = None
    size: tuple[int, int] | None = None
    channels: int | None = None
    keypoint_shape: tuple[int, int] | None = None
    end2end: bool = False
    generation: str | None = None


def parse_metadata(metadata: Mapping[str, str]) -> YoloMetadata:
    """Read the metadata of an export; unknown keys are ignored, malformed values of known keys are SpecErrors."""
    values = {key: _literal(metadata[key], where=f"metadata {key!r}") for key in _LITERALS if metadata.get(key)}
    task = metadata.get("task") or None
    if task is not None and task not in TASKS:
        raise SpecError(f"metadata 'task': {task!r} is not one of {', '.join(TASKS)}; pass head= to override")
    size = values.get("imgsz")
    size = (size, size) if isinstance(size, int) else size
    arguments = values.get("args")
    built_in_nms = isinstance(arguments, dict) and arguments.get("nms") is True
    return YoloMetadata(
        task=task,
        names=parse_names(values["names"], where="metadata 'names'") if "names" in values else None,
        stride=_one_int(values.get("stride"), where="metadata 'stride'"),
        size=_int_pair(size, where="metadata 'imgsz'"),
        channels=_one_int(values.get("channels"), where="metadata 'channels'"),
        keypoint_shape=_int_pair(values.get("kpt_shape"), where="metadata 'kpt_shape'"),
        end2end=values.get("end2end") is True or built_in_nms,
        generation=_generation(metadata.get("description", "")),
    )


def parse_names(value: Any, *, where: str = "names") -> dict[int, str]:
    """Class names from a list, or a dict with the numbers 0..n-1 (int or text) as keys. Raises SpecError."""
    if isinstance(value, Mapping):
        try:
            names = {int(key): str(name) for key, name in value.items()}
        except (TypeError, ValueError) as error:
            raise SpecError(f"{where}: keys must be class numbers, got {list(value)[:3]}") from error
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
        names = {index: str(name) for index, name in enumerate(value)}
    else:
        raise SpecError(f"{where}: expected a list or a dict of class names, got {value!r}"[:300])
    if sorted(names) != list(range(len(names))):
        raise SpecError(f"{where}: class numbers must run from 0 to {len(names) - 1} without a gap")
    return dict(sorted(names.items()))


_LITERALS = ("names", "stride", "imgsz", "channels", "kpt_shape", "end2end", "args")


def _literal(text: Any, *, where: str) -> Any:
    """Values are stored as Python literals (an export converts them with str()); nothing is executed."""
    if not isinstance(text, str):
        return text
    if len(text) > _MAX_TEXT:
        raise SpecError(f"{where}: {len(text)} characters is more than the {_MAX_TEXT} allowed")
    plain = {"true": True, "false": False, "null": None, "none": None}
    if text.strip().lower() in plain:
        return plain[text.strip().lower()]
    try:
        return ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, MemoryError, RecursionError) as error:
        raise SpecError(
            f"{where}: cannot read {text[:80]!r}; export the model again or pass head= and names="
        ) from error


def _one_int(value: Any, *, where: str) -> int | None:
    # Old exports store the strides of all levels; the largest is the one that sizes must divide by.
    if isinstance(value, list | tuple) and value:
        value = max(value)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise SpecError(f"{where}: expected a positive whole number, got {value!r}")
    return value


def _int_pair(value: Any, *, where: str) -> tuple[int, int] | None:
    if value is None:
        return None
    if not (isinstance(value, list | tuple) and len(value) == 2 and all(isinstance(v, int) and v > 0 for v in value)):
        raise SpecError(f"{where}: expected two positive whole numbers, got {value!r}")
    return int(value[0]), int(value[1])


def _generation(description: str) -> str | None:
    """``v8`` from "Ultralytics YOLOv8n model trained on ...", ``v11`` from "YOLO11n"; None when it does not say."""
    lowered = description.lower()
    at = lowered.find("yolo")
    if at < 0:
        return None
    rest = lowered[at + 4 :].lstrip("v")
    digits = ""
    for letter in rest:
        if not letter.isdigit():
            break
        digits += letter
    return f"v{digits}" if digits else None
