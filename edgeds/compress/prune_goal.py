"""How much to prune: a ratio as given, or the smallest one that reaches a speed-up or a budget."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from onnx import ModelProto

from edgeds.boards import resolve_target
from edgeds.boards.cost_file import ModelWork, parse_cost
from edgeds.boards.predictor import Prediction, predict
from edgeds.compress.channels import PruneResult
from edgeds.compress.choose import check_ratio
from edgeds.errors import BudgetError, SpecError
from edgeds.graph.cost import count_cost
from edgeds.specs import Budget, to_json

HIGHEST_RATIO = 0.95
_STEPS = 7
"""Halvings of the interval: the ratio is found to within 0.01."""


@dataclass(frozen=True, kw_only=True)
class Goal:
    """What to reach. ``speedup`` and ``latency_ms`` are of predicted latency when there is a ``target``."""

    ratio: float | None
    speedup: float | None
    latency_ms: float | None
    target: str | None
    precision: str

    @staticmethod
    def of(
        *, ratio: float | None, speedup: float | None, budget: Budget | None, target: str | None, precision: str
    ) -> Goal:
        """Check that exactly one goal is given, with what it needs. Raises SpecError."""
        given = [value for value in (ratio, speedup, budget) if value is not None]
        if len(given) != 1:
            raise SpecError("give exactly one of ratio, speedup and budget, to say how much to remove")
        if ratio is not None:
            check_ratio(ratio)
        if speedup is not None and (isinstance(speedup, bool) or not 1 < speedup < math.inf):
            raise SpecError(f"speedup {speedup!r}: a number above 1, for example 1.3")
        latency_ms = None
        if budget is not None:
            limits = [budget.latency_ms, 1000 / budget.total_fps if budget.total_fps else None]
            latency_ms = min((limit for limit in limits if limit is not None), default=None)
            if latency_ms is None:
                raise SpecError("a budget for pruning needs a latency or frames per second")
            if target is None:
                raise SpecError("a budget is of a board: say which with a target, as in orin-nx-16gb@25W")
        if target is not None:
            resolve_target(target)
        return Goal(ratio=ratio, speedup=speedup, latency_ms=latency_ms, target=target, precision=precision)

    def predict(self, model: ModelProto) -> Prediction | None:
        """Figures of the target, None when there is none. Predicted, never measured."""
        if self.target is None:
            return None
        found = resolve_target(self.target)
        mode = found.mode_or_default
        if mode is None:
            raise SpecError(f"target {self.target}: which power mode? add it, as in {self.target}@25W")
        return predict(_work(model), board=found.board, mode=mode, precision=self.precision)

    def cost(self, model: ModelProto) -> float:
        """Predicted milliseconds, or FLOPs without a target."""
        found = self.predict(model)
        return found.latency_ms if found is not None else float(count_cost(model).flops)

    def layer_costs(self, model: ModelProto) -> dict[str, float]:
        """Predicted microseconds of every kernel by the node it is named after, or FLOPs without a target."""
        found = self.predict(model)
        if found is None:
            return {layer.node: float(layer.flops) for layer in count_cost(model).layers}
        costs: dict[str, float] = {}
        for layer in found.layers:
            costs[layer.node] = costs.get(layer.node, 0.0) + layer.latency_us
        return costs

    def figures(self, before: ModelProto, after: ModelProto) -> dict[str, Any] | None:
        """Predicted figures of both models for the report."""
        pair = self.predict(before), self.predict(after)
        if pair[0] is None or pair[1] is None:
            return None
        return {
            "status": "predicted",
            "target": str(self.target),
            "precision": self.precision,
            "latency_ms_before": pair[0].latency_ms,
            "latency_ms_after": pair[1].latency_ms,
            "speedup": pair[0].latency_ms / pair[1].latency_ms,
        }


def _work(model: ModelProto) -> ModelWork:
    return parse_cost(to_json(count_cost(model)), where="the model")


def find_ratio(goal: Goal, *, at: Callable[[float], PruneResult], dense: ModelProto) -> tuple[PruneResult, float]:
    """The result at the smallest ratio that reaches the goal, and that ratio. Raises BudgetError when none does."""
    if goal.ratio is not None:
        return at(goal.ratio), goal.ratio
    before = goal.cost(dense)
    limit = before / goal.speedup if goal.speedup is not None else goal.latency_ms
    if limit is None:
        raise SpecError("there is no goal to reach")
    best, high, low = at(HIGHEST_RATIO), HIGHEST_RATIO, 0.0
    cost = goal.cost(best.model)
    if cost > limit:
        unit = "ms predicted" if goal.target is not None else "FLOPs"
        raise BudgetError(
            f"{limit:.4g} {unit} cannot be reached: {HIGHEST_RATIO:.0%} of the removable channels gone leave "
            f"{cost:.4g} of {before:.4g}; the layers under 'protected' make up the rest"
        )
    for _ in range(_STEPS):
        middle = (low + high) / 2
        tried = at(middle)
        if goal.cost(tried.model) <= limit:
            best, high = tried, middle
        else:
            low = middle
    return best, high
