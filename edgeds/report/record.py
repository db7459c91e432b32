"""What one run showed, as a value and a JSON file: the one form that reports are made from.

Everything that was not measured is None, and the page says why. A record is measured or predicted, never both; layers
and rows by batch say it for themselves, since a profile may hold both.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from edgeds.errors import SpecError
from edgeds.files import read_json, write_json
from edgeds.specs import Budget, from_json, to_json

KIND = "edgeds-run"
SCHEMA = 1
MAX_KEPT = 5000
"""Latencies and power readings kept in a record; more are thinned out."""

Status = Literal["measured", "predicted"]
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Device:
    """What it ran on, or is predicted for. ``mode_watts`` is the number in the power mode's name, None for MAXN."""

    name: str | None = None
    board: str | None = None
    mode: str | None = None
    mode_watts: float | None = None
    gpu: str | None = None
    backend: str | None = None
    threads: int | None = None
    versions: Mapping[str, str] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """Board and mode where they are known, else the machine's name."""
        place = self.board or self.name or "an unknown device"
        return f"{place} in {self.mode} mode" if self.mode else place


@dataclass(frozen=True, kw_only=True)
class LatencyFigures:
    """Milliseconds per request. ``low_ms`` and ``high_ms`` bound a prediction; ``samples`` are kept measurements."""

    mean_ms: float | None = None
    p50_ms: float | None = None
    p95_ms: float | None = None
    p99_ms: float | None = None
    max_ms: float | None = None
    low_ms: float | None = None
    high_ms: float | None = None
    samples: tuple[float, ...] = ()

    @property
    def typical_ms(self) -> float | None:
        """The median, else the mean."""
        return self.p50_ms if self.p50_ms is not None else self.mean_ms


@dataclass(frozen=True, kw_only=True)
class PowerFigures:
    """Watts of the module. ``series``: (seconds, watts) points. ``unavailable``: the reason why ``mean_w`` is None."""

    mean_w: float | None = None
    peak_w: float | None = None
    energy_j: float | None = None
    duration_s: float | None = None
    temp_max_c: float | None = None
    source: str | None = None
    series: tuple[tuple[float, float], ...] = ()
    unavailable: str | None = None


@dataclass(frozen=True, kw_only=True)
class ThrottleEvent:
    """What held the device back; ``count`` of over-current events, None for a state without a count."""

    what: str
    count: int | None = None


@dataclass(frozen=True, kw_only=True)
class BatchPoint:
    """Latency of one run with ``batch`` rows."""

    batch: int
    latency_ms: float
    fps: float | None = None
    size: str | None = None
    status: Status = "measured"


@dataclass(frozen=True, kw_only=True)
class LayerTime:
    """Time of one layer or fused kernel, with its operations and the bytes it moves where they are known."""

    name: str
    kind: str
    time_us: float
    flops: float | None = None
    bytes: float | None = None
    status: Status = "measured"


@dataclass(frozen=True, kw_only=True)
class Roof:
    """What the device can do at most: operations and bytes per second. ``label`` says for which precision."""

    flops_per_s: float
    bytes_per_s: float
    label: str = ""


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """One run. ``origin`` says what it was read from. ``throttle_events``: () nothing happened, None nobody tells.

    ``energy_mj`` is per frame. ``accuracy`` maps a figure's name to its value. ``memory_mib`` leaves out runtime
    libraries.
    """

    kind: str = KIND
    schema: int = SCHEMA
    status: Status
    title: str
    origin: str = "bench"
    date: str | None = None
    device: Device = Device()
    model: str | None = None
    precision: str | None = None
    batch: int | None = None
    sizes: tuple[str, ...] = ()
    fps: float | None = None
    frames: int | None = None
    seconds: float | None = None
    latency_ms: LatencyFigures | None = None
    power: PowerFigures = PowerFigures(unavailable="nothing recorded it")
    energy_mj: float | None = None
    memory_mib: float | None = None
    limited_by: str | None = None
    throttle_events: tuple[ThrottleEvent, ...] | None = None
    by_batch: tuple[BatchPoint, ...] = ()
    layers: tuple[LayerTime, ...] = ()
    roof: Roof | None = None
    accuracy: Mapping[str, Any] = field(default_factory=dict)
    budget: Budget = field(default_factory=Budget)
    interrupted: bool = False
    notes: tuple[str, ...] = ()


