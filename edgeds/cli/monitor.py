"""``edgeds monitor``: power, clocks, load and temperatures, live or from a recorded tegrastats log."""

from __future__ import annotations

import argparse
import contextlib
import errno
import itertools
import os
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from edgeds.boards.catalogue import load_catalogue
from edgeds.boards.spec import Target
from edgeds.boards.targets import resolve_target
from edgeds.cli.output import emit_line, emit_text
from edgeds.errors import InputError, SpecError
from edgeds.files import open_regular
from edgeds.power.sample import PowerSample, Sensor
from edgeds.power.trace import PowerSummary, summarize

if TYPE_CHECKING:
    from edgeds.runtime.livestats import LiveStats

SUMMARY = "Watch power, clocks, load and temperatures: live, or from a recorded tegrastats log."

EXAMPLES = """\
examples:
  edgeds monitor                                             live view of this machine, Ctrl-C ends it
  edgeds monitor --interval 0.5 --count 20 --json            JSON lines
  edgeds monitor --from-log run.txt --target orin-nx-16gb    a log made with: tegrastats --logfile run.txt
  tegrastats | edgeds monitor --from-log - --json            lines of a running tegrastats
  edgeds monitor --stats yolo.stats                          and FPS and queue of: edgeds run ... --stats yolo.stats
"""

