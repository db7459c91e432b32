"""Choose power mode, precision, batch and size for a model on a board, under limits. Pure functions of their arguments.

Every combination of mode, candidate, size and batch becomes a choice with figures: measured on this board where there
are such, predicted otherwise, and each says which. A limit on something unknown is not met.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from edgeds.boards.coefficients import Table, load_table
from edgeds.boards.pareto import pareto_front
from edgeds.boards.plan_choice import (
    choice_at_rate,
    measured_choice,
    own_size,
    predict_candidate,
    predicted_choice,
    resize_to,
    scaled_choice,
)
from edgeds.boards.plan_spec import Candidate, Miss, Objective, PlanChoice, PlanOptions, PlanResult
from edgeds.boards.predictor import PRECISIONS, idle_power, machine_of
from edgeds.boards.spec import BoardSpec, PowerMode, Target
from edgeds.errors import SpecError
from edgeds.specs import Budget, Resolution

NEAREST = 3
LIVE_WAIT_MS = 100.0
"""Without a latency limit, frames of a live stream (a rate was given) wait at most so long for a batch to fill."""

MEMORY_SHARE = 0.7
"""Of the memory that Linux sees, a model may take so much: the rest is for the application and page cache."""


def plan_model(
    candidates: Sequence[Candidate], *, target: Target, options: PlanOptions, table: Table | None = None
) -> PlanResult:
    """The best way to run one of ``candidates`` on ``target`` within the budget, and what else would do.

    Raises SpecError when there is nothing to choose from: no candidates, no mode whose facts are known, bad batches.
    """
    _check(candidates, options)
    table = table or load_table()
    modes, reasons = usable_modes(target, options)
    candidates, left_out = _placeable(candidates, board=target.board, modes=modes, table=table)
    reasons += left_out
    choices = [
        choice
        for mode in modes
        for candidate in candidates
        for choice in each_choice(candidate, board=target.board, mode=mode, options=options, table=table)
    ]
    fit = sorted((one for one in choices if not one.misses), key=lambda one: rank(one, options.objective))
    if fit:
        front = pareto_front(fit, key=_pareto_key)
        plan, rest = fit[0], tuple(one for one in front if one is not fit[0])
        reasons += _why(plan, fit, choices, modes=modes, options=options)
        nearest: tuple[PlanChoice, ...] = ()
    else:
        plan, rest = None, ()
        nearest = tuple(
            sorted(choices, key=lambda one: (sum(miss.shortfall for miss in one.misses), one.batch))[:NEAREST]
        )
        reasons += _why_none(nearest, candidates, target=target, options=options, table=table)
    return PlanResult(
        target=str(target),
        objective=options.objective,
        feasible=plan is not None,
        plan=plan,
        alternatives=rest,
        nearest=nearest,
        reasons=tuple(reasons),
        tried=len(choices),
    )


def usable_modes(target: Target, options: PlanOptions) -> tuple[list[PowerMode], list[str]]:
    """The modes to try and, for those left out, why. Raises SpecError when none is left."""
    board = target.board
    if target.mode is not None:
        modes = [target.mode]
    elif options.modes is None:
        modes = list(board.modes)
    else:
        from edgeds.boards.targets import find_mode

        modes = []
        for text in options.modes:
            mode = find_mode(text, board.modes)
            if mode is None:
                known = ", ".join(one.label for one in board.modes) or "none that is known"
                raise SpecError(f"mode {text!r}: {board.name} has {known}")
            modes.append(mode)
    usable, reasons = [], []
    for mode in modes:
        try:
            machine_of(board, mode)
        except SpecError as error:
            reasons.append(f"{mode.label} left out: {str(error).split('; add')[0]}")
        else:
            usable.append(mode)
    if not usable:
        why = "; ".join(reasons) or f"no power mode of {board.name} is known; describe it in a boards file"
        raise SpecError(f"target {target}: nothing can be planned: {why} (docs/boards.md)")
    return usable, reasons


def each_choice(
    candidate: Candidate, *, board: BoardSpec, mode: PowerMode, options: PlanOptions, table: Table
) -> Iterator[PlanChoice]:
    """All sizes and batches of one candidate in one mode, each with the limits that it misses."""
    idle_w = idle_power(machine_of(board, mode), table.power)
    for size in options.sizes or (None,):
        work = candidate.work if size is None else resize_to(candidate.work, size)
        for batch in options.batches:
            found = predict_candidate(candidate, work, board=board, mode=mode, batch=batch, table=table)
            size_text = str(size) if size is not None else own_size(candidate.work)
            choice = predicted_choice(candidate, found, mode=mode, size=size_text, options=options)
            if candidate.scale is not None and candidate.scale.board == board.name:
                choice = scaled_choice(choice, candidate.scale, options=options)
            for row in candidate.measured:
                if row.is_of(choice, board=board.name):
                    choice = measured_choice(choice, row, options=options)
            choice = choice_at_rate(choice, idle_w=idle_w, options=options)
            yield replace(choice, misses=tuple(find_misses(choice, board=board, options=options)))


def find_misses(choice: PlanChoice, *, board: BoardSpec, options: PlanOptions) -> Iterator[Miss]:
    """The limits that a choice does not meet. What is unknown meets no limit."""
    budget = options.budget
    latency = {"mean": choice.latency_ms, "high": choice.latency_high_ms, "low": choice.latency_low_ms}[options.margin]
    wait = choice.waiting_ms
    unlimited = budget.latency_ms is None and budget.latency_p99_ms is None
    fps = choice.batch / latency * 1e3
    at_most = (
        ("watts", budget.watts, choice.power_w),
        ("latency_ms", budget.latency_ms, latency + wait),
        ("latency_p99_ms", budget.latency_p99_ms, choice.latency_high_ms + wait),
        ("waiting_ms", LIVE_WAIT_MS if budget.total_fps and unlimited else None, wait),
        ("memory_mib", memory_limit(board, budget), choice.memory_mib),
        ("energy_mj", budget.energy_mj, choice.energy_mj),
    )
    at_least = (("fps", budget.total_fps, fps), ("accuracy", budget.min_accuracy, choice.accuracy))
    for limit, wanted, got in at_most:
        if wanted is not None and (got is None or got > wanted):
            yield Miss(limit=limit, wanted=wanted, got=got)
    for limit, wanted, got in at_least:
        if wanted is not None and (got is None or got < wanted):
            yield Miss(limit=limit, wanted=wanted, got=got)


def memory_limit(board: BoardSpec, budget: Budget) -> float | None:
    """MiB that a plan may take: the budget's, else a share of what the board has. None when nobody states that."""
    if budget.memory_mib is not None:
        return budget.memory_mib
    if board.usable_memory_mib is not None:
        return board.usable_memory_mib * MEMORY_SHARE
    return None if board.memory_gb is None else board.memory_gb * 1024 * MEMORY_SHARE


