"""Statistics of unfolded BatchNormalization nodes, estimated anew after what feeds them has changed.

The stored mean and variance are moved by what calibration samples show between the dense model and the pruned one
(variance * v' / v, mean to m' - (m - mean) * sqrt(v' / v)): the output has the dense model's mean and variance, and
samples unlike the training data do not replace what training measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto

from edgeds.compress.calibset import Feeds
from edgeds.compress.moments import truncated
from edgeds.compress.ranges import run_feeds
from edgeds.graph.session import open_session
from edgeds.graph.view import GraphView

_SMALLEST_VARIANCE = 1e-12


def restat_batchnorm(
    dense: GraphView,
    pruned: GraphView,
    mapping: Mapping[str, NDArray[np.int64]],
    feeds: Sequence[Feeds],
    *,
    threads: int | None = None,
) -> tuple[str, ...]:
    """Move mean and variance of every BatchNormalization of ``pruned`` (edited in place), inputs first.

    Returns the nodes done. Left alone: statistics shared with another node, nodes whose channels cannot be matched
    through ``mapping`` (by output or input tensor), and channels whose samples are not finite or never vary.
    """
    done = []
    for node in pruned.nodes:
        twin = dense.producer(node.output[0]) if node.op_type == "BatchNormalization" else None
        if twin is None or twin.op_type != node.op_type or not _owns(pruned, node):
            continue
        mean, variance = pruned.constant(node.input[3]), pruned.constant(node.input[4])
        channels = _channels(dense, twin, mapping, size=0 if mean is None else mean.size)
        if mean is None or variance is None or channels is None:
            continue
        old = tuple(item[channels] for item in _statistics(dense.model, twin.input[0], feeds, threads=threads))
        new = _statistics(pruned.model, node.input[0], feeds, threads=threads)
        good = np.isfinite(old[0]) & np.isfinite(new[0]) & (old[1] > _SMALLEST_VARIANCE) & (new[1] > _SMALLEST_VARIANCE)
        ratio = np.divide(new[1], old[1], out=np.ones_like(new[1]), where=good)
        moved = np.where(good, new[0] - (old[0] - mean) * np.sqrt(ratio), mean)
        pruned.set_constant(node.input[3], moved.astype(mean.dtype))
        pruned.set_constant(node.input[4], (variance * ratio).astype(variance.dtype))
        done.append(node.name)
    return tuple(done)


def _owns(view: GraphView, node: NodeProto) -> bool:
    return all(
        view.is_constant(name)
        and view.producer(name) is None
        and len(view.consumers(name)) == 1
        and not view.used_in_subgraph(name)
        for name in node.input[3:5]
    )


def _channels(
    dense: GraphView, twin: NodeProto, mapping: Mapping[str, NDArray[np.int64]], *, size: int
) -> NDArray[np.int64] | None:
    full = dense.constant(twin.input[3])
    if full is not None and full.size == size:
        return np.arange(size)
    for name in (twin.output[0], twin.input[0]):
        if name in mapping and len(mapping[name]) == size:
            return np.asarray(mapping[name], np.int64)
    return None


def _statistics(
    model: ModelProto, tensor: str, feeds: Sequence[Feeds], *, threads: int | None
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Mean and variance per channel (axis 1) over all samples, in float64."""
    session = open_session(truncated(model, [tensor]), threads=threads)
    needed = {item.name for item in session.get_inputs()}
    total, squares, count = 0.0, 0.0, 0
    for sample in feeds:
        if tensor in sample:
            value = np.asarray(sample[tensor], np.float64)
        else:
            fed = {name: array for name, array in sample.items() if name in needed}
            value = run_feeds(session, [tensor], fed)[0].astype(np.float64)
        axes = (0, *range(2, value.ndim))
        total, squares = total + value.sum(axis=axes), squares + np.square(value).sum(axis=axes)
        count += value.size // value.shape[1]
    mean = np.asarray(total) / count
    return mean, np.maximum(np.asarray(squares) / count - np.square(mean), 0.0)
