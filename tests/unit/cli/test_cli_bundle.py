"""``edgeds bundle``: JSON keys of the contract, exit codes, and class names from files."""

import json
import shutil
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from edgeds.bundle import Manifest, open_bundle, unzip_bundle, verify_bundle, write_bundle, zip_bundle
from edgeds.cli.bundle import read_names
from edgeds.cli.main import main
from edgeds.errors import SpecError
from edgeds.specs import Resolution


def write(out: Path) -> Path:
    manifest = Manifest(
        task="detect", models={"float": "model.onnx"}, inputs=(), outputs=(), precision="float", license="MIT"
    )
    return write_bundle(out, files={"model.onnx": b"weights"}, manifest=manifest)


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return write(tmp_path / "a.bundle")


def run_json(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, dict[str, Any]]:
    code = main([*map(str, arguments), "--json"])
    out = capsys.readouterr().out
    return code, json.loads(out) if out else {}


def test_every_action_gives_task_files_and_ok(bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    archive, out = tmp_path / "a.zip", tmp_path / "out"
    for arguments in (("show", bundle), ("verify", bundle), ("zip", bundle, archive), ("unzip", archive, out)):
        code, data = run_json(capsys, "bundle", *arguments)
        assert code == 0
        assert data["task"] == "detect"
        assert list(data["files"]) == ["model.onnx"]
        assert data["ok"] is True
    assert run_json(capsys, "bundle", "verify", archive)[1]["ok"] is True


@pytest.mark.parametrize("zipped", [False, True])
def test_verify_exits_with_1_and_names_the_file(
    bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], zipped: bool
) -> None:
    (bundle / "model.onnx").write_bytes(b"weightz")
    path = Path(shutil.make_archive(str(tmp_path / "a"), "zip", bundle)) if zipped else bundle
    code, data = run_json(capsys, "bundle", "verify", path)
    assert code == 1
    assert data["ok"] is False
    assert data["problems"]
    assert main(["bundle", "verify", str(path)]) == 1
    assert "1 problem" in capsys.readouterr().out


