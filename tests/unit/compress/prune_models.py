"""Small networks for the pruning tests: every way in which channels are coupled, with random weights."""

from __future__ import annotations

import numpy as np
from compress_models import BOOL, HALF, Net
from onnx import helper

from edgeds.graph.shapes import fill_output_shapes


def finish(net, *tensors):
    for tensor in tensors:
        net.output(tensor, elem=HALF if net.dtype == np.float16 else 1)
    model = net.model()
    fill_output_shapes(model)
    return model


def start(seed, *, opset=17, dtype=np.float32, batch="n", size=8):
    net = Net(seed=seed, opset=opset, dtype=dtype)
    return net, net.input("x", [batch, 3, size, size], HALF if dtype == np.float16 else 1)


def concat_twice(seed):
    """B15"""
    net, x = start(seed)
    t = net.conv(x, 3, 8, label="conv1")
    return finish(net, net.conv(net.op("Concat", t, t, axis=1), 16, 4, 1, act=None))


def c2f(seed, opset=17):
    """B16, also with sizes as an attribute (opset 12)."""
    net, x = start(seed, opset=opset)
    q = net.conv(x, 3, 8, act="SiLU", label="cv1")
    if opset < 13:
        a, b = net.op("Split", q, outputs=2, axis=1, split=[4, 4])
    else:
        a, b = net.op("Split", q, net.ints(4, 4), outputs=2, axis=1)
    m = net.conv(net.conv(b, 4, 4, act="SiLU"), 4, 4, act="SiLU", label="m")
    s = net.op("Add", b, m)
    cat = net.op("Concat", a, b, s, axis=1)
    nested = net.op("Concat", cat, net.op("MaxPool", s, kernel_shape=[3, 3], pads=[1] * 4), axis=1)
    return finish(net, net.conv(nested, 16, 6, 1, act=None))


def gate(seed):
    """B18"""
    net, x = start(seed)
    t = net.conv(net.conv(x, 3, 8, label="stem"), 8, 8, group=8, label="dw")
    g = net.op("Sigmoid", net.conv(t, 8, 1, 1, act=None, label="gate"))
    return finish(net, net.conv(net.op("Mul", t, g), 8, 4, 1, act=None))


def grouped(seed):
    """B19"""
    net, x = start(seed)
    b = net.conv(net.conv(x, 3, 8, label="pre"), 8, 16, group=4, label="grp")
    c = net.conv(x, 3, 4, 1, label="side")
    return finish(net, net.conv(net.op("Concat", b, c, axis=1), 20, 6, 1, act=None))


def multiplier(seed):
    """A depthwise layer with two outputs per channel."""
    net, x = start(seed)
    t = net.conv(net.conv(x, 3, 6), 6, 12, group=6, label="dw")
    return finish(net, net.conv(t, 12, 4, act=None))


def flat(seed, trans_b=1):
    """B20, both weight layouts."""
    net, x = start(seed, size=4)
    f = net.op("Flatten", net.conv(x, 3, 4, label="conv"))
    shapes = [(8, 64), (3, 8)] if trans_b else [(64, 8), (8, 3)]
    g = net.op("Relu", net.op("Gemm", f, net.w(*shapes[0]), net.w(8), transB=trans_b))
    return finish(net, net.op("Gemm", g, net.w(*shapes[1]), net.w(1, 3), transB=trans_b))


def viewed(seed):
    """view(x.size(0), -1), the target computed."""
    net, x = start(seed, size=4)
    t = net.conv(x, 3, 4)
    batch = net.op("Gather", net.op("Shape", t), net.w(value=np.asarray(0)), axis=0)
    target = net.op("Concat", net.op("Unsqueeze", batch, net.ints(0)), net.ints(-1), axis=0)
    f = net.op("Reshape", t, target)
    return finish(net, net.op("Add", net.op("MatMul", f, net.w(64, 5)), net.w(5)))


