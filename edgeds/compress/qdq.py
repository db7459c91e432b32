"""Insert the planned Q/DQ pairs: explicit symmetric INT8 in the form every TensorRT from 8.5 to 11 reads.

Each pair has constant scales greater than zero, an explicit int8 zero-point of zero, one scale per activation tensor,
int8 weights with only a DequantizeLinear, the axis always written, and float biases.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from onnx import ModelProto, NodeProto

from edgeds.compress.placement import QdqPlan, WeightPlan
from edgeds.compress.ranges import TensorRange
from edgeds.compress.weights import quantize_weight
from edgeds.graph.opset import require_opset
from edgeds.graph.view import GraphView

PER_AXIS_OPSET = 13
FLOAT16_OPSET = 19
_SMALLEST_FLOAT16_SCALE = 6.2e-5
"""Just above the smallest normal float16: subnormal scales are flushed to zero on some devices."""


def insert_qdq(
    model: ModelProto, plan: QdqPlan, ranges: Mapping[str, TensorRange], *, dedicated: bool = False
) -> ModelProto:
    """Return the quantized model. ``dedicated`` gives every consumer a pair of its own instead of one per tensor.

    The opset is raised only when the pairs need it: to 13 for per-channel scales, to 19 for float16 activations.
    """
    before = GraphView(model, copy=False)  # one view: types are inferred once and kept in it
    half = any(before.dtype(name) == np.float16 for name in plan.tensors)
    view = GraphView(require_opset(model, FLOAT16_OPSET if half else PER_AXIS_OPSET))
    nodes = {node.name: node for node in view.nodes}
    # Looked up before the first edit: inference works on the graph as it was.
    tensors = (*plan.tensors, *(edge.tensor for edge in plan.edges))
    dtypes = {name: view.dtype(name) or np.dtype(np.float32) for name in tensors}
    writer = _Writer(view, ranges, dtypes, dedicated=dedicated)
    for node_plan in plan.nodes:
        node = nodes[node_plan.node]
        for index, tensor in node_plan.activations.items():
            writer.read_quantized(node, index, tensor, scale_of=tensor)
        if node_plan.weight is not None:
            writer.quantize_constant(node, node_plan.weight)
    for edge in plan.edges:
        writer.read_quantized(nodes[edge.node], edge.index, edge.tensor, scale_of=edge.scale_of)
    return view.finish()


class _Writer:
    """Holds what was inserted so far, so that one tensor gets one Q and a shared weight one DQ."""

    def __init__(
        self, view: GraphView, ranges: Mapping[str, TensorRange], dtypes: Mapping[str, np.dtype], *, dedicated: bool
    ) -> None:
        self.view, self.ranges, self.dtypes, self.dedicated = view, ranges, dtypes, dedicated
        self._pairs: dict[tuple[str, str], str] = {}
        self._weights: dict[tuple[str, int | None], str] = {}

    def read_quantized(self, node: NodeProto, index: int, tensor: str, *, scale_of: str) -> None:
        """Let one input of a node read the dequantized value of ``tensor``."""
        key = (tensor, scale_of)
        if self.dedicated or key not in self._pairs:
            self._pairs[key] = self._add_pair(tensor, scale_of)
        self.view.set_input(node, index, self._pairs[key])

    def _add_pair(self, tensor: str, scale_of: str) -> str:
        view = self.view
        dtype = self.dtypes[tensor]
        scale = np.asarray(_as_dtype(self.ranges[scale_of].scale, dtype), dtype)
        scale_name = view.add_constant(f"{tensor}_scale", scale)
        zero_name = view.add_constant(f"{tensor}_zero_point", np.zeros((), np.int8))
        quantized, dequantized = view.fresh_name(f"{tensor}_quantized"), view.fresh_name(f"{tensor}_dequantized")
        name = f"{tensor}_QuantizeLinear"
        view.make_node("QuantizeLinear", [tensor, scale_name, zero_name], [quantized], name=name)
        name = f"{tensor}_DequantizeLinear"
        view.make_node("DequantizeLinear", [quantized, scale_name, zero_name], [dequantized], name=name)
        return dequantized

    def quantize_constant(self, node: NodeProto, plan: WeightPlan) -> None:
        """Replace a constant operand by int8 values behind a DequantizeLinear; other readers keep the float one."""
        source = node.input[plan.index]
        key = (source, plan.axis)
        if key not in self._weights:
            value = self.view.constant(source)
            assert value is not None
            self._weights[key] = self._add_weight(source, value, plan.axis)
        self.view.set_input(node, plan.index, self._weights[key])

    def _add_weight(self, source: str, value: np.ndarray, axis: int | None) -> str:
        view = self.view
        minimum = _SMALLEST_FLOAT16_SCALE if value.dtype == np.float16 else None
        weight = quantize_weight(value, axis, minimum_scale=None if minimum is None else np.float64(minimum))
        scale = weight.scale.astype(value.dtype)
        values_name = view.add_constant(f"{source}_quantized", weight.values)
        scale_name = view.add_constant(f"{source}_scale", scale)
        zero_name = view.add_constant(f"{source}_zero_point", np.zeros(scale.shape, np.int8))
        output = view.fresh_name(f"{source}_dequantized")
        attributes = {} if axis is None else {"axis": axis}
        name = f"{source}_DequantizeLinear"
        view.make_node("DequantizeLinear", [values_name, scale_name, zero_name], [output], name=name, **attributes)
        return output


def _as_dtype(scale: float, dtype: np.dtype) -> float:
    return max(scale, _SMALLEST_FLOAT16_SCALE) if dtype == np.float16 else max(scale, 2.0**-100)
