"""Channel analysis of operators that move axes: Reshape, Flatten, Transpose, Squeeze, Unsqueeze, Expand, Shape."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from onnx import NodeProto

from edgeds.compress.group_attention import packed_heads
from edgeds.compress.group_axes import Ids, Rewrite, Track, Tracker
from edgeds.compress.group_ops import ints


def map_axis(track: Track, before: tuple[int, ...], after: tuple[int, ...]) -> tuple[int, Ids] | None:
    """Where the channel axis goes in a row-major reshape: (axis, atoms), None when nothing of it stays together.

    A channel may become a block of positions (Flatten: H * W columns). Where channels become blocks of an axis of
    their own (attention heads), the atoms have two axes: one row per position, whose atoms go or stay together.
    """
    lead, channels = math.prod(before[: track.axis]), track.ids.size
    rest = math.prod(before[track.axis + 1 :])
    for axis in range(len(after)):
        if math.prod(after[:axis]) != lead or after[axis] == 1:
            continue
        size = after[axis]
        if size == channels and math.prod(after[axis + 1 :]) == rest:
            return axis, track.ids
        if size > channels and size % channels == 0 and rest % (size // channels) == 0:
            return axis, np.repeat(track.ids, size // channels)
        if size < channels and channels % size == 0:
            return axis, track.ids.reshape(size, -1)
    return None


def _joined(tracker: Tracker, node: NodeProto, ids: Ids) -> Ids:
    """One atom per position: atoms of a block are coupled, so that heads are pruned whole or not at all."""
    if ids.ndim == 1:
        return ids
    first = ids[:, 0].copy()
    for column in range(1, ids.shape[1]):
        tracker.tie(first, ids[:, column].copy(), node)
    return first


def reshape(tracker: Tracker, node: NodeProto) -> None:
    """Reshape, with the number that counts channels rewritten; -1, and 0 for a copied size, follow by themselves."""
    for name in node.input[1:]:
        tracker.freeze_tensor(name, node, "its values are used as sizes")
    track = tracker.tracks.get(node.input[0])
    found = _moved(tracker, node)
    if track is None or found is None:
        return
    axis, ids = found
    rows = packed_heads(tracker, node, axis) if ids.ndim > 1 else None
    if rows is not None:
        axis, ids = axis + 1, rows
    entry = _target_entry(tracker, node, axis)
    if entry is None:
        tracker.freeze(track.ids, node, "is reshaped to a computed number of channels")
        return
    site, value = entry
    if value == 0 and not tracker.attrs(node).get("allowzero", 0) and axis != track.axis:
        tracker.freeze(track.ids, node, "copies a size from another axis")
        return
    ids = _joined(tracker, node, ids)
    if value > 0:
        tracker.rewrites.append(Rewrite(node=site[0], kind="entry", parts=(ids,), input=site[1], index=site[2]))
    tracker.follow(node.output[0], axis, ids)


def _moved(tracker: Tracker, node: NodeProto) -> tuple[int, Ids] | None:
    """The axis and units of the first input's channels in the output; None when it has none or they are frozen here."""
    track = tracker.tracks.get(node.input[0])
    if track is None:
        return None
    before, after = tracker.shape(node.input[0]), tracker.shape(node.output[0])
    found = map_axis(track, before, after) if before is not None and after is not None else None
    if found is None:
        tracker.freeze(track.ids, node, "its channels are broken up over several axes")
    return found


def _target_entry(tracker: Tracker, node: NodeProto, axis: int) -> tuple[tuple[str, int, int], int] | None:
    """Where element ``axis`` of the target shape stands, as (node, input, element), and its value.

    Also where other elements are computed and joined by a Concat, if nothing else reads it.
    """
    values = ints(tracker, node, 1, "shape")
    if values is not None:
        return (node.name, 1, axis), values[axis]
    source = tracker.view.producer(node.input[1])
    if source is None or source.op_type != "Concat":
        return None
    place = 0
    for index, name in enumerate(source.input):
        shape = tracker.shape(name)
        if shape is None or len(shape) != 1:
            return None
        if place <= axis < place + shape[0]:
            value = tracker.view.constant(name)
            if value is None or (value[axis - place] > 0 and len(tracker.view.consumers(node.input[1])) > 1):
                return None
            return (source.name, index, axis - place), int(value[axis - place])
        place += shape[0]
    return None


