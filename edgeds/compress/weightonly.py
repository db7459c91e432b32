"""Group-wise INT4/INT8 weights with error compensation, for matrix products too large to keep in float.

Each output has one scale per ``group`` neighbouring inputs. Columns are rounded one by one, and the error of each is
spread over the columns that follow, through the Cholesky factor of the inverse Hessian (Frantar et al. 2022, "GPTQ",
algorithm 1, without lazy batches). Symmetric, no zero-points.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgeds.errors import SpecError

_DAMPING = 0.01
_SHRINK = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75)
"""Shares of the largest weight that a scale may cover: clipping the largest often costs less than coarse steps."""


@dataclass(frozen=True, kw_only=True)
class GroupedWeight:
    """``values`` int8 (outputs, K) within the range of ``bits``; ``scale`` float32 (outputs, ceil(K / group))."""

    values: NDArray[np.int8]
    scale: NDArray[np.float32]
    group: int
    bits: int

    def dequantized(self) -> NDArray[np.float32]:
        """Float32 weights (outputs, K) that the quantized product computes with."""
        wide = np.repeat(self.scale, self.group, axis=1)[:, : self.values.shape[1]]
        return (self.values * wide).astype(np.float32)


def quantize_grouped(
    weight: NDArray[np.floating], *, hessian: NDArray[np.float64] | None = None, bits: int = 4, group: int = 32
) -> GroupedWeight:
    """Quantize ``weight`` (outputs, K); ``hessian`` is the sum of x x^T (K, K) over samples, None rounds to nearest.

    Raises SpecError for bits other than 4 and 8, a group below one, shapes that do not fit, NaN or infinity.
    """
    if bits not in (4, 8) or group < 1 or weight.ndim != 2 or not weight.size:
        raise SpecError(
            f"weights {list(weight.shape)}, {bits} bits, group {group}: expected a matrix, 4 or 8 bits, group >= 1"
        )
    size = weight.shape[1]
    if hessian is not None and hessian.shape != (size, size):
        raise SpecError(f"hessian {list(hessian.shape)}: weights with {size} inputs need {[size, size]}")
    if not np.isfinite(weight).all() or (hessian is not None and not np.isfinite(hessian).all()):
        raise SpecError("weights or hessian hold NaN or infinity")
    work, limit = weight.astype(np.float64), 2 ** (bits - 1) - 1
    upper = _inverse_factor(hessian) if hessian is not None else np.eye(size)
    values = np.zeros(work.shape, np.int8)
    scales = np.zeros((work.shape[0], -(-size // group)), np.float32)
    for column in range(size):
        if column % group == 0:
            scales[:, column // group] = _best_scale(work[:, column : column + group], limit)
        scale = scales[:, column // group].astype(np.float64)
        rounded = np.clip(np.rint(work[:, column] / scale), -limit, limit)
        values[:, column] = rounded
        error = (work[:, column] - rounded * scale) / upper[column, column]
        work[:, column + 1 :] -= np.outer(error, upper[column, column + 1 :])
    return GroupedWeight(values=values, scale=scales, group=group, bits=bits)


def _inverse_factor(hessian: NDArray[np.float64]) -> NDArray[np.float64]:
    size = hessian.shape[0]
    mean = max(float(np.trace(hessian)) / size, float(np.finfo(np.float32).tiny))
    factor: NDArray[np.float64] = np.linalg.cholesky(np.linalg.inv(hessian / mean + _DAMPING * np.eye(size))).T
    return factor


def _best_scale(block: NDArray[np.float64], limit: int) -> NDArray[np.float64]:
    """Per output the candidate scale of least squared rounding error; one for groups that are zero."""
    largest = np.abs(block).max(axis=1)
    largest[largest < np.finfo(np.float32).tiny * limit] = limit
    scales = np.stack([share * largest / limit for share in _SHRINK])
    rounded = np.clip(np.rint(block / scales[..., None]), -limit, limit) * scales[..., None]
    best = np.square(rounded - block).sum(axis=2).argmin(axis=0)
    chosen: NDArray[np.float64] = scales[best, np.arange(block.shape[0])]
    return chosen
