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
from edgeds.compress.choose import choose_units, unit_costs
from edgeds.compress.groups import Groups, find_groups
from edgeds.compress.importance import BY_LOSS, score_groups
from edgeds.compress.prune_goal import Goal, find_ratio
from edgeds.compress.prune_report import LayerWidth, PruneReport, make_report, mapping_json
from edgeds.compress.shape_fold import fold_shapes
from edgeds.errors import BudgetError, CalibrationError, ModelError, SpecError
from edgeds.files import real_path, refuse_special, write_json
from edgeds.graph.cost import count_cost
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
    check_place(source, place)
    dense = load_model(source)
    samples = take_samples(calibration, options)
    method = options.method or ("sensitivity" if samples else "l2")
    with stage("finding coupled channels", quiet=quiet):
        found = _analyse(dense, options, absorbing=ratio != 0)
    if ratio == 0 or not found.groups.groups:
        result, chosen = PruneResult(model=dense, mapping={}, axes={}), 0.0
        notes = _untouched(source, goal, found.groups)
    else:
        result, chosen, notes = _remove(found, goal, method=method, options=options, samples=samples, quiet=quiet)
    pruned, fitted = result.model, 0
    if result.mapping and samples and options.reconstruct:
        pruned, fitted = _reconstruct(found.model, result, samples, options=options, quiet=quiet)
    pruned = check_result(pruned, dense, threads=options.threads)
    report = make_report(
        place,
        (count_cost(dense), count_cost(pruned)),
        groups=found.groups,
        result=result,
        facts={"method": method, "scope": options.scope, "ratio": chosen, "notes": tuple(notes)},
        extra={
            "reconstructed": fitted,
            "samples": len(samples),
            "predicted": goal.figures(dense, pruned),
            "seconds": round(time.perf_counter() - started, 2),
        },
    )
    write_json(Path(report.mapping), mapping_json(result))
    write_json(Path(report.report), to_json(report))
    save_model(pruned, place)  # last: where the model is, its files are
    return report


@dataclass(frozen=True, kw_only=True)
class _Analysis:
    """The model with sizes and constant channels folded, its groups, and how many readings became biases."""

    model: ModelProto
    groups: Groups
    moved: int


def _analyse(dense: ModelProto, options: PruneOptions, *, absorbing: bool) -> _Analysis:
    view = GraphView(fold_shapes(dense))
    groups = find_groups(view, protect=options.keep)
    moved = absorb_constants(view, groups) if absorbing else 0
    if not moved:
        return _Analysis(model=view.model, groups=groups, moved=0)
    model = view.finish()
    groups = find_groups(GraphView(model, copy=False), protect=options.keep)
    return _Analysis(model=model, groups=groups, moved=moved)


def take_samples(calibration: Any, options: PruneOptions) -> list[dict[str, Any]]:
    """At most ``options.samples`` feeds; [] without a calibration set. Raises SpecError, CalibrationError."""
    if isinstance(options.samples, bool) or not isinstance(options.samples, int) or options.samples < 1:
        raise SpecError(f"samples: expected a whole number from 1, got {options.samples!r}")
    if calibration is None:
        return []
    samples = [dict(feed) for feed in islice(calibration, options.samples)]
    if not samples:
        raise CalibrationError("the calibration set holds no samples")
    return samples


def _untouched(source: Path, goal: Goal, groups: Groups) -> list[str]:
    """Why the model is copied as it is. Raises when that is not what was asked for."""
    if goal.ratio == 0:
        return ["ratio 0: the model as it was"]
    if not groups.protected:
        raise ModelError(
            f"{source}: nothing can be pruned: it has no layer with constant weights and more than one output channel"
        )
    first = groups.protected[0]
    why = f"all {len(groups.protected)} layers have to stay, {first.node!r} because it {first.reason}"
    if goal.ratio is None:
        raise BudgetError(f"{source}: the goal cannot be reached, nothing can be pruned: {why}")
    return [f"nothing can be pruned, so this is the model as it was: {why}"]


def _remove(
    found: _Analysis,
    goal: Goal,
    *,
    method: str,
    options: PruneOptions,
    samples: Sequence[Feeds],
    quiet: bool,
) -> tuple[PruneResult, float, list[str]]:
    """Rank, and remove what the goal asks for: the result, the ratio it took, and notes."""
    model, groups = found.model, found.groups
    by_loss = method in BY_LOSS
    weights = unit_costs(groups, goal.layer_costs(model)) if by_loss and goal.ratio is None else None
    scores = score_groups(
        model, groups, method=method, weights=weights, feeds=samples, threads=options.threads, quiet=quiet
    )

    def at(share: float) -> PruneResult:
        keep = choose_units(
            groups,
            scores,
            ratio=share,
            scope=options.scope,
            multiple=options.multiple,
            min_channels=options.min_channels,
            max_share=_MOST if by_loss else None,
            weights=weights,
        )
        return prune_channels(model, keep, groups=groups)

    with stage("removing channels", quiet=quiet):
        result, chosen = find_ratio(goal, at=at, dense=model)
    notes = [f"{found.moved} readings of constant channels moved into biases"] if found.moved else []
    if not result.mapping:
        notes.append("no channel was removed: rounding to a multiple, or too small a ratio, left every layer whole")
    return result, chosen, notes


def check_place(source: Path, place: Path) -> None:
    """Refuse a result that is no .onnx file, or the model itself. Raises SpecError."""
    if place.suffix.lower() != ".onnx":
        raise SpecError(f"--out {place}: name a file that ends in .onnx")
    if place.is_dir():
        raise SpecError(f"{place}: is a directory; name a file, for example {place / 'pruned.onnx'}")
    refuse_special(place)
    if real_path(place) == real_path(source):
        raise SpecError(f"{place}: is the model itself; write to another file")


def _reconstruct(
    dense: ModelProto, result: PruneResult, feeds: Sequence[dict[str, Any]], *, options: PruneOptions, quiet: bool
) -> tuple[ModelProto, int]:
    from edgeds.compress.reconstruct import reconstruct

    report = reconstruct(
        dense, result.model, result.mapping, feeds, samples=options.samples, threads=options.threads, quiet=quiet
    )
    return report.model, sum(layer.ridge is not None for layer in report.layers)


def check_result(pruned: ModelProto, dense: ModelProto, *, threads: int | None) -> ModelProto:
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


__all__ = ["LayerWidth", "PruneOptions", "PruneReport", "prune_model"]
