"""Channel analysis of attention: operators that hold all of it, and Reshapes that pack queries, keys and values.

Heads go whole, and with grouped queries all query heads of a key head with it; the counts in attributes follow. A past
of keys and values that comes from outside has a fixed number of heads, so it pins them.
"""

from __future__ import annotations

import numpy as np
from onnx import NodeProto

from edgeds.compress.group_axes import Ids, Rewrite, Tracker

MICROSOFT = "com.microsoft"
_NAMES = {"MultiHeadAttention": ("num_heads", "num_heads"), "GroupQueryAttention": ("num_heads", "kv_num_heads")}
_STANDARD = ("q_num_heads", "kv_num_heads")
_PAST = {"MultiHeadAttention": (6, 7), "GroupQueryAttention": (3, 4), "Attention": (4, 5)}
_BIAS = {"MultiHeadAttention": 5, "GroupQueryAttention": 10, "Attention": 3}


def attention(tracker: Tracker, node: NodeProto) -> None:
    """Attention over three separate inputs (B, S, heads * d) or (B, heads, S, d): ONNX's own from opset 23 on, and
    ONNX Runtime's MultiHeadAttention and GroupQueryAttention."""
    names = list(node.input[:3])
    followed = [name for name in names if name in tracker.tracks]
    if not followed:
        return
    reason = _refused(tracker, node)
    rows = None if reason else _rows(tracker, node)
    if rows is None:
        for name in followed:
            tracker.freeze_tensor(name, node, reason or "its inputs are not all followed, or are packed")
        return
    heads = [_together(tracker, node, ids) for ids in rows]
    for other in heads[1:]:
        tracker.tie(heads[0], other, node)
    _follow(tracker, node, heads[0])
    if node.op_type == "MultiHeadAttention" and len(node.input) > 3 and node.input[3]:
        tracker.cut(node, 3, axis=0, ids=np.concatenate([ids.reshape(-1) for ids in rows]), role="bias")


def _refused(tracker: Tracker, node: NodeProto) -> str | None:
    given = [node.input[index] for index in _PAST[node.op_type] if index < len(node.input)]
    kept = [name for name in node.output[1:] if name and (tracker.view.is_output(name) or tracker.view.consumers(name))]
    if any(given) or kept:
        return "its keys and values come from or go outside (a cache), with a fixed number of heads"
    place = _BIAS[node.op_type]
    if place < len(node.input) and node.input[place]:
        shape = tracker.shape(node.input[place])
        if shape is None or (len(shape) > 2 and shape[-3] != 1):
            return f"its mask {node.input[place]!r} has heads of its own"
    bias = node.input[3] if node.op_type == "MultiHeadAttention" and len(node.input) > 3 else ""
    if bias and not tracker.view.is_constant(bias):
        return "its bias is computed, not constant"
    return None


def _counts(tracker: Tracker, node: NodeProto) -> tuple[int, int] | None:
    """Query heads and key heads."""
    attrs = tracker.attrs(node)
    shapes = [tracker.shape(name) for name in node.input[:2]]
    if node.op_type == "Attention" and all(shape is not None and len(shape) == 4 for shape in shapes):
        return tuple(shape[1] for shape in shapes)  # type: ignore[index,return-value]
    counts = [attrs.get(name) for name in _NAMES.get(node.op_type, _STANDARD)]
    if not all(isinstance(count, int) and count > 0 for count in counts):
        return None
    return counts[0], counts[1]  # type: ignore[return-value]


def _rows(tracker: Tracker, node: NodeProto) -> list[Ids] | None:
    """Atoms of queries, keys and values, one row per key head; None when they cannot be told."""
    counts = _counts(tracker, node)
    if counts is None or counts[0] % counts[1] or len(node.input) < 3 or not all(node.input[:3]):
        return None
    rows: list[Ids] = []
    for name in node.input[:3]:
        shape = tracker.shape(name)
        track = tracker.tracks.get(name)
        axis = {3: 2, 4: 1}.get(len(shape or ()))
        if shape is None or track is None or track.axis != axis or track.ids.size % counts[1]:
            return None
        rows.append(track.ids.reshape(counts[1], -1))
    return rows


def _together(tracker: Tracker, node: NodeProto, rows: Ids) -> Ids:
    """One atom per head, its channels tied."""
    first: Ids = rows[:, 0].copy()
    for column in range(1, rows.shape[1]):
        tracker.tie(first, rows[:, column].copy(), node)
    return first


