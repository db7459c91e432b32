"""B60: engine files with and without the JSON header of Ultralytics."""

from __future__ import annotations

import json
import struct

import pytest

from edgeds.engines.plan_file import split_engine
from edgeds.errors import ModelError


def test_header_and_plan_are_told_apart(tmp_path):
    header = json.dumps({"stride": 32, "names": {"0": "person"}, "task": "detect"}).encode()
    path = tmp_path / "m.engine"
    path.write_bytes(struct.pack("<i", len(header)) + header + b"ftrt-plan")
    metadata, offset, length = split_engine(path)
    assert metadata == {"stride": "32", "names": '{"0": "person"}', "task": "detect"}
    assert path.read_bytes()[offset : offset + length] == b"ftrt-plan"


@pytest.mark.parametrize("magic", [b"ftrt", b"ptrt", b"vtrt"])
def test_bare_plan_is_all_plan(tmp_path, magic):
    path = tmp_path / "m.engine"
    path.write_bytes(magic + bytes(20))
    assert split_engine(path) == ({}, 0, 24)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "empty"),
        (b"abc", "too few"),
        (struct.pack("<i", -5) + bytes(40), "valid header length"),
        (struct.pack("<i", 0) + bytes(40), "valid header length"),
        (struct.pack("<i", 2**31 - 1) + bytes(40), "valid header length"),
        (struct.pack("<i", 8) + b"not json" + b"ftrt", "not valid JSON"),
        (struct.pack("<i", 4) + b"\xff\xfe\xfd\xfc" + b"ftrt", "not valid JSON"),
        (struct.pack("<i", 6) + b"[1, 2]" + b"ftrt", "not an object"),
        (struct.pack("<i", 2) + b"{}" + b"", "too few"),
        (struct.pack("<i", 8) + b'{"a": 1}', "no plan"),
    ],
)
def test_damaged_headers_are_named(tmp_path, content, message):
    path = tmp_path / "m.engine"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=message):
        split_engine(path)


def test_missing_file_is_named(tmp_path):
    with pytest.raises(ModelError, match=r"none\.engine"):
        split_engine(tmp_path / "none.engine")
