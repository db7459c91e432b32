"""Channel analysis of layers with weights: Conv, ConvTranspose, Gemm, MatMul and normalisation."""

from __future__ import annotations

import numpy as np
from onnx import NodeProto

from edgeds.compress.group_axes import KEPT, Ids, Rewrite, Tracker

Shape = tuple[int, ...]


def _weight_shape(tracker: Tracker, node: NodeProto, index: int = 1) -> Shape | None:
    if len(node.input) <= index or not tracker.view.is_constant(node.input[index]):
        return None
    return tracker.shape(node.input[index])


def _give_up(tracker: Tracker, node: NodeProto, reason: str) -> None:
    for name in node.input:
        tracker.freeze_tensor(name, node, reason)
    tracker.unfollowed.append((node.name, reason))


def _cut_bias(tracker: Tracker, node: NodeProto, index: int, ids: Ids) -> bool:
    """Let a bias vector follow the outputs. False when it is computed."""
    if len(node.input) <= index or not node.input[index]:
        return True
    if _weight_shape(tracker, node, index) is None:
        return False
    tracker.cut(node, index, axis=0, ids=ids, role="bias")
    return True


def conv(tracker: Tracker, node: NodeProto) -> None:
    """Conv and ConvTranspose: weight (out, in / group, ...) and (in, out / group, ...).

    Depthwise means group == input channels > 1. Other groups stay or go whole: removing the same number from each
    would need ids that differ from group to group in what they are tied to.
    """
    weight = _weight_shape(tracker, node)
    if weight is None:
        return _give_up(tracker, node, "its weights are computed, not constant")
    group, transposed = int(tracker.attrs(node).get("group", 1)), node.op_type == "ConvTranspose"  # type: ignore[call-overload]
    channels = weight[0] if transposed else weight[1] * group
    outputs = weight[1] * group if transposed else weight[0]
    given = tracker.ids_on(node.input[0], 1)
    if given is None or given.size != channels:
        tracker.freeze_tensor(node.input[0], node, "its channels are not those of the layer")
        given = np.full(channels, KEPT, np.int64)
    if group == 1:
        out = tracker.fresh(node, outputs)
        tracker.cut(node, 1, axis=int(transposed), ids=out, role="producer")
        tracker.cut(node, 1, axis=int(not transposed), ids=given, role="consumer")
    else:
        out = _grouped(tracker, node, given, (group, channels, outputs), transposed=transposed)
    if not _cut_bias(tracker, node, 2, out):
        tracker.freeze(out, node, "its bias is computed, not constant")
    return tracker.follow(node.output[0], 1, out)


