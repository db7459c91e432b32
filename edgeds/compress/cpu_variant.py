"""The CPU form of a quantized model: the same scales in uint8 with zero-point 128, shaped for ONNX Runtime's kernels.

On x86 ONNX Runtime runs signed int8 activations slower than float and unsigned ones faster. uint8 with zero-point 128
and the same scale represents exactly the numbers of int8 with zero-point 0, so this form differs from the TensorRT
form in one respect only: ONNX Runtime's integer convolution also rounds its own output to 8 bits, where TensorRT fuses
the activation first. That extra step gets the finest uint8 range that loses nothing visible after the activation:
for ReLU and layout operators it is the consumer's own scale (no change in numbers), for SiLU and its like the interval
outside which the activation moves by less than half of its consumer's step, and otherwise a calibrated range.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import numpy as np
from onnx import ModelProto, NodeProto

from edgeds.compress.placement import QdqPlan, silu_input
from edgeds.compress.ranges import TensorRange
from edgeds.compress.tail import WEIGHTED_OPS
from edgeds.compress.weights import QMAX, quantize_weight
from edgeds.errors import ModelError
from edgeds.graph.opset import import_domain
from edgeds.graph.proto import attributes
from edgeds.graph.view import GraphView

ZERO_POINT = 128
_COMMUTING = {
    *("MaxPool", "Concat", "Split", "Slice", "Reshape", "Transpose", "Squeeze", "Unsqueeze", "Flatten", "Identity"),
    "Resize",
}
_INT32_SAFE = 2.0**30


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 1.0 / (1.0 + np.exp(-np.clip(x, -60.0, 60.0)))


_MONOTONE_CLIPS = {"Relu", "Clip"}
_CURVES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "SiLU": lambda x: x * _sigmoid(x),
    "HardSwish": lambda x: x * np.clip(x / 6.0 + 0.5, 0.0, 1.0),
    "Mish": lambda x: x * np.tanh(np.logaddexp(0.0, x)),
    "Gelu": lambda x: 0.5 * x * (1.0 + np.tanh(0.7978845608 * (x + 0.044715 * x**3))),
    "Sigmoid": _sigmoid,
    "HardSigmoid": lambda x: np.clip(0.2 * x + 0.5, 0.0, 1.0),
    "Tanh": np.tanh,
}


@dataclass(frozen=True)
class _Uint8:
    scale: float
    zero_point: int
    is_float32: bool = True


def cpu_tensors(view: GraphView, plan: QdqPlan) -> tuple[str, ...]:
    """Tensors beyond ``plan.tensors`` whose ranges the CPU form needs; ``view`` is the float model."""
    quantized = set(plan.tensors)
    covered = {(node.node, index) for node in plan.nodes for index in node.activations}
    covered |= {(edge.node, edge.index) for edge in plan.edges}
    names = {node.node for node in plan.nodes}
    extra: dict[str, None] = {}
    for node in view.nodes:
        if node.op_type == "Conv" and node.name in names:
            source = _range_source(view, node.output[0], quantized.__contains__, covered)
            if isinstance(source, str) and source not in quantized:
                extra[source] = None
    return tuple(extra)


def to_cpu_variant(
    model: ModelProto, ranges: Mapping[str, TensorRange], *, float_convolutions: AbstractSet[str] = frozenset()
) -> ModelProto:
    """Return the uint8 form of a model written by ``insert_qdq``. Runs on ONNX Runtime only (one fused contrib op).

    Convolutions whose output has no usable range keep the quantized numbers but compute in float, as do those named
    in ``float_convolutions``.
    """
    view = GraphView(model)
    pairs, scales = _to_uint8(view)
    for node in view.nodes:
        operands = [pairs.get(name) for name in node.input[:2]]
        weight = _weight_source(view, node)
        if weight is None or operands[0] is None:
            continue
        if node.op_type == "Conv":
            named = node.name in float_convolutions
            output = None if named else _output_range(view, node.output[0], scales, ranges)
            if output is None or not operands[0].is_float32:  # no integer kernels around float16
                _use_float_weights(view, node, weight)
            else:
                _integer_convolution(view, node, weight, operands[0], output)
        elif node.op_type == "ConvTranspose":
            _use_float_weights(view, node, weight)
    _fuse_silu(view)
    return view.finish()


def _to_uint8(view: GraphView) -> tuple[dict[str, _Uint8], dict[str, float]]:
    """Rewrite every activation pair; return its parameters by dequantized tensor, and the scale by float tensor."""
    pairs: dict[str, _Uint8] = {}
    scales: dict[str, float] = {}
    done: dict[str, str] = {}
    for node in view.nodes:
        if node.op_type != "QuantizeLinear":
            continue
        scale = view.constant(node.input[1])
        if scale is None or scale.ndim != 0:
            continue
        scales[node.input[0]] = max(float(scale), scales.get(node.input[0], 0.0))
        for consumer in (node, *view.consumers(node.output[0])):
            if len(consumer.input) < 3 or consumer.op_type not in ("QuantizeLinear", "DequantizeLinear"):
                raise ModelError(
                    f"node '{node.name}' is not a pair as edgeds writes it (zero point given, read by "
                    "DequantizeLinear only); make the CPU form from a model that edgeds quantized"
                )
            zero = consumer.input[2]
            if zero not in done:
                done[zero] = view.add_constant(f"{zero}_uint8", np.array(ZERO_POINT, np.uint8))
            view.set_input(consumer, 2, done[zero])
            if consumer is not node:
                pairs[consumer.output[0]] = _Uint8(float(scale), ZERO_POINT, scale.dtype == np.float32)
    return pairs, scales


def _weight_source(view: GraphView, node: NodeProto) -> NodeProto | None:
    """The DequantizeLinear of the node's constant weight, None when it has none."""
    if node.op_type not in ("Conv", "ConvTranspose") or len(node.input) < 2:
        return None
    producer = view.producer(node.input[1])
    if producer is None or producer.op_type != "DequantizeLinear" or not view.is_constant(producer.input[0]):
        return None
    return producer


