"""Small transformers in the forms that exporters write, with dead heads and units planted on request."""

from __future__ import annotations

import numpy as np
from compress_models import INT64, Net
from onnx import helper

from edgeds.graph.shapes import fill_output_shapes

HIDDEN, HEADS, SIZE, WIDTH, VOCAB = 16, 4, 4, 24, 30
FORMS = ("separate", "pack_first", "heads_first", "split", "gemm", "multihead", "fused", "onnx_attention")
MICROSOFT = "com.microsoft"


class Encoder(Net):
    """A Net whose ``dead`` heads and ``gone`` units (layer -> indices) reach no output."""

    def __init__(self, *, seed=0, opset=17, dead=None, gone=None):
        super().__init__(seed=seed, opset=opset)
        self.dead, self.gone = dead or {}, gone or {}

    def linear(self, t, inputs, outputs, *, zero_rows=(), label=None):
        weight = self.w(inputs, outputs)
        self.weights[weight][list(zero_rows)] = 0
        return self.op("Add", self.op("MatMul", t, weight, label=label), self.w(outputs, scale=0.1))

    def norm(self, t, width=HIDDEN):
        return self.op("LayerNormalization", t, self.w(value=np.ones(width, np.float32)), self.w(width), axis=-1)

    def size(self, t, axis):
        """One dim of a tensor as a vector, computed as PyTorch writes it."""
        dim = self.op("Gather", self.op("Shape", t), self.w(value=np.asarray(axis)), axis=0)
        return self.op("Unsqueeze", dim, self.ints(0))

    def view(self, t, source, *rest):
        """view(b, s, *rest) with sizes taken from ``source``."""
        sizes = [self.ints(item) for item in rest]
        return self.op("Reshape", t, self.op("Concat", self.size(source, 0), self.size(source, 1), *sizes, axis=0))


def scores(net, q, k, v, bias, *, size=SIZE):
    """softmax(q k^T / sqrt(d) + bias) v over (b, heads, s, d)."""
    product = net.op("MatMul", q, net.op("Transpose", k, perm=[0, 1, 3, 2]))
    scaled = net.op("Div", product, net.w(value=np.float32(np.sqrt(size))))
    return net.op("MatMul", net.op("Softmax", net.op("Add", scaled, bias), axis=-1), v)


def _triple(net, x, form):
    """Queries, keys and values (b, heads, s, d) from one packed layer."""
    wide = net.linear(x, HIDDEN, 3 * HEADS * SIZE)
    if form == "split":
        parts = net.op("Split", wide, net.ints(*[HEADS * SIZE] * 3), outputs=3, axis=2)
        return [net.op("Transpose", net.view(t, x, -1, SIZE), perm=[0, 2, 1, 3]) for t in parts]
    if form == "pack_first":  # ViT, Swin: (b, s, 3, heads, d)
        t = net.op("Transpose", net.view(wide, x, 3, HEADS, SIZE), perm=[2, 0, 3, 1, 4])
        return [net.op("Gather", t, net.w(value=np.asarray(index)), axis=0) for index in range(3)]
    parts = net.op("Split", net.view(wide, x, HEADS, 3 * SIZE), net.ints(*[SIZE] * 3), outputs=3, axis=3)
    return [net.op("Transpose", t, perm=[0, 2, 1, 3]) for t in parts]


def _context(net, x, bias, form):
    """What all heads give, (b, s, heads * d)."""
    wide = HEADS * SIZE
    if form == "fused":
        weight, vector = net.w(HIDDEN, 3 * wide), net.w(3 * wide, scale=0.1)
        return net.op("Attention", x, weight, vector, domain=MICROSOFT, num_heads=HEADS)
    if form in ("multihead", "onnx_attention"):
        q, k, v = (net.op("MatMul", x, net.w(HIDDEN, wide)) for _ in range(3))
        if form == "multihead":
            return net.op("MultiHeadAttention", q, k, v, net.w(3 * wide, scale=0.1), domain=MICROSOFT, num_heads=HEADS)
        return net.op("Attention", q, k, v, q_num_heads=HEADS, kv_num_heads=HEADS)
    if form == "gemm":
        made = []
        for _ in range(3):
            flat = net.op("Gemm", net.reshape(x, -1, HIDDEN), net.w(wide, HIDDEN), net.w(wide, scale=0.1), transB=1)
            made.append(net.op("Transpose", net.view(flat, x, HEADS, SIZE), perm=[0, 2, 1, 3]))
    elif form == "separate":
        made = [
            net.op("Transpose", net.view(net.linear(x, HIDDEN, wide), x, -1, SIZE), perm=[0, 2, 1, 3]) for _ in range(3)
        ]
    else:
        made = _triple(net, x, form)
    mixed = net.op("Transpose", scores(net, *made, bias), perm=[0, 2, 1, 3])
    return net.view(mixed, x, -1)


