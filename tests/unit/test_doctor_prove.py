"""``edgeds doctor --prove`` without a GPU: its model against numpy, its steps on a builder that copies the ONNX.

The steps here are not a TensorRT run: ONNX Runtime computes what the "plan" holds.
"""

import base64
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent / "engines"))

from install_fakes import FakeOptions, fake_host

from edgeds import doctor_prove
from edgeds.bundle import open_bundle, verify_bundle
from edgeds.cli.main import main
from edgeds.doctor_proof import BIAS, PROOF_MODEL, WEIGHT_SCALES, WEIGHTS, write_proof_bundle
from edgeds.doctor_prove import STEPS, prove
from edgeds.engines.onnxruntime import OnnxRuntimeEngine
from edgeds.errors import BuildError, DeviceError

GRAPHS = SimpleNamespace(graph_runs=4, graph_problem=None)


class Engine(OnnxRuntimeEngine):
    """Runs the ONNX behind the magic number; says what it is told about graphs."""

    told: Any = GRAPHS
    gain = 1.0

    def stats(self) -> Any:
        return self.told

    def infer(self, feeds: Any) -> dict[str, np.ndarray]:
        return {name: value * np.float32(self.gain) for name, value in super().infer(feeds).items()}


def host(told: Any = GRAPHS, gain: float = 1.0, **changes: Any) -> Any:
    def build(onnx: Path, out: Path, options: FakeOptions, layers: Any) -> dict[str, Any]:
        out.write_bytes(b"ftrt" + onnx.read_bytes())
        return {}

    def open_plan(plan: Path) -> Engine:
        model = plan.with_suffix(".onnx")
        model.write_bytes(plan.read_bytes()[4:])
        engine = Engine(model, threads=1)
        engine.told, engine.gain = told, gain
        return engine

    return fake_host(build, **({"open_plan": open_plan} | changes))


def test_the_model_agrees_with_numpy_and_its_constants_are_the_ones_inside(tmp_path: Path) -> None:
    """The references come from numpy alone; ONNX Runtime must give the same to float rounding."""
    onnx = pytest.importorskip("onnx")
    model = onnx.load_from_string(base64.b64decode(PROOF_MODEL))
    inside = {item.name: onnx.numpy_helper.to_array(item).tobytes() for item in model.graph.initializer}
    assert [inside[name] for name in ("w", "ws", "b")] == [base64.b64decode(x) for x in (WEIGHTS, WEIGHT_SCALES, BIAS)]
    with open_bundle(write_proof_bundle(tmp_path / "b")) as bundle:
        golden = bundle.golden()
        with OnnxRuntimeEngine(bundle.model_path("int8"), threads=1) as engine:
            for index in ("0", "1"):
                got = engine.infer({"x": golden[f"input/{index}/x"]})["y"]
                assert np.abs(got - golden[f"int8/{index}/y"]).max() < 1e-5
                assert np.abs(golden[f"float/{index}/y"] - golden[f"int8/{index}/y"]).max() > 1e-4
    assert verify_bundle(tmp_path / "b") == []


def test_every_step_passes_and_nothing_is_left_in_the_bundle(tmp_path: Path) -> None:
    write_proof_bundle(tmp_path / "b")
    for bundle in (None, tmp_path / "b"):
        checks = prove(bundle, host=host(), seconds=0.05, quiet=True)
        assert [check.name for check in checks] == list(STEPS)
        assert all(check.ok and check.required for check in checks), checks
        messages = {check.name: check.message for check in checks}
        assert "2 sample(s)" in messages["prove-golden"]
        assert "32x32 batch 4" in messages["prove-bench"]
        assert "4 replay(s)" in messages["prove-graph"]
    assert not (tmp_path / "b" / "engines").exists()


@pytest.mark.parametrize(
    ("changes", "failed", "word"),
    [
        ({"gain": 1.5}, "prove-build", "wrong results"),
        ({"told": SimpleNamespace(graph_runs=0, graph_problem="the driver is too old")}, "prove-graph", "too old"),
        ({"told": None}, "prove-graph", "captures no graphs"),
        ({"open_plan": None, "cannot_run": "no GPU here"}, "prove-gpu", "no GPU here"),
    ],
    ids=["wrong", "no-graph", "no-stats", "no-gpu"],
)
def test_the_step_that_fails_is_named_and_the_rest_is_not_reached(
    changes: dict[str, Any], failed: str, word: str
) -> None:
    checks = prove(None, host=host(**changes), seconds=0.02, quiet=True)
    assert [check.name for check in checks] == list(STEPS)
    first = next(check for check in checks if not check.ok)
    assert first.name == failed
    assert word in first.message
    rest = checks[checks.index(first) + 1 :]
    assert all("not reached" in check.message for check in rest)


def test_a_build_that_fails_is_a_failed_check() -> None:
    def fail(*_args: Any) -> Any:
        raise BuildError("node 'conv': no implementation")

    checks = prove(None, host=fake_host(fail), seconds=0.02, quiet=True)
    assert [check.ok for check in checks] == [True, False, False, False, False]
    assert "no implementation" in checks[1].message


def test_the_command_says_what_is_missing_and_exits_with_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def none(**_options: Any) -> Any:
        raise DeviceError("no CUDA driver: libcuda.so.1 cannot be loaded")

    monkeypatch.setattr("edgeds.engines.install.find_host", none)
    monkeypatch.setattr("edgeds.cli.doctor.check_machine", list)
    assert main(["doctor", "--prove", "--json", "-q"]) == 1
    data = json.loads(capsys.readouterr().out)
    assert data["ok"] is False
    assert "libcuda.so.1" in data["checks"][0]["message"]
    assert main(["doctor", "-q", "--prove", str(tmp_path / "nothing")]) == 1
    assert "no such file" in capsys.readouterr().err


def test_the_command_passes_where_everything_works(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("edgeds.engines.install.find_host", lambda **_options: host())
    monkeypatch.setattr("edgeds.cli.doctor.check_machine", list)
    monkeypatch.setattr(doctor_prove, "GRAPH_RUNS", 2)
    assert main(["doctor", "--prove", "-q"]) == 0
    out = capsys.readouterr().out
    assert "required: all fine" in out
    assert "prove-graph" in out
