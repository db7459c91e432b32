"""Two kinds of chart as drawings: points and lines over two axes, and horizontal bars.

What was measured is a full line or a filled mark; what was predicted a dashed line or an open mark.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from edgeds.report.axes import Scale, linear_scale, log_scale, number
from edgeds.report.drawing import Box, Colour, Dot, Drawing, Path, Shape, Text, shorten
from edgeds.report.record import Status, keep_shape

WIDTH = 480.0
PLOT_HEIGHT = 250.0
LEFT, RIGHT, TOP, BOTTOM = 58.0, 14.0, 26.0, 46.0
ROW = 18.0
MAX_POINTS = 600
"""Points drawn of one line: more than a page has pixels for helps nobody and makes it large."""
NAME_CHARS = 50
BAR_ROW = 22.0
ROOM_ABOVE = 1.1


@dataclass(frozen=True, kw_only=True)
class Axis:
    """``unit`` goes into the label; ``low`` and ``high`` widen the range."""

    label: str
    is_log: bool = False
    from_zero: bool = True
    include: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Series:
    """Points of one run. ``hints`` (one per point) are shown on hovering, ``tag`` is written beside the last point."""

    name: str
    points: Sequence[tuple[float, float]]
    colour: Colour
    status: Status = "measured"
    has_line: bool = True
    has_marks: bool = False
    hints: Sequence[str] = ()
    tag: str = ""


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A limit: a dashed line at a value of y."""

    value: float
    name: str


@dataclass(frozen=True, kw_only=True)
class Bar:
    """One bar; ``text`` stands at its end."""

    name: str
    value: float
    colour: Colour
    text: str
    status: Status = "measured"


def xy_chart(
    series: Sequence[Series], *, x: Axis, y: Axis, label: str, rules: Sequence[Rule] = (), legend: bool = True
) -> Drawing:
    """Lines and marks over two axes. Values that are not above 0 are left out where an axis goes by decades."""
    drawn = [_visible(one, x=x, y=y) for one in series]
    across = _scale(x, [point[0] for one in drawn for point in one.points], start=LEFT, end=WIDTH - RIGHT)
    heights = [point[1] for one in drawn for point in one.points] + [rule.value * ROOM_ABOVE for rule in rules]
    upward = _scale(y, heights, start=PLOT_HEIGHT - BOTTOM, end=TOP)
    shapes = _frame(across, upward, x=x, y=y)
    for rule in rules:
        height = upward.at(rule.value)
        shapes.append(Path(points=[(LEFT, height), (WIDTH - RIGHT, height)], colour="budget", dash=True))
        above = height - 5 if height - 18 > TOP else height + 15
        shapes.append(Text(x=WIDTH - RIGHT, y=above, text=rule.name, colour="budget", anchor="end"))
    for one in drawn:
        shapes += _series(one, across=across, upward=upward)
    rows = _legend(series) if legend else []
    return Drawing(
        width=WIDTH, height=PLOT_HEIGHT + ROW * len(series) * bool(rows), label=label, shapes=[*shapes, *rows]
    )


def bar_chart(bars: Sequence[Bar], *, label: str) -> Drawing:
    """Horizontal bars from 0, one row each, in the given order."""
    longest = max((bar.value for bar in bars), default=0.0) or 1.0
    names_end, room = 190.0, 96.0
    shapes: list[Shape] = []
    for index, bar in enumerate(bars):
        middle = BAR_ROW * index + BAR_ROW / 2
        length = max(1.0, bar.value / longest * (WIDTH - names_end - room))
        shapes.append(Text(x=names_end - 8, y=middle + 4.5, text=shorten(bar.name, 27), colour="ink", anchor="end"))
        shapes.append(
            Box(
                x=names_end,
                y=middle - 7,
                width=length,
                height=14,
                colour=bar.colour,
                filled=bar.status == "measured",
                hint=f"{bar.name}: {bar.text}, {bar.status}",
            )
        )
        shapes.append(Text(x=names_end + length + 6, y=middle + 4.5, text=bar.text))
    return Drawing(width=WIDTH, height=BAR_ROW * max(1, len(bars)) + 4, label=label, shapes=shapes)


