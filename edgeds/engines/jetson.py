"""Which Jetson an engine is for, from two files, read here or sent by a device: module and L4T release.

The tables live in ``edgeds.boards``. What a release can do is never looked up in them: an unknown one gives a note.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from edgeds.boards import load_catalogue
from edgeds.boards.l4t import find_jetpack, parse_release
from edgeds.boards.probe import find_part


@dataclass(frozen=True, kw_only=True)
class Jetson:
    """What the files say. ``note`` tells what could not be recognised and what is assumed instead.

    ``module`` is the part number, as ``p3767-0005``. ``jetpack`` is None for a release that is not in the table.
    """

    module: str | None
    l4t: str | None
    jetpack: str | None
    note: str | None = None

    def describe(self) -> str:
        """One line for people."""
        board = load_catalogue().find_part(self.module, is_super=False) if self.module else None
        name = board.title if board is not None else self.module or "unknown module"
        release = f"L4T {self.l4t} (JetPack {self.jetpack or 'unknown'})" if self.l4t else "unknown L4T release"
        return f"{name}, {release}{f'; {self.note}' if self.note else ''}"


def read_jetson(root: Path = Path("/")) -> Jetson | None:
    """The Jetson under ``root`` (``/`` for this machine), or None where neither file speaks of one."""
    compatible = _read(root / "proc/device-tree/compatible")
    release = _read(root / "etc/nv_tegra_release")
    return parse_jetson(compatible, release)


def parse_jetson(compatible: str | None, release: str | None) -> Jetson | None:
    """The same from the content of the two files; None for a file that does not exist.

    ``compatible`` has its strings one per line.
    """
    names = (compatible or "").split()
    is_tegra = any(name.startswith(("nvidia,tegra", "nvidia,p")) for name in names)
    if not is_tegra and release is None:
        return None
    module = find_part(names)[0]
    if release is None:
        note = "no /etc/nv_tegra_release (inside a container? mount it from the host), so the release is unknown"
        return Jetson(module=module, l4t=None, jetpack=None, note=note)
    l4t = parse_release(release)
    if l4t is None:
        note = "/etc/nv_tegra_release is not in the known form, so the release is unknown"
        return Jetson(module=module, l4t=None, jetpack=None, note=note)
    found = find_jetpack(l4t)
    known = found.jetpack.jetpack if found.is_exact and found.jetpack is not None else None
    return Jetson(module=module, l4t=l4t, jetpack=known, note=found.note)


def _read(path: Path) -> str | None:
    try:
        with path.open("rb") as stream:
            return stream.read(4096).replace(b"\0", b"\n").decode("utf-8", "replace")
    except OSError:
        return None