def head(seed):
    """B27"""
    net, x = start(seed, batch=1)
    t = net.conv(x, 3, 8, label="stem")
    b = net.reshape(net.conv(t, 8, 4, 1, act=None, label="box"), 0, 4, -1)
    c = net.op("Sigmoid", net.reshape(net.conv(t, 8, 3, 1, act=None, label="cls"), 0, 3, -1))
    return finish(net, net.op("Concat", b, c, axis=1))


def residual(seed):
    """BatchNormalization, residual sums, squeeze-and-excite, and a constant per channel."""
    net, x = start(seed)

    def norm(t, width):
        positive = net.w(value=net.rng.uniform(0.5, 2, width).astype(np.float32))
        return net.op("BatchNormalization", t, net.w(width), net.w(width), net.w(width), positive)

    a = net.op("Relu", norm(net.conv(x, 3, 10, act=None, bias=False), 10))
    b = norm(net.conv(net.conv(a, 10, 7, 1), 7, 10, act=None), 10)
    s = net.op("Add", net.op("Add", a, b), net.w(1, 10, 1, 1))
    e = net.conv(net.conv(net.op("GlobalAveragePool", s), 10, 5, 1), 5, 10, 1, act="Sigmoid")
    s = net.op("PRelu", net.op("Mul", s, e), net.w(10, 1, 1))
    return finish(net, net.conv(s, 10, 4, 1, act=None))


def upsampled(seed):
    """ConvTranspose (plain and depthwise) and Resize to sizes that name the channels."""
    net, x = start(seed, batch=2)
    a = net.conv(x, 3, 6)
    up = net.op("ConvTranspose", a, net.w(6, 8, 2, 2), net.w(8), strides=[2, 2])
    up = net.op("ConvTranspose", net.op("Relu", up), net.w(8, 1, 2, 2), strides=[2, 2], group=8)
    r = net.op("Resize", a, "", "", net.ints(2, 6, 32, 32), mode="nearest")
    return finish(net, net.conv(net.op("Concat", up, r, axis=1), 14, 3, act=None))


def mlp(seed):
    """Linear layers on the last axis of a sequence, with Transpose and reductions between conv and linear."""
    net, x = start(seed)
    t = net.reshape(net.conv(x, 3, 6), 0, 6, -1)
    s = net.op("Transpose", t, perm=[0, 2, 1])
    h = net.op("Relu", net.op("Add", net.op("MatMul", s, net.w(6, 12)), net.w(12)))
    h = net.op("Softmax", h, axis=1)
    pooled = net.op("ReduceMean", net.op("MatMul", h, net.w(12, 9)), axes=[1], keepdims=0)
    return finish(net, net.op("Gemm", pooled, net.w(9, 4)))


def pieces(seed):
    """Slice and Gather of channels."""
    net, x = start(seed)
    t = net.conv(x, 3, 12)
    a = net.op("Slice", t, net.ints(0), net.ints(5), net.ints(1))
    b = net.op("Slice", t, net.ints(-7), net.ints(2**62), net.ints(1), net.ints(1))
    c = net.op("Gather", t, net.ints(-1, 3, 0), axis=1)
    return finish(net, net.conv(net.op("Concat", a, b, c, axis=1), 15, 3, act=None))


def twins(seed):
    """One weight and bias for two layers, that also read the same number of channels."""
    net, x = start(seed)
    a, b = net.conv(x, 3, 6), net.conv(x, 3, 6, 1)
    weight, bias = net.w(8, 6, 3, 3), net.w(8)
    made = [net.op("Relu", net.op("Conv", t, weight, bias, pads=[1] * 4)) for t in (a, b)]
    tails = [net.conv(t, 8, 3, 1, act=None) for t in made]
    return finish(net, *tails)


