"""Every TensorRT name our code says exists in the genuine bindings of 10.3, 10.7, 10.13, 10.16, 11.0, 11.4 and RTX 1.7.

tests/data/trt_names.json holds names and parameters generated from NVIDIA's bindings by tests/tensorrt/make_names.py.
The code is read as syntax: what is said on variables that hold TensorRT objects is looked up in the table. A name that
only some versions have must be asked for first, and is listed here with the reason.
"""

import ast
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fake_tensorrt
import pytest

import edgeds

ENGINES = Path(edgeds.__file__).parent / "engines"
TABLE: dict[str, Any] = json.loads((Path(__file__).parents[2] / "data/trt_names.json").read_text(encoding="utf-8"))
VERSIONS: list[str] = TABLE["versions"]
SYMBOLS: dict[str, Any] = TABLE["symbols"]
PARAMETERS: dict[str, dict[str, Any]] = TABLE["parameters"]

FILES = sorted(path for pattern in ("build*.py", "trt_*.py", "tensorrt*.py") for path in ENGINES.glob(pattern))

# Variables that hold a TensorRT object in these files, by name.
HOLDS = {
    "trt": "",
    "builder": "Builder",
    "network": "INetworkDefinition",
    "config": "IBuilderConfig",
    "parser": "OnnxParser",
    "runtime": "Runtime",
    "inspector": "EngineInspector",
}
# Names that hold a TensorRT object in one half only: the build's or the runtime's files.
HOLDS_IN_BUILD = {"profile": "IOptimizationProfile", "tensor": "ITensor"}
HOLDS_IN_RUNTIME = {"engine": "ICudaEngine", "raw": "IExecutionContext", "_raw": "IExecutionContext"}
FIELDS = ("engine", "runtime", "_raw")
"""Of these, the names that are also fields: ``loaded.engine.name`` is a use of the engine as ``engine.name`` is."""

# Names that some versions lack. Each use is guarded by TrtFacts, hasattr or enum_member.
OPTIONAL = {
    "ComputeCapability": "RTX only; guarded by has_compute_capabilities",
    "IBuilderConfig.num_compute_capabilities": "RTX only; guarded by has_compute_capabilities",
    "IBuilderConfig.set_compute_capability": "RTX only; guarded by has_compute_capabilities",
    "IExecutionContext.is_stream_capturable": "RTX only; asked for with hasattr",
    "ICudaEngine.device_memory_size": "removed in 11; only where there is no device_memory_size_v2",
    "BuilderFlag.FP16": "removed in 11; weak typing only",
    "BuilderFlag.INT8": "removed in 11; weak typing only",
    "HardwareCompatibilityLevel.SAME_COMPUTE_CAPABILITY": "from 10.9; asked for with enum_member",
    "TilingOptimizationLevel": "from 10.8; guarded by has_tiling",
    "IBuilderConfig.tiling_optimization_level": "from 10.8; guarded by has_tiling",
    "IBuilderConfig.l2_limit_for_tiling": "from 10.8; guarded by has_tiling",
    "IBuilderConfig.max_num_tactics": "from 10.7; set through hasattr",
    "TilingOptimizationLevel.FAST": "from 10.8",
    "TilingOptimizationLevel.MODERATE": "from 10.8",
    "TilingOptimizationLevel.FULL": "from 10.8",
}
# Names that are put together at run time, so that syntax alone does not show them.
BY_TEXT = (
    *("BuilderFlag.FP16", "BuilderFlag.INT8", "BuilderFlag.SPARSE_WEIGHTS", "BuilderFlag.STRIP_PLAN"),
    *("BuilderFlag.REFIT", "BuilderFlag.VERSION_COMPATIBLE", "BuilderFlag.GPU_FALLBACK", "BuilderFlag.TF32"),
    *("MemoryPoolType.WORKSPACE", "MemoryPoolType.TACTIC_DRAM", "MemoryPoolType.DLA_MANAGED_SRAM"),
    *("HardwareCompatibilityLevel.AMPERE_PLUS", "HardwareCompatibilityLevel.SAME_COMPUTE_CAPABILITY"),
    *("TilingOptimizationLevel.FAST", "TilingOptimizationLevel.MODERATE", "TilingOptimizationLevel.FULL"),
    *("DeviceType.DLA", "ProfilingVerbosity.DETAILED", "NetworkDefinitionCreationFlag.STRONGLY_TYPED"),
    *("ParserError.desc", "ParserError.node", "ParserError.node_name", "ParserError.node_operator"),
    *("ILogger.log", "IProgressMonitor.phase_start", "IProgressMonitor.step_complete"),
    *("IProgressMonitor.phase_finish", "IHostMemory.nbytes", "ITimingCache.serialize"),
    *("IBuilderConfig.builder_optimization_level", "IBuilderConfig.max_aux_streams"),
    *("IBuilderConfig.max_num_tactics", "IBuilderConfig.tiling_optimization_level"),
    *("IBuilderConfig.l2_limit_for_tiling", "IBuilderConfig.hardware_compatibility_level"),
    *("IBuilderConfig.default_device_type", "IBuilderConfig.DLA_core", "IBuilderConfig.profiling_verbosity"),
    *("IBuilderConfig.progress_monitor", "IOptimizationProfile.set_shape_input"),
    *("IOptimizationProfile.get_shape_input", "IOptimizationProfile.set_shape", "IOptimizationProfile.get_shape"),
)