def write_record(path: Path, record: RunRecord) -> None:
    """Write the record as JSON, atomically. Raises SpecError for values that JSON does not have."""
    write_json(path, to_json(record))


def read_record(path: Path) -> RunRecord:
    """Read what ``write_record`` wrote. Raises SpecError that names file and key."""
    return parse_record(read_json(path), where=str(path))


def parse_record(data: Any, *, where: str) -> RunRecord:
    """A record from its JSON. ``where`` names it. Raises SpecError for another kind, a newer schema, odd numbers."""
    if not isinstance(data, Mapping) or data.get("kind") != KIND:
        raise SpecError(f"{where}: not a run record; write one with: edgeds bench BUNDLE --record FILE")
    schema = data.get("schema")
    if isinstance(schema, bool) or not isinstance(schema, int) or schema < 1:
        raise SpecError(f"{where}: 'schema' must be a whole number from 1 up, got {schema!r}")
    if schema > SCHEMA:
        raise SpecError(f"{where}: written with record schema {schema}, this edgeds reads up to {SCHEMA}; upgrade it")
    check_numbers(data, where=where)
    record = from_json(RunRecord, data, where=where)
    _check_signs(record, where=where)
    return record


def check_numbers(data: Any, *, where: str) -> None:
    """Raise SpecError for numbers that are no finite floats (``1e999``, thousands of digits), anywhere in ``data``."""
    stack: list[tuple[str, Any]] = [(where, data)]
    while stack:
        place, value = stack.pop()
        if isinstance(value, Mapping):
            stack += [(f"{place}.{key}", item) for key, item in value.items()]
        elif isinstance(value, list | tuple):
            stack += [(f"{place}[{index}]", item) for index, item in enumerate(value)]
        elif isinstance(value, int | float) and not -1e300 < value < 1e300:
            raise SpecError(f"{place}: the number is too large to be a measurement; correct the file")


def keep_spread(values: Sequence[float], *, limit: int = MAX_KEPT) -> tuple[float, ...]:
    """The finite values in order of size; of more than ``limit`` evenly spaced ranks, smallest and largest included."""
    finite = sorted(float(value) for value in values if math.isfinite(value))
    if len(finite) <= limit:
        return tuple(finite)
    return tuple(finite[round(index * (len(finite) - 1) / (limit - 1))] for index in range(limit))


def keep_shape(points: Sequence[tuple[float, float]], *, limit: int = MAX_KEPT) -> tuple[tuple[float, float], ...]:
    """At most ``limit`` of the points, in order: lowest and highest of each stretch, so that peaks stay."""
    finite = [(float(x), float(y)) for x, y in points if math.isfinite(x) and math.isfinite(y)]
    if len(finite) <= limit:
        return tuple(finite)
    stretches = max(1, limit // 2)
    kept: list[tuple[float, float]] = []
    for index in range(stretches):
        part = finite[index * len(finite) // stretches : (index + 1) * len(finite) // stretches]
        lowest, highest = min(part, key=_height), max(part, key=_height)
        kept += sorted({lowest, highest})
    return tuple(kept)


def _height(point: tuple[float, float]) -> float:
    return point[1]


def _check_signs(record: RunRecord, *, where: str) -> None:
    latency, power = record.latency_ms or LatencyFigures(), record.power
    values: list[tuple[str, float | int | None]] = [
        (name, getattr(record, name)) for name in ("fps", "energy_mj", "memory_mib", "frames", "seconds")
    ]
    values += [
        (f"latency_ms.{name}_ms", getattr(latency, f"{name}_ms")) for name in ("mean", "p50", "p95", "p99", "max")
    ]
    values += [(f"latency_ms.samples[{index}]", value) for index, value in enumerate(latency.samples)]
    values += [("power.mean_w", power.mean_w), ("power.peak_w", power.peak_w)]
    values += [(f"layers[{index}].time_us", layer.time_us) for index, layer in enumerate(record.layers)]
    values += [(f"by_batch[{index}].latency_ms", point.latency_ms) for index, point in enumerate(record.by_batch)]
    if record.roof is not None:
        values += [("roof.flops_per_s", record.roof.flops_per_s), ("roof.bytes_per_s", record.roof.bytes_per_s)]
    for name, value in values:
        if value is not None and value < 0:
            raise SpecError(f"{where}.{name}: {value:g} cannot have been measured; it must not be below 0")
    if (record.batch is not None and record.batch < 1) or any(point.batch < 1 for point in record.by_batch):
        raise SpecError(f"{where}: a batch is below 1")
