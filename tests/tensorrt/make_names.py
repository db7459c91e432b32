"""Regenerate tests/data/trt_names.json: which names each TensorRT version has, from NVIDIA's own Python bindings.

    python tests/tensorrt/make_names.py [--cache DIR] [--out FILE]

The bindings of every version are on the package index as wheels of a few MiB. They load on a stub library that has the
nine C functions they look up (each returns 0), so every class, member and signature is the genuine one; nothing can be
built or run with them. Only names are kept, for the classes that edgeds uses. Needs gcc and the package index.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

OUT = Path(__file__).parents[1] / "data" / "trt_names.json"
WHEELS = {
    "10.3.0": "tensorrt_cu12_bindings",
    "10.7.0": "tensorrt_cu12_bindings",
    "10.13.3.9": "tensorrt_cu12_bindings",
    "10.16.1.11": "tensorrt_cu12_bindings",
    "11.0.0.114": "tensorrt_cu12_bindings",
    "11.4.0.106": "tensorrt_cu12_bindings",
    "rtx-1.7.1.116": "tensorrt_rtx_cu13_bindings",
}
CLASSES = (
    *("Builder", "IBuilderConfig", "INetworkDefinition", "IOptimizationProfile", "OnnxParser", "ParserError"),
    *("ITensor", "ILayer", "IHostMemory", "ITimingCache", "ILogger", "Logger", "IProgressMonitor", "Dims"),
    *("Runtime", "ICudaEngine", "IExecutionContext", "IOutputAllocator", "IProfiler", "EngineInspector"),
    *("IStreamReader", "IStreamReaderV2", "ISerializationConfig"),
    *("BuilderFlag", "NetworkDefinitionCreationFlag", "MemoryPoolType", "ProfilingVerbosity", "DeviceType"),
    *("HardwareCompatibilityLevel", "TilingOptimizationLevel", "ComputeCapability", "DataType", "TensorIOMode"),
    *("TensorLocation", "TensorFormat", "ExecutionContextAllocationStrategy", "LayerInformationFormat"),
    *("OnnxParserFlag", "ErrorCode", "EngineCapability", "RuntimePlatform", "EngineStat"),
)
STUB = """
#define NONE(name) void *name(void) { return 0; }
NONE(createInferBuilder_INTERNAL) NONE(createInferRefitter_INTERNAL) NONE(createInferRuntime_INTERNAL)
NONE(createNvOnnxParserRefitter_INTERNAL) NONE(createNvOnnxParser_INTERNAL) NONE(getBuilderPluginRegistry)
NONE(getNvOnnxParserVersion) NONE(getPluginRegistry) NONE(initLibNvInferPlugins)
"""
LIBRARIES = ("nvinfer", "nvonnxparser", "nvinfer_plugin")
RTX_LIBRARIES = ("libtensorrt_rtx.so.1", "libtensorrt_onnxparser_rtx.so.1")


def dump(module: str) -> dict[str, Any]:
    """Names of the module in this process: classes with members, and the parameters of each method."""
    import importlib
    import re

    trt = importlib.import_module(module)
    found: dict[str, Any] = {"__version__": trt.__version__, "module": sorted(n for n in dir(trt) if n[0] != "_")}
    classes: dict[str, dict[str, Any]] = {}
    for name in CLASSES:
        cls = getattr(trt, name, None)
        if cls is None:
            continue
        members: dict[str, Any] = {}
        for member in dir(cls):
            if member.startswith("_") and member != "__init__":
                continue
            doc = getattr(getattr(cls, member, None), "__doc__", None) or ""
            # One line per overload: "1. set_flag(self: ..., flag: tensorrt...) -> None".
            lines = re.findall(rf"^(?:\d+\. )?{re.escape(member)}\((.*)\) ->", doc, re.MULTILINE)
            members[member] = sorted({_parameters(line) for line in lines}) if lines else None
        # Some callbacks are not attributes of their class: C++ looks them up by name, and only its text shows them.
        for member, signature in re.findall(r"^ *def (\w+)\((self[^)]*)\):", cls.__doc__ or "", re.MULTILINE):
            if member not in members and member != "__init__":
                members[member] = [_parameters(signature)]
        classes[name] = members
    found["classes"] = classes
    return found


def _parameters(signature: str) -> str:
    """``self, network, config=`` out of a pybind signature; ``=`` marks a default."""
    import re

    plain = re.sub(r"<[^<>]*>", "X", signature)
    while "[" in plain or re.search(r"\([^()]*\)", plain):
        plain, before = re.sub(r"\[[^\[\]]*\]|\([^()]*\)", "", plain), plain
        if plain == before:
            break
    parts = [part.strip() for part in plain.split(",") if part.strip()]
    return ", ".join(part.split(":")[0].strip() + ("=" if "=" in part else "") for part in parts)


def collect(cache: Path) -> dict[str, Any]:
    """Install every wheel into ``cache`` (kept for the next time), load each in a process of its own."""
    versions: dict[str, Any] = {}
    for version, package in WHEELS.items():
        folder = cache / version
        if not folder.exists():
            number = version.removeprefix("rtx-")
            pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--disable-pip-version-check"]
            subprocess.run([*pip, "--target", str(folder), f"{package}=={number}"], check=True, timeout=600)
        module = "tensorrt_rtx_bindings" if version.startswith("rtx-") else "tensorrt_bindings"
        stubs = build_stubs(cache / f"stub-{version}", version)
        environment = {**os.environ, "PYTHONPATH": str(folder), "LD_LIBRARY_PATH": str(stubs)}
        done = subprocess.run(
            [sys.executable, __file__, "--dump", module],
            capture_output=True,
            text=True,
            env=environment,
            timeout=120,
        )
        if done.returncode:
            raise RuntimeError(f"{package} {version} does not load on the stub: {done.stderr[-800:]}")
        versions[version] = json.loads(done.stdout)
    return invert(versions)


def build_stubs(folder: Path, version: str) -> Path:
    """Compile the stub under the names that this version's bindings are linked against."""
    if version.startswith("rtx-"):
        names: tuple[str, ...] = RTX_LIBRARIES
    else:
        names = tuple(f"lib{name}.so.{version.split('.')[0]}" for name in LIBRARIES)
    folder.mkdir(parents=True, exist_ok=True)
    source = folder / "stub.c"
    source.write_text(STUB, encoding="utf-8")
    for name in names:
        if not (folder / name).exists():
            command = ["gcc", "-shared", "-fPIC", f"-Wl,-soname,{name}", "-o", str(folder / name), str(source)]
            subprocess.run(command, check=True, timeout=60)
    return folder


