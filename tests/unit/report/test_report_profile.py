"""metrics.json: measured here or predicted for a target, shares of peaks, verdicts, rates; and the EngineMonitor."""

import json
import threading
import time
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from edgeds import EngineMonitor
from edgeds.boards.cost_file import LayerWork, ModelWork
from edgeds.boards.targets import resolve_target
from edgeds.cli.main import main
from edgeds.engines import open_engine
from edgeds.engines.ort_profile import parse_trace, profile_onnx
from edgeds.errors import ModelError, SpecError
from edgeds.power import PowerSample
from edgeds.report.profile import Peak, match_costs, measured_profile, parallel_efficiency, predict_profile
from edgeds.report.profile_run import cpu_peaks, profile_here
from edgeds.runtime import BatchPolicy, Session
from edgeds.runtime.livestats import publish_stats, read_stats

COSTS = Path(__file__).resolve().parents[3] / "benchmarks" / "predictor" / "costs"
PEAK = Peak(flops_per_s=1e12, bytes_per_s=1e11, source="test")


def work(*names: str) -> ModelWork:
    layers = tuple(
        LayerWork(
            node=name, op="Conv", flops=10**9, params=1000, bytes_read=5_004_000, bytes_written=5_000_000,
            int8_eligible=True, precision="float32",
        )
        for name in names
    )  # fmt: skip
    return ModelWork(inputs={"x": (1, 3, 32, 32)}, layers=layers)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    weights = [rng.standard_normal((8, 3, 3, 3)), rng.standard_normal((4, 8, 1, 1))]
    nodes = [
        helper.make_node("Conv", ["x", "w0"], ["/first/Conv_output_0"], "/first/Conv", pads=[1] * 4),
        helper.make_node("Softmax", ["/first/Conv_output_0"], ["b"], "act", axis=1),
        helper.make_node("Conv", ["b", "w1"], ["y"], "second"),
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 3, "h", "w"])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 4, "h", "w"])],
        [numpy_helper.from_array(w.astype(np.float32), f"w{i}") for i, w in enumerate(weights)],
    )
    path = tmp_path / "m.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


def test_layers_are_timed_by_the_runtimes_own_profiler(model):
    layers = profile_onnx(model, {"x": np.zeros((1, 3, 64, 64), np.float32)}, threads=1, runs=4)
    assert {layer.op for layer in layers} >= {"Conv", "Softmax"}
    assert all(layer.time_us >= 0 for layer in layers)
    assert sum(layer.time_us for layer in layers) > 0
    with pytest.raises(ModelError, match="cannot be profiled"):
        profile_onnx(model, {"wrong": np.zeros((1, 3, 8, 8), np.float32)})


def test_traces_skip_the_first_runs_and_foreign_events():
    events = [{"cat": "Node", "name": "a_kernel_time", "dur": dur, "args": {"op_name": "Conv"}} for dur in (90, 10, 20)]
    events += [{"cat": "Session", "name": "x", "dur": 1}, {"cat": "Node", "name": "a_fence_before", "dur": 5}, 7]
    (layer,) = parse_trace(events, skip=1)
    assert (layer.name, layer.op, layer.time_us) == ("a", "Conv", 15.0)
    with pytest.raises(ModelError, match="trace"):
        parse_trace({"not": "a list"})


def test_costs_are_found_under_the_names_that_runtimes_give():
    names = ["a", "b_nchwc", "/m/Conv_output_0_nchwc", "a + b", "made by the runtime"]
    found = match_costs(names, work("a", "b", "/m/Conv"), batch=2)
    assert set(found) == set(names[:4])
    assert found["a"][0] == 2e9
    assert found["a + b"][0] == 4e9
    assert found["a"][1] == pytest.approx(4000 + 2 * 10_000_000, rel=0.01)  # weights once, activations by the batch


