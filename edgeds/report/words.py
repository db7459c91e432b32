"""A report's summary in sentences: what came out, against which budget, and what is not known."""

from __future__ import annotations

import math
from collections.abc import Sequence

from edgeds.report.axes import number
from edgeds.report.record import LatencyFigures, RunRecord

MAX_COMPARED = 3
MAX_LIMITS_TOLD = 12
SAME = 0.005


def summarize_runs(runs: Sequence[RunRecord]) -> list[str]:
    """One paragraph for the first run, its budget and gaps, then one sentence for each of the next runs."""
    first = runs[0]
    lines = [headline(first), *budget_words(first), *gaps(first)]
    if len(runs) > 1:
        compared = [compare(first, run) for run in runs[1 : 1 + MAX_COMPARED]]
        lines += [text for text in compared if text]
        left = len(runs) - 1 - MAX_COMPARED
        if left > 0:
            lines.append(f"{left} more runs are in the table.")
        if len({run.status for run in runs}) > 1:
            lines.append("Measured and predicted figures stand side by side here; each is marked as what it is.")
    return lines


def headline(run: RunRecord) -> str:
    """``31.2 frames per second at 12.4 W on ... (measured, date)``, for people who read one sentence."""
    figures = []
    if run.fps is not None:
        figures.append(f"{number(run.fps)} frames per second")
    elif run.latency_ms is not None and run.latency_ms.typical_ms is not None:
        figures.append(f"{number(run.latency_ms.typical_ms)} ms per run")
    if run.power.mean_w is not None:
        figures.append(f"{number(run.power.mean_w)} W")
    what = " at ".join(figures) or "No speed and no power"
    form = ", ".join(part for part in (run.model, run.precision, f"batch {run.batch}" if run.batch else None) if part)
    sentence = f"{what} on {run.device.label}{f' with {form}' if form else ''}"
    date = f" on {run.date[:10]}" if run.date else ""
    mark = f"predicted{date}, not measured" if run.status == "predicted" else f"measured{date}"
    text = f"{sentence} ({mark})."
    text += _latency_words(run.latency_ms)
    if run.energy_mj is not None:
        text += f" Energy: {number(run.energy_mj)} mJ per frame."
    if run.interrupted:
        text += " The run was interrupted: the figures cover the time until then."
    return text


def _latency_words(latency: LatencyFigures | None) -> str:
    if latency is None:
        return ""
    if latency.p99_ms is not None:
        middle = f", half within {number(latency.p50_ms)} ms" if latency.p50_ms is not None else ""
        return f" 99 of 100 requests are answered within {number(latency.p99_ms)} ms{middle}."
    if latency.mean_ms is None:
        return ""
    band = ""
    if latency.low_ms is not None and latency.high_ms is not None:
        band = f", probably between {number(latency.low_ms)} and {number(latency.high_ms)} ms"
    return f" A run takes {number(latency.mean_ms)} ms{band}."


def budget_words(run: RunRecord) -> list[str]:
    """One sentence about each limit: met by how much, missed by how much, or unknown."""
    budget, latency = run.budget, run.latency_ms or LatencyFigures()
    verb = "would be" if run.status == "predicted" else "is"
    typical = latency.typical_ms
    limits = [
        ("power", run.power.mean_w, budget.watts, "W", False),
        ("speed", run.fps, budget.total_fps, "frames per second", True),
        ("latency", typical, budget.latency_ms, "ms", False),
        ("latency of 99 in 100", latency.p99_ms, budget.latency_p99_ms, "ms", False),
        ("memory", run.memory_mib, budget.memory_mib, "MiB", False),
        ("energy per frame", run.energy_mj, budget.energy_mj, "mJ", False),
    ]
    lines = []
    for name, got, limit, unit, wants_more in limits:
        if limit is None:
            continue
        kind = "goal" if wants_more else "budget"
        if got is None:
            lines.append(f"The {name} {kind} of {number(limit)} {unit} cannot be checked: the figure is unknown.")
            continue
        gap = abs(got - limit)
        side = "above" if got > limit else "under"
        is_met = got >= limit if wants_more else got <= limit
        word = "meets" if is_met else "MISSES"
        distance = "exactly at" if gap < 1e-9 * max(abs(limit), 1) else f"{number(gap)} {unit} {side}"
        lines.append(f"The {name} {verb} {distance} the {kind} of {number(limit)} {unit}: it {word} it.")
    if budget.watts is None and run.device.mode_watts is not None and run.power.mean_w is not None:
        gap = run.device.mode_watts - run.power.mean_w
        side = "under" if gap >= 0 else "above"
        named = f"the {number(run.device.mode_watts)} W that the power mode is named after"
        lines.append(f"That is {number(abs(gap))} W {side} {named}.")
    return lines


def gaps(run: RunRecord) -> list[str]:
    """What is not known, and what held the device back."""
    lines = []
    if run.power.mean_w is None:
        lines.append(f"Power: unavailable, {run.power.unavailable or 'no reason is given'}.")
    if run.throttle_events:
        lines.append(f"The device was held back: {events_words(run)}.")
    return lines


def events_words(run: RunRecord) -> str:
    """Throttling and over-current events in words."""
    if run.throttle_events is None:
        return "unavailable, nothing on this device tells"
    if not run.throttle_events:
        return "none seen"
    told = [
        event.what if event.count is None else f"{event.what} ({event.count} times)"
        for event in run.throttle_events[:MAX_LIMITS_TOLD]
    ]
    left = len(run.throttle_events) - MAX_LIMITS_TOLD
    return ", ".join(told) + (f" and {left} more" if left > 0 else "")


def compare(first: RunRecord, other: RunRecord) -> str:
    """The other run by ratios to the first; nothing where they share no figure."""
    ratios = {
        "frames per second": ratio(other.fps, first.fps),
        "power": ratio(other.power.mean_w, first.power.mean_w),
        "energy per frame": ratio(other.energy_mj, first.energy_mj),
    }
    parts = [
        f"the same {name}" if abs(times - 1) < SAME else f"{number(times)} times the {name}"
        for name, times in ratios.items()
        if times is not None
    ]
    if not parts:
        return ""
    mark = "" if first.status == other.status else f" ({other.status} against {first.status})"
    return f"{other.title} has {_listed(parts)} of {first.title}{mark}."


def ratio(value: float | None, base: float | None) -> float | None:
    """``value`` over ``base``; None where one is unknown or the base is 0."""
    if value is None or not base:
        return None
    result = value / base
    return result if math.isfinite(result) else None


def _listed(parts: Sequence[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