def invert(versions: dict[str, Any]) -> dict[str, Any]:
    """Name -> versions that have it, which is small since most names are in all of them."""
    symbols: dict[str, list[str]] = {}
    parameters: dict[str, dict[str, list[str]]] = {}
    for version, found in versions.items():
        for name in found["module"]:
            symbols.setdefault(name, []).append(version)
        for cls, members in found["classes"].items():
            for member, signatures in members.items():
                symbols.setdefault(f"{cls}.{member}", []).append(version)
                for signature in signatures or ():
                    parameters.setdefault(f"{cls}.{member}", {}).setdefault(signature, []).append(version)
    every = list(versions)
    return {
        "comment": "Generated by tests/tensorrt/make_names.py from NVIDIA's bindings; 'all' stands for every version.",
        "versions": every,
        "symbols": {name: "all" if have == every else have for name, have in sorted(symbols.items())},
        "parameters": {
            name: {signature: "all" if have == every else have for signature, have in sorted(found.items())}
            for name, found in sorted(parameters.items())
        },
    }


def to_text(table: dict[str, Any]) -> str:
    """JSON with one name per line, so that changes between versions read well in a diff."""
    parts = []
    for key, value in table.items():
        if isinstance(value, dict):
            rows = ",\n".join(f"  {json.dumps(name)}: {json.dumps(item)}" for name, item in value.items())
            parts.append(f"{json.dumps(key)}: {{\n{rows}\n}}")
        else:
            parts.append(f"{json.dumps(key)}: {json.dumps(value)}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--cache", type=Path, help="folder for wheels and stubs (default: a temporary one)")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--dump", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.dump:
        print(json.dumps(dump(args.dump)))
        return
    with tempfile.TemporaryDirectory() as temporary:
        table = collect(args.cache or Path(temporary))
    args.out.write_text(to_text(table), encoding="utf-8")
    print(f"{args.out}: {len(table['symbols'])} names of {len(table['versions'])} versions")


if __name__ == "__main__":
    main()