def test_verdicts_follow_the_closer_peak():
    times = [("a", "Conv", 1100.0), ("b", "Conv", 1e6), ("c", "Conv", 300.0)]
    found = measured_profile(
        times, work=work("a", "b"), model="m", backend="onnxruntime", precision="fp32", batch=1, latency_ms=1001.4,
        peak=PEAK, rates={"batches": {1: 1.0}},
    )  # fmt: skip
    a, b, c = found.layers
    assert (a.verdict, b.verdict, c.verdict) == ("compute", "launch", None)
    assert a.gflops_per_s == pytest.approx(1e9 / 1100e-6 / 1e9)
    assert found.verdict == "launch"
    assert found.compute_utilization == pytest.approx(2e9 / 1.0014 / 1e12)
    assert sum(layer.share for layer in found.layers) == pytest.approx(1)
    assert "1 of 3 layers have no costs" in found.notes[0]
    narrow = Peak(flops_per_s=1e14, bytes_per_s=1e10, source="t")
    again = measured_profile(
        times,
        work=work("a", "b"),
        model="m",
        backend="x",
        precision="fp32",
        batch=1,
        latency_ms=1,
        peak=narrow,
        rates={},
    )
    assert again.layers[0].verdict == "memory"


def test_unknown_peaks_and_costs_stay_unknown():
    found = measured_profile(
        [("a", "Conv", 10.0)], work=None, model="m", backend="x", precision="fp32", batch=1, latency_ms=1.0,
        peak=Peak(flops_per_s=None, bytes_per_s=None, source="unknown"), rates={},
    )  # fmt: skip
    assert found.flops_per_byte is None
    assert found.compute_utilization is None
    assert found.bandwidth_utilization is None
    assert found.parallel_efficiency is None
    assert found.layers[0].verdict is None


def test_parallel_efficiency_is_speed_up_over_ideal():
    assert parallel_efficiency({1: 100.0, 4: 200.0}) == {1: 1.0, 4: 0.5}
    assert parallel_efficiency({4: 200.0}) == {}


def test_a_target_is_predicted_and_says_so():
    from edgeds.boards.cost_file import read_cost

    found = predict_profile(
        read_cost(COSTS / "yolo11n.json"),
        model="y",
        target=resolve_target("orin-nx-16gb@25W"),
        precision="int8",
        batch=8,
    )
    assert found.status == "predicted"
    assert {layer.status for layer in found.layers} == {"predicted"}
    assert 0 < found.compute_utilization < 1
    assert 0 < found.bandwidth_utilization < 1
    assert 1 / 8 <= found.parallel_efficiency <= 1
    assert sum(layer.time_us for layer in found.layers) == pytest.approx(found.latency_ms * 1e3)
    assert any("nothing was run" in note for note in found.notes)


def test_a_model_is_measured_here(model):
    from edgeds.cli.predict import load_work

    found = profile_here(
        model, model="m", work=load_work(model, {"x": (1, 3, 64, 64)}), precision="fp32", batch=2, size="64x64",
        seconds=0.05, threads=1, quiet=True,
    )  # fmt: skip
    assert found.status == "measured"
    assert found.device
    assert found.latency_ms > 0
    assert found.fps == pytest.approx(2 / found.latency_ms * 1e3)
    assert set(found.parallel) == {"batches", "streams", "devices"}
    assert found.parallel["batches"]["1"] == 1.0
    assert found.flops > 0
    assert any(layer.flops for layer in found.layers)


def test_the_size_counts_for_predictions_too(model, tmp_path, capsys):
    found = {}
    for name, extra in {"64": ["--size", "64"], "128": ["--size", "128"], "input": ["--input", "x:1x3x64x64"]}.items():
        out = tmp_path / f"{name}.json"
        flags = ["--precision", "fp16", "--target", "orin-nx-16gb@15W", "--output", str(out)]
        assert main(["profile", "--model", str(model), *flags, *extra]) == 0
        found[name] = json.loads(out.read_text())["flops"]
    assert found["64"] == found["input"]
    assert found["128"] == pytest.approx(4 * found["64"], rel=0.01)


