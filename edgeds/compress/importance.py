"""How much each unit of coupled channels matters: what is removed first.

A unit's score is the size of what makes it times the size of what reads it, each relative to its layer's mean: zero
when either side is zero, so channels that cannot reach an output go first. "l1" and "l2" take the norms of weights with
BatchNormalization folded in ("bn" takes only its scale); "activation" weighs the reading weights with the energy that
samples show at their input (the size of the term that a sum would lose; compare Sun et al. 2023, "Wanda").
"sensitivity" is the estimated loss after the readers' weights are solved anew (``sensitivity.py``), "taylor" how far
the outputs move, to first order (``taylor.py``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto

from edgeds.compress.groups import ChannelGroup, Groups, Member
from edgeds.compress.sensitivity import find_readers, inverse_moments, unit_losses
from edgeds.errors import ModelError, SpecError
from edgeds.graph.fold import fold_batchnorm
from edgeds.graph.view import GraphView
from edgeds.progress import track as progress

Array = NDArray[np.float64]
Scores = dict[int, Array]
METHODS = ("l2", "l1", "bn", "activation", "taylor", "sensitivity")
BY_LOSS = ("taylor", "sensitivity")
"""Those whose scores are losses, which compare over groups."""


def score_groups(
    model: ModelProto,
    groups: Groups,
    *,
    method: str = "l2",
    weights: Mapping[int, float] | None = None,
    feeds: Iterable[Mapping[str, NDArray[np.generic]]] = (),
    threads: int | None = 2,
    quiet: bool = False,
) -> Scores:
    """Group index -> one finite score per unit (float64, mean 1 except for losses); higher means keep.
    ``weights``: what a unit of each group saves, which losses are divided by (None: its channels).

    ``model`` is the one that ``groups`` was found in. Raises SpecError for an unknown method, or one that needs
    samples without them, ModelError for weights with NaN or infinity.
    """
    if method not in METHODS:
        raise SpecError(f"method {method!r} is not known; choose from {', '.join(METHODS)}")
    energies: dict[str, Array] = {}
    if method == "activation":
        energies = channel_energies(model, _read_by(model, groups), feeds, threads=threads, quiet=quiet)
        if not energies:
            raise SpecError("method activation weighs what samples show: give --calib (calibration samples)")
    if method == "taylor":
        from edgeds.compress.taylor import taylor_scores

        effects = taylor_scores(model, groups, feeds, quiet=quiet)
        saved = weights or {group.index: float(group.channels) for group in groups.groups}
        return {index: effect / saved[index] for index, effect in effects.items()}
    if method == "sensitivity":
        return _by_loss(model, groups, list(feeds), weights=weights, threads=threads, quiet=quiet)
    folded, plain = GraphView(fold_batchnorm(model), copy=False), GraphView(model, copy=False)
    at = {node.name: node for node in folded.nodes}
    original = {node.name: node for node in plain.nodes}
    scores: Scores = {}
    for group in groups.groups:
        parts: dict[str, list[Array]] = {"producer": [], "consumer": [], "pass": []}
        for member in group.members:
            if member.role in parts:
                if member.role == "consumer" and method == "activation":
                    energy = energies.get(original[member.node].input[0])
                else:
                    energy = None
                size = _sizes(folded, at[member.node], member, group=group, method=method, energy=energy)
                parts[member.role].append(_relative(size))
        if method == "bn":
            scales = _bn_scales(plain, original, group)
            parts["producer"] = scales or parts["producer"]
        total = np.ones(group.size)
        for sizes in parts.values():
            if sizes:
                total = total * np.mean(sizes, axis=0)
        scores[group.index] = _relative(total)
    return scores


def _by_loss(
    model: ModelProto,
    groups: Groups,
    feeds: Sequence[Mapping[str, NDArray[np.generic]]],
    *,
    weights: Mapping[int, float] | None,
    threads: int | None,
    quiet: bool,
) -> Scores:
    """Losses of the layers that read a unit, per channel (or weight) it takes away; comparable over groups."""
    saved = weights or {group.index: float(group.channels) for group in groups.groups}
    if not feeds:
        raise SpecError("method sensitivity weighs what samples show: give --calib (calibration samples)")
    sizes = score_groups(model, groups, method="l2")
    readers = find_readers(GraphView(model, copy=False), groups)
    inverses, variances = inverse_moments(model, list(readers.values()), feeds, threads=threads, quiet=quiet)
    scores = {
        group.index: unit_losses(group, readers, inverses, variances, dead=sizes[group.index] == 0) / saved[group.index]
        for group in groups.groups
    }
    highest = max((float(np.nanmax(losses, initial=0)) for losses in scores.values()), default=0.0)
    return {  # what nothing measured reads ranks behind all that was
        index: np.where(np.isnan(losses), highest * (1 + sizes[index]), losses) for index, losses in scores.items()
    }


def _relative(sizes: Array) -> Array:
    mean = float(sizes.mean())
    return sizes / mean if mean > 0 else sizes


def _per_unit(values: Array, units: NDArray[np.int64], size: int) -> Array:
    inside = units >= 0
    total: Array = np.bincount(units[inside], weights=values[inside], minlength=size)[:size].astype(np.float64)
    return total


def _sizes(
    view: GraphView, node: NodeProto, member: Member, *, group: ChannelGroup, method: str, energy: Array | None
) -> Array:
    weight = view.constant(node.input[member.index])
    if weight is None:
        raise ModelError(f"node {member.node!r}: its weights are not constant any more")
    if not np.isfinite(weight).all():
        raise ModelError(f"node {member.node!r}: weights {node.input[member.index]!r} hold NaN or infinity")
    rows = np.moveaxis(weight.astype(np.float64), member.axis, 0).reshape(weight.shape[member.axis], -1)
    values = np.abs(rows).sum(axis=1) if method == "l1" else np.square(rows).sum(axis=1)
    if energy is not None and energy.size and values.size % energy.size == 0:
        values = values * np.repeat(energy, values.size // energy.size)
    total = _per_unit(values, member.units, group.size)
    if member.role != "consumer" and not total.all():
        total = np.where(total > 0, total, _bias_sizes(view, node, member, size=group.size))
    return total if method == "l1" else np.sqrt(total)


def _bias_sizes(view: GraphView, node: NodeProto, member: Member, *, size: int) -> Array:
    """Squares of the biases: a channel with zero weights and a bias is constant, not dead."""
    bias = view.constant(node.input[2]) if len(node.input) > 2 and node.input[2] else None
    if bias is None or bias.size != member.units.size:
        return np.zeros(size)
    return _per_unit(np.square(bias.reshape(-1).astype(np.float64)), member.units, size)


def _bn_scales(view: GraphView, nodes: Mapping[str, NodeProto], group: ChannelGroup) -> list[Array]:
    found = []
    for member in group.members:
        if member.role == "norm" and member.index == 1 and nodes[member.node].op_type == "BatchNormalization":
            scale, shift = (view.constant(nodes[member.node].input[index]) for index in (1, 2))
            if scale is not None and shift is not None:
                sizes = np.where(scale != 0, np.abs(scale), np.abs(shift)).astype(np.float64)
                found.append(_relative(_per_unit(sizes, member.units, group.size)))
    return found


def _read_by(model: ModelProto, groups: Groups) -> dict[str, int]:
    """Inputs of layers that read prunable channels -> the channel axis."""
    nodes = {node.name: node for node in GraphView(model, copy=False).nodes}
    names = {nodes[cut.node].input[0] for cut in groups.cuts if cut.role == "consumer"}
    return {name: groups.tracks[name].axis for name in sorted(names) if name in groups.tracks}


def channel_energies(
    model: ModelProto,
    tensors: Mapping[str, int],
    feeds: Iterable[Mapping[str, NDArray[np.generic]]],
    *,
    threads: int | None = 2,
    quiet: bool = False,
) -> dict[str, Array]:
    """Mean square per channel of tensors (name -> channel axis) over samples, in float64; {} without samples.

    NaN and infinity count as 0.
    """
    from edgeds.graph.session import open_session

    names: Sequence[str] = list(tensors)
    if not names:
        return {}
    session = open_session(model, outputs=names, threads=threads)
    sums: dict[str, Array] = {}
    count = 0
    for feed in progress(feeds, what="measuring activations", unit="sample", quiet=quiet):
        count += 1
        for name, value in zip(names, session.run(names, dict(feed)), strict=True):
            rows = np.moveaxis(np.nan_to_num(value.astype(np.float64), posinf=0, neginf=0), tensors[name], 0)
            mean = np.square(rows.reshape(rows.shape[0], -1)).mean(axis=1)
            sums[name] = sums.get(name, np.zeros_like(mean)) + mean
    return {name: total / count for name, total in sums.items()}
