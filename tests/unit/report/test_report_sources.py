"""Runs out of the files of other verbs, tegrastats logs and bundles; what cannot be one is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from run_builders import measured

from edgeds.boards.catalogue import load_catalogue
from edgeds.boards.plan_file import plan_document
from edgeds.boards.plan_spec import PlanChoice, PlanOptions, PlanResult
from edgeds.boards.targets import resolve_target
from edgeds.bundle import Manifest, write_bundle
from edgeds.errors import BundleError, SpecError
from edgeds.report.record import write_record
from edgeds.report.sources import read_runs
from edgeds.specs import Budget, TensorSpec

LINES = Path(__file__).parents[2] / "data/power/tegrastats_lines.txt"
BENCH: dict[str, Any] = {
    **{"frames": 60, "requests": 60, "wall_s": 2.0, "fps": 30.0, "latency_mean_ms": 33.0, "latency_p50_ms": 32.0},
    **{"latency_p95_ms": 40.0, "latency_p99_ms": 44.0, "latency_max_ms": 50.0, "batch_size_histogram": {"1": 60}},
    **{"backend": "onnxruntime", "precision": "int8", "threads": 2, "device": "A CPU", "date": "2026-12-01T00:00:00"},
    **{"interrupted": False, "versions": {"edgeds": "0.1"}, "power_w": None, "energy_mj": None},
    **{"power_source": "unavailable: no sensor was found", "fallback_reason": None},
}
PREDICT: dict[str, Any] = {
    **{"status": "predicted", "target": "orin-nx-16gb@15W", "precision": "fp16", "batch": 4, "latency_ms": 20.0},
    **{"latency_low_ms": 16.0, "latency_high_ms": 25.0, "fps": 200.0, "power_w": 12.0, "energy_mj": 240.0},
    **{"memory_mib": 300.0, "limited_by": "compute", "notes": ["a note"], "table_version": "3"},
}


def write(path: Path, data: Any) -> Path:
    path.write_text(data if isinstance(data, str) else json.dumps(data), encoding="utf-8")
    return path


def tegra(path: Path, *names: str) -> Path:
    rows = dict(line.split("\t")[::2] for line in LINES.read_text().splitlines() if "\t" in line)
    return write(path, "\n".join(rows[name] for name in names) + "\n")


def test_record_is_read_as_it_is(tmp_path: Path) -> None:
    write_record(tmp_path / "run.json", measured())
    assert read_runs(tmp_path / "run.json") == (measured(),)


def test_bench_json_is_measured_and_unknown_power_is_not_zero(tmp_path: Path) -> None:
    (run,) = read_runs(write(tmp_path / "bench.json", BENCH))
    assert (run.status, run.title, run.origin, run.batch) == ("measured", "bench", "bench", 1)
    assert (run.fps, run.latency_ms.p99_ms if run.latency_ms else None) == (30.0, 44.0)
    assert run.power.mean_w is None
    assert run.power.unavailable == "no sensor was found"


def test_interrupted_bench_without_a_figure_has_no_speed(tmp_path: Path) -> None:
    names = ("mean", "p50", "p95", "p99", "max")
    empty = {**BENCH, **{f"latency_{name}_ms": None for name in names}, "fps": 0.0, "interrupted": True}
    (run,) = read_runs(write(tmp_path / "bench.json", empty))
    assert (run.fps, run.latency_ms, run.interrupted) == (None, None, True)


def test_prediction_stays_predicted_with_board_title_and_energy_per_item(tmp_path: Path) -> None:
    (run,) = read_runs(write(tmp_path / "p.json", PREDICT))
    assert (run.status, run.device.board, run.device.mode) == ("predicted", "Jetson Orin NX 16GB", "15W")
    assert run.device.mode_watts == 15.0
    assert run.energy_mj == 60.0
    assert run.latency_ms is not None
    assert (run.latency_ms.low_ms, run.latency_ms.high_ms) == (16.0, 25.0)


def choice(**changes: Any) -> PlanChoice:
    values: dict[str, Any] = {
        **{"candidate": "yolo", "mode": "15W", "precision": "int8", "batch": 1, "size": "640x640", "latency_ms": 10.0},
        **{"latency_low_ms": 8.0, "latency_high_ms": 13.0, "response_ms": 10.0, "fps": 100.0, "power_w": 9.0},
        **{"energy_mj": 90.0, "memory_mib": 200.0, "accuracy": None, "limited_by": "launch", "status": "predicted"},
    }
    return PlanChoice(**{**values, **changes})


def test_plan_gives_the_choice_its_alternatives_and_the_budget(tmp_path: Path) -> None:
    options = PlanOptions(budget=Budget(watts=15, fps=30))
    result = PlanResult(
        target="orin-nx-16gb",
        objective="fps",
        feasible=True,
        plan=choice(),
        alternatives=(choice(), choice(batch=4, fps=180.0, status="measured")),
        nearest=(),
        reasons=("the fastest",),
        tried=9,
    )
    runs = read_runs(write(tmp_path / "plan.json", plan_document(result, options=options)))
    assert [run.status for run in runs] == ["predicted", "measured"], "the plan is not told twice"
    assert [run.batch for run in runs] == [1, 4]
    assert runs[0].title.startswith("plan (")
    assert runs[0].budget == options.budget
    assert "the fastest" in runs[0].notes


def test_plan_that_fits_nothing_says_so(tmp_path: Path) -> None:
    options = PlanOptions(budget=Budget(fps=1000))
    values = {"target": "orin-nx-16gb", "objective": "fps", "feasible": False, "plan": None, "alternatives": ()}
    near = PlanResult(**values, nearest=(choice(),), reasons=("too slow",), tried=9)  # type: ignore[arg-type]
    (run,) = read_runs(write(tmp_path / "plan.json", plan_document(near, options=options)))
    assert run.title.startswith("does not fit (")
    none = PlanResult(**values, nearest=(), reasons=("too slow",), tried=9)  # type: ignore[arg-type]
    with pytest.raises(SpecError, match="too slow"):
        read_runs(write(tmp_path / "plan.json", plan_document(none, options=options)))


def test_profile_keeps_layers_and_who_said_their_times(tmp_path: Path) -> None:
    layers = [
        {"name": "a", "op": "Conv", "time_us": 5.0, "flops": 1e6, "bytes": 100, "status": "measured"},
        {"node": "b", "kind": "Relu", "latency_us": 1.0, "status": "predicted"},
        {"name": "no time"},
    ]
    data = {"flops_per_byte": 12.0, "bandwidth_utilization": 0.25, "layers": layers, "model": "m", "batch_size": 8}
    (run,) = read_runs(write(tmp_path / "metrics.json", data))
    assert [(layer.name, layer.time_us, layer.status) for layer in run.layers] == [
        ("a", 5.0, "measured"),
        ("b", 1.0, "predicted"),
    ]
    assert (run.model, run.batch, run.roof) == ("m", 8, None)
    assert "achieved bandwidth over peak: 25.0%" in run.notes


def test_profile_of_a_board_tells_latency_by_batch_and_the_roof(tmp_path: Path) -> None:
    data = {
        **{"kind": "edgeds-profile", "status": "predicted", "model": "m", "target": "orin-nx-16gb@15W", "batch": 4},
        **{"fps": 200.0, "latency_ms": 20.0, "flops_per_byte": 9.0, "precision": "int8", "layers": []},
        **{"parallel": {"batches": {"1": 1.0, "4": 0.5}}, "peak": {"flops_per_s": 1e13, "bytes_per_s": 1e11}},
    }
    (run,) = read_runs(write(tmp_path / "metrics.json", data))
    assert [(point.batch, point.latency_ms, point.fps) for point in run.by_batch] == [
        (1, 10.0, 100.0),
        (4, 20.0, 200.0),
    ]
    assert {point.status for point in run.by_batch} == {"predicted"}
    assert run.roof is not None
    assert (run.roof.flops_per_s, run.device.board) == (1e13, "Jetson Orin NX 16GB")


def test_report_of_the_demo_holds_two_runs(tmp_path: Path) -> None:
    data = {"bench": {"float": BENCH, "int8": BENCH}, "sizes": ["64x64"], "accuracy": {"int8_map50_95": 0.3}}
    runs = read_runs(write(tmp_path / "report.json", data))
    assert [run.title for run in runs] == ["report float", "report int8"]


def test_tegrastats_log_with_its_board(tmp_path: Path) -> None:
    target = resolve_target("orin-nx-16gb@15W", catalogue=load_catalogue())
    path = tegra(tmp_path / "t.log", "S21", "S21", "S10")
    (run,) = read_runs(path, target=target)
    assert (run.status, run.device.board, run.device.mode_watts) == ("measured", "Jetson Orin NX 16GB", 15.0)
    assert [watts for _, watts in run.power.series] == [7.28, 7.28, 5.299]
    assert run.date == "2026-10-01T20:36:35"
    assert run.throttle_events is None, "tegrastats does not tell"


def test_tegrastats_log_of_one_line_has_a_reading_and_no_energy(tmp_path: Path) -> None:
    (run,) = read_runs(tegra(tmp_path / "t.log", "S21"))
    assert (run.power.mean_w, run.power.energy_j) == (7.28, None)


def test_tegrastats_log_without_a_total_says_why(tmp_path: Path) -> None:
    target = resolve_target("orin-nx-16gb@15W", catalogue=load_catalogue())
    (run,) = read_runs(tegra(tmp_path / "t.log", "S17"), target=target)
    assert run.power.mean_w is None
    assert run.power.unavailable


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "empty"),
        ("hello\nworld\n", "neither JSON nor a tegrastats log"),
        ("{", "not valid JSON"),
        ('{"fps": NaN, "latency_p50_ms": 1}', "NaN"),
        ("[]", "expected one JSON object"),
        ("{}", "none of the files"),
        ('{"fps": "x", "latency_p50_ms": 1}', "fps"),
        ('{"fps": 1e999, "latency_p50_ms": 1}', "too large"),
        ('{"fps": -2, "latency_p50_ms": 1}', "below 0"),
        ('{"flops_per_byte": 1, "layers": 3}', "layers"),
        ('{"flops_per_byte": 1, "layers": [3]}', r"layers\[0\]"),
        ('{"feasible": true, "alternatives": [3], "plan": null}', r"alternatives\[0\]"),
        ('{"bench": {"a": 3}}', r"bench\.a"),
        ('{"bench": {}}', "no run"),
    ],
)
def test_file_that_is_no_run_is_named(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(SpecError, match=words) as caught:
        read_runs(write(tmp_path / "odd.json", text))
    assert "odd.json" in str(caught.value)


def test_missing_file_pipe_and_other_folder_are_named(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"gone\.json.*No such file"):
        read_runs(tmp_path / "gone.json")
    with pytest.raises(BundleError, match="not a bundle"):
        read_runs(tmp_path)
    with pytest.raises(SpecError, match="cannot be read"):
        read_runs(Path("/dev/null"))


def make_bundle(path: Path, **manifest: Any) -> Path:
    (path.parent / "model.onnx").write_bytes(b"onnx")
    spec = TensorSpec(name="x", dtype="float32", shape=(1, 3, 64, 64))
    values = {"task": "detect", "models": {"float": "model.onnx"}, "precision": "int8", "license": "MIT"}
    made = Manifest(inputs=(spec,), outputs=(spec,), **{**values, **manifest})
    return write_bundle(path, files={"model.onnx": path.parent / "model.onnx"}, manifest=made)


def test_bundle_reports_prediction_accuracy_and_what_was_measured_on_the_board(tmp_path: Path) -> None:
    bundle = make_bundle(
        tmp_path / "m.bundle", predicted=PREDICT, accuracy={"int8_map50_95": 0.37}, budget={"watts": 15.0}
    )
    (run,) = read_runs(bundle)
    assert (run.status, run.model, run.accuracy) == ("predicted", "m", {"int8_map50_95": 0.37})
    assert run.budget.watts == 15.0
    rows = [
        {
            **{"board": "orin-nx-16gb", "mode": "15W", "variant": "int8", "precision": "int8", "batch": 2},
            **{"size": "64x64", "latency_ms": 20.0, "power_w": 10.0, "date": "2026-12-01", "device": "x"},
        }
    ]
    (bundle / "engines").mkdir()
    write(bundle / "engines/measured.json", rows)
    (run,) = read_runs(bundle)
    assert (run.status, run.fps, run.energy_mj) == ("measured", 100.0, 100.0)


def test_bundle_that_holds_no_figures_is_named(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"m\.bundle.*no plan, prediction, measurement or accuracy"):
        read_runs(make_bundle(tmp_path / "m.bundle"))
