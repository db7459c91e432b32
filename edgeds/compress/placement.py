"""Decide where Q/DQ pairs go, so that TensorRT fuses what lies around them and ONNX Runtime computes the same.

- The inputs of Conv, ConvTranspose, Gemm and MatMul: activations per tensor, constant weights per output channel.
- The shortcut input of a residual Add whose other input is a quantized convolution's own output: the convolution
  fuses with the Add and reads the shortcut as INT8. Never between a convolution and what it fuses with.
- Pooling, Concat, Resize and layout operators carry no pair of their own: TensorRT moves the consumer's Q in front of
  them, so they keep exactly one scale. ``concat="before"`` writes that out: a pair on each input of a Concat, at the
  scale of its output (the same numbers; some TensorRT versions run one form faster than the other).
- Nothing in a detector's tail (see tail.py), in subgraphs, or on tensors that are not float.

One tensor has one Q, whatever the number of consumers.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
from onnx import NodeProto

from edgeds.compress.tail import WEIGHTED_OPS, Tail
from edgeds.errors import SpecError
from edgeds.graph.proto import each_graph
from edgeds.graph.view import GraphView

QUANTIZABLE_OPS = WEIGHTED_OPS


@dataclass(frozen=True, kw_only=True)
class Selection:
    """What the user chose. Names are those of the user's model; no pass before this one renames a node."""

    op_types: tuple[str, ...] = QUANTIZABLE_OPS
    exclude: tuple[str, ...] = ()
    only: tuple[str, ...] = ()
    residual: bool = True
    concat: str = "after"
    keep_tail: bool = True


@dataclass(frozen=True, kw_only=True)
class WeightPlan:
    """A constant operand: its input index, and the axis of its output channels (None: one scale for all)."""

    index: int
    axis: int | None


@dataclass(frozen=True, kw_only=True)
class NodePlan:
    """One node to quantize: activation inputs by index, and its weight if it has one."""

    node: str
    activations: dict[int, str]
    weight: WeightPlan | None


@dataclass(frozen=True, kw_only=True)
class Edge:
    """One input of one node that reads a quantized value; ``scale_of`` names the tensor whose range is used."""

    node: str
    index: int
    tensor: str
    scale_of: str
    partner: str = ""
    """The quantized node this pair exists for; without it the pair is pointless."""


@dataclass(frozen=True, kw_only=True)
class QdqPlan:
    """All pairs to insert."""

    nodes: tuple[NodePlan, ...]
    edges: tuple[Edge, ...]
    float_nodes: dict[str, str] = field(default_factory=dict)
    """Quantizable nodes that stay float, with the reason to show."""
    notes: tuple[str, ...] = ()

    @property
    def tensors(self) -> tuple[str, ...]:
        """Activation tensors that need a range, in first-use order."""
        names = [name for plan in self.nodes for name in plan.activations.values()]
        return tuple(dict.fromkeys([*names, *(edge.scale_of for edge in self.edges)]))

    def without_node(self, node: str, reason: str) -> QdqPlan:
        """The plan with one node, and the pairs that exist for its sake, left in float."""
        kept = tuple(plan for plan in self.nodes if plan.node != node)
        edges = tuple(edge for edge in self.edges if edge.partner != node)
        return replace(self, nodes=kept, edges=edges, float_nodes={**self.float_nodes, node: reason})

    def without(self, bad: dict[str, str]) -> QdqPlan:
        """The plan minus everything that needs a tensor in ``bad`` (tensor -> reason)."""
        reasons = dict(self.float_nodes)
        kept = []
        for plan in self.nodes:
            blocked = next((name for name in plan.activations.values() if name in bad), None)
            if blocked is None:
                kept.append(plan)
            else:
                reasons[plan.node] = f"tensor '{blocked}' {bad[blocked]}"
        edges = tuple(e for e in self.edges if e.scale_of not in bad and (not e.partner or e.partner not in reasons))
        return QdqPlan(nodes=tuple(kept), edges=edges, float_nodes=reasons, notes=self.notes)


