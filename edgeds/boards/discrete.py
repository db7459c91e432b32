"""Discrete NVIDIA GPUs by what they report: nvidia-smi gives compute capability, memory, clocks and power limit."""

from __future__ import annotations

import re
from dataclasses import dataclass

from edgeds.boards.catalogue import Catalogue
from edgeds.boards.nvpmodel import NO_ANSWER, Run
from edgeds.boards.spec import BoardSpec, GpuArch, PowerMode

TIMEOUT_S = 10.0
FIELDS = ("name", "compute_cap", "memory.total", "power.limit", "clocks.max.sm", "clocks.max.memory")
OLD_FIELDS = tuple(field for field in FIELDS if field != "compute_cap")
"""Drivers before 510 do not know compute_cap and refuse the whole query."""


@dataclass(frozen=True, kw_only=True)
class GpuFacts:
    """What one GPU says about itself; None where it gives no number (``[N/A]``)."""

    name: str
    compute_capability: str | None = None
    memory_mib: int | None = None
    power_limit_w: float | None = None
    gpu_mhz: float | None = None
    memory_mhz: float | None = None


def query_gpus(run: Run | None) -> tuple[tuple[GpuFacts, ...], str | None]:
    """The GPUs that nvidia-smi lists, and otherwise the reason. Never raises."""
    if run is None:
        return (), "no program is run for a copied tree, so discrete GPUs are unknown"
    note = None
    for fields in (FIELDS, OLD_FIELDS):
        code, output = run(
            ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"], TIMEOUT_S
        )
        if code == 0:
            gpus = tuple(gpu for line in output.splitlines() if (gpu := parse_gpu(line, fields)) is not None)
            return gpus, None if gpus else "nvidia-smi lists no GPU"
        if code == NO_ANSWER:
            return (), "no NVIDIA GPU: nvidia-smi does not exist here or does not answer"
        note = f"nvidia-smi failed (exit {code}): {' '.join(output.split())[:120]}"
    return (), note


def parse_gpu(line: str, fields: tuple[str, ...]) -> GpuFacts | None:
    """One line of the CSV; None when it has another number of fields (names have no commas)."""
    words = [word.strip() for word in line.split(",")]
    if len(words) != len(fields) or not words[0]:
        return None
    values = dict(zip(fields, words, strict=True))
    memory = _number(values["memory.total"])
    capability = values.get("compute_cap", "")
    return GpuFacts(
        name=values["name"],
        compute_capability=capability if re.fullmatch(r"\d{1,2}\.\d", capability) else None,
        memory_mib=int(memory) if memory is not None else None,
        power_limit_w=_number(values["power.limit"]),
        gpu_mhz=_number(values["clocks.max.sm"]),
        memory_mhz=_number(values["clocks.max.memory"]),
    )


def discrete_board(gpu: GpuFacts, catalogue: Catalogue) -> BoardSpec:
    """A board of what the GPU says. The number of SMs and the bandwidth are not among it and stay unknown."""
    capability = gpu.compute_capability or "unknown"
    known = next((arch for arch in catalogue.archs.values() if arch.compute_capability == capability), None)
    source = ("nvidia-smi on this machine",)
    facts = {"gpu_mhz": gpu.gpu_mhz, "watts": gpu.power_limit_w}
    return BoardSpec(
        name=re.sub(r"[^a-z0-9]+", "-", gpu.name.lower()).strip("-") or "gpu",
        title=gpu.name,
        kind="discrete",
        arch=known or GpuArch(name=f"sm_{capability.replace('.', '')}", compute_capability=capability),
        memory_gb=round(gpu.memory_mib / 1024, 1) if gpu.memory_mib is not None else None,
        usable_memory_mib=gpu.memory_mib,
        max_power_w=gpu.power_limit_w,
        modes=(
            PowerMode(
                name="default",
                is_default=True,
                watts=gpu.power_limit_w,
                gpu_mhz=gpu.gpu_mhz,
                sources={name: source for name, value in facts.items() if value is not None},
            ),
        ),
        sources={"memory_gb": source, "max_power_w": source},
        notes={"sm": "nvidia-smi does not state SMs and bandwidth; give them in a --boards file with 'base' left out"},
    )


def _number(text: str) -> float | None:
    return float(text) if re.fullmatch(r"\d{1,9}(?:\.\d{1,6})?", text) else None
