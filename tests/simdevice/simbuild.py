"""The build half of the stand-in TensorRT, just enough for ``edgeds build``: our reading of the API.

It builds nothing. A "plan" names the ONNX file and the profiles; simtrt computes it with ONNX Runtime.
"""

from __future__ import annotations

import enum
import json
import types
from pathlib import Path
from typing import Any

from simdevice.simtrt import MAGIC, ORT_TYPES, DataType, PybindBase, Severity, check_base

BuilderFlag = enum.IntEnum(
    "BuilderFlag", ["FP16", "INT8", "TF32", "SPARSE_WEIGHTS", "STRIP_PLAN", "REFIT", "VERSION_COMPATIBLE"], start=0
)
CreationFlag = enum.IntEnum("NetworkDefinitionCreationFlag", ["EXPLICIT_BATCH", "STRONGLY_TYPED"], start=0)
MemoryPoolType = enum.IntEnum("MemoryPoolType", ["WORKSPACE", "TACTIC_DRAM", "DLA_MANAGED_SRAM"], start=0)
ProfilingVerbosity = enum.IntEnum("ProfilingVerbosity", ["LAYER_NAMES_ONLY", "DETAILED", "NONE"], start=0)
HardwareLevel = enum.IntEnum("HardwareCompatibilityLevel", ["NONE", "AMPERE_PLUS"], start=0)
DeviceType = enum.IntEnum("DeviceType", ["GPU", "DLA"], start=0)


class Profile:
    def __init__(self) -> None:
        self.shapes: dict[str, list[tuple[int, ...]]] = {}

    def set_shape(self, input: str, min: Any, opt: Any, max: Any) -> None:
        self.shapes[input] = [tuple(min), tuple(opt), tuple(max)]

    def get_shape(self, input: str) -> list[tuple[int, ...]]:
        return self.shapes[input]


class TimingCache:
    def serialize(self) -> bytes:
        return b"simulated timing cache"


class Config:
    progress_monitor = None
    builder_optimization_level = 3
    max_aux_streams = -1
    max_num_tactics = -1
    hardware_compatibility_level = HardwareLevel.NONE
    default_device_type = DeviceType.GPU
    DLA_core = -1
    profiling_verbosity = ProfilingVerbosity.LAYER_NAMES_ONLY

    def __init__(self) -> None:
        self.flags: set[int] = set()
        self.pools: dict[int, int] = {}
        self.profiles: list[Profile] = []

    def set_flag(self, flag: int) -> None:
        self.flags.add(flag)

    def clear_flag(self, flag: int) -> None:
        self.flags.discard(flag)

    def get_flag(self, flag: int) -> bool:
        return flag in self.flags

    def set_memory_pool_limit(self, pool: int, pool_size: int) -> None:
        self.pools[pool] = pool_size

    def get_memory_pool_limit(self, pool: int) -> int:
        return self.pools[pool]

    def create_timing_cache(self, serialized_timing_cache: bytes) -> TimingCache:
        return TimingCache()

    def set_timing_cache(self, cache: TimingCache, ignore_mismatch: bool) -> bool:
        return True

    def get_timing_cache(self) -> TimingCache:
        return TimingCache()

    def add_optimization_profile(self, profile: Profile) -> int:
        self.profiles.append(profile)
        return len(self.profiles) - 1


class Tensor:
    is_shape_tensor = False

    def __init__(self, argument: Any) -> None:
        self.name = argument.name
        self._dims = argument.shape
        self.shape = tuple(dim if isinstance(dim, int) else -1 for dim in argument.shape)
        self.dtype = DataType[ORT_TYPES[argument.type]]

    def get_dimension_name(self, index: int) -> str:
        return self._dims[index] if isinstance(self._dims[index], str) else ""


class Network:
    def __init__(self, flags: int) -> None:
        self.flags, self.onnx = flags, ""
        self.inputs: list[Tensor] = []
        self.outputs: list[Tensor] = []

    num_inputs = property(lambda self: len(self.inputs))
    num_outputs = property(lambda self: len(self.outputs))

    def get_flag(self, flag: int) -> bool:
        return bool(self.flags >> int(flag) & 1)

    def get_input(self, index: int) -> Tensor:
        return self.inputs[index]

    def get_output(self, index: int) -> Tensor:
        return self.outputs[index]


class OnnxParser:
    num_errors = 0

    def __init__(self, network: Network, logger: Any) -> None:
        self.network, self.logger = network, check_base(logger)

    def parse_from_file(self, model: str) -> bool:
        import onnxruntime as ort

        session = ort.InferenceSession(model, providers=["CPUExecutionProvider"])
        self.network.onnx = str(Path(model).resolve())
        self.network.inputs = [Tensor(argument) for argument in session.get_inputs()]
        self.network.outputs = [Tensor(argument) for argument in session.get_outputs()]
        return True


class HostMemory(bytes):
    @property
    def nbytes(self) -> int:
        return len(self)


def add_builder(module: types.ModuleType, *, version: str) -> None:
    """Give a simulated module its build half."""

    class Builder:
        num_DLA_cores = 0

        def __init__(self, logger: Any) -> None:
            self.logger = check_base(logger)

        def create_network(self, flags: int = 0) -> Network:
            return Network(flags)

        def create_builder_config(self) -> Config:
            return Config()

        def create_optimization_profile(self) -> Profile:
            return Profile()

        def build_serialized_network(self, network: Network, config: Config) -> HostMemory | None:
            if any(-1 in tensor.shape for tensor in network.inputs) and not config.profiles:
                self.logger.log(Severity.ERROR, "Network has dynamic inputs, but no profile has been defined")
                return None
            manifest = {
                "onnx": network.onnx,
                "profiles": [profile.shapes for profile in config.profiles],
                "values": [],
                "data_dependent": [],
                "version": version,
                "capability": [8, 7],
                "scratch_bytes": 4096,
                "capturable": True,
                "overrides": {},
            }
            return HostMemory(MAGIC + json.dumps(manifest).encode())

    for name, value in {
        "Builder": Builder,
        "OnnxParser": OnnxParser,
        "IBuilderConfig": Config,
        "IProgressMonitor": PybindBase,
        "BuilderFlag": BuilderFlag,
        "NetworkDefinitionCreationFlag": CreationFlag,
        "MemoryPoolType": MemoryPoolType,
        "ProfilingVerbosity": ProfilingVerbosity,
        "HardwareCompatibilityLevel": HardwareLevel,
        "DeviceType": DeviceType,
    }.items():
        setattr(module, name, value)
