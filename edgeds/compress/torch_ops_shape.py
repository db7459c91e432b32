"""ONNX operators that move, cut and shape tensors, as torch functions."""

from __future__ import annotations

from typing import Any

from edgeds.compress.torch_lib import import_torch
from edgeds.compress.torch_ops import Op, OpContext, Values, ints


def _constant(_: Values, context: OpContext) -> Any:
    torch = import_torch()
    from onnx import numpy_helper

    if "value" in context.attributes:
        return torch.from_numpy(numpy_helper.to_array(context.attributes["value"]).copy())
    for name, dtype in (("value_int", torch.int64), ("value_ints", torch.int64)):
        if name in context.attributes:
            return torch.tensor(context.attributes[name], dtype=dtype)
    for name in ("value_float", "value_floats"):
        if name in context.attributes:
            return torch.tensor(context.attributes[name], dtype=torch.float32)
    raise context.refuse("constants of text or sparse values")


def _constant_of_shape(values: Values, context: OpContext) -> Any:
    torch = import_torch()
    from onnx import numpy_helper

    shape = ints(values[0])
    if "value" not in context.attributes:
        return torch.zeros(shape)
    fill = torch.from_numpy(numpy_helper.to_array(context.attributes["value"]).copy())
    return fill.reshape(()).expand(shape).clone()


def _shape(values: Values, context: OpContext) -> Any:
    torch = import_torch()
    shape = list(values[0].shape)
    return torch.tensor(shape[context.get("start", 0) : context.get("end")], dtype=torch.int64)


def _size(values: Values, _: OpContext) -> Any:
    return import_torch().tensor(values[0].numel())


def _reshape(values: Values, context: OpContext) -> Any:
    value, shape = values[0], ints(values[1])
    if not context.get("allowzero", 0):
        shape = [value.shape[index] if size == 0 else size for index, size in enumerate(shape)]
    return value.reshape(shape)


def _flatten(values: Values, context: OpContext) -> Any:
    value = values[0]
    axis = context.get("axis", 1)
    axis = axis + value.ndim if axis < 0 else axis
    rows = 1
    for size in value.shape[:axis]:
        rows *= size
    return value.reshape(rows, -1)


def _transpose(values: Values, context: OpContext) -> Any:
    order = context.get("perm") or list(reversed(range(values[0].ndim)))
    return values[0].permute(order)


def _axes(values: Values, context: OpContext) -> list[int] | None:
    if "axes" in context.attributes:
        return list(context.attributes["axes"])
    return ints(values[1]) if len(values) > 1 and values[1] is not None else None


def _squeeze(values: Values, context: OpContext) -> Any:
    value, axes = values[0], _axes(values, context)
    if axes is None:
        return value.squeeze()
    for axis in sorted((axis % value.ndim for axis in axes), reverse=True):
        value = value.squeeze(axis)
    return value


def _unsqueeze(values: Values, context: OpContext) -> Any:
    value, axes = values[0], _axes(values, context) or []
    rank = value.ndim + len(axes)
    for axis in sorted(axis % rank for axis in axes):
        value = value.unsqueeze(axis)
    return value


def _concat(values: Values, context: OpContext) -> Any:
    return import_torch().cat(list(values), dim=context.get("axis"))


