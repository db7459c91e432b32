"""Fuse what exporters took apart: layer normalisation, and its scale and bias into the linear layers behind it.

Exporters below opset 17 write LayerNormalization as seven to nine operators. As one operator it is computed in float32
inside a float16 engine (no overflow of the squares), and TensorRT and ONNX Runtime run it as one kernel.
"""

from __future__ import annotations

import numpy as np
from onnx import ModelProto, NodeProto

from edgeds.graph.opset import require_opset
from edgeds.graph.view import GraphView

NORM_OPSET = 17


def fuse_layernorms(model: ModelProto) -> tuple[ModelProto, int]:
    """Replace decomposed layer normalisations by the operator; returns how many. Equal to float rounding.

    Found: mean over the last axis, difference, its square (Pow by 2 or a product with itself), mean, plus epsilon,
    root, quotient (or product with the reciprocal), and scale and bias where they follow.
    """
    view = GraphView(require_opset(model, NORM_OPSET))
    count = 0
    for node in view.nodes:
        if node.op_type in ("Div", "Mul") and _fuse_one(view, node):
            count += 1
    return (view.finish(), count) if count else (model, 0)


def fold_norm_scales(model: ModelProto) -> tuple[ModelProto, int]:
    """Move scale and bias of each LayerNormalization into the linear layers that alone read it; returns how many.

    y = (n * s + b) W + c = n (diag(s) W) + (b W + c), exact in real arithmetic. The normalised values then have
    variance one in every channel, which is what INT8 rounds best.
    """
    view = GraphView(model)
    count = 0
    for node in view.nodes:
        if node.op_type == "LayerNormalization" and _fold_one(view, node):
            count += 1
    return (view.finish(), count) if count else (model, 0)


def _fuse_one(view: GraphView, last: NodeProto) -> bool:
    found = _centred_and_root(view, last)
    if found is None:
        return False
    centred, root = found
    start = view.producer(centred)
    if start is None or start.op_type != "Sub":
        return False
    x, mean = start.input
    if not _is_last_mean(view, mean, of=x):
        return False
    epsilon = _epsilon(view, root, centred)
    shape = view.shape(x)
    width = shape[-1] if shape else None
    if epsilon is None or not isinstance(width, int):
        return False
    result = last.output[0]
    scale, result = _affine(view, result, "Mul", width)
    bias, result = _affine(view, result, "Add", width)
    dtype = view.dtype(x) or np.dtype(np.float32)
    inputs = [x, view.add_constant(f"{last.name}_scale", np.ones(width, dtype) if scale is None else scale)]
    if bias is not None:
        inputs.append(view.add_constant(f"{last.name}_bias", bias))
    made = view.fresh_name(f"{last.name}_normalized")
    view.make_node("LayerNormalization", inputs, [made], name=f"{last.name}_LayerNorm", axis=-1, epsilon=epsilon)
    if view.is_output(result):
        producer = view.producer(result)
        if producer is None:
            return False
        view.set_output(producer, result, view.fresh_name(f"{result}_unused"))
        view.make_node("Identity", [made], [result], name=f"{last.name}_Output")
    else:
        view.replace_uses(result, made)
    return True


def _centred_and_root(view: GraphView, last: NodeProto) -> tuple[str, str] | None:
    """(x - mean, its standard deviation) of a quotient, or of a product with a reciprocal."""
    a, b = last.input
    if last.op_type == "Div":
        return a, b
    for centred, factor in ((a, b), (b, a)):
        maker = view.producer(factor)
        if maker is not None and maker.op_type == "Reciprocal":
            return centred, maker.input[0]
    return None


def _is_last_mean(view: GraphView, tensor: str, *, of: str) -> bool:
    node = view.producer(tensor)
    if node is None or node.op_type != "ReduceMean" or node.input[0] != of:
        return False
    attributes = {item.name: item for item in node.attribute}
    if "keepdims" in attributes and attributes["keepdims"].i == 0:
        return False
    axes = list(attributes["axes"].ints) if "axes" in attributes else None
    if axes is None and len(node.input) > 1:
        stored = view.constant(node.input[1])
        axes = None if stored is None else stored.reshape(-1).tolist()
    shape = view.shape(of)
    return axes is not None and shape is not None and [axis % len(shape) for axis in axes] == [len(shape) - 1]


def _epsilon(view: GraphView, root: str, centred: str) -> float | None:
    """Epsilon of sqrt(mean(centred^2) + epsilon); None when it is something else."""
    node = view.producer(root)
    if node is None or node.op_type != "Sqrt":
        return None
    plus = view.producer(node.input[0])
    if plus is None or plus.op_type != "Add":
        return None
    for variance, constant in (tuple(plus.input), tuple(reversed(plus.input))):
        value = view.constant(constant)
        mean = view.producer(variance)
        if value is None or value.size != 1 or mean is None or mean.op_type != "ReduceMean":
            continue
        if _is_last_mean(view, variance, of=mean.input[0]) and _is_square(view, mean.input[0], centred):
            return float(value.reshape(-1)[0])
    return None


def _is_square(view: GraphView, tensor: str, of: str) -> bool:
    node = view.producer(tensor)
    if node is None or node.input[0] != of:
        return _is_equal_difference(view, node, of)
    if node.op_type == "Mul":
        return node.input[1] == of
    value = view.constant(node.input[1]) if node.op_type == "Pow" else None
    return value is not None and value.size == 1 and float(value.reshape(-1)[0]) == 2.0


