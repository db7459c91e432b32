"""What a model will do on a board: latency with a band, limits, power, energy and memory. Never a measurement."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from edgeds.boards.assumptions import assumed, explain
from edgeds.boards.coefficients import Interval, Table, load_table
from edgeds.boards.cost_file import ModelWork
from edgeds.boards.dla import DlaSplit, dla_core, mix_devices
from edgeds.boards.footprint import MemoryParts, memory_parts
from edgeds.boards.fusion import Kernel, fuse_layers
from edgeds.boards.resize import resize_work
from edgeds.boards.roofline import SPARSE_SHARE, Coefficients, KernelTime, Machine, choose_precision, time_kernel
from edgeds.boards.spec import BoardSpec, PowerMode, missing_facts, peak_tops
from edgeds.boards.watts import PowerState, find_clock, idle_power, power_terms, rail_watts, slow_kernel
from edgeds.errors import SpecError

__all__ = [
    "PRECISIONS",
    "Prediction",
    "idle_power",
    "machine_of",
    "power_terms",
    "predict",
    "resize_work",
    "time_layers",
    "workload_kind",
]

PRECISIONS = ("fp32", "fp32-strict", "fp16", "int8", "int4")
DEVICES = ("gpu", "dla")
SPARSITIES = ("none", "2:4")
MAX_BATCH = 65_536
_LEAST_DEPTH = 16


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Predicted figures of one inference of ``batch`` items. ``power_w`` is the module's, ``energy_mj`` per inference
    of the whole batch. 80 % of left-out measurements lay between low and high (on a DLA: most of few). ``status`` is
    always ``predicted``.

    ``gpu_mhz`` is lower than the mode's where ``throttled``: more would pass the mode's watts. ``memory`` splits
    ``memory_mib``. ``rails_w``: None for rails that no source tells apart. ``dla``: the expected split, on a DLA.
    """

    status: str = "predicted"
    target: str
    device: str = "gpu"
    precision: str
    batch: int
    latency_ms: float
    latency_low_ms: float
    latency_high_ms: float
    fps: float
    power_w: float
    energy_mj: float
    energy_per_item_mj: float
    memory_mib: float
    memory: MemoryParts
    limited_by: str
    gpu_mhz: float
    throttled: bool
    rails_w: Mapping[str, float | None] = field(default_factory=dict)
    dla: DlaSplit | None = None
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
    device: str = "gpu",
    sparsity: str | None = None,
    kv_cache_mib: float = 0.0,
    kind: str | None = None,
) -> Prediction:
    """Predict ``work`` on ``board`` in ``mode``; ``batch`` None takes the batch that the costs were counted at.

    ``precision``: one of ``PRECISIONS`` (``fp32`` is TensorRT's default, TF32; ``int4`` means weights only).
    ``device``: ``gpu``, or ``dla`` for one DLA core with fallback. ``sparsity``: ``2:4`` takes all large weights as
    2:4 sparse, ``none`` no weights, None those that the costs say. ``kv_cache_mib`` is added to the memory. ``kind``:
    whose coefficients count, ``cnn`` or ``llm`` (None: ``workload_kind``). Raises SpecError for an impossible batch or
    choice, and for facts of the board that nobody states.
    """
    table = table or load_table()
    batch = work.batch if batch is None else batch
    _check(precision=precision, batch=batch, device=device, sparsity=sparsity)
    machine = machine_of(board, mode)
    kernels = _with_sparsity(fuse_layers(work, batch=batch), sparsity)
    kind = kind or workload_kind(kernels)
    coefficients = table.llm if kind == "llm" else table.time
    times = time_layers(work, kernels, machine=machine, precision=precision, table=table, kind=kind)
    core = dla_core(board, mode, precision=precision, batch=batch) if device == "dla" else None
    if core is None:
        times = _add_reformats(kernels, times, machine=machine, coefficients=coefficients)
        split, band, dla_tops = None, table.intervals[kind], 0.0
    else:
        times, split = mix_devices(kernels, times, core=core, machine=machine)
        band, dla_tops = dla_band(), core.peak_flops / 1e12
    state = find_clock(
        times, machine=machine, coefficients=table.power, launch_us=coefficients.launch_us, watts=mode.watts,
        dla_tops=dla_tops,
    )  # fmt: skip
    times = tuple(slow_kernel(time, share=state.share, launch_us=coefficients.launch_us) for time in times)
    power_w = state.power_w if state.fits or mode.watts is None else mode.watts
    latency_ms = sum(time.latency_us for time in times) / 1e3
    memory = memory_parts(kernels, work=work, precision=precision, kv_cache_mib=kv_cache_mib)
    gpu_mhz = machine.gpu_mhz * state.share
    choices = _choice_notes(kernels, precision=precision, device=device)
    limits = _limit_notes(state, memory, board=board, mode=mode, gpu_mhz=gpu_mhz)
    return Prediction(
        target=f"{board.name}@{mode.label}",
        device=device,
        precision=precision,
        batch=batch,
        latency_ms=latency_ms,
        latency_low_ms=latency_ms * band.low,
        latency_high_ms=latency_ms * band.high,
        fps=batch / latency_ms * 1e3,
        power_w=power_w,
        energy_mj=power_w * latency_ms,
        energy_per_item_mj=power_w * latency_ms / batch,
        memory_mib=memory.total_mib,
        memory=memory,
        limited_by=_limit(times),
        gpu_mhz=gpu_mhz,
        throttled=state.share < 1,
        rails_w=rail_watts(board, power_w),
        dla=split,
        notes=(*choices, *limits, *work.notes),
        table_version=table.version,
        layers=times,
    )


