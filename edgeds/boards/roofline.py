"""Time of one kernel: the roofline of Williams et al. (2009), with what small kernels lose on a GPU.

    time = launch + cycles / clock + (compute^p + memory^p)^(1/p),  p = 2
    compute = flops / (peak x efficiency) x (1 + fill x SMs / outputs) x (1 + shallow / depth)
              + smooth x outputs / (SMs x clock)          where a SiLU, GELU or the like is folded in
    memory = bytes / (bandwidth x efficiency)

``fill``: outputs per SM at which half of the machine idles; ``shallow``: multiply-adds per output at which half of
the tensor cores' work is padding. ``smooth``: cycles of an SM per output. All come from the fit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from edgeds.boards.assumptions import assumed
from edgeds.boards.fusion import Kernel

WEIGHT_BYTES = {"fp32": 4.0, "fp32-strict": 4.0, "fp16": 2.0, "int8": 1.0, "int4": 0.5625}
"""Bytes per weight; int4 with a scale of 16 bits and a zero of the same for groups of 64 weights (256 bits)."""
SPARSE_SHARE = {"fp16": 0.5625, "int8": 0.625}
"""Bytes of 2:4 weights over dense ones: half of the values, and two bits for the place of each that is kept."""


@dataclass(frozen=True, kw_only=True)
class Coefficients:
    """What is fitted. Efficiencies are shares of peak, launch in microseconds, cycles of the GPU's clock."""

    launch_us: float
    cycles: float
    efficiency_fp32: float
    efficiency_fp16: float
    efficiency_int8: float
    bandwidth_efficiency: float
    fill: float
    shallow: float
    smooth: float

    def efficiency(self, precision: str) -> float:
        """Share of peak of large layers that compute in ``fp32`` (TF32), ``fp32-strict``, ``fp16`` or ``int8``."""
        values = {"fp32": self.efficiency_fp32, "fp16": self.efficiency_fp16, "int8": self.efficiency_int8}
        return assumed("fp32_strict_efficiency") if precision == "fp32-strict" else values[precision]


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A GPU at its clocks. ``peak_flops`` per second by ``fp32`` (TF32), ``fp32-strict``, ``fp16``,
    ``int8``; what no source states is left out."""

    sm: int
    gpu_mhz: float
    dram_gb_s: float
    peak_flops: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class KernelTime:
    """Predicted times of one kernel in microseconds, and what it moves. ``device``: ``gpu`` or ``dla``."""

    node: str
    op: str
    precision: str
    latency_us: float
    compute_us: float
    memory_us: float
    overhead_us: float
    bytes: float
    flops: float
    device: str = "gpu"

    @property
    def limited_by(self) -> str:
        """``compute``, ``memory`` or ``launch``: the largest part."""
        parts = {"compute": self.compute_us, "memory": self.memory_us, "launch": self.overhead_us}
        return max(parts, key=lambda name: parts[name])


def choose_precision(kernel: Kernel, *, precision: str, is_quantized: bool) -> str:
    """The precision a kernel computes in: as the file says in a quantized model, else INT8 for layers with weights."""
    if precision in ("fp32", "fp32-strict", "fp16"):
        return precision
    if precision == "int4":
        return "int4" if kernel.int8_eligible and not kernel.is_vocabulary else "fp16"
    if is_quantized:
        return "int8" if kernel.precision == "int8" else "fp16"
    return "int8" if kernel.int8_eligible and not kernel.is_vocabulary else "fp16"


def weight_bytes(kernel: Kernel, *, precision: str) -> float:
    """Bytes of the weights as an engine stores them; 2:4 ones packed where the tensor cores take them so."""
    packed = SPARSE_SHARE.get(precision, 1.0) if kernel.sparse_24 else 1.0
    return kernel.params * WEIGHT_BYTES[precision] * packed


def moved_bytes(kernel: Kernel, *, precision: str) -> float:
    """Bytes over the memory bus: weights once, activations in their width."""
    weights = weight_bytes(kernel, precision=precision)
    width = 2.0 if precision == "int4" else WEIGHT_BYTES[precision]
    return weights + (kernel.read + kernel.written) * width


def time_kernel(kernel: Kernel, machine: Machine, *, precision: str, coefficients: Coefficients) -> KernelTime:
    """Predict one kernel that computes in ``precision`` (``choose_precision``)."""
    c = coefficients
    engine = "fp16" if precision == "int4" else precision
    compute_us = 0.0
    if kernel.is_matrix and kernel.written:
        lost = (1 + c.fill * machine.sm / kernel.written) * (1 + c.shallow / max(kernel.depth, 1))
        compute_us = kernel.flops / (machine.peak_flops[engine] * c.efficiency(engine)) * lost * 1e6
        if kernel.sparse_24 and engine in SPARSE_SHARE and precision != "int4":
            compute_us /= assumed(f"sparse_gain_{engine}")
        if kernel.is_smooth:
            compute_us += c.smooth * kernel.written / (machine.sm * machine.gpu_mhz)
    size = moved_bytes(kernel, precision=precision)
    memory_us = size / (machine.dram_gb_s * c.bandwidth_efficiency) / 1e3
    overhead_us = c.launch_us + c.cycles / machine.gpu_mhz
    return KernelTime(
        node=kernel.node,
        op=kernel.op,
        precision=precision,
        latency_us=overhead_us + math.hypot(compute_us, memory_us),
        compute_us=compute_us,
        memory_us=memory_us,
        overhead_us=overhead_us,
        bytes=size,
        flops=kernel.flops,
    )
