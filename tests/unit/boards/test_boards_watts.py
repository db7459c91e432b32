"""Power and its limit: clocks fall until the mode's watts are kept, latency grows with them, and rails stay honest."""

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgeds.boards import resolve_target
from edgeds.boards.assumptions import assumed, load_assumptions
from edgeds.boards.cost_file import LayerCost, ModelWork
from edgeds.boards.predictor import Prediction, predict
from edgeds.errors import SpecError


def network(*, precision: str = "float32", **changes: object) -> ModelWork:
    side, channels = 160, 256
    elements, params = channels * side * side, channels * channels * 9
    conv = LayerCost(
        node="conv", op="Conv", flops=2 * params * side * side, params=params, int8_eligible=True,
        bytes_read=4 * (elements + params), bytes_written=4 * elements, precision=precision,
    )  # fmt: skip
    return ModelWork(inputs={"images": (1, 3, side, side)}, layers=(replace(conv, **changes),) * 4)  # type: ignore[arg-type]


def on(
    target: str, *, watts: float | None = None, precision: str = "fp16", work: ModelWork | None = None, **options: str
) -> Prediction:
    found = resolve_target(target)
    assert found.mode is not None
    mode = replace(found.mode, watts=watts)
    return predict(work or network(), board=found.board, mode=mode, precision=precision, **options)  # type: ignore[arg-type]


@settings(max_examples=20, deadline=None)
@given(watts=st.floats(16, 60))
def test_throttling_keeps_the_watts_and_pays_with_latency(watts: float) -> None:
    free, held = on("agx-orin-64gb@MAXN"), on("agx-orin-64gb@MAXN", watts=watts)
    assert held.power_w <= watts or not held.throttled
    assert held.throttled == (free.power_w > watts)
    assert held.latency_ms >= free.latency_ms
    assert sum(layer.latency_us for layer in held.layers) == pytest.approx(held.latency_ms * 1e3)
    if held.throttled:
        assert held.gpu_mhz < free.gpu_mhz
        assert any("throttled: the GPU runs at about" in note for note in held.notes)
        assert held.power_w == pytest.approx(watts, rel=0.01)  # no slower than it has to be


def test_a_throttled_prediction_is_that_of_a_mode_with_the_lower_clock() -> None:
    held = on("agx-orin-64gb@MAXN", watts=25.0)
    found = resolve_target("agx-orin-64gb@MAXN")
    assert found.mode is not None
    slow = replace(found.mode, watts=None, gpu_mhz=held.gpu_mhz)
    wanted = predict(network(), board=found.board, mode=slow, precision="fp16")
    assert held.latency_ms == pytest.approx(wanted.latency_ms)
    assert held.power_w == pytest.approx(wanted.power_w)


def test_a_limit_below_what_the_lowest_clock_takes_is_said() -> None:
    held = on("agx-orin-64gb@MAXN", watts=5.0)
    assert held.gpu_mhz == pytest.approx(306)
    assert held.power_w == 5.0
    assert any("even at 306 MHz" in note for note in held.notes)


def test_rails_that_no_source_tells_apart_are_null() -> None:
    nx = on("orin-nx-16gb@MAXN")
    assert nx.rails_w == {"VDD_IN": nx.power_w, "VDD_CPU_GPU_CV": None, "VDD_SOC": None}
    assert set(on("agx-orin-64gb@MAXN").rails_w.values()) == {None}
    assert nx.energy_per_item_mj == pytest.approx(nx.power_w * nx.latency_ms)


def test_memory_splits_into_its_parts() -> None:
    found = on("orin-nx-16gb@MAXN")
    assert found.memory.weights_mib == pytest.approx(4 * 256 * 256 * 9 * 2 / 2**20)
    assert found.memory.kv_cache_mib == 0
    assert found.memory_mib == pytest.approx(found.memory.weights_mib + found.memory.activations_mib + 64)


def test_sparse_weights_from_the_option_and_from_the_costs_are_the_same() -> None:
    dense = on("orin-nx-16gb@MAXN", precision="int8")
    asked = on("orin-nx-16gb@MAXN", precision="int8", sparsity="2:4")
    noted = on("orin-nx-16gb@MAXN", precision="int8", work=network(sparse_24=True))
    assert asked.latency_ms == noted.latency_ms
    assert 1 < dense.latency_ms / asked.latency_ms <= assumed("sparse_gain_int8")
    assert asked.memory.weights_mib == pytest.approx(0.625 * dense.memory.weights_mib)
    assert any("sparse_gain_int8 1.24" in note and "V2XFusion" in note for note in asked.notes)
    ignored = on("orin-nx-16gb@MAXN", precision="int8", work=network(sparse_24=True), sparsity="none")
    assert ignored.latency_ms == dense.latency_ms


def test_strict_fp32_takes_about_twice_tf32() -> None:
    ratio = on("agx-orin-64gb@MAXN", precision="fp32-strict").latency_ms
    ratio /= on("agx-orin-64gb@MAXN", precision="fp32").latency_ms
    assert 1.8 < ratio < 2.5


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"device": "npu"}, "device 'npu'"),
        ({"sparsity": "1:2"}, "sparsity '1:2'"),
        ({"sparsity": "2:4", "precision": "int4"}, "not for int4"),
    ],
)
def test_unknown_choices_are_refused(options: dict[str, str], said: str) -> None:
    with pytest.raises(SpecError, match=said):
        on("orin-nx-16gb@MAXN", **options)


def test_a_float_convolution_after_an_int8_one_pays_for_one_reformat_of_its_input() -> None:
    base = network().layers[0]
    rows = (
        replace(base, node="a", precision="int8", reads=()),
        replace(base, node="b", reads=(0,)),
        replace(base, node="c", reads=(0,)),
        replace(base, node="d", precision="int8", reads=(1,)),
        LayerCost(
            node="q", op="QuantizeLinear", flops=0, params=0, bytes_read=0, bytes_written=0, int8_eligible=False,
            precision="int8", reads=(2,),
        ),
    )  # fmt: skip
    work = replace(network(), layers=rows)
    names = [layer.node for layer in on("orin-nx-16gb@MAXN", precision="int8", work=work).layers]
    assert names == ["a", "a to fp16", "b", "c", "d"]
    assert len(on("orin-nx-16gb@MAXN", precision="fp16", work=work).layers) == 4


def test_every_assumption_states_its_source() -> None:
    assert all(math.isfinite(one.value) and len(one.source) > 20 for one in load_assumptions().values())