def test_verify_without_a_readable_manifest_still_answers(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (bundle / "bundle.json").write_text("{")
    code, data = run_json(capsys, "bundle", "verify", bundle)
    assert (code, data["ok"], data["task"], data["files"]) == (1, False, None, {})


@pytest.mark.parametrize("action", ["show", "verify"])
def test_a_path_that_does_not_exist(action: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bundle", action, str(tmp_path / "nope")]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert "nope" in err


def test_show_prints_what_a_person_asks(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bundle", "show", str(bundle)]) == 0
    out = capsys.readouterr().out
    for part in ("detect", "model.onnx", "MIT"):
        assert part in out


def test_show_fits_lines_and_keeps_the_notes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    calibration = {
        "method": "percentile",
        "set_digest": "0123456789abcdef" * 4,
        "shapes": {"images=1x3x64x64": 40},
        "int8_flops_share": 0.972883769977677,
        "float_nodes": [{"node": "/model.23/cv2.0/cv2.0.2/Conv", "reason": "detector tail"}] * 7,
        "notes": ["480x640 is served but no calibration sample had it"],
    }
    manifest = Manifest(
        task="detect",
        models={"float": "m.onnx"},
        inputs=(),
        outputs=(),
        precision="float",
        license="MIT",
        calibration=calibration,
        target={"name": "orin-nano-8gb", "mode": "15W"},
    )
    path = write_bundle(tmp_path / "b", files={"m.onnx": b"x"}, manifest=manifest)
    assert main(["bundle", "show", str(path)]) == 0
    out = capsys.readouterr().out
    assert "set_digest 0123456789ab, shapes images=1x3x64x64 40, int8_flops_share 0.9729, float_nodes 7\n" in out
    assert "note        480x640 is served but no calibration sample had it\n" in out
    assert "target      name orin-nano-8gb mode 15W\n" in out
    assert max(map(len, out.splitlines())) < 200


@pytest.mark.parametrize(("action", "shown"), [("create", 6), ("zip", 1)])
def test_help_of_an_action_shows_its_examples(action: str, shown: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bundle", action, "--help"]) == 0
    examples = capsys.readouterr().out.partition("examples:\n")[2]
    assert examples.count(f"edgeds bundle {action} ") == examples.count("edgeds bundle ") == shown
    assert ("--max-drop 0.5" in examples) == (action == "create"), "continued lines belong to their example"


def test_paths_may_be_text(bundle: Path, tmp_path: Path) -> None:
    archive, out = str(tmp_path / "t.zip"), str(tmp_path / "out")
    zip_bundle(str(bundle), archive)
    unzip_bundle(archive, out)
    assert verify_bundle(archive) == verify_bundle(out) == []
    with open_bundle(out) as opened:
        copy = write_bundle(
            str(tmp_path / "c"), files={"model.onnx": str(opened.path("model.onnx"))}, manifest=opened.manifest
        )
    assert verify_bundle(str(copy)) == []


@pytest.fixture
def create(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A stand-in for the packaging itself, which has its own tests: records the call and writes a small bundle."""
    calls: dict[str, Any] = {}

    def create_bundle(model: Path, *, out: Path, **options: Any) -> Path:
        calls.update(model=model, out=out, **options)
        return write(out)

    module = types.ModuleType("edgeds.workshop.package")
    module.create_bundle = create_bundle  # type: ignore[attr-defined]
    parent = sys.modules.get("edgeds.workshop") or types.ModuleType("edgeds.workshop")
    monkeypatch.setitem(sys.modules, "edgeds.workshop", parent)
    monkeypatch.setattr(parent, "package", module, raising=False)
    monkeypatch.setitem(sys.modules, "edgeds.workshop.package", module)
    return calls


def test_create_passes_everything_on(
    create: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "names.txt").write_text("cat\ndog\n")
    out = tmp_path / "b"
    options = ["--task", "detect", "--calib", "imgs", "--size", "640", "--size", "320x480", "--method", "mse"]
    more = ["--names", tmp_path / "names.txt", "--head", "yolov8", "--max-batch", "4", "--out", out]
    code, data = run_json(capsys, "bundle", "create", "m.onnx", *options, *more)
    assert code == 0
    assert data["bundle"] == str(out)
    assert data["ok"] is True
    wanted = {
        "model": Path("m.onnx"),
        "out": out,
        "task": "detect",
        "calib": Path("imgs"),
        "sizes": (Resolution(640, 640), Resolution(320, 480)),
        "max_batch": 4,
        "method": "mse",
        "names": {0: "cat", 1: "dog"},
        "head": "yolov8",
        "float_only": False,
        "quiet": False,
    }
    assert {key: create[key] for key in wanted} == wanted


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["--calib", "x", "--size", "big"],
        ["--calib", "x", "--max-batch", "0"],
        ["--calib", "x", "--method", "magic"],
    ],
)
def test_create_used_wrongly_exits_with_2(
    create: dict[str, Any], tmp_path: Path, options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bundle", "create", "m.onnx", "--task", "detect", "--out", str(tmp_path / "b"), *options]) == 2
    assert create == {}
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("a.txt", "cat\ndog\n\n", {0: "cat", 1: "dog"}),
        ("a.txt", "\ufeffcat\r\ndog", {0: "cat", 1: "dog"}),
        ("a.json", '["cat", "dog"]', {0: "cat", 1: "dog"}),
        ("a.json", '{"3": "cat", "7": "dog"}', {3: "cat", 7: "dog"}),
    ],
)
def test_class_names_from_files(tmp_path: Path, name: str, text: str, expected: dict[int, str]) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8")
    assert read_names(tmp_path / name) == expected


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.txt", b""),
        ("a.txt", b"cat\n\ndog\n"),
        ("a.txt", b"\xff\xfe"),
        ("a.json", b"[1, 2]"),
        ("a.json", b'{"x": "cat"}'),
        ("a.json", b'{"-1": "cat"}'),
        ("a.json", b'{"0": "cat", "00": "dog"}'),
        ("a.json", b"3"),
        ("a.json", b"{"),
    ],
)
def test_class_names_that_make_no_sense(tmp_path: Path, name: str, text: bytes) -> None:
    (tmp_path / name).write_bytes(text)
    with pytest.raises(SpecError, match=name):
        read_names(tmp_path / name)


def test_missing_names_file(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="cannot be read"):
        read_names(tmp_path / "missing.txt")
