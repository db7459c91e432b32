"""The import rule of docs/architecture.md over the AST, and that importing edgeds stays light."""

import ast
import functools
import importlib
import os
import statistics
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import edgeds

ROOT = Path(edgeds.__file__).parent

# Each group may import its own and everything to its left.
BASE = ("errors", "specs", "files", "progress", "imagefile", "difference", "_version")
SHARED = ("boards", "bundle", "preproc", "buckets", "zoo", "zoo_data", "zoo_sources")
DOCTOR = ("doctor", "doctor_device", "doctor_proof", "doctor_prove")
DEVICE_ORDER = (BASE, SHARED, ("engines", "power"), ("runtime",), ("pipelines",), ("serve", "report", *DOCTOR))
WORKSTATION_ORDER = (BASE, SHARED, ("graph",), ("compress",))
TOP_ORDER = ("workshop", "cli")
DEVICE_HALF = {name for group in DEVICE_ORDER for name in group}

# Who may say these names at all; everyone else reaches them through these modules.
ONLY = {
    "onnxruntime": ("engines/onnxruntime.py", "graph/", "compress/"),
    "pycuda": ("engines/cuda_pycuda.py",),
    "cuda": ("engines/cuda_bindings.py",),
    "tensorrt": ("engines/trt_module.py",),
    "tensorrt_rtx": ("engines/trt_module.py",),
    "onnx": ("graph/", "compress/", "workshop/"),
    "torch": ("graph/", "compress/", "workshop/"),
}
HEAVY = (
    *("cv2", "onnx", "onnxruntime", "torch", "pycocotools", "tensorrt", "pycuda", "cuda"),
    *("matplotlib", "PIL", "scipy"),
)


@dataclass(frozen=True, kw_only=True)
class Import:
    file: str
    line: int
    module: str
    is_top_level: bool

    def __str__(self) -> str:
        return f"{self.file}:{self.line} imports {self.module}"


def python_files() -> list[Path]:
    return sorted(ROOT.rglob("*.py"))


@functools.cache
def all_imports() -> tuple[Import, ...]:
    return tuple(item for path in python_files() for item in read_imports(path))


def read_imports(path: Path) -> Iterator[Import]:
    """Every import of a file: statements anywhere, relative ones resolved, and import_module of a constant."""
    relative = path.relative_to(ROOT)
    package = ["edgeds", *relative.with_suffix("").parts[:-1]]
    tree = ast.parse(path.read_text(encoding="utf-8"))
    inside: set[ast.AST] = set()
    for node in ast.walk(tree):
        deferred = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        typing_only = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        if deferred or typing_only:
            inside.update(ast.walk(node))
    for node in ast.walk(tree):
        for module in _modules(node, package):
            yield Import(file=relative.as_posix(), line=node.lineno, module=module, is_top_level=node not in inside)


def _modules(node: ast.AST, package: list[str]) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = package[: len(package) - node.level + 1] if node.level else []
        module = ".".join([*base, *([node.module] if node.module else [])])
        yield module
        if module == "edgeds" or not node.module:
            yield from (f"{module}.{alias.name}" for alias in node.names)
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute | ast.Name):
        name = node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id
        argument = node.args[0] if node.args else None
        if name in ("import_module", "__import__") and isinstance(argument, ast.Constant):
            yield str(argument.value)


def part_of(item: Import) -> str:
    return Path(item.file).parts[0].removesuffix(".py")


def target_of(item: Import) -> str | None:
    parts = item.module.split(".")
    return parts[1] if parts[0] == "edgeds" and len(parts) > 1 else None


def is_part(name: str) -> bool:
    """Whether edgeds has a module or folder of that name; ``from edgeds import open_bundle`` names neither."""
    return (ROOT / name).is_dir() or (ROOT / f"{name}.py").is_file()


def allowed_targets(part: str) -> set[str]:
    for order in (DEVICE_ORDER, WORKSTATION_ORDER):
        for index, group in enumerate(order):
            if part in group:
                return {name for names in order[: index + 1] for name in names}
    everything = DEVICE_HALF | {"graph", "compress"}
    return everything | set(TOP_ORDER[: TOP_ORDER.index(part) + 1])


def test_every_part_has_a_place_in_the_order() -> None:
    known = DEVICE_HALF | {"graph", "compress", *TOP_ORDER, "__init__", "__main__"}
    assert {path.relative_to(ROOT).parts[0].removesuffix(".py") for path in python_files()} <= known


def test_imports_point_in_one_direction() -> None:
    wrong = []
    for item in all_imports():
        part, target = part_of(item), target_of(item)
        if target is None or part in ("__init__", "__main__") or not is_part(target):
            continue
        # graph shares the splitter of engine files, a pure function over bytes.
        exception = part == "graph" and item.module == "edgeds.engines.plan_file"
        if target not in allowed_targets(part) and not exception:
            wrong.append(str(item))
    assert wrong == []


