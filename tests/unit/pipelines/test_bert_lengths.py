"""Length buckets and groups: optimal covers, bounded padding, every row once."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeds.errors import InputError, SpecError
from edgeds.pipelines.bert.lengths import (
    RowCost,
    default_lengths,
    fit_row_cost,
    group_rows,
    padding_share,
    pick_length,
    plan_lengths,
)

LENGTHS = st.lists(st.integers(1, 64), min_size=1, max_size=40)


@given(lengths=LENGTHS, buckets=st.integers(1, 4), square=st.sampled_from([0.0, 0.05]))
def test_no_other_cover_is_cheaper(lengths: list[int], buckets: int, square: float) -> None:
    cost = RowCost(fixed_us=3.0, token_us=1.0, square_us=square)
    found = plan_lengths(lengths, max_length=64, max_buckets=buckets, multiple=8, cost=cost)
    assert found[-1] == 64
    assert len(found) <= buckets

    def price(cover: tuple[int, ...]) -> float:
        return sum(cost.of(pick_length(length, cover)) for length in lengths)

    others = ((*cover, 64) for count in range(buckets) for cover in itertools.combinations(range(8, 64, 8), count))
    assert price(found) <= min(map(price, others)) + 1e-6


@given(lengths=LENGTHS, tokens=st.integers(1, 300), rows=st.integers(1, 9), run=st.integers(0, 50))
def test_groups_hold_every_row_once_within_their_limits(lengths: list[int], tokens: int, rows: int, run: int) -> None:
    groups = group_rows(lengths, max_tokens=tokens, max_rows=rows, run_tokens=run)
    assert sorted(index for group in groups for index in group) == list(range(len(lengths)))
    for group in groups:
        sizes = [lengths[index] for index in group]
        assert sizes == sorted(sizes, reverse=True)
        assert len(group) <= rows
        assert len(group) == 1 or sizes[0] * len(group) <= tokens
        assert sum(sizes[0] - size for size in sizes) <= run


def test_row_cost_is_fitted_without_negative_terms() -> None:
    exact = RowCost(fixed_us=50, token_us=2, square_us=0.01)
    fitted = fit_row_cost({length: exact.of(length) for length in (16, 64, 128, 256, 512)})
    assert fitted.of(300) == pytest.approx(exact.of(300), rel=1e-6)
    falling = fit_row_cost({16: 100.0, 32: 90.0, 64: 80.0})
    assert min(falling.fixed_us, falling.token_us, falling.square_us) >= 0
    for bad in ({16: 1.0}, {16: 1.0, 32: 0.0}, {16: 1.0, 32: float("nan")}):
        with pytest.raises(SpecError, match="row cost"):
            fit_row_cost(bad)


def test_default_lengths_and_padding() -> None:
    assert default_lengths(256) == (16, 32, 48, 64, 96, 128, 192, 256)
    assert default_lengths(20) == (16, 20)
    assert default_lengths(8) == (8,)
    assert padding_share([8, 12], (16,)) == pytest.approx(1 - 20 / 32)
    assert padding_share([], (16,)) == 0
    with pytest.raises(InputError, match="40 tokens are more than the longest"):
        pick_length(40, (16, 32))


def test_bad_arguments() -> None:
    for options in ({"max_buckets": 0}, {"multiple": 0}, {"max_length": 0}):
        with pytest.raises(SpecError):
            plan_lengths([4], **{"max_length": 8, **options})
    with pytest.raises(SpecError, match="length 0"):
        plan_lengths([0], max_length=8)
