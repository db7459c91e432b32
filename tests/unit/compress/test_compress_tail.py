"""Detector tails are found by structure in every YOLO layout; other networks lose nothing. Names are random."""

import numpy as np
import pytest
from compress_models import INT64, Net

from edgeds.compress.tail import find_detector_tail
from edgeds.graph.view import GraphView


def backbone(net):
    x = net.input("x", ["N", 3, 32, 32])
    p3 = net.conv(x, 3, 8, act="SiLU", strides=[4, 4], label="stem")
    return p3, net.conv(p3, 8, 8, act="SiLU", strides=[2, 2], label="down")


def head_convs(net, levels, width, tag):
    made = []
    for index, level in enumerate(levels):
        hidden = net.conv(level, 8, 8, act="SiLU", label=f"{tag}_hidden{index}")
        made.append(net.conv(hidden, 8, width, 1, act=None, label=f"{tag}{index}"))
    return made


def v8_parts(net, *, dfl, classes=3):
    levels = backbone(net)
    boxes, scores = head_convs(net, levels, 64, "box"), head_convs(net, levels, classes, "cls")
    joined = [
        net.op("Concat", net.reshape(b, 0, 64, -1), net.reshape(s, 0, classes, -1), axis=1)
        for b, s in zip(boxes, scores, strict=True)
    ]
    both = net.op("Concat", *joined, axis=2)
    box, score = net.op("Split", both, net.ints(64, classes), outputs=2, axis=1)
    weights = np.arange(16, dtype=np.float32)
    if dfl == "Conv":
        soft = net.op("Softmax", net.op("Transpose", net.reshape(box, 0, 4, 16, -1), perm=[0, 2, 1, 3]), axis=1)
        distance = net.reshape(net.op("Conv", soft, net.w(value=weights.reshape(1, 16, 1, 1)), label="dfl"), 0, 4, -1)
    else:
        soft = net.op("Softmax", net.op("Transpose", net.reshape(box, 0, 4, 16, -1), perm=[0, 1, 3, 2]), axis=3)
        distance = net.op(
            "Squeeze", net.op("MatMul", soft, net.w(value=weights.reshape(16, 1)), label="dfl"), net.ints(3)
        )
    return levels, net.op("Mul", distance, net.w(value=np.float32(8.0))), net.op("Sigmoid", score)


def v8(dfl="Conv"):
    net = Net()
    _, box, score = v8_parts(net, dfl=dfl)
    net.output(net.op("Concat", box, score, axis=1))
    return net, {"box0", "box1", "cls0", "cls1"}


def v8_matmul():
    return v8("MatMul")


def end_to_end():
    net = Net()
    _, box, score = v8_parts(net, dfl="Conv")
    boxes, scores = (net.op("Transpose", t, perm=[0, 2, 1]) for t in (box, score))
    _, index = net.op("TopK", net.op("ReduceMax", scores, axes=[-1], keepdims=0), net.ints(5), outputs=2)
    index3 = net.op("Unsqueeze", index, net.ints(2))
    box = net.op("GatherElements", boxes, net.op("Tile", index3, net.ints(1, 1, 4)), axis=1)
    score = net.op("GatherElements", scores, net.op("Tile", index3, net.ints(1, 1, 3)), axis=1)
    net.output(net.op("Concat", box, score, axis=2))
    return net, {"box0", "box1", "cls0", "cls1"}


def v5_decoded():
    net = Net()
    parts = []
    for conv in head_convs(net, backbone(net), 24, "head"):
        grid = net.op("Sigmoid", net.op("Transpose", net.reshape(conv, 0, 3, 8, 64, -1), perm=[0, 1, 3, 4, 2]))
        xy, wh, rest = net.op("Split", grid, net.ints(2, 2, 4), outputs=3, axis=4)
        xy, wh = net.op("Mul", xy, net.w(value=np.float32(16))), net.op("Mul", wh, wh)
        parts.append(net.reshape(net.op("Concat", xy, wh, rest, axis=4), 0, -1, 8))
    net.output(net.op("Concat", *parts, axis=1))
    return net, {"head0", "head1"}


def v5_raw():
    net = Net()
    for conv in head_convs(net, backbone(net), 24, "head"):
        net.output(net.op("Transpose", net.reshape(conv, 0, 3, 8, 64, -1), perm=[0, 1, 3, 4, 2]))
    return net, {"head0", "head1"}


