"""The float16 forms in a bundle: typed for strong builds, close to what they come from, and never a reason to fail."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from edgeds.bundle import open_bundle
from edgeds.compress.calibset import open_calibration
from edgeds.compress.quantize import quantize_model
from edgeds.errors import ModelError
from edgeds.graph.io import input_specs, load_model
from edgeds.graph.session import open_session
from edgeds.graph.typecheck import find_type_errors
from edgeds.specs import Resolution
from edgeds.workshop import halfmodels
from edgeds.workshop.halfmodels import make_half_models
from edgeds.workshop.package import create_bundle


def quantized(model: Path, folder: Path) -> tuple[Any, Any]:
    feeds = [{"images": np.random.default_rng(seed).random((1, 3, 64, 64), np.float32)} for seed in range(3)]
    calibration = open_calibration(feeds, model_inputs=input_specs(load_model(model)))
    return quantize_model(model, calibration, out=folder / "int8.onnx", threads=1, quiet=True), feeds[:2]


def make(model: Path, folder: Path) -> halfmodels.HalfModels:
    report, feeds = quantized(model, folder)
    return make_half_models(
        model, Path(report.int8_model), ranges=Path(report.ranges), feeds=feeds, folder=folder / "half", quiet=True
    )


def test_bundles_carry_both_forms_and_they_agree_with_their_origins(model: Path, images: Path, tmp_path: Path) -> None:
    path = create_bundle(
        model, out=tmp_path / "b", task="detect", sizes=(Resolution(64, 64),), calib=images, quiet=True
    )
    with open_bundle(path) as bundle:
        golden = bundle.golden()
        for variant, origin in (("float16", "float"), ("int8_fp16", "int8")):
            stored = load_model(bundle.model_path(variant))
            onnx.checker.check_model(stored, full_check=True)
            assert find_type_errors(stored) == []
            got = open_session(stored, threads=1).run(None, {"images": golden["input/0/images"]})[0]
            want = golden[f"{origin}/0/output0"]
            assert got.dtype == np.float32
            assert np.abs(got[:, 4:] - want[:, 4:]).max() < 0.05
            assert bundle.manifest.accuracy is not None
            assert 0 < bundle.manifest.accuracy[f"{variant}_max_abs"] < 10


def test_half_models_use_what_calibration_saw(model: Path, tmp_path: Path) -> None:
    loud = onnx.load(model)
    for tensor in loud.graph.initializer:
        if tensor.name in ("stem.w", "mix.w"):
            factor = 1e6 if tensor.name == "stem.w" else 1e-6
            array = onnx.numpy_helper.to_array(tensor) * np.float32(factor)
            tensor.CopyFrom(onnx.numpy_helper.from_array(array, tensor.name))
    onnx.save(loud, tmp_path / "loud.onnx")
    made = make(tmp_path / "loud.onnx", tmp_path)
    half = load_model(made.paths["float16"])
    stored = {tensor.name: tensor.data_type for tensor in half.graph.initializer}
    nodes = {node.name: node for node in half.graph.node}
    assert stored[nodes["stem"].input[1]] == onnx.TensorProto.FLOAT  # its output is beyond float16
    assert stored[nodes["box"].input[1]] == onnx.TensorProto.FLOAT16


def test_a_model_that_cannot_be_converted_is_left_out_with_a_note(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    convert = halfmodels.convert_float16

    def refuse(given: Any, **options: Any) -> Any:
        if any(node.op_type == "QuantizeLinear" for node in given.graph.node):
            raise ModelError("upgrade from opset 13 to 19 failed")
        return convert(given, **options)

    monkeypatch.setattr(halfmodels, "convert_float16", refuse)
    made = make(model, tmp_path)
    assert set(made.paths) == {"float16"}
    assert made.notes == ["no int8_fp16 model, so none can be built in FP16: upgrade from opset 13 to 19 failed"]
