"""Sizes that a graph computes from shapes it always has become constants, so that pruning can rewrite them.

Exporters write ``view(n, c // 2, -1)`` as Shape, Gather, Div and Concat. Where a size is the same for every input, the
reading is replaced by its value and the arithmetic is folded away; what depends on the input stays computed.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto

from edgeds.compress.shape_sizes import complete_reshapes, drop_guards, straighten_transposes, unshare_targets
from edgeds.graph.fold import fold_constants
from edgeds.graph.proto import attributes
from edgeds.graph.view import GraphView

_ROUNDS = 4
"""Folding one reading can make the shapes known that another one reads."""


def fold_shapes(model: ModelProto) -> ModelProto:
    """A copy with constants folded, those from fixed dims included. Names of nodes that stay do not change."""
    folded = fold_constants(model)
    for _ in range(_ROUNDS):
        complete_reshapes(folded)
        view = GraphView(folded)
        done = sum(_settle(view, node) for node in view.nodes if node.op_type == "Shape" and not node.domain)
        done += drop_guards(view) + straighten_transposes(view)
        if not done:
            break
        folded = fold_constants(view.finish())
    view = GraphView(folded)
    return view.finish() if unshare_targets(view) else folded


def _settle(view: GraphView, node: NodeProto) -> int:
    """Replace what is known of one Shape: all of it, or the elements that a Gather or Slice takes. Return how many
    readings."""
    dims = view.shape(node.input[0])
    if dims is None or view.is_output(node.output[0]):
        return 0
    attrs = attributes(node)
    dims = dims[slice(attrs.get("start", 0), attrs.get("end"))]
    if all(isinstance(dim, int) for dim in dims):
        value = np.asarray([int(dim or 0) for dim in dims], np.int64)
        view.remove_node(node)
        view.store_constant(node.output[0], value)
        return 1
    done = 0
    for reader in view.consumers(node.output[0]):
        places = _places(view, reader, len(dims))
        if places is None or places.size == 0 or view.is_output(reader.output[0]):
            continue
        if not ((places >= -len(dims)) & (places < len(dims))).all():
            continue
        taken = [dims[int(place)] for place in places.reshape(-1)]
        if all(isinstance(dim, int) for dim in taken):
            value = np.asarray([int(dim or 0) for dim in taken], np.int64).reshape(places.shape)
            view.remove_node(reader)
            view.store_constant(reader.output[0], value)
            done += 1
    return done


def _places(view: GraphView, reader: NodeProto, rank: int) -> NDArray[np.int64] | None:
    """Which elements of a shape a Gather or a Slice takes; None when that is computed."""
    if reader.op_type == "Gather":
        return view.constant(reader.input[1])
    if reader.op_type != "Slice" or len(reader.input) < 3:
        return None
    starts, ends = view.constant(reader.input[1]), view.constant(reader.input[2])
    steps = view.constant(reader.input[4]) if len(reader.input) > 4 and reader.input[4] else np.ones(1, np.int64)
    if starts is None or ends is None or steps is None or starts.size != 1:
        return None
    return np.arange(rank, dtype=np.int64)[slice(int(starts[0]), int(ends[0]), int(steps[0]))]
