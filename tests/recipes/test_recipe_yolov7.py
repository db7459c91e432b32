"""``python -m recipes.yolov7_agx_orin`` on a small model: planned, pruned, packed and reported."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def recipe(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT))
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "unit" / "workshop"))
    monkeypatch.setattr("edgeds.workshop.measure.SPEED_SECONDS", 0.01)
    import recipes.yolov7_agx_orin as module

    return module


def test_the_headline_case_is_planned_from_costs_alone(recipe: ModuleType, tmp_path: Path, capsys: Any) -> None:
    assert recipe.main(["--out", str(tmp_path), "--stop-after", "plan"]) == 0
    found = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert found["goal"] == {"fps": 35.0, "watts": 25.0}
    assert found["yolov7_fits"]
    assert found["yolov7_predicted"]["status"] == "predicted"
    assert found["yolov7_predicted"]["fps"] >= 35
    assert found["yolov7_predicted"]["power_w"] <= 25
    assert json.loads((tmp_path / "plan.json").read_text())["feasible"]


def test_the_whole_recipe_on_a_small_model(recipe: ModuleType, tmp_path: Path, capsys: Any) -> None:
    from tiny_yolo import write_labelled, write_tiny_yolo

    model, data = write_tiny_yolo(tmp_path / "tiny.onnx"), write_labelled(tmp_path / "data")
    flags = ["--model", str(model), "--data", str(data / "images" / "train"), "--size", "64"]
    assert recipe.main(["--out", str(tmp_path / "out"), *flags]) == 0
    found = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert found["params"][1] <= found["params"][0]
    assert found["plan"]["target"] == "agx-orin-64gb"
    assert "35 FPS under 25 W" in Path(found["report"]).read_text(encoding="utf-8")


@pytest.mark.parametrize("flags", [["--target", "agx-orin-65gb"], ["--fps", "-1"], ["--size", "big"]])
def test_wrong_use(recipe: ModuleType, tmp_path: Path, flags: list[str], capsys: Any) -> None:
    assert recipe.main(["--out", str(tmp_path), *flags]) == 2
    assert "error" in capsys.readouterr().err
