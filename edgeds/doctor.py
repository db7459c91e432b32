"""Check what this machine has. Each part is looked at in its own process: a broken library cannot stop the rest."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgeds.errors import SpecError
from edgeds.files import cache_dir

PROBE_TIMEOUT_S = 60
LOW_MEMORY_MIB = 1024

# y = x + x over two floats, opset 13, IR 7: made once with onnx.helper, so that onnx is not needed here.
TINY_MODEL = "CAc6NQoOCgF4CgF4EgF5IgNBZGQSAWdaDwoBeBIKCggIARIECgIIAmIPCgF5EgoKCAgBEgQKAggCQgQKABAN"

_PROBES = {
    "numpy": "import numpy as m; r = dict(version=m.__version__)",
    "tqdm": "import tqdm as m; r = dict(version=m.__version__)",
    "onnx": "import onnx as m; r = dict(version=m.__version__)",
    "pycocotools": (
        "import pycocotools.mask; from importlib.metadata import version; r = dict(version=version('pycocotools'))"
    ),
    # A package that only has the name is not what an environment should be made for.
    "tensorrt": "import tensorrt as m; m.Builder; r = dict(version=m.__version__)",
    "onnxruntime": (
        "import base64, numpy, onnxruntime as m\n"
        f"model = base64.b64decode({TINY_MODEL!r})\n"
        "o = m.SessionOptions(); o.intra_op_num_threads = 1\n"
        "s = m.InferenceSession(model, o, providers=['CPUExecutionProvider'])\n"
        "y = s.run(None, {'x': numpy.array([1, 2], numpy.float32)})[0].tolist()\n"
        "r = dict(version=m.__version__, providers=m.get_available_providers(), result=y)"
    ),
    "opencv": (
        "import cv2 as m\n"
        "b = {k.strip(): v.strip() for k, _, v in (x.partition(':') for x in m.getBuildInformation().splitlines())}\n"
        "r = dict(version=m.__version__, file=m.__file__, gui=b.get('GUI', ''), gstreamer=b.get('GStreamer', 'NO'))"
    ),
}


@dataclass(frozen=True, kw_only=True)
class Check:
    """The result of one check. The machine passes when every required check is ok."""

    name: str
    ok: bool
    required: bool
    message: str


@dataclass(frozen=True, kw_only=True)
class Probe:
    """What importing one part gave: its facts, or the reason why it cannot be used."""

    facts: dict[str, Any]
    error: str | None = None

    @property
    def is_missing(self) -> bool:
        return self.error is not None and self.error.startswith("ModuleNotFoundError")


def check_machine(*, root: Path = Path("/")) -> list[Check]:
    """Run all checks, in parallel where they start a process. Raises nothing; a failed check is in the result.

    On a machine with a GPU, and on a Jetson above all, what engines need is looked at too; ``root`` is where files of
    the system are read.
    """
    from edgeds.doctor_device import device_checks
    from edgeds.engines.jetson import read_jetson

    is_jetson = read_jetson(root) is not None
    checks: list[Callable[[], Check]] = [
        _check_python,
        lambda: _check_import("numpy", required=True, fix="pip install 'numpy>=1.24'"),
        lambda: _check_import("tqdm", required=True, fix="pip install tqdm"),
        _check_cache,
        _check_onnxruntime,
        _check_opencv,
        lambda: _check_import("onnx", fix="needed for inspect and quantize: pip install 'edgeds[workshop]'"),
        lambda: _check_import("pycocotools", fix="needed for eval: pip install 'edgeds[workshop]'"),
        lambda: _check_memory(root / "proc/meminfo"),
    ]
    with ThreadPoolExecutor(max_workers=4) as pool:
        first = [pool.submit(lambda: _check_tensorrt(required=is_jetson)), pool.submit(lambda: _check_gpu(root))]
        futures = [pool.submit(check) for check in checks]
        tensorrt, gpu = (future.result() for future in first)
        more = device_checks(root=root, has_gpu=gpu.ok, has_tensorrt=tensorrt.ok)
        found = [*(future.result() for future in futures), tensorrt, gpu]
        return [*found, *(future.result() for future in [pool.submit(check) for check in more])]


def is_healthy(checks: Sequence[Check]) -> bool:
    """Whether every required check is ok."""
    return all(check.ok for check in checks if check.required)


def probe(code: str, *, python: str = sys.executable) -> Probe:
    """Run ``code`` (which sets ``r``) in a new Python process and return ``r``, or why it failed."""
    # Without '' in the path a file named onnx.py in the current folder does not count as the package.
    script = f"import sys; sys.path[:] = filter(None, sys.path)\n{code}\nimport json; print('\\n' + json.dumps(r))"
    try:
        done = subprocess.run(
            [python, "-c", script],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=PROBE_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        return Probe(facts={}, error=f"no answer within {PROBE_TIMEOUT_S} s")
    except OSError as error:
        return Probe(facts={}, error=f"{python} cannot be started: {error.strerror or error}")
    if done.returncode < 0:
        return Probe(facts={}, error=f"the process was killed by signal {-done.returncode} (a broken native library?)")
    lines = (done.stdout if done.returncode == 0 else done.stderr).decode("utf-8", "replace").split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), "no message")
    if done.returncode:
        return Probe(facts={}, error=last)
    try:
        return Probe(facts=json.loads(last))
    except ValueError:
        return Probe(facts={}, error=f"unexpected answer {last[:80]!r}")


def _check_python() -> Check:
    version = platform.python_version()
    kind = "virtual environment" if sys.prefix != sys.base_prefix else "no virtual environment"
    ok = sys.version_info >= (3, 10)
    fix = "" if ok else "; edgeds needs 3.10 or newer"
    return Check(name="python", ok=ok, required=True, message=f"{version} at {sys.executable} ({kind}){fix}")


def _check_import(name: str, *, fix: str, required: bool = False) -> Check:
    found = probe(_PROBES[name])
    if found.error is None:
        return Check(name=name, ok=True, required=required, message=str(found.facts["version"]))
    return Check(name=name, ok=False, required=required, message=f"{_reason(found)}; {fix}")


def _check_onnxruntime() -> Check:
    found = probe(_PROBES["onnxruntime"])
    if found.error is not None:
        fix = "needed to run models on the CPU: pip install 'edgeds[cpu]'"
        return Check(name="onnxruntime", ok=False, required=False, message=f"{_reason(found)}; {fix}")
    facts = found.facts
    if facts["result"] != [2.0, 4.0]:
        message = f"{facts['version']} computed {facts['result']} for [1, 2] + [1, 2]; reinstall it"
        return Check(name="onnxruntime", ok=False, required=False, message=message)
    message = f"{facts['version']}, ran a small model; providers: {', '.join(facts['providers'])}"
    return Check(name="onnxruntime", ok=True, required=False, message=message)


def _check_opencv() -> Check:
    found = probe(_PROBES["opencv"])
    if found.error is not None:
        fix = "needed for images and video: pip install 'edgeds[vision]' (on a Jetson use JetPack's own OpenCV)"
        return Check(name="opencv", ok=False, required=False, message=f"{_reason(found)}; {fix}")
    facts = found.facts
    headless = facts["gui"].upper() in ("", "NONE")
    windows = "headless: no windows (pip install opencv-python instead to get them)" if headless else "with windows"
    streams = "with GStreamer" if facts["gstreamer"].upper().startswith("YES") else "without GStreamer"
    message = f"{facts['version']}, {windows}, {streams}, from {Path(facts['file']).parent}"
    return Check(name="opencv", ok=True, required=False, message=message)


def _check_tensorrt(*, required: bool = False) -> Check:
    from edgeds.doctor_device import TENSORRT_PROBE, check_tensorrt_facts, rtx_version

    found = probe(TENSORRT_PROBE)
    if found.error is None:
        return check_tensorrt_facts(found, required=required)
    elsewhere = _find_system_tensorrt()
    if not found.is_missing or elsewhere is None:
        rtx = rtx_version(probe) if found.is_missing else None
        also = f"; TensorRT-RTX {rtx} is there, for 'edgeds build --rtx'" if rtx is not None else ""
        message = f"{_reason(found)}; needed only to run on NVIDIA GPUs, it comes with JetPack{also}"
        return Check(name="tensorrt", ok=False, required=required, message=message)
    python, facts = elsewhere
    message = (
        f"TensorRT {facts['version']} is in the system Python {facts['python']} ({python}), not in this Python "
        f"{platform.python_version()}; make the environment with: {python} -m venv --system-site-packages .venv"
    )
    return Check(name="tensorrt", ok=False, required=required, message=message)


def system_pythons() -> list[str]:
    """Interpreters of the operating system, where JetPack puts TensorRT; not the one that runs now."""
    found = sorted(str(path) for path in Path("/usr/bin").glob("python3*") if path.name.replace(".", "")[6:].isdigit())
    running = os.path.realpath(sys.executable)
    in_environment = sys.prefix != sys.base_prefix
    distinct = {os.path.realpath(python): python for python in found}
    return [python for real, python in distinct.items() if in_environment or real != running]


def _find_system_tensorrt() -> tuple[str, dict[str, Any]] | None:
    for python in system_pythons():
        code = f"import platform\n{_PROBES['tensorrt']}\nr['python'] = platform.python_version()"
        found = probe(code, python=python)
        if found.error is None:
            return python, found.facts
    return None


def _check_gpu(root: Path = Path("/")) -> Check:
    name = _tegra_model(root) or _nvidia_smi_name()
    if name is not None:
        return Check(name="gpu", ok=True, required=False, message=name)
    message = "no NVIDIA GPU found (neither a Jetson nor an answer from nvidia-smi); models run on the CPU"
    return Check(name="gpu", ok=False, required=False, message=message)


def _tegra_model(root: Path) -> str | None:
    try:
        model = (root / "proc/device-tree/model").read_bytes().rstrip(b"\0").decode("utf-8", "replace")
    except OSError:
        return None
    return model if any(word in model for word in ("NVIDIA", "Jetson", "Orin")) else None


def _nvidia_smi_name() -> str | None:
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    command = [program, "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = done.stdout.strip().splitlines()
    return "; ".join(lines) if done.returncode == 0 and lines else None


def _check_memory(meminfo: Path = Path("/proc/meminfo")) -> Check:
    try:
        fields = dict(line.split(":", 1) for line in meminfo.read_text(encoding="ascii").splitlines() if ":" in line)
        available, total = (int(fields[key].split()[0]) // 1024 for key in ("MemAvailable", "MemTotal"))
    except (OSError, KeyError, ValueError, IndexError):
        return Check(name="memory", ok=True, required=False, message="free memory is unknown on this system")
    ok = available >= LOW_MEMORY_MIB
    fix = "" if ok else f"; below {LOW_MEMORY_MIB} MiB calibration and engine builds may be killed"
    return Check(name="memory", ok=ok, required=False, message=f"{available} of {total} MiB available{fix}")


def _check_cache() -> Check:
    try:
        folder = cache_dir()
    except SpecError as error:
        return Check(name="cache", ok=False, required=True, message=str(error))
    existing = folder.absolute()
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent  # look only; the cache folder itself is made by the first fetch
    try:
        with tempfile.TemporaryFile(dir=existing):
            free_mib = shutil.disk_usage(existing).free >> 20
    except OSError as error:
        message = (
            f"{folder} cannot be written ({existing}: {error.strerror or error}); set EDGEDS_CACHE to one that can"
        )
        return Check(name="cache", ok=False, required=True, message=message)
    return Check(name="cache", ok=True, required=True, message=f"{folder} can be written, {free_mib} MiB free")


def _reason(found: Probe) -> str:
    return "not installed" if found.is_missing else f"cannot be used: {found.error}"
