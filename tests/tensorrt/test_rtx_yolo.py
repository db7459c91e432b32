"""YOLO11n on the real TensorRT-RTX, without a GPU: every precision, dynamic batch, four resolutions, and what each
convolution computes in, read from the builder's detailed log."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import onnx
import pytest

from edgeds.compress.calibset import open_calibration
from edgeds.compress.placement import Selection
from edgeds.compress.quantize import quantize_model
from edgeds.engines.builder import BuildOptions, BuildReport, build_plan
from edgeds.engines.profiles import plan_profiles
from edgeds.graph.io import input_specs, load_model, save_model
from edgeds.graph.precision import to_float16
from edgeds.specs import Resolution
from edgeds.zoo import fetch_model

pytestmark = [pytest.mark.tensorrt, pytest.mark.zoo, pytest.mark.slow]

Build = Callable[..., BuildReport]
CONVOLUTIONS = 88
FLOAT_HEAD = 7
"""The last Conv of each branch (3 scales, boxes and scores) and the DFL projection stay float by default (B36)."""


@pytest.fixture(scope="session")
def yolo() -> Path:
    return fetch_model("yolo11n", quiet=True)


@pytest.fixture(scope="session")
def int8(yolo: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The int8 form, calibrated on noise: enough for types and kernels, useless for accuracy."""
    folder = tmp_path_factory.mktemp("int8")

    def make(*, keep_tail: bool) -> Path:
        out = folder / f"tail-{keep_tail}.onnx"
        if not out.exists():
            rng = np.random.default_rng(0)
            feeds = [{"images": rng.random((1, 3, 320, 320), dtype=np.float32)} for _ in range(2)]
            calibration = open_calibration(feeds, model_inputs=input_specs(load_model(yolo)))
            selection = Selection(keep_tail=keep_tail)
            quantize_model(
                yolo, calibration, out=out, selection=selection, bias_correction=False, threads=2, quiet=True
            )
        return out

    return make


@pytest.fixture
def build(rtx: ModuleType, tmp_path: Path) -> Build:
    def run(path: Path, *sizes: int, max_batch: int = 1, isolate: bool = False) -> BuildReport:
        buckets = [Resolution(size, size) for size in sizes]
        profiles = plan_profiles(input_specs(load_model(path)), buckets, max_batch=max_batch)
        options = BuildOptions(profiles=tuple(map(dict, profiles)), compute_capabilities=(86,))
        return build_plan(path, tmp_path / "yolo.plan", options, trt=rtx, quiet=True, isolate=isolate)

    return run


def convolutions(path: Path) -> dict[str, bool]:
    """Names of all Conv nodes, and whether their weights come through a DequantizeLinear."""
    graph = onnx.load(path).graph
    dequantized = {node.output[0] for node in graph.node if node.op_type == "DequantizeLinear"}
    return {node.name: node.input[1] in dequantized for node in graph.node if node.op_type == "Conv"}


def precisions(report: BuildReport, path: Path) -> dict[str, set[str]]:
    """Precisions of the quantized and of the float convolutions. Each convolution of the model must be in the log."""
    told = report.precision_of_nodes()
    found: dict[str, set[str]] = {"quantized": set(), "float": set()}
    for name, quantized in convolutions(path).items():
        found["quantized" if quantized else "float"].add(told[name])
    return found


def test_float32_at_a_fixed_size(build: Build, yolo: Path) -> None:
    report = build(yolo, 320)
    assert precisions(report, yolo) == {"quantized": set(), "float": {"Float"}}
    assert report.outputs[0].dtype == "float32"
    assert 8 << 20 < report.plan_bytes < 40 << 20


def test_float32_with_a_dynamic_batch_and_four_resolutions(build: Build, yolo: Path) -> None:
    report = build(yolo, 320, 480, 640, 1280, max_batch=16)
    assert len(report.profiles) == 4
    assert [profile["images"].max for profile in report.profiles][-1] == (16, 3, 1280, 1280)
    assert report.precision_of_nodes()
    # Each further profile brings its own kernels.
    assert report.plan_bytes > 1.3 * build(yolo, 320, max_batch=16).plan_bytes


def test_float16_is_what_a_typed_network_says(build: Build, yolo: Path, tmp_path: Path) -> None:
    path = save_model(to_float16(load_model(yolo)), tmp_path / "half.onnx")
    report = build(path, 320, 640, max_batch=4)
    # Some 1x1 convolutions become matrix products, which the log does not connect with their node.
    told = report.precision_of_nodes()
    named = [told[name] for name in convolutions(path) if name in told]
    assert len(named) > 0.9 * CONVOLUTIONS
    assert set(named) == {"Half"}
    assert report.outputs[0].dtype == "float32"


def test_int8_computes_every_quantized_convolution_in_int8(build: Build, int8: Callable[..., Path]) -> None:
    path = int8(keep_tail=True)
    kinds = list(convolutions(path).values())
    assert (len(kinds), kinds.count(False)) == (CONVOLUTIONS, FLOAT_HEAD)
    report = build(path, 320, max_batch=4, isolate=True)
    assert report.precision == "int8"
    assert precisions(report, path) == {"quantized": {"Int8"}, "float": {"Float"}}


def test_a_fully_quantized_model_computes_all_88_convolutions_in_int8(build: Build, int8: Callable[..., Path]) -> None:
    path = int8(keep_tail=False)
    assert list(convolutions(path).values()) == [True] * CONVOLUTIONS
    assert precisions(build(path, 320), path) == {"quantized": {"Int8"}, "float": set()}


def test_int8_with_float16_for_the_rest(build: Build, int8: Callable[..., Path], tmp_path: Path) -> None:
    path = save_model(to_float16(load_model(int8(keep_tail=True))), tmp_path / "int8_fp16.onnx")
    report = build(path, 320, 640)
    assert precisions(report, path) == {"quantized": {"Int8"}, "float": {"Half"}}
