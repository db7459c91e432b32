"""YOLOv7, v9, v10 and 26, RetinaNet, SSD-MobileNet and RF-DETR from the published descriptions of their blocks."""

from __future__ import annotations

from benchmarks.predictor import detectors as d
from benchmarks.predictor.layers import Map, Sketch
from benchmarks.predictor.networks import residual

V10_SCALES = {"n": (0.33, 0.25, 1024), "s": (0.33, 0.5, 1024), "m": (0.67, 0.75, 768)}

# Widths of the stages and of the join behind them, repeats of the inner blocks, per size of YOLOv9.
V9_SIZES = {
    "t": ((16, 32), (32, 64, 96, 128), 3, (48, 64)),
    "s": ((32, 64), (64, 128, 192, 256), 3, (96, 128)),
    "m": ((32, 64), (128, 240, 360, 480), 1, (184, 240)),
}

# Image side, patch, decoder layers, width, layers and heads of the backbone, width of the decoder.
RF_DETR = {
    "nano": (384, 16, 2, 384, 6),
    "small": (512, 16, 3, 384, 6),
    "medium": (576, 16, 4, 384, 6),
    "base": (560, 14, 3, 384, 6),
    "large": (560, 14, 3, 768, 12),
}


def yolov7(s: Sketch, px: int = 640) -> None:
    def down(x: Map, c: int) -> tuple[Map, Map]:
        return s.conv(s.pool(x, k=2, s=2), c), s.conv(s.conv(x, c), c, k=3, s=2)

    x = s.conv(s.conv((3, px, px), 32, k=3), 64, k=3, s=2)
    x = _elan(s, s.conv(s.conv(x, 64, k=3), 128, k=3, s=2), 64, 256)
    p3 = _elan(s, s.cat(*down(x, 128)), 128, 512)
    p4 = _elan(s, s.cat(*down(p3, 256)), 256, 1024)
    p5 = _elan(s, s.cat(*down(p4, 512)), 256, 1024)
    y = s.conv(s.conv(s.conv(p5, 512), 512, k=3), 512)
    pools = [s.pool(y, k=k, s=1) for k in (5, 9, 13)]
    y = s.conv(s.conv(s.cat(y, *pools), 512), 512, k=3)
    p5 = s.conv(s.cat(y, s.conv(p5, 512)), 512)
    t4 = _elan_head(s, s.cat(s.conv(p4, 256), s.resize(s.conv(p5, 256))), 256)
    o3 = _elan_head(s, s.cat(s.conv(p3, 128), s.resize(s.conv(t4, 128))), 128)
    o4 = _elan_head(s, s.cat(*down(o3, 128), t4), 256)
    o5 = _elan_head(s, s.cat(*down(o4, 256), p5), 512)
    _anchor_head(s, [s.conv(o, 2 * o[0], k=3) for o in (o3, o4, o5)])


def yolov7_tiny(s: Sketch, px: int = 640) -> None:
    x = s.conv(s.conv((3, px, px), 32, k=3, s=2), 64, k=3, s=2)
    x = _elan_tiny(s, x, 32, 64)
    p3 = _elan_tiny(s, s.pool(x, k=2, s=2), 64, 128)
    p4 = _elan_tiny(s, s.pool(p3, k=2, s=2), 128, 256)
    p5 = _elan_tiny(s, s.pool(p4, k=2, s=2), 256, 512)
    y, other = s.conv(p5, 256), s.conv(p5, 256)
    y = s.conv(s.cat(y, *(s.pool(y, k=k, s=1) for k in (5, 9, 13))), 256)
    p5 = s.conv(s.cat(y, other), 256)
    t4 = _elan_tiny(s, s.cat(s.conv(p4, 128), s.resize(s.conv(p5, 128))), 64, 128)
    o3 = _elan_tiny(s, s.cat(s.conv(p3, 64), s.resize(s.conv(t4, 64))), 32, 64)
    o4 = _elan_tiny(s, s.cat(s.conv(o3, 128, k=3, s=2), t4), 64, 128)
    o5 = _elan_tiny(s, s.cat(s.conv(o4, 256, k=3, s=2), p5), 128, 256)
    _anchor_head(s, [s.conv(o, 2 * o[0], k=3) for o in (o3, o4, o5)])


