"""One build inside this process: parse, configure, compile. Everything TensorRT makes lives and dies in here."""

from __future__ import annotations

import errno
import threading
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, cast

from edgeds.engines.build_config import Settings, configure, load_timing_cache, save_timing_cache
from edgeds.engines.build_errors import build_error, parser_error
from edgeds.engines.build_log import LogTap, process_logger, tap_log
from edgeds.engines.build_memory import BuildMemory
from edgeds.engines.build_monitor import BuildProgress, make_monitor
from edgeds.engines.build_options import BuildOptions
from edgeds.engines.layer_log import EngineLayer, read_layers, read_memory_mib
from edgeds.engines.profiles import check_profiles
from edgeds.engines.trt_module import TrtFacts, network_flags
from edgeds.errors import BuildError, DeviceError, ModelError, SpecError
from edgeds.specs import Dim, ShapeRange, TensorSpec

NUMPY_NAMES = {
    **{"FLOAT": "float32", "HALF": "float16", "BF16": "bfloat16", "FP8": "float8_e4m3fn", "FP4": "float4_e2m1fn"},
    **{"INT8": "int8", "INT32": "int32", "INT64": "int64", "UINT8": "uint8", "BOOL": "bool", "INT4": "int4"},
}

# TensorRT has one log for all builds of a process, so two at once could not be told apart.
_ONE_AT_A_TIME = threading.Lock()


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The finished plan (TensorRT's IHostMemory, a buffer) and what was learned while making it."""

    data: Any
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    settings: Settings
    warnings: tuple[str, ...]
    layers: tuple[EngineLayer, ...]
    memory_mib: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class BuildTask:
    """One build, everything decided. ``typing`` and ``precision`` are resolved, never ``auto``."""

    onnx: Path
    options: BuildOptions
    facts: TrtFacts
    typing: Literal["strong", "weak"]
    precision: str
    memory: BuildMemory


def run_build(trt: ModuleType, task: BuildTask, *, progress: BuildProgress) -> Plan:
    """Build one plan. Raises BuildError, ModelError, SpecError or OutOfMemory."""
    with _ONE_AT_A_TIME, tap_log() as tap:
        if progress.cancelled:
            raise BuildError("the build was cancelled before it started")
        builder, network, parser = _parse(trt, task, tap)
        specs = _specs(network)
        config = builder.create_builder_config()
        if config is None:
            raise build_error(task.onnx, tap, facts=task.facts, workspace_mib=0, doing="creating its configuration")
        settings = _configure(trt, config, task, builder=builder)
        _add_profiles(builder, config, network, task, specs=specs[0], tap=tap)
        if task.facts.has_progress:
            config.progress_monitor = monitor = make_monitor(trt, progress)
        cache_path = None if task.options.timing_cache is None else Path(task.options.timing_cache)
        # The cache object must outlive the build; so must everything above, hence the names.
        cache = load_timing_cache(config, cache_path, facts=task.facts, done=settings) if cache_path else None
        data = builder.build_serialized_network(network, config)
        if progress.cancelled:
            raise BuildError(f"{task.onnx}: the build was cancelled")
        if data is None or tap.fatal_warnings():
            raise build_error(
                task.onnx,
                tap,
                facts=task.facts,
                workspace_mib=task.memory.workspace_mib,
                doing="building the engine",
            )
        if cache is not None and cache_path is not None:
            save_timing_cache(config, cache_path, done=settings)
        del cache, parser
        if task.facts.has_progress:
            del monitor
        lines = tap.lines
        return Plan(
            data=data,
            inputs=specs[0],
            outputs=specs[1],
            settings=settings,
            warnings=tuple(tap.warnings()),
            layers=read_layers(lines),
            memory_mib=read_memory_mib(lines),
        )


def write_plan(data: Any, path: Path) -> None:
    """Write the plan's buffer. Raises BuildError for a full or failing disk."""
    try:
        with path.open("wb") as stream:
            stream.write(cast(memoryview, data))
            stream.flush()
    except OSError as error:
        raise disk_error(error, path.parent, needed_bytes=int(data.nbytes)) from error


def disk_error(error: OSError, folder: Path, *, needed_bytes: int) -> BuildError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return BuildError(
            f"{folder}: the disk is full, the engine needs {needed_bytes / (1 << 20):.1f} MiB; free some space or "
            "choose another folder"
        )
    return BuildError(f"{folder}: the engine cannot be written: {error.strerror or error}")


def _parse(trt: ModuleType, task: BuildTask, tap: LogTap) -> tuple[Any, Any, Any]:
    logger = process_logger(trt)
    try:
        builder = trt.Builder(logger)
    except (TypeError, RuntimeError) as error:
        # What the bindings raise when their factory returns null: libraries without a driver or a usable GPU.
        raise DeviceError(
            f"{task.facts.product} is installed but cannot build here ({tap.errors()[:1] or error}); check that the "
            "NVIDIA driver works and that this user may use the GPU (group video)"
        ) from error
    network = builder.create_network(network_flags(trt, typing=task.typing))
    if network is None:
        raise build_error(task.onnx, tap, facts=task.facts, workspace_mib=0, doing="creating a network")
    if task.typing == "strong" and not network.get_flag(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED):
        raise BuildError(f"{task.facts.product} did not make a strongly typed network; its types would not be kept")
    parser = trt.OnnxParser(network, logger)
    # The parser logs that it could not open a file in the same words as for a damaged one; scan_onnx came before.
    if not parser.parse_from_file(str(task.onnx)):
        raise parser_error(task.onnx, parser, tap=tap, facts=task.facts)
    if network.num_outputs == 0:
        raise ModelError(f"{task.onnx}: TensorRT found no outputs in it; it is not an ONNX model or is damaged")
    return builder, network, parser


def _configure(trt: ModuleType, config: Any, task: BuildTask, *, builder: Any) -> Settings:
    core = task.options.dla_core
    if core is not None and core >= builder.num_DLA_cores:
        raise BuildError(
            f"DLA core {core} was asked for, but TensorRT finds {builder.num_DLA_cores} on this machine; build for the "
            "GPU (leave out the DLA core)"
        )
    return configure(
        trt,
        config,
        task.options,
        facts=task.facts,
        typing=task.typing,
        precision=task.precision,
        memory=task.memory,
    )


def _add_profiles(
    builder: Any, config: Any, network: Any, task: BuildTask, *, specs: tuple[TensorSpec, ...], tap: LogTap
) -> None:
    values = [tensor.name for tensor in _inputs(network) if tensor.is_shape_tensor]
    check_profiles(task.options.profiles, specs, values=values)
    for index, wanted in enumerate(task.options.profiles):
        profile = builder.create_optimization_profile()
        for name, shapes in wanted.items():
            _set_range(profile, name, shapes, by_value=name in values, where=f"profile {index}, input {name!r}")
        if config.add_optimization_profile(profile) < 0:
            reason = "; ".join(tap.errors()[:2]) or "it gave no reason"
            raise SpecError(f"{task.onnx}: profile {index} was refused by {task.facts.product}: {reason}")


def _set_range(profile: Any, name: str, shapes: ShapeRange, *, by_value: bool, where: str) -> None:
    wanted = [shapes.min, shapes.opt, shapes.max]
    write, read = (
        (profile.set_shape_input, profile.get_shape_input) if by_value else (profile.set_shape, profile.get_shape)
    )
    try:
        write(name, *wanted)
        held = [tuple(dims) for dims in read(name)]
    except (ValueError, TypeError, RuntimeError) as error:
        raise SpecError(f"{where}: TensorRT does not take {wanted}: {error}") from error
    if held != wanted:
        raise SpecError(f"{where}: TensorRT does not take {wanted}, it holds {held}")


def _inputs(network: Any) -> list[Any]:
    return [network.get_input(index) for index in range(network.num_inputs)]


def _specs(network: Any) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
    """Inputs and outputs as they really are: a declared output type is ignored where the network has another."""
    outputs = [network.get_output(index) for index in range(network.num_outputs)]
    return tuple(map(_spec, _inputs(network))), tuple(map(_spec, outputs))


def _spec(tensor: Any) -> TensorSpec:
    dims: list[Dim] = []
    try:
        shape = list(tensor.shape)
    except ValueError:  # an output whose rank is not known before the build
        shape = []
    for axis, size in enumerate(shape):
        dims.append(int(size) if size >= 0 else (tensor.get_dimension_name(axis) or None))
    dtype = tensor.dtype.name
    return TensorSpec(name=tensor.name, dtype=NUMPY_NAMES.get(dtype, dtype.lower()), shape=tuple(dims))
