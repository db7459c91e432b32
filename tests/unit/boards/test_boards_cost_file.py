"""Cost files: what is read, and what is refused with the file and the key."""

import json
from pathlib import Path
from typing import Any

import pytest

from edgeds.boards.cost_file import parse_cost, read_cost
from edgeds.errors import SpecError

LAYER = {
    "node": "conv", "op": "Conv", "flops": 1000, "params": 10, "bytes_read": 80, "bytes_written": 40,
    "int8_eligible": True, "precision": "float32",
}  # fmt: skip


def document(**changes: Any) -> dict[str, Any]:
    return {"inputs": {"x": [4, 3, 8, 8]}, "layers": [{**LAYER, **changes}], "notes": []}


def test_reads_layers_and_the_batch_they_were_counted_at(tmp_path: Path) -> None:
    path = tmp_path / "cost.json"
    path.write_text(json.dumps(document()))
    work = read_cost(path)
    assert work.batch == 4
    assert work.layers[0].flops == 1000
    assert not work.is_quantized


@pytest.mark.parametrize("key", ["flops", "params", "bytes_read", "bytes_written"])
@pytest.mark.parametrize("value", [-1, 1 << 61, 1.5, "1", None, True])
def test_impossible_figures_name_the_key(key: str, value: object) -> None:
    with pytest.raises(SpecError, match=key):
        parse_cost(document(**{key: value}), where="cost.json")


@pytest.mark.parametrize(
    "data",
    [
        [],
        {},
        {"layers": []},
        {"inputs": {}, "layers": []},
        {**document(), "extra": 1},
        {**document(), "inputs": {"x": [0]}},
    ],
)
def test_other_documents_are_refused_by_name(data: object) -> None:
    with pytest.raises(SpecError, match=r"cost\.json"):
        parse_cost(data, where="cost.json")


@pytest.mark.parametrize("text", [b"", b"\xff\xfe", b'{"layers": [NaN]}', b"[" * 100_000])
def test_damaged_files_are_refused_by_name(text: bytes, tmp_path: Path) -> None:
    path = tmp_path / "broken.json"
    path.write_bytes(text)
    with pytest.raises(SpecError, match="broken"):
        read_cost(path)
