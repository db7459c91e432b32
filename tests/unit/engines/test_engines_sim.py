"""Whole paths on the simulated device, CPU and TensorRT side by side: our reading of the API, never a TensorRT run."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from simdevice import models
from simdevice.simcuda import build_library, missing_symbols, simulated_environment
from simdevice.simtrt import make_tensorrt, write_plan

from edgeds.doctor_proof import write_proof_bundle
from edgeds.engines.cuda import open_cuda
from edgeds.engines.onnxruntime import OnnxRuntimeEngine
from edgeds.engines.tensorrt import TensorRTEngine
from edgeds.pipelines.yolo import YoloPipeline

ROOT = Path(__file__).parents[3]
METADATA = {"names": "{0: 'red', 1: 'green'}", "task": "detect", "stride": "8"}


def write_detector(path: Path) -> Path:
    """A detector in the v8 layout for any size: each 8x8 cell is a candidate, scored by its red and green."""
    import onnx
    from onnx import helper, numpy_helper

    weights = np.zeros((2, 3, 8, 8), np.float32)
    weights[0, 0] = weights[1, 1] = 1 / 64
    ones = np.zeros((2, 3, 8, 8), np.float32)
    nodes = [
        helper.make_node("Conv", ["images", "w"], ["scores"], strides=[8, 8]),
        helper.make_node("Conv", ["images", "z"], ["none"], strides=[8, 8]),
        helper.make_node("Add", ["none", "one"], ["filled"]),
        helper.make_node("CumSum", ["filled", "axis_x"], ["right"]),
        helper.make_node("CumSum", ["filled", "axis_y"], ["down"]),
        helper.make_node("Concat", ["right", "down"], ["grid2"], axis=1),
        helper.make_node("Gather", ["grid2", "pick"], ["grid"], axis=1),
        helper.make_node("Sub", ["grid", "half"], ["centres"]),
        helper.make_node("Concat", ["centres", "filled", "scores"], ["all6"], axis=1),
        helper.make_node("Mul", ["all6", "gain"], ["scaled"]),
        helper.make_node("Reshape", ["scaled", "flat"], ["output0"]),
    ]
    constants = {
        "w": weights,
        "z": ones,
        "one": np.ones((1, 2, 1, 1), np.float32),
        "axis_x": np.array(3, np.int64),
        "axis_y": np.array(2, np.int64),
        "pick": np.array([0, 2], np.int64),
        "half": np.full((1, 2, 1, 1), 0.5, np.float32),
        "gain": np.array([8, 8, 8, 8, 1, 1], np.float32).reshape(1, 6, 1, 1),
        "flat": np.array([0, 6, -1], np.int64),
    }
    inits = [numpy_helper.from_array(value, name) for name, value in constants.items()]
    inputs = [models.value("images", "FLOAT", ["batch", 3, "height", "width"])]
    models.save(path, nodes, inputs, [models.value("output0", "FLOAT", ["batch", 6, "anchors"])], inits)
    model = onnx.load(str(path))
    helper.set_model_props(model, METADATA)
    onnx.save(model, str(path))
    return path


def pictures() -> list[np.ndarray]:
    found = []
    for index, (height, width) in enumerate([(64, 64), (64, 96), (128, 96), (96, 64), (64, 96), (40, 40), (300, 200)]):
        image = np.zeros((height, width, 3), np.uint8)
        image[8 : 24 + index, 16:32, 2 - index % 2] = 200
        image[-16:, -24:, 1] = 250
        found.append(image)
    return found


@pytest.mark.parametrize("integrated", [1, 0], ids=["jetson", "discrete"])
def test_the_yolo_pipeline_agrees_with_the_cpu(simcuda, tmp_path, integrated):
    """The same pictures through the CPU engine and the simulated device: equal boxes, classes and scores."""
    pytest.importorskip("cv2")
    simcuda.set(integrated=integrated)
    onnx = write_detector(tmp_path / "cells.onnx")
    buckets = [64, 96, 128]
    profiles = [{"images": ((1, 3, side, side), (4, 3, side, side), (4, 3, side, side))} for side in buckets]
    plan = write_plan(tmp_path / "cells.plan", onnx, profiles=profiles)
    trt = make_tensorrt(simcuda)
    with OnnxRuntimeEngine(onnx, threads=1) as cpu, YoloPipeline.from_engine(cpu, buckets=buckets) as pipeline:
        want = pipeline.predict(pictures() * 3)
        names = cpu.inputs + cpu.outputs
    with (
        open_cuda(driver="ctypes", library=str(simcuda.path)) as cuda,
        TensorRTEngine(plan, trt=trt, cuda=cuda, specs=names) as engine,
        YoloPipeline.from_engine(engine, buckets=buckets, names={0: "red", 1: "green"}) as pipeline,
    ):
        assert pipeline.session.policy.max_batch == 4
        got = pipeline.predict(pictures() * 3)
        assert pipeline.session.stats().backend == "tensorrt"
        assert engine.stats().graph_runs > 0
    assert any(len(result.xyxy) for result in want)
    for left, right in zip(got, want, strict=True):
        np.testing.assert_array_equal(left.xyxy, right.xyxy)
        np.testing.assert_array_equal(left.conf, right.conf)
        np.testing.assert_array_equal(left.cls, right.cls)
    assert trt.sim.violations == []
    assert set(trt.sim.live.values()) == {0}


def run_python(simcuda, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {**simulated_environment(simcuda.path), "EDGEDS_CACHE": str(cwd / "cache"), "HOME": str(cwd)}
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=240, env=environment, cwd=cwd
    )


OPEN = """
import json, sys
import numpy as np
from edgeds.bundle import open_bundle
from edgeds.engines import available_backends, open_engine
from edgeds.errors import EdgedsError
out = {"reason": available_backends()["tensorrt"]}
for backend in ("auto", "tensorrt", "cpu"):
    try:
        with open_bundle(sys.argv[1]) as bundle, open_engine(bundle, backend=backend) as engine:
            golden = bundle.golden()
            spec = engine.inputs[0]
            shape = [dim if isinstance(dim, int) else {0: 2}.get(axis, 32) for axis, dim in enumerate(spec.shape)]
            feeds = {spec.name: np.random.default_rng(0).random(shape).astype(spec.dtype)}
            values = [array.sum().item() for array in engine.infer(feeds).values()]
            out[backend] = [engine.backend, engine.precision, engine.fallback_reason, values, str(spec)]
    except EdgedsError as error:
        out[backend] = f"{type(error).__name__}: {error}"
