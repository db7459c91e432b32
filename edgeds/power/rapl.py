"""Power of x86 CPUs from the powercap files (RAPL): energy counters in uJ, so readings are means over an interval."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from edgeds.power.sample import PowerSample
from edgeds.power.sysfs import read_int, read_text
from edgeds.power.telemetry import Telemetry

MIN_INTERVAL_S = 0.001


@dataclass(frozen=True, kw_only=True)
class Zone:
    """One energy counter. It starts again at 0 above ``wrap_uj``."""

    name: str
    path: Path
    wrap_uj: int


def find_zones(root: Path = Path("/")) -> tuple[list[Zone], str | None]:
    """CPU packages and their DRAM: the zones, or none and the reason.

    Cores and uncore lie inside the package and psys around it, so adding them would count twice.
    """
    folder = root / "sys/class/powercap"
    zones = []
    for path in sorted(folder.glob("intel-rapl:*")):
        name = read_text(path / "name") or ""
        parent = read_text(path.with_name(path.name.rpartition(":")[0]) / "name") or ""
        if re.fullmatch(r"package-\d+", name) or (name == "dram" and path.name.count(":") == 2):
            label = f"{parent} dram" if name == "dram" else name
            zones.append(Zone(name=label, path=path / "energy_uj", wrap_uj=read_int(path / "max_energy_range_uj") or 0))
    if not zones:
        return [], "no RAPL counters under /sys/class/powercap (a virtual machine, or the driver is not loaded)"
    for zone in zones:
        try:
            with zone.path.open("rb") as stream:
                stream.read(32)
        except OSError as error:
            how = "; run as root or allow reading it" if isinstance(error, PermissionError) else ""
            return [], f"RAPL counter {zone.path}: {error.strerror or error}{how}"
    return zones, None


class RaplSensor:
    """CPU packages and DRAM together. Not the whole machine: ``source`` says so."""

    is_interval_mean = True
    source = "RAPL: CPU packages and their DRAM, the rest of the machine is not measured"

    def __init__(self, root: Path = Path("/"), *, clock: Callable[[], float] = time.monotonic) -> None:
        self._zones, self.unavailable = find_zones(root)
        self._clock = clock
        self._telemetry = Telemetry(root)
        self._last = self._energies()
        self._last_s = clock()

    @property
    def notes(self) -> tuple[str, ...]:
        return ()

    def read(self, t_s: float) -> PowerSample:
        """Mean power since the last reading; unknown where a counter does not answer."""
        now, now_s = self._energies(), self._clock()
        passed = now_s - self._last_s
        rails = {}
        if passed >= MIN_INTERVAL_S:
            for zone in self._zones:
                before, after = self._last.get(zone.name), now.get(zone.name)
                if before is None or after is None or (after < before and not zone.wrap_uj):
                    continue
                rails[zone.name] = (
                    ((after - before) % (zone.wrap_uj + 1) if after < before else after - before) / passed / 1000
                )
            self._last, self._last_s = now, now_s
        # All zones or nothing: one socket of two would be half the power.
        total = sum(rails.values()) if self._zones and len(rails) == len(self._zones) else None
        return PowerSample(t_s=t_s, rails_mw=rails, total_mw=total, **self._telemetry.read())

    def close(self) -> None:
        """Nothing is held open."""

    def _energies(self) -> dict[str, int]:
        return {zone.name: value for zone in self._zones if (value := read_int(zone.path)) is not None}
