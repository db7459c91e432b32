"""The golden check: what it lets pass, what it does not, and that scores cannot hide behind boxes."""

import numpy as np
import pytest
from install_fakes import FakeEngine

from edgeds.engines.golden_check import check_golden, compare
from edgeds.errors import BundleError, SpecError

RNG = np.random.default_rng(0)


def golden(**arrays: np.ndarray) -> dict[str, np.ndarray]:
    x = RNG.random((1, 3, 4, 4), dtype=np.float32)
    values = {"input/0/x": x, "float/0/y": 2 * x}
    return {**values, **{name.replace("__", "/"): array for name, array in arrays.items()}}


@pytest.mark.parametrize(
    ("precision", "gain", "ok"),
    [
        ("float", 1.0, True),
        ("float", 1.004, True),
        ("float", 1.02, False),
        ("float16", 1.015, True),
        ("float16", 1.2, False),
        ("int8", 1.015, True),
        ("int8", 1.2, False),
    ],
)
def test_tolerances_by_precision(precision: str, gain: float, ok: bool) -> None:
    result = check_golden(FakeEngine(gain), golden(), precision=precision)
    assert result.ok is ok
    assert result.max_error == pytest.approx(abs(gain - 1), rel=0.05, abs=1e-6)
    assert ("'y'" in result.failures()) is not ok


def test_int8_may_be_as_far_from_float_as_quantizing_is_and_not_much_more() -> None:
    """B66: judged on the device against the float outputs; the quantized reference says how much INT8 costs."""
    data = golden()
    data["int8/0/y"] = data["float/0/y"] * 1.1
    assert check_golden(FakeEngine(1.1), data, precision="int8").ok
    assert check_golden(FakeEngine(1.14), data, precision="int8").ok
    assert not check_golden(FakeEngine(1.3), data, precision="int8").ok
    assert not check_golden(FakeEngine(0.7), data, precision="int8").ok
    assert not check_golden(FakeEngine(1.1), data, precision="float").ok


def test_wrong_scores_do_not_hide_behind_boxes() -> None:
    boxes, scores = RNG.random((1, 4, 50)) * 640, RNG.random((1, 80, 50)) * 0.9
    reference = np.concatenate([boxes, scores], axis=1)
    wrong = np.concatenate([boxes, scores * 0.5], axis=1)
    assert np.sqrt(np.mean((wrong - reference) ** 2)) / np.sqrt(np.mean(reference**2)) < 0.01  # what a plain ratio says
    max_error, rms_error = compare(wrong, reference)
    assert max_error == pytest.approx(0.5, rel=0.05)
    assert rms_error == pytest.approx(0.5, rel=0.05)


def test_noise_where_the_reference_is_nearly_zero_is_no_error() -> None:
    boxes, silent = RNG.random((1, 4, 50)) * 640, np.full((1, 80, 50), 1e-9)
    reference = np.concatenate([boxes, silent], axis=1)
    assert max(compare(reference + 1e-6, reference)) < 1e-4


def test_values_that_are_not_numbers() -> None:
    reference = np.array([1.0, np.inf, -np.inf, np.nan])
    assert compare(reference.copy(), reference) == (0.0, 0.0)
    for wrong in (np.nan, np.inf):
        got = reference.copy()
        got[0] = wrong
        assert compare(got, reference) == (np.inf, np.inf)
    assert compare(np.zeros(4), np.zeros(4)) == (0.0, 0.0)
    assert compare(np.ones(4), np.zeros(4)) == (np.inf, np.inf)
    assert compare(np.zeros((0, 3)), np.zeros((0, 3))) == (0.0, 0.0)
    labels = np.array([1, 2, 3, 4])
    assert compare(np.array([1, 2, 3, 9]), labels) == (0.25, 0.25)


def test_golden_data_that_does_not_fit() -> None:
    with pytest.raises(BundleError, match="input/<sample>/<name>"):
        check_golden(FakeEngine(), {"float/0/y": np.zeros(1)}, precision="float")
    with pytest.raises(BundleError, match="no reference"):
        check_golden(FakeEngine(), {"input/0/x": np.zeros((1, 3, 4, 4), np.float32)}, precision="float")
    with pytest.raises(BundleError, match="do not belong together"):
        check_golden(FakeEngine(), golden(float__0__y=np.zeros((1, 3, 4, 5))), precision="float")
    with pytest.raises(SpecError, match="precision"):
        check_golden(FakeEngine(), golden(), precision="fp8")


def test_samples_beyond_the_profiles_are_skipped() -> None:
    result = check_golden(FakeEngine(), golden(), precision="float", fits=lambda _feeds: False)
    assert (result.samples, result.skipped, result.ok, result.max_error) == (0, 1, False, None)
