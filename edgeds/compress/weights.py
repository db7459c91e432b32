"""Symmetric INT8 weights: scales per output channel or per tensor, safe for dead and denormal channels."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

QMAX = 127
SMALLEST_SCALE = 2.0**-100
"""Well above the smallest normal float32 (2**-126), so products with an activation scale do not underflow."""


@dataclass(frozen=True, kw_only=True)
class QuantizedWeight:
    """``values`` int8 in [-127, 127]; ``scale`` float32, a vector along ``axis`` or a scalar when axis is None."""

    values: np.ndarray
    scale: np.ndarray
    axis: int | None

    def dequantized(self) -> np.ndarray:
        """Float32 values that the quantized graph computes with."""
        return self.values.astype(np.float32) * self.broadcast_scale()

    def broadcast_scale(self) -> np.ndarray:
        if self.axis is None:
            return self.scale
        shape = [1] * self.values.ndim
        shape[self.axis] = -1
        return self.scale.reshape(shape)


def quantize_weight(
    weight: np.ndarray, axis: int | None, *, minimum_scale: np.ndarray | None = None
) -> QuantizedWeight:
    """Quantize with ``scale = max|w| / 127`` per slice of ``axis`` (or for the tensor).

    Slices that are zero or below what a normal float32 scale can hold become exact zeros with the layer's typical
    scale: every scale is finite and positive. ``minimum_scale`` (a vector along the axis, or a scalar) widens scales.
    """
    weight = weight.astype(np.float32)
    reduced = tuple(i for i in range(weight.ndim) if i != axis) if axis is not None else None
    amax = np.abs(weight.astype(np.float64)).max(axis=reduced)
    scale = np.atleast_1d(amax / QMAX)
    dead = scale < SMALLEST_SCALE
    scale[dead] = float(np.median(scale[~dead])) if (~dead).any() else 1.0 / QMAX
    if minimum_scale is not None:
        scale = np.maximum(scale, np.atleast_1d(np.asarray(minimum_scale, np.float64)))
    scale32 = scale.astype(np.float32)
    result = QuantizedWeight(
        values=np.zeros(weight.shape, np.int8), scale=scale32 if axis is not None else scale32[0], axis=axis
    )
    values = np.clip(np.rint(weight / result.broadcast_scale()), -QMAX, QMAX).astype(np.int8)
    return QuantizedWeight(values=values, scale=np.asarray(result.scale), axis=axis)
