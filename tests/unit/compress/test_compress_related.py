"""Graphs of every kind that users bring, quantized with defaults in both forms and compared on fresh feeds."""

import numpy as np
import onnx
import pytest
from compress_models import BOOL, DOUBLE, FLOAT, INT64, Net, image_feeds, quantize, worst_error
from onnx import helper

CASES = {}


def case(*, feeds=None, quantized):
    """Register a builder with its feeds and how many nodes it must get quantized."""

    def register(build):
        CASES[build.__name__] = (build, feeds or image_feeds(), quantized)
        return build

    return register


def net_with(x_dims=("N", 3, 16, 16), **options):
    net = Net(**options)
    return net, net.input("x", list(x_dims))


def f32(value):
    return np.asarray(value, np.float32)


@case(feeds=image_feeds((2, 4, 12)), quantized=2)
def transposed_1d_grouped():
    net, x = net_with(("N", 4, 12))
    attrs = {"group": 2, "strides": [3], "output_padding": [2], "dilations": [2]}
    x = net.op("LeakyRelu", net.op("ConvTranspose", x, net.w(4, 3, 3), net.w(6), **attrs), alpha=0.2)
    net.output(net.op("Conv", x, net.w(2, 6, 1)))
    return net


@case(feeds=image_feeds((5, 8)), quantized=2)
def gemm_trans_a_and_left_constant():
    net, x = net_with((5, 8))
    y = net.op("Gemm", x, net.w(5, 6), net.w(6), transA=1, alpha=0.5, beta=3.0)
    net.output(net.op("MatMul", net.w(4, 8), y))
    return net


@case(quantized=3)
def split_slice_resize():
    net, x = net_with()
    a, b = net.op("Split", net.conv(x, 3, 8, act="HardSwish"), net.ints(4, 4), outputs=2, axis=1)
    b = net.op("Slice", b, net.ints(0), net.ints(2**62), net.ints(2), net.ints(2))
    b = net.op("Resize", b, "", net.w(value=f32([1, 1, 2, 1])), mode="linear")
    b = net.conv(b, 4, 4, act="Relu")
    net.output(net.conv(net.op("Concat", a, b, a, axis=1), 12, 2, 1, act="Tanh"))
    return net


@case(quantized=3)
def activations():
    net, x = net_with()
    x = net.op("PRelu", net.conv(x, 3, 6, act=None), net.w(6, 1, 1))
    x = net.op("Clip", net.conv(x, 6, 6, act=None), net.w(value=f32(0)), net.w(value=f32(6)))
    net.output(net.op("Elu", net.conv(x, 6, 6, act=None)))
    return net


@case(quantized=2)
def shared_bias():
    net, x = net_with()
    bias = net.w(4)
    y = net.op("Conv", x, net.w(4, 3, 1, 1), bias)
    net.output(net.op("Conv", net.op("Relu", y), net.w(4, 4, 1, 1), bias))
    net.output(net.op("Add", net.reshape(y, 0, 0, -1), net.op("Unsqueeze", bias, net.ints(1))))
    return net


@case(quantized=3)
def norms_and_padding():
    net, x = net_with()
    x = net.conv(net.op("Pad", x, net.ints(0, 0, 1, 1, 0, 0, 1, 1), mode="reflect"), 3, 4, act=None, pads=[0] * 4)
    x = net.op("InstanceNormalization", x, net.w(4), net.w(4))
    x = net.conv(net.op("Tile", x, net.ints(1, 2, 1, 1)), 8, 4)
    x = net.op("Mul", x, net.op("Expand", net.w(value=f32([[[2]]])), net.ints(4, 1, 1)))
    x = net.op("Flatten", net.op("GlobalAveragePool", x))
    net.output(net.op("Gemm", x, net.w(4, 3), net.w(3)))
    return net


@case(quantized=2)
def same_padding_dilation_depthwise():
    net, x = net_with()
    x = net.op("Conv", x, net.w(6, 1, 3, 3), net.w(6), group=3, auto_pad="SAME_UPPER", strides=[2, 2])
    net.output(net.op("Conv", net.op("Relu", x), net.w(2, 6, 3, 3), dilations=[2, 2], pads=[2] * 4))
    return net


