"""What a model's layers would lose without a channel after their weights are solved anew, estimated on samples.

The layers that read a channel can make up for what the other channels predict of it. What is left is its variance given
the others, 1 / (G^-1)_cc with G the second moments of the layer's input (Hassibi and Stork 1993, "Optimal Brain
Surgeon", with the squared error of the layer's output as the loss), times the squared weights that read it, as a share
of the variance of what the layer gives. Taps of a kernel count with the same G. Channels are taken one by one, so that
of two alike only the first is free.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto

from edgeds.compress.groups import ChannelGroup, Groups
from edgeds.graph.session import open_session
from edgeds.graph.view import GraphView
from edgeds.progress import track as progress

Array = NDArray[np.float64]
MAX_CHANNELS = 1024
"""Inputs with more positions (flattened images) count each on its own, without what the others predict."""
_POSITIONS = 2048
"""Places per sample that enter the moments, drawn at random."""
_DAMPING = 1e-5
"""Share of the mean diagonal added to G."""


@dataclass(frozen=True, kw_only=True)
class Reader:
    """One layer that reads channels: its input and output, their channel axes, squared weights per input position."""

    node: str
    source: str
    axis: int
    output: str
    squares: Array


def find_readers(view: GraphView, groups: Groups) -> dict[str, Reader]:
    """Layers that read prunable channels, by node."""
    nodes: dict[str, NodeProto] = {node.name: node for node in view.nodes}
    found: dict[str, Reader] = {}
    for cut in groups.cuts:
        node = nodes[cut.node]
        weight = view.constant(node.input[cut.index]) if cut.role == "consumer" else None
        if weight is None or node.input[0] not in groups.tracks:
            continue
        rows = np.moveaxis(weight.astype(np.float64), cut.axis, 0).reshape(weight.shape[cut.axis], -1)
        found[cut.node] = Reader(
            node=cut.node,
            source=node.input[0],
            axis=groups.tracks[node.input[0]].axis,
            output=node.output[0],
            squares=np.square(rows).sum(axis=1),
        )
    return found


def inverse_moments(
    model: ModelProto,
    readers: Sequence[Reader],
    feeds: Iterable[Mapping[str, NDArray[np.generic]]],
    *,
    threads: int | None = 2,
    quiet: bool = False,
) -> tuple[dict[str, Array], dict[str, float]]:
    """Inverse second moments of each input, a constant term first (C + 1, C + 1), float64; summed variance per output.

    Empty without samples. NaN and infinity count as 0.
    """
    axes = {reader.source: reader.axis for reader in readers}
    made = {reader.output: reader.axis for reader in readers}
    names = list(dict.fromkeys([*axes, *made]))
    session = open_session(model, outputs=names, threads=threads)
    grams: dict[str, Array] = {}
    sums: dict[str, Array] = {}
    generator, count = np.random.default_rng(0), 0
    for feed in progress(feeds, what="measuring what channels add", unit="sample", quiet=quiet):
        count += 1
        values = dict(zip(names, session.run(names, dict(feed)), strict=True))
        for name, axis in axes.items():
            rows = _rows(values[name], axis, generator)
            rows = np.concatenate([np.ones((len(rows), 1), rows.dtype), rows], axis=1)
            gram = rows.T @ rows / len(rows) if rows.shape[1] <= MAX_CHANNELS else np.square(rows[:, 1:]).mean(axis=0)
            grams[name] = grams.get(name, np.zeros(gram.shape)) + gram
        for name, axis in made.items():
            rows = _rows(values[name], axis, generator)
            moments = np.stack([rows.mean(axis=0), np.square(rows).mean(axis=0)])
            sums[name] = sums.get(name, np.zeros(moments.shape)) + moments
    variances = {name: float((total[1] / count - np.square(total[0] / count)).sum()) for name, total in sums.items()}
    return {name: _inverse(gram / count) for name, gram in grams.items()}, variances


def _rows(value: NDArray[np.generic], axis: int, generator: np.random.Generator) -> NDArray[np.float64]:
    """(places, channels), at most ``_POSITIONS`` of them."""
    rows = np.moveaxis(value, axis, -1).reshape(-1, value.shape[axis])
    if len(rows) > _POSITIONS:
        rows = rows[generator.integers(0, len(rows), _POSITIONS)]
    return np.nan_to_num(rows.astype(np.float64), posinf=0, neginf=0)


def _inverse(gram: Array) -> Array:
    """The inverse with damping; of a diagonal (too many channels) as a matrix is left as a vector."""
    if gram.ndim == 1:
        return 1 / np.maximum(gram, np.finfo(np.float64).tiny)
    damping = _DAMPING * float(np.trace(gram)) / len(gram) + np.finfo(np.float64).tiny
    inverse: Array = np.linalg.inv(gram + damping * np.eye(len(gram)))
    return inverse


def unit_losses(
    group: ChannelGroup,
    readers: Mapping[str, Reader],
    inverses: Mapping[str, Array],
    variances: Mapping[str, float],
    *,
    dead: NDArray[np.bool_],
) -> Array:
    """Loss of each unit at the moment it would go, never falling in that order; 0 for ``dead`` ones, NaN unmeasured."""
    known = [
        (readers[member.node], member.units)
        for member in group.members
        if member.role == "consumer" and member.node in readers and readers[member.node].source in inverses
    ]
    losses = np.full(group.size, np.nan)
    if not known:
        return np.where(dead, 0.0, losses)
    state = {reader.source: inverses[reader.source].copy() for reader, _ in known}
    places = {reader.source: units for reader, units in known}
    gone, highest = np.zeros(group.size, np.bool_), 0.0
    for _ in range(group.size):
        now = np.zeros(group.size)
        for reader, units in known:
            diagonal = _left(state[reader.source])
            share = reader.squares / np.where(diagonal > 0, diagonal, np.inf) / max(variances[reader.output], 1e-30)
            inside = units >= 0
            now += np.bincount(units[inside], weights=share[inside], minlength=group.size)
        now = np.where(dead, 0.0, now)
        unit = int(np.where(gone, np.inf, now).argmin())
        highest = max(highest, float(now[unit]))
        losses[unit], gone[unit] = highest, True
        for source, units in places.items():
            for place in np.flatnonzero(units == unit):
                _remove(state[source], int(place))
    return losses


def _left(inverse: Array) -> Array:
    return inverse if inverse.ndim == 1 else np.diagonal(inverse)[1:]


def _remove(inverse: Array, place: int) -> None:
    """The inverse moments of the other channels, in place: the row and column of this one become zero."""
    if inverse.ndim == 1:
        inverse[place] = 0
        return
    column = inverse[:, place + 1].copy()
    inverse -= np.outer(column, column / column[place + 1])
    inverse[place + 1] = inverse[:, place + 1] = 0
