"""Value types: what they accept, what they refuse, and that JSON round trips are exact."""

import dataclasses
import json
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeds.errors import SpecError
from edgeds.specs import Resolution, ShapeRange, TensorSpec, from_json, to_json


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inner:
    size: Resolution
    rate: float = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outer:
    kind: Literal["a", "b"]
    inner: Inner | None = None
    pair: tuple[int, float] = (1, 2.0)
    many: tuple[Inner, ...] = ()
    names: dict[int, str] = dataclasses.field(default_factory=dict)
    free: dict[str, Any] | None = None
    flag: bool = False


resolutions = st.builds(Resolution, st.integers(1, 65536), st.integers(1, 65536))
inners = st.builds(Inner, size=resolutions, rate=st.floats(allow_nan=False, allow_infinity=False))
outers = st.builds(
    Outer,
    kind=st.sampled_from(["a", "b"]),
    inner=st.none() | inners,
    pair=st.tuples(st.integers(), st.floats(allow_nan=False, allow_infinity=False)),
    many=st.lists(inners, max_size=3).map(tuple),
    names=st.dictionaries(st.integers(0, 10**6), st.text(max_size=5), max_size=4),
    free=st.none() | st.dictionaries(st.text(max_size=3), st.integers() | st.text(max_size=3), max_size=3),
    flag=st.booleans(),
)


@given(outers)
def test_json_round_trip_is_exact(value: Outer) -> None:
    assert from_json(Outer, json.loads(json.dumps(to_json(value))), where="x") == value


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"kind": "c"}, ["x.kind", "'c'", "a, b"]),
        ({"knd": 1}, ["unknown key 'knd'", "known keys"]),
        ({"pair": [1]}, ["x.pair", "2 values"]),
        ({"pair": [True, 1]}, ["x.pair", "int"]),
        ({"flag": 1}, ["x.flag", "bool"]),
        ({"names": {"one": "x"}}, ["x.names", "'one'", "whole number"]),
        ({"names": {"1_0": "x"}}, ["x.names", "'1_0'"]),
        ({"names": {"1": "x", "01": "y"}}, ["x.names", "'01'"]),
        ({"names": []}, ["x.names", "object"]),
        ({"names": {"0": 1}}, ["x.names.0", "str"]),
        ({"many": [{"size": "640"}, {}]}, ["x.many[1]", "'size' is missing"]),
        ({"inner": {"size": "0x4"}}, ["65536"]),
        ({"inner": 3}, ["x.inner", "object"]),
    ],
)
def test_wrong_json_names_the_key(change: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(SpecError) as caught:
        from_json(Outer, {"kind": "a", **change}, where="x")
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("data", [None, [], "text", 3])
def test_json_that_is_no_object_is_refused(data: object) -> None:
    with pytest.raises(SpecError, match="expected an object"):
        from_json(Outer, data, where="x")


@given(resolutions)
def test_resolution_text_round_trip(resolution: Resolution) -> None:
    assert Resolution.parse(str(resolution)) == resolution


def test_resolution_is_height_by_width_and_one_number_is_square() -> None:
    assert Resolution.parse("480x640") == Resolution(480, 640)
    assert Resolution.parse(640) == Resolution(640, 640)


@pytest.mark.parametrize("text", ["", "x", "640x", "-1", "0", "1e3", "640x480x3", "99999999", "65537", "6 40"])
def test_malformed_resolutions_are_refused(text: str) -> None:
    with pytest.raises(SpecError):
        Resolution.parse(text)


@pytest.mark.parametrize(
    ("low", "opt", "high"),
    [((0,), (1,), (1,)), ((2,), (1,), (3,)), ((1,), (4,), (3,)), ((1, 1), (1,), (1,))],
)
def test_shape_range_keeps_min_opt_max_in_order(low: Any, opt: Any, high: Any) -> None:
    """B56: 1 <= min <= opt <= max in every dimension."""
    with pytest.raises(SpecError, match="shape range"):
        ShapeRange(min=low, opt=opt, max=high)


def test_tensor_spec_accepts_what_its_dims_allow() -> None:
    spec = TensorSpec(name="images", dtype="float32", shape=("n", 3, None, 640))
    assert spec.accepts((2, 3, 320, 640))
    assert not spec.accepts((2, 3, 320, 320))
    assert not spec.accepts((3, 320, 640))
    assert not spec.is_static
    assert spec.np_dtype == np.float32
    assert str(spec) == "images: float32[nx3x?x640]"
    assert from_json(TensorSpec, to_json(spec), where="x") == spec


def test_to_json_gives_plain_values() -> None:
    value = {
        "set": {3, 1, 2},
        "path": Path("a/b"),
        "scalar": np.float32(0.5),
        "array": np.arange(3),
        "bound": ShapeRange(min=(1,), opt=(2,), max=(3,)),
        1: Resolution(2, 3),
    }
    assert json.loads(json.dumps(to_json(value))) == {
        "set": [1, 2, 3],
        "path": "a/b",
        "scalar": 0.5,
        "array": [0, 1, 2],
        "bound": {"min": [1], "opt": [2], "max": [3]},
        "1": "2x3",
    }