def attention(seed):
    """Packed queries, keys and values of two heads, as in YOLO11's attention block: heads go whole."""
    net, x = start(seed, batch=1)
    t = net.conv(x, 3, 8)
    qkv = net.reshape(net.conv(t, 8, 24, 1, act=None, label="qkv"), 1, 2, 12, 64)
    q, k, v = net.op("Split", qkv, net.ints(4, 4, 4), outputs=3, axis=2)
    scores = net.op("Softmax", net.op("MatMul", net.op("Transpose", q, perm=[0, 1, 3, 2]), k), axis=-1)
    mixed = net.op("MatMul", v, net.op("Transpose", scores, perm=[0, 1, 3, 2]))
    out = net.conv(net.reshape(mixed, 1, 8, 8, 8), 8, 8, 1, act=None)
    return finish(net, net.conv(net.op("Add", t, out), 8, 3, 1, act=None))


def heads(seed):
    """B22: separate projections with biases, four heads, and a feed-forward layer."""
    net = Net(seed=seed)
    x = net.input("x", [2, 5, 8])

    def linear(t, inputs, outputs):
        return net.op("Add", net.op("MatMul", t, net.w(inputs, outputs)), net.w(outputs))

    q, k, v = (net.op("Reshape", linear(x, 8, 12), net.ints(0, 0, 4, 3)) for _ in range(3))
    q, v = (net.op("Transpose", t, perm=[0, 2, 1, 3]) for t in (q, v))
    scores = net.op(
        "Mul", net.op("MatMul", q, net.op("Transpose", k, perm=[0, 2, 3, 1])), net.w(value=np.float32(0.577))
    )
    mixed = net.op("MatMul", net.op("Softmax", scores, axis=-1), v)
    mixed = net.op("Reshape", net.op("Transpose", mixed, perm=[0, 2, 1, 3]), net.ints(2, 5, 12))
    s = net.op("LayerNormalization", net.op("Add", x, linear(mixed, 12, 8)), net.w(8))
    return finish(net, linear(net.op("Relu", linear(s, 8, 16)), 16, 8))


def grouped_queries(seed):
    """Four query heads share two key heads, repeated by Expand."""
    net = Net(seed=seed)
    x = net.input("x", [2, 5, 8])
    q = net.op(
        "Transpose", net.op("Reshape", net.op("MatMul", x, net.w(8, 12)), net.ints(2, 5, 4, 3)), perm=[0, 2, 1, 3]
    )
    made = []
    for _ in range(2):
        t = net.op("Reshape", net.op("MatMul", x, net.w(8, 6)), net.ints(2, 5, 2, 3))
        t = net.op("Unsqueeze", net.op("Transpose", t, perm=[0, 2, 1, 3]), net.ints(2))
        made.append(net.reshape(net.op("Expand", t, net.ints(2, 2, 2, 5, 3)), 2, 4, 5, 3))
    scores = net.op("Softmax", net.op("MatMul", q, net.op("Transpose", made[0], perm=[0, 1, 3, 2])), axis=-1)
    mixed = net.op("Transpose", net.op("MatMul", scores, made[1]), perm=[0, 2, 1, 3])
    return finish(net, net.op("MatMul", net.reshape(mixed, 2, 5, 12), net.w(12, 4)))


def shuffled(seed):
    """ShuffleNet's channel shuffle."""
    net, x = start(seed, batch=2)
    t = net.reshape(net.conv(x, 3, 8), 2, 2, 4, 8, 8)
    t = net.reshape(net.op("Transpose", t, perm=[0, 2, 1, 3, 4]), 2, 8, 8, 8)
    return finish(net, net.conv(net.conv(t, 8, 6), 6, 4, act=None))


