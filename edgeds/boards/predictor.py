"""What a model will do on a board: latency with a band, limits, power, energy and memory. Never a measurement."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from edgeds.boards.coefficients import PowerCoefficients, Table, load_table
from edgeds.boards.cost_file import ModelWork
from edgeds.boards.fusion import Kernel, fuse_layers
from edgeds.boards.roofline import WEIGHT_BYTES, KernelTime, Machine, choose_precision, time_kernel
from edgeds.boards.spec import BoardSpec, PowerMode, missing_facts, peak_tops
from edgeds.errors import SpecError

PRECISIONS = ("fp32", "fp16", "int8", "int4")
WORKSPACE_MIB = 64.0
MAX_BATCH = 65_536
_TOP_GHZ = 1.3


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Predicted figures of one inference of ``batch`` items. ``power_w`` is the module's, ``energy_mj`` per inference
    of the whole batch. 80 % of left-out measurements lay between low and high. ``status`` is always ``predicted``."""

    status: str = "predicted"
    target: str
    precision: str
    batch: int
    latency_ms: float
    latency_low_ms: float
    latency_high_ms: float
    fps: float
    power_w: float
    energy_mj: float
    memory_mib: float
    limited_by: str
    notes: tuple[str, ...]
    table_version: str
    layers: tuple[KernelTime, ...] = ()


def predict(
    work: ModelWork,
    *,
    board: BoardSpec,
    mode: PowerMode,
    precision: str,
    batch: int | None = None,
    table: Table | None = None,
) -> Prediction:
    """Predict ``work`` on ``board`` in ``mode``; ``batch`` None takes the batch that the costs were counted at.

    ``precision``: one of ``PRECISIONS`` (``fp32`` is TensorRT's default, TF32; ``int4`` means weights only). Raises
    SpecError for an impossible batch or precision, and for facts of the board that nobody states.
    """
    table = table or load_table()
    batch = work.batch if batch is None else batch
    if precision not in PRECISIONS:
        raise SpecError(f"precision {precision!r} is not known; choose from {', '.join(PRECISIONS)}")
    if not 1 <= batch <= MAX_BATCH:
        raise SpecError(f"batch {batch}: expected 1 to {MAX_BATCH}")
    machine = machine_of(board, mode)
    kernels = fuse_layers(work, batch=batch)
    kind = workload_kind(kernels)
    times = time_layers(work, kernels, machine=machine, precision=precision, table=table)
    latency_us = sum(time.latency_us for time in times)
    power = module_power(times, machine=machine, coefficients=table.power)
    notes = [] if precision != "fp32" else ["fp32 is computed as TF32, as TensorRT does by default"]
    if mode.watts is not None and power > mode.watts:
        notes.append(f"{power:.1f} W would pass the mode's {mode.watts:g} W: shown at those, clocks may be lowered")
        power = mode.watts
    memory = memory_mib(kernels, work=work, precision=precision)
    if board.memory_gb is not None and memory > board.memory_gb * 1024:
        notes.append(f"needs more than the {board.memory_gb:g} GB of {board.name}")
    band = table.intervals[kind]
    return Prediction(
        target=f"{board.name}@{mode.label}",
        precision=precision,
        batch=batch,
        latency_ms=latency_us / 1e3,
        latency_low_ms=latency_us * band.low / 1e3,
        latency_high_ms=latency_us * band.high / 1e3,
        fps=batch / latency_us * 1e6,
        power_w=power,
        energy_mj=power * latency_us / 1e3,
        memory_mib=memory,
        limited_by=_limit(times),
        notes=(*notes, *work.notes),
        table_version=table.version,
        layers=times,
    )


def machine_of(board: BoardSpec, mode: PowerMode) -> Machine:
    """The GPU of a board in a mode. Raises SpecError that lists the facts that no source states."""
    missing = missing_facts(board, mode)
    half, whole = (peak_tops(board, mode, precision=name) for name in ("fp16", "int8"))
    if missing or half is None or whole is None or not (mode.sm and mode.gpu_mhz and mode.dram_gb_s):
        facts = "; ".join(missing) or f"{board.arch.name}: operations per clock of fp16 and int8"
        raise SpecError(f"cannot predict: no source states {facts}; add them to a boards file (docs/boards.md)")
    # No source states the TF32 rate of Orin: half of FP16 is the unit that the fitted efficiency is a share of.
    peaks = {"fp32": half / 2 * 1e12, "fp16": half * 1e12, "int8": whole * 1e12}
    return Machine(sm=mode.sm, gpu_mhz=mode.gpu_mhz, dram_gb_s=mode.dram_gb_s, peak_flops=peaks)


