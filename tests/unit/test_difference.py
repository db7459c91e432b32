"""Differences between arrays against plain numpy, and what counts as NaN, infinity and too far."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeds.difference import Difference, Tolerance
from edgeds.errors import SpecError


def compared(*pairs):
    found = Difference()
    for want, got in pairs:
        found.add(np.asarray(want, np.float32), np.asarray(got, np.float32))
    return found


@given(st.lists(st.integers(0, 2**31), min_size=1, max_size=4))
def test_figures_over_several_samples_are_those_of_all_values_together(seeds):
    pairs = []
    for seed in seeds:
        generator = np.random.default_rng(seed)
        want = generator.standard_normal((2, 5)).astype(np.float32)
        pairs.append((want, want + generator.standard_normal((2, 5)).astype(np.float32) * 0.1))
    found = compared(*pairs)
    a, b = (np.concatenate([pair[side].reshape(-1) for pair in pairs]).astype(np.float64) for side in (0, 1))
    assert found.max_abs == pytest.approx(np.abs(a - b).max())
    assert found.mean_abs == pytest.approx(np.abs(a - b).mean())
    assert found.relative == pytest.approx(np.abs(a - b).max() / np.abs(a).max())
    assert found.cosine == pytest.approx(a @ b / np.linalg.norm(a) / np.linalg.norm(b))
    assert found.sqnr_db == pytest.approx(10 * np.log10((a @ a) / ((a - b) @ (a - b))))
    assert found.worst_sample == int(np.argmax([np.abs(p - q).max() for p, q in pairs]))


def test_equal_and_empty_arrays_and_zeros():
    assert compared(([1, 2], [1, 2])).sqnr_db is None
    assert compared(([], [])).cosine == 1.0
    zero = compared(([0, 0], [0, 1]))
    assert (zero.relative, zero.cosine, zero.sqnr_db) == (None, None, None)
    assert not Tolerance(relative=0.5).allows(zero)
    assert Tolerance(relative=0.0).allows(compared(([0, 0], [0, 0])))


def test_nan_and_infinity_on_one_side_are_counted_placed_and_never_tolerated():
    nan, inf = np.nan, np.inf
    found = compared(([1, nan, inf, -inf, 2], [1, nan, inf, inf, nan]), ([nan] * 9, [0.0] * 9))
    assert found.non_finite_mismatch == 11
    assert found.positions == [(0, 3), (0, 4), (1, 0), (1, 1), (1, 2)]
    assert (found.nan_want, found.nan_got) == (10, 2)
    assert found.max_abs == 0.0
    assert not Tolerance(absolute=1e9).allows(found)
    same = compared(([nan, inf], [nan, inf]))
    assert Tolerance(absolute=0.0).allows(same)


def test_other_shapes_and_text_are_problems_and_huge_values_have_no_power():
    assert "shapes differ: [2] and [3]" in (compared(([1, 2], [1, 2, 3])).problem or "")
    text = Difference()
    text.add(np.array(["a"], object), np.array(["b"], object))
    assert text.problem == "text differs"
    huge = Difference()
    huge.add(np.array([1e300, 1.0]), np.array([1e300, 3.0]))
    assert (huge.max_abs, huge.cosine, huge.sqnr_db) == (2.0, None, None)


def test_tolerances():
    near = compared(([100, 1], [100.5, 1]))
    assert Tolerance(absolute=0.5).allows(near)
    assert not Tolerance(absolute=0.4).allows(near)
    assert Tolerance(relative=0.005).allows(near)
    assert not Tolerance(absolute=1.0, relative=0.004).allows(near)
    assert Tolerance(absolute=0.01).allows_layer(near)  # inner tensors: in proportion to their magnitude
    for bad in (-1.0, float("nan"), float("inf")):
        with pytest.raises(SpecError, match="absolute tolerance"):
            Tolerance(absolute=bad)