def token_feeds(seed):
    rng = np.random.default_rng(seed)
    mask = rng.random((2, 6)) > 0.3
    mask[:, 0] = True
    return {"x": rng.normal(size=(2, 6, 8)).astype(np.float32), "mask": mask}


@case(feeds=token_feeds, quantized=6)
def attention_with_infinite_mask():
    net, x = net_with(("N", "L", 8))
    mask = net.op("Unsqueeze", net.input("mask", ["N", "L"], BOOL), net.ints(1))
    q, k, v = (net.op("Add", net.op("MatMul", x, net.w(8, 8)), net.w(8)) for _ in range(3))
    scores = net.op("MatMul", q, net.op("Transpose", k, perm=[0, 2, 1]))
    scores = net.op("Where", mask, scores, net.w(value=f32(-np.inf)))
    y = net.op("MatMul", net.op("Softmax", scores, axis=-1), v)
    y = net.op("Add", x, net.op("MatMul", y, net.w(8, 8)))
    net.output(net.op("LayerNormalization", y, net.w(value=np.ones(8, np.float32)), net.w(8), axis=-1))
    return net


@case(feeds=image_feeds((2, 5, 8)), quantized=2)
def recurrent_nodes_are_left_alone():
    net, x = net_with((2, 5, 8))
    x = net.op("Transpose", net.op("MatMul", x, net.w(8, 6)), perm=[1, 0, 2])
    x = net.op("Squeeze", net.op("LSTM", x, net.w(1, 16, 6), net.w(1, 16, 4), net.w(1, 32), hidden_size=4), net.ints(1))
    x = net.op("Squeeze", net.op("GRU", x, net.w(1, 12, 4), net.w(1, 12, 4), hidden_size=4), net.ints(1))
    net.output(net.op("MatMul", x, net.w(4, 3)))
    return net


@case(feeds=image_feeds((2, 8)), quantized=2)
def loop_with_a_layer_inside():
    net, x = net_with(("N", 8))
    weight = net.w(8, 8, scale=0.1)
    start = net.op("MatMul", x, net.w(8, 8))
    value = helper.make_tensor_value_info
    body = helper.make_graph(
        [
            helper.make_node("MatMul", ["state", weight], ["step"], "inner"),
            helper.make_node("Add", ["step", start], ["next"], "add"),
            helper.make_node("Identity", ["cond"], ["cond_out"], "id"),
        ],
        "body",
        [value("i", INT64, []), value("cond", BOOL, []), value("state", FLOAT, ["N", 8])],
        [value("cond_out", BOOL, []), value("next", FLOAT, ["N", 8])],
    )
    y = net.op("Loop", net.w(value=np.int64(3)), net.w(value=np.array(True)), start, body=body)
    net.output(net.op("MatMul", y, net.w(8, 3)), ["N", 3])
    return net


@case(feeds=lambda seed: {"x": np.random.default_rng(seed).normal(size=(2, 8))}, quantized=1)
def double_input():
    net = Net()
    x = net.op("Cast", net.input("x", ["N", 8], DOUBLE), to=FLOAT)
    net.output(net.op("Cast", net.op("MatMul", x, net.w(8, 3)), to=DOUBLE), elem=DOUBLE)
    return net


@case(feeds=lambda seed: {"x": np.random.default_rng(seed).integers(0, 255, (2, 8, 8, 3), dtype=np.uint8)}, quantized=2)
def bytes_input():
    net = Net()
    x = net.op("Cast", net.input("x", ["N", 8, 8, 3], onnx.TensorProto.UINT8), to=FLOAT)
    x = net.op("Div", net.op("Transpose", x, perm=[0, 3, 1, 2]), net.w(value=f32(255)))
    net.output(net.conv(net.conv(x, 3, 4), 4, 2, 1, act=None))
    return net


