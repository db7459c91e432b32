"""``python -m recipes.llm`` on a small random model: packed, scored, measured and reported."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from llmmodels import write_llm

from edgeds.bundle import verify_bundle

pytest.importorskip("tokenizers")
ROOT = Path(__file__).parents[2]


@pytest.fixture
def recipe(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT))
    import recipes.llm as module

    return module


def run(recipe: ModuleType, capsys: Any, *flags: Any) -> dict[str, Any]:
    assert recipe.main([str(flag) for flag in flags]) == 0
    return json.loads(capsys.readouterr().out.strip().splitlines()[-1])


def test_the_whole_recipe(recipe: ModuleType, tmp_path: Path, capsys: Any) -> None:
    source = write_llm(tmp_path / "model")
    data = tmp_path / "text.txt"
    data.write_text("the quick brown fox jumps over the lazy dog.\n" * 40)
    flags = ("--out", tmp_path / "out", "--model", source, "--data", data, "--seconds", 0.6, "--tokens", 256)
    found = run(recipe, capsys, *flags, "--weights", "int4", "--target", "orin-nano-8gb@15W")
    assert verify_bundle(tmp_path / "out" / "bundle") == []
    assert found["stage"] == "bench"
    assert found["weights"] == "int4"
    assert found["predicted"]["label"] == "predicted"
    assert 0.3 < found["perplexity"] / found["perplexity_float"] < 3
    assert found["tokens_per_s_one"] > 0
    assert found["tokens_per_s_eight"] > 0
    page = Path(found["report"]).read_text(encoding="utf-8")
    assert "Perplexity, measured" in page
    assert "Predicted for orin-nano-8gb@15W" in page
    stored = json.loads((tmp_path / "out" / "report.json").read_text())
    assert stored["bench"]["eight"]["load"]["concurrency"] == 8


def test_stages_end_where_they_are_told_and_float_needs_no_reference(
    recipe: ModuleType, tmp_path: Path, capsys: Any
) -> None:
    source = write_llm(tmp_path / "model")
    (tmp_path / "data").mkdir()
    for half in ("test", "train"):
        (tmp_path / "data" / f"{half}.txt").write_text("some words to read. " * 20)
    flags = ("--out", tmp_path / "out", "--model", source, "--data", tmp_path / "data", "--tokens", 64)
    found = run(recipe, capsys, *flags, "--weights", "float", "--stop-after", "eval")
    assert found["perplexity"] > 1
    assert "perplexity_float" not in found
    assert "report" not in found
    assert not (tmp_path / "out" / "text").exists(), "the folder has both halves"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--seconds", "0"], "--seconds"),
        (["--tokens", "1"], "--tokens"),
        (["--data", "missing"], "missing"),
        (["--target", "no-board"], "no-board"),
    ],
)
def test_wrong_use(recipe: ModuleType, tmp_path: Path, flags: list[str], words: str, capsys: Any) -> None:
    source = write_llm(tmp_path / "model")
    code = recipe.main(["--out", str(tmp_path / "out"), "--model", str(source), *flags])
    assert code in (1, 2)
    assert words in capsys.readouterr().err
    assert not (tmp_path / "out" / "bundle").exists()
