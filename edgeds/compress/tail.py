"""Find a detector's tail in the graph: where boxes and scores are decoded and meet. It stays in float.

Pixel boxes (0..640) and scores (0..1) that share one INT8 scale lose every score; the last layers before the
decoding lose about one point of mAP. Neither has a stable name across exporters, so both are found by structure:
walk back from each graph output to the weighted layers that feed it; what lies between is that output's tail. The tail
is a detector's when it joins several of those layers (boxes, scores, scales), selects candidates (TopK, NMS), or takes
an expectation over a softmax (distribution focal loss), or when several outputs are raw heads of one width.
"""

from __future__ import annotations

from dataclasses import dataclass

from onnx import NodeProto

from edgeds.graph.view import GraphView

WEIGHTED_OPS = ("Conv", "ConvTranspose", "Gemm", "MatMul")
_LAYOUT_OPS = {"Reshape", "Transpose", "Squeeze", "Unsqueeze", "Flatten", "Identity", "Slice", "Split", "Cast"}
_SELECT_OPS = {"TopK", "NonMaxSuppression", "GatherND", "GatherElements", "ScatterND", "ScatterElements", "ArgMax"}
_SHAPE_OPS = {"Shape", "Size"}


@dataclass(frozen=True, kw_only=True)
class Tail:
    """Names of the nodes that decode, and of the last weighted layers before them, with the reason to show."""

    nodes: frozenset[str]
    last_layers: frozenset[str]
    reason: str

    def covers(self, name: str) -> bool:
        return name in self.nodes or name in self.last_layers


EMPTY_TAIL = Tail(nodes=frozenset(), last_layers=frozenset(), reason="")


@dataclass(frozen=True)
class _Region:
    output: str
    nodes: tuple[NodeProto, ...]
    layers: tuple[NodeProto, ...]


def find_detector_tail(view: GraphView) -> Tail:
    """The tail of every output that is a detector's; EMPTY_TAIL for classifiers, encoders and image-to-image nets."""
    regions = [_walk_back(view, name) for name in view.outputs]
    chosen = [region for region in regions if _is_decoded(view, region)]
    chosen += [region for region in _raw_heads(view, regions) if region not in chosen]
    if not chosen:
        return EMPTY_TAIL
    nodes = frozenset(node.name for region in chosen for node in region.nodes)
    layers = frozenset(node.name for region in chosen for node in region.layers)
    outputs = ", ".join(region.output for region in chosen)
    return Tail(nodes=nodes, last_layers=layers - nodes, reason=f"detector tail of output '{outputs}'")


def data_inputs(node: NodeProto) -> list[str]:
    """Inputs that carry data rather than shapes, axes or sizes."""
    if node.op_type in ("Reshape", "Expand", "Slice", "Tile", "Resize", "Split", "Squeeze", "Unsqueeze", "Pad", "TopK"):
        return [name for name in node.input[:1] if name]
    return [name for name in node.input if name]


def is_weighted(view: GraphView, node: NodeProto) -> bool:
    """Whether a node multiplies an activation with constant weights."""
    return node.op_type in WEIGHTED_OPS and any(view.is_constant(name) for name in node.input[:2])


def _walk_back(view: GraphView, output: str) -> _Region:
    nodes: dict[str, NodeProto] = {}
    layers: dict[str, NodeProto] = {}
    pending = [output]
    while pending:
        node = view.producer(pending.pop())
        if node is None or node.name in nodes or node.name in layers or node.op_type in _SHAPE_OPS:
            continue
        if is_weighted(view, node) and not _is_expectation(view, node):
            layers[node.name] = node
            continue
        nodes[node.name] = node
        pending.extend(data_inputs(node))
    return _Region(output, tuple(nodes.values()), tuple(layers.values()))


def _is_expectation(view: GraphView, node: NodeProto) -> bool:
    """A fixed weighting of a softmax's output: the decoding of distribution focal loss, not a learned layer."""
    tensor = next((name for name in node.input[:2] if not view.is_constant(name)), "")
    while tensor:
        producer = view.producer(tensor)
        if producer is None:
            return False
        if producer.op_type == "Softmax":
            return True
        if producer.op_type not in _LAYOUT_OPS:
            return False
        tensor = producer.input[0]
    return False


def _is_decoded(view: GraphView, region: _Region) -> bool:
    for node in region.nodes:
        if node.op_type in _SELECT_OPS or is_weighted(view, node):
            return True
        if node.op_type == "Concat":
            sources = [_source_layers(view, name) for name in node.input]
            joined = set().union(*sources)
            if len(joined) > 1 and any(source and source != joined for source in sources):
                return True
    return False


def _source_layers(view: GraphView, tensor: str) -> set[str]:
    return {node.name for node in _walk_back(view, tensor).layers}


def _raw_heads(view: GraphView, regions: list[_Region]) -> list[_Region]:
    """Outputs that are 1x1 convolutions of one width with weights of their own, only reshaped afterwards."""
    widths: dict[int, list[_Region]] = {}
    for region in regions:
        if len(region.layers) != 1 or region.layers[0].op_type != "Conv":
            continue
        if any(node.op_type not in _LAYOUT_OPS | {"Sigmoid"} for node in region.nodes):
            continue
        weight = view.constant(region.layers[0].input[1])
        if weight is not None and weight.ndim == 4 and weight.shape[2:] == (1, 1):
            widths.setdefault(weight.shape[0], []).append(region)
    heads: list[_Region] = []
    for same_width in widths.values():
        if len({region.layers[0].input[1] for region in same_width}) > 1:
            heads.extend(same_width)
    return heads
