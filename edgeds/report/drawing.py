"""Drawings as values: lines, shapes and text in pixels, turned into SVG here and into pixels by ``png``.

Colours are roles, not values: the page decides for light and dark, the picture is light.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Colour = str
"""``ink``, ``faint``, ``grid``, ``budget``, ``page`` or ``s0`` to ``s7`` (one per run)."""

PALETTE_LIGHT = {
    **{"ink": "#1c2024", "faint": "#5f6873", "grid": "#d9dee4", "budget": "#b42318", "page": "#ffffff"},
    **{"s0": "#1f6feb", "s1": "#c2540a", "s2": "#13795b", "s3": "#8250df"},
    **{"s4": "#9a6700", "s5": "#bf3989", "s6": "#0a7ea4", "s7": "#57606a"},
}
PALETTE_DARK = {
    **{"ink": "#e6e9ec", "faint": "#9aa4af", "grid": "#353c44", "budget": "#ff8a80", "page": "#15181b"},
    **{"s0": "#79b0ff", "s1": "#ffa657", "s2": "#56d4a4", "s3": "#d2a8ff"},
    **{"s4": "#e3b341", "s5": "#ff9bce", "s6": "#6cd3f0", "s7": "#b1bac4"},
}
SERIES = 8


@dataclass(frozen=True, kw_only=True)
class Path:
    """A line through points; ``dash`` means predicted or a limit."""

    points: Sequence[tuple[float, float]]
    colour: Colour
    width: float = 1.6
    dash: bool = False


@dataclass(frozen=True, kw_only=True)
class Box:
    """A filled rectangle, or an outlined one (predicted)."""

    x: float
    y: float
    width: float
    height: float
    colour: Colour
    filled: bool = True
    hint: str = ""


@dataclass(frozen=True, kw_only=True)
class Dot:
    """A filled circle (measured) or a ring (predicted)."""

    x: float
    y: float
    colour: Colour
    radius: float = 4.5
    filled: bool = True
    hint: str = ""


@dataclass(frozen=True, kw_only=True)
class Text:
    """One line of text on a baseline at ``y``."""

    x: float
    y: float
    text: str
    colour: Colour = "faint"
    anchor: Literal["start", "middle", "end"] = "start"
    size: float = 13.0
    bold: bool = False


Shape = Path | Box | Dot | Text


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """Shapes on a page of ``width`` x ``height`` pixels. ``label`` says in words what it shows."""

    width: float
    height: float
    label: str
    shapes: Sequence[Shape]


def palette_style() -> str:
    """CSS that gives the roles their colours, light and dark; printed pages are light."""

    def rules(palette: dict[str, str]) -> str:
        return " ".join(f"--c-{role}: {value};" for role, value in palette.items())

    return (
        f":root {{ {rules(PALETTE_LIGHT)} }}\n"
        f"@media screen and (prefers-color-scheme: dark) {{ :root {{ {rules(PALETTE_DARK)} }} }}\n"
    )


def to_svg(drawing: Drawing) -> str:
    """The drawing as an inline SVG element that scales with the page; all text is escaped."""
    label = plain(drawing.label)
    shapes = "".join(_svg(shape) for shape in drawing.shapes)
    return (
        f'<svg viewBox="0 0 {_n(drawing.width)} {_n(drawing.height)}" role="img" aria-label="{label}" '
        f'xmlns="http://www.w3.org/2000/svg">{shapes}</svg>'
    )


def plain(value: object) -> str:
    """Escaped text. Bytes that are not UTF-8 and control characters become marks."""
    text = str(value).encode("utf-8", "replace").decode("utf-8")
    return html.escape("".join(char if char.isprintable() or char == "\u00a0" else "\ufffd" for char in text))


def shorten(text: str, limit: int) -> str:
    """At most ``limit`` characters; the middle goes, since names differ at both ends."""
    if len(text) <= limit:
        return text
    head = (limit - 1) // 2
    return f"{text[:head]}\u2026{text[len(text) - (limit - 1 - head) :]}"


def _svg(shape: Shape) -> str:
    colour = f"var(--c-{shape.colour})"
    if isinstance(shape, Path):
        dash = ' stroke-dasharray="6 4"' if shape.dash else ""
        points = " ".join(f"{_n(x)},{_n(y)}" for x, y in shape.points)
        style = f'style="stroke:{colour}" stroke-width="{_n(shape.width)}"'
        return f'<polyline points="{points}" fill="none" stroke-linejoin="round" {style}{dash}/>'
    if isinstance(shape, Text):
        weight = ' font-weight="600"' if shape.bold else ""
        place = f'x="{_n(shape.x)}" y="{_n(shape.y)}" text-anchor="{shape.anchor}" font-size="{_n(shape.size)}"'
        return f'<text {place}{weight} style="fill:{colour}">{plain(shape.text)}</text>'
    hint = f"<title>{plain(shape.hint)}</title>" if shape.hint else ""
    paint = f"fill:{colour}" if shape.filled else f"fill:none;stroke:{colour};stroke-width:1.6"
    if isinstance(shape, Dot):
        return f'<circle cx="{_n(shape.x)}" cy="{_n(shape.y)}" r="{_n(shape.radius)}" style="{paint}">{hint}</circle>'
    size = f'width="{_n(shape.width)}" height="{_n(shape.height)}"'
    return f'<rect x="{_n(shape.x)}" y="{_n(shape.y)}" {size} style="{paint}">{hint}</rect>'


def _n(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
