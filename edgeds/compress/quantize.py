"""Quantize a model: calibrate, place Q/DQ, write the TensorRT form and the CPU form, and prove both against float."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from onnx import ModelProto

from edgeds.compress.accuracy_limit import Limit, layer_costs
from edgeds.compress.autopilot import Costs, Pilot
from edgeds.compress.calibset import CalibrationSet
from edgeds.compress.candidates import CandidateMaker
from edgeds.compress.cpu_fit import fit_cpu_variant
from edgeds.compress.cpu_variant import cpu_tensors
from edgeds.compress.fit import FitSettings, Fitted, choose_method, fit_model, usable_plan
from edgeds.compress.placement import QdqPlan, Selection, plan_placement
from edgeds.compress.qdq import FLOAT16_OPSET, PER_AXIS_OPSET
from edgeds.compress.quantize_report import (
    CHECKED_SAMPLES,
    FloatNode,
    Places,
    QuantizeReport,
    check_places,
    make_report,
    write_all,
)
from edgeds.compress.rangefind import FoundRanges, RangeSettings, find_ranges, model_digest
from edgeds.compress.ranges import SAMPLED_ELEMENTS, RangeTable
from edgeds.compress.tail import EMPTY_TAIL, WEIGHTED_OPS, find_detector_tail
from edgeds.compress.trt_table import write_table
from edgeds.compress.verify import check_scores
from edgeds.errors import CalibrationError, ModelError, SpecError
from edgeds.graph.fold import fold_batchnorm, fold_constants
from edgeds.graph.io import load_model
from edgeds.graph.opset import require_opset
from edgeds.graph.proto import each_graph
from edgeds.graph.view import GraphView
from edgeds.progress import stage

DEFAULT_METHOD = "mse"
DEFAULT_PERCENTILE = 99.999
"""For the percentile method: on yolo11n 99.99 clips features of boxes and scores (docs/benchmarks.md)."""

_QUANTIZED_OPS = {
    *("QuantizeLinear", "DynamicQuantizeLinear", "ConvInteger", "MatMulInteger", "MatMulIntegerToFloat", "QGemm"),
    *("DynamicQuantizeMatMul", "MatMulNBits", "QAttention", "QEmbedLayerNormalization", "QMoE"),
}


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
    limit: Limit | None = None,
    target: str | None = None,
    quiet: bool = False,
) -> QuantizeReport:
    """Calibrate ``model_path`` over ``calibration`` and write the quantized model to ``out``.

    ``method`` is minmax, percentile, entropy, mse, or auto: the best of the four on samples held out of calibration.
    Beside ``out`` come ``<stem>.ranges.json`` and ``<stem>.report.json``; ``cpu_out`` asks for the uint8 form as well.
    ``ranges_in`` reuses a table when it belongs to exactly this model, set, method and version, and is otherwise
    ignored with a note; a TensorRT calibration table there is imported. ``table_out`` also writes the ranges as such a
    table, for the calibrators of TensorRT ``table_version``. With ``limit`` the autopilot searches (``method`` is then
    its choice) and ``report.autopilot`` says whether the limit holds; layers that hurt go back to float in the order of
    accuracy per predicted millisecond on ``target``, per FLOP without one. Nothing is written unless the quantized
    model passes the ONNX checker, loads, runs, and keeps its outputs alive.

    Raises ModelError, CalibrationError or SpecError.
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
    places = check_places(Path(model_path), Path(out), cpu=cpu_out, table=table_out, table_version=table_version)
    if limit is not None and (dedicated or settings.ranges_in is not None):
        raise SpecError("--max-drop searches ranges itself: leave --ranges and --dedicated-qdq out")
    chosen = _calibrate(
        places,
        calibration,
        selection or Selection(),
        settings,
        limit=limit,
        target=target,
        bias_correction=bias_correction,
    )
    corrects = bias_correction if chosen.bias_correction is None else chosen.bias_correction
    fitting = FitSettings(dedicated=dedicated, bias_correction=corrects, threads=threads)
    return _finish(places, chosen, fitting, started=started, table_version=table_version, quiet=quiet)


