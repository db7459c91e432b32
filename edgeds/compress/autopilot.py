"""Quantize within an accuracy limit: try the methods, repair what hurts, give back to float what must be.

The search keeps the best it has measured, so the result is never worse than the best single method:

1. Every calibration method and, where the network allows, equalised or smoothed weights are compared with the float
   model on samples held out of calibration (judge.py). All plain methods and the best of the others are measured with
   the metric that counts.
2. If the limit does not hold, tensors on which the methods disagree choose their range one by one.
3. Then layers go back to float, in the order of agreement gained per cost, as few as the metric needs.

The metric is the task's own where labels exist (points of mAP50-95, of Spearman's correlation ...), else the agreement.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from onnx import ModelProto

from edgeds.compress.accuracy_limit import Limit
from edgeds.compress.calibset import CalibrationSet
from edgeds.compress.candidates import Candidate, CandidateMaker, quantized
from edgeds.compress.fit import Fitted
from edgeds.compress.judge import WORST, Judge
from edgeds.compress.placement import QdqPlan
from edgeds.compress.verify import compare_models
from edgeds.errors import CalibrationError
from edgeds.graph.io import save_model
from edgeds.graph.view import GraphView
from edgeds.progress import track

MEASURED_VARIANTS = 2
"""How many rescaled candidates the metric is asked about, beside the plain methods."""
PROBED_LAYERS = 32
PROBED_TENSORS = 12
_DISAGREE = 1.2
"""Methods disagree about a tensor when their largest and smallest range differ by this factor."""
_REASON = "autopilot: its rounding costs more accuracy than the limit leaves"


@dataclass(frozen=True, kw_only=True)
class Layer:
    """A layer's part in the error: the agreement gained in points when it alone goes back to float, and its cost."""

    node: str
    gain: float
    cost: float


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Of each layer: what FP16 costs beyond INT8 (``price``, milliseconds or FLOPs), and its FLOPs."""

    price: Mapping[str, float]
    flops: Mapping[str, float]

    def int8_share(self, plan: QdqPlan) -> float:
        """INT8 FLOPs of all that could be quantized."""
        kept = sum(self.flops.get(item.node, 0.0) for item in plan.nodes)
        total = kept + sum(self.flops.get(name, 0.0) for name in plan.float_nodes)
        return kept / total if total else 1.0


@dataclass(frozen=True, kw_only=True)
class Flight:
    """What was tried and what came out. ``blame``: layers ordered by agreement per cost that float would gain."""

    chosen: Candidate
    limit: Limit
    float_points: float
    tried: tuple[Candidate, ...]
    returned: tuple[str, ...]
    blame: tuple[Layer, ...]
    out_of_time: bool

    @property
    def drop(self) -> float:
        """Points lost against float."""
        return self.float_points - _points(self.chosen)

    @property
    def holds(self) -> bool:
        """Whether the limit holds."""
        return self.drop <= self.limit.max_drop

    def to_json(self) -> dict[str, Any]:
        """For the report."""
        return {
            "metric": self.limit.metric,
            "float": round(self.float_points, 4),
            "int8": round(_points(self.chosen), 4),
            "drop": round(self.drop, 4),
            "max_drop": self.limit.max_drop,
            "holds": self.holds,
            "method": self.chosen.name,
            "bias_correction": self.chosen.bias_correction,
            "tried": [
                {"method": item.name, "agreement": round(item.agreement, 4), "points": item.points}
                for item in self.tried
            ],
            "returned_to_float": list(self.returned),
            "blame": [{"node": layer.node, "gain": round(layer.gain, 4)} for layer in self.blame],
            "out_of_time": self.out_of_time,
        }


class Pilot:
    """One search for the best INT8 form of one model under a limit."""

    def __init__(
        self, limit: Limit, *, maker: CandidateMaker, costs: Costs, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._limit, self._maker, self._costs, self._clock = limit, maker, costs, clock
        self._threads, self._quiet = maker.settings.threads, maker.settings.quiet
        self._tried: list[Candidate] = []
        self._until = 0.0
        self._judge: Judge | None = None

    def fly(self, model: ModelProto, calibration: CalibrationSet, *, bias_correction: bool = True) -> Flight:
        """Search. Raises CalibrationError when nothing can be quantized, or the metric is not a number."""
        self._until = self._clock() + 60.0 * self._limit.minutes
        made = self._maker.make(model, calibration)
        self._judge = judge = Judge(model, made[0].found.held_out or made[0].found.feeds, threads=self._threads)
        base = 100.0 if self._limit.measure is None else self._points_of(model)
        best = self._best_method(made, judge, corrects=bias_correction)
        blame: tuple[Layer, ...] = ()
        returned: tuple[str, ...] = ()
        if not self._holds(best, base):
            best = max(best, self._measured(self._tune_tensors(best, judge)), key=_points)
        if not self._holds(best, base):
            blame = self._blame(best, judge)
            best, returned = self._give_back(best, judge, blame, base)
        return Flight(
            chosen=best,
            limit=self._limit,
            float_points=base,
            tried=tuple(self._tried),
            returned=returned,
            blame=blame,
            out_of_time=self._late(),
        )

    def confirmed(self, flight: Flight, fitted: Fitted) -> Flight:
        """The flight with the points of what came out, when it had to be repaired: INT8 lost layers altogether."""
        assert self._judge is not None
        gone = {item.node for item in flight.chosen.plan.nodes} - {item.node for item in fitted.plan.nodes}
        if not gone and flight.chosen.points is not None:
            return flight
        agreement = self._judge.agreement(fitted.model)
        points = agreement if self._limit.measure is None else self._points_of(fitted.model)
        name = flight.chosen.name + (f", {len(gone)} lost layers in float" if gone else "")
        chosen = replace(flight.chosen, name=name, plan=fitted.plan, agreement=agreement, points=points)
        returned = (*flight.returned, *sorted(gone))
        return replace(flight, chosen=chosen, tried=(*flight.tried, chosen), returned=returned)

    def _late(self) -> bool:
        return self._clock() > self._until

    def _holds(self, item: Candidate, base: float) -> bool:
        return base - _points(item) <= self._limit.max_drop

    def _best_method(self, made: Sequence[Candidate], judge: Judge, *, corrects: bool) -> Candidate:
        """The best by the metric; plain methods are all measured, so that none of them can be better."""
        compared: list[Candidate] = []
        for item in track(made, what="comparing methods", total=len(made), quiet=self._quiet):
            both = [replace(item, bias_correction=choice) for choice in ((True, False) if corrects else (False,))]
            compared.append(max((self._judged(one, judge) for one in both), key=lambda one: one.agreement))
        ranked = sorted(compared, key=lambda item: item.agreement, reverse=True)
        rescaled = [item for item in ranked if not item.is_plain]
        chosen = [item for item in ranked if item.is_plain or item in rescaled[:MEASURED_VARIANTS]]
        self._tried += rescaled[MEASURED_VARIANTS:]
        unit = track(chosen, what="measuring", total=len(chosen), quiet=self._quiet or self._limit.measure is None)
        return max([self._measured(item) for item in unit], key=_points)

    def _judged(self, item: Candidate, judge: Judge) -> Candidate:
        return replace(item, agreement=judge.agreement(quantized(item, threads=self._threads)))

    def _measured(self, item: Candidate) -> Candidate:
        """With points of the metric, unless an output is dead, which needs no metric."""
        if item.agreement > WORST and self._limit.measure is None:
            item = replace(item, points=item.agreement)
        elif item.agreement > WORST:
            item = replace(item, points=self._points_of(quantized(item, threads=self._threads)))
        self._tried.append(item)
        return item

    def _points_of(self, model: ModelProto) -> float:
        assert self._limit.measure is not None
        with TemporaryDirectory(prefix="edgeds-autopilot-") as folder:
            found = float(self._limit.measure(save_model(model, Path(folder) / "candidate.onnx")))
        if not math.isfinite(found):
            raise CalibrationError(f"the metric {self._limit.metric} is {found}: is there anything to measure on?")
        return found

    def _tune_tensors(self, item: Candidate, judge: Judge) -> Candidate:
        """Where methods disagree most, the range with the least error at the outputs, one tensor after the other."""
        options: list[tuple[float, str]] = []
        for name in item.plan.tensors:
            scales = [ranges[name].scale for ranges in item.found.candidates.values() if name in ranges]
            if len(scales) > 1 and min(scales) > 0 and max(scales) > _DISAGREE * min(scales):
                options.append((max(scales) / min(scales), name))
        chosen = [name for _, name in sorted(options, reverse=True)[:PROBED_TENSORS]]
        best = item
        for name in track(chosen, what="choosing ranges", total=len(chosen), quiet=self._quiet):
            for ranges in item.found.candidates.values():
                if self._late() or name not in ranges or ranges[name].note:
                    continue
                if ranges[name].scale != best.ranges[name].scale:
                    trial = replace(best, ranges={**best.ranges, name: ranges[name]})
                    best = max(best, self._judged(trial, judge), key=lambda one: one.agreement)
        return replace(best, name=f"{item.name}, ranges by tensor", points=None)

    def _blame(self, item: Candidate, judge: Judge) -> tuple[Layer, ...]:
        """Agreement gained by each layer alone in float, most per cost first; the loudest ones when there are many."""
        names = [plan.node for plan in item.plan.nodes]
        if len(names) > PROBED_LAYERS:
            names = self._loudest(item, names)[:PROBED_LAYERS]
        layers = []
        for name in track(names, what="finding layers to blame", total=len(names), quiet=self._quiet):
            trial = item.without([name], _REASON)
            if trial.plan.nodes and not self._late():
                gain = self._judged(trial, judge).agreement - item.agreement
                layers.append(Layer(node=name, gain=gain, cost=max(self._costs.price.get(name, 0.0), 1e-12)))
        return tuple(sorted(layers, key=lambda layer: layer.gain / layer.cost if layer.gain > 0 else -1, reverse=True))

    def _loudest(self, item: Candidate, names: Sequence[str]) -> list[str]:
        """Layers by the signal-to-noise ratio of their outputs, lowest first."""
        view = GraphView(item.model, copy=False)
        outputs = {node.name: node.output[0] for node in view.nodes}
        model = quantized(item, threads=self._threads)
        layers = [(name, outputs[name]) for name in names]
        feeds = (item.found.held_out or item.found.feeds)[:2]
        found = compare_models(item.model, model, feeds, layers=layers, threads=self._threads)
        level = {layer.node: math.inf if layer.sqnr_db is None else layer.sqnr_db for layer in found.layers}
        return sorted(names, key=lambda name: level[name])

    def _give_back(
        self, item: Candidate, judge: Judge, blame: Sequence[Layer], base: float
    ) -> tuple[Candidate, tuple[str, ...]]:
        """The shortest start of ``blame`` that has to be float: doubled until the limit holds, then halved.

        Without one that holds: the best that was measured.
        """
        order = self._returnable(item, blame)
        trials = {0: item}

        def holds(count: int) -> bool:
            if count not in trials:
                named = replace(item, name=f"{item.name}, {count} layers in float")
                trials[count] = self._measured(self._judged(named.without(order[:count], _REASON), judge))
            return self._holds(trials[count], base)

        low, high = 0, min(1, len(order))
        while high < len(order) and not self._late() and not holds(high):
            low, high = high, min(2 * high, len(order))
        if high and not self._late() and holds(high):
            while high - low > 1 and not self._late():
                middle = (low + high) // 2
                low, high = (low, middle) if holds(middle) else (middle, high)
            return trials[high], tuple(order[:high])
        best = max(trials, key=lambda count: (_points(trials[count]), -count))
        return trials[best], tuple(order[:best])

    def _returnable(self, item: Candidate, blame: Sequence[Layer]) -> list[str]:
        """Layers that gain in the order of blame, then those not probed, as far as enough FLOPs stay in INT8."""
        probed = {layer.node for layer in blame}
        rest = [plan.node for plan in item.plan.nodes if plan.node not in probed]
        order: list[str] = []
        plan = item.plan
        for name in [layer.node for layer in blame if layer.gain > 0] + rest:
            smaller = plan.without_node(name, _REASON)
            if smaller.nodes and self._costs.int8_share(smaller) >= self._limit.min_share:
                plan = smaller
                order.append(name)
        return order


def _points(item: Candidate) -> float:
    return -math.inf if item.points is None else item.points