def test_token_ids_get_the_type_that_the_model_declares(tmp_path):
    nodes = [helper.make_node("Gather", ["table", "ids"], ["y"], "embed")]
    table = numpy_helper.from_array(np.ones((10, 4), np.float32), "table")
    inputs = [helper.make_tensor_value_info("ids", TensorProto.INT64, ["n", "length"])]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", "length", 4])]
    path = tmp_path / "ids.onnx"
    graph = helper.make_graph(nodes, "g", inputs, outputs, [table])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    found = profile_here(
        path, model="ids", work=None, precision="fp16", batch=2, shapes={"ids": (1, 8)}, seconds=0.02, threads=1,
        quiet=True,
    )  # fmt: skip
    assert found.latency_ms > 0
    assert found.precision != "fp16"  # a float32 file does not run in FP16 because it was asked to


def test_this_cpus_peaks_are_plausible():
    flops, moved = cpu_peaks(seconds=0.05, side=256)
    assert 1e8 < flops < 1e14
    assert 1e8 < moved < 1e13


def test_the_command_measures_and_predicts(model, tmp_path, capsys):
    out = tmp_path / "metrics.json"
    common = ["profile", "--batch-size", "1", "--precision", "fp32", "--output", str(out)]
    assert main([*common, "--model", str(model), "--size", "64", "--seconds", "0.05", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads(out.read_text())
    keys = {"flops_per_byte", "bandwidth_utilization", "compute_utilization", "parallel_efficiency", "layers"}
    assert keys <= set(printed)
    assert printed["status"] == "measured"
    assert main([*common, "--model", str(COSTS / "yolo11n.json"), "--target", "orin-nx-16gb@15W"]) == 0
    assert json.loads(out.read_text())["status"] == "predicted"
    assert "predicted" in capsys.readouterr().out
    assert main(["report", str(out), "--out", str(tmp_path / "r.html")]) == 0


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["--model", "MODEL"], 2, "--size"),
        (["--model", str(COSTS / "yolo11n.json")], 2, "--target"),
        (["--model", str(COSTS / "yolo11n.json"), "--target", "orin-nx-16gb"], 0, ""),
        (["--model", "MODEL", "--size", "64", "--batch-size", "0"], 2, "--batch-size"),
        (["--model", "MODEL", "--size", "64", "--seconds", "0"], 2, "--seconds"),
        (["--model", "MODEL", "--size", "64", "--output", "."], 2, "folder"),
        (["--model", "none.onnx"], 1, "none.onnx"),
    ],
)
def test_wrong_use_is_one_sentence(model, tmp_path, capsys, arguments, code, says):
    given = [str(model) if one == "MODEL" else one for one in arguments]
    out = [] if "--output" in given else ["--output", str(tmp_path / "m.json")]
    assert main(["profile", "--precision", "fp32", *out, *given]) == code
    captured = capsys.readouterr().err
    assert says in captured
    assert "Traceback" not in captured


class _Load:
    """A sensor with a GPU."""

    source, is_interval_mean, unavailable, notes = "simulated", False, None, ()

    def read(self, t_s):
        return PowerSample(t_s=t_s, total_mw=12_000.0, gpu_load_pct=50.0)

    def close(self):
        raise AssertionError("a given sensor is not the monitor's to close")


def _busy(engine, feeds, stop):
    while not stop.is_set():
        engine.infer(feeds)


def test_an_engine_that_others_use_is_watched(model):
    feeds = {"x": np.ones((2, 3, 16, 16), np.float32)}
    with open_engine(model, threads=1) as engine:
        before = engine.infer(feeds)["y"]
        stop = threading.Event()
        thread = threading.Thread(target=_busy, args=(engine, feeds, stop))
        thread.start()
        try:
            found = EngineMonitor(engine, sensor=_Load()).collect(interval=0.3)
        finally:
            stop.set()
            thread.join()
        assert found["calls"] > 5
        assert found["items"] == 2 * found["calls"]
        assert 0 < found["latency"]["p50_ms"] <= found["latency"]["p99_ms"] <= found["latency"]["max_ms"]
        assert found["throughput"]["items_per_s"] == pytest.approx(found["items"] / found["interval_s"])
        assert found["gpu_util"] == 50.0
        assert found["power"]["mean_w"] == pytest.approx(12.0)
        assert not {"infer", "infer_borrowed"} & set(vars(engine))  # nothing is left on the engine
        np.testing.assert_array_equal(engine.infer(feeds)["y"], before)
    assert not [one for one in threading.enumerate() if one.name == "edgeds-power"]