def check_selection(selection: Selection, view: GraphView) -> None:
    """SpecError for an unknown operator type or node name, before any calibration starts."""
    given: object = selection.op_types
    if isinstance(given, str):
        raise SpecError(f"op_types {given!r}: give a sequence of names, ('{given}',)")
    for op in selection.op_types:
        if op not in QUANTIZABLE_OPS:
            raise SpecError(f"op_types: {op!r} cannot be quantized; choose from {', '.join(QUANTIZABLE_OPS)}")
    if selection.concat not in ("after", "before"):
        raise SpecError(f"concat {selection.concat!r}: choose after or before")
    names = {node.name for node in view.nodes}
    for label, wanted in (("exclude", selection.exclude), ("only", selection.only)):
        unknown = [name for name in wanted if name not in names]
        if unknown:
            import difflib

            near = difflib.get_close_matches(unknown[0], names, n=3)
            hint = f"; nearest: {', '.join(near)}" if near else ""
            raise SpecError(f"{label}: the model has no node named {unknown[0]!r}{hint}")


def plan_placement(view: GraphView, tail: Tail, selection: Selection) -> QdqPlan:
    """Choose every node and edge to quantize, and name each quantizable node that stays float."""
    check_selection(selection, view)
    plans: list[NodePlan] = []
    float_nodes: dict[str, str] = {}
    notes: list[str] = []
    for node in view.nodes:
        if node.op_type not in QUANTIZABLE_OPS:
            continue
        reason = _excluded(node, tail, selection)
        plan = None if reason else _plan_node(view, node, notes)
        if isinstance(plan, NodePlan):
            plans.append(plan)
        elif reason or plan:
            float_nodes[node.name] = reason or str(plan)
    for graph in list(each_graph(view.model.graph))[1:]:
        for inner in graph.node:
            if inner.op_type in QUANTIZABLE_OPS:
                float_nodes[inner.name] = f"{inner.op_type} inside a control-flow body"
    quantized = {plan.node for plan in plans}
    edges = _residual_edges(view, tail, quantized) if selection.residual else []
    if selection.concat == "before":
        edges += _concat_edges(view, plans)
    return QdqPlan(nodes=tuple(plans), edges=tuple(edges), float_nodes=float_nodes, notes=tuple(notes))


def _excluded(node: NodeProto, tail: Tail, selection: Selection) -> str | None:
    if node.name in selection.exclude:
        return "excluded by the user"
    if selection.only and node.name not in selection.only:
        return "not among the nodes the user chose"
    if node.op_type not in selection.op_types:
        return f"{node.op_type} is not among the chosen operator types"
    if selection.keep_tail and tail.covers(node.name):
        return tail.reason
    return None


def _plan_node(view: GraphView, node: NodeProto, notes: list[str]) -> NodePlan | str | None:
    """A plan, the reason why not, or None for a node that has nothing to quantize (integers, all constant)."""
    operands = list(node.input[:2])
    dtypes = {view.dtype(name) for name in operands}
    if any(dtype is not None and dtype.kind in "iubcOS" for dtype in dtypes):
        return None
    other = dtypes - {None, np.dtype(np.float32), np.dtype(np.float16)}
    if other:
        return f"computes in {', '.join(sorted(map(str, other)))}"
    constants = {index: value for index, name in enumerate(operands) if (value := view.constant(name)) is not None}
    if len(constants) == len(operands):
        return None
    if node.op_type in ("Conv", "ConvTranspose") and 1 not in constants:
        return "its weights are computed at run time"
    weight: WeightPlan | None = None
    for index, value in constants.items():
        if value.size == 0:
            return f"its weight '{operands[index]}' is empty"
        if not np.isfinite(value).all():
            return f"its weight '{operands[index]}' holds NaN or infinity"
        axis, note = _channel_axis(node, index, value)
        weight = WeightPlan(index=index, axis=axis)
        if note:
            notes.append(f"{node.name}: {note}")
    activations = {index: name for index, name in enumerate(operands) if index not in constants}
    return NodePlan(node=node.name, activations=activations, weight=weight)


