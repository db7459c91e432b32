"""What ``edgeds doctor`` looks at on a machine with an NVIDIA GPU, and on a Jetson in particular.

``root`` is where files of the system are read; programs are asked only when it is the real one.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import edgeds
from edgeds.boards import read_power_mode
from edgeds.boards.nvpmodel import find_conf, run_command
from edgeds.doctor import Check, Probe, probe
from edgeds.engines.jetson import Jetson, read_jetson

OLDEST_L4T = 36
OLDEST_TENSORRT = (10, 3)
SWAP_ADVISED_MIB = 4096

# Also tells a package of that name that is not TensorRT, and which libraries the import really loaded, from where.
MAPS = (
    "import re\n"
    "maps = open('/proc/self/maps').read() if __import__('os').path.exists('/proc/self/maps') else ''\n"
    "found = set(re.findall(r'(/\\S*/lib(?:nvinfer|nvonnxparser|cuda|cudart|nvdla)[\\w-]*\\.so[.\\d]*)', maps))\n"
)
TENSORRT_PROBE = (
    "import tensorrt as m\n"
    "names = ('__version__', 'Builder', 'OnnxParser', 'Runtime')\n"
    "missing = [n for n in names if not hasattr(m, n)]\n"
    "where = getattr(m, '__file__', None) or str(list(getattr(m, '__path__', ['an unknown place']))[0])\n"
    f"{MAPS}"
    "r = dict(version=str(getattr(m, '__version__', '')), file=where, missing=missing, libraries=sorted(found))"
)
CUDA_PROBE = (
    "import sys; sys.path.insert(0, {package!r})\n"
    "from edgeds.engines.cuda import open_cuda\n"
    "c = open_cuda()\n"
    f"{MAPS}"
    "r = dict(name=c.name, capability='%d.%d' % c.capability, binding=c.driver.name, integrated=c.is_integrated,"
    " driver=c.driver.driver_version, libraries=sorted(found))"
)
CUDA_PYTHON_PROBE = (
    "import importlib.metadata as im\n"
    "r = {}\n"
    "for name in ('pycuda', 'cuda-bindings'):\n"
    "    try: r[name] = im.version(name)\n"
    "    except im.PackageNotFoundError: pass"
)


def device_checks(*, root: Path = Path("/"), has_gpu: bool, has_tensorrt: bool) -> list[Callable[[], Check]]:
    """The checks that make sense here: none on a machine without GPU and TensorRT."""
    jetson = read_jetson(root)
    checks: list[Callable[[], Check]] = []
    if jetson is not None:
        checks += [
            lambda: check_jetpack(jetson),
            lambda: check_power_mode(root),
            lambda: check_swap(root),
        ]
    if jetson is not None or has_gpu or has_tensorrt:
        checks += [
            lambda: check_cuda(required=jetson is not None),
            check_cuda_python,
            lambda: check_known_bugs(jetson),
        ]
    return checks


def check_tensorrt_facts(found: Probe, *, required: bool) -> Check:
    """Judge an import of TensorRT that worked: is it TensorRT, new enough, and which libraries came with it."""
    facts = found.facts
    if facts["missing"]:
        message = (
            f"the package at {facts['file']} is called tensorrt but is not TensorRT (no {facts['missing'][0]}); "
            "uninstall it (pip uninstall tensorrt) and use the one of JetPack"
        )
        return Check(name="tensorrt", ok=False, required=required, message=message)
    version = tuple(int(part) for part in re.findall(r"\d+", facts["version"])[:2])
    libraries = ", ".join(facts["libraries"]) or "no library of it is loaded"
    message = f"{facts['version']} at {facts['file']} ({libraries})"
    if version < OLDEST_TENSORRT:
        message += "; edgeds needs 10.3 or newer, which JetPack 6.1 and later bring"
        return Check(name="tensorrt", ok=False, required=required, message=message)
    return Check(name="tensorrt", ok=True, required=required, message=message)


def check_jetpack(jetson: Jetson) -> Check:
    """Module and release. JetPack 5 and older fail; an unknown release does not (B121)."""
    major = int(jetson.l4t.split(".")[0]) if jetson.l4t else None
    if major is not None and major < OLDEST_L4T:
        message = f"{jetson.describe()}; edgeds needs JetPack 6.1 or newer, which means flashing the board"
        return Check(name="jetpack", ok=False, required=True, message=message)
    return Check(name="jetpack", ok=True, required=False, message=jetson.describe())


def check_power_mode(root: Path = Path("/")) -> Check:
    """The power mode from nvpmodel's status file, named by the machine's own nvpmodel.conf."""
    conf, _ = find_conf(root)
    mode = read_power_mode(root=root, conf=conf, run=run_command if root == Path("/") else None)
    if mode.name is None and mode.id is None:
        message = f"unknown ({mode.note}); set one with: sudo nvpmodel -m ID"
        return Check(name="power_mode", ok=False, required=False, message=message)
    note = f"; {mode.note}" if mode.note else ""
    message = f"{mode.name or 'unnamed mode'} (id {mode.id}), from {mode.source}{note}"
    return Check(name="power_mode", ok=mode.name is not None, required=False, message=message)


def check_swap(root: Path = Path("/")) -> Check:
    """Swap helps builds that need more memory than the model; on a Jetson CPU and GPU share one memory."""
    try:
        text = (root / "proc/meminfo").read_text(encoding="ascii", errors="replace")
        fields = dict(re.findall(r"^(\w+):\s+(\d+) kB", text, re.MULTILINE))
        total, free = (int(fields[key]) // 1024 for key in ("SwapTotal", "SwapFree"))
    except (OSError, KeyError):
        return Check(name="swap", ok=True, required=False, message="swap is unknown on this system")
    if total < SWAP_ADVISED_MIB:
        message = (
            f"{total} MiB; builds of large models may be killed: add {SWAP_ADVISED_MIB} MiB on an NVMe disk, "
            "deploy/README.md says how"
        )
        return Check(name="swap", ok=False, required=False, message=message)
    return Check(name="swap", ok=True, required=False, message=f"{free} of {total} MiB free")


def check_cuda(*, required: bool) -> Check:
    """Open the GPU in a process of its own and say which libraries were really loaded."""
    found = probe(CUDA_PROBE.format(package=str(Path(edgeds.__file__).parents[1])))
    if found.error is not None:
        reason = re.sub(r"^(edgeds\.errors\.)?\w+Error: ", "", found.error)
        return Check(name="cuda", ok=False, required=required, message=f"the GPU cannot be used: {reason}")
    facts = found.facts
    version = f"{facts['driver'] // 1000}.{facts['driver'] % 1000 // 10}"
    shared = ", shares the CPU's memory" if facts["integrated"] else ""
    message = (
        f"{facts['name']}, compute capability {facts['capability']}{shared}; driver for CUDA {version} "
        f"({', '.join(facts['libraries']) or 'libraries unknown'})"
    )
    return Check(name="cuda", ok=True, required=required, message=message)


def check_cuda_python() -> Check:
    """Which Python binding calls the driver. None is needed: ctypes does as well."""
    found = probe(CUDA_PYTHON_PROBE)
    have = [f"{name} {version}" for name, version in found.facts.items()]
    if not have:
        message = "neither pycuda nor cuda-bindings is installed; the driver is called directly, nothing is missing"
        return Check(name="cuda_python", ok=True, required=False, message=message)
    return Check(name="cuda_python", ok=True, required=False, message=", ".join(have))


def check_known_bugs(jetson: Jetson | None, *, tensorrt: str | None = None) -> Check:
    """Faults of this TensorRT and L4T that are known, for INT8 bundles. ``tensorrt`` is asked for when not given."""
    from edgeds.engines.known_bugs import BuildFacts, find_known_bugs

    if tensorrt is None:
        found = probe(TENSORRT_PROBE)
        tensorrt = str(found.facts.get("version") or "") if found.error is None else ""
    numbers = tuple(int(part) for part in re.findall(r"\d+", tensorrt)[:4])
    facts = BuildFacts(
        tensorrt=numbers if len(numbers) > 1 else None,
        l4t=jetson.l4t if jetson is not None else None,
        module=jetson.module if jetson is not None else None,
        precision="int8",
        is_jetson=jetson is not None,
    )
    bugs = find_known_bugs(facts)
    open_bugs = [bug for bug in bugs if bug.severity != "avoid"]
    avoided = len(bugs) - len(open_bugs)
    tail = f"{avoided} more are worked around" if avoided else "none is worked around"
    if not open_bugs:
        message = f"no open fault is known for TensorRT {tensorrt or '(none)'}; {tail}"
        return Check(name="known_bugs", ok=True, required=False, message=message)
    texts = "; ".join(f"{bug.id}: {bug.describe()}" for bug in open_bugs)
    return Check(name="known_bugs", ok=False, required=False, message=f"{texts}; {tail}")


def rtx_version(run: Callable[[str], Probe] = probe) -> Any:
    """Version of TensorRT-RTX, which builds for RTX GPUs without having one; None when it is not installed."""
    for name in ("tensorrt_rtx", "tensorrt_rtx_bindings"):
        found = run(f"import importlib; m = importlib.import_module({name!r}); r = dict(version=m.__version__)")
        if found.error is None:
            return found.facts["version"]
    return None
