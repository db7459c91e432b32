"""Channel analysis of operators without weights of their own: elementwise, reductions, Concat, Split and the like."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
from onnx import NodeProto

from edgeds.compress.group_axes import Ids, Rewrite, Tracker

ELEMENTWISE = frozenset(
    re.findall(
        r"\w+",
        "Abs Acos Acosh Add And Asin Asinh Atan Atanh BitShift Cast CastLike Ceil Celu Clip Cos Cosh Div Elu Equal Erf "
        "Exp Floor Gelu Greater GreaterOrEqual HardSigmoid HardSwish Identity IsInf IsNaN LeakyRelu Less LessOrEqual "
        "Log Max "
        "Mean Min Mish Mod Mul Neg Not Or PRelu Pow Reciprocal Relu Round Selu Sigmoid Sign Sin Sinh Softplus Softsign "
        "Sqrt Sub Sum Swish Tan Tanh ThresholdedRelu Where Xor Dropout",
    )
)
POOLS = frozenset(
    re.findall(r"\w+", "AveragePool MaxPool LpPool GlobalAveragePool GlobalMaxPool GlobalLpPool Resize Upsample Pad")
)
REDUCTIONS = frozenset(
    re.findall(
        r"\w+",
        "ReduceMean ReduceSum ReduceMax ReduceMin ReduceL1 ReduceL2 ReduceProd ReduceLogSum ReduceLogSumExp "
        "ReduceSumSquare ArgMax ArgMin",
    )
)


def ints(tracker: Tracker, node: NodeProto, index: int, attribute: str) -> list[int] | None:
    """A list of integers that is an attribute in old opsets and a constant input in new ones; None when neither."""
    attrs: dict[str, Any] = dict(tracker.attrs(node))
    if attribute in attrs:
        value = attrs[attribute]
        return [int(item) for item in value] if isinstance(value, list | tuple) else [int(value)]
    if len(node.input) > index and node.input[index]:
        constant = tracker.view.constant(node.input[index])
        return None if constant is None else [int(item) for item in constant.reshape(-1)]
    return None


def elementwise(tracker: Tracker, node: NodeProto) -> None:
    """Broadcasting operators: positions along the channel axis meet their partners, counted from the last axis."""
    names = [name for name in node.input if name]
    followed = [name for name in names if name in tracker.tracks]
    out = tracker.shape(node.output[0])
    if not followed:
        return
    if out is None or any(tracker.shape(name) is None for name in names):
        for name in followed:
            tracker.freeze_tensor(name, node, "meets a tensor of unknown shape")
        return
    ranks = {name: len(tracker.shape(name) or ()) for name in names}
    lead = max(followed, key=lambda name: tracker.tracks[name].ids.size)
    ids = tracker.tracks[lead].ids
    axis = tracker.tracks[lead].axis + len(out) - ranks[lead]
    if ids.size != out[axis]:
        tracker.freeze(ids, node, "a single channel is spread over many")
        return
    for index, name in enumerate(node.input):
        if name and name != lead:
            _meet(tracker, node, index, ids=ids, axis=axis - len(out) + ranks[name])
    tracker.follow(node.output[0], axis, ids)


def _meet(tracker: Tracker, node: NodeProto, index: int, *, ids: Ids, axis: int) -> None:
    name = node.input[index]
    shape, track = tracker.shape(name) or (), tracker.tracks.get(name)
    if track is not None and track.axis != axis:
        tracker.freeze(track.ids, node, "meets channels on another axis")
        tracker.freeze(ids, node, "meets channels on another axis")
    elif axis < 0 or shape[axis] != ids.size:
        tracker.freeze_tensor(name, node, "a single channel is spread over many")
    elif track is not None:
        tracker.tie(ids, track.ids, node)
    elif tracker.view.is_constant(name):
        tracker.cut(node, index, axis=axis, ids=ids, role="bias")
    else:
        tracker.freeze(ids, node, f"meets channels of {name!r} that have to stay")


def pool(tracker: Tracker, node: NodeProto) -> None:
    """Pooling, resizing and padding leave the channel axis alone, unless they are told to change it."""
    track = tracker.tracks.get(node.input[0])
    if track is None:
        return
    before, after = tracker.shape(node.input[0]), tracker.shape(node.output[0])
    if before is None or after is None or before[track.axis] != after[track.axis]:
        tracker.freeze(track.ids, node, "changes the number of channels, or its output shape is unknown")
        return
    reason = None
    if node.op_type in ("Resize", "Upsample"):
        reason = _resize(tracker, node, track.axis, track.ids)
    elif track.axis != 1 and node.op_type != "Pad":
        reason = "works along the channel axis"
    elif node.op_type == "Pad" and len(node.input) > 3 and node.input[3]:
        reason = "padding of chosen axes is not followed"
    if reason is not None or len([name for name in node.output if name]) > 1:
        tracker.freeze(track.ids, node, reason or "indices of maxima are not followed")
        return
    tracker.follow(node.output[0], track.axis, track.ids)


def _resize(tracker: Tracker, node: NodeProto, axis: int, ids: Ids) -> str | None:
    attrs = tracker.attrs(node)
    if "axes" in attrs or attrs.get("coordinate_transformation_mode") == b"tf_crop_and_resize":
        return "resizing of chosen axes or crops is not followed"
    if len(node.input) > 3 and node.input[3]:
        if not tracker.view.is_constant(node.input[3]):
            return "is resized to a computed size"
        tracker.rewrites.append(Rewrite(node=node.name, kind="entry", parts=(ids,), input=3, index=axis))
    return None


def softmax(tracker: Tracker, node: NodeProto) -> None:
    """Softmax over other axes passes channels on; over the channel axis (before opset 13: from ``axis`` on) it pins."""
    track = tracker.tracks.get(node.input[0])
    if track is None:
        return
    rank = len(tracker.shape(node.input[0]) or ())
    attrs: dict[str, Any] = dict(tracker.attrs(node))
    axis = int(attrs.get("axis", -1 if tracker.opset >= 13 else 1))
    axis += rank if axis < 0 else 0
    if track.axis == axis or (tracker.opset < 13 and track.axis >= axis) or not rank:
        tracker.freeze(track.ids, node, "is normalised over its channels")
        return
    tracker.follow(node.output[0], track.axis, track.ids)


def reduction(tracker: Tracker, node: NodeProto) -> None:
    """Reductions over other axes pass channels on; over the channel axis they pin them."""
    track = tracker.tracks.get(node.input[0])
    if track is None:
        return
    shape = tracker.shape(node.input[0])
    single = node.op_type in ("ArgMax", "ArgMin")
    axes = ints(tracker, node, 1, "axis" if single else "axes")
    if single and axes is None:
        axes = [0]
    attrs: dict[str, Any] = dict(tracker.attrs(node))
    if shape is None or not axes:
        tracker.freeze(track.ids, node, "is reduced over all axes, or over computed ones")
        return
    done = {axis + len(shape) if axis < 0 else axis for axis in axes}
    if track.axis in done:
        tracker.freeze(track.ids, node, "is reduced over its channels")
        return
    gone = 0 if attrs.get("keepdims", 1) else sum(axis < track.axis for axis in done)
    tracker.follow(node.output[0], track.axis - gone, track.ids)


def layernorm(tracker: Tracker, node: NodeProto) -> None:
    """LayerNormalization and its kin over other axes (as of queries per head) pass channels on; over them they pin."""
    track = tracker.tracks.get(node.input[0])
    if track is None:
        return
    attrs: dict[str, Any] = dict(tracker.attrs(node))
    axis, rank = int(attrs.get("axis", -1)), len(tracker.shape(node.input[0]) or ())
    axis += rank if axis < 0 else 0
    if not rank or track.axis >= axis or len([name for name in node.output if name]) > 1:
        tracker.freeze(track.ids, node, "is normalised over its channels")
        return
    tracker.follow(node.output[0], track.axis, track.ids)


def concat(tracker: Tracker, node: NodeProto) -> None:
    """Along the channel axis positions are joined (any nesting and repeats); along others they are coupled."""
    followed = [name for name in node.input if name in tracker.tracks]
    if not followed:
        return
    shape = tracker.shape(node.output[0])
    attrs: dict[str, Any] = dict(tracker.attrs(node))
    axis = int(attrs.get("axis", 0))
    channel = tracker.tracks[followed[0]].axis
    parts = [tracker.ids_on(name, channel) for name in node.input]
    if shape is None or any(part is None for part in parts):
        for name in followed:
            tracker.freeze_tensor(name, node, "is joined with channels on another axis, or with unknown shapes")
        return
    known = [part for part in parts if part is not None]
    axis += len(shape) if axis < 0 else 0
    if axis == channel:
        tracker.follow(node.output[0], channel, np.concatenate(known))
        return
    for part in known[1:]:
        tracker.tie(known[0], part, node)
    tracker.follow(node.output[0], channel, known[0])


def split(tracker: Tracker, node: NodeProto) -> None:
    """Parts along the channel axis get their own positions, and at least one channel each stays."""
    track = tracker.tracks.get(node.input[0])
    if track is None:
        return
    shape = tracker.shape(node.input[0])
    attrs: dict[str, Any] = dict(tracker.attrs(node))
    axis = int(attrs.get("axis", 0))
    axis += len(shape or ()) if axis < 0 else 0
    if shape is None:
        tracker.freeze(track.ids, node, "the shape before the split is unknown")
    elif axis != track.axis:
        for name in node.output:
            tracker.follow(name, track.axis, track.ids)
    else:
        _split_channels(tracker, node, axis, track.ids)


def _split_channels(tracker: Tracker, node: NodeProto, axis: int, ids: Ids) -> None:
    sizes = ints(tracker, node, 1, "split")
    if sizes is None and (len(node.input) < 2 or not node.input[1]):
        step = math.ceil(ids.size / len(node.output))
        sizes = [min(step, ids.size - step * index) for index in range(len(node.output))]
    if sizes is None or sum(sizes) != ids.size or len(sizes) != len(node.output) or min(sizes) < 1:
        tracker.freeze(ids, node, "is split into parts of computed or odd sizes")
        return
    ends = np.cumsum(sizes)
    parts = tuple(ids[end - size : end] for end, size in zip(ends, sizes, strict=True))
    for name, part in zip(node.output, parts, strict=True):
        tracker.follow(name, axis, part)
        tracker.regions.append(part)
    tracker.rewrites.append(Rewrite(node=node.name, kind="split", parts=parts))


def cut_out(tracker: Tracker, node: NodeProto) -> None:
    """Slice with constant bounds: channels in it keep their order; a step along the channel axis pins."""
    track = tracker.tracks.get(node.input[0])
    if track is None:
        return
    shape = tracker.shape(node.input[0])
    starts, ends = ints(tracker, node, 1, "starts"), ints(tracker, node, 2, "ends")
    if shape is None or starts is None or ends is None:
        tracker.freeze(track.ids, node, "is sliced at computed places")
        return
    axes = ints(tracker, node, 3, "axes")
    if axes is None:
        if len(node.input) > 3 and node.input[3]:
            tracker.freeze(track.ids, node, "is sliced along computed axes")
            return
        axes = list(range(len(starts)))
    axes = [axis + len(shape) if axis < 0 else axis for axis in axes]
    if track.axis not in axes:
        tracker.follow(node.output[0], track.axis, track.ids)
        return
    index, steps = axes.index(track.axis), ints(tracker, node, 4, "steps")
    computed = len(node.input) > 4 and node.input[4] and steps is None
    if computed or (steps is not None and steps[index] != 1) or tracker.opset < 10:
        tracker.freeze(track.ids, node, "channels are sliced with a step, or before opset 10")
        return
    low, high, _ = slice(starts[index], ends[index]).indices(track.ids.size)
    inside = track.ids[low:high]
    if not inside.size:
        tracker.freeze(track.ids, node, "an empty part is sliced off")
        return
    tracker.regions.append(inside)
    tracker.rewrites.append(
        Rewrite(node=node.name, kind="slice", parts=(track.ids, track.ids[:low], inside), index=index)
    )
    tracker.follow(node.output[0], track.axis, inside)


def gather(tracker: Tracker, node: NodeProto) -> None:
    """Gather with constant indices: a list of channels, or places on other axes."""
    track = tracker.tracks.get(node.input[0])
    for name in node.input[1:]:
        tracker.freeze_tensor(name, node, "its values are used as places")
    if track is None:
        return
    shape, indices = tracker.shape(node.input[0]), tracker.view.constant(node.input[1])
    rank = len(tracker.shape(node.input[1]) or ()) if tracker.shape(node.input[1]) is not None else None
    attrs: dict[str, Any] = dict(tracker.attrs(node))
    axis = int(attrs.get("axis", 0))
    axis += len(shape or ()) if axis < 0 else 0
    if shape is not None and axis != track.axis and rank is not None:
        moved = track.axis + (rank - 1 if axis < track.axis else 0)
        tracker.follow(node.output[0], moved, track.ids)
    elif shape is None or indices is None or indices.ndim != 1 or not indices.size:
        tracker.freeze(track.ids, node, "single or computed channels are picked from it")
    else:
        inside = track.ids[indices]
        tracker.freeze(inside[_doubled(indices)], node, "is picked more than once")
        tracker.regions.append(inside)
        tracker.rewrites.append(Rewrite(node=node.name, kind="gather", parts=(track.ids,)))
        tracker.follow(node.output[0], axis, inside)


def _doubled(indices: np.ndarray) -> np.ndarray:
    values, counts = np.unique(indices, return_counts=True)
    doubled: np.ndarray = np.isin(indices, values[counts > 1])
    return doubled
