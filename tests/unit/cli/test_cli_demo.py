"""``edgeds demo`` and ``edgeds bundle create``: flags reach the work, JSON keys of the contract, exit codes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgeds.bundle import Manifest, write_bundle
from edgeds.cli.main import main
from edgeds.errors import ModelError
from edgeds.specs import Resolution


@pytest.fixture
def demo_calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    from edgeds.workshop import demo

    calls: list[dict[str, Any]] = []

    def fake(out: Path, **options: Any) -> demo.DemoResult:
        calls.append({"out": out, **options})
        print("a library that prints")
        return demo.DemoResult(
            bundle=out / "bundle",
            images=(out / "pictures" / "a\udcff.jpg",),
            fps_float=20.0,
            fps_int8=30.0,
            report=out / "report.html",
            detections=3,
        )

    monkeypatch.setattr(demo, "run_demo", fake)
    return calls


def test_demo_prints_one_json_document(demo_calls: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--out", "x", "--data", "d", "--size", "320", "--seconds", "2", "--replace", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert {"bundle", "images", "fps_float", "fps_int8", "report"} <= set(data)
    assert (data["bundle"], data["fps_int8"]) == ("x/bundle", 30.0)
    (call,) = demo_calls
    assert (call["data"], call["long_side_px"], call["seconds"], call["replace"]) == (Path("d"), 320, 2.0, True)


def test_demo_prints_figures_for_people(demo_calls: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo"]) == 0
    text = capsys.readouterr().out
    assert "1.50 x float" in text
    assert "edgeds-demo/report.html" in text


def test_demo_runs_twice_but_replaces_a_named_folder_only_when_told(demo_calls: list[dict[str, Any]]) -> None:
    for arguments in ([], ["--out", "edgeds-demo"], ["--out", "x", "--replace"]):
        assert main(["demo", *arguments]) == 0
    assert [(str(call["out"]), call["replace"]) for call in demo_calls] == [
        ("edgeds-demo", True),
        ("edgeds-demo", False),
        ("x", True),
    ]


@pytest.mark.parametrize("arguments", [["--size", "16"], ["--size", "9999"], ["--seconds", "0"], ["--seconds", "nan"]])
def test_demo_refuses_bad_figures(
    demo_calls: list[dict[str, Any]], arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", *arguments]) == 2
    assert arguments[0] in capsys.readouterr().err
    assert demo_calls == []


def test_demo_failures_are_sentences(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from edgeds.workshop import demo

    def offline(*_: Any, **__: Any) -> Any:
        raise ModelError("yolo11n cannot be fetched; put yolo11n.onnx into /cache")

    monkeypatch.setattr(demo, "fetch_model", offline)
    assert main(["demo", "--out", str(tmp_path / "out"), "--json"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "edgeds demo: error: yolo11n cannot be fetched; put" in captured.err
    (tmp_path / "out").write_bytes(b"")
    assert main(["demo", "--out", str(tmp_path / "out")]) == 2
    assert main(["demo", "--out", str(tmp_path / "none"), "--data", str(tmp_path / "no")]) == 2


@pytest.fixture
def create_calls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[dict[str, Any]]:
    from edgeds.workshop import package

    calls: list[dict[str, Any]] = []

    def fake(model: Path, **options: Any) -> Path:
        calls.append({"model": model, **options})
        manifest = Manifest(
            task="detect", models={"float": "m.onnx"}, inputs=(), outputs=(), precision="float", license="MIT"
        )
        return write_bundle(options["out"], files={"m.onnx": b"x"}, manifest=manifest, replace=True)

    monkeypatch.setattr(package, "create_bundle", fake)
    return calls


def test_create_passes_every_flag(
    create_calls: list[dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = tmp_path / "names.txt"
    names.write_text("cat\ndog\n", encoding="utf-8")
    flags = ["--calib", "c", "--size", "384x640", "--size", "640", "--max-batch", "4", "--method", "percentile"]
    flags += ["--percentile", "99.9", "--samples", "12", "--eval", "e", "--split", "val", "--max-drop", "0.5"]
    flags += ["--target", "orin@15W", "--names", str(names), "--head", "yolov8", "--replace", "--json"]
    assert main(["bundle", "create", "m.onnx", "--task", "detect", "--out", str(tmp_path / "b"), *flags]) == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["task"], data["ok"], list(data["files"])) == ("detect", True, ["m.onnx"])
    assert {"bundle", "accuracy", "calibration"} <= set(data)
    (call,) = create_calls
    assert call["sizes"] == (Resolution(384, 640), Resolution(640, 640))
    wanted = {
        **{"calib": Path("c"), "max_batch": 4, "method": "percentile", "percentile": 99.9, "samples": 12},
        **{"evaluate": Path("e"), "split": "val", "max_drop": 0.5, "target": "orin@15W", "head": "yolov8"},
        **{"names": {0: "cat", 1: "dog"}, "replace": True, "float_only": False},
    }
    assert {key: call[key] for key in wanted} == wanted


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "--calib"),
        (["--calib", "c", "--max-batch", "0"], "--max-batch"),
        (["--calib", "c", "--method", "mse", "--percentile", "99"], "--percentile belongs"),
        (["--calib", "c", "--size", "big"], "'big'"),
        (["--calib", "c", "--max-drop", "1"], "--eval"),
        (["--calib", "c", "--float-only"], "leave --calib out"),
        (["--calib", "c", "--target", "@15W"], "BOARD@MODE"),
        (["--calib", "c", "--names", "/no/such.txt"], "/no/such.txt"),
    ],
)
def test_create_used_wrongly_exits_with_2(
    tmp_path: Path, flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "b"
    assert main(["bundle", "create", "none.onnx", "--task", "detect", "--out", str(out), *flags]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""
    assert not out.exists()


def test_names_that_are_not_utf8_are_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = tmp_path / "n.txt"
    names.write_bytes("café".encode("latin-1"))
    arguments = ["m.onnx", "--task", "detect", "--calib", "c", "--out", str(tmp_path / "b"), "--names", str(names)]
    assert main(["bundle", "create", *arguments]) == 2
    assert "n.txt: class names: is not UTF-8 text (byte 3)" in capsys.readouterr().err


def test_create_really_works_from_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    monkeypatch.setattr("edgeds.workshop.measure.SPEED_SECONDS", 0.01)
    weight = np.random.default_rng(0).normal(size=(4, 8)).astype(np.float32)
    graph = helper.make_graph(
        [helper.make_node("Gemm", ["x", "w"], ["y"], name="fc", transB=1)],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 8])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 4])],
        [numpy_helper.from_array(weight, "w")],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), tmp_path / "m.onnx")
    np.savez(tmp_path / "feeds.npz", x=np.random.default_rng(1).normal(size=(9, 8)).astype(np.float32))
    arguments = [
        "bundle",
        "create",
        str(tmp_path / "m.onnx"),
        "--task",
        "score",
        "--calib",
        str(tmp_path / "feeds.npz"),
    ]
    assert main([*arguments, "--samples", "5", "--out", str(tmp_path / "b"), "--json", "-q"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["calibration"]["samples"] == 5
    assert data["calibration"]["int8_flops_share"] == 1.0
    assert main([*arguments, "--out", str(tmp_path / "b")]) == 2
    assert main([*arguments, "--out", str(tmp_path / "b"), "--replace", "-q"]) == 0
    capsys.readouterr()
    assert main(["bundle", "verify", str(tmp_path / "b"), "--json"]) == 0


def test_writer_already_there_exits_with_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from edgeds.workshop.outfolder import claim_folder

    out = tmp_path / "b"
    with claim_folder(out, replace=False, ours=(), what="a bundle"):
        assert main(["bundle", "create", "m.onnx", "--task", "detect", "--float-only", "--out", str(out)]) == 1
    assert "another edgeds is writing it" in capsys.readouterr().err
