"""Tuning on a simulated board that heats up (our model): gates, steady windows, pruned branches, resuming, refit."""

import base64
import json
import signal
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from simdevice.simthermal import MODES, SimBoard

from edgeds.boards.catalogue import load_catalogue
from edgeds.boards.cost_file import parse_cost
from edgeds.boards.plan_file import read_measured
from edgeds.boards.plan_spec import Candidate, PlanOptions
from edgeds.boards.planner import plan_model
from edgeds.boards.refit import fit_scale, read_scale
from edgeds.boards.targets import resolve_target
from edgeds.bundle import Manifest, open_bundle, verify_bundle, write_bundle
from edgeds.bundle.keys import make_keys
from edgeds.bundle.signature import find_trust, sign_bundle
from edgeds.cli.main import main
from edgeds.doctor import TINY_MODEL
from edgeds.errors import EngineMismatch, SpecError
from edgeds.report import tune_device
from edgeds.report.tune import TuneOptions, tune
from edgeds.report.tune_device import TuneStep, make_feeds
from edgeds.report.tune_result import best_rows, order_steps, store_measured, store_scale
from edgeds.report.tune_state import hold_tuning, open_state, state_path
from edgeds.specs import TensorSpec

ROOT = Path(__file__).resolve().parents[3]
OPTIONS = TuneOptions(window_s=2.0, start_temp_c=70.0)
COST = {
    "inputs": {"x": [1, 3, 640, 640]},
    "layers": [
        {
            "node": "c", "op": "Conv", "flops": 10**10, "params": 10**6, "bytes_read": 10**7, "bytes_written": 10**7,
            "int8_eligible": True, "precision": "float32",
        }
    ],
}  # fmt: skip


def step(mode="15W", precision="int8", batch=1, size=None):
    return TuneStep(mode=mode, precision=precision, size=size, batch=batch)


def steps(modes=("15W",), batches=(1, 2, 4, 8, 16), precisions=("int8",)):
    return [step(mode, precision, batch) for mode in modes for precision in precisions for batch in batches]


@pytest.fixture
def bundle(tmp_path):
    spec = (TensorSpec(name="x", dtype="float32", shape=(2,)),)
    manifest = Manifest(
        task="other", models={"float": "model.onnx"}, inputs=spec, outputs=spec, precision="float", license="Apache-2.0"
    )
    files = {"model.onnx": base64.b64decode(TINY_MODEL), "cost.json": json.dumps(COST).encode()}
    return write_bundle(tmp_path / "b", files=files, manifest=manifest)


def run(board, bundle, asked=None, **options):
    chosen = replace(OPTIONS, **options)
    return tune(asked or steps(), device=board, root=bundle, options=chosen, quiet=True)


def test_every_mode_and_batch_is_measured_and_the_mode_set_back(bundle):
    board = SimBoard()
    outcome = run(board, bundle, steps(modes=("10W", "25W"), batches=(1, 2)))
    assert outcome.complete
    assert [row.step.key for row in outcome.state.rows] == [one.key for one in steps(("10W", "25W"), (1, 2))]
    assert board.mode_log == ["10W", "25W", "15W"]
    first = outcome.state.rows[0]
    assert first.latency_ms == pytest.approx(5.0 / MODES["10W"][0])
    assert first.power_w == MODES["10W"][1]
    assert first.usable


def test_growing_batches_stop_where_they_gain_nothing(bundle):
    """Beyond the knee at 4 each item costs the same: 8 shows it, 16 and 32 are not measured, with the reason."""
    outcome = run(SimBoard(), bundle, steps(batches=(1, 2, 4, 8, 16, 32)))
    assert [row.step.batch for row in outcome.state.rows] == [1, 2, 4, 8]
    assert [one.step.batch for one in outcome.state.skipped] == [16, 32]
    assert "batch 8 gives" in outcome.state.skipped[0].reason
    assert best_rows(outcome.state.rows)["fps"].step.batch in (4, 8)


def test_a_latency_limit_ends_a_branch(bundle):
    outcome = run(SimBoard(), bundle, steps(batches=(1, 2, 4)), latency_limit_ms=9.0)
    assert [row.step.batch for row in outcome.state.rows] == [1, 2]
    assert "over 9 ms" in outcome.state.skipped[0].reason


