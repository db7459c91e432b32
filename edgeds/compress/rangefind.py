"""Where ranges come from: a table of an earlier run that still fits, else a run over the calibration set."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from onnx import ModelProto

from edgeds.compress.calibset import CalibrationSet, Feeds
from edgeds.compress.observers import METHODS
from edgeds.compress.ranges import (
    RangeKey,
    RangeTable,
    TensorRange,
    collect_histograms,
    load_ranges,
    range_of,
)
from edgeds.compress.trt_table import is_table, read_table
from edgeds.errors import CalibrationError, SpecError
from edgeds.graph.proto import each_tensor, light_copy
from edgeds.progress import track
from edgeds.specs import to_json

AUTO = "auto"
"""Not a method of its own: all are compared on samples held out of calibration, the best one is used."""

IMPORTED = "tensorrt-table"
"""The method of ranges that a TensorRT calibration table gave; never equal to one of ours, so never taken for it."""

KEPT_SAMPLES = 16
"""Feeds held in memory after calibration, for bias correction and for the comparison with float."""

_HELD_OUT_EVERY = 8


@dataclass(frozen=True, kw_only=True)
class RangeSettings:
    """How ranges are found. ``method`` is one of ``observers.METHODS`` or ``auto``."""

    method: str
    percentile: float
    sampled_elements: int | None
    ranges_in: Path | None = None
    threads: int | None = None
    quiet: bool = False

    def __post_init__(self) -> None:
        if self.method not in (*METHODS, AUTO):
            raise SpecError(f"calibration method {self.method!r}: choose one of {', '.join((*METHODS, AUTO))}")
        if not 50.0 < self.percentile <= 100.0:
            raise SpecError(f"percentile {self.percentile}: must be above 50 and at most 100")
        if self.sampled_elements is not None and self.sampled_elements < 1:
            raise SpecError(f"sampled_elements {self.sampled_elements}: must be at least 1")


@dataclass(frozen=True, kw_only=True)
class FoundRanges:
    """A table, the first feeds of the set, and for ``auto`` each method's ranges with the feeds to judge them on."""

    table: RangeTable
    feeds: list[Feeds]
    notes: list[str]
    candidates: dict[str, dict[str, TensorRange]] = field(default_factory=dict)
    held_out: list[Feeds] = field(default_factory=list)


def model_digest(model: ModelProto) -> str:
    """Hex SHA-256 over the graph and every weight; the same for inline and external weights."""
    digest = hashlib.sha256(light_copy(model).SerializeToString(deterministic=True))
    for name, tensor in each_tensor(model.graph):
        digest.update(name.encode())
        digest.update(tensor.raw_data or tensor.SerializeToString(deterministic=True))
    return digest.hexdigest()


def find_ranges(
    model: ModelProto, tensors: Sequence[str], *, calibration: CalibrationSet, settings: RangeSettings
) -> FoundRanges:
    """Ranges of the tensors from ``settings.ranges_in`` when it fits, else measured; a table is never half used.

    ``ranges_in`` may also be a TensorRT calibration table: its ranges are used, and tensors that it lacks are measured,
    with a note. Raises CalibrationError for a set that does not fit the model, and for a damaged or foreign TensorRT
    table.
    """
    tensors = tuple(dict.fromkeys(tensors))
    key = RangeKey(
        model_sha256=model_digest(model),
        set_sha256="",
        method=settings.method,
        percentile=settings.percentile,
        sampled_elements=settings.sampled_elements,
    )
    notes: list[str] = []
    if settings.ranges_in is not None and is_table(settings.ranges_in):
        return _import_table(model, tensors, settings.ranges_in, calibration=calibration, settings=settings, key=key)
    if settings.ranges_in is not None:
        table, note = _load_fitting(settings.ranges_in, key, tensors)
        if table is not None and calibration.one_shot:
            table, note = None, "ranges not reused: the calibration samples can be read only once, so not compared"
        if table is not None:
            feeds: list[Feeds] = []
            expected = calibration.expected
            reader = _keep_first(calibration, feeds)
            for _ in track(reader, what="hashing samples", total=expected, unit="sample", quiet=settings.quiet):
                pass
            if calibration.digest == table.key.set_sha256:
                return FoundRanges(table=table, feeds=feeds, notes=[f"ranges reused from {settings.ranges_in}"])
            note = f"ranges not reused: {settings.ranges_in} was made from other samples, preprocessing or sizes"
        notes.append(note)
    return _measure(model, tensors, calibration=calibration, settings=settings, key=key, notes=notes)


