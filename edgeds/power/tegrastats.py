"""One line of ``tegrastats``, of any JetPack: every token by its own pattern, unknown and cut tokens are skipped.

Forms (JetPack 4, 5/6, 7): rails ``NAME cur/avg``, ``NAME curmW/avgmW``, ``NAME curmW/avgmW/peakmW``; GPU ``p%@f``,
``p%@[f,f]``, ``@[f,f,f]``, ``p%``; memory clock absent without root; sleeping CPUs are ``off``; zones may miss.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from edgeds.power.sample import PowerSample
from edgeds.power.total import module_total

MAX_LINE = 8192

STAMP = re.compile(r"\s*(\d\d)-(\d\d)-(\d{4}) (\d\d):(\d\d):(\d\d)(?=\s)")
RAM = re.compile(r"(?<!\S)RAM (\d{1,9})/(\d{1,9})MB(?=\s)")
CPU = re.compile(r"(?<!\S)CPU \[([^\]\[]*)\]")
CORE = re.compile(r"(\d{1,3})%@(\d{1,6})$")
# A clock at the very end of a line may be cut ("@21" of "@2133"): complete lines go on with temperatures or rails.
EMC = re.compile(r"(?<!\S)EMC_FREQ (\d{1,3})%(?:@(\d{1,6}))?(?=\s)")
GPU = re.compile(r"(?<!\S)GR3D_FREQ (?:(\d{1,3})%)?(?:@(?:\[(\d[\d,]*)\]|(\d{1,6})))?(?=\s)")
TEMP = re.compile(r"(?<!\S)([A-Za-z]\w*)@(-?\d{1,4}(?:\.\d{1,6})?)C(?:/-?[\d.]+C)?(?=\s|$)")
RAIL_MW = re.compile(r"(?<!\S)([A-Z][A-Z0-9_]+)\s+(\d{1,9})mW/(?:(\d{1,9})mW)?(?:/(?:(\d{1,9})mW)?)?")
RAIL_BARE = re.compile(r"(?<!\S)(?!(?:RAM|SWAP|IRAM)\s)([A-Z][A-Z0-9_]+)\s+(\d{1,9})/(\d{1,9})(?=\s|$)")
ENGINE = re.compile(r"(?<!\S)((?:NV[A-Z]+|VIC|OFA|PVA|APE|GR3D2)\w*?)(?:_FREQ)?\s+(?:\d{1,3}%)?@?(\d{1,6})(?=\s)")
NOT_CONNECTED = "NC"
UNAVAILABLE_C = -200.0
"""JetPack 5 prints -256 for a zone whose block sleeps."""


@dataclass(frozen=True, kw_only=True)
class Rail:
    """One rail in mW. ``avg`` and ``peak`` are over all samples since tegrastats began, so prefer ``cur``."""

    name: str
    cur_mw: int
    avg_mw: int | None = None
    peak_mw: int | None = None


@dataclass(frozen=True, kw_only=True)
class TegraLine:
    """A parsed line. Rail names are not unique (JetPack 5 prints NC twice), so ``rails`` is a list in order."""

    time: datetime.datetime | None = None
    ram_used_mib: int | None = None
    ram_total_mib: int | None = None
    cpus: tuple[tuple[int, int] | None, ...] = ()
    emc_load_pct: int | None = None
    emc_mhz: int | None = None
    gpu_load_pct: int | None = None
    gpu_mhz: tuple[int, ...] = ()
    engines_mhz: Mapping[str, int] = field(default_factory=dict)
    temps_c: Mapping[str, float] = field(default_factory=dict)
    rails: tuple[Rail, ...] = ()

    @property
    def rails_mw(self) -> dict[str, float]:
        """Rails by name without unconnected channels; of a name that is there twice, the first."""
        found: dict[str, float] = {}
        for rail in self.rails:
            if rail.name != NOT_CONNECTED:
                found.setdefault(rail.name, float(rail.cur_mw))
        return found


def parse_line(text: str) -> TegraLine | None:
    """Parse one line; None when nothing in it looks like tegrastats. Never raises."""
    if len(text) > MAX_LINE:
        return None
    text = text.rstrip("\r\n\0")
    ram = RAM.search(text)
    cpu = CPU.search(text)
    emc = EMC.search(text)
    gpu = GPU.search(text)
    rest = CPU.sub(" ", text)
    rails = _rails(rest)
    temps = {name.lower(): float(value) for name, value in TEMP.findall(rest) if float(value) > UNAVAILABLE_C}
    if ram is None and cpu is None and not rails and not temps:
        return None
    return TegraLine(
        time=_time(text),
        ram_used_mib=int(ram.group(1)) if ram else None,
        ram_total_mib=int(ram.group(2)) if ram else None,
        cpus=_cpus(cpu.group(1)) if cpu else (),
        emc_load_pct=int(emc.group(1)) if emc else None,
        emc_mhz=int(emc.group(2)) if emc and emc.group(2) else None,
        gpu_load_pct=int(gpu.group(1)) if gpu and gpu.group(1) else None,
        gpu_mhz=_clocks(gpu),
        engines_mhz={name: int(value) for name, value in ENGINE.findall(rest)},
        temps_c=temps,
        rails=rails,
    )


def to_sample(line: TegraLine, *, t_s: float, total_rails: tuple[str, ...] | None = None) -> PowerSample:
    """The line as a sample; ``total_rails`` is the target's rule, without it the rails tell."""
    rails = line.rails_mw
    total, _ = module_total(rails, total_rails)
    awake = [core for core in line.cpus if core is not None]
    return PowerSample(
        t_s=t_s,
        rails_mw=rails,
        total_mw=total,
        gpu_load_pct=line.gpu_load_pct,
        gpu_mhz=max(line.gpu_mhz, default=None),
        emc_load_pct=line.emc_load_pct,
        emc_mhz=line.emc_mhz,
        cpu_load_pct=round(sum(load for load, _ in awake) / len(awake), 1) if awake else None,
        cpu_mhz=max((mhz for _, mhz in awake), default=None),
        cpu_online=len(awake) if line.cpus else None,
        temps_c=line.temps_c,
        ram_used_mib=line.ram_used_mib,
        ram_total_mib=line.ram_total_mib,
        engines_mhz=line.engines_mhz,
    )


