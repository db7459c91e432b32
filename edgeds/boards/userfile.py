"""Boards and modes that a user wrote down in a JSON file: strict keys, errors with file and key.

``{"schema": 1, "boards": [{"name": "my-carrier", "base": "orin-nx-16gb-super", "source": "our lab",
"modes": [{"name": "18W", "watts": 18, "gpu_mhz": 800, "sm": 8, "emc_mhz": 3199}]}]}``. With ``base`` everything not
given is taken from that board and modes are added to its own (one of the same name takes its place).
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from edgeds.boards.spec import BoardSpec, GpuArch, PowerMode
from edgeds.errors import SpecError
from edgeds.files import read_json
from edgeds.specs import from_json

if TYPE_CHECKING:
    from edgeds.boards.catalogue import Catalogue

NAME = re.compile(r"[a-z0-9][a-z0-9.\-]{0,63}")
MODE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.\-]{0,63}")
LIMITS = {
    "watts": 2000.0,
    "cpu_mhz": 20_000.0,
    "gpu_mhz": 20_000.0,
    "emc_mhz": 20_000.0,
    "dram_gb_s": 20_000.0,
    "memory_gb": 16_384.0,
    "max_power_w": 5000.0,
}
"""Above these a value is in the wrong unit (Hz or kHz for MHz, mW for W)."""


@dataclass(frozen=True, kw_only=True)
class UserMode:
    """A mode of the file; the fields mean what they mean in PowerMode."""

    name: str
    id: int | None = None
    watts: float | None = None
    is_default: bool | None = None
    cpu_cores: int | None = None
    cpu_mhz: float | None = None
    tpc: int | None = None
    sm: int | None = None
    gpu_mhz: float | None = None
    emc_mhz: float | None = None
    dram_gb_s: float | None = None
    dla_cores: int | None = None
    dla_mhz: tuple[float | None, ...] = ()
    source: str | None = None


@dataclass(frozen=True, kw_only=True)
class UserBoard:
    """A board of the file. Without ``base``, ``compute_capability`` is needed."""

    name: str
    base: str | None = None
    title: str | None = None
    kind: Literal["jetson", "discrete"] | None = None
    compute_capability: str | None = None
    aliases: tuple[str, ...] | None = None
    memory_gb: float | None = None
    usable_memory_mib: int | None = None
    bus_bits: int | None = None
    cpu_cores: int | None = None
    tpc: int | None = None
    sm: int | None = None
    dla_cores: int | None = None
    max_power_w: float | None = None
    power_range_w: tuple[float, float] | None = None
    total_rails: tuple[str, ...] | None = None
    modes: tuple[UserMode, ...] = ()
    source: str | None = None


@dataclass(frozen=True, kw_only=True)
class UserFile:
    schema: int
    boards: tuple[UserBoard, ...]


def read_user_boards(path: Path, catalogue: Catalogue) -> tuple[BoardSpec, ...]:
    """The boards of a file. Raises SpecError: unreadable, unknown keys, impossible values, names already taken."""
    data = from_json(UserFile, read_json(path), where=str(path))
    if data.schema != 1:
        raise SpecError(f"{path}: schema {data.schema} is not known; this edgeds reads schema 1")
    taken = {name for board in catalogue.boards for name in (board.name, *board.aliases)}
    boards: dict[str, BoardSpec] = {}
    for index, item in enumerate(data.boards):
        where = f"{path}: boards[{index}]"
        for name in (item.name, *(item.aliases or ())):
            if not NAME.fullmatch(name):
                raise SpecError(f"{where}: name {name!r}: use lower-case letters, digits, dots and hyphens")
            if name in taken:
                raise SpecError(f"{where}: name {name!r} is taken by another board; choose another")
            taken.add(name)
        boards[item.name] = _to_board(item, {**{b.name: b for b in catalogue.boards}, **boards}, catalogue, where)
    return tuple(boards.values())


def _to_board(item: UserBoard, known: dict[str, BoardSpec], catalogue: Catalogue, where: str) -> BoardSpec:
    base = known.get(item.base) if item.base is not None else None
    if item.base is not None and base is None:
        raise SpecError(f"{where}.base: no board {item.base!r}; edgeds targets lists them")
    _check_numbers(item, where=where)
    if item.power_range_w is not None and item.power_range_w[0] > item.power_range_w[1]:
        raise SpecError(f"{where}.power_range_w: the lower end comes first, got {list(item.power_range_w)}")
    if item.total_rails == ():
        raise SpecError(
            f"{where}.total_rails: empty; name the rails that add up to the module's power, or leave it out"
        )
    if base is None:
        if item.compute_capability is None:
            raise SpecError(f"{where}: give 'base' (a known board) or 'compute_capability', such as \"8.7\"")
        arch = _arch(item.compute_capability, catalogue, where=where)
        base = BoardSpec(name=item.name, title=item.name, kind=item.kind or "discrete", arch=arch)
    elif item.compute_capability not in (None, base.arch.compute_capability):
        raise SpecError(f"{where}.compute_capability: differs from {item.base} ({base.arch.compute_capability})")
    source = (item.source or str(catalogue_label(where)),)
    copied = {
        field.name: value
        for field in dataclasses.fields(BoardSpec)
        if field.name != "modes" and (value := getattr(item, field.name, None)) is not None
    }
    copied.setdefault("title", item.name)
    copied.setdefault("aliases", ())
    board = dataclasses.replace(
        base,
        **copied,
        # Part numbers belong to the module; a probe must keep finding the shipped entry.
        part_numbers=(),
        sources={**base.sources, **{name: source for name in copied if name not in ("name", "title", "aliases")}},
    )
    own = {}
    for index, mode in enumerate(item.modes):
        spot = f"{where}.modes[{index}]"
        if mode.name in own:
            raise SpecError(f"{spot}: mode {mode.name!r} appears twice")
        own[mode.name] = _to_mode(mode, board, source=source, where=spot)
    kept = [mode for mode in base.modes if mode.name not in own]
    if sum(bool(mode.is_default) for mode in own.values()) > 1:
        raise SpecError(f"{where}.modes: more than one has 'is_default'; a board boots in one mode")
    if any(mode.is_default for mode in own.values()):
        kept = [dataclasses.replace(mode, is_default=False) for mode in kept]
    return dataclasses.replace(board, modes=(*kept, *own.values()))


def _to_mode(mode: UserMode, board: BoardSpec, *, source: tuple[str, ...], where: str) -> PowerMode:
    if not MODE_NAME.fullmatch(mode.name):
        raise SpecError(f"{where}: mode name {mode.name!r}: use letters, digits, dots, hyphens and underscores")
    _check_numbers(mode, where=where)
    values: dict[str, Any] = {
        field.name: getattr(mode, field.name) for field in dataclasses.fields(mode) if field.name != "source"
    }
    given = {name for name, value in values.items() if value not in (None, ())}
    own_source = (mode.source,) if mode.source else source
    sources = dict.fromkeys(given, own_source)
    if mode.sm is None and mode.tpc is not None and board.arch.sm_per_tpc is not None:
        values["sm"] = mode.tpc * board.arch.sm_per_tpc
        sources["sm"] = (f"derived: {board.arch.sm_per_tpc} SM per TPC x {mode.tpc} TPC",)
    if board.sm is not None and values["sm"] is not None and values["sm"] > board.sm:
        raise SpecError(f"{where}.sm: {values['sm']} is more than the {board.sm} of {board.name}")
    if mode.dram_gb_s is None and mode.emc_mhz is not None and board.bus_bits is not None:
        values["dram_gb_s"] = dram_gb_s(board.bus_bits, mode.emc_mhz)
        sources["dram_gb_s"] = (f"derived: {board.bus_bits}-bit bus / 8 x 2 x {mode.emc_mhz:g} MHz / 1000",)
    return PowerMode(**values, sources=sources)


def dram_gb_s(bus_bits: int, emc_mhz: float) -> float:
    """Peak bandwidth of LPDDR5: two transfers per EMC clock."""
    return round(bus_bits / 8 * 2 * emc_mhz / 1000, 2)


def catalogue_label(where: str) -> str:
    """The source of facts for which the file gives none: the file itself."""
    return f"the user's file {where.rsplit(': boards[', 1)[0]}"


def _arch(capability: str, catalogue: Catalogue, *, where: str) -> GpuArch:
    if not re.fullmatch(r"\d{1,2}\.\d", capability):
        raise SpecError(f'{where}.compute_capability: {capability!r}: expected a form like "8.6"')
    for arch in catalogue.archs.values():
        if arch.compute_capability == capability:
            return arch
    return GpuArch(name=f"sm_{capability.replace('.', '')}", compute_capability=capability)


def _check_numbers(item: UserBoard | UserMode, *, where: str) -> None:
    for field in dataclasses.fields(item):
        value = getattr(item, field.name)
        values: Iterable[Any] = value if isinstance(value, tuple) else (value,)
        for number in values:
            if isinstance(number, bool) or not isinstance(number, int | float):
                continue
            high = LIMITS.get(field.name, 20_000.0 if field.name == "dla_mhz" else 1e9)
            low_ok = number >= 0 if field.name in ("id", "dla_cores", "dla_mhz") else number > 0
            if not math.isfinite(number) or not low_ok or number > high:
                raise SpecError(
                    f"{where}.{field.name}: {number:g} is not between 0 and {high:g} (clocks in MHz, power in watts)"
                )
