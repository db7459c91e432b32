"""Prune a transformer: attention heads, feed-forward width and whole layers, each by a share or count of its own."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from onnx import ModelProto

from edgeds.compress.channels import PruneResult
from edgeds.compress.choose import check_ratio
from edgeds.compress.group_axes import concrete_shapes
from edgeds.compress.groups import Groups, Protected, find_groups
from edgeds.compress.heads_cut import CutResult, Width, choose_blocks, correct_metadata, cut_blocks
from edgeds.compress.heads_find import Blocks, attention_nodes, find_blocks, only
from edgeds.compress.importance import BY_LOSS, score_groups
from edgeds.compress.layerdrop import LayerCost, choose_layers, drop_layers, find_layers, measure_against
from edgeds.compress.prune import PruneOptions, check_place, check_result, take_samples
from edgeds.compress.prune_report import mapping_json
from edgeds.compress.shape_fold import fold_shapes
from edgeds.errors import ModelError, SpecError
from edgeds.files import write_json
from edgeds.graph.cost import count_cost
from edgeds.graph.io import input_specs, load_model, save_model
from edgeds.graph.shapes import assume_input_shapes
from edgeds.graph.view import GraphView
from edgeds.progress import stage
from edgeds.specs import to_json

_MADE_UP = 8
_MADE_UP_LENGTH = 16
"""Samples, and tokens in each, that stand in where no calibration is given to compare layers on."""


@dataclass(frozen=True, kw_only=True)
class TransformerReport:
    """What was removed, what it saved and what it costs. FLOPs are counted at the same input shapes.

    ``cosine`` and ``sqnr_db`` compare all outputs with the dense model's on the calibration samples (at most 16; None
    without any). ``layers`` says what each layer costs alone, measured on ``layers_measured_on``.
    """

    model: str
    mapping: str
    report: str
    method: str
    scope: str
    params_before: int
    params_after: int
    flops_before: int
    flops_after: int
    heads: tuple[Width, ...]
    ffn: tuple[Width, ...]
    layers: tuple[LayerCost, ...]
    layers_measured_on: str | None
    cosine: float | None
    sqnr_db: float | None
    protected: tuple[Protected, ...]
    reconstructed: int
    samples: int
    notes: tuple[str, ...]
    seconds: float


def prune_transformer(
    path: str | Path,
    *,
    out: str | Path,
    heads: float = 0.0,
    ffn: float = 0.0,
    layers: int = 0,
    calibration: Any = None,
    options: PruneOptions | None = None,
    quiet: bool = False,
) -> TransformerReport:
    """Remove shares of the attention heads and of the feed-forward width, and a number of layers, from an ONNX model.

    ``heads`` and ``ffn``: at least 0 and below 1, of what can be removed at all; with grouped queries a key head goes
    with all its query heads. ``layers``: those whose loss changes the outputs least go first. ``calibration`` (a
    CalibrationSet or an iterable of feeds) ranks by measured loss and lets the layers left make up for what is gone.
    Nothing is written unless the result passes the checker, loads and runs. Raises SpecError, ModelError,
    CalibrationError.
    """
    started = time.perf_counter()
    options = options or PruneOptions()
    check_ratio(heads)
    check_ratio(ffn)
    source, place = Path(path), Path(out).absolute()
    check_place(source, place)
    dense = load_model(source)
    samples = take_samples(calibration, options)
    method = options.method or ("sensitivity" if samples else "l2")
    with stage("finding heads and layers", quiet=quiet):
        whole = fold_shapes(dense)
        if not attention_nodes(GraphView(whole, copy=False)):
            raise ModelError(f"{source}: has no attention (no Softmax over a product of activations); use --ratio")
    shorter, costs, kept_layers = _drop(whole, layers, samples, options=options, quiet=quiet)
    cut, blocks = _cut(shorter, heads=heads, ffn=ffn, method=method, samples=samples, options=options, quiet=quiet)
    gone = sum(cost.dropped for cost in costs)
    pruned, fitted = _reconstruct(whole, cut.result, samples, every=gone > 0, options=options, quiet=quiet)
    changed = _correct(pruned, cut, whole, gone=gone)
    pruned = check_result(pruned, dense, threads=options.threads)
    difference = measure_against(whole, samples, threads=options.threads)(pruned) if samples else None
    report = TransformerReport(
        model=str(place),
        mapping=str(place.with_suffix(".mapping.json")),
        report=str(place.with_suffix(".report.json")),
        method=method,
        scope=options.scope,
        params_before=(first := count_cost(dense)).params,
        params_after=(last := count_cost(pruned)).params,
        flops_before=first.flops,
        flops_after=last.flops,
        heads=cut.heads,
        ffn=cut.ffn,
        layers=costs,
        layers_measured_on=None if not costs else "calibration samples" if samples else "made-up samples",
        cosine=difference.cosine if difference is not None else None,
        sqnr_db=difference.sqnr_db if difference is not None else None,
        protected=(*kept_layers, *blocks.protected),
        reconstructed=fitted,
        samples=len(samples),
        notes=_notes(cut, asked=(heads, ffn), costs=costs, samples=len(samples), changed=changed),
        seconds=round(time.perf_counter() - started, 2),
    )
    write_json(Path(report.mapping), mapping_json(cut.result))
    write_json(Path(report.report), to_json(report))
    save_model(pruned, place)  # last: where the model is, its files are
    return report


def _drop(
    model: ModelProto, count: int, samples: Sequence[Mapping[str, Any]], *, options: PruneOptions, quiet: bool
) -> tuple[ModelProto, tuple[LayerCost, ...], list[Protected]]:
    if count == 0 and not isinstance(count, bool):
        return model, (), []
    view = GraphView(model, copy=False)
    found, protected = find_layers(view, concrete_shapes(model))
    feeds = samples or made_up_samples(model)
    gone, costs = choose_layers(
        model, found, feeds, count=count, protected=protected, threads=options.threads, quiet=quiet
    )
    return drop_layers(model, gone), costs, protected


def _cut(
    model: ModelProto,
    *,
    heads: float,
    ffn: float,
    method: str,
    samples: Sequence[Mapping[str, Any]],
    options: PruneOptions,
    quiet: bool,
) -> tuple[CutResult, Blocks]:
    """Rank and remove heads and feed-forward units."""
    view = GraphView(model)
    groups = find_groups(view, protect=options.keep)
    blocks = find_blocks(view, groups)
    wanted = {block.group for block in blocks.attention if heads} | {block.group for block in blocks.ffn if ffn}
    kept = {}
    if wanted:
        part: Groups = only(groups, wanted)
        scores = score_groups(view.model, part, method=method, feeds=samples, threads=options.threads, quiet=quiet)
        kept = choose_blocks(
            groups,
            blocks,
            scores,
            heads=heads,
            ffn=ffn,
            scope=options.scope,
            multiple=options.multiple,
            min_channels=options.min_channels,
            by_loss=method in BY_LOSS,
        )
    with stage("removing heads and units", quiet=quiet):
        return cut_blocks(view.model, groups, blocks, kept), blocks


def _reconstruct(
    dense: ModelProto,
    result: PruneResult,
    samples: Sequence[dict[str, Any]],
    *,
    every: bool,
    options: PruneOptions,
    quiet: bool,
) -> tuple[ModelProto, int]:
    """Fit the layers behind removed heads and units; with ``every`` all, which is what a dropped layer leaves."""
    if not (samples and options.reconstruct and (result.mapping or every)):
        return result.model, 0
    from edgeds.compress.reconstruct import reconstruct

    report = reconstruct(
        dense,
        result.model,
        result.mapping,
        samples,
        samples=options.samples,
        every_layer=every,
        threads=options.threads,
        quiet=quiet,
    )
    return report.model, sum(layer.ridge is not None for layer in report.layers)


def _correct(model: ModelProto, cut: CutResult, whole: ModelProto, *, gone: int) -> tuple[str, ...]:
    before = len(attention_nodes(GraphView(whole, copy=False)))
    layers = (before, before - gone) if gone else None
    return correct_metadata(model, heads=cut.heads, key_heads=cut.key_heads, ffn=cut.ffn, layers=layers)


def _notes(
    cut: CutResult,
    *,
    asked: tuple[float, float],
    costs: Sequence[LayerCost],
    samples: int,
    changed: Sequence[str],
) -> tuple[str, ...]:
    notes = []
    for ratio, widths, what in ((asked[0], cut.heads, "head"), (asked[1], cut.ffn, "feed-forward unit")):
        if ratio and all(width.before == width.after for width in widths):
            why = "too small a ratio left every layer whole" if widths else "none can be; see protected"
            notes.append(f"no {what} was removed: {why}")
    if costs and not samples:
        notes.append("layers were compared on made-up samples; give --calib to compare them on yours")
    if changed:
        notes.append(f"metadata corrected: {', '.join(changed)}")
    return tuple(notes)


def made_up_samples(model: ModelProto, *, seed: int = 0) -> list[dict[str, np.ndarray[Any, np.dtype[Any]]]]:
    """A few feeds of batch 1: indices drawn from the table they pick from, other integers 1 (masks), normal floats."""
    generator = np.random.default_rng(seed)
    view, shapes = GraphView(model, copy=False), assume_input_shapes(model).shapes
    feeds: list[dict[str, np.ndarray[Any, np.dtype[Any]]]] = []
    for _ in range(_MADE_UP):
        feed: dict[str, np.ndarray[Any, np.dtype[Any]]] = {}
        for spec in input_specs(model):
            free = [not isinstance(dim, int) and len(spec.shape) < 4 for dim in spec.shape]
            sizes = zip(shapes[spec.name], free, strict=True)
            shape = tuple(min(size, _MADE_UP_LENGTH) if loose else size for size, loose in sizes)
            if spec.np_dtype.kind == "f":
                feed[spec.name] = generator.standard_normal(shape).astype(spec.np_dtype)
            elif spec.np_dtype.kind in "iub":
                rows = _table_rows(view, spec.name)
                values = generator.integers(0, rows, shape) if rows else np.ones(shape)
                feed[spec.name] = values.astype(spec.np_dtype)
            else:
                raise SpecError(f"input {spec.name!r} takes {spec.np_dtype}: give --calib to compare layers on samples")
        feeds.append(feed)
    return feeds


def _table_rows(view: GraphView, name: str) -> int:
    """Rows of the table that an input picks from, 0 when it picks from none."""
    for node in view.consumers(name):
        if node.op_type == "Gather" and node.input[1] == name:
            table = view.shape(node.input[0])
            if table and isinstance(table[0], int):
                return table[0]
        if node.op_type in ("Cast", "Identity"):
            return _table_rows(view, node.output[0])
    return 0