def test_a_hot_board_is_waited_for(bundle):
    board = SimBoard(temp_c=90.0)
    run(board, bundle, steps(batches=(1,)))
    assert board.time_s > 20  # cooled by waiting, not by luck
    stuck = SimBoard(temp_c=95.0, ambient_c=80.0)
    (bundle / "engines" / "tune.json").unlink()
    outcome = run(stuck, bundle, steps(batches=(1,)), cool_limit_s=60.0)
    assert any("did not cool" in note for note in outcome.notes)
    assert outcome.state.rows


def test_windows_are_taken_until_they_agree(bundle):
    outcome = run(SimBoard(warm_up_windows=4), bundle, steps(batches=(1,)))
    (row,) = outcome.state.rows
    assert row.windows == 7
    assert row.steady
    assert row.latency_ms == pytest.approx(5.0 / MODES["15W"][0])
    restless = SimBoard(warm_up_windows=1000)
    (bundle / "engines" / "tune.json").unlink()
    (row,) = run(restless, bundle, steps(batches=(1,)), max_windows=5, agree_share=1e-6).state.rows
    assert not row.usable
    assert store_measured(bundle, run(restless, bundle, steps(batches=(1,))).state) == ()


def test_throttled_windows_are_kept_and_not_used(bundle):
    board = SimBoard(resistance_c_per_w=6.0, tau_s=2.0)
    outcome = run(board, bundle, steps(modes=("MAXN",), batches=(1,)))
    (row,) = outcome.state.rows
    assert row.throttled == ("sw-thermal",)
    assert store_measured(bundle, outcome.state) == ()
    assert best_rows(outcome.state.rows)["fps"] is None


def test_ctrl_c_keeps_what_was_measured_and_sets_the_mode_back(bundle):
    board = SimBoard(stop_after=7)
    outcome = run(board, bundle, steps(modes=("25W",), batches=(1, 2, 4)))
    assert outcome.interrupted
    assert board.mode() == "15W"
    assert len(outcome.state.rows) == 2
    again = SimBoard()
    resumed = run(again, bundle, steps(modes=("25W",), batches=(1, 2, 4)))
    assert resumed.complete
    assert again.calls == 3  # the two before were not measured again
    assert resumed.state.rows[:2] == outcome.state.rows


def test_time_that_is_up_leaves_the_rest_for_the_next_run(bundle):
    outcome = run(SimBoard(), bundle, minutes=0.15)
    assert not outcome.complete
    assert 0 < len(outcome.state.rows) < 5
    assert "run it again" in outcome.notes[-1]
    assert run(SimBoard(), bundle).complete


def test_a_killed_run_goes_on_and_the_mode_of_before_is_set(bundle, tmp_path):
    """SIGKILL between two steps, in another mode than at the start."""
    script = textwrap.dedent(f"""
        import os, signal, sys
        sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "tests")!r}]
        from pathlib import Path
        from simdevice.simthermal import SimBoard
        from edgeds.report.tune import TuneOptions, tune
        from edgeds.report.tune_device import TuneStep

        class Killed(SimBoard):
            def measure(self, step, seconds):
                if step.batch == 4:
                    os.kill(os.getpid(), signal.SIGKILL)
                return super().measure(step, seconds)

        steps = [TuneStep(mode="25W", precision="int8", size=None, batch=batch) for batch in (1, 2, 4)]
        tune(steps, device=Killed(), root=Path({str(bundle)!r}), options=TuneOptions(window_s=2.0), quiet=True)
    """)
    assert subprocess.run([sys.executable, "-c", script]).returncode == -signal.SIGKILL
    board = SimBoard(_mode="25W")  # as the killed run left it
    outcome = run(board, bundle, steps(modes=("25W",), batches=(1, 2, 4)))
    assert len(outcome.state.rows) == 3
    assert board.mode() == "15W"
    assert open_bundle(bundle).manifest.task == "other"


