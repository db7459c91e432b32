"""Power rails of a Jetson from the kernel's hwmon files: INA3221 (JetPack 5, 6, 7) and INA238 (newer carriers).

INA3221: ``inN_label``, ``inN_input`` in mV and ``currN_input`` in mA; power is their product. INA238:
``power1_input`` in uW. Chips are found by name and rails by label, never by number.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from edgeds.power.sysfs import hwmon_folders, read_int, read_text

CHANNELS = range(1, 4)
"""An INA3221 has three channels; inputs 4 to 6 are shunt voltages, 7 is the sum of shunt voltages."""

ALARMS = ("crit_alarm", "max_alarm")


@dataclass(frozen=True, kw_only=True)
class RailFiles:
    """Where one rail is read: either voltage and current, or power."""

    name: str
    chip: str
    voltage: Path | None = None
    current: Path | None = None
    power: Path | None = None
    alarms: tuple[Path, ...] = ()


def find_rails(root: Path = Path("/")) -> list[RailFiles]:
    """All labelled rails under ``root``. A name that two chips use gets ``#2`` on its second use."""
    found: list[RailFiles] = []
    for chip, folder in hwmon_folders(root):
        if chip == "ina3221":
            found += _ina3221(chip, folder)
        elif re.fullmatch(r"ina2\d\d", chip):
            found += _ina2xx(chip, folder)
    names: dict[str, int] = {}
    unique = []
    for rail in found:
        names[rail.name] = names.get(rail.name, 0) + 1
        suffix = f"#{names[rail.name]}" if names[rail.name] > 1 else ""
        unique.append(
            RailFiles(
                name=rail.name + suffix,
                chip=rail.chip,
                voltage=rail.voltage,
                current=rail.current,
                power=rail.power,
                alarms=rail.alarms,
            )
        )
    return unique


def _ina3221(chip: str, folder: Path) -> list[RailFiles]:
    rails = []
    for channel in CHANNELS:
        label = read_text(folder / f"in{channel}_label")
        is_off = read_int(folder / f"in{channel}_enable") == 0
        if not label or label == "NC" or is_off or label.startswith("sum of"):
            continue
        rails.append(
            RailFiles(
                name=label,
                chip=chip,
                voltage=folder / f"in{channel}_input",
                current=folder / f"curr{channel}_input",
                alarms=tuple(folder / f"curr{channel}_{alarm}" for alarm in ALARMS),
            )
        )
    return rails


def _ina2xx(chip: str, folder: Path) -> list[RailFiles]:
    labels = ("power1_label", "in1_label", "curr1_label", "label", "device/of_node/label")
    label = next((text for name in labels if (text := read_text(folder / name))), None)
    if label == "NC" or not (folder / "power1_input").exists():
        return []
    if label is None:
        address = re.search(r"(\d+)-00([0-9a-f]{2})\b", str(folder.resolve()))
        label = f"{chip}@{address.group(1)}-{address.group(2)}" if address else chip
    return [RailFiles(name=label, chip=chip, power=folder / "power1_input", alarms=(folder / "power1_crit_alarm",))]


class RailReader:
    """Reads rails again and again. A rail that fails is left out of that reading and noted once, by its reason."""

    def __init__(self, rails: list[RailFiles], *, read: Callable[[Path], int] | None = None) -> None:
        self.rails = tuple(rails)
        self._read = read or read_number
        self._notes: dict[str, str] = {}

    @property
    def notes(self) -> tuple[str, ...]:
        return tuple(self._notes.values())

    def read_mw(self) -> dict[str, float]:
        """Power of every rail that answers, in mW."""
        found = {}
        for rail in self.rails:
            try:
                found[rail.name] = self._power_mw(rail)
            except (OSError, ValueError) as error:
                if rail.name not in self._notes:
                    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
                    self._notes[rail.name] = f"rail {rail.name} ({rail.chip}) cannot be read: {reason}"
        return found

    def read_alarms(self) -> tuple[str, ...] | None:
        """Rails above the chip's warning or critical limit at this moment; None where no chip has alarms."""
        states = {
            rail.name: [value for path in rail.alarms if (value := read_int(path)) is not None] for rail in self.rails
        }
        if not any(states.values()):
            return None
        return tuple(f"over-current {name}" for name, values in states.items() if 1 in values)

    def _power_mw(self, rail: RailFiles) -> float:
        if rail.power is not None:
            return self._read(rail.power) / 1000
        if rail.voltage is None or rail.current is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        return self._read(rail.voltage) * self._read(rail.current) / 1000


def read_number(path: Path) -> int:
    """A whole number from a file. Raises OSError as the kernel gives it, ValueError for any other content."""
    with path.open("rb") as stream:
        text = stream.read(64).decode("ascii", "replace").strip()
    if not re.fullmatch(r"-?\d{1,19}", text):
        raise ValueError(f"{text[:20]!r} is not a number")
    return int(text)
