"""The one place that imports TensorRT, and the one table of what its versions can do.

Two libraries with nearly the same Python API are served: ``tensorrt`` (10.3 of JetPack 6 to 11.4) and
``tensorrt_rtx`` (RTX GPUs on PCs; it builds engines without any GPU). Everyone else gets the module as a value and
the facts about it as ``TrtFacts``. Facts are found by asking whether a name exists, not by comparing versions: the
names per version are in tests/data/trt_names.json, generated from NVIDIA's own bindings.
"""

from __future__ import annotations

import importlib
import re
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal

from edgeds.errors import BuildError, DeviceError, MissingDependency, SpecError

Prefer = Literal["auto", "tensorrt", "rtx"]

MODULES = {
    "tensorrt": ("tensorrt",),
    # The two wheels alone give tensorrt_rtx_bindings; only NVIDIA's meta package adds tensorrt_rtx.
    "rtx": ("tensorrt_rtx", "tensorrt_rtx_bindings"),
}
OLDEST = (10, 0)
STRONG_TYPING_COMPLETE = (10, 12)
"""First version whose strongly typed networks cover all layers, as NVIDIA's migration guide for 11.x states."""

INSTALL_TENSORRT = (
    "on a Jetson install it with JetPack (sudo apt install python3-libnvinfer); elsewhere see docs/tensorrt.md"
)


@dataclass(frozen=True, kw_only=True)
class TrtFacts:
    """What one TensorRT module can do. ``has_*`` and ``can_*`` come from its names, never from its version number."""

    module: str
    version: tuple[int, ...]
    version_text: str
    is_rtx: bool
    can_weak: bool
    has_progress: bool
    has_timing_cache: bool
    has_tiling: bool
    has_max_tactics: bool
    has_same_compute_capability: bool
    has_compute_capabilities: bool
    has_dla: bool

    @property
    def typed_only(self) -> bool:
        return not self.can_weak

    @property
    def product(self) -> str:
        """Name and version for messages."""
        return f"{'TensorRT-RTX' if self.is_rtx else 'TensorRT'} {self.version_text}"


def load_tensorrt(prefer: Prefer = "auto") -> ModuleType:
    """Import TensorRT (``tensorrt``), TensorRT-RTX (``rtx``), or whichever is installed, TensorRT first (``auto``).

    Raises MissingDependency or DeviceError saying what to install, and DeviceError for a package that is there but
    does not work: libraries missing, too old, or a stand-in package of that name without the API.
    """
    if prefer not in ("auto", *MODULES):
        raise SpecError(f"TensorRT {prefer!r}: expected auto, tensorrt or rtx")
    kinds = tuple(MODULES) if prefer == "auto" else (prefer,)
    for kind in kinds:
        for name in MODULES[kind]:
            module = _try_import(name)
            if module is not None:
                return _checked(module)
    if prefer == "rtx":
        raise MissingDependency("tensorrt-rtx", extra="rtx", purpose="building engines for RTX GPUs")
    raise DeviceError(f"TensorRT's Python package is not installed; {INSTALL_TENSORRT}")


def describe_tensorrt(trt: ModuleType) -> TrtFacts:
    """What this module can do. ``trt`` is what ``load_tensorrt`` gave, or any module with the same names."""
    config = trt.IBuilderConfig
    is_rtx = hasattr(trt, "ComputeCapability")
    return TrtFacts(
        module=trt.__name__,
        version=parse_version(str(trt.__version__)),
        version_text=str(trt.__version__),
        is_rtx=is_rtx,
        can_weak=not is_rtx and hasattr(trt.BuilderFlag, "FP16"),
        has_progress=hasattr(trt, "IProgressMonitor") and hasattr(config, "progress_monitor"),
        # RTX has the names, but they are no-ops that ask for a GPU and so prevent builds without one.
        has_timing_cache=not is_rtx,
        has_tiling=not is_rtx and hasattr(config, "tiling_optimization_level"),
        has_max_tactics=hasattr(config, "max_num_tactics"),
        has_same_compute_capability=hasattr(trt.HardwareCompatibilityLevel, "SAME_COMPUTE_CAPABILITY"),
        has_compute_capabilities=is_rtx,
        has_dla=not is_rtx and hasattr(trt.DeviceType, "DLA"),
    )


