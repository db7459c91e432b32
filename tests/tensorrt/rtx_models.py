"""Small models that TensorRT takes or refuses, each for one reason, and what a build of them needs."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from edgeds.engines.builder import BuildOptions
from edgeds.specs import ShapeRange

FLOAT, HALF = TensorProto.FLOAT, TensorProto.FLOAT16
X = helper.make_tensor_value_info("x", FLOAT, ["n", 3, "h", "w"])
Y = helper.make_tensor_value_info("y", FLOAT, None)
RNG = np.random.default_rng(0)
WEIGHT = RNG.standard_normal((8, 3, 3, 3)).astype(np.float32)


def model_of(
    nodes: Sequence[onnx.NodeProto],
    *,
    inputs: Sequence[Any] = (X,),
    outputs: Sequence[Any] = (Y,),
    opset: int = 17,
    **constants: np.ndarray,
) -> onnx.ModelProto:
    """A model with IR 9, whose constants are given by name."""
    initializers = [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()]
    graph = helper.make_graph(list(nodes), "g", list(inputs), list(outputs), initializers)
    domains = [helper.make_opsetid("", opset), helper.make_opsetid("my.ops", 1)]
    model = helper.make_model(graph, opset_imports=domains)
    model.ir_version = 9
    return model


def conv() -> onnx.ModelProto:
    return model_of([helper.make_node("Conv", ["x", "w"], ["y"], name="conv1", pads=[1] * 4)], w=WEIGHT)


def qdq_conv(*, kind: type = np.int8, zero: int = 0, scale: float = 0.1, int32_bias: bool = False) -> onnx.ModelProto:
    """Input and weight quantized; the defaults are the form that every TensorRT takes."""
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"], name="quant_x"),
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["d"], name="dequant_x"),
        helper.make_node("DequantizeLinear", ["w8", "ws", "wz"], ["wd"], name="dequant_w", axis=0),
    ]
    constants = {
        "s": np.float32(scale),
        "z": np.array(zero, kind),
        "w8": RNG.integers(-127, 128, (8, 3, 3, 3)).astype(np.int8),
        "ws": np.full(8, 0.01, np.float32),
        "wz": np.zeros(8, np.int8),
    }
    operands = ["d", "wd"]
    if int32_bias:
        nodes.append(helper.make_node("DequantizeLinear", ["b32", "bs", "bz"], ["b"], name="dequant_bias", axis=0))
        constants |= {"b32": np.zeros(8, np.int32), "bs": np.full(8, 1e-3, np.float32), "bz": np.zeros(8, np.int32)}
        operands.append("b")
    nodes.append(helper.make_node("Conv", operands, ["y"], name="conv1", pads=[1] * 4))
    return model_of(nodes, **constants)


def custom_op() -> onnx.ModelProto:
    return model_of([helper.make_node("Fancy", ["x"], ["y"], name="fancy1", domain="my.ops")])


def nameless_custom_op() -> onnx.ModelProto:
    return model_of([helper.make_node("Fancy", ["x"], ["y"], domain="my.ops")])


def mixed_types() -> onnx.ModelProto:
    cast = helper.make_node("Cast", ["x"], ["half"], to=HALF, name="cast1")
    return model_of([cast, helper.make_node("Add", ["half", "x"], ["y"], name="add1")])


def nms() -> onnx.ModelProto:
    info = helper.make_tensor_value_info
    return model_of(
        [helper.make_node("NonMaxSuppression", ["b", "s", "k"], ["y"], name="nms1")],
        inputs=[info("b", FLOAT, [1, 10, 4]), info("s", FLOAT, [1, 2, 10])],
        outputs=[info("y", TensorProto.INT64, None)],
        k=np.array([3], np.int64),
    )


def input_of(kind: int) -> onnx.ModelProto:
    x = helper.make_tensor_value_info("x", kind, [1, 10])
    return model_of([helper.make_node("Cast", ["x"], ["y"], to=FLOAT, name="cast1")], inputs=[x])


def baked_size() -> onnx.ModelProto:
    """Says it is dynamic, but its Reshape holds for 32x32 and batch 1 only, like an export with baked anchors."""
    node = helper.make_node("Reshape", ["x", "shape"], ["y"], name="reshape1")
    return model_of([node], shape=np.array([1, 3, 1024], np.int64))


def paged_attention(*, layers: int = 2, kv_heads: int = 2, group: int = 2, head: int = 16, page: int = 8) -> Any:
    """Decode of one token over a paged KV pool, page by page, in plain operators (design.md, section 6).

    K pages are stored [pages, kv_heads, head, page] and V pages [pages, kv_heads, page, head], so that one MatMul per
    page needs neither a transpose nor a copy of them. Written from that description.
    """
    hidden = kv_heads * group * head
    info = helper.make_tensor_value_info
    inputs = [info("x", FLOAT, ["batch", hidden]), info("table", TensorProto.INT64, ["batch", "blocks"])]
    constants: dict[str, np.ndarray] = {
        "scale": np.float32(head**-0.5),
        "heads": np.array([0, 1, kv_heads, group, head], np.int64),
        "scores": np.array([0, kv_heads, group, -1], np.int64),
        "pages": np.array([0, kv_heads, group, -1, page], np.int64),
        "flat": np.array([0, hidden], np.int64),
        "blocks_axis": np.array([1], np.int64),
    }
    nodes: list[onnx.NodeProto] = []

    def add(op: str, operands: Sequence[str], out: str, **attributes: Any) -> str:
        nodes.append(helper.make_node(op, list(operands), [out], name=f"node_{out}", **attributes))
        return out

    state = "x"
    for layer in range(layers):
        keys, values = f"k_pool{layer}", f"v_pool{layer}"
        inputs += [
            info(keys, FLOAT, ["pool", kv_heads, head, page]),
            info(values, FLOAT, ["pool", kv_heads, page, head]),
        ]
        query = add("Reshape", [state, "heads"], f"query{layer}")
        query = add("Mul", [query, "scale"], f"scaled{layer}")
        keys = add("Gather", [keys, "table"], f"keys{layer}", axis=0)
        values = add("Gather", [values, "table"], f"values{layer}", axis=0)
        raw = add("MatMul", [query, keys], f"raw{layer}")  # batch, blocks, kv_heads, group, page
        raw = add("Transpose", [raw], f"moved{layer}", perm=[0, 2, 3, 1, 4])
        weights = add("Softmax", [add("Reshape", [raw, "scores"], f"joined{layer}")], f"weights{layer}", axis=-1)
        weights = add("Reshape", [weights, "pages"], f"by_page{layer}")
        weights = add("Transpose", [weights], f"back{layer}", perm=[0, 3, 1, 2, 4])
        mixed = add("MatMul", [weights, values], f"mixed{layer}")
        mixed = add("ReduceSum", [mixed, "blocks_axis"], f"summed{layer}", keepdims=0)
        state = add("Reshape", [mixed, "flat"], f"state{layer}")
    outputs = [info(state, FLOAT, ["batch", hidden])]
    return model_of(nodes, inputs=inputs, outputs=outputs, **constants)


def shapes(low: Sequence[int], opt: Sequence[int] | None = None, high: Sequence[int] | None = None) -> ShapeRange:
    return ShapeRange(min=tuple(low), opt=tuple(opt or low), max=tuple(high or opt or low))


def options_for(*profiles: dict[str, ShapeRange], **more: Any) -> BuildOptions:
    """SM86, so that a machine with a GPU builds the same as one without."""
    return BuildOptions(profiles=profiles, compute_capabilities=more.pop("targets", (86,)), **more)


def save(model: onnx.ModelProto, folder: Path) -> Path:
    path = folder / "model.onnx"
    onnx.save(model, path)
    return path
