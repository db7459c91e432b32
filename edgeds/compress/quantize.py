"""Quantize a model: calibrate, place Q/DQ, write the TensorRT form and the CPU form, and prove both against float."""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from onnx import ModelProto

from edgeds.compress.calibset import CalibrationSet, Feeds
from edgeds.compress.cpu_fit import CpuFitted, fit_cpu_variant
from edgeds.compress.cpu_variant import cpu_tensors
from edgeds.compress.fit import FitSettings, Fitted, choose_method, fit_model, usable_plan
from edgeds.compress.placement import QdqPlan, Selection, plan_placement
from edgeds.compress.qdq import FLOAT16_OPSET, PER_AXIS_OPSET
from edgeds.compress.rangefind import FoundRanges, RangeSettings, find_ranges, model_digest
from edgeds.compress.ranges import SAMPLED_ELEMENTS, RangeTable, save_ranges
from edgeds.compress.tail import EMPTY_TAIL, WEIGHTED_OPS, find_detector_tail
from edgeds.compress.trt_table import version_number, write_table
from edgeds.compress.verify import LayerComparison, OutputComparison, check_scores
from edgeds.errors import CalibrationError, ModelError, SpecError
from edgeds.files import real_path, refuse_special, write_json
from edgeds.graph.cost import count_cost
from edgeds.graph.fold import fold_batchnorm, fold_constants
from edgeds.graph.io import load_model, save_model
from edgeds.graph.opset import require_opset
from edgeds.graph.proto import each_graph, weight_bytes
from edgeds.graph.view import GraphView
from edgeds.progress import stage
from edgeds.specs import to_json

DEFAULT_METHOD = "mse"
DEFAULT_PERCENTILE = 99.999
"""For the percentile method: on yolo11n 99.99 clips features of boxes and scores (docs/benchmarks.md)."""

CHECKED_SAMPLES = 2
"""Of the feeds kept after calibration (they serve bias correction) the first so many are compared with float."""

_QUANTIZED_OPS = {
    *("QuantizeLinear", "DynamicQuantizeLinear", "ConvInteger", "MatMulInteger", "MatMulIntegerToFloat", "QGemm"),
    *("DynamicQuantizeMatMul", "MatMulNBits", "QAttention", "QEmbedLayerNormalization", "QMoE"),
}


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
    checked_feeds: tuple[Feeds, ...] = field(default=(), repr=False)


def prepare_float(path: Path) -> ModelProto:
    """The float model that calibration and Q/DQ work on: constants and BatchNorm folded, the opset one that has the
    Q/DQ it needs (13, or 19 around float16), node names unchanged."""
    model = fold_batchnorm(fold_constants(load_model(path)))
    for graph in each_graph(model.graph):
        for node in graph.node:
            if node.op_type in _QUANTIZED_OPS or node.op_type.startswith("QLinear"):
                raise ModelError(
                    f"{path}: already quantized (node '{node.name}' is {node.op_type}); give the float model"
                )
    # Raised before anything is named: the converter gives some tensors new names (Upsample becomes Resize).
    model = require_opset(model, PER_AXIS_OPSET)
    view = GraphView(model)
    halves = (
        view.dtype(name) == np.float16 for node in view.nodes if node.op_type in WEIGHTED_OPS for name in node.input
    )
    return GraphView(require_opset(model, FLOAT16_OPSET)).model if any(halves) else view.model


