"""How large the values of every tensor get on given feeds, in one pass whose memory does not grow with the model."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import onnx
from onnx import ModelProto, TensorProto, helper, numpy_helper

from edgeds.errors import ModelError
from edgeds.graph.proto import clone_model, main_opset, np_dtype, one_line
from edgeds.graph.session import open_session, runtime_errors
from edgeds.graph.shapes import infer_types
from edgeds.progress import track

_SUFFIX = "__edgeds_peak"


def find_amplitudes(
    model: ModelProto,
    feeds: Iterable[Mapping[str, np.ndarray[Any, Any]]],
    *,
    threads: int | None = None,
    quiet: bool = True,
) -> dict[str, float]:
    """Largest magnitude of every computed float tensor of the main graph over ``feeds``; graph inputs included.

    The maxima are taken inside the graph, so that only one number per tensor leaves a run. A tensor that held infinity
    gets ``inf``; NaN is passed over. Raises ModelError when the model does not run on the feeds.
    """
    names = _float_tensors(model)
    if not names:
        return {}
    session = open_session(_with_peaks(model, names), threads=threads)
    peaks = dict.fromkeys(names, 0.0)
    wanted = [name + _SUFFIX for name in names]
    needed = {item.name for item in session.get_inputs()}
    for sample in track(feeds, what="measuring magnitudes", unit="sample", quiet=quiet):
        try:
            values = session.run(wanted, {name: array for name, array in sample.items() if name in needed})
        except runtime_errors() as error:
            raise ModelError(f"the model does not run on the samples given: {one_line(error)}") from error
        for name, value in zip(names, values, strict=True):
            peak = float(value)
            peaks[name] = max(peaks[name], peak if math.isfinite(peak) else math.inf)
    return peaks


def _float_tensors(model: ModelProto) -> list[str]:
    types = infer_types(model)
    stored = {tensor.name for tensor in model.graph.initializer}
    names = [item.name for item in model.graph.input if item.name not in stored]
    names += [name for node in model.graph.node if node.op_type != "Constant" for name in node.output if name]
    return [name for name in dict.fromkeys(names) if name in types and _is_float(types[name])]


def _is_float(kind: onnx.TypeProto) -> bool:
    dtype = np_dtype(kind.tensor_type.elem_type) if kind.WhichOneof("value") == "tensor_type" else None
    return dtype is not None and dtype.name in ("float16", "float32", "float64")


def _with_peaks(model: ModelProto, names: list[str]) -> ModelProto:
    """The model with ``max |x|`` of each named tensor as its only outputs."""
    copy = clone_model(model)
    graph, by_input = copy.graph, main_opset(model) >= 18
    del graph.output[:]
    del graph.value_info[:]
    flat, zero = f"flat{_SUFFIX}", f"zero{_SUFFIX}"
    graph.initializer.append(numpy_helper.from_array(np.array([-1], np.int64), flat))
    graph.initializer.append(numpy_helper.from_array(np.zeros(1, np.float32), zero))
    copy.ir_version = max(copy.ir_version, 4)
    axes = {} if by_input else {"axes": [0]}
    extra = [zero + "_axis"] if by_input else []
    if by_input:
        graph.initializer.append(numpy_helper.from_array(np.array([0], np.int64), extra[0]))
    for name in names:
        steps = [f"{name}{_SUFFIX}_{step}" for step in ("cast", "line", "abs", "some")]
        # The zero joined on makes the maximum of an empty tensor (an unused key/value cache) defined.
        graph.node.extend(
            [
                helper.make_node("Cast", [name], [steps[0]], to=TensorProto.FLOAT),
                helper.make_node("Reshape", [steps[0], flat], [steps[1]]),
                helper.make_node("Abs", [steps[1]], [steps[2]]),
                helper.make_node("Concat", [steps[2], zero], [steps[3]], axis=0),
                helper.make_node("ReduceMax", [steps[3], *extra], [name + _SUFFIX], keepdims=0, **axes),
            ]
        )
        graph.output.append(helper.make_tensor_value_info(name + _SUFFIX, TensorProto.FLOAT, []))
    return copy
