"""Group-wise INT4/INT8 weights (issue 5 part 5): error bounds, GPTQ against rounding, bad input."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgeds.compress.weightonly import quantize_grouped
from edgeds.errors import SpecError


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 5), st.integers(1, 40), st.sampled_from([4, 8]), st.integers(1, 50), st.integers(0, 99))
def test_values_fit_their_bits_and_int8_stays_close(rows, size, bits, group, seed):
    weight = np.random.default_rng(seed).normal(size=(rows, size))
    found = quantize_grouped(weight, bits=bits, group=group)
    assert np.abs(found.values).max(initial=0) <= 2 ** (bits - 1) - 1
    assert (found.scale > 0).all()
    lost = np.square(found.dequantized() - weight).sum() / np.square(weight).sum()
    assert lost < (1e-3 if bits == 8 else 0.05)


def test_compensation_changes_outputs_less_than_rounding():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(600, 12)) @ rng.normal(size=(12, 64)) + 0.1 * rng.normal(size=(600, 64))
    weight = rng.normal(size=(16, 64))
    found = [quantize_grouped(weight, hessian=h, group=32).dequantized() for h in (x.T @ x, None)]
    lost = [np.square(x @ (w - weight).T).sum() for w in found]
    assert lost[0] < 0.5 * lost[1]


def test_zero_weights_and_dead_inputs_stay_finite():
    weight = np.zeros((3, 16))
    assert (quantize_grouped(weight, hessian=np.zeros((16, 16))).dequantized() == 0).all()
    found = quantize_grouped(np.ones((2, 8)), hessian=np.diag([1.0, 0, 1, 0, 1, 0, 1, 0]), bits=8)
    np.testing.assert_allclose(found.dequantized(), 1, atol=0.01)


def test_bad_input_is_refused():
    good = np.ones((2, 8))
    for options in ({"bits": 3}, {"group": 0}, {"hessian": np.eye(4)}, {"hessian": np.full((8, 8), np.nan)}):
        with pytest.raises(SpecError):
            quantize_grouped(good, **options)
    with pytest.raises(SpecError):
        quantize_grouped(np.full((2, 8), np.inf))
