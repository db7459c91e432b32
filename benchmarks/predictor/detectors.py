"""One-stage detectors from the published descriptions of their blocks, as layers. Own code; shapes only."""

from __future__ import annotations

from benchmarks.predictor.layers import Map, Sketch

SCALES_V8 = {
    "n": (0.33, 0.25, 1024),
    "s": (0.33, 0.5, 1024),
    "m": (0.67, 0.75, 768),
    "l": (1, 1, 512),
    "x": (1, 1.25, 512),
}
SCALES_11 = {"n": (0.5, 0.25, 1024), "s": (0.5, 0.5, 1024), "m": (0.5, 1, 512), "l": (1, 1, 512), "x": (1, 1.5, 512)}
SCALES_X = {"nano": (0.33, 0.25), "tiny": (0.33, 0.375), "s": (0.33, 0.5), "m": (0.67, 0.75), "l": (1, 1)}


def width_of(channels: int, factor: float, top: int) -> int:
    return -(-int(min(channels, top) * factor) // 8) * 8


def depth_of(count: int, factor: float) -> int:
    return max(round(count * factor), 1)


def _residual(s: Sketch, x: Map, hidden: int, *, k1: int, add: bool) -> Map:
    out = s.conv(s.conv(x, hidden, k=k1), x[0], k=3)
    return s.pointwise("Add", out, inputs=2) if add else out


def c2f(s: Sketch, x: Map, out: int, n: int, *, add: bool) -> Map:
    """Split in two, chain bottlenecks on one half, join everything."""
    half = out // 2
    s.conv(x, out)
    y = (half, x[1], x[2])
    parts = [y, y]
    for _ in range(n):
        y = _residual(s, y, half, k1=3, add=add)
        parts.append(y)
    return s.conv(s.cat(*parts), out)


def c3(s: Sketch, x: Map, out: int, n: int, *, add: bool, k1: int = 1, last_k: int = 3, hidden: float = 0.5) -> Map:
    half = int(out * hidden)
    y = s.conv(x, half)
    other = s.conv(x, half)
    for _ in range(n):
        y = _residual(s, y, half, k1=k1, add=add)
    return s.conv(s.cat(y, other), out)


def _c3k2(s: Sketch, x: Map, out: int, n: int, *, deep: bool, e: float) -> Map:
    half = int(out * e)
    s.conv(x, 2 * half)
    y = (half, x[1], x[2])
    parts = [y, y]
    for _ in range(n):
        y = c3(s, y, half, 2, add=True, k1=3) if deep else _thin(s, y)
        parts.append(y)
    return s.conv(s.cat(*parts), out)


def _thin(s: Sketch, x: Map) -> Map:
    out = s.conv(s.conv(x, x[0] // 2, k=3), x[0], k=3)
    return s.pointwise("Add", out, inputs=2)


def sppf(s: Sketch, x: Map, out: int) -> Map:
    y = s.conv(x, x[0] // 2)
    pools = [y]
    for _ in range(3):
        pools.append(s.pool(pools[-1], k=5, s=1))
    return s.conv(s.cat(*pools), out)


def attend(s: Sketch, tokens: int, heads: int, key: int, value: int) -> None:
    s.matmul(batch=heads, m=tokens, k=key, n=tokens)
    s.add("Softmax", flops=5 * heads * tokens**2, params=0, read=heads * tokens**2, out=heads * tokens**2)
    s.matmul(batch=heads, m=tokens, k=tokens, n=value)


def psa(s: Sketch, x: Map, n: int) -> Map:
    s.conv(x, x[0])
    half = (x[0] // 2, x[1], x[2])
    for _ in range(n):
        heads = max(half[0] // 64, 1)
        s.conv(half, half[0] + heads * 64)
        attend(s, x[1] * x[2], heads, 32, half[0] // heads)
        s.conv(half, half[0], k=3, g=half[0])
        s.conv(half, half[0])
        s.conv(s.conv(half, half[0] * 2), half[0])
    return s.conv(s.cat(half, half), x[0])


def head(s: Sketch, maps: list[Map], *, light: bool, box_bins: int = 16) -> None:
    """Box and class branches per level, then distribution to boxes."""
    box, classes = max(16, maps[0][0] // 4, box_bins * 4), max(maps[0][0], 80)
    anchors = 0
    for x in maps:
        s.conv(s.conv(s.conv(x, box, k=3), box, k=3), 4 * box_bins)
        if light:
            y = s.conv(s.conv(x, x[0], k=3, g=x[0]), classes)
            y = s.conv(s.conv(y, y[0], k=3, g=y[0]), classes)
        else:
            y = s.conv(s.conv(x, classes, k=3), classes, k=3)
        s.conv(y, 80)
        anchors += x[1] * x[2]
    s.cat((4 * box_bins + 80, anchors, 1))
    if box_bins > 1:
        s.add("Softmax", flops=5 * 64 * anchors, params=0, read=64 * anchors, out=64 * anchors)
        s.conv((16, 4, anchors), 1)
    s.pointwise("Mul", (4, anchors, 1))
    s.pointwise("Sigmoid", (80, anchors, 1))
    s.cat((84, anchors, 1))


def yolov8(s: Sketch, size: str, px: int = 640) -> None:
    depth, width, top = SCALES_V8[size]
    c = {ch: width_of(ch, width, top) for ch in (64, 128, 256, 512, 1024)}
    n3, n6 = depth_of(3, depth), depth_of(6, depth)
    x = s.conv(s.conv((3, px, px), c[64], k=3, s=2), c[128], k=3, s=2)
    x = c2f(s, x, c[128], n3, add=True)
    p3 = c2f(s, s.conv(x, c[256], k=3, s=2), c[256], n6, add=True)
    p4 = c2f(s, s.conv(p3, c[512], k=3, s=2), c[512], n6, add=True)
    p5 = sppf(s, c2f(s, s.conv(p4, c[1024], k=3, s=2), c[1024], n3, add=True), c[1024])
    t4 = c2f(s, s.cat(s.resize(p5), p4), c[512], n3, add=False)
    o3 = c2f(s, s.cat(s.resize(t4), p3), c[256], n3, add=False)
    o4 = c2f(s, s.cat(s.conv(o3, c[256], k=3, s=2), t4), c[512], n3, add=False)
    o5 = c2f(s, s.cat(s.conv(o4, c[512], k=3, s=2), p5), c[1024], n3, add=False)
    head(s, [o3, o4, o5], light=False)


def yolo11(s: Sketch, size: str, px: int = 640, *, bins: int = 16) -> None:
    depth, width, top = SCALES_11[size]
    c = {ch: width_of(ch, width, top) for ch in (64, 128, 256, 512, 1024)}
    n, deep = depth_of(2, depth), size in "mlx"
    x = s.conv(s.conv((3, px, px), c[64], k=3, s=2), c[128], k=3, s=2)
    x = _c3k2(s, x, c[256], n, deep=deep, e=0.25)
    p3 = _c3k2(s, s.conv(x, c[256], k=3, s=2), c[512], n, deep=deep, e=0.25)
    p4 = _c3k2(s, s.conv(p3, c[512], k=3, s=2), c[512], n, deep=True, e=0.5)
    p5 = sppf(s, _c3k2(s, s.conv(p4, c[1024], k=3, s=2), c[1024], n, deep=True, e=0.5), c[1024])
    p5 = psa(s, p5, n)
    t4 = _c3k2(s, s.cat(s.resize(p5), p4), c[512], n, deep=deep, e=0.5)
    o3 = _c3k2(s, s.cat(s.resize(t4), p3), c[256], n, deep=deep, e=0.5)
    o4 = _c3k2(s, s.cat(s.conv(o3, c[256], k=3, s=2), t4), c[512], n, deep=deep, e=0.5)
    o5 = _c3k2(s, s.cat(s.conv(o4, c[512], k=3, s=2), p5), c[1024], n, deep=True, e=0.5)
    head(s, [o3, o4, o5], light=True, box_bins=bins)


def yolov5s(s: Sketch, px: int = 640) -> None:
    x = s.conv(s.conv((3, px, px), 32, k=6, s=2), 64, k=3, s=2)
    x = c3(s, x, 64, 1, add=True)
    p3 = c3(s, s.conv(x, 128, k=3, s=2), 128, 2, add=True)
    p4 = c3(s, s.conv(p3, 256, k=3, s=2), 256, 3, add=True)
    p5 = sppf(s, c3(s, s.conv(p4, 512, k=3, s=2), 512, 1, add=True), 512)
    t5 = s.conv(p5, 256)
    t4 = s.conv(c3(s, s.cat(s.resize(t5), p4), 256, 1, add=False), 128)
    o3 = c3(s, s.cat(s.resize(t4), p3), 128, 1, add=False)
    o4 = c3(s, s.cat(s.conv(o3, 128, k=3, s=2), t4), 256, 1, add=False)
    o5 = c3(s, s.cat(s.conv(o4, 256, k=3, s=2), t5), 512, 1, add=False)
    for x in (o3, o4, o5):
        s.pointwise("Sigmoid", s.conv(x, 255))
    s.cat((85, 3 * sum(m[1] * m[2] for m in (o3, o4, o5)), 1))


def yolox(s: Sketch, size: str, px: int = 640) -> None:
    depth, width = SCALES_X[size]
    b, n, dw = int(64 * width), depth_of(3, depth), size == "nano"

    def conv3(x: Map, out: int, stride: int = 1) -> Map:
        return s.conv(s.conv(x, x[0], k=3, s=stride, g=x[0]), out) if dw else s.conv(x, out, k=3, s=stride)

    def csp(x: Map, out: int, count: int, *, add: bool) -> Map:
        y, other = s.conv(x, out // 2), s.conv(x, out // 2)
        for _ in range(count):
            y = conv3(s.conv(y, out // 2), out // 2)
            y = s.pointwise("Add", y, inputs=2) if add else y
        return s.conv(s.cat(y, other), out)

    x = s.conv(s.cat((12, px // 2, px // 2)), b, k=3)
    x = csp(conv3(x, 2 * b, 2), 2 * b, n, add=True)
    p3 = csp(conv3(x, 4 * b, 2), 4 * b, 3 * n, add=True)
    p4 = csp(conv3(p3, 8 * b, 2), 8 * b, 3 * n, add=True)
    y = s.conv(conv3(p4, 16 * b, 2), 8 * b)
    p5 = csp(s.conv(s.cat(y, *(s.pool(y, k=k, s=1) for k in (5, 9, 13))), 16 * b), 16 * b, n, add=False)
    t5 = s.conv(p5, 8 * b)
    t4 = s.conv(csp(s.cat(s.resize(t5), p4), 8 * b, n, add=False), 4 * b)
    o3 = csp(s.cat(s.resize(t4), p3), 4 * b, n, add=False)
    o4 = csp(s.cat(conv3(o3, 4 * b, 2), t4), 8 * b, n, add=False)
    o5 = csp(s.cat(conv3(o4, 8 * b, 2), t5), 16 * b, n, add=False)
    for x in (o3, o4, o5):
        stem = s.conv(x, 4 * b)
        classes = conv3(conv3(stem, 4 * b), 4 * b)
        boxes = conv3(conv3(stem, 4 * b), 4 * b)
        s.cat(s.conv(classes, 80), s.conv(boxes, 4), s.conv(boxes, 1))
    s.cat((85, sum(m[1] * m[2] for m in (o3, o4, o5)), 1))
