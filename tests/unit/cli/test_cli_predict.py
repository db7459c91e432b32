"""``edgeds predict`` on cost files and ONNX models: contract keys, label, and one sentence for every mistake."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from edgeds.cli.main import main

KEYS = {
    *("latency_ms", "latency_low_ms", "latency_high_ms", "fps", "power_w", "energy_mj", "memory_mib", "limited_by"),
    "status",
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    weights = numpy_helper.from_array(np.zeros((8, 3, 3, 3), np.float32), "w")
    graph = helper.make_graph(
        [
            helper.make_node("Conv", ["x", "w"], ["c"], name="conv", pads=[1, 1, 1, 1]),
            helper.make_node("Relu", ["c"], ["y"], name="relu"),
        ],
        "tiny",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 3, "h", "w"])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 8, "h", "w"])],
        [weights],
    )
    path = tmp_path / "tiny.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


@pytest.fixture
def cost(model: Path) -> Path:
    from edgeds.files import write_json
    from edgeds.graph.cost import count_cost
    from edgeds.graph.io import load_model
    from edgeds.specs import to_json

    path = model.with_name("cost.json")
    write_json(path, to_json(count_cost(load_model(model), {"x": (1, 3, 64, 64)})))
    return path


def run_json(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    assert main(["predict", *map(str, arguments), "--json"]) == 0
    data: dict[str, Any] = json.loads(capsys.readouterr().out)
    return data


def test_model_and_its_cost_file_predict_the_same(model: Path, cost: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = ("--target", "orin-nx-16gb@15W", "--precision", "int8", "--batch", 4)
    from_cost = run_json(capsys, cost, *common)
    from_model = run_json(capsys, model, "--input", "x:1x3x64x64", *common)
    assert from_cost.keys() >= KEYS
    assert from_cost["status"] == "predicted"
    assert {key: from_cost[key] for key in KEYS} == {key: from_model[key] for key in KEYS}


def test_bundle_folder_and_zip_are_predicted_from_their_cost_file(
    model: Path, cost: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from edgeds.bundle import Manifest, write_bundle, zip_bundle

    manifest = Manifest(
        task="detect", models={"float": "model.onnx"}, inputs=(), outputs=(), precision="float", license="Apache-2.0"
    )
    folder = write_bundle(tmp_path / "b", files={"model.onnx": model, "cost.json": cost}, manifest=manifest)
    common = ("--target", "orin-nx-16gb@15W", "--precision", "fp16")
    wanted = run_json(capsys, cost, *common)
    assert run_json(capsys, folder, *common) == wanted
    packed = tmp_path / "b.zip"
    zip_bundle(folder, packed)
    assert run_json(capsys, packed, *common) == wanted
    bare = write_bundle(tmp_path / "bare", files={"model.onnx": model}, manifest=manifest)
    assert main(["predict", str(bare), *common]) == 1
    assert "cost.json" in capsys.readouterr().err


def test_layers_on_request_and_page_for_people(cost: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = run_json(capsys, cost, "--target", "agx-orin-64gb@MAXN", "--precision", "fp16", "--layers")
    assert [layer["op"] for layer in data["layers"]] == ["Conv"]  # the Relu is folded in
    assert main(["predict", str(cost), "--target", "agx-orin-64gb@MAXN", "--precision", "fp16"]) == 0
    assert capsys.readouterr().out.startswith("predicted, not measured: agx-orin-64gb@MAXN")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--target", "orin-nx-16bg@15W", "--precision", "fp16"), "orin-nx-16gb"),
        (("--target", "agx-orin-64gb@45W", "--precision", "fp16"), "its modes: MAXN, 15W, 30W, 50W"),
        (("--target", "orin-nano-8gb-super@7W", "--precision", "fp16"), "sm"),
        (("--target", "sm86", "--precision", "fp16"), "power mode"),
        (("--target", "orin-nx-16gb@15W", "--precision", "fp16", "--batch", "0"), "batch 0"),
        (("--target", "orin-nx-16gb@15W", "--precision", "fp16", "--input", "z:1x3x8x8"), "inputs x"),
        (("--target", "orin-nx-16gb@15W", "--precision", "fp4"), "invalid choice"),
    ],
)
def test_mistakes_exit_2_with_what_to_do(
    arguments: tuple[str, ...], text: str, cost: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["predict", str(cost), *arguments]) == 2
    captured = capsys.readouterr()
    assert text in captured.err
    assert captured.out == ""
    assert "Traceback" not in captured.err


def test_missing_and_wrong_files_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "other.json"
    other.write_text('{"a": 1}')
    for path, code in ((tmp_path / "no.json", 2), (other, 2), (tmp_path / "no.onnx", 1), (tmp_path, 1)):
        assert main(["predict", str(path), "--target", "orin-nx-16gb@15W", "--precision", "fp16"]) == code
        error = capsys.readouterr().err
        assert str(path) in error
        assert "bug in edgeds" not in error


@pytest.fixture
def language_cost(tmp_path: Path) -> Path:
    from edgeds.files import write_json

    def row(node: str, flops: int, params: int, read: int, written: int) -> dict[str, Any]:
        return {
            "node": node, "op": "MatMul", "flops": flops, "params": params, "bytes_read": 4 * (read + params),
            "bytes_written": 4 * written, "int8_eligible": True, "precision": "float32",
        }  # fmt: skip

    layers = [
        row("scores", 2 * 128 * 16, 0, 128 + 64 * 16, 2 * 16),
        row("values", 2 * 128 * 16, 0, 2 * 16 + 64 * 16, 128),
        row("head", 2 * 128 * 40_000, 128 * 40_000, 128, 40_000),
    ]
    path = tmp_path / "llama.json"
    write_json(path, {"inputs": {"input_ids": [1, 1]}, "layers": layers, "notes": []})
    return path


def test_language_models_give_first_token_rate_and_cache(
    language_cost: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = ("--target", "orin-nx-16gb@15W", "--precision", "int4", "--prompt", 512, "--context", 2048)
    data = run_json(capsys, language_cost, *common)
    assert data.keys() >= KEYS | {"llm", "memory", "rails_w", "gpu_mhz", "throttled"}
    llm = data["llm"]
    assert llm["kv_cache_mib"] == 2 * 1 * 1 * 64 * 2 * 2048 / 2**20
    assert llm["tokens_per_s"] == pytest.approx(1e3 / data["latency_ms"])
    assert llm["ttft_ms"] == llm["prefill"]["latency_ms"]
    assert llm["prefill"]["status"] == "predicted"
    assert main(["predict", str(language_cost), *map(str, common)]) == 0
    assert "first token" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--context", "99"), "--prompt"),
        (("--prompt", "9", "--device", "dla"), "DLA"),
        (("--prompt", "9", "--input", "x:1x3"), "--input"),
        (("--prompt", "9"), "no decoder's"),
        (("--device", "dla", "--target", "orin-nano-8gb@15W"), "has no DLA"),
        (("--sparsity", "2:4", "--precision", "fp32"), "2:4"),
    ],
)
def test_wrong_combinations_are_used_wrongly(
    cost: Path, options: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    common = ("--target", "orin-nx-16gb@15W", "--precision", "int8")
    assert main(["predict", str(cost), *common, *options]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert "Traceback" not in error


def test_dla_split_is_shown(cost: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = ("--target", "agx-orin-64gb@30W", "--precision", "int8", "--device", "dla")
    assert run_json(capsys, cost, *common)["dla"]["dla_kernels"] == 1
    assert main(["predict", str(cost), *common]) == 0
    assert "expected on the DLA: 1 kernels with 100.0% of the work" in capsys.readouterr().out