def flatten(tracker: Tracker, node: NodeProto) -> None:
    """Flatten to two axes."""
    found = _moved(tracker, node)
    if found is None:
        return
    tracker.follow(node.output[0], found[0], _joined(tracker, node, found[1]))


def transpose(tracker: Tracker, node: NodeProto) -> None:
    """Transpose moves the axis."""
    track, shape = tracker.tracks.get(node.input[0]), tracker.shape(node.input[0])
    if track is None:
        return
    if shape is None:
        tracker.freeze(track.ids, node, "its shape is unknown")
        return
    attrs: dict[str, Any] = dict(tracker.attrs(node))
    perm = list(attrs.get("perm", range(len(shape))[::-1]))
    tracker.follow(node.output[0], perm.index(track.axis), track.ids)


def squeeze(tracker: Tracker, node: NodeProto) -> None:
    """Squeeze and Unsqueeze shift the axis."""
    track = tracker.tracks.get(node.input[0])
    if track is None:
        return
    before, after = tracker.shape(node.input[0]), tracker.shape(node.output[0])
    axes = ints(tracker, node, 1, "axes")
    if before is None or after is None:
        tracker.freeze(track.ids, node, "its shape is unknown")
        return
    if axes is None and node.op_type == "Squeeze" and len(node.input) < 2:
        axes = [axis for axis, size in enumerate(before) if size == 1]
    rank = len(before) if node.op_type == "Squeeze" else len(after)
    moved = {axis + rank if axis < 0 else axis for axis in axes or ()}
    if axes is None or (node.op_type == "Squeeze" and track.axis in moved):
        tracker.freeze(track.ids, node, "its channel axis is squeezed, or axes are computed")
    elif node.op_type == "Squeeze":
        tracker.follow(node.output[0], track.axis - sum(axis < track.axis for axis in moved), track.ids)
    else:
        stay = [axis for axis in range(rank) if axis not in moved]
        tracker.follow(node.output[0], stay[track.axis], track.ids)


def expand(tracker: Tracker, node: NodeProto) -> None:
    """Expand along other axes; the constant target is rewritten where it says the number of channels."""
    track = tracker.tracks.get(node.input[0])
    for name in node.input[1:]:
        tracker.freeze_tensor(name, node, "its values are used as sizes")
    if track is None:
        return
    before, after = tracker.shape(node.input[0]), tracker.shape(node.output[0])
    count = tracker.shape(node.input[1])
    if before is None or after is None or not count:
        tracker.freeze(track.ids, node, "is expanded to an unknown shape")
        return
    axis = track.axis + len(after) - len(before)
    if after[axis] != track.ids.size:
        tracker.freeze(track.ids, node, "its channel axis is repeated")
        return
    index = axis - (len(after) - count[0])
    if index >= 0 and (node.op_type == "Expand" or not tracker.view.is_constant(node.input[1])):
        entry = _target_entry(tracker, node, index)
        if entry is None or node.op_type != "Expand":
            tracker.freeze(track.ids, node, "is expanded to a computed number of channels")
            return
        site, value = entry
        if value > 1:
            tracker.rewrites.append(
                Rewrite(node=site[0], kind="entry", parts=(track.ids,), input=site[1], index=site[2])
            )
    tracker.follow(node.output[0], axis, track.ids)


def shape_of(tracker: Tracker, node: NodeProto) -> None:
    """Shape: harmless where only sizes of other axes are taken from it."""
    track = tracker.tracks.get(node.input[0])
    if track is None:
        return
    rank = len(tracker.shape(node.input[0]) or ())
    for reader in tracker.view.consumers(node.output[0]):
        places = ints(tracker, reader, 1, "")
        if reader.op_type == "Gather" and places is not None and rank:
            used = {place % rank for place in places}
        elif reader.op_type == "Slice":
            starts, ends, steps = (ints(tracker, reader, index, "") for index in (1, 2, 4))
            whole = starts is None or ends is None or steps not in (None, [1])
            used = set(range(rank)) if whole else set(range(rank)[starts[0] : ends[0]])  # type: ignore[index]
        else:
            used = set(range(rank))
        if track.axis in used or not rank:
            tracker.freeze(track.ids, node, "its number of channels is used in a computation")
            return
    if tracker.view.is_output(node.output[0]) or tracker.view.used_in_subgraph(node.output[0]):
        tracker.freeze(track.ids, node, "its number of channels is used in a computation")
