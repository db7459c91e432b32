"""open_engine: which backend, which file of a bundle, and what it says when the wish cannot be met."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from onnx import TensorProto, helper, numpy_helper  # noqa: E402

from edgeds import engines  # noqa: E402
from edgeds.engines import available_backends, open_engine  # noqa: E402
from edgeds.errors import BundleError, DeviceError, MissingDependency, ModelError, SpecError  # noqa: E402


def save_add(path: Path, value: float) -> Path:
    info = helper.make_tensor_value_info
    graph = helper.make_graph(
        [helper.make_node("Add", ["x", "c"], ["y"])],
        "add",
        [info("x", TensorProto.FLOAT, ["N", 2])],
        [info("y", TensorProto.FLOAT, ["N", 2])],
        [numpy_helper.from_array(np.array([value], np.float32), "c")],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8), str(path))
    return path


@dataclass
class FakeManifest:
    models: dict[str, str]
    task: str = "detect"


@dataclass
class FakeBundle:
    root: Path
    manifest: FakeManifest
    closed: list[int] = field(default_factory=list)

    def path(self, name: str) -> Path:
        return self.root / name

    def close(self) -> None:
        self.closed.append(1)


VALUES = {"int8": ("model.onnx", 1.0), "cpu_int8": ("model.cpu.onnx", 2.0), "float": ("float.onnx", 3.0)}


def make_bundle(root: Path, *keys: str) -> FakeBundle:
    for key in keys:
        save_add(root / VALUES[key][0], VALUES[key][1])
    return FakeBundle(root, FakeManifest({key: VALUES[key][0] for key in keys}))


def value_of(engine) -> float:
    with engine:
        return float(engine.infer({"x": np.zeros((1, 2), np.float32)})["y"][0, 0])


@pytest.mark.parametrize(
    ("keys", "precision", "value", "chosen"),
    [
        (("int8", "cpu_int8", "float"), "auto", 2.0, "int8"),
        (("int8", "cpu_int8", "float"), "int8", 2.0, "int8"),
        (("int8", "cpu_int8", "float"), "float", 3.0, "float"),
        (("int8", "float"), "auto", 1.0, "int8"),
        (("float",), "auto", 3.0, "float"),
    ],
)
def test_precision_picks_the_file(tmp_path, keys, precision, value, chosen):
    engine = open_engine(make_bundle(tmp_path, *keys), precision=precision, threads=1)
    assert engine.precision == chosen
    assert value_of(engine) == value


def test_missing_precision_is_an_error(tmp_path):
    with pytest.raises(SpecError, match=r"int8.*it has float"):
        open_engine(make_bundle(tmp_path, "float"), precision="int8")
    with pytest.raises(BundleError, match="no model"):
        open_engine(make_bundle(tmp_path))
    with pytest.raises(SpecError, match="fp7"):
        open_engine(make_bundle(tmp_path, "float"), precision="fp7")
    with pytest.raises(SpecError, match="only for a bundle"):
        open_engine(save_add(tmp_path / "m.onnx", 1.0), precision="int8")


def test_signed_int8_on_x86_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    with open_engine(make_bundle(tmp_path, "int8"), backend="cpu") as engine:
        assert "half the speed" in engine.fallback_reason
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    with open_engine(make_bundle(tmp_path, "int8"), backend="cpu") as engine:
        assert engine.fallback_reason is None


@pytest.mark.parametrize("name", ["tensorrt", "cuda", "trt"])
def test_named_backend_that_is_missing_is_an_error(tmp_path, name):
    """B76: no silent CPU run when a device was named."""
    path = save_add(tmp_path / "m.onnx", 1.0)
    with pytest.raises(DeviceError, match=f"{name}.*cannot run here"):
        open_engine(path, backend=name)


def test_auto_says_that_it_fell_back(tmp_path):
    """B76: auto may fall back, with the reason on the engine."""
    path = save_add(tmp_path / "m.onnx", 1.0)
    with open_engine(path) as engine:
        assert engine.backend == "onnxruntime"
        assert "TensorRT" in engine.fallback_reason
    with open_engine(str(path), backend="cpu") as engine:
        assert engine.fallback_reason is None


def test_onnxruntime_missing_names_the_extra(tmp_path, monkeypatch):
    path = save_add(tmp_path / "m.onnx", 1.0)
    monkeypatch.setattr(engines.importlib.util, "find_spec", lambda name: None)
    assert "edgeds[cpu]" in available_backends()["onnxruntime"]
    for backend in ("auto", "onnxruntime"):
        with pytest.raises(MissingDependency, match=r"edgeds\[cpu\]"):
            open_engine(path, backend=backend)


def test_sources_that_are_wrong(tmp_path):
    with pytest.raises(ModelError, match="no such file"):
        open_engine(tmp_path / "absent.onnx")
    with pytest.raises(SpecError, match=r"'vulkan' is unknown.*onnxruntime"):
        open_engine(save_add(tmp_path / "m.onnx", 1.0), backend="vulkan")


def test_null_backend_has_the_models_io(tmp_path):
    with open_engine(save_add(tmp_path / "m.onnx", 1.0), backend="null") as engine:
        assert engine.backend == "null"
        assert engine.infer({"x": np.full((2, 2), 4, np.float32)})["y"].tolist() == [[4, 4], [4, 4]]
