"""Shape inference on a light copy of the model, symbolic or for given input shapes."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import onnx
from onnx import ModelProto, TypeProto, ValueInfoProto

from edgeds.errors import ModelError, SpecError
from edgeds.graph.proto import clone_model, dims_of, light_copy, one_line, set_dims, subgraphs
from edgeds.specs import Dim

DEFAULT_IMAGE_PX = 640
DEFAULT_SEQUENCE = 128
_IMAGE_NAMES = ("height", "width", "h", "w", "imgsz", "size")
_BATCH_NAMES = ("batch", "n", "b", "batch_size", "bs")


@dataclass(frozen=True, kw_only=True)
class AssumedShapes:
    """Concrete input shapes and, in words, what was assumed for dims that are not numbers."""

    shapes: dict[str, tuple[int, ...]]
    notes: tuple[str, ...]


def infer_shapes(model: ModelProto, input_shapes: Mapping[str, Sequence[int]] | None = None) -> ModelProto:
    """Return a copy with a type and shape for every tensor that inference reaches; dims are numbers, names or unknown.

    With ``input_shapes`` the named inputs get these shapes, a symbolic dim that becomes a number does so on every
    input, and shapes stored for intermediate tensors are computed anew. Raises SpecError for an unknown input, a
    wrong rank or a conflicting size, ModelError when the graph contradicts the shapes.
    """
    result = clone_model(model)
    if input_shapes:
        _set_input_shapes(result, input_shapes)
        del result.graph.value_info[:]
        for item in result.graph.output:
            if item.type.WhichOneof("value") == "tensor_type":
                item.type.tensor_type.ClearField("shape")
    inferred = _infer(light_copy(result))
    del result.graph.value_info[:]
    result.graph.value_info.extend(inferred.graph.value_info)
    for index, node in enumerate(inferred.graph.node):
        if subgraphs(node):
            result.graph.node[index].CopyFrom(node)  # with the shapes inside its bodies
    known = {item.name: item for item in inferred.graph.output}
    for index, item in enumerate(result.graph.output):
        found = known.get(item.name)
        dims = dims_of(found.type) if found is not None else None
        if dims is None and input_shapes:
            item.CopyFrom(model.graph.output[index])
        elif found is not None:
            item.CopyFrom(found)
    return result


def infer_types(model: ModelProto) -> dict[str, TypeProto]:
    """Types of all main-graph tensors that inference can reach, by name, without copying the weights."""
    inferred = _infer(light_copy(model)).graph
    return {item.name: item.type for item in (*inferred.value_info, *inferred.input, *inferred.output)}


def fill_output_shapes(model: ModelProto) -> None:
    """Give graph outputs that say no shape the inferred one, in place; the ONNX checker insists on a shape."""
    bare = [item for item in model.graph.output if _lacks_shape(item)]
    if bare:
        types = infer_types(model)
        for item in bare:
            dims = dims_of(types[item.name]) if item.name in types else None
            if dims is not None:
                set_dims(item, dims)


def _lacks_shape(item: ValueInfoProto) -> bool:
    return item.type.WhichOneof("value") == "tensor_type" and not item.type.tensor_type.HasField("shape")


def _infer(light: ModelProto) -> ModelProto:
    try:
        return onnx.shape_inference.infer_shapes(light, check_type=False, strict_mode=False, data_prop=True)
    except (onnx.shape_inference.InferenceError, RuntimeError, ValueError) as error:
        raise ModelError(f"shape inference failed: {one_line(error)}") from error


def _set_input_shapes(model: ModelProto, input_shapes: Mapping[str, Sequence[int]]) -> None:
    stored = {tensor.name for tensor in model.graph.initializer}
    inputs = {item.name: item for item in model.graph.input if item.name not in stored}
    symbols: dict[str, int] = {}
    for name, shape in input_shapes.items():
        if name not in inputs:
            raise SpecError(f"input {name!r}: the model has no such input; it has {', '.join(inputs) or 'none'}")
        dims = dims_of(inputs[name].type)
        if dims is not None and len(dims) != len(shape):
            raise SpecError(f"input {name!r}: shape {_text(shape)} has {len(shape)} dims, the model wants {len(dims)}")
        for axis, size in enumerate(shape):
            if isinstance(size, bool) or int(size) != size or not 0 <= size < 2**31:
                raise SpecError(f"input {name!r}: dim {axis} is {size!r}; need a whole number from 0 to 2**31 - 1")
            want = dims[axis] if dims is not None else None
            if isinstance(want, int) and want != size:
                raise SpecError(f"input {name!r}: dim {axis} is {size}, but the model fixes it to {want}")
            if isinstance(want, str) and symbols.setdefault(want, int(size)) != size:
                raise SpecError(f"input {name!r}: dim {want!r} is {size} here and {symbols[want]} elsewhere")
        set_dims(inputs[name], tuple(int(size) for size in shape))
    for item in inputs.values():
        dims = dims_of(item.type)
        if dims is not None and any(isinstance(dim, str) and dim in symbols for dim in dims):
            set_dims(item, tuple(symbols.get(dim, dim) if isinstance(dim, str) else dim for dim in dims))


def _text(shape: Sequence[int]) -> str:
    return "x".join(str(size) for size in shape)


def assume_input_shapes(model: ModelProto, given: Mapping[str, Sequence[int]] | None = None) -> AssumedShapes:
    """Concrete shapes for all inputs: the given ones, fixed dims, and documented defaults for the rest.

    Defaults: batch 1; height and width of image-like (rank 4) inputs from the metadata key ``imgsz``, else 640;
    any other dim 128 (a sequence length). Equal names get equal sizes.
    """
    from edgeds.graph.io import input_specs

    given = dict(given or {})
    copy = ModelProto()
    copy.graph.input.extend(model.graph.input)
    copy.graph.initializer.extend(t for t in model.graph.initializer if any(t.name == i.name for i in copy.graph.input))
    _set_input_shapes(copy, given)
    height, width = _metadata_size(model)
    symbols: dict[str, int] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    notes: list[str] = []
    for spec in input_specs(copy):
        sizes: list[int] = []
        for axis, dim in enumerate(spec.shape):
            if isinstance(dim, int):
                sizes.append(dim)
                continue
            size = _default_dim(dim, axis=axis, rank=len(spec.shape), image=(height, width))
            if dim:
                size = symbols.setdefault(dim, size)
            sizes.append(size)
            notes.append(f"{spec.name}: dim {axis} ({dim or 'unknown'}) taken as {size}")
        shapes[spec.name] = tuple(sizes)
    return AssumedShapes(shapes=shapes, notes=tuple(notes))


def _default_dim(dim: Dim, *, axis: int, rank: int, image: tuple[int, int]) -> int:
    name = str(dim or "").lower()
    if axis == 0 or name in _BATCH_NAMES:
        return 1
    if rank == 4 and axis >= 2:
        return image[axis - 2]
    if rank == 4 and axis == 1:
        return 3
    if name in _IMAGE_NAMES:
        return image[0]
    return DEFAULT_SEQUENCE


def _metadata_size(model: ModelProto) -> tuple[int, int]:
    text = next((entry.value for entry in model.metadata_props if entry.key == "imgsz"), "")
    try:
        value = ast.literal_eval(text) if 0 < len(text) < 100 else None
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        value = None
    sizes = [value, value] if isinstance(value, int) else value
    if (
        isinstance(sizes, list | tuple)
        and len(sizes) == 2
        and all(isinstance(size, int) and 1 <= size <= 65536 for size in sizes)
    ):
        return int(sizes[0]), int(sizes[1])
    return DEFAULT_IMAGE_PX, DEFAULT_IMAGE_PX
