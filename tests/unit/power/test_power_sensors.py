"""Rails and telemetry from made-up trees of JetPack 5, 6 and 7, RAPL, NVML, and which of them is taken."""

import ctypes
import errno
import os
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from power_tree import OPTIONAL, add_ina3221, make_power_tree, write

from edgeds.boards import load_catalogue
from edgeds.errors import SensorUnavailable
from edgeds.power import PowerSampler, open_sensor, require_power
from edgeds.power.nvml import NvmlSensor
from edgeds.power.rails import find_rails
from edgeds.power.rapl import RaplSensor
from edgeds.power.tegra import TegraSensor, TegrastatsSensor


@pytest.mark.parametrize("jetpack", [5, 6, 7])
@pytest.mark.parametrize(("board", "total"), [("nx", 5000), ("agx", 3000 + 1000 + 4500)])
def test_rails_and_total_of_each_jetpack(tmp_path: Path, jetpack: int, board: str, total: float) -> None:
    sensor = TegraSensor(make_power_tree(tmp_path, jetpack=jetpack, board=board))
    assert sensor.unavailable is None
    sample = sensor.read(1.5)
    assert (sample.t_s, sample.total_mw) == (1.5, total)
    assert "NC" not in sample.rails_mw
    assert "sum of shunt voltages" not in sample.rails_mw
    assert ("VDDQ_VDD2_1V8AO" in sample.rails_mw) == (board == "agx")
    assert (sample.gpu_load_pct, sample.gpu_mhz) == (43.5, 612)
    assert (sample.emc_mhz, sample.emc_load_pct) == (2133, 10)
    assert sample.temps_c == {"cpu": 47.937, "gpu": 45.875, "tj": 48.875}
    assert sample.temp_c == 48.875
    assert (sample.fan_pct, sample.fan_rpm) == (40, 2210)
    assert (sample.cpu_mhz, sample.cpu_online) == (1420.8, 2)
    assert sample.ram_total_mib == 15625
    assert sample.oc_events == {"oc1": 0, "oc3": 17}
    assert sample.throttle == ()
    assert ("VDD_IN" in sensor.source) == (board == "nx")


@pytest.mark.parametrize("name", OPTIONAL)
def test_each_missing_file_costs_only_its_own_metric_b119(tmp_path: Path, name: str) -> None:
    """B119: a JetPack that removes a file makes that metric None; power goes on."""
    root = make_power_tree(tmp_path)
    whole = TegraSensor(root).read(0)
    (root / name).unlink()
    sample = TegraSensor(root).read(0)
    assert sample.total_mw == 5000
    fields = ("gpu_load_pct", "gpu_mhz", "emc_mhz", "emc_load_pct", "fan_pct", "fan_rpm", "ram_total_mib", "oc_events")
    lost = [field for field in fields if getattr(whole, field) is not None and getattr(sample, field) is None]
    assert len(lost) <= 2


@pytest.mark.parametrize("content", ["", "garbage", "12.5", "99999999999999999999999", "\xff"])
def test_files_with_other_content_are_unknown(tmp_path: Path, content: str) -> None:
    root = make_power_tree(tmp_path)
    for name in OPTIONAL:
        write(root, name, content)
    sample = TegraSensor(root).read(0)
    assert sample.total_mw == 5000
    assert sample.gpu_load_pct is None


def failing(*names: str, error: int = errno.EIO) -> Callable[[Path], int]:
    def read(path: Path) -> int:
        if path.name in names:
            raise OSError(error, os.strerror(error))
        return int(path.read_text())

    return read


def test_a_channel_with_io_error_is_skipped_and_noted_once_b122(tmp_path: Path) -> None:
    """B122: EIO on an unused channel: one note, the others and the total stay, the sampler lives and stops."""
    sensor = TegraSensor(make_power_tree(tmp_path), read=failing("curr3_input"))
    assert sensor.unavailable is None
    with PowerSampler(sensor, interval_s=0.01) as sampler:
        time.sleep(0.05)
    summary = sampler.summary()
    assert summary.samples >= 2
    assert summary.mean_w == pytest.approx(5.0)
    assert "VDD_SOC" not in summary.rails_mean_mw
    assert len(summary.notes) == 1
    assert "VDD_SOC" in summary.notes[0]
    assert "Input/output" in summary.notes[0]


