"""Plans: limits are kept, unknown never passes, nothing better is overlooked, measurements replace predictions."""

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgeds.boards.board_plan import Load, plan_board
from edgeds.boards.catalogue import load_catalogue
from edgeds.boards.cost_file import LayerWork, ModelWork, read_cost
from edgeds.boards.pareto import pareto_front
from edgeds.boards.plan_choice import waiting_ms
from edgeds.boards.plan_file import max_delay_ms, plan_document, read_measured, store_plan
from edgeds.boards.plan_spec import OBJECTIVES, Candidate, Measured, PlanOptions
from edgeds.boards.planner import plan_model, rank
from edgeds.boards.stored_plan import read_stored_plan
from edgeds.boards.targets import resolve_target
from edgeds.cli.main import main
from edgeds.errors import SpecError
from edgeds.specs import Budget, Resolution, to_json

CATALOGUE = load_catalogue()
NX = resolve_target("orin-nx-16gb", catalogue=CATALOGUE)
COSTS = Path(__file__).resolve().parents[3] / "benchmarks" / "predictor" / "costs"


def layer(index: int, *, flops: int = 10**9, params: int = 100_000) -> LayerWork:
    return LayerWork(
        node=f"conv{index}", op="Conv", flops=flops, params=params, bytes_read=4 * params + 4_000_000,
        bytes_written=4_000_000, int8_eligible=True, precision="float32",
    )  # fmt: skip


def work(layers: int = 8, **changes: int) -> ModelWork:
    return ModelWork(inputs={"x": (1, 3, 640, 640)}, layers=tuple(layer(i, **changes) for i in range(layers)))


def forms(accuracy: float | None = None, **changes: int) -> list[Candidate]:
    return [
        Candidate(name="m", precision=precision, work=work(**changes), accuracy=accuracy)
        for precision in ("fp16", "int8")
    ]


def plan(budget: Budget | None = None, *, candidates=None, target=NX, **options):
    asked = PlanOptions(budget=budget or Budget(), **options)
    return plan_model(candidates or forms(), target=target, options=asked)


def test_the_headline_question_has_an_answer():
    result = plan(Budget(watts=15, fps=30))
    assert result.feasible
    assert result.plan.fps >= 30
    assert result.plan.power_w <= 15
    assert result.plan.status == "predicted"
    assert result.plan.latency_low_ms < result.plan.latency_ms < result.plan.latency_high_ms
    assert any("predicted, not measured" in reason for reason in result.reasons)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_each_objective_picks_the_best_of_what_fits(objective):
    result = plan(Budget(watts=20, fps=5), objective=objective, candidates=forms(accuracy=40.0))
    others = [rank(one, objective)[0] for one in result.alternatives]
    assert rank(result.plan, objective)[0] <= min(others, default=float("inf"))


LIMITS = st.fixed_dictionaries(
    {},
    optional={
        "watts": st.floats(4, 40),
        "fps": st.floats(1, 400),
        "latency_ms": st.floats(2, 200),
        "energy_mj": st.floats(5, 500),
        "memory_mib": st.floats(60, 2000),
    },
)


@settings(max_examples=30, deadline=None)
@given(limits=LIMITS, objective=st.sampled_from(OBJECTIVES), tighter=st.floats(0.5, 1.0))
def test_a_plan_keeps_every_limit_and_tighter_limits_are_never_better(limits, objective, tighter):
    result = plan(Budget(**limits), objective=objective)
    for one in (*([result.plan] if result.plan else ()), *result.alternatives):
        assert limits.get("watts", 1e9) >= one.power_w
        assert limits.get("fps", 0) <= one.fps
        assert limits.get("latency_ms", 1e9) >= one.response_ms
        assert limits.get("energy_mj", 1e9) >= one.energy_mj
        assert limits.get("memory_mib", 1e9) >= one.memory_mib
    assert result.feasible == (not result.nearest)
    if not result.feasible:
        assert all(one.misses for one in result.nearest)
        assert result.reasons
    if limits.keys() & {"watts", "latency_ms", "energy_mj"}:
        name = next(iter(limits.keys() & {"watts", "latency_ms", "energy_mj"}))
        closer = plan(Budget(**{**limits, name: limits[name] * tighter}), objective=objective)
        if closer.feasible:
            assert result.feasible
            assert rank(closer.plan, objective)[0] >= rank(result.plan, objective)[0] - 1e-9


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5), st.integers(0, 5)), max_size=40))
def test_the_front_is_what_nothing_dominates(points):
    front = pareto_front(points, key=lambda point: point)

    def beats(a, b):
        return a != b and all(x <= y for x, y in zip(a, b, strict=True))

    assert set(front) == {point for point in points if not any(beats(other, point) for other in points)}
    assert len(front) == len(set(front))


