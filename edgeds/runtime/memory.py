"""How much system memory is left. On Orin the GPU shares it, so this is the figure that matters there too."""

from __future__ import annotations

import re
from pathlib import Path


def available_memory_share(meminfo: Path = Path("/proc/meminfo")) -> float | None:
    """MemAvailable / MemTotal, from 0 to 1; None where the file is missing or has neither."""
    try:
        text = meminfo.read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    values = dict(re.findall(r"^(MemTotal|MemAvailable):\s+(\d+) kB", text, re.MULTILINE))
    total = int(values.get("MemTotal", 0))
    return int(values["MemAvailable"]) / total if total and "MemAvailable" in values else None
