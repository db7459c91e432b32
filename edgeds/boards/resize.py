"""Costs of a model at other input sizes than those that they were counted at."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from edgeds.boards.cost_file import LayerCost, ModelWork
from edgeds.errors import SpecError


def resize_work(work: ModelWork, shapes: Mapping[str, Sequence[int]]) -> ModelWork:
    """Costs at other input sizes: activations and FLOPs grow with the elements of the inputs per item, weights stay.

    An approximation for cost files (attention grows faster); a model file is counted anew instead. Raises SpecError
    for unknown inputs and other ranks.
    """
    inputs = dict(work.inputs)
    for name, shape in shapes.items():
        if name not in inputs:
            raise SpecError(f"--input {name}: the costs have the inputs {', '.join(inputs) or 'none'}")
        if len(shape) != len(inputs[name]) or any(dim < 1 for dim in shape):
            raise SpecError(f"--input {name}: expected {len(inputs[name])} positive numbers, got {list(shape)}")
        inputs[name] = tuple(shape)
    before = max(math.prod(shape) for shape in work.inputs.values()) if work.inputs else 1
    ratio = (max(math.prod(shape) for shape in inputs.values()) if inputs else 1) / before
    layers = [scale_layer(layer, ratio) for layer in work.layers]
    note = () if ratio == 1 else ("scaled from the size that the costs were counted at",)
    return replace(work, inputs=inputs, layers=tuple(layers), notes=(*work.notes, *note))


def scale_layer(layer: LayerCost, ratio: float) -> LayerCost:
    """A layer on ``ratio`` times the activations; its weights stay."""
    weights = min(round(layer.params * element_bytes(layer.precision)), layer.bytes_read)
    counts = None if layer.elements is None else (round(layer.elements[0] * ratio), round(layer.elements[1] * ratio))
    return replace(
        layer,
        flops=round(layer.flops * ratio),
        bytes_read=weights + round((layer.bytes_read - weights) * ratio),
        bytes_written=round(layer.bytes_written * ratio),
        elements=counts,
    )


def element_bytes(precision: str) -> float:
    """Bytes of one element of a precision as cost files name it."""
    return {"float16": 2.0, "bfloat16": 2.0, "int8": 1.0, "uint8": 1.0}.get(precision, 4.0)
