"""Observers against straightforward references written here."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgeds.compress.observers import BINS, METHODS, TensorHistogram, find_threshold
from edgeds.errors import SpecError


def histogram(*arrays):
    found = TensorHistogram()
    for array in arrays:
        found.update(array)
    return found


def same(a, b):
    return (
        a.exponent == b.exponent
        and np.array_equal(a.magnitudes(), b.magnitudes())  # signs differ only where float32 underflows
        and (a.count, a.minimum, a.maximum, a.non_finite) == (b.count, b.minimum, b.maximum, b.non_finite)
    )


NORMAL = np.random.default_rng(0).normal(0, 1, 100_000).astype(np.float32)


def test_statistics_are_exact():
    found = histogram(NORMAL[:50_000], NORMAL[50_000:])
    assert (found.count, found.minimum, found.maximum) == (NORMAL.size, float(NORMAL.min()), float(NORMAL.max()))
    limit = 2.0**found.exponent
    counts, _ = np.histogram(np.abs(NORMAL).astype(np.float64), bins=BINS, range=(0, limit))
    assert np.abs(np.cumsum(found.magnitudes()) - np.cumsum(counts)).max() <= 2  # ties on bin borders
    assert find_threshold(found, "minmax") == float(np.abs(NORMAL).max())


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.lists(st.floats(-(2.0**100), 2.0**100, width=32), max_size=20), min_size=1, max_size=6),
    st.randoms(use_true_random=False),
)
def test_order_and_split_do_not_matter(batches, random):
    arrays = [np.array(batch, np.float32) for batch in batches]
    whole = histogram(np.concatenate(arrays))
    shuffled = list(arrays)
    random.shuffle(shuffled)
    assert same(whole, histogram(*shuffled))
    merged, other = histogram(*arrays[:2]), histogram(*arrays[2:])
    merged.merge(other)
    assert same(whole, merged)


def test_percentile_ignores_outliers_b43():
    """B43: 1e6 normals and 10 outliers at 100; the 99.99 percentile of |x| is near 3.89, zero stays in range."""
    values = np.random.default_rng(1).normal(0, 1, 1_000_000).astype(np.float32)
    both = histogram(values, np.full(10, 100, np.float32))
    assert find_threshold(both, "percentile", percentile=99.99) == pytest.approx(3.9, abs=0.1)
    positive = histogram(np.abs(values), np.full(10, 100, np.float32))
    assert find_threshold(positive, "percentile", percentile=99.99) == pytest.approx(3.9, abs=0.1)
    assert find_threshold(both, "minmax") == 100.0
    assert 3.0 < find_threshold(both, "mse") < 10.0
    assert find_threshold(both, "entropy") < 20.0


@pytest.mark.parametrize("percentile", [99.0, 99.9, 100.0])
def test_percentile_matches_numpy(percentile):
    found = find_threshold(histogram(NORMAL), "percentile", percentile=percentile)
    assert found == pytest.approx(float(np.percentile(np.abs(NORMAL), percentile)), rel=0.005)


def slow_kl(counts, step):
    """The textbook loop: clip into the last bin, merge into 128 levels, spread over occupied bins, divergence."""
    counts = counts.astype(np.float64).copy()
    counts[0] = counts[1]
    best = (math.inf, 0)
    candidates = sorted({*range(128, counts.size + 1, step), counts.size})
    for size in candidates:
        clipped = counts[:size].copy()
        clipped[-1] += counts[size:].sum()
        spread = np.zeros(size)
        for level in range(128):
            low, high = level * size // 128, (level + 1) * size // 128
            occupied = clipped[low:high] > 0
            if occupied.any():
                spread[low:high][occupied] = counts[low:high].sum() / occupied.sum()
        p, q = clipped / clipped.sum(), spread / spread.sum()
        if (q[p > 0] == 0).any():
            continue
        divergence = float((p[p > 0] * np.log(p[p > 0] / q[p > 0])).sum())
        if divergence < best[0] - 1e-12:
            best = (divergence, size)
    return best[1]


@pytest.mark.parametrize("kind", ["normal", "laplace", "relu", "bimodal"])
def test_entropy_matches_a_slow_reference(kind):
    rng = np.random.default_rng(3)
    values = {
        "normal": rng.normal(0, 1, 40_000),
        "laplace": rng.laplace(0, 1, 40_000),
        "relu": np.maximum(rng.normal(0, 1, 40_000), 0),
        "bimodal": np.concatenate([rng.normal(0, 0.1, 30_000), rng.normal(5, 0.2, 10_000)]),
    }[kind].astype(np.float32)
    found = histogram(values)
    counts = found.magnitudes()[: min(BINS, math.ceil(found.amax / found.bin_width))]
    floor = float(np.percentile(np.abs(values), 99.9))  # documented: entropy never clips below this
    expected = max(slow_kl(counts, 8) * found.bin_width, floor)
    assert find_threshold(found, "entropy") == pytest.approx(min(expected, found.amax), rel=0.01)


def test_mse_matches_brute_force():
    found = find_threshold(histogram(NORMAL), "mse")

    def error(threshold):
        scale = threshold / 127
        return float(np.square(np.clip(np.rint(NORMAL / scale), -127, 127) * scale - NORMAL).mean())

    best = min(error(threshold) for threshold in np.linspace(1.0, np.abs(NORMAL).max(), 400))
    assert error(found) <= best * 1.02


@pytest.mark.parametrize("method", METHODS)
def test_degenerate_tensors(method):
    assert find_threshold(histogram(np.zeros(10, np.float32)), method) == 0.0
    assert find_threshold(histogram(np.full(10, 1e-41, np.float32)), method) == 0.0
    assert find_threshold(TensorHistogram(), method) == 0.0
    for value in (1e-20, 0.5, 1.0, 3e38, float(np.finfo(np.float32).max)):
        found = find_threshold(histogram(np.array([value, -value, 0], np.float32)), method)
        assert 0 < found <= np.float32(value)
        assert found >= value * 0.9


def test_unusual_arrays():
    found = histogram(np.zeros((0, 3), np.float32), np.array([np.nan, np.inf, 2.0], np.float32))
    assert (found.count, found.non_finite, found.maximum) == (1, 2, 2.0)
    half = histogram(np.array([1.5, -3.0], np.float16))
    assert (half.minimum, half.maximum) == (-3.0, 1.5)
    wide = histogram(np.array([1e300, 4.0], np.float64))
    assert (wide.count, wide.non_finite, wide.maximum) == (1, 1, 4.0)
    scalar = histogram(np.float32(2.5))
    assert scalar.count == 1


def test_size_does_not_depend_on_the_number_of_samples_b42():
    """B42: the accumulator is the same few arrays after one sample and after many."""
    one, many = histogram(NORMAL[:1000]), histogram(*np.split(NORMAL, 100))
    assert one.counts.nbytes == many.counts.nbytes == 2 * BINS * 8


def test_subsampling_keeps_exact_limits():
    values = NORMAL.copy()
    values[12_345] = 50.0
    found = TensorHistogram()
    found.update(values, max_elements=1000)
    assert found.maximum == 50.0
    assert found.count == values.size
    assert 500 <= found.counts.sum() <= 1000


def test_bad_arguments():
    with pytest.raises(SpecError, match="choose one of"):
        find_threshold(histogram(NORMAL), "median")
    for percentile in (0.0, 50.0, 100.1, math.nan):
        with pytest.raises(SpecError, match="percentile"):
            find_threshold(histogram(NORMAL), "percentile", percentile=percentile)
