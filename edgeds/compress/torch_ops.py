"""ONNX operators as torch functions: arithmetic, reductions, normalisation and Q/DQ.

Every function takes the node's inputs (torch tensors; None for one left out) and an ``OpContext``, and returns the
outputs. Shapes, axes and sizes are small int64 tensors on the CPU; data is wherever the graph runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from edgeds.compress.torch_lib import import_torch
from edgeds.errors import ModelError

Values = Sequence[Any]


@dataclass(frozen=True, kw_only=True)
class OpContext:
    """One node: its name and attributes, the graph's opset, how many outputs it has."""

    node: str
    op: str
    opset: int
    outputs: int
    attributes: Mapping[str, Any] = field(default_factory=dict)

    def get(self, name: str, default: Any = None) -> Any:
        """An attribute's value."""
        return self.attributes.get(name, default)

    def refuse(self, what: str) -> ModelError:
        """The error for something this module cannot do."""
        return ModelError(f"node '{self.node}' ({self.op}): training does not support {what}")


Op = Callable[[Values, OpContext], Any]


def ints(value: Any) -> list[int]:
    """A shape or axes tensor as Python integers."""
    return [int(item) for item in value.reshape(-1).tolist()]


def same_device(values: Values) -> list[Any]:
    """Values that meet in one operation on the device of the one that is not on the CPU."""
    device = next((value.device for value in values if value is not None and value.device.type != "cpu"), None)
    if device is None:
        return list(values)
    return [value if value is None else value.to(device) for value in values]


def _torch_dtype(onnx_type: int) -> Any:
    from onnx import helper

    torch = import_torch()
    name = np.dtype(helper.tensor_dtype_to_np_dtype(onnx_type)).name
    return getattr(torch, name)


def _divide(a: Any, b: Any) -> Any:
    torch = import_torch()
    whole = not a.is_floating_point() and not b.is_floating_point()
    return torch.div(a, b, rounding_mode="trunc") if whole else a / b


def _mod(values: Values, context: OpContext) -> Any:
    torch = import_torch()
    a, b = same_device(values)
    return torch.fmod(a, b) if context.get("fmod", 0) else torch.remainder(a, b)


def _fold_binary(function: Callable[[Any, Any], Any]) -> Op:
    def run(values: Values, _: OpContext) -> Any:
        values = same_device(values)
        result = values[0]
        for value in values[1:]:
            result = function(result, value)
        return result

    return run


def _unary(function: Callable[[Any], Any]) -> Op:
    def run(values: Values, _: OpContext) -> Any:
        return function(values[0])

    return run


def _clip(values: Values, context: OpContext) -> Any:
    torch = import_torch()
    low = values[1] if len(values) > 1 and values[1] is not None else context.get("min")
    high = values[2] if len(values) > 2 and values[2] is not None else context.get("max")
    low, high = (None if bound is None else float(bound) for bound in (low, high))
    if low is None and high is None:
        return values[0]
    return torch.clamp(values[0], min=low, max=high)


def _gelu(values: Values, context: OpContext) -> Any:
    functional = import_torch().nn.functional
    kind = context.get("approximate", "none")
    return functional.gelu(values[0], approximate=kind.decode() if isinstance(kind, bytes) else kind)


def _softmax(values: Values, context: OpContext) -> Any:
    torch = import_torch()
    function = torch.log_softmax if context.op == "LogSoftmax" else torch.softmax
    value = values[0]
    if context.opset >= 13:
        return function(value, dim=context.get("axis", -1))
    # Before opset 13 everything from the axis on is one flat row.
    axis = context.get("axis", 1) % max(value.ndim, 1)
    flat = value.flatten(axis)
    return function(flat, dim=-1).reshape(value.shape)


def _reduce(function: Callable[..., Any]) -> Op:
    def run(values: Values, context: OpContext) -> Any:
        value = values[0]
        axes = context.get("axes")
        if axes is None and len(values) > 1 and values[1] is not None:
            axes = ints(values[1])
        if not axes:
            if context.get("noop_with_empty_axes", 0):
                return value
            axes = list(range(value.ndim))
        return function(value, tuple(axis % value.ndim for axis in axes), bool(context.get("keepdims", 1)))

    return run


