"""The latency table: learning, interpolation, files."""

from __future__ import annotations

import json

import pytest

from edgeds.errors import SpecError
from edgeds.runtime import LatencyTable


def test_learns_and_interpolates():
    table = LatencyTable(smoothing=0.5)
    assert table.estimate("a", 1) is None
    table.update("a", rows=2, latency_ms=30)
    table.update("a", rows=2, latency_ms=10)
    assert table.estimate("a", 2) == 10, "a slow first run is forgotten"
    table.update("a", rows=2, latency_ms=20)
    assert table.estimate("a", 2) == 15
    table.update("a", rows=4, latency_ms=25)
    assert table.estimate("a", 3) == 20
    assert table.estimate("a", 1) == 15
    assert table.estimate("a", 8) == 50


def test_is_bounded():
    table = LatencyTable(max_keys=3)
    for index in range(10):
        table.update(str(index), rows=1, latency_ms=1)
    assert list(table.snapshot()) == ["7", "8", "9"]


def test_round_trip(tmp_path):
    table = LatencyTable()
    table.update("3x320x320", rows=1, latency_ms=5.5)
    table.update("3x320x320", rows=8, latency_ms=31.0)
    table.save(tmp_path / "t.json")
    assert LatencyTable.load(tmp_path / "t.json").snapshot() == table.snapshot()
    table.save(str(tmp_path / "u.json"))
    assert LatencyTable.load(str(tmp_path / "u.json")).snapshot() == table.snapshot()


@pytest.mark.parametrize(
    "data",
    [
        [],
        {"schema": 2, "latency_ms": {}},
        {"schema": 1, "latency_ms": []},
        {"schema": 1, "latency_ms": {"a": 3}},
        {"schema": 1, "latency_ms": {"a": {"x": 3}}},
        {"schema": 1, "latency_ms": {"a": {"1": "3"}}},
        {"schema": 1, "latency_ms": {"a": {"1": -3}}},
        {"schema": 1, "latency_ms": {"a": {"0": 3}}},
    ],
)
def test_malformed_files_are_named(tmp_path, data):
    (tmp_path / "t.json").write_text(json.dumps(data))
    with pytest.raises(SpecError) as caught:
        LatencyTable.load(tmp_path / "t.json")
    assert "t.json" in str(caught.value) or "'a'" in str(caught.value)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
def test_measurements_must_be_finite(value):
    with pytest.raises(SpecError, match="finite"):
        LatencyTable().update("a", rows=1, latency_ms=value)
