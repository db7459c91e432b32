"""Quantize a model: calibrate, place Q/DQ, write the TensorRT form and the CPU form, and prove both against float."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from onnx import ModelProto

from edgeds.compress.bias import correct_biases
from edgeds.compress.calibset import CalibrationSet, Feeds
from edgeds.compress.cpu_variant import cpu_tensors, to_cpu_variant
from edgeds.compress.observers import METHODS
from edgeds.compress.placement import QdqPlan, Selection, plan_placement
from edgeds.compress.qdq import insert_qdq
from edgeds.compress.ranges import (
    SAMPLED_ELEMENTS,
    RangeKey,
    RangeTable,
    TensorRange,
    collect_ranges,
    load_ranges,
    save_ranges,
)
from edgeds.compress.tail import EMPTY_TAIL, find_detector_tail
from edgeds.compress.verify import LayerComparison, OutputComparison, check_scores, compare_models, first_lost_layer
from edgeds.errors import CalibrationError, ModelError, SpecError
from edgeds.files import write_json
from edgeds.graph.cost import count_cost
from edgeds.graph.fold import fold_batchnorm, fold_constants
from edgeds.graph.io import load_model, save_model
from edgeds.graph.proto import each_tensor, light_copy, weight_bytes
from edgeds.graph.view import GraphView
from edgeds.specs import to_json

DEFAULT_METHOD = "percentile"
DEFAULT_PERCENTILE = 99.999
"""Measured on yolo11n: keeps mAP at 320 and 640 px, where 99.99 clips box and score features (docs/benchmarks.md)."""

CHECKED_SAMPLES = 2
KEPT_SAMPLES = 8
"""Feeds held in memory after calibration, for bias correction; the first CHECKED_SAMPLES also for the comparison."""


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
    notes: tuple[str, ...] = ()
    seconds: float = 0.0
    checked_feeds: tuple[Feeds, ...] = field(default=(), repr=False)


def prepare_float(path: Path) -> ModelProto:
    """The float model that calibration and Q/DQ work on: constants folded, BatchNorm folded, node names unchanged."""
    model = fold_batchnorm(fold_constants(load_model(path)))
    for node in model.graph.node:
        if node.op_type in ("QuantizeLinear", "QLinearConv", "QLinearMatMul", "ConvInteger", "MatMulInteger"):
            raise ModelError(f"{path}: already quantized (node '{node.name}' is {node.op_type}); give the float model")
    return GraphView(model).model


def model_digest(model: ModelProto) -> str:
    """Hex SHA-256 over the graph and every weight; the same for inline and external weights."""
    digest = hashlib.sha256(light_copy(model).SerializeToString(deterministic=True))
    for name, tensor in each_tensor(model.graph):
        digest.update(name.encode())
        digest.update(tensor.raw_data or tensor.SerializeToString(deterministic=True))
    return digest.hexdigest()


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
    dedicated: bool = False,
    bias_correction: bool = True,
    threads: int | None = None,
    sampled_elements: int | None = SAMPLED_ELEMENTS,
    quiet: bool = False,
) -> QuantizeReport:
    """Calibrate ``model_path`` over ``calibration`` and write the quantized model to ``out``.

    Beside ``out`` come ``<stem>.ranges.json`` and ``<stem>.report.json``; ``cpu_out`` asks for the uint8 form as well.
    ``ranges_in`` reuses a table when it belongs to exactly this model, set, method and version, and is otherwise
    ignored with a note. Nothing is written unless the quantized model passes the ONNX checker, loads, runs, and keeps
    its outputs alive. Raises ModelError, CalibrationError or SpecError.
    """
    started = time.perf_counter()
    if method not in METHODS:
        raise SpecError(f"calibration method {method!r}: choose one of {', '.join(METHODS)}")
    source, target = Path(model_path), Path(out)
    selection = selection or Selection()
    model = prepare_float(source)
    view = GraphView(model, copy=False)
    tail = find_detector_tail(view) if selection.keep_tail else EMPTY_TAIL
    plan = plan_placement(view, tail, selection)
    if not plan.nodes:
        raise ModelError(f"{source}: nothing to quantize: {_why_nothing(plan)}")
    table, kept, notes = _find_ranges(
        model,
        (*plan.tensors, *(cpu_tensors(view, plan) if cpu_out is not None else ())),
        calibration,
        {"method": method, "percentile": percentile, "sampled_elements": sampled_elements},
        ranges_in=ranges_in,
        threads=threads,
        quiet=quiet,
    )
    plan = _drop_unusable(plan, table, where=str(source))
    checked = kept[:CHECKED_SAMPLES]
    base = correct_biases(model, plan, table.tensors, kept, threads=threads) if bias_correction else model
    while True:
        quantized = insert_qdq(base, plan, table.tensors, dedicated=dedicated)
        comparison = compare_models(model, quantized, checked, layers=_layer_outputs(view, plan), threads=threads)
        lost = first_lost_layer(comparison)
        if lost is None or len(plan.nodes) == 1:
            break
        plan = plan.without_node(lost.node, f"INT8 loses its output (SQNR {lost.sqnr_db:.1f} dB)")
        base = correct_biases(model, plan, table.tensors, kept, threads=threads) if bias_correction else model
    check_scores(comparison)
    cpu_model = to_cpu_variant(quantized, table.tensors) if cpu_out is not None else None
    cpu_comparison = compare_models(model, cpu_model, checked, threads=threads) if cpu_model is not None else None
    if cpu_comparison is not None:
        check_scores(cpu_comparison)
    report = QuantizeReport(
        model=str(source),
        int8_model=str(target),
        cpu_model=str(cpu_out) if cpu_out is not None else None,
        ranges=str(target.with_suffix(".ranges.json")),
        method=method,
        samples=table.samples,
        set_digest=table.key.set_sha256,
        shapes=table.shapes,
        int8_flops_share=_int8_share(quantized, checked),
        quantized_nodes=len(plan.nodes),
        float_nodes=tuple(FloatNode(node=name, reason=reason) for name, reason in plan.float_nodes.items()),
        sqnr_db=comparison.sqnr_db,
        cpu_sqnr_db=cpu_comparison.sqnr_db if cpu_comparison is not None else None,
        outputs=comparison.outputs,
        layers=comparison.layers,
        weights_bytes_float=weight_bytes(model),
        weights_bytes_int8=weight_bytes(quantized),
        notes=(*plan.notes, *notes),
        seconds=time.perf_counter() - started,
        checked_feeds=tuple(checked),
    )
    _write_all(target, quantized, cpu_out, cpu_model, table, report)
    return report


def _drop_unusable(plan: QdqPlan, table: RangeTable, *, where: str) -> QdqPlan:
    """The plan without what has no usable range; CalibrationError when nothing is left."""
    bad = {name: found.note for name, found in table.tensors.items() if found.note is not None}
    bad |= {name: "was not calibrated" for name in plan.tensors if name not in table.tensors}
    kept = plan.without(bad)
    if not kept.nodes:
        raise CalibrationError(f"{where}: no tensor has a usable range: {_why_nothing(kept)}")
    return kept


def _find_ranges(
    model: ModelProto,
    tensors: tuple[str, ...],
    calibration: CalibrationSet,
    key_parts: dict[str, Any],
    *,
    ranges_in: str | Path | None,
    threads: int | None,
    quiet: bool,
) -> tuple[RangeTable, list[Feeds], list[str]]:
    """Ranges from a matching table, else from a calibration run; with the first feeds for the comparison."""
    checked: list[Feeds] = []
    notes: list[str] = []
    tensors = tuple(dict.fromkeys(tensors))
    digest = model_digest(model)
    if ranges_in is not None:
        for _ in _keep_first(calibration, checked):
            pass
        key = RangeKey(model_sha256=digest, set_sha256=calibration.digest, **key_parts)
        reused, note = _reusable(Path(ranges_in), key, tensors)
        notes.append(note)
        if reused is not None:
            return reused, checked, notes
    found: dict[str, TensorRange] = collect_ranges(
        model,
        tensors,
        _Counted(calibration, checked),
        method=key_parts["method"],
        percentile=key_parts["percentile"],
        sampled_elements=key_parts["sampled_elements"],
        threads=threads,
        quiet=quiet,
    )
    key = RangeKey(model_sha256=digest, set_sha256=calibration.digest, **key_parts)
    table = RangeTable(key=key, samples=calibration.samples, shapes=dict(calibration.shapes), tensors=found)
    return table, checked, notes


@dataclass(frozen=True)
class _Counted:
    """A calibration set that also keeps its first feeds."""

    inner: CalibrationSet
    kept: list[Feeds]

    @property
    def expected(self) -> int | None:
        return self.inner.expected

    def __iter__(self) -> Iterator[Feeds]:
        return _keep_first(self.inner, self.kept)


def _keep_first(calibration: CalibrationSet, kept: list[Feeds]) -> Iterator[Feeds]:
    kept.clear()
    for feeds in calibration:
        if len(kept) < KEPT_SAMPLES:
            kept.append(feeds)
        yield feeds


def _reusable(path: Path, key: RangeKey, tensors: tuple[str, ...]) -> tuple[RangeTable | None, str]:
    try:
        table = load_ranges(path)
    except SpecError as error:
        return None, f"ranges not reused: {error}"
    for name, wanted in to_json(key).items():
        found = getattr(table.key, name)
        if found != wanted:
            return None, f"ranges not reused: {path} was made with {name} {found}, this run has {wanted}"
    missing = [name for name in tensors if name not in table.tensors]
    if missing:
        return None, f"ranges not reused: {path} has no range for tensor '{missing[0]}'"
    return table, f"ranges reused from {path}"


def _why_nothing(plan: QdqPlan) -> str:
    if not plan.float_nodes:
        return "the graph has no Conv, ConvTranspose, Gemm or MatMul on float tensors"
    node, reason = next(iter(plan.float_nodes.items()))
    return f"{len(plan.float_nodes)} candidate nodes, '{node}' stays float: {reason}"


def _layer_outputs(view: GraphView, plan: QdqPlan) -> list[tuple[str, str]]:
    outputs = {node.name: node.output[0] for node in view.nodes}
    return [(node.node, outputs[node.node]) for node in plan.nodes]


def _int8_share(model: ModelProto, checked: list[Feeds]) -> float:
    names = {value.name for value in model.graph.input}
    shapes = {name: array.shape for name, array in checked[0].items() if name in names} if checked else None
    return count_cost(model, shapes).int8_flops_share


def _write_all(
    target: Path,
    quantized: ModelProto,
    cpu_out: str | Path | None,
    cpu_model: ModelProto | None,
    table: RangeTable,
    report: QuantizeReport,
) -> None:
    """Write every file, the model last: where it is, everything that belongs to it is there too."""
    save_ranges(table, Path(report.ranges))
    data = to_json(report)
    data.pop("checked_feeds")
    write_json(target.with_suffix(".report.json"), data)
    if cpu_out is not None and cpu_model is not None:
        save_model(cpu_model, Path(cpu_out))
    save_model(quantized, target)


__all__ = [
    "CHECKED_SAMPLES",
    "DEFAULT_METHOD",
    "FloatNode",
    "QuantizeReport",
    "model_digest",
    "prepare_float",
    "quantize_model",
]
