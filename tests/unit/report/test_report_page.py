"""The run page: self-contained, everything escaped, pictures embedded small, bad input named."""

from __future__ import annotations

import base64
import re
from pathlib import Path

import cv2
import numpy as np
import pytest
from run_builders import HOSTILE, Reader

from edgeds.errors import InputError, SpecError
from edgeds.report.page import MAX_PICTURE_PX, Picture, Table, write_page


def picture(path: Path, *, height: int = 40, width: int = 60) -> Path:
    cv2.imwrite(str(path), np.full((height, width, 3), 90, np.uint8))
    return path


def full_page(tmp_path: Path, text: str = HOSTILE) -> str:
    out = write_page(
        tmp_path / "report.html",
        title=text,
        summary=[text, text],
        tables=[Table(title=text, columns=[text, "n"], rows=[[text, "1"]])],
        pictures=[Picture(path=picture(tmp_path / "a.png"), caption=text)],
        facts={text: text},
    )
    return out.read_text(encoding="utf-8")


def test_hostile_text_stays_text_everywhere(tmp_path: Path) -> None:
    page = full_page(tmp_path)
    read = Reader(page)
    assert "script" not in {tag for tag, _ in read.tags}
    assert [attrs["alt"] for tag, attrs in read.tags if tag == "img"] == [HOSTILE]
    assert all(set(attrs) <= {"src", "alt"} for tag, attrs in read.tags if tag == "img")
    assert read.text.count(HOSTILE) == 10


def test_page_needs_nothing_from_elsewhere(tmp_path: Path) -> None:
    page = full_page(tmp_path, "plain")
    assert "http:" not in page
    assert "https:" not in page
    assert "url(" not in page
    read = Reader(page)
    assert not {"script", "link", "iframe", "object"} & {tag for tag, _ in read.tags}
    sources = [attrs["src"] or "" for _, attrs in read.tags if "src" in attrs]
    assert sources
    assert all(source.startswith("data:image/jpeg;base64,") for source in sources)
    assert "default-src 'none'" in page


def test_pictures_are_scaled_down_and_any_format_is_embedded(tmp_path: Path) -> None:
    large = picture(tmp_path / "large.bmp", height=1200, width=3000)
    page = write_page(
        tmp_path / "r.html", title="t", summary=["s"], pictures=[Picture(path=large, caption="c")]
    ).read_text(encoding="utf-8")
    found = re.search(r"base64,([^\"]+)", page)
    assert found is not None
    image = cv2.imdecode(np.frombuffer(base64.b64decode(found[1]), np.uint8), cv2.IMREAD_COLOR)
    assert image.shape == (384, MAX_PICTURE_PX, 3)


@pytest.mark.parametrize("content", [None, b"", b"text"])
def test_picture_that_is_missing_or_damaged_is_named_and_no_page_is_written(
    tmp_path: Path, content: bytes | None
) -> None:
    path = tmp_path / "gone.jpg"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError, match=r"gone\.jpg"):
        write_page(tmp_path / "r.html", title="t", summary=[], pictures=[Picture(path=path, caption="c")])
    assert not (tmp_path / "r.html").exists()


def test_names_that_are_not_utf8_and_control_characters_do_not_break_the_page(tmp_path: Path) -> None:
    page = full_page(tmp_path, "a\udcffb\x00c\x1b[31m\u202ed")
    assert "\x00" not in page
    assert "\x1b" not in page
    assert "\u202e" not in page
    assert "a?b\ufffdc" in page


def test_columns_of_numbers_are_aligned_with_their_heading(tmp_path: Path) -> None:
    table = Table(title="t", columns=["model", "ms", "note"], rows=[["7up", "1.5", "3"], ["int8", "-", "x"]])
    page = write_page(tmp_path / "r.html", title="t", summary=[], tables=[table]).read_text(encoding="utf-8")
    assert "<th class=number>ms</th>" in page
    assert "<th>model</th>" in page
    assert "<td class=number>-</td>" in page
    assert "<td>3</td>" in page


def test_row_that_does_not_fit_its_columns_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="3 cells for 2 columns"):
        write_page(
            tmp_path / "r.html",
            title="t",
            summary=[],
            tables=[Table(title="t", columns=["a", "b"], rows=[["1", "2", "3"]])],
        )