def _prod(value: Any, axes: tuple[int, ...], keep: bool) -> Any:
    for axis in sorted(axes, reverse=True):
        value = value.prod(dim=axis, keepdim=keep)
    return value


def _layer_norm(values: Values, context: OpContext) -> Any:
    functional = import_torch().nn.functional
    value, scale = values[0], values[1]
    bias = values[2] if len(values) > 2 else None
    axis = context.get("axis", -1) % value.ndim
    result = functional.layer_norm(value, value.shape[axis:], eps=context.get("epsilon", 1e-5)) * scale
    return result if bias is None else result + bias


def _batch_norm(values: Values, context: OpContext) -> Any:
    functional = import_torch().nn.functional
    value, scale, bias, mean, variance = values
    # Statistics are constants in an exported graph, so they are in training too.
    return functional.batch_norm(value, mean, variance, scale, bias, training=False, eps=context.get("epsilon", 1e-5))


def _instance_norm(values: Values, context: OpContext) -> Any:
    functional = import_torch().nn.functional
    return functional.instance_norm(values[0], weight=values[1], bias=values[2], eps=context.get("epsilon", 1e-5))


def round_through(value: Any) -> Any:
    """Round half to even, with the gradient of the identity (straight-through, Bengio et al. 2013)."""
    return value + (value.round() - value).detach()


def _per_axis(parameter: Any, value: Any, axis: int) -> Any:
    if parameter.ndim == 0 or parameter.numel() == 1:
        return parameter.reshape(())
    shape = [1] * value.ndim
    shape[axis % value.ndim] = parameter.numel()
    return parameter.reshape(shape)


def _quantize(values: Values, context: OpContext) -> Any:
    """Integers kept as floats, so that gradients reach through; DequantizeLinear undoes it."""
    torch = import_torch()
    value, scale = same_device(values[:2])
    zero = values[2] if len(values) > 2 and values[2] is not None else torch.zeros((), dtype=torch.uint8)
    limits = torch.iinfo(zero.dtype)
    axis = context.get("axis", 1)
    zero_point = _per_axis(zero.to(value.dtype).to(value.device), value, axis)
    return torch.clamp(round_through(value / _per_axis(scale, value, axis)) + zero_point, limits.min, limits.max)


def _dequantize(values: Values, context: OpContext) -> Any:
    value, scale = same_device(values[:2])
    axis = context.get("axis", 1)
    value = value.to(scale.dtype)
    if len(values) > 2 and values[2] is not None:
        value = value - _per_axis(values[2].to(scale.dtype).to(value.device), value, axis)
    return value * _per_axis(scale, value, axis)


def _cast(values: Values, context: OpContext) -> Any:
    return values[0].to(_torch_dtype(context.get("to")))


def _matmul(values: Values, _: OpContext) -> Any:
    return import_torch().matmul(*same_device(values))


def _gemm(values: Values, context: OpContext) -> Any:
    a, b = values[0], values[1]
    a = a.transpose(0, 1) if context.get("transA", 0) else a
    b = b.transpose(0, 1) if context.get("transB", 0) else b
    result = a @ b
    alpha, beta = context.get("alpha", 1.0), context.get("beta", 1.0)
    result = result if alpha == 1.0 else result * alpha
    if len(values) > 2 and values[2] is not None:
        result = result + (values[2] if beta == 1.0 else values[2] * beta)
    return result


def _prelu(values: Values, _: OpContext) -> Any:
    value, slope = values
    if slope.ndim == 1 and slope.numel() > 1:
        slope = slope.reshape(-1, *([1] * (value.ndim - 2)))
    return value.clamp(min=0) + slope * value.clamp(max=0)


def _hard_sigmoid(values: Values, context: OpContext) -> Any:
    return (values[0] * context.get("alpha", 0.2) + context.get("beta", 0.5)).clamp(0, 1)


