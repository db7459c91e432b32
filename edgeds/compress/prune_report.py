"""What pruning reports: widths, costs, what stayed and why, and the mapping from old channels to new ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgeds.compress.channels import PruneResult
from edgeds.compress.groups import Groups, Protected
from edgeds.graph.cost import ModelCost


@dataclass(frozen=True, kw_only=True)
class LayerWidth:
    """Output channels of a layer before and after."""

    node: str
    before: int
    after: int


@dataclass(frozen=True, kw_only=True)
class PruneReport:
    """What was removed, what it saved, and what stayed and why. FLOPs are counted at the same input shapes.

    ``ratio`` is the share of the removable channels that was aimed for, ``removed_share`` what rounding and limits made
    of it; ``channels_before`` counts the others too. ``predicted`` holds figures of the target before and after, when
    one was given. ``aligned_share`` is the share of narrowed layers whose width is a multiple of 8.
    """

    model: str
    mapping: str
    report: str
    method: str
    scope: str
    ratio: float
    removed_share: float
    params_before: int
    params_after: int
    flops_before: int
    flops_after: int
    channels_before: int
    channels_after: int
    aligned_share: float
    layers: tuple[LayerWidth, ...]
    protected: tuple[Protected, ...]
    reconstructed: int
    samples: int
    notes: tuple[str, ...]
    predicted: dict[str, Any] | None
    seconds: float


def _widths(groups: Groups, result: PruneResult, names: Mapping[str, str]) -> tuple[LayerWidth, ...]:
    found: dict[str, LayerWidth] = {}
    for cut in groups.cuts:
        output = names.get(cut.node, "")
        if cut.role in ("producer", "pass") and output in groups.tracks and cut.node not in found:
            before = groups.tracks[output].ids.size
            after = len(result.mapping[output]) if output in result.mapping else before
            found[cut.node] = LayerWidth(node=cut.node, before=before, after=after)
    return tuple(found.values())


def make_report(
    place: Path,
    costs: tuple[ModelCost, ModelCost],
    *,
    groups: Groups,
    result: PruneResult,
    facts: dict[str, Any],
    extra: dict[str, Any],
) -> PruneReport:
    """The report over the costs before and after; ``facts`` and ``extra`` are fields as they are."""
    names = {node.name: node.output[0] for node in result.model.graph.node}
    layers = _widths(groups, result, names)
    narrowed = [layer for layer in layers if layer.after < layer.before]
    before, after = (sum(getattr(layer, which) for layer in layers) for which in ("before", "after"))
    removable = sum(group.size * group.channels for group in groups.groups)
    return PruneReport(
        model=str(place),
        mapping=str(place.with_suffix(".mapping.json")),
        report=str(place.with_suffix(".report.json")),
        removed_share=round((before - after) / removable, 4) if removable else 0.0,
        params_before=costs[0].params,
        params_after=costs[1].params,
        flops_before=costs[0].flops,
        flops_after=costs[1].flops,
        channels_before=before,
        channels_after=after,
        aligned_share=sum(layer.after % 8 == 0 for layer in narrowed) / len(narrowed) if narrowed else 1.0,
        layers=layers,
        protected=groups.protected,
        **facts,
        **extra,
    )


def mapping_json(result: PruneResult) -> dict[str, Any]:
    """What ``<stem>.mapping.json`` holds."""
    tensors = {
        name: {"axis": result.axes[name], "kept": [int(place) for place in kept]}
        for name, kept in result.mapping.items()
    }
    return {"schema": 1, "tensors": tensors}
