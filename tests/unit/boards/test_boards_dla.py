"""DLA predictions: what runs there, what falls back, what is refused by name, and agreement with published rates."""

from dataclasses import replace
from pathlib import Path

import pytest

import edgeds
from edgeds.boards import resolve_target
from edgeds.boards.cost_file import LayerCost, ModelWork, read_cost
from edgeds.boards.dla import split_kernels
from edgeds.boards.fusion import fuse_layers
from edgeds.boards.predictor import Prediction, predict
from edgeds.errors import SpecError

COSTS = Path(edgeds.__file__).parent.parent / "benchmarks" / "predictor" / "costs"


def layer(op: str, *, params: int = 0, flops: int = 50_000_000) -> LayerCost:
    return LayerCost(
        node=op.lower(), op=op, flops=flops, params=params, bytes_read=4 * (100_000 + params), bytes_written=400_000,
        int8_eligible=params > 0, precision="float32",
    )  # fmt: skip


def network(*ops: str) -> ModelWork:
    return ModelWork(inputs={"x": (1, 3, 8, 8)}, layers=tuple(layer(op, params=5_000 * (op == "Conv")) for op in ops))


def on(target: str, work: ModelWork, *, precision: str = "int8", **options: object) -> Prediction:
    found = resolve_target(target)
    assert found.mode is not None
    return predict(work, board=found.board, mode=found.mode, precision=precision, device="dla", **options)  # type: ignore[arg-type]


def test_unsupported_layers_fall_back_to_the_gpu_and_every_change_costs() -> None:
    work = network("Conv", "MaxPool", "TopK", "Conv")
    placed, split = split_kernels(fuse_layers(work, batch=1))
    assert placed == [True, True, False, True]
    assert (split.dla_kernels, split.gpu_kernels, split.transitions) == (3, 1, 2)
    assert split.gpu_ops == ("1 TopK: no DLA form",)
    found = on("agx-orin-64gb@MAXN", work)
    assert [time.op for time in found.layers] == ["Conv", "MaxPool", "Transition", "TopK", "Transition", "Conv"]
    assert [time.device for time in found.layers if time.op != "Transition"] == ["dla", "dla", "gpu", "dla"]
    assert found.dla == split
    assert any("assumed dla_transition_us" in note for note in found.notes)


def test_slower_dla_clocks_are_slower_and_take_less_power() -> None:
    work = network(*["Conv"] * 20)
    fast, slow = on("agx-orin-64gb@MAXN", work), on("agx-orin-64gb@15W", work)
    assert fast.latency_ms < slow.latency_ms
    assert fast.power_w > slow.power_w


def test_sparse_weights_pay_what_was_published_at_most() -> None:
    work = network(*["Conv"] * 20)
    gain = on("agx-orin-64gb@MAXN", work).latency_ms / on("agx-orin-64gb@MAXN", work, sparsity="2:4").latency_ms
    assert 1.0 < gain <= 1.35


@pytest.mark.parametrize(
    ("target", "precision", "said"),
    [
        ("orin-nano-8gb@15W", "int8", "has no DLA"),
        ("igx-orin@MAXN", "int8", "no source states"),
        ("agx-orin-industrial@30W", "int8", "no source states"),
        ("agx-orin-64gb@MAXN", "fp16", "DLA operations per clock of fp16"),
        ("agx-orin-64gb@MAXN", "fp32", "computes in int8 or fp16, not in fp32"),
        ("agx-orin-64gb@MAXN", "int4", "computes in int8 or fp16, not in int4"),
    ],
)
def test_boards_without_dla_and_unknown_facts_are_refused_by_name(target: str, precision: str, said: str) -> None:
    with pytest.raises(SpecError, match=said):
        on(target, network("Conv"), precision=precision)


def test_an_unknown_dla_clock_is_named() -> None:
    found = resolve_target("agx-orin-64gb@MAXN")
    assert found.mode is not None
    mode = replace(found.mode, dla_mhz=(None, None))
    with pytest.raises(SpecError, match="agx-orin-64gb@MAXN: dla_mhz"):
        predict(network("Conv"), board=found.board, mode=mode, precision="int8", device="dla")


def test_models_and_batches_that_no_dla_takes_are_refused() -> None:
    with pytest.raises(SpecError, match="takes no layer of this model"):
        on("agx-orin-64gb@MAXN", network("TopK"))
    with pytest.raises(SpecError, match="at most 4096"):
        on("agx-orin-64gb@MAXN", network("Conv"), batch=5000)


@pytest.mark.skipif(not COSTS.is_dir(), reason="the costs come with the repository, not with the wheel")
@pytest.mark.parametrize(
    ("model", "mode", "published_fps"),
    [("resnet50", "MAXN", 1018.5), ("resnet50", "15W", 536.0), ("ssd-resnet34", "MAXN", 41.5)],
)
def test_rates_of_one_core_are_within_a_fifth_of_the_published_ones(
    model: str, mode: str, published_fps: float
) -> None:
    assert on(f"agx-orin-64gb@{mode}", read_cost(COSTS / f"{model}.json")).fps == pytest.approx(published_fps, rel=0.2)
