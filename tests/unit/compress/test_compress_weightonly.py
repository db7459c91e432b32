"""Group-wise INT4/INT8 weights (issue 5 part 5): error bounds, GPTQ against rounding, bad input."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgeds.compress.weightonly import quantize_grouped
from edgeds.errors import SpecError


@settings(max_examples=30, deadline=None)
@given(
    st.integers(1, 5),
    st.integers(1, 40),
    st.sampled_from([4, 8]),
    st.integers(1, 50),
    st.booleans(),
    st.booleans(),
    st.integers(0, 99),
)
def test_values_fit_their_bits_and_int8_stays_close(rows, size, bits, group, symmetric, fitted, seed):
    symmetric = symmetric or bits == 8
    rng = np.random.default_rng(seed)
    weight = rng.normal(size=(rows, size)) + rng.normal()
    x = rng.normal(size=(50, size)) * rng.uniform(0.01, 10, size)
    found = quantize_grouped(weight, hessian=x.T @ x if fitted else None, bits=bits, group=group, symmetric=symmetric)
    assert (found.scale > 0).all()
    codes = found.codes().astype(int)
    assert codes.max() <= 2**bits - 1
    zero = 2 ** (bits - 1) if symmetric else np.repeat(found.zero.astype(int), group, axis=1)[:, :size]
    np.testing.assert_array_equal(codes - zero, found.values)
    if symmetric and bits == 8:
        assert np.abs(found.values.astype(int)).max() <= 127
    if fitted:
        return
    lost = np.square(found.dequantized() - weight).sum() / np.square(weight).sum()
    assert lost < (1e-3 if bits == 8 else 0.05)


def test_compensation_changes_outputs_less_than_rounding():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(600, 12)) @ rng.normal(size=(12, 64)) + 0.1 * rng.normal(size=(600, 64))
    weight = rng.normal(size=(16, 64))
    found = [quantize_grouped(weight, hessian=h, group=32).dequantized() for h in (x.T @ x, None)]
    lost = [np.square(x @ (w - weight).T).sum() for w in found]
    assert lost[0] < 0.5 * lost[1]


def test_zero_points_cost_less_where_weights_lean_to_one_side():
    weight = np.random.default_rng(1).uniform(0.5, 3.0, size=(8, 64))
    lost = [np.square(quantize_grouped(weight, symmetric=kind).dequantized() - weight).sum() for kind in (True, False)]
    assert lost[1] < 0.5 * lost[0]


def test_large_inputs_count_more_in_the_choice_of_a_scale():
    """One weight far out, whose input is nearly always zero: it is clipped so that the others keep fine steps."""
    weight = np.random.default_rng(2).normal(size=(4, 32))
    weight[:, 5] = 20.0
    hessian = np.eye(32)
    hessian[5, 5] = 1e-6
    found = quantize_grouped(weight, hessian=hessian)
    plain = quantize_grouped(weight)
    assert (found.scale < plain.scale).all()


def test_zero_weights_and_dead_inputs_stay_finite():
    weight = np.zeros((3, 16))
    assert (quantize_grouped(weight, hessian=np.zeros((16, 16))).dequantized() == 0).all()
    found = quantize_grouped(np.ones((2, 8)), hessian=np.diag([1.0, 0, 1, 0, 1, 0, 1, 0]), bits=8)
    np.testing.assert_allclose(found.dequantized(), 1, atol=0.01)


def test_bad_input_is_refused():
    good = np.ones((2, 8))
    for options in (
        {"bits": 3},
        {"group": 0},
        {"bits": 8, "symmetric": False},
        {"hessian": np.eye(4)},
        {"hessian": np.full((8, 8), np.nan)},
    ):
        with pytest.raises(SpecError):
            quantize_grouped(good, **options)
    with pytest.raises(SpecError):
        quantize_grouped(np.full((2, 8), np.inf))