def test_device_half_never_names_the_workstation_half() -> None:
    """Also not inside functions or for typing: the device has neither onnx nor torch."""
    forbidden = ("torch", "onnx", "edgeds.graph", "edgeds.compress", "edgeds.workshop")
    wrong = [
        str(item)
        for item in all_imports()
        if part_of(item) in DEVICE_HALF and any(item.module == f or item.module.startswith(f"{f}.") for f in forbidden)
    ]
    assert wrong == []


@pytest.mark.parametrize("library", ONLY)
def test_each_backend_library_has_its_own_place(library: str) -> None:
    wrong = [
        str(item)
        for item in all_imports()
        if item.module.split(".")[0] == library and not item.file.startswith(ONLY[library])
    ]
    assert wrong == []


def test_heavy_libraries_are_imported_inside_functions() -> None:
    """graph and compress work on onnx objects throughout and may import it at their top."""
    wrong = [
        str(item)
        for item in all_imports()
        if item.is_top_level
        and item.module.split(".")[0] in HEAVY
        and not (item.module.split(".")[0] == "onnx" and item.file.startswith(("graph/", "compress/", "workshop/")))
    ]
    assert wrong == []


def test_the_rule_itself_sees_hidden_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = """
        import importlib
        from typing import TYPE_CHECKING
        if TYPE_CHECKING:
            import torch
        def f():
            from onnx import helper
            from ..graph import io
            from .. import compress
            importlib.import_module("edgeds.graph.io")
    """
    (tmp_path / "engines").mkdir()
    path = tmp_path / "engines" / "x.py"
    path.write_text(textwrap.dedent(source))
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    found = {item.module: item.is_top_level for item in read_imports(path)}
    assert found["torch"] is False
    assert {"onnx", "edgeds.graph", "edgeds.compress", "edgeds.graph.io"} <= set(found)
    assert found["importlib"] is True


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT.parent)}
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=120, env=environment
    )


def test_import_edgeds_loads_nothing_heavy_and_is_fast() -> None:
    """Under 100 ms. CPU time, the median of five: wall time on a shared machine measures the neighbours."""
    code = f"""
        import sys, time
        start = time.process_time()
        import edgeds
        spent = time.process_time() - start
        heavy = [name for name in {(*HEAVY, "numpy", "tqdm", "edgeds.specs")!r} if name in sys.modules]
        print(spent, ",".join(heavy))
    """
    runs = [run_python(code).stdout.split(maxsplit=1) for _ in range(5)]
    assert [run[1:] for run in runs] == [[]] * 5
    assert statistics.median(float(run[0]) for run in runs) < 0.1


def test_cli_help_imports_no_verb_and_no_numpy_heavy_library() -> None:
    code = f"""
        import sys
        from edgeds.cli.main import VERBS, main
        main(["--help"])
        loaded = [name for name in {HEAVY!r} if name in sys.modules]
        loaded += [verb for verb in VERBS if f"edgeds.cli.{{verb}}" in sys.modules]
        print("loaded:", loaded)
    """
    done = run_python(code)
    assert done.stdout.splitlines()[-1] == "loaded: []", done.stderr


def test_device_half_imports_without_onnx_and_torch() -> None:
    """Every module of the device half loads where onnx, torch and the workstation half cannot be imported."""
    modules = [
        ".".join(["edgeds", *path.relative_to(ROOT).with_suffix("").parts]).removesuffix(".__init__")
        for path in python_files()
        if path.relative_to(ROOT).parts[0].removesuffix(".py") in DEVICE_HALF
    ]
    code = f"""
        import importlib, sys
        class Blocker:
            def find_spec(self, name, path=None, target=None):
                if name.split(".")[0] in ("onnx", "torch") or name.startswith(("edgeds.graph", "edgeds.compress")):
                    raise ImportError(f"blocked: {{name}}")
        sys.meta_path.insert(0, Blocker())
        for name in {modules!r}:
            importlib.import_module(name)
        print("fine")
    """
    done = run_python(code)
    assert done.stdout == "fine\n", done.stderr


def test_public_names_exist_and_all_is_true() -> None:
    assert len(edgeds.__all__) == len(set(edgeds.__all__))
    for name in edgeds.__all__:
        assert getattr(edgeds, name) is not None
        assert name in dir(edgeds)
    for name, module in edgeds._PUBLIC.items():
        assert getattr(edgeds, name) is getattr(importlib.import_module(module), name)


def test_public_names_cover_the_error_tree_and_unknown_names_fail_plainly() -> None:
    from edgeds import errors

    tree = {name for name, value in vars(errors).items() if isinstance(value, type)}
    assert tree <= set(edgeds.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        edgeds.nonsense  # noqa: B018
