"""A small detector in the v8 layout with real convolutions, a two-level decoded head, and images to feed it."""

from __future__ import annotations

from pathlib import Path

import numpy as np

NAMES = {0: "red", 1: "green", 2: "blue"}
WIDTH = 8


def write_tiny_yolo(
    path: Path,
    *,
    height: int | str = "h",
    width: int | str = "w",
    batch: int | str = "n",
    channels: int = 3,
    metadata: dict[str, str] | None = None,
    seed: int = 0,
) -> Path:
    """Stride 8: two backbone convolutions, one branch for boxes and one for scores, decoded to pixels in the graph.

    Free height and width get their grid from the shape of the features, as exports with dynamic axes do.
    """
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    rng = np.random.default_rng(seed)
    weights: dict[str, np.ndarray] = {}

    def conv(source: str, name: str, inputs: int, outputs: int, kernel: int, stride: int) -> list[onnx.NodeProto]:
        weights[f"{name}.w"] = rng.normal(0, 1 / np.sqrt(inputs * kernel**2), (outputs, inputs, kernel, kernel))
        weights[f"{name}.b"] = rng.normal(0, 0.1, outputs)
        pads = [0 if kernel == stride else kernel // 2] * 4
        node = helper.make_node(
            "Conv",
            [source, f"{name}.w", f"{name}.b"],
            [name],
            name=name,
            strides=[stride] * 2,
            pads=pads,
            kernel_shape=[kernel] * 2,
        )
        return [node]

    nodes = conv("images", "stem", channels, WIDTH, 4, 4)
    nodes += [helper.make_node("Relu", ["stem"], ["stem.act"])]
    nodes += conv("stem.act", "down", WIDTH, WIDTH, 2, 2)
    nodes += [helper.make_node("Relu", ["down"], ["down.act"])]
    nodes += conv("down.act", "mix", WIDTH, WIDTH, 3, 1)
    nodes += [helper.make_node("Relu", ["mix"], ["mix.act"])]
    nodes += conv("mix.act", "box", WIDTH, 4, 1, 1)
    nodes += conv("mix.act", "score", WIDTH, len(NAMES), 1, 1)
    weights["score.b"] = weights["score.b"] - 1
    nodes += [
        helper.make_node("Reshape", ["box", "to_box"], ["box.flat"]),
        helper.make_node("Reshape", ["score", "to_score"], ["score.flat"]),
        helper.make_node("Sigmoid", ["score.flat"], ["score.prob"]),
        helper.make_node("Sigmoid", ["box.flat"], ["box.unit"]),
        helper.make_node("Mul", ["box.unit", "span"], ["box.px"]),
        helper.make_node("Concat", ["box.px", "score.prob"], ["output0"], axis=1),
    ]
    weights["span"] = np.array([64, 64, 32, 32]).reshape(1, 4, 1)
    shapes = {"to_box": [0, 4, -1], "to_score": [0, len(NAMES), -1]}
    cells: int | str = "cells"
    if isinstance(height, int) and isinstance(width, int):
        cells = (height // 8) * (width // 8)
    graph = helper.make_graph(
        nodes,
        "tiny",
        [helper.make_tensor_value_info("images", TensorProto.FLOAT, [batch, channels, height, width])],
        [helper.make_tensor_value_info("output0", TensorProto.FLOAT, [batch, 4 + len(NAMES), cells])],
        [numpy_helper.from_array(np.asarray(value, np.float32), name) for name, value in weights.items()]
        + [numpy_helper.from_array(np.array(value, np.int64), name) for name, value in shapes.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    given = {"names": str(NAMES), "task": "detect", "stride": "8", "imgsz": "[64, 64]", "license": "MIT"}
    helper.set_model_props(model, given if metadata is None else metadata)
    onnx.save(model, str(path))
    return path


def write_images(
    folder: Path, *, count: int = 6, sizes: tuple[tuple[int, int], ...] = ((64, 64),), seed: int = 1
) -> list[Path]:
    """PNG images of coloured blocks on noise, (height, width) in turn from ``sizes``."""
    import cv2

    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    paths = []
    for index in range(count):
        height, width = sizes[index % len(sizes)]
        image = rng.integers(0, 80, (height, width, 3), np.uint8)
        top, left = int(rng.integers(0, height // 2)), int(rng.integers(0, width // 2))
        image[top : top + height // 3, left : left + width // 3, index % 3] = 255
        path = folder / f"{index:03d}.png"
        cv2.imwrite(str(path), image)
        paths.append(path)
    return paths


def write_labelled(folder: Path, *, train: int = 4, val: int = 3) -> Path:
    """A YOLO folder with train and val halves and one object per image."""
    for offset, (split, count) in enumerate((("train", train), ("val", val))):
        for path in write_images(folder / "images" / split, count=count, seed=10 + offset):
            label = folder / "labels" / split / f"{path.stem}.txt"
            label.parent.mkdir(parents=True, exist_ok=True)
            label.write_text("1 0.5 0.5 0.4 0.4\n", encoding="utf-8")
    return folder