def _dequantized_weight(view: GraphView, source: NodeProto) -> tuple[np.ndarray, int | None]:
    values, scale = view.constant(source.input[0]), view.constant(source.input[1])
    assert values is not None
    assert scale is not None
    axis = attributes(source).get("axis", 1) if scale.ndim else None
    if axis is None:
        return values.astype(scale.dtype) * scale, None
    shape = [1] * values.ndim
    shape[axis] = -1
    return values.astype(scale.dtype) * scale.reshape(shape), axis


def _use_float_weights(view: GraphView, node: NodeProto, source: NodeProto) -> None:
    weight, _ = _dequantized_weight(view, source)
    view.set_input(node, 1, view.add_constant(f"{source.output[0]}_float", weight))


def _integer_convolution(
    view: GraphView, node: NodeProto, source: NodeProto, activation: _Uint8, output: _Uint8
) -> None:
    """Give the convolution an int32 bias and an 8-bit output, which ONNX Runtime turns into one integer kernel."""
    if len(node.input) > 2 and node.input[2]:
        bias = view.constant(node.input[2])
        if bias is None:
            _use_float_weights(view, node, source)
            return
        _integer_bias(view, node, source, activation, bias.astype(np.float64))
    tensor = node.output[0]
    only_quantized = all(consumer.op_type == "QuantizeLinear" for consumer in view.consumers(tensor))
    if only_quantized and view.consumers(tensor) and not view.is_output(tensor) and not view.used_in_subgraph(tensor):
        return
    raw, quantized = view.fresh_name(f"{tensor}_raw"), view.fresh_name(f"{tensor}_uint8")
    scale = view.add_constant(f"{tensor}_cpu_scale", np.array(output.scale, np.float32))
    zero = view.add_constant(f"{tensor}_cpu_zero_point", np.array(output.zero_point, np.uint8))
    view.set_output(node, tensor, raw)
    view.make_node("QuantizeLinear", [raw, scale, zero], [quantized], name=f"{tensor}_cpu_QuantizeLinear")
    view.make_node("DequantizeLinear", [quantized, scale, zero], [tensor], name=f"{tensor}_cpu_DequantizeLinear")