def _leaky_relu(values: Values, context: OpContext) -> Any:
    return import_torch().nn.functional.leaky_relu(values[0], context.get("alpha", 0.01))


def _elu(values: Values, context: OpContext) -> Any:
    return import_torch().nn.functional.elu(values[0], context.get("alpha", 1.0))


def _where(values: Values, _: OpContext) -> Any:
    return import_torch().where(*same_device(values))


def _arg_max(values: Values, context: OpContext) -> Any:
    return values[0].argmax(dim=context.get("axis", 0), keepdim=bool(context.get("keepdims", 1)))


_REDUCTIONS: dict[str, Callable[[Any, Any, bool], Any]] = {
    "ReduceMean": lambda x, axes, keep: x.mean(dim=axes, keepdim=keep),
    "ReduceSum": lambda x, axes, keep: x.sum(dim=axes, keepdim=keep),
    "ReduceMax": lambda x, axes, keep: x.amax(dim=axes, keepdim=keep),
    "ReduceMin": lambda x, axes, keep: x.amin(dim=axes, keepdim=keep),
    "ReduceL2": lambda x, axes, keep: x.square().sum(dim=axes, keepdim=keep).sqrt(),
    "ReduceL1": lambda x, axes, keep: x.abs().sum(dim=axes, keepdim=keep),
    "ReduceSumSquare": lambda x, axes, keep: x.square().sum(dim=axes, keepdim=keep),
    "ReduceProd": _prod,
}


def _elementwise() -> dict[str, Op]:
    torch = import_torch()
    functional = torch.nn.functional

    unary = {
        "Relu": torch.relu,
        "Sigmoid": torch.sigmoid,
        "Tanh": torch.tanh,
        "Exp": torch.exp,
        "Log": torch.log,
        "Sqrt": torch.sqrt,
        "Abs": torch.abs,
        "Neg": torch.neg,
        "Erf": torch.erf,
        "Reciprocal": torch.reciprocal,
        "Floor": torch.floor,
        "Ceil": torch.ceil,
        "Round": torch.round,
        "Sign": torch.sign,
        "Sin": torch.sin,
        "Cos": torch.cos,
        "Not": torch.logical_not,
        "Softplus": functional.softplus,
        "Softsign": functional.softsign,
        "Mish": functional.mish,
        "HardSwish": functional.hardswish,
        "Identity": lambda value: value,
        "Dropout": lambda value: value,
    }
    binary = {
        "Add": torch.add,
        "Sub": torch.sub,
        "Mul": torch.mul,
        "Div": _divide,
        "Pow": lambda a, b: torch.pow(a, b.to(a.dtype)),
        "Max": torch.maximum,
        "Min": torch.minimum,
        "Equal": torch.eq,
        "Greater": torch.gt,
        "GreaterOrEqual": torch.ge,
        "Less": torch.lt,
        "LessOrEqual": torch.le,
        "And": torch.logical_and,
        "Or": torch.logical_or,
        "Sum": torch.add,
    }
    return {
        **{name: _unary(function) for name, function in unary.items()},
        **{name: _fold_binary(function) for name, function in binary.items()},
    }


def build_table() -> dict[str, Op]:
    """Operator name -> function."""
    return {
        **_elementwise(),
        **{name: _reduce(function) for name, function in _REDUCTIONS.items()},
        "Mod": _mod,
        "Clip": _clip,
        "Gelu": _gelu,
        "LeakyRelu": _leaky_relu,
        "Elu": _elu,
        "PRelu": _prelu,
        "HardSigmoid": _hard_sigmoid,
        "Softmax": _softmax,
        "LogSoftmax": _softmax,
        "Where": _where,
        "ArgMax": _arg_max,
        "LayerNormalization": _layer_norm,
        "BatchNormalization": _batch_norm,
        "InstanceNormalization": _instance_norm,
        "QuantizeLinear": _quantize,
        "DequantizeLinear": _dequantize,
        "Cast": _cast,
        "MatMul": _matmul,
        "Gemm": _gemm,
    }
