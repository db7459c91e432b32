"""Which IR and opset versions the installed onnx and onnxruntime read, and what to do with newer files."""

from __future__ import annotations

import functools

import onnx
from onnx import ModelProto, TensorProto, helper

from edgeds.errors import MissingDependency, ModelError
from edgeds.graph.proto import each_graph, main_opset

_TYPES_SINCE_IR = {
    9: ("FLOAT8E4M3FN", "FLOAT8E4M3FNUZ", "FLOAT8E5M2", "FLOAT8E5M2FNUZ"),
    10: ("INT4", "UINT4"),
    11: ("FLOAT4E2M1",),
    12: ("FLOAT8E8M0",),
    13: ("INT2", "UINT2"),
}
"""Element types by the IR version that brought them (onnx.proto, history of the IR version)."""


@functools.cache
def runtime_ir_limit() -> int:
    """Newest IR version that both the installed onnx and onnxruntime accept (found by loading a one-node model)."""
    try:
        import onnxruntime
        from onnxruntime.capi import onnxruntime_pybind11_state as state
    except ImportError as error:
        raise MissingDependency("onnxruntime", extra="cpu", purpose="reading models", cause=error) from error
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    for version in range(int(onnx.IR_VERSION), 3, -1):
        value = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1])
        out = helper.make_tensor_value_info("y", TensorProto.FLOAT, [1])
        graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "probe", [value], [out])
        probe = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=version)
        try:
            onnxruntime.InferenceSession(probe.SerializeToString(), options, providers=["CPUExecutionProvider"])
        except (state.Fail, state.InvalidGraph, state.InvalidProtobuf, state.NotImplemented, state.InvalidArgument):
            continue
        return version
    return 3


def opset_limit() -> int:
    """Newest default-domain opset the installed onnx knows."""
    return int(onnx.defs.onnx_opset_version())


def needed_ir(model: ModelProto) -> int:
    """Lowest IR version whose features cover the model (local functions, element types, metadata, multi-device)."""
    needed = 4
    if model.functions:
        needed = max(needed, 8)
    used_types = {tensor.data_type for graph in each_graph(model.graph) for tensor in graph.initializer}
    for graph in each_graph(model.graph):
        values = [*graph.input, *graph.output, *graph.value_info]
        used_types |= {v.type.tensor_type.elem_type for v in values if v.type.WhichOneof("value") == "tensor_type"}
    for version, names in _TYPES_SINCE_IR.items():
        if any(getattr(TensorProto, name, -1) in used_types for name in names):
            needed = max(needed, version)
    if model.graph.metadata_props or any(node.metadata_props for node in model.graph.node):
        needed = max(needed, 10)
    if any(node.device_configurations for node in model.graph.node) or model.configuration:
        needed = max(needed, 11)
    return needed


def check_versions(model: ModelProto, *, where: str, lower_ir: bool) -> None:
    """Refuse versions that cannot be read here; with ``lower_ir`` lower the IR in place where nothing needs it."""
    limit = runtime_ir_limit()
    if model.ir_version > limit:
        needed = needed_ir(model)
        if needed > limit:
            raise ModelError(
                f"{where}: IR version {model.ir_version} found, up to {limit} supported here, and the model uses "
                f"features of version {needed}; upgrade onnx and onnxruntime or export with an older onnx"
            )
        if not lower_ir:
            raise ModelError(
                f"{where}: IR version {model.ir_version} found, up to {limit} supported here; the model uses nothing "
                f"newer than version {needed}, so edgeds.graph.io.load_model(path, lower_ir=True) "
                f"reads it as version {limit}; or upgrade onnx and onnxruntime"
            )
        model.ir_version = limit
    opset = main_opset(model)
    if opset > opset_limit():
        raise ModelError(
            f"{where}: opset {opset} found, up to {opset_limit()} supported here; "
            "upgrade onnx and onnxruntime, or export again with an older opset"
        )