def _integer_bias(view: GraphView, node: NodeProto, source: NodeProto, activation: _Uint8, bias: np.ndarray) -> None:
    """Write the bias as int32 at scale s_x * s_w; channels where it would overflow get a wider weight scale (B32)."""
    weight, _ = _dequantized_weight(view, source)
    scale = view.constant(source.input[1])
    assert scale is not None
    least = np.abs(bias) / (_INT32_SAFE * activation.scale)
    channels = np.broadcast_to(scale.astype(np.float64), bias.shape)
    if (least > channels).any():
        wide = quantize_weight(weight, 0, minimum_scale=np.maximum(least, channels))
        values = view.add_constant(f"{node.input[1]}_wide", wide.values)
        scales = view.add_constant(f"{node.input[1]}_wide_scale", wide.scale)
        zeros = view.add_constant(f"{node.input[1]}_wide_zero_point", np.zeros(wide.scale.shape, np.int8))
        tensor = view.fresh_name(f"{node.input[1]}_wide_dequantized")
        view.make_node("DequantizeLinear", [values, scales, zeros], [tensor], name=f"{node.name}_wide_weight", axis=0)
        view.set_input(node, 1, tensor)
        channels = wide.scale.astype(np.float64)
    bias_scale = (channels * activation.scale).astype(np.float32)
    integers = np.clip(np.rint(bias / bias_scale), -(2.0**31) + 1, 2.0**31 - 1).astype(np.int32)
    name = node.input[2]
    values = view.add_constant(f"{name}_int32", integers)
    scales = view.add_constant(f"{name}_scale", bias_scale)
    tensor = view.fresh_name(f"{name}_dequantized")
    zeros = view.add_constant(f"{name}_zero_point", np.zeros(bias_scale.shape, np.int32))
    view.make_node("DequantizeLinear", [values, scales, zeros], [tensor], name=f"{node.name}_bias", axis=0)
    view.set_input(node, 2, tensor)


def _range_source(
    view: GraphView, tensor: str, quantized: Callable[[str], bool], covered: set[tuple[str, int]]
) -> str | tuple[str, frozenset[str]] | None:
    """Where the 8-bit range of a convolution's output comes from.

    Either the name of a tensor whose own range is needed, or (activation, tensors whose scales it must serve). None
    when the values leave the graph, or a layer that was left in float reads them: TensorRT does not round those either.
    """
    activation, after = _activation_of(view, tensor)
    if view.is_output(after) or any(_reads_in_float(view, node, after, covered) for node in view.consumers(after)):
        return None
    if activation == "other":
        return tensor
    reached = _reached(view, after, quantized, covered)
    if reached:
        return (activation, frozenset(reached))
    return tensor if activation in ("none", *_MONOTONE_CLIPS) else after


def _reads_in_float(view: GraphView, node: NodeProto, tensor: str, covered: set[tuple[str, int]]) -> bool:
    places = [index for index, name in enumerate(node.input) if name == tensor]
    return node.op_type in WEIGHTED_OPS and not all((node.name, index) in covered for index in places)


def _activation_of(view: GraphView, tensor: str) -> tuple[str, str]:
    """("SiLU", its output) and the like for the only thing done with a tensor; ("none", tensor) without activation."""
    consumers = [node for node in view.consumers(tensor) if node.op_type != "QuantizeLinear"]
    if view.is_output(tensor) or view.used_in_subgraph(tensor) or len(consumers) != len(view.consumers(tensor)):
        return "none", tensor
    if len(consumers) == 2:
        for node in consumers:
            if node.op_type == "Mul" and silu_input(view, node) == tensor:
                gate = next(item for item in consumers if item is not node)
                if view.consumers(gate.output[0]) == [node] and not view.is_output(gate.output[0]):
                    return "SiLU", node.output[0]
    if len(consumers) == 1:
        op = consumers[0].op_type
        if op in _CURVES or op in _MONOTONE_CLIPS:
            return op, consumers[0].output[0]
        if op in ("LeakyRelu", "PRelu", "Elu", "Softplus", "Softsign"):
            return "other", tensor
    return "none", tensor


