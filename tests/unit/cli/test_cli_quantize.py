"""``edgeds quantize`` as scripts call it: the JSON keys of the contract, exit codes, one-sentence errors."""

import json
import os

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from edgeds.cli.main import main


@pytest.fixture
def model(tmp_path):
    rng = np.random.default_rng(0)
    weights = {"w": rng.normal(0, 0.3, (4, 3, 3, 3)), "v": rng.normal(0, 0.3, (2, 4, 1, 1))}
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["a"], "first"),
        helper.make_node("Relu", ["a"], ["b"], "relu"),
        helper.make_node("Conv", ["b", "v"], ["y"], "second"),
    ]
    values = [helper.make_tensor_value_info(n, TensorProto.FLOAT, ["N", c, "H", "W"]) for n, c in (("x", 3), ("y", 2))]
    stored = [numpy_helper.from_array(value.astype(np.float32), name) for name, value in weights.items()]
    graph = helper.make_graph(nodes, "g", values[:1], values[1:], stored)
    path = tmp_path / "m.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


@pytest.fixture
def feeds(tmp_path):
    path = tmp_path / "set.npz"
    np.savez(path, x=np.random.default_rng(1).normal(size=(9, 3, 12, 12)).astype(np.float32))
    return path


def call(*args):
    return main(["quantize", *map(str, args)])


def test_json_has_the_keys_of_the_contract(model, feeds, tmp_path, capsys):
    out = tmp_path / "o.onnx"
    options = ("--samples", 8, "--exclude", "second", "--cpu-out", tmp_path / "c.onnx", "--json")
    assert call(model, "--calib", feeds, "--out", out, *options) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["samples"] == 8
    assert data["float_nodes"] == [{"node": "second", "reason": "excluded by the user"}]
    assert 0 < data["int8_flops_share"] < 1
    assert data["sqnr_db"] > 20
    assert json.loads((tmp_path / "o.ranges.json").read_text())["samples"] == 8
    assert data["ranges"] == str(tmp_path / "o.ranges.json")
    onnx.checker.check_model(str(out), full_check=True)


@pytest.mark.parametrize("method", ["minmax", "percentile", "entropy", "mse", "auto"])
def test_every_method_and_the_text_report(model, feeds, tmp_path, capsys, method):
    assert call(model, "--calib", feeds, "--out", tmp_path / "o.onnx", "--method", method) == 0
    text = capsys.readouterr().out
    assert "100.0% of Conv/MatMul FLOPs, 2 nodes" in text
    assert ("on held-out samples (used)" in text) == (method == "auto")
    assert call(model, "--calib", feeds, "--out", tmp_path / "p.onnx", "--method", method, "--ranges",
                tmp_path / "o.ranges.json") == 0  # fmt: skip
    assert "ranges reused from" in capsys.readouterr().out


def test_images_need_a_size(model, tmp_path, capsys):
    cv2 = pytest.importorskip("cv2")
    (tmp_path / "images").mkdir()
    for seed in range(3):
        image = np.random.default_rng(seed).integers(0, 255, (20, 30, 3), dtype=np.uint8)
        cv2.imwrite(str(tmp_path / "images" / f"{seed}.png"), image)
    assert call(model, "--calib", tmp_path / "images", "--out", tmp_path / "o.onnx") == 2
    assert "--size" in capsys.readouterr().err
    images = ("--calib", tmp_path / "images", "--out", tmp_path / "o.onnx", "--size", "16x32")
    assert call(model, *images, "--mean", "0.5", "--std", "0.25", "--resize", "stretch") == 0
    assert "x=1x3x16x32" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (("--out", "o.txt"), 2, "ends in .onnx"),
        (("--out", "m.onnx"), 2, "is the float model itself"),
        (("--percentile", "99.9", "--method", "mse"), 2, "belongs to --method percentile"),
        (("--op-types", "Matmul"), 2, "cannot be quantized"),
        (("--only", "thrid"), 2, "no node named 'thrid'"),
        (("--samples", "0"), 2, "must be a whole number"),
        (("--size", "320"), 2, "are for images"),
        (("--calib", "absent"), 1, "no such file or folder"),
        (("--op-types", ""), 1, "nothing to quantize"),
    ],
)
def test_mistakes_are_one_sentence(model, feeds, tmp_path, capsys, monkeypatch, options, code, message):
    monkeypatch.chdir(tmp_path)
    before = sorted(path.name for path in tmp_path.iterdir())
    assert call("m.onnx", "--calib", "set.npz", "--out", "o.onnx", *options) == code
    captured = capsys.readouterr()
    assert message in captured.err
    assert "Traceback" not in captured.err
    assert captured.out == ""
    assert sorted(path.name for path in tmp_path.iterdir()) == before


@pytest.mark.parametrize("threads", ["0", "-4", "100000"])
def test_absurd_thread_counts_are_refused_before_any_work(tmp_path, capsys, threads):
    """100000 threads hang the machine; 0 and below meant all cores in silence."""
    command = ["quantize", str(tmp_path / "m.onnx"), "--calib", str(tmp_path), "--out", str(tmp_path / "o.onnx")]
    assert main([*command, "--threads", threads]) == 2
    assert "from 1 to 1024" in capsys.readouterr().err


def test_loops_and_pipes_as_output_are_refused(tmp_path, capsys):
    from edgeds.compress.quantize import quantize_model
    from edgeds.errors import SpecError

    (tmp_path / "loop.onnx").symlink_to("loop.onnx")
    os.mkfifo(tmp_path / "pipe.onnx")
    with pytest.raises(SpecError, match="pipe or device"):
        quantize_model(tmp_path / "m.onnx", None, out=tmp_path / "pipe.onnx")
    assert main(["quantize", str(tmp_path / "m.onnx"), "--calib", "x", "--out", str(tmp_path / "loop.onnx")]) == 1
    assert "bug" not in capsys.readouterr().err
