"""Records from the JSON of other verbs: ``bench``, ``predict``, ``plan``, ``profile``, the demo's ``report.json``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from edgeds.errors import SpecError
from edgeds.report.fields import (
    Document,
    list_at,
    number_at,
    object_at,
    status_at,
    text_at,
    texts_at,
    whole_at,
)
from edgeds.report.plandocument import from_plan, power_figure, predicted_latency
from edgeds.report.record import (
    KIND,
    BatchPoint,
    Device,
    LatencyFigures,
    LayerTime,
    Roof,
    RunRecord,
    Status,
    check_numbers,
    parse_record,
)


def parse_runs(data: Any, *, where: str, title: str) -> tuple[RunRecord, ...]:
    """The runs that a JSON document holds; ``title`` names those without a name of their own.

    Raises SpecError that names the file for anything that no verb writes.
    """
    if not isinstance(data, Mapping):
        raise SpecError(f"{where}: expected one JSON object, got {type(data).__name__}; {_EXPECTED}")
    if data.get("kind") == KIND:
        return (parse_record(data, where=where),)
    check_numbers(data, where=where)
    if "feasible" in data and "alternatives" in data:
        return from_plan(data, where=where)
    if "latency_p50_ms" in data and "fps" in data:
        return (from_bench(data, where=where, title=title),)
    if "limited_by" in data and "latency_low_ms" in data:
        return (from_prediction(data, where=where, title=title),)
    if "flops_per_byte" in data:
        return (from_profile(data, where=where, title=title),)
    if isinstance(data.get("bench"), Mapping):
        return _from_demo(data, where=where, title=title)
    raise SpecError(f"{where}: none of the files that can be reported; {_EXPECTED}")


_EXPECTED = (
    "expected a run record (edgeds bench --record), the JSON of bench, predict, plan or profile, a tegrastats log or a "
    "bundle"
)


def from_bench(data: Document, *, where: str, title: str) -> RunRecord:
    """The JSON of ``edgeds bench``: measured."""
    power_w = number_at(data, "power_w", where=where)
    source = text_at(data, "power_source", where=where)
    latency = LatencyFigures(
        mean_ms=number_at(data, "latency_mean_ms", where=where),
        p50_ms=number_at(data, "latency_p50_ms", where=where),
        p95_ms=number_at(data, "latency_p95_ms", where=where),
        p99_ms=number_at(data, "latency_p99_ms", where=where),
        max_ms=number_at(data, "latency_max_ms", where=where),
    )
    frames = whole_at(data, "frames", where=where)
    is_empty = latency.p50_ms is None
    reason = text_at(data, "fallback_reason", where=where)
    return RunRecord(
        status="measured",
        title=title,
        origin="bench",
        date=text_at(data, "date", where=where),
        device=Device(
            name=text_at(data, "device", where=where),
            backend=text_at(data, "backend", where=where),
            threads=whole_at(data, "threads", where=where),
            versions=_versions(data, where=where),
        ),
        precision=text_at(data, "precision", where=where),
        batch=_batch_of(data, where=where),
        fps=None if is_empty else number_at(data, "fps", where=where),
        frames=frames,
        seconds=number_at(data, "wall_s", where=where),
        latency_ms=None if is_empty else latency,
        power=power_figure(power_w, source),
        energy_mj=number_at(data, "energy_mj", where=where),
        interrupted=data.get("interrupted") is True,
        notes=(reason,) if reason else (),
    )


def from_prediction(data: Document, *, where: str, title: str) -> RunRecord:
    """The JSON of ``edgeds predict``: predicted. Its energy is per inference of the batch; here it is per item."""
    board, _, mode = (text_at(data, "target", where=where) or "").partition("@")
    batch = whole_at(data, "batch", where=where) or 1
    energy = number_at(data, "energy_mj", where=where)
    return RunRecord(
        status="predicted",
        title=title,
        origin="predict",
        date=text_at(data, "date", where=where),
        device=Device(board=board or None, mode=mode or None, versions=_table(data, where=where)),
        precision=text_at(data, "precision", where=where),
        batch=batch,
        fps=number_at(data, "fps", where=where),
        latency_ms=predicted_latency(data, where=where),
        power=power_figure(number_at(data, "power_w", where=where), "predicted from the board's coefficients"),
        energy_mj=None if energy is None else energy / batch,
        memory_mib=number_at(data, "memory_mib", where=where),
        limited_by=text_at(data, "limited_by", where=where),
        layers=_layers(data, where=where, default="predicted"),
        notes=texts_at(data, "notes", where=where),
    )


def from_profile(data: Document, *, where: str, title: str) -> RunRecord:
    """The ``metrics.json`` of ``edgeds profile``: its layers, and shares of peak as notes."""
    status = status_at(data, where=where, default="measured")
    latency = number_at(data, "latency_ms", where=where)
    board, _, mode = (text_at(data, "target", where=where) or "").partition("@")
    fps, batch = number_at(data, "fps", where=where), whole_at(data, "batch", "batch_size", where=where)
    notes = [
        f"{label}: {value:.1%}"
        for key, label in (
            ("bandwidth_utilization", "achieved bandwidth over peak"),
            ("compute_utilization", "achieved operations per second over peak"),
        )
        if (value := number_at(data, key, where=where)) is not None
    ]
    intensity = number_at(data, "flops_per_byte", where=where)
    if intensity is not None:
        notes.insert(0, f"operations per byte: {intensity:.3g}")
    return RunRecord(
        status=status,
        title=text_at(data, "model", where=where) or title,
        origin="profile",
        date=text_at(data, "date", where=where),
        device=Device(
            name=text_at(data, "device", where=where),
            board=board or None,
            mode=mode or None,
            backend=text_at(data, "backend", where=where),
            versions=_versions(data, where=where),
        ),
        model=text_at(data, "model", where=where),
        precision=text_at(data, "precision", where=where),
        batch=batch,
        fps=fps,
        latency_ms=None if latency is None else LatencyFigures(mean_ms=latency),
        power=power_figure(number_at(data, "power_w", where=where), status),
        energy_mj=number_at(data, "energy_mj", where=where),
        by_batch=_by_batch(data, fps=fps, batch=batch, where=where, status=status),
        layers=_layers(data, where=where, default=status),
        roof=_roof(data, where=where),
        notes=(*notes, *texts_at(data, "notes", where=where)),
    )


def _from_demo(data: Document, *, where: str, title: str) -> tuple[RunRecord, ...]:
    accuracy = object_at(data, "accuracy", where=where)
    runs: list[RunRecord] = []
    for name, bench in object_at(data, "bench", where=where).items():
        place = f"{where}.bench.{name}"
        if not isinstance(bench, Mapping):
            raise SpecError(f"{place}: expected an object, got {bench!r:.80}")
        record = from_bench(bench, where=place, title=f"{title} {name}")
        runs.append(replace(record, sizes=texts_at(data, "sizes", where=where), accuracy=accuracy if not runs else {}))
    if not runs:
        raise SpecError(f"{where}.bench: holds no run")
    return tuple(runs)


def _layers(data: Document, *, where: str, default: Status) -> tuple[LayerTime, ...]:
    layers = []
    for index, row in enumerate(list_at(data, "layers", where=where)):
        place = f"{where}.layers[{index}]"
        if not isinstance(row, Mapping):
            raise SpecError(f"{place}: expected an object, got {row!r:.80}")
        time_us = number_at(row, "time_us", "latency_us", where=place)
        if time_us is None:
            time_ms = number_at(row, "time_ms", "latency_ms", where=place)
            if time_ms is None:
                continue  # a layer without a time has no place among the times
            time_us = time_ms * 1e3
        kind = text_at(row, "kind", "op", where=place) or ""
        layers.append(
            LayerTime(
                name=text_at(row, "name", "node", where=place) or kind or f"layer {index}",
                kind=kind,
                time_us=time_us,
                flops=number_at(row, "flops", where=place),
                bytes=number_at(row, "bytes", where=place),
                status=status_at(row, where=place, default=default),
            )
        )
    return tuple(layers)


def _by_batch(
    data: Document, *, fps: float | None, batch: int | None, where: str, status: Status
) -> tuple[BatchPoint, ...]:
    """Latency by batch out of the parallel efficiency e(n) = rate(n) / (n x rate(1)), of which one rate is known."""
    place = f"{where}.parallel.batches"
    stated = object_at(object_at(data, "parallel", where=where), "batches", where=f"{where}.parallel")
    shares = {int(key): number_at(stated, key, where=place) for key in stated if re.fullmatch(r"[1-9]\d{0,5}", key)}
    own = shares.get(batch or 0)
    if not fps or not own or batch is None:
        return ()
    single = fps / (own * batch)
    rates = {size: share * size * single for size, share in sorted(shares.items()) if share}
    return tuple(
        BatchPoint(batch=size, latency_ms=size / rate * 1e3, fps=rate, status=status) for size, rate in rates.items()
    )


def _roof(data: Document, *, where: str) -> Roof | None:
    peak = object_at(data, "peak", where=where)
    flops = number_at(peak, "flops_per_s", where=f"{where}.peak")
    moved = number_at(peak, "bytes_per_s", where=f"{where}.peak")
    if not flops or not moved:
        return None
    return Roof(flops_per_s=flops, bytes_per_s=moved, label=text_at(data, "precision", where=where) or "")


def _versions(data: Document, *, where: str) -> dict[str, str]:
    return {str(key): str(value) for key, value in object_at(data, "versions", where=where).items()}


def _table(data: Document, *, where: str) -> dict[str, str]:
    version = text_at(data, "table_version", where=where)
    return {} if version is None else {"predictor": version}


def _batch_of(data: Document, *, where: str) -> int | None:
    """A bench does not store its largest batch; its runs say which one they had, where they all had the same."""
    histogram = object_at(data, "batch_size_histogram", where=where)
    sizes = [int(rows) for rows in histogram if str(rows).isdigit() and int(rows) > 0]
    return sizes[0] if len(sizes) == 1 else None