def _reached(
    view: GraphView, tensor: str, quantized: Callable[[str], bool], covered: set[tuple[str, int]]
) -> set[str] | None:
    """Quantized tensors that a tensor's values reach unchanged; None when something else also reads them."""
    found: set[str] = set()
    seen, pending = {tensor}, [tensor]
    while pending:  # not recursive: graphs are deep, and paths that part and meet again double at every meeting
        current = pending.pop()
        if view.is_output(current) or view.used_in_subgraph(current):
            return None
        if quantized(current):
            found.add(current)
        for node in view.consumers(current):
            places = [index for index, name in enumerate(node.input) if name == current]
            if node.op_type in ("QuantizeLinear", "Shape") or all((node.name, index) in covered for index in places):
                continue
            if node.op_type not in _COMMUTING or (node.op_type == "Resize" and _interpolates(node)):
                return None
            new = [name for name in node.output if name and name not in seen and view.consumers(name)]
            seen.update(new)
            pending += new
    return found


def _interpolates(node: NodeProto) -> bool:
    return attributes(node).get("mode", b"nearest") != b"nearest"


def _output_range(
    view: GraphView, tensor: str, scales: Mapping[str, float], ranges: Mapping[str, TensorRange]
) -> _Uint8 | None:
    source = _range_source(view, tensor, scales.__contains__, set())
    if isinstance(source, tuple):
        activation, reached = source
        steps = [scales[name] for name in reached]
        if activation == "none" or activation in _MONOTONE_CLIPS:
            return _Uint8(max(steps), ZERO_POINT)
        return _curve_range(_CURVES[activation], limit=max(steps) * QMAX, step=min(steps))
    known = ranges.get(source) if source is not None else None
    if known is None or known.note is not None:
        return None
    activation, after = _activation_of(view, tensor)
    if source == after and activation in _CURVES:
        return _curve_range(_CURVES[activation], limit=max(known.threshold, 1e-6), step=known.scale)
    return _asymmetric(max(known.minimum, -known.threshold), min(known.maximum, known.threshold))


def _curve_range(curve: Callable[[np.ndarray], np.ndarray], *, limit: float, step: float) -> _Uint8:
    """The interval outside which the clipped activation changes by at most half a step."""
    reach = max(32.0, 2.0 * limit)
    x = np.concatenate([np.linspace(-reach, -20.0, 64, endpoint=False), np.linspace(-20.0, reach, 8192)])
    y = np.clip(curve(x), -limit, limit)
    highest = np.maximum.accumulate(y), np.minimum.accumulate(y)
    settled_low = np.maximum(np.abs(highest[0] - y), np.abs(highest[1] - y)) <= step / 2
    lowest = np.maximum.accumulate(y[::-1])[::-1], np.minimum.accumulate(y[::-1])[::-1]
    settled_high = np.maximum(np.abs(lowest[0] - y), np.abs(lowest[1] - y)) <= step / 2
    low = x[int(np.argmin(settled_low)) - 1] if not settled_low.all() else x[0]
    high = x[int(np.nonzero(~settled_high)[0][-1]) + 1] if not settled_high.all() else x[-1]
    return _asymmetric(float(low), float(high))


def _asymmetric(low: float, high: float) -> _Uint8:
    """uint8 parameters for [low, high], with zero exactly representable."""
    low, high = min(low, 0.0), max(high, 0.0)
    scale = max((high - low) / 255.0, 2.0**-100)
    return _Uint8(scale, int(np.clip(round(-low / scale), 0, 255)))


def _fuse_silu(view: GraphView) -> None:
    """x * Sigmoid(x) as one operator: on integer graphs ONNX Runtime does not find the pattern by itself."""
    fused = False
    for node in view.nodes:
        if node.op_type != "Mul" or (tensor := silu_input(view, node)) is None:
            continue
        gate = next(item for item in view.consumers(tensor) if item.op_type == "Sigmoid")
        if view.consumers(gate.output[0]) != [node] or view.is_output(gate.output[0]):
            continue
        output = node.output[0]
        view.remove_node(node)
        view.remove_node(gate)
        view.add_node(_quick_gelu(node.name, tensor, output))
        fused = True
    if fused:
        import_domain(view.model, "com.microsoft")


def _quick_gelu(name: str, tensor: str, output: str) -> NodeProto:
    from onnx import helper

    # QuickGelu with alpha 1 is SiLU.
    return helper.make_node("QuickGelu", [tensor], [output], name=name, domain="com.microsoft", alpha=1.0)
