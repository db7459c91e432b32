"""Correct predictions for one board by what was measured on it: one factor for latency, one for power.

The factor is the geometric mean of measured / predicted, drawn toward 1 as if ``PRIOR_ROWS`` rows had agreed with the
prediction, so that two lucky rows do not turn everything. It holds for that board alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path

from edgeds.boards.plan_spec import BoardScale
from edgeds.errors import SpecError
from edgeds.files import read_json
from edgeds.specs import from_json

SCALE_NAME = "board_scale.json"
"""In a bundle's ``engines/`` folder, beside the measurements that it comes from."""

PRIOR_ROWS = 1.0


def fit_scale(
    board: str, *, latencies: Sequence[tuple[float, float]], powers: Sequence[tuple[float, float]], date: str = ""
) -> BoardScale | None:
    """Factors from pairs (measured, predicted) of latency and of power; None without a pair of latencies."""
    if not latencies:
        return None
    return BoardScale(
        board=board,
        latency=_factor(latencies),
        power=_factor(powers) if powers else None,
        rows=len(latencies),
        spread=_spread(latencies),
        date=date,
    )


def read_scale(path: Path) -> BoardScale:
    """Read what a tuning run stored. Raises SpecError for a damaged file."""
    scale = from_json(BoardScale, read_json(path), where=str(path))
    values = [scale.latency, scale.spread, *([scale.power] if scale.power is not None else [])]
    if not all(0 < value < math.inf for value in values):
        raise SpecError(f"{path}: a factor that is not above 0")
    return scale


def _factor(pairs: Iterable[tuple[float, float]]) -> float:
    logs = [math.log(measured / predicted) for measured, predicted in pairs]
    return math.exp(sum(logs) / (len(logs) + PRIOR_ROWS))


def _spread(pairs: Sequence[tuple[float, float]]) -> float:
    """The largest factor that a row lies away from the common one: how much a scaled prediction may still be off."""
    common = _factor(pairs)
    return max(math.exp(abs(math.log(measured / predicted / common))) for measured, predicted in pairs)