def embed(net):
    ids, mask = net.input("input_ids", ["b", "s"], INT64), net.input("attention_mask", ["b", "s"], INT64)
    x = net.op("Gather", net.w(VOCAB, HIDDEN, scale=1), ids)
    shown = net.op("Unsqueeze", net.op("Cast", mask, to=1), net.ints(1, 2))
    one = net.w(value=np.float32(1))
    return x, net.op("Mul", net.op("Sub", one, shown), net.w(value=np.float32(-1e4)))


def bert(seed=0, *, form="separate", layers=2, pre=False, dead=None, gone=None):
    """An encoder with its normalisation after (BERT) or before each part; output (b, s, hidden)."""
    net = Encoder(seed=seed, opset=23 if form == "onnx_attention" else 17, dead=dead, gone=gone)
    x, bias = embed(net)
    if not pre:
        x = net.norm(x)
    for index in range(layers):
        rows = [head * SIZE + place for head in net.dead.get(index, ()) for place in range(SIZE)]
        inner = net.norm(x) if pre else x
        a = net.linear(_context(net, inner, bias, form), HEADS * SIZE, HIDDEN, zero_rows=rows, label=f"out{index}")
        x = net.op("Add", x, a) if pre else net.norm(net.op("Add", a, x))
        h = net.op("Relu", net.linear(net.norm(x) if pre else x, HIDDEN, WIDTH, label=f"up{index}"))
        h = net.linear(h, WIDTH, HIDDEN, zero_rows=net.gone.get(index, ()), label=f"down{index}")
        x = net.op("Add", x, h) if pre else net.norm(net.op("Add", h, x))
    net.output(net.norm(x) if pre else x, ["b", "s", HIDDEN])
    return _finished(net)


def _finished(net):
    model = net.model()
    if any(node.domain == MICROSOFT for node in model.graph.node):
        model.opset_import.append(helper.make_opsetid(MICROSOFT, 1))
    fill_output_shapes(model)
    return model


def decoder(seed=0, *, layers=2, queries=4, keys=2, dead=None, gone=None, cache=False):
    """Grouped queries repeated by Expand as PyTorch writes it, query norms, a gated feed-forward, logits."""
    net = Encoder(seed=seed, dead=dead, gone=gone)
    x, bias = embed(net)
    repeat = queries // keys
    for index in range(layers):
        inner = net.norm(x)
        q, k, v = (
            net.view(net.op("MatMul", inner, net.w(HIDDEN, count * SIZE)), inner, -1, SIZE)
            for count in (queries, keys, keys)
        )
        q, k, v = (net.op("Transpose", t, perm=[0, 2, 1, 3]) for t in (net.norm(q, SIZE), net.norm(k, SIZE), v))
        if cache:
            net.output(k, ["b", keys, "s", SIZE])
        k, v = (_repeated(net, t, repeat) for t in (k, v))
        mixed = net.view(net.op("Transpose", scores(net, q, k, v, bias), perm=[0, 2, 1, 3]), inner, -1)
        rows = [head * SIZE + place for head in net.dead.get(index, ()) for place in range(SIZE)]
        weight = net.w(queries * SIZE, HIDDEN)
        net.weights[weight][rows] = 0
        x = net.op("Add", x, net.op("MatMul", mixed, weight))
        inner = net.norm(x)
        gate, up = (net.op("MatMul", inner, net.w(HIDDEN, WIDTH)) for _ in range(2))
        weight = net.w(WIDTH, HIDDEN)
        net.weights[weight][list(net.gone.get(index, ()))] = 0
        h = net.op("Mul", net.op("Mul", gate, net.op("Sigmoid", gate)), up)
        x = net.op("Add", x, net.op("MatMul", h, weight))
    net.output(net.op("MatMul", net.norm(x), net.w(HIDDEN, VOCAB)))
    return _finished(net)


def _repeated(net, t, repeat):
    """(b, keys, s, d) to (b, keys * repeat, s, d), sizes computed and -1 guarded as PyTorch does."""
    one = [net.op("Gather", net.op("Shape", t), net.w(value=np.asarray(axis)), axis=0) for axis in range(3)]
    b, keys, s = (net.op("Unsqueeze", item, net.ints(0)) for item in one)
    target = net.op("Concat", b, keys, net.ints(repeat), s, net.ints(SIZE), axis=0)
    target = net.op("Reshape", target, net.ints(-1))
    test = net.op("Equal", target, net.ints(*[-1] * 5))
    target = net.op("Where", test, net.ints(*[1] * 5), target)
    wide = net.op("Expand", net.op("Unsqueeze", t, net.ints(2)), target)
    heads = net.op("Unsqueeze", net.op("Mul", one[1], net.w(value=np.asarray(repeat))), net.ints(0))
    return net.op("Reshape", wide, net.op("Concat", b, heads, s, net.ints(SIZE), axis=0))


def texts(seed=0, *, batch=2, length=6):
    rng = np.random.default_rng(seed)
    mask = np.ones((batch, length), np.int64)
    mask[0, length - 2 :] = 0
    return {"input_ids": rng.integers(0, VOCAB, (batch, length)), "attention_mask": mask}
