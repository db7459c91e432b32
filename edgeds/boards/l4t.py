"""Which Jetson Linux and JetPack a machine has. An unknown release is no error: the nearest known one and a note."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from pathlib import Path

from edgeds.files import read_json
from edgeds.specs import from_json

DATA = Path(__file__).parent / "jetpack.json"


@dataclass(frozen=True, kw_only=True)
class JetPack:
    """What a JetPack release carries. None: not stated anywhere we read."""

    l4t: str
    jetpack: str
    ubuntu: str | None = None
    python: str | None = None
    cuda: str | None = None
    tensorrt: str | None = None
    cudnn: str | None = None


@dataclass(frozen=True, kw_only=True)
class L4tReading:
    """The release of Jetson Linux, and the JetPack it is (``is_exact``) or is nearest to; ``note`` says which."""

    l4t: str | None
    jetpack: JetPack | None
    is_exact: bool
    note: str | None = None


def read_l4t(root: Path = Path("/")) -> L4tReading:
    """Read ``/etc/nv_tegra_release`` under ``root``; never raises."""
    path = root / "etc/nv_tegra_release"
    try:
        text = path.read_bytes()[:4096].decode("utf-8", "replace")
    except OSError as error:
        note = f"{path}: {error.strerror or error}; the JetPack version is unknown"
        return L4tReading(l4t=None, jetpack=None, is_exact=False, note=note)
    release = parse_release(text)
    if release is None:
        note = f"{path}: not understood; the JetPack version is unknown"
        return L4tReading(l4t=None, jetpack=None, is_exact=False, note=note)
    return find_jetpack(release)


def parse_release(text: str) -> str | None:
    """``# R36 (release), REVISION: 4.4, ...`` is ``36.4.4``; None for anything else."""
    found = re.search(r"#\s*R(\d{1,3})\b[^,]*,\s*REVISION:\s*(\d{1,4}(?:\.\d{1,4})*)", text)
    return f"{found.group(1)}.{found.group(2)}" if found else None


def find_jetpack(l4t: str) -> L4tReading:
    """The JetPack of a release, else the nearest: the highest not above it, else the lowest known."""
    table = jetpack_table()
    exact = next((entry for entry in table if entry.l4t == l4t), None)
    if exact is not None:
        return L4tReading(l4t=l4t, jetpack=exact, is_exact=True)
    wanted = _numbers(l4t)
    lower = [entry for entry in table if _numbers(entry.l4t) <= wanted]
    nearest = max(lower, key=lambda entry: _numbers(entry.l4t)) if lower else table[0]
    note = (
        f"L4T {l4t} is not in the table of this edgeds; nearest is {nearest.l4t} (JetPack {nearest.jetpack}). "
        "Nothing is switched off for that: sensors and modes are looked up on the machine"
    )
    return L4tReading(l4t=l4t, jetpack=nearest, is_exact=False, note=note)


@functools.cache
def jetpack_table() -> tuple[JetPack, ...]:
    """Known releases for Orin, oldest first."""
    rows = read_json(DATA)["releases"]
    found = [from_json(JetPack, row, where=f"{DATA.name}: releases[{index}]") for index, row in enumerate(rows)]
    return tuple(sorted(found, key=lambda entry: _numbers(entry.l4t)))


def _numbers(l4t: str) -> tuple[int, ...]:
    return tuple(int(part) for part in l4t.split("."))
