"""A stand-in for the build half of TensorRT's Python module: our reading of its API, never a TensorRT run.

What it does is chosen by the stem of the model's file name (``none.onnx`` builds nothing), so that it works in a
process of its own too. Failures come as they do in TensorRT: None, False or -1, and lines in the log.
"""

import enum
import os
import signal
import time
from pathlib import Path

__version__ = "10.16.2.10"


class Severity(enum.Enum):
    INTERNAL_ERROR = 0
    ERROR = 1
    WARNING = 2
    INFO = 3
    VERBOSE = 4


def _enum(name: str, *members: str) -> type[enum.IntEnum]:
    return enum.IntEnum(name, {member: index for index, member in enumerate(members)})


NetworkDefinitionCreationFlag = _enum("NetworkDefinitionCreationFlag", "EXPLICIT_BATCH", "STRONGLY_TYPED")
BuilderFlag = _enum(
    "BuilderFlag",
    *("FP16", "INT8", "TF32", "SPARSE_WEIGHTS", "STRIP_PLAN", "REFIT", "VERSION_COMPATIBLE", "GPU_FALLBACK"),
)
MemoryPoolType = _enum("MemoryPoolType", "WORKSPACE", "TACTIC_DRAM", "DLA_MANAGED_SRAM")
ProfilingVerbosity = _enum("ProfilingVerbosity", "LAYER_NAMES_ONLY", "DETAILED", "NONE")
HardwareCompatibilityLevel = _enum("HardwareCompatibilityLevel", "NONE", "AMPERE_PLUS", "SAME_COMPUTE_CAPABILITY")
TilingOptimizationLevel = _enum("TilingOptimizationLevel", "NONE", "FAST", "MODERATE", "FULL")
DeviceType = _enum("DeviceType", "GPU", "DLA")
DataType = _enum("DataType", "FLOAT", "HALF", "INT8", "INT32", "INT64", "BOOL")


class ILogger:
    Severity = Severity

    def __init__(self) -> None:
        pass


class IProgressMonitor:
    def __init__(self) -> None:
        pass


class IOptimizationProfile:
    def __init__(self) -> None:
        self.shapes: dict = {}

    def set_shape(self, input: str, min: tuple, opt: tuple, max: tuple) -> None:
        self.shapes[input] = [min, opt, max]

    def get_shape(self, input: str) -> list:
        return self.shapes[input]

    set_shape_input, get_shape_input = set_shape, get_shape


class _TimingCache:
    def __init__(self, content: bytes) -> None:
        self.content = content

    def serialize(self) -> bytes:
        return self.content + b"+timed"


class IBuilderConfig:
    tiling_optimization_level = TilingOptimizationLevel.NONE
    l2_limit_for_tiling = -1
    max_num_tactics = -1
    max_aux_streams = -1
    builder_optimization_level = 3
    hardware_compatibility_level = HardwareCompatibilityLevel.NONE
    default_device_type = DeviceType.GPU
    DLA_core = -1
    progress_monitor = None
    profiling_verbosity = ProfilingVerbosity.LAYER_NAMES_ONLY

    def __init__(self, logger: ILogger) -> None:
        self.logger = logger
        self.flags = {BuilderFlag.TF32}
        self.pools: dict = {}
        self.profiles: list = []
        self.cache: _TimingCache | None = None
        LAST.append(self)

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

    def create_timing_cache(self, serialized_timing_cache: bytes) -> _TimingCache | None:
        return None if serialized_timing_cache == b"damaged" else _TimingCache(serialized_timing_cache)

    def set_timing_cache(self, cache: _TimingCache, ignore_mismatch: bool) -> bool:
        self.cache = cache
        return True

    def get_timing_cache(self) -> _TimingCache | None:
        return self.cache

    def add_optimization_profile(self, profile: IOptimizationProfile) -> int:
        self.profiles.append(profile)
        return len(self.profiles) - 1


class Tensor:
    def __init__(self, name: str, shape: tuple, names: tuple) -> None:
        self.name, self.shape, self.names = name, shape, names
        self.dtype = DataType.FLOAT
        self.is_shape_tensor = False

    def get_dimension_name(self, index: int) -> str | None:
        return self.names[index]


class INetworkDefinition:
    def __init__(self, flags: int) -> None:
        self.flags = flags
        self.behaviour = ""
        self.num_inputs, self.num_outputs = 1, 1

    def get_flag(self, flag: int) -> bool:
        return bool(self.flags >> int(flag) & 1)

    def get_input(self, index: int) -> Tensor:
        return Tensor("x", (-1, 3, -1, -1), ("batch", "", "height", "width"))

    def get_output(self, index: int) -> Tensor:
        return Tensor("y", (-1, 8), ("batch", ""))


