"""Layers of a transformer found on the graph, what dropping each costs, and their removal.

A layer's end is the last tensor that everything after its attention goes through before the next attention: the
residual sum, or the normalisation after it. The first layer's start and the last layer's end have no attention beyond
them; they are found by walking the neighbouring layer in lockstep.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, helper

from edgeds.compress.groups import Protected
from edgeds.compress.heads_find import attention_nodes
from edgeds.compress.ranges import run_feeds
from edgeds.difference import Difference
from edgeds.errors import CalibrationError, SpecError
from edgeds.graph.session import open_session
from edgeds.graph.view import GraphView
from edgeds.progress import track

COST_SAMPLES = 16
"""Samples that layers are compared on at most: every layer is tried on each of them, in every round."""
Feeds = Mapping[str, NDArray[np.generic]]
Measure = Callable[[ModelProto], Difference]


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One layer: its place among the attention blocks, the node of its attention, and the tensors it goes between."""

    index: int
    node: str
    start: str
    end: str


@dataclass(frozen=True, kw_only=True)
class LayerCost:
    """What dropping one layer alone does to the outputs on samples: ``sqnr_db`` 10 log10(signal / error) and the cosine
    over all outputs, None where it cannot be told; ``dropped`` says whether it went."""

    layer: int
    node: str
    cosine: float | None
    sqnr_db: float | None
    dropped: bool


def find_layers(view: GraphView, shapes: Mapping[str, tuple[int, ...]]) -> tuple[tuple[Layer, ...], list[Protected]]:
    """The layers that can be dropped, and those that cannot, with the reason; ``shapes`` by ``concrete_shapes``."""
    nodes = attention_nodes(view)
    walk = _Walk(view)
    ends = [walk.end_between(a, b) for a, b in pairwise(nodes)]
    starts: list[str | None] = [None, *ends]
    if len(nodes) > 1:
        if ends[0] is not None:
            starts[0] = walk.partner(nodes[1], nodes[0], ends[0])
        ends.append(walk.end_like(nodes[-2], nodes[-1], ends[-1]) if ends[-1] is not None else None)
    else:
        ends.append(None)
    found, protected = [], []
    for index, (node, start, end) in enumerate(zip(nodes, starts, ends, strict=False)):
        reason = _refused(walk, start, end, shapes)
        if reason is not None or start is None or end is None:
            protected.append(Protected(node=node.name, reason=f"layer {index} stays: {reason}", channels=0))
        else:
            found.append(Layer(index=index, node=node.name, start=start, end=end))
    return tuple(found), protected


def _refused(walk: _Walk, start: str | None, end: str | None, shapes: Mapping[str, tuple[int, ...]]) -> str | None:
    if start is None or end is None:
        return "where it starts and ends is not clear"
    if start not in shapes or shapes.get(start) != shapes.get(end):
        return f"{start!r} before it and {end!r} after it differ in shape, or it is unknown"
    if walk.view.dtype(start) != walk.view.dtype(end):
        return f"{start!r} before it and {end!r} after it differ in type"
    leak = walk.leak(start, end)
    return None if leak is None else f"{leak!r} inside it is used outside, or is an output"


class _Walk:
    """Reachability over the data tensors of one graph, in node order."""

    def __init__(self, view: GraphView) -> None:
        self.view = view
        self.nodes = view.nodes
        self._outer = {name for node in self.nodes for name in node.output if view.used_in_subgraph(name)}

    def descendants(self, tensors: set[str]) -> set[str]:
        """What is computed from the values of tensors; their sizes do not count."""
        reached = set(tensors)
        for node in self.nodes:
            if node.op_type not in ("Shape", "Size") and not reached.isdisjoint(node.input):
                reached.update(name for name in node.output if name)
        return reached

    def ancestors(self, tensors: set[str]) -> set[str]:
        needed = set(tensors)
        for node in reversed(self.nodes):
            if not needed.isdisjoint(node.output):
                needed.update(name for name in node.input if name)
        return needed

    def bottlenecks(self, node: NodeProto) -> list[tuple[str, str]]:
        """Tensors that every path from a node to any output goes through, with the operators that make them.

        At the point of node order where such a tensor is made, it is the only one alive of all that depend on the node.
        """
        readers: dict[str, int] = {}
        reached, live = set(node.output[:1]), set(node.output[:1])
        for other in self.nodes:
            for name in set(other.input):
                readers[name] = readers.get(name, 0) + 1
        found = []
        for other in self.nodes:
            used = reached.intersection(other.input)
            if not used:
                continue
            for name in used:
                readers[name] -= 1
                if not readers[name] and not self._stays(name):
                    live.discard(name)
            made = [name for name in other.output if name]
            reached.update(made)
            live.update(name for name in made if readers.get(name, 0) or self._stays(name))
            if len(live) == 1 and len(made) == 1 and made[0] in live:
                found.append((made[0], other.op_type))
        return found

    def _stays(self, name: str) -> bool:
        return self.view.is_output(name) or name in self._outer

    def end_between(self, node: NodeProto, after: NodeProto) -> str | None:
        """The last such tensor that the next attention depends on."""
        before = self.ancestors(set(after.output[:1]))
        found = [name for name, _ in self.bottlenecks(node) if name in before and name not in after.output]
        return found[-1] if found else None

    def end_like(self, model: NodeProto, node: NodeProto, end: str) -> str | None:
        """The tensor after ``node`` that stands where ``end`` does after ``model``; None when operators differ."""
        pattern, found = self.bottlenecks(model), self.bottlenecks(node)
        count = next((index + 1 for index, (name, _) in enumerate(pattern) if name == end), 0)
        same = [op for _, op in pattern[:count]] == [op for _, op in found[:count]]
        return found[count - 1][0] if count and same else None

    def partner(self, model: NodeProto, node: NodeProto, start: str) -> str | None:
        """The tensor before ``node`` that stands where ``start`` does before ``model``, by walking both backwards."""
        todo = list(zip(model.input, node.input, strict=False))
        seen: set[tuple[str, str]] = set()
        partners: set[str] = set()
        inside = self.descendants({start})
        while todo:
            pair = todo.pop()
            if pair in seen or pair[0] not in inside:
                continue
            seen.add(pair)
            if pair[0] == start:
                partners.add(pair[1])
                continue
            a, b = self.view.producer(pair[0]), self.view.producer(pair[1])
            if a is not None and b is not None and a.op_type == b.op_type and len(a.input) == len(b.input):
                todo += [both for both in zip(a.input, b.input, strict=True) if all(both)]
        return partners.pop() if len(partners) == 1 else None

    def leak(self, start: str, end: str) -> str | None:
        """A tensor between both that something outside reads, or that is an output."""
        before = self.ancestors({end})
        inside = (self.descendants({start}) & before) - {start, end}
        for name in sorted(inside):
            if self._stays(name):
                return name
            for reader in self.view.consumers(name):
                if not before.intersection(reader.output):
                    return name
        return None


