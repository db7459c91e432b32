"""Small inputs shared by the workshop's tests."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_yolo import write_images, write_tiny_yolo

from edgeds.workshop import measure


@pytest.fixture(autouse=True)
def short_speed_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "SPEED_SECONDS", 0.01)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_tiny_yolo(tmp_path / "tiny.onnx")


@pytest.fixture
def images(tmp_path: Path) -> Path:
    write_images(tmp_path / "images")
    return tmp_path / "images"
