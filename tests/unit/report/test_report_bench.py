"""The bench: what counts, percentiles, interruption, and the command line on a small bundle."""

from __future__ import annotations

import argparse
import json
import threading
import time

import numpy as np
import pytest

from edgeds.cli import bench as cli
from edgeds.engines.null import NullEngine
from edgeds.errors import InputError, SpecError
from edgeds.power import PowerSample
from edgeds.report.bench import BenchRequest, run_bench
from edgeds.report.stats import device_name, software_versions, summarize_latencies
from edgeds.runtime import BatchPolicy, Session
from edgeds.specs import Resolution, TensorSpec, to_json

SPEC = TensorSpec(name="x", dtype="float32", shape=("n", 2))


def feed(value=0.0):
    return {"x": np.full((1, 2), value, np.float32)}


def test_session_figures_agree_with_each_other():
    engine = NullEngine([SPEC], [SPEC], latency_ms=5, fallback_reason="no accelerator here")
    with Session(engine, policy=BatchPolicy(max_batch=4, max_delay_ms=2)) as session:
        requests = [BenchRequest(payload=feed(), padding_share=0.2), BenchRequest(payload=feed(), padding_share=0.4)]
        report = run_bench(session, requests, seconds=0.5, warmup_seconds=0.1, concurrency=4, quiet=True)
    assert report.fps == pytest.approx(report.frames / report.wall_s)
    assert report.frames == report.requests >= 40
    assert 0.4 < report.wall_s < 2
    assert 5 <= report.latency_p50_ms <= report.latency_p95_ms <= report.latency_p99_ms <= report.latency_max_ms
    assert report.stages_ms["compute"] >= 5
    assert report.padding_share == pytest.approx(0.3, abs=0.01)
    assert report.mean_batch_rows > 1.5
    assert max(report.batch_size_histogram) <= 4
    assert (report.backend, report.fallback_reason) == ("null", "no accelerator here"), "B76: the reason is reported"
    assert (report.power_w, report.power_source) == (None, "unavailable")
    assert not report.interrupted
    assert json.loads(json.dumps(to_json(report), allow_nan=False))["versions"]["edgeds"]


def test_slow_targets_still_finish_one_request():
    report = run_bench(
        lambda _: time.sleep(0.15), [BenchRequest(payload=1)], seconds=0.01, warmup_seconds=0, quiet=True
    )
    assert report.frames == 1
    assert report.latency_p99_ms >= 150
    assert report.fps == pytest.approx(1 / report.wall_s)
    assert report.backend == "unknown"


def test_warm_up_does_not_count():
    """Slow first calls, as of a model that allocates, leave no trace in the percentiles."""
    calls = []

    def target(_):
        calls.append(1)
        time.sleep(0.1 if len(calls) <= 3 else 0.002)

    report = run_bench(target, [BenchRequest(payload=1)], seconds=0.2, warmup_seconds=0.35, quiet=True)
    assert report.latency_max_ms < 90


def test_an_error_of_a_request_is_raised_and_ends_the_run():
    calls = []

    def target(_):
        calls.append(1)
        if len(calls) > 5:
            raise InputError("frame is broken")

    begin = time.perf_counter()
    with pytest.raises(InputError, match="broken"):
        run_bench(target, [BenchRequest(payload=1)], seconds=30, warmup_seconds=0, concurrency=3, quiet=True)
    assert time.perf_counter() - begin < 5


@pytest.mark.parametrize("when", ["warming up", "measuring"])
def test_interruption_reports_what_there_is(monkeypatch, when):
    def interrupting(items, *, what, **options):
        for index, item in enumerate(items):
            if what == when and index == 3:
                raise KeyboardInterrupt
            yield item

    monkeypatch.setattr("edgeds.report.bench.track", interrupting)
    threads = threading.active_count()
    report = run_bench(lambda _: time.sleep(0.01), [BenchRequest(payload=1)], seconds=20, warmup_seconds=0.5)
    assert report.interrupted
    assert (report.frames > 0) == (when == "measuring")
    assert (report.latency_p50_ms is None) == (when == "warming up")
    assert threading.active_count() == threads
    json.dumps(to_json(report), allow_nan=False)


@pytest.mark.parametrize(
    ("requests", "options", "word"),
    [
        ([], {}, "requests"),
        ([BenchRequest(payload=1, frames=0)], {}, "frames"),
        ([BenchRequest(payload=1)], {"seconds": 0}, "seconds"),
        ([BenchRequest(payload=1)], {"seconds": float("nan")}, "seconds"),
        ([BenchRequest(payload=1)], {"warmup_seconds": -1}, "warmup_seconds"),
        ([BenchRequest(payload=1)], {"concurrency": 0}, "concurrency"),
    ],
)
def test_arguments_are_checked(requests, options, word):
    with pytest.raises(SpecError, match=word):
        run_bench(lambda _: None, requests, **options)


def test_percentiles_and_facts(tmp_path):
    summary = summarize_latencies(list(range(101)))
    assert (summary.p50_ms, summary.p95_ms, summary.p99_ms, summary.max_ms) == (50, 95, 99, 100)
    for values in ([], [1.0, float("nan")]):
        with pytest.raises(SpecError):
            summarize_latencies(values)
    assert device_name()
    (tmp_path / "proc/device-tree").mkdir(parents=True)
    (tmp_path / "proc/device-tree/model").write_bytes(b"NVIDIA Jetson Orin Nano\0")
    assert device_name(root=tmp_path) == "NVIDIA Jetson Orin Nano"
    assert software_versions()["numpy"] == np.__version__


def test_sizes_are_parsed():
    assert cli.parse_sizes("320x320, 480x640,320") == (Resolution(320, 320), Resolution(480, 640))
    for text in ("", ",", "12y3"):
        with pytest.raises(SpecError):
            cli.parse_sizes(text)