def parse_version(text: str) -> tuple[int, ...]:
    """``10.16.2.10`` or ``10.13.0.post1`` as numbers; at least two, at most four. Raises DeviceError for other text."""
    match = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?(?:\.(\d+))?", text)
    if match is None:
        raise DeviceError(f"TensorRT states its version as {text!r}, which is not one; reinstall TensorRT")
    return tuple(int(part) for part in match.groups() if part is not None)


def resolve_typing(facts: TrtFacts, *, typing: Literal["auto", "strong", "weak"]) -> Literal["strong", "weak"]:
    """How networks are typed: by the model (``strong``) or by builder flags (``weak``).

    ``auto`` is strong, except for TensorRT older than 10.12, where strong typing has gaps. Raises BuildError for
    ``weak`` on a version that has strongly typed networks only.
    """
    if typing == "auto":
        return "weak" if facts.can_weak and facts.version < STRONG_TYPING_COMPLETE else "strong"
    if typing == "weak" and facts.typed_only:
        raise BuildError(
            f"{facts.product} has strongly typed networks only: precision is part of the model; build the bundle's "
            "int8_fp16 or float16 variant without asking for weak typing"
        )
    return typing


def network_flags(trt: ModuleType, *, typing: Literal["strong", "weak"]) -> int:
    """Flags of ``Builder.create_network``. Bits are looked up: STRONGLY_TYPED is bit 1 in 10.x and bit 0 in 11."""
    flags = trt.NetworkDefinitionCreationFlag
    return 1 << int(flags.STRONGLY_TYPED) if typing == "strong" else 0


def enum_member(trt: ModuleType, path: str) -> Any:
    """``enum_member(trt, "BuilderFlag.FP16")``, or None where this version has no such name."""
    value: Any = trt
    for part in path.split("."):
        value = getattr(value, part, None)
        if value is None:
            return None
    return value


def _try_import(name: str) -> ModuleType | None:
    """The module; None when no package of that name exists. Raises DeviceError when it exists but cannot load."""
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name == name:
            return None
        raise DeviceError(f"{name} is installed but needs the module {error.name!r}; reinstall TensorRT") from error
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        raise DeviceError(f"{name} is installed but cannot be loaded: {_explain_load(error)}") from error
    # A folder that happens to have the name (Python takes it for a namespace package) is no installation.
    spec = getattr(module, "__spec__", None)
    return None if spec is not None and spec.origin is None and spec.submodule_search_locations is not None else module


def _explain_load(error: BaseException) -> str:
    text = " ".join(str(error).split())[:300] or type(error).__name__
    library = re.search(r"(lib[\w.+-]+\.so[.\d]*)", text)
    if library and "nvdla" in library.group(1):
        return (
            f"{library.group(1)} is missing; on JetPack 6 install the package nvidia-l4t-dla-compiler, in a container "
            "mount /usr/lib/aarch64-linux-gnu/nvidia from the host"
        )
    if library:
        return f"{library.group(1)} is missing or does not fit ({text}); install the TensorRT and CUDA of your JetPack"
    return f"{text}; reinstall TensorRT"


def _checked(module: ModuleType) -> ModuleType:
    missing = [name for name in ("__version__", "Builder", "OnnxParser", "Runtime") if not hasattr(module, name)]
    if missing:
        where = getattr(module, "__file__", None) or "an unknown place"
        raise DeviceError(
            f"the package {module.__name__!r} at {where} is a stand-in without TensorRT's API (no {missing[0]}); "
            f"uninstall it; {INSTALL_TENSORRT}"
        )
    version = parse_version(str(module.__version__))
    if not hasattr(module, "ComputeCapability") and version < OLDEST:
        raise DeviceError(
            f"TensorRT {module.__version__} is too old; edgeds needs 10.3 or newer, which JetPack 6.1 and later bring"
        )
    return module
