"""The autopilot (issue 5 part 5): holds a limit, never worse than the best single method, names what is to blame."""

import json

import numpy as np
import onnx
import pytest
from compress_models import Net, check_quantized

from edgeds.cli.main import main
from edgeds.compress.accuracy_limit import Limit, layer_costs
from edgeds.compress.autopilot import Pilot
from edgeds.compress.calibset import open_calibration
from edgeds.compress.quantize import quantize_model
from edgeds.errors import CalibrationError, SpecError
from edgeds.graph.io import input_specs, load_model


def outlier_net(seed=0, bad=True, between="Elu"):
    """Four convolutions; the third gets an input with one huge channel, which one scale cannot hold."""
    net = Net(seed=seed)
    x = net.input("x", [1, 3, 12, 12])
    first = net.rng.normal(size=(8, 3, 3, 3)).astype(np.float32)
    if bad:
        first[0] = np.abs(first[0]) * 300.0
    a = net.op("Sigmoid", net.op("Conv", x, net.w(8, 3, 1, 1), label="start"))
    wide = net.op("Conv", a, net.w(value=np.concatenate([first, first[:, :3], first[:, :2]], axis=1)), label="wide")
    second = net.rng.normal(size=(8, 8, 3, 3)).astype(np.float32)
    if bad:
        second[:, 0] /= 300.0
    wide = net.op(between, wide)
    b = net.op("Conv", wide, net.w(value=second), label="hurt")
    net.output(net.op("Conv", b, net.w(4, 8, 1, 1), label="end"), [1, 4, 8, 8])
    return net, net.model()


def calibration(model, count=12):
    rng = np.random.default_rng(3)
    data = [{"x": rng.normal(size=(1, 3, 12, 12)).astype(np.float32)} for _ in range(count)]
    return open_calibration(data, model_inputs=input_specs(model))


def fly(folder, model, limit, **options):
    onnx.save(model, folder / "m.onnx")
    report = quantize_model(
        folder / "m.onnx", calibration(model), out=folder / "q.onnx", limit=limit, threads=1, quiet=True, **options
    )
    check_quantized(folder / "q.onnx")
    return report


def test_the_layer_that_hurts_goes_back_to_float_and_the_rest_stays_int8(tmp_path):
    net, model = outlier_net()
    report = fly(tmp_path, model, Limit(max_drop=0.5))
    found = report.autopilot
    assert found["holds"]
    assert found["drop"] <= 0.5
    names = {item.node for item in report.float_nodes}
    assert net.names["hurt"] in names
    assert found["returned_to_float"]
    assert report.quantized_nodes >= 2
    assert set(found["returned_to_float"]) <= names


def test_what_equalising_repairs_needs_no_float_layer(tmp_path):
    _, model = outlier_net(between="Relu")
    report = fly(tmp_path, model, Limit(max_drop=0.5))
    assert report.autopilot["method"].startswith("equalized+")
    assert report.autopilot["holds"]
    assert report.quantized_nodes == 4


def test_a_generous_limit_leaves_every_layer_int8(tmp_path):
    _, model = outlier_net(bad=False)
    report = fly(tmp_path, model, Limit(max_drop=2.0))
    assert report.autopilot["holds"]
    assert report.autopilot["returned_to_float"] == []
    assert report.quantized_nodes == 4


def test_never_worse_than_the_best_single_method(tmp_path):
    """Also by the metric of a task, which need not agree with the signal-to-noise ratio."""
    _, model = outlier_net(seed=5)
    calls = []

    def measure(path):
        """A metric with a taste of its own: the share of the largest output found at the same place."""
        rng = np.random.default_rng(8)
        import onnxruntime as ort

        feeds = [{"x": rng.normal(size=(1, 3, 12, 12)).astype(np.float32)} for _ in range(6)]
        runs = [
            [ort.InferenceSession(str(p), providers=["CPUExecutionProvider"]).run(None, f)[0] for f in feeds]
            for p in (tmp_path / "m.onnx", path)
        ]
        hits = [np.mean(a.argmax(1) == b.argmax(1)) for a, b in zip(*runs, strict=True)]
        calls.append(100.0 * float(np.mean(hits)))
        return calls[-1]

    report = fly(tmp_path, model, Limit(max_drop=0.0, measure=measure, metric="hits"))
    found = report.autopilot
    assert found["metric"] == "hits"
    assert found["float"] == 100.0
    tried = [item["points"] for item in found["tried"] if item["points"] is not None]
    assert found["int8"] == pytest.approx(max(tried), abs=1e-3)
    assert len(calls) == len(tried) + 1


def test_an_impossible_limit_is_said_and_layers_are_blamed(tmp_path):
    net, model = outlier_net()

    def measure(path):
        return 50.0 if path.name == "candidate.onnx" and has_qdq(path) else 90.0

    report = fly(tmp_path, model, Limit(max_drop=0.1, measure=measure, metric="made up"))
    found = report.autopilot
    assert not found["holds"]
    assert found["drop"] == pytest.approx(40.0)
    assert {layer["node"] for layer in found["blame"]} == {net.names[key] for key in ("start", "wide", "hurt", "end")}
    gains = {layer["node"]: layer["gain"] for layer in found["blame"]}
    assert max(gains, key=gains.get) == net.names["hurt"]


def has_qdq(path):
    return any(node.op_type == "QuantizeLinear" for node in load_model(path).graph.node)


