"""Real TensorRT-RTX parses and builds what float16 conversion writes: every network there is strongly typed.

Needs the wheels tensorrt_rtx_cu13_libs and tensorrt_rtx_cu13_bindings (no GPU); built for SM86, as Orin's generation.
"""

from __future__ import annotations

import importlib

import numpy as np
import pytest
from graph_models import branch_with_capture
from half_models import encoder, qdq_conv, range_detector

from edgeds.engines.layer_log import node_precisions, read_layers
from edgeds.graph.io import load_model, save_model
from edgeds.graph.precision import convert_float16

pytestmark = [pytest.mark.tensorrt, pytest.mark.slow]


@pytest.fixture(scope="module")
def rtx():
    for name in ("tensorrt_rtx", "tensorrt_rtx_bindings"):
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    return pytest.skip("the TensorRT-RTX wheels are not installed")


def build_plan(trt, path, ranges):
    """(plan bytes or None, [(severity, text)]) of a build with one profile; ``ranges``: input -> (min, opt, max)."""
    log = []

    class Logger(trt.ILogger):
        def __init__(self):
            trt.ILogger.__init__(self)

        def log(self, severity, text):
            log.append((severity.name, text))

    logger = Logger()
    builder = trt.Builder(logger)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, logger)
    parsed = parser.parse_from_file(str(path))
    assert parsed, [(parser.get_error(i).node_name(), parser.get_error(i).desc()) for i in range(parser.num_errors)]
    config = builder.create_builder_config()
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
    config.num_compute_capabilities = 1
    assert config.set_compute_capability(trt.ComputeCapability.SM86, 0)
    profile = builder.create_optimization_profile()
    for name, shapes in ranges.items():
        profile.set_shape(name, *shapes)
    assert config.add_optimization_profile(profile) >= 0
    plan = builder.build_serialized_network(network, config)
    errors = [text for severity, text in log if "ERROR" in severity and "cudaError 35" not in text]
    inconsistent = [text for _, text in log if "self-consistent" in text]
    assert plan is not None, errors[:5]
    assert not inconsistent
    types = [network.get_output(i).dtype.name for i in range(network.num_outputs)]
    return plan, types, log


def squares(low, high):
    return ((1, 3, low, low), (1, 3, low, low), (2, 3, high, high))


@pytest.mark.parametrize("io", ["float32", "float16"])
def test_dynamic_detector_with_range_anchors_builds(rtx, tmp_path, io):
    """Other converters leave mixed types at the anchors, which RTX refuses when H and W are dynamic (facts 2.7)."""
    half = convert_float16(range_detector(), io=io).model
    path = save_model(half, tmp_path / "m.onnx")
    _, types, _ = build_plan(rtx, path, {"images": squares(64, 128)})
    assert types == ["FLOAT" if io == "float32" else "HALF"]


@pytest.mark.parametrize("spelled", [False, True])
def test_masked_encoder_builds(rtx, tmp_path, spelled):
    path = save_model(convert_float16(encoder(spelled=spelled)).model, tmp_path / "m.onnx")
    shapes = ((1, 4), (2, 16), (4, 32))
    _, _, log = build_plan(rtx, path, {"ids": shapes, "mask": shapes})
    assert not [text for _, text in log if "layernorm" in text.lower() and "overflow" in text.lower()]


@pytest.mark.parametrize("scale", [None, np.full(4, 2e-5), np.array([0.004, 1e-9, 0.003, 0.005])])
def test_int8_with_half_rest_builds_and_runs_in_int8(rtx, tmp_path, scale):
    path = save_model(convert_float16(qdq_conv(weight_scale=scale, shared=True)).model, tmp_path / "m.onnx")
    _, _, log = build_plan(rtx, path, {"x": ((1, 4, 8, 8), (1, 4, 8, 8), (4, 4, 8, 8))})
    precisions = node_precisions(read_layers(log))
    assert "Int8" in precisions["conv"].split("/"), precisions  # conv2 reads a float activation


def test_if_with_casted_captures_builds(rtx, tmp_path):
    path = save_model(convert_float16(branch_with_capture()).model, tmp_path / "m.onnx")
    build_plan(rtx, path, {"x": ((1, 4, 8, 8), (1, 4, 8, 8), (2, 4, 8, 8))})


@pytest.mark.zoo
def test_yolo11n_builds_in_half_and_in_int8_with_half_rest(rtx, tmp_path):
    """INT8 + FP16 as the bundle's ``int8_fp16`` variant; every quantized convolution runs in Int8."""
    from edgeds.compress.calibset import open_calibration
    from edgeds.compress.quantize import quantize_model
    from edgeds.graph.io import input_specs
    from edgeds.zoo import fetch_model

    source = fetch_model("yolo11n", quiet=True)
    model = load_model(source)
    half = save_model(convert_float16(model).model, tmp_path / "half.onnx")
    build_plan(rtx, half, {"images": squares(320, 640)})
    generator = np.random.default_rng(0)
    feeds = [{"images": generator.random((1, 3, 320, 320), np.float32)} for _ in range(2)]
    calibration = open_calibration(feeds, model_inputs=input_specs(model))
    int8 = tmp_path / "int8.onnx"
    report = quantize_model(source, calibration, out=int8, threads=2, quiet=True)
    mixed = save_model(convert_float16(load_model(int8)).model, tmp_path / "mixed.onnx")
    _, _, log = build_plan(rtx, mixed, {"images": squares(320, 640)})
    precisions = node_precisions(read_layers(log))
    convolutions = {item.name for item in load_model(mixed).graph.node if item.op_type == "Conv"}
    int8_convolutions = [name for name in convolutions if "Int8" in precisions.get(name, "").split("/")]
    assert len(int8_convolutions) >= 80
    assert report.quantized_nodes >= len(int8_convolutions)