@dataclass(frozen=True)
class Use:
    """One mention of a TensorRT name. ``call`` is (positional arguments, keywords) when it is called."""

    where: str
    symbol: str
    call: tuple[int, tuple[str, ...]] | None


def versions_of(symbol: str) -> list[str]:
    have = SYMBOLS.get(symbol, [])
    return VERSIONS if have == "all" else have


def uses(path: Path) -> Iterator[Use]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    calls = {id(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            symbol = symbol_of(node, path.name)
            if symbol is not None:
                call = calls.get(id(node))
                yield Use(f"{path.name}:{node.lineno}", symbol, arguments(call) if call else None)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "enum_member":
            name = node.args[1]
            if isinstance(name, ast.Constant):
                yield Use(f"{path.name}:{node.lineno}", str(name.value), None)


def symbol_of(node: ast.Attribute, file: str) -> str | None:
    """``Class.member`` of ``variable.member``, ``trt.Class`` and ``trt.Enum.MEMBER``; None for anything else."""
    if node.attr.startswith("__"):
        return None
    inner = node.value
    holds = {**HOLDS, **(HOLDS_IN_BUILD if file.startswith("build") else HOLDS_IN_RUNTIME)}
    name = inner.id if isinstance(inner, ast.Name) else inner.attr if isinstance(inner, ast.Attribute) else ""
    is_field = isinstance(inner, ast.Attribute) and name in FIELDS and not file.startswith("build")
    if name in holds and (isinstance(inner, ast.Name) or is_field):
        return f"{holds[name]}.{node.attr}" if holds[name] else node.attr
    if isinstance(inner, ast.Attribute) and isinstance(inner.value, ast.Name) and inner.value.id == "trt":
        return f"{inner.attr}.{node.attr}"
    return None


def arguments(call: ast.Call) -> tuple[int, tuple[str, ...]] | None:
    if any(isinstance(argument, ast.Starred) for argument in call.args):
        return None  # how many there are shows only at run time
    return len(call.args), tuple(keyword.arg or "**" for keyword in call.keywords)


ALL_USES = [use for path in FILES for use in uses(path)]


def test_the_reader_finds_the_uses() -> None:
    found = {use.symbol for use in ALL_USES}
    assert {"Builder", "Builder.create_network", "OnnxParser.parse_from_file", "BuilderFlag.TF32"} <= found
    assert {"IBuilderConfig.set_timing_cache", "INetworkDefinition.num_outputs"} <= found
    assert {"Runtime.deserialize_cuda_engine", "ICudaEngine.create_execution_context"} <= found
    assert {"IExecutionContext.execute_async_v3", "IExecutionContext.set_tensor_address"} <= found


@pytest.mark.parametrize("version", VERSIONS)
def test_every_name_exists_in_this_version_or_is_guarded(version: str) -> None:
    names = [(use.where, use.symbol) for use in ALL_USES] + [("by text", symbol) for symbol in BY_TEXT]
    missing = [item for item in names if version not in versions_of(item[1]) and item[1] not in OPTIONAL]
    assert missing == []


def test_guarded_names_exist_somewhere_and_are_missing_somewhere() -> None:
    for symbol in OPTIONAL:
        assert versions_of(symbol), f"{symbol} is in no version"
        assert versions_of(symbol) != VERSIONS, f"{symbol} is in all versions; it needs no guard"


@pytest.mark.parametrize("version", VERSIONS)
def test_every_call_fits_a_signature_of_this_version(version: str) -> None:
    wrong = []
    for use in ALL_USES:
        if use.call is None or version not in versions_of(use.symbol):
            continue
        name = use.symbol if use.symbol in PARAMETERS else f"{use.symbol}.__init__"
        signatures = [text for text, have in PARAMETERS.get(name, {}).items() if have == "all" or version in have]
        if signatures and not any(fits(use.call, text) for text in signatures):
            wrong.append((use.where, use.symbol, use.call, signatures))
    assert wrong == []


def fits(call: tuple[int, tuple[str, ...]], signature: str) -> bool:
    positional, keywords = call
    parameters = [text.strip() for text in signature.split(",") if text.strip() not in ("/", "*")][1:]  # not self
    names = [text.rstrip("=") for text in parameters]
    if positional > len(parameters) or not set(keywords) <= set(names[positional:]):
        return False
    rest = [text for text in parameters[positional:] if text.rstrip("=") not in keywords]
    return all(text.endswith("=") for text in rest)


def callbacks() -> Iterator[tuple[str, str, list[str]]]:
    """(file, Class.method, parameters) of every method in a class that derives from one of TensorRT's."""
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.ClassDef) or not node.bases:
                continue
            base = node.bases[0]
            if isinstance(base, ast.Attribute) and isinstance(base.value, ast.Name) and base.value.id == "trt":
                for method in node.body:
                    if isinstance(method, ast.FunctionDef) and method.name != "__init__":
                        yield path.name, f"{base.attr}.{method.name}", [item.arg for item in method.args.args]


def test_callbacks_take_the_parameters_that_tensorrt_passes() -> None:
    """Overridden methods are called from C++ by position; their number must be that of the bindings."""
    found = {symbol for _, symbol, _ in callbacks()}
    assert {"ILogger.log", "IProgressMonitor.step_complete", "IProfiler.report_layer_time"} <= found
    for file, symbol, ours in callbacks():
        assert SYMBOLS.get(symbol) == "all", f"{file}: {symbol} is not a callback in every version"
        for signature in PARAMETERS[symbol]:
            assert len(signature.split(",")) == len(ours), f"{file}: {symbol} takes ({signature}), not {ours}"


def test_the_stand_in_has_no_name_that_tensorrt_lacks() -> None:
    """Tests on the stand-in would otherwise prove code that fails on the real one."""
    for cls_name in ("IBuilderConfig", "OnnxParser", "Builder", "IOptimizationProfile", "INetworkDefinition"):
        cls = getattr(fake_tensorrt, cls_name)
        for member in vars(cls):
            if not member.startswith("_"):
                assert f"{cls_name}.{member}" in SYMBOLS


def test_enum_numbers_are_never_written_down() -> None:
    """Their values move between versions (STRONGLY_TYPED is 1 in 10.x and 0 in 11): only names may be stored."""
    for path in FILES:
        for line in path.read_text(encoding="utf-8").splitlines():
            assert not re.search(r"(create_network|set_flag|get_flag)\(\s*\d", line), f"{path.name}: {line}"
