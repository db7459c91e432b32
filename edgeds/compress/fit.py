"""Fit the plan to the model: choose the method, insert Q/DQ, and put back to float what INT8 cannot hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from onnx import ModelProto

from edgeds.compress.bias import correct_biases
from edgeds.compress.calibset import Feeds
from edgeds.compress.placement import QdqPlan
from edgeds.compress.qdq import insert_qdq
from edgeds.compress.ranges import TensorRange
from edgeds.compress.verify import Comparison, LayerComparison, compare_models, lost_layers
from edgeds.errors import CalibrationError
from edgeds.graph.proto import node_inputs
from edgeds.graph.view import GraphView

MAX_ROUNDS = 8
_PREFERENCE = ("percentile", "mse", "entropy", "minmax")
"""Which method wins when several are equally accurate."""


@dataclass(frozen=True, kw_only=True)
class Fitted:
    """The quantized model, the plan that made it and how it compares with float."""

    plan: QdqPlan
    model: ModelProto
    comparison: Comparison


@dataclass(frozen=True, kw_only=True)
class FitSettings:
    dedicated: bool = False
    bias_correction: bool = True
    threads: int | None = None


def usable_plan(plan: QdqPlan, ranges: Mapping[str, TensorRange]) -> QdqPlan:
    """The plan without what has no usable range, the reasons in ``float_nodes``."""
    bad = {name: found.note for name, found in ranges.items() if found.note is not None}
    bad |= {name: "was not calibrated" for name in plan.tensors if name not in ranges}
    return plan.without(bad)


def choose_method(
    model: ModelProto, plan: QdqPlan, candidates: Mapping[str, Mapping[str, TensorRange]], feeds: Sequence[Feeds]
) -> tuple[str, dict[str, float | None]]:
    """The method with the best SQNR of the worst output on ``feeds``, and every method's figure (None: exact)."""
    figures: dict[str, float | None] = {}
    for method, ranges in candidates.items():
        kept = usable_plan(plan, ranges)
        figures[method] = compare_models(model, insert_qdq(model, kept, ranges), feeds).sqnr_db
    ranked = sorted(figures, key=_PREFERENCE.index)
    best = max(ranked, key=lambda name: float("inf") if figures[name] is None else round(figures[name] or 0.0, 2))
    return best, figures


def fit_model(
    model: ModelProto,
    plan: QdqPlan,
    *,
    ranges: Mapping[str, TensorRange],
    feeds: Sequence[Feeds],
    checked: Sequence[Feeds],
    settings: FitSettings,
) -> Fitted:
    """Insert the plan and compare with float on ``checked``; layers that INT8 loses go back to float, by rounds.

    In each round every lost layer goes back that no lost layer feeds: what lies behind one may only have inherited its
    error. Raises CalibrationError when layers are still lost after ``MAX_ROUNDS``, or all of them are.
    """
    view = GraphView(model, copy=False)
    outputs = {node.name: node.output[0] for node in view.nodes}
    for _ in range(MAX_ROUNDS):
        base = model
        if settings.bias_correction:
            base = correct_biases(model, plan, ranges, feeds, threads=settings.threads)
        quantized = insert_qdq(base, plan, ranges, dedicated=settings.dedicated)
        layers = [(node.node, outputs[node.node]) for node in plan.nodes]
        comparison = compare_models(model, quantized, checked, layers=layers, threads=settings.threads)
        lost = {layer.node: layer for layer in lost_layers(comparison)}
        if not lost:
            return Fitted(plan=plan, model=quantized, comparison=comparison)
        if len(lost) == len(plan.nodes) == 1:
            break
        for name in first_lost(view, lost):
            plan = plan.without_node(name, f"INT8 loses its output (SQNR {lost[name].sqnr_db or 0.0:.1f} dB)")
        if not plan.nodes:
            break
    names = ", ".join(f"'{name}' ({layer.sqnr_db or 0.0:.1f} dB)" for name, layer in list(lost.items())[:5])
    raise CalibrationError(
        f"INT8 loses the output of {len(lost)} layers even with what feeds them in float: {names}; check that the "
        "calibration data is what the model is served, try another method, or exclude these nodes"
    )


def first_lost(view: GraphView, lost: Mapping[str, LayerComparison]) -> list[str]:
    """The lost layers with no lost layer upstream, in graph order."""
    tainted: set[str] = set()
    first = []
    for node in view.nodes:
        behind = any(name in tainted for name in node_inputs(node))
        if node.name in lost and not behind:
            first.append(node.name)
        if behind or node.name in lost:
            tainted.update(node.output)
    return first