def test_a_failing_total_rail_makes_the_total_unknown_never_0(tmp_path: Path) -> None:
    sensor = TegraSensor(make_power_tree(tmp_path), read=failing("curr1_input", error=errno.EACCES))
    assert sensor.read(0).total_mw is None
    assert "VDD_IN" in (sensor.unavailable or "")
    with pytest.raises(SensorUnavailable, match="cannot be measured"):
        require_power(sensor)


def test_disabled_unlabelled_and_unknown_chips_give_no_rails(tmp_path: Path) -> None:
    root = make_power_tree(tmp_path)
    write(root, "sys/class/hwmon/hwmon3/in2_enable", "0")
    (root / "sys/class/hwmon/hwmon3/in3_label").unlink()
    write(root, "sys/class/hwmon/hwmon9/name", "nvme")
    assert [rail.name for rail in find_rails(root)] == ["VDD_IN"]


def test_one_chip_seen_by_two_ways_is_one_chip(tmp_path: Path) -> None:
    root = make_power_tree(tmp_path)
    link = root / "sys/bus/i2c/drivers/ina3221/1-0040/hwmon/hwmon3"
    link.parent.mkdir(parents=True)
    link.symlink_to(root / "sys/class/hwmon/hwmon3")
    assert len(find_rails(root)) == 3


def test_equal_labels_of_two_chips_stay_apart(tmp_path: Path) -> None:
    root = make_power_tree(tmp_path)
    add_ina3221(root, "sys/class/hwmon/hwmon8", {"VDD_IN": (5000, 1)})
    sample = TegraSensor(root).read(0)
    assert sample.rails_mw["VDD_IN#2"] == 5
    assert sample.total_mw == 5000


def test_ina238_power_is_in_microwatt(tmp_path: Path) -> None:
    write(tmp_path, "sys/class/hwmon/hwmon1/name", "ina238")
    write(tmp_path, "sys/class/hwmon/hwmon1/label", "VDD_IN")
    write(tmp_path, "sys/class/hwmon/hwmon1/power1_input", "7250000")
    write(tmp_path, "sys/class/hwmon/hwmon2/name", "ina238")
    write(tmp_path, "sys/class/hwmon/hwmon2/power1_input", "1000")
    sample = TegraSensor(tmp_path).read(0)
    assert sample.total_mw == 7250
    assert sample.rails_mw == {"VDD_IN": 7250, "ina238": 1}


def test_alarms_cooling_and_counters_are_told(tmp_path: Path) -> None:
    root = make_power_tree(tmp_path)
    write(root, "sys/class/hwmon/hwmon3/curr1_crit_alarm", "1")
    write(root, "sys/class/thermal/cooling_device0/cur_state", "1")
    assert TegraSensor(root).read(0).throttle == ("thermal cpu-throttle-alert", "over-current VDD_IN")


def test_cpu_load_is_between_two_readings(tmp_path: Path) -> None:
    root = make_power_tree(tmp_path)
    sensor = TegraSensor(root)
    write(root, "proc/stat", "cpu  130 0 130 720 120 0 0 0 0 0")
    assert sensor.read(0).cpu_load_pct == 60
    assert sensor.read(0).cpu_load_pct is None  # nothing passed


def test_the_board_brings_the_rule(tmp_path: Path) -> None:
    root = make_power_tree(tmp_path, board="agx")
    boards = {board.name: board for board in load_catalogue().boards}
    assert open_sensor(root=root, board=boards["agx-orin-64gb"]).read(0).total_mw == 8500
    wrong = open_sensor(root=root, board=boards["orin-nx-16gb"])
    assert wrong.read(0).total_mw is None
    assert "VDD_IN is missing" in (wrong.unavailable or "")
    # No source tells the rule of the Industrial module; its rails do.
    assert open_sensor(root=root, board=boards["agx-orin-industrial"]).unavailable is None


