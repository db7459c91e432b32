"""What this machine is, found by what it has rather than by a table of versions: an unknown release never fails."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from edgeds.boards.catalogue import Catalogue, load_catalogue
from edgeds.boards.discrete import GpuFacts, discrete_board, query_gpus
from edgeds.boards.l4t import L4tReading, read_l4t
from edgeds.boards.nvpmodel import ModeReading, Run, find_conf, power_modes, read_power_mode, run_command
from edgeds.boards.spec import BoardSpec, GpuArch, PowerMode

MAX_TEXT = 4096


@dataclass(frozen=True, kw_only=True)
class LiveCaps:
    """The caps that hold now, read from sysfs. They tell a mode switch that still waits for a reboot."""

    cpu_online: int | None = None
    cpu_mhz: float | None = None
    gpu_mhz: float | None = None
    emc_mhz: float | None = None
    tpc_pg_mask: int | None = None


@dataclass(frozen=True, kw_only=True)
class MachineProbe:
    """One machine. ``board`` is the catalogue's entry with this machine's own modes and memory, or a board made from
    what could be read; None where there is neither a Jetson nor an NVIDIA GPU. ``notes`` say what is unknown and why.
    """

    kind: Literal["jetson", "nvidia", "cpu"]
    model: str | None
    part_number: str | None
    l4t: L4tReading | None
    board: BoardSpec | None
    mode: ModeReading | None
    memory_mib: int | None
    live: LiveCaps
    gpus: tuple[GpuFacts, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def current_mode(self) -> PowerMode | None:
        """The mode in use as the board knows it; None when it is unknown."""
        if self.board is None:
            return None
        if self.mode is None:
            return self.board.default_mode if self.kind == "nvidia" else None
        by_id = [mode for mode in self.board.modes if self.mode.id is not None and mode.id == self.mode.id]
        by_name = [mode for mode in self.board.modes if self.mode.name is not None and mode.name == self.mode.name]
        return next(iter(by_name or by_id), None)


def probe_machine(
    *, root: Path = Path("/"), catalogue: Catalogue | None = None, run: Run | None = None
) -> MachineProbe:
    """Look at the machine under ``root``. Never raises for what it finds there.

    ``run`` runs programs (nvpmodel, nvidia-smi); by default they run only when ``root`` is the real one.
    """
    catalogue = catalogue or load_catalogue()
    if run is None and root == Path("/"):
        run = run_command
    compatible = [part for part in (_read(root / "proc/device-tree/compatible") or "").split("\0") if part]
    is_tegra = any(re.match(r"nvidia,(tegra|p\d{4})", part) for part in compatible)
    if is_tegra or (root / "etc/nv_tegra_release").exists():
        return _probe_jetson(root, compatible, catalogue=catalogue, run=run)
    gpus, note = query_gpus(run)
    return MachineProbe(
        kind="nvidia" if gpus else "cpu",
        model=(_read(root / "proc/device-tree/model") or "").rstrip("\0") or None,
        part_number=None,
        l4t=None,
        board=discrete_board(gpus[0], catalogue) if gpus else None,
        mode=None,
        memory_mib=_memory_mib(root),
        live=read_live_caps(root),
        gpus=gpus,
        notes=(note,) if note else (),
    )


def _probe_jetson(root: Path, compatible: list[str], *, catalogue: Catalogue, run: Run | None) -> MachineProbe:
    notes: list[str] = []
    l4t = read_l4t(root)
    part, is_super = find_part(compatible)
    entry = catalogue.find_part(part, is_super=is_super) if part else None
    memory = _memory_mib(root)
    live = read_live_caps(root)
    if entry is None:
        known = f"module {part}{'-super' if is_super else ''}" if part else "the module (no part number in device-tree)"
        notes.append(f"{known} is not in the catalogue; facts about it come from this machine only")
    board = entry or _unknown_board(compatible, part, catalogue=catalogue, live=live)
    conf, why_not = find_conf(root)
    if conf is None:
        notes.append(f"power modes of this machine are unknown ({why_not}); the catalogue's are shown")
    else:
        notes.extend(conf.notes)
        # The highest clocks come from the catalogue: the file only says "no cap".
        own = power_modes(conf, board=board, source=str(root / "etc/nvpmodel.conf"))
        board = dataclasses.replace(board, modes=own or board.modes)
    if memory is not None:
        source = ("MemTotal of this machine",)
        board = dataclasses.replace(
            board, usable_memory_mib=memory, sources={**board.sources, "usable_memory_mib": source}
        )
        if board.memory_gb is not None and memory < board.memory_gb * 1024 * 0.75:
            # The AGX developer kit module exists with 32 and with 64 GB under one part number.
            sold = 2.0 ** max(0, (memory - 1).bit_length() - 10)
            notes.append(f"the catalogue says {board.memory_gb:g} GB, this machine has about {sold:g} GB")
            board = dataclasses.replace(board, memory_gb=sold, sources={**board.sources, "memory_gb": source})
    mode = read_power_mode(root=root, conf=conf, run=run)
    probe = MachineProbe(
        kind="jetson",
        model=(_read(root / "proc/device-tree/model") or "").rstrip("\0") or None,
        part_number=part,
        l4t=l4t,
        board=board,
        mode=mode,
        memory_mib=memory,
        live=live,
        notes=(*filter(None, (l4t.note, mode.note)), *notes),
    )
    return dataclasses.replace(probe, notes=(*probe.notes, *_differences(probe)))


def find_part(compatible: list[str]) -> tuple[str | None, bool]:
    """Module part number and whether it is a Super image, from the device-tree's ``compatible``.

    ``nvidia,p3768-0000+p3767-0005-super`` names carrier and module; ``p3701-0000-as-p3767-0001`` is a developer kit
    that was flashed to act as another module: the emulated one counts.
    """
    for text in compatible:
        found = re.search(r"(?:-as-|\+)(p\d{4}-\d{4})(?!.*-as-p)(-super)?", text)
        if found is not None:
            return found.group(1), found.group(2) is not None
    for text in compatible:
        found = re.search(r"(p(?:3701|3767)-\d{4})(-super)?", text)
        if found is not None:
            return found.group(1), found.group(2) is not None
    return None, False


def read_live_caps(root: Path = Path("/")) -> LiveCaps:
    """Caps in force now; what cannot be read is None."""
    cpus = sorted((root / "sys/devices/system/cpu").glob("cpu[0-9]*"))
    online = [cpu for cpu in cpus if (_read(cpu / "online") or "1").strip() != "0"]  # cpu0 may have no such file
    khz = [value for cpu in online if (value := _int(cpu / "cpufreq/scaling_max_freq")) is not None]
    gpu = next((v for p in _gpu_nodes(root) if (v := _int(p / "max_freq")) is not None), None)
    emc_paths = ("sys/kernel/nvpmodel_clk_cap/emc", "sys/kernel/nvpmodel_emc_cap/emc_iso_cap")
    emc = next((v for p in emc_paths if (v := _int(root / p)) not in (None, 0)), None)
    masks = ("sys/devices/platform/gpu.0/tpc_pg_mask", "sys/devices/gpu.0/tpc_pg_mask")
    return LiveCaps(
        cpu_online=len(online) or None,
        cpu_mhz=max(khz) / 1000 if khz else None,
        gpu_mhz=gpu / 1e6 if gpu is not None else None,
        emc_mhz=emc / 1e6 if emc is not None else None,
        tpc_pg_mask=next((v for p in masks if (v := _int(root / p)) is not None), None),
    )


def _gpu_nodes(root: Path) -> list[Path]:
    folder = root / "sys/class/devfreq"
    return sorted(path for path in folder.glob("*") if re.search(r"17000000\.(gpu|ga10b)", path.name))


def _differences(probe: MachineProbe) -> list[str]:
    """Where the caps in force contradict the mode that nvpmodel reports."""
    mode = probe.current_mode
    if mode is None:
        return []
    notes = []
    if None not in (mode.tpc_pg_mask, probe.live.tpc_pg_mask) and mode.tpc_pg_mask != probe.live.tpc_pg_mask:
        notes.append(
            f"mode {mode.label} wants TPC mask {mode.tpc_pg_mask}, in force is {probe.live.tpc_pg_mask}: "
            "the switch waits for a reboot"
        )
    if mode.cpu_cores is not None and probe.live.cpu_online is not None and mode.cpu_cores != probe.live.cpu_online:
        notes.append(f"mode {mode.label} has {mode.cpu_cores} CPU cores, {probe.live.cpu_online} are online")
    if mode.gpu_mhz is not None and probe.live.gpu_mhz is not None and abs(mode.gpu_mhz - probe.live.gpu_mhz) > 5:
        notes.append(
            f"mode {mode.label} allows {mode.gpu_mhz:g} MHz on the GPU, in force is {probe.live.gpu_mhz:g} MHz"
        )
    return notes


def _unknown_board(compatible: list[str], part: str | None, *, catalogue: Catalogue, live: LiveCaps) -> BoardSpec:
    """A board of which only what the machine says is known. Every tegra234 is an Orin, so its GPU is sm_87."""
    is_orin = any("tegra234" in text for text in compatible)
    arch = catalogue.archs["sm_87"] if is_orin else GpuArch(name="unknown", compute_capability="unknown")
    return BoardSpec(
        name=part or "this-jetson", title=f"Jetson ({part or 'unknown module'})", kind="jetson", arch=arch,
        cpu_cores=live.cpu_online,
    )  # fmt: skip


def _memory_mib(root: Path) -> int | None:
    found = re.search(r"^MemTotal:\s*(\d+) kB", _read(root / "proc/meminfo") or "", re.MULTILINE)
    return int(found.group(1)) // 1024 if found else None


def _read(path: Path) -> str | None:
    try:
        with path.open("rb") as stream:
            return stream.read(MAX_TEXT).decode("utf-8", "replace")
    except OSError:
        return None


def _int(path: Path) -> int | None:
    text = (_read(path) or "").strip()
    return int(text) if re.fullmatch(r"-?\d{1,19}", text) else None
