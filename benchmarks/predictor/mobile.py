"""Small classifiers and a volume network from their published tables, as layers."""

from __future__ import annotations

import math

from benchmarks.predictor.layers import Map, Sketch

# Expansion, channels, repeats, stride.
MOBILENET_V2 = (
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)

# Kernel, expanded channels, channels, squeeze-and-excite, stride.
MOBILENET_V3 = (
    (3, 16, 16, False, 1), (3, 64, 24, False, 2), (3, 72, 24, False, 1), (5, 72, 40, True, 2), (5, 120, 40, True, 1),
    (5, 120, 40, True, 1), (3, 240, 80, False, 2), (3, 200, 80, False, 1), (3, 184, 80, False, 1),
    (3, 184, 80, False, 1), (3, 480, 112, True, 1), (3, 672, 112, True, 1), (5, 672, 160, True, 2),
    (5, 960, 160, True, 1), (5, 960, 160, True, 1),
)  # fmt: skip

# Expansion, channels, repeats, stride, kernel of EfficientNet-B0; others scale width and depth.
EFFICIENTNET = (
    (1, 16, 1, 1, 3), (6, 24, 2, 2, 3), (6, 40, 2, 2, 5), (6, 80, 3, 2, 3), (6, 112, 3, 1, 5), (6, 192, 4, 2, 5),
    (6, 320, 1, 1, 3),
)  # fmt: skip
EFFICIENTNET_SIZES = {"b0": (1.0, 1.0, 224), "b1": (1.0, 1.1, 240), "b2": (1.1, 1.2, 260), "b3": (1.2, 1.4, 300)}


def mobilenet_v2(s: Sketch, px: int = 224) -> None:
    x = s.conv((3, px, px), 32, k=3, s=2)
    for expansion, out, count, stride in MOBILENET_V2:
        for index in range(count):
            x = _inverted(s, x, expansion * x[0], out, k=3, stride=stride if index == 0 else 1, squeeze=0)
    _classify(s, s.conv(x, 1280))


def mobilenet_v3(s: Sketch, px: int = 224) -> None:
    """The large one."""
    x = s.conv((3, px, px), 16, k=3, s=2)
    for k, hidden, out, squeeze, stride in MOBILENET_V3:
        x = _inverted(s, x, hidden, out, k=k, stride=stride, squeeze=_eights(hidden / 4) if squeeze else 0)
    x = s.conv(x, 960)
    _pool(s, x)
    s.linear(s.linear((960, 1, 1), 1280), 1000)


def efficientnet(s: Sketch, size: str) -> None:
    width, depth, px = EFFICIENTNET_SIZES[size]
    x = s.conv((3, px, px), _eights(32 * width), k=3, s=2)
    for expansion, out, count, stride, k in EFFICIENTNET:
        for index in range(math.ceil(count * depth)):
            hidden = expansion * x[0]
            x = _inverted(
                s, x, hidden, _eights(out * width), k=k, stride=stride if index == 0 else 1, squeeze=max(1, x[0] // 4)
            )
    _classify(s, s.conv(x, _eights(1280 * width)))


def unet3d(s: Sketch, side: int = 128) -> None:
    """One window of the MLPerf KiTS19 network: 3x3x3 convolutions with instance norm, 32 to 320 channels, 3 classes."""
    widths = (32, 64, 128, 256, 320, 320)
    channels, size = 1, side
    for level, out in enumerate(widths):
        size = size // 2 if level else size
        _conv3d(s, channels, out, size, stride=2 if level else 1)
        channels = _conv3d(s, out, out, size)
    for level in range(len(widths) - 2, -1, -1):
        size *= 2
        out = widths[level]
        weights = channels * out * 8
        s.add(
            "ConvTranspose", flops=2 * weights * (size // 2) ** 3, params=weights + out,
            read=channels * (size // 2) ** 3, out=out * size**3, eligible=True,
        )  # fmt: skip
        s.add("Concat", flops=0, params=0, read=2 * out * size**3, out=2 * out * size**3)
        _conv3d(s, 2 * out, out, size)
        channels = _conv3d(s, out, out, size)
    s.add("Conv", flops=2 * 32 * 3 * side**3, params=99, read=32 * side**3, out=3 * side**3, eligible=True)


def _conv3d(s: Sketch, channels: int, out: int, size: int, *, stride: int = 1) -> int:
    weights, voxels = channels * out * 27, size**3
    s.add(
        "Conv", flops=2 * weights * voxels, params=weights + out, read=channels * voxels * stride**3, out=out * voxels,
        eligible=True,
    )  # fmt: skip
    s.add("InstanceNormalization", flops=8 * out * voxels, params=2 * out, read=out * voxels, out=out * voxels)
    return out


def _inverted(s: Sketch, x: Map, hidden: int, out: int, *, k: int, stride: int, squeeze: int) -> Map:
    y = s.conv(x, hidden) if hidden != x[0] else x
    y = s.conv(y, hidden, k=k, s=stride, g=hidden)
    if squeeze:
        _pool(s, y)
        s.linear(s.linear((hidden, 1, 1), squeeze), hidden)
        s.pointwise("Mul", y, inputs=2)
    y = s.plain_conv(y, out)
    return s.pointwise("Add", y, inputs=2) if stride == 1 and x[0] == out else y


def _pool(s: Sketch, x: Map) -> None:
    s.add("GlobalAveragePool", flops=math.prod(x), params=0, read=math.prod(x), out=x[0])


def _classify(s: Sketch, x: Map) -> None:
    _pool(s, x)
    s.linear((x[0], 1, 1), 1000)


def _eights(channels: float) -> int:
    """The nearest multiple of 8 that is not more than 10 % smaller."""
    nearest = max(8, int(channels + 4) // 8 * 8)
    return nearest + 8 if nearest < 0.9 * channels else nearest
