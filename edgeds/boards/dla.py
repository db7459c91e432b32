"""Time on one DLA core: what a DLA can take runs there, the rest falls back to the GPU, and every change costs.

    time = layer + sqrt(compute² + memory²)
    compute = flops / (operations per clock x clock x efficiency)
    memory  = bytes / (bandwidth of the mode x share of one core)

A SiLU or the like is no part of a DLA convolution: its passes over the output count as bytes.

Constants: ``assumptions.json``, fitted by ``benchmarks/predictor/fit_dla.py`` on published rows of AGX Orin.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from edgeds.boards.assumptions import assumed
from edgeds.boards.dla_ops import PLACEABLE, REASONS
from edgeds.boards.fusion import Kernel
from edgeds.boards.roofline import WEIGHT_BYTES, KernelTime, Machine, moved_bytes
from edgeds.boards.spec import BoardSpec, PowerMode
from edgeds.errors import SpecError

PRECISIONS = ("int8", "fp16")
MAX_BATCH = 4096
_OPS_KEYS = {"int8": "int8_dense", "fp16": "fp16"}


@dataclass(frozen=True, kw_only=True)
class DlaCore:
    """One core at its clock. ``peak_flops`` per second in the precision asked for."""

    peak_flops: float
    dram_gb_s: float
    precision: str


@dataclass(frozen=True, kw_only=True)
class DlaSplit:
    """Where the kernels are expected to run. ``gpu_ops``: operator, why and how often of those that fall back."""

    dla_kernels: int
    gpu_kernels: int
    dla_flops_share: float
    transitions: int
    gpu_ops: tuple[str, ...]


def dla_core(board: BoardSpec, mode: PowerMode, *, precision: str, batch: int) -> DlaCore:
    """The fastest DLA core of a mode. Raises SpecError without a DLA, for what it cannot compute, and for facts that
    no source states."""
    if precision not in PRECISIONS:
        raise SpecError(f"the DLA computes in {' or '.join(PRECISIONS)}, not in {precision}")
    if batch > MAX_BATCH:
        raise SpecError(f"batch {batch}: the DLA takes at most {MAX_BATCH}")
    where = f"{board.name}@{mode.label}"
    if board.dla_cores == 0 or mode.dla_cores == 0:
        raise SpecError(f"{where} has no DLA; predict it for the GPU (--device gpu)")
    clock = max((mhz for mhz in mode.dla_mhz if mhz is not None), default=None)
    ops = board.arch.dla_ops_per_core_per_clock.get(_OPS_KEYS[precision])
    missing = [f"{board.name}: dla_cores"] if board.dla_cores is None else []
    missing += [f"{where}: dla_mhz"] if clock is None else []
    missing += [f"{board.arch.name}: DLA operations per clock of {precision}"] if ops is None else []
    missing += [f"{where}: dram_gb_s"] if mode.dram_gb_s is None else []
    if missing or clock is None or ops is None or mode.dram_gb_s is None:
        raise SpecError(f"cannot predict for the DLA: no source states {'; '.join(missing)}")
    return DlaCore(peak_flops=clock * 1e6 * ops, dram_gb_s=mode.dram_gb_s, precision=precision)


def split_kernels(kernels: Sequence[Kernel]) -> tuple[list[bool], DlaSplit]:
    """For each kernel whether a DLA takes it, and the summary."""
    placed = [kernel.op in PLACEABLE for kernel in kernels]
    total = sum(kernel.flops for kernel in kernels)
    on_dla = sum(kernel.flops for kernel, yes in zip(kernels, placed, strict=True) if yes)
    rest = Counter(kernel.op for kernel, yes in zip(kernels, placed, strict=True) if not yes)
    ops = tuple(f"{count} {op}: {REASONS.get(op, 'no DLA form')}" for op, count in rest.most_common())
    return placed, DlaSplit(
        dla_kernels=sum(placed),
        gpu_kernels=len(placed) - sum(placed),
        dla_flops_share=on_dla / total if total else 0.0,
        transitions=sum(1 for one, two in itertools.pairwise(placed) if one != two),
        gpu_ops=ops,
    )


def time_on_dla(kernel: Kernel, core: DlaCore) -> KernelTime:
    """One kernel on the core; 2:4 weights by the published gain in INT8."""
    compute_us = kernel.flops / (core.peak_flops * assumed(f"dla_efficiency_{core.precision}")) * 1e6
    if not kernel.is_matrix:
        compute_us = 0.0
    elif kernel.sparse_24 and core.precision == "int8":
        compute_us /= assumed("sparse_gain_dla_int8")
    size = moved_bytes(kernel, precision=core.precision)
    if kernel.is_smooth:
        size += assumed("dla_smooth_moves") * kernel.written * WEIGHT_BYTES[core.precision]
    memory_us = size / (core.dram_gb_s * assumed("dla_bandwidth_share")) / 1e3
    return KernelTime(
        node=kernel.node,
        op=kernel.op,
        precision=core.precision,
        latency_us=assumed("dla_layer_us") + math.hypot(compute_us, memory_us),
        compute_us=compute_us,
        memory_us=memory_us,
        overhead_us=assumed("dla_layer_us"),
        bytes=size,
        flops=kernel.flops,
        device="dla",
    )


def mix_devices(
    kernels: Sequence[Kernel], gpu: Sequence[KernelTime], *, core: DlaCore, machine: Machine
) -> tuple[tuple[KernelTime, ...], DlaSplit]:
    """Times with every kernel where it is expected to run, and a transition at each change of device.

    ``gpu`` are the kernels' times on the GPU. Raises SpecError when the DLA would take nothing.
    """
    placed, split = split_kernels(kernels)
    if not any(placed):
        raise SpecError(f"the DLA takes no layer of this model ({', '.join(split.gpu_ops)}); predict it for the GPU")
    times: list[KernelTime] = []
    for index, (kernel, yes) in enumerate(zip(kernels, placed, strict=True)):
        if index and placed[index - 1] != yes:
            times.append(_transition(kernels[index - 1], core=core, machine=machine))
        times.append(time_on_dla(kernel, core) if yes else gpu[index])
    return tuple(times), split


def _transition(source: Kernel, *, core: DlaCore, machine: Machine) -> KernelTime:
    """The copy of what the one device hands to the other, read and written once, and the wait for it."""
    size = 2 * source.written * WEIGHT_BYTES[core.precision]
    memory_us = size / machine.dram_gb_s / 1e3
    wait = assumed("dla_transition_us")
    return KernelTime(
        node=f"{source.node} to the other device",
        op="Transition",
        precision=core.precision,
        latency_us=wait + memory_us,
        compute_us=0.0,
        memory_us=memory_us,
        overhead_us=wait,
        bytes=size,
        flops=0.0,
        device="dla",
    )
