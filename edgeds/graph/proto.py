"""Small helpers over ONNX protobufs: walking subgraphs, dtypes, sizes, and copies without the weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx
from google.protobuf.message import Message  # type: ignore[import-untyped]
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, TypeProto, ValueInfoProto, helper

from edgeds.specs import Dim

INLINE_LIMIT_BYTES = 1 << 30
"""Above this many bytes of weights nothing serialises the whole model in one protobuf (the hard limit is 2 GiB)."""

LIGHT_KEEP_BYTES = 1024
"""Constants up to this size stay in a light copy: shapes, axes and scales that inference and checks read."""

_BITS = {
    getattr(TensorProto, name): bits
    for name, bits in {
        **{"INT4": 4, "UINT4": 4, "FLOAT4E2M1": 4, "INT2": 2, "UINT2": 2},
        **{"COMPLEX64": 64, "COMPLEX128": 128},
    }.items()
    if hasattr(TensorProto, name)
}


def main_opset(model: ModelProto) -> int:
    """Version of the default operator set; 0 when the model does not import it."""
    return next((entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")), 0)


def is_standard(node: NodeProto) -> bool:
    """Whether the node's operator belongs to the default ONNX domain."""
    return node.domain in ("", "ai.onnx")


def attributes(node: NodeProto) -> dict[str, Any]:
    """Attribute values by name (bytes stay bytes, tensors stay TensorProto)."""
    return {a.name: helper.get_attribute_value(a) for a in node.attribute if not a.ref_attr_name}


def subgraphs(node: NodeProto) -> list[GraphProto]:
    """Bodies of If, Loop, Scan and the like, directly below one node."""
    found: list[GraphProto] = []
    for attribute in node.attribute:
        if attribute.type == onnx.AttributeProto.GRAPH:
            found.append(attribute.g)
        elif attribute.type == onnx.AttributeProto.GRAPHS:
            found.extend(attribute.graphs)
    return found


def each_graph(graph: GraphProto) -> Iterator[GraphProto]:
    """The graph itself, then every nested subgraph."""
    yield graph
    for node in graph.node:
        for inner in subgraphs(node):
            yield from each_graph(inner)


def each_tensor(graph: GraphProto) -> Iterator[tuple[str, TensorProto]]:
    """Every stored tensor with a name to show: initializers and node attributes, subgraphs included."""
    for inner in each_graph(graph):
        for tensor in inner.initializer:
            yield tensor.name, tensor
        for node in inner.node:
            for attribute in node.attribute:
                if attribute.type == onnx.AttributeProto.TENSOR:
                    yield node.output[0] if node.output else node.name, attribute.t
                elif attribute.type == onnx.AttributeProto.TENSORS:
                    for tensor in attribute.tensors:
                        yield node.name, tensor


def captured_names(graph: GraphProto) -> set[str]:
    """Tensor names that a subgraph (or one nested in it) takes from outside."""
    defined = {item.name for item in graph.input} | {item.name for item in graph.initializer}
    defined |= {item.values.name for item in graph.sparse_initializer}
    used: set[str] = {item.name for item in graph.output}
    for node in graph.node:
        used.update(name for name in node.input if name)
        for inner in subgraphs(node):
            used |= captured_names(inner)
        defined.update(node.output)
    return used - defined


def node_inputs(node: NodeProto) -> list[str]:
    """Everything a node reads: its inputs, then what its subgraphs capture."""
    names = [name for name in node.input if name]
    for inner in subgraphs(node):
        names.extend(sorted(captured_names(inner)))
    return names


def np_dtype(elem_type: int) -> np.dtype[Any] | None:
    """numpy dtype of an ONNX element type; None when undefined or unknown."""
    if elem_type in (TensorProto.UNDEFINED, TensorProto.STRING) or elem_type not in TensorProto.DataType.values():
        return np.dtype(object) if elem_type == TensorProto.STRING else None
    try:
        return np.dtype(helper.tensor_dtype_to_np_dtype(elem_type))
    except (KeyError, ValueError, TypeError):
        return None


def dtype_name(elem_type: int) -> str:
    """Lower-case dtype name as numpy says it (float32, int64, bool, object for strings)."""
    dtype = np_dtype(elem_type)
    return dtype.name if dtype is not None else "undefined"


