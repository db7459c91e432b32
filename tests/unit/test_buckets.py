"""Resolution buckets: bounded, aligned, deterministic, and as cheap as an exhaustive search."""

from __future__ import annotations

import itertools
import random
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgeds.buckets import cover_resolutions, padding_share, pick_bucket
from edgeds.errors import SpecError
from edgeds.specs import Resolution

SIDES = st.integers(1, 5000)
SIZES = st.lists(st.tuples(SIDES, SIDES), min_size=1, max_size=30)
STRIDES = st.sampled_from([1, 8, 32, 64])


def total_cost(sizes, buckets):
    return sum(pick_bucket(size, buckets).pixels for size in sizes)


@settings(max_examples=80, deadline=None)
@given(SIZES, STRIDES, st.integers(1, 5), st.sampled_from([320, 500, 640]))
def test_cover_properties(sizes, stride, most, long_side):
    buckets = cover_resolutions(sizes, stride=stride, max_buckets=most, long_side_px=long_side)
    assert 1 <= len(buckets) <= most
    assert len(set(buckets)) == len(buckets)
    side = -(-long_side // stride) * stride
    for bucket in buckets:
        assert bucket.height_px % stride == 0
        assert bucket.width_px % stride == 0
        assert max(bucket.height_px, bucket.width_px) == side
    for size in sizes:
        picked = pick_bucket(size, buckets)
        assert picked in buckets
        assert 0 <= padding_share(size, picked) < 1
        # Full scale: the long side reaches long_side within the rounding of half a pixel of the short side.
        scale = min(picked.height_px / size[0], picked.width_px / size[1])
        assert scale * min(size) > side / max(size) * min(size) - 0.51 or min(size) * side < max(size)
    assert buckets == cover_resolutions(list(reversed(sizes)), stride=stride, max_buckets=most, long_side_px=long_side)


@settings(max_examples=60, deadline=None)
@given(SIZES, st.integers(1, 5))
def test_more_buckets_are_never_worse(sizes, most):
    fewer = total_cost(sizes, cover_resolutions(sizes, max_buckets=most))
    assert total_cost(sizes, cover_resolutions(sizes, max_buckets=most + 1)) <= fewer


def test_as_good_as_trying_every_set():
    """The reference tries all sets of candidate buckets; with stride 1 no sizes are merged beforehand."""
    rng = random.Random(3)
    for _ in range(15):
        sizes = [(rng.randint(1, 12), rng.randint(1, 12)) for _ in range(6)]
        side = 12
        scaled = {
            (max(1, int(h * side / max(h, w) + 0.5)), max(1, int(w * side / max(h, w) + 0.5))) for h, w in sizes
        } | {(side, side)}
        candidates = [Resolution(h, w) for h, w in scaled]
        for most in (1, 2, 3):
            best = min(
                total_cost(sizes, group)
                for count in range(1, most + 1)
                for group in itertools.combinations(candidates, count)
                if all(
                    any(
                        b.height_px >= min(round(h * side / max(h, w)), 12)
                        and b.width_px >= min(round(w * side / max(h, w)), 12)
                        for b in group
                    )
                    for h, w in sizes
                )
            )
            found = cover_resolutions(sizes, stride=1, max_buckets=most, long_side_px=side)
            assert total_cost(sizes, found) <= best


def test_nearly_equal_sizes_share_one_bucket():
    """B78: 20 images within 10 pixels of each other, wherever the multiple of the stride lies."""
    rng = random.Random(0)
    for height, width in ((600, 800), (800, 600), (480, 640), (635, 640), (720, 1280), (512, 2000)):
        sizes = [(height - rng.randint(0, 10), width - rng.randint(0, 10)) for _ in range(20)]
        buckets = cover_resolutions(sizes)
        assert len(buckets) == 1, (sizes, buckets)
        assert len({pick_bucket(size, buckets) for size in sizes}) == 1


def test_sizes_off_the_stride_are_padded():
    """B91: 300x500 at 500 px becomes 512 wide; nothing is hard-coded to 640."""
    (bucket,) = cover_resolutions([(300, 500)], long_side_px=500)
    assert bucket == Resolution(320, 512)
    assert 0 < padding_share((300, 500), bucket) < 0.1


def test_typical_mix_gets_its_own_buckets():
    sizes = [(1080, 1920)] * 50 + [(480, 640)] * 30 + [(1000, 1000)] * 5 + [(1920, 1080)] * 10
    assert cover_resolutions(sizes) == (
        Resolution(384, 640),
        Resolution(480, 640),
        Resolution(640, 384),
        Resolution(640, 640),
    )
    assert cover_resolutions(sizes, max_buckets=1) == (Resolution(640, 640),)


def test_cost_table_and_function_change_the_choice():
    sizes = [(360, 640)] * 10 + [(480, 640)] * 10
    assert len(cover_resolutions(sizes, max_buckets=2)) == 2
    flat = {Resolution(384, 640): 10.0, Resolution(480, 640): 10.0}
    assert cover_resolutions(sizes, max_buckets=2, cost=flat) == (Resolution(480, 640),)
    assert cover_resolutions(sizes, max_buckets=2, cost=lambda r: 5.0) == (Resolution(480, 640),)
    with pytest.raises(SpecError, match=r"384x640.*nan"):
        cover_resolutions([(360, 640)], cost=lambda r: float("nan"))
    with pytest.raises(SpecError, match="table is empty"):
        cover_resolutions([(360, 640)], cost={})


def test_pick_keeps_scale_before_saving_area():
    buckets = (Resolution(320, 320), Resolution(384, 640), Resolution(640, 640))
    assert pick_bucket((1080, 1920), buckets) == Resolution(384, 640)
    assert pick_bucket((640, 640), buckets) == Resolution(640, 640)
    assert pick_bucket(Resolution(3, 2), buckets[:1]) == Resolution(320, 320)
    assert pick_bucket(np.array([1080, 1920]), buckets) == Resolution(384, 640)


def test_ten_thousand_sizes_are_fast():
    rng = random.Random(1)
    sizes = [(rng.randint(1, 4000), rng.randint(1, 4000)) for _ in range(10_000)]
    start = time.perf_counter()
    cover_resolutions(sizes, max_buckets=8, long_side_px=1280, stride=8)
    assert time.perf_counter() - start < 2.5


@pytest.mark.parametrize(
    ("sizes", "options", "words"),
    [
        ([], {}, "no image sizes"),
        ([(0, 10)], {}, "0x10"),
        ([(10, -1)], {}, "10x-1"),
        ([(70000, 10)], {}, "70000x10"),
        ([(10.5, 10)], {}, "two whole numbers"),
        ([(10, 10, 3)], {}, "two whole numbers"),
        (["10x10"], {}, "two whole numbers"),
        ([(10, 10)], {"stride": 0}, "stride"),
        ([(10, 10)], {"max_buckets": 0}, "max_buckets"),
        ([(10, 10)], {"long_side_px": 640.0}, "long_side_px"),
    ],
)
def test_wrong_arguments_are_named(sizes, options, words):
    with pytest.raises(SpecError, match=words):
        cover_resolutions(sizes, **options)


def test_pick_without_buckets():
    with pytest.raises(SpecError, match="none given"):
        pick_bucket((10, 10), ())
