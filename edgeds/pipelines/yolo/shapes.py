"""Which output of a YOLO model is which, by rank and size only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from edgeds.errors import SpecError
from edgeds.specs import TensorSpec

# Strides of the levels in use: P3-P5, with P6, with P2.
STRIDE_SETS = ((8, 16, 32), (8, 16, 32, 64), (4, 8, 16, 32))


@dataclass(frozen=True, kw_only=True)
class Reading:
    """One way to read a rank-3 output: how many values each box has, and how many boxes (None when it varies)."""

    values: int
    boxes: int | None
    rows_first: bool

    def swapped(self) -> Reading:
        """The other order of the two axes; values 0 when the number of boxes is unknown."""
        return Reading(values=self.boxes or 0, boxes=self.values, rows_first=not self.rows_first)


@dataclass(frozen=True, kw_only=True)
class OutputShapes:
    """The outputs by role."""

    boxes_name: str = ""
    readings: tuple[Reading, ...] = ()
    proto: TensorSpec | None = None
    levels: tuple[TensorSpec, ...] = ()
    scores: TensorSpec | None = None
    input_hw: tuple[int, int] | None = None
    input_is_dynamic: bool = False


def pick_outputs(outputs: Sequence[TensorSpec], input_spec: TensorSpec | None) -> OutputShapes:
    """Sort outputs by rank: 2 scores, 3 boxes, 4 mask prototypes or raw levels, 5 raw levels. Raises SpecError."""
    input_hw, dynamic = _input_size(input_spec)
    by_rank: dict[int, list[TensorSpec]] = {}
    for spec in outputs:
        by_rank.setdefault(len(spec.shape), []).append(spec)
    boxes, planes, raw = by_rank.get(3, []), by_rank.get(4, []), by_rank.get(5, [])
    common = {"input_hw": input_hw, "input_is_dynamic": dynamic}
    if len(boxes) == 1:
        # Exports of v5 and v7 may also carry their raw levels; the decoded output makes them redundant.
        readings = _readings(boxes[0], input_hw)
        proto = planes[0] if len(planes) == 1 else None
        return OutputShapes(boxes_name=boxes[0].name, readings=readings, proto=proto, **common)  # type: ignore[arg-type]
    if not boxes and len(raw or planes) in (2, 3, 4):
        return OutputShapes(levels=tuple(raw or planes), **common)  # type: ignore[arg-type]
    if not boxes and len(outputs) == 1 and len(by_rank.get(2, [])) == 1:
        return OutputShapes(scores=outputs[0], **common)  # type: ignore[arg-type]
    shown = "; ".join(str(spec) for spec in outputs)
    raise SpecError(
        f"outputs [{shown}] are not those of a YOLO model: expected one output of boxes [N, values, boxes] (and mask "
        "prototypes), raw levels, or class scores [N, classes]"
    )


def boxes_per_cell(boxes: int, input_hw: tuple[int, int]) -> int:
    """1 or 3 when ``boxes`` is that many per grid cell of a known set of strides, else 0."""
    for per_cell in (1, 3):
        if any(boxes == per_cell * cells_of(input_hw, strides) for strides in STRIDE_SETS):
            return per_cell
    return 0


def cells_of(input_hw: tuple[int, int], strides: Sequence[int]) -> int:
    """Grid cells over all levels; sides that do not divide round up, as strided convolutions do."""
    return sum(-(-input_hw[0] // stride) * -(-input_hw[1] // stride) for stride in strides)


def _readings(spec: TensorSpec, input_hw: tuple[int, int] | None) -> tuple[Reading, ...]:
    first, second = spec.shape[1], spec.shape[2]
    if isinstance(first, int) and not isinstance(second, int):
        return (Reading(values=first, boxes=None, rows_first=True),) if first >= 5 else ()
    if isinstance(second, int) and not isinstance(first, int):
        return (Reading(values=second, boxes=None, rows_first=False),) if second >= 5 else ()
    if not isinstance(first, int) or not isinstance(second, int):
        raise SpecError(f"output {spec}: neither dimension is known; run shape inference or pass a complete head=")
    if input_hw is not None:
        # The number of boxes follows from the input size; when one axis has it, the other holds the values.
        by_grid = [
            Reading(values=values, boxes=boxes, rows_first=rows_first)
            for values, boxes, rows_first in ((first, second, True), (second, first, False))
            if values >= 5 and boxes_per_cell(boxes, input_hw)
        ]
        if by_grid:
            return tuple(by_grid)
    values, boxes = min(first, second), max(first, second)
    if values < 5:
        return ()
    return (Reading(values=values, boxes=boxes, rows_first=first <= second),)


def _input_size(spec: TensorSpec | None) -> tuple[tuple[int, int] | None, bool]:
    if spec is None or len(spec.shape) != 4:
        return None, False
    height, width = spec.shape[2], spec.shape[3]
    if isinstance(height, int) and isinstance(width, int):
        return (height, width), False
    return None, True