def workload_kind(kernels: Sequence[Kernel]) -> str:
    """``llm`` for a decode step (weights outweigh activations by far), else ``cnn``."""
    weights = sum(kernel.params for kernel in kernels)
    moved = sum(kernel.read + kernel.written for kernel in kernels)
    return "llm" if any(kernel.is_vocabulary for kernel in kernels) and weights > moved else "cnn"


def time_layers(
    work: ModelWork, kernels: Sequence[Kernel], *, machine: Machine, precision: str, table: Table
) -> tuple[KernelTime, ...]:
    """Times of all kernels; decode steps have coefficients of their own."""
    coefficients = table.llm if workload_kind(kernels) == "llm" else table.time
    quantized = work.is_quantized
    return tuple(
        time_kernel(
            kernel,
            machine,
            precision=choose_precision(kernel, precision=precision, is_quantized=quantized),
            coefficients=coefficients,
        )
        for kernel in kernels
    )


def power_terms(times: Sequence[KernelTime], *, machine: Machine) -> tuple[float, float, float, float]:
    """What the four power coefficients multiply: 1, peak and moved bandwidth in 100 GB/s, SMs x GHz x (V / Vtop)^2.

    The voltage is taken as 0.55 + 0.45 x clock / 1.3 GHz of its top value; the GPU counts half while it only launches.
    """
    total = sum(time.latency_us for time in times)
    idle = sum(time.overhead_us for time in times) / total
    ghz = machine.gpu_mhz / 1e3
    voltage = 0.55 + 0.45 * ghz / _TOP_GHZ
    gpu = machine.sm * ghz * voltage**2 * (1 - 0.5 * idle)
    return 1.0, machine.dram_gb_s / 100, gpu, sum(time.bytes for time in times) / total / 1e5


def module_power(times: Sequence[KernelTime], *, machine: Machine, coefficients: PowerCoefficients) -> float:
    """Watts while the model runs without a pause."""
    one, peak, gpu, moved = power_terms(times, machine=machine)
    c = coefficients
    return c.static_w * one + c.memory_static_w * peak + c.gpu_w * gpu + c.dram_w * moved


def idle_power(machine: Machine, coefficients: PowerCoefficients) -> float:
    """Watts that do not depend on work: the fit's static terms. What runs less than all the time lies between."""
    return coefficients.static_w + coefficients.memory_static_w * machine.dram_gb_s / 100


def memory_mib(kernels: Sequence[Kernel], *, work: ModelWork, precision: str) -> float:
    """Weights, twice the largest input and output of a layer, and a workspace; without runtime libraries."""
    quantized = work.is_quantized
    weights = sum(
        kernel.params * WEIGHT_BYTES[choose_precision(kernel, precision=precision, is_quantized=quantized)]
        for kernel in kernels
    )
    width = 4.0 if precision == "fp32" else 2.0
    largest = max((kernel.read + kernel.written for kernel in kernels), default=0.0) * width
    return (weights + 2 * largest) / (1 << 20) + WORKSPACE_MIB


def resize_work(work: ModelWork, shapes: Mapping[str, Sequence[int]]) -> ModelWork:
    """Costs at other input sizes: activations and FLOPs grow with the elements of the inputs per item, weights stay.

    An approximation for cost files (attention grows faster); a model file is counted anew instead. Raises SpecError
    for unknown inputs and other ranks.
    """
    inputs = dict(work.inputs)
    for name, shape in shapes.items():
        if name not in inputs:
            raise SpecError(f"--input {name}: the costs have the inputs {', '.join(inputs) or 'none'}")
        if len(shape) != len(inputs[name]) or any(dim < 1 for dim in shape):
            raise SpecError(f"--input {name}: expected {len(inputs[name])} positive numbers, got {list(shape)}")
        inputs[name] = tuple(shape)
    before = max(math.prod(shape) for shape in work.inputs.values()) if work.inputs else 1
    ratio = (max(math.prod(shape) for shape in inputs.values()) if inputs else 1) / before
    layers = []
    for layer in work.layers:
        weights = min(round(layer.params * _width(layer.precision)), layer.bytes_read)
        read = weights + round((layer.bytes_read - weights) * ratio)
        written, flops = round(layer.bytes_written * ratio), round(layer.flops * ratio)
        layers.append(replace(layer, flops=flops, bytes_read=read, bytes_written=written))
    note = () if ratio == 1 else ("scaled from the size that the costs were counted at",)
    return replace(work, inputs=inputs, layers=tuple(layers), notes=(*work.notes, *note))


def _width(precision: str) -> float:
    return {"float16": 2.0, "bfloat16": 2.0, "int8": 1.0, "uint8": 1.0}.get(precision, 4.0)


def _limit(times: Sequence[KernelTime]) -> str:
    totals = {"compute": 0.0, "memory": 0.0, "launch": 0.0}
    for time in times:
        totals[time.limited_by] += time.latency_us
    return max(totals, key=lambda name: totals[name])