class _ParserError:
    def __init__(self, desc: str, *, node: int, name: str, operator: str) -> None:
        self._values = (desc, node, name, operator)

    def desc(self) -> str:
        return self._values[0]

    def node(self) -> int:
        return self._values[1]

    def node_name(self) -> str:
        return self._values[2]

    def node_operator(self) -> str:
        return self._values[3]


class OnnxParser:
    def __init__(self, network: INetworkDefinition, logger: ILogger) -> None:
        self.network, self.logger = network, logger
        self.errors: list[_ParserError] = []

    @property
    def num_errors(self) -> int:
        return len(self.errors)

    def get_error(self, index: int) -> _ParserError:
        return self.errors[index]

    def parse_from_file(self, model: str) -> bool:
        self.network.behaviour = Path(model).stem
        if self.network.behaviour == "unsupported":
            self.logger.log(Severity.ERROR, 'ModelImporter.cpp:140: While parsing node number 7 [Fancy -> "z"]:')
            text = 'creator && "Plugin not found, are the plugin name, version, and namespace correct?"'
            self.errors = [
                _ParserError(text, node=2, name="fancy", operator="Fancy"),
                _ParserError(text, node=7, name="", operator="Fancy"),
            ]
        if self.network.behaviour == "empty":
            self.network.num_outputs = 0
        return not self.errors


class HostMemory(bytes):
    @property
    def nbytes(self) -> int:
        return len(self)


class Builder:
    num_DLA_cores = 2

    def __init__(self, logger: ILogger) -> None:
        self.logger = logger

    def create_network(self, flags: int = 0) -> INetworkDefinition:
        return INetworkDefinition(flags)

    def create_builder_config(self) -> IBuilderConfig:
        return IBuilderConfig(self.logger)

    def create_optimization_profile(self) -> IOptimizationProfile:
        return IOptimizationProfile()

    def build_serialized_network(self, network: INetworkDefinition, config: IBuilderConfig) -> HostMemory | None:
        what = network.behaviour
        if what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "crash":
            print("Myelin: something went wrong", flush=True)
            os.kill(os.getpid(), signal.SIGSEGV)
        if what == "stuck":
            time.sleep(60)
        for severity, text in LOG.get(what, ()):
            self.logger.log(severity, text)
        if what in ("none", "silent", "memory"):
            return None
        if not _steps(config.progress_monitor, count=2000 if what == "slow" else 4):
            self.logger.log(Severity.ERROR, "Build canceled by user")
            return None
        return HostMemory(f"ftrt plan of {what}, typed {network.flags}".encode())


def _steps(monitor: object, *, count: int) -> bool:
    if monitor is None:
        return True
    monitor.phase_start("Building engine", None, 2)
    monitor.phase_start("Timing", "Building engine", count)
    for step in range(count):
        time.sleep(0.01)
        if not monitor.step_complete("Timing", step):
            return False
    monitor.phase_finish("Timing")
    monitor.step_complete("Building engine", 1)
    monitor.phase_finish("Building engine")
    return True


LAST: list[IBuilderConfig] = []
NOISE = "[checkMacros.cpp::catchCudaError::250] Error Code 1: Cuda Runtime (cudaError 35: driver is insufficient)"
LOG = {
    "none": [
        (Severity.ERROR, "[tacticSupply.cpp::f::48] Error Code 2: Internal Error (Assertion !x.empty() failed. "
         "nms_0 has no runners that implement it In f at /_src/optimizer/x.cpp:48)"),
        (Severity.ERROR, NOISE),
    ],
    "memory": [(Severity.ERROR, "Error Code 1: Myelin (OutOfMemory (Requested size was 10530528 bytes.))")],
    "inconsistent": [
        (Severity.WARNING, "Profile kMAX values are not self-consistent. IShuffleLayer rs1: reshaping failed"),
    ],
    "uint8": [(Severity.WARNING, "TensorRT supports UINT8 zero_point only on DLA. Defaulting to INT8 instead.")],
    "layers": [
        (
            Severity.VERBOSE,
            "Layers:\nName: fused, LayerType: correlation, Inputs: [ { Name: x, Dimensions: [1,3,8,8], Datatype: Int8, "
            "Format: Row }], Constants: [ { Name: w, Dimensions: [8,3], Datatype: Int8, Format: Row }], Outputs: [{ "
            "Name: y, Dimensions: [1,8], Datatype: Float, Format: Row }], TacticName: t, StreamId: 0, Metadata: "
            "[ONNX Layer: /conv1/Conv]\x1f[ONNX Layer: /act/Mul]",
        ),
        (Severity.INFO, "Total Activation Memory: 2097152 bytes"),
    ],
}  # fmt: skip


class Runtime:
    pass
