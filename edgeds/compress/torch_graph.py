"""An ONNX graph as a trainable torch function, and its trained weights back into the same graph.

The graph is interpreted node by node, so what is trained is exactly what is deployed: names, structure, inputs and
outputs stay. In a Q/DQ graph int8 weights are trained through float master weights that are rounded in every run, as
their DequantizeLinear reads them (quantization-aware training).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
from onnx import AttributeProto, ModelProto, NodeProto, helper, numpy_helper

from edgeds.compress import torch_ops, torch_ops_shape, torch_ops_spatial
from edgeds.compress.tail import find_detector_tail
from edgeds.compress.torch_lib import import_torch
from edgeds.compress.torch_ops import OpContext, round_through
from edgeds.compress.weights import QMAX
from edgeds.errors import ModelError
from edgeds.graph.view import GraphView

_WEIGHT_PLACES = {
    "Conv": (1, 2),
    "ConvTranspose": (1, 2),
    "Gemm": (1, 2),
    "MatMul": (0, 1),
    "BatchNormalization": (1, 2),
    "InstanceNormalization": (1, 2),
    "LayerNormalization": (1, 2),
    "PRelu": (1,),
}
"""Inputs that are learned when they are constants; a constant added to a MatMul is its bias and learned too."""


class TorchGraph:
    """``parameters`` are the tensors to train, by initializer name. Raises ModelError for what it cannot run."""

    def __init__(
        self, model: ModelProto, *, device: str = "cpu", masters: Mapping[str, np.ndarray] | None = None
    ) -> None:
        """``masters`` gives the float weights behind int8 initializers (by the int8 initializer's name); without,
        training starts at the rounded values."""
        torch = import_torch()
        self._model = model
        self._view = GraphView(model, copy=False)
        self._device = device
        self._table = {**torch_ops.build_table(), **torch_ops_shape.build_table(), **torch_ops_spatial.build_table()}
        self._opset = next((item.version for item in model.opset_import if item.domain in ("", "ai.onnx")), 0)
        self._nodes = [(node, self._context(node)) for node in self._view.nodes]
        self._quantized = _quantized_weights(self._view)
        trainable = _trainable(self._view)
        self._constants: dict[str, Any] = {}
        self.parameters: dict[str, Any] = {}
        for item in model.graph.initializer:
            array = numpy_helper.to_array(item)
            if item.name in self._quantized:
                scale, axis = self._quantized[item.name]
                start = (masters or {}).get(item.name)
                value = array.astype(np.float32) * _along(scale, array.ndim, axis) if start is None else start
                self.parameters[item.name] = self._parameter(torch, value)
            elif item.name in trainable:
                self.parameters[item.name] = self._parameter(torch, array)
            else:
                tensor = torch.from_numpy(array.copy())
                self._constants[item.name] = tensor.to(device) if tensor.is_floating_point() else tensor

    @property
    def tensor_names(self) -> set[str]:
        """Every tensor that ``run`` can give."""
        return {name for node, _ in self._nodes for name in node.output if name}

    def run(self, feeds: Mapping[str, Any], *, want: Collection[str]) -> dict[str, Any]:
        """Tensors named in ``want``. Only what they need is computed."""
        needed, readers = self._needed(frozenset(want))
        values: dict[str, Any] = {**self._constants, **self._weights(), **feeds}
        for node, context in self._nodes:
            if id(node) not in needed:
                continue
            inputs = [values.get(name) if name else None for name in node.input]
            for index, (name, value) in enumerate(zip(node.input, inputs, strict=True)):
                if name and value is None:
                    raise ModelError(f"node '{node.name}': input {index} '{name}' is no tensor of the main graph")
            try:
                result = self._table[node.op_type](inputs, context)
            except (RuntimeError, IndexError, TypeError, ValueError) as error:
                first = str(error).split("\n", 1)[0][:200]
                raise ModelError(f"node '{node.name}' ({node.op_type}) cannot be run for training: {first}") from error
            outputs = result if isinstance(result, tuple) else (result,)
            values.update({name: value for name, value in zip(node.output, outputs, strict=False) if name})
            for name in node.input:
                if name in readers:
                    readers[name] -= 1
                    if not readers[name] and name not in want:
                        values.pop(name, None)  # frees activations early where no gradient holds them
        return {name: values[name] for name in want}

    def export(self, values: Mapping[str, Any] | None = None) -> ModelProto:
        """The model with the parameters (or ``values`` in their place) as its weights; everything else as it was."""
        model = ModelProto()
        model.CopyFrom(self._model)
        source = values if values is not None else self.parameters
        for item in model.graph.initializer:
            if item.name not in source:
                continue
            old = numpy_helper.to_array(item)
            array = source[item.name].detach().cpu().numpy()
            if item.name in self._quantized:
                scale, axis = self._quantized[item.name]
                array = np.clip(np.round(array / _along(scale, old.ndim, axis)), -QMAX, QMAX)
            item.CopyFrom(numpy_helper.from_array(np.ascontiguousarray(array.astype(old.dtype)), item.name))
        return model

    def _weights(self) -> dict[str, Any]:
        torch = import_torch()
        values = dict(self.parameters)
        for name, (scale, axis) in self._quantized.items():
            master = values[name]
            step = torch.from_numpy(_along(scale, master.ndim, axis).copy()).to(master.device)
            values[name] = torch.clamp(round_through(master / step), -QMAX, QMAX)
        return values

    def _parameter(self, torch: Any, array: np.ndarray) -> Any:
        tensor = torch.from_numpy(np.array(array, dtype=np.float32)).to(self._device)
        return tensor.requires_grad_(True)

    def _context(self, node: NodeProto) -> OpContext:
        if node.domain not in ("", "ai.onnx") or node.op_type not in self._table:
            name = f"{node.domain}.{node.op_type}" if node.domain else node.op_type
            return OpContext(node=node.name, op=name, opset=self._opset, outputs=len(node.output))
        attributes = {item.name: _attribute(item) for item in node.attribute}
        return OpContext(
            node=node.name, op=node.op_type, opset=self._opset, outputs=len(node.output), attributes=attributes
        )

    def _needed(self, want: frozenset[str]) -> tuple[set[int], Counter[str]]:
        wanted, needed = set(want), set()
        readers: Counter[str] = Counter()
        for node, context in reversed(self._nodes):
            if not wanted.intersection(node.output):
                continue
            if node.op_type not in self._table or node.domain not in ("", "ai.onnx"):
                raise context.refuse(f"the operator {context.op}")
            needed.add(id(node))
            wanted.update(node.input)
            readers.update(name for name in node.input if name)
        missing = want - self.tensor_names - {value.name for value in self._model.graph.input}
        if missing:
            raise ModelError(f"the graph has no tensor '{min(missing)}'")
        return needed, readers


def _attribute(item: AttributeProto) -> Any:
    value = helper.get_attribute_value(item)
    return list(value) if item.type in (AttributeProto.INTS, AttributeProto.FLOATS) else value


def _along(scale: np.ndarray, rank: int, axis: int) -> np.ndarray:
    if scale.size == 1:
        return scale.reshape(())
    shape = [1] * rank
    shape[axis % rank] = scale.size
    return scale.reshape(shape)


def _trainable(view: GraphView) -> set[str]:
    fixed = find_detector_tail(view).nodes  # decoding constants look like weights (the bins of a distribution)
    names: set[str] = set()
    for node in view.nodes:
        if node.name in fixed:
            continue
        places: tuple[int, ...] = _WEIGHT_PLACES.get(node.op_type, ())
        if node.op_type == "Add":
            makers = (view.producer(name) for name in node.input)
            places = (0, 1) if any(maker is not None and maker.op_type == "MatMul" for maker in makers) else ()
        for index in places:
            name = node.input[index] if index < len(node.input) else ""
            array = view.constant(name) if name and view.is_constant(name) else None
            if array is not None and array.dtype == np.float32 and array.ndim:
                names.add(name)
    return names


def _quantized_weights(view: GraphView) -> dict[str, tuple[np.ndarray, int]]:
    """Int8 initializers with zero-point zero behind a DequantizeLinear: name -> (scale, axis)."""
    found: dict[str, tuple[np.ndarray, int]] = {}
    for node in view.nodes:
        if node.op_type != "DequantizeLinear" or not view.is_constant(node.input[0]):
            continue
        values, scale = view.constant(node.input[0]), view.constant(node.input[1])
        zero = view.constant(node.input[2]) if len(node.input) > 2 and node.input[2] else np.zeros(1, np.int8)
        if values is None or scale is None or zero is None or values.dtype != np.int8 or np.any(zero):
            continue
        axis = next((item.i for item in node.attribute if item.name == "axis"), 1)
        found[node.input[0]] = (scale.astype(np.float32), axis)
    return found