def _split(values: Values, context: OpContext) -> Any:
    value = values[0]
    axis = context.get("axis", 0)
    sizes = context.get("split")
    if sizes is None and len(values) > 1 and values[1] is not None:
        sizes = ints(values[1])
    if sizes is None:
        count = context.get("num_outputs", context.outputs)
        whole = -(-value.shape[axis] // count)
        sizes = [whole] * (count - 1)
        sizes.append(value.shape[axis] - sum(sizes))
    return tuple(value.split(list(sizes), dim=axis))


def _slice(values: Values, context: OpContext) -> Any:
    value = values[0]
    if "starts" in context.attributes:
        starts, ends = list(context.get("starts")), list(context.get("ends"))
        axes, steps = context.get("axes"), None
    else:
        starts, ends = ints(values[1]), ints(values[2])
        axes = ints(values[3]) if len(values) > 3 and values[3] is not None else None
        steps = ints(values[4]) if len(values) > 4 and values[4] is not None else None
    axes = list(axes) if axes is not None else list(range(len(starts)))
    for start, end, axis, step in zip(starts, ends, axes, steps or [1] * len(starts), strict=True):
        size = value.shape[axis]
        # Python's own rules for out-of-range and negative bounds are those of ONNX.
        indices = range(*slice(start, None if step < 0 and end < -size else end, step).indices(size))
        if step == 1:
            value = value.narrow(axis, indices.start, len(indices))
        else:
            torch = import_torch()
            chosen = torch.tensor(list(indices), dtype=torch.int64, device=value.device)
            value = value.index_select(axis, chosen)
    return value


def _gather(values: Values, context: OpContext) -> Any:
    value, index = values
    axis = context.get("axis", 0) % value.ndim
    index = index.to(value.device).long()
    index = index.where(index >= 0, index + value.shape[axis])
    taken = value.index_select(axis, index.reshape(-1))
    return taken.reshape([*value.shape[:axis], *index.shape, *value.shape[axis + 1 :]])


def _gather_elements(values: Values, context: OpContext) -> Any:
    value, index = values
    axis = context.get("axis", 0)
    index = index.to(value.device).long()
    return value.gather(axis, index.where(index >= 0, index + value.shape[axis]))


def _expand(values: Values, _: OpContext) -> Any:
    torch = import_torch()
    shape = torch.broadcast_shapes(tuple(values[0].shape), tuple(ints(values[1])))
    return values[0].expand(shape)


def _tile(values: Values, _: OpContext) -> Any:
    return values[0].repeat(ints(values[1]))


def _range(values: Values, _: OpContext) -> Any:
    torch = import_torch()
    start, end, step = (value.item() for value in values)
    return torch.arange(start, end, step, dtype=values[0].dtype)


def _pad(values: Values, context: OpContext) -> Any:
    torch = import_torch()
    value = values[0]
    pads = list(context.get("pads") or ints(values[1]))
    axes = ints(values[3]) if len(values) > 3 and values[3] is not None else list(range(value.ndim))
    mode = context.get("mode", b"constant")
    mode = mode.decode() if isinstance(mode, bytes) else mode
    fill = values[2] if len(values) > 2 and values[2] is not None else None
    amounts = [0] * (2 * value.ndim)
    for place, axis in enumerate(axes):
        back = value.ndim - 1 - axis % value.ndim
        amounts[2 * back], amounts[2 * back + 1] = pads[place], pads[place + len(axes)]
    if mode == "constant":
        return torch.nn.functional.pad(value, amounts, value=0.0 if fill is None else fill.item())
    names = {"reflect": "reflect", "edge": "replicate"}
    if mode not in names or any(amounts[2 * (value.ndim - 2) :]):
        raise context.refuse(f"padding of mode {mode} here")
    return torch.nn.functional.pad(value, amounts[: 2 * (value.ndim - 2)], mode=names[mode])


def _depth_to_space(values: Values, context: OpContext) -> Any:
    n, c, h, w = values[0].shape
    block = context.get("blocksize")
    mode = context.get("mode", b"DCR")
    if (mode.decode() if isinstance(mode, bytes) else mode) == "DCR":
        moved = values[0].reshape(n, block, block, c // block**2, h, w).permute(0, 3, 4, 1, 5, 2)
    else:
        moved = values[0].reshape(n, c // block**2, block, block, h, w).permute(0, 1, 4, 2, 5, 3)
    return moved.reshape(n, c // block**2, h * block, w * block)


def _space_to_depth(values: Values, context: OpContext) -> Any:
    n, c, h, w = values[0].shape
    block = context.get("blocksize")
    moved = values[0].reshape(n, c, h // block, block, w // block, block).permute(0, 3, 5, 1, 2, 4)
    return moved.reshape(n, c * block**2, h // block, w // block)


def _trilu(values: Values, context: OpContext) -> Any:
    torch = import_torch()
    offset = int(values[1].item()) if len(values) > 1 and values[1] is not None else 0
    return (torch.triu if context.get("upper", 1) else torch.tril)(values[0], diagonal=offset)


def _cumsum(values: Values, context: OpContext) -> Any:
    if context.get("exclusive", 0) or context.get("reverse", 0):
        raise context.refuse("exclusive or reverse sums")
    return values[0].cumsum(dim=int(values[1].item()))


def _einsum(values: Values, context: OpContext) -> Any:
    equation = context.get("equation")
    return import_torch().einsum(equation.decode() if isinstance(equation, bytes) else equation, *values)


def _top_k(values: Values, context: OpContext) -> Any:
    found = values[0].topk(
        int(values[1].item()), dim=context.get("axis", -1), largest=bool(context.get("largest", 1)), sorted=True
    )
    return found.values, found.indices


def build_table() -> dict[str, Op]:
    """Operator name -> function."""
    return {
        "Constant": _constant,
        "ConstantOfShape": _constant_of_shape,
        "Shape": _shape,
        "Size": _size,
        "Reshape": _reshape,
        "Flatten": _flatten,
        "Transpose": _transpose,
        "Squeeze": _squeeze,
        "Unsqueeze": _unsqueeze,
        "Concat": _concat,
        "Split": _split,
        "Slice": _slice,
        "Gather": _gather,
        "GatherElements": _gather_elements,
        "Expand": _expand,
        "Tile": _tile,
        "Range": _range,
        "Pad": _pad,
        "DepthToSpace": _depth_to_space,
        "SpaceToDepth": _space_to_depth,
        "Trilu": _trilu,
        "CumSum": _cumsum,
        "Einsum": _einsum,
        "TopK": _top_k,
    }