def test_one_mode_is_kept_to_and_unknown_modes_list_what_there_is():
    result = plan(target=resolve_target("orin-nx-16gb@15W", catalogue=CATALOGUE))
    assert {one.mode for one in (result.plan, *result.alternatives)} == {"15W"}
    assert plan(modes=("10W", "15W")).plan.mode in ("10W", "15W")
    with pytest.raises(SpecError, match=r"10W.*15W"):
        plan(modes=("99W",))


def test_unknown_facts_leave_a_mode_out_by_name():
    """A mode whose clocks nobody states is not silently dropped; when none is left, that is an error with the fact."""
    mode = replace(NX.board.modes[0], name="MODE_ODD", gpu_mhz=None)
    mixed = replace(NX, board=replace(NX.board, modes=(*NX.board.modes, mode)))
    assert any("ODD" in reason and "gpu_mhz" in reason for reason in plan(target=mixed).reasons)
    with pytest.raises(SpecError, match="gpu_mhz"):
        plan(target=replace(NX, board=replace(NX.board, modes=(mode,))))


def test_unknown_accuracy_and_unknown_power_meet_no_limit():
    refused = plan(Budget(min_accuracy=30))
    assert not refused.feasible
    assert "unknown" in str(refused.nearest[0].misses[0])
    assert plan(Budget(min_accuracy=30), candidates=forms(accuracy=41.0)).feasible
    row = Measured(board="orin-nx-16gb", mode="15W", variant="m", precision="int8", batch=1, size=None, latency_ms=5)
    only = [replace(forms()[1], measured=(row,))]
    target = resolve_target("orin-nx-16gb@15W", catalogue=CATALOGUE)
    result = plan(Budget(watts=15), candidates=only, target=target, batches=(1,))
    assert not result.feasible
    assert "watts: unknown" in str(result.nearest[0].misses[0])


def test_measurements_of_this_board_and_mode_take_the_place_of_predictions():
    row = Measured(
        board="orin-nx-16gb", mode="15W", variant="m", precision="int8", batch=1, size="640x640", latency_ms=7.0,
        power_w=9.5, date="2026-11-30", device="Orin NX",
    )  # fmt: skip
    only = [replace(forms()[1], measured=(row,))]
    target = resolve_target("orin-nx-16gb@15W", catalogue=CATALOGUE)
    result = plan(candidates=only, target=target, batches=(1,))
    assert (result.plan.status, result.plan.latency_ms, result.plan.power_w) == ("measured", 7.0, 9.5)
    assert result.plan.energy_mj == pytest.approx(66.5)
    assert "2026-11-30" in result.plan.notes[0]
    assert not any("predicted, not measured" in reason for reason in result.reasons)
    elsewhere = plan(candidates=only, target=resolve_target("orin-nx-16gb@10W", catalogue=CATALOGUE), batches=(1,))
    assert elsewhere.plan.status == "predicted"
    resized = plan(candidates=only, target=target, batches=(1,), sizes=(Resolution(320, 320),))
    assert resized.plan.status == "predicted"


def test_waiting_for_a_batch_counts_as_latency():
    assert waiting_ms(1, rate_fps=30, latency_ms=5) == 0
    assert waiting_ms(4, rate_fps=30, latency_ms=5) == pytest.approx(100)
    result = plan(Budget(fps=30, latency_ms=50))
    assert result.plan.batch <= 2
    many = plan(Budget(fps=30, streams=8, latency_ms=50), objective="fps")
    assert many.plan.batch > 2
    assert many.plan.fps >= 240


def test_live_streams_do_not_wait_half_a_second_unasked():
    result = plan(Budget(fps=30))
    assert result.plan.waiting_ms <= 100
    assert any("waiting_ms" in reason for reason in result.reasons)
    assert plan(Budget(fps=30, latency_ms=2000), objective="fps").plan.batch == 16


def test_nothing_fits_says_what_is_nearest_and_whether_smaller_images_would():
    heavy = forms(flops=4 * 10**10)
    result = plan(Budget(fps=60, watts=12), candidates=heavy)
    assert not result.feasible
    assert result.plan is None
    assert 1 <= len(result.nearest) <= 3
    worst = [sum(miss.shortfall for miss in one.misses) for one in result.nearest]
    assert worst == sorted(worst)
    assert "misses" in result.reasons[0]
    assert any("at " in reason and "it would fit" in reason for reason in result.reasons)


def test_memory_of_the_board_is_a_limit_without_asking():
    nano = resolve_target("orin-nano-4gb", catalogue=CATALOGUE)
    result = plan(candidates=forms(layers=1, params=4_000_000_000), target=nano)
    assert not result.feasible
    assert "memory_mib" in {miss.limit for miss in result.nearest[0].misses}


