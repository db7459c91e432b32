"""One picture of a report: its first sentences and its main charts, painted with OpenCV."""

from __future__ import annotations

import itertools
import textwrap
import unicodedata
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeds.errors import InputError, SpecError
from edgeds.files import atomic_path
from edgeds.imagefile import import_cv2
from edgeds.report import plots
from edgeds.report.charts import WIDTH
from edgeds.report.drawing import PALETTE_LIGHT, Box, Dot, Drawing, Shape, Text, shorten
from edgeds.report.drawing import Path as Line
from edgeds.report.record import RunRecord
from edgeds.report.words import summarize_runs

MARGIN = 28.0
GAP = 36.0
ZOOM = 2
"""Pixels of the picture per pixel of a drawing."""
LINE_CHARS = 120
MAX_LINES = 8
DASH, SPACE = 7.0, 5.0
_STAND_INS = {"µ": "u", "\u2026": "..", "\u25cf": "", "\u25cb": "", "°": " deg ", "×": "x"}


def write_png(out: Path, runs: Sequence[RunRecord], *, title: str) -> Path:
    """Paint the summary of ``runs`` as a PNG, about 2080 pixels wide, atomically.

    Raises SpecError for another suffix, MissingDependency without OpenCV (extra ``vision``).
    """
    if out.suffix.lower() != ".png":
        raise SpecError(f"{out}: the picture is a PNG; name it FILE.png")
    cv2 = import_cv2("the picture of a report")
    done, data = cv2.imencode(".png", paint(_compose(runs, title=title), cv2=cv2))
    if not done:
        raise InputError(f"{out}: the picture could not be encoded")
    with atomic_path(out) as temporary:
        temporary.write_bytes(bytes(data))
    return out


def paint(drawing: Drawing, *, cv2: Any) -> NDArray[np.uint8]:
    """The drawing as BGR uint8, [height x ZOOM, width x ZOOM, 3]."""
    size = (round(drawing.height * ZOOM), round(drawing.width * ZOOM), 3)
    image = np.full(size, _bgr("page"), dtype=np.uint8)
    for shape in drawing.shapes:
        _paint(image, shape, cv2=cv2)
    return image


def _compose(runs: Sequence[RunRecord], *, title: str) -> Drawing:
    """Title, summary, then the charts that there is something to draw for, two beside each other."""
    shapes: list[Shape] = [Text(x=MARGIN, y=46, text=shorten(title, 70), colour="ink", size=24, bold=True)]
    lines = [line for sentence in summarize_runs(runs) for line in textwrap.wrap(sentence, LINE_CHARS)]
    if len(lines) > MAX_LINES:
        lines = [*lines[: MAX_LINES - 1], "More in the page."]
    y = 76.0
    for line in lines:
        shapes.append(Text(x=MARGIN, y=y, text=line, colour="ink", size=14))
        y += 22
    figures = [
        plots.fps_over_watts(runs),
        plots.latency_cdf(runs),
        plots.power_trace(runs),
        plots.latency_by_batch(runs),
    ]
    first = next(((index, run) for index, run in enumerate(runs) if run.layers), None)
    if first is not None:
        figures += [plots.roofline(first[1], index=first[0]), plots.layer_bars(first[1], index=first[0])]
    drawn = [(figure.caption, figure.drawing) for figure in figures if figure.drawing is not None]
    y += 12
    for start in range(0, len(drawn), 2):
        tallest = 0.0
        for column, (caption, chart) in enumerate(drawn[start : start + 2]):
            x = MARGIN + column * (WIDTH + GAP)
            shapes.append(Text(x=x, y=y + 10, text=shorten(caption.partition(";")[0], 66), colour="ink", bold=True))
            shapes += [_moved(shape, x=x, y=y + 26) for shape in chart.shapes]
            tallest = max(tallest, chart.height)
        y += tallest + 26 + GAP
    return Drawing(width=2 * WIDTH + GAP + 2 * MARGIN, height=y + 4, label=title, shapes=shapes)


def _moved(shape: Shape, *, x: float, y: float) -> Shape:
    if isinstance(shape, Line):
        return replace(shape, points=[(px + x, py + y) for px, py in shape.points])
    return replace(shape, x=shape.x + x, y=shape.y + y)


def _paint(image: NDArray[np.uint8], shape: Shape, *, cv2: Any) -> None:
    colour = _bgr(shape.colour)
    if isinstance(shape, Line):
        width = max(1, round(shape.width * ZOOM))
        pieces = _dashes(shape.points) if shape.dash else [list(shape.points)]
        for piece in pieces:
            points = np.array([[(round(x * ZOOM * 16), round(y * ZOOM * 16)) for x, y in piece]], dtype=np.int32)
            cv2.polylines(image, points, False, colour, width, cv2.LINE_AA, 4)
    elif isinstance(shape, Text):
        _write(image, shape, colour=colour, cv2=cv2)
    elif isinstance(shape, Dot):
        center = (round(shape.x * ZOOM), round(shape.y * ZOOM))
        cv2.circle(image, center, round(shape.radius * ZOOM), colour, -1 if shape.filled else ZOOM, cv2.LINE_AA)
    elif isinstance(shape, Box):
        first = (round(shape.x * ZOOM), round(shape.y * ZOOM))
        last = (round((shape.x + shape.width) * ZOOM), round((shape.y + shape.height) * ZOOM))
        cv2.rectangle(image, first, last, colour, -1 if shape.filled else ZOOM, cv2.LINE_AA)


def _write(image: NDArray[np.uint8], shape: Text, *, colour: tuple[int, int, int], cv2: Any) -> None:
    """Text in OpenCV's own font, which has ASCII only."""
    text = _ascii(shape.text)
    scale = shape.size * ZOOM / 30
    thickness = 2 * ZOOM if shape.bold and shape.size > 18 else ZOOM if shape.bold else max(1, round(ZOOM * 0.6))
    font = cv2.FONT_HERSHEY_SIMPLEX
    (width, _), _ = cv2.getTextSize(text, font, scale, thickness)
    shift = {"start": 0.0, "middle": width / 2, "end": float(width)}[shape.anchor]
    place = (round(shape.x * ZOOM - shift), round(shape.y * ZOOM))
    cv2.putText(image, text, place, font, scale, colour, thickness, cv2.LINE_AA)


def _ascii(text: str) -> str:
    for char, stand_in in _STAND_INS.items():
        text = text.replace(char, stand_in)
    plain = unicodedata.normalize("NFKD", text)
    kept = "".join(char for char in plain if not unicodedata.combining(char))
    return "".join(char if 32 <= ord(char) < 127 else "?" for char in kept).strip()


def _dashes(points: Sequence[tuple[float, float]]) -> list[list[tuple[float, float]]]:
    """The line cut into dashes of equal length."""
    pieces: list[list[tuple[float, float]]] = []
    left, is_on = DASH, True
    piece = [points[0]]
    for (x0, y0), (x1, y1) in itertools.pairwise(points):
        length = float(np.hypot(x1 - x0, y1 - y0))
        at = 0.0
        while length - at > left:
            at += left
            cut = (x0 + (x1 - x0) * at / length, y0 + (y1 - y0) * at / length)
            if is_on:
                pieces.append([*piece, cut])
            is_on = not is_on
            left = DASH if is_on else SPACE
            piece = [cut]
        left -= length - at
        piece.append((x1, y1))
    return [*pieces, piece] if is_on and len(piece) > 1 else pieces


def _bgr(role: str) -> tuple[int, int, int]:
    text = PALETTE_LIGHT[role]
    return int(text[5:7], 16), int(text[3:5], 16), int(text[1:3], 16)
