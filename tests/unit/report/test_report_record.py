"""Run records: written and read back, refused when damaged, thinned out without losing their shape."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from run_builders import bare, measured, predicted

from edgeds.errors import SpecError
from edgeds.report.record import RunRecord, keep_shape, keep_spread, parse_record, read_record, write_record
from edgeds.specs import to_json

finite = st.floats(allow_nan=False, allow_infinity=False, width=32)


@pytest.mark.parametrize("record", [measured(), predicted(), bare(interrupted=True)], ids=lambda record: record.title)
def test_record_comes_back_as_it_was_written(tmp_path: Path, record: RunRecord) -> None:
    path = tmp_path / "run.json"
    write_record(path, record)
    assert read_record(path) == record


def changed(**keys: Any) -> dict[str, Any]:
    return {**to_json(measured()), **keys}


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ([], "not a run record"),
        ({"kind": "other"}, "not a run record"),
        (changed(schema=2), "upgrade"),
        (changed(schema=True), "schema"),
        (changed(status="guessed"), "guessed"),
        (changed(fps=-1.0), "fps"),
        (changed(fps="fast"), "fps"),
        (changed(fps=math.inf), "too large"),
        (changed(fps=10**400), "too large"),
        (changed(extra=1), "unknown key 'extra'"),
        (changed(batch=0), "batch"),
        (changed(power={"mean_w": -3.0}), r"power\.mean_w"),
        (changed(budget={"watts": 0}), "watts"),
        (changed(layers=[{"name": "a", "kind": "b", "time_us": -1.0}]), r"layers\[0\]\.time_us"),
        (changed(power={"series": [[1.0]]}), "expected 2 values"),
    ],
)
def test_damaged_record_is_refused_with_file_and_place(data: Any, words: str) -> None:
    with pytest.raises(SpecError, match=words) as caught:
        parse_record(data, where="run.json")
    assert "run.json" in str(caught.value) or "watts" in str(caught.value)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "1e999", "9" * 400])
def test_numbers_that_json_or_floats_do_not_have_are_refused(tmp_path: Path, number: str) -> None:
    path = tmp_path / "run.json"
    path.write_text(json.dumps(changed(fps="X")).replace('"X"', number))
    with pytest.raises(SpecError, match=r"run\.json"):
        read_record(path)


def test_nothing_is_left_when_a_record_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"run\.json"):
        write_record(tmp_path / "run.json", measured(fps=math.nan))
    assert list(tmp_path.iterdir()) == []


@given(st.lists(st.floats(), max_size=300), st.integers(2, 40))
def test_kept_latencies_have_the_same_ends_and_stay_ordered(values: list[float], limit: int) -> None:
    kept = keep_spread(values, limit=limit)
    real = sorted(value for value in values if math.isfinite(value))
    assert list(kept) == sorted(kept)
    assert len(kept) == min(len(real), limit)
    if real:
        assert (kept[0], kept[-1]) == (real[0], real[-1])


def test_kept_latencies_have_the_percentiles_of_all() -> None:
    rng = random.Random(1)
    values = sorted(rng.gauss(30, 4) for _ in range(60_000))
    kept = keep_spread(values)
    assert len(kept) == 5000
    for share in (0.5, 0.95, 0.99):
        assert kept[int(share * 4999)] == pytest.approx(values[int(share * 59_999)], abs=0.05)


@given(st.lists(st.tuples(finite, finite), max_size=300), st.integers(2, 40))
def test_kept_points_hold_the_peaks_in_order(points: list[tuple[float, float]], limit: int) -> None:
    points = sorted(points)
    kept = keep_shape(points, limit=limit)
    assert len(kept) <= max(limit, 2)
    assert [point[0] for point in kept] == sorted(point[0] for point in kept)
    if points:
        assert max(point[1] for point in kept) == max(point[1] for point in points)
        assert min(point[1] for point in kept) == min(point[1] for point in points)