def test_batches_of_a_session_that_was_open_before_are_counted(model):
    policy = BatchPolicy(max_batch=4, max_delay_ms=20)
    with open_engine(model, threads=1) as engine, Session(engine, policy=policy) as session:
        with EngineMonitor(engine, metrics=["throughput"]) as monitor:
            waiting = [session.submit({"x": np.full((1, 3, 8, 8), i, np.float32)}) for i in range(8)]
            for one in waiting:
                one.result(timeout=30)
        found = monitor.result()
    assert found["items"] == 8
    assert found["calls"] < 8  # they ran in batches


def test_only_what_was_asked_for_and_unknown_stays_unknown(model):
    with open_engine(model, threads=1) as engine:
        found = EngineMonitor(engine, metrics=["latency", "throughput"]).collect(interval=0.01)
        assert found["latency"] is None
        assert "no call" in found["unavailable"]["latency"]
        assert not {"power", "gpu_util"} & set(found)
        for bad in (["fps"], []):
            with pytest.raises(SpecError, match="choose from latency"):
                EngineMonitor(engine, metrics=bad)
        for bad in (0, -1, float("nan")):
            with pytest.raises(SpecError, match="interval"):
                EngineMonitor(engine, metrics=["latency"]).collect(interval=bad)
        with pytest.raises(SpecError, match="nothing was collected"):
            EngineMonitor(engine).result()


def test_errors_pass_through_and_are_counted(model):
    with open_engine(model, threads=1) as engine, EngineMonitor(engine, metrics=["latency"]) as monitor:
        with pytest.raises(Exception, match="x"):
            engine.infer({})
        engine.infer({"x": np.zeros((1, 3, 8, 8), np.float32)})
    assert (monitor.result()["failed"], monitor.result()["calls"]) == (1, 1)


def test_watching_costs_little(model):
    feeds = {"x": np.zeros((1, 3, 8, 8), np.float32)}

    class Idle:
        backend = "null"

        def infer(self, feeds):
            return feeds

    engine = Idle()
    with EngineMonitor(engine, metrics=["latency"]):
        times = []
        for _ in range(2000):
            begin = time.perf_counter()
            engine.infer(feeds)
            times.append(time.perf_counter() - begin)
    assert np.median(times) < 50e-6


def test_a_running_pipelines_counters_are_seen_from_outside(model, tmp_path):
    path = tmp_path / "live.stats"
    with open_engine(model, threads=1) as engine, Session(engine) as session:
        with publish_stats(session, path, interval_s=0.05):
            assert read_stats(path).fps == 0.0
            deadline = time.monotonic() + 10
            while time.monotonic() < deadline:
                session.infer({"x": np.zeros((1, 3, 8, 8), np.float32)})
                live = read_stats(path)
                if live.fps > 0:
                    break
            assert live.fps > 0
            assert live.mean_batch >= 1
            assert live.completed > 0
        assert not path.exists()
        assert read_stats(path) is None
        with pytest.raises(SpecError, match="--stats"), publish_stats(session, tmp_path, interval_s=1):
            pass
    path.write_text('{"pid": 1}')
    with pytest.raises(SpecError, match="live"):
        read_stats(path)


def test_the_monitor_shows_a_pipeline(tmp_path, capsys):
    assert main(["monitor", "--count", "1", "--interval", "0.02", "--json", "--stats", str(tmp_path / "none")]) == 0
    row = json.loads(capsys.readouterr().out)
    assert row["fps"] is None
    assert row["queue"] is None
    assert main(["monitor", "--count", "1", "--interval", "0.02", "--stats", str(tmp_path / "none")]) == 0
    assert "nothing running" in capsys.readouterr().out