def _channel_axis(node: NodeProto, index: int, weight: np.ndarray) -> tuple[int | None, str | None]:
    """Axis of the output channels in the weight; None with a note where one scale per channel cannot be expressed."""
    attributes = {attribute.name: attribute for attribute in node.attribute}
    if node.op_type == "Conv":
        return 0, None
    if node.op_type == "ConvTranspose":
        group = attributes["group"].i if "group" in attributes else 1
        if group == 1:
            return 1, None
        return None, "grouped ConvTranspose shares axis 1 between its groups, one weight scale for the tensor"
    if index == 0:
        return None, "the constant is the left operand, one weight scale for the tensor"
    if node.op_type == "Gemm":
        return (0 if "transB" in attributes and attributes["transB"].i else 1), None
    if weight.ndim == 2:
        return 1, None
    return None, f"MatMul weight of rank {weight.ndim}, one weight scale for the tensor"


def _residual_edges(view: GraphView, tail: Tail, quantized: set[str]) -> list[Edge]:
    edges = []
    for node in view.nodes:
        if node.op_type != "Add" or len(node.input) != 2 or tail.covers(node.name):
            continue
        if any(view.is_constant(name) for name in node.input) or not _same_shape(view, node):
            continue
        main = [_is_fusable_branch(view, name, quantized) for name in node.input]
        if not any(main):
            continue
        # Two convolutions meet (projection shortcut): the later one fuses with the Add, the other is the shortcut.
        branch = (
            1 if main[1] and (not main[0] or _position(view, node.input[1]) > _position(view, node.input[0])) else 0
        )
        shortcut = node.input[1 - branch]
        if shortcut != node.input[branch] and view.dtype(shortcut) in (np.dtype(np.float32), np.dtype(np.float16)):
            partner = view.producer(node.input[branch])
            name = partner.name if partner is not None else ""
            edges.append(Edge(node=node.name, index=1 - branch, tensor=shortcut, scale_of=shortcut, partner=name))
    return edges


def _same_shape(view: GraphView, node: NodeProto) -> bool:
    """False only when both shapes are known and differ: a broadcast is not a residual."""
    left, right = (view.shape(name) for name in node.input)
    if left is None or right is None:
        return True
    return len(left) == len(right) and all(
        a == b or not (isinstance(a, int) and isinstance(b, int)) for a, b in zip(left, right, strict=True)
    )


def _is_fusable_branch(view: GraphView, tensor: str, quantized: set[str]) -> bool:
    """Whether a tensor is a quantized convolution's own output, read by the Add only: that is what fuses.

    With an activation in between the Add is a pointwise kernel of its own, and a pair on its shortcut would cost
    accuracy for nothing (measured on yolo11n: 9 % of the whole activation noise).
    """
    if len(view.consumers(tensor)) != 1 or view.is_output(tensor) or view.used_in_subgraph(tensor):
        return False
    producer = view.producer(tensor)
    return producer is not None and producer.op_type in ("Conv", "ConvTranspose") and producer.name in quantized


def silu_input(view: GraphView, mul: NodeProto) -> str | None:
    """``x`` when the Mul computes ``x * Sigmoid(x)``, else None."""
    for gate, value in ((0, 1), (1, 0)):
        producer = view.producer(mul.input[gate])
        if producer is not None and producer.op_type == "Sigmoid" and producer.input[0] == mul.input[value]:
            return mul.input[value]
    return None


def _position(view: GraphView, tensor: str) -> int:
    producer = view.producer(tensor)
    if producer is None:
        return -1
    return next(index for index, node in enumerate(view.nodes) if node is producer)


def _concat_edges(view: GraphView, plans: list[NodePlan]) -> list[Edge]:
    """The inputs of each Concat that feeds a quantized node, at the scale of the Concat's own output."""
    edges: dict[tuple[str, int], Edge] = {}
    for plan in plans:
        for tensor in plan.activations.values():
            producer = view.producer(tensor)
            if producer is not None and producer.op_type == "Concat" and len(producer.input) > 1:
                for place, name in enumerate(producer.input):
                    edges[producer.name, place] = Edge(
                        node=producer.name, index=place, tensor=name, scale_of=tensor, partner=plan.node
                    )
    return list(edges.values())


__all__ = [
    "QUANTIZABLE_OPS",
    "Edge",
    "NodePlan",
    "QdqPlan",
    "Selection",
    "WeightPlan",
    "check_selection",
    "plan_placement",
    "silu_input",
]
