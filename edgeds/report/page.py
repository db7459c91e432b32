"""A self-contained HTML page: words, tables, drawings and pictures, all in the file. No scripts, no network."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgeds.errors import InputError, SpecError
from edgeds.files import write_text
from edgeds.imagefile import import_cv2, read_image
from edgeds.report.drawing import Drawing, palette_style, plain, to_svg

MAX_PICTURE_PX = 960
"""Long side of an embedded picture; the full ones lie beside the page."""
JPEG_QUALITY = 85

# Nothing may be loaded: even if a caption got past the escaping it could not call out.
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"

_STYLE = """
:root { color-scheme: light dark; --ink: #1c2024; --faint: #5f6873; --line: #d9dee4; --page: #fff; --card: #f5f7f9; }
@media screen and (prefers-color-scheme: dark) {
  :root { --ink: #e6e9ec; --faint: #9aa4af; --line: #353c44; --page: #15181b; --card: #1e2226; }
}
* { box-sizing: border-box; }
body { font: 16px/1.55 system-ui, sans-serif; color: var(--ink); background: var(--page); max-width: 1080px;
  margin: 0 auto; padding: 1.5rem 1rem 3rem; overflow-wrap: anywhere; }
h1 { font-size: 1.7rem; line-height: 1.25; margin: .5rem 0 1rem; }
h2 { font-size: 1.15rem; margin: 2rem 0 .6rem; }
h3 { font-size: .95rem; margin: 1.2rem 0 .3rem; }
p { max-width: 46rem; margin: .6rem 0; }
.lead { font-size: 1.1rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; min-width: 16rem; }
th, td { text-align: left; padding: .35rem 1.1rem .35rem 0; border-bottom: 1px solid var(--line); vertical-align: top;
  overflow-wrap: break-word; max-width: 24rem; }
td:nth-child(2):not(.number) { min-width: 7rem; }
th { color: var(--faint); font-weight: 600; font-size: .85rem; vertical-align: bottom; }
.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.pictures { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 300px), 1fr)); gap: 1rem; }
figure { margin: 0; background: var(--card); border: 1px solid var(--line); border-radius: 6px; overflow: hidden; }
figure a { display: block; }
img { display: block; width: 100%; height: 230px; object-fit: contain; background: #0002; }
figcaption { font-size: .85rem; color: var(--faint); padding: .4rem .7rem; }
.charts { margin-top: 1rem; display: grid; gap: 1rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 420px), 1fr)); }
.chart { padding: .7rem .6rem .2rem; max-width: 640px; }
.chart figcaption { padding: .5rem .1rem; }
svg { display: block; width: 100%; height: auto; font-family: system-ui, sans-serif; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1rem; font-size: .85rem; color: var(--faint);
  border-top: 1px solid var(--line); margin-top: 2.5rem; padding-top: 1rem; }
dd { margin: 0; }
@media print { figure, tr { break-inside: avoid; } h2, h3 { break-after: avoid; } .scroll { overflow: visible; } }
"""


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows of cells under a heading; numbers are shown as given (format them where their meaning is known)."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True, kw_only=True)
class Picture:
    """An image file and what it shows."""

    path: Path
    caption: str


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A drawing and what it shows."""

    drawing: Drawing
    caption: str


@dataclass(frozen=True, kw_only=True)
class Section:
    """Words, tables (under a smaller heading each, none for an empty title) and charts under one heading."""

    title: str
    words: Sequence[str] = ()
    tables: Sequence[Table] = ()
    charts: Sequence[Chart] = ()


