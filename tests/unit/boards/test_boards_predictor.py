"""Predictions: physical behaviour, refusals that name the fact, the shipped table, and the fit behind it."""

import json
import math
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import edgeds
from edgeds.boards import load_catalogue, resolve_target
from edgeds.boards.coefficients import load_table
from edgeds.boards.cost_file import LayerWork, ModelWork
from edgeds.boards.predictor import Prediction, machine_of, predict, resize_work
from edgeds.errors import SpecError

ROOT = Path(edgeds.__file__).parent.parent


def network(*, convs: int = 20, side: int = 80, channels: int = 64, batch: int = 1) -> ModelWork:
    elements, params = channels * side * side * batch, channels * channels * 9
    conv = LayerWork(
        node="conv", op="Conv", flops=2 * params * side * side * batch, params=params, int8_eligible=True,
        bytes_read=4 * (elements + params), bytes_written=4 * elements, precision="float32",
    )  # fmt: skip
    return ModelWork(inputs={"images": (batch, 3, side, side)}, layers=(conv,) * convs)


def on(target: str, work: ModelWork | None = None, *, precision: str = "fp16", batch: int | None = None) -> Prediction:
    found = resolve_target(target)
    assert found.mode is not None
    return predict(work or network(), board=found.board, mode=found.mode, precision=precision, batch=batch)


def test_faster_boards_modes_and_precisions_are_faster() -> None:
    order = ("agx-orin-64gb@MAXN", "orin-nx-16gb@MAXN", "orin-nano-8gb@15W", "orin-nano-8gb@7W")
    latencies = [on(target).latency_ms for target in order]
    assert latencies == sorted(latencies)
    by_precision = [on("orin-nx-16gb@MAXN", precision=name).latency_ms for name in ("int8", "fp16", "fp32")]
    assert by_precision == sorted(by_precision)


@settings(max_examples=25, deadline=None)
@given(batch=st.integers(1, 512), convs=st.integers(1, 40), channels=st.sampled_from([1, 8, 64, 256]))
def test_figures_are_finite_consistent_and_batches_pay(batch: int, convs: int, channels: int) -> None:
    work = network(convs=convs, channels=channels, side=20)
    one, many = (on("agx-orin-64gb@MAXN", work, batch=count) for count in (1, batch))
    assert one.latency_ms <= many.latency_ms <= batch * one.latency_ms * (1 + 1e-9)
    assert many.latency_low_ms < many.latency_ms < many.latency_high_ms
    assert many.fps == pytest.approx(batch / many.latency_ms * 1e3)
    assert many.energy_mj == pytest.approx(many.power_w * many.latency_ms)
    assert all(math.isfinite(value) and value > 0 for value in (many.power_w, many.memory_mib))
    assert sum(layer.latency_us for layer in many.layers) == pytest.approx(many.latency_ms * 1e3)


def test_costs_counted_at_another_batch_give_the_same() -> None:
    eight = on("orin-nx-16gb@MAXN", network(batch=8), batch=2)
    assert eight.latency_ms == pytest.approx(on("orin-nx-16gb@MAXN", network(), batch=2).latency_ms)


def test_power_rises_with_clocks_and_is_shown_at_most_at_the_modes_watts() -> None:
    work = network(side=320, channels=256)
    powers = [on(f"agx-orin-64gb@{mode}", work).power_w for mode in ("15W", "30W", "50W", "MAXN")]
    assert powers == sorted(powers)
    assert powers[0] <= 15
    assert powers[1] <= 30


def test_too_little_memory_is_noted() -> None:
    assert any("needs more than the 4 GB" in note for note in on("orin-nano-4gb@10W", batch=65_536).notes)


@pytest.mark.parametrize("target", ["orin-nano-8gb-super@7W", "agx-orin-industrial@30W", "igx-orin@MAXN"])
def test_unknown_facts_are_named(target: str) -> None:
    with pytest.raises(SpecError, match=r"no source states .*@.*: (sm|gpu_mhz|dram_gb_s)"):
        on(target)