def element_bits(elem_type: int) -> int | None:
    """Stored bits per element, None for strings and unknown types."""
    if elem_type in _BITS:
        return _BITS[elem_type]
    dtype = np_dtype(elem_type)
    return None if dtype is None or dtype.kind == "O" else dtype.itemsize * 8


def count_elements(dims: Any) -> int:
    """Product of the dims; 1 for a scalar."""
    total = 1
    for dim in dims:
        total *= int(dim)
    return total


def tensor_nbytes(tensor: TensorProto) -> int:
    """Bytes of a tensor's values by its dims and dtype (strings: the sum of their lengths)."""
    bits = element_bits(tensor.data_type)
    if bits is None:
        return sum(len(item) for item in tensor.string_data)
    return (count_elements(tensor.dims) * bits + 7) // 8


def weight_bytes(model: ModelProto) -> int:
    """Bytes of all stored tensors, subgraphs included."""
    return sum(tensor_nbytes(tensor) for _, tensor in each_tensor(model.graph))


def dims_of(value: TypeProto) -> tuple[Dim, ...] | None:
    """Dims of a tensor type: numbers, names or None; None when the rank is unknown or it is no plain tensor."""
    if value.WhichOneof("value") != "tensor_type" or not value.tensor_type.HasField("shape"):
        return None
    dims: list[Dim] = []
    for dim in value.tensor_type.shape.dim:
        kind = dim.WhichOneof("value")
        if kind == "dim_value":
            dims.append(dim.dim_value)
        else:
            dims.append(dim.dim_param or None if kind == "dim_param" else None)
    return tuple(dims)


def set_dims(value: ValueInfoProto, dims: tuple[Dim, ...]) -> None:
    """Overwrite the shape of a tensor value."""
    shape = value.type.tensor_type.shape
    del shape.dim[:]
    shape.SetInParent()
    for dim in dims:
        entry = shape.dim.add()
        if isinstance(dim, int):
            entry.dim_value = dim
        elif dim:
            entry.dim_param = dim


def clone_model(model: ModelProto) -> ModelProto:
    """A deep copy, also above 2 GiB (copied in memory, not through serialisation)."""
    copy = ModelProto()
    copy.CopyFrom(model)
    return copy


def _copy_fields(source: Message, target: Message, *, skip: str) -> None:
    for field, value in source.ListFields():
        if field.name == skip:
            continue
        if hasattr(value, "extend"):
            getattr(target, field.name).extend(value)
        elif hasattr(value, "CopyFrom"):
            getattr(target, field.name).CopyFrom(value)
        else:
            setattr(target, field.name, value)


def light_copy(model: ModelProto, *, keep_bytes: int = LIGHT_KEEP_BYTES) -> ModelProto:
    """Copy everything but the large weights, which become typed graph inputs of the copy.

    Shape inference, the checker and the version converter work on it as on the original, whatever the size of the
    weights. ``restore_weights`` undoes it.
    """
    light = ModelProto()
    _copy_fields(model, light, skip="graph")
    _copy_fields(model.graph, light.graph, skip="initializer")
    source, target = model.graph, light.graph
    target.SetInParent()
    listed = {item.name for item in source.input}
    for tensor in source.initializer:
        if tensor_nbytes(tensor) <= keep_bytes:
            target.initializer.add().CopyFrom(tensor)
        elif tensor.name not in listed:
            target.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims)))
    return light


def restore_weights(light: ModelProto, model: ModelProto) -> ModelProto:
    """Put the weights of ``model`` back into a (processed) light copy of it; edits ``light`` and returns it."""
    listed = {item.name for item in model.graph.input}
    present = {tensor.name for tensor in light.graph.initializer}
    heavy = {t.name: t for t in model.graph.initializer if t.name not in present}
    kept = [item for item in light.graph.input if item.name not in heavy or item.name in listed]
    del light.graph.input[:]
    light.graph.input.extend(kept)
    used = {name for node in light.graph.node for name in node_inputs(node)}
    used |= {item.name for item in light.graph.output}
    for name, tensor in heavy.items():
        if name in used:
            light.graph.initializer.add().CopyFrom(tensor)
    return light


def one_line(error: BaseException, *, limit: int = 300) -> str:
    """The message of a library error on one line, shortened."""
    text = " ".join(str(error).split())
    return text if len(text) <= limit else text[: limit - 3] + "..."