def _grouped(tracker: Tracker, node: NodeProto, given: Ids, sizes: Shape, *, transposed: bool) -> Ids:
    """Atoms of the outputs of a grouped or depthwise layer."""
    group, channels, outputs = sizes
    if group == channels:
        units = given
    else:
        inside = given.reshape(group, -1)
        if (inside < 0).any():
            tracker.freeze(given, node, "shares a group with channels that have to stay")
            units = np.full(group, KEPT, np.int64)
            tracker.unfollowed.append((node.name, "grouped layer whose input channels have to stay"))
        else:
            units = inside[:, 0].copy()
            for column in range(1, inside.shape[1]):
                tracker.tie(units, inside[:, column].copy(), node)
    out: Ids = np.repeat(units, outputs // group)
    if transposed:
        tracker.cut(
            node, 1, axis=0, ids=given if group == channels else np.repeat(units, channels // group), role="pass"
        )
    else:
        tracker.cut(node, 1, axis=0, ids=out, role="pass")
    if node.name in tracker.protect:
        tracker.freeze(units, node, "kept as asked")
    if (units >= 0).any():
        tracker.rewrites.append(Rewrite(node=node.name, kind="group", parts=(units,)))
    return out


def gemm(tracker: Tracker, node: NodeProto) -> None:
    """Gemm: A (M, K), weight (K, N) or (N, K), bias broadcast to (M, N)."""
    weight, attrs = _weight_shape(tracker, node), tracker.attrs(node)
    if weight is None or len(weight) != 2 or attrs.get("transA", 0):
        return _give_up(tracker, node, "a Gemm with computed weights or a transposed input is not followed")
    out_axis = 0 if attrs.get("transB", 0) else 1
    given = tracker.ids_on(node.input[0], 1)
    if given is None or given.size != weight[1 - out_axis]:
        tracker.freeze_tensor(node.input[0], node, "its channels are not the columns of the layer")
        given = np.full(weight[1 - out_axis], KEPT, np.int64)
    out = tracker.fresh(node, weight[out_axis])
    tracker.cut(node, 1, axis=out_axis, ids=out, role="producer")
    tracker.cut(node, 1, axis=1 - out_axis, ids=given, role="consumer")
    if len(node.input) > 2 and node.input[2]:
        bias = _weight_shape(tracker, node, 2)
        if bias is None:
            tracker.freeze(out, node, "its bias is computed, not constant")
            tracker.freeze_tensor(node.input[2], node, "is added as a bias")
        elif bias and bias[-1] == out.size and out.size > 1:
            tracker.cut(node, 2, axis=len(bias) - 1, ids=out, role="bias")
    return tracker.follow(node.output[0], 1, out)


def matmul(tracker: Tracker, node: NodeProto) -> None:
    """MatMul with a constant matrix is a layer; between activations the summed axes are coupled."""
    a, b = node.input[0], node.input[1]
    left, right = tracker.shape(a), tracker.shape(b)
    if left is None or right is None or len(left) < 2 or len(right) < 2:
        return _give_up(tracker, node, "the shape of an input is unknown or not a matrix")
    if tracker.view.is_constant(b) and len(right) == 2:
        return _linear(tracker, node, rows=len(left), weight=right)
    if tracker.view.is_constant(a) or tracker.view.is_constant(b):
        return _give_up(tracker, node, "a constant on the left, or of more than two axes, is not followed")
    return _product(tracker, node, len(left), len(right))


def _linear(tracker: Tracker, node: NodeProto, *, rows: int, weight: Shape) -> None:
    track = tracker.tracks.get(node.input[0])
    if track is not None and track.axis != rows - 1:  # its channels are rows: they pass, and columns stay
        tracker.unfollowed.append((node.name, "works on another axis than the channels that it passes on"))
        tracker.cut(node, 1, axis=1, ids=np.full(weight[1], KEPT, np.int64), role="producer")
        tracker.cut(node, 1, axis=0, ids=np.full(weight[0], KEPT, np.int64), role="consumer")
        return tracker.follow(node.output[0], track.axis, track.ids)
    given = track.ids if track is not None else np.full(weight[0], KEPT, np.int64)
    out = tracker.fresh(node, weight[1])
    tracker.cut(node, 1, axis=1, ids=out, role="producer")
    tracker.cut(node, 1, axis=0, ids=given, role="consumer")
    return tracker.follow(node.output[0], rows - 1, out)


def _product(tracker: Tracker, node: NodeProto, left: int, right: int) -> None:
    a, b = tracker.tracks.get(node.input[0]), tracker.tracks.get(node.input[1])
    rank = max(left, right)
    sums_a = a is not None and a.axis == left - 1
    sums_b = b is not None and b.axis == right - 2
    if a is not None and b is not None and sums_a and sums_b:
        return tracker.tie(a.ids, b.ids, node)
    if a is not None and b is None and a.axis == left - 2:
        return tracker.follow(node.output[0], rank - 2, a.ids)
    if b is not None and a is None and b.axis == right - 1:
        return tracker.follow(node.output[0], rank - 1, b.ids)
    ranks, tracks = (left, right), (a, b)
    batch = {track.axis - rank for track, rank in zip(tracks, ranks, strict=True) if track and track.axis < rank - 2}
    if len(batch) == 1 and all(
        track is None or track.axis < rank - 2 for track, rank in zip(tracks, ranks, strict=True)
    ):
        return _batched(tracker, node, batch.pop(), rank=rank)
    for name in node.input:
        tracker.freeze_tensor(name, node, "is multiplied with another activation")
    return None


def _batched(tracker: Tracker, node: NodeProto, place: int, *, rank: int) -> None:
    """Heads side by side: both operands carry them, or one that is the same for all. ``place`` counts from the end."""
    shapes = [tracker.shape(name) or () for name in node.input]
    spread = [len(shape) < -place or shape[place] == 1 for shape in shapes]
    known = [tracker.tracks.get(name) for name in node.input]
    if any(track is not None and single for track, single in zip(known, spread, strict=True)):
        for name in node.input:
            tracker.freeze_tensor(name, node, "a single head is spread over many")
        return
    ids = [
        tracker.ids_on(name, len(shape) + place)
        for name, shape, single in zip(node.input, shapes, spread, strict=True)
        if not single
    ]
    whole = [item for item in ids if item is not None]
    for other in whole[1:]:
        tracker.tie(whole[0], other, node)
    tracker.follow(node.output[0], rank + place, whole[0])


def batchnorm(tracker: Tracker, node: NodeProto) -> None:
    """BatchNormalization and InstanceNormalization: one scale and shift per channel (axis 1)."""
    track = tracker.tracks.get(node.input[0])
    if track is None:
        return
    constant = all(_weight_shape(tracker, node, index) is not None for index in range(1, len(node.input)))
    if track.axis != 1 or not constant or tracker.attrs(node).get("training_mode", 0) or len(node.output) > 1:
        tracker.freeze(track.ids, node, "is normalised in a way that is not followed")
        return
    for index in range(1, len(node.input)):
        tracker.cut(node, index, axis=0, ids=track.ids, role="norm")
    tracker.follow(node.output[0], 1, track.ids)
