"""Telling a slower INT8 model from a faster one, without trusting a busy machine's clock."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from edgeds.errors import InputError, ModelError, SpecError
from edgeds.workshop.speed import compare_cpu_speed

FEEDS = {"x": np.ones((1, 256), np.float32)}


def save_chain(path: Path, *, layers: int) -> Path:
    """``layers`` square matrix products one after the other: time in proportion to their number."""
    weights = [
        numpy_helper.from_array(np.eye(256, dtype=np.float32) * 0.5 + index, f"w{index}") for index in range(layers)
    ]
    names = ["x", *(f"y{index}" for index in range(layers))]
    nodes = [helper.make_node("MatMul", [names[i], f"w{i}"], [names[i + 1]]) for i in range(layers)]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 256])
    y = helper.make_tensor_value_info(names[-1], TensorProto.FLOAT, ["n", 256])
    graph = helper.make_graph(nodes, "chain", [x], [y], weights)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


def test_the_ratio_says_which_model_is_faster_and_roughly_by_how_much(tmp_path: Path) -> None:
    short, long = save_chain(tmp_path / "short.onnx", layers=3), save_chain(tmp_path / "long.onnx", layers=60)
    feeds = {"x": np.ones((64, 256), np.float32)}
    assert compare_cpu_speed(long, short, feeds=feeds, seconds=0.3, threads=1) > 2
    assert compare_cpu_speed(short, long, feeds=feeds, seconds=0.3, threads=1) < 0.5


def test_equal_models_are_about_equally_fast(tmp_path: Path) -> None:
    path = save_chain(tmp_path / "same.onnx", layers=30)
    feeds = {"x": np.ones((64, 256), np.float32)}
    assert 0.5 < compare_cpu_speed(path, path, feeds=feeds, seconds=0.3, threads=1) < 2


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), float("inf")])
def test_a_time_that_is_none_is_refused(tmp_path: Path, seconds: float) -> None:
    with pytest.raises(SpecError, match="seconds"):
        compare_cpu_speed(tmp_path / "a.onnx", tmp_path / "b.onnx", feeds=FEEDS, seconds=seconds)


def test_missing_models_and_wrong_feeds_say_so(tmp_path: Path) -> None:
    path = save_chain(tmp_path / "model.onnx", layers=1)
    with pytest.raises(ModelError, match=r"gone\.onnx"):
        compare_cpu_speed(path, tmp_path / "gone.onnx", feeds=FEEDS)
    with pytest.raises(InputError, match="unknown"):
        compare_cpu_speed(path, path, feeds={"y": np.ones((1, 256), np.float32)})