def test_command_exits_with_1_when_the_limit_does_not_hold(tmp_path, capsys):
    _, model = outlier_net()
    onnx.save(model, tmp_path / "m.onnx")
    rng = np.random.default_rng(3)
    np.savez(tmp_path / "set.npz", x=rng.normal(size=(12, 3, 12, 12)).astype(np.float32))
    words = ["quantize", str(tmp_path / "m.onnx"), "--calib", str(tmp_path / "set.npz"), "-q", "--threads", "1"]
    words += ["--out", str(tmp_path / "q.onnx"), "--json", "--max-drop"]
    assert main([*words, "1.0"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["autopilot"]["holds"]
    assert {"ranges", "int8_flops_share", "float_nodes", "sqnr_db", "samples"} <= set(found)
    assert main([*words, "0"]) == 1
    assert not json.loads(capsys.readouterr().out)["autopilot"]["holds"]


@pytest.mark.parametrize(
    "extra",
    [["--data", "x"], ["--target", "orin-nx-16gb@15W"], ["--split", "val"], ["--minutes", "3"], ["--min-int8", "0.9"]],
)
def test_options_of_a_limit_need_one(tmp_path, extra, capsys):
    _, model = outlier_net()
    onnx.save(model, tmp_path / "m.onnx")
    words = ["quantize", str(tmp_path / "m.onnx"), "--calib", str(tmp_path), "--out", str(tmp_path / "q.onnx")]
    assert main([*words, *extra]) == 2
    assert "--max-drop" in capsys.readouterr().err


def test_a_method_beside_a_limit_is_refused(tmp_path, capsys):
    words = ["quantize", "m.onnx", "--calib", str(tmp_path), "--out", str(tmp_path / "q.onnx"), "--max-drop", "1"]
    assert main([*words, "--method", "entropy"]) == 2
    assert "--method entropy" in capsys.readouterr().err


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_a_limit_is_a_number_of_points(value):
    with pytest.raises(SpecError, match="max-drop"):
        Limit(max_drop=value)


@pytest.mark.parametrize(("option", "word"), [({"min_share": 1.5}, "--min-int8"), ({"minutes": 0.0}, "--minutes")])
def test_share_and_time_are_checked(option, word):
    with pytest.raises(SpecError, match=word):
        Limit(max_drop=1.0, **option)


def test_a_float_share_that_is_not_allowed_is_not_used(tmp_path):
    """The layer that hurts holds most of the FLOPs: with a floor on INT8 it stays, and is named instead."""
    net, model = outlier_net()
    report = fly(tmp_path, model, Limit(max_drop=0.5, min_share=1.0))
    found = report.autopilot
    assert found["blame"][0]["node"] == net.names["hurt"]
    assert not any("layers in float" in item["method"] and "lost" not in item["method"] for item in found["tried"])
    # INT8 loses the output of that layer altogether, so that it goes back all the same, and the figures say so.
    assert found["method"].endswith("1 lost layers in float")
    assert found["returned_to_float"] == [net.names["hurt"]]
    assert found["int8"] == pytest.approx(found["tried"][-1]["points"], abs=1e-3)


def test_time_that_is_over_ends_the_search_with_the_best_so_far(tmp_path, monkeypatch):
    ticks = iter(range(0, 10_000_000, 3600))
    monkeypatch.setitem(Pilot.__init__.__kwdefaults__, "clock", lambda: float(next(ticks)))
    _, model = outlier_net()
    report = fly(tmp_path, model, Limit(max_drop=0.0, minutes=1))
    found = report.autopilot
    assert found["out_of_time"]
    assert not found["holds"]
    assert found["blame"] == []
    best = max(item["points"] for item in found["tried"] if item["points"] is not None)
    assert found["int8"] == pytest.approx(best, abs=1e-3)


def test_a_metric_that_is_not_a_number_is_refused(tmp_path):
    _, model = outlier_net(bad=False)
    with pytest.raises(CalibrationError, match="accuracy is nan"):
        fly(tmp_path, model, Limit(max_drop=1.0, measure=lambda _: float("nan"), metric="accuracy"))
    assert not (tmp_path / "q.onnx").exists()


def test_samples_that_can_be_read_once_are_enough(tmp_path):
    _, model = outlier_net(between="Relu")
    onnx.save(model, tmp_path / "m.onnx")
    rng = np.random.default_rng(3)
    stream = ({"x": rng.normal(size=(1, 3, 12, 12)).astype(np.float32)} for _ in range(10))
    report = quantize_model(
        tmp_path / "m.onnx",
        open_calibration(stream, model_inputs=input_specs(model)),
        out=tmp_path / "q.onnx",
        limit=Limit(max_drop=1.0),
        threads=1,
        quiet=True,
    )
    assert report.samples == 10
    assert report.autopilot["holds"]


def test_interrupting_the_search_leaves_nothing(tmp_path):
    _, model = outlier_net()

    def measure(path):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fly(tmp_path, model, Limit(max_drop=0.1, measure=measure))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m.onnx"]


def test_costs_are_predicted_milliseconds_with_a_board_and_flops_without():
    _, model = outlier_net()
    flops, times = layer_costs(model, target=None), layer_costs(model, target="orin-nx-16gb@15W")
    assert set(flops) >= {node.name for node in model.graph.node if node.op_type == "Conv"}
    assert all(0 <= value < 1 for value in times.values())
    with pytest.raises(SpecError, match="toaster"):
        layer_costs(model, target="toaster@1W")
