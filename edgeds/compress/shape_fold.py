"""Sizes that a graph computes from shapes it always has become constants, so that pruning can rewrite them.

Exporters write ``view(n, c // 2, -1)`` as Shape, Gather, Div and Concat. Where a size is the same for every input, the
reading is replaced by its value and the arithmetic is folded away; what depends on the input stays computed.
"""

from __future__ import annotations

import numpy as np
from onnx import ModelProto, NodeProto

from edgeds.graph.fold import fold_constants
from edgeds.graph.proto import attributes
from edgeds.graph.view import GraphView

_ROUNDS = 4
"""Folding one reading can make the shapes known that another one reads."""


def fold_shapes(model: ModelProto) -> ModelProto:
    """A copy with constants folded, those from fixed dims included. Names of nodes that stay do not change."""
    folded = fold_constants(model)
    for _ in range(_ROUNDS):
        view = GraphView(folded)
        done = sum(_settle(view, node) for node in view.nodes if node.op_type == "Shape" and not node.domain)
        if not done:
            break
        folded = fold_constants(view.finish())
    return folded


def _settle(view: GraphView, node: NodeProto) -> int:
    """Replace what is known of one Shape: all of it, or the elements that a Gather takes. Return how many readings."""
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
        places = view.constant(reader.input[1]) if reader.op_type == "Gather" else None
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
