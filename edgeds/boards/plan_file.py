"""A plan as JSON: what ``edgeds plan --json`` prints, the form a bundle stores, and measurements of devices."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from edgeds.boards.plan_spec import Measured, PlanChoice, PlanOptions, PlanResult
from edgeds.boards.stored_plan import DEFAULT_DELAY_MS, StoredPlan
from edgeds.errors import SpecError
from edgeds.files import read_json
from edgeds.specs import from_json, to_json

MEASURED_NAME = "measured.json"
"""In a bundle's ``engines/`` folder: measurements belong to a device, like the engines."""


def store_plan(result: PlanResult, *, options: PlanOptions, sizes: Sequence[str] = ()) -> StoredPlan:
    """The short form of a feasible plan. ``sizes`` are all resolutions to serve (default: the plan's own).

    Raises SpecError for a result without a plan.
    """
    plan = result.plan
    if plan is None:
        raise SpecError(f"no plan for {result.target} to store: {result.reasons[0] if result.reasons else 'none fits'}")
    return StoredPlan(
        target=result.target.split("@")[0],
        mode=plan.mode,
        candidate=plan.candidate,
        precision=plan.precision,
        batch=plan.batch,
        sizes=tuple(sizes) or ((plan.size,) if plan.size else ()),
        max_delay_ms=max_delay_ms(plan, options),
        objective=result.objective,
        status=plan.status,
        latency_ms=plan.latency_ms,
        latency_low_ms=plan.latency_low_ms,
        latency_high_ms=plan.latency_high_ms,
        fps=plan.fps,
        power_w=plan.power_w,
        energy_mj=plan.energy_mj,
        memory_mib=plan.memory_mib,
        limited_by=plan.limited_by,
        device=plan.device,
        planned_utc=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    )


def max_delay_ms(plan: PlanChoice, options: PlanOptions) -> float:
    """How long the batcher may wait for company: until the batch is full at the rate asked for, within the latency."""
    budget = options.budget
    delay = DEFAULT_DELAY_MS if not budget.total_fps else (plan.batch - 1) / budget.total_fps * 1e3
    limit = budget.latency_ms if budget.latency_ms is not None else budget.latency_p99_ms
    return delay if limit is None else max(0.0, min(delay, limit - plan.latency_high_ms))


def plan_document(result: PlanResult, *, options: PlanOptions) -> dict[str, Any]:
    """What ``edgeds plan --json`` prints."""
    return {
        "feasible": result.feasible,
        "target": result.target,
        "objective": result.objective,
        "budget": to_json(options.budget),
        "plan": choice_document(result.plan, options) if result.plan is not None else None,
        "alternatives": [choice_document(one, options) for one in result.alternatives],
        "nearest": [choice_document(one, options) for one in result.nearest],
        "reasons": list(result.reasons),
        "tried": result.tried,
    }


def choice_document(choice: PlanChoice, options: PlanOptions) -> dict[str, Any]:
    """One choice, with ``sizes`` as a list and the batcher's delay."""
    document: dict[str, Any] = to_json(choice)
    document["sizes"] = [choice.size] if choice.size else []
    document["fps_per_watt"] = choice.fps_per_watt
    document["max_delay_ms"] = max_delay_ms(choice, options)
    document["misses"] = [{**to_json(miss), "text": str(miss)} for miss in choice.misses]
    del document["size"]
    return document


def read_measured(path: Path) -> tuple[Measured, ...]:
    """Measurements from a file: a list of the fields of ``Measured``. Raises SpecError that names row and field."""
    data = read_json(path)
    if not isinstance(data, list):
        raise SpecError(f"{path}: expected a list of measurements")
    rows = tuple(from_json(Measured, row, where=f"{path}[{index}]") for index, row in enumerate(data))
    for index, row in enumerate(rows):
        if row.batch < 1 or not 0 < row.latency_ms < float("inf") or (row.power_w is not None and row.power_w <= 0):
            raise SpecError(f"{path}[{index}]: a batch, latency or power that cannot have been measured")
    return rows
