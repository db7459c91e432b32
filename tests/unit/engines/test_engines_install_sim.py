"""Installing and proving on the simulated device: our reading of the API, never a TensorRT run.

The stand-in computes real outputs with ONNX Runtime, so the golden check compares true results with numpy's.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from install_fakes import fake_host

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from simdevice import simtrt

from edgeds.bundle import Bundle, open_bundle
from edgeds.doctor_proof import write_proof_bundle
from edgeds.doctor_prove import prove
from edgeds.engines.build_host import BuildHost, identify_device
from edgeds.engines.cuda import Cuda, open_cuda
from edgeds.engines.install import find_installed, install_engine
from edgeds.engines.jetson import Jetson
from edgeds.engines.tensorrt import TensorRTEngine
from edgeds.errors import EngineMismatch
from edgeds.specs import to_json


@pytest.fixture
def trt(simcuda: Any) -> Iterator[ModuleType]:
    module = simtrt.make_tensorrt(simcuda)
    yield module
    assert module.sim.violations == []
    assert set(module.sim.live.values()) == {0}


@pytest.fixture
def cuda(simcuda: Any, trt: ModuleType) -> Iterator[Cuda]:
    simcuda.set(integrated=1)
    with open_cuda(driver="ctypes", library=str(simcuda.path)) as opened:
        yield opened


@pytest.fixture
def bundle(tmp_path: Path) -> Iterator[Bundle]:
    with open_bundle(write_proof_bundle(tmp_path / "b")) as opened:
        yield opened


def sim_host(trt: ModuleType, cuda: Cuda, *, capability: tuple[int, int] = (8, 7), **plan: Any) -> BuildHost:
    def build(onnx: Path, out: Path, options: Any, layers: Any) -> dict[str, Any]:
        shapes = [
            {name: (allowed.min, allowed.opt, allowed.max) for name, allowed in profile.items()}
            for profile in options.profiles
        ]
        simtrt.write_plan(out, onnx, profiles=shapes, capability=capability, **plan)
        return {"profiles": to_json(options.profiles), "simulated": True}

    return fake_host(
        build,
        device=identify_device(cuda, Jetson(module="p3767-0005", l4t="36.4.3", jetpack="6.2")),
        open_plan=lambda path: TensorRTEngine(path, trt=trt, cuda=cuda),
    )


def test_an_engine_is_checked_and_measured_where_it_runs(bundle: Bundle, trt: ModuleType, cuda: Cuda) -> None:
    host = sim_host(trt, cuda)
    found = install_engine(bundle, host=host, measure_seconds=0.05, quiet=True)
    assert found.golden_max_error is not None
    assert found.golden_max_error < 1e-4
    assert found.manifest.golden is not None
    assert found.manifest.golden.samples == 2
    assert {key: list(row) for key, row in found.manifest.latency_ms.items()} == {
        "3x32x32": [1, 2, 4],
        "3x48x64": [1, 2, 4],
    }
    installed = find_installed(bundle, host=host)
    assert installed is not None
    with TensorRTEngine(installed.plan, trt=trt, cuda=cuda) as engine:
        golden = bundle.golden()
        got = engine.infer({"x": golden["input/1/x"]})["y"]
        assert abs(got - golden["int8/1/y"]).max() < 1e-4


def test_prove_captures_a_graph(trt: ModuleType, cuda: Cuda) -> None:
    checks = prove(host=sim_host(trt, cuda), seconds=0.05, quiet=True)
    assert [check.ok for check in checks] == [True] * 5, checks
    assert "replay(s)" in checks[-1].message


def test_prove_says_when_no_graph_can_be_captured(trt: ModuleType, cuda: Cuda) -> None:
    checks = prove(host=sim_host(trt, cuda, capturable=False), seconds=0.05, quiet=True)
    assert [check.ok for check in checks] == [True, True, True, True, False]
    assert "no CUDA graph was captured" in checks[-1].message


def test_an_engine_that_does_not_load_is_not_installed(bundle: Bundle, trt: ModuleType, cuda: Cuda) -> None:
    with pytest.raises(EngineMismatch, match=r"10\.16"):
        install_engine(bundle, host=sim_host(trt, cuda, version="10.16.2"), quiet=True)
    assert list((bundle.root / "engines").iterdir()) == []