def _import_table(
    model: ModelProto,
    tensors: tuple[str, ...],
    path: Path,
    *,
    calibration: CalibrationSet,
    settings: RangeSettings,
    key: RangeKey,
) -> FoundRanges:
    """Ranges of a TensorRT table, the others measured; the feeds are needed in any case, for the comparison."""
    if settings.method == AUTO:
        raise SpecError(f"method {AUTO} compares methods, and {path} already holds ranges: leave one of them out")
    table = read_table(path)
    given = {name: known for name, known in table.ranges().items() if name in set(tensors)}
    if not given:
        some = ", ".join(f"'{name}'" for name in list(table.scales)[:3])
        raise CalibrationError(f"{path}: none of its tensors ({some}, ...) is one to quantize here: of another model?")
    missing = tuple(name for name in tensors if name not in given)
    notes = [f"ranges of {len(given)} tensors imported from {path} (TensorRT {table.version}, {table.algorithm})"]
    if missing:
        notes.append(
            f"{path} has no range for {len(missing)} tensors ('{missing[0]}', ...): measured with {key.method}"
        )
    found = _measure(model, missing, calibration=calibration, settings=settings, key=key, notes=notes)
    if not missing:  # nothing was measured, so the samples have not been read
        reader, expected = _keep_first(calibration, found.feeds), calibration.expected
        for _ in track(reader, what="reading samples", total=expected, unit="sample", quiet=settings.quiet):
            pass
    merged = replace(
        found.table,
        key=replace(key, method=IMPORTED, set_sha256=calibration.digest),
        samples=calibration.samples,
        shapes=dict(calibration.shapes),
        tensors={**found.table.tensors, **given},
        chosen=IMPORTED,
    )
    return replace(found, table=merged)


def _measure(
    model: ModelProto,
    tensors: tuple[str, ...],
    *,
    calibration: CalibrationSet,
    settings: RangeSettings,
    key: RangeKey,
    notes: list[str],
) -> FoundRanges:
    reader = _Split(calibration, hold_out=settings.method == AUTO)
    histograms, unusable = collect_histograms(
        model,
        tensors,
        reader,
        threads=settings.threads,
        sampled_elements=settings.sampled_elements,
        quiet=settings.quiet,
    )
    methods = METHODS if settings.method == AUTO else (settings.method,)
    candidates = {
        method: {
            name: range_of(histogram, method, percentile=settings.percentile, note=unusable.get(name))
            for name, histogram in histograms.items()
        }
        for method in methods
    }
    table = RangeTable(
        key=RangeKey(**{**to_json(key), "set_sha256": calibration.digest}),
        samples=calibration.samples,
        shapes=dict(calibration.shapes),
        tensors=candidates[methods[0]],
        chosen=methods[0],
    )
    if settings.method != AUTO:
        candidates = {}
    elif not reader.held_out:
        notes.append("fewer than 8 calibration runs: methods are compared on the calibration samples themselves")
    held_out = reader.held_out or reader.kept[:2]
    return FoundRanges(table=table, feeds=reader.kept, notes=notes, candidates=candidates, held_out=held_out)


@dataclass
class _Split:
    """A calibration set that keeps its first feeds, and with ``hold_out`` takes every eighth out of calibration."""

    inner: CalibrationSet
    hold_out: bool
    kept: list[Feeds] = field(default_factory=list)
    held_out: list[Feeds] = field(default_factory=list)

    @property
    def expected(self) -> int | None:
        return self.inner.expected

    def __iter__(self) -> Iterator[Feeds]:
        for index, feeds in enumerate(_keep_first(self.inner, self.kept)):
            held = index % _HELD_OUT_EVERY == _HELD_OUT_EVERY - 1 and len(self.held_out) < KEPT_SAMPLES
            if self.hold_out and held:
                self.held_out.append(feeds)
            else:
                yield feeds


def _keep_first(calibration: CalibrationSet, kept: list[Feeds]) -> Iterator[Feeds]:
    kept.clear()
    for feeds in calibration:
        if len(kept) < KEPT_SAMPLES:
            kept.append(feeds)
        yield feeds


def _load_fitting(path: Path, key: RangeKey, tensors: tuple[str, ...]) -> tuple[RangeTable | None, str]:
    """The table when it can be read and belongs to this model, method and tool; else the note that says why not."""
    try:
        table = load_ranges(path)
    except SpecError as error:
        return None, f"ranges not reused: {error}"
    for name, wanted in to_json(key).items():
        found = getattr(table.key, name)
        if name != "set_sha256" and found != wanted:
            return None, f"ranges not reused: {path} was made with {name} {found}, this run has {wanted}"
    missing = [name for name in tensors if name not in table.tensors]
    if missing:
        return None, f"ranges not reused: {path} has no range for tensor '{missing[0]}'"
    return table, ""