def arguments(bundle, *extra):
    parser = argparse.ArgumentParser()
    parser.add_argument("--quiet", action="store_true")
    cli.add_arguments(parser)
    return parser.parse_args([str(bundle), "--quiet", "--seconds", "0.3", "--warmup", "0", "--json", *extra])


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    """A detector in the v8 layout (boxes, two class scores), as a bundle."""
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    pytest.importorskip("cv2")
    from onnx import TensorProto, helper, numpy_helper

    from edgeds.bundle import Manifest, write_bundle
    from edgeds.preproc import ImagePreprocess

    root = tmp_path_factory.mktemp("bench")
    rng = np.random.default_rng(0)
    inits = [numpy_helper.from_array(np.array([0, 6, -1], np.int64), "shape")]
    nodes = []
    for step in (8, 16, 32):
        inits.append(numpy_helper.from_array(rng.normal(0, 0.01, (6, 3, step, step)).astype(np.float32), f"w{step}"))
        nodes.append(helper.make_node("Conv", ["images", f"w{step}"], [f"c{step}"], strides=[step, step]))
        nodes.append(helper.make_node("Reshape", [f"c{step}", "shape"], [f"r{step}"]))
    nodes.append(helper.make_node("Concat", ["r8", "r16", "r32"], ["output0"], axis=2))
    floats = TensorProto.FLOAT
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("images", floats, ["N", 3, "H", "W"])],
        [helper.make_tensor_value_info("output0", floats, ["N", 6, "A"])],
        inits,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    onnx.save(model, str(root / "m.onnx"))
    preprocess = ImagePreprocess()

    def make(task):
        manifest = Manifest(
            task=task,
            models={"float": "model.onnx"},
            inputs=(TensorSpec(name="images", dtype="float32", shape=("N", 3, "H", "W")),),
            outputs=(TensorSpec(name="output0", dtype="float32", shape=("N", 6, "A")),),
            preprocess=to_json(preprocess),
            preprocess_digest=preprocess.digest(),
            head={"family": "v8", "task": "detect", "classes": 2} if task == "detect" else None,
            names={0: "a", 1: "b"},
            buckets=(Resolution(64, 64), Resolution(96, 128)),
            max_batch=4,
            precision="float",
            license="Apache-2.0",
        )
        return write_bundle(root / task, files={"model.onnx": root / "m.onnx"}, manifest=manifest)

    return make


@pytest.mark.parametrize("task", ["detect", "embed"])
def test_command_line_json(bundle, capsys, task):
    """The whole pipeline for a YOLO task, the session for any other; the contract's keys are there."""
    assert cli.run(arguments(bundle(task), "--batch", "4", "--backend", "cpu", "--threads", "1")) == 0
    data = json.loads(capsys.readouterr().out)
    for key in ("fps", "latency_p50_ms", "latency_p95_ms", "latency_p99_ms", "power_w", "backend"):
        assert key in data
    assert data["backend"] == "onnxruntime"
    assert data["precision"] == "float"
    # With a sensor a figure, without one null and the reason; never 0.
    assert (data["power_w"] is None) == data["power_source"].startswith("unavailable: ")
    assert data["power_w"] != 0
    assert data["threads"] == 1
    assert data["fps"] > 0
    assert data["mean_batch_rows"] > 1
    assert "compute" in data["stages_ms"]


def test_command_line_sizes_and_text(bundle, capsys):
    args = arguments(bundle("sized"), "--sizes", "64x64", "--threads", "1")
    args.json = False
    assert cli.run(args) == 0
    text = capsys.readouterr().out
    assert "frames/s" in text
    assert "TensorRT" in text, "auto fell back, and the text says so (B76)"


def test_command_line_mistakes(bundle):
    path = bundle("wrong")
    for extra in (("--batch", "0"), ("--sizes", "axb"), ("--precision", "int8"), ("--seconds", "-1")):
        with pytest.raises(SpecError):
            cli.run(arguments(path, *extra))


class FakeSensor:
    """5 W; or what is given, an exception being raised."""

    source = "fake rail"
    is_interval_mean = False
    notes = ()

    def __init__(self, value=5000.0, unavailable=None):
        self.value = value
        self.unavailable = unavailable

    def read(self, t_s):
        if isinstance(self.value, Exception):
            raise self.value
        return PowerSample(t_s=t_s, total_mw=self.value)

    def close(self): ...


def bench_with(sensor):
    return run_bench(
        lambda feeds: time.sleep(0.002),
        [BenchRequest(payload=feed())],
        seconds=0.4,
        warmup_seconds=0,
        quiet=True,
        sensor=sensor,
    )


def test_power_is_sampled_in_the_window():
    report = bench_with(FakeSensor())
    assert report.power_w == pytest.approx(5)
    assert report.energy_mj == pytest.approx(5000 / report.fps)
    assert report.power_source == "fake rail"
    assert not [thread for thread in threading.enumerate() if thread.name == "edgeds-power"]


@pytest.mark.parametrize(
    ("sensor", "reason"),
    [
        (FakeSensor(unavailable="no rails"), "no rails"),
        (FakeSensor(OSError(5, "Input/output error")), "0% of the window; a reading failed"),
        (FakeSensor(None), "0% of the window"),
    ],
)
def test_power_without_readings_is_unknown_with_the_reason_b116(sensor, reason):
    """B116: a sensor that is there but answers nothing does not finish a run without saying so."""
    report = bench_with(sensor)
    assert (report.power_w, report.energy_mj) == (None, None)
    assert report.power_source.startswith("unavailable: ")
    assert reason in report.power_source
    assert report.fps > 0
