"""``edgeds doctor``: text and exit code agree, whichever part is missing or broken."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from edgeds import doctor
from edgeds.cli.main import main
from edgeds.doctor import Check, Probe

OPTIONAL = {
    "onnxruntime": ("onnxruntime", "edgeds[cpu]"),
    "cv2": ("opencv", "edgeds[vision]"),
    "onnx": ("onnx", "edgeds[workshop]"),
    "pycocotools": ("pycocotools", "edgeds[workshop]"),
}


def run_json(capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any], dict[str, dict[str, Any]]]:
    code = main(["doctor", "--json", "-q"])
    data = json.loads(capsys.readouterr().out)
    return code, data, {check["name"]: check for check in data["checks"]}


def shadow(monkeypatch: pytest.MonkeyPatch, folder: Path, name: str, code: str) -> None:
    """Put a module of that name in front of the installed one, for this process's children."""
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]))


def test_this_machine_passes_and_names_every_part(capsys: pytest.CaptureFixture[str]) -> None:
    code, data, checks = run_json(capsys)
    assert code == 0
    assert data["ok"] is True
    assert {
        "python",
        "numpy",
        "onnxruntime",
        "opencv",
        "onnx",
        "pycocotools",
        "tensorrt",
        "gpu",
        "memory",
        "cache",
    } <= (set(checks))
    for check in checks.values():
        assert set(check) == {"name", "ok", "required", "message"}
        assert check["message"]
    assert "ran a small model" in checks["onnxruntime"]["message"]
    assert "GStreamer" in checks["opencv"]["message"]


@pytest.mark.parametrize("module", OPTIONAL)
@pytest.mark.parametrize(
    ("code", "word"),
    [
        ("raise ModuleNotFoundError('No module named x')", "not installed"),
        ("raise ImportError('libGL.so.1: cannot open shared object file')", "libGL.so.1"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "signal 11"),
    ],
    ids=["missing", "broken", "crashing"],
)
def test_b125_an_optional_part_that_is_missing_or_broken(
    module: str, code: str, word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B125: the part is reported as not ok with the command that brings it, and the exit code says the same."""
    name, extra = OPTIONAL[module]
    shadow(monkeypatch, tmp_path / "shadow", module, code)
    check = {
        "onnxruntime": doctor._check_onnxruntime,
        "opencv": doctor._check_opencv,
        "onnx": lambda: doctor._check_import("onnx", fix="pip install 'edgeds[workshop]'"),
        "pycocotools": lambda: doctor._check_import("pycocotools", fix="pip install 'edgeds[workshop]'"),
    }[name]()
    assert (check.name, check.ok, check.required) == (name, False, False)
    assert word in check.message
    assert extra in check.message


def test_b125_exit_code_and_text_agree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shadow(monkeypatch, tmp_path / "shadow", "onnxruntime", "raise ModuleNotFoundError('No module named x')")
    assert main(["doctor", "-q"]) == 0
    out = capsys.readouterr().out
    assert "required: all fine" in out
    assert "onnxruntime" in out.splitlines()[-1]
    shadow(monkeypatch, tmp_path / "shadow", "tqdm", "raise ImportError('broken')")
    assert main(["doctor", "-q"]) == 1
    out = capsys.readouterr().out
    assert "required: FAILED: tqdm" in out
    assert "all fine" not in out
    code, data, checks = run_json(capsys)
    assert (code, data["ok"], checks["tqdm"]["ok"]) == (1, False, False)


def test_a_runtime_that_computes_wrongly_is_not_ok(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = {"version": "9", "providers": [], "result": [2.0, 5.0]}
    monkeypatch.setattr(doctor, "probe", lambda *_args, **_options: Probe(facts=facts))
    check = doctor._check_onnxruntime()
    assert not check.ok
    assert "[2.0, 5.0]" in check.message


def test_b59_a_cache_that_cannot_be_written_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """B59: said early, with place and way out. A file stands in for a read-only folder, as root writes anywhere."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("EDGEDS_CACHE", str(tmp_path / "file" / "cache"))
    code, _, checks = run_json(capsys)
    assert code == 1
    assert checks["cache"]["required"] is True
    assert str(tmp_path / "file") in checks["cache"]["message"]
    assert "EDGEDS_CACHE" in checks["cache"]["message"]


def test_looking_at_the_cache_does_not_create_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGEDS_CACHE", str(tmp_path / "a" / "b"))
    assert doctor._check_cache().ok
    assert list(tmp_path.iterdir()) == []


def test_b123_tensorrt_of_the_system_python_is_pointed_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """B123: TensorRT is there, but for another Python; say which, and how to make an environment that sees it."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "tensorrt.py").write_text("__version__ = '10.3.0'\nBuilder = object")
    python = tmp_path / "python3.10"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{tmp_path / "site"}" exec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    monkeypatch.setattr(doctor, "system_pythons", lambda: [str(tmp_path / "missing"), str(python)])
    shadow(monkeypatch, tmp_path / "shadow", "tensorrt", "raise ModuleNotFoundError('No module named tensorrt')")
    check = doctor._check_tensorrt()
    assert (check.ok, check.required) == (False, False)
    for part in ("10.3.0", str(python), "--system-site-packages"):
        assert part in check.message


def test_a_probe_that_hangs_or_babbles_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "PROBE_TIMEOUT_S", 0.2)
    assert "no answer" in str(doctor.probe("import time; time.sleep(20); r = {}").error)
    monkeypatch.setattr(doctor, "PROBE_TIMEOUT_S", 60)
    assert doctor.probe("r = {}; import atexit; atexit.register(print, 'bye')").error == "unexpected answer 'bye'"
    assert doctor.probe("print('hello'); r = dict(version='1')").facts == {"version": "1"}
    assert "cannot be started" in str(doctor.probe("r = {}", python="/no/such/python").error)


def test_a_file_in_the_current_folder_is_not_taken_for_a_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "onnx.py").write_text("__version__ = 'fake'")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    assert doctor.probe(doctor._PROBES["onnx"]).facts.get("version") != "fake"


@pytest.mark.parametrize("text", ["", "MemTotal: x kB", "garbage", "MemTotal:\nMemAvailable:"])
def test_unknown_memory_is_unknown_not_zero(tmp_path: Path, text: str) -> None:
    (tmp_path / "meminfo").write_text(text)
    check = doctor._check_memory(tmp_path / "meminfo")
    assert check.ok
    assert "unknown" in check.message


def test_low_memory_is_said(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 4096000 kB\nMemAvailable: 204800 kB\n")
    check = doctor._check_memory(tmp_path / "meminfo")
    assert not check.ok
    assert "200 of 4000 MiB" in check.message


def test_healthy_means_every_required_check() -> None:
    good = Check(name="a", ok=True, required=True, message="m")
    optional = Check(name="b", ok=False, required=False, message="m")
    bad = Check(name="c", ok=False, required=True, message="m")
    assert doctor.is_healthy([good, optional])
    assert not doctor.is_healthy([good, bad])
