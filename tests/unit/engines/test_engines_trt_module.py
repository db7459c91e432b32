"""Loading TensorRT: what is installed, what only looks installed, and what a module can do."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import fake_tensorrt
import pytest

from edgeds.engines.trt_module import (
    MODULES,
    describe_tensorrt,
    enum_member,
    load_tensorrt,
    network_flags,
    parse_version,
    resolve_typing,
)
from edgeds.errors import BuildError, DeviceError, MissingDependency, SpecError

Fake = Callable[..., ModuleType]


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Put a module of that name and source first on the path, and hide whatever is installed."""
    monkeypatch.setattr(sys, "path", [str(tmp_path), *(p for p in sys.path if "site-packages" not in p)])
    for name in ("tensorrt", "tensorrt_rtx", "tensorrt_rtx_bindings"):
        monkeypatch.delitem(sys.modules, name, raising=False)

    def write(name: str, source: str) -> None:
        (tmp_path / f"{name}.py").write_text(source)

    return write


API = "__version__ = '{}'\nclass Builder: pass\nclass OnnxParser: pass\nclass Runtime: pass\n"


def test_nothing_installed_says_what_to_do(package: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [sys.path[0]])  # no installed TensorRT anywhere
    with pytest.raises(DeviceError, match="python3-libnvinfer"):
        load_tensorrt()
    with pytest.raises(MissingDependency, match=r"edgeds\[rtx\]"):
        load_tensorrt("rtx")
    with pytest.raises(SpecError, match="expected auto"):
        load_tensorrt("cuda")


def test_tensorrt_comes_before_rtx_and_either_can_be_named(package: Callable) -> None:
    package("tensorrt", API.format("10.3.0"))
    package("tensorrt_rtx_bindings", API.format("1.7.1") + "class ComputeCapability: pass\n")
    assert load_tensorrt().__version__ == "10.3.0"
    assert load_tensorrt("rtx").__version__ == "1.7.1"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("", "stand-in without TensorRT's API"),
        ("__version__ = '10.3'\n", "stand-in"),
        (API.format("8.5.2"), "too old"),
        (API.format("soon"), "states its version as 'soon'"),
        ("raise ImportError('libnvdla_compiler.so: cannot open shared object file')", "nvidia-l4t-dla-compiler"),
        ("raise OSError('libnvinfer.so.10: cannot open shared object file')", r"libnvinfer\.so\.10 is missing"),
        ("import module_that_is_not_there", "needs the module 'module_that_is_not_there'"),
        ("raise RuntimeError('no luck')", "cannot be loaded: no luck"),
    ],
)
def test_a_package_that_is_there_but_does_not_work_is_explained(package: Callable, source: str, message: str) -> None:
    package("tensorrt", source)
    with pytest.raises(DeviceError, match=message):
        load_tensorrt("tensorrt")


def test_facts_come_from_names_not_from_version_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = describe_tensorrt(fake_tensorrt)
    assert facts.version == (10, 16, 2, 10)
    assert facts.product == "TensorRT 10.16.2.10"
    assert facts.can_weak
    assert facts.has_tiling
    assert facts.has_timing_cache
    assert not facts.is_rtx
    monkeypatch.delattr(fake_tensorrt.IBuilderConfig, "tiling_optimization_level")
    monkeypatch.delattr(fake_tensorrt, "IProgressMonitor")
    monkeypatch.setattr(fake_tensorrt, "BuilderFlag", SimpleNamespace(TF32=0))
    facts = describe_tensorrt(fake_tensorrt)
    assert (facts.has_tiling, facts.has_progress, facts.typed_only) == (False, False, True)
    monkeypatch.setattr(fake_tensorrt, "ComputeCapability", SimpleNamespace(SM86=0), raising=False)
    facts = describe_tensorrt(fake_tensorrt)
    assert facts.is_rtx
    assert not facts.has_timing_cache
    assert facts.product.startswith("TensorRT-RTX")


@pytest.mark.parametrize(
    ("version", "expected"), [("10.3.0", "weak"), ("10.11.0", "weak"), ("10.12.0", "strong"), ("10.16.2.10", "strong")]
)
def test_strong_typing_is_the_default_from_10_12_on(
    version: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fake_tensorrt, "__version__", version)
    assert resolve_typing(describe_tensorrt(fake_tensorrt), typing="auto") == expected
    assert resolve_typing(describe_tensorrt(fake_tensorrt), typing="weak") == "weak"


def test_weak_typing_is_refused_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake_tensorrt, "BuilderFlag", SimpleNamespace(TF32=0))
    monkeypatch.setattr(fake_tensorrt, "__version__", "11.4.1")
    facts = describe_tensorrt(fake_tensorrt)
    assert resolve_typing(facts, typing="auto") == "strong"
    with pytest.raises(BuildError, match="int8_fp16 or float16"):
        resolve_typing(facts, typing="weak")


def test_flags_are_looked_up_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """The literal 1 means EXPLICIT_BATCH in 10.x and STRONGLY_TYPED in 11: a build with it would be typed wrongly."""
    assert network_flags(fake_tensorrt, typing="strong") == 2
    assert network_flags(fake_tensorrt, typing="weak") == 0
    monkeypatch.setattr(fake_tensorrt, "NetworkDefinitionCreationFlag", SimpleNamespace(STRONGLY_TYPED=0))
    assert network_flags(fake_tensorrt, typing="strong") == 1
    assert enum_member(fake_tensorrt, "BuilderFlag.FP16") is fake_tensorrt.BuilderFlag.FP16
    assert enum_member(fake_tensorrt, "BuilderFlag.NEW") is None
    assert enum_member(fake_tensorrt, "NoSuchEnum.X") is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [("10.3.0", (10, 3, 0)), ("10.13.0.post1", (10, 13, 0)), ("10.16.2.10", (10, 16, 2, 10)), ("1.7", (1, 7))],
)
def test_versions_are_read_with_their_suffixes(text: str, expected: tuple[int, ...]) -> None:
    assert parse_version(text) == expected


def test_a_folder_of_that_name_is_no_tensorrt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder called tensorrt on the path imports as an empty namespace package; it must count as missing."""
    from edgeds.engines.trt_choice import _is_installed

    (tmp_path / "tensorrt_folder").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(MODULES, "tensorrt", ("tensorrt_folder",))
    monkeypatch.setitem(MODULES, "rtx", ("no_such_module",))
    assert not _is_installed("tensorrt_folder")
    with pytest.raises(DeviceError, match="is not installed"):
        load_tensorrt("auto")