def _visible(one: Series, *, x: Axis, y: Axis) -> Series:
    hints = one.hints or [""] * len(one.points)
    pairs = [
        (point, hint)
        for point, hint in zip(one.points, hints, strict=True)
        if (not x.is_log or point[0] > 0) and (not y.is_log or point[1] > 0)
    ]
    points = [point for point, _ in pairs]
    if one.has_line and len(points) > MAX_POINTS:
        points = list(keep_shape(points, limit=MAX_POINTS))
        pairs = [(point, "") for point in points]
    return Series(
        name=one.name,
        points=points,
        colour=one.colour,
        status=one.status,
        has_line=one.has_line,
        has_marks=one.has_marks or len(points) == 1,
        hints=[hint for _, hint in pairs],
        tag=one.tag,
    )


def _scale(axis: Axis, values: Sequence[float], *, start: float, end: float) -> Scale:
    known = [*values, *axis.include]
    if axis.is_log:
        return log_scale(known, start=start, end=end)
    return linear_scale(known, start=start, end=end, from_zero=axis.from_zero)


def _frame(across: Scale, upward: Scale, *, x: Axis, y: Axis) -> list[Shape]:
    bottom = PLOT_HEIGHT - BOTTOM
    shapes: list[Shape] = []
    for value in upward.ticks():
        height = upward.at(value)
        shapes.append(Path(points=[(LEFT, height), (WIDTH - RIGHT, height)], colour="grid", width=1))
        shapes.append(Text(x=LEFT - 7, y=height + 4.5, text=number(value), anchor="end"))
    for value in across.ticks():
        place = across.at(value)
        shapes.append(Path(points=[(place, bottom), (place, bottom + 4)], colour="faint", width=1))
        shapes.append(Text(x=place, y=bottom + 18, text=number(value), anchor="middle"))
    shapes.append(Path(points=[(LEFT, bottom), (WIDTH - RIGHT, bottom)], colour="faint", width=1))
    shapes.append(Text(x=(LEFT + WIDTH - RIGHT) / 2, y=bottom + 38, text=x.label, anchor="middle"))
    shapes.append(Text(x=2, y=13, text=y.label))
    return shapes


def _series(one: Series, *, across: Scale, upward: Scale) -> list[Shape]:
    places = [(across.at(x), upward.at(y)) for x, y in one.points]
    is_measured = one.status == "measured"
    shapes: list[Shape] = []
    if one.has_line and len(places) > 1:
        shapes.append(Path(points=places, colour=one.colour, dash=not is_measured))
    if one.has_marks:
        shapes += [
            Dot(x=x, y=y, colour=one.colour, filled=is_measured, hint=hint)
            for (x, y), hint in zip(places, one.hints, strict=True)
        ]
    if one.tag and places:
        x, y = places[-1]
        if x > WIDTH * 0.75:
            shapes.append(Text(x=x - 8, y=y - 8, text=one.tag, anchor="end"))
        else:
            shapes.append(Text(x=x + 8, y=y + 15, text=one.tag))
    return shapes


def _legend(series: Sequence[Series]) -> list[Shape]:
    shapes: list[Shape] = []
    for index, one in enumerate(series):
        y = PLOT_HEIGHT + ROW * index + 6
        is_measured = one.status == "measured"
        if one.has_line:
            shapes.append(Path(points=[(LEFT, y), (LEFT + 22, y)], colour=one.colour, dash=not is_measured, width=2.4))
        else:
            shapes.append(Dot(x=LEFT + 11, y=y, colour=one.colour, filled=is_measured))
        room = NAME_CHARS - len(one.status) - 2
        shapes.append(Text(x=LEFT + 30, y=y + 4.5, text=f"{shorten(one.name, room)}, {one.status}", colour="ink"))
    return shapes