def _follow(tracker: Tracker, node: NodeProto, heads: Ids) -> None:
    counts = _counts(tracker, node)
    shape = tracker.shape(node.output[0])
    if counts is None or shape is None:
        tracker.freeze(heads, node, "its output shape is unknown")
        return
    queries = np.repeat(heads, counts[0] // counts[1])
    if len(shape) == 4:
        tracker.follow(node.output[0], 1, queries)
    else:
        tracker.follow(node.output[0], 2, np.repeat(queries, shape[2] // queries.size))
    stated = tracker.attrs(node)
    for name, ids in zip(_NAMES.get(node.op_type, _STANDARD), (queries, heads), strict=True):
        if name in stated:
            tracker.rewrites.append(Rewrite(node=node.name, kind="attribute", parts=(ids,), attribute=name))


def packed_attention(tracker: Tracker, node: NodeProto) -> None:
    """ONNX Runtime's Attention, a layer with weights (in, 3 * heads * d) of its own."""
    attrs = tracker.attrs(node)
    weight = tracker.shape(node.input[1]) if tracker.view.is_constant(node.input[1]) else None
    heads, given = attrs.get("num_heads"), tracker.ids_on(node.input[0], 2)
    bias = node.input[2] if len(node.input) > 2 else ""
    odd = (
        weight is None
        or len(weight) != 2
        or not isinstance(heads, int)
        or weight[1] % (3 * heads)
        or given is None
        or given.size != weight[0]
        or "qkv_hidden_sizes" in attrs
        or any(node.input[4:])
        or len([name for name in node.output if name]) > 1
        or (bias and not tracker.view.is_constant(bias))
    )
    if odd or weight is None or given is None or not isinstance(heads, int):
        tracker.freeze_tensor(node.input[0], node, "an Attention with a past or odd sizes is not followed")
        tracker.unfollowed.append((node.name, "an Attention with a past or odd sizes is not followed"))
        return
    made = tracker.fresh(node, weight[1])
    tracker.cut(node, 1, axis=1, ids=made, role="producer")
    tracker.cut(node, 1, axis=0, ids=given, role="consumer")
    if bias:
        tracker.cut(node, 2, axis=0, ids=made, role="bias")
    rows = made.reshape(3, heads, -1).transpose(1, 0, 2).reshape(heads, -1)
    first = _together(tracker, node, rows)
    tracker.rewrites.append(Rewrite(node=node.name, kind="attribute", parts=(first,), attribute="num_heads"))
    tracker.follow(node.output[0], 2, np.repeat(first, weight[1] // (3 * heads)))


def packed_heads(tracker: Tracker, node: NodeProto, axis: int) -> Ids | None:
    """Rows of atoms per head where a Reshape splits its channels into (pack, heads, d) from ``axis`` on and only the
    pack is taken apart afterwards, as in ViT and Swin; None for any other Reshape."""
    track, after = tracker.tracks[node.input[0]], tracker.shape(node.output[0])
    if after is None or axis + 2 >= len(after) or after[axis] not in (2, 3):
        return None
    pack, heads = after[axis], after[axis + 1]
    if heads < 2 or track.ids.size != pack * heads * after[axis + 2] or not _taken_apart(tracker, node.output[0], axis):
        return None
    rows: Ids = track.ids.reshape(pack, heads, -1).transpose(1, 0, 2).reshape(heads, -1)
    return rows


def _taken_apart(tracker: Tracker, tensor: str, axis: int) -> bool:
    """Whether all that reads a tensor picks from this axis, also behind a Transpose."""
    readers = tracker.view.consumers(tensor)
    for node in readers:
        attrs = tracker.attrs(node)
        if node.op_type == "Transpose":
            perm = attrs.get("perm")
            if not isinstance(perm, list) or not _taken_apart(tracker, node.output[0], perm.index(axis)):
                return False
        elif node.op_type in ("Gather", "Split"):
            rank, own = len(tracker.shape(tensor) or ()), attrs.get("axis", 0)
            if not isinstance(own, int) or not rank or own % rank != axis:
                return False
        elif node.op_type == "Slice":
            axes = tracker.view.constant(node.input[3]) if len(node.input) > 3 and node.input[3] else None
            rank = len(tracker.shape(tensor) or ())
            if axes is None or not rank or [int(item) % rank for item in axes] != [axis]:
                return False
        else:
            return False
    return bool(readers)