def rank(choice: PlanChoice, objective: Objective) -> tuple[float, float, float, int]:
    """Sorts the best first; ties go to less power, then less latency, then the smaller batch. Unknown comes last."""
    worst = float("inf")
    value = {
        "fps_per_watt": -choice.fps_per_watt if choice.fps_per_watt is not None else worst,
        "fps": -choice.fps,
        "latency": choice.response_ms,
        "energy": choice.energy_mj if choice.energy_mj is not None else worst,
        "accuracy": -choice.accuracy if choice.accuracy is not None else worst,
    }[objective]
    return value, choice.power_w if choice.power_w is not None else worst, choice.response_ms, choice.batch


def _check(candidates: Sequence[Candidate], options: PlanOptions) -> None:
    if not candidates:
        raise SpecError("nothing to plan: no candidate was given")
    for candidate in candidates:
        if candidate.precision not in PRECISIONS:
            raise SpecError(f"precision {candidate.precision!r} is not known; choose from {', '.join(PRECISIONS)}")
    if not options.batches or any(batch < 1 for batch in options.batches):
        raise SpecError(f"batches {options.batches}: give numbers of at least 1")


def _placeable(
    candidates: Sequence[Candidate], *, board: BoardSpec, modes: Sequence[PowerMode], table: Table
) -> tuple[list[Candidate], list[str]]:
    """The candidates that can run in some mode, and why others cannot: no DLA, none of its precisions, unknown facts.

    Raises SpecError when none is left.
    """
    kept, reasons = [], []
    for candidate in candidates:
        try:
            if candidate.device == "dla":
                for mode in modes:
                    predict_candidate(candidate, candidate.work, board=board, mode=mode, batch=1, table=table)
        except SpecError as error:
            reasons.append(f"{candidate.name} {candidate.precision} on DLA left out: {error}")
        else:
            kept.append(candidate)
    if not kept:
        raise SpecError(f"nothing can be planned: {'; '.join(reasons)}")
    return kept, reasons


