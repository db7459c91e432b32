"""``python -m recipes.bert`` on a small random encoder: pruned, packed, scored, measured and reported."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from checkpoints import write_encoder
from textmodels import VOCAB, write_tokenizer

from edgeds.bundle import open_bundle, verify_bundle

pytest.importorskip("tokenizers")
ROOT = Path(__file__).parents[2]
WORDS = ("john smith works at acme", "the movie is very good", "a bad movie !", "who is in paris ?", "running", "a b c")


@pytest.fixture
def recipe(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT))
    monkeypatch.setattr("edgeds.workshop.measure.SPEED_SECONDS", 0.01)
    import recipes.bert as module

    return module


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    write_encoder(folder, "bert", vocab_size=len(VOCAB))
    return write_tokenizer(folder)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    pairs = [(a, b) for a in WORDS for b in WORDS]
    for half in ("dev", "test"):
        lines = [f"{a}\t{b}\t{float(a == b)}" for a, b in pairs]
        (folder / f"sts-{half}.tsv").write_text("sentence1\tsentence2\tscore\n" + "\n".join(lines) + "\n")
    return folder


def run(recipe: ModuleType, capsys: Any, *flags: Any) -> dict[str, Any]:
    code = recipe.main([str(flag) for flag in flags])
    captured = capsys.readouterr()
    assert code == 0, captured.err
    return json.loads(captured.out.strip().splitlines()[-1])


def test_the_whole_recipe(recipe: ModuleType, model: Path, data: Path, tmp_path: Path, capsys: Any) -> None:
    flags = ("--out", tmp_path / "out", "--model", model, "--data", data, "--seconds", 0.4)
    found = run(recipe, capsys, *flags, "--target", "orin-nano-8gb@15W")
    assert verify_bundle(tmp_path / "out" / "bundle") == []
    assert found["stage"] == "bench"
    assert found["plan"]["target"] == "orin-nano-8gb"
    assert abs(found["spearman_float"] - found["spearman_int8"]) < 20
    assert found["fps_float"] > 0
    assert found["fps_int8"] > 0
    assert "Spearman on the test pairs, measured" in Path(found["report"]).read_text(encoding="utf-8")


def test_heads_and_width_are_removed_first_when_asked(
    recipe: ModuleType, model: Path, data: Path, tmp_path: Path, capsys: Any
) -> None:
    flags = ("--out", tmp_path / "out", "--model", model, "--data", data, "--stop-after", "eval")
    found = run(recipe, capsys, *flags, "--heads", 0.34, "--ffn", 0.3)
    assert found["params"][1] < found["params"][0]
    assert Path(found["model"]).name == "pruned.onnx"
    assert found["spearman_int8"] is not None
    with open_bundle(found["bundle"]) as opened:
        assert "tokenizer/vocab.txt" in opened.manifest.files


def test_without_data_edgeds_brings_sentences(recipe: ModuleType, model: Path, tmp_path: Path, capsys: Any) -> None:
    found = run(recipe, capsys, "--out", tmp_path / "out", "--model", model, "--stop-after", "bundle", "--samples", 8)
    assert found["calibration"] <= 8


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--seconds", "0"], "--seconds"),
        (["--max-drop", "1"], "--max-drop needs sentence pairs"),
        (["--heads", "1"], "1"),
        (["--target", "no-board"], "no-board"),
    ],
)
def test_wrong_use(recipe: ModuleType, model: Path, tmp_path: Path, flags: list[str], words: str, capsys: Any) -> None:
    assert recipe.main(["--out", str(tmp_path / "out"), "--model", str(model), *flags]) == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "out" / "bundle").exists()


def test_data_without_a_half_is_named(recipe: ModuleType, model: Path, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "empty").mkdir()
    assert recipe.main(["--out", str(tmp_path / "o"), "--model", str(model), "--data", str(tmp_path / "empty")]) == 2
    assert "holds no *dev* file" in capsys.readouterr().err
