"""``edgeds report`` and ``edgeds bench --record``: one JSON document, exit codes, nothing half-written."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgeds.bundle import Manifest, write_bundle
from edgeds.cli.main import main
from edgeds.report.record import (
    Device,
    LatencyFigures,
    PowerFigures,
    RunRecord,
    ThrottleEvent,
    read_record,
    write_record,
)
from edgeds.specs import Resolution, TensorSpec

ROOT = Path(__file__).parents[3]


def make_run(path: Path, **changes: Any) -> Path:
    values: dict[str, Any] = {
        **{"status": "measured", "title": path.stem, "fps": 31.2, "precision": "int8", "batch": 1},
        "device": Device(board="Jetson Orin NX 16GB", mode="15W", mode_watts=15.0),
        "latency_ms": LatencyFigures(p50_ms=30.0, p99_ms=41.0, samples=(29.0, 30.0, 41.0)),
        "power": PowerFigures(mean_w=12.4, source="hwmon", series=((0.0, 12.0), (1.0, 12.8))),
        "throttle_events": (ThrottleEvent(what="oc1", count=1),),
    }
    write_record(path, RunRecord(**{**values, **changes}))
    return path


def test_json_is_one_document_with_the_contract_s_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = make_run(tmp_path / "a.json"), make_run(tmp_path / "b.json", fps=62.4)
    page, picture = tmp_path / "out/report.html", tmp_path / "out/report.png"
    arguments = [
        "report",
        str(first),
        str(second),
        "--out",
        str(page),
        "--png",
        str(picture),
        "--watts",
        "15",
        "--json",
    ]
    assert main(arguments) == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["report"], data["png"]) == (str(page), str(picture))
    assert [run["title"] for run in data["runs"]] == ["a", "b"]
    assert data["runs"][0]["power_w"] == 12.4
    assert any("2.6 W under the budget of 15 W" in line for line in data["summary"])
    assert any("2 times the frames per second" in line for line in data["summary"])
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert picture.read_bytes()[:4] == b"\x89PNG"


def test_text_is_the_summary_and_the_path(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "a.json", power=PowerFigures(unavailable="no sensor"))
    assert main(["report", str(run), "--out", str(tmp_path / "r.html")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == str(tmp_path / "r.html")
    assert "Power: unavailable, no sensor." in lines


def test_equal_names_get_numbers_and_power_without_a_sensor_is_null(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path / "a.json", power=PowerFigures(unavailable="no sensor"))
    assert main(["report", str(run), str(run), "--out", str(tmp_path / "r.html"), "--json"]) == 0
    runs = json.loads(capsys.readouterr().out)["runs"]
    assert [one["title"] for one in runs] == ["a", "a (2)"]
    assert runs[0]["power_w"] is None
    assert runs[0]["power_source"] == "unavailable: no sensor"


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        (["--out", "r.txt"], "name it FILE.html"),
        (["--out", "r.html", "--png", "r.jpg"], "name it FILE.png"),
        (["--out", "r.html", "--watts", "-3"], "watts"),
        (["--out", "r.html", "--watts", "nan"], "watts"),
        (["--out", "r.html", "--target", "orin-nx-61gb"], "orin-nx-16gb"),
        (["gone.json", "--out", "r.html"], "gone.json"),
        (["--out", "folder.html"], "is a folder"),
        ([], "--out"),
    ],
)
def test_wrong_use_exits_with_2_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], extra: list[str], words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / "a.json")
    (tmp_path / "folder.html").mkdir()
    assert main(["report", "a.json", *extra]) == 2
    assert words in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json", "folder.html"]


def test_picture_without_opencv_names_the_extra_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "cv2", None)
    run = make_run(tmp_path / "a.json")
    page = ["--out", str(tmp_path / "r.html")]
    assert main(["report", str(run), *page, "--png", str(tmp_path / "r.png")]) == 1
    assert "edgeds[vision]" in capsys.readouterr().err
    assert not (tmp_path / "r.html").exists()
    assert main(["report", str(run), *page]) == 0, "the page alone needs none"


def test_page_of_before_stays_when_a_run_is_damaged(tmp_path: Path) -> None:
    page = tmp_path / "r.html"
    page.write_text("before")
    (tmp_path / "bad.json").write_text('{"kind": "edgeds-run", "schema": 1, "fps": NaN}')
    assert main(["report", str(make_run(tmp_path / "a.json")), str(tmp_path / "bad.json"), "--out", str(page)]) == 2
    assert page.read_text() == "before"
    assert not list(tmp_path.glob(".r-*"))


def test_page_written_by_several_at_once_is_whole(tmp_path: Path) -> None:
    run, page = make_run(tmp_path / "a.json"), tmp_path / "r.html"
    from edgeds.report.html import write_report
    from edgeds.report.sources import read_runs

    runs = read_runs(run)
    threads = [threading.Thread(target=write_report, args=(page, runs), kwargs={"title": "t"}) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert page.read_text(encoding="utf-8").endswith("</html>\n")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json", "r.html"]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A convolution, as a bundle for a session."""
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    from onnx import TensorProto, helper, numpy_helper

    root = tmp_path_factory.mktemp("record")
    weight = numpy_helper.from_array(np.ones((2, 3, 3, 3), np.float32), "w")
    node = helper.make_node("Conv", ["x", "w"], ["y"], pads=[1, 1, 1, 1])
    ends = [helper.make_tensor_value_info(n, TensorProto.FLOAT, ["N", c, "H", "W"]) for n, c in (("x", 3), ("y", 2))]
    graph = helper.make_graph([node], "g", ends[:1], ends[1:], [weight])
    imports = [helper.make_opsetid("", 13)]
    onnx.save(helper.make_model(graph, opset_imports=imports, ir_version=8), str(root / "m.onnx"))
    manifest = Manifest(
        task="embed",
        models={"float": "model.onnx"},
        inputs=(TensorSpec(name="x", dtype="float32", shape=("N", 3, "H", "W")),),
        outputs=(TensorSpec(name="y", dtype="float32", shape=("N", 2, "H", "W")),),
        buckets=(Resolution(32, 32),),
        max_batch=2,
        precision="float",
        budget={"watts": 15.0, "fps": 10.0},
        license="MIT",
    )
    return write_bundle(root / "conv.bundle", files={"model.onnx": root / "m.onnx"}, manifest=manifest)


