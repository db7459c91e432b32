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


@pytest.mark.parametrize("reads", [[0], [5], [-1]])
def test_edges_must_point_backwards(reads: list[int]) -> None:
    with pytest.raises(SpecError, match=r"cost\.json: layers\[0\] .* reads layer"):
        parse_cost(document(reads=reads), where="cost.json")


@pytest.mark.parametrize("elements", [[1], [1, -1], [1.5, 2], "12"])
def test_impossible_elements_are_refused(elements: object) -> None:
    with pytest.raises(SpecError, match=r"cost\.json.*elements"):
        parse_cost(document(elements=elements), where="cost.json")


def test_files_without_the_newer_keys_still_load() -> None:
    work = parse_cost(document(), where="cost.json")
    assert work.layers[0].reads is None
    assert not work.layers[0].sparse_24
    assert work.decoder is None


@pytest.mark.parametrize(
    "changes", [{"layers": 0}, {"heads": -1}, {"kv_heads": 3}, {"context": 0}, {"head_dim": "64"}, {"rope": 1}]
)
def test_impossible_decoder_facts_are_refused_by_name(changes: dict[str, Any]) -> None:
    facts = {"layers": 2, "heads": 8, "kv_heads": 2, "head_dim": 64, "context": 256}
    assert parse_cost({**document(), "decoder": facts}, where="c").decoder is not None
    with pytest.raises(SpecError, match=r"cost\.json.*decoder"):
        parse_cost({**document(), "decoder": {**facts, **changes}}, where="cost.json")
