"""The monitor's screen: plain text within the given width, drawn again in place."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from edgeds.power.sample import PowerSample
from edgeds.power.trace import PowerSummary

NAME_WIDTH = 11
BAR_WIDTH = 20
HOME_AND_CLEAR = "\x1b[H"
CLEAR_LINE_END = "\x1b[K"
CLEAR_BELOW = "\x1b[J"


def screen_lines(
    sample: PowerSample,
    summary: PowerSummary,
    *,
    title: str,
    budget_w: float | None = None,
    width: int = 80,
    extra: Sequence[tuple[str, str]] = (),
) -> list[str]:
    """The screen for one sample. Unknown values are ``?``; every line fits ``width``. ``extra`` rows come last."""
    width = max(width, 40)
    total = sample.total_mw / 1000 if sample.total_mw is not None else None
    over = budget_w is not None and total is not None and total > budget_w
    budget = f", mode's number {budget_w:g} W{' EXCEEDED' if over else ''}" if budget_w is not None else ""
    energy = f"{summary.energy_j:.1f} J" if summary.energy_j is not None else "?"
    rows: list[tuple[str, str]] = [
        ("total", f"{_watts(total)}  mean {_watts(summary.mean_w)}  max {_watts(summary.peak_w)}  {energy}{budget}"),
        ("rails", "  ".join(f"{name} {mw / 1000:.2f} W" for name, mw in sample.rails_mw.items()) or "?"),
        ("GPU", f"{_bar(sample.gpu_load_pct)}  {_mhz(sample.gpu_mhz)}"),
        ("memory bus", f"{_bar(sample.emc_load_pct)}  {_mhz(sample.emc_mhz)}"),
        ("CPU", f"{_bar(sample.cpu_load_pct)}  {_mhz(sample.cpu_mhz)}  {_number(sample.cpu_online)} online"),
        ("RAM", _ram(sample)),
        ("temp C", "  ".join(f"{zone} {value:.1f}" for zone, value in sample.temps_c.items()) or "?"),
        ("fan", f"{_number(sample.fan_pct)} %  {_number(sample.fan_rpm)} rpm"),
        ("throttling", "?" if sample.throttle is None else ", ".join(sample.throttle) or "none now"),
        ("over-curr.", _over_current(sample, summary)),
        *extra,
    ]
    lines = [_cut(f"edgeds monitor  {title}  {sample.t_s:.0f} s", width), _cut(f"sensor: {summary.source}", width), ""]
    for name, text in rows:
        wrapped = textwrap.wrap(text, width - NAME_WIDTH) or [""]
        lines.append(_cut(f"{name:<{NAME_WIDTH}}{wrapped[0]}", width))
        lines += [_cut(" " * NAME_WIDTH + more, width) for more in wrapped[1:4]]
    seen = f"figures over {summary.duration_s:.0f} s: {summary.samples} samples, {summary.unknown} without total, "
    seen += f"{summary.gaps} gaps"
    lines += ["", _cut(f"{seen}; Ctrl-C ends", width)]
    return lines


def redraw(lines: Sequence[str], *, height: int = 24) -> str:
    """The text that draws ``lines`` over what the terminal showed before, cut to its height."""
    kept = lines[: max(1, height - 1)]
    return HOME_AND_CLEAR + "".join(f"{line}{CLEAR_LINE_END}\n" for line in kept) + CLEAR_BELOW


def table_head() -> str:
    """The header of the one-line form, for pipes and files."""
    return f"{'T S':>8} {'TOTAL W':>8} {'GPU %':>6} {'GPU MHZ':>8} {'EMC MHZ':>8} {'CPU %':>6} {'TEMP C':>7}  RAILS W"


def table_row(sample: PowerSample) -> str:
    """One sample on one line; ``?`` is unknown."""
    total = "?" if sample.total_mw is None else f"{sample.total_mw / 1000:.2f}"
    temp = "?" if sample.temp_c is None else f"{sample.temp_c:.1f}"
    rails = " ".join(f"{name}={mw / 1000:.2f}" for name, mw in sample.rails_mw.items())
    return (
        f"{sample.t_s:8.1f} {total:>8} {_number(sample.gpu_load_pct):>6} {_number(sample.gpu_mhz):>8} "
        f"{_number(sample.emc_mhz):>8} {_number(sample.cpu_load_pct):>6} {temp:>7}  {rails}"
    ).rstrip()


def summary_line(summary: PowerSummary) -> str:
    """A whole measurement in one sentence."""
    if summary.mean_w is None or summary.energy_j is None:
        return f"power unknown over {summary.samples} samples ({summary.source})"
    hottest = f", up to {summary.temp_max_c:.1f} C" if summary.temp_max_c is not None else ""
    return (
        f"mean {summary.mean_w:.2f} W, max {summary.peak_w:.2f} W, {summary.energy_j:.1f} J over "
        f"{summary.covered_s:.1f} s of {summary.duration_s:.1f} s ({summary.gaps} gaps){hottest}; {summary.source}"
    )


def _over_current(sample: PowerSample, summary: PowerSummary) -> str:
    if sample.oc_events is None:
        return "?"
    return ", ".join(f"{name} +{count}" for name, count in summary.oc_events.items()) or "no event since the start"


def _ram(sample: PowerSample) -> str:
    if sample.ram_used_mib is None or not sample.ram_total_mib:
        return "?"
    share = sample.ram_used_mib / sample.ram_total_mib * 100
    return f"{_bar(share)}  {sample.ram_used_mib / 1024:.1f} of {sample.ram_total_mib / 1024:.1f} GiB"


def _bar(percent: float | None) -> str:
    if percent is None:
        return f"[{'?' * BAR_WIDTH}]     ?"
    filled = round(min(max(percent, 0.0), 100.0) / 100 * BAR_WIDTH)
    return f"[{'#' * filled}{'-' * (BAR_WIDTH - filled)}] {percent:4.0f}%"


def _watts(value: float | None) -> str:
    return "? W" if value is None else f"{value:.2f} W"


def _mhz(value: float | None) -> str:
    return "? MHz" if value is None else f"{value:.0f} MHz"


def _number(value: float | None) -> str:
    return "?" if value is None else f"{value:g}"


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"
