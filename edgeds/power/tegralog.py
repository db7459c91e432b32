"""A recorded tegrastats log as samples with times."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import BinaryIO

from edgeds.power.sample import PowerSample
from edgeds.power.tegrastats import MAX_LINE, TegraLine, parse_line, to_sample
from edgeds.power.total import module_total

DEFAULT_INTERVAL_S = 1.0
"""tegrastats prints once a second unless told otherwise."""


@dataclass
class LogStats:
    """What a pass over a log met; grows while the samples are drawn. ``reason``: why the first total was unknown."""

    lines: int = 0
    parsed: int = 0
    without_total: int = 0
    reason: str | None = None
    skipped: list[int] = field(default_factory=list)


def read_log(
    stream: BinaryIO,
    *,
    total_rails: tuple[str, ...] | None = None,
    interval_s: float | None = None,
    stats: LogStats | None = None,
) -> Iterator[PowerSample]:
    """Samples of a log, one per line that is understood; others are counted in ``stats``.

    ``t_s`` counts from the first line: by ``interval_s`` when given, else by the time stamps (lines within one second
    are spread over it), else one second per line.
    """
    stats = stats if stats is not None else LogStats()
    for t_s, line in _timed(_lines(stream, stats), interval_s):
        sample = to_sample(line, t_s=t_s, total_rails=total_rails)
        if sample.total_mw is None:
            stats.without_total += 1
            if stats.reason is None:
                stats.reason = module_total(sample.rails_mw, total_rails)[1]
        yield sample


def _lines(stream: BinaryIO, stats: LogStats) -> Iterator[TegraLine]:
    while raw := stream.readline(MAX_LINE + 1):
        text = raw.decode("utf-8", "replace")
        if not text.strip():
            continue
        stats.lines += 1
        line = parse_line(text)
        if line is None:
            if len(stats.skipped) < 10:
                stats.skipped.append(stats.lines)
            continue
        stats.parsed += 1
        yield line


def _timed(lines: Iterable[TegraLine], interval_s: float | None) -> Iterator[tuple[float, TegraLine]]:
    if interval_s is not None:
        yield from ((index * interval_s, line) for index, line in enumerate(lines))
        return
    last_s, last_stamp = -DEFAULT_INTERVAL_S, None
    for group in _same_second(lines):
        stamp = group[0].time
        step = DEFAULT_INTERVAL_S
        if stamp is not None and last_stamp is not None:
            passed = (stamp - last_stamp).total_seconds()
            step = passed if passed > 0 else DEFAULT_INTERVAL_S  # the clock was set back: go on from where we are
        last_s += step
        last_stamp = stamp or last_stamp
        yield from ((last_s + index / len(group), line) for index, line in enumerate(group))


def _same_second(lines: Iterable[TegraLine]) -> Iterator[list[TegraLine]]:
    """Neighbouring lines with the same stamp together; lines without a stamp alone."""
    group: list[TegraLine] = []
    stamp: datetime.datetime | None = None
    for line in lines:
        if group and (line.time is None or line.time != stamp):
            yield group
            group = []
        group.append(line)
        stamp = line.time
    if group:
        yield group
