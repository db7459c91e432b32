"""``edgeds report``: one page for people about one run or several, from files that other verbs wrote."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgeds.cli.options import add_trust, given_path
from edgeds.cli.output import emit_json, emit_text
from edgeds.errors import SpecError

if TYPE_CHECKING:
    from edgeds.report.record import RunRecord

SUMMARY = "Write a self-contained page (and a picture) about runs: speed, power, energy, layers, comparison."

EXAMPLES = """\
examples:
  edgeds bench model.bundle --record run.json && edgeds report run.json --out report.html
  edgeds report orin.json nano.json --out compare.html --png compare.png     the first is the base of the ratios
  edgeds report plan.json --out plan.html                                    what edgeds plan --json printed
  edgeds report tegra.log --target orin-nx-16gb@15W --out power.html         a recorded tegrastats log
  edgeds report model.bundle --out bundle.html --json                        what the bundle stores
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "runs", metavar="RUN", nargs="+", type=given_path, help="run record, JSON of a verb, tegrastats log or bundle"
    )
    parser.add_argument("--out", metavar="FILE.html", type=given_path, required=True, help="the page to write")
    parser.add_argument("--png", metavar="FILE.png", type=given_path, help="one picture of the summary, too")
    parser.add_argument("--title", metavar="TEXT", help="heading (default: made from the runs)")
    parser.add_argument("--target", metavar="NAME@MODE", help="board of tegrastats logs, and of runs that name none")
    parser.add_argument("--boards", type=Path, metavar="FILE", help="own boards (docs/boards.md)")
    parser.add_argument("--watts", type=float, metavar="W", help="power budget to compare with")
    parser.add_argument("--fps", type=float, metavar="F", help="frames per second wanted")
    parser.add_argument("--latency-ms", type=float, metavar="L", help="latency budget")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    add_trust(parser)


def run(args: argparse.Namespace) -> int:
    from edgeds.boards.catalogue import load_catalogue
    from edgeds.boards.targets import resolve_target
    from edgeds.progress import track
    from edgeds.report.html import write_report
    from edgeds.report.sources import MAX_RUNS, read_runs
    from edgeds.report.words import summarize_runs

    _check_outputs(args)
    catalogue = load_catalogue(args.boards)
    target = resolve_target(args.target, catalogue=catalogue) if args.target is not None else None
    runs: list[RunRecord] = []
    for path in track(args.runs, what="reading runs", unit="file", quiet=args.quiet):
        runs += read_runs(path, target=target, catalogue=catalogue)
    if len(runs) > MAX_RUNS:
        raise SpecError(f"{len(runs)} runs in all, at most {MAX_RUNS} go into one report; give fewer files")
    runs = [replace(one, budget=_budget(one, args)) for one in _distinct(runs)]
    title = args.title if args.title is not None else _title(runs)
    page = write_report(args.out, runs, title=title)
    if args.png is not None:
        from edgeds.report.png import write_png

        write_png(args.png, runs, title=title)
    summary = summarize_runs(runs)
    if args.json:
        emit_json({"report": page, "png": args.png, "runs": [_brief(one) for one in runs], "summary": summary})
    else:
        emit_text("\n".join([*summary, str(page), *([str(args.png)] if args.png is not None else [])]))
    return 0


def _check_outputs(args: argparse.Namespace) -> None:
    """Refuse what would overwrite a run or be no page or picture, before any work."""
    if args.out.suffix.lower() not in (".html", ".htm"):
        raise SpecError(f"--out {args.out}: the page is HTML; name it FILE.html")
    if args.png is not None and args.png.suffix.lower() != ".png":
        raise SpecError(f"--png {args.png}: the picture is a PNG; name it FILE.png")
    for out in (args.out, args.png):
        if out is not None and out.is_dir():
            raise SpecError(f"{out}: is a folder; name a file in it")
    if args.png is not None:
        from edgeds.imagefile import import_cv2

        import_cv2("the picture of a report")


def _budget(record: RunRecord, args: argparse.Namespace) -> Any:
    """The run's own budget with what the command line gives instead."""
    given = {"watts": args.watts, "fps": args.fps, "latency_ms": args.latency_ms}
    return replace(record.budget, **{name: value for name, value in given.items() if value is not None})


def _distinct(runs: list[RunRecord]) -> list[RunRecord]:
    """Equal titles get a number, so that charts and tables can be read."""
    seen: dict[str, int] = {}
    found = []
    for record in runs:
        count = seen[record.title] = seen.get(record.title, 0) + 1
        found.append(record if count == 1 else replace(record, title=f"{record.title} ({count})"))
    return found


def _title(runs: list[RunRecord]) -> str:
    first = runs[0]
    what = first.model or first.title
    if len(runs) == 1:
        return f"{what} on {first.device.label}"
    return f"{what} and {len(runs) - 1} more run{'s' if len(runs) > 2 else ''}"


def _brief(record: RunRecord) -> dict[str, Any]:
    """The run's figures without its series."""
    latency = record.latency_ms
    names = ("mean_ms", "p50_ms", "p95_ms", "p99_ms", "low_ms", "high_ms")
    return {
        "title": record.title,
        "status": record.status,
        "origin": record.origin,
        "date": record.date,
        "board": record.device.board or record.device.name,
        "mode": record.device.mode,
        "model": record.model,
        "precision": record.precision,
        "batch": record.batch,
        "fps": record.fps,
        **{f"latency_{name}": None if latency is None else getattr(latency, name) for name in names},
        "power_w": record.power.mean_w,
        "power_source": record.power.source or f"unavailable: {record.power.unavailable}",
        "energy_mj": record.energy_mj,
        "interrupted": record.interrupted,
        "budget": record.budget,
    }