@case(quantized=2)
def zero_size_tensors():
    net, x = net_with()
    y = net.conv(x, 3, 4)
    nothing = net.op("Slice", y, net.ints(0), net.ints(0), net.ints(1))
    net.output(net.conv(net.op("Concat", y, nothing, axis=1), 4, 2, 1, act=None))
    net.output(nothing)
    return net


@case(quantized=2)
def outputs_that_are_also_read():
    net, x = net_with()
    y = net.conv(x, 3, 4, act=None)
    net.output(y)
    z = net.op("Add", y, y)
    net.output(z)
    net.output(net.op("Conv", z, net.w(4, 4, 1, 1)))
    return net


@case(quantized=2)
def upsample_and_old_batchnorm():
    net, x = net_with(opset=9)
    y = net.op("Conv", x, net.w(4, 3, 3, 3))
    positive = net.w(value=f32([1, 2, 0.5, 1]))
    y = net.op("Relu", net.op("BatchNormalization", y, positive, net.w(4), net.w(4), positive))
    y = net.op("Upsample", y, net.w(value=f32([1, 1, 2, 2])), mode="nearest")
    net.output(net.op("Conv", y, net.w(2, 4, 1, 1)), ["N", 2, 28, 28])
    return net


@case(quantized=4)
def squeeze_and_excite():
    net, x = net_with()
    x = net.conv(x, 3, 8, act="SiLU")
    gate = net.conv(net.conv(net.op("GlobalAveragePool", x), 8, 2, 1, act="SiLU"), 2, 8, 1, act="HardSigmoid")
    net.output(net.conv(net.op("Mul", x, gate), 8, 4, 1, act=None))
    return net


@case(feeds=image_feeds((2, 3, 16, 16), scale=1e-6), quantized=2)
def tiny_values():
    net, x = net_with()
    net.output(net.conv(net.conv(x, 3, 4, bias=False), 4, 2, 1, act=None, bias=False))
    return net


@case(feeds=image_feeds((2, 3, 16, 16), scale=1e6), quantized=2)
def huge_values():
    net, x = net_with()
    net.output(net.conv(net.conv(x, 3, 4), 4, 2, 1, act=None))
    return net


@case(feeds=image_feeds((2, 6, 8)), quantized=2)
def batched_products_without_weights():
    net, x = net_with(("N", 6, 8))
    y = net.op("MatMul", x, net.op("Transpose", x, perm=[0, 2, 1]))
    net.output(net.op("MatMul", net.op("Softmax", y, axis=-1), x))
    return net


@case(feeds=image_feeds((2, 3, 16, 16)), quantized=3)
def dense_block_with_pools():
    net, x = net_with()
    a = net.conv(x, 3, 4)
    b = net.op("Concat", a, net.conv(a, 4, 4), axis=1)
    pooled = net.op("AveragePool", b, kernel_shape=[2, 2], strides=[2, 2])
    peak = net.op("MaxPool", b, kernel_shape=[2, 2], strides=[2, 2])
    net.output(net.conv(net.op("Concat", pooled, peak, axis=1), 16, 2, 1, act=None))
    return net


@case(feeds=lambda seed: {"ids": np.random.default_rng(seed).integers(0, 20, (2, 6))}, quantized=3)
def embedding_bag():
    net = Net()
    x = net.op("Gather", net.w(20, 8, scale=1.0), net.input("ids", ["N", "L"], INT64))
    x = net.op("ReduceMean", net.op("Sigmoid", net.op("MatMul", x, net.w(8, 16))), axes=[1], keepdims=0)
    x = net.op("Gemm", x, net.w(16, 8), net.w(8), transB=0)
    net.output(net.op("Softmax", net.op("Gemm", net.op("Tanh", x), net.w(8, 4)), axis=1))
    return net


@pytest.mark.parametrize("name", CASES)
def test_graph(name, tmp_path):
    build, feeds, quantized = CASES[name]
    net = build()
    model = net.model()
    report, int8 = quantize(tmp_path, model, feeds, cpu_out=tmp_path / "cpu.onnx")
    assert report.quantized_nodes == quantized, report.float_nodes
    assert worst_error(model, int8, feeds) < 0.15
    assert worst_error(model, tmp_path / "cpu.onnx", feeds) < 0.15
