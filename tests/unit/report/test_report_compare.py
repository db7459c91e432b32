"""Comparing engines whose outputs are known: matching, figures, refusals."""

from __future__ import annotations

import types

import numpy as np
import pytest

from edgeds.difference import Tolerance
from edgeds.errors import BundleError, SpecError
from edgeds.report.compare import compare_engines, fit_feeds
from edgeds.report.feeds import golden_feeds, random_feeds
from edgeds.specs import TensorSpec


class Fake:
    """An engine made of a function over its feeds."""

    def __init__(self, function, *, inputs=("x:float32:N,4",), outputs=("y:float32:N,4",), metadata=None):
        self.inputs = tuple(map(spec, inputs))
        self.outputs = tuple(map(spec, outputs))
        self.function, self.metadata, self.seen = function, metadata or {}, []
        self.backend, self.precision = "fake", None

    def infer(self, feeds):
        self.seen.append(feeds)
        values = self.function(**feeds)
        return values if isinstance(values, dict) else {self.outputs[0].name: values}


def spec(text):
    name, dtype, dims = text.split(":")
    shape = tuple(int(dim) if dim.isdecimal() else dim for dim in dims.split(",") if dim)
    return TensorSpec(name=name, dtype=dtype, shape=shape)


X = [{"x": np.arange(8, dtype=np.float32).reshape(2, 4)}, {"x": np.ones((1, 4), np.float32)}]


def compare(a, b, feeds=X, **options):
    return compare_engines(a, b, feeds, quiet=True, **options)


def test_equal_engines_agree_and_differences_are_measured():
    same = compare(Fake(lambda x: x), Fake(lambda x: x.copy()))
    assert same.ok
    assert (same.outputs["y"].max_abs, same.outputs["y"].cosine, same.samples) == (0.0, 1.0, 2)
    off = compare(Fake(lambda x: x), Fake(lambda x: x + 0.5), tolerance=Tolerance(absolute=0.4))
    assert not off.ok
    item = off.outputs["y"]
    assert item.max_abs == 0.5
    assert item.rel == pytest.approx(0.5 / 7)
    assert compare(Fake(lambda x: x), Fake(lambda x: x + 0.5), tolerance=Tolerance(absolute=0.5)).ok
    assert not compare(Fake(lambda x: x), Fake(lambda x: x * 1.02)).ok  # the default: 0.01 relative
    assert compare(Fake(lambda x: x), Fake(lambda x: x * 1.005)).ok


def test_class_agreement_only_for_outputs_that_are_scores():
    flip = Fake(lambda x: x[:, ::-1])
    assert compare(Fake(lambda x: x), flip, [X[0]]).outputs["y"].argmax_agreement == 0.0
    boxes = ("y:float32:N,2,4",)
    cube = np.arange(8, dtype=np.float32).reshape(1, 2, 4)
    assert (
        compare(Fake(lambda x: cube, outputs=boxes), Fake(lambda x: cube, outputs=boxes)).outputs["y"].argmax_agreement
        is None
    )
    named = ("logits:float32:N,2,4",)
    assert (
        compare(Fake(lambda x: cube, outputs=named), Fake(lambda x: cube, outputs=named))
        .outputs["logits"]
        .argmax_agreement
        == 1.0
    )


def test_nan_positions_are_reported():
    def broken(x):
        y = x.copy()
        y[0, 2] = np.nan
        return y

    item = compare(Fake(lambda x: x), Fake(broken)).outputs["y"]
    assert not item.ok
    assert (item.nan_a, item.nan_b, item.non_finite_mismatch) == (0, 2, 2)
    assert item.non_finite_positions == ((0, 0, 2), (1, 0, 2))
    assert item.max_abs == 0.0


def test_outputs_without_counterpart_fail_and_all_new_names_go_by_position():
    two = Fake(lambda x: {"y": x, "z": x}, outputs=("y:float32:N,4", "z:float32:N,4"))
    report = compare(two, Fake(lambda x: x))
    assert not report.ok
    assert report.only_a == ("z",)
    assert "output 'z' is only in A" in report.notes
    renamed = compare(Fake(lambda x: x), Fake(lambda x: x, outputs=("out:float32:N,4",)))
    assert renamed.ok
    assert renamed.outputs["y"].other == "out"
    assert "compared by position: 'y' with 'out'" in renamed.notes[0]
    with pytest.raises(SpecError, match="share no output name and differ in number"):
        compare(two, Fake(lambda x: x, outputs=("out:float32:N,4",)))