def dla_band() -> Interval:
    """The band of predictions on a DLA: assumed, not an interval of so many cases."""
    return Interval(low=assumed("dla_band_low"), high=assumed("dla_band_high"))


def _check(*, precision: str, batch: int, device: str, sparsity: str | None) -> None:
    if precision not in PRECISIONS:
        raise SpecError(f"precision {precision!r} is not known; choose from {', '.join(PRECISIONS)}")
    if not 1 <= batch <= MAX_BATCH:
        raise SpecError(f"batch {batch}: expected 1 to {MAX_BATCH}")
    if device not in DEVICES:
        raise SpecError(f"device {device!r} is not known; choose from {', '.join(DEVICES)}")
    if sparsity is not None and sparsity not in SPARSITIES:
        raise SpecError(f"sparsity {sparsity!r} is not known; choose from {', '.join(SPARSITIES)}")
    if sparsity == "2:4" and precision not in SPARSE_SHARE:
        raise SpecError(f"2:4 sparsity is predicted for {' and '.join(SPARSE_SHARE)}, not for {precision}")


def machine_of(board: BoardSpec, mode: PowerMode) -> Machine:
    """The GPU of a board in a mode. Raises SpecError that lists the facts that no source states."""
    missing = missing_facts(board, mode)
    half, whole = (peak_tops(board, mode, precision=name) for name in ("fp16", "int8"))
    if missing or half is None or whole is None or not (mode.sm and mode.gpu_mhz and mode.dram_gb_s):
        facts = "; ".join(missing) or f"{board.arch.name}: operations per clock of fp16 and int8"
        raise SpecError(f"cannot predict: no source states {facts}; add them to a boards file (docs/boards.md)")
    strict = peak_tops(board, mode, precision="fp32")
    # No source states the TF32 rate of Orin: half of FP16 is the unit that the fitted efficiency is a share of.
    peaks = {"fp32": half / 2 * 1e12, "fp16": half * 1e12, "int8": whole * 1e12}
    if strict is not None:
        peaks["fp32-strict"] = strict * 1e12
    return Machine(sm=mode.sm, gpu_mhz=mode.gpu_mhz, dram_gb_s=mode.dram_gb_s, peak_flops=peaks)


def workload_kind(kernels: Sequence[Kernel]) -> str:
    """``llm`` for a decode step (weights outweigh activations by far), else ``cnn``."""
    weights = sum(kernel.params for kernel in kernels)
    moved = sum(kernel.read + kernel.written for kernel in kernels)
    return "llm" if any(kernel.is_vocabulary for kernel in kernels) and weights > moved else "cnn"


