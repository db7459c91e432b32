"""Write a graph node by node: the common part of the builders of encoders and decoders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from onnx import ModelProto, TensorProto, helper, numpy_helper

IR_VERSION = 10
"""What TensorRT 10.3's parser and ONNX Runtime 1.20 read."""


class GraphWriter:
    """``op`` adds a node and returns its output; ``weight`` a constant and returns its name.

    Names are ``prefix/kind``, so that reports about layers read like the network.
    """

    def __init__(self, *, opset: int) -> None:
        self._opset = opset
        self._nodes: list[Any] = []
        self._weights: dict[str, np.ndarray] = {}
        self._names: dict[str, int] = {}
        self._inputs: list[Any] = []
        self._outputs: list[Any] = []
        self._small: dict[tuple[str, tuple[int, ...], bytes], str] = {}
        self.prefix = ""

    def op(self, kind: str, *inputs: str, **attributes: Any) -> str:
        """Add a node with one output."""
        return self.ops(kind, *inputs, outputs=1, **attributes)[0]

    def ops(self, kind: str, *inputs: str, outputs: int, name: str | None = None, **attributes: Any) -> list[str]:
        """Add a node with several outputs; ``name`` instead of one made of the prefix and the kind."""
        name = name or self._fresh(f"{self.prefix}/{kind}")
        made = [f"{name}_output_{index}" for index in range(outputs)]
        self._nodes.append(helper.make_node(kind, list(inputs), made, name, **attributes))
        return made

    def reduce(self, kind: str, tensor: str, axes: Sequence[int], *, keepdims: int) -> str:
        """A reduction other than ReduceSum, whose axes became an input with opset 18."""
        if self._opset < 18:
            return self.op(kind, tensor, axes=list(axes), keepdims=keepdims)
        return self.op(kind, tensor, self.const(list(axes)), keepdims=keepdims)

    def rename(self, tensor: str, name: str) -> str:
        """Give a tensor the name of a graph output."""
        self._nodes.append(helper.make_node("Identity", [tensor], [name], self._fresh(f"{name}/Identity")))
        return name

    def weight(self, name: str, value: np.ndarray) -> str:
        """A constant under its own name."""
        name = self._fresh(name)
        self._weights[name] = np.asarray(value, order="C")  # ascontiguousarray would give a scalar an axis
        return name

    def const(self, value: Any, dtype: Any = np.int64) -> str:
        """A small constant; equal ones are stored once."""
        array = np.asarray(value, dtype)
        key = (array.dtype.str, array.shape, array.tobytes())
        if key not in self._small:
            self._small[key] = self.weight(f"const_{len(self._small)}", array)
        return self._small[key]

    def input(self, name: str, shape: Sequence[int | str], dtype: Any = np.int64) -> str:
        """A graph input."""
        self._inputs.append(helper.make_tensor_value_info(name, _elem(dtype), list(shape)))
        return name

    def output(self, name: str, shape: Sequence[int | str], dtype: Any = np.float32) -> None:
        """A graph output; the tensor must exist under this name."""
        self._outputs.append(helper.make_tensor_value_info(name, _elem(dtype), list(shape)))

    def model(self, *, name: str, metadata: Mapping[str, str]) -> ModelProto:
        """The finished model."""
        graph = helper.make_graph(self._nodes, name, self._inputs, self._outputs)
        for label, value in self._weights.items():
            graph.initializer.append(numpy_helper.from_array(value, label))
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", self._opset)], producer_name="edgeds")
        model.ir_version = IR_VERSION
        helper.set_model_props(model, dict(metadata))
        return model

    def _fresh(self, base: str) -> str:
        count = self._names.get(base, 0)
        self._names[base] = count + 1
        return base if count == 0 else f"{base}_{count}"


def _elem(dtype: Any) -> int:
    return int(helper.np_dtype_to_tensor_dtype(np.dtype(dtype))) if dtype is not None else TensorProto.UNDEFINED
