"""A self-contained HTML page for a run: a summary in words, tables, pictures in the file. No scripts, no network."""

from __future__ import annotations

import base64
import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgeds.files import write_text

_STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1000px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
table { border-collapse: collapse; width: 100%; } th, td { text-align: left; padding: .3rem .7rem; }
tr { border-bottom: 1px solid #8884; } td.number { text-align: right; font-variant-numeric: tabular-nums; }
figure { margin: 1rem 0; } img { max-width: 100%; height: auto; border-radius: 4px; }
.pictures { display: grid; grid-template-columns: repeat(auto-fit, minmax(300px, 1fr)); gap: 1rem; }
figcaption, footer { font-size: .85rem; opacity: .75; }
"""
_MIME = {".jpg": "image/jpeg", ".jpeg": "image/jpeg", ".png": "image/png"}


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


def write_page(
    out: Path,
    *,
    title: str,
    summary: Sequence[str],
    tables: Sequence[Table] = (),
    pictures: Sequence[Picture] = (),
    facts: Mapping[str, Any] | None = None,
) -> Path:
    """Write the page atomically and return its path. ``facts`` (device, date, versions) go to the foot."""
    body = [f"<h1>{html.escape(title)}</h1>"]
    body += [f"<p>{html.escape(sentence)}</p>" for sentence in summary]
    body += [_table(table) for table in tables]
    if pictures:
        body.append("<h2>Pictures</h2><div class='pictures'>")
        body += [_picture(picture) for picture in pictures]
        body.append("</div>")
    if facts:
        listed = " · ".join(f"{html.escape(key)}: {html.escape(str(value))}" for key, value in facts.items())
        body.append(f"<footer>{listed}</footer>")
    head = (
        f"<meta charset='utf-8'><meta name='viewport' content='width=device-width'><title>{html.escape(title)}</title>"
    )
    page = (
        f"<!doctype html><html lang='en'><head>{head}<style>{_STYLE}</style></head><body>{''.join(body)}</body></html>"
    )
    write_text(out, page + "\n")
    return out


def _table(table: Table) -> str:
    head = "".join(f"<th>{html.escape(column)}</th>" for column in table.columns)
    rows = "".join("<tr>" + "".join(_cell(cell) for cell in row) + "</tr>" for row in table.rows)
    return f"<h2>{html.escape(table.title)}</h2><table><tr>{head}</tr>{rows}</table>"


def _cell(text: str) -> str:
    number = text[:1].isdigit() or text[:1] == "-"
    return f"<td class='number'>{html.escape(text)}</td>" if number else f"<td>{html.escape(text)}</td>"


def _picture(picture: Picture) -> str:
    data = base64.b64encode(picture.path.read_bytes()).decode("ascii")
    mime = _MIME.get(picture.path.suffix.lower(), "application/octet-stream")
    caption = html.escape(picture.caption)
    return f"<figure><img src='data:{mime};base64,{data}' alt='{caption}'><figcaption>{caption}</figcaption></figure>"
