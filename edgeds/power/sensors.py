"""Find the sensor of this machine. None is an answer too: power is then unknown, with the reason."""

from __future__ import annotations

import ctypes
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from edgeds.boards.spec import BoardSpec
from edgeds.errors import SensorUnavailable
from edgeds.power.nvml import NvmlSensor
from edgeds.power.rapl import RaplSensor
from edgeds.power.sample import PowerSample, Sensor
from edgeds.power.tegra import TegraSensor, TegrastatsSensor
from edgeds.power.telemetry import Telemetry


class NoSensor:
    """Telemetry without power. ``unavailable`` lists what was tried."""

    is_interval_mean = False
    source = "unavailable"

    def __init__(self, reasons: list[str], root: Path = Path("/")) -> None:
        self.unavailable: str | None = "; ".join(reasons) or "no power sensor is known for this machine"
        self._telemetry = Telemetry(root)

    @property
    def notes(self) -> tuple[str, ...]:
        return ()

    def read(self, t_s: float) -> PowerSample:
        return PowerSample(t_s=t_s, **self._telemetry.read())

    def close(self) -> None:
        """Nothing is held open."""


def open_sensor(
    *,
    root: Path = Path("/"),
    board: BoardSpec | None = None,
    interval_s: float = 0.1,
    load_nvml: Callable[[str], Any] = ctypes.CDLL,
    which: Callable[[str], str | None] = shutil.which,
    clock: Callable[[], float] = time.monotonic,
) -> Sensor:
    """The best sensor that really answers: rails of a Jetson, its tegrastats, NVML of a discrete GPU, RAPL.

    Each is probed by reading it once. Never raises: without any, the sensor's ``unavailable`` gives the reasons.
    ``board`` brings the rule for the module's total. Programs and libraries are used only on the real root.
    """
    rule = board.total_rails if board is not None else None
    is_real = root == Path("/")
    reasons: list[str] = []
    tegra = TegraSensor(root, total_rails=rule)
    if tegra.unavailable is None:
        return tegra
    if tegra.reader.rails or _is_tegra(root):
        reasons.append(tegra.unavailable)
        program = which("tegrastats") if is_real else None
        if program is not None:
            stats = TegrastatsSensor(total_rails=rule, interval_s=interval_s, command=(program,), clock=clock)
            if stats.unavailable is None:
                return stats
            stats.close()
            reasons.append(stats.unavailable)
        if tegra.reader.rails:
            return tegra  # rails without a rule for the total are still worth showing
        return NoSensor(reasons, root)
    if is_real or load_nvml is not ctypes.CDLL:
        nvml = NvmlSensor(load=load_nvml)
        if nvml.unavailable is None:
            return nvml
        nvml.close()
        reasons.append(nvml.unavailable)
    rapl = RaplSensor(root, clock=clock)
    if rapl.unavailable is None:
        return rapl
    reasons.append(rapl.unavailable)
    return NoSensor(reasons, root)


def require_power(sensor: Sensor) -> Sensor:
    """The sensor itself. Raises SensorUnavailable when it cannot tell the power: a budget never passes on unknown."""
    if sensor.unavailable is not None:
        raise SensorUnavailable(f"power cannot be measured here: {sensor.unavailable}")
    return sensor


def _is_tegra(root: Path) -> bool:
    if (root / "etc/nv_tegra_release").exists():
        return True
    try:
        return b"nvidia,tegra" in (root / "proc/device-tree/compatible").read_bytes()[:4096]
    except OSError:
        return False
