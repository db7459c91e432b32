"""ONNX Runtime CPU sessions for the workstation half: quiet, modest, from memory or from a path."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import onnx
from onnx import ModelProto

from edgeds.errors import MissingDependency, ModelError, SpecError
from edgeds.graph.proto import INLINE_LIMIT_BYTES, clone_model, one_line, weight_bytes

if TYPE_CHECKING:
    import onnxruntime


def _runtime() -> Any:
    try:
        import onnxruntime
    except ImportError as error:
        raise MissingDependency("onnxruntime", extra="cpu", purpose="running models on the CPU", cause=error) from error
    return onnxruntime


def runtime_errors() -> tuple[type[Exception], ...]:
    """The exception types onnxruntime raises for models and feeds it cannot take."""
    _runtime()
    from onnxruntime.capi import onnxruntime_pybind11_state as state

    names = (
        *("Fail", "InvalidArgument", "InvalidGraph", "InvalidProtobuf", "NoSuchFile", "NotImplemented"),
        *("RuntimeException", "NoModel", "EPFail", "EngineError"),
    )
    return (*(getattr(state, name) for name in names if hasattr(state, name)), ValueError)


def session_options(*, threads: int | None = None) -> Any:
    """Options used everywhere: no spinning (it starves busy machines), no memory pattern per shape, quiet.

    Raises SpecError for an absurd thread count, which would hang the machine.
    """
    if threads is not None and (isinstance(threads, bool) or not isinstance(threads, int) or not 1 <= threads <= 1024):
        raise SpecError(f"threads: expected a whole number from 1 to 1024, got {threads!r}")
    options = _runtime().SessionOptions()
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    options.intra_op_num_threads = threads if threads is not None else available
    options.inter_op_num_threads = 1
    options.log_severity_level = 4  # what fails also raises, and is reported once
    options.enable_mem_pattern = False
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.add_session_config_entry("session.inter_op.allow_spinning", "0")
    # Weights stay out of the arena, which then holds only activations.
    options.add_session_config_entry("session.use_device_allocator_for_initializers", "1")
    return options


def open_session(
    model_or_path: ModelProto | str | Path,
    *,
    outputs: Sequence[str] | None = None,
    threads: int | None = None,
    optimize: bool = True,
) -> onnxruntime.InferenceSession:
    """Open a CPU session. ``outputs`` exposes extra tensors after the model's own outputs.

    Models with more than 1 GiB of weights go through a temporary file, never through one protobuf. ``optimize=False``
    runs the graph as written. Raises ModelError (one line, with the node as onnxruntime names it).
    """
    from edgeds.graph.io import load_model, save_model, verify_model_file

    where = "model in memory" if isinstance(model_or_path, ModelProto) else str(model_or_path)
    options = session_options(threads=threads)
    if not optimize:
        options.graph_optimization_level = _runtime().GraphOptimizationLevel.ORT_DISABLE_ALL
    if not isinstance(model_or_path, ModelProto):
        if not outputs:
            verify_model_file(model_or_path)
            return _create(str(model_or_path), options, where=where)
        model_or_path = load_model(model_or_path)
    model = model_or_path
    large = weight_bytes(model) >= INLINE_LIMIT_BYTES
    if outputs:
        model = _with_outputs(model, outputs, where=where)
    if not large:
        return _create(model.SerializeToString(), options, where=where)
    with tempfile.TemporaryDirectory(prefix="edgeds-") as folder:
        path = save_model(model, Path(folder) / "model.onnx")
        return _create(str(path), options, where=where)


def _with_outputs(model: ModelProto, outputs: Sequence[str], *, where: str) -> ModelProto:
    known = {name for node in model.graph.node for name in node.output if name}
    known |= {item.name for item in (*model.graph.input, *model.graph.initializer)}
    present = {item.name for item in model.graph.output}
    copy = clone_model(model)
    for name in dict.fromkeys(outputs):
        if name not in known:
            raise ModelError(f"{where}: there is no tensor {name!r} to expose as an output")
        if name not in present:
            copy.graph.output.append(onnx.ValueInfoProto(name=name))
    return copy


def _create(source: str | bytes, options: Any, *, where: str) -> Any:
    try:
        return _runtime().InferenceSession(source, options, providers=["CPUExecutionProvider"])
    except runtime_errors() as error:
        raise ModelError(f"{where}: onnxruntime cannot load it: {one_line(error)}") from error
