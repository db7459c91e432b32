"""Load, clocks, temperatures, fan, throttling and over-current counters of a Jetson from sysfs.

Every value is looked up by itself and is None where its file is missing or does not answer: kernels add and remove
these files. Paths are those of JetPack 5, 6 and 7. Requested clocks are shown: hardware division by over-current or
heat is visible in the counters only.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgeds.power.sysfs import first_int, hwmon_folders, read_int, read_text

GPU_LOAD = ("sys/devices/platform/gpu.0/load", "sys/devices/gpu.0/load")
EMC_RATE = ("sys/kernel/debug/bpmp/debug/clk/emc/rate",)
EMC_ACTIVITY = (
    "sys/kernel/debug/cactmon/mc_all",
    "sys/kernel/debug/bpmp/debug/actmon/mc_all_avg_activity",
    "sys/kernel/actmon_avg_activity/mc_all",
)
OC_PLATFORM = "sys/devices/platform/soctherm-oc-event/hwmon/hwmon*"
PLAUSIBLE_C = (-100.0, 200.0)
COOLING = re.compile(r"cpu|gpu|throttle|devfreq|processor|hot-surface")
FAN_CHIPS = ("pwmfan", "pwm_fan", "pwm-fan")


@dataclass(frozen=True, kw_only=True)
class CpuTimes:
    """Busy and total jiffies of all CPUs since boot."""

    busy: int
    total: int


class Telemetry:
    """Reads everything but power under ``root``; keeps the last CPU times for the load between two readings."""

    def __init__(self, root: Path = Path("/")) -> None:
        self.root = root
        self._gpu = next(iter(_gpu_folders(root)), None)
        self._zones = sorted((root / "sys/class/thermal").glob("thermal_zone*"))
        self._cooling = sorted((root / "sys/class/thermal").glob("cooling_device*"))
        chips = hwmon_folders(root)
        self._fans = [folder for name, folder in chips if name in FAN_CHIPS]
        self._tachs = [folder for name, folder in chips if "tach" in name]
        self._oc = [folder for name, folder in chips if name == "soctherm_oc"] or sorted(root.glob(OC_PLATFORM))
        self._cpu = _cpu_times(root)

    def read(self) -> dict[str, Any]:
        """Keyword arguments of a PowerSample: all its fields but time and power."""
        load = first_int(self.root, GPU_LOAD)
        emc_hz = first_int(self.root, EMC_RATE)
        activity = first_int(self.root, EMC_ACTIVITY)
        cpu_mhz, online = self._cpu_clock()
        used, total = _memory(self.root)
        gpu_hz = read_int(self._gpu / "cur_freq") if self._gpu else None
        return {
            "gpu_load_pct": load / 10 if load is not None else None,
            "gpu_mhz": gpu_hz / 1e6 if gpu_hz is not None else None,
            "emc_mhz": emc_hz / 1e6 if emc_hz is not None else None,
            # The counter is in kHz of busy clocks; root only, like the rate.
            "emc_load_pct": min(100.0, round(activity / (emc_hz / 1000) * 100, 1))
            if emc_hz and activity is not None
            else None,
            "cpu_load_pct": self._cpu_load(),
            "cpu_mhz": cpu_mhz,
            "cpu_online": online,
            "temps_c": self._temperatures(),
            "fan_pct": next(
                (round(v / 255 * 100, 1) for f in self._fans if (v := read_int(f / "pwm1")) is not None), None
            ),
            "fan_rpm": self._fan_rpm(),
            "ram_used_mib": used,
            "ram_total_mib": total,
            "throttle": self._throttle(),
            "oc_events": self._oc_events(),
        }

    def _temperatures(self) -> Mapping[str, float]:
        """Zone -> C. A zone whose block sleeps answers EAGAIN and is missing, not 0."""
        found = {}
        for zone in self._zones:
            name, value = read_text(zone / "type"), read_int(zone / "temp")
            if name and value is not None and PLAUSIBLE_C[0] < value / 1000 < PLAUSIBLE_C[1]:
                found[re.sub(r"-therm(al)?$", "", name.lower())] = value / 1000
        return found

    def _throttle(self) -> tuple[str, ...] | None:
        """Cooling devices that hold a processor back at this moment; fans and screens are none. None without any."""
        active = []
        is_known = False
        for device in self._cooling:
            name, state = read_text(device / "type"), read_int(device / "cur_state")
            if name is None or state is None or not COOLING.search(name.lower()):
                continue
            is_known = True
            if state > 0:
                active.append(f"thermal {name}")
        return tuple(dict.fromkeys(active)) if is_known else None

    def _oc_events(self) -> Mapping[str, int] | None:
        counts = {
            path.name.removesuffix("_event_cnt"): value
            for folder in self._oc
            for path in sorted(folder.glob("oc*_event_cnt"))
            if (value := read_int(path)) is not None
        }
        return counts or None

    def _fan_rpm(self) -> float | None:
        names = ("rpm", "fan1_input")
        return next(
            (float(v) for f in (*self._tachs, *self._fans) for n in names if (v := read_int(f / n)) is not None), None
        )

    def _cpu_clock(self) -> tuple[float | None, int | None]:
        """The highest requested clock and the number of CPUs online."""
        cpus = sorted((self.root / "sys/devices/system/cpu").glob("cpu[0-9]*"))
        online = [cpu for cpu in cpus if read_int(cpu / "online") != 0]  # cpu0 often has no such file
        khz = [value for cpu in online if (value := read_int(cpu / "cpufreq/scaling_cur_freq")) is not None]
        return (max(khz) / 1000 if khz else None), len(online) or None

    def _cpu_load(self) -> float | None:
        before, self._cpu = self._cpu, _cpu_times(self.root)
        if before is None or self._cpu is None or self._cpu.total <= before.total:
            return None
        return round((self._cpu.busy - before.busy) / (self._cpu.total - before.total) * 100, 1)


def _gpu_folders(root: Path) -> list[Path]:
    # 17000000.gpu (JetPack 6, 7), 17000000.ga10b (JetPack 5); other Tegra generations name theirs alike.
    folder = root / "sys/class/devfreq"
    return sorted(p for p in folder.glob("*") if re.search(r"\.(gpu|ga10b|gv11b|gp10b)$|^gpu-gpc", p.name))


def _cpu_times(root: Path) -> CpuTimes | None:
    line = (read_text(root / "proc/stat") or "").partition("\n")[0].split()
    if len(line) < 6 or line[0] != "cpu" or not all(word.isdigit() for word in line[1:9]):
        return None
    ticks = [int(word) for word in line[1:9]]
    idle = ticks[3] + ticks[4]
    return CpuTimes(busy=sum(ticks) - idle, total=sum(ticks))


def _memory(root: Path) -> tuple[float | None, float | None]:
    text = read_text(root / "proc/meminfo") or ""
    found = {name: int(kb) / 1024 for name, kb in re.findall(r"^(MemTotal|MemAvailable):\s*(\d{1,15}) kB", text, re.M)}
    total, free = found.get("MemTotal"), found.get("MemAvailable")
    used = round(total - free, 1) if total is not None and free is not None else None
    return used, round(total, 1) if total is not None else None