def test_a_jetson_without_readable_rails_is_unknown_with_the_reason(tmp_path: Path) -> None:
    write(tmp_path, "etc/nv_tegra_release", "# R99 (release), REVISION: 1.0")
    sensor = open_sensor(root=tmp_path)
    assert "INA3221" in (sensor.unavailable or "")
    assert sensor.read(0).total_mw is None


def make_rapl(root: Path, *, energies: tuple[int, int, int] = (1_000_000, 500_000, 200_000)) -> Path:
    folder = "sys/class/powercap"
    for name, label, energy in (
        ("intel-rapl:0", "package-0", energies[0]),
        ("intel-rapl:0:0", "core", energies[1]),
        ("intel-rapl:0:1", "dram", energies[2]),
        ("intel-rapl:1", "psys", 5),
    ):
        write(root, f"{folder}/{name}/name", label)
        write(root, f"{folder}/{name}/energy_uj", str(energy))
        write(root, f"{folder}/{name}/max_energy_range_uj", "2000000")
    return root


def test_rapl_is_energy_over_time_and_wraps(tmp_path: Path) -> None:
    now = [0.0]
    sensor = RaplSensor(make_rapl(tmp_path), clock=lambda: now[0])
    assert sensor.unavailable is None
    assert sensor.is_interval_mean
    now[0] = 0.5
    make_rapl(tmp_path, energies=(1_600_000, 900_000, 300_000))
    sample = sensor.read(0.5)
    # Package and DRAM; cores lie inside the package.
    assert sample.rails_mw == {"package-0": 1200, "package-0 dram": 200}
    assert sample.total_mw == 1400
    now[0] = 1.5
    make_rapl(tmp_path, energies=(99_999, 0, 300_000))
    assert sensor.read(1.5).rails_mw["package-0"] == pytest.approx(500, rel=1e-3)
    assert sensor.read(1.5).total_mw is None  # no time passed


def test_half_of_rapl_is_unknown(tmp_path: Path) -> None:
    now = [0.0]
    sensor = RaplSensor(make_rapl(tmp_path), clock=lambda: now[0])
    now[0] = 1.0
    (tmp_path / "sys/class/powercap/intel-rapl:0:1/energy_uj").unlink()
    sample = sensor.read(1.0)
    assert sample.rails_mw.keys() == {"package-0"}
    assert sample.total_mw is None


def test_rapl_that_cannot_be_read_says_why(tmp_path: Path) -> None:
    assert "no RAPL" in (RaplSensor(tmp_path).unavailable or "")
    make_rapl(tmp_path)
    (tmp_path / "sys/class/powercap/intel-rapl:0/energy_uj").unlink()
    (tmp_path / "sys/class/powercap/intel-rapl:0/energy_uj").mkdir()
    assert "energy_uj" in (RaplSensor(tmp_path).unavailable or "")


class FakeNvml:
    """The library's calls over ctypes; codes and values are set per test."""

    def __init__(self, *, init: int = 0, count: int = 1, power_code: int = 0, power_mw: int = 45_000) -> None:
        self.init, self.count, self.power_code, self.power_mw = init, count, power_code, power_mw
        self.shutdowns = 0

    def nvmlInit_v2(self) -> int:
        return self.init

    def nvmlShutdown(self) -> int:
        self.shutdowns += 1
        return 0

    def nvmlDeviceGetCount_v2(self, out: Any) -> int:
        out._obj.value = self.count
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: ctypes.c_uint, out: Any) -> int:
        out._obj.value = 100 + index.value
        return 0

    def nvmlDeviceGetPowerUsage(self, device: ctypes.c_void_p, out: Any) -> int:
        out._obj.value = self.power_mw
        return self.power_code

    def nvmlDeviceGetUtilizationRates(self, device: ctypes.c_void_p, out: Any) -> int:
        out._obj.gpu = 77
        return 0

    def nvmlDeviceGetClockInfo(self, device: ctypes.c_void_p, kind: ctypes.c_uint, out: Any) -> int:
        out._obj.value = 1500 if kind.value == 1 else 7000
        return 0

    def nvmlDeviceGetTemperature(self, device: ctypes.c_void_p, kind: ctypes.c_uint, out: Any) -> int:
        out._obj.value = 61
        return 0

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, device: ctypes.c_void_p, out: Any) -> int:
        out._obj.value = 0x4 | 0x1
        return 0