def computed_heads(seed):
    """Heads whose Reshape targets join a computed batch with constants, as exporters write them."""
    net = Net(seed=seed)
    x = net.input("x", ["n", 5, 8])

    def target(t, *rest):
        return net.op("Concat", net.op("Gather", net.op("Shape", t), net.ints(0)), net.ints(*rest), axis=0)

    made = []
    for _ in range(3):
        t = net.op("MatMul", x, net.w(8, 12))
        made.append(net.op("Transpose", net.op("Reshape", t, target(x, 5, 4, 3)), perm=[0, 2, 1, 3]))
    scores = net.op("Softmax", net.op("MatMul", made[0], net.op("Transpose", made[1], perm=[0, 1, 3, 2])), axis=-1)
    mixed = net.op("Transpose", net.op("MatMul", scores, made[2]), perm=[0, 2, 1, 3])
    return finish(net, net.op("MatMul", net.op("Reshape", mixed, target(x, 5, 12)), net.w(12, 4)))


def single_head(seed):
    """Queries and keys that are multiplied over their channels."""
    net, x = start(seed)
    s = net.op("Transpose", net.reshape(net.conv(x, 3, 5), 0, 5, -1), perm=[0, 2, 1])
    q, k, v = (net.op("MatMul", s, net.w(5, width)) for width in (6, 6, 7))
    scores = net.op("Softmax", net.op("MatMul", q, net.op("Transpose", k, perm=[0, 2, 1])), axis=-1)
    return finish(net, net.op("MatMul", net.op("MatMul", scores, v), net.w(7, 4)))


def branching(seed):
    """A branch that reads channels from outside."""
    net, x = start(seed)
    flag = net.input("flag", [], BOOL)
    a, b = net.conv(x, 3, 8, label="outside"), net.conv(x, 3, 8)
    bodies = [
        helper.make_graph([helper.make_node(op, [a], [name])], name, [], [helper.make_tensor_value_info(name, 1, None)])
        for op, name in (("Relu", "yes"), ("Neg", "no"))
    ]
    chosen = net.op("If", flag, then_branch=bodies[0], else_branch=bodies[1])
    mixed = net.conv(net.op("Add", chosen, net.conv(b, 8, 8)), 8, 3, act=None)
    return finish(net, mixed)


def unknown(seed):
    """Operators that mix channels: LayerNormalization, DepthToSpace, Softmax over channels."""
    net, x = start(seed)
    a, b = net.conv(x, 3, 8), net.conv(x, 3, 8)
    d = net.op("DepthToSpace", a, blocksize=2)
    s = net.op("Softmax", b, axis=1)
    n = net.op("LayerNormalization", net.op("Transpose", net.conv(x, 3, 6), perm=[0, 2, 3, 1]), net.w(6))
    tail = net.conv(net.conv(d, 2, 6), 6, 3, act=None)
    return finish(net, tail, net.conv(s, 8, 3, act=None), net.op("MatMul", n, net.w(6, 4)))


def half(seed):
    """float16 weights."""
    net, x = start(seed, dtype=np.float16)
    return finish(net, net.conv(net.conv(x, 3, 8), 8, 4, act=None))


NETS = {
    "concat_twice": concat_twice,
    "c2f": c2f,
    "c2f_opset_12": lambda seed: c2f(seed, opset=12),
    "gate": gate,
    "grouped": grouped,
    "multiplier": multiplier,
    "flat": flat,
    "flat_not_transposed": lambda seed: flat(seed, trans_b=0),
    "viewed": viewed,
    "head": head,
    "residual": residual,
    "upsampled": upsampled,
    "mlp": mlp,
    "pieces": pieces,
    "twins": twins,
    "attention": attention,
    "heads": heads,
    "grouped_queries": grouped_queries,
    "computed_heads": computed_heads,
    "shuffled": shuffled,
    "single_head": single_head,
    "branching": branching,
    "unknown": unknown,
    "half": half,
}


def feeds_of(model, seed=0):
    rng = np.random.default_rng(seed)
    found = {}
    for item in model.graph.input:
        if item.name == "flag":
            found["flag"] = np.asarray(True)
            continue
        dims = [dim.dim_value or 2 for dim in item.type.tensor_type.shape.dim]
        dtype = np.float16 if item.type.tensor_type.elem_type == HALF else np.float32
        found[item.name] = rng.normal(size=dims).astype(dtype)
    return found
