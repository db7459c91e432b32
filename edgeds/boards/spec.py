"""A board, its power modes and its GPU architecture as values. None means that no source states the fact."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Sources = Mapping[str, tuple[str, ...]]
"""Field name -> ids into ``Catalogue.sources`` (or, for boards read from a file or a machine, the text itself)."""

OPS_KEYS = {
    "fp32": "fp32_cuda",
    "tf32": "tf32_tensor",
    "bf16": "bf16_tensor",
    "fp16": "fp16_tensor_dense",
    "fp16_sparse": "fp16_tensor_sparse",
    "fp16_cuda": "fp16_cuda",
    "int8": "int8_tensor_dense",
    "int8_sparse": "int8_tensor_sparse",
    "int4": "int4_tensor",
}
"""Precision as people name it -> key of ``GpuArch.ops_per_sm_per_clock``."""


@dataclass(frozen=True, kw_only=True)
class GpuArch:
    """What one streaming multiprocessor does per clock. One multiply-add counts as two operations."""

    name: str
    compute_capability: str
    sm_per_tpc: int | None = None
    cuda_cores_per_sm: int | None = None
    tensor_cores_per_sm: int | None = None
    max_threads_per_sm: int | None = None
    shared_memory_per_sm_bytes: int | None = None
    ops_per_sm_per_clock: Mapping[str, float | None] = field(default_factory=dict)
    dla_ops_per_core_per_clock: Mapping[str, float | None] = field(default_factory=dict)
    sources: Sources = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class PowerMode:
    """One nvpmodel mode: caps on clocks and units.

    ``watts`` is the number in the name of the mode, None for MAXN. It names a set of caps: it is neither a promise
    nor an enforced limit. ``dla_mhz`` has one entry per DLA core; ``gpu_mhz`` and ``emc_mhz`` are maxima.
    """

    name: str
    id: int | None = None
    watts: float | None = None
    is_default: bool | None = None
    cpu_cores: int | None = None
    cpu_mhz: float | None = None
    tpc_pg_mask: int | None = None
    tpc: int | None = None
    sm: int | None = None
    gpu_mhz: float | None = None
    emc_mhz: float | None = None
    dram_gb_s: float | None = None
    dla_cores: int | None = None
    dla_mhz: tuple[float | None, ...] = ()
    sources: Sources = field(default_factory=dict)
    notes: Mapping[str, str] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """The name as people say it: ``30W`` for ``MODE_30W``."""
        return self.name.removeprefix("MODE_")


@dataclass(frozen=True, kw_only=True)
class ThermalLimits:
    """Junction temperatures: software starts to throttle, hardware throttles, software and hardware shut down."""

    sw_throttle_c: float | None = None
    hw_throttle_c: float | None = None
    critical_c: float | None = None
    hw_shutdown_c: float | None = None


@dataclass(frozen=True, kw_only=True)
class BoardSpec:
    """A module with its power modes.

    ``memory_gb`` is the size it is sold with; ``usable_memory_mib`` the least that Linux was seen to have.
    ``total_rails`` are the rails whose sum is the module's power (None: no rule is known); ``rails`` all of them.
    ``power_range_w`` and ``max_power_w`` are published figures. ``advertised`` holds published TOPS and TFLOPS.
    """

    name: str
    title: str
    kind: Literal["jetson", "discrete"]
    arch: GpuArch
    profile: str = "standard"
    aliases: tuple[str, ...] = ()
    part_numbers: tuple[str, ...] = ()
    nvpmodel_conf: str | None = None
    valid_for: str | None = None
    memory_gb: float | None = None
    usable_memory_mib: int | None = None
    memory_type: str | None = None
    bus_bits: int | None = None
    ecc: bool | None = None
    cpu_core: str | None = None
    cpu_cores: int | None = None
    tpc: int | None = None
    sm: int | None = None
    dla_cores: int | None = None
    power_range_w: tuple[float, float] | None = None
    max_power_w: float | None = None
    total_rails: tuple[str, ...] | None = None
    rails: tuple[str, ...] | None = None
    thermal: ThermalLimits = ThermalLimits()
    advertised: Mapping[str, float] = field(default_factory=dict)
    modes: tuple[PowerMode, ...] = ()
    sources: Sources = field(default_factory=dict)
    notes: Mapping[str, str] = field(default_factory=dict)

    @property
    def default_mode(self) -> PowerMode | None:
        """The mode it boots in; the only mode where there is one; None when no source says."""
        if len(self.modes) == 1:
            return self.modes[0]
        return next((mode for mode in self.modes if mode.is_default), None)

    @property
    def is_integrated(self) -> bool:
        """Whether CPU and GPU share one memory, as on every Jetson."""
        return self.kind == "jetson"

    def highest(self, fact: Literal["cpu_mhz", "gpu_mhz", "emc_mhz", "dram_gb_s", "cpu_cores"]) -> float | None:
        """The highest value of a fact over all modes: what an uncapped mode reaches. None when no mode states it."""
        values = [value for mode in self.modes if (value := getattr(mode, fact)) is not None]
        return max(values, default=None)


@dataclass(frozen=True, kw_only=True)
class Target:
    """A board and, where one was named, a mode. ``mode`` None leaves the choice to a planner."""

    board: BoardSpec
    mode: PowerMode | None = None

    @property
    def mode_or_default(self) -> PowerMode | None:
        return self.mode or self.board.default_mode

    def __str__(self) -> str:
        return self.board.name if self.mode is None else f"{self.board.name}@{self.mode.label}"


def peak_tops(board: BoardSpec, mode: PowerMode, *, precision: str) -> float | None:
    """Peak of the GPU in 1e12 operations per second: SMs x clock x operations per SM and clock.

    ``precision`` is a key of ``OPS_KEYS``. None when a factor is unknown (``missing_facts`` names it).
    """
    ops = board.arch.ops_per_sm_per_clock.get(OPS_KEYS[precision])
    if ops is None or mode.sm is None or mode.gpu_mhz is None:
        return None
    return mode.sm * mode.gpu_mhz * ops / 1e6


def missing_facts(board: BoardSpec, mode: PowerMode, *, precision: str | None = None) -> tuple[str, ...]:
    """Which facts a prediction needs and nobody states, as ``board@mode: gpu_mhz``; empty when all are known."""
    where = f"{board.name}@{mode.label}"
    missing = [f"{where}: {name}" for name in ("sm", "gpu_mhz", "emc_mhz", "dram_gb_s") if getattr(mode, name) is None]
    if board.memory_gb is None:
        missing.append(f"{board.name}: memory_gb")
    if precision is not None and board.arch.ops_per_sm_per_clock.get(OPS_KEYS[precision]) is None:
        missing.append(f"{board.arch.name}: operations per clock of {precision}")
    return tuple(missing)