def _rails(text: str) -> tuple[Rail, ...]:
    found: list[tuple[int, Rail]] = []
    for match in RAIL_MW.finditer(text):
        name, cur, avg, peak = match.groups()
        rail = Rail(name=name, cur_mw=int(cur), avg_mw=int(avg) if avg else None, peak_mw=int(peak) if peak else None)
        found.append((match.start(), rail))
    found += [
        (match.start(), Rail(name=match.group(1), cur_mw=int(match.group(2)), avg_mw=int(match.group(3))))
        for match in RAIL_BARE.finditer(text)
    ]
    return tuple(rail for _, rail in sorted(found, key=lambda item: item[0]))


def _cpus(text: str) -> tuple[tuple[int, int] | None, ...]:
    cores: list[tuple[int, int] | None] = []
    for part in text.split(","):
        match = CORE.match(part.strip())
        cores.append((int(match.group(1)), int(match.group(2))) if match else None)
    return tuple(cores)


def _clocks(gpu: re.Match[str] | None) -> tuple[int, ...]:
    if gpu is None or not (gpu.group(2) or gpu.group(3)):
        return ()
    return tuple(int(part) for part in (gpu.group(2) or gpu.group(3)).split(",") if part)


def _time(text: str) -> datetime.datetime | None:
    match = STAMP.match(text)
    if match is None:
        return None
    month, day, year, hour, minute, second = map(int, match.groups())
    try:
        return datetime.datetime(year, month, day, hour, minute, second)
    except ValueError:  # 13-45-2026
        return None