def test_under_tensorrt_only_an_engine_of_that_precision_is_measured(bundle, monkeypatch):
    """Neither the CPU nor an engine of another precision stands in; the step is skipped with the reason."""
    asked = []

    def installed(opened, *, precision, on_close):
        asked.append(precision)
        raise EngineMismatch(
            f"no engine in {precision} is installed; run 'edgeds build BUNDLE --precision {precision}'"
        )

    monkeypatch.setattr(tune_device, "open_installed", installed)
    monkeypatch.setattr(tune_device, "available_backends", lambda: {"tensorrt": None, "onnxruntime": None})
    with open_bundle(bundle) as opened:
        for precision in ("int8", "fp16", "fp32"):
            with pytest.raises(EngineMismatch):
                tune_device.open_precision(opened, precision=precision, backend="auto", threads=1)
        assert asked == ["int8", "float16", "float"]
        with tune_device.open_precision(opened, precision="fp32", backend="cpu", threads=1) as engine:
            assert engine.backend == "onnxruntime"
        with pytest.raises(SpecError, match="int4"):
            tune_device.open_precision(opened, precision="int4", backend="auto", threads=1)

    class Missing(SimBoard):
        def measure(self, step, seconds):
            raise EngineMismatch("no engine in int8 is installed")

    outcome = run(Missing(), bundle, steps(batches=(1,)))
    assert "no engine" in outcome.state.skipped[0].reason


def test_two_runs_of_one_bundle_do_not_disturb_each_other(bundle):
    with hold_tuning(bundle), pytest.raises(SpecError, match="another process is tuning"):
        run(SimBoard(), bundle)
    assert run(SimBoard(), bundle, steps(batches=(1,))).complete


def test_a_mode_that_cannot_be_set_back_is_said(bundle):
    board = SimBoard()
    asked = steps(modes=("25W",), batches=(1,))
    board.refuse_modes = ("15W",)
    outcome = run(board, bundle, asked)
    assert any("still in 25W" in note for note in outcome.notes)


def test_a_batch_that_the_engine_does_not_take_is_skipped_by_name(bundle):
    outcome = run(SimBoard(max_batch=2, knee=64), bundle, steps(batches=(1, 2, 4)))
    assert "takes up to 2" in outcome.state.skipped[0].reason


def test_states_of_other_bundles_boards_and_versions_are_refused(bundle):
    run(SimBoard(), bundle, steps(batches=(1,)))
    with pytest.raises(SpecError, match="another board"):
        run(SimBoard(board="orin-nano-8gb"), bundle)
    path = state_path(bundle)
    for change, says in (
        ({"manifest_sha256": "0"}, "another bundle"),
        ({"schema": 9}, "schema 9"),
        ({"rows": 3}, "rows"),
    ):
        path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
        with pytest.raises(SpecError, match=says):
            run(SimBoard(), bundle)
        tune(steps(batches=(1,)), device=SimBoard(), root=bundle, options=OPTIONS, restart=True, quiet=True)
    assert (
        open_state(bundle, board="orin-nx-16gb", device="simulated Orin NX", mode="MAXN", restart=True).original_mode
        == "15W"
    )


def test_measurements_are_used_by_plans_and_leave_signatures_whole(bundle, tmp_path):
    pair = make_keys(tmp_path / "key")
    sign_bundle(bundle, key=pair.private)
    outcome = run(SimBoard(), bundle, steps(batches=(1, 2)))
    stored = store_measured(bundle, outcome.state)
    assert read_measured(bundle / "engines" / "measured.json") == stored
    assert verify_bundle(bundle, trust=find_trust([pair.public], required=True)) == []
    candidate = Candidate(name="m", precision="int8", work=parse_cost(COST, where="x"), measured=stored)
    target = resolve_target("orin-nx-16gb@15W", catalogue=load_catalogue())
    plan = plan_model([candidate], target=target, options=PlanOptions(batches=(1,))).plan
    assert (plan.status, plan.latency_ms) == ("measured", pytest.approx(5.0 / MODES["15W"][0]))


