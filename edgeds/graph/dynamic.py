"""Make batch, and where the graph allows it height and width, of a static detector export dynamic."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto

from edgeds.errors import ModelError
from edgeds.graph.feeds import is_close, random_feeds
from edgeds.graph.fold import fold_constants
from edgeds.graph.io import input_specs
from edgeds.graph.proto import attributes, clone_model, is_standard, one_line, set_dims
from edgeds.graph.session import open_session, runtime_errors
from edgeds.graph.view import GraphView
from edgeds.specs import Dim

_AXIS_NAMES = ("batch", "", "height", "width")
_REEXPORT = "export the model again with dynamic=True"

Feeds = dict[str, NDArray[np.generic]]


def make_dynamic(model: ModelProto, *, batch: bool = True, spatial: bool = True) -> ModelProto:
    """Return a model whose batch (all inputs) and height and width (image inputs, rank 4) are symbolic.

    Verified by running it: equal to the original at its own shape, a double batch equal to two single runs, and one
    other resolution. Constants are folded on the way. Raises ModelError when the batch or the resolution is baked into
    the graph (anchors stored for one image size), naming the tensor; then only a new export helps.
    """
    original = {spec.name: spec.shape for spec in input_specs(model)}
    wanted = {name: _dynamic_dims(shape, batch=batch, spatial=spatial) for name, shape in original.items()}
    if wanted == original:
        return clone_model(model)
    view = GraphView(fold_constants(model))
    grows = spatial and any(wanted[n][2:] != original[n][2:] for n in wanted if len(wanted[n]) == 4)
    if grows:
        _refuse_baked_size(view, original)
    rewrite_batch = batch and any(wanted[n][:1] != original[n][:1] for n in wanted)
    for node in view.nodes:
        if is_standard(node) and node.op_type == "Reshape":
            _relax_reshape(view, node, batch=rewrite_batch, spatial=grows)
        elif is_standard(node) and node.op_type == "Resize":
            _relax_resize(view, node)
    result = view.finish()
    for item in result.graph.input:
        if item.name in wanted:
            set_dims(item, wanted[item.name])
    del result.graph.value_info[:]
    for item in result.graph.output:
        item.type.tensor_type.ClearField("shape")
    _verify(model, result, original=original, batch=rewrite_batch, spatial=grows)
    return result


def _dynamic_dims(shape: tuple[Dim, ...], *, batch: bool, spatial: bool) -> tuple[Dim, ...]:
    dims = list(shape)
    for axis, dim in enumerate(shape):
        if isinstance(dim, int) and ((axis == 0 and batch) or (len(shape) == 4 and axis >= 2 and spatial)):
            dims[axis] = _AXIS_NAMES[axis]
    return tuple(dims)


def _refuse_baked_size(view: GraphView, inputs: dict[str, tuple[Dim, ...]]) -> None:
    """Stored tensors with as many entries as the model has predictions, or scalars equal to the image size."""
    counts = {
        dim for name in view.outputs for dim in (view.shape(name) or ())[1:] if isinstance(dim, int) and dim > 256
    }
    sides = {dim for shape in inputs.values() if len(shape) == 4 for dim in shape[2:] if isinstance(dim, int)}
    for tensor in view.model.graph.initializer:
        users = [node for node in view.consumers(tensor.name) if node.op_type in ("Add", "Sub", "Mul", "Div", "Concat")]
        if not users:
            continue
        where = f"tensor {tensor.name!r} {list(tensor.dims)}, read by {users[0].op_type} {users[0].name!r}"
        if counts.intersection(tensor.dims):
            raise ModelError(
                f"height and width cannot be made dynamic: anchors for one image size are stored in {where}; "
                f"{_REEXPORT}, or make only the batch dynamic (spatial=False)"
            )
        if math.prod(tensor.dims) <= 4 and users[0].op_type in ("Mul", "Div"):
            value = view.constant(tensor.name)
            if value is not None and value.dtype.kind == "f" and {float(s) for s in sides}.intersection(value.flat):
                raise ModelError(
                    f"height and width cannot be made dynamic: the image size {sorted(sides)} is a stored factor in "
                    f"{where}; {_REEXPORT}, or make only the batch dynamic (spatial=False)"
                )


def _relax_reshape(view: GraphView, node: NodeProto, *, batch: bool, spatial: bool) -> None:
    """Leading batch size -> 0 (copy the input's); a flattened H x W at the end -> -1."""
    if len(node.input) < 2 or attributes(node).get("allowzero", 0):
        return
    target, source = view.constant(node.input[1]), view.shape(node.input[0])
    if target is None or source is None or target.ndim != 1 or target.size == 0 or not source:
        return
    if view.is_constant(node.input[0]):
        return
    new = target.copy()
    if batch and isinstance(source[0], int) and new[0] == source[0]:
        new[0] = 0
    if spatial and -1 not in new:
        tail = [dim for dim in source[2:] if isinstance(dim, int)]
        sizes = {math.prod(tail)} | ({tail[-1]} if tail else set())
        hits = [axis for axis in range(1, new.size) if len(source) >= 3 and int(new[axis]) in sizes and new[axis] > 1]
        if hits:
            new[hits[-1]] = -1
    if not np.array_equal(new, target):
        view.set_input(node, 1, view.add_constant(f"{node.input[1]}_dyn", new.astype(np.int64)))


def _relax_resize(view: GraphView, node: NodeProto) -> None:
    """Fixed output sizes -> the same factor as scales, where the factor is exact."""
    sizes = view.constant(node.input[3]) if len(node.input) > 3 and node.input[3] else None
    source = view.shape(node.input[0])
    if sizes is None or source is None or not all(isinstance(dim, int) and dim > 0 for dim in source):
        return
    dims = [int(dim or 0) for dim in source]
    if len(dims) != sizes.size:
        return
    scales = np.asarray([int(size) / dim for size, dim in zip(sizes, dims, strict=True)], np.float32)
    if any(math.floor(dim * float(s)) != int(size) for dim, s, size in zip(dims, scales, sizes, strict=True)):
        return
    view.set_input(node, 2, view.add_constant(f"{node.name}_scales", scales))
    del node.input[3:]


def _verify(
    before: ModelProto, after: ModelProto, *, original: dict[str, tuple[Dim, ...]], batch: bool, spatial: bool
) -> None:
    shapes = {
        name: tuple(dim if isinstance(dim, int) else _stand_in(axis, len(shape)) for axis, dim in enumerate(shape))
        for name, shape in original.items()
    }
    one, two = random_feeds(before, shapes, seed=1), random_feeds(before, shapes, seed=2)
    old, new = open_session(before), open_session(after)
    first, second = _run(old, one, what="the original model"), _run(old, two, what="the original model")
    names = [item.name for item in before.graph.output]
    _expect(names, first, _run(new, one, what="at the original shape"), what="at the original shape")
    if batch:
        stacked = {name: np.concatenate([one[name], two[name]]) for name in one}
        got = _run(new, stacked, what="the batch is baked into the graph; with a double batch")
        _expect(
            names, [np.concatenate(pair) for pair in zip(first, second, strict=True)], got, what="at a double batch"
        )
    if spatial:
        sizes = {name: _other_size(shape) for name, shape in shapes.items()}
        got = _run(new, random_feeds(before, sizes), what="the image size is baked into the graph; at another size")
        for name, small, large in zip(names, got, first, strict=True):
            if not np.all(np.isfinite(small)) and np.all(np.isfinite(large)):
                raise ModelError(f"make_dynamic: output {name!r} is not finite at another image size; {_REEXPORT}")
    _set_output_dims(after, first, batch=batch, spatial=spatial, other=got if spatial else first)


def _stand_in(axis: int, rank: int) -> int:
    return 1 if axis == 0 else 64 if rank == 4 and axis >= 2 else 3 if rank == 4 else 16


def _other_size(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Another resolution that strides of up to 64 divide wherever they divide the original one."""
    if len(shape) != 4:
        return shape
    height, width = shape[2:]
    step_h, step_w = math.gcd(height, 64), math.gcd(width, 64)
    return (*shape[:2], height + step_h, max(step_w, width - step_w))


def _run(session: object, feeds: Feeds, *, what: str) -> list[NDArray[np.generic]]:
    try:
        return list(session.run(None, feeds))  # type: ignore[attr-defined]
    except runtime_errors() as error:
        raise ModelError(f"make_dynamic: {what} it fails: {one_line(error)}; {_REEXPORT}") from error


def _expect(names: list[str], want: list[NDArray[np.generic]], have: list[NDArray[np.generic]], *, what: str) -> None:
    for name, left, right in zip(names, want, have, strict=True):
        if not is_close(left, right):
            raise ModelError(f"make_dynamic: output {name!r} differs {what}; the graph fixes its shape, {_REEXPORT}")


def _set_output_dims(
    model: ModelProto,
    first: list[NDArray[np.generic]],
    *,
    batch: bool,
    spatial: bool,
    other: list[NDArray[np.generic]],
) -> None:
    """Output dims: the batch by name, what changed with the image size unknown, the rest as measured."""
    for item, small, large in zip(model.graph.output, first, other, strict=True):
        dims: list[Dim] = list(small.shape)
        if spatial and len(small.shape) == len(large.shape):
            dims = [
                a if a == b else f"{item.name}_dim{i}"
                for i, (a, b) in enumerate(zip(small.shape, large.shape, strict=True))
            ]
        if batch and dims:
            dims[0] = "batch"
        set_dims(item, tuple(dims))
