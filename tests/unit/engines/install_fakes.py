"""Small stand-ins for building and running: a "plan" is a magic number and JSON, the "model" doubles its input."""

from __future__ import annotations

import dataclasses
import io
import json
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from edgeds.bundle import Bundle, Manifest, open_bundle, write_bundle
from edgeds.engines.build_host import BuildHost
from edgeds.engines.fingerprint import DeviceIdentity
from edgeds.specs import Resolution, ShapeRange, TensorSpec, to_json

INPUT = TensorSpec(name="x", dtype="float32", shape=("n", 3, "h", "w"))
OUTPUT = TensorSpec(name="y", dtype="float32", shape=("n", 3, "h", "w"))
ORIN = DeviceIdentity(gpu="Orin", compute_capability="8.7", board="p3767-0005")


@dataclass(frozen=True, kw_only=True)
class FakeOptions:
    profiles: tuple[Mapping[str, ShapeRange], ...] = ()
    precision: str = "auto"
    workspace_mib: int | None = None
    optimization_level: int = 3
    sparsity: bool = False
    flags: tuple[str, ...] = ()
    timing_cache: Path | None = None
    compute_capabilities: tuple[str, ...] = ()


@dataclass
class FakeEngine:
    """Doubles its input, times ``gain``."""

    gain: float = 1.0
    inputs = (INPUT,)
    outputs = (OUTPUT,)
    backend = "fake"
    closed: bool = False

    def infer(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {"y": (2 * self.gain * feeds["x"]).astype(np.float32)}

    def infer_async(self, feeds: Mapping[str, np.ndarray]) -> Future[dict[str, np.ndarray]]:
        raise NotImplementedError

    def close(self) -> None:
        self.closed = True

    def __enter__(self) -> FakeEngine:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()


@dataclass
class FakeBuilder:
    """Counts builds and writes a plan; ``before`` runs first (to fail, wait or kill)."""

    builds: list[Any] = dataclasses.field(default_factory=list)
    before: Callable[[Path], None] = lambda out: None
    magic: bytes = b"ftrt"

    def __call__(self, onnx: Path, out: Path, options: Any, layers: Any) -> dict[str, Any]:
        self.builds.append(options)
        self.before(out)
        out.write_bytes(self.magic + json.dumps(to_json(options)).encode() + onnx.read_bytes())
        return {"applied": ["fake"]}


def fake_host(build: Any = None, **changes: Any) -> BuildHost:
    values: dict[str, Any] = {
        "product": "tensorrt",
        "tensorrt": "10.3.0",
        "typing": "strong",
        "device": ORIN,
        "description": "a fake board",
        "options_type": FakeOptions,
        "fixed": {},
        "build": build or FakeBuilder(),
        "open_plan": lambda plan: FakeEngine(),
    }
    return BuildHost(**(values | changes))


def make_bundle(folder: Path, *, golden: bool = True, models: dict[str, str] | None = None, **changes: Any) -> Bundle:
    """A bundle whose model files are any bytes; the golden references say that y = 2x."""
    models = models or {"float": "model.onnx"}
    files: dict[str, Path | bytes] = {name: f"model {name}".encode() for name in models.values()}
    if golden:
        x = np.random.default_rng(1).random((1, 3, 8, 8), dtype=np.float32)
        buffer = io.BytesIO()
        arrays = {"input/0/x": x, "float/0/y": 2 * x, "int8/0/y": 2 * x + np.float32(0.01)}
        np.savez(buffer, **arrays)  # type: ignore[arg-type]
        files["golden.npz"] = buffer.getvalue()
    values: dict[str, Any] = {
        "task": "other",
        "models": models,
        "inputs": (INPUT,),
        "outputs": (OUTPUT,),
        "buckets": (Resolution(8, 8),),
        "max_batch": 4,
        "precision": "float",
        "license": "Apache-2.0",
    }
    return open_bundle(write_bundle(folder, files=files, manifest=Manifest(**(values | changes))))


def profile(low: int = 1, high: int = 4, side: int = 8) -> dict[str, ShapeRange]:
    return {"x": ShapeRange(min=(low, 3, side, side), opt=(high, 3, side, side), max=(high, 3, side, side))}
