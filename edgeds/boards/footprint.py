"""Memory of an engine: weights, activations, workspace, and the cache of a language model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from edgeds.boards.cost_file import ModelWork
from edgeds.boards.fusion import Kernel
from edgeds.boards.roofline import choose_precision, weight_bytes

WORKSPACE_MIB = 64.0


@dataclass(frozen=True, kw_only=True)
class MemoryParts:
    """What an engine holds while it runs, in MiB; runtime libraries are not in it."""

    weights_mib: float
    activations_mib: float
    workspace_mib: float
    kv_cache_mib: float = 0.0

    @property
    def total_mib(self) -> float:
        return self.weights_mib + self.activations_mib + self.workspace_mib + self.kv_cache_mib


def memory_parts(
    kernels: Sequence[Kernel], *, work: ModelWork, precision: str, kv_cache_mib: float = 0.0
) -> MemoryParts:
    """Weights as stored, twice the largest input and output of a layer, and a workspace of 64 MiB."""
    quantized = work.is_quantized
    weights = sum(
        weight_bytes(kernel, precision=choose_precision(kernel, precision=precision, is_quantized=quantized))
        for kernel in kernels
    )
    width = 4.0 if precision.startswith("fp32") else 2.0
    largest = max((kernel.read + kernel.written for kernel in kernels), default=0.0) * width
    return MemoryParts(
        weights_mib=weights / (1 << 20),
        activations_mib=2 * largest / (1 << 20),
        workspace_mib=WORKSPACE_MIB,
        kv_cache_mib=kv_cache_mib,
    )