def _is_equal_difference(view: GraphView, node: NodeProto | None, of: str) -> bool:
    """Some exporters compute x - mean twice: once for the square, once for the quotient."""
    if node is None or node.op_type not in ("Mul", "Pow"):
        return False
    other, mine = view.producer(node.input[0]), view.producer(of)
    if other is None or mine is None or other.op_type != "Sub" or list(other.input) != list(mine.input):
        return False
    return _is_square(view, node.output[0], node.input[0])


def _affine(view: GraphView, tensor: str, op: str, width: int) -> tuple[np.ndarray | None, str]:
    """The constant vector a tensor is scaled by or moved by, and the tensor behind that."""
    readers = view.consumers(tensor)
    if len(readers) != 1 or readers[0].op_type != op or view.is_output(tensor) or view.used_in_subgraph(tensor):
        return None, tensor
    other = [name for name in readers[0].input if name != tensor]
    value = view.constant(other[0]) if len(other) == 1 else None
    if value is None or value.shape != (width,):
        return None, tensor
    return value, readers[0].output[0]


def _fold_one(view: GraphView, norm: NodeProto) -> bool:
    tensor = norm.output[0]
    readers = view.consumers(tensor)
    scale = view.constant(norm.input[1])
    bias = view.constant(norm.input[2]) if len(norm.input) > 2 and norm.input[2] else None
    if scale is None or scale.ndim != 1 or not readers or view.is_output(tensor) or view.used_in_subgraph(tensor):
        return False
    if len(norm.input) > 2 and norm.input[2] and bias is None:
        return False
    if np.all(scale == 1) and (bias is None or not bias.any()):
        return False
    planned = []
    for reader in readers:
        kernel = _kernel(view, reader, tensor)
        moved = None if kernel is None else _moved(kernel, scale, bias)
        if moved is None:
            return False
        planned.append((reader, *moved))
    for reader, scaled, shift in planned:
        if shift is not None:
            _add_bias(view, reader, shift)
        stored = scaled.T if _is_transposed(reader) else scaled
        view.set_input(reader, 1, view.add_constant(f"{reader.input[1]}_scaled", stored))
    view.set_input(norm, 1, view.add_constant(f"{norm.input[1]}_one", np.ones_like(scale)))
    if bias is not None:
        view.set_input(norm, 2, view.add_constant(f"{norm.input[2]}_zero", np.zeros_like(bias)))
    return True


def _moved(
    kernel: np.ndarray, scale: np.ndarray, bias: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray | None] | None:
    """The kernel [in, out] with the scale in it and the bias as seen behind it; None where they do not fit.

    In float64, then rounded to the kernel's type; sums that leave float16 do not fit either.
    """
    if any(value is not None and value.shape != kernel.shape[:1] for value in (scale, bias)):
        return None
    wide = kernel.astype(np.float64)
    with np.errstate(over="ignore"):
        scaled = (wide * scale.astype(np.float64)[:, None]).astype(kernel.dtype)
        shift = None
        if bias is not None and bias.any():
            shift = (bias.astype(np.float64) @ wide).astype(kernel.dtype)
    finite = np.isfinite(scaled).all() and (shift is None or np.isfinite(shift).all())
    return (scaled, shift) if finite else None


def _is_transposed(node: NodeProto) -> bool:
    return node.op_type == "Gemm" and any(item.name == "transB" and item.i for item in node.attribute)


def _kernel(view: GraphView, node: NodeProto, tensor: str) -> np.ndarray | None:
    """Weights [in, out] of a linear layer that reads the tensor and owns its weights; None for any other reader."""
    if node.op_type not in ("MatMul", "Gemm") or list(node.input).index(tensor) or list(node.input).count(tensor) > 1:
        return None
    value = view.constant(node.input[1])
    if value is None or value.ndim != 2 or len(view.consumers(node.input[1])) != 1:
        return None
    if any(item.name == "transA" and item.i for item in node.attribute):
        return None
    if any(item.name in ("alpha", "beta") and item.f != 1.0 for item in node.attribute):
        return None
    return value.T if _is_transposed(node) else value


def _add_bias(view: GraphView, node: NodeProto, moved: np.ndarray) -> None:
    """Add ``moved`` to a linear layer's bias, which gets one if it has none."""
    if node.op_type == "Gemm" and len(node.input) > 2 and node.input[2]:
        old = view.constant(node.input[2])
        if old is not None:
            view.set_input(node, 2, view.add_constant(f"{node.input[2]}_moved", (old + moved).astype(old.dtype)))
            return
    result = node.output[0]
    old, _ = _affine(view, result, "Add", moved.shape[0])
    if old is not None:
        add = view.consumers(result)[0]
        place = 1 if add.input[0] == result else 0
        view.set_input(add, place, view.add_constant(f"{add.input[place]}_moved", (old + moved).astype(old.dtype)))
        return
    raw = view.fresh_name(f"{result}_raw")
    view.set_output(node, result, raw)
    shift = view.add_constant(f"{node.name}_shift", moved)
    view.make_node("Add", [raw, shift], [result], name=f"{node.name}_Shift")
