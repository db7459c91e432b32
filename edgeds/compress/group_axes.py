"""What channel analysis knows while it walks a graph: which channel every position of a tensor stands for.

A channel of a layer that can be narrowed gets a number ("atom"). A followed tensor has one axis whose positions hold
atoms, -1 for positions that always stay. Operators tie atoms together (edges), pin them (freezes), and leave notes on
how to cut a constant or rewrite a size (sites) when atoms go.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto

from edgeds.errors import ModelError
from edgeds.graph.feeds import random_feeds
from edgeds.graph.proto import attributes, dims_of, light_copy, main_opset
from edgeds.graph.session import open_session, runtime_errors
from edgeds.graph.shapes import assume_input_shapes, infer_shapes
from edgeds.graph.view import GraphView

Ids = NDArray[np.int64]
KEPT = -1
"""Stands at positions that no pruning removes."""


@dataclass(frozen=True, kw_only=True)
class Track:
    """The atoms of a tensor along ``axis`` (int64, one per position)."""

    axis: int
    ids: Ids


@dataclass(frozen=True, kw_only=True)
class Cut:
    """Constant ``node.input[index]`` loses positions along ``axis`` with their atoms. ``role``: producer, consumer,
    bias or pass (weights that only pass channels on)."""

    node: str
    index: int
    axis: int
    ids: Ids
    role: str


@dataclass(frozen=True, kw_only=True)
class Rewrite:
    """A number in the graph that counts channels. ``kind``: "group" (attribute, ``parts[0]`` has one atom per group),
    "split" (sizes: one array of atoms per output), "entry" (element ``index`` of the constant input ``input``),
    "attribute" (the one named ``attribute``, likewise),
    "slice" (bounds: element ``index`` of inputs 1 and 2, ``parts``: all atoms of the input, those before the slice,
    those in it), "gather" (indices, ``parts[0]`` the input's atoms)."""

    node: str
    kind: str
    parts: tuple[Ids, ...]
    input: int = 0
    index: int = 0
    attribute: str = "group"


@dataclass(kw_only=True)
class Tracker:
    """The state of one analysis. Not frozen: handlers of operators write into it."""

    view: GraphView
    shapes: dict[str, tuple[int, ...]]
    opset: int
    protect: frozenset[str] = frozenset()
    atoms: int = 0
    tracks: dict[str, Track] = field(default_factory=dict)
    producers: dict[str, Ids] = field(default_factory=dict)
    """Node -> the atoms it made, in order of its outputs."""
    edges: list[tuple[Ids, Ids]] = field(default_factory=list)
    freezes: list[tuple[Ids, str, str]] = field(default_factory=list)
    unfollowed: list[tuple[str, str]] = field(default_factory=list)
    """(node, reason) of layers that could not be narrowed from the start."""
    regions: list[Ids] = field(default_factory=list)
    """Sets of atoms of which at least one has to stay: the parts of a Split or Slice."""
    cuts: list[Cut] = field(default_factory=list)
    rewrites: list[Rewrite] = field(default_factory=list)
    _shared: dict[tuple[str, int], Cut] = field(default_factory=dict)

    def fresh(self, node: NodeProto, count: int) -> Ids:
        """New atoms for the outputs of a layer; none (-1) when it has a single one, which has to stay."""
        if count < 2:
            return np.full(count, KEPT, np.int64)
        ids = np.arange(self.atoms, self.atoms + count, dtype=np.int64)
        self.atoms += count
        self.producers[node.name] = ids
        if node.name in self.protect:
            self.freeze(ids, node, "kept as asked")
        return ids

    def freeze(self, ids: Ids, node: NodeProto, reason: str) -> None:
        """Pin atoms: the channels stay."""
        live = ids[ids >= 0]
        if live.size:
            self.freezes.append((live, node.name, reason))

    def freeze_tensor(self, tensor: str, node: NodeProto, reason: str) -> None:
        """Pin what is followed of a tensor."""
        track = self.tracks.get(tensor)
        if track is not None:
            self.freeze(track.ids, node, reason)

    def tie(self, a: Ids, b: Ids, node: NodeProto) -> None:
        """Couple positions pairwise; partners of positions that stay are pinned."""
        both = (a >= 0) & (b >= 0)
        if both.any():
            self.edges.append((a[both], b[both]))
        for mine, other in ((a, b), (b, a)):
            self.freeze(mine[other < 0], node, "tied to channels that have to stay")

    def cut(self, node: NodeProto, index: int, *, axis: int, ids: Ids, role: str) -> None:
        """Note that a constant follows ``ids`` along ``axis``. Weights shared by several layers are coupled."""
        site = Cut(node=node.name, index=index, axis=axis, ids=ids, role=role)
        name = node.input[index]
        if role in ("producer", "consumer"):
            first = self._shared.setdefault((name, axis), site)
            if first is not site and first.ids.size == ids.size:
                self.tie(first.ids, ids, node)
        if (ids >= 0).any():
            self.cuts.append(site)

    def follow(self, tensor: str, axis: int, ids: Ids) -> None:
        """Say which atoms a tensor carries; tensors whose positions all stay are not followed."""
        if tensor and (ids >= 0).any():
            self.tracks[tensor] = Track(axis=axis, ids=ids)

    def shape(self, tensor: str) -> tuple[int, ...] | None:
        """Concrete shape at the assumed input shapes, None when unknown."""
        return self.shapes.get(tensor)

    def ids_on(self, tensor: str, axis: int) -> Ids | None:
        """Atoms of a tensor along an axis: its track, all -1 when not followed there, None when followed elsewhere or
        of unknown size."""
        track = self.tracks.get(tensor)
        if track is not None:
            return track.ids if track.axis == axis else None
        shape = self.shape(tensor)
        if shape is None or not 0 <= axis < len(shape):
            return None
        return np.full(shape[axis], KEPT, np.int64)

    def attrs(self, node: NodeProto) -> dict[str, object]:
        return attributes(node)


_FREE_SIZES = {(False, 0): 3, (True, 0): 3, (True, 2): 96, (True, 3): 160}
"""Sizes of free (rank is 4, axis): a batch that is no factor of channel counts, and a small image."""
_SHORT = 11
"""A free length, for models whose table of positions is shorter than the usual default."""


def concrete_shapes(model: ModelProto) -> dict[str, tuple[int, ...]]:
    """Shapes of all tensors in numbers. Free batch sizes count as 3, so that batch and channel axes that were merged
    are not taken for one another, and free images as small; where the graph refuses that, the usual defaults count."""
    assumed = assume_input_shapes(model).shapes
    free = {
        item.name: [axis for axis, dim in enumerate(dims_of(item.type) or ()) if not isinstance(dim, int)]
        for item in model.graph.input
    }
    tripled = {
        name: tuple(
            _FREE_SIZES.get((len(shape) == 4, axis), size) if axis in free[name] else size
            for axis, size in enumerate(shape)
        )
        for name, shape in assumed.items()
    }
    short = {
        name: tuple(
            min(size, _SHORT) if len(shape) != 4 and axis in free[name] and axis else size
            for axis, size in enumerate(shape)
        )
        for name, shape in tripled.items()
    }
    errors: tuple[type[Exception], ...] = (ModelError, *runtime_errors())
    for sizes in (tripled, short):
        try:
            return _complete(model, sizes)
        except errors:
            continue
    return _complete(model, assumed, strict=False)


def _complete(
    model: ModelProto, inputs: Mapping[str, tuple[int, ...]], *, strict: bool = True
) -> dict[str, tuple[int, ...]]:
    """Shapes by inference, and where that stops, from one run on made-up data. With ``strict`` a failure is raised."""
    found = _tables(infer_shapes(light_copy(model), inputs), model)
    nodes = [node for node in model.graph.node if node.op_type != "Constant"]
    holes = [name for node in nodes for name in node.output if name and name not in found]
    if not holes:
        return found
    errors: tuple[type[Exception], ...] = (ModelError, *runtime_errors())
    try:
        values = open_session(model, outputs=holes, threads=2).run(holes, random_feeds(model, inputs))
    except errors:
        if strict:
            raise
        return found
    found.update({name: np.shape(value) for name, value in zip(holes, values, strict=True)})
    return found


def _tables(inferred: ModelProto, source: ModelProto) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {}
    for item in (*inferred.graph.value_info, *inferred.graph.input, *inferred.graph.output):
        dims = dims_of(item.type)
        if dims is not None and all(isinstance(dim, int) for dim in dims):
            found[item.name] = tuple(int(dim or 0) for dim in dims)
    found.update({tensor.name: tuple(tensor.dims) for tensor in source.graph.initializer})
    return found


def new_tracker(view: GraphView, *, protect: Sequence[str] = ()) -> Tracker:
    """A tracker over a model, with concrete shapes."""
    shapes = concrete_shapes(view.model)
    for node in view.nodes:
        for name in node.input:
            value = view.constant(name) if name and name not in shapes and view.is_constant(name) else None
            if value is not None:
                shapes[name] = value.shape
    return Tracker(view=view, shapes=shapes, opset=main_opset(view.model), protect=frozenset(protect))
