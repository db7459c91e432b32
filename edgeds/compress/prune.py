"""Prune a model file: find coupled channels, rank, remove, fit what reads them, check and write the result."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto

from edgeds.compress.absorb import absorb_constants
from edgeds.compress.channels import PruneResult, prune_channels
from edgeds.compress.choose import check_ratio, choose_units, unit_flops
from edgeds.compress.groups import Groups, Protected, find_groups
from edgeds.compress.importance import score_groups
from edgeds.compress.prune_goal import Goal, find_ratio
from edgeds.compress.shape_fold import fold_shapes
from edgeds.errors import ModelError, SpecError
from edgeds.files import real_path, refuse_special, write_json
from edgeds.graph.cost import ModelCost, count_cost
from edgeds.graph.feeds import random_feeds
from edgeds.graph.io import load_model, save_model
from edgeds.graph.session import open_session, runtime_errors
from edgeds.graph.shapes import assume_input_shapes, infer_shapes
from edgeds.graph.view import GraphView
from edgeds.progress import stage
from edgeds.specs import Budget, to_json

Feeds = Mapping[str, NDArray[np.generic]]
DEFAULT_SAMPLES = 48
_MOST = 0.75
"""Share of a group that may go when losses of layers are compared."""


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


@dataclass(frozen=True, kw_only=True)
class PruneOptions:
    """How to prune: ``method`` of importance (None: sensitivity with samples, else l2), ``scope`` global or uniform,
    ``multiple`` (None: 8 for groups of 32 and more channels), names of nodes to ``keep``, and whether calibration
    samples also re-solve the weights."""

    method: str | None = None
    scope: str = "global"
    multiple: int | None = None
    min_channels: int = 1
    keep: tuple[str, ...] = ()
    reconstruct: bool = True
    samples: int = DEFAULT_SAMPLES
    threads: int | None = 2


def prune_model(
    path: str | Path,
    *,
    out: str | Path,
    ratio: float | None = None,
    speedup: float | None = None,
    budget: Budget | None = None,
    target: str | None = None,
    precision: str = "int8",
    calibration: Any = None,
    options: PruneOptions | None = None,
    quiet: bool = False,
) -> PruneReport:
    """Remove channels from the model at ``path``; write the smaller one to ``out``, its mapping and report beside it.

    Exactly one of ``ratio`` (share of the removable channels), ``speedup`` (in predicted latency on ``target``
    ("orin-nx-16gb@25W") at ``precision``, else in FLOPs) and ``budget`` (``latency_ms`` or ``fps``, needs ``target``)
    says how much. ``calibration`` (a CalibrationSet or an iterable of feeds) lets the layers that are left make up for
    what is gone. Nothing is written unless the result passes the checker, loads and runs. Raises SpecError, ModelError,
    CalibrationError, and BudgetError when the goal cannot be reached.
    """
    started = time.perf_counter()
    options = options or PruneOptions()
    goal = Goal.of(ratio=ratio, speedup=speedup, budget=budget, target=target, precision=precision)
    source, place = Path(path), Path(out).absolute()
    _check_place(source, place)
    dense = load_model(source)
    with stage("finding coupled channels", quiet=quiet):
        view = GraphView(fold_shapes(dense))
        groups = find_groups(view, protect=options.keep)
        moved = absorb_constants(view, groups) if ratio != 0 else 0
        model = view.finish() if moved else view.model
        groups = find_groups(GraphView(model, copy=False), protect=options.keep) if moved else groups
    kept_feeds = [dict(feed) for feed in islice(calibration, options.samples)] if calibration is not None else []
    method = options.method or ("sensitivity" if kept_feeds else "l2")
    if ratio == 0:
        result, chosen = PruneResult(model=dense, mapping={}, axes={}), 0.0
        notes = ["ratio 0: the model as it was"]
    elif not groups.groups:
        if not groups.protected:
            raise ModelError(f"{source}: {_NOTHING}")
        result, chosen = PruneResult(model=dense, mapping={}, axes={}), 0.0
        notes = [f"nothing can be pruned, so this is the model as it was: {_why(groups)}"]
    else:
        weights = None if ratio is not None or method != "sensitivity" else unit_flops(groups, count_cost(model))
        scores = score_groups(
            model,
            groups,
            method=method,
            weights=weights,
            feeds=kept_feeds,
            threads=options.threads,
            quiet=quiet,
        )
        notes = [f"{moved} readings of constant channels moved into biases"] if moved else []

        def at(share: float) -> PruneResult:
            keep = choose_units(
                groups,
                scores,
                ratio=share,
                scope=options.scope,
                multiple=options.multiple,
                min_channels=options.min_channels,
                max_share=_MOST if method == "sensitivity" else None,
                weights=weights,
            )
            return prune_channels(model, keep, groups=groups)

        with stage("removing channels", quiet=quiet):
            result, chosen = find_ratio(goal, at=at, dense=model)
        if not result.mapping:
            notes.append("no channel was removed: rounding to a multiple, or too small a ratio, left every layer whole")
    pruned, fitted = result.model, 0
    if result.mapping and kept_feeds and options.reconstruct:
        pruned, fitted = _reconstruct(model, result, kept_feeds, options=options, quiet=quiet)
    pruned = _checked(pruned, dense, threads=options.threads)
    report = _report(
        place,
        (count_cost(dense), count_cost(pruned)),
        groups=groups,
        result=result,
        facts={"method": method, "scope": options.scope, "ratio": chosen, "notes": tuple(notes)},
        extra={
            "reconstructed": fitted,
            "samples": len(kept_feeds),
            "predicted": goal.figures(dense, pruned),
            "seconds": round(time.perf_counter() - started, 2),
        },
    )
    write_json(Path(report.mapping), _mapping_json(result))
    write_json(Path(report.report), to_json(report))
    save_model(pruned, place)  # last: where the model is, its files are
    return report


def _check_place(source: Path, place: Path) -> None:
    if place.suffix.lower() != ".onnx":
        raise SpecError(f"--out {place}: name a file that ends in .onnx")
    if place.is_dir():
        raise SpecError(f"{place}: is a directory; name a file, for example {place / 'pruned.onnx'}")
    refuse_special(place)
    if real_path(place) == real_path(source):
        raise SpecError(f"{place}: is the model itself; write to another file")


_NOTHING = "nothing can be pruned: it has no layer with constant weights and more than one output channel"


def _why(groups: Groups) -> str:
    first = groups.protected[0]
    return f"all {len(groups.protected)} layers have to stay, {first.node!r} because it {first.reason}"


def _reconstruct(
    dense: ModelProto, result: PruneResult, feeds: Sequence[dict[str, Any]], *, options: PruneOptions, quiet: bool
) -> tuple[ModelProto, int]:
    from edgeds.compress.reconstruct import reconstruct

    report = reconstruct(
        dense, result.model, result.mapping, feeds, samples=options.samples, threads=options.threads, quiet=quiet
    )
    return report.model, sum(layer.ridge is not None for layer in report.layers)


def _checked(pruned: ModelProto, dense: ModelProto, *, threads: int | None) -> ModelProto:
    """With known shapes again; loads, runs, and gives outputs of the dense model's shapes and dtypes."""
    model = infer_shapes(pruned)
    shapes = assume_input_shapes(dense).shapes
    errors: tuple[type[Exception], ...] = (ModelError, *runtime_errors())
    try:
        feeds = random_feeds(dense, shapes)
        want = open_session(dense, threads=threads).run(None, feeds)
    except errors:
        open_session(model, threads=threads)  # the model given does not run on made-up data: loading is what is left
        return model
    try:
        have = open_session(model, threads=threads).run(None, feeds)
    except runtime_errors() as error:
        raise ModelError(f"the pruned model does not run, so it was not written: {error}") from error
    for item, a, b in zip(dense.graph.output, want, have, strict=True):
        if isinstance(a, np.ndarray) and (a.shape != b.shape or a.dtype != b.dtype):
            raise ModelError(
                f"output {item.name!r} of the pruned model is {list(b.shape)} instead of {list(a.shape)}, "
                "so it was not written; name the layers before it with --keep"
            )
    return model


def _widths(groups: Groups, result: PruneResult, names: Mapping[str, str]) -> tuple[LayerWidth, ...]:
    found: dict[str, LayerWidth] = {}
    for cut in groups.cuts:
        output = names.get(cut.node, "")
        if cut.role in ("producer", "pass") and output in groups.tracks and cut.node not in found:
            before = groups.tracks[output].ids.size
            after = len(result.mapping[output]) if output in result.mapping else before
            found[cut.node] = LayerWidth(node=cut.node, before=before, after=after)
    return tuple(found.values())


def _report(
    place: Path,
    costs: tuple[ModelCost, ModelCost],
    *,
    groups: Groups,
    result: PruneResult,
    facts: dict[str, Any],
    extra: dict[str, Any],
) -> PruneReport:
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


def _mapping_json(result: PruneResult) -> dict[str, Any]:
    tensors = {
        name: {"axis": result.axes[name], "kept": [int(place) for place in kept]}
        for name, kept in result.mapping.items()
    }
    return {"schema": 1, "tensors": tensors}


__all__ = ["LayerWidth", "PruneOptions", "PruneReport", "check_ratio", "prune_model"]
