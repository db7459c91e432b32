"""Check a model against the rules of a strongly typed network: what TensorRT refuses at parse time, said by node name.

A strongly typed network inserts no casts of its own: every operator takes its inputs in the types they have. On top of
ONNX's type variables TensorRT wants all floating-point inputs of one operator to be the same type, a QuantizeLinear's
scale to have the type of its input, and a DequantizeLinear's result the type of its scale (NvInfer.h, IQuantizeLayer
and IDequantizeLayer: "input data type must match the scale data type"; measured with TensorRT-RTX 1.7: mixed Half and
Float operands are parse errors).
"""

from __future__ import annotations

from collections.abc import Iterator

from onnx import GraphProto, ModelProto, NodeProto, TensorProto, TypeProto

from edgeds.errors import ModelError
from edgeds.graph.proto import attributes, dtype_name, each_graph, main_opset, subgraphs
from edgeds.graph.schemas import OpTypes, op_types
from edgeds.graph.shapes import infer_shapes, infer_types

FLOAT_TYPES = frozenset({TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE})

_MAY_MIX = frozenset(
    {"If", "Loop", "Scan", "Resize", "Upsample", "CastLike", "Dropout", "NonMaxSuppression", "OneHot"}
    | {"DequantizeLinear"}
)
"""Operators with floating-point inputs whose types TensorRT reads independently of each other."""

Types = dict[str, int]


def find_type_errors(model: ModelProto) -> list[str]:
    """Every violation as one sentence, subgraphs included; [] for a model that a strongly typed parser accepts.

    Tensors whose type cannot be inferred (outputs of custom operators) are not judged. Raises ModelError when shape
    inference itself fails.
    """
    opset = main_opset(model)
    types = {name: _elem(item) for name, item in infer_types(model).items()}
    types.update({tensor.name: tensor.data_type for tensor in model.graph.initializer})
    errors: list[str] = []
    if any(subgraphs(node) for node in model.graph.node):
        model = infer_shapes(model)  # fills in the types inside the bodies
    for graph in each_graph(model.graph):
        types |= {} if graph is model.graph else _stored_types(graph)
        for node in graph.node:
            errors += _node_errors(node, types, opset=opset)
    for item in model.graph.output:
        declared, actual = _elem(item.type), types.get(item.name, 0)
        if declared and actual and declared != actual:
            errors.append(f"output {item.name!r} is declared {dtype_name(declared)} and computed {dtype_name(actual)}")
    return errors


def check_types(model: ModelProto, *, where: str) -> None:
    """Raise ModelError with the first violation and the number of the others."""
    errors = find_type_errors(model)
    if errors:
        more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
        raise ModelError(f"{where}: a strongly typed network refuses it: {errors[0]}{more}; insert a Cast there")


def _elem(kind: TypeProto) -> int:
    return kind.tensor_type.elem_type if kind.WhichOneof("value") == "tensor_type" else 0


def _stored_types(graph: GraphProto) -> Types:
    types = {item.name: _elem(item.type) for item in (*graph.input, *graph.value_info, *graph.output)}
    return types | {tensor.name: tensor.data_type for tensor in graph.initializer}


def _node_errors(node: NodeProto, types: Types, *, opset: int) -> Iterator[str]:
    found = [(name, types.get(name, 0)) for name in node.input]
    label = f"node {node.name!r} ({node.op_type})"
    if node.op_type not in _MAY_MIX:
        floats = {kind: name for name, kind in found if kind in FLOAT_TYPES}
        if len(floats) > 1:
            listed = " and ".join(f"{name!r} {dtype_name(kind)}" for kind, name in sorted(floats.items()))
            yield f"{label} mixes {listed}"
            return
    rules = op_types(node, opset=opset)
    if rules is not None:
        yield from _variable_errors(node, rules, types, label=label)
    if node.op_type == "DequantizeLinear":
        wanted, scale = attributes(node).get("output_dtype", 0), found[1][1]
        actual = types.get(node.output[0], 0)
        if scale and (wanted or actual) and scale != (wanted or actual):
            yield f"{label} has a {dtype_name(scale)} scale and a {dtype_name(wanted or actual)} result"


def _variable_errors(node: NodeProto, rules: OpTypes, types: Types, *, label: str) -> Iterator[str]:
    bound: dict[str, tuple[str, int]] = {}
    places = [(rules.input(i), name) for i, name in enumerate(node.input)]
    places += [(rules.output(i), name) for i, name in enumerate(node.output)]
    for variable, name in places:
        kind = types.get(name, 0) if name else 0
        if not kind or variable in rules.mixed:
            continue
        first, seen = bound.setdefault(variable, (name, kind))
        if seen != kind:
            yield f"{label} needs one type for {first!r} ({dtype_name(seen)}) and {name!r} ({dtype_name(kind)})"
            return
        if kind in (TensorProto.FLOAT, TensorProto.FLOAT16):
            written = "tensor(float)" if kind == TensorProto.FLOAT else "tensor(float16)"
            if not rules.takes(variable, written):
                yield f"{label} does not take {name!r} as {dtype_name(kind)}"
                return
