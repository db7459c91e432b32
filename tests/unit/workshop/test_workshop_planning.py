"""A bundle made for a board carries its plan; builder, batcher and commands obey it."""

import json
from pathlib import Path

import pytest

from edgeds.boards.plan_file import MEASURED_NAME
from edgeds.boards.stored_plan import read_stored_plan
from edgeds.bundle import open_bundle
from edgeds.bundle.keys import make_keys
from edgeds.bundle.signature import sign_bundle
from edgeds.cli.main import main
from edgeds.errors import SpecError
from edgeds.specs import Budget, Resolution, to_json
from edgeds.workshop.planning import parse_target, plan_parts

COST = {
    "inputs": {"x": [1, 3, 64, 64]},
    "layers": [
        {
            "node": "c", "op": "Conv", "flops": 10**9, "params": 10**5, "bytes_read": 10**6, "bytes_written": 10**6,
            "int8_eligible": True, "precision": "float32",
        }
    ],
}  # fmt: skip


def parts(text="orin-nx-16gb", **budget):
    limits = Budget(**budget) if budget else None
    target = parse_target(text, budget=limits)
    return plan_parts(target, cost=COST, accuracy={}, budget=limits, sizes=(Resolution(64, 64),), max_batch=6)


def test_the_plan_of_a_bundle_names_mode_batch_and_figures():
    made = parts(fps=30)
    plan = read_stored_plan(made.plan, where="plan")
    assert plan is not None
    assert made.target == {"name": "orin-nx-16gb", "mode": plan.mode}
    assert plan.batch <= 6
    assert plan.sizes == ("64x64",)
    assert made.predicted["status"] == "predicted"
    assert made.budget["fps"] == 30


def test_a_budget_that_nothing_meets_leaves_no_plan_and_says_so(caplog):
    made = parts(fps=1e6)
    assert made.plan is None
    assert made.predicted["misses"]
    assert "no plan for orin-nx-16gb" in caplog.text


def test_a_board_without_known_modes_is_named_and_not_planned_for(caplog):
    made = parts("sm86")
    assert made.plan is None
    assert made.target is not None
    assert "not planned" in caplog.text


def test_a_budget_needs_a_board():
    with pytest.raises(SpecError, match="--target"):
        parse_target(None, budget=Budget(fps=1))
    assert plan_parts(None, cost=COST, accuracy={}, budget=None, sizes=(), max_batch=1).target is None


@pytest.fixture
def bundle(tmp_path):
    from edgeds.bundle import Manifest, write_bundle
    from edgeds.specs import TensorSpec

    spec = (TensorSpec(name="x", dtype="float32", shape=("n", 3, "h", "w")),)
    manifest = Manifest(
        task="other", models={"float": "m.onnx", "int8": "m.onnx"}, inputs=spec, outputs=spec, precision="int8",
        license="Apache-2.0", buckets=(Resolution(64, 64),), accuracy={"int8_map50_95": 0.4},
    )  # fmt: skip
    files = {"m.onnx": b"model", "cost.json": json.dumps(COST).encode()}
    return write_bundle(tmp_path / "b", files=files, manifest=manifest)


def plan_bundle(bundle, capsys, *arguments):
    code = main(["plan", str(bundle), "--target", "orin-nx-16gb@15W", *arguments, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_the_command_writes_the_plan_into_the_bundle(bundle, capsys):
    code, found = plan_bundle(bundle, capsys, "--fps", "30", "--write", "--min-accuracy", "39")
    assert code == 0
    assert found["plan"]["accuracy"] == 40.0
    with open_bundle(bundle) as opened:
        plan = read_stored_plan(opened.manifest.plan, where="plan")
        assert plan is not None
        assert (plan.mode, plan.precision, plan.sizes) == ("15W", "int8", ("64x64",))
        assert opened.manifest.budget["fps"] == 30
    assert main(["bundle", "show", str(bundle)]) == 0
    assert "plan        orin-nx-16gb@15W, int8" in capsys.readouterr().out


def test_no_batch_is_planned_that_the_bundle_does_not_serve(bundle, capsys):
    with open_bundle(bundle) as opened:
        most = opened.manifest.max_batch
    _, found = plan_bundle(bundle, capsys, "--objective", "fps")
    assert max(one["batch"] for one in (found["plan"], *found["alternatives"])) == most
    _, asked = plan_bundle(bundle, capsys, "--batch", "64")
    assert asked["plan"]["batch"] == 64


def test_an_infeasible_plan_and_a_signed_bundle_stay_untouched(bundle, capsys, tmp_path):
    before = (bundle / "bundle.json").read_bytes()
    code, _ = plan_bundle(bundle, capsys, "--fps", "1000000", "--write")
    assert code == 1
    assert (bundle / "bundle.json").read_bytes() == before
    sign_bundle(bundle, key=make_keys(tmp_path / "k").private)
    assert main(["plan", str(bundle), "--target", "orin-nx-16gb", "--write"]) == 1
    assert "is signed" in capsys.readouterr().err
    assert (bundle / "bundle.json").read_bytes() == before


def test_measurements_in_the_bundle_are_used_on_the_same_board(bundle, capsys):
    row = {
        "board": "orin-nx-16gb", "mode": "15W", "variant": "int8", "precision": "int8", "batch": 1, "size": "64x64",
        "latency_ms": 3.5, "power_w": 8.0, "memory_mib": None, "date": "2026-11-30", "device": "NX",
    }  # fmt: skip
    (bundle / "engines").mkdir()
    (bundle / "engines" / MEASURED_NAME).write_text(json.dumps([row]))
    code, found = plan_bundle(bundle, capsys, "--batch", "1", "--precision", "int8")
    assert code == 0
    assert (found["plan"]["status"], found["plan"]["latency_ms"]) == ("measured", 3.5)


def test_the_builder_obeys_the_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    import sys

    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "engines"))
    try:
        from install_fakes import FakeBuilder, fake_host, make_bundle
    finally:
        sys.path.pop(0)
    from edgeds.engines.install import install_engine

    monkeypatch.setenv("EDGEDS_CACHE", str(tmp_path / "cache"))
    plan = parts(fps=30).plan
    made = make_bundle(tmp_path / "b", plan={**plan, "batch": 3}, max_batch=8)
    host = fake_host(FakeBuilder())
    found = install_engine(made, host=host, measure_seconds=0, quiet=True)
    assert [shape.max[0] for profile in found.manifest.profiles for shape in profile.values()] == [3]
    more = install_engine(made, host=host, max_batch=5, measure_seconds=0, quiet=True)
    assert [shape.max[0] for profile in more.manifest.profiles for shape in profile.values()] == [5]


def test_a_damaged_plan_is_refused_by_name(bundle):
    path = bundle / "bundle.json"
    document = json.loads(path.read_text())
    document["plan"] = {"batch": 1}
    path.write_text(json.dumps(document))
    with open_bundle(bundle) as opened, pytest.raises(SpecError, match="plan"):
        read_stored_plan(opened.manifest.plan, where=f"{bundle}: plan")
    assert to_json(Budget(fps=2))["streams"] == 1
