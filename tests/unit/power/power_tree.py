"""Builds the sysfs of a made-up Jetson under a temporary root: rails, GPU, memory clock, zones, fan, counters."""

from __future__ import annotations

from pathlib import Path

NX_RAILS = {"VDD_IN": (5000, 1000), "VDD_CPU_GPU_CV": (5000, 160), "VDD_SOC": (5000, 290)}
"""Label -> mV, mA."""
AGX_RAILS = {"VDD_GPU_SOC": (20000, 150), "VDD_CPU_CV": (20000, 50), "VIN_SYS_5V0": (5000, 900)}
OPTIONAL = (
    "sys/devices/platform/gpu.0/load",
    "sys/class/devfreq/17000000.gpu/cur_freq",
    "sys/kernel/debug/bpmp/debug/clk/emc/rate",
    "sys/kernel/debug/cactmon/mc_all",
    "sys/class/thermal/thermal_zone0/temp",
    "sys/class/thermal/thermal_zone8/type",
    "sys/class/thermal/cooling_device0/cur_state",
    "sys/class/hwmon/hwmon5/pwm1",
    "sys/class/hwmon/hwmon6/rpm",
    "sys/class/hwmon/hwmon7/oc3_event_cnt",
    "sys/class/hwmon/hwmon3/curr1_crit_alarm",
    "sys/devices/system/cpu/cpu0/cpufreq/scaling_cur_freq",
    "proc/stat",
    "proc/meminfo",
)


def write(root: Path, name: str, text: str) -> Path:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n", encoding="utf-8")
    return path


def add_ina3221(root: Path, folder: str, rails: dict[str, tuple[int, int]]) -> None:
    write(root, f"{folder}/name", "ina3221")
    for channel, (label, (millivolt, milliamp)) in enumerate(rails.items(), start=1):
        write(root, f"{folder}/in{channel}_label", label)
        write(root, f"{folder}/in{channel}_enable", "1")
        write(root, f"{folder}/in{channel}_input", str(millivolt))
        write(root, f"{folder}/curr{channel}_input", str(milliamp))
        write(root, f"{folder}/curr{channel}_max_alarm", "0")
        write(root, f"{folder}/curr{channel}_crit_alarm", "0")
    write(root, f"{folder}/in7_label", "sum of shunt voltages")
    write(root, f"{folder}/in7_input", "12")


def make_power_tree(root: Path, *, jetpack: int = 6, board: str = "nx") -> Path:
    """A tree as the named JetPack lays it out. GPU 43.5 % at 612 MHz, EMC 2133 MHz at 10 %, tj 49 C."""
    write(root, "etc/nv_tegra_release", "# R36 (release), REVISION: 4.4, GCID: 1")
    folder = "sys/class/hwmon/hwmon3"
    if jetpack == 5:  # only through the driver, and other places for GPU and EMC
        folder = "sys/bus/i2c/drivers/ina3221/1-0040/hwmon/hwmon3"
    add_ina3221(root, folder, NX_RAILS if board == "nx" else AGX_RAILS)
    if board == "agx":
        second = folder.replace("1-0040", "1-0041").replace("hwmon3", "hwmon4")
        add_ina3221(root, second, {"NC": (0, 0), "VDDQ_VDD2_1V8AO": (5000, 140)})
    gpu, zone = ("gpu.0", "17000000.gpu") if jetpack > 5 else ("gpu.0", "17000000.ga10b")
    write(root, f"sys/devices/platform/{gpu}/load" if jetpack > 5 else "sys/devices/gpu.0/load", "435")
    write(root, f"sys/class/devfreq/{zone}/cur_freq", "612000000")
    write(root, "sys/kernel/debug/bpmp/debug/clk/emc/rate", "2133000000")
    activity = {5: "sys/kernel/actmon_avg_activity/mc_all", 6: "sys/kernel/debug/cactmon/mc_all"}
    newest = "sys/kernel/debug/bpmp/debug/actmon/mc_all_avg_activity"
    write(root, activity.get(jetpack, newest), "213300")
    suffix = "-therm" if jetpack == 5 else "-thermal"
    for index, name, value in ((0, "cpu", 47937), (1, "gpu", 45875), (8, "tj", 48875)):
        write(root, f"sys/class/thermal/thermal_zone{index}/type", name + suffix)
        write(root, f"sys/class/thermal/thermal_zone{index}/temp", str(value))
    write(root, "sys/class/thermal/thermal_zone2/type", f"cv0{suffix}")
    write(root, "sys/class/thermal/thermal_zone2/temp", "-256000")
    write(root, "sys/class/thermal/cooling_device0/type", "cpu-throttle-alert")
    write(root, "sys/class/thermal/cooling_device0/cur_state", "0")
    write(root, "sys/class/thermal/cooling_device1/type", "pwm-fan")
    write(root, "sys/class/thermal/cooling_device1/cur_state", "2")
    write(root, "sys/class/hwmon/hwmon5/name", "pwmfan")
    write(root, "sys/class/hwmon/hwmon5/pwm1", "102")
    write(root, "sys/class/hwmon/hwmon6/name", "pwm_tach")
    write(root, "sys/class/hwmon/hwmon6/rpm", "2210")
    write(root, "sys/class/hwmon/hwmon7/name", "soctherm_oc")
    write(root, "sys/class/hwmon/hwmon7/oc1_event_cnt", "0")
    write(root, "sys/class/hwmon/hwmon7/oc3_event_cnt", "17")
    for core, online in enumerate("1100"):
        if core:
            write(root, f"sys/devices/system/cpu/cpu{core}/online", online)
        write(root, f"sys/devices/system/cpu/cpu{core}/cpufreq/scaling_cur_freq", str(729600 + core * 691200))
    write(root, "proc/stat", "cpu  100 0 100 700 100 0 0 0 0 0\ncpu0 1 1 1 1")
    write(root, "proc/meminfo", "MemTotal:       16000000 kB\nMemFree: 1 kB\nMemAvailable:   12000000 kB")
    return root