@pytest.mark.parametrize(("batch", "precision"), [(0, "fp16"), (-1, "fp16"), (10**9, "fp16"), (1, "fp8"), (1, "")])
def test_impossible_requests(batch: int, precision: str) -> None:
    with pytest.raises(SpecError, match=r"batch|precision"):
        on("orin-nx-16gb@MAXN", batch=batch, precision=precision)


def test_resize_scales_activations_and_keeps_weights() -> None:
    small, large = network(), resize_work(network(), {"images": (1, 3, 160, 160)})
    assert large.layers[0].flops == 4 * small.layers[0].flops
    assert large.layers[0].params == small.layers[0].params
    assert on("orin-nx-16gb@MAXN", large).latency_ms == pytest.approx(
        on("orin-nx-16gb@MAXN", network(side=160)).latency_ms, rel=1e-6
    )
    for shapes in ({"other": (1, 3, 8, 8)}, {"images": (1, 3)}, {"images": (1, 3, 0, 8)}):
        with pytest.raises(SpecError, match="--input"):
            resize_work(small, shapes)


def test_shipped_table_states_its_own_errors_and_reaches_the_goals() -> None:
    report = load_table().report
    assert report["cnn_median_error"] <= 0.18
    assert report["llm_median_error"] <= 0.15
    assert report["power_median_error"] <= 0.20
    assert all(band.low < 1 < band.high for band in load_table().intervals.values())


def test_every_complete_mode_of_the_catalogue_predicts() -> None:
    done = 0
    for board in load_catalogue().boards:
        for mode in board.modes:
            if mode.sm and mode.gpu_mhz and mode.dram_gb_s and board.memory_gb:
                assert predict(network(), board=board, mode=mode, precision="int8").latency_ms > 0
                done += 1
    assert done > 20


needs_benchmarks = pytest.mark.skipif(
    not (ROOT / "benchmarks" / "predictor").is_dir(), reason="the fit comes with the repository, not with the wheel"
)


@needs_benchmarks
def test_committed_costs_are_those_of_the_definitions_and_close_to_public_totals(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    from benchmarks.predictor.make_costs import COSTS, PUBLIC, draw, recipes

    for name in recipes():
        drawn = draw(name)
        assert json.loads((COSTS / f"{name}.json").read_text(encoding="utf-8")) == drawn, name
        if name in PUBLIC:
            params, gflops = PUBLIC[name]
            assert sum(row["params"] for row in drawn["layers"]) / 1e6 == pytest.approx(params, rel=0.05), name
            allowed = 0.08 if name == "yolov9t" else 0.03
            assert sum(row["flops"] for row in drawn["layers"]) / 1e9 == pytest.approx(gflops, rel=allowed), name


@needs_benchmarks
@pytest.mark.parametrize(("name", "precision"), [("yolo11n", "int8"), ("resnet50", "fp16"), ("qwen3-0.6b", "int4")])
def test_the_fit_minimises_what_the_predictor_computes(
    name: str, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    import numpy as np

    from benchmarks.predictor.fit import KEYS, predicted, vectors
    from benchmarks.predictor.rows import COSTS, Row
    from edgeds.boards.cost_file import read_cost

    work, found = read_cost(COSTS / f"{name}.json"), resolve_target("orin-nx-16gb@MAXN")
    assert found.mode is not None
    row = Row(
        source="s", kind="cnn", model=name, work=work, board=found.board, mode=found.mode, precision=precision,
        batch=4, value=1.0,
    )  # fmt: skip
    c = load_table().llm if name.startswith("qwen") else load_table().time
    wanted = predicted(vectors(row), np.log([getattr(c, key) for key in KEYS]))
    assert on("orin-nx-16gb@MAXN", work, precision=precision, batch=4).latency_ms == pytest.approx(wanted, rel=1e-6)


def test_machine_needs_every_factor() -> None:
    found = resolve_target("orin-nx-16gb@MAXN")
    assert found.mode is not None
    with pytest.raises(SpecError, match="emc_mhz"):
        machine_of(found.board, replace(found.mode, emc_mhz=None))


def test_a_planner_can_ask_hundreds_of_times() -> None:
    work = network(convs=220)
    spent = []
    for _ in range(20):
        start = time.perf_counter()
        on("orin-nx-16gb@15W", work, precision="int8")
        spent.append(time.perf_counter() - start)
    assert min(spent) < 0.005
