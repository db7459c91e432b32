"""Streaming range observers for symmetric INT8: min-max, percentile, entropy (KL) and mean squared error.

Every method reads one mergeable histogram per tensor, so memory depends on the number of tensors and not on the
number of samples. The histogram's range is always ``[-2**k, 2**k]``: growing it merges whole bins, which makes the
result independent of the order of the samples and of how a set was split between workers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from edgeds.errors import SpecError

METHODS = ("minmax", "percentile", "entropy", "mse")
BINS = 4096
"""Bins per sign. The largest value lies in the upper half of the range: at least 2048 hold data, as in TensorRT."""

LEVELS = 128
"""Magnitudes of symmetric int8 with zero-point 0 and -128 unused."""

ENTROPY_FLOOR_PERCENTILE = 99.9
"""The entropy method never clips more than the values above this percentile."""

_MIN_EXPONENT = -100
# Below 2**-100 a scale would come near the smallest normal float32; such tensors count as all zero.


@dataclass
class TensorHistogram:
    """Counts of one tensor's values in 2 x BINS equal bins over [-2**exponent, 2**exponent], with exact statistics.

    Not frozen: it is the accumulator. All statistics are float64.
    """

    exponent: int = _MIN_EXPONENT
    counts: np.ndarray = field(default_factory=lambda: np.zeros(2 * BINS, np.float64))
    count: int = 0
    """Values seen (not only those sampled into ``counts``)."""
    minimum: float = math.inf
    maximum: float = -math.inf
    non_finite: int = 0

    def update(self, values: np.ndarray, *, max_elements: int | None = None) -> None:
        """Add an array of any shape and float dtype.

        The minimum and maximum are taken over every value. With ``max_elements`` the histogram itself takes an evenly
        strided subset of at most about that many values: the shape of a distribution is known long before every
        pixel of every image is counted. NaN and infinities are counted apart and never reach the histogram.
        """
        flat = np.ravel(values)
        if flat.size == 0:
            return
        if flat.dtype != np.float32:
            with np.errstate(over="ignore"):  # float64 beyond float32: counted as non-finite below
                flat = flat.astype(np.float32)
        low, high = float(flat.min()), float(flat.max())
        if not (math.isfinite(low) and math.isfinite(high)):
            finite = flat[np.isfinite(flat)]
            self.non_finite += int(flat.size - finite.size)
            if finite.size == 0:
                return
            flat, low, high = finite, float(finite.min()), float(finite.max())
        self.count += flat.size
        self.minimum, self.maximum = min(self.minimum, low), max(self.maximum, high)
        self._grow(max(-low, high))
        if max_elements is not None and flat.size > max_elements:
            # An odd stride does not stay in the same columns of even-sized feature maps.
            flat = flat[:: (-(-flat.size // max_elements)) | 1]
        index = np.floor(flat * np.float32(BINS * 2.0**-self.exponent)).astype(np.int32)
        index += BINS
        np.clip(index, 0, 2 * BINS - 1, out=index)
        self.counts += np.bincount(index, minlength=2 * BINS)

    def merge(self, other: TensorHistogram) -> None:
        """Add another histogram of the same tensor, exactly."""
        if other.count:
            self._grow(other.amax)
        shifted = other.counts
        if self.exponent > other.exponent:
            shifted = _coarsen(shifted, self.exponent - other.exponent)
        elif other.exponent > self.exponent:
            self.counts = _coarsen(self.counts, other.exponent - self.exponent)
            self.exponent = other.exponent
        self.counts = self.counts + shifted
        self.count += other.count
        self.non_finite += other.non_finite
        self.minimum, self.maximum = min(self.minimum, other.minimum), max(self.maximum, other.maximum)

    @property
    def amax(self) -> float:
        """Largest magnitude seen; 0 when nothing was seen."""
        return max(-self.minimum, self.maximum, 0.0) if self.count else 0.0

    def magnitudes(self) -> np.ndarray:
        """Counts of ``|x|`` in BINS bins over [0, 2**exponent]."""
        return self.counts[BINS:] + self.counts[BINS - 1 :: -1]

    @property
    def bin_width(self) -> float:
        return 2.0**self.exponent / BINS

    def _grow(self, amax: float) -> None:
        if amax <= 0.0:
            return
        exponent = max(_MIN_EXPONENT, math.frexp(amax)[1])  # amax <= 2**exponent
        if exponent > self.exponent:
            self.counts = _coarsen(self.counts, exponent - self.exponent)
            self.exponent = exponent


def _coarsen(counts: np.ndarray, steps: int) -> np.ndarray:
    """Counts over a range that is 2**steps wider: neighbours fall together, the rest is zero."""
    if not counts.any():
        return np.zeros_like(counts)
    factor = 1 << min(steps, BINS.bit_length() - 1)
    half = counts.size // 2
    kept = counts.reshape(-1, factor).sum(axis=1)
    wide = np.zeros_like(counts)
    start = half - kept.size // 2
    wide[start : start + kept.size] = kept
    if steps > BINS.bit_length() - 1:
        # Everything is narrower than one bin on either side of zero.
        wide[:] = 0.0
        wide[half - 1], wide[half] = counts[:half].sum(), counts[half:].sum()
    return wide


def find_threshold(histogram: TensorHistogram, method: str, *, percentile: float = 99.99) -> float:
    """The magnitude that maps to 127 (``scale = threshold / 127``), in the tensor's units; 0 for an all-zero tensor.

    ``minmax``: the largest magnitude. ``percentile``: the magnitude below which that percentage of the values lies.
    ``entropy``: the threshold whose quantized distribution has the least Kullback-Leibler divergence from the clipped
    one (Migacz, "8-bit inference with TensorRT", GTC 2017). ``mse``: the least mean squared quantization error.
    """
    if method not in METHODS:
        raise SpecError(f"calibration method {method!r}: choose one of {', '.join(METHODS)}")
    amax = histogram.amax
    if amax <= 2.0**_MIN_EXPONENT or method == "minmax":
        return amax if amax > 2.0**_MIN_EXPONENT else 0.0
    counts = histogram.magnitudes()
    used = min(BINS, math.ceil(amax / histogram.bin_width))
    counts = counts[: max(used, 1)]
    if counts.sum() <= 0:
        return amax
    if method == "percentile":
        threshold = _percentile(counts, percentile) * histogram.bin_width
    elif method == "entropy":
        # Divergence alone prefers to clip where a distribution has spikes (letterbox padding, SiLU's floor).
        least = _percentile(counts, ENTROPY_FLOOR_PERCENTILE)
        threshold = max(_entropy(counts), least) * histogram.bin_width
    else:
        threshold = _mean_squared_error(counts) * histogram.bin_width
    return min(max(threshold, histogram.bin_width), amax)


def _percentile(counts: np.ndarray, percentile: float) -> float:
    """Position in bins (interpolated) below which ``percentile`` % of the counts lie."""
    if not 50.0 < percentile <= 100.0:
        raise SpecError(f"percentile {percentile}: must be above 50 and at most 100")
    cumulative = np.cumsum(counts)
    wanted = cumulative[-1] * percentile / 100.0
    bin_index = int(np.searchsorted(cumulative, wanted))
    bin_index = min(bin_index, counts.size - 1)
    before = cumulative[bin_index - 1] if bin_index else 0.0
    inside = counts[bin_index]
    return bin_index + (float((wanted - before) / inside) if inside > 0 else 1.0)


def _entropy(counts: np.ndarray, *, step: int = 8) -> float:
    """Threshold in bins with the least KL divergence between the clipped distribution P and its 128-level version Q.

    Within one level Q is constant over the occupied bins, so both sums of ``sum P log(P/Q)`` come from cumulative
    sums at the level borders; no candidate needs a pass over the bins.
    """
    size = counts.size
    if size <= LEVELS:
        return float(size)
    counts = counts.copy()
    # Exact zeros (ReLU, padding) need no resolution; left in, they would dominate the divergence.
    counts[0] = counts[1]
    total = counts.sum()
    if total <= 0:
        return float(size)
    mass = np.concatenate([[0.0], np.cumsum(counts)])
    occupied = np.concatenate([[0.0], np.cumsum(counts > 0)])
    with np.errstate(divide="ignore", invalid="ignore"):
        self_term = np.concatenate([[0.0], np.cumsum(np.where(counts > 0, counts * np.log(counts), 0.0))])
    candidates = np.arange(LEVELS, size + 1, step)
    if candidates[-1] != size:
        candidates = np.append(candidates, size)
    borders = (np.arange(LEVELS + 1)[None, :] * candidates[:, None]) // LEVELS
    level_mass = np.diff(mass[borders], axis=1)
    level_bins = np.diff(occupied[borders], axis=1)
    outliers = total - mass[candidates]
    last = counts[candidates - 1]
    reference_mass = level_mass.copy()
    reference_mass[:, -1] += outliers
    with np.errstate(divide="ignore", invalid="ignore"):
        # P: the counts, outliers added to the last bin. Its own entropy term changes in that bin only.
        clipped_last = last + outliers
        p_log_p = self_term[candidates] - np.where(last > 0, last * np.log(last), 0.0)
        p_log_p += np.where(clipped_last > 0, clipped_last * np.log(clipped_last), 0.0)
        # An empty last bin that receives outliers is occupied in P; Q then has to cover it too.
        level_bins[:, -1] += (last <= 0) & (outliers > 0)
        q_value = level_mass / level_bins
        p_log_q = np.where(reference_mass > 0, reference_mass * np.log(q_value), 0.0)
        # A level that holds only outliers has Q = 0 there: infinite divergence, never chosen.
        divergence = (p_log_p - p_log_q.sum(axis=1)) / total + np.log(mass[candidates] / total)
    divergence[~np.isfinite(divergence)] = np.inf
    if not np.isfinite(divergence).any():
        return float(size)
    return float(candidates[int(np.argmin(divergence))])


def _mean_squared_error(counts: np.ndarray, *, candidates: int = 120) -> float:
    """Threshold in bins with the least squared error of rounding to 127 levels and clipping."""
    centres = np.arange(counts.size) + 0.5
    centres[0] = 0.0  # exact zeros are represented exactly
    occupied = counts > 0
    centres, weights = centres[occupied], counts[occupied]
    # Geometric, since one far outlier can leave the bulk of the values in the lowest hundredth of the range.
    thresholds = np.geomspace(0.01, 1.0, candidates) * counts.size
    scales = (thresholds / (LEVELS - 1))[:, None]
    error = np.minimum(np.rint(centres / scales), LEVELS - 1) * scales - centres
    return float(thresholds[int(np.argmin((error**2) @ weights))])
