"""Several models on one board: one power mode for all, and a share of the GPU's time for each.

Models take turns on the GPU, each for whole inferences. A model that must run ``fps`` times a second in batches that
take ``t`` seconds each needs the share fps x t / batch; shares, memory and power add up.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from edgeds.boards.coefficients import Table, load_table
from edgeds.boards.plan_spec import Candidate, Miss, PlanChoice, PlanOptions
from edgeds.boards.planner import each_choice, memory_limit, usable_modes
from edgeds.boards.predictor import idle_power, machine_of
from edgeds.boards.spec import PowerMode, Target
from edgeds.errors import SpecError
from edgeds.specs import Budget

MAX_SHARE = 0.9
"""Of the GPU's time: beyond that, small delays pile up."""
_KEPT = 6
_OWN_LIMITS = ("waiting_ms", "latency_p99_ms", "energy_mj")
"""Limits of one model that sharing the board does not change; the others are judged for the board."""


@dataclass(frozen=True, kw_only=True)
class Load:
    """One model on a shared board: its forms and what it must do. ``budget.fps`` is needed (tokens/s for an LLM)."""

    candidates: tuple[Candidate, ...]
    budget: Budget


@dataclass(frozen=True, kw_only=True)
class ModelShare:
    """How one model runs: its choice, its share of the GPU's time, and its response with the others in its way."""

    model: str
    choice: PlanChoice
    share: float
    response_ms: float


@dataclass(frozen=True, kw_only=True)
class BoardPlan:
    """A mode and one choice per model; ``misses`` are empty when it is feasible. Power is the mean over time."""

    target: str
    mode: str
    models: tuple[ModelShare, ...]
    share: float
    power_w: float | None
    memory_mib: float | None
    misses: tuple[Miss, ...]
    status: str

    @property
    def feasible(self) -> bool:
        return not self.misses


def plan_board(
    loads: Mapping[str, Load], *, target: Target, options: PlanOptions, table: Table | None = None
) -> tuple[BoardPlan, tuple[str, ...]]:
    """The plan with the least power that does all loads, else the one that misses least; and the modes left out.

    ``options.budget`` holds the limits of the whole board (watts, memory). Raises SpecError without loads, or for a
    load without ``fps``.
    """
    if not loads:
        raise SpecError("nothing to plan: no model was given")
    for name, load in loads.items():
        if not load.budget.total_fps or not load.candidates:
            raise SpecError(f"model {name!r}: say how often it runs (NAME=FILE:30fps) and give it a model")
    table = table or load_table()
    modes, reasons = usable_modes(target, options)
    plans = [
        _join(names, target=target, mode=mode, loads=loads, options=options, table=table)
        for mode in modes
        for names in _combinations(loads, target=target, mode=mode, options=options, table=table)
    ]
    best = min(
        plans,
        key=lambda plan: (
            bool(plan.misses),
            sum(miss.shortfall for miss in plan.misses),
            plan.power_w if plan.power_w is not None else float("inf"),
            plan.share,
        ),
    )
    return best, tuple(reasons)


def _combinations(
    loads: Mapping[str, Load], *, target: Target, mode: PowerMode, options: PlanOptions, table: Table
) -> list[dict[str, PlanChoice]]:
    """For each model its few choices with the least share of the GPU (those within its own limits first)."""
    kept: list[list[PlanChoice]] = []
    for load in loads.values():
        own = replace(options, budget=replace(load.budget, watts=None, memory_mib=None))
        choices = [
            choice
            for candidate in load.candidates
            for choice in each_choice(candidate, board=target.board, mode=mode, options=own, table=table)
        ]
        limit = _KEPT if len(loads) <= 3 else 2
        kept.append(sorted(choices, key=lambda one: (bool(one.misses), one.latency_ms / one.batch))[:limit])
    if len(loads) > 8:  # one choice each keeps the number of combinations linear
        kept = [choices[:1] for choices in kept]
    return [dict(zip(loads, chosen, strict=True)) for chosen in itertools.product(*kept)]


def _join(
    chosen: Mapping[str, PlanChoice],
    *,
    target: Target,
    mode: PowerMode,
    loads: Mapping[str, Load],
    options: PlanOptions,
    table: Table,
) -> BoardPlan:
    shares, misses = [], []
    for name, choice in chosen.items():
        budget = loads[name].budget
        rate = budget.total_fps or 0.0
        # The GPU does not preempt: the longest inference of the others may just have started.
        blocked = max((other.latency_ms for key, other in chosen.items() if key != name), default=0.0)
        response = choice.response_ms + blocked
        share = rate * choice.latency_ms / choice.batch / 1e3
        shares.append(ModelShare(model=name, choice=choice, share=share, response_ms=response))
        if budget.latency_ms is not None and response > budget.latency_ms:
            misses.append(Miss(limit=f"{name}: latency_ms", wanted=budget.latency_ms, got=response))
        own = [miss for miss in choice.misses if miss.limit in _OWN_LIMITS]
        misses += [Miss(limit=f"{name}: {miss.limit}", wanted=miss.wanted, got=miss.got) for miss in own]
        if budget.min_accuracy is not None and (choice.accuracy is None or choice.accuracy < budget.min_accuracy):
            misses.append(Miss(limit=f"{name}: accuracy", wanted=budget.min_accuracy, got=choice.accuracy))
    total = sum(share.share for share in shares)
    power = _power(shares, idle_w=idle_power(machine_of(target.board, mode), table.power))
    memories = [share.choice.memory_mib for share in shares]
    memory = None if any(one is None for one in memories) else sum(one for one in memories if one is not None)
    limit = memory_limit(target.board, options.budget)
    if total > MAX_SHARE:
        misses.append(Miss(limit="share of GPU time", wanted=MAX_SHARE, got=total))
    if limit is not None and (memory is None or memory > limit):
        misses.append(Miss(limit="memory_mib", wanted=limit, got=memory))
    if options.budget.watts is not None and (power is None or power > options.budget.watts):
        misses.append(Miss(limit="watts", wanted=options.budget.watts, got=power))
    measured = all(share.choice.status == "measured" for share in shares)
    return BoardPlan(
        target=str(target),
        mode=mode.label,
        models=tuple(shares),
        share=total,
        power_w=power,
        memory_mib=memory,
        misses=tuple(misses),
        status="measured" if measured else "predicted",
    )


def _power(shares: Sequence[ModelShare], *, idle_w: float) -> float | None:
    """Idle power, and what each model adds while it runs; None when one of them is unknown."""
    power = idle_w
    for share in shares:
        if share.choice.power_w is None:
            return None
        power += min(share.share, 1.0) * max(0.0, share.choice.power_w - idle_w)
    return power