def test_nvml_reads_a_discrete_gpu() -> None:
    library = FakeNvml(count=2)
    sensor = NvmlSensor(load=lambda name: library)
    sample = sensor.read(0)
    assert sample.rails_mw == {"GPU0": 45_000, "GPU1": 45_000}
    assert sample.total_mw == 90_000
    assert (sample.gpu_load_pct, sample.gpu_mhz, sample.emc_mhz, sample.temp_c) == (77, 1500, 7000, 61)
    assert sample.throttle == ("GPU0 power cap", "GPU1 power cap")
    sensor.close()
    sensor.close()
    assert library.shutdowns == 1


def test_nvml_that_lists_a_gpu_but_has_no_power_b116(tmp_path: Path) -> None:
    """B116: as on Tegra: starts, lists one GPU, power is not supported: probed once, then the next sensor."""
    library = FakeNvml(power_code=3)
    sensor = open_sensor(root=tmp_path, load_nvml=lambda name: library)
    assert "not supported" in (sensor.unavailable or "")
    assert library.shutdowns == 1
    make_rapl(tmp_path)
    assert open_sensor(root=tmp_path, load_nvml=lambda name: library).source.startswith("RAPL")
    assert open_sensor(root=tmp_path, load_nvml=lambda name: FakeNvml()).source.startswith("NVML")


def test_nvml_on_a_jetson_is_not_asked_b116(tmp_path: Path) -> None:
    def refuse(name: str) -> object:
        raise AssertionError("NVML on a Jetson")

    assert open_sensor(root=make_power_tree(tmp_path), load_nvml=refuse).read(0).total_mw == 5000


@pytest.mark.parametrize(("library", "reason"), [(FakeNvml(init=9), "driver not loaded"), (FakeNvml(count=0), "none")])
def test_nvml_that_does_not_start(library: FakeNvml, reason: str) -> None:
    assert reason in (NvmlSensor(load=lambda name: library).unavailable or "")


def test_old_or_absent_nvml_library() -> None:
    def absent(name: str) -> object:
        raise OSError(f"{name}: cannot open shared object file")

    assert "no NVIDIA driver" in (NvmlSensor(load=absent).unavailable or "")
    assert "too old" in (NvmlSensor(load=lambda name: object()).unavailable or "")


LINE = "RAM 1/2MB (lfb 1x1MB) CPU [1%@729] GR3D_FREQ 0% tj@50C VDD_IN 4824mW/4824mW"


def make_program(tmp_path: Path, body: str) -> str:
    program = tmp_path / "tegrastats"
    program.write_text(f"#!/bin/sh\n{body}\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return str(program)


def test_tegrastats_process_is_followed_and_ended(tmp_path: Path) -> None:
    program = make_program(tmp_path, f'while :; do echo "{LINE}"; sleep 0.05; done')
    sensor = TegrastatsSensor(command=(program,), clock=time.monotonic, interval_s=0.05)
    assert sensor.unavailable is None
    assert sensor.read(2.0).total_mw == 4824
    sensor.close()
    sensor.close()
    assert sensor._process is not None
    assert sensor._process.returncode is not None


def test_tegrastats_lines_go_stale(tmp_path: Path) -> None:
    program = make_program(tmp_path, f'echo "{LINE}"; exec sleep 20')
    now = [0.0]
    sensor = TegrastatsSensor(command=(program,), clock=lambda: now[0], interval_s=0.05)
    assert sensor.unavailable is None
    now[0] = 60.0
    assert sensor.read(60).total_mw is None
    sensor.close()


@pytest.mark.parametrize("body", ["exit 3", "echo nonsense"])
def test_tegrastats_that_says_nothing_useful(tmp_path: Path, body: str) -> None:
    sensor = TegrastatsSensor(command=(make_program(tmp_path, body),), clock=time.monotonic)
    assert "no module power" in (sensor.unavailable or "")
    sensor.close()


def test_tegrastats_that_cannot_start(tmp_path: Path) -> None:
    sensor = TegrastatsSensor(command=(str(tmp_path / "absent"),), clock=time.monotonic)
    assert "cannot be started" in (sensor.unavailable or "")
    sensor.close()