def yolov9(s: Sketch, size: str, px: int = 640) -> None:
    stem, (c2, c3, c4, c5), n, (n4, n5) = V9_SIZES[size]
    x = s.conv(s.conv((3, px, px), stem[0], k=3, s=2), stem[1], k=3, s=2)
    x = _elan1(s, x, c2) if size != "m" else _gelan(s, x, c2, n)
    p3 = _gelan(s, s.conv(x, c3, k=3, s=2), c3, n)
    p4 = _gelan(s, s.conv(p3, c4, k=3, s=2), c4, n)
    p5 = _gelan(s, s.conv(p4, c5, k=3, s=2), c5, n)
    y = s.conv(p5, c5 // 2)
    pools = [y]
    for _ in range(3):
        pools.append(s.pool(pools[-1], k=5, s=1))
    p5 = s.conv(s.cat(*pools), c5)
    t4 = _gelan(s, s.cat(s.resize(p5), p4), c4, n)
    o3 = _gelan(s, s.cat(s.resize(t4), p3), c3, n)
    o4 = _gelan(s, s.cat(s.conv(o3, n4, k=3, s=2), t4), c4, n)
    o5 = _gelan(s, s.cat(s.conv(o4, n5, k=3, s=2), p5), c5, n)
    d.head(s, [o3, o4, o5], light=False)


def yolov10(s: Sketch, size: str, px: int = 640) -> None:
    depth, width, top = V10_SCALES[size]
    c = {ch: d.width_of(ch, width, top) for ch in (64, 128, 256, 512, 1024)}
    n3, n6 = d.depth_of(3, depth), d.depth_of(6, depth)
    x = s.conv(s.conv((3, px, px), c[64], k=3, s=2), c[128], k=3, s=2)
    x = d.c2f(s, x, c[128], n3, add=True)
    p3 = d.c2f(s, s.conv(x, c[256], k=3, s=2), c[256], n6, add=True)
    p4 = d.c2f(s, _down(s, p3, c[512]), c[512], n6, add=True)
    last = (
        d.c2f(s, _down(s, p4, c[1024]), c[1024], n3, add=True)
        if size == "n"
        else _cib(s, _down(s, p4, c[1024]), c[1024], n3)
    )
    p5 = d.psa(s, d.sppf(s, last, c[1024]), 1)
    t4 = d.c2f(s, s.cat(s.resize(p5), p4), c[512], n3, add=False)
    o3 = d.c2f(s, s.cat(s.resize(t4), p3), c[256], n3, add=False)
    joined = s.cat(s.conv(o3, c[256], k=3, s=2), t4)
    o4 = _cib(s, joined, c[512], n3) if size == "m" else d.c2f(s, joined, c[512], n3, add=False)
    o5 = _cib(s, s.cat(_down(s, o4, c[512]), p5), c[1024], n3)
    d.head(s, [o3, o4, o5], light=True)


def yolo26(s: Sketch, size: str, px: int = 640) -> None:
    """The layout of YOLO11 with one bin per box side: boxes are regressed directly, and no NMS follows."""
    d.yolo11(s, size, px, bins=1)


def retinanet_resnext50(s: Sketch, px: int = 800, classes: int = 264) -> None:
    """The MLPerf variant: ResNeXt-50 32x4d, a pyramid of 256 channels on five levels, nine anchors."""
    x = s.pool(s.conv((3, px, px), 64, k=7, s=2), k=3, s=2)
    maps = []
    for stage, count in enumerate((3, 4, 6, 3)):
        for index in range(count):
            stride, width, out = 2 if stage and not index else 1, 128 << stage, 256 << stage
            if x[0] != out:
                s.conv(x, out, s=stride)
            x = s.conv(s.conv(s.conv(x, width), width, k=3, s=stride, g=32), out)
            x = s.pointwise("Add", x, inputs=2)
        maps.append(x)
    levels = [s.conv(one, 256) for one in maps[1:]]
    for lower in (levels[1], levels[0]):
        s.resize((256, lower[1] // 2, lower[2] // 2))
        s.pointwise("Add", lower, inputs=2)
    pyramid = [s.conv(one, 256, k=3) for one in levels]
    pyramid.append(s.conv(pyramid[-1], 256, k=3, s=2))
    pyramid.append(s.conv(pyramid[-1], 256, k=3, s=2))
    _shared_heads(s, pyramid, (9 * classes, 36))


def ssd_mobilenet_v1(s: Sketch, px: int = 300) -> None:
    """The MLPerf variant: six feature maps, 91 classes, 1x1 predictors."""
    x = s.conv((3, px, px), 32, k=3, s=2)
    maps = []
    for index, (out, stride) in enumerate(
        ((64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), *((512, 1),) * 5, (1024, 2), (1024, 1))
    ):
        x = s.conv(s.conv(x, x[0], k=3, s=stride, g=x[0]), out)
        if index in (10, 12):
            maps.append(x)
    for hidden, out in ((256, 512), (128, 256), (128, 256), (64, 128)):
        x = s.conv(s.conv(x, hidden), out, k=3, s=2)
        maps.append(x)
    for one, boxes in zip(maps, (3, 6, 6, 6, 6, 6), strict=True):
        s.conv(one, boxes * 4)
        s.conv(one, boxes * 91)


def rf_detr(s: Sketch, size: str) -> None:
    """A DINOv2 backbone with windows of a quarter of the image (every third block global), a light decoder over 300
    queries with deformable attention at one scale."""
    px, patch, layers, width, heads = RF_DETR[size]
    side = px // patch
    tokens = side * side
    s.conv((3, px, px), width, k=patch, s=patch)
    x: Map = (width, tokens, 1)
    for block in range(12):
        s.linear(x, 3 * width)
        windows = 1 if block % 3 == 2 else 4
        for _ in range(windows):
            d.attend(s, tokens // windows, heads, width // heads, width // heads)
        s.linear(x, width)
        s.pointwise("LayerNormalization", x, inputs=2)
        s.linear(s.linear(x, 4 * width), width)
        s.pointwise("LayerNormalization", x, inputs=2)
    hidden = 256 if width == 384 else 384
    y = d.c2f(s, s.cat(*[(width, side, side)] * 4), hidden, 3, add=False)
    memory: Map = (hidden, y[1] * y[2], 1)
    s.linear(s.linear(memory, hidden), 91)
    s.linear(s.linear(s.linear(memory, hidden), hidden), 4)
    queries: Map = (hidden, 300, 1)
    for _ in range(layers):
        s.linear(queries, 3 * hidden)
        d.attend(s, 300, 8, hidden // 8, hidden // 8)
        s.linear(queries, hidden)
        s.linear(memory, hidden)
        s.linear(queries, 16 * 2 * 3)
        s.add("GridSample", flops=300 * hidden * 32, params=0, read=hidden * memory[1], out=300 * hidden)
        s.linear(queries, hidden)
        s.linear(s.linear(queries, 2048), hidden)
        s.pointwise("LayerNormalization", queries, inputs=2)
    s.linear(queries, 91)
    s.linear(s.linear(s.linear(queries, hidden), hidden), 4)


def retinanet_resnet50(s: Sketch, px: int = 800, classes: int = 91) -> None:
    """ResNet-50, the same pyramid and heads, COCO classes."""
    x = s.pool(s.conv((3, px, px), 64, k=7, s=2), k=3, s=2)
    maps = []
    for stage, count in enumerate((3, 4, 6, 3)):
        for index in range(count):
            x = residual(s, x, 64 << stage, stride=2 if stage and not index else 1, bottleneck=True)
        maps.append(x)
    pyramid = [s.conv(s.conv(one, 256), 256, k=3) for one in maps[1:]]
    pyramid.append(s.conv(pyramid[-1], 256, k=3, s=2))
    pyramid.append(s.conv(pyramid[-1], 256, k=3, s=2))
    _shared_heads(s, pyramid, (9 * classes, 36))


def _shared_heads(s: Sketch, pyramid: list[Map], outputs: tuple[int, ...]) -> None:
    """Four convolutions and an output per branch; the weights are one set for all levels, counted at the first."""
    for out in outputs:
        for level, x in enumerate(pyramid):
            y = x
            for _ in range(4):
                y = s.conv(y, 256, k=3, repeated=level > 0)
            s.conv(y, out, k=3, repeated=level > 0)


def _anchor_head(s: Sketch, maps: list[Map]) -> None:
    for x in maps:
        s.pointwise("Sigmoid", s.plain_conv(x, 255))
    s.cat((85, 3 * sum(m[1] * m[2] for m in maps), 1))


def _elan(s: Sketch, x: Map, hidden: int, out: int) -> Map:
    first, y = s.conv(x, hidden), s.conv(x, hidden)
    a = s.conv(s.conv(y, hidden, k=3), hidden, k=3)
    b = s.conv(s.conv(a, hidden, k=3), hidden, k=3)
    return s.conv(s.cat(b, a, y, first), out)


def _elan_head(s: Sketch, x: Map, out: int) -> Map:
    parts = [s.conv(x, out), s.conv(x, out)]
    for _ in range(4):
        parts.append(s.conv(parts[-1], out // 2, k=3))
    return s.conv(s.cat(*parts), out)


def _elan_tiny(s: Sketch, x: Map, hidden: int, out: int) -> Map:
    parts = [s.conv(x, hidden), s.conv(x, hidden)]
    for _ in range(2):
        parts.append(s.conv(parts[-1], hidden, k=3))
    return s.conv(s.cat(*parts), out)


def _elan1(s: Sketch, x: Map, out: int) -> Map:
    s.conv(x, out)
    half = (out // 2, x[1], x[2])
    a = s.conv(half, out // 2, k=3)
    return s.conv(s.cat(half, half, a, s.conv(a, out // 2, k=3)), out)


def _gelan(s: Sketch, x: Map, out: int, n: int) -> Map:
    """Split in two, two chains of (CSP block, 3x3), join."""
    half = out // 2
    s.conv(x, out)
    y = (half, x[1], x[2])
    parts = [y, y]
    for _ in range(2):
        y = s.conv(d.c3(s, y, half, n, add=True, k1=3), half, k=3)
        parts.append(y)
    return s.conv(s.cat(*parts), out)


def _down(s: Sketch, x: Map, out: int) -> Map:
    y = s.conv(x, out)
    return s.conv(y, out, k=3, s=2, g=out)


def _cib(s: Sketch, x: Map, out: int, n: int) -> Map:
    """C2f whose blocks are three depthwise and two pointwise convolutions."""
    half = out // 2
    s.conv(x, out)
    y = (half, x[1], x[2])
    parts = [y, y]
    for _ in range(n):
        z = s.conv(s.conv(y, half, k=3, g=half), 2 * half)
        z = s.conv(s.conv(z, 2 * half, k=3, g=2 * half), half)
        y = s.pointwise("Add", s.conv(z, half, k=3, g=half), inputs=2)
        parts.append(y)
    return s.conv(s.cat(*parts), out)
