"""One reading of power and telemetry. None is "unknown" everywhere: a missing sensor is never 0."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

CONSTANT_ZONES = ("pmic",)
"""JetPack 4 reports a fixed 100 C for it."""


@dataclass(frozen=True, kw_only=True)
class PowerSample:
    """A reading at ``t_s`` seconds. ``rails_mw`` holds what could be read; ``total_mw`` the module's power by its rule.

    ``temp_c`` is the junction (tj) where there is one, else the hottest zone; ``temps_c`` all zones. ``throttle`` names
    what limits the machine at this moment (empty: nothing; None: nobody tells). ``oc_events`` are over-current
    counters since boot: use differences.
    """

    t_s: float
    rails_mw: Mapping[str, float] = field(default_factory=dict)
    total_mw: float | None = None
    gpu_load_pct: float | None = None
    gpu_mhz: float | None = None
    emc_load_pct: float | None = None
    emc_mhz: float | None = None
    cpu_load_pct: float | None = None
    cpu_mhz: float | None = None
    cpu_online: int | None = None
    temps_c: Mapping[str, float] = field(default_factory=dict)
    fan_pct: float | None = None
    fan_rpm: float | None = None
    ram_used_mib: float | None = None
    ram_total_mib: float | None = None
    throttle: tuple[str, ...] | None = None
    oc_events: Mapping[str, int] | None = None
    engines_mhz: Mapping[str, float] = field(default_factory=dict)

    @property
    def temp_c(self) -> float | None:
        zones = [value for zone, value in self.temps_c.items() if zone not in CONSTANT_ZONES]
        return self.temps_c.get("tj", max(zones, default=None))

    def to_row(self) -> dict[str, Any]:
        """The sample as one JSON line of ``edgeds monitor``."""
        row = {item.name: getattr(self, item.name) for item in dataclasses.fields(self)}
        row["t_s"] = round(self.t_s, 3)
        row["temp_c"] = self.temp_c
        return row


class Sensor(Protocol):
    """Something that reads power. ``source`` is stated wherever its figures are shown.

    ``is_interval_mean`` tells that ``total_mw`` is the mean since the reading before (energy counters), not the value
    of the moment. ``unavailable`` is the reason why there is no total at all, else None. ``notes`` grow while reading.
    """

    source: str
    is_interval_mean: bool
    unavailable: str | None

    @property
    def notes(self) -> tuple[str, ...]: ...

    def read(self, t_s: float) -> PowerSample:
        """Read everything once; what fails is None. May raise OSError or SensorUnavailable when nothing answers."""
        ...

    def close(self) -> None: ...
