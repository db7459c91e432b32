"""``edgeds doctor`` on a device: made-up Jetson trees, packages that only have TensorRT's name, driver stand-ins."""

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "boards"))

from jetson_tree import make_jetson, write

from edgeds import doctor, doctor_device
from edgeds.doctor import Check, Probe, check_machine, is_healthy
from edgeds.engines.jetson import parse_jetson

RELEASE = "# R{}, REVISION: {}, GCID: 1, BOARD: generic"


def shadow(monkeypatch: pytest.MonkeyPatch, folder: Path, name: str, code: str) -> None:
    """Put a module of that name in front of the installed one, for this process's children."""
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]))


def by_name(checks: list[Check]) -> dict[str, Check]:
    return {check.name: check for check in checks}


def test_a_jetson_without_tensorrt_fails_and_says_everything_that_matters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shadow(monkeypatch, tmp_path / "shadow", "tensorrt", "raise ModuleNotFoundError('No module named tensorrt')")
    checks = by_name(check_machine(root=make_jetson(tmp_path / "root")))
    assert {"jetpack", "power_mode", "swap", "cuda", "cuda_python", "known_bugs", "memory", "gpu"} <= set(checks)
    assert (checks["tensorrt"].ok, checks["tensorrt"].required) == (False, True)
    assert (checks["cuda"].ok, checks["cuda"].required) == (False, True)
    assert "libcuda" in checks["cuda"].message
    assert "Orin NX" in checks["gpu"].message
    assert "JetPack 6.2.1" in checks["jetpack"].message
    assert "15W (id 2)" in checks["power_mode"].message
    assert "7812 of 15625 MiB" in checks["memory"].message
    assert not is_healthy(list(checks.values()))


def test_on_a_machine_without_gpu_and_tensorrt_nothing_about_devices_is_listed(tmp_path: Path) -> None:
    assert doctor_device.device_checks(root=tmp_path, has_gpu=False, has_tensorrt=False) == []
    assert len(doctor_device.device_checks(root=tmp_path, has_gpu=True, has_tensorrt=False)) == 3


