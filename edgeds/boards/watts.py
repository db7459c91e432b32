"""Watts of a module, and the clock that fits its power mode: a GPU that would pass the mode's watts is slowed down."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from edgeds.boards.assumptions import assumed
from edgeds.boards.coefficients import PowerCoefficients
from edgeds.boards.roofline import KernelTime, Machine
from edgeds.boards.spec import BoardSpec

_TOP_GHZ = 1.3
_STEPS = 14
_TOPS_PER_SM_GHZ = 4.096


@dataclass(frozen=True, kw_only=True)
class Load:
    """Sums over kernels: microseconds on either device, the GPU's microseconds of launching, bytes moved."""

    gpu_us: float
    launch_us: float
    dla_us: float
    bytes: float

    @property
    def total_us(self) -> float:
        return self.gpu_us + self.dla_us


@dataclass(frozen=True, kw_only=True)
class PowerState:
    """``share`` of the mode's GPU clock at which ``power_w`` holds; ``fits``: within the mode's watts."""

    share: float
    power_w: float
    fits: bool


def measure_load(times: Sequence[KernelTime], *, share: float = 1.0, launch_us: float = 0.0) -> Load:
    """The sums at ``share`` of the GPU's clock (``slow_kernel`` says what that changes)."""
    gpu = launch = dla = moved = 0.0
    for time in times:
        moved += time.bytes
        if time.device == "dla":
            dla += time.latency_us
            continue
        over = launch_us + (time.overhead_us - launch_us) / share
        launch += over
        gpu += over + math.hypot(time.compute_us / share, time.memory_us)
    return Load(gpu_us=gpu, launch_us=launch, dla_us=dla, bytes=moved)


def slow_kernel(time: KernelTime, *, share: float, launch_us: float) -> KernelTime:
    """A kernel at ``share`` of the GPU's clock: compute and the cycles of a launch take longer, memory does not."""
    if share == 1 or time.device == "dla":
        return time
    compute, over = time.compute_us / share, launch_us + (time.overhead_us - launch_us) / share
    return replace(time, compute_us=compute, overhead_us=over, latency_us=over + math.hypot(compute, time.memory_us))


def power_terms(times: Sequence[KernelTime], *, machine: Machine) -> tuple[float, float, float, float]:
    """What the four power coefficients multiply: 1, peak and moved bandwidth in 100 GB/s, SMs x GHz x (V / Vtop)^2.

    The voltage is taken as 0.55 + 0.45 x clock / 1.3 GHz of its top value; the GPU counts half while it only launches,
    and not at all while the DLA works.
    """
    return load_terms(measure_load(times), machine=machine)


def load_terms(load: Load, *, machine: Machine, share: float = 1.0) -> tuple[float, float, float, float]:
    """``power_terms`` of sums, at ``share`` of the GPU's clock."""
    ghz = machine.gpu_mhz / 1e3 * share
    voltage = 0.55 + 0.45 * ghz / _TOP_GHZ
    busy = (load.gpu_us - 0.5 * load.launch_us) / load.total_us
    return 1.0, machine.dram_gb_s / 100, machine.sm * ghz * voltage**2 * busy, load.bytes / load.total_us / 1e5


def load_power(
    load: Load, *, machine: Machine, coefficients: PowerCoefficients, share: float = 1.0, dla_tops: float = 0.0
) -> float:
    """Watts while the work runs without a pause. ``dla_tops``: peak of the DLA core that works."""
    c = coefficients
    one, peak, gpu, moved = load_terms(load, machine=machine, share=share)
    # The DLA's watts per peak operation are the GPU's at its top voltage over the published gain in work per watt.
    dla = c.gpu_w * dla_tops / _TOPS_PER_SM_GHZ / assumed("dla_perf_per_watt_gain") * load.dla_us / load.total_us
    return c.static_w * one + c.memory_static_w * peak + c.gpu_w * gpu + c.dram_w * moved + dla


def idle_power(machine: Machine, coefficients: PowerCoefficients) -> float:
    """Watts that do not depend on work: the fit's static terms. What runs less than all the time lies between."""
    return coefficients.static_w + coefficients.memory_static_w * machine.dram_gb_s / 100


def find_clock(
    times: Sequence[KernelTime],
    *,
    machine: Machine,
    coefficients: PowerCoefficients,
    launch_us: float,
    watts: float | None,
    dla_tops: float = 0.0,
) -> PowerState:
    """The highest share of the GPU's clock whose power is within ``watts`` (None: no limit), by bisection.

    Never below the lowest clock that the GPU has: then ``fits`` is False and the power is what that clock takes.
    """

    def power(share: float) -> float:
        load = measure_load(times, share=share, launch_us=launch_us)
        return load_power(load, machine=machine, coefficients=coefficients, share=share, dla_tops=dla_tops)

    full = power(1.0)
    if watts is None or full <= watts:
        return PowerState(share=1.0, power_w=full, fits=True)
    low, high = min(assumed("lowest_gpu_mhz") / machine.gpu_mhz, 1.0), 1.0
    least = power(low)
    if least > watts:
        return PowerState(share=low, power_w=least, fits=False)
    for _ in range(_STEPS):
        middle = (low + high) / 2
        if (found := power(middle)) <= watts:
            low, least = middle, found
        else:
            high = middle
    return PowerState(share=low, power_w=least, fits=True)


def rail_watts(board: BoardSpec, power_w: float) -> Mapping[str, float | None]:
    """Watts per rail of the module: the one that carries everything; None where no source splits the total."""
    only = board.total_rails[0] if board.total_rails is not None and len(board.total_rails) == 1 else None
    return {rail: power_w if rail == only else None for rail in board.rails or ()}
