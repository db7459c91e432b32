"""Agreement with the float model (issue 5 part 5): boxes beside scores, integers, dead and changing outputs."""

import numpy as np
import pytest
from compress_models import FLOAT, INT64, Net

from edgeds.compress.judge import WORST, Judge


def scaled(factors, *, side=2):
    """x -> x * factors, [n, channels, side]."""
    net = Net(seed=1)
    x = net.input("x", ["n", len(factors), side])
    net.output(net.op("Mul", x, net.w(value=np.float32(factors).reshape(1, -1, 1))), ["n", len(factors), side])
    return net.model()


def feed(*rows):
    return {"x": np.float32([[[value, value] for value in rows]])}


def test_an_equal_model_agrees_fully():
    assert Judge(scaled([1, 1]), [feed(1, 2)]).agreement(scaled([1, 1])) == 100.0


def test_agreement_is_the_share_of_the_signal_without_error():
    """An error of a tenth is a hundredth of the power: 99 points, 20 dB."""
    assert Judge(scaled([1, 1]), [feed(2, -3)]).agreement(scaled([1.1, 1.1])) == pytest.approx(99.0, abs=1e-4)


def test_boxes_do_not_hide_scores():
    """Scores that are all zero cost half of everything, however large the boxes beside them are."""
    judge = Judge(scaled([1, 1]), [feed(300, 0.9)])
    assert judge.agreement(scaled([1, 0])) == pytest.approx(50.0)
    assert judge.agreement(scaled([0, 1])) == pytest.approx(50.0)
    assert judge.agreement(scaled([1, 0.9])) == pytest.approx(99.5, abs=1e-4)


def test_a_model_with_nan_or_a_multiple_of_its_signal_is_dead():
    judge = Judge(scaled([1, 1]), [feed(2, -3)])
    assert judge.agreement(scaled([np.nan, 1])) == WORST
    assert judge.agreement(scaled([50, 1])) == WORST


def test_the_worst_output_counts_and_integers_count_by_value():
    def model(factor, add):
        net = Net(seed=1)
        x = net.input("x", ["n", 4])
        net.output(net.op("Mul", x, net.w(value=np.float32(factor))), ["n", 4], FLOAT)
        net.output(net.op("ArgMax", net.op("Add", x, net.w(value=np.float32(add))), axis=1), ["n", 1], INT64)
        return net.model()

    judge = Judge(model(1, [0, 0, 0, 0]), [{"x": np.eye(4, dtype=np.float32)}])
    assert judge.agreement(model(1, [0, 0, 0, 0])) == 100.0
    assert judge.agreement(model(1.1, [0, 0, 0, 0])) == pytest.approx(99.0, abs=1e-4)
    assert judge.agreement(model(1, [5, 0, 0, 0])) == pytest.approx(25.0), "three of four classes changed"


def test_outputs_whose_shape_depends_on_the_data_are_left_out():
    def model(threshold):
        net = Net(seed=1)
        x = net.input("x", [8])
        net.output(net.op("Compress", x, net.op("Greater", x, net.w(value=np.float32(threshold)))), ["k"])
        return net.model()

    values = {"x": np.arange(8, dtype=np.float32)}
    assert Judge(model(3), [values]).agreement(model(4)) == 100.0


def test_silence_is_no_error():
    assert Judge(scaled([0, 0]), [feed(1, 1)]).agreement(scaled([0, 0])) == 100.0
    assert Judge(scaled([0, 0]), [feed(1, 1)]).agreement(scaled([0, 1])) == WORST
