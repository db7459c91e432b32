"""Values that float16 cannot hold: in constants, in Q/DQ scales, and where such values flow from there.

Limits of IEEE 754 binary16: largest 65504, smallest normal 2**-14 (6.1e-5), smallest subnormal 2**-24 (6e-8).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from onnx import NodeProto

from edgeds.graph.view import GraphView

HALF_MAX = 65504.0
HALF_SMALLEST_NORMAL = 2.0**-14
PEAK_HEADROOM = 2.0
"""Magnitudes seen on samples may be this much larger in the field before they leave float16."""
WORST_WEIGHT_ERROR = 2.0**-8
"""Relative L2 error of a weight tensor in float16 above which its node stays float32 (normal values: 2**-12)."""
SMALLEST_SCALE = 6.2e-5
"""A scale that is widened becomes this: just above the smallest normal float16."""
WIDENING_ERROR = 2.0**-9
"""Relative L2 change of the dequantized weights that widening scales may cost, about that of rounding them."""

Array = np.ndarray[Any, np.dtype[Any]]


def describe_misfit(value: Array, *, divides: bool = False) -> str | None:
    """Why a float constant must not become float16: ``large: ...`` or ``small: ...``; None when it may.

    ``divides`` looks at the smallest element, for constants that something is divided by.
    """
    magnitude = np.abs(value[~np.isnan(value)].astype(np.float64)) if value.size else np.zeros(0)
    peak = float(magnitude.max(initial=0.0))
    if peak > HALF_MAX:
        return f"large: constant {_signed(value, peak):g} is beyond float16 (65504)"
    if peak == 0.0:
        return None
    if peak < HALF_SMALLEST_NORMAL:
        return f"small: constant {_signed(value, peak):g} is below float16's normal range (6.1e-5)"
    lowest = float(magnitude[magnitude > 0].min())
    if divides and lowest < HALF_SMALLEST_NORMAL:
        return f"small: divisor {lowest:g} is below float16's normal range (6.1e-5)"
    if lowest < HALF_SMALLEST_NORMAL:
        change = np.linalg.norm(magnitude - magnitude.astype(np.float16)) / np.linalg.norm(magnitude)
        if change > WORST_WEIGHT_ERROR:
            return f"small: weights change by {change:.1%} in float16"
    return None


def _signed(value: Array, peak: float) -> float:
    return peak if bool((value == value.dtype.type(peak)).any()) else -peak


@dataclass(frozen=True, kw_only=True)
class ScaleFit:
    """What becomes of a quantization scale in float16: usable as rounded, widened with new int8 values, or neither."""

    problem: str | None = None
    scale: Array | None = None
    values: Array | None = None
    note: str | None = None


def fit_scale(scale: Array, values: Array | None, axis: int | None) -> ScaleFit:
    """Whether a scale may be float16; subnormal ones are flushed to zero on some devices, so they are never written.

    ``values`` are stored integers dequantized with it (None for activations). Channels whose scale is too small get a
    larger one, and their integers are scaled down, where the weights as a whole change by no more than rounding does.
    """
    largest, smallest = float(scale.max(initial=0.0)), float(scale.min(initial=np.inf))
    if largest * 127 > HALF_MAX:
        return ScaleFit(problem=f"scale {largest:g} reaches values beyond float16 (65504)")
    if smallest >= HALF_SMALLEST_NORMAL:
        return ScaleFit()
    problem = f"scale {smallest:g} would be subnormal in float16"
    if values is None or values.dtype not in (np.dtype(np.int8), np.dtype(np.int16)):
        return ScaleFit(problem=problem)
    if scale.ndim == 1 and scale.size > 1 and (axis is None or values.shape[axis] != scale.size):
        return ScaleFit(problem=problem)  # block-wise scales
    shape = [1] * values.ndim
    if scale.size > 1 and axis is not None:
        shape[axis] = scale.size
    old = scale.astype(np.float64).reshape(shape)
    new = np.where(old < HALF_SMALLEST_NORMAL, SMALLEST_SCALE, old)
    integers = np.rint(values * (old / new))
    change = np.linalg.norm(integers * new - values * old) / max(float(np.linalg.norm(values * old)), 1e-300)
    if change > WIDENING_ERROR:
        return ScaleFit(problem=f"{problem}, and a larger one changes the weights by {change:.1%}")
    count = int((old < HALF_SMALLEST_NORMAL).sum())
    return ScaleFit(
        scale=new.reshape(scale.shape).astype(scale.dtype),
        values=integers.astype(values.dtype),
        note=f"{count} of {scale.size} scales widened to {SMALLEST_SCALE:g}; weights change by {change:.2g}",
    )


_BOUNDED = frozenset(
    {"Softmax", "Sigmoid", "HardSigmoid", "Tanh", "Sin", "Cos", "Erf", "Sign", "Softsign", "Atan", "Asin", "Acos"}
    | {"LayerNormalization", "InstanceNormalization", "GroupNormalization", "RMSNormalization", "LpNormalization"}
    | {"MeanVarianceNormalization", "QuantizeLinear"}
)
"""Operators whose results are small whatever they read."""

HEAVY_OPS = frozenset({"Conv", "ConvTranspose", "MatMul", "Gemm", "Einsum", "LSTM", "GRU", "RNN", "Attention"})
"""Operators with weights of their own: what leaves them has a scale unrelated to that of what enters."""


def large_flow(
    view: GraphView, constants: Mapping[str, str], peaks: Mapping[str, float], flexible: frozenset[str]
) -> dict[str, str]:
    """Tensors that hold, or may hold, values beyond float16, each with the reason.

    From constants (name -> reason), dequantized activations with large scales and measured ``peaks``, along every
    operator that does not bound its result. A measured peak that fits ends the flow. ``flexible`` are the float
    tensors.
    """
    limit = HALF_MAX / PEAK_HEADROOM
    large = dict(constants)
    for name, peak in peaks.items():
        if name in flexible and peak > limit:
            large[name] = f"reaches {peak:g} on calibration data (float16 ends at 65504)"
    for node in view.nodes:
        sources = [large[name] for index, name in enumerate(node.input) if name in large and _passes_on(node, index)]
        for name in node.output:
            if sources and name in flexible and name not in large and name not in peaks:
                large[name] = sources[0]
    return large


def _passes_on(node: NodeProto, index: int) -> bool:
    if node.op_type in _BOUNDED or node.op_type in HEAVY_OPS:
        return False
    # Dividing by something large, and the limits of a clipping, do not make results large.
    return not (node.op_type in ("Div", "Clip") and index > 0)
