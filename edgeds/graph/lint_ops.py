"""Lint rules for operators, types, constants and shapes that TensorRT lacks or handles differently."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from onnx import NodeProto

from edgeds.graph.findings import Finding, Level, LintContext
from edgeds.graph.proto import dims_of, dtype_name, each_graph, is_standard, main_opset
from edgeds.graph.view import GraphView

_INT32 = np.iinfo(np.int32)
_FLOAT16_MAX = 65504.0

_OPS: dict[str, tuple[Level, str]] = {
    "NonMaxSuppression": ("warning", "output size depends on the data; TensorRT-RTX cannot build it; do it after"),
    "NonZero": ("warning", "its output size depends on the data; TensorRT-RTX and TensorRT before 8.6 refuse it"),
    "Unique": ("error", "TensorRT has no Unique"),
    "Compress": ("warning", "its output size depends on the data"),
    "RoiAlign": ("warning", "needs the ROIAlign plugin; TensorRT-RTX refuses it"),
    "DeformConv": ("error", "TensorRT-RTX refuses it and TensorRT before 10 has none"),
    "If": ("info", "control flow: both branches are built and their outputs must have one rank and type"),
    "Loop": ("warning", "control flow: the body is not fused with its surroundings, and trip counts must be scalars"),
    "Scan": ("warning", "control flow: the body is not fused with its surroundings"),
    "Dropout": ("info", "has no effect at inference"),
    "RandomNormal": ("warning", "random output: runs cannot be compared"),
    "RandomUniform": ("warning", "random output: runs cannot be compared"),
    "RandomNormalLike": ("warning", "random output: runs cannot be compared"),
    "RandomUniformLike": ("warning", "random output: runs cannot be compared"),
    "Multinomial": ("error", "TensorRT has no Multinomial"),
    "Det": ("error", "TensorRT has no Det"),
    "StringNormalizer": ("error", "TensorRT has no string tensors"),
    "TfIdfVectorizer": ("error", "TensorRT has no TfIdfVectorizer"),
    "SequenceConstruct": ("error", "TensorRT has no sequences"),
    "SequenceAt": ("error", "TensorRT has no sequences"),
    "SequenceInsert": ("error", "TensorRT has no sequences"),
    "SplitToSequence": ("error", "TensorRT has no sequences"),
    "ConcatFromSequence": ("error", "TensorRT has no sequences"),
    "Optional": ("error", "TensorRT has no optional values"),
    "BitShift": ("error", "TensorRT has no BitShift"),
}  # fmt: skip

_TRT_DOMAINS = ("", "ai.onnx")
_MICROSOFT_OK = ("Gelu", "FastGelu", "QuantizeLinear", "DequantizeLinear")


def lint_ops(context: LintContext) -> Iterator[Finding]:
    """Operators without support, custom domains, data-dependent shapes, control flow."""
    for node in (node for graph in each_graph(context.model.graph) for node in graph.node):
        if not is_standard(node):
            if node.domain == "com.microsoft" and node.op_type in _MICROSOFT_OK:
                continue
            yield Finding(
                node=node.name,
                level="error",
                message=f"operator {node.domain}.{node.op_type} is not ONNX: TensorRT needs a plugin of that name",
            )
        elif node.op_type in _OPS:
            level, text = _OPS[node.op_type]
            yield Finding(node=node.name, level=level, message=f"{node.op_type}: {text}")
        elif node.op_type == "TopK":
            yield from _topk(context.view, node)


def _topk(view: GraphView, node: NodeProto) -> Iterator[Finding]:
    count = view.constant(node.input[1]) if len(node.input) > 1 else None
    if count is None and len(node.input) > 1:
        yield Finding(
            node=node.name, level="warning", message="TopK: k is computed; TensorRT before 10 wants a constant"
        )
    elif count is not None and count.size == 1 and int(count.reshape(-1)[0]) > 3840:
        yield Finding(
            node=node.name, level="error", message=f"TopK: k is {int(count.reshape(-1)[0])}; TensorRT takes up to 3840"
        )


def lint_opset(context: LintContext) -> Iterator[Finding]:
    """Which TensorRT versions document the model's opset."""
    opset = main_opset(context.model)
    if opset < 9:
        text = f"opset {opset}: TensorRT 10 documents 9 to 20; convert to 17"
        yield Finding(node="model", level="warning", message=text)
    elif opset > 25:
        text = f"opset {opset}: newer than any TensorRT documents (11.x: up to 25); convert to 17 or 19"
        yield Finding(node="model", level="warning", message=text)
    elif opset > 20:
        text = f"opset {opset}: TensorRT 11 documents up to 25, but 10.x (JetPack 6) only up to 20"
        yield Finding(node="model", level="warning", message=text)
    elif opset > 17:
        text = f"opset {opset}: fine for TensorRT 10 and newer; 8.5 (JetPack 5) documents up to 17"
        yield Finding(node="model", level="info", message=text)


