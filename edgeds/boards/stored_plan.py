"""The plan that a bundle carries: builder and batcher obey it. Light: read wherever a bundle is opened."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from edgeds.errors import SpecError
from edgeds.specs import from_json

DEFAULT_DELAY_MS = 5.0


@dataclass(frozen=True, kw_only=True)
class StoredPlan:
    """What a bundle keeps of a plan. The builder takes precision and batch from it, the batcher batch and delay."""

    target: str
    mode: str
    candidate: str
    precision: str
    batch: int
    sizes: tuple[str, ...]
    max_delay_ms: float
    objective: str
    status: str
    latency_ms: float
    latency_low_ms: float
    latency_high_ms: float
    fps: float
    power_w: float | None
    energy_mj: float | None
    memory_mib: float | None
    limited_by: str | None
    planned_utc: str
    device: str = "gpu"

    @property
    def build_precision(self) -> str:
        """As ``edgeds build`` names it."""
        return {"fp32": "float", "fp16": "float16"}.get(self.precision, self.precision)


def read_stored_plan(data: Mapping[str, Any] | None, *, where: str) -> StoredPlan | None:
    """The plan of a manifest, None without one. Raises SpecError for a plan that is damaged."""
    if data is None:
        return None
    plan = from_json(StoredPlan, data, where=where)
    if plan.batch < 1 or not 0 <= plan.max_delay_ms < float("inf"):
        raise SpecError(f"{where}: batch {plan.batch} with a delay of {plan.max_delay_ms} ms is impossible")
    return plan