def test_bench_keeps_a_record_that_can_be_reported(
    tmp_path: Path, bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.json"
    bench = ["bench", str(bundle), "--seconds", "0.3", "--warmup", "0", "--threads", "1", "--backend", "cpu", "-q"]
    assert main([*bench, "--record", str(path), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    record = read_record(path)
    assert (record.status, record.origin, record.model, record.sizes) == ("measured", "bench", "conv", ("32x32",))
    assert record.fps == printed["fps"]
    assert record.latency_ms is not None
    assert record.latency_ms.p99_ms == printed["latency_p99_ms"]
    assert len(record.latency_ms.samples) == min(printed["requests"], 5000)
    assert np.percentile(record.latency_ms.samples, 50) == pytest.approx(printed["latency_p50_ms"], rel=0.2)
    assert record.power.mean_w == printed["power_w"]
    assert (record.power.mean_w is None) == (record.power.unavailable is not None)
    assert record.budget.watts == 15.0
    assert not record.interrupted
    assert main(["report", str(path), "--out", str(tmp_path / "r.html"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["runs"][0]["fps"] == printed["fps"]


def test_record_that_cannot_be_written_is_refused_before_the_bench(tmp_path: Path, bundle: Path) -> None:
    assert main(["bench", str(bundle), "--seconds", "600", "--record", str(tmp_path), "-q"]) == 2


def test_interrupted_bench_keeps_what_it_has(
    tmp_path: Path, bundle: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(_load: object, seconds: float, *, what: str, quiet: bool) -> None:
        time.sleep(min(seconds, 0.3))
        if what == "measuring":
            raise KeyboardInterrupt

    monkeypatch.setattr("edgeds.report.bench._wait", interrupt)
    path = tmp_path / "run.json"
    bench = ["bench", str(bundle), "--seconds", "60", "--warmup", "0", "--threads", "1", "--backend", "cpu", "-q"]
    assert main([*bench, "--record", str(path), "--json"]) == 130
    record = read_record(path)
    assert record.interrupted
    assert record.frames
    assert record.frames == json.loads(capsys.readouterr().out)["frames"]


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="sends a signal")
def test_bench_interrupted_by_ctrl_c_keeps_what_it_has(tmp_path: Path, bundle: Path) -> None:
    path = tmp_path / "run.json"
    bench = ["bench", str(bundle), "--seconds", "60", "--warmup", "0", "--threads", "1", "--backend", "cpu"]
    command = [sys.executable, "-m", "edgeds", *bench, "--record", str(path), "--json"]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(ROOT)}
    ) as process:
        assert process.stderr is not None
        seen = b""
        while b"measuring" not in seen:
            seen += process.stderr.read1()  # type: ignore[attr-defined]
            assert process.poll() is None, seen
        threading.Event().wait(0.5)
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    record = read_record(path)
    assert record.interrupted
    assert record.frames == json.loads(out)["frames"]