import tensorrt
out["violations"], out["live"] = tensorrt.sim.violations, tensorrt.sim.live
out["left"] = {k: v for k, v in tensorrt.sim.cuda.live().items() if v}
print(json.dumps(out))
"""


def test_auto_takes_an_installed_engine_and_says_when_there_is_none(simcuda_library, tmp_path):
    """B76: before ``edgeds build`` auto falls back and says so, a named backend is an error; afterwards both run."""
    bundle = write_proof_bundle(tmp_path / "bundle")
    before = run_python(simcuda_library, "-c", OPEN, str(bundle), cwd=tmp_path)
    assert before.returncode == 0, before.stderr
    first = json.loads(before.stdout)
    assert first["reason"] is None
    assert first["auto"][0] == "onnxruntime"
    assert "no TensorRT engine" in first["auto"][2]
    assert "edgeds build" in first["auto"][2]
    assert first["tensorrt"].startswith("EngineMismatch: no engine was built")

    built = run_python(simcuda_library, "-m", "edgeds", "build", str(bundle), "--json", cwd=tmp_path)
    assert built.returncode == 0, built.stderr
    assert json.loads(built.stdout)["cached"] is False

    after = run_python(simcuda_library, "-c", OPEN, str(bundle), cwd=tmp_path)
    assert after.returncode == 0, after.stderr
    second = json.loads(after.stdout)
    for name in ("auto", "tensorrt"):
        assert second[name][0] == "tensorrt"
        assert second[name][2] is None
        np.testing.assert_allclose(second[name][3], second["cpu"][3], rtol=0.02, atol=1)
        assert second[name][4] == second["cpu"][4]  # dims are named as in the bundle
    assert second["cpu"][0] == "onnxruntime"
    assert (second["violations"], second["live"]) == ([], {"runtimes": 0, "engines": 0, "contexts": 0})
    assert second["left"] == {}

    plan = next((tmp_path / "bundle" / "engines").rglob("*.plan"))
    plan.write_bytes(plan.read_bytes()[:-9])
    damaged = json.loads(run_python(simcuda_library, "-c", OPEN, str(bundle), cwd=tmp_path).stdout)
    assert damaged["auto"][0] == "onnxruntime"
    assert "cut short" in damaged["auto"][2]
    assert "cut short" in damaged["tensorrt"]


def test_the_script_for_boards_runs_on_the_simulated_device(simcuda_library):
    """tests/device with -m gpu: so that the first person with a board meets a script that works."""
    command = [sys.executable, "-m", "pytest", "tests/device", "-m", "gpu", "-q", "-p", "no:cacheprovider"]
    environment = simulated_environment(simcuda_library.path)
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "skipped" not in done.stdout


ENGINE = """
import sys
from concurrent.futures import ThreadPoolExecutor
import numpy as np
import tensorrt
from edgeds.engines.cuda import open_cuda
from edgeds.engines.onnxruntime import OnnxRuntimeEngine
from edgeds.engines.tensorrt import RunOptions, TensorRTEngine
name, plan, onnx = sys.argv[1:4]
shapes = [(1, 3, 8, 8), (4, 3, 8, 8), (2, 3, 20, 24)]
with OnnxRuntimeEngine(onnx, threads=1) as cpu:
    for integrated in (1, 0):
        tensorrt.sim.cuda.set(integrated=integrated)
        with open_cuda(driver=name) as cuda, TensorRTEngine(plan, cuda=cuda, options=RunOptions(lanes=2)) as engine:
            assert cuda.driver.name == name
            def work(mark):
                for turn in range(12):
                    x = np.full(shapes[turn % 3], mark, np.float32)
                    got, want = engine.infer({"x": x}), cpu.infer({"x": x})
                    assert all((got[key] == want[key]).all() for key in want)
            with ThreadPoolExecutor(4) as pool:
                list(pool.map(work, range(4)))
            assert engine.stats().graph_runs > 0, engine.stats()
assert tensorrt.sim.violations == [], tensorrt.sim.violations
print({key: value for key, value in tensorrt.sim.cuda.live().items() if value}, tensorrt.sim.live)
"""


@pytest.mark.parametrize(("name", "module"), [("cuda-bindings", "cuda"), ("pycuda", "pycuda"), ("ctypes", "ctypes")])
def test_the_engine_runs_on_every_cuda_binding(simcuda_library, tmp_path, name, module):
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{name} is not installed")
    library = simcuda_library.path
    if name == "pycuda":
        (extension,) = Path(importlib.util.find_spec(module).origin).parent.glob("_driver*.so")
        library = build_library(tmp_path, also=missing_symbols(extension))
    onnx = models.conv_model(tmp_path / "conv.onnx")
    plan = write_plan(tmp_path / "conv.plan", onnx, profiles=models.CONV_PROFILES)
    environment = {**simulated_environment(library), "LD_PRELOAD": str(library)}
    command = [sys.executable, "-c", ENGINE, name, str(plan), str(onnx)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "{} {'runtimes': 0, 'engines': 0, 'contexts': 0}"
