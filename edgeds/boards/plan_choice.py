"""One choice of a plan: its figures predicted, corrected by this board's measurements, or measured."""

from __future__ import annotations

from dataclasses import replace

from edgeds.boards.coefficients import Table
from edgeds.boards.cost_file import ModelWork
from edgeds.boards.plan_spec import BoardScale, Candidate, Measured, PlanChoice, PlanOptions
from edgeds.boards.predictor import Prediction, predict, resize_work
from edgeds.boards.spec import BoardSpec, PowerMode
from edgeds.errors import SpecError
from edgeds.specs import Resolution


def predict_candidate(
    candidate: Candidate, work: ModelWork, *, board: BoardSpec, mode: PowerMode, batch: int, table: Table
) -> Prediction:
    """Figures of a candidate on its device; of a language model at its context."""
    if candidate.context is None:
        return predict(
            work, board=board, mode=mode, precision=candidate.precision, batch=batch, table=table,
            device=candidate.device,
        )  # fmt: skip
    from edgeds.boards.decoder import predict_llm

    return predict_llm(
        work, board=board, mode=mode, precision=candidate.precision, prompt=1, context=candidate.context, batch=batch,
        table=table,
    ).decode  # fmt: skip


def resize_to(work: ModelWork, size: Resolution) -> ModelWork:
    """Costs at another image size; every image input (rank 4) gets it. Raises SpecError without one."""
    shapes = {
        name: (*shape[:2], size.height_px, size.width_px) for name, shape in work.inputs.items() if len(shape) == 4
    }
    if not shapes:
        raise SpecError(f"--size {size}: the model has no image input (inputs: {', '.join(work.inputs) or 'none'})")
    return resize_work(work, shapes)


def own_size(work: ModelWork) -> str | None:
    """The size of a model's one image input as the costs were counted; None when there is not one."""
    images = [shape for shape in work.inputs.values() if len(shape) == 4]
    return str(Resolution(images[0][2], images[0][3])) if len(images) == 1 else None


def waiting_ms(batch: int, *, rate_fps: float | None, latency_ms: float) -> float:
    """How long the first item of a batch waits for the last one: at the rate asked for, else at the device's own."""
    rate = rate_fps if rate_fps else batch / latency_ms * 1e3
    return (batch - 1) / rate * 1e3


def predicted_choice(
    candidate: Candidate, found: Prediction, *, mode: PowerMode, size: str | None, options: PlanOptions
) -> PlanChoice:
    """The choice that a prediction makes, with the waiting time at the rate asked for."""
    wait = waiting_ms(found.batch, rate_fps=options.budget.total_fps, latency_ms=found.latency_ms)
    return PlanChoice(
        candidate=candidate.name,
        mode=mode.label,
        precision=candidate.precision,
        batch=found.batch,
        size=size,
        latency_ms=found.latency_ms,
        latency_low_ms=found.latency_low_ms,
        latency_high_ms=found.latency_high_ms,
        response_ms=found.latency_ms + wait,
        fps=found.fps,
        power_w=found.power_w,
        energy_mj=found.energy_mj / found.batch,
        memory_mib=found.memory_mib,
        accuracy=candidate.accuracy,
        limited_by=found.limited_by,
        status="predicted",
        device=candidate.device,
        memory=found.memory,
        notes=(*found.notes, *([candidate.note] if candidate.note else [])),
    )


def scaled_choice(choice: PlanChoice, scale: BoardScale, *, options: PlanOptions) -> PlanChoice:
    """A prediction corrected by what other ways to run this model showed on this board. It stays a prediction."""
    latency = choice.latency_ms * scale.latency
    power = choice.power_w * (scale.power or 1.0) if choice.power_w is not None else None
    return replace(
        choice,
        latency_ms=latency,
        latency_low_ms=latency / scale.spread,
        latency_high_ms=latency * scale.spread,
        response_ms=latency + waiting_ms(choice.batch, rate_fps=options.budget.total_fps, latency_ms=latency),
        fps=choice.batch / latency * 1e3,
        power_w=power,
        energy_mj=None if power is None else power * latency / choice.batch,
        notes=(*choice.notes, f"scaled by {scale.rows} measurements on this board"),
    )


def measured_choice(choice: PlanChoice, row: Measured, *, options: PlanOptions) -> PlanChoice:
    """The choice with what a device showed. Power that was not measured is unknown: never a prediction among them."""
    wait = waiting_ms(row.batch, rate_fps=options.budget.total_fps, latency_ms=row.latency_ms)
    note = f"measured on {row.device or row.board}" + (f", {row.date}" if row.date else "")
    return replace(
        choice,
        latency_ms=row.latency_ms,
        latency_low_ms=row.latency_ms,
        latency_high_ms=row.latency_ms,
        response_ms=row.latency_ms + wait,
        fps=row.batch / row.latency_ms * 1e3,
        power_w=row.power_w,
        energy_mj=None if row.power_w is None else row.power_w * row.latency_ms / row.batch,
        memory_mib=choice.memory_mib if row.memory_mib is None else row.memory_mib,
        status="measured",
        notes=(note,),
    )


def choice_at_rate(choice: PlanChoice, *, idle_w: float, options: PlanOptions) -> PlanChoice:
    """Add mean power at the rate asked for: idle power, and the rest for the share of time that the device works."""
    rate = options.budget.total_fps
    if rate is None:
        return choice
    if choice.power_w is None:
        return replace(choice, rate_fps=rate)
    busy = min(1.0, rate / choice.fps)
    idle = min(idle_w, choice.power_w)
    return replace(choice, rate_fps=rate, mean_power_w=idle + busy * (choice.power_w - idle))
