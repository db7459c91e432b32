"""Checks on a parsed model: the ONNX checker on a light copy, stored sizes, and what is not supported at all."""

from __future__ import annotations

import onnx
from onnx import ModelProto, TensorProto

from edgeds.errors import ModelError
from edgeds.graph.proto import (
    count_elements,
    each_graph,
    each_tensor,
    element_bits,
    light_copy,
    np_dtype,
    one_line,
    set_dims,
    tensor_nbytes,
)
from edgeds.graph.shapes import fill_output_shapes


def check_model(model: ModelProto, *, full: bool, where: str) -> None:
    """Run the ONNX checker on a light copy; failures are a ModelError of one line.

    ``full`` adds strict shape inference, where stored intermediate shapes that contradict each other are dropped and
    the check repeated: they are hints, and some exporters write wrong ones.
    """
    light = light_copy(model)
    fill_output_shapes(light)
    for item in light.graph.output:
        # Of unknown rank even after inference: onnxruntime takes that, the checker wants some shape.
        if item.type.WhichOneof("value") == "tensor_type" and not item.type.tensor_type.HasField("shape"):
            set_dims(item, (None,))
    errors = (onnx.checker.ValidationError, onnx.shape_inference.InferenceError, UnicodeDecodeError)
    try:
        onnx.checker.check_model(light, full_check=full)
    except errors as error:
        if full and light.graph.value_info:
            del light.graph.value_info[:]
            try:
                onnx.checker.check_model(light, full_check=True)
            except errors as second:
                raise ModelError(f"{where}: not a valid ONNX model: {one_line(second)}") from second
            del model.graph.value_info[:]
        else:
            raise ModelError(f"{where}: not a valid ONNX model: {one_line(error)}") from error


def check_text(model: ModelProto, *, where: str) -> None:
    """Names must be UTF-8: protobuf hands out the bytes unchecked and every later use would fail on its own."""
    try:
        _ = (model.producer_name, model.producer_version, model.domain, model.doc_string, model.graph.doc_string)
        for graph in each_graph(model.graph):
            _ = graph.name
            for item in (*graph.input, *graph.output, *graph.value_info):
                str(item)
            for tensor in graph.initializer:
                _ = (tensor.name, [(entry.key, entry.value) for entry in tensor.external_data])
            for node in graph.node:
                _ = (node.name, node.op_type, node.domain, list(node.input), list(node.output))
                _ = [attribute.name for attribute in node.attribute]
        _ = [(entry.key, entry.value) for entry in model.metadata_props]
        _ = [entry.domain for entry in model.opset_import]
    except UnicodeDecodeError as error:
        raise ModelError(f"{where}: a name in the model is not UTF-8 text; the file is damaged") from error


def check_inputs(model: ModelProto, *, where: str) -> None:
    """Inputs that are tensors must say their element type."""
    for item in model.graph.input:
        if item.type.WhichOneof("value") in (None, "tensor_type") and np_dtype(item.type.tensor_type.elem_type) is None:
            raise ModelError(f"{where}: input {item.name!r} has no usable element type; export the model again")


def refuse_sparse(model: ModelProto, *, where: str) -> None:
    """Raise ModelError for sparse initializers, by name."""
    for graph in each_graph(model.graph):
        for sparse in graph.sparse_initializer:
            raise ModelError(
                f"{where}: tensor {sparse.values.name!r} is a sparse initializer, which TensorRT does not read; "
                "export it dense"
            )


def check_sizes(model: ModelProto, *, where: str) -> None:
    """The values stored must fill the dims; the C++ checker sees this only for what a light copy keeps."""
    for name, tensor in each_tensor(model.graph):
        if any(dim < 0 for dim in tensor.dims):
            raise ModelError(f"{where}: tensor {name!r} has a negative dimension: {list(tensor.dims)}")
        if element_bits(tensor.data_type) is None:
            if tensor.data_type != TensorProto.STRING:
                raise ModelError(f"{where}: tensor {name!r} has an unknown element type ({tensor.data_type})")
            continue
        if tensor.HasField("raw_data"):
            got, want = len(tensor.raw_data), tensor_nbytes(tensor)
        else:
            typed = ("float_data", "int32_data", "int64_data", "double_data", "uint64_data")
            got = sum(len(getattr(tensor, field)) for field in typed)
            want = count_elements(tensor.dims)
            if tensor.data_type in (TensorProto.COMPLEX64, TensorProto.COMPLEX128):
                want *= 2
            elif element_bits(tensor.data_type) in (2, 4):
                want = got  # packed several to an int32; left to the checker
        if got != want:
            raise ModelError(
                f"{where}: tensor {name!r} of shape {list(tensor.dims)} needs {want} bytes or values but holds {got}; "
                "the model is damaged"
            )