def test_the_boards_coefficients_are_refitted_and_hold_for_that_board_alone(bundle):
    work = parse_cost(COST, where="x")
    outcome = run(SimBoard(), bundle, steps(modes=("10W", "15W", "25W"), batches=(1, 2)))
    scale = store_scale(bundle, outcome.state, work=work)
    assert read_scale(bundle / "engines" / "board_scale.json") == scale
    assert scale.rows == 6
    plain = Candidate(name="m", precision="int8", work=work)
    here = resolve_target("orin-nx-16gb@25W", catalogue=load_catalogue())
    options = PlanOptions(batches=(4,))
    before = plan_model([plain], target=here, options=options).plan
    after = plan_model([replace(plain, scale=scale)], target=here, options=options).plan
    assert after.latency_ms == pytest.approx(before.latency_ms * scale.latency)
    assert after.status == "predicted"
    assert "6 measurements on this board" in after.notes[-1]
    elsewhere = resolve_target("orin-nano-8gb@15W", catalogue=load_catalogue())
    other = plan_model([replace(plain, scale=scale)], target=elsewhere, options=options).plan
    assert other.latency_ms == plan_model([plain], target=elsewhere, options=options).plan.latency_ms


def test_factors_are_drawn_toward_one_and_closer_with_more_rows():
    one = fit_scale("b", latencies=[(2.0, 1.0)], powers=[])
    many = fit_scale("b", latencies=[(2.0, 1.0)] * 20, powers=[(1.0, 2.0)] * 20)
    assert 1 < one.latency < many.latency < 2
    assert one.power is None
    assert 0.5 < many.power < 1
    assert fit_scale("b", latencies=[], powers=[]) is None


def test_unknown_power_stays_unknown(bundle):
    outcome = run(SimBoard(has_power=False), bundle, steps(batches=(1,)))
    (row,) = store_measured(bundle, outcome.state)
    assert row.power_w is None
    assert best_rows(outcome.state.rows)["fps_per_watt"] is None


def test_steps_keep_modes_together_and_grow_batches():
    mixed = [
        step(mode, precision, batch) for batch in (4, 1) for precision in ("fp16", "int8") for mode in ("25W", "15W")
    ]
    ordered = order_steps(mixed, work=parse_cost(COST, where="x"), board="orin-nx-16gb")
    assert [one.mode for one in ordered] == ["25W"] * 4 + ["15W"] * 4
    assert [(one.precision, one.batch) for one in ordered[:4]] == [("int8", 1), ("int8", 4), ("fp16", 1), ("fp16", 4)]


def test_feeds_come_from_specs_size_and_golden_samples():
    spec = TensorSpec(name="x", dtype="float32", shape=("n", 3, "h", "w"))
    feeds = make_feeds((spec,), size="32x64", batch=2, golden={})
    assert feeds["x"].shape == (2, 3, 32, 64)
    golden = {"x": np.ones((1, 3, 32, 32), np.float32)}
    assert (make_feeds((spec,), size=None, batch=3, golden=golden)["x"] == 1).all()
    with pytest.raises(SpecError, match="no golden sample"):
        make_feeds((spec,), size=None, batch=1, golden={})
    fixed = TensorSpec(name="x", dtype="float32", shape=(1, 3, 64, 64))
    with pytest.raises(SpecError, match="fixed first"):
        make_feeds((fixed,), size=None, batch=2, golden={})
    with pytest.raises(SpecError, match="fixed size"):
        make_feeds((fixed,), size="32x32", batch=1, golden={})


def test_the_command_on_this_machine(bundle, capsys):
    """The CPU engine, no modes to set; where no sensor tells, power is null and says why."""
    arguments = ["tune", str(bundle), "--window", "0.02", "--batch", "2", "--json"]
    assert main(arguments) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["complete"]
    assert found["rows"][0]["step"]["batch"] == 2
    assert found["rows"][0]["latency_ms"] > 0
    assert found["rows"][0]["power_w"] is None or found["rows"][0]["power_w"] > 0
    assert main(["tune", str(bundle), "--modes", "15W"]) == 2
    assert "--set-modes" in capsys.readouterr().err
    assert main(["tune", str(bundle / "model.onnx")]) == 2
    assert main(["tune", str(bundle), "--batch", "0"]) == 2
