"""What ``edgeds compare`` prints: one JSON document, or lines for people."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from edgeds.engines.base import Engine
from edgeds.report.compare import CompareReport

if TYPE_CHECKING:
    from edgeds.bundle import Bundle
    from edgeds.graph.bisect import BisectResult, LayerDifference

_SHOWN_LAYERS = 10


@dataclass
class Side:
    """One of the two models, as named on the command line, and what runs it."""

    label: str
    engine: Engine
    bundle: Bundle | None


def report_json(report: CompareReport, *, a: Side, b: Side, source: str) -> dict[str, Any]:
    """The document that ``--json`` prints."""
    return {
        "ok": report.ok,
        "a": {"model": a.label, "backend": a.engine.backend, "precision": a.engine.precision},
        "b": {"model": b.label, "backend": b.engine.backend, "precision": b.engine.precision},
        "tolerance": asdict(report.tolerance),
        "samples": report.samples,
        "inputs": source,
        "outputs": {name: asdict(item) for name, item in report.outputs.items()},
        "only_a": list(report.only_a),
        "only_b": list(report.only_b),
        "notes": list(report.notes),
    }


def layer_json(item: LayerDifference) -> dict[str, Any]:
    """One layer for ``--json``."""
    found = item.difference
    return {
        **asdict(item.match),
        "ok": item.ok,
        "max_abs": found.max_abs,
        "rel": found.relative,
        "cosine": found.cosine,
        "sqnr_db": found.sqnr_db,
        "non_finite_mismatch": found.non_finite_mismatch,
        "problem": found.problem,
    }


def bisect_json(found: BisectResult) -> dict[str, Any]:
    """The result of a bisection for ``--json``."""
    return {
        "first": layer_json(found.first) if found.first is not None else None,
        "worst": [layer_json(item) for item in found.worst],
        "layers": found.layers,
        "checked": found.checked,
    }


def describe(report: CompareReport, document: dict[str, Any]) -> list[str]:
    """The outputs for people."""
    sides = [f"{document[key]['model']} ({document[key]['backend']})" for key in "ab"]
    lines = [f"A  {sides[0]}", f"B  {sides[1]}", f"on {document['inputs']}, tolerance {report.tolerance}"]
    for item in report.outputs.values():
        verdict = "ok  " if item.ok else "FAIL"
        if item.problem is not None:
            lines.append(f"{verdict} {item.name}: {item.problem}")
            continue
        figures = [f"max {item.max_abs:.4g}", f"mean {item.mean_abs:.4g}"]
        figures += [
            f"{label} {value:.4g}" for label, value in (("rel", item.rel), ("cosine", item.cosine)) if value is not None
        ]
        figures.append("exact" if item.sqnr_db is None and not item.max_abs else f"SQNR {item.sqnr_db or 0:.1f} dB")
        if item.argmax_agreement is not None:
            figures.append(f"same class {item.argmax_agreement:.1%}")
        lines.append(f"{verdict} {item.name}: {', '.join(figures)}")
        if item.non_finite_mismatch:
            places = ", ".join(map(str, item.non_finite_positions))
            lines.append(
                f"     NaN or infinity on one side only at {item.non_finite_mismatch} places (NaN: {item.nan_a} in A, "
                f"{item.nan_b} in B), first (sample, index...): {places}"
            )
    lines += [f"note {note}" for note in document["notes"]]
    return [*lines, "the outputs agree" if report.ok else "the outputs differ by more than the tolerance"]


def describe_layers(layers: tuple[LayerDifference, ...]) -> list[str]:
    """The layers with the largest accumulated error, for people."""
    if not layers:
        return []
    lines = [f"layers: {len(layers)} shared tensors, error accumulated up to each, largest first"]
    ranked = sorted(layers, key=lambda item: item.difference.relative or 0.0, reverse=True)
    return lines + [_layer_line(item) for item in ranked[:_SHOWN_LAYERS]]


def describe_bisect(found: BisectResult | None) -> list[str]:
    """What a bisection found, for people."""
    if found is None:
        return []
    if found.first is None:
        lines = [
            f"bisect: none of {found.layers} layers breaks the tolerance alone, the error builds up; most of it in:"
        ]
        return lines + [_layer_line(item) for item in found.worst]
    return ["bisect: first layer beyond the tolerance with equal inputs:", _layer_line(found.first)]


def _layer_line(item: LayerDifference) -> str:
    found = item.difference
    figures = (
        found.problem or f"max {found.max_abs:.4g}, rel {'-' if found.relative is None else f'{found.relative:.4g}'}"
    )
    if found.non_finite_mismatch:
        figures += f", {found.non_finite_mismatch} places finite on one side only"
    return f"  {item.match.op:<12} {item.match.node}: {figures}"
