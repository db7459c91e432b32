"""``edgeds run`` and ``edgeds eval`` from the outside: output forms, files, exit codes."""

from __future__ import annotations

import json

import numpy as np
import pytest
from grid_model import cell_picture, write_grid_model

from edgeds.cli.main import main

cv2 = pytest.importorskip("cv2")
pytest.importorskip("onnxruntime")
pytest.importorskip("onnx")


@pytest.fixture
def model(tmp_path) -> str:
    return str(write_grid_model(tmp_path / "grid.onnx"))


@pytest.fixture
def images(tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    cv2.imwrite(str(folder / "a.png"), cell_picture((1, 2, "red"), scale=2))
    cv2.imwrite(str(folder / "b.png"), cell_picture((3, 3, "green"), scale=2))
    return folder


def lines(text: str) -> list[dict]:
    return [json.loads(line) for line in text.splitlines()]


def test_run_prints_one_json_line_per_frame(model, images, capsys) -> None:
    (images / "broken.png").write_bytes(b"")
    assert main(["run", model, str(images), "--json", "--threads", "1"]) == 0
    out = lines(capsys.readouterr().out)
    assert [(line["frame"], len(line["detections"])) for line in out] == [(0, 1), (1, 1), (2, 0)]
    assert out[0]["source"].endswith("a.png")
    assert {"xyxy", "conf", "cls", "label"} <= set(out[0]["detections"][0])
    assert out[0]["detections"][0]["label"] == "red"
    assert out[0]["detections"][0]["xyxy"] == [16.0, 32.0, 32.0, 48.0]
    assert "broken.png" in out[2]["error"]


def test_run_saves_pictures_and_videos(model, images, tmp_path, capsys) -> None:
    writer = cv2.VideoWriter(str(tmp_path / "v.avi"), cv2.VideoWriter_fourcc(*"MJPG"), 20, (64, 64))
    for _ in range(5):
        writer.write(cell_picture((1, 2, "red")))
    writer.release()
    out = tmp_path / "out"
    code = main(["run", model, str(images), str(images / "a.png"), str(tmp_path / "v.avi"), "--save", str(out)])
    assert code == 0
    assert "8 frames" in capsys.readouterr().out
    names = sorted(path.name for path in out.iterdir())
    assert names[:3] == ["a.png", "a_2.png", "b.png"]
    (video,) = [path for path in out.iterdir() if path.stem == "v"]
    capture = cv2.VideoCapture(str(video))
    frames = 0
    while capture.read()[0]:
        frames += 1
    capture.release()
    assert frames == 5
    drawn = cv2.imread(str(out / "a.png"))
    assert (drawn != cv2.imread(str(images / "a.png"))).any()


def test_frames_and_thresholds(model, images, capsys) -> None:
    assert main(["run", model, str(images), "--json", "--frames", "1", "--conf", "1.0"]) == 0
    (line,) = lines(capsys.readouterr().out)
    assert line["detections"] == []


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["gone.jpg"], 1, "gone.jpg"),
        (["IN", "--conf", "7"], 2, "conf"),
        (["IN", "--frames", "0"], 2, "--frames"),
        (["IN", "--save", "MODEL"], 2, "folder"),
        (["IN", "--save", "IN"], 2, "replace the source"),
        (["IN", "--precision", "int8"], 2, "--precision"),
        (["IN", "--head", "v5"], 2, "outputs"),
        (["IN", "--size", "100x"], 2, "size"),
        (["IN/empty.png"], 1, "empty.png"),
    ],
)
def test_run_refusals(model, images, capsys, arguments, code, message) -> None:
    (images / "empty.png").write_bytes(b"")
    places = {"IN": str(images), "MODEL": model}
    for name, place in places.items():
        arguments = [place + text[len(name) :] if text.startswith(name) else text for text in arguments]
    before = sorted(path.name for path in images.iterdir())
    assert main(["run", model, *arguments]) == code
    errors = capsys.readouterr().err
    assert message in errors
    assert "Traceback" not in errors
    assert sorted(path.name for path in images.iterdir()) == before


@pytest.fixture
def labelled(tmp_path):
    for part in ("images", "labels"):
        (tmp_path / "data" / part).mkdir(parents=True)
    for index, (column, row, color) in enumerate([(1, 2, "red"), (3, 3, "green"), (7, 0, "green")]):
        cv2.imwrite(str(tmp_path / "data" / "images" / f"{index}.png"), cell_picture((column, row, color)))
        label = f"{int(color == 'green')} {(column + 0.5) / 8} {(row + 0.5) / 8} 0.125 0.125\n"
        (tmp_path / "data" / "labels" / f"{index}.txt").write_text(label)
    return tmp_path / "data"


def test_eval_reports_map_and_checks_a_limit(model, labelled, capsys) -> None:
    assert main(["eval", model, "--data", str(labelled), "--json", "--min-map", "0.99"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["metric"], report["value"], report["map50"], report["map50_95"]) == ("map50_95", 1.0, 1.0, 1.0)
    assert report["per_class"] == {"red": 1.0, "green": 1.0}
    (labelled / "labels" / "0.txt").write_text("1 0.5 0.5 0.1 0.1\n")
    assert main(["eval", model, "--data", str(labelled), "--min-map", "0.99"]) == 1
    captured = capsys.readouterr()
    assert "below --min-map" in captured.err
    assert "map50_95" in captured.out


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--data", "gone"], 2, "gone"),
        (["--data", "DATA", "--split", "test"], 2, "no split 'test'"),
        (["--data", "DATA", "--min-map", "45"], 2, "0 to 1"),
        (["--data", "DATA", "--limit", "0"], 2, "limit"),
        ([], 2, "--data"),
    ],
)
def test_eval_refusals(model, labelled, capsys, arguments, code, message) -> None:
    arguments = [str(labelled) if text == "DATA" else text for text in arguments]
    assert main(["eval", model, *arguments]) == code
    assert message in capsys.readouterr().err


def test_interrupting_leaves_nothing_half_written(model, tmp_path, monkeypatch) -> None:
    from edgeds.cli import saving

    out = tmp_path / "out"
    real = saving.ResultWriter.write

    def stop_at_third(self, frame, result) -> None:
        if frame.index == 2:
            raise KeyboardInterrupt
        real(self, frame, result)

    monkeypatch.setattr(saving.ResultWriter, "write", stop_at_third)
    folder = tmp_path / "in"
    folder.mkdir()
    for index in range(4):
        cv2.imwrite(str(folder / f"{index}.png"), np.zeros((64, 64, 3), np.uint8))
    assert main(["run", model, str(folder), "--save", str(out)]) == 130
    assert sorted(path.name for path in out.iterdir()) == ["0.png", "1.png"]
