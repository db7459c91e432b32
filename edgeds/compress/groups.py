"""Which channels of a model can only be removed together, found on the ONNX graph itself.

The graph is walked once; every output channel of a layer gets a number, and each operator says what becomes of it
(``group_axes``, ``group_layers``, ``group_ops``, ``group_layout``). What is coupled becomes one unit. Units made by the
same layers form a group, within which importance is comparable. Anything not understood pins its channels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import numpy as np
from numpy.typing import NDArray
from onnx import NodeProto

from edgeds.compress import group_attention, group_layers, group_layout, group_ops
from edgeds.compress.group_axes import KEPT, Cut, Ids, Rewrite, Track, Tracker, new_tracker
from edgeds.errors import ModelError, SpecError
from edgeds.graph.proto import is_standard, subgraphs
from edgeds.graph.view import GraphView

_QUANTIZED = ("QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear", "ConvInteger", "MatMulInteger")

_HANDLERS: dict[str, Callable[[Tracker, NodeProto], None]] = {
    **dict.fromkeys(group_ops.ELEMENTWISE, group_ops.elementwise),
    **dict.fromkeys(group_ops.POOLS, group_ops.pool),
    **dict.fromkeys(group_ops.REDUCTIONS, group_ops.reduction),
    **dict.fromkeys(("Softmax", "LogSoftmax", "Hardmax"), group_ops.softmax),
    **dict.fromkeys(("Conv", "ConvTranspose"), group_layers.conv),
    **dict.fromkeys(("BatchNormalization", "InstanceNormalization"), group_layers.batchnorm),
    **dict.fromkeys(("Squeeze", "Unsqueeze"), group_layout.squeeze),
    **dict.fromkeys(("Expand", "Tile"), group_layout.expand),
    **dict.fromkeys(("LayerNormalization", "RMSNormalization", "SimplifiedLayerNormalization"), group_ops.layernorm),
    "Attention": group_attention.attention,
    "Gemm": group_layers.gemm,
    "MatMul": group_layers.matmul,
    "Concat": group_ops.concat,
    "Split": group_ops.split,
    "Slice": group_ops.cut_out,
    "Gather": group_ops.gather,
    "Reshape": group_layout.reshape,
    "Flatten": group_layout.flatten,
    "Transpose": group_layout.transpose,
    "Shape": group_layout.shape_of,
}


_FUSED: dict[str, Callable[[Tracker, NodeProto], None]] = {
    **dict.fromkeys(("BiasGelu", "FastGelu", "Gelu", "QuickGelu"), group_ops.elementwise),
    **dict.fromkeys(("MultiHeadAttention", "GroupQueryAttention"), group_attention.attention),
    "Attention": group_attention.packed_attention,
}
"""Operators of ONNX Runtime, which its own transformer optimizer writes."""


@dataclass(frozen=True, kw_only=True)
class Protected:
    """A layer whose channels (all, or ``channels`` of them) stay, and why."""

    node: str
    reason: str
    channels: int


@dataclass(frozen=True, kw_only=True)
class Member:
    """One constant that follows a group: position ``p`` along ``axis`` of input ``index`` of ``node`` belongs to unit
    ``units[p]`` of the group, -1 for positions of other groups. ``role``: producer, consumer, bias, norm or pass."""

    node: str
    index: int
    axis: int
    role: str
    units: NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class ChannelGroup:
    """``size`` units that are ranked together; removing one takes ``unit`` channels from each of ``producers``, and
    ``channels`` from all of them together."""

    index: int
    size: int
    unit: int
    channels: int
    producers: tuple[str, ...]
    members: tuple[Member, ...]


@dataclass(frozen=True, kw_only=True)
class Groups:
    """``place`` gives (group, unit) per atom, (-1, -1) where it stays; the rest is for ``prune_channels``."""

    groups: tuple[ChannelGroup, ...]
    protected: tuple[Protected, ...]
    place: NDArray[np.int64]
    cuts: tuple[Cut, ...]
    rewrites: tuple[Rewrite, ...]
    tracks: dict[str, Track]


def find_groups(view: GraphView, *, protect: Sequence[str] = ()) -> Groups:
    """Analyse a model whose constants are folded. ``protect``: names of nodes whose outputs stay (``*`` matches any).

    Raises ModelError for a quantized model, SpecError for a name that no node has.
    """
    _refuse_quantized(view)
    tracker = new_tracker(view, protect=_named(view, protect))
    for node in view.nodes:
        _visit(tracker, node)
    for name in view.outputs:
        track = tracker.tracks.get(name)
        maker = view.producer(name)
        if track is not None and maker is not None:
            tracker.freeze(track.ids, maker, f"reaches the graph output {name!r}")
    return _collect(tracker)


def _refuse_quantized(view: GraphView) -> None:
    for node in view.nodes:
        if node.op_type in _QUANTIZED or node.op_type.startswith("QLinear"):
            raise ModelError(
                f"node {node.name!r} ({node.op_type}): the model is already quantized; "
                "prune the float model first and quantize the result"
            )


def _named(view: GraphView, patterns: Sequence[str]) -> list[str]:
    names = [node.name for node in view.nodes]
    found: list[str] = []
    for pattern in patterns:
        matches = [name for name in names if name == pattern or fnmatchcase(name, pattern)]
        if not matches:
            raise SpecError(f"--keep {pattern!r}: the model has no such node; edgeds inspect MODEL --json lists them")
        found += matches
    return found


def _visit(tracker: Tracker, node: NodeProto) -> None:
    handlers = _HANDLERS if is_standard(node) else _FUSED if node.domain == group_attention.MICROSOFT else {}
    handler = handlers.get(node.op_type) if not subgraphs(node) else None
    if node.op_type in ("Constant", "ConstantOfShape"):
        handler = None
    if handler is not None:
        handler(tracker, node)
    else:
        for name in node.input:
            tracker.freeze_tensor(name, node, f"operator {node.op_type} is not followed")
    for name in node.output:
        if name and tracker.view.used_in_subgraph(name):
            tracker.freeze_tensor(name, node, "is used inside a branch or loop")


def _components(tracker: Tracker) -> Ids:
    """The smallest atom that each atom is coupled with, by label spreading with pointer jumping."""
    labels: Ids = np.arange(tracker.atoms, dtype=np.int64)
    if not tracker.edges:
        return labels
    a = np.concatenate([pair[0] for pair in tracker.edges])
    b = np.concatenate([pair[1] for pair in tracker.edges])
    while True:
        before = labels.copy()
        low = np.minimum(labels[a], labels[b])
        for side in (a, b):
            np.minimum.at(labels, labels[side], low)
            np.minimum.at(labels, side, low)
        labels = labels[labels]
        if np.array_equal(before, labels):
            return labels


def _collect(tracker: Tracker) -> Groups:
    labels = _components(tracker)
    reasons: dict[int, tuple[str, str]] = {}
    for ids, node, reason in tracker.freezes:
        for root in np.unique(labels[ids]).tolist():
            reasons.setdefault(root, (node, reason))
    signatures: dict[int, list[int]] = {}
    sets = [*tracker.producers.values(), *tracker.regions]
    for number, ids in enumerate(sets):
        for root in np.unique(labels[ids[ids >= 0]]).tolist():
            if root not in reasons:
                signatures.setdefault(root, []).append(number)
    kinds: dict[tuple[int, ...], list[int]] = {}
    for root, signature in sorted(signatures.items()):
        kinds.setdefault(tuple(signature), []).append(root)
    place = np.full((tracker.atoms, 2), -1, np.int64)
    by_root = np.full((tracker.atoms, 2), -1, np.int64)
    for group, roots in enumerate(kinds.values()):
        by_root[roots, 0], by_root[roots, 1] = group, np.arange(len(roots))
    if tracker.atoms:
        place = by_root[labels]
    return Groups(
        groups=_groups(tracker, place, [len(roots) for roots in kinds.values()]),
        protected=_protected(tracker, labels, reasons),
        place=place,
        cuts=tuple(tracker.cuts),
        rewrites=tuple(tracker.rewrites),
        tracks=dict(tracker.tracks),
    )


def _groups(tracker: Tracker, place: NDArray[np.int64], sizes: list[int]) -> tuple[ChannelGroup, ...]:
    members: list[list[Member]] = [[] for _ in sizes]
    producers: list[dict[str, int]] = [{} for _ in sizes]
    for cut in tracker.cuts:
        spots = np.where((cut.ids >= 0)[:, None], place[np.maximum(cut.ids, 0)], KEPT)
        for group in np.unique(spots[:, 0][spots[:, 0] >= 0]).tolist():
            units = np.where(spots[:, 0] == group, spots[:, 1], KEPT)
            member = Member(node=cut.node, index=cut.index, axis=cut.axis, role=cut.role, units=units)
            members[group].append(member)
            if cut.role in ("producer", "pass"):
                producers[group][cut.node] = int((units >= 0).sum())
    found = []
    for index, size in enumerate(sizes):
        counts = producers[index]
        widest = max((count // size for count in counts.values()), default=1)
        found.append(
            ChannelGroup(
                index=index,
                size=size,
                unit=max(1, widest),
                channels=max(1, sum(counts.values()) // size),
                producers=tuple(counts),
                members=tuple(members[index]),
            )
        )
    return tuple(found)


def _protected(tracker: Tracker, labels: Ids, reasons: dict[int, tuple[str, str]]) -> tuple[Protected, ...]:
    found = [Protected(node=node, reason=reason, channels=0) for node, reason in tracker.unfollowed]
    for name, ids in tracker.producers.items():
        roots = [root for root in labels[ids].tolist() if root in reasons]
        if roots:
            node, reason = reasons[roots[0]]
            text = reason if node == name else f"{reason} (at {node!r})"
            found.append(Protected(node=name, reason=text, channels=len(roots)))
    return tuple(found)
