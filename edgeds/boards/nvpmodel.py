"""Power modes of a real Jetson: its ``nvpmodel.conf``, and which mode it is in.

Grammar of the file (NVIDIA states it in the comments of every one): sections ``< PARAM TYPE=FILE|CLOCK NAME=x >`` with
lines ``ARG path``, ``< POWER_MODEL ID=n NAME=x >`` with lines ``PARAM ARG value``, ``< PM_CONFIG DEFAULT=n >``. CPU
values are kHz, all others Hz; -1 (or INT_MAX) lifts a cap, and so does 0 for EMC on JetPack 5.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from edgeds.boards.spec import BoardSpec, PowerMode
from edgeds.boards.userfile import dram_gb_s
from edgeds.errors import SpecError

MAX_CONF_BYTES = 1 << 20
UNCAPPED = {-1, 2**31 - 1, 2**63 - 1}
PHYSICAL_TPC = 8
QUERY_TIMEOUT_S = 2.0
SECTION = re.compile(r"<\s*(PARAM|POWER_MODEL|PM_CONFIG)\s+(.*?)\s*>$")
NO_ANSWER = 127

Run = Callable[[list[str], float], "tuple[int, str]"]
"""Runs a command with a timeout in seconds: exit code and output. 127 when it does not exist or does not answer."""


@dataclass(frozen=True, kw_only=True)
class ConfMode:
    """One POWER_MODEL section: (parameter, argument) -> value as written."""

    id: int
    name: str
    settings: Mapping[tuple[str, str], str]

    def number(self, param: str, arg: str) -> int | None:
        """The value as a number; None when it is absent, no number, or lifts the cap."""
        text = self.settings.get((param, arg), "")
        value = int(text) if re.fullmatch(r"-?\d{1,19}", text) else None
        return None if value is None or value in UNCAPPED else value


@dataclass(frozen=True, kw_only=True)
class NvpmodelConf:
    """A parsed file. ``params``: parameter -> argument -> path. ``notes`` name lines that were not understood."""

    modes: tuple[ConfMode, ...]
    default_id: int | None
    params: Mapping[str, Mapping[str, str]]
    notes: tuple[str, ...] = ()

    def mode(self, number: int) -> ConfMode | None:
        return next((mode for mode in self.modes if mode.id == number), None)


@dataclass(frozen=True, kw_only=True)
class ModeReading:
    """The mode the machine is in; ``name`` None is "unknown", with the reason in ``note``."""

    id: int | None
    name: str | None
    source: str
    note: str | None = None


def parse_nvpmodel_conf(text: str, *, where: str) -> NvpmodelConf:
    """Parse an ``nvpmodel.conf``. Odd lines become notes. Raises SpecError when the text has no section at all."""
    params: dict[str, dict[str, str]] = {}
    modes: dict[int, ConfMode] = {}
    default: int | None = None
    notes: list[str] = []
    target: dict[str, str] | dict[tuple[str, str], str] | None = None
    width = 0
    sections = 0
    for number, raw in enumerate(text.splitlines(), start=1):
        line = raw.split("#", 1)[0].strip()
        if not line:
            continue
        header = SECTION.match(line)
        if header is None:
            words = line.split()
            if target is None or len(words) < width:
                notes.append(f"{where}:{number}: not understood: {line[:60]!r}")
            elif width == 2:
                target[words[0]] = words[1]  # type: ignore[index]
            else:
                target[(words[0], words[1])] = words[2]  # type: ignore[index]
            continue
        sections += 1
        target, width = None, 0
        fields = dict(re.findall(r"(\w+)\s*=\s*(\S+)", header.group(2)))
        if header.group(1) == "PARAM" and "NAME" in fields:
            target, width = params.setdefault(fields["NAME"], {}), 2
        elif header.group(1) == "POWER_MODEL" and fields.get("ID", "").isdigit() and "NAME" in fields:
            mode_id = int(fields["ID"])
            settings: dict[tuple[str, str], str] = {}
            target, width = settings, 3
            if mode_id in modes:
                notes.append(f"{where}:{number}: mode id {mode_id} appears twice; the first is used")
            else:
                modes[mode_id] = ConfMode(id=mode_id, name=fields["NAME"], settings=settings)
        elif header.group(1) == "PM_CONFIG" and fields.get("DEFAULT", "").isdigit():
            default = int(fields["DEFAULT"])
        else:
            notes.append(f"{where}:{number}: not understood: {line[:60]!r}")
    if not sections:
        raise SpecError(f"{where}: not an nvpmodel.conf: no PARAM, POWER_MODEL or PM_CONFIG section")
    if default is None:
        notes.append(f"{where}: no default mode (PM_CONFIG) is given")
    return NvpmodelConf(modes=tuple(modes.values()), default_id=default, params=params, notes=tuple(notes))


def power_modes(conf: NvpmodelConf, *, board: BoardSpec | None = None, source: str) -> tuple[PowerMode, ...]:
    """The modes of a file as PowerModes. Lifted caps take the highest value the catalogue states for ``board``."""
    return tuple(_to_mode(mode, conf.default_id, board, source) for mode in conf.modes)


def _to_mode(mode: ConfMode, default_id: int | None, board: BoardSpec | None, source: str) -> PowerMode:
    online = [value for (param, _), value in mode.settings.items() if param == "CPU_ONLINE"]
    cpu = [
        mode.number(param, "MAX_FREQ")
        for param, arg in mode.settings
        if param.startswith("CPU_A") and arg == "MAX_FREQ"
    ]
    cpu_khz = max((value for value in cpu if value is not None), default=None) if None not in cpu else None
    mask = mode.number("TPC_POWER_GATING", "TPC_PG_MASK")
    tpc = PHYSICAL_TPC - (mask & 0xFF).bit_count() if mask is not None else None
    arch = board.arch if board is not None else None
    emc = _mhz(mode.number("EMC", "MAX_FREQ") or None) or (board.highest("emc_mhz") if board else None)
    dla = tuple(
        _mhz(mode.number(name, "MAX_FREQ"))
        for name in ("DLA0_CORE", "DLA1_CORE")
        if (name, "MAX_FREQ") in mode.settings
    )
    watts = re.search(r"(\d+(?:\.\d+)?)\s*W(?![a-z])", mode.name)
    values = {
        "cpu_cores": sum(value == "1" for value in online) if online else None,
        "cpu_mhz": cpu_khz / 1000 if cpu_khz is not None else (board.highest("cpu_mhz") if board else None),
        "tpc_pg_mask": mask,
        "tpc": tpc,
        "sm": tpc * arch.sm_per_tpc if tpc is not None and arch and arch.sm_per_tpc else None,
        "gpu_mhz": _mhz(mode.number("GPU", "MAX_FREQ")) or (board.highest("gpu_mhz") if board else None),
        "emc_mhz": emc,
        "dram_gb_s": dram_gb_s(board.bus_bits, emc) if board and board.bus_bits and emc else None,
        "dla_cores": board.dla_cores if board else (len(dla) or None),
        "watts": float(watts.group(1)) if watts else None,
    }
    return PowerMode(
        name=mode.name,
        id=mode.id,
        is_default=None if default_id is None else mode.id == default_id,
        dla_mhz=dla,
        sources={name: (source,) for name, value in values.items() if value is not None},
        **values,  # type: ignore[arg-type]
    )


def _mhz(hertz: int | None) -> float | None:
    return hertz / 1e6 if hertz is not None else None


def find_conf(root: Path = Path("/")) -> tuple[NvpmodelConf | None, str | None]:
    """Parse ``/etc/nvpmodel.conf`` under ``root``: the file and None, or None and the reason."""
    path = root / "etc/nvpmodel.conf"
    try:
        with path.open("rb") as stream:
            data = stream.read(MAX_CONF_BYTES + 1)
    except OSError as error:
        return None, f"{path}: {error.strerror or error}"
    if len(data) > MAX_CONF_BYTES:
        return None, f"{path}: more than {MAX_CONF_BYTES >> 20} MiB"
    try:
        return parse_nvpmodel_conf(data.decode("utf-8", "replace"), where=str(path)), None
    except SpecError as error:
        return None, str(error)


def read_power_mode(*, root: Path = Path("/"), conf: NvpmodelConf | None = None, run: Run | None = None) -> ModeReading:
    """The mode this machine is in: the status file that nvpmodel keeps, else ``nvpmodel -q``; never raises.

    The status file holds the mode that was last asked for; a switch that waits for a reboot shows only in the live
    caps (see ``probe_machine``). ``run`` may be None to ask no program, as for a copied tree.
    """
    path = root / "var/lib/nvpmodel/status"
    note = None
    try:
        text = path.read_bytes()[:4096].decode("utf-8", "replace")
        found = re.search(r"^\s*pmode:\s*(\d{1,9})\s*$", text, re.MULTILINE)
        if found is not None:
            number = int(found.group(1))  # "0002" is decimal
            mode = conf.mode(number) if conf is not None else None
            missing = None if mode else f"mode id {number} is not in the machine's nvpmodel.conf"
            return ModeReading(id=number, name=mode.name if mode else None, source=str(path), note=missing)
        note = f"{path}: holds no mode"
    except OSError as error:
        note = f"{path}: {error.strerror or error}"
    if run is None:
        return ModeReading(id=None, name=None, source="unknown", note=note)
    code, output = run(["nvpmodel", "-q"], QUERY_TIMEOUT_S)
    return parse_query(output, code=code, fallback=note)


def parse_query(output: str, *, code: int, fallback: str | None = None) -> ModeReading:
    """What ``nvpmodel -q`` printed: ``NV Power Mode: 25W`` and the id on its own line."""
    name = re.search(r"NV Power Mode:\s*(\S+)\s*$", output, re.MULTILINE)
    number = re.search(r"^\s*(\d{1,4})\s*$", output, re.MULTILINE)
    if name is None:
        why = (
            "does not exist or does not answer" if code == NO_ANSWER else f"said {output.strip()[:100]!r} (exit {code})"
        )
        reason = "; ".join(filter(None, (fallback, f"nvpmodel -q {why}")))
        return ModeReading(id=None, name=None, source="unknown", note=reason)
    return ModeReading(id=int(number.group(1)) if number else None, name=name.group(1), source="nvpmodel -q")


def run_command(command: list[str], timeout_s: float) -> tuple[int, str]:
    """Run a program: exit code and what it printed, stdout then stderr. 127 when it cannot run or takes too long."""
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout_s, check=False, errors="replace"
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return NO_ANSWER, str(error)
    return done.returncode, f"{done.stdout}\n{done.stderr}"
