"""Ways to quantize one model that the autopilot compares: calibration methods over plain and rescaled weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from onnx import ModelProto

from edgeds.compress.bias import Means, correct_biases
from edgeds.compress.calibread import Sample
from edgeds.compress.calibset import CalibrationSet
from edgeds.compress.fit import usable_plan
from edgeds.compress.placement import QdqPlan
from edgeds.compress.qdq import insert_qdq
from edgeds.compress.rangefind import AUTO, FoundRanges, RangeSettings, find_ranges
from edgeds.compress.ranges import TensorRange
from edgeds.compress.seams import equalize, find_seams
from edgeds.compress.smoothquant import smooth
from edgeds.errors import CalibrationError
from edgeds.graph.view import GraphView


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One way to quantize: a (rescaled) float model, the pairs, their ranges.

    ``agreement``: points on held-out samples (judge.py); ``points``: of the metric, None until measured; ``is_plain``:
    a calibration method by itself, on the weights as they are.
    """

    name: str
    is_plain: bool
    model: ModelProto = field(repr=False)
    plan: QdqPlan = field(repr=False)
    found: FoundRanges = field(repr=False)
    ranges: dict[str, TensorRange] = field(repr=False)
    means: Means = field(repr=False, default_factory=dict)
    bias_correction: bool = True
    agreement: float = 0.0
    points: float | None = None

    def without(self, nodes: Sequence[str], reason: str) -> Candidate:
        """With these layers in float."""
        plan = self.plan
        for node in nodes:
            plan = plan.without_node(node, reason)
        return replace(self, plan=plan, points=None)


@dataclass(frozen=True, kw_only=True)
class CandidateMaker:
    """``place(model)`` says where pairs go, ``wanted(model, plan)`` which tensors need ranges; ``rescales``: weights
    may be equalised and smoothed."""

    place: Callable[[ModelProto], QdqPlan]
    wanted: Callable[[ModelProto, QdqPlan], Sequence[str]]
    settings: RangeSettings
    rescales: bool = True

    def make(self, model: ModelProto, calibration: CalibrationSet) -> list[Candidate]:
        """Every method on the model itself, and on equalised or smoothed weights where its layers allow it.

        Raises CalibrationError when no tensor has a usable range with any of them.
        """
        calibration = _many_times(calibration)
        plan, found = self._ranges(model, calibration)
        made = _by_method("", model, plan, found)
        for prefix, variant in self._variants(model, found) if self.rescales else ():
            made += _by_method(prefix, variant, *self._ranges(variant, calibration))
        if not made:
            raise CalibrationError("no tensor has a usable range with any method, so nothing can be INT8")
        return made

    def _variants(self, model: ModelProto, found: FoundRanges) -> list[tuple[str, ModelProto]]:
        seams = find_seams(GraphView(model, copy=False))
        variants = []
        if any(seam.makers and seam.axis == 1 for seam in seams):
            variants.append(("equalized+", equalize(model).model))
        if any(seam.axis == -1 for seam in seams):
            moved = smooth(model, found.feeds, threads=self.settings.threads, quiet=self.settings.quiet)
            if moved.seams:
                variants.append(("smoothed+", moved.model))
        return variants

    def _ranges(self, model: ModelProto, calibration: CalibrationSet) -> tuple[QdqPlan, FoundRanges]:
        plan = self.place(model)
        settings = replace(self.settings, method=AUTO, ranges_in=None)
        return plan, find_ranges(model, self.wanted(model, plan), calibration=calibration, settings=settings)


def quantized(item: Candidate, *, threads: int | None) -> ModelProto:
    """The Q/DQ model of a candidate."""
    base = item.model
    if item.bias_correction:
        base = correct_biases(base, item.plan, item.ranges, item.found.feeds, threads=threads, known=item.means)
    return insert_qdq(base, item.plan, item.ranges)


def _by_method(prefix: str, model: ModelProto, plan: QdqPlan, found: FoundRanges) -> list[Candidate]:
    means: Means = {}
    made = []
    for method, ranges in found.candidates.items():
        kept = usable_plan(plan, ranges)
        if kept.nodes:
            made.append(
                Candidate(
                    name=prefix + method,
                    is_plain=not prefix,
                    model=model,
                    plan=kept,
                    found=found,
                    ranges=dict(ranges),
                    means=means,
                )
            )
    return made


def _many_times(calibration: CalibrationSet) -> CalibrationSet:
    """Samples that can be read again: several calibrations are needed."""
    if not calibration.one_shot:
        return calibration
    kept = [Sample(name=f"sample {index}", feeds=dict(feed)) for index, feed in enumerate(calibration)]
    return replace(calibration, _read=lambda: iter(kept), one_shot=False)