def _pareto_key(choice: PlanChoice) -> tuple[float, ...]:
    """Smaller is better in each: more frames, faster response, fewer watts, higher accuracy."""
    worst = float("inf")
    power = choice.mean_power_w if choice.mean_power_w is not None else choice.power_w
    power = worst if power is None else power
    accuracy = worst if choice.accuracy is None else -choice.accuracy
    return -choice.fps, choice.response_ms, power, accuracy


def _why(
    plan: PlanChoice,
    fit: Sequence[PlanChoice],
    choices: Sequence[PlanChoice],
    *,
    modes: Sequence[PowerMode],
    options: PlanOptions,
) -> list[str]:
    what = {"fps_per_watt": "most frames per joule", "fps": "most frames per second", "latency": "fastest response"}
    best = {**what, "energy": "least energy per frame", "accuracy": "highest accuracy"}[options.objective]
    reasons = [f"{len(fit)} of {len(choices)} ways meet all limits; chosen for {best}: {plan}"]
    cap, watts = next((mode.watts for mode in modes if mode.label == plan.mode), None), options.budget.watts
    if watts is not None and (cap is None or cap > watts):
        named = f"{cap:g} W" if cap is not None else "no limit"
        reasons.append(
            f"mode {plan.mode} allows {named}: this model stays below {watts:g} W by prediction, other work may not"
        )
    if plan.mean_power_w is not None and plan.rate_fps is not None:
        reasons.append(f"about {plan.mean_power_w:.3g} W on average at {plan.rate_fps:g} FPS (estimated)")
    refused: dict[str, int] = {}
    for choice in choices:
        for miss in choice.misses:
            refused[miss.limit] = refused.get(miss.limit, 0) + 1
    assumed = {"waiting_ms": f" (over {LIVE_WAIT_MS:g} ms for a batch to fill; --latency-ms sets a limit instead)"}
    reasons += [f"{count} were refused by {limit}{assumed.get(limit, '')}" for limit, count in sorted(refused.items())]
    if plan.status == "predicted":
        band = f"{plan.latency_low_ms:.3g} to {plan.latency_high_ms:.3g} ms"
        reasons.append(f"predicted, not measured: latency lies within {band} for about 80 % of known cases")
    return reasons


def _why_none(
    nearest: Sequence[PlanChoice],
    candidates: Sequence[Candidate],
    *,
    target: Target,
    options: PlanOptions,
    table: Table,
) -> list[str]:
    reasons = [f"nothing meets all limits; {one}; misses {'; '.join(map(str, one.misses))}" for one in nearest[:1]]
    smaller = _smaller_size(candidates, target=target, options=options, table=table)
    return [*reasons, *([smaller] if smaller else [])]


def _smaller_size(candidates: Sequence[Candidate], *, target: Target, options: PlanOptions, table: Table) -> str | None:
    """Whether a smaller image would do; what accuracy it costs has to be measured."""
    if options.sizes or options.budget.min_accuracy is not None:
        return None
    own = own_size(candidates[0].work)
    if own is None:
        return None
    now = Resolution.parse(own)
    for share in (0.8, 0.65, 0.5):
        sides = (max(32, round(side * share / 32) * 32) for side in (now.height_px, now.width_px))
        size = Resolution(*sides)
        tried = replace(options, sizes=(size,))
        for mode in usable_modes(target, options)[0]:
            for candidate in candidates:
                for choice in each_choice(candidate, board=target.board, mode=mode, options=tried, table=table):
                    if not choice.misses:
                        return f"at {size} it would fit: {choice}; measure the accuracy at that size"
    return None
