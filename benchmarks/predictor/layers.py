"""A pencil for layers: feature maps go in, kernels with FLOPs and bytes come out, as ``edgeds inspect`` would count.

Figures are for float32 tensors and batch 1. Activations and folded batch norms are part of their convolution, as in a
compiled engine.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

Map = tuple[int, int, int]
"""Channels, height, width; token tensors are (features, tokens, 1)."""


@dataclass(kw_only=True)
class Sketch:
    """Collects layers in order. Every method returns the shape of its output."""

    layers: list[dict[str, Any]] = field(default_factory=list)
    smooth: bool = False
    """Whether convolutions are followed by x * sigmoid(x)."""

    def add(self, op: str, *, flops: float, params: int, read: int, out: int, eligible: bool = False) -> None:
        """``read`` and ``out`` are elements of activations; weights are read once more."""
        self.layers.append(
            {
                "node": f"{op.lower()}_{len(self.layers)}",
                "op": op,
                "flops": int(flops),
                "params": params,
                "bytes_read": 4 * (read + params),
                "bytes_written": 4 * out,
                "int8_eligible": eligible,
                "precision": "float32",
            }
        )

    def conv(self, x: Map, out: int, *, k: int = 1, s: int = 1, g: int = 1, repeated: bool = False) -> Map:
        """A convolution and its activation. ``repeated``: the weights are those of an earlier layer."""
        y = self.plain_conv(x, out, k=k, s=s, g=g, repeated=repeated)
        return self.pointwise("Swish", y) if self.smooth else y

    def plain_conv(self, x: Map, out: int, *, k: int = 1, s: int = 1, g: int = 1, repeated: bool = False) -> Map:
        """A convolution without an activation."""
        h, w = math.ceil(x[1] / s), math.ceil(x[2] / s)
        weights = out * (x[0] // g) * k * k
        self.add(
            "Conv",
            flops=2 * weights * h * w,
            params=0 if repeated else weights + out,
            read=math.prod(x) + (weights if repeated else 0),
            out=out * h * w,
            eligible=True,
        )
        return (out, h, w)

    def linear(self, x: Map, out: int, *, bias: bool = True) -> Map:
        tokens = x[1] * x[2]
        weights = x[0] * out
        params = weights + (out if bias else 0)
        self.add(
            "MatMul", flops=2 * weights * tokens, params=params, read=x[0] * tokens, out=out * tokens, eligible=True
        )
        return (out, x[1], x[2])

    def matmul(self, *, batch: int, m: int, k: int, n: int, shared: int = 1) -> None:
        """A product of two activations; ``shared`` batch entries read the same right-hand side."""
        read = batch * m * k + batch // shared * k * n
        self.add("MatMul", flops=2 * batch * m * k * n, params=0, read=read, out=batch * m * n, eligible=True)

    def pool(self, x: Map, *, k: int, s: int) -> Map:
        out = (x[0], math.ceil(x[1] / s), math.ceil(x[2] / s))
        self.add("MaxPool", flops=math.prod(out) * k * k, params=0, read=math.prod(x), out=math.prod(out))
        return out

    def resize(self, x: Map) -> Map:
        out = (x[0], 2 * x[1], 2 * x[2])
        self.add("Resize", flops=0, params=0, read=math.prod(x), out=math.prod(out))
        return out

    def cat(self, *maps: Map) -> Map:
        """A join; compilers let the producers write into place, but a shared producer is copied."""
        out = (sum(m[0] for m in maps), maps[0][1], maps[0][2])
        self.add("Concat", flops=0, params=0, read=math.prod(out), out=math.prod(out))
        return out

    def pointwise(self, op: str, x: Map, *, inputs: int = 1) -> Map:
        self.add(op, flops=math.prod(x), params=0, read=inputs * math.prod(x), out=math.prod(x))
        return x

    def document(self, name: str, shape: tuple[int, ...], note: str) -> dict[str, Any]:
        return {"inputs": {name: list(shape)}, "layers": self.layers, "notes": [note]}
