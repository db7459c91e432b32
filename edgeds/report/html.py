"""The report page of one run or several: what a person reads, from records. See docs/report.md."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from edgeds.report import plots
from edgeds.report.axes import number
from edgeds.report.page import Chart, Section, Table, write_page
from edgeds.report.plots import Figure
from edgeds.report.record import RunRecord
from edgeds.report.stats import software_versions, utc_now
from edgeds.report.words import events_words, ratio, summarize_runs

UNKNOWN = "unknown"
MARKS = {"measured": "\u25cf\u00a0measured", "predicted": "\u25cb\u00a0predicted"}
LEGEND = (
    "\u25cf measured: read off a device while it ran. \u25cb predicted: computed from the model and the board, on no "
    "device. Charts draw measured figures as full lines and filled marks, predicted ones dashed and open."
)
COLUMNS = 4
"""Runs side by side in one table of facts."""
DETAILED = 6
"""Runs that get charts of their layers."""
ACCURACY_ROWS = 40


def write_report(out: Path, runs: Sequence[RunRecord], *, title: str) -> Path:
    """Write the page about ``runs`` (at least one; the first is what the others are compared with), atomically."""
    return write_page(
        out,
        title=title,
        summary=[*summarize_runs(runs), LEGEND],
        sections=[section for section in _sections(runs) if section is not None],
        facts={
            "written": utc_now(),
            "by": ", ".join(f"{name} {version}" for name, version in software_versions().items()),
        },
    )


def _sections(runs: Sequence[RunRecord]) -> list[Section | None]:
    return [
        _comparison(runs) if len(runs) > 1 else None,
        _about(runs),
        _with_figures("Speed", [plots.latency_cdf(runs), plots.latency_by_batch(runs)], tables=[_latency_table(runs)]),
        _with_figures("Power and heat", [plots.power_trace(runs)], tables=[_power_table(runs)]),
        _layers(runs),
        _accuracy(runs),
        _notes(runs),
    ]


def _with_figures(title: str, figures: Sequence[Figure], *, tables: Sequence[Table] = ()) -> Section:
    """Drawings become charts; what could not be drawn is said in words."""
    return Section(
        title=title,
        words=[figure.caption for figure in figures if figure.drawing is None],
        tables=tables,
        charts=[
            Chart(drawing=figure.drawing, caption=figure.caption) for figure in figures if figure.drawing is not None
        ],
    )


def _comparison(runs: Sequence[RunRecord]) -> Section:
    base = runs[0]
    rows = [
        [
            str(index + 1),
            run.title,
            MARKS[run.status],
            run.device.label,
            _figure(run.fps),
            _times(run.fps, base.fps),
            _figure(run.power.mean_w),
            _times(run.power.mean_w, base.power.mean_w),
            _figure(_per_watt(run)),
            _figure(run.energy_mj),
            _times(run.energy_mj, base.energy_mj),
        ]
        for index, run in enumerate(runs)
    ]
    columns = ["", "run", "status", "device", "FPS", "ratio", "W", "ratio", "FPS/W", "mJ/frame", "ratio"]
    table = Table(title="", columns=columns, rows=rows)
    words = [f"Ratios are to run 1, {base.title}. A ratio of a measured to a predicted figure compares unlike things."]
    section = _with_figures("Comparison", [plots.fps_over_watts(runs)], tables=[table])
    return Section(title=section.title, words=[*words, *section.words], tables=section.tables, charts=section.charts)


_FACTS: tuple[tuple[str, Callable[[RunRecord], Any]], ...] = (
    ("figures are", lambda run: MARKS[run.status]),
    ("read from", lambda run: run.origin),
    ("board", lambda run: run.device.board or run.device.name),
    ("power mode", lambda run: run.device.mode),
    ("GPU", lambda run: run.device.gpu),
    ("runs on", lambda run: run.device.backend),
    ("CPU threads", lambda run: run.device.threads),
    ("model", lambda run: run.model),
    ("precision", lambda run: run.precision),
    ("batch", lambda run: run.batch),
    ("resolutions", lambda run: ", ".join(run.sizes)),
    ("frames per second", lambda run: None if run.fps is None else number(run.fps)),
    ("memory, MiB", lambda run: None if run.memory_mib is None else number(run.memory_mib)),
    ("limited by", lambda run: run.limited_by),
    ("power from", lambda run: run.power.source or f"unavailable, {run.power.unavailable}"),
    ("throttling", events_words),
    ("date", lambda run: run.date),
    ("versions", lambda run: ", ".join(f"{name} {version}" for name, version in run.device.versions.items())),
)


def _about(runs: Sequence[RunRecord]) -> Section:
    tables = []
    for start in range(0, len(runs), COLUMNS):
        part = runs[start : start + COLUMNS]
        rows = []
        for name, read in _FACTS:
            values = [read(run) for run in part]
            rows.append([name, *(UNKNOWN if value in (None, "") else str(value) for value in values)])
        tables.append(Table(title="", columns=["", *(run.title for run in part)], rows=rows))
    return Section(title="What ran where" if len(runs) > 1 else "What ran", tables=tables)


def _latency_table(runs: Sequence[RunRecord]) -> Table:
    rows = []
    for run in runs:
        latency = run.latency_ms
        names = ("mean", "p50", "p95", "p99", "max", "low", "high")
        values = [None if latency is None else getattr(latency, f"{name}_ms") for name in names]
        rows.append([run.title, MARKS[run.status], *map(_figure, values)])
    columns = ["run", "status", "mean ms", "p50", "p95", "p99", "longest", "band from", "band to"]
    return Table(title="Latency", columns=columns, rows=rows)


def _power_table(runs: Sequence[RunRecord]) -> Table:
    rows = []
    for run in runs:
        power = run.power
        budget = run.budget.watts
        left = None if budget is None or power.mean_w is None else budget - power.mean_w
        values = (power.mean_w, power.peak_w, budget, left, power.energy_j, run.energy_mj, power.temp_max_c)
        rows.append([run.title, MARKS[run.status], *map(_figure, values)])
    columns = ["run", "status", "mean W", "peak W", "budget W", "left W", "energy J", "mJ/frame", "hottest °C"]
    return Table(title="Power of the module", columns=columns, rows=rows)


def _layers(runs: Sequence[RunRecord]) -> Section:
    known = [(index, run) for index, run in enumerate(runs) if run.layers]
    if not known:
        return Section(title="Layers", words=["Layers and roofline: unavailable, no run holds times of layers."])
    figures = []
    for index, run in known[:DETAILED]:
        figures += [plots.roofline(run, index=index), plots.layer_bars(run, index=index)]
    section = _with_figures("Layers", figures)
    left = len(known) - DETAILED
    words = [*section.words, *([f"Layers of {left} more runs are not drawn."] if left > 0 else [])]
    return Section(title=section.title, words=words, charts=section.charts)


def _accuracy(runs: Sequence[RunRecord]) -> Section:
    rows = [
        [run.title, str(name), _figure(value) if _is_number(value) else str(value)]
        for run in runs
        for name, value in run.accuracy.items()
        if isinstance(value, str) or _is_number(value)
    ]
    if not rows:
        return Section(title="Accuracy", words=["Accuracy: unavailable, no run holds a figure for it."])
    words = ["Accuracy is measured on labelled data, on whatever machine evaluated it."]
    if len(rows) > ACCURACY_ROWS:
        words.append(f"The first {ACCURACY_ROWS} of {len(rows)} figures.")
    table = Table(title="", columns=["run", "figure", "value"], rows=rows[:ACCURACY_ROWS])
    return Section(title="Accuracy", words=words, tables=[table])


def _notes(runs: Sequence[RunRecord]) -> Section | None:
    rows = [[run.title, note] for run in runs for note in run.notes]
    rows += [[run.title, "interrupted: the figures cover the time until then"] for run in runs if run.interrupted]
    return Section(title="Notes", tables=[Table(title="", columns=["run", "note"], rows=rows)]) if rows else None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _figure(value: float | None) -> str:
    return "-" if value is None else number(value)


def _times(value: float | None, base: float | None) -> str:
    found = ratio(value, base)
    return "-" if found is None else f"{number(found)}x"


def _per_watt(run: RunRecord) -> float | None:
    return ratio(run.fps, run.power.mean_w)
