"""The figures of a report, from records: each gives a drawing, or the sentence that says why there is none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from edgeds.boards.pareto import pareto_front
from edgeds.report.axes import number
from edgeds.report.charts import Axis, Bar, Rule, Series, bar_chart, xy_chart
from edgeds.report.drawing import SERIES, Drawing
from edgeds.report.record import LayerTime, RunRecord, Status

MAX_LINES = SERIES
"""Runs drawn into one figure; the tables have all of them."""
TOP_LAYERS = 20
MAX_DOTS = 400


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A drawing with its caption, or words alone where there is nothing to draw."""

    caption: str
    drawing: Drawing | None = None


def latency_cdf(runs: Sequence[RunRecord]) -> Figure:
    """Share of requests answered within a time, of runs that kept their latencies."""
    known = [
        (index, run, sorted(run.latency_ms.samples))
        for index, run in enumerate(runs)
        if run.latency_ms is not None and run.latency_ms.samples
    ]
    if not known:
        return Figure(caption="Latency distribution: unavailable, no run kept single latencies.")
    series = [
        Series(
            name=run.title,
            points=[(value, (rank + 1) / len(values) * 100) for rank, value in enumerate(values)],
            colour=colour(index),
            status=run.status,
        )
        for index, run, values in known[:MAX_LINES]
    ]
    drawing = xy_chart(
        series,
        x=Axis(label="latency, ms", include=(0.0,)),
        y=Axis(label="share answered, %", include=(100.0,)),
        label="Share of requests answered within a time",
    )
    return Figure(caption=f"Share of requests answered within a time{_left_out(known)}.", drawing=drawing)


def power_trace(runs: Sequence[RunRecord]) -> Figure:
    """Watts over time with the budget, of runs that kept readings."""
    known = [(index, run) for index, run in enumerate(runs) if run.power.series]
    if not known:
        return Figure(caption="Power over time: unavailable, no run kept readings of a sensor.")
    series = [
        Series(name=run.title, points=run.power.series, colour=colour(index), status=run.status)
        for index, run in known[:MAX_LINES]
    ]
    drawing = xy_chart(
        series,
        x=Axis(label="time, s"),
        y=Axis(label="power of the module, W"),
        rules=power_rules([run for _, run in known]),
        label="Power over time",
    )
    return Figure(caption=f"Power over time{_left_out(known)}.", drawing=drawing)


def power_rules(runs: Sequence[RunRecord]) -> list[Rule]:
    """The budgets that runs state, else the watts in the name of their power modes; each value once."""
    budgets = {run.budget.watts for run in runs if run.budget.watts is not None}
    if budgets:
        return [Rule(value=watts, name=f"budget {watts:g} W") for watts in sorted(budgets)[:3]]
    modes = {(run.device.mode_watts, run.device.mode) for run in runs if run.device.mode_watts is not None}
    return [Rule(value=watts, name=f"mode {mode}") for watts, mode in sorted(modes, key=str)[:3] if watts is not None]


def latency_by_batch(runs: Sequence[RunRecord]) -> Figure:
    """Latency over the batch: rows that a run holds, and runs that differ in nothing but their batch."""
    lines: dict[tuple[str, str], dict[int, float]] = {}
    for run in runs:
        name = f"{run.model or run.title}, {run.precision or '?'}, {run.device.label}"
        for point in run.by_batch:
            size = f", {point.size}" if point.size else ""
            lines.setdefault((name + size, point.status), {})[point.batch] = point.latency_ms
        typical = run.latency_ms.typical_ms if run.latency_ms is not None else None
        if run.batch is not None and typical is not None:
            lines.setdefault((name, run.status), {}).setdefault(run.batch, typical)
    known = [(key, rows) for key, rows in lines.items() if len(rows) > 1]
    if not known:
        return Figure(caption="Latency by batch: unavailable, only one batch size was run.")
    series = [
        Series(
            name=name,
            points=sorted(rows.items()),
            colour=colour(index),
            status="predicted" if status == "predicted" else "measured",
            has_marks=True,
            hints=[f"batch {batch}: {number(ms)} ms" for batch, ms in sorted(rows.items())],
        )
        for index, ((name, status), rows) in enumerate(known[:MAX_LINES])
    ]
    drawing = xy_chart(series, x=Axis(label="batch"), y=Axis(label="latency (median), ms"), label="Latency by batch")
    return Figure(caption=f"Latency by batch{_left_out(known)}.", drawing=drawing)