def test_shapes_and_types_of_outputs_are_explained():
    item = compare(Fake(lambda x: x), Fake(lambda x: x[:, :3]))
    assert not item.ok
    assert item.outputs["y"].problem == "shapes differ: [2, 4] and [2, 3]"
    assert item.outputs["y"].max_abs is None
    half = compare(Fake(lambda x: x), Fake(lambda x: x.astype(np.float16)))
    assert half.ok
    assert "is float32 in A and float16 in B" in half.notes[0]


def test_each_side_gets_the_float_width_it_takes():
    half = Fake(lambda x: x.astype(np.float32), inputs=("x:float16:N,4",))
    report = compare(Fake(lambda x: x), half)
    assert half.seen[0]["x"].dtype == np.float16
    assert "input 'x' is float32 in A and float16 in B" in report.notes[0]
    with pytest.raises(SpecError, match="do not fit int32"):
        fit_feeds([spec("i:int32:N")], {"i": np.array([2**40])})


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        (("z:float32:N,4",), "A takes x, B takes z"),
        (("x:float32:N,4", "z:float32:N"), "A takes x, B takes x, z"),
        (("x:float32:N,5",), "input 'x' is x: float32"),
        (("x:float32:N,4,4",), "input 'x' is x: float32"),
        (("x:int64:N,4",), "input 'x' is float32 in A, int64 in B"),
    ],
)
def test_inputs_that_do_not_match_are_refused_in_one_sentence(inputs, words):
    with pytest.raises(SpecError, match=f"cannot be compared: .*{words}") as caught:
        compare(Fake(lambda x: x), Fake(lambda **feeds: feeds["x"], inputs=inputs))
    assert "\n" not in str(caught.value)


def test_no_sample_is_refused():
    with pytest.raises(SpecError, match="no sample to compare on"):
        compare(Fake(lambda x: x), Fake(lambda x: x), [])


def test_random_feeds_are_seeded_and_follow_the_specs():
    engine = Fake(
        None,
        inputs=("images:float32:batch,3,H,W", "ids:int64:batch,S", "mask:int64:batch,S", "k:float16:2"),
        metadata={"imgsz": "[64, 96]"},
    )
    first, second = list(random_feeds(engine, samples=2, seed=3))
    again = next(iter(random_feeds(engine, seed=3)))
    assert {name: array.shape for name, array in first.items()} == {
        "images": (1, 3, 64, 96),
        "ids": (1, 128),
        "mask": (1, 128),
        "k": (2,),
    }
    assert first["k"].dtype == np.float16
    assert set(np.unique(first["ids"])) == {0, 1}
    assert np.array_equal(first["images"], again["images"])
    assert not np.array_equal(first["images"], second["images"])
    given = next(iter(random_feeds(engine, shapes={"ids": (4, 7), "images": (4, 3, 8, 8)})))
    assert given["images"].shape == (4, 3, 8, 8)


@pytest.mark.parametrize(
    ("shapes", "words"),
    [
        ({"nope": (1,)}, "no such input; it has x"),
        ({"x": (1, 5)}, "shape 1x5 does not fit"),
        ({"x": (1 << 40, 4)}, "more than 2 GiB"),
    ],
)
def test_random_feeds_refuse_shapes_that_do_not_fit(shapes, words):
    with pytest.raises(SpecError, match=words):
        random_feeds(Fake(None), shapes=shapes)


def test_metadata_that_is_no_size_is_ignored():
    for text in ("[", "0", "[1,2,3]", "'big'", "9" * 200):
        engine = Fake(None, inputs=("x:float32:1,1,H,4",), metadata={"imgsz": text})
        assert next(iter(random_feeds(engine)))["x"].shape == (1, 1, 640, 4)


def test_golden_feeds_come_in_order_and_damaged_names_are_refused():
    arrays = {f"input/{i}/x": np.full(1, i) for i in (10, 2, 0)} | {"float/0/y": np.zeros(1)}
    bundle = types.SimpleNamespace(source="b", has_golden=lambda: True, golden=lambda: arrays)
    assert [feeds["x"][0] for feeds in golden_feeds(bundle)] == [0, 2, 10]
    assert len(golden_feeds(bundle, limit=2)) == 2
    arrays["input/x"] = np.zeros(1)
    with pytest.raises(BundleError, match="not named input/<sample>/<name>"):
        golden_feeds(bundle)
    assert golden_feeds(types.SimpleNamespace(has_golden=lambda: False)) == []