def lint_types(context: LintContext) -> Iterator[Finding]:
    """Element types that TensorRT refuses or narrows, at inputs, outputs and stored tensors."""
    graph = context.model.graph
    seen: dict[str, str] = {}
    for item in (*graph.input, *graph.output):
        kind = item.type.WhichOneof("value")
        if kind not in (None, "tensor_type"):
            yield Finding(node=item.name, level="error", message=f"is a {kind.removesuffix('_type')}, not a tensor")
            continue
        seen[item.name] = dtype_name(item.type.tensor_type.elem_type)
    seen.update({tensor.name: dtype_name(tensor.data_type) for tensor in graph.initializer})
    for node in context.view.nodes:
        for name in node.output:
            dtype = context.view.dtype(name) if name else None
            if dtype is not None and dtype.name in ("float64", "object", "complex64", "complex128", "int16", "uint16"):
                # One finding per computed tensor of a type the inputs do not already show.
                seen.setdefault(name, dtype.name)
    for name, dtype_text in seen.items():
        if dtype_text == "float64":
            yield Finding(node=name, level="warning", message="is float64; TensorRT computes it in float32")
        elif dtype_text in ("object", "complex64", "complex128", "int16", "uint16", "uint32", "uint64"):
            shown = "string" if dtype_text == "object" else dtype_text
            yield Finding(node=name, level="error", message=f"is {shown}, which TensorRT does not take")


def lint_shapes(context: LintContext) -> Iterator[Finding]:
    """Dynamic inputs: every such dim needs a profile; unknown ranks cannot have one."""
    stored = {tensor.name for tensor in context.model.graph.initializer}
    for item in context.model.graph.input:
        if item.name in stored or item.type.WhichOneof("value") != "tensor_type":
            continue
        dims = dims_of(item.type)
        if dims is None:
            yield Finding(node=item.name, level="error", message="input of unknown rank; TensorRT needs the rank")
            continue
        open_dims = [str(dim or f"axis {axis}") for axis, dim in enumerate(dims) if not isinstance(dim, int)]
        if open_dims:
            yield Finding(
                node=item.name,
                level="info",
                message=f"dynamic dims without an upper bound: {', '.join(open_dims)}; a build needs a range for each",
            )
        if any(isinstance(dim, int) and dim <= 0 for dim in dims):
            yield Finding(node=item.name, level="error", message=f"input with an empty dimension: {list(dims)}")


_CLAMP_SAFE = {"Slice": (1, 2, 3, 4)}


def lint_int64(context: LintContext) -> Iterator[Finding]:
    """int64 constants beyond int32, once per tensor: slice ends survive clamping, arithmetic and indices do not."""
    view = context.view
    for name in _constant_names(view):
        if view.dtype(name) not in (np.dtype(np.int64), np.dtype(np.uint64)):
            continue
        value = view.constant(name)
        if value is None or value.size == 0 or (value.max() <= _INT32.max and value.min() >= _INT32.min):
            continue
        users = view.consumers(name)
        harmless = users and all(
            name not in [n for i, n in enumerate(user.input) if i not in _CLAMP_SAFE.get(user.op_type, ())]
            for user in users
        )
        worst = max(value.reshape(-1).tolist(), key=abs)
        if harmless and not view.used_in_subgraph(name):
            text = (
                f"int64 value {worst} only bounds {users[0].op_type} {users[0].name!r}: clamping to int32 is harmless"
            )
            yield Finding(node=name, level="info", message=text)
        else:
            where = f"{users[0].op_type} {users[0].name!r}" if users else "a subgraph"
            text = (
                f"int64 value {worst} used in {where} is beyond int32; "
                "TensorRT before 10 clamps it and the result changes"
            )
            yield Finding(node=name, level="warning", message=text)


def lint_float16(context: LintContext) -> Iterator[Finding]:
    """What overflows in half precision: constants beyond 65504 and squares that are averaged (LayerNorm by hand)."""
    view = context.view
    for name in _constant_names(view):
        dtype = view.dtype(name)
        if dtype is None or dtype.name not in ("float32", "float64"):
            continue
        value = view.constant(name)
        if value is None or value.size == 0:
            continue
        low, high = float(value.min()), float(value.max())
        if np.isnan(low) or np.isnan(high):
            yield Finding(node=name, level="error", message="holds NaN; the weights are damaged")
        elif max(abs(low), abs(high)) > _FLOAT16_MAX:
            users = view.consumers(name)
            where = f" (read by {users[0].op_type} {users[0].name!r})" if users else ""
            worst = low if abs(low) > abs(high) else high
            text = f"value {worst:g}{where} does not fit float16 (65504); keep that part in float32"
            yield Finding(node=name, level="warning", message=text)
    for node in view.nodes:
        square = view.producer(node.input[0]) if node.op_type == "ReduceMean" else None
        if square is not None and (
            square.op_type == "Pow" or (square.op_type == "Mul" and square.input[0] == square.input[1])
        ):
            text = f"mean of squares ({square.op_type} {square.name!r}) may overflow in float16; keep it in float32"
            yield Finding(node=node.name, level="warning", message=text)


def _constant_names(view: GraphView) -> list[str]:
    names = [tensor.name for tensor in view.model.graph.initializer]
    names += [node.output[0] for node in view.nodes if node.op_type == "Constant" and is_standard(node)]
    return [name for name in names if view.consumers(name) or view.used_in_subgraph(name)]