DEFAULT_INTERVAL_S = 1.0
MIN_INTERVAL_S = 0.02
KEPT_SAMPLES = 5_000
"""The live figures are over the last of these; at one per second that is 83 minutes."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--from-log", metavar="FILE", help="read tegrastats lines from a file, - for stdin")
    parser.add_argument("--target", metavar="NAME", help="board of the log; gives the rule for the module's total")
    parser.add_argument("--boards", type=Path, metavar="FILE", help="own boards, see docs/boards.md")
    parser.add_argument(
        "--interval", type=float, metavar="S", help="seconds between samples (default: 1; logs: their time stamps)"
    )
    parser.add_argument(
        "--count", type=int, metavar="N", help="end after N samples (default: Ctrl-C, or the log's end)"
    )
    parser.add_argument(
        "--stats", type=Path, metavar="FILE", help="also show FPS and queue of an 'edgeds run|bench --stats FILE'"
    )
    parser.add_argument("--json", action="store_true", help="print JSON lines")


def run(args: argparse.Namespace) -> int:
    if args.interval is not None and not MIN_INTERVAL_S <= args.interval <= 86_400:
        raise SpecError(f"--interval: expected {MIN_INTERVAL_S} to 86400 seconds, got {args.interval:g}")
    if args.count is not None and args.count < 1:
        raise SpecError(f"--count: expected at least 1, got {args.count}")
    catalogue = load_catalogue(args.boards)
    target = resolve_target(args.target, catalogue=catalogue) if args.target is not None else None
    return _replay(args, target) if args.from_log is not None else _watch(args, target)


def _replay(args: argparse.Namespace, target: Target | None) -> int:
    from edgeds.power.tegralog import LogStats, read_log
    from edgeds.power.view import summary_line, table_head, table_row

    rule = target.board.total_rails if target is not None else None
    source = f"tegrastats log {args.from_log}"
    stats = LogStats()
    kept: list[PowerSample] = []
    with _open_log(args.from_log) as stream:
        for sample in read_log(stream, total_rails=rule, interval_s=args.interval, stats=stats):
            if args.json:
                emit_line({**sample.to_row(), "source": source})
            else:
                if not kept:
                    emit_text(table_head())
                emit_text(table_row(sample))
                kept.append(sample)
            if args.count is not None and stats.parsed >= args.count:
                break
    if stats.parsed == 0:
        raise InputError(f"{args.from_log}: no tegrastats line in it ({stats.lines} lines read)")
    if stats.skipped:
        print(f"warning: not understood and left out: lines {', '.join(map(str, stats.skipped))}", file=sys.stderr)
    if stats.without_total:
        print(f"warning: {stats.without_total} samples have no module power: {stats.reason}", file=sys.stderr)
    if not args.json:
        emit_text(summary_line(summarize(kept, source=source, interval_s=args.interval or _spacing(kept))))
    return 0


@contextlib.contextmanager
def _open_log(name: str) -> Iterator[BinaryIO]:
    if name == "-":
        if sys.stdin is None:
            raise SpecError("--from-log -: standard input is closed")
        yield sys.stdin.buffer
        return
    try:
        stream = open_regular(Path(name))
    except OSError as error:
        hint = "" if error.errno != errno.EINVAL else ", or give - and pipe the lines into standard input"
        raise SpecError(f"--from-log {name}: cannot be read: {error.strerror or error}{hint}") from error
    with stream:
        yield stream


def _spacing(samples: list[PowerSample]) -> float:
    """The usual distance between samples: the median."""
    steps = sorted(b.t_s - a.t_s for a, b in itertools.pairwise(samples))
    return steps[len(steps) // 2] if steps else DEFAULT_INTERVAL_S


def _watch(args: argparse.Namespace, target: Target | None) -> int:
    from edgeds.boards.probe import probe_machine
    from edgeds.power.sensors import open_sensor
    from edgeds.power.view import summary_line

    interval_s = args.interval or DEFAULT_INTERVAL_S
    title, budget_w = str(target) if target else "this machine", target.mode.watts if target and target.mode else None
    board = target.board if target else None
    if target is None:
        probe = probe_machine(catalogue=load_catalogue(args.boards))
        board = probe.board if probe.kind == "jetson" else None
        mode = probe.current_mode
        if probe.board is not None:
            title = str(Target(board=probe.board, mode=mode))
            budget_w = mode.watts if mode is not None else None
    sensor = open_sensor(board=board, interval_s=interval_s)
    try:
        if sensor.unavailable is not None:
            print(f"note: power is unknown here: {sensor.unavailable}", file=sys.stderr)
        kept = _live(args, sensor, title=title, budget_w=budget_w, interval_s=interval_s)
    finally:
        sensor.close()
    if not args.json:
        emit_text(summary_line(_summary(kept, sensor, interval_s)))
    return 0


def _live(
    args: argparse.Namespace, sensor: Sensor, *, title: str, budget_w: float | None, interval_s: float
) -> list[PowerSample]:
    """Read and show until the count is reached or Ctrl-C, which is the usual end and no failure."""
    from edgeds.power.view import redraw, screen_lines, table_head, table_row
    from edgeds.runtime.livestats import read_stats

    is_screen = not args.json and sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"
    kept: list[PowerSample] = []
    if is_screen:
        emit_text("\x1b[2J", end="")
    elif not args.json:
        emit_text(table_head())
    begin = time.monotonic()
    turn = 0
    with contextlib.suppress(KeyboardInterrupt):
        while args.count is None or turn < args.count:
            left = begin + turn * interval_s - time.monotonic()
            time.sleep(max(0.0, left))
            sample = sensor.read(time.monotonic() - begin)
            kept.append(sample)
            del kept[:-KEPT_SAMPLES]
            turn += 1
            live = read_stats(args.stats) if args.stats is not None else None
            if args.json:
                emit_line({**sample.to_row(), **_live_row(args, live), "source": sensor.source})
            elif is_screen:
                size = shutil.get_terminal_size()
                summary = _summary(kept, sensor, interval_s)
                extra = [("pipeline", _live_text(live))] if args.stats is not None else []
                width = size.columns or 80
                lines = screen_lines(sample, summary, title=title, budget_w=budget_w, width=width, extra=extra)
                # Python 3.10 passes on the 0 x 0 of a terminal without a size.
                emit_text(redraw(lines, height=size.lines or 24), end="")
            else:
                emit_text(table_row(sample) + (f"  {_live_text(live)}" if args.stats is not None else ""))
    if is_screen:
        emit_text("")  # below the ^C that the terminal shows
    return kept


def _live_row(args: argparse.Namespace, live: LiveStats | None) -> dict[str, object]:
    """What the watched pipeline does, for JSON; null where nothing runs."""
    if args.stats is None:
        return {}
    if live is None:
        return {"fps": None, "queue": None, "mean_batch": None}
    return {"fps": live.fps, "queue": live.waiting, "mean_batch": live.mean_batch, "backend": live.backend}


def _live_text(live: LiveStats | None) -> str:
    if live is None:
        return "nothing running"
    batch = "?" if live.mean_batch is None else f"{live.mean_batch:.1f}"
    lost = f", {live.failed} failed, {live.rejected} rejected, {live.expired} expired"
    return f"{live.fps:.1f} FPS on {live.backend}, {live.waiting} waiting, batch {batch}, {live.completed} done{lost}"


def _summary(kept: list[PowerSample], sensor: Sensor, interval_s: float) -> PowerSummary:
    return summarize(
        kept,
        source=sensor.source if sensor.unavailable is None else f"power unknown: {sensor.unavailable}",
        interval_s=interval_s,
        is_interval_mean=sensor.is_interval_mean,
        notes=sensor.notes,
    )
