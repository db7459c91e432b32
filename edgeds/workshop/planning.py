"""What a new bundle says about its board: target, budget, plan and predicted figures."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edgeds.boards.cost_file import parse_cost
from edgeds.boards.plan_file import choice_document, store_plan
from edgeds.boards.plan_spec import DEFAULT_BATCHES, Candidate, PlanOptions
from edgeds.boards.planner import plan_model
from edgeds.boards.spec import Target
from edgeds.boards.targets import resolve_target
from edgeds.errors import SpecError
from edgeds.specs import Budget, Resolution, to_json

log = logging.getLogger("edgeds.workshop")


@dataclass(frozen=True, kw_only=True)
class PlannedParts:
    """The manifest's keys of the same names; None where nothing was asked or nothing fits."""

    target: dict[str, str] | None = None
    budget: dict[str, Any] | None = None
    plan: dict[str, Any] | None = None
    predicted: dict[str, Any] | None = None


def parse_target(text: str | None, *, budget: Budget | None) -> Target | None:
    """The board that a bundle is made for. Raises SpecError for names that nobody knows, and a budget without one."""
    if text is None:
        if budget is not None:
            raise SpecError("a budget needs a board: give --target NAME or NAME@MODE")
        return None
    return resolve_target(text)


def plan_parts(
    target: Target | None,
    *,
    cost: Mapping[str, Any],
    accuracy: Mapping[str, Any],
    budget: Budget | None,
    sizes: Sequence[Resolution],
    max_batch: int,
) -> PlannedParts:
    """Plan the bundle's model (``cost`` as ``cost.json`` has it) for ``target``, up to ``max_batch``, at the largest of
    ``sizes``; ``accuracy`` as the manifest has it.

    A bundle that misses its budget is still written, without a plan and with a warning that says what it misses: the
    calibration is worth keeping, and another board or budget may do.
    """
    if target is None:
        return PlannedParts()
    named = {"name": target.board.name, **({"mode": target.mode.label} if target.mode is not None else {})}
    stated = to_json(budget) if budget is not None else None
    batches = (*(batch for batch in DEFAULT_BATCHES if batch < max_batch), max_batch)
    largest = max(sizes, key=lambda size: size.height_px * size.width_px, default=None)
    options = PlanOptions(budget=budget or Budget(), batches=batches, sizes=(largest,) if largest is not None else ())
    work = parse_cost(cost, where="cost.json")
    share = accuracy.get(f"{'int8' if work.is_quantized else 'float'}_map50_95")
    candidate = Candidate(
        name="model",
        precision="int8" if work.is_quantized else "fp16",
        work=work,
        accuracy=100 * share if isinstance(share, float) else None,
    )
    try:
        result = plan_model([candidate], target=target, options=options)
    except SpecError as error:  # a board without known modes or clocks: named, but not planned for
        log.warning("not planned: %s", error)
        return PlannedParts(target=named, budget=stated)
    if result.plan is None:
        log.warning("no plan for %s: %s", target, "; ".join(result.reasons))
        return PlannedParts(target=named, budget=stated, predicted=choice_document(result.nearest[0], options))
    stored = store_plan(result, options=options, sizes=[str(size) for size in sizes])
    return PlannedParts(
        target={**named, "mode": stored.mode},
        budget=stated,
        plan=to_json(stored),
        predicted=choice_document(result.plan, options),
    )