def roofline(run: RunRecord, *, index: int = 0) -> Figure:
    """Operations per second of each layer over its operations per byte, under what the device can do."""
    dots = [layer for layer in run.layers if layer.flops and layer.bytes and layer.time_us > 0]
    if not dots:
        return Figure(caption=f"Roofline of {run.title}: unavailable, no layers with operations, bytes and times.")
    dots = sorted(dots, key=lambda layer: -layer.time_us)[:MAX_DOTS]
    xs = [(layer.flops or 0.0) / (layer.bytes or 1.0) for layer in dots]
    series = [
        Series(
            name="layers",
            points=[(x, _rate(layer)) for x, layer in zip(xs, dots, strict=True) if layer.status == status_word],
            colour=colour(index),
            status="predicted" if status_word == "predicted" else "measured",
            has_line=False,
            has_marks=True,
            hints=[_hint(layer) for layer in dots if layer.status == status_word],
        )
        for status_word in dict.fromkeys(layer.status for layer in dots)
    ]
    caption = f"Roofline of {run.title}: the {len(dots)} longest layers"
    if run.roof is not None and run.roof.bytes_per_s > 0 and run.roof.flops_per_s > 0:
        knee = run.roof.flops_per_s / run.roof.bytes_per_s
        left, right = min(*xs, knee) / 2, max(*xs, knee) * 2
        points = [(left, left * run.roof.bytes_per_s), (knee, run.roof.flops_per_s), (right, run.roof.flops_per_s)]
        name = f"peak of the device{f' ({run.roof.label})' if run.roof.label else ''}"
        series.append(Series(name=name, points=points, colour="faint", status="predicted"))
        caption += f"; left of {number(knee)} operations per byte the memory is the limit"
    else:
        caption += "; the peak of the device is not known"
    drawing = xy_chart(
        series,
        x=Axis(label="operations per byte", is_log=True),
        y=Axis(label="operations per second", is_log=True),
        label=f"Roofline of {run.title}",
    )
    return Figure(caption=f"{caption}.", drawing=drawing)


def layer_bars(run: RunRecord, *, index: int = 0) -> Figure:
    """The longest layers and the rest as one bar."""
    if not run.layers:
        return Figure(caption=f"Layers of {run.title}: unavailable, the run holds no times of layers.")
    ordered = sorted(run.layers, key=lambda layer: -layer.time_us)
    total = sum(layer.time_us for layer in ordered) or 1.0
    bars = [
        Bar(
            name=layer.name or layer.kind,
            value=layer.time_us,
            colour=colour(index),
            text=f"{number(layer.time_us)} µs {layer.time_us / total:.0%}",
            status=layer.status,
        )
        for layer in ordered[:TOP_LAYERS]
    ]
    rest = ordered[TOP_LAYERS:]
    if rest:
        time_us = sum(layer.time_us for layer in rest)
        text = f"{number(time_us)} µs {time_us / total:.0%}"
        bars.append(
            Bar(name=f"{len(rest)} other layers", value=time_us, colour="faint", text=text, status=rest[0].status)
        )
    words = " and ".join(sorted({layer.status for layer in ordered}))
    caption = f"Layers of {run.title}, {words}: {number(total / 1000)} ms in {len(ordered)} layers."
    return Figure(caption=caption, drawing=bar_chart(bars, label=f"Time of layers of {run.title}"))


def fps_over_watts(runs: Sequence[RunRecord]) -> Figure:
    """Frames per second over watts, and the line through the runs that no other one beats in both."""
    known = [(index, run) for index, run in enumerate(runs) if run.fps and run.power.mean_w]
    if len(known) < 2:
        words = "fewer than two runs with frames per second and power"
        return Figure(caption=f"Frames per second over watts: unavailable, {words}.")
    series = [
        Series(
            name=f"{index + 1} {run.title}",
            points=[(run.power.mean_w or 0.0, run.fps or 0.0)],
            colour=colour(index),
            status=run.status,
            has_line=False,
            has_marks=True,
            hints=[f"{run.title}: {number(run.fps or 0.0)} FPS at {number(run.power.mean_w or 0.0)} W"],
            tag=str(index + 1),
        )
        for index, run in known
    ]
    best = pareto_front([run for _, run in known], key=lambda run: (run.power.mean_w or 0.0, -(run.fps or 0.0)))
    front = sorted((run.power.mean_w or 0.0, run.fps or 0.0) for run in best)
    if len(front) > 1:
        statuses = {run.status for run in best}
        series.insert(0, Series(name="front", points=front, colour="faint", status=min(statuses, key=_caution)))
    drawing = xy_chart(
        series,
        x=Axis(label="power of the module, W"),
        y=Axis(label="frames per second"),
        label="Frames per second over watts",
        legend=False,
    )
    numbers = ", ".join(str(index + 1) for index, run in known if any(run is one for one in best))
    caption = f"Frames per second over watts; numbers as in the table. Beaten in both by no other run: {numbers}."
    return Figure(caption=caption, drawing=drawing)


def colour(index: int) -> str:
    """The colour role of run number ``index``."""
    return f"s{index % SERIES}"


def _caution(status: Status) -> bool:
    return status != "predicted"


def _rate(layer: LayerTime) -> float:
    return (layer.flops or 0.0) / layer.time_us * 1e6


def _hint(layer: LayerTime) -> str:
    return f"{layer.name} ({layer.kind}): {number(layer.time_us)} µs, {number(_rate(layer))} operations/s"


def _left_out(known: Sequence[object]) -> str:
    left = len(known) - MAX_LINES
    return f"; {left} more are not drawn" if left > 0 else ""
