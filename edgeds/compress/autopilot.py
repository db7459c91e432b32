"""Quantize within an accuracy limit: try the methods, repair what hurts, give back to float what must be.

The search keeps the best it has measured, so the result is never worse than the best single method it tried:

1. Every calibration method (and, where the network allows, equalised or smoothed weights) is compared on samples held
   out of calibration; the best few are measured with the metric that counts.
2. If the limit does not hold, tensors on which the methods disagree choose their range one by one.
3. Then layers go back to float, in the order of error removed per cost, as few as the metric needs.

The metric is the task's own where labels exist (points of mAP50-95, of Spearman's correlation ...). Without labels it
is the agreement with the float model: 100 x (1 - error power / signal power) of the worst output, so that a drop of
0.5 points is a signal-to-noise ratio of 23 dB.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from onnx import ModelProto

from edgeds.compress.accuracy_limit import Limit, agreement
from edgeds.compress.bias import correct_biases
from edgeds.compress.calibread import Sample
from edgeds.compress.calibset import CalibrationSet
from edgeds.compress.fit import usable_plan
from edgeds.compress.placement import QdqPlan
from edgeds.compress.qdq import insert_qdq
from edgeds.compress.rangefind import AUTO, FoundRanges, RangeSettings, find_ranges
from edgeds.compress.ranges import TensorRange
from edgeds.compress.seams import equalize, find_seams
from edgeds.compress.smoothquant import smooth
from edgeds.compress.verify import compare_models
from edgeds.errors import CalibrationError, SpecError
from edgeds.graph.io import save_model
from edgeds.graph.view import GraphView
from edgeds.progress import track

Ranges = Mapping[str, TensorRange]
MEASURED_CANDIDATES = 2
"""How many of the compared candidates the metric is asked about; the first is nearly always the best."""
PROBED_LAYERS = 32
PROBED_TENSORS = 12
_DISAGREE = 1.2
"""Methods disagree about a tensor when their largest and smallest range differ by this factor."""
_REASON = "autopilot: its rounding costs more accuracy than the limit leaves"


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One way to quantize: a (rescaled) float model, the pairs, their ranges. ``sqnr_db`` on held-out samples."""

    name: str
    model: ModelProto = field(repr=False)
    plan: QdqPlan = field(repr=False)
    found: FoundRanges = field(repr=False)
    ranges: dict[str, TensorRange] = field(repr=False)
    bias_correction: bool = True
    sqnr_db: float = -math.inf
    points: float | None = None


@dataclass(frozen=True, kw_only=True)
class Layer:
    """A layer's part in the error: the agreement gained in points when it alone goes back to float, and its cost."""

    node: str
    gain: float
    cost: float


@dataclass(frozen=True, kw_only=True)
class Flight:
    """What was tried and what came out. ``blame``: layers ordered by how much of the error is theirs."""

    chosen: Candidate
    metric: str
    float_points: float
    points: float
    max_drop: float
    tried: tuple[tuple[str, float, float | None], ...]
    returned: tuple[str, ...]
    blame: tuple[Layer, ...]

    @property
    def drop(self) -> float:
        """Points lost against float."""
        return self.float_points - self.points

    @property
    def holds(self) -> bool:
        """Whether the limit holds."""
        return self.drop <= self.max_drop

    def to_json(self) -> dict[str, Any]:
        """For the report."""
        return {
            "metric": self.metric,
            "float": round(self.float_points, 4),
            "int8": round(self.points, 4),
            "drop": round(self.drop, 4),
            "max_drop": self.max_drop,
            "holds": self.holds,
            "method": self.chosen.name,
            "tried": [
                {"method": name, "sqnr_db": None if math.isinf(db) else round(db, 2), "points": points}
                for name, db, points in self.tried
            ],
            "returned_to_float": list(self.returned),
            "blame": [{"node": layer.node, "gain": round(layer.gain, 4)} for layer in self.blame],
        }


