"""Runs from whatever the user names: a record, the JSON of a verb, a tegrastats log, or a bundle."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from edgeds.boards.catalogue import Catalogue, load_catalogue
from edgeds.boards.plan_file import MEASURED_NAME, read_measured
from edgeds.boards.spec import Target
from edgeds.boards.stored_plan import read_stored_plan
from edgeds.bundle import Bundle, open_bundle
from edgeds.bundle.manifest import ENGINES_FOLDER, MANIFEST_NAME
from edgeds.errors import SpecError
from edgeds.files import MAX_JSON_BYTES, open_regular, parse_json
from edgeds.power import PowerSample, PowerSummary, summarize
from edgeds.power.tegralog import LogStats, read_log
from edgeds.power.tegrastats import parse_line
from edgeds.report.documents import from_prediction, parse_runs
from edgeds.report.record import (
    Device,
    LatencyFigures,
    PowerFigures,
    RunRecord,
    ThrottleEvent,
    check_numbers,
    keep_shape,
)
from edgeds.specs import Budget, from_json

MAX_RUNS = 100
MAX_LOG_SAMPLES = 2_000_000


def read_runs(path: Path, *, target: Target | None = None, catalogue: Catalogue | None = None) -> tuple[RunRecord, ...]:
    """All runs of one file or bundle. ``target`` is the board of a tegrastats log, and where a run names none.

    Boards of the ``catalogue`` get its titles, and their modes the watts that they are named after. Raises SpecError or
    BundleError that names the file.
    """
    if path.is_dir() or path.suffix.lower() == ".zip":
        runs = _from_bundle(path)
    else:
        runs = _from_file(path, target=target)
    if len(runs) > MAX_RUNS:
        raise SpecError(f"{path}: holds {len(runs)} runs, at most {MAX_RUNS} go into one report")
    return tuple(_placed(run, target=target, catalogue=catalogue or load_catalogue()) for run in runs)


def _from_file(path: Path, *, target: Target | None) -> tuple[RunRecord, ...]:
    try:
        with open_regular(path) as stream:
            head = stream.read(4096)
            stream.seek(0)
            if not head:
                raise SpecError(f"{path}: the file is empty")
            if head.lstrip(b"\xef\xbb\xbf").lstrip()[:1] not in (b"{", b"["):
                return (_from_log(path, stream, target=target, head=head),)
            text = stream.read(MAX_JSON_BYTES + 1)
    except OSError as error:
        raise SpecError(f"{path}: cannot be read: {error.strerror or error}") from error
    if len(text) > MAX_JSON_BYTES:
        raise SpecError(f"{path}: more than the {MAX_JSON_BYTES >> 20} MiB of JSON allowed")
    return parse_runs(parse_json(text, where=str(path)), where=str(path), title=path.stem)


def _from_log(path: Path, stream: Any, *, target: Target | None, head: bytes) -> RunRecord:
    stats = LogStats()
    rule = target.board.total_rails if target is not None else None
    samples = list(itertools.islice(read_log(stream, total_rails=rule, stats=stats), MAX_LOG_SAMPLES))
    if not samples:
        raise SpecError(f"{path}: neither JSON nor a tegrastats log ({stats.lines} lines read)")
    steps = sorted(b.t_s - a.t_s for a, b in itertools.pairwise(samples))
    found = summarize(
        samples, source=f"tegrastats log {path.name}", interval_s=steps[len(steps) // 2] if steps else 1.0
    )
    notes = [f"lines that were not understood: {', '.join(map(str, stats.skipped))}"] if stats.skipped else []
    if target is None:
        notes.append("no --target was given: the board of the log is unknown")
    return RunRecord(
        status="measured",
        title=path.stem,
        origin="tegrastats log",
        date=_first_time(head),
        seconds=found.duration_s,
        power=power_of(samples, found, unknown=stats.reason),
        throttle_events=events_of(found),
        notes=tuple(notes),
    )


def _first_time(head: bytes) -> str | None:
    """The first time stamp near the start of a log, by the clock of the board, which names no zone."""
    lines = (parse_line(line) for line in head.decode("utf-8", "replace").splitlines())
    stamp = next((line.time for line in lines if line is not None and line.time is not None), None)
    return None if stamp is None else stamp.isoformat(timespec="seconds")


def power_of(
    samples: list[PowerSample] | tuple[PowerSample, ...], found: PowerSummary, *, unknown: str | None
) -> PowerFigures:
    """The power of a series of samples: figures, and the points that a chart needs."""
    series = [(sample.t_s, sample.total_mw / 1000) for sample in samples if sample.total_mw is not None]
    mean_w = found.mean_w
    if mean_w is None and len(series) == 1:
        mean_w = series[0][1]  # a single reading is its own mean; energy stays unknown
    return PowerFigures(
        mean_w=mean_w,
        peak_w=found.peak_w,
        energy_j=found.energy_j,
        duration_s=found.duration_s,
        temp_max_c=found.temp_max_c,
        source=found.source,
        series=keep_shape(series),
        unavailable=None if mean_w is not None else unknown or "no reading had the module's power",
    )


def events_of(found: PowerSummary) -> tuple[ThrottleEvent, ...] | None:
    """What held the device back; None where neither states nor counters were told."""
    if found.throttle is None and not found.oc_events:
        return None
    states = [ThrottleEvent(what=what) for what in found.throttle or ()]
    return (*states, *(ThrottleEvent(what=what, count=count) for what, count in found.oc_events.items()))


def _from_bundle(path: Path) -> tuple[RunRecord, ...]:
    with open_bundle(path) as bundle:
        manifest, where = bundle.manifest, f"{path}/{MANIFEST_NAME}"
        check_numbers({"accuracy": manifest.accuracy, "predicted": manifest.predicted}, where=where)
        budget = Budget()
        if manifest.budget is not None:
            budget = from_json(Budget, manifest.budget, where=f"{where}.budget")
        name = path.name.removesuffix(".zip").removesuffix(".bundle")
        runs = [*_planned(bundle, where=where, name=name), *_measured(bundle, name=name)]
        predicted = manifest.predicted
        if not runs and isinstance(predicted, Mapping) and "latency_ms" in predicted:
            runs.append(from_prediction(predicted, where=f"{where}.predicted", title=f"{name} predicted"))
        if not runs:
            if not manifest.accuracy:
                raise SpecError(f"{path}: the bundle holds no plan, prediction, measurement or accuracy to report")
            runs.append(RunRecord(status="measured", title=name, origin="bundle", precision=manifest.precision))
        sizes = tuple(map(str, manifest.buckets))
        runs = [replace(run, model=name, budget=budget, origin="bundle", sizes=run.sizes or sizes) for run in runs]
        return (replace(runs[0], accuracy=manifest.accuracy or {}), *runs[1:])


def _planned(bundle: Bundle, *, where: str, name: str) -> list[RunRecord]:
    plan = read_stored_plan(bundle.manifest.plan, where=f"{where}.plan")
    if plan is None:
        return []
    return [
        RunRecord(
            status="measured" if plan.status == "measured" else "predicted",
            title=f"{name} planned",
            date=plan.planned_utc,
            device=Device(board=plan.target, mode=plan.mode),
            precision=plan.precision,
            batch=plan.batch,
            sizes=plan.sizes,
            fps=plan.fps,
            latency_ms=LatencyFigures(
                mean_ms=plan.latency_ms, low_ms=plan.latency_low_ms, high_ms=plan.latency_high_ms
            ),
            power=PowerFigures(mean_w=plan.power_w, source=plan.status)
            if plan.power_w is not None
            else PowerFigures(unavailable="the plan has no figure for it"),
            energy_mj=plan.energy_mj,
            memory_mib=plan.memory_mib,
            limited_by=plan.limited_by,
        )
    ]


def _measured(bundle: Bundle, *, name: str) -> list[RunRecord]:
    path = bundle.root / ENGINES_FOLDER / MEASURED_NAME
    if not path.is_file():
        return []
    return [
        RunRecord(
            status="measured",
            title=f"{name} measured: {row.mode}, {row.variant}, {row.precision}, batch {row.batch}",
            date=row.date or None,
            device=Device(name=row.device or None, board=row.board, mode=row.mode),
            precision=row.precision,
            batch=row.batch,
            sizes=(row.size,) if row.size else (),
            fps=row.batch / row.latency_ms * 1e3,
            latency_ms=LatencyFigures(mean_ms=row.latency_ms),
            power=PowerFigures(mean_w=row.power_w, source="measured on the device")
            if row.power_w is not None
            else PowerFigures(unavailable="it was not measured"),
            energy_mj=None if row.power_w is None else row.power_w * row.latency_ms / row.batch,
            memory_mib=row.memory_mib,
        )
        for row in read_measured(path)
    ]


def _placed(run: RunRecord, *, target: Target | None, catalogue: Catalogue) -> RunRecord:
    """The run with its board's title and mode, taken from ``target`` where it names no board itself."""
    board = catalogue.find(run.device.board) if run.device.board is not None else None
    mode = next((one for one in board.modes if run.device.mode in (one.name, one.label)), None) if board else None
    if target is not None and run.device.board is None:
        board, mode = target.board, target.mode
    if board is None:
        return run
    device = replace(
        run.device,
        board=board.title,
        mode=mode.label if mode is not None else run.device.mode,
        mode_watts=mode.watts if mode is not None else run.device.mode_watts,
    )
    return replace(run, device=device)