def test_dla_is_planned_where_there_is_one_and_left_out_by_name_elsewhere():
    both = [replace(one, device=device) for one in forms() for device in ("gpu", "dla")]
    result = plan(candidates=both)
    assert {"gpu", "dla"} == {one.device for one in (result.plan, *result.alternatives)} | {"dla"}
    alone = plan(candidates=[one for one in both if one.device == "dla"])
    assert alone.plan.device == "dla"
    assert "on DLA" in str(alone.plan)
    nano = resolve_target("orin-nano-8gb", catalogue=CATALOGUE)
    assert any("DLA left out" in reason for reason in plan(candidates=both, target=nano).reasons)
    with pytest.raises(SpecError, match="DLA"):
        plan(candidates=[one for one in both if one.device == "dla"], target=nano)
    stored = store_plan(alone, options=PlanOptions())
    assert stored.device == "dla"


def test_b107_a_7b_model_with_its_cache_on_8_gb_is_judged_beforehand():
    """Weights, KV cache and workspace are told apart; what does not fit says by how much."""
    costs = read_cost(COSTS / "qwen2.5-7b.json")
    nano = resolve_target("orin-nano-8gb", catalogue=CATALOGUE)
    llm = [Candidate(name="7b", precision="int4", work=costs, context=4096)]
    result = plan(Budget(memory_mib=8000), candidates=llm, target=nano, batches=(1,))
    parts = result.plan.memory
    assert parts.weights_mib > 3000
    assert parts.kv_cache_mib == pytest.approx(28 * 2 * 4 * 128 * 2 * 4096 / 2**20, rel=0.01)
    wide = plan(Budget(memory_mib=8000), candidates=llm, target=nano, batches=(32,))
    assert not wide.feasible
    assert "memory_mib" in {miss.limit for miss in wide.nearest[0].misses}


def test_margins_order_what_passes():
    low, mean, high = (len(plan(Budget(fps=150), margin=one).alternatives) for one in ("low", "mean", "high"))
    assert low >= mean >= high


@pytest.mark.parametrize("changes", [{"batches": ()}, {"batches": (0,)}])
def test_impossible_batches(changes):
    with pytest.raises(SpecError, match="batches"):
        plan(**changes)


@pytest.mark.parametrize("limits", [{"watts": 0}, {"fps": -1}, {"latency_ms": float("nan")}, {"streams": 0}])
def test_impossible_budgets(limits):
    with pytest.raises(SpecError, match=next(iter(limits))):
        Budget(**limits)


def test_a_grid_of_a_real_model_takes_under_a_second():
    found = read_cost(COSTS / "yolo11n.json")
    candidates = [Candidate(name="y", precision=precision, work=found) for precision in ("fp32", "fp16", "int8")]
    started = time.process_time()
    result = plan(Budget(fps=30), candidates=candidates, batches=(1, 2, 4, 8, 16, 32))
    assert result.tried == 3 * 6 * len(NX.board.modes)
    assert time.process_time() - started < 1.0


def test_a_stored_plan_reads_back_and_a_damaged_one_is_refused():
    options = PlanOptions(budget=Budget(fps=30, streams=4, latency_ms=80))
    result = plan_model(forms(), target=NX, options=options)
    stored = store_plan(result, options=options, sizes=["640x640", "320x640"])
    data = json.loads(json.dumps(to_json(stored)))
    assert read_stored_plan(data, where="x") == stored
    assert stored.sizes == ("640x640", "320x640")
    assert stored.max_delay_ms + stored.latency_high_ms <= 80
    assert stored.build_precision in ("int8", "float16")
    assert read_stored_plan(None, where="x") is None
    for bad in ({**data, "batch": 0}, {**data, "extra": 1}, {key: data[key] for key in list(data)[1:]}):
        with pytest.raises(SpecError, match="manifest plan"):
            read_stored_plan(bad, where="manifest plan")
    assert max_delay_ms(result.plan, PlanOptions()) == 5.0
    with pytest.raises(SpecError, match="no plan"):
        store_plan(plan(Budget(fps=1e6)), options=options)


def test_documents_hold_what_the_contract_names():
    options = PlanOptions(budget=Budget(fps=30))
    document = plan_document(plan_model(forms(), target=NX, options=options), options=options)
    assert {"feasible", "plan", "alternatives", "reasons"} <= set(document)
    assert {"mode", "precision", "batch", "sizes", "latency_ms", "fps", "power_w"} <= set(document["plan"])
    json.dumps(document, allow_nan=False)


@pytest.mark.parametrize("text", ['{"a": 1}', '[{"board": "x"}]', "[1]", "nonsense"])
def test_damaged_measurements_name_the_row(tmp_path, text):
    (tmp_path / "measured.json").write_text(text)
    with pytest.raises(SpecError, match=r"measured\.json"):
        read_measured(tmp_path / "measured.json")


