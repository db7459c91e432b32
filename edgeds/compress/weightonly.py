"""Group-wise INT4/INT8 weights with error compensation, for matrix products too large to keep in float.

Each output has one scale, and where wanted a zero-point, per ``group`` neighbouring inputs: of several that clip the
largest weights more or less, the one of least rounding error, inputs counted by their mean square. Columns are then
rounded one by one, those of the largest inputs first, and the error of each is spread over the columns that follow,
through the Cholesky factor of the inverse Hessian (Frantar et al. 2022, "GPTQ", algorithm 1, with scales set before).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgeds.errors import SpecError

_DAMPING = 0.01
_LAZY_COLUMNS = 128
"""Columns whose errors are spread over the rest in one matrix product."""
_SHARES = np.linspace(1.0, 0.7, 13)
"""Of the range of a block that its scale covers: clipping the largest often costs less than coarse steps."""

Float = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class GroupedWeight:
    """``values`` int8 (outputs, K), to be multiplied with ``scale`` float32 (outputs, ceil(K / group)) as they are.

    Symmetric without ``zero``. With it (4 bits only; uint8 of the shape of ``scale``), ``values + zero`` is from 0 to
    2^bits - 1.
    """

    values: NDArray[np.int8]
    scale: NDArray[np.float32]
    group: int
    bits: int
    zero: NDArray[np.uint8] | None = None

    def dequantized(self) -> NDArray[np.float32]:
        """Float32 weights (outputs, K) that the quantized product computes with."""
        return (self.values * _wide(self.scale, self)).astype(np.float32)

    def codes(self) -> NDArray[np.uint8]:
        """Unsigned values (outputs, K): zero is at ``zero``, without it at the middle of the range."""
        zero = 2 ** (self.bits - 1) if self.zero is None else _wide(self.zero.astype(np.int16), self)
        return (self.values.astype(np.int16) + zero).astype(np.uint8)


def _wide(per_group: NDArray, weight: GroupedWeight) -> NDArray:
    return np.repeat(per_group, weight.group, axis=1)[:, : weight.values.shape[1]]


def quantize_grouped(
    weight: NDArray[np.floating],
    *,
    hessian: Float | None = None,
    bits: int = 4,
    group: int = 32,
    symmetric: bool = True,
) -> GroupedWeight:
    """Quantize ``weight`` (outputs, K); ``hessian`` is the sum of x x^T (K, K) over samples, None rounds to nearest.

    Scales are positive. Symmetric values are from -8 to 7 with 4 bits, and from -127 to 127 with 8, where zero-points
    would gain nothing and are refused. Raises SpecError for bits other than 4 and 8, a group below one, shapes that do
    not fit, NaN or infinity.
    """
    if bits == 8 and not symmetric:
        raise SpecError("zero-points are for 4 bits; 8 bits are symmetric")
    if bits not in (4, 8) or group < 1 or weight.ndim != 2 or not weight.size:
        raise SpecError(
            f"weights {list(weight.shape)}, {bits} bits, group {group}: expected a matrix, 4 or 8 bits, group >= 1"
        )
    outputs, size = weight.shape
    if hessian is not None and hessian.shape != (size, size):
        raise SpecError(f"hessian {list(hessian.shape)}: weights with {size} inputs need {[size, size]}")
    if not np.isfinite(weight).all() or (hessian is not None and not np.isfinite(hessian).all()):
        raise SpecError("weights or hessian hold NaN or infinity")
    work, groups = weight.astype(np.float64), -(-size // group)
    importance = np.ones(size) if hessian is None else np.diag(hessian) / max(np.diag(hessian).mean(), 1e-300) + 1e-3
    spare = (0, groups * group - size)
    blocks = np.pad(work, ((0, 0), spare)).reshape(outputs, groups, group)
    scale, zero = _fit(blocks, np.pad(importance, spare).reshape(groups, group), bits=bits, symmetric=symmetric)
    scale = scale.astype(np.float32).astype(np.float64)
    lowest = -zero if zero is not None else np.full(scale.shape, -8.0 if bits == 4 else -127.0)
    highest = lowest + (2**bits - 1) if zero is not None else np.full(scale.shape, 2.0 ** (bits - 1) - 1)
    if hessian is None:
        values = np.clip(np.rint(blocks / scale[..., None]), lowest[..., None], highest[..., None])
        values = values.reshape(outputs, -1)[:, :size]
    else:
        values = _compensated(work, hessian, scale=scale, lowest=lowest, highest=highest, group=group)
    return GroupedWeight(
        values=values.astype(np.int8),
        scale=scale.astype(np.float32),
        group=group,
        bits=bits,
        zero=None if zero is None else zero.astype(np.uint8),
    )


def _fit(blocks: Float, importance: Float, *, bits: int, symmetric: bool) -> tuple[Float, Float | None]:
    """Scale and zero-point of each block of (outputs, groups, group); ``importance`` is (groups, group)."""
    low, high = np.minimum(blocks.min(axis=2), 0.0), np.maximum(blocks.max(axis=2), 0.0)
    # Symmetric 4 bits reach one step further down than up.
    down, up = (8.0, 7.0) if bits == 4 else (127.0, 127.0)
    whole = np.maximum(-low / down, high / up) if symmetric else (high - low) / (2**bits - 1)
    whole[whole < np.finfo(np.float32).tiny * 2**bits] = 1.0
    best = np.full(low.shape, np.inf)
    chosen, zeros = whole.copy(), np.zeros_like(whole)
    for share in _SHARES:
        scale = share * whole
        if symmetric:
            zero, lowest, highest = np.zeros_like(scale), -down, up
        else:
            zero = np.clip(np.rint(-low * share / scale), 0, 2**bits - 1)
            lowest, highest = -zero[..., None], 2**bits - 1 - zero[..., None]
        rounded = np.clip(np.rint(blocks / scale[..., None]), lowest, highest) * scale[..., None]
        cost = (np.square(rounded - blocks) * importance).sum(axis=2)
        better = cost < best
        best, chosen, zeros = (np.where(better, a, b) for a, b in ((cost, best), (scale, chosen), (zero, zeros)))
    return chosen, None if symmetric else zeros


def _compensated(
    weight: Float, hessian: Float, *, scale: Float, lowest: Float, highest: Float, group: int
) -> NDArray[np.float64]:
    """Whole numbers (outputs, K) whose product with ``scale`` gives outputs close to those of ``weight``."""
    size = weight.shape[1]
    order = np.argsort(-np.diag(hessian), kind="stable")
    upper = _inverse_factor(hessian[np.ix_(order, order)]).astype(np.float32)
    # Transposed: a column of the weights is a run in memory.
    work, values = weight.T[order].astype(np.float32), np.zeros(weight.shape[::-1], np.float32)
    steps, low, high = (np.ascontiguousarray(array.T, np.float32) for array in (scale, lowest, highest))
    for start in range(0, size, _LAZY_COLUMNS):
        stop = min(size, start + _LAZY_COLUMNS)
        errors = np.zeros((stop - start, weight.shape[0]), np.float32)
        for column in range(start, stop):
            at = order[column] // group
            rounded = np.clip(np.rint(work[column] / steps[at]), low[at], high[at])
            values[order[column]] = rounded
            error = (work[column] - rounded * steps[at]) / upper[column, column]
            work[column + 1 : stop] -= np.outer(upper[column, column + 1 : stop], error)
            errors[column - start] = error
        work[stop:] -= upper[start:stop, stop:].T @ errors
    return np.ascontiguousarray(values.T, np.float64)


def _inverse_factor(hessian: Float) -> Float:
    size = hessian.shape[0]
    mean = max(float(np.trace(hessian)) / size, float(np.finfo(np.float32).tiny))
    factor: Float = np.linalg.cholesky(np.linalg.inv(hessian / mean + _DAMPING * np.eye(size))).T
    return factor
