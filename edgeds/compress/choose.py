"""Which units of which groups stay at a given ratio."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from edgeds.compress.groups import ChannelGroup, Groups, Member
from edgeds.errors import SpecError

WIDE = 32
"""Groups of at least this many channels keep multiples of 8 when no multiple is asked for (tensor-core tiles)."""
AUTO_MULTIPLE = 8

Scores = Mapping[int, NDArray[np.float64]]
Kept = dict[int, NDArray[np.int64]]


def check_ratio(ratio: float) -> float:
    """``ratio`` when it is a share below 1; SpecError otherwise."""
    if isinstance(ratio, bool) or not isinstance(ratio, int | float) or not 0 <= ratio < 1:
        raise SpecError(f"ratio {ratio!r}: the share of channels to remove is at least 0 and below 1, for example 0.2")
    return float(ratio)


def choose_units(
    groups: Groups,
    scores: Scores,
    *,
    ratio: float,
    scope: str = "global",
    multiple: int | None = None,
    min_channels: int = 1,
    max_share: float | None = None,
    weights: Mapping[int, float] | None = None,
) -> Kept:
    """Group -> sorted units that stay, for groups that lose any.

    ``ratio`` is the share of the channels that can be removed at all. "global" ranks all units together, at most
    ``max_share`` (None: twice the ratio; and the channels with score 0) from any one group; "uniform" takes the same
    share of each. ``multiple`` rounds the width of each group to the nearest multiple (None: 8 for groups of at least
    32 channels); a group keeps at least ``min_channels`` channels and one unit. Ties go to the lower index, so results
    repeat. ``weights``: what a unit of each group counts in a global ranking, in place of its channels.
    """
    check_ratio(ratio)
    if scope not in ("global", "uniform"):
        raise SpecError(f"scope {scope!r} is not known; choose global or uniform")
    for name, value in (("multiple", multiple), ("min_channels", min_channels)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise SpecError(f"{name}: expected a whole number from 1, got {value!r}")
    if ratio == 0:
        return {}
    removed = (
        _by_share(groups, ratio)
        if scope == "uniform"
        else _by_rank(groups, scores, ratio, max_share=max_share, weights=weights)
    )
    kept: Kept = {}
    for group in groups.groups:
        count = _rounded(group, group.size - removed[group.index], multiple=multiple, min_channels=min_channels)
        if count < group.size:
            order = np.argsort(-scores[group.index], kind="stable")
            kept[group.index] = np.sort(order[:count]).astype(np.int64)
    return kept


def _by_share(groups: Groups, ratio: float) -> dict[int, int]:
    return {group.index: min(group.size - 1, math.floor(group.size * ratio + 0.5)) for group in groups.groups}


def unit_costs(groups: Groups, costs: Mapping[str, float]) -> dict[int, float]:
    """Group -> share of the model's cost that one unit takes away, with the other groups whole. ``costs`` by node:
    FLOPs, or predicted time."""
    total = max(sum(costs.values()), 1e-12)
    return {
        group.index: max(1e-12, sum(_member_cost(member, costs) for member in group.members) / group.size / total)
        for group in groups.groups
    }


def _member_cost(member: Member, costs: Mapping[str, float]) -> float:
    """Cost of the positions of a layer that follow a group; of constants that only pass it on, none."""
    if member.role not in ("producer", "consumer", "pass"):
        return 0.0
    return costs.get(member.node, 0.0) * float((member.units >= 0).mean())


def _by_rank(
    groups: Groups, scores: Scores, ratio: float, *, max_share: float | None, weights: Mapping[int, float] | None
) -> dict[int, int]:
    share = min(1.0, 2 * ratio if max_share is None else max(ratio, max_share))
    removed = {group.index: 0 for group in groups.groups}
    limit = {
        group.index: min(
            group.size - 1,
            max(math.ceil(group.size * share), int((scores[group.index] == 0).sum())),
        )
        for group in groups.groups
    }
    widths = weights or {group.index: float(group.channels) for group in groups.groups}
    budget = ratio * sum(group.size * widths[group.index] for group in groups.groups)
    ranked = sorted(
        (float(score), group.index, unit)
        for group in groups.groups
        for unit, score in enumerate(scores[group.index].tolist())
    )
    spent = 0.0
    for _, index, _ in ranked:
        if removed[index] < limit[index] and spent + widths[index] <= budget + widths[index] / 2:
            removed[index] += 1
            spent += widths[index]
    return removed


def _rounded(group: ChannelGroup, count: int, *, multiple: int | None, min_channels: int) -> int:
    """Units to keep: the width ``count * unit`` at the nearest multiple (halves up), within the group."""
    if multiple is None:
        multiple = AUTO_MULTIPLE if group.size * group.unit >= WIDE else 1
    step = multiple // math.gcd(multiple, group.unit)
    least = max(1, math.ceil(min_channels / group.unit))
    if count < group.size:
        near = math.floor(count / step + 0.5) * step
        count = max(near, step)
    return min(group.size, max(count, least))
