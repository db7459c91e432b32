"""A board that heats up, for tuning runs without one: our model, never a measurement.

Temperature follows power with one time constant: dT/dt = (ambient + resistance x power - T) / tau. Above the limit the
clock falls to a third of what the mode gives until it is 3 C cooler. Time passes only when the board is used or waited
for. Watts per mode and the limit of 99 C are those of an Orin NX (edgeds/boards/catalogue.json).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from edgeds.errors import DeviceError, SpecError
from edgeds.report.tune_device import TuneStep, Window

MODES = {"10W": (0.45, 8.0), "15W": (0.6, 11.0), "25W": (0.9, 18.0), "MAXN": (1.0, 24.0)}
"""Mode -> (clock as a share of the highest, watts while it works)."""


@dataclass(kw_only=True)
class SimBoard:
    """A ``TuneDevice``. ``calls`` counts windows; ``stop_after`` raises KeyboardInterrupt in that window."""

    board: str | None = "orin-nx-16gb"
    name: str = "simulated Orin NX"
    can_set_mode: bool = True
    resistance_c_per_w: float = 2.5
    tau_s: float = 60.0
    ambient_c: float = 25.0
    limit_c: float = 99.0
    warm_up_windows: int = 0
    has_power: bool = True
    max_batch: int = 64
    knee: int = 4
    refuse_modes: tuple[str, ...] = ()
    stop_after: int | None = None
    calls: int = 0
    time_s: float = 0.0
    temp_c: float = 30.0
    mode_log: list[str] = field(default_factory=list)
    _mode: str = "15W"
    _throttled: bool = False

    def mode(self) -> str | None:
        return self._mode

    def set_mode(self, name: str) -> None:
        if name in self.refuse_modes or name not in MODES:
            raise DeviceError(f"nvpmodel refused {name}")
        self._mode = name
        self.mode_log.append(name)

    def temperature_c(self) -> float | None:
        return self.temp_c

    def measure(self, step: TuneStep, seconds: float) -> Window:
        self.calls += 1
        if self.stop_after is not None and self.calls > self.stop_after:
            raise KeyboardInterrupt
        if step.batch > self.max_batch:
            raise SpecError(f"batch {step.batch}: the installed engine takes up to {self.max_batch}")
        clock, watts = MODES[self._mode]
        self._pass(seconds, watts)
        if self._throttled:
            clock /= 3
        drift = 1.0 + 0.2 * max(0, self.warm_up_windows - self.calls + 1)
        # Launch bound below the knee: up to there a larger batch costs little, beyond it every item costs the same.
        work = 1.0 if step.precision == "int8" else 1.8
        latency = (
            (4.0 + 1.0 * step.batch if step.batch <= self.knee else (4.0 + self.knee) * step.batch / self.knee)
            * work
            / clock
        )
        return Window(
            latency_ms=latency * drift,
            power_w=watts if self.has_power else None,
            power_source="simulated" if self.has_power else "unavailable: no sensor",
            temp_c=self.temp_c,
            throttled=("sw-thermal",) if self._throttled else (),
        )

    def sleep(self, seconds: float) -> None:
        self._pass(seconds, 3.0)

    def clock(self) -> float:
        return self.time_s

    def _pass(self, seconds: float, watts: float) -> None:
        final = self.ambient_c + self.resistance_c_per_w * watts
        self.temp_c = final + (self.temp_c - final) * math.exp(-seconds / self.tau_s)
        self.time_s += seconds
        self._throttled = self.temp_c > (self.limit_c - 3 if self._throttled else self.limit_c)
