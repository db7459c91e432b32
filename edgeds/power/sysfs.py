"""Small reads from /sys and /proc that answer None instead of failing: sensors come and go with kernels."""

from __future__ import annotations

import re
from pathlib import Path

MAX_BYTES = 1 << 16


def read_text(path: Path) -> str | None:
    """The text of a small file, stripped; None for any reason not to have it (absent, EIO, EAGAIN, permission)."""
    try:
        with path.open("rb") as stream:
            return stream.read(MAX_BYTES).decode("utf-8", "replace").strip("\0 \t\r\n")
    except OSError:
        return None


def read_int(path: Path) -> int | None:
    """A whole number, or None."""
    text = read_text(path)
    return int(text) if text is not None and re.fullmatch(r"[+-]?\d{1,19}", text) else None


def first_int(root: Path, names: tuple[str, ...]) -> int | None:
    """The first of several files that gives a number."""
    return next((value for name in names if (value := read_int(root / name)) is not None), None)


def hwmon_folders(root: Path) -> list[tuple[str, Path]]:
    """(chip name, folder) of every hardware monitor. Their numbers change between boots; names do not."""
    found: dict[Path, tuple[str, Path]] = {}
    # Older kernels show an I2C chip only through its driver; a set of real paths keeps each chip once.
    patterns = ("sys/class/hwmon/hwmon*", "sys/bus/i2c/drivers/ina*/*-*/hwmon/hwmon*")
    for pattern in patterns:
        for folder in sorted(root.glob(pattern)):
            name = read_text(folder / "name")
            if name:
                found.setdefault(folder.resolve(), (name, folder))
    return list(found.values())
