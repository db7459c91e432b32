"""What quantizing writes: the places of its files, checked beforehand, the report, and the files themselves."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from onnx import ModelProto

from edgeds.compress.calibset import Feeds
from edgeds.compress.cpu_fit import CpuFitted
from edgeds.compress.fit import Fitted
from edgeds.compress.rangefind import FoundRanges
from edgeds.compress.ranges import RangeTable, save_ranges
from edgeds.compress.trt_table import version_number
from edgeds.compress.verify import LayerComparison, OutputComparison
from edgeds.errors import SpecError
from edgeds.files import real_path, refuse_special, write_json
from edgeds.graph.cost import count_cost
from edgeds.graph.io import save_model
from edgeds.graph.proto import weight_bytes
from edgeds.specs import to_json

CHECKED_SAMPLES = 2
"""Of the feeds kept after calibration (they serve bias correction) the first so many are compared with float."""


@dataclass(frozen=True, kw_only=True)
class FloatNode:
    """A node that could be quantized and was not, and why."""

    node: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class QuantizeReport:
    """What was done and what it cost. Paths are absolute text; SQNR in dB against the float model, None when exact."""

    model: str
    int8_model: str
    cpu_model: str | None
    ranges: str
    table: str | None
    """The TensorRT calibration table, when one was asked for."""
    method: str
    samples: int
    set_digest: str
    shapes: dict[str, int]
    int8_flops_share: float
    quantized_nodes: int
    float_nodes: tuple[FloatNode, ...]
    sqnr_db: float | None
    cpu_sqnr_db: float | None
    outputs: tuple[OutputComparison, ...]
    layers: tuple[LayerComparison, ...]
    weights_bytes_float: int
    weights_bytes_int8: int
    methods: dict[str, float | None] = field(default_factory=dict)
    """For method ``auto``: each method's SQNR in dB on samples held out of calibration (None: exact)."""
    notes: tuple[str, ...] = ()
    seconds: float = 0.0
    autopilot: dict[str, Any] | None = None
    """What was tried to hold an accuracy limit (``--max-drop``); None without one."""
    checked_feeds: tuple[Feeds, ...] = field(default=(), repr=False)


@dataclass(frozen=True, kw_only=True)
class Places:
    source: Path
    target: Path
    cpu: Path | None
    table: Path | None

    @property
    def ranges(self) -> Path:
        return self.target.with_suffix(".ranges.json")

    @property
    def report(self) -> Path:
        return self.target.with_suffix(".report.json")


def check_places(
    source: Path, target: Path, *, cpu: str | Path | None, table: str | Path | None, table_version: str
) -> Places:
    """Refuse before hours of calibration what could not be written after them, or would overwrite the float model."""
    version_number(table_version)
    cpu, table = (Path(path).absolute() if path is not None else None for path in (cpu, table))
    outputs = [path for path in (target, cpu, table) if path is not None]
    for path in outputs:
        if path.is_dir():
            raise SpecError(f"{path}: is a directory; name a file, for example {path / 'model.int8.onnx'}")
        refuse_special(path)
        if real_path(path) == real_path(source):
            raise SpecError(f"{path}: is the float model itself; write to another file")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=path.parent):
                pass
        except OSError as error:
            raise SpecError(f"{path}: its folder cannot be written to: {error.strerror or error}") from error
    if len({real_path(path) for path in outputs}) != len(outputs):
        raise SpecError(f"{target}: what is to be written needs different files")
    return Places(source=source, target=target.absolute(), cpu=cpu, table=table)


def make_report(
    places: Places,
    model: ModelProto,
    fitted: Fitted,
    *,
    found: FoundRanges,
    cpu: CpuFitted | None,
    methods: dict[str, float | None],
) -> QuantizeReport:
    plan, table, checked = fitted.plan, found.table, found.feeds[:CHECKED_SAMPLES]
    return QuantizeReport(
        model=str(places.source),
        int8_model=str(places.target),
        cpu_model=str(places.cpu) if places.cpu is not None else None,
        ranges=str(places.ranges),
        table=str(places.table) if places.table is not None else None,
        method=table.chosen or table.key.method,
        samples=table.samples,
        set_digest=table.key.set_sha256,
        shapes=table.shapes,
        int8_flops_share=int8_share(fitted.model, checked),
        quantized_nodes=len(plan.nodes),
        float_nodes=tuple(FloatNode(node=name, reason=reason) for name, reason in plan.float_nodes.items()),
        sqnr_db=fitted.comparison.sqnr_db,
        cpu_sqnr_db=cpu.comparison.sqnr_db if cpu is not None else None,
        outputs=fitted.comparison.outputs,
        layers=fitted.comparison.layers,
        weights_bytes_float=weight_bytes(model),
        weights_bytes_int8=weight_bytes(fitted.model),
        methods=methods,
        notes=(*plan.notes, *found.notes, *_cpu_notes(cpu)),
        checked_feeds=tuple(checked),
    )


def _cpu_notes(cpu: CpuFitted | None) -> tuple[str, ...]:
    if cpu is None or not cpu.float_convolutions:
        return ()
    names = cpu.float_convolutions
    shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
    return (
        f"CPU form: output of {len(names)} convolutions kept in float, since 8 bits for all channels lose the small "
        f"ones: {shown}",
    )


def int8_share(model: ModelProto, checked: list[Feeds]) -> float:
    names = {value.name for value in model.graph.input}
    shapes = {name: array.shape for name, array in checked[0].items() if name in names} if checked else None
    return count_cost(model, shapes).int8_flops_share


def write_all(
    places: Places, quantized: ModelProto, cpu_model: ModelProto | None, *, table: RangeTable, report: QuantizeReport
) -> None:
    """Write every file, the model last: where it is, everything that belongs to it is there too."""
    data = to_json(replace(report, checked_feeds=()))
    data.pop("checked_feeds")
    try:
        save_ranges(table, places.ranges)
        write_json(places.report, data)
    except OSError as error:
        raise SpecError(f"{places.target.parent}: cannot be written to: {error.strerror or error}") from error
    if places.cpu is not None and cpu_model is not None:
        save_model(cpu_model, places.cpu)
    save_model(quantized, places.target)
