"""Builds the files of a made-up Jetson under a temporary root: what edgeds reads, nothing else."""

from __future__ import annotations

from pathlib import Path

CONF_HEAD = """
# our own sample in the grammar of NVIDIA's files
< PARAM TYPE=FILE NAME=CPU_ONLINE >
CORE_0 /sys/devices/system/cpu/cpu0/online
< PARAM TYPE=FILE NAME=TPC_POWER_GATING >
TPC_PG_MASK /sys/devices/gpu.0/tpc_pg_mask
< PARAM TYPE=CLOCK NAME=GPU >
MAX_FREQ /sys/devices/17000000.ga10b/devfreq/17000000.ga10b/max_freq
MAX_FREQ_KNEXT /sys/devices/17000000.ga10b/devfreq_dev/max_freq
<PARAM TYPE=CLOCK NAME=EMC >
MAX_FREQ /sys/kernel/nvpmodel_emc_cap/emc_iso_cap
"""


def conf_mode(number: int, name: str, *, cores: int, khz: int, mask: int, gpu_hz: int, emc_hz: int, dla_hz: int) -> str:
    lines = [f"< POWER_MODEL ID={number} NAME={name} >"]
    lines += [f"CPU_ONLINE CORE_{core} {int(core < cores)}" for core in range(8)]
    lines += [f"TPC_POWER_GATING TPC_PG_MASK {mask}", "GPU_POWER_CONTROL_ENABLE GPU_PWR_CNTL_EN on"]
    lines += ["CPU_A78_0 MIN_FREQ 729600", f"CPU_A78_0 MAX_FREQ {khz}", "GPU MIN_FREQ 0", f"GPU MAX_FREQ {gpu_hz}"]
    lines += [f"EMC MAX_FREQ {emc_hz}", f"DLA0_CORE MAX_FREQ {dla_hz}", f"DLA1_CORE MAX_FREQ {dla_hz}"]
    return "\n".join(lines) + "\n"


def nx_conf(*, uncapped_emc: int = 0, default: str = "< PM_CONFIG DEFAULT=2 >") -> str:
    top = conf_mode(0, "MAXN", cores=8, khz=-1, mask=240, gpu_hz=-1, emc_hz=uncapped_emc, dla_hz=-1)
    low = conf_mode(1, "10W", cores=4, khz=1190400, mask=252, gpu_hz=612000000, emc_hz=2133000000, dla_hz=153600000)
    mid = conf_mode(2, "15W", cores=4, khz=1420800, mask=252, gpu_hz=612000000, emc_hz=uncapped_emc, dla_hz=614400000)
    return f"{CONF_HEAD}\n{top}\n{low}\n{mid}\n{default}\n"


def write(root: Path, name: str, text: str) -> Path:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def make_jetson(
    root: Path,
    *,
    compatible: str = "nvidia,p3768-0000+p3767-0000",
    release: str | None = "# R36 (release), REVISION: 4.4, GCID: 1, BOARD: generic, EABI: aarch64, DATE: today",
    conf: str | None = None,
    status: str | None = "pmode:0002\nfmode:fanmode\n",
    memory_kb: int = 16_000_000,
) -> Path:
    """An Orin NX 16GB in 15W unless told otherwise."""
    write(root, "proc/device-tree/compatible", f"{compatible}\0nvidia,tegra234\0")
    write(root, "proc/device-tree/model", "NVIDIA Jetson Orin NX Engineering Reference Developer Kit\0")
    write(root, "proc/meminfo", f"MemTotal:       {memory_kb} kB\nMemAvailable:   {memory_kb // 2} kB\n")
    if release is not None:
        write(root, "etc/nv_tegra_release", release + "\n# KERNEL_VARIANT: oot\n")
    if conf != "":
        write(root, "etc/nvpmodel.conf", conf or nx_conf())
    if status is not None:
        write(root, "var/lib/nvpmodel/status", status)
    for core in range(8):
        folder = f"sys/devices/system/cpu/cpu{core}"
        if core:
            write(root, f"{folder}/online", str(int(core < 4)) + "\n")
        write(root, f"{folder}/cpufreq/scaling_max_freq", "1420800\n")
    write(root, "sys/class/devfreq/17000000.gpu/max_freq", "612000000\n")
    write(root, "sys/kernel/nvpmodel_clk_cap/emc", "3199000000\n")
    write(root, "sys/devices/platform/gpu.0/tpc_pg_mask", "252\n")
    return root
