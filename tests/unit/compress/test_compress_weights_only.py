"""``edgeds quantize --weights`` (issue 5 part 5): any model's matrix products, both forms, report, mistakes."""

import json

import numpy as np
import onnx
import pytest
from checkpoints import write_encoder

from edgeds.cli.main import main
from edgeds.compress.weights_only import quantize_weights_only
from edgeds.errors import CalibrationError, ModelError, SpecError
from edgeds.graph.encoder import build_encoder
from edgeds.graph.io import save_model
from edgeds.graph.session import open_session

SIZES = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("encoder")
    config, _ = write_encoder(folder / "m", normalize=True, **SIZES)
    return save_model(build_encoder(folder / "m"), folder / "model.onnx"), config["vocab_size"]


def feeds(vocab, count=6):
    rng = np.random.default_rng(0)
    found = []
    for _ in range(count):
        ids = rng.integers(5, vocab, (1, 12))
        found.append({"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)})
    return found


def embed(path, sample):
    return open_session(path, optimize=False).run(["embedding"], sample)[0]


@pytest.mark.parametrize(("weights", "least"), [("int8", 0.999), ("int4", 0.93)])
def test_both_forms_stay_close_and_weights_shrink(model, tmp_path, weights, least):
    path, vocab = model
    report = quantize_weights_only(
        path, out=tmp_path / "o.onnx", cpu_out=tmp_path / "c.onnx", weights=weights, group=None, quiet=True
    )
    for name in ("o.onnx", "c.onnx"):
        for sample in feeds(vocab, 2):
            assert float((embed(tmp_path / name, sample) * embed(path, sample)).sum()) > least
    assert report.weights_bytes < 0.45 * report.weights_bytes_float
    assert report.layers == 12
    assert report.left == ()
    assert (report.compensated, report.samples, report.sqnr_db) == (False, 0, None)
    onnx.checker.check_model(str(tmp_path / "o.onnx"), full_check=True)
    kinds = [node.op_type for node in onnx.load(tmp_path / "o.onnx").graph.node]
    assert kinds.count("DequantizeLinear") == 12
    assert "QuantizeLinear" not in kinds


def test_samples_make_int4_better_and_are_reported(model, tmp_path):
    path, vocab = model
    samples = feeds(vocab, 24)
    lost = []
    for calibration in (None, samples):
        report = quantize_weights_only(
            path, out=tmp_path / "o.onnx", weights="int4", group=32, calibration=calibration, quiet=True
        )
        errors = [np.square(embed(tmp_path / "o.onnx", one) - embed(path, one)).sum() for one in samples]
        lost.append(float(np.mean(errors)))
    assert lost[1] < 0.8 * lost[0]
    assert (report.compensated, report.samples, report.group) == (True, 24, 32)
    assert report.sqnr_db > 5


def test_the_command_writes_and_reports(model, tmp_path, capsys):
    path, vocab = model
    for number, sample in enumerate(feeds(vocab, 2)):
        np.savez(tmp_path / f"{number}.npz", **sample)
    arguments = [
        "quantize",
        str(path),
        "--weights",
        "int4",
        "--calib",
        str(tmp_path),
        "--out",
        str(tmp_path / "o.onnx"),
    ]
    assert main([*arguments, "--json", "-q"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["weights"], document["layers"], document["samples"]) == ("int4", 12, 2)
    assert main([*arguments, "-q"]) == 0
    assert "12 layers in INT4" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--weights", "int8", "--group", "32"], "--group is for int4"),
        (["--weights", "int4", "--group", "24"], "group 24"),
        (["--weights", "int4", "--method", "mse"], "--method is for activations"),
        (["--weights", "int4", "--max-drop", "1"], "--max-drop is for activations"),
        (["--group", "32"], "--group belongs to --weights int4"),
        ([], "give --calib PATH, or --weights"),
    ],
)
def test_mistakes_are_one_sentence(model, tmp_path, capsys, flags, words):
    code = main(["quantize", str(model[0]), "--out", str(tmp_path / "o.onnx"), "-q", *flags])
    assert code == 2
    assert words in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_models_without_such_weights_are_named(tmp_path):
    value = onnx.helper.make_tensor_value_info
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("Relu", ["x"], ["y"])], "g", [value("x", 1, [2])], [value("y", 1, [2])]
    )
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, tmp_path / "conv.onnx")
    with pytest.raises(ModelError, match="no MatMul with a constant matrix"):
        quantize_weights_only(tmp_path / "conv.onnx", out=tmp_path / "o.onnx", weights="int8", quiet=True)
    with pytest.raises(SpecError, match="int2"):
        quantize_weights_only(tmp_path / "conv.onnx", out=tmp_path / "o.onnx", weights="int2", quiet=True)


def test_an_empty_set_is_named(model, tmp_path):
    with pytest.raises(CalibrationError, match="no samples"):
        quantize_weights_only(model[0], out=tmp_path / "o.onnx", weights="int4", calibration=[], quiet=True)