def test_several_models_share_a_board():
    loads = {
        "yolo": Load(candidates=tuple(forms()), budget=Budget(fps=30)),
        "bert": Load(candidates=tuple(forms(layers=4)), budget=Budget(fps=20, latency_ms=100)),
    }
    found, left_out = plan_board(loads, target=NX, options=PlanOptions(budget=Budget(watts=20)))
    assert found.feasible
    assert left_out == ()
    assert found.share == pytest.approx(sum(one.share for one in found.models))
    assert found.share <= 0.9
    assert found.power_w <= 20
    assert found.memory_mib == pytest.approx(sum(one.choice.memory_mib for one in found.models))
    bert = next(one for one in found.models if one.model == "bert")
    yolo = next(one for one in found.models if one.model == "yolo")
    assert bert.response_ms == pytest.approx(bert.choice.response_ms + yolo.choice.latency_ms)
    assert bert.response_ms <= 100


def test_models_that_share_a_board_do_not_wait_half_a_second_unasked_either():
    loads = {name: Load(candidates=tuple(forms()), budget=Budget(fps=20)) for name in "ab"}
    found, _ = plan_board(loads, target=NX, options=PlanOptions())
    assert found.feasible
    assert all(one.choice.waiting_ms <= 100 for one in found.models)
    forced, _ = plan_board(loads, target=NX, options=PlanOptions(batches=(16,)))
    assert {"a: waiting_ms", "b: waiting_ms"} <= {miss.limit for miss in forced.misses}


def test_a_mode_that_allows_more_than_the_budget_is_said():
    target = resolve_target("orin-nx-16gb@25W", catalogue=CATALOGUE)
    above = plan(Budget(watts=15), target=target)
    assert any("mode 25W allows 25 W" in reason for reason in above.reasons)
    below = plan(Budget(watts=15), target=resolve_target("orin-nx-16gb@15W", catalogue=CATALOGUE))
    assert not any("allows" in reason for reason in below.reasons)


def test_too_many_models_for_a_board_say_so():
    loads = {name: Load(candidates=tuple(forms()), budget=Budget(fps=900)) for name in "abcd"}
    found, _ = plan_board(loads, target=NX, options=PlanOptions())
    assert not found.feasible
    assert "share of GPU time" in {miss.limit for miss in found.misses}
    with pytest.raises(SpecError, match="how often"):
        plan_board({"a": Load(candidates=tuple(forms()), budget=Budget())}, target=NX, options=PlanOptions())


def command(capsys, *arguments):
    code = main(["plan", *map(str, arguments), "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_the_command(capsys):
    code, found = command(capsys, COSTS / "yolo11n.json", "--target", "orin-nx-16gb", "--watts", 15, "--fps", 30)
    assert (code, found["feasible"]) == (0, True)
    code, found = command(capsys, COSTS / "yolo11n.json", "--target", "orin-nx-16gb@15W", "--fps", 90000)
    assert (code, found["feasible"], found["plan"]) == (1, False, None)
    assert found["nearest"][0]["misses"][0]["limit"] == "fps"
    assert main(["plan", str(COSTS / "yolo11n.json"), "--target", "orin-nx-16gb", "--watts", "15"]) == 0
    assert "predicted" in capsys.readouterr().out


def test_the_command_for_several_models(capsys):
    models = [f"--model=a={COSTS / 'yolo11n.json'}:30fps", f"--model=b={COSTS / 'resnet18.json'}:10fps,80ms"]
    code, found = command(capsys, *models, "--target", "agx-orin-64gb", "--watts", 40)
    assert (code, found["feasible"]) == (0, True)
    assert {one["model"] for one in found["plan"]["models"]} == {"a", "b"}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--target", "orin-nx-16gb"], "give one MODEL"),
        ([str(COSTS / "yolo11n.json"), "--target", "orin-nx-17gb"], "nearest"),
        ([str(COSTS / "yolo11n.json"), "--target", "orin-nx-16gb", "--watts", "-3"], "watts"),
        ([str(COSTS / "yolo11n.json"), "--target", "orin-nx-16gb", "--streams", "3"], "--fps"),
        ([str(COSTS / "yolo11n.json"), "--target", "orin-nx-16gb", "--write"], "not a bundle"),
        (["--model", "a=b", "--target", "orin-nx-16gb"], "NAME=FILE:30fps"),
        ([str(COSTS / "bert-large.json"), "--target", "orin-nx-16gb", "--size", "640"], "no image input"),
        ([str(COSTS / "yolo11n.json"), "--target", "orin-nx-16gb", "--variant", "x.onnx=good"], "--variant"),
    ],
)
def test_wrong_use(arguments, says, capsys):
    assert main(["plan", *arguments]) == 2
    assert says in capsys.readouterr().err
