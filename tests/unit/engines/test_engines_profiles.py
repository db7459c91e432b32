"""Profiles for TensorRT: 1 <= min <= opt <= max always, opt a size in use, nothing unbounded (report B56)."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeds.engines.profiles import DimRange, check_profiles, choose_range, plan_profiles
from edgeds.errors import SpecError
from edgeds.specs import Resolution, ShapeRange, TensorSpec

IMAGES = TensorSpec(name="images", dtype="float32", shape=("batch", 3, "height", "width"))
IDS = TensorSpec(name="ids", dtype="int64", shape=("batch", "length"))
MASK = TensorSpec(name="mask", dtype="int64", shape=("batch", "length"))
SIZES = st.integers(1, 4096)


@given(low=st.one_of(st.none(), st.integers(0, 5000)), high=st.integers(1, 5000), used=st.lists(st.integers(-9, 6000)))
def test_b56_chosen_ranges_are_ordered_and_tuned_for_a_used_size(low: int | None, high: int, used: list[int]) -> None:
    if (low or 1) > high:
        with pytest.raises(SpecError, match="above the largest"):
            choose_range(low, high, name="n", used=used)
        return
    found = choose_range(low, high, name="n", used=used)
    assert 1 <= found.min <= found.opt <= found.max == high
    inside = [size for size in used if found.min <= size <= found.max]
    assert found.opt in inside if inside else found.opt == high


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(1000, 1200, (1000, 1200)), (1, 1, (1, 1)), (1, 7, (1, 7)), (0, 7, (1, 7)), (5, 5, (5, 5)), (None, 3, (1, 3))],
)
def test_b56_ranges_of_the_report(low: int | None, high: int, expected: tuple[int, int]) -> None:
    found = choose_range(low, high, name="n")
    assert (found.min, found.max) == expected
    assert found.min <= found.opt <= found.max


@pytest.mark.parametrize(("low", "high"), [(0, None), (None, None), (1, None)])
def test_b56_an_unbounded_dimension_is_refused_by_name(low: int | None, high: None) -> None:
    with pytest.raises(SpecError, match="'sequence' has no upper bound"):
        choose_range(low, high, name="sequence")


@pytest.mark.parametrize(("low", "high"), [(-1, 4), (0, 0), (5, 4), (1, -3)])
def test_impossible_ranges_are_refused(low: int, high: int) -> None:
    with pytest.raises(SpecError, match="'n'"):
        choose_range(low, high, name="n")


@given(
    buckets=st.lists(st.tuples(SIZES, SIZES), min_size=1, max_size=6),
    max_batch=st.integers(1, 64),
    opt=st.integers(1, 64),
)
def test_one_profile_per_bucket_always_ordered(buckets: list[tuple[int, int]], max_batch: int, opt: int) -> None:
    resolutions = [Resolution(*pair) for pair in buckets]
    profiles = plan_profiles([IMAGES], resolutions, max_batch=max_batch, opt_batch=min(opt, max_batch))
    assert len(profiles) == len(set(resolutions))
    for profile, bucket in zip(profiles, dict.fromkeys(resolutions), strict=True):
        shapes = profile["images"]
        assert shapes.min == (1, 3, bucket.height_px, bucket.width_px)
        assert shapes.max == (max_batch, 3, bucket.height_px, bucket.width_px)
        assert shapes.opt[0] == min(opt, max_batch)
    check_profiles(profiles, [IMAGES])


def test_length_buckets_give_one_profile_each_for_all_inputs_that_share_the_name() -> None:
    lengths = [DimRange(min=1, opt=32, max=32), DimRange(min=33, opt=128, max=128)]
    profiles = plan_profiles([IDS, MASK], max_batch=4, dims={"length": lengths})
    assert [profile["ids"].max for profile in profiles] == [(4, 32), (4, 128)]
    assert all(profile["ids"] == profile["mask"] for profile in profiles)
    check_profiles(profiles, [IDS, MASK])


def test_unnamed_dimensions_are_addressed_by_input_and_axis() -> None:
    spec = TensorSpec(name="x", dtype="float32", shape=(None, None, 8))
    with pytest.raises(SpecError, match=r"'x\[1\]' has no upper bound"):
        plan_profiles([spec])
    (profile,) = plan_profiles([spec], max_batch=2, dims={"x[1]": DimRange.fixed(5)})
    assert (profile["x"].min, profile["x"].max) == ((1, 5, 8), (2, 5, 8))


def test_channels_last_images_get_height_and_width_too() -> None:
    spec = TensorSpec(name="x", dtype="uint8", shape=("n", "h", "w", 3))
    (profile,) = plan_profiles([spec], [Resolution(320, 640)])
    assert profile["x"].max == (1, 320, 640, 3)


def test_models_without_dynamic_dimensions_need_no_profile_and_refuse_what_does_not_fit() -> None:
    fixed = TensorSpec(name="images", dtype="float32", shape=(1, 3, 320, 320))
    assert plan_profiles([fixed], [Resolution(320, 320)]) == ()
    with pytest.raises(SpecError, match="axis 2 is fixed at 320"):
        plan_profiles([fixed], [Resolution(640, 640)])
    with pytest.raises(SpecError, match="batch is fixed"):
        plan_profiles([fixed], max_batch=4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"inputs": [IDS], "buckets": [Resolution(32, 32)]}, "no input looks like an image"),
        ({"inputs": [IDS]}, "'length' has no upper bound"),
        ({"inputs": [IDS], "dims": {"lenght": DimRange.fixed(3)}}, "'lenght' is no dynamic dimension"),
        ({"inputs": [IDS], "dims": {"length": []}}, "is empty"),
        ({"inputs": [IDS], "dims": {"length": [DimRange.fixed(n) for n in range(1, 99)]}}, "98 profiles"),
        ({"inputs": [IMAGES], "buckets": [Resolution(32, 32)], "max_batch": 0}, "max_batch"),
        ({"inputs": [IMAGES], "buckets": [Resolution(32, 32)], "max_batch": True}, "max_batch"),
        ({"inputs": [IMAGES], "buckets": [Resolution(32, 32)], "max_batch": 2, "opt_batch": 3}, "opt_batch"),
    ],
)
def test_requests_that_do_not_fit_the_model_name_what_is_wrong(arguments: dict, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        plan_profiles(**arguments)


def test_a_model_whose_height_and_width_are_one_dimension_takes_squares_only() -> None:
    square = TensorSpec(name="x", dtype="float32", shape=("n", 3, "s", "s"))
    assert plan_profiles([square], [Resolution(64, 64)])[0]["x"].max == (1, 3, 64, 64)
    with pytest.raises(SpecError, match="same dimension 's'"):
        plan_profiles([square], [Resolution(64, 96)])


def shapes(*sizes: int) -> ShapeRange:
    return ShapeRange(min=sizes, opt=sizes, max=sizes)


@pytest.mark.parametrize(
    ("profiles", "message"),
    [
        ([], "needs at least one profile"),
        ([{}], "no range"),
        ([{"ids": shapes(1, 4), "mask": shapes(1, 4), "x": shapes(1)}], "'x' is unknown"),
        ([{"ids": shapes(1, 4, 4), "mask": shapes(1, 4)}], "has 2 dimensions, its range has 3"),
        ([{"ids": shapes(1, 4), "mask": shapes(2, 4)}], "'batch' is"),
        ([{"ids": shapes(1, 4), "mask": shapes(1, 4)}, {"ids": shapes(1, 4)}], "profile 1"),
    ],
)
def test_profiles_that_do_not_fit_the_inputs_are_refused_before_the_build(profiles: list, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        check_profiles(profiles, [IDS, MASK])


def test_a_fixed_dimension_cannot_be_given_another_size() -> None:
    with pytest.raises(SpecError, match="axis 1 is fixed at 3"):
        check_profiles([{"images": shapes(1, 4, 32, 32)}], [IMAGES])


def test_shape_tensors_take_values_instead_of_shapes() -> None:
    size = TensorSpec(name="size", dtype="int64", shape=(2,))
    check_profiles([{"size": ShapeRange(min=(1, 1), opt=(8, 8), max=(64, 64))}], [size], values=["size"])
    with pytest.raises(SpecError, match="axis 0 is fixed at 2"):
        check_profiles([{"size": shapes(8)}], [size])
