"""Which Jetson this is, from files: module, L4T release, JetPack. What it can do is asked elsewhere, never looked up.

Files: ``/proc/device-tree/compatible`` (NUL-separated; ``nvidia,p3768-0000+p3767-0005-super``) and
``/etc/nv_tegra_release`` (``# R36 (release), REVISION: 4.3, ...``). Both are world-readable.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

# L4T -> (JetPack, TensorRT it brings). NVIDIA's release notes; the last of a row of patch releases stands for all.
RELEASES: dict[tuple[int, int, int], tuple[str, str | None]] = {
    (35, 1, 0): ("5.0.2", None),
    (35, 2, 1): ("5.1", "8.5.2"),
    (35, 3, 1): ("5.1.1", "8.5.2"),
    (35, 4, 1): ("5.1.2", "8.5.2"),
    (35, 5, 0): ("5.1.3", "8.5.2"),
    (35, 6, 0): ("5.1.4", "8.5.2"),
    (35, 6, 1): ("5.1.5", "8.5.2"),
    (35, 6, 4): ("5.1.6", "8.5.2"),
    (36, 2, 0): ("6.0 DP", "8.6.2"),
    (36, 3, 0): ("6.0", "8.6.2"),
    (36, 4, 0): ("6.1", "10.3.0"),
    (36, 4, 2): ("6.1", "10.3.0"),
    (36, 4, 3): ("6.2", "10.3.0"),
    (36, 4, 4): ("6.2.1", "10.3.0"),
    (36, 4, 7): ("6.2.1", "10.3.0"),
    (36, 5, 0): ("6.2.2", "10.3.0"),
    (36, 5, 2): ("6.2.3", None),
    (38, 2, 0): ("7.0", None),
    (38, 4, 0): ("7.1", None),
    (39, 0, 0): ("7.2 EA", None),
    (39, 2, 0): ("7.2", "10.16.2"),
    (39, 2, 1): ("7.2.1", "10.16.2"),
}

MODULES = {
    "p3701-0000": "AGX Orin (developer kit module)",
    "p3701-0002": "IGX Orin",
    "p3701-0004": "AGX Orin 32GB",
    "p3701-0005": "AGX Orin 64GB",
    "p3701-0008": "AGX Orin Industrial",
    "p3767-0000": "Orin NX 16GB",
    "p3767-0001": "Orin NX 8GB",
    "p3767-0002": "Orin NX 16GB",
    "p3767-0003": "Orin Nano 8GB",
    "p3767-0004": "Orin Nano 4GB",
    "p3767-0005": "Orin Nano 8GB (developer kit module)",
}


@dataclass(frozen=True, kw_only=True)
class Jetson:
    """What the files say. ``note`` tells what could not be recognised and what is assumed instead."""

    module: str | None
    l4t: str | None
    jetpack: str | None
    tensorrt: str | None = None
    note: str | None = None

    @property
    def l4t_major(self) -> int | None:
        return int(self.l4t.split(".")[0]) if self.l4t else None

    def describe(self) -> str:
        """One line for people."""
        name = MODULES.get(self.module or "", self.module or "unknown module")
        release = f"L4T {self.l4t} (JetPack {self.jetpack or 'unknown'})" if self.l4t else "unknown L4T release"
        return f"{name}, {release}{f'; {self.note}' if self.note else ''}"


def read_jetson(root: Path = Path("/")) -> Jetson | None:
    """The Jetson under ``root`` (``/`` for this machine), or None where neither file speaks of one."""
    compatible = _read(root / "proc/device-tree/compatible")
    release = _read(root / "etc/nv_tegra_release")
    return parse_jetson(compatible, release)


def parse_jetson(compatible: str | None, release: str | None) -> Jetson | None:
    """The same from the content of the two files; None for a file that does not exist."""
    is_tegra = compatible is not None and ("nvidia,tegra" in compatible or "nvidia,p3" in compatible)
    if not is_tegra and release is None:
        return None
    match = re.search(r"\+(p\d{4}-\d{4})", compatible or "") or re.search(r"\b(p3[67]\d{2}-\d{4})", compatible or "")
    module = match.group(1) if match else None
    if release is None:
        note = "no /etc/nv_tegra_release (inside a container? mount it from the host), so the release is unknown"
        return Jetson(module=module, l4t=None, jetpack=None, note=note)
    found = re.search(r"R(\d{1,4})\s*\(release\),\s*REVISION:\s*(\d{1,4})\.(\d{1,4})", release)
    if found is None:
        note = "/etc/nv_tegra_release is not in the known form, so the release is unknown"
        return Jetson(module=module, l4t=None, jetpack=None, note=note)
    numbers = (int(found.group(1)), int(found.group(2)), int(found.group(3)))
    l4t = ".".join(map(str, numbers))
    known = RELEASES.get(numbers)
    if known is not None:
        return Jetson(module=module, l4t=l4t, jetpack=known[0], tensorrt=known[1])
    nearest = nearest_release(numbers)
    note = (
        f"L4T {l4t} is newer or rarer than the table of this edgeds; treated like {'.'.join(map(str, nearest))} "
        f"(JetPack {RELEASES[nearest][0]})"
    )
    return Jetson(module=module, l4t=l4t, jetpack=None, note=note)


def nearest_release(numbers: tuple[int, int, int]) -> tuple[int, int, int]:
    """The newest known release that is not newer; for one older than all, the oldest."""
    older = [known for known in RELEASES if known <= numbers]
    return max(older) if older else min(RELEASES)


def _read(path: Path) -> str | None:
    try:
        with path.open("rb") as stream:
            return stream.read(4096).replace(b"\0", b"\n").decode("utf-8", "replace")
    except OSError:
        return None