def yolox():
    net = Net()
    levels = backbone(net)
    parts = []
    for box, obj, cls in zip(
        *(head_convs(net, levels, w, t) for w, t in ((4, "box"), (1, "obj"), (3, "cls"))), strict=True
    ):
        joined = net.op("Concat", box, net.op("Sigmoid", obj), net.op("Sigmoid", cls), axis=1)
        parts.append(net.reshape(joined, 0, 8, -1))
    net.output(net.op("Transpose", net.op("Concat", *parts, axis=2), perm=[0, 2, 1]))
    return net, {f"{tag}{i}" for tag in ("box", "obj", "cls") for i in (0, 1)}


def segmentation():
    net = Net()
    levels, box, score = v8_parts(net, dfl="Conv")
    masks = [net.reshape(conv, 0, 4, -1) for conv in head_convs(net, levels, 4, "mask")]
    net.output(net.op("Concat", box, score, net.op("Concat", *masks, axis=2), axis=1))
    net.output(
        net.conv(net.conv(levels[0], 8, 8, act="SiLU", label="proto_hidden"), 8, 4, 1, act="SiLU", label="proto")
    )
    return net, {"box0", "box1", "cls0", "cls1", "mask0", "mask1"}


def pose():
    net = Net()
    levels, box, score = v8_parts(net, dfl="Conv")
    points = net.op("Concat", *[net.reshape(c, 0, 6, -1) for c in head_convs(net, levels, 6, "points")], axis=2)
    points = net.op("Mul", points, net.w(value=np.float32(8)))
    net.output(net.op("Concat", box, score, points, axis=1))
    return net, {"box0", "box1", "cls0", "cls1", "points0", "points1"}


@pytest.mark.parametrize("build", [v8, v8_matmul, end_to_end, v5_decoded, v5_raw, yolox, segmentation, pose])
@pytest.mark.parametrize("seed", [0, 7])
def test_detectors_keep_their_tail_in_float_b36(build, seed, monkeypatch):
    """B36: exactly the last learned layers before decoding, and the decoding itself; hidden layers are not lost."""
    monkeypatch.setattr(Net.__init__, "__kwdefaults__", {**Net.__init__.__kwdefaults__, "seed": seed})
    net, last = build()
    model = net.model()
    view = GraphView(model)
    tail = find_detector_tail(view)
    labels = {name: label for label, name in net.names.items()}
    assert {labels[name] for name in tail.last_layers} == last
    kept = {labels[name] for name in tail.nodes if name in labels}
    assert kept <= {"dfl"}
    covered = {node.op_type for node in view.nodes if tail.covers(node.name)}
    assert not covered & {"MaxPool", "Relu"}
    assert tail.reason.startswith("detector tail of output")


def classifier():
    net = Net()
    x = net.conv(net.input("x", ["N", 3, 32, 32]), 3, 8)
    x = net.op("Flatten", net.op("GlobalAveragePool", net.op("Add", x, net.conv(x, 8, 8, act=None))))
    net.output(net.op("Softmax", net.op("Gemm", x, net.w(8, 5), net.w(5)), axis=1))
    return net


def unet():
    net = Net()
    a = net.conv(net.input("x", ["N", 3, 32, 32]), 3, 8)
    b = net.conv(net.op("MaxPool", a, kernel_shape=[2, 2], strides=[2, 2]), 8, 8)
    up = net.op("ConvTranspose", b, net.w(8, 8, 2, 2), strides=[2, 2])
    net.output(net.op("Sigmoid", net.conv(net.op("Concat", up, a, axis=1), 16, 2, 1, act=None)))
    return net


def two_heads():
    net = Net()
    x = net.op("Relu", net.op("Gemm", net.input("x", ["N", 16]), net.w(16, 12), net.w(12)))
    for width in (3, 3):
        net.output(net.op("Gemm", x, net.w(12, width), net.w(width)))
    return net


def encoder():
    net = Net()
    x = net.op("Gather", net.w(20, 8), net.input("ids", ["N", "L"], INT64))
    q, k, v = (net.op("MatMul", x, net.w(8, 8)) for _ in range(3))
    a = net.op("Softmax", net.op("MatMul", q, net.op("Transpose", k, perm=[0, 2, 1])), axis=-1)
    net.output(net.op("Add", x, net.op("MatMul", net.op("MatMul", a, v), net.w(8, 8))))
    return net


def feature_pyramid():
    """Several feature maps of different widths, as backbones export them."""
    net = Net()
    x = net.conv(net.input("x", ["N", 3, 32, 32]), 3, 8)
    y = net.conv(x, 8, 16, strides=[2, 2])
    net.output(x)
    net.output(y)
    return net


@pytest.mark.parametrize("build", [classifier, unet, two_heads, encoder, feature_pyramid])
def test_other_networks_lose_no_layer(build):
    tail = find_detector_tail(GraphView(build().model()))
    assert not tail.nodes
    assert not tail.last_layers