def write_page(
    out: Path,
    *,
    title: str,
    summary: Sequence[str],
    sections: Sequence[Section] = (),
    tables: Sequence[Table] = (),
    pictures: Sequence[Picture] = (),
    facts: Mapping[str, Any] | None = None,
) -> Path:
    """Write the page atomically and return its path.

    Pictures are embedded at up to ``MAX_PICTURE_PX``. ``facts`` (device, date, versions) go to the foot. All text is
    escaped. Raises InputError naming a picture that cannot be read, SpecError for a row that does not fit its columns.
    """
    body = [f"<h1>{plain(title)}</h1>"]
    body += [f"<p{' class=lead' if not index else ''}>{plain(words)}</p>" for index, words in enumerate(summary)]
    body += [_section(section) for section in sections]
    body += [f"<h2>{plain(table.title)}</h2>{_table(table)}" for table in tables]
    if pictures:
        body.append("<h2>Pictures</h2><div class=pictures>")
        body += [_picture(picture) for picture in pictures]
        body.append("</div>")
    if facts:
        body.append(
            f"<dl>{''.join(f'<dt>{plain(key)}</dt><dd>{plain(value)}</dd>' for key, value in facts.items())}</dl>"
        )
    head = (
        f'<meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><title>{plain(title)}</title>'
    )
    page = (
        f'<!doctype html><html lang="en"><head>{head}<style>{_STYLE}{palette_style()}</style></head>'
        f"<body><main>{''.join(body)}</main></body></html>\n"
    )
    write_text(out, page)
    return out


def _section(section: Section) -> str:
    body = [f"<section><h2>{plain(section.title)}</h2>", *(f"<p>{plain(words)}</p>" for words in section.words)]
    body += [f"{f'<h3>{plain(table.title)}</h3>' if table.title else ''}{_table(table)}" for table in section.tables]
    if section.charts:
        charts = (
            f"<figure class=chart>{to_svg(chart.drawing)}<figcaption>{plain(chart.caption)}</figcaption></figure>"
            for chart in section.charts
        )
        body.append(f"<div class=charts>{''.join(charts)}</div>")
    return f"{''.join(body)}</section>"


def _table(table: Table) -> str:
    for row in table.rows:
        if len(row) != len(table.columns):
            raise SpecError(f"table {table.title!r}: a row has {len(row)} cells for {len(table.columns)} columns")
    # A column is right-aligned when all of its cells are numbers, its heading with them.
    numeric = [bool(table.rows) and all(_is_number(row[i]) for row in table.rows) for i in range(len(table.columns))]
    head = "".join(_cell("th", name, number) for name, number in zip(table.columns, numeric, strict=True))
    rows = (
        "<tr>" + "".join(_cell("td", cell, number) for cell, number in zip(row, numeric, strict=True)) + "</tr>"
        for row in table.rows
    )
    return f"<div class=scroll><table><tr>{head}</tr>{''.join(rows)}</table></div>"


def _cell(tag: str, text: str, number: bool) -> str:
    return f"<{tag}{' class=number' if number else ''}>{plain(text)}</{tag}>"


def _is_number(text: str) -> bool:
    try:
        float(text.strip().rstrip("%").replace(",", "").replace("x", ""))
    except ValueError:
        return text.strip() in ("-", "–")
    return True


def _picture(picture: Picture) -> str:
    data = base64.b64encode(_small_jpeg(picture.path)).decode("ascii")
    caption = plain(picture.caption)
    return (
        f'<figure><img src="data:image/jpeg;base64,{data}" alt="{caption}"><figcaption>{caption}</figcaption></figure>'
    )


def _small_jpeg(path: Path) -> bytes:
    cv2 = import_cv2("pictures in a report")
    image = read_image(path)
    scale = MAX_PICTURE_PX / max(image.shape[:2])
    if scale < 1:
        size = tuple(max(1, round(side * scale)) for side in image.shape[1::-1])
        image = cv2.resize(image, size, interpolation=cv2.INTER_AREA)
    done, data = cv2.imencode(".jpg", image, [cv2.IMWRITE_JPEG_QUALITY, JPEG_QUALITY])
    if not done:
        raise InputError(f"{path}: the picture could not be encoded for the report")
    return bytes(data)
