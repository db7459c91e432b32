"""``python -m recipes.yolo`` on a small model, and the rules that recipes keep."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "recipes").glob("*.py"))


@pytest.fixture
def recipe(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT))
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "unit" / "workshop"))
    monkeypatch.setattr("edgeds.workshop.measure.SPEED_SECONDS", 0.01)
    import recipes.yolo as module

    return module


@pytest.fixture
def arguments(recipe: ModuleType, tmp_path: Path) -> list[str]:
    from tiny_yolo import write_labelled, write_tiny_yolo

    model, data = write_tiny_yolo(tmp_path / "tiny.onnx"), write_labelled(tmp_path / "data")
    flags = ["--model", str(model), "--data", str(data), "--size", "64", "--seconds", "0.05"]
    return ["--out", str(tmp_path / "out"), *flags]


def last_line(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    out = capsys.readouterr().out.strip().splitlines()
    found: dict[str, Any] = json.loads(out[-1])
    return found


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.name)
def test_recipes_are_short_and_straight(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    assert len(text.splitlines()) <= 100
    assert not [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            assert (node.end_lineno or 0) - node.lineno < 19, node.name


def test_recipes_are_no_package() -> None:
    assert RECIPES
    assert not (ROOT / "recipes" / "__init__.py").exists()


def test_whole_recipe(recipe: ModuleType, arguments: list[str], tmp_path: Path, capsys: Any) -> None:
    assert recipe.main([*arguments, "--target", "orin-nano@15W", "--max-drop", "100"]) == 0
    done = last_line(capsys)
    out = tmp_path / "out"
    assert (done["stage"], done["bundle"], done["report"]) == ("bench", str(out / "bundle"), str(out / "report.html"))
    assert done["fps_float"] > 0
    assert done["fps_int8"] > 0
    assert {"float_map50_95", "int8_map50_95"} <= set(done["accuracy"])
    assert len(done["images"]) == 3
    manifest = json.loads((out / "bundle" / "bundle.json").read_bytes())
    assert manifest["target"] == {"name": "orin-nano-8gb", "mode": "15W"}
    assert manifest["plan"]["status"] == "predicted"
    assert manifest["calibration"]["samples"] == 4  # the train half
    assert "mAP50-95 on 3 labelled images" in (out / "report.html").read_text(encoding="utf-8")
    assert recipe.main([*arguments, "--stop-after", "bundle"]) == 0  # running again renews


def test_an_unknown_target_is_refused_before_the_work(recipe: ModuleType, arguments: list[str], capsys: Any) -> None:
    assert recipe.main([*arguments, "--target", "orin-mini@15W", "--stop-after", "bundle"]) == 2
    assert "nearest" in capsys.readouterr().err


def test_what_pruning_left_is_trained_when_asked(
    recipe: ModuleType, arguments: list[str], tmp_path: Path, capsys: Any
) -> None:
    pytest.importorskip("torch")
    flags = ["--prune", "0.3", "--recover", "0.03", "--stop-after", "recover"]
    assert recipe.main([*arguments, *flags]) == 0
    found = last_line(capsys)
    assert found["model"] == str(tmp_path / "out" / "recovered.onnx")
    assert (tmp_path / "out" / "recovered.onnx").is_file()
    assert found["loss"][1] <= found["loss"][0] or not found["kept"]
    assert recipe.main([*arguments, "--recover", "1"]) == 2
    assert "--prune R as well" in capsys.readouterr().err


def test_channels_are_removed_first_when_asked(
    recipe: ModuleType, arguments: list[str], tmp_path: Path, capsys: Any
) -> None:
    assert recipe.main([*arguments, "--prune", "0.3", "--stop-after", "bundle"]) == 0
    found = last_line(capsys)
    assert found["model"] == str(tmp_path / "out" / "pruned.onnx")
    assert (tmp_path / "out" / "pruned.mapping.json").is_file()
    assert recipe.main([*arguments, "--prune", "1.5", "--stop-after", "bundle"]) == 2


@pytest.mark.parametrize("stage", ["fetch", "bundle", "pictures"])
def test_stops_after_each_stage(
    recipe: ModuleType, arguments: list[str], tmp_path: Path, stage: str, capsys: Any
) -> None:
    assert recipe.main([*arguments, "--stop-after", stage]) == 0
    assert last_line(capsys)["stage"] == stage
    written = {item.name for item in (tmp_path / "out").glob("*")}
    assert written == {"fetch": set(), "bundle": {"bundle"}, "pictures": {"bundle", "pictures"}}[stage]


@pytest.mark.parametrize(
    ("flags", "code"),
    [
        (["--size", "60"], 2),
        (["--size", "large"], 2),
        (["--seconds", "nan"], 2),
        (["--data", "/no/such"], 2),
        (["--target", "@"], 2),
        (["--model", "/no/such.onnx"], 1),
    ],
)
def test_bad_input_is_one_line_and_an_exit_code(
    recipe: ModuleType, arguments: list[str], tmp_path: Path, flags: list[str], code: int, capsys: Any
) -> None:
    assert recipe.main([*arguments, *flags]) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("recipes.yolo: error:") == 1
    assert not (tmp_path / "out").exists()


def test_folder_without_halves_or_labels_is_refused_before_fetching(
    recipe: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    from tiny_yolo import write_images

    monkeypatch.setattr(recipe, "fetch_model", lambda name: pytest.fail("fetched first"))
    write_images(tmp_path / "plain" / "images" / "train", count=2)
    assert recipe.main(["--out", str(tmp_path / "out"), "--data", str(tmp_path / "plain")]) == 2
    assert "label" in capsys.readouterr().err


def test_interrupt_exits_with_130(
    recipe: ModuleType, arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def interrupt(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(recipe, "create_bundle", interrupt)
    assert recipe.main(arguments) == 130
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "recipes.yolo: interrupted\n")


def test_runs_as_a_module(arguments: list[str]) -> None:
    command = [sys.executable, "-m", "recipes.yolo", *arguments, "--stop-after", "fetch"]
    done = subprocess.run(command, cwd=ROOT, env=dict(os.environ), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["stage"] == "fetch"


@pytest.mark.slow
@pytest.mark.zoo
def test_recipe_on_real_weights(recipe: ModuleType, tmp_path: Path, capsys: Any) -> None:
    assert recipe.main(["--out", str(tmp_path / "out"), "--size", "320", "--seconds", "0.3"]) == 0
    done = last_line(capsys)
    assert done["detections"] >= 10