def drop_layers(model: ModelProto, layers: Sequence[Layer]) -> ModelProto:
    """A copy in which what follows each layer reads what comes before it. Names of tensors that stay do not change."""
    view = GraphView(model)
    instead: dict[str, str] = {}
    for layer in sorted(layers, key=lambda item: item.index):
        start = instead.get(layer.start, layer.start)
        instead[layer.end] = start
        view.replace_uses(layer.end, start)
        if view.is_output(layer.end):
            maker = view.producer(layer.end)
            if maker is not None:
                view.set_output(maker, layer.end, view.fresh_name(f"{layer.end}_dropped"))
            view.add_node(helper.make_node("Identity", [start], [layer.end], name=f"{layer.node}_dropped"))
    return view.finish()


def choose_layers(
    model: ModelProto,
    layers: Sequence[Layer],
    feeds: Sequence[Feeds],
    *,
    count: int,
    protected: Sequence[Protected] = (),
    threads: int | None = 2,
    quiet: bool = False,
) -> tuple[tuple[Layer, ...], tuple[LayerCost, ...]]:
    """``count`` layers whose loss costs the outputs least on samples, one by one with those before gone, and what each
    costs alone. Raises SpecError for more layers than can go (``protected``: those that cannot, for what it says), and
    CalibrationError for samples that do not run."""
    if isinstance(count, bool) or not isinstance(count, int) or count < 0:
        raise SpecError(f"layers {count!r}: how many layers to drop is a whole number of at least 0")
    if count > max(0, len(layers) - 1):
        why = f"; {protected[0].reason}" if protected else ""
        raise SpecError(
            f"layers {count}: {len(layers)} of {len(layers) + len(protected)} layers can be dropped, and one of those "
            f"stays{why}"
        )
    if count == 0:
        return (), ()
    measure = measure_against(model, feeds, threads=threads)
    gone: list[Layer] = []
    alone: list[LayerCost] = []
    for turn in range(count):
        left = [layer for layer in layers if layer not in gone]
        found = {}
        for layer in track(left, what=f"trying without layer, {turn + 1} of {count}", unit="layer", quiet=quiet):
            found[layer.index] = difference = measure(drop_layers(model, [*gone, layer]))
            if turn == 0:
                cost = LayerCost(
                    layer=layer.index,
                    node=layer.node,
                    cosine=difference.cosine,
                    sqnr_db=difference.sqnr_db,
                    dropped=False,
                )
                alone.append(cost)
        gone.append(min(left, key=lambda layer: _loss(found[layer.index])))
    names = {layer.index for layer in gone}
    return tuple(gone), tuple(replace(cost, dropped=cost.layer in names) for cost in alone)


def _loss(difference: Difference) -> float:
    if difference.max_abs == 0:
        return -np.inf
    ratio = difference.sqnr_db
    return np.inf if ratio is None or difference.non_finite_mismatch else -ratio


def _outputs(model: ModelProto, samples: Sequence[Feeds], *, threads: int | None) -> list[list[Any]]:
    if not samples:
        raise CalibrationError("the calibration set holds no samples: what a layer costs is measured on some")
    session = open_session(model, threads=threads)
    return [run_feeds(session, None, dict(feed)) for feed in samples]


def measure_against(model: ModelProto, feeds: Sequence[Feeds], *, threads: int | None = 2) -> Measure:
    """A function that compares the outputs of numbers of another model with this one's, on ``COST_SAMPLES`` at most."""
    samples = list(feeds)[:COST_SAMPLES]
    want = _outputs(model, samples, threads=threads)

    def measure(other: ModelProto) -> Difference:
        total = Difference()
        for have, expected in zip(_outputs(other, samples, threads=threads), want, strict=True):
            for a, b in zip(expected, have, strict=True):
                if isinstance(a, np.ndarray) and a.dtype.kind == "f":
                    total.add(a, b)
        return total

    return measure