class Pilot:
    """One search. ``place(model) -> QdqPlan`` says where pairs go; ``wanted(view, plan)`` which tensors need ranges."""

    def __init__(
        self,
        limit: Limit,
        *,
        place: Callable[[ModelProto], QdqPlan],
        wanted: Callable[[ModelProto, QdqPlan], Sequence[str]],
        settings: RangeSettings,
        costs: Mapping[str, float],
    ) -> None:
        self._limit = limit
        self._place, self._wanted = place, wanted
        self._settings = replace(settings, method=AUTO, ranges_in=None)
        self._costs = costs
        self._tried: list[tuple[str, float, float | None]] = []

    def fly(self, model: ModelProto, calibration: CalibrationSet) -> Flight:
        """Search. Raises CalibrationError when nothing can be quantized."""
        calibration = _many_times(calibration)
        candidates = self._candidates(model, calibration)
        ranked = sorted(candidates, key=lambda item: item.sqnr_db, reverse=True)
        base = self._float_points(model)
        measured = [self._measured(item, model) for item in ranked[:MEASURED_CANDIDATES]]
        self._tried += [(item.name, item.sqnr_db, None) for item in ranked[MEASURED_CANDIDATES:]]
        best = max(measured, key=_points)
        blame: tuple[Layer, ...] = ()
        returned: tuple[str, ...] = ()
        if not self._holds(best, base):
            best = max(best, self._measured(self._tune_tensors(best, model), model), key=_points)
        if not self._holds(best, base):
            blame = self._blame(best, model)
            best, returned = self._give_back(best, model, blame, base)
        return Flight(
            chosen=best,
            metric=self._limit.metric,
            float_points=base,
            points=_points(best),
            max_drop=self._limit.max_drop,
            tried=tuple(self._tried),
            returned=returned,
            blame=blame,
        )

    def _candidates(self, model: ModelProto, calibration: CalibrationSet) -> list[Candidate]:
        variants = {"": model}
        first = self._ranges(model, calibration)
        view = GraphView(model, copy=False)
        seams = find_seams(view)
        if any(seam.makers and seam.axis == 1 for seam in seams):
            variants["equalized+"] = equalize(model).model
        if any(seam.axis == -1 for seam in seams):
            variants["smoothed+"] = smooth(model, first[1].feeds, threads=self._settings.threads).model
        made: list[Candidate] = []
        for prefix, variant in variants.items():
            plan, found = first if not prefix else self._ranges(variant, calibration)
            for method, ranges in found.candidates.items():
                kept = usable_plan(plan, ranges)
                if kept.nodes:
                    made.append(
                        Candidate(name=prefix + method, model=variant, plan=kept, found=found, ranges=dict(ranges))
                    )
        if not made:
            raise CalibrationError("no tensor has a usable range with any method, so nothing can be INT8")
        quiet = self._settings.quiet
        return [
            self._compared(item, model) for item in track(made, what="comparing methods", total=len(made), quiet=quiet)
        ]

    def _ranges(self, model: ModelProto, calibration: CalibrationSet) -> tuple[QdqPlan, FoundRanges]:
        plan = self._place(model)
        found = find_ranges(model, self._wanted(model, plan), calibration=calibration, settings=self._settings)
        return plan, found

    def quantized(self, item: Candidate) -> ModelProto:
        """The Q/DQ model of a candidate."""
        base = item.model
        if item.bias_correction:
            base = correct_biases(base, item.plan, item.ranges, item.found.feeds, threads=self._settings.threads)
        return insert_qdq(base, item.plan, item.ranges)

    def _compared(self, item: Candidate, model: ModelProto) -> Candidate:
        """With its figure on held-out samples, biases corrected or not, whichever is better."""
        both = [replace(item, bias_correction=corrects) for corrects in (True, False)]
        return max((replace(one, sqnr_db=self._sqnr(one, model)) for one in both), key=lambda one: one.sqnr_db)

    def _sqnr(self, item: Candidate, model: ModelProto) -> float:
        feeds = item.found.held_out or item.found.feeds
        try:
            found = compare_models(model, self.quantized(item), feeds, threads=self._settings.threads).sqnr_db
        except CalibrationError:
            return -math.inf  # an output died: worse than any figure
        return math.inf if found is None else found

    def _float_points(self, model: ModelProto) -> float:
        return 100.0 if self._limit.measure is None else self._points_of(model)

    def _points_of(self, model: ModelProto) -> float:
        if self._limit.measure is None:
            raise SpecError("there is no metric to measure")
        with TemporaryDirectory(prefix="edgeds-autopilot-") as folder:
            return float(self._limit.measure(save_model(model, Path(folder) / "candidate.onnx")))

    def _measured(self, item: Candidate, model: ModelProto) -> Candidate:
        if math.isinf(item.sqnr_db) and item.sqnr_db < 0:
            item = replace(item, points=-math.inf)
        elif self._limit.measure is None:
            item = replace(item, points=agreement(self._sqnr(item, model)))
        else:
            item = replace(item, points=self._points_of(self.quantized(item)))
        self._tried.append((item.name, item.sqnr_db, item.points))
        return item

    def _holds(self, item: Candidate, base: float) -> bool:
        return base - _points(item) <= self._limit.max_drop

    def _tune_tensors(self, item: Candidate, model: ModelProto) -> Candidate:
        """Where methods disagree most, the range with the least error at the outputs, one tensor after the other."""
        options: list[tuple[float, str]] = []
        for name in item.plan.tensors:
            scales = [ranges[name].scale for ranges in item.found.candidates.values() if name in ranges]
            if len(scales) > 1 and min(scales) > 0 and max(scales) > _DISAGREE * min(scales):
                options.append((max(scales) / min(scales), name))
        chosen = [name for _, name in sorted(options, reverse=True)[:PROBED_TENSORS]]
        best = item
        for name in track(chosen, what="choosing ranges", total=len(chosen), quiet=self._settings.quiet):
            for ranges in item.found.candidates.values():
                if name not in ranges or ranges[name].scale == best.ranges[name].scale or ranges[name].note:
                    continue
                trial = replace(best, ranges={**best.ranges, name: ranges[name]})
                trial = replace(trial, sqnr_db=self._sqnr(trial, model))
                if trial.sqnr_db > best.sqnr_db:
                    best = trial
        return replace(best, name=f"{item.name}, ranges by tensor", points=None)

    def _blame(self, item: Candidate, model: ModelProto) -> tuple[Layer, ...]:
        """Agreement gained by each layer alone in float, most per cost first."""
        names = [plan.node for plan in item.plan.nodes]
        if len(names) > PROBED_LAYERS:
            names = self._loudest(item, model, names)
        start = agreement(item.sqnr_db)
        layers = []
        for name in track(names, what="finding layers to blame", total=len(names), quiet=self._settings.quiet):
            trial = replace(item, plan=item.plan.without_node(name, _REASON))
            gain = agreement(self._sqnr(trial, model)) - start if trial.plan.nodes else 0.0
            layers.append(Layer(node=name, gain=gain, cost=max(self._costs.get(name, 0.0), 1e-12)))
        return tuple(sorted(layers, key=lambda layer: layer.gain / layer.cost if layer.gain > 0 else -1, reverse=True))

    def _loudest(self, item: Candidate, model: ModelProto, names: list[str]) -> list[str]:
        """Layers whose own error stands out: the fall of the signal-to-noise ratio from what feeds them."""
        view = GraphView(item.model, copy=False)
        outputs = {node.name: node.output[0] for node in view.nodes}
        layers = [(name, outputs[name]) for name in names]
        feeds = item.found.held_out or item.found.feeds
        found = compare_models(item.model, self.quantized(item), feeds, layers=layers, threads=self._settings.threads)
        level = {layer.node: math.inf if layer.sqnr_db is None else layer.sqnr_db for layer in found.layers}
        return sorted(names, key=lambda name: level[name])[:PROBED_LAYERS]

    def _give_back(
        self, item: Candidate, model: ModelProto, blame: Sequence[Layer], base: float
    ) -> tuple[Candidate, tuple[str, ...]]:
        """The shortest start of ``blame`` that has to be float, found by halving; else the best that was measured."""
        useful = [layer.node for layer in blame if layer.gain > 0]
        best, returned = item, tuple[str, ...]()
        low, high = 0, len(useful)
        trials: dict[int, Candidate] = {}

        def at(count: int) -> Candidate:
            if count not in trials:
                plan = item.plan
                for name in useful[:count]:
                    plan = plan.without_node(name, _REASON)
                trial = replace(item, plan=plan, name=f"{item.name}, {count} layers in float", points=None)
                trials[count] = self._measured(replace(trial, sqnr_db=self._sqnr(trial, model)), model)
            return trials[count]

        if high and len(item.plan.nodes) > high and self._holds(at(high), base):
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (low, middle) if self._holds(at(middle), base) else (middle, high)
            return at(high), tuple(useful[:high])
        for count, trial in trials.items():
            if _points(trial) > _points(best):
                best, returned = trial, tuple(useful[:count])
        return best, returned


def _points(item: Candidate) -> float:
    return -math.inf if item.points is None else item.points


def _many_times(calibration: CalibrationSet) -> CalibrationSet:
    """Samples that can be read again: several calibrations are needed."""
    if not calibration.one_shot:
        return calibration
    kept = [Sample(name=f"sample {index}", feeds=dict(feed)) for index, feed in enumerate(calibration)]
    return replace(calibration, _read=lambda: iter(kept), one_shot=False)
