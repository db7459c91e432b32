"""Classifiers, transformers and decoders from their published configurations, as layers."""

from __future__ import annotations

from benchmarks.predictor.detectors import attend
from benchmarks.predictor.layers import Map, Sketch

# hidden, layers, heads, KV heads, head size, inner size, vocabulary: from the models' public config files.
DECODERS = {
    "llama-3.2-1b": (2048, 16, 32, 8, 64, 8192, 128256),
    "llama-3.2-3b": (3072, 28, 24, 8, 128, 8192, 128256),
    "llama-3.1-8b": (4096, 32, 32, 8, 128, 14336, 128256),
    "qwen2.5-0.5b": (896, 24, 14, 2, 64, 4864, 151936),
    "qwen2.5-1.5b": (1536, 28, 12, 2, 128, 8960, 151936),
    "qwen2.5-3b": (2048, 36, 16, 2, 128, 11008, 151936),
    "qwen2.5-7b": (3584, 28, 28, 4, 128, 18944, 152064),
    "qwen3-0.6b": (1024, 28, 16, 8, 128, 3072, 151936),
    "qwen3-1.7b": (2048, 28, 16, 8, 128, 6144, 151936),
    "qwen3-4b": (2560, 36, 32, 8, 128, 9728, 151936),
    "qwen3-8b": (4096, 36, 32, 8, 128, 12288, 151936),
    "gemma-2-2b": (2304, 26, 8, 4, 256, 9216, 256000),
    "phi-3.5-mini": (3072, 32, 32, 32, 96, 8192, 32064),
    "smollm2-135m": (576, 30, 9, 3, 64, 1536, 49152),
    "smollm2-360m": (960, 32, 15, 5, 64, 2560, 49152),
    "smollm2-1.7b": (2048, 24, 32, 32, 64, 8192, 49152),
}


def resnet(s: Sketch, depth: int, px: int = 224) -> None:
    """ResNet v1.5: the stride is in the 3x3 convolution of a bottleneck."""
    blocks = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3), 152: (3, 8, 36, 3)}[depth]
    x = s.pool(s.conv((3, px, px), 64, k=7, s=2), k=3, s=2)
    for stage, count in enumerate(blocks):
        for index in range(count):
            x = residual(s, x, 64 << stage, stride=2 if stage and not index else 1, bottleneck=depth >= 50)
    s.add("GlobalAveragePool", flops=x[0] * x[1] * x[2], params=0, read=x[0] * x[1] * x[2], out=x[0])
    s.linear((x[0], 1, 1), 1000)


def residual(s: Sketch, x: Map, width: int, *, stride: int, bottleneck: bool) -> Map:
    out = 4 * width if bottleneck else width
    if x[0] != out or stride > 1:
        s.conv(x, out, s=stride)
    y = s.conv(s.conv(x, width), width, k=3, s=stride) if bottleneck else s.conv(x, width, k=3, s=stride)
    y = s.conv(y, out) if bottleneck else s.conv(y, out, k=3)
    return s.pointwise("Add", y, inputs=2)


def ssd_resnet34(s: Sketch, px: int = 1200) -> None:
    """The MLPerf variant: the third stage keeps stride 1, six feature maps, 81 classes."""
    x = s.pool(s.conv((3, px, px), 64, k=7, s=2), k=3, s=2)
    for stage, count in enumerate((3, 4, 6)):
        for index in range(count):
            x = residual(s, x, 64 << stage, stride=2 if stage == 1 and not index else 1, bottleneck=False)
    extras = ((256, 512, 2), (256, 512, 2), (128, 256, 2), (128, 256, 2), (128, 256, 1))
    maps = [x]
    for hidden, out, stride in extras:
        x = s.conv(s.conv(x, hidden), out, k=3, s=stride)
        maps.append(x)
    for one, boxes, stride in zip(maps, (4, 6, 6, 6, 4, 4), (3, 3, 2, 2, 1, 1), strict=True):
        s.conv(one, boxes * 4, k=3, s=stride)
        s.conv(one, boxes * 81, k=3, s=stride)


def encoder(s: Sketch, *, tokens: int, width: int, layers: int, heads: int, inner: int) -> None:
    x = (width, tokens, 1)
    for _ in range(layers):
        s.linear(x, 3 * width)
        attend(s, tokens, heads, width // heads, width // heads)
        s.linear(x, width)
        s.pointwise("LayerNormalization", x, inputs=2)
        s.linear(s.linear(x, inner), width)
        s.pointwise("LayerNormalization", x, inputs=2)


def vit_b(s: Sketch, patch: int, px: int = 224) -> None:
    s.conv((3, px, px), 768, k=patch, s=patch)
    encoder(s, tokens=(px // patch) ** 2 + 1, width=768, layers=12, heads=12, inner=3072)
    s.linear((768, 1, 1), 1000)


def decoder(s: Sketch, name: str, *, context: int = 256) -> None:
    """One decoded token with ``context`` tokens in the cache."""
    hidden, layers, heads, kv, size, inner, vocabulary = DECODERS[name]
    x = (hidden, 1, 1)
    for _ in range(layers):
        s.pointwise("RMSNormalization", x)
        s.linear(x, (heads + 2 * kv) * size, bias=False)
        s.matmul(batch=heads, m=1, k=size, n=context, shared=heads // kv)
        s.matmul(batch=heads, m=1, k=context, n=size, shared=heads // kv)
        s.linear((heads * size, 1, 1), hidden, bias=False)
        s.pointwise("RMSNormalization", x, inputs=2)
        s.linear(x, 2 * inner, bias=False)
        s.linear((inner, 1, 1), hidden, bias=False)
    s.linear(x, vocabulary, bias=False)