def _finish(
    places: Places, chosen: _Calibrated, fitting: FitSettings, *, started: float, table_version: str, quiet: bool
) -> QuantizeReport:
    """Insert the pairs, compare with float, make the CPU form, and write it all."""
    model, found = chosen.model, chosen.found
    ranges, checked = found.table.tensors, found.feeds[:CHECKED_SAMPLES]
    with stage("comparing INT8 with float", quiet=quiet):
        fitted = fit_model(model, chosen.plan, ranges=ranges, feeds=found.feeds, checked=checked, settings=fitting)
    check_scores(fitted.comparison)
    autopilot = chosen.confirm(fitted) if chosen.confirm is not None else None
    cpu = None
    if places.cpu is not None:
        with stage("making the CPU form", quiet=quiet):
            cpu = fit_cpu_variant(
                model,
                fitted.model,
                ranges=ranges,
                feeds=checked,
                target_db=fitted.comparison.sqnr_db,
                threads=fitting.threads,
            )
    report = make_report(places, model, fitted, found=found, cpu=cpu, methods=chosen.methods)
    report = replace(report, autopilot=autopilot, seconds=time.perf_counter() - started)
    if places.table is not None and (left_out := write_table(ranges, places.table, version=table_version)):
        note = f"{places.table}: {len(left_out)} tensors without a usable range left out ('{left_out[0]}', ...)"
        report = replace(report, notes=(*report.notes, note))
    write_all(places, fitted.model, cpu.model if cpu is not None else None, table=found.table, report=report)
    return report


@dataclass(frozen=True, kw_only=True)
class _Calibrated:
    """What is to be quantized and how. With an autopilot: its choice of ``bias_correction``, and what reports its
    search for the model that came out."""

    model: ModelProto
    plan: QdqPlan
    found: FoundRanges
    methods: dict[str, float | None] = field(default_factory=dict)
    bias_correction: bool | None = None
    confirm: Callable[[Fitted], dict[str, Any]] | None = None


def _calibrate(
    places: Places,
    calibration: CalibrationSet,
    selection: Selection,
    settings: RangeSettings,
    *,
    limit: Limit | None,
    target: str | None,
    bias_correction: bool,
) -> _Calibrated:
    model = prepare_float(places.source)

    def place(given: ModelProto) -> QdqPlan:
        return place_qdq(GraphView(given, copy=False), selection, where=places.source)

    def wanted(given: ModelProto, plan: QdqPlan) -> tuple[str, ...]:
        extra = cpu_tensors(GraphView(given, copy=False), plan) if places.cpu is not None else ()
        return (*plan.tensors, *extra)

    if limit is not None:
        flops = layer_costs(model, target=None)
        costs = Costs(price=flops if target is None else layer_costs(model, target=target), flops=flops)
        # A TensorRT table belongs to the weights as they are.
        maker = CandidateMaker(place=place, wanted=wanted, settings=settings, rescales=places.table is None)
        pilot = Pilot(limit, maker=maker, costs=costs)
        flight = pilot.fly(model, calibration, bias_correction=bias_correction)
        best = flight.chosen
        table = replace(best.found.table, tensors=best.ranges, chosen=best.name)
        return _Calibrated(
            model=best.model,
            plan=best.plan,
            found=replace(best.found, table=table),
            bias_correction=best.bias_correction,
            confirm=lambda fitted: pilot.confirmed(flight, fitted).to_json(),
        )
    plan = place(model)
    found = find_ranges(model, wanted(model, plan), calibration=calibration, settings=settings)
    with stage("choosing the method", quiet=settings.quiet):
        found, methods = _with_best_method(model, plan, found)
    plan = usable_plan(plan, found.table.tensors)
    if not plan.nodes:
        raise CalibrationError(f"{places.source}: no tensor has a usable range: {_why_nothing(plan)}")
    return _Calibrated(model=model, plan=plan, found=found, methods=methods)


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
    plan = place_qdq(view, Selection(), where=model_path)
    wanted = (*plan.tensors, *cpu_tensors(view, plan))
    return find_ranges(model, wanted, calibration=calibration, settings=settings).table


def place_qdq(view: GraphView, selection: Selection, *, where: str | Path) -> QdqPlan:
    plan = plan_placement(view, find_detector_tail(view) if selection.keep_tail else EMPTY_TAIL, selection)
    if not plan.nodes:
        raise ModelError(f"{where}: nothing to quantize: {_why_nothing(plan)}")
    return plan


def _with_best_method(
    model: ModelProto, plan: QdqPlan, found: FoundRanges
) -> tuple[FoundRanges, dict[str, float | None]]:
    """For ``auto``: the ranges of the method that is best on held-out samples, and every method's figure."""
    if not found.candidates:
        return found, {}
    best, figures = choose_method(model, plan, found.candidates, found.held_out)
    table = replace(found.table, tensors=found.candidates[best], chosen=best)
    return replace(found, table=table), figures


def _why_nothing(plan: QdqPlan) -> str:
    if not plan.float_nodes:
        return "the graph has no Conv, ConvTranspose, Gemm or MatMul on float tensors"
    node, reason = next(iter(plan.float_nodes.items()))
    return f"{len(plan.float_nodes)} candidate nodes, '{node}' stays float: {reason}"


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
