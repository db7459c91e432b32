"""An accuracy limit, how far a model is from its float original, and what a layer costs in float."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from onnx import ModelProto

from edgeds.boards import resolve_target
from edgeds.boards.cost_file import parse_cost
from edgeds.boards.predictor import predict
from edgeds.errors import SpecError
from edgeds.graph.cost import count_cost
from edgeds.specs import to_json

Measure = Callable[[Path], float]
"""Points (of 100, more is better) of the model in a file."""


DEFAULT_MINUTES = 30.0
DEFAULT_SHARE = 0.5


@dataclass(frozen=True, kw_only=True)
class Limit:
    """``max_drop`` points may be lost. ``measure``: the task's metric; None: agreement with the float model.

    No layer goes back to float that would leave less than ``min_share`` of the quantizable FLOPs in INT8, and nothing
    new is tried after ``minutes``.
    """

    max_drop: float
    measure: Measure | None = None
    metric: str = "agreement"
    min_share: float = DEFAULT_SHARE
    minutes: float = DEFAULT_MINUTES

    def __post_init__(self) -> None:
        if not (math.isfinite(self.max_drop) and self.max_drop >= 0):
            raise SpecError(f"--max-drop {self.max_drop}: give points of the metric, 0 or more")
        if not 0.0 <= self.min_share <= 1.0:
            raise SpecError(f"--min-int8 {self.min_share}: give a share of the FLOPs, from 0 to 1")
        if not self.minutes > 0:
            raise SpecError(f"--minutes {self.minutes}: give a time above 0")


def layer_costs(model: ModelProto, *, target: str | None) -> dict[str, float]:
    """What it costs to compute each layer in FP16 instead of INT8: predicted milliseconds on ``target``, else FLOPs.

    Raises SpecError for an unknown board or one without a power mode.
    """
    cost = count_cost(model)
    if target is None:
        return {layer.node: float(layer.flops) for layer in cost.layers}
    found = resolve_target(target)
    mode = found.mode_or_default
    if mode is None:
        raise SpecError(f"target {target}: which power mode? add it, as in {target}@25W")
    work = parse_cost(to_json(cost), where="the model")
    times: list[dict[str, float]] = []
    for precision in ("fp16", "int8"):
        kernels = predict(work, board=found.board, mode=mode, precision=precision).layers
        times.append({kernel.node: kernel.latency_us for kernel in kernels})
    return {name: max(0.0, times[0][name] - times[1].get(name, 0.0)) / 1e3 for name in times[0]}
