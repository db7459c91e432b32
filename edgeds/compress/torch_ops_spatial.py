"""Convolutions, pooling and resizing of ONNX as torch functions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from edgeds.compress.torch_lib import import_torch
from edgeds.compress.torch_ops import Op, OpContext, Values, ints


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _window(value: Any, kernel: Sequence[int], context: OpContext) -> tuple[list[int], list[int], list[int], list[int]]:
    """(strides, dilations, pads at the start, pads at the end) with ``auto_pad`` resolved for this input."""
    rank = len(kernel)
    strides = list(context.get("strides") or [1] * rank)
    dilations = list(context.get("dilations") or [1] * rank)
    pads = list(context.get("pads") or [0] * (2 * rank))
    auto = _text(context.get("auto_pad", b"NOTSET"))
    if auto == "VALID":
        pads = [0] * (2 * rank)
    elif auto in ("SAME_UPPER", "SAME_LOWER"):
        for axis in range(rank):
            size = value.shape[2 + axis]
            reach = (kernel[axis] - 1) * dilations[axis] + 1
            total = max(0, (math.ceil(size / strides[axis]) - 1) * strides[axis] + reach - size)
            small, large = total // 2, total - total // 2
            pads[axis], pads[rank + axis] = (small, large) if auto == "SAME_UPPER" else (large, small)
    return strides, dilations, pads[:rank], pads[rank:]


def _padded(value: Any, begin: Sequence[int], end: Sequence[int], fill: float = 0.0) -> Any:
    amounts = [amount for pair in reversed(list(zip(begin, end, strict=True))) for amount in pair]
    return import_torch().nn.functional.pad(value, amounts, value=fill)


def _conv(values: Values, context: OpContext) -> Any:
    functional = import_torch().nn.functional
    value, weight = values[0], values[1]
    bias = values[2] if len(values) > 2 else None
    rank = weight.ndim - 2
    if rank not in (1, 2, 3):
        raise context.refuse(f"convolutions over {rank} dimensions")
    strides, dilations, begin, end = _window(value, weight.shape[2:], context)
    if begin != end:
        value, begin = _padded(value, begin, end), [0] * rank
    function = (functional.conv1d, functional.conv2d, functional.conv3d)[rank - 1]
    return function(value, weight, bias, strides, begin, dilations, context.get("group", 1))


def _conv_transpose(values: Values, context: OpContext) -> Any:
    functional = import_torch().nn.functional
    value, weight = values[0], values[1]
    bias = values[2] if len(values) > 2 else None
    rank = weight.ndim - 2
    if rank not in (1, 2, 3) or context.get("output_shape") or _text(context.get("auto_pad", b"NOTSET")) != "NOTSET":
        raise context.refuse("transposed convolutions with output_shape or auto_pad")
    strides, dilations, begin, end = _window(value, weight.shape[2:], context)
    extra = list(context.get("output_padding") or [0] * rank)
    function = (functional.conv_transpose1d, functional.conv_transpose2d, functional.conv_transpose3d)[rank - 1]
    # Run without padding and cut: that also serves unequal padding and output_padding beyond torch's limits.
    result = function(value, weight, bias, strides, [0] * rank, 0, context.get("group", 1), dilations)
    result = _padded(result, [0] * rank, extra) if any(extra) else result
    if any(extra) and bias is not None:
        raise context.refuse("output_padding together with a bias")
    for axis in range(rank):
        length = result.shape[2 + axis] - begin[axis] - end[axis]
        result = result.narrow(2 + axis, begin[axis], length)
    return result


def _max_pool(values: Values, context: OpContext) -> Any:
    functional = import_torch().nn.functional
    value, kernel = values[0], list(context.get("kernel_shape"))
    if context.outputs > 1 or len(kernel) not in (1, 2, 3):
        raise context.refuse("indices of MaxPool")
    strides, dilations, begin, end = _window(value, kernel, context)
    if begin != end or any(2 * pad > size for pad, size in zip(begin, kernel, strict=True)):
        value, begin = _padded(value, begin, end, -math.inf), [0] * len(kernel)
    function = (functional.max_pool1d, functional.max_pool2d, functional.max_pool3d)[len(kernel) - 1]
    return function(value, kernel, strides, begin, dilations, ceil_mode=bool(context.get("ceil_mode", 0)))


def _average_pool(values: Values, context: OpContext) -> Any:
    torch = import_torch()
    value, kernel = values[0], list(context.get("kernel_shape"))
    strides, dilations, begin, end = _window(value, kernel, context)
    if len(kernel) != 2 or any(step != 1 for step in dilations) or context.get("ceil_mode", 0):
        raise context.refuse("AveragePool other than two-dimensional without dilation and ceil_mode")
    pool = torch.nn.functional.avg_pool2d
    result = pool(_padded(value, begin, end), kernel, strides)
    if context.get("count_include_pad", 0) or not any([*begin, *end]):
        return result
    # Divide by how much of each window lies inside the image.
    ones = torch.ones((1, 1, *value.shape[2:]), dtype=value.dtype, device=value.device)
    return result / pool(_padded(ones, begin, end), kernel, strides)


def _global_average(values: Values, _: OpContext) -> Any:
    return values[0].mean(dim=tuple(range(2, values[0].ndim)), keepdim=True)


def _global_max(values: Values, _: OpContext) -> Any:
    return values[0].amax(dim=tuple(range(2, values[0].ndim)), keepdim=True)


def _resize(values: Values, context: OpContext) -> Any:
    value = values[0]
    scales = values[2] if len(values) > 2 and values[2] is not None and values[2].numel() else None
    sizes = ints(values[3]) if len(values) > 3 and values[3] is not None and values[3].numel() else None
    if context.get("axes") is not None or _text(context.get("keep_aspect_ratio_policy", b"stretch")) != "stretch":
        raise context.refuse("Resize over chosen axes")
    if sizes is None:
        if scales is None:
            raise context.refuse("Resize without scales and sizes")
        factors = [float(item) for item in scales.reshape(-1).tolist()]
        sizes = [math.floor(size * factor) for size, factor in zip(value.shape, factors, strict=True)]
    else:
        factors = [out / size for out, size in zip(sizes, value.shape, strict=True)]
    mode = _text(context.get("mode", b"nearest"))
    where = _text(context.get("coordinate_transformation_mode", b"half_pixel"))
    if mode == "nearest":
        for axis in range(value.ndim):
            if sizes[axis] != value.shape[axis] or factors[axis] != 1.0:
                value = _nearest(value, axis, sizes[axis], factor=factors[axis], where=where, context=context)
        return value
    if mode != "linear" or sizes[:2] != list(value.shape[:2]) or value.ndim not in (3, 4):
        raise context.refuse(f"Resize of mode {mode} here")
    if where not in ("half_pixel", "pytorch_half_pixel", "align_corners"):
        raise context.refuse(f"linear Resize with coordinates {where}")
    kind = "bilinear" if value.ndim == 4 else "linear"
    functional = import_torch().nn.functional
    return functional.interpolate(value, size=sizes[2:], mode=kind, align_corners=where == "align_corners")


def _nearest(value: Any, axis: int, size: int, *, factor: float, where: str, context: OpContext) -> Any:
    torch = import_torch()
    length = value.shape[axis]
    rounding = _text(context.get("nearest_mode", b"round_prefer_floor"))
    chosen = []
    for place in range(size):
        if where == "asymmetric":
            source = place / factor
        elif where in ("half_pixel", "half_pixel_symmetric"):
            source = (place + 0.5) / factor - 0.5
        elif where == "pytorch_half_pixel":
            source = (place + 0.5) / factor - 0.5 if size > 1 else 0.0
        elif where == "align_corners":
            source = place * (length - 1) / (size - 1) if size > 1 else 0.0
        else:
            raise context.refuse(f"nearest Resize with coordinates {where}")
        rounded = {
            "floor": math.floor(source),
            "ceil": math.ceil(source),
            "round_prefer_floor": math.ceil(source - 0.5),
            "round_prefer_ceil": math.floor(source + 0.5),
        }[rounding]
        chosen.append(min(max(rounded, 0), length - 1))
    return value.index_select(axis, torch.tensor(chosen, dtype=torch.int64, device=value.device))


def build_table() -> dict[str, Op]:
    """Operator name -> function."""
    return {
        "Conv": _conv,
        "ConvTranspose": _conv_transpose,
        "MaxPool": _max_pool,
        "AveragePool": _average_pool,
        "GlobalAveragePool": _global_average,
        "GlobalMaxPool": _global_max,
        "Resize": _resize,
    }
