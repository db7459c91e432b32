"""Attention blocks and feed-forward layers of a transformer, among the groups of coupled channels that a graph has."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import numpy as np
from onnx import NodeProto

from edgeds.compress.group_attention import MICROSOFT
from edgeds.compress.groups import ChannelGroup, Groups, Protected
from edgeds.graph.proto import attributes, is_standard
from edgeds.graph.view import GraphView

_FUSED = frozenset(("MultiHeadAttention", "GroupQueryAttention", "Attention"))
_BEFORE_SOFTMAX = frozenset(
    re.findall(
        r"\w+",
        "Add Sub Mul Div Where Cast Identity Max Min Tanh Clip Concat Reshape Transpose Squeeze Unsqueeze Slice",
    )
)
"""What stands between the product of queries and keys and the Softmax: scale, mask, bias, soft capping, and for pages
of keys the joining of their scores."""
_LAYERS = frozenset(("MatMul", "Gemm"))


@dataclass(frozen=True, kw_only=True)
class AttentionBlock:
    """One attention: the node of its Softmax (or of all of it), the group its heads are in, and its query heads and key
    heads; ``units`` of key heads are removed together with their queries."""

    node: str
    group: int
    heads: int
    units: int


@dataclass(frozen=True, kw_only=True)
class FfnBlock:
    """One feed-forward layer: the group of its width, the layers that make it (two when gated)."""

    group: int
    layers: tuple[str, ...]
    width: int


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """What can be narrowed, and attention and dense layers that cannot, with the reason. Layers that lead back to the
    model's width from what can be narrowed are neither: no head or unit is theirs."""

    attention: tuple[AttentionBlock, ...]
    ffn: tuple[FfnBlock, ...]
    protected: tuple[Protected, ...]


def attention_nodes(view: GraphView) -> tuple[NodeProto, ...]:
    """The Softmax over a product of two activations, or the fused operator, of each attention; in graph order."""
    return tuple(node for node in view.nodes if _is_fused(node) or _is_scores(view, node))


def _is_fused(node: NodeProto) -> bool:
    return node.op_type in _FUSED and (is_standard(node) or node.domain == MICROSOFT)


def _is_scores(view: GraphView, node: NodeProto) -> bool:
    return node.op_type == "Softmax" and is_standard(node) and _product(view, node.input[0]) is not None


def _product(view: GraphView, tensor: str, depth: int = 8) -> NodeProto | None:
    """The MatMul of queries and keys behind what a Softmax reads."""
    node = view.producer(tensor)
    if node is None or depth == 0:
        return None
    if node.op_type == "MatMul":
        return None if any(view.is_constant(name) for name in node.input) else node
    if node.op_type not in _BEFORE_SOFTMAX:
        return None
    found = (_product(view, name, depth - 1) for name in node.input if name and not view.is_constant(name))
    return next((item for item in found if item is not None), None)


def find_blocks(view: GraphView, groups: Groups) -> Blocks:
    """Sort the groups of ``find_groups(view)`` into attention heads and feed-forward widths; the rest is neither."""
    reasons = {item.node: item for item in groups.protected}
    attention, protected, taken = [], [], set()
    for node in attention_nodes(view):
        track = groups.tracks.get(node.output[0])
        place = groups.place[track.ids[track.ids >= 0]] if track is not None else np.zeros((0, 2), np.int64)
        known = np.unique(place[:, 0])
        if track is None or known.size != 1 or known[0] < 0 or (track.ids < 0).any():
            protected.append(Protected(node=node.name, reason=_why(view, node, reasons), channels=0))
            continue
        group = groups.groups[int(known[0])]
        taken.add(group.index)
        units = len(np.unique(place[:, 1]))
        heads = _query_heads(node, track.ids.size, units)
        attention.append(AttentionBlock(node=node.name, group=group.index, heads=heads, units=units))
    ffn = tuple(
        FfnBlock(group=group.index, layers=group.producers, width=group.size)
        for group in groups.groups
        if group.index not in taken and _is_ffn(view, groups, group)
    )
    known_groups = taken | {block.group for block in ffn}
    sides = {member.node for index in known_groups for member in groups.groups[index].members}
    dense = {node.name for node in view.nodes if node.op_type in _LAYERS}
    protected += [item for item in groups.protected if item.node in dense - sides]
    return Blocks(attention=tuple(attention), ffn=ffn, protected=tuple(protected))


def _query_heads(node: NodeProto, positions: int, units: int) -> int:
    """Query heads: positions of the Softmax's axis of heads, or what a fused operator says."""
    attrs = attributes(node)
    stated = attrs.get("num_heads", attrs.get("q_num_heads"))
    if node.op_type == "Softmax" or stated is None:
        return positions
    return int(stated) if int(stated) % units == 0 else units


def _why(view: GraphView, node: NodeProto, reasons: dict[str, Protected]) -> str:
    """The reason given for the layers before an attention."""
    todo = [name for name in node.input if name]
    seen: set[str] = set()
    while todo:
        maker = view.producer(todo.pop(0))
        if maker is None or maker.name in seen:
            continue
        seen.add(maker.name)
        if maker.name in reasons:
            return f"its heads stay: {maker.name!r} {reasons[maker.name].reason}"
        if maker.op_type not in _LAYERS or not any(view.is_constant(name) for name in maker.input):
            todo += [name for name in maker.input if name and not view.is_constant(name)]
    return "its heads stay: they have no axis of their own"


def _is_ffn(view: GraphView, groups: Groups, group: ChannelGroup) -> bool:
    """Dense layers in and out, the second as wide as what the first reads, and no product with activations between."""
    nodes = {node.name: node for node in view.nodes}
    sides: dict[str, set[int]] = {"producer": set(), "consumer": set()}
    for member in group.members:
        if member.role == "pass" or member.role == "norm":
            return False
        if member.role in sides:
            node = nodes[member.node]
            weight = view.shape(node.input[member.index])
            if node.op_type not in _LAYERS or weight is None or len(weight) != 2 or member.index != 1:
                return False
            sides[member.role].add(int(weight[1 - member.axis] or 0))
    if len(sides["producer"]) != 1 or sides["producer"] != sides["consumer"]:
        return False
    return not any(_multiplies(view, groups, group, node) for node in view.nodes if node.op_type == "MatMul")


def _multiplies(view: GraphView, groups: Groups, group: ChannelGroup, node: NodeProto) -> bool:
    if any(view.is_constant(name) for name in node.input):
        return False
    for name in node.input:
        track = groups.tracks.get(name)
        ids = track.ids[track.ids >= 0] if track is not None else np.zeros(0, np.int64)
        if (groups.place[ids, 0] == group.index).any():
            return True
    return False


def only(groups: Groups, indices: set[int]) -> Groups:
    """The same analysis with some of its groups, which keep their numbers."""
    return replace(groups, groups=tuple(group for group in groups.groups if group.index in indices))
