"""How much memory a model may take here. On a Jetson GPU and CPU share one memory; a discrete GPU has its own."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from edgeds.boards.discrete import TIMEOUT_S
from edgeds.boards.nvpmodel import Run, run_command

RESERVE_MIB = 512.0
"""Left to the system on shared memory: what it needs grows while a model runs."""


@dataclass(frozen=True, kw_only=True)
class MemoryReading:
    """Memory that can be allocated now. ``kind``: shared with the CPU, the GPU's own, or the CPU's without any GPU.

    ``free_mib`` is None when nothing tells; ``source`` says what was read or why nothing was.
    """

    kind: Literal["shared", "device", "host"]
    free_mib: float | None
    total_mib: float | None
    source: str


def read_memory(
    kind: Literal["jetson", "nvidia", "cpu"],
    *,
    root: Path = Path("/"),
    run: Run | None = None,
    gpu: int = 0,
    reserve_mib: float = RESERVE_MIB,
) -> MemoryReading:
    """Read the memory of a machine of this kind (``MachineProbe.kind``). Never raises.

    Shared memory: MemAvailable (which counts what caches would give back) less ``reserve_mib``. A discrete GPU: its
    own number, never the host's. The choice is made by the kind alone, so one is not taken for the other.
    """
    if kind == "nvidia":
        return _device_memory(run or (run_command if root == Path("/") else None), gpu)
    try:
        text = (root / "proc/meminfo").read_bytes()[:65536].decode("ascii", "replace")
    except OSError as error:
        text = ""
        reason = f"{root / 'proc/meminfo'}: {error.strerror or error}"
    else:
        reason = "no MemAvailable in /proc/meminfo"
    found = {name: int(kb) / 1024 for name, kb in re.findall(r"^(MemTotal|MemAvailable):\s*(\d{1,15}) kB", text, re.M)}
    available = found.get("MemAvailable")
    shared = kind == "jetson"
    reserve = reserve_mib if shared else 0.0
    less = f" less {reserve:g} MiB for the system" if shared else ""
    return MemoryReading(
        kind="shared" if shared else "host",
        free_mib=max(0.0, available - reserve) if available is not None else None,
        total_mib=found.get("MemTotal"),
        source=f"MemAvailable{less}" if available is not None else reason,
    )


def _device_memory(run: Run | None, gpu: int) -> MemoryReading:
    if run is None:
        return MemoryReading(kind="device", free_mib=None, total_mib=None, source="no program is run for a copied tree")
    command = ["nvidia-smi", f"--id={gpu}", "--query-gpu=memory.free,memory.total", "--format=csv,noheader,nounits"]
    code, output = run(command, TIMEOUT_S)
    found = re.search(r"^\s*(\d{1,9})\s*,\s*(\d{1,9})\s*$", output, re.MULTILINE)
    if code or found is None:
        said = " ".join(output.split())[:100]
        return MemoryReading(kind="device", free_mib=None, total_mib=None, source=f"nvidia-smi gives none: {said}")
    free, total = map(float, found.groups())
    return MemoryReading(kind="device", free_mib=free, total_mib=total, source=f"nvidia-smi, GPU {gpu}")
