"""A tiny detector in the v8 layout whose answers are known: each 8x8 cell of a 64x64 input is a candidate box.

Class 0 scores the mean red, class 1 the mean green of its cell.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

SIDE_PX, CELL_PX = 64, 8
METADATA = {"names": "{0: 'red', 1: 'green'}", "task": "detect", "stride": "8", "imgsz": "[64, 64]"}


def write_grid_model(path: Path, *, metadata: dict[str, str] | None = None) -> Path:
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    cells = SIDE_PX // CELL_PX
    weights = np.zeros((6, 3, CELL_PX, CELL_PX), np.float32)
    weights[4, 0] = weights[5, 1] = 1 / CELL_PX**2
    y, x = np.divmod(np.arange(cells**2), cells)
    boxes = np.zeros((1, 6, cells**2), np.float32)
    boxes[0, 0], boxes[0, 1], boxes[0, 2:4] = (x + 0.5) * CELL_PX, (y + 0.5) * CELL_PX, CELL_PX
    nodes = [
        helper.make_node("Conv", ["images", "w"], ["c"], strides=[CELL_PX, CELL_PX]),
        helper.make_node("Reshape", ["c", "shape"], ["r"]),
        helper.make_node("Add", ["r", "boxes"], ["output0"]),
    ]
    graph = helper.make_graph(
        nodes,
        "grid",
        [helper.make_tensor_value_info("images", TensorProto.FLOAT, ["n", 3, SIDE_PX, SIDE_PX])],
        [helper.make_tensor_value_info("output0", TensorProto.FLOAT, ["n", 6, cells**2])],
        [
            numpy_helper.from_array(weights, "w"),
            numpy_helper.from_array(boxes, "boxes"),
            numpy_helper.from_array(np.array([0, 6, -1], np.int64), "shape"),
        ],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    helper.set_model_props(model, METADATA if metadata is None else metadata)
    onnx.save(model, str(path))
    return path


def cell_picture(*cells: tuple[int, int, str], scale: int = 1) -> np.ndarray:
    """A black picture with coloured cells (column, row, "red" | "green"), BGR, ``scale`` times 64 pixels wide."""
    image = np.zeros((SIDE_PX * scale, SIDE_PX * scale, 3), np.uint8)
    step = CELL_PX * scale
    for column, row, color in cells:
        channel = {"red": 2, "green": 1}[color]
        image[row * step : (row + 1) * step, column * step : (column + 1) * step, channel] = 255
    return image
