"""What a build is asked for and what it reports. Plain values: both travel as JSON to and from the build's process."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from edgeds.engines.layer_log import EngineLayer, node_precisions
from edgeds.errors import SpecError
from edgeds.specs import ShapeRange, TensorSpec

Typing = Literal["auto", "strong", "weak"]
BuildPrecision = Literal["auto", "float32", "float16", "int8"]
Tiling = Literal["fast", "moderate", "full"]
Compatibility = Literal["ampere_plus", "same_compute_capability"]


@dataclass(frozen=True, kw_only=True)
class BuildOptions:
    """How to build one engine. None and False mean TensorRT's own default.

    ``profiles``: input name to ShapeRange, one mapping per profile (see ``profiles.plan_profiles``).
    ``precision`` states what the model holds; it becomes builder flags only in a weakly typed build.
    ``timing_cache``: file of measured kernel timings to reuse and update; never used by TensorRT-RTX.
    ``compute_capabilities``: targets of an ahead-of-time build, such as 86; TensorRT-RTX only.
    ``dla_core``: run what can be run on this DLA core, the rest on the GPU unless ``gpu_fallback`` is off.
    ``strip``: leave weights out of the plan; ``refit``: allow replacing them later.
    """

    profiles: tuple[dict[str, ShapeRange], ...] = ()
    typing: Typing = "auto"
    precision: BuildPrecision = "auto"
    workspace_mib: int | None = None
    optimization_level: int | None = None
    timing_cache: Path | str | None = None
    sparsity: bool = False
    tf32: bool = True
    tiling: Tiling | None = None
    tiling_l2_kib: int | None = None
    max_tactics: int | None = None
    max_aux_streams: int | None = None
    dla_core: int | None = None
    gpu_fallback: bool = True
    version_compatible: bool = False
    hardware_compatibility: Compatibility | None = None
    strip: bool = False
    refit: bool = False
    compute_capabilities: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        _check_whole("workspace_mib", self.workspace_mib, low=1, high=1 << 20)
        _check_whole("optimization_level", self.optimization_level, low=0, high=5)
        _check_whole("tiling_l2_kib", self.tiling_l2_kib, low=0, high=1 << 20)
        _check_whole("max_tactics", self.max_tactics, low=-1, high=1 << 20)
        _check_whole("max_aux_streams", self.max_aux_streams, low=0, high=64)
        _check_whole("dla_core", self.dla_core, low=0, high=15)
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                known = ", ".join(str(value) for value in allowed if value is not None)
                raise SpecError(f"{name}: expected one of {known}, got {getattr(self, name)!r}")
        for value in self.compute_capabilities:
            _check_whole("compute_capabilities", value, low=50, high=999)
        if len(set(self.compute_capabilities)) != len(self.compute_capabilities):
            raise SpecError(f"compute_capabilities {self.compute_capabilities}: one is given twice")
        if self.tiling_l2_kib is not None and self.tiling is None:
            raise SpecError("tiling_l2_kib has a meaning only together with tiling; give both or neither")
        if self.dla_core is None and not self.gpu_fallback:
            raise SpecError("gpu_fallback=False has a meaning only together with dla_core")


@dataclass(frozen=True, kw_only=True)
class BuildReport:
    """What was built. Sizes of tensors are the network's (-1 never: dynamic dims are names or None).

    ``applied`` and ``skipped`` say per option what TensorRT holds now, and why it holds something else.
    ``layers`` is what the builder's detailed log tells, empty where a version does not tell.
    """

    plan: str
    plan_bytes: int
    product: str
    tensorrt: str
    typing: Literal["strong", "weak"]
    precision: str
    seconds: float
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    profiles: tuple[dict[str, ShapeRange], ...]
    applied: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    layers: tuple[EngineLayer, ...] = ()
    memory_mib: dict[str, float] = field(default_factory=dict)
    needed_mib: int = 0
    free_mib: int = 0
    dla: str | None = None

    def precision_of_nodes(self) -> dict[str, str]:
        """ONNX node name to the precision it computes in (``Int8``, ``Half``, ``Float``), as the log tells."""
        return node_precisions(self.layers)

    @property
    def int8_nodes(self) -> tuple[str, ...]:
        return tuple(node for node, precision in self.precision_of_nodes().items() if precision == "Int8")


_CHOICES: dict[str, tuple[Any, ...]] = {
    "typing": ("auto", "strong", "weak"),
    "precision": ("auto", "float32", "float16", "int8"),
    "tiling": (None, "fast", "moderate", "full"),
    "hardware_compatibility": (None, "ampere_plus", "same_compute_capability"),
}


def _check_whole(name: str, value: object, *, low: int, high: int) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise SpecError(f"{name}: expected a whole number from {low} to {high}, got {value!r}")
