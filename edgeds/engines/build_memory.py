"""Memory of a build: an estimate before it starts, refusal when it cannot fit, and how large its pools may be.

A build needs several times the weights (report B62). The factors come from builds on TensorRT-RTX 1.7 on a CPU: peak
resident memory above the 163 MiB of the imported library, over the bytes of the ONNX, was 3.9 (652 MB float32 decoder),
4.7 (327 MB float16), 4.6 (90 MB encoder), and each further profile added about 1.7. On a Jetson the CPU and the GPU
share one memory, so weights, workspace and the CUDA context all count against MemAvailable.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from edgeds.errors import OutOfMemory, SpecError

MIB = 1 << 20
BASE_MIB = 512
"""Library, parser and CUDA context. 163 MiB was measured without a GPU; the context's share is our allowance."""
WEIGHTS_FACTOR = 4.7
PROFILE_FACTOR = 1.7
MIN_WORKSPACE_MIB = 256
"""Enough for every detector tried; 1 MiB was too little for a YOLO at 320."""
MAX_WORKSPACE_MIB = 4096
MARGIN_SHARE = 0.1
"""Of the free memory, kept for the rest of the system."""


@dataclass(frozen=True, kw_only=True)
class FreeMemory:
    """Memory in MiB: ``available_mib`` without swapping, ``swap_mib`` free swap."""

    total_mib: int
    available_mib: int
    swap_mib: int
    is_tegra: bool


@dataclass(frozen=True, kw_only=True)
class BuildMemory:
    """What a build is expected to need in MiB, and the pools to set."""

    needed_mib: int
    free_mib: int
    weights_mib: int
    workspace_mib: int
    tactic_dram_mib: int | None

    def describe(self) -> str:
        return f"about {self.needed_mib} MiB needed, {self.free_mib} MiB free, workspace {self.workspace_mib} MiB"


def read_free_memory(root: Path = Path("/")) -> FreeMemory | None:
    """Free memory of this machine, or of a copy of its files under ``root``; None where /proc/meminfo is unreadable.

    A control group's limit (containers, systemd units) counts when it is the smaller one.
    """
    info = dict(re.findall(r"^(\w+):\s+(\d+) kB", _read(root / "proc/meminfo"), re.MULTILINE))
    if "MemAvailable" not in info or "MemTotal" not in info:
        return None
    total, available = int(info["MemTotal"]) // 1024, int(info["MemAvailable"]) // 1024
    limit, used = _read(root / "sys/fs/cgroup/memory.max").strip(), _read(root / "sys/fs/cgroup/memory.current").strip()
    if limit.isdigit() and used.isdigit():
        total = min(total, int(limit) // MIB)
        # Page cache is counted as used but is given back under pressure.
        stat = dict(re.findall(r"^(\w+) (\d+)$", _read(root / "sys/fs/cgroup/memory.stat"), re.MULTILINE))
        freeable = int(stat.get("inactive_file", 0)) + int(stat.get("active_file", 0))
        available = min(available, max(0, int(limit) - int(used) + freeable) // MIB)
    compatible = _read(root / "proc/device-tree/compatible")
    is_tegra = "nvidia,tegra" in compatible or (root / "etc/nv_tegra_release").exists()
    return FreeMemory(
        total_mib=total, available_mib=available, swap_mib=int(info.get("SwapFree", 0)) // 1024, is_tegra=is_tegra
    )


def plan_memory(
    *,
    weight_bytes: int,
    free: FreeMemory | None,
    profiles: int = 1,
    workspace_mib: int | None = None,
    activation_mib: int = 0,
) -> BuildMemory:
    """Estimate a build and choose its pools; raise OutOfMemory with needed and free MiB when it cannot fit.

    Without ``workspace_mib`` the workspace is half of what is left, from 256 to 4096 MiB. On a Jetson the pool for
    tactics' own memory (TACTIC_DRAM, by default 75 % of all memory) is set too, to what is left beside the rest.
    ``free`` is None where it cannot be read: nothing is refused then.
    """
    if workspace_mib is not None and (isinstance(workspace_mib, bool) or not 1 <= workspace_mib <= 1 << 20):
        raise SpecError(f"workspace_mib: expected 1 to 1048576 MiB, got {workspace_mib!r}")
    weights = -(-max(weight_bytes, 0) // MIB)
    fixed = int(BASE_MIB + weights * (WEIGHTS_FACTOR + PROFILE_FACTOR * max(profiles - 1, 0)) + activation_mib)
    if free is None:
        workspace = workspace_mib or MAX_WORKSPACE_MIB // 4
        return BuildMemory(
            needed_mib=fixed + workspace,
            free_mib=0,
            weights_mib=weights,
            workspace_mib=workspace,
            tactic_dram_mib=None,
        )
    usable = int(free.available_mib * (1 - MARGIN_SHARE))
    left = usable - fixed
    workspace = workspace_mib or min(MAX_WORKSPACE_MIB, max(MIN_WORKSPACE_MIB, left // 2))
    needed = fixed + workspace
    if needed > usable:
        raise OutOfMemory(_refusal(needed, free, weights=weights, workspace=workspace, profiles=profiles))
    # Powers of two are required only of DLA pools; these take any size.
    dram = max(workspace, usable - fixed) if free.is_tegra else None
    return BuildMemory(
        needed_mib=needed,
        free_mib=free.available_mib,
        weights_mib=weights,
        workspace_mib=workspace,
        tactic_dram_mib=dram,
    )


def killed_message(*, needed_mib: int, free_mib: int) -> str:
    """What to say when the kernel killed the build (signal 9)."""
    return (
        f"the build was killed by the system (signal 9), which means out of memory: about {needed_mib} MiB were "
        f"expected, {free_mib} MiB were free at the start; stop other programs, add swap, lower the workspace "
        "(--workspace), build fewer buckets, or use the int8 or float16 variant. The previous engine is untouched"
    )


def _refusal(needed: int, free: FreeMemory, *, weights: int, workspace: int, profiles: int) -> str:
    fixes = ["stop other programs"]
    if weights > 256:
        fixes.append("use the int8 or float16 variant (a half or a quarter of the weights)")
    if profiles > 1:
        fixes.append(f"build fewer than {profiles} profiles")
    if workspace > MIN_WORKSPACE_MIB:
        fixes.append(f"lower the workspace ({workspace} MiB)")
    swap = f" ({free.swap_mib} MiB of free swap do not count: a GPU cannot use it)" if free.swap_mib else ""
    return (
        f"the engine build needs about {needed} MiB, {free.available_mib} MiB are free{swap}: {weights} MiB of weights "
        f"count several times while building; {', '.join(fixes)}, or build on a board with more memory"
    )


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
