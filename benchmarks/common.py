"""What the benchmarks share: arguments, clocks, memory of a process of its own, and the one way results are printed."""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgeds.engines import default_threads
from edgeds.errors import EdgedsError, SpecError
from edgeds.progress import track
from edgeds.report.stats import device_name, software_versions, utc_now

MIB = 1 << 20
DEFAULT_MODEL = "yolo11n"
PEAK_FIELD, NOW_FIELD = "VmHWM", "VmRSS"


@dataclass(frozen=True, kw_only=True)
class Limit:
    """One stated figure and what was measured; ``at_most`` says on which side of the limit is good."""

    name: str
    value: float
    limit: float
    at_most: bool = True

    @property
    def ok(self) -> bool:
        # NaN compares false on both sides and so counts as missed.
        return self.value <= self.limit if self.at_most else self.value >= self.limit

    def line(self) -> str:
        sign = "<=" if self.at_most else ">="
        return f"{'met   ' if self.ok else 'MISSED'}  {self.name}: {self.value:.4g} (limit {sign} {self.limit:.4g})"


@dataclass(frozen=True, kw_only=True)
class Times:
    """Seconds of one measured call: by the clock on the wall, and of processor time in all threads."""

    wall_s: float
    cpu_s: float


def make_parser(module: str, *, about: str, data: bool = True) -> argparse.ArgumentParser:
    """A parser with the arguments every benchmark takes."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{module}", description=about)
    if data:
        parser.add_argument(
            "--data", type=Path, required=True, metavar="DIR", help="a YOLO folder with images/ and labels/"
        )
    parser.add_argument("--model", metavar="ONNX", help=f"a detector; default: {DEFAULT_MODEL} from the model zoo")
    parser.add_argument(
        "--threads", type=count, default=default_threads(), help="threads per engine (default: all there are)"
    )
    parser.add_argument("--no-limits", action="store_true", help="report only: exit 0 when a stated limit is missed")
    parser.add_argument("-q", "--quiet", action="store_true", help="no progress on stderr")
    return parser


def count(text: str) -> int:
    """A whole number of at least 1, for argparse."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be at least 1")
    return value


def find_model(given: str | None, *, quiet: bool) -> Path:
    """The model file to measure, made absolute; the zoo's default when none is given."""
    if given is None:
        from edgeds.zoo import fetch_model

        return fetch_model(DEFAULT_MODEL, quiet=quiet)
    path = Path(given)
    if not path.is_file():
        raise SpecError(f"--model {given}: no such file")
    return path.absolute()


def measure(call: Callable[[], Any]) -> Times:
    """Run once and time it."""
    wall, cpu = time.perf_counter(), time.process_time()
    call()
    return Times(wall_s=time.perf_counter() - wall, cpu_s=time.process_time() - cpu)


def measure_in_turns(
    calls: dict[str, Callable[[], Any]], *, rounds: int, what: str, quiet: bool = False
) -> dict[str, Times]:
    """Medians of ``rounds`` runs of each call, taken in turns so that a slow spell of the machine hits all of them.

    The order is reversed in every second round. One run of each before the first round is not counted.
    """
    for call in calls.values():
        call()
    taken: dict[str, list[Times]] = {name: [] for name in calls}
    for turn in track(range(rounds), what=what, total=rounds, unit="round", quiet=quiet):
        for name in reversed(calls) if turn % 2 else calls:
            taken[name].append(measure(calls[name]))
    return {
        name: Times(
            wall_s=statistics.median(item.wall_s for item in times),
            cpu_s=statistics.median(item.cpu_s for item in times),
        )
        for name, times in taken.items()
    }


def memory_mib(field: str = NOW_FIELD) -> float:
    """Resident memory of this process, now or (``PEAK_FIELD``) at its highest, in MiB.

    Read from /proc: the peak that getrusage gives still holds that of the process which started this one.
    """
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) / 1024
    raise SpecError(f"this system does not report {field} in /proc/self/status; memory is measured on Linux only")


def run_side(module: str, arguments: Sequence[str], *, quiet: bool) -> dict[str, Any]:
    """Run one side of a benchmark in a process of its own and return the JSON object it prints last."""
    command = [sys.executable, "-m", f"benchmarks.{module}", *arguments, *(["--quiet"] if quiet else [])]
    root = Path(__file__).resolve().parent.parent
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, cwd=root, check=False)
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        raise EdgedsError(f"{' '.join(command[1:])}: ended with exit code {done.returncode}")
    return json.loads(lines[-1])


def ratio(value: float, reference: float) -> float:
    """``value / reference``, NaN (which no limit accepts) when there is no reference."""
    return value / reference if reference > 0 else math.nan


def format_table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A Markdown table, numbers with four digits and aligned to the right, absent ones as a dash."""
    cells = [[_cell(value) for value in row] for row in rows]
    widths = [max(len(line[column]) for line in (list(header), *cells)) for column in range(len(header))]
    numeric = [any(isinstance(row[column], int | float) for row in rows) for column in range(len(header))]

    def join(line: Sequence[str]) -> str:
        padded = (
            text.rjust(width) if right else text.ljust(width)
            for text, width, right in zip(line, widths, numeric, strict=True)
        )
        return f"| {' | '.join(padded)} |"

    rule = "|".join("-" * (width + 1) + (":" if right else "-") for width, right in zip(widths, numeric, strict=True))
    return "\n".join([join(header), f"|{rule}|", *map(join, cells)])


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 10_000 else f"{value:.4g}"
    return str(value)


def finish(
    name: str,
    *,
    header: Sequence[str],
    rows: Sequence[Sequence[Any]],
    limits: Sequence[Limit],
    arguments: argparse.Namespace,
    figures: Mapping[str, Any],
) -> int:
    """Print where it was measured, the table, the limits and, last, one JSON object; return the exit code."""
    facts = {"device": device_name(), "date": utc_now(), "threads": arguments.threads, "versions": software_versions()}
    versions = ", ".join(f"{key} {value}" for key, value in software_versions().items())
    print(f"{name}: {facts['device']}, {arguments.threads} threads, {facts['date']}, {versions}\n")
    print(format_table(header, rows))
    print()
    for limit in limits:
        print(limit.line())
    ok = all(limit.ok for limit in limits)
    judged = [{"name": item.name, "value": _number(item.value), "limit": item.limit, "ok": item.ok} for item in limits]
    print(json.dumps({"benchmark": name, "ok": ok, "limits": judged, **facts, **figures}, allow_nan=False))
    return 0 if ok or arguments.no_limits else 1


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


def run_main(main: Callable[[Sequence[str] | None], int]) -> None:
    """Run a benchmark's ``main`` as a program: one sentence for a user's mistake, 130 after Ctrl-C."""
    try:
        code = main(None)
    except SpecError as error:
        print(f"error: {error}", file=sys.stderr)
        code = 2
    except EdgedsError as error:
        print(f"error: {error}", file=sys.stderr)
        code = 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        code = 130
    sys.exit(code)