def quantize_model(
    model_path: str | Path,
    calibration: CalibrationSet,
    *,
    out: str | Path,
    method: str = DEFAULT_METHOD,
    percentile: float = DEFAULT_PERCENTILE,
    selection: Selection | None = None,
    cpu_out: str | Path | None = None,
    ranges_in: str | Path | None = None,
    table_out: str | Path | None = None,
    table_version: str = "10.3",
    dedicated: bool = False,
    bias_correction: bool = True,
    threads: int | None = None,
    sampled_elements: int | None = SAMPLED_ELEMENTS,
    quiet: bool = False,
) -> QuantizeReport:
    """Calibrate ``model_path`` over ``calibration`` and write the quantized model to ``out``.

    ``method`` is minmax, percentile, entropy, mse, or auto: the best of the four on samples held out of calibration.
    Beside ``out`` come ``<stem>.ranges.json`` and ``<stem>.report.json``; ``cpu_out`` asks for the uint8 form as well.
    ``ranges_in`` reuses a table when it belongs to exactly this model, set, method and version, and is otherwise
    ignored with a note; a TensorRT calibration table there is imported. ``table_out`` also writes the ranges as such a
    table, for the calibrators of TensorRT ``table_version``. Nothing is written unless the quantized model passes the
    ONNX checker, loads, runs, and keeps its outputs alive. Raises ModelError, CalibrationError or SpecError.
    """
    started = time.perf_counter()
    settings = RangeSettings(
        method=method,
        percentile=percentile,
        sampled_elements=sampled_elements,
        ranges_in=Path(ranges_in) if ranges_in is not None else None,
        threads=threads,
        quiet=quiet,
    )
    places = _check_places(Path(model_path), Path(out), cpu=cpu_out, table=table_out, table_version=table_version)
    model = prepare_float(places.source)
    view = GraphView(model, copy=False)
    plan = _place(view, selection or Selection(), where=places.source)
    wanted = (*plan.tensors, *(cpu_tensors(view, plan) if cpu_out is not None else ()))
    found = find_ranges(model, wanted, calibration=calibration, settings=settings)
    with stage("choosing the method", quiet=quiet):
        found, methods = _with_best_method(model, plan, found)
    plan = usable_plan(plan, found.table.tensors)
    if not plan.nodes:
        raise CalibrationError(f"{places.source}: no tensor has a usable range: {_why_nothing(plan)}")
    ranges, checked = found.table.tensors, found.feeds[:CHECKED_SAMPLES]
    fitting = FitSettings(dedicated=dedicated, bias_correction=bias_correction, threads=threads)
    with stage("comparing INT8 with float", quiet=quiet):
        fitted = fit_model(model, plan, ranges=ranges, feeds=found.feeds, checked=checked, settings=fitting)
    check_scores(fitted.comparison)
    cpu = None
    if places.cpu is not None:
        with stage("making the CPU form", quiet=quiet):
            cpu = fit_cpu_variant(
                model,
                fitted.model,
                ranges=ranges,
                feeds=checked,
                target_db=fitted.comparison.sqnr_db,
                threads=threads,
            )
    report = _report(places, model, fitted, found=found, cpu=cpu, methods=methods)
    report = replace(report, seconds=time.perf_counter() - started)
    if places.table is not None and (left_out := write_table(ranges, places.table, version=table_version)):
        note = f"{places.table}: {len(left_out)} tensors without a usable range left out ('{left_out[0]}', ...)"
        report = replace(report, notes=(*report.notes, note))
    _write_all(places, fitted.model, cpu.model if cpu is not None else None, table=found.table, report=report)
    return report


def measure_ranges(
    model_path: str | Path,
    calibration: CalibrationSet,
    *,
    method: str = DEFAULT_METHOD,
    percentile: float = DEFAULT_PERCENTILE,
    sampled_elements: int | None = SAMPLED_ELEMENTS,
    threads: int | None = None,
    quiet: bool = False,
) -> RangeTable:
    """The table that ``quantize_model`` would measure with the default selection, the CPU form's tensors included.

    Raises ModelError, CalibrationError or SpecError.
    """
    settings = RangeSettings(
        method=method, percentile=percentile, sampled_elements=sampled_elements, threads=threads, quiet=quiet
    )
    model = prepare_float(Path(model_path))
    view = GraphView(model, copy=False)
    plan = _place(view, Selection(), where=model_path)
    wanted = (*plan.tensors, *cpu_tensors(view, plan))
    return find_ranges(model, wanted, calibration=calibration, settings=settings).table


def _place(view: GraphView, selection: Selection, *, where: str | Path) -> QdqPlan:
    plan = plan_placement(view, find_detector_tail(view) if selection.keep_tail else EMPTY_TAIL, selection)
    if not plan.nodes:
        raise ModelError(f"{where}: nothing to quantize: {_why_nothing(plan)}")
    return plan


@dataclass(frozen=True, kw_only=True)
class _Places:
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


def _check_places(
    source: Path, target: Path, *, cpu: str | Path | None, table: str | Path | None, table_version: str
) -> _Places:
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
    return _Places(source=source, target=target.absolute(), cpu=cpu, table=table)


def _with_best_method(
    model: ModelProto, plan: QdqPlan, found: FoundRanges
) -> tuple[FoundRanges, dict[str, float | None]]:
    """For ``auto``: the ranges of the method that is best on held-out samples, and every method's figure."""
    if not found.candidates:
        return found, {}
    best, figures = choose_method(model, plan, found.candidates, found.held_out)
    table = replace(found.table, tensors=found.candidates[best], chosen=best)
    return replace(found, table=table), figures


def _report(
    places: _Places,
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
        int8_flops_share=_int8_share(fitted.model, checked),
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


def _why_nothing(plan: QdqPlan) -> str:
    if not plan.float_nodes:
        return "the graph has no Conv, ConvTranspose, Gemm or MatMul on float tensors"
    node, reason = next(iter(plan.float_nodes.items()))
    return f"{len(plan.float_nodes)} candidate nodes, '{node}' stays float: {reason}"


def _int8_share(model: ModelProto, checked: list[Feeds]) -> float:
    names = {value.name for value in model.graph.input}
    shapes = {name: array.shape for name, array in checked[0].items() if name in names} if checked else None
    return count_cost(model, shapes).int8_flops_share


def _write_all(
    places: _Places, quantized: ModelProto, cpu_model: ModelProto | None, *, table: RangeTable, report: QuantizeReport
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


__all__ = [
    "CHECKED_SAMPLES",
    "DEFAULT_METHOD",
    "FloatNode",
    "QuantizeReport",
    "measure_ranges",
    "model_digest",
    "prepare_float",
    "quantize_model",
]
