"""FLOPs, bytes and parameters of every layer of a model at given input shapes: what ``cost.json`` holds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from onnx import GraphProto, ModelProto, NodeProto, TypeProto

from edgeds.boards.cost_file import LayerCost
from edgeds.errors import ModelError
from edgeds.graph.feeds import refuse_huge
from edgeds.graph.flops import FREE_OPS, MATRIX_OPS, Shape, node_flops
from edgeds.graph.nodes import name_nodes
from edgeds.graph.proto import dims_of, dtype_name, element_bits, is_standard, light_copy, one_line, subgraphs
from edgeds.graph.session import open_session, runtime_errors
from edgeds.graph.shapes import assume_input_shapes, infer_shapes
from edgeds.graph.sparse24 import check_24

_QDQ = ("QuantizeLinear", "DequantizeLinear")
_FLOATS = ("float32", "float16", "bfloat16")
_INT8_INPUT_OPS = ("QLinearConv", "QLinearMatMul", "ConvInteger", "MatMulInteger")


@dataclass(frozen=True, kw_only=True)
class ModelCost:
    """Costs of all nodes at the input shapes ``inputs``; ``notes`` says which sizes were assumed."""

    inputs: dict[str, tuple[int, ...]]
    layers: tuple[LayerCost, ...]
    notes: tuple[str, ...] = ()

    @property
    def flops(self) -> int:
        return sum(layer.flops for layer in self.layers)

    @property
    def params(self) -> int:
        return sum(layer.params for layer in self.layers)

    @property
    def bytes(self) -> int:
        return sum(layer.bytes_read + layer.bytes_written for layer in self.layers)

    @property
    def is_quantized(self) -> bool:
        return any(layer.op in _QDQ or layer.op in _INT8_INPUT_OPS for layer in self.layers)

    @property
    def int8_flops_share(self) -> float:
        """Share of the Conv, ConvTranspose, Gemm and MatMul FLOPs that run in int8 (both data inputs come from
        DequantizeLinear); for a model without Q/DQ the share that could. 0 when there are none."""
        matrix = [layer for layer in self.layers if layer.op in MATRIX_OPS]
        total = sum(layer.flops for layer in matrix)
        quantized = self.is_quantized
        done = sum(layer.flops for layer in matrix if (layer.precision == "int8" if quantized else layer.int8_eligible))
        return done / total if total else 0.0


def count_cost(model: ModelProto, input_shapes: Mapping[str, Sequence[int]] | None = None) -> ModelCost:
    """Cost of every node of the main graph; control flow counts its costliest branch, or its body per known trip.

    Inputs left out get the documented defaults (``assume_input_shapes``). Shapes that inference cannot tell are taken
    from one run on zeros. Raises SpecError for shapes that do not fit the inputs, ModelError when the graph fails.
    """
    assumed = assume_input_shapes(model, input_shapes)
    inferred = infer_shapes(light_copy(model), _fed(model, assumed.shapes))
    name_nodes(inferred)
    shapes, elem_types = _tables(inferred.graph, model.graph)
    notes = list(assumed.notes)
    holes = [name for node in inferred.graph.node for name in node.output if name and name not in shapes]
    if holes:
        shapes.update(_recorded(model, assumed.shapes, holes, notes))
    counter = _Counter(shapes=shapes, elem_types=elem_types, notes=notes)
    counter.index(inferred.graph, model.graph)
    sparse = {layer.node for layer in check_24(model) if layer.is_24}
    layers = tuple(
        replace(layer, sparse_24=True) if layer.node in sparse else layer
        for layer in map(counter.count, counter.listed)
    )
    return ModelCost(inputs=assumed.shapes, layers=layers, notes=tuple(notes))


def _fed(model: ModelProto, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    stored = {tensor.name for tensor in model.graph.initializer}
    return {name: shape for name, shape in shapes.items() if name not in stored}


def _concrete(value: TypeProto) -> Shape | None:
    dims = dims_of(value)
    return None if dims is None or not all(isinstance(d, int) for d in dims) else tuple(int(d or 0) for d in dims)


def _tables(inferred: GraphProto, source: GraphProto) -> tuple[dict[str, Shape], dict[str, int]]:
    """Concrete shapes and element types by tensor name, from inference and from the stored weights."""
    shapes: dict[str, Shape] = {tensor.name: tuple(tensor.dims) for tensor in source.initializer}
    elem_types: dict[str, int] = {tensor.name: tensor.data_type for tensor in source.initializer}
    for item in (*inferred.value_info, *inferred.input, *inferred.output):
        elem_types.setdefault(item.name, item.type.tensor_type.elem_type)
        found = _concrete(item.type)
        if found is not None:
            shapes.setdefault(item.name, found)
    for node in inferred.node:
        for attribute in node.attribute:
            if node.op_type == "Constant" and attribute.name == "value":
                shapes.setdefault(node.output[0], tuple(attribute.t.dims))
                elem_types.setdefault(node.output[0], attribute.t.data_type)
    return shapes, elem_types


def _recorded(
    model: ModelProto, inputs: Mapping[str, tuple[int, ...]], holes: list[str], notes: list[str]
) -> dict[str, Shape]:
    """Shapes of the tensors ``holes`` from one run on zeros."""
    from edgeds.graph.io import input_specs

    errors: tuple[type[Exception], ...] = (ModelError, *runtime_errors())
    try:
        feeds = {}
        for spec in input_specs(model):
            refuse_huge(spec, inputs[spec.name])
            feeds[spec.name] = np.full(inputs[spec.name], "" if spec.dtype == "object" else 0, spec.np_dtype)
        results = open_session(model, outputs=holes).run(holes, feeds)
    except errors as error:
        notes.append(f"{len(holes)} tensors have unknown shapes and count as empty: {one_line(error, limit=120)}")
        return {}
    return {name: np.shape(value) for name, value in zip(holes, results, strict=True)}


@dataclass(kw_only=True)
class _Counter:
    shapes: dict[str, Shape]
    elem_types: dict[str, int]
    notes: list[str]
    producers: dict[str, NodeProto] = field(default_factory=dict)
    readers: dict[str, list[NodeProto]] = field(default_factory=dict)
    outputs: set[str] = field(default_factory=set)
    weights: set[str] = field(default_factory=set)
    counted: set[str] = field(default_factory=set)
    listed: list[NodeProto] = field(default_factory=list)
    origin: dict[str, int] = field(default_factory=dict)

    def index(self, graph: GraphProto, source: GraphProto) -> None:
        self.weights |= {tensor.name for tensor in source.initializer}
        self.outputs |= {item.name for item in graph.output}
        for node in graph.node:
            self.producers.update({name: node for name in node.output if name})
            for name in node.input:
                self.readers.setdefault(name, []).append(node)
            if node.op_type == "Constant":
                self.weights.add(node.output[0])
            else:
                self.origin.update({name: len(self.listed) for name in node.output if name})
                self.listed.append(node)

    def count(self, node: NodeProto) -> LayerCost:
        standard = is_standard(node) or node.domain == "com.microsoft"
        inputs = [self.shapes.get(name) if name else None for name in node.input]
        outputs = [self.shapes.get(name) if name else None for name in node.output]
        is_float = bool(node.output) and dtype_name(self.elem_types.get(node.output[0], 0)) in (*_FLOATS, "float64")
        exact = node.op_type in MATRIX_OPS
        flops = node_flops(node, inputs, outputs) if standard and (is_float or exact) else 0
        params = self._params(node)
        read, written = self._bytes(node)
        precision = self._precision(node)
        eligible = node.op_type in ("Conv", "ConvTranspose", "Gemm", "MatMul") and all(
            dtype_name(self.elem_types.get(name, 0)) in _FLOATS for name in node.input[:2]
        )
        for inner_flops, inner_params, inner_bytes in self._control_flow(node):
            flops, params, read = flops + inner_flops, params + inner_params, read + inner_bytes
        return LayerCost(
            node=node.name,
            op=node.op_type,
            flops=flops,
            params=params,
            bytes_read=read,
            bytes_written=written,
            int8_eligible=eligible,
            precision=precision,
            reads=tuple(dict.fromkeys(self.origin[name] for name in node.input if name in self.origin)),
            elements=self._elements(node),
        )

    def _dequantized(self, name: str) -> NodeProto | None:
        node = self.producers.get(name)
        return node if node is not None and node.op_type == "DequantizeLinear" else None

    def _stored_name(self, name: str) -> str:
        """The tensor really read: through DequantizeLinear, its int8 source."""
        node = self._dequantized(name)
        return node.input[0] if node is not None else name

    def _precision(self, node: NodeProto) -> str:
        if node.op_type in _INT8_INPUT_OPS:
            return "int8"
        names = [name for name in node.input if name]
        data = names[:2] if node.op_type in MATRIX_OPS else [n for n in names if n not in self.weights]
        if data and node.op_type not in _QDQ and all(self._dequantized(name) for name in data):
            return "int8"
        first = next((name for name in (*node.output, *names) if name in self.elem_types), "")
        return dtype_name(self.elem_types.get(first, 0))

    def _params(self, node: NodeProto) -> int:
        """Float weights, and quantized ones behind DequantizeLinear; each stored tensor counts once (first reader)."""
        if node.op_type in _QDQ:
            return 0
        total = 0
        for name in node.input:
            stored = self._stored_name(name)
            through = stored != name
            size = math.prod(self.shapes.get(stored, ()))
            dtype = dtype_name(self.elem_types.get(stored, 0))
            if stored not in self.weights or stored in self.counted or (size <= 1 and not through):
                continue
            if through or dtype in (*_FLOATS, "float64") or node.op_type in _INT8_INPUT_OPS:
                self.counted.add(stored)
                total += size
        return total

    def _nbytes(self, name: str) -> int:
        bits = element_bits(self.elem_types.get(name, 0)) or 0
        return (math.prod(self.shapes[name]) * bits + 7) // 8 if name in self.shapes else 0

    def _bytes(self, node: NodeProto) -> tuple[int, int]:
        if node.op_type in FREE_OPS or node.op_type == "DequantizeLinear":
            return 0, 0
        if node.op_type == "QuantizeLinear" and self._fused_quantize(node):
            return 0, 0
        names = node.input[:1] if node.op_type == "QuantizeLinear" else node.input
        if node.op_type in ("Gather", "Slice") and node.output:
            # Only the rows taken are read, not the whole table.
            read = self._nbytes(node.output[0]) + sum(self._nbytes(name) for name in node.input[1:])
        else:
            read = sum(self._nbytes(self._stored_name(name)) for name in dict.fromkeys(names) if name)
        return read, sum(self._written(name) for name in node.output if name)

    def _elements(self, node: NodeProto) -> tuple[int, int] | None:
        """Elements of activations that are read and written; None where a shape is unknown."""
        names = [name for name in dict.fromkeys(node.input) if name and self._stored_name(name) not in self.weights]
        if node.op_type in ("Gather", "Slice") and node.output:
            names = [*node.output[:1], *(name for name in names if name != node.input[0])]
        written = [name for name in node.output if name]
        if any(name not in self.shapes for name in (*names, *written)):
            return None
        read = sum(math.prod(self.shapes[name]) for name in names)
        return read, sum(math.prod(self.shapes[name]) for name in written)

    def _fused_quantize(self, node: NodeProto) -> bool:
        source = node.input[0]
        return source in self.producers and self._only_quantized(source)

    def _only_quantized(self, name: str) -> bool:
        readers = self.readers.get(name, [])
        return bool(readers) and name not in self.outputs and all(r.op_type == "QuantizeLinear" for r in readers)

    def _written(self, name: str) -> int:
        """A tensor that is only quantized is written as int8: compilers fuse the Q into its producer."""
        return self._nbytes(self.readers[name][0].output[0]) if self._only_quantized(name) else self._nbytes(name)

    def _control_flow(self, node: NodeProto) -> list[tuple[int, int, int]]:
        bodies = subgraphs(node)
        if not bodies:
            return []
        if node.op_type != "If":
            self.notes.append(f"node {node.name!r} ({node.op_type}): the number of trips is unknown, one is counted")
        costs = []
        for body in bodies:
            shapes, elem_types = _tables(body, body)
            inner = _Counter(
                shapes={**self.shapes, **shapes}, elem_types={**self.elem_types, **elem_types}, notes=self.notes
            )
            inner.weights, inner.counted = set(self.weights), self.counted
            inner.index(body, body)
            layers = [inner.count(item) for item in body.node if item.op_type != "Constant"]
            moved = sum(layer.bytes_read + layer.bytes_written for layer in layers)
            costs.append((sum(layer.flops for layer in layers), sum(layer.params for layer in layers), moved))
        flops, moved = max(cost[0] for cost in costs), max(cost[2] for cost in costs)
        return [(flops, sum(cost[1] for cost in costs), moved)]
