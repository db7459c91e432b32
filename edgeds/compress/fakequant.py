"""Students of quantization-aware training: Q/DQ models whose int8 weights are trained through float master weights.

What is trained is the Q/DQ graph itself, run by ``torch_graph`` with the scales and the rounding it is deployed with;
rounding passes gradients on unchanged (straight-through, Bengio et al. 2013). Scales stay those of calibration.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from onnx import ModelProto

from edgeds.compress.calibset import Feeds, open_calibration
from edgeds.compress.quantize import prepare_float, quantize_model
from edgeds.compress.weights import QMAX
from edgeds.graph.io import input_specs, load_model
from edgeds.graph.view import GraphView

CALIBRATION_SAMPLES = 64
"""Ranges need fewer samples than training."""


@dataclass(frozen=True, kw_only=True)
class Student:
    """A model to train. ``masters``: float weights behind its int8 ones, by the name of the int8 initializer."""

    model: ModelProto
    quantized: bool
    masters: dict[str, np.ndarray] = field(default_factory=dict)


def open_student(
    source: Path,
    *,
    reference: ModelProto,
    feeds: Sequence[Feeds],
    qat: bool,
    threads: int | None = None,
    quiet: bool = False,
) -> Student:
    """The model at ``source`` as it is trained. ``qat`` quantizes a float one first, calibrated on ``feeds``.

    A Q/DQ model starts from the weights of ``reference`` (its float original) where they round to those it has.
    Raises what ``load_model`` and ``quantize_model`` raise.
    """
    model = load_model(source)
    if any(node.op_type == "DequantizeLinear" for node in model.graph.node):
        model = GraphView(model).model  # not folded: that would turn its int8 weights into floats
        return Student(model=model, quantized=True, masters=find_masters(model, reference))
    original = prepare_float(source)
    if not qat:
        return Student(model=original, quantized=False)
    step = max(1, len(feeds) // CALIBRATION_SAMPLES)
    chosen = open_calibration(list(feeds[::step]), model_inputs=input_specs(model))
    with tempfile.TemporaryDirectory(prefix="edgeds-qat-") as folder:
        place = Path(folder) / "int8.onnx"
        quantize_model(source, chosen, out=place, threads=threads, quiet=quiet)
        model = load_model(place)
    return Student(model=model, quantized=True, masters=find_masters(model, original))


def find_masters(model: ModelProto, original: ModelProto) -> dict[str, np.ndarray]:
    """Float weights of ``original`` behind the int8 ones of ``model``, where they still round to those."""
    ours, theirs = GraphView(model, copy=False), GraphView(original, copy=False)
    found = {}
    for node in ours.nodes:
        if node.op_type != "DequantizeLinear" or not ours.is_constant(node.input[0]):
            continue
        name = node.input[0]
        source = theirs.constant(name.removesuffix("_quantized"))
        values, scale = ours.constant(name), ours.constant(node.input[1])
        if source is None or values is None or scale is None or source.shape != values.shape:
            continue
        axis = next((item.i for item in node.attribute if item.name == "axis"), 1)
        shape = [1] * source.ndim
        if scale.size > 1:
            shape[axis % source.ndim] = scale.size
        rounded = np.clip(np.rint(source / scale.reshape(shape)), -QMAX, QMAX)
        if np.abs(rounded - values.astype(np.float32)).max(initial=0) <= 1:
            found[name] = source
    return found