def time_layers(
    work: ModelWork,
    kernels: Sequence[Kernel],
    *,
    machine: Machine,
    precision: str,
    table: Table,
    kind: str | None = None,
) -> tuple[KernelTime, ...]:
    """Times of all kernels; decode steps have coefficients of their own."""
    if precision not in machine.peak_flops and precision != "int4":
        raise SpecError(f"cannot predict: no source states the operations per clock of {precision} of this GPU")
    coefficients = table.llm if (kind or workload_kind(kernels)) == "llm" else table.time
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


def _with_sparsity(kernels: tuple[Kernel, ...], sparsity: str | None) -> tuple[Kernel, ...]:
    """Kernels with 2:4 weights as asked: all that are deep enough for a pattern of four to pay, none, or as noted."""
    if sparsity is None:
        return kernels
    return tuple(
        replace(
            kernel,
            sparse_24=sparsity == "2:4"
            and kernel.is_matrix
            and kernel.params > 0
            and kernel.depth >= _LEAST_DEPTH
            and not kernel.is_vocabulary,
        )
        for kernel in kernels
    )


def _add_reformats(
    kernels: Sequence[Kernel], times: Sequence[KernelTime], *, machine: Machine, coefficients: Coefficients
) -> tuple[KernelTime, ...]:
    """Times with a conversion where a matrix product in floats reads what one in INT8 wrote, once per tensor.

    The other way round the conversion folds into what writes; other layers run in either type. Needs edges.
    """
    done: set[int] = set()
    result: list[KernelTime] = []
    for kernel, time in zip(kernels, times, strict=True):
        if kernel.is_matrix and time.precision != "int8":
            for index in kernel.sources or ():
                source = kernels[index]
                if index not in done and source.is_matrix and times[index].precision == "int8":
                    done.add(index)
                    moved = Kernel(
                        node=f"{source.node} to {time.precision}", op="Reformat", flops=0.0, params=0,
                        read=source.written / 2, written=source.written, is_matrix=False, int8_eligible=False,
                        precision="float16",
                    )  # fmt: skip
                    result.append(time_kernel(moved, machine, precision="fp16", coefficients=coefficients))
        result.append(time)
    return tuple(result)


def _choice_notes(kernels: Sequence[Kernel], *, precision: str, device: str) -> list[str]:
    notes = []
    if precision == "fp32":
        notes.append("fp32 is computed as TF32, as TensorRT does by default")
    if precision == "fp32-strict":
        notes.append(explain("fp32_strict_efficiency"))
    sparse = sum(kernel.sparse_24 for kernel in kernels)
    if sparse and precision in SPARSE_SHARE:
        name = "sparse_gain_dla_int8" if device == "dla" and precision == "int8" else f"sparse_gain_{precision}"
        notes.append(f"{sparse} kernels with 2:4 weights, built with sparsity on; {explain(name)}")
    if device == "dla":
        notes.append(f"one DLA core; {explain('dla_efficiency_int8')}; {explain('dla_transition_us')}")
        notes.append(f"power of the DLA: {explain('dla_perf_per_watt_gain')}; band: {explain('dla_band_low')}")
    return notes


def _limit_notes(
    state: PowerState, memory: MemoryParts, *, board: BoardSpec, mode: PowerMode, gpu_mhz: float
) -> list[str]:
    notes = []
    if not state.fits and mode.watts is not None:
        notes.append(f"{state.power_w:.1f} W even at {gpu_mhz:.0f} MHz, shown at the mode's {mode.watts:g} W")
    elif state.share < 1 and mode.watts is not None:
        notes.append(
            f"throttled: the GPU runs at about {gpu_mhz:.0f} of {mode.gpu_mhz:g} MHz to stay within {mode.watts:g} W"
        )
    if board.memory_gb is not None and memory.total_mib > board.memory_gb * 1024:
        notes.append(f"needs more than the {board.memory_gb:g} GB of {board.name}")
    return notes


def _limit(times: Sequence[KernelTime]) -> str:
    totals = {"compute": 0.0, "memory": 0.0, "launch": 0.0}
    for time in times:
        totals[time.limited_by] += time.latency_us
    return max(totals, key=lambda name: totals[name])