@pytest.mark.parametrize(
    ("code", "ok", "words"),
    [
        ("__version__ = '10.3.0'\nBuilder = OnnxParser = Runtime = object", True, ["10.3.0 at ", "tensorrt.py"]),
        ("__version__ = '8.6.2'\nBuilder = OnnxParser = Runtime = object", False, ["8.6.2", "JetPack 6.1"]),
        ("__version__ = '10.3.0'", False, ["is not TensorRT (no Builder)", "uninstall"]),
        ("", False, ["is not TensorRT (no __version__)"]),
        ("raise ImportError('libnvinfer.so.10: cannot open shared object file')", False, ["libnvinfer.so.10"]),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", False, ["signal 11"]),
    ],
    ids=["fine", "old", "stub", "empty", "broken", "crashing"],
)
def test_b125_tensorrt_is_what_it_says_and_text_and_result_agree(
    code: str, ok: bool, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B125: a package that only has the name, or does not load, is never "passed"."""
    shadow(monkeypatch, tmp_path / "shadow", "tensorrt", code)
    monkeypatch.setattr(doctor, "system_pythons", list)
    for required in (True, False):
        check = doctor._check_tensorrt(required=required)
        assert (check.ok, check.required) == (ok, required)
        for word in words:
            assert word in check.message


def test_a_folder_called_tensorrt_is_no_tensorrt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "shadow" / "tensorrt").mkdir(parents=True)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path / "shadow"), os.environ.get("PYTHONPATH", "")]))
    check = doctor._check_tensorrt()
    assert not check.ok
    assert str(tmp_path / "shadow" / "tensorrt") in check.message


def test_b123_a_stub_in_the_system_python_is_not_pointed_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """B123 with a trap: only a TensorRT that works is worth making an environment for."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "tensorrt.py").write_text("__version__ = '10.3.0'")
    python = tmp_path / "python3.10"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{tmp_path / "site"}" exec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    monkeypatch.setattr(doctor, "system_pythons", lambda: [str(python)])
    shadow(monkeypatch, tmp_path / "shadow", "tensorrt", "raise ModuleNotFoundError('No module named tensorrt')")
    check = doctor._check_tensorrt()
    assert not check.ok
    assert "--system-site-packages" not in check.message


@pytest.mark.parametrize(
    ("release", "ok", "word"),
    [
        (RELEASE.format(35, "5.0"), False, "flashing"),
        (RELEASE.format(36, "4.4"), True, "JetPack 6.2.1"),
        (RELEASE.format(39, "2.0"), True, "JetPack 7.2"),
        (RELEASE.format(36, "99.1"), True, "nearest is"),
        ("garbage", True, "not in the known form"),
        (None, True, "inside a container"),
    ],
    ids=["jp5", "jp6", "jp7", "unknown", "garbage", "absent"],
)
def test_b121_only_a_release_known_to_be_too_old_fails(release: str | None, ok: bool, word: str) -> None:
    jetson = parse_jetson("nvidia,p3768-0000+p3767-0005\nnvidia,tegra234", release)
    assert jetson is not None
    check = doctor_device.check_jetpack(jetson)
    assert (check.ok, check.required) == (ok, not ok)
    assert word in check.message


@pytest.mark.parametrize(
    ("status", "conf", "ok", "word"),
    [
        ("pmode:0002\nfmode:x\n", None, True, "15W (id 2)"),
        ("pmode:0009\n", None, False, "not in the machine's nvpmodel.conf"),
        ("nonsense", None, False, "holds no mode"),
        (None, None, False, "No such file"),
        ("pmode:0000\n", "", False, "id 0"),
    ],
)
def test_the_power_mode_is_named_by_the_machines_own_table(
    tmp_path: Path, status: str | None, conf: str | None, ok: bool, word: str
) -> None:
    check = doctor_device.check_power_mode(make_jetson(tmp_path, status=status, conf=conf))
    assert (check.ok, check.required) == (ok, False)
    assert word in check.message


def test_swap(tmp_path: Path) -> None:
    root = make_jetson(tmp_path)
    assert "unknown" in doctor_device.check_swap(root).message
    write(root, "proc/meminfo", "SwapTotal:      1024000 kB\nSwapFree:  1024000 kB\n")
    small = doctor_device.check_swap(root)
    assert not small.ok
    assert "1000 MiB" in small.message
    write(root, "proc/meminfo", "SwapTotal:      8388608 kB\nSwapFree:  4194304 kB\n")
    assert doctor_device.check_swap(root).message == "4096 of 8192 MiB free"
    assert "unknown" in doctor_device.check_swap(tmp_path / "nowhere").message


def test_known_bugs_follow_tensorrt_and_board() -> None:
    jetson = parse_jetson("nvidia,p3768-0000+p3767-0005\nnvidia,tegra234", RELEASE.format(39, "2.0"))
    check = doctor_device.check_known_bugs(jetson, tensorrt="10.16.2.10")
    assert not check.ok
    assert "issues/4832" in check.message
    assert "issues/4832" not in doctor_device.check_known_bugs(None, tensorrt="10.16.2.10").message
    assert doctor_device.check_known_bugs(None, tensorrt="").ok


def test_cuda_is_told_with_the_libraries_that_were_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = {
        "name": "Orin",
        "capability": "8.7",
        "binding": "ctypes",
        "integrated": True,
        "driver": 12060,
        "libraries": ["/usr/lib/aarch64-linux-gnu/nvidia/libcuda.so.1.1"],
    }
    monkeypatch.setattr(doctor_device, "probe", lambda _code: Probe(facts=facts))
    check = doctor_device.check_cuda(required=True)
    assert check.ok
    for word in ("Orin", "8.7", "CUDA 12.6", "/nvidia/libcuda.so.1.1", "shares the CPU's memory"):
        assert word in check.message


def test_no_binding_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_device, "probe", lambda _code: Probe(facts={}))
    assert doctor_device.check_cuda_python().ok
    monkeypatch.setattr(doctor_device, "probe", lambda _code: Probe(facts={"pycuda": "2024.1"}))
    assert doctor_device.check_cuda_python().message == "pycuda 2024.1"
