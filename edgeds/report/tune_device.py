"""What a tuning run needs of a device, and the machine it runs on as one."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from edgeds.boards.probe import MachineProbe, probe_machine
from edgeds.bundle import Bundle
from edgeds.engines import Engine, available_backends, open_engine
from edgeds.engines.trt_choice import open_installed
from edgeds.errors import DeviceError, EdgedsError, SpecError
from edgeds.power import PowerSampler, open_sensor
from edgeds.power.modes import apply_mode_change, plan_mode_change
from edgeds.report.stats import device_name
from edgeds.specs import Resolution, TensorSpec

_ON_CPU: Mapping[str, Literal["int8", "float"]] = {"int8": "int8", "fp16": "float", "fp32": "float"}
_INSTALLED = {"int8": "int8", "fp16": "float16", "fp32": "float"}
"""Precision of a plan -> what runs it: a model of the bundle on the CPU, an installed engine under TensorRT."""


@dataclass(frozen=True, kw_only=True)
class TuneStep:
    """One thing to measure. ``mode`` None: whatever mode the device is in."""

    mode: str | None
    precision: str
    size: str | None
    batch: int

    @property
    def key(self) -> str:
        return f"{self.mode or 'as it is'} {self.precision} {self.size or 'own size'} batch {self.batch}"


@dataclass(frozen=True, kw_only=True)
class Window:
    """One window of measurement: median time of an inference, mean watts (None: unknown, ``power_source`` says why)."""

    latency_ms: float
    power_w: float | None
    power_source: str
    temp_c: float | None = None
    throttled: tuple[str, ...] = ()


class TuneDevice(Protocol):
    """A board that can be measured. ``board`` is its catalogue name, None when it is none that is known."""

    board: str | None
    name: str
    can_set_mode: bool

    def mode(self) -> str | None: ...

    def set_mode(self, name: str) -> None: ...

    def temperature_c(self) -> float | None: ...

    def measure(self, step: TuneStep, seconds: float) -> Window: ...

    def sleep(self, seconds: float) -> None: ...

    def clock(self) -> float: ...


class ThisMachine:
    """The machine that this process runs on. One engine is open at a time; ``close`` ends it and the sensor."""

    def __init__(self, bundle: Bundle, *, backend: str = "auto", threads: int | None = None, set_modes: bool = False):
        self._bundle, self._backend, self._threads = bundle, backend, threads
        probe: MachineProbe = probe_machine()
        self.board = probe.board.name if probe.board is not None else None
        self.name = device_name()
        self.can_set_mode = set_modes and probe.kind == "jetson"
        self._mode = probe.current_mode.label if probe.current_mode is not None else None
        self._sensor = open_sensor()
        self._engine: Engine | None = None
        self._opened: str | None = None

    def mode(self) -> str | None:
        return self._mode

    def set_mode(self, name: str) -> None:
        """Switch with sudo nvpmodel. Raises DeviceError when that fails or was not allowed."""
        if not self.can_set_mode:
            raise DeviceError("power modes are switched only on a Jetson and with --set-modes")
        change = plan_mode_change(name)
        apply_mode_change(change)
        self._mode = change.mode.label

    def temperature_c(self) -> float | None:
        with contextlib.suppress(OSError, EdgedsError):
            return self._sensor.read(0.0).temp_c
        return None

    def measure(self, step: TuneStep, seconds: float) -> Window:
        """Run inferences one after the other for ``seconds``. Raises SpecError when the engine does not take them."""
        engine = self._open(step.precision)
        limit = getattr(engine, "max_batch", None)
        if limit is not None and step.batch > limit:
            raise SpecError(f"batch {step.batch}: the installed engine takes up to {limit}")
        feeds = make_feeds(engine.inputs, size=step.size, batch=step.batch, golden=self._golden())
        times: list[float] = []
        with PowerSampler(self._sensor) as sampler:
            end = time.perf_counter() + seconds
            while not times or time.perf_counter() < end:
                begin = time.perf_counter()
                engine.infer(feeds)
                times.append((time.perf_counter() - begin) * 1e3)
        power = sampler.summary()
        known = self._sensor.unavailable is None and power.mean_w is not None
        return Window(
            latency_ms=float(np.median(times)),
            power_w=power.mean_w if known else None,
            power_source=self._sensor.source if known else f"unavailable: {self._sensor.unavailable or 'no reading'}",
            temp_c=power.temp_max_c,
            throttled=power.throttle or (),
        )

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def clock(self) -> float:
        return time.monotonic()

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()
            self._engine = None
        self._sensor.close()

    def _open(self, precision: str) -> Engine:
        if self._engine is None or self._opened != precision:
            if self._engine is not None:
                self._engine.close()
                self._engine = None
            self._engine = open_precision(
                self._bundle, precision=precision, backend=self._backend, threads=self._threads
            )
            self._opened = precision
        return self._engine

    def _golden(self) -> Mapping[str, np.ndarray]:
        return self._bundle.golden() if self._bundle.has_golden() else {}


def open_precision(bundle: Bundle, *, precision: str, backend: str, threads: int | None) -> Engine:
    """The bundle in the precision of a plan (``int8``, ``fp16``, ``fp32``). Where TensorRT runs, only an engine that
    was built in that precision will do: measuring another one, or the CPU, would say nothing about it.

    Raises EngineMismatch when no such engine is installed, and what opening an engine raises.
    """
    if precision not in _INSTALLED:
        raise SpecError(f"precision {precision!r}: a bundle runs in {', '.join(_INSTALLED)}")
    has_tensorrt = backend == "tensorrt" or (backend == "auto" and available_backends().get("tensorrt", "") is None)
    if has_tensorrt:
        return open_installed(bundle, precision=_INSTALLED[precision], on_close=None)
    return open_engine(bundle, backend=backend, precision=_ON_CPU[precision], threads=threads)


def make_feeds(
    inputs: tuple[TensorSpec, ...], *, size: str | None, batch: int, golden: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Feeds of ``batch`` rows: shapes from the specs, ``size`` for images, and the golden sample for what is open.

    Values are the golden sample's where its shape fits, else uniform in [0, 1) (zeros for integers), always the same.
    Raises SpecError for a dimension that nothing tells.
    """
    rng = np.random.default_rng(0)
    feeds = {}
    for spec in inputs:
        stored = golden.get(spec.name)
        shape = _shape(spec, size=size, batch=batch, stored=stored)
        if stored is not None and stored.shape[1:] == shape[1:]:
            feeds[spec.name] = np.ascontiguousarray(np.resize(stored, shape))
        elif np.dtype(spec.dtype).kind == "f":
            feeds[spec.name] = rng.random(shape, dtype=np.float32).astype(spec.dtype)
        else:
            feeds[spec.name] = np.zeros(shape, spec.dtype)
    return feeds


def _shape(spec: TensorSpec, *, size: str | None, batch: int, stored: np.ndarray | None) -> tuple[int, ...]:
    dims: list[int | None] = [dim if isinstance(dim, int) else None for dim in spec.shape]
    if dims and dims[0] is None:
        dims[0] = batch
    elif dims and dims[0] != batch:
        raise SpecError(f"batch {batch}: input {spec} has a fixed first dimension")
    if size is not None and len(dims) == 4:
        resolution = Resolution.parse(size)
        for axis, side in ((2, resolution.height_px), (3, resolution.width_px)):
            if dims[axis] not in (None, side):
                raise SpecError(f"size {size}: input {spec} has a fixed size")
            dims[axis] = side
    known = stored.shape if stored is not None and stored.ndim == len(dims) else (None,) * len(dims)
    filled = [dim if dim is not None else known[axis] for axis, dim in enumerate(dims)]
    if any(dim is None for dim in filled):
        raise SpecError(f"input {spec}: its size is open and the bundle has no golden sample; give --size HxW")
    return tuple(int(dim) for dim in filled if dim is not None)
