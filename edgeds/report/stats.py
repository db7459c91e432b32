"""Small statistics and the facts about machine and software that belong in every report."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

import numpy as np

from edgeds._version import __version__
from edgeds.errors import SpecError

PACKAGES = {
    "numpy": ("numpy",),
    "onnxruntime": ("onnxruntime",),
    "opencv": ("opencv-python-headless", "opencv-python", "opencv-contrib-python"),
}


@dataclass(frozen=True, kw_only=True)
class LatencySummary:
    """Milliseconds. Percentiles by linear interpolation over all values (numpy's default method)."""

    count: int
    mean_ms: float
    p50_ms: float
    p95_ms: float
    p99_ms: float
    max_ms: float


def summarize_latencies(latencies_ms: Sequence[float]) -> LatencySummary:
    """Mean, percentiles and maximum; SpecError without values or for values that are not finite."""
    values = np.asarray(latencies_ms, dtype=np.float64)
    if values.size == 0:
        raise SpecError("latencies: nothing was measured")
    if not np.isfinite(values).all():
        raise SpecError("latencies: a value is not finite")
    p50, p95, p99 = (float(value) for value in np.percentile(values, (50, 95, 99)))
    return LatencySummary(
        count=int(values.size),
        mean_ms=float(values.mean()),
        p50_ms=p50,
        p95_ms=p95,
        p99_ms=p99,
        max_ms=float(values.max()),
    )


def device_name(*, root: Path = Path("/")) -> str:
    """Board model of a Jetson, else the CPU model with its architecture."""
    board = _read(root / "proc/device-tree/model").rstrip("\0").strip()
    if board:
        return board
    for line in _read(root / "proc/cpuinfo").splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("model name", "Model", "Hardware") and value.strip():
            return f"{' '.join(value.split())} ({platform.machine()})"
    return platform.processor() or platform.machine() or "unknown"


def software_versions() -> dict[str, str]:
    """edgeds, Python and the packages that decide speed; what is not installed is left out."""
    versions = {"edgeds": __version__, "python": platform.python_version()}
    for name, candidates in PACKAGES.items():
        for candidate in candidates:
            try:
                versions[name] = importlib.metadata.version(candidate)
                break
            except importlib.metadata.PackageNotFoundError:
                continue
    return versions


def utc_now() -> str:
    """The date and time, UTC, ISO 8601 to the second."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
