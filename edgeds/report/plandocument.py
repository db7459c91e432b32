"""Records from what ``edgeds plan --json`` prints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from edgeds.errors import SpecError
from edgeds.report.fields import Document, list_at, number_at, object_at, status_at, text_at, texts_at, whole_at
from edgeds.report.record import Device, LatencyFigures, PowerFigures, RunRecord
from edgeds.specs import Budget, from_json

MAX_CHOICES = 8
"""Of a plan: the chosen one and this many alternatives."""
NOT_TOLD = "the file does not say"


def from_plan(data: Document, *, where: str) -> tuple[RunRecord, ...]:
    """The JSON of ``edgeds plan``: the plan and its alternatives, or the nearest where nothing fits."""
    budget = from_json(Budget, object_at(data, "budget", where=where), where=f"{where}.budget")
    board = (text_at(data, "target", where=where) or "").partition("@")[0] or None
    reasons = texts_at(data, "reasons", where=where)
    rows: list[tuple[str, str, Document]] = []
    if data.get("plan") is not None:
        rows.append(("plan", f"{where}.plan", object_at(data, "plan", where=where)))
    for key in ("alternatives", "nearest"):
        for index, row in enumerate(list_at(data, key, where=where)[:MAX_CHOICES]):
            place = f"{where}.{key}[{index}]"
            if not isinstance(row, Mapping):
                raise SpecError(f"{place}: expected an object, got {row!r:.80}")
            rows.append(("alternative" if key == "alternatives" else "does not fit", place, row))
    if not rows:
        raise SpecError(
            f"{where}: the plan holds no choice to report: {reasons[0] if reasons else 'no reason is given'}"
        )
    records = [_choice(row, where=place, role=role, board=board, budget=budget) for role, place, row in rows]
    unique = {_choice_key(record): record for record in reversed(records)}  # the plan is among its alternatives too
    found = list(reversed(unique.values()))
    return (replace(found[0], notes=(*reasons, *found[0].notes)), *found[1:])


def _choice_key(record: RunRecord) -> tuple[Any, ...]:
    return (record.model, record.device.mode, record.precision, record.batch, record.sizes)


def _choice(row: Document, *, where: str, role: str, board: str | None, budget: Budget) -> RunRecord:
    mode, precision = text_at(row, "mode", where=where), text_at(row, "precision", where=where)
    batch = whole_at(row, "batch", where=where)
    sizes = texts_at(row, "sizes", where=where)
    status = status_at(row, where=where, default="predicted")
    accuracy = row.get("accuracy")
    misses = [item.get("text") for item in list_at(row, "misses", where=where) if isinstance(item, Mapping)]
    candidate = text_at(row, "candidate", where=where)
    what = ", ".join(str(part) for part in (mode, candidate, *sizes, f"batch {batch}") if part)
    return RunRecord(
        status=status,
        title=f"{role} ({what})",
        origin="plan",
        device=Device(board=board, mode=mode),
        model=candidate,
        precision=precision,
        batch=batch,
        sizes=sizes,
        fps=number_at(row, "fps", where=where),
        latency_ms=predicted_latency(row, where=where),
        power=power_figure(number_at(row, "power_w", where=where), status),
        energy_mj=number_at(row, "energy_mj", where=where),
        memory_mib=number_at(row, "memory_mib", where=where),
        limited_by=text_at(row, "limited_by", where=where),
        accuracy={} if accuracy is None else {"points": accuracy},
        budget=budget,
        notes=(*texts_at(row, "notes", where=where), *(f"misses {text}" for text in misses if text)),
    )


def predicted_latency(data: Document, *, where: str) -> LatencyFigures:
    """A predicted time with its band."""
    low, high = number_at(data, "latency_low_ms", where=where), number_at(data, "latency_high_ms", where=where)
    return LatencyFigures(mean_ms=number_at(data, "latency_ms", where=where), low_ms=low, high_ms=high)


def power_figure(mean_w: float | None, source: str | None) -> PowerFigures:
    """A mean and its source; where there is no mean, ``source`` may say why."""
    if mean_w is not None:
        return PowerFigures(mean_w=mean_w, source=source)
    reason = (source or NOT_TOLD).removeprefix("unavailable").lstrip(": ")
    return PowerFigures(unavailable=reason if reason not in ("", "predicted", "measured") else NOT_TOLD)
