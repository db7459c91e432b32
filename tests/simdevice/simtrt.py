"""A stand-in for TensorRT's Python runtime: OUR READING of its API, never a TensorRT run.

``make_tensorrt(sim)`` gives a module with ``Runtime``, ``ICudaEngine`` and ``IExecutionContext`` whose members are
named as the real ones. A "plan" is ``ftrt`` and a JSON manifest that names an ONNX file. Inference is put on the
stream of the stand-in driver and computes real outputs with ONNX Runtime in the memory behind the device addresses,
when the driver gets to it. Like TensorRT it answers misuse with False or None and a log line. What would be undefined
on a GPU (bad addresses, a graph of a context that has changed, scratch memory in use twice, no current context) is
noted in ``module.sim.violations``, which tests expect to be empty.
"""

from __future__ import annotations

import ctypes
import enum
import itertools
import json
import types
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from simdevice.simcuda import SimCuda

MAGIC = b"ftrt"
HOST_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
ORT_TYPES = {
    "tensor(float)": "FLOAT",
    "tensor(float16)": "HALF",
    "tensor(int8)": "INT8",
    "tensor(int32)": "INT32",
    "tensor(int64)": "INT64",
    "tensor(bool)": "BOOL",
    "tensor(uint8)": "UINT8",
}
NUMPY = {"FLOAT": "f4", "HALF": "f2", "INT8": "i1", "INT32": "i4", "INT64": "i8", "BOOL": "?", "UINT8": "u1"}

Range = tuple[Sequence[int], Sequence[int], Sequence[int]]


def write_plan(
    path: Path,
    onnx: Path,
    *,
    profiles: Sequence[Mapping[str, Range]] = (),
    values: Sequence[Mapping[str, Range]] = (),
    data_dependent: Sequence[str] = (),
    version: str = "10.3.0",
    capability: Sequence[int] = (8, 7),
    scratch_bytes: int = 4096,
    capturable: bool | str = True,
    overrides: Mapping[str, Mapping[str, str]] | None = None,
) -> Path:
    """Write a plan: ``profiles`` give (min, opt, max) of every dynamic input, ``values`` of inputs read by the CPU.

    ``capturable`` False says no beforehand (as only RTX can), "fails" breaks the capture.
    """
    manifest = {
        "onnx": str(Path(onnx).resolve()),
        "profiles": [dict(profile) for profile in profiles],
        "values": [dict(item) for item in values],
        "data_dependent": list(data_dependent),
        "version": version,
        "capability": list(capability),
        "scratch_bytes": scratch_bytes,
        "capturable": capturable,
        "overrides": {name: dict(fields) for name, fields in (overrides or {}).items()},
    }
    path.write_bytes(MAGIC + json.dumps(manifest).encode())
    return path


class SimState:
    """What tests look at. ``compute`` False leaves outputs as they are, to measure everything else."""

    def __init__(self, cuda: SimCuda) -> None:
        self.cuda = cuda
        self.compute = True
        self.violations: list[str] = []
        self.live = {"runtimes": 0, "engines": 0, "contexts": 0}
        self.runs = 0
        self.scratch: dict[int, tuple[int, int]] = {}  # address -> (stream, runs that have not happened yet)
        self.fail_next: str | None = None
        self.log_sink: Any = None
        self.calls: dict[int, Any] = {}
        self.ids = itertools.count(1)
        self.trampoline = HOST_FUNCTION(self._call)
        library = cuda.library
        library.cuLaunchHostFunc.argtypes = (ctypes.c_void_p, HOST_FUNCTION, ctypes.c_void_p)
        library.cuCtxGetCurrent.argtypes = (ctypes.POINTER(ctypes.c_void_p),)
        library.cuStreamIsCapturing.argtypes = (ctypes.c_void_p, ctypes.POINTER(ctypes.c_int))
        library.cuStreamSynchronize.argtypes = (ctypes.c_void_p,)

    def violate(self, text: str) -> None:
        self.violations.append(text)

    def log(self, severity: str, text: str) -> None:
        if self.log_sink is not None:
            self.log_sink.log(Severity[severity], text)

    def has_context(self) -> bool:
        current = ctypes.c_void_p()
        return self.cuda.library.cuCtxGetCurrent(ctypes.byref(current)) == 0 and bool(current.value)

    def is_capturing(self, stream: int) -> bool:
        status = ctypes.c_int()
        return self.cuda.library.cuStreamIsCapturing(stream, ctypes.byref(status)) == 0 and status.value == 1

    def launch(self, stream: int, function: Any) -> tuple[bool, int]:
        """Put a Python function on a stream. The number lets its owner drop it (functions in graphs run again)."""
        number = next(self.ids)
        self.calls[number] = function
        return self.cuda.library.cuLaunchHostFunc(stream, self.trampoline, number) == 0, number

    def _call(self, number: int) -> None:
        function = self.calls.get(number)
        if function is None:
            self.violate("a graph ran whose execution context is gone")
            return
        function()


class Severity(enum.IntEnum):
    INTERNAL_ERROR = 0
    ERROR = 1
    WARNING = 2
    INFO = 3
    VERBOSE = 4


DataType = enum.Enum("DataType", [*NUMPY, "BF16", "FP8", "INT4"])
TensorIOMode = enum.Enum("TensorIOMode", ["NONE", "INPUT", "OUTPUT"])
TensorLocation = enum.Enum("TensorLocation", ["DEVICE", "HOST"])
TensorFormat = enum.Enum("TensorFormat", ["LINEAR", "CHW32", "HWC8"])
Strategy = enum.Enum("ExecutionContextAllocationStrategy", ["STATIC", "ON_PROFILE_CHANGE", "USER_MANAGED"])


class PybindBase:
    """Bases that Python code extends: unusable unless their ``__init__`` was called, as pybind11 demands."""

    def __init__(self) -> None:
        self._ready = True


def check_base(value: Any) -> Any:
    if value is not None and not getattr(value, "_ready", False):
        raise TypeError("__init__() of the TensorRT base class was not called")
    return value


class Engine:
    """ICudaEngine: what a plan says about itself, and the session that computes."""

    def __init__(self, sim: SimState, manifest: dict[str, Any]) -> None:
        import onnxruntime as ort

        options = ort.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        options.log_severity_level = 4
        self.sim, self.manifest = sim, manifest
        self.session = ort.InferenceSession(manifest["onnx"], options, providers=["CPUExecutionProvider"])
        self.inputs = {arg.name: arg for arg in self.session.get_inputs()}
        self.outputs = {arg.name: arg for arg in self.session.get_outputs()}
        self.names = [*self.inputs, *self.outputs]
        self.host = {name for item in manifest["values"] for name in item}
        self.known_shapes: dict[Any, dict[str, tuple[int, ...]]] = {}
        self.name = "simulated engine"
        self.num_layers = 3
        sim.live["engines"] += 1

    def __del__(self) -> None:
        self.sim.live["engines"] -= 1
        if not self.sim.has_context():
            self.sim.violate("an engine was destroyed without a current CUDA context")

    num_io_tensors = property(lambda self: len(self.names))
    num_optimization_profiles = property(lambda self: max(1, len(self.manifest["profiles"])))
    device_memory_size_v2 = property(lambda self: self.manifest["scratch_bytes"])

    def get_tensor_name(self, index: int) -> str:
        return self.names[index]

    def get_tensor_mode(self, name: str) -> Any:
        return TensorIOMode.INPUT if name in self.inputs else TensorIOMode.OUTPUT

    def get_tensor_dtype(self, name: str) -> Any:
        changed = self.manifest["overrides"].get(name, {}).get("dtype")
        return DataType[changed or ORT_TYPES[self.argument(name).type]]

    def get_tensor_format(self, name: str) -> Any:
        return TensorFormat[self.manifest["overrides"].get(name, {}).get("format", "LINEAR")]

    def get_tensor_location(self, name: str) -> Any:
        return TensorLocation.HOST if name in self.host else TensorLocation.DEVICE

    def is_shape_inference_io(self, name: str) -> bool:
        return name in self.host

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return tuple(dim if isinstance(dim, int) else -1 for dim in self.argument(name).shape)

    def get_tensor_profile_shape(self, name: str, profile_index: int) -> list[tuple[int, ...]]:
        if name not in self.inputs:
            raise RuntimeError(f"{name} is not an input")
        return [tuple(item) for item in self.manifest["profiles"][profile_index][name]]

    def get_tensor_profile_values(self, profile_index: int, name: str) -> list[list[int]]:
        assert isinstance(profile_index, int), "by position the real call takes (profile, name)"
        return [list(item) for item in self.manifest["values"][profile_index].get(name, [])]

    def create_execution_context(self, strategy: Any = Strategy.STATIC) -> Context | None:
        if self.sim.fail_next == "context":
            self.sim.fail_next = None
            self.sim.log("ERROR", "IExecutionContext: Error Code 2: OutOfMemory (Requested size was 1048576 bytes.)")
            return None
        return Context(self, strategy)

    def argument(self, name: str) -> Any:
        return self.inputs.get(name) or self.outputs[name]

    def numpy_type(self, name: str) -> np.dtype[Any]:
        return np.dtype(NUMPY[self.get_tensor_dtype(name).name])

    def output_shapes(self, shapes: Mapping[str, tuple[int, ...]], host: Mapping[str, np.ndarray]) -> dict[str, Any]:
        """Shapes of all outputs, found by running zeros through the model once for each set of shapes."""
        key = (tuple(sorted(shapes.items())), tuple(sorted((n, v.tobytes()) for n, v in host.items())))
        if key not in self.known_shapes:
            feeds = {n: host.get(n, np.zeros(shapes[n], self.numpy_type(n))) for n in self.inputs}
            results = self.session.run(list(self.outputs), feeds)
            self.known_shapes[key] = {
                name: tuple(array.shape) for name, array in zip(self.outputs, results, strict=True)
            }
        found = dict(self.known_shapes[key])
        for name in self.manifest["data_dependent"]:
            found[name] = (-1, *found[name][1:])
        return found


class Context:
    """IExecutionContext: shapes, addresses and one enqueue call."""

    def __init__(self, engine: Engine, strategy: Any) -> None:
        self.engine, self.sim = engine, engine.sim
        self.strategy = strategy
        self.profile = 0
        self.shapes = {n: engine.get_tensor_shape(n) for n in engine.inputs if -1 not in engine.get_tensor_shape(n)}
        self.addresses: dict[str, int] = {}
        self.allocators: dict[str, Any] = {}
        self.scratch = (0, 0)
        self.generation = 0
        self.captured: list[int] = []
        self.pending: tuple[int, int] = (0, 0)
        self._profiler: Any = None
        self.sim.live["contexts"] += 1
        if not self.sim.has_context():
            self.sim.violate("an execution context was made without a current CUDA context")

    def __del__(self) -> None:
        self.sim.live["contexts"] -= 1
        for number in self.captured:
            self.sim.calls.pop(number, None)
        if self.pending[1]:
            self.sim.violate("an execution context was destroyed while its work was running")
        if not self.sim.has_context():
            self.sim.violate("an execution context was destroyed without a current CUDA context")

    @property
    def profiler(self) -> Any:
        return self._profiler

    @profiler.setter
    def profiler(self, value: Any) -> None:
        self._profiler = check_base(value)

    def set_device_memory(self, memory: int, size: int) -> None:
        self.scratch = (int(memory), int(size))

    def set_optimization_profile_async(self, profile_index: int, stream_handle: int) -> bool:
        if not 0 <= profile_index < self.engine.num_optimization_profiles or not stream_handle:
            self.sim.log("ERROR", "IExecutionContext::setOptimizationProfileAsync: Error Code 3: API Usage Error")
            return False
        self.profile, self.generation = profile_index, self.generation + 1
        return True

    def set_input_shape(self, name: str, shape: Sequence[int]) -> bool:
        shape = tuple(shape)
        limits = self._limits("profiles").get(name)
        fixed = self.engine.get_tensor_shape(name) if name in self.engine.inputs else ()
        if name not in self.engine.inputs or len(shape) != len(fixed):
            self.sim.log("ERROR", f"IExecutionContext::setInputShape: Error Code 3: API Usage Error (no input {name})")
            return False
        static = all(want in (-1, got) for want, got in zip(fixed, shape, strict=True))
        if not static or (limits and not _inside(shape, limits)):
            self.sim.log(
                "ERROR",
                f"IExecutionContext::setInputShape: Error Code 3: API Usage Error (Parameter check failed, condition: "
                f"engineDims.d[i] == dims.d[i]. Static or profile dimension mismatch while setting input shape for "
                f"{name}. Set dimensions are {list(shape)}.)",
            )
            return False
        if self.shapes.get(name) != shape:
            self.shapes[name], self.generation = shape, self.generation + 1
        return True

    def set_tensor_address(self, name: str, memory: int) -> bool:
        if name not in self.engine.names:
            self.sim.log("ERROR", f"IExecutionContext::setTensorAddress: Error Code 3: API Usage Error (no {name})")
            return False
        if self.addresses.get(name) != int(memory):
            self.addresses[name], self.generation = int(memory), self.generation + 1
        return True

    def set_output_allocator(self, name: str, output_allocator: Any) -> bool:
        self.allocators[name] = check_base(output_allocator)
        return name in self.engine.outputs

    def infer_shapes(self) -> list[str]:
        missing = [name for name in self.engine.inputs if name not in self.shapes]
        missing += [name for name in self.engine.host if not self.addresses.get(name)]
        if not missing:
            self._output_shapes()
        return missing

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        if name in self.engine.inputs:
            return self.shapes.get(name, self.engine.get_tensor_shape(name))
        if any(n not in self.shapes for n in self.engine.inputs):
            return self.engine.get_tensor_shape(name)
        return self._output_shapes()[name]

    def execute_async_v3(self, stream_handle: int) -> bool:
        stream = int(stream_handle)
        if self.sim.fail_next == "execute":
            self.sim.fail_next = None
            self.sim.log("ERROR", "IExecutionContext::enqueueV3: Error Code 1: Cask (no kernel could be run)")
            return False
        problem = self._problem(stream)
        if problem is not None:
            self.sim.log("ERROR", f"IExecutionContext::enqueueV3: Error Code 3: API Usage Error ({problem})")
            return False
        capturing = self.sim.is_capturing(stream)
        if capturing and (self.engine.manifest["data_dependent"] or self.engine.manifest["capturable"] is not True):
            self.sim.cuda.library.cuStreamSynchronize(stream)  # what real engines do here breaks the capture
            self.sim.log("ERROR", "IExecutionContext::enqueueV3: Error Code 1: Cuda Runtime (operation not permitted)")
            return False
        if self.engine.manifest["data_dependent"]:
            return self._execute_found(stream)
        shapes, addresses, generation = dict(self.shapes), dict(self.addresses), self.generation
        outputs = self._output_shapes()
        host = self._host_values()

        mine = weakref.ref(self)  # a graph must not keep its context alive: it does not on a GPU

        def work() -> None:
            context = mine()
            if context is None:
                return  # its __del__ noted the violation
            if capturing and generation != context.generation:
                context.sim.violate("a graph ran although the context it was captured from has changed")
            context._compute(shapes, addresses, outputs, host)
            if not capturing:
                context._settle(number)

        ok, number = self.sim.launch(stream, work)
        if capturing:
            self.captured.append(number)
        elif ok:
            self.pending = (stream, self.pending[1] + 1)
            _, count = self.sim.scratch.get(self.scratch[0], (stream, 0))
            self.sim.scratch[self.scratch[0]] = (stream, count + 1)
            if self._profiler is not None:  # with a profiler the call waits, so that times can be reported
                self.sim.cuda.library.cuStreamSynchronize(stream)
                for index in range(self.engine.num_layers):
                    self._profiler.report_layer_time(f"layer {index}", 0.5 + index)
        return ok

    def is_stream_capturable(self, stream: int) -> bool:
        return bool(self.engine.manifest["capturable"])

    def _settle(self, number: int) -> None:
        self.sim.calls.pop(number, None)
        self.pending = (self.pending[0], self.pending[1] - 1)
        owner, count = self.sim.scratch[self.scratch[0]]
        self.sim.scratch[self.scratch[0]] = (owner, count - 1)

    def _limits(self, kind: str) -> dict[str, Any]:
        items = self.engine.manifest[kind]
        return items[self.profile] if items else {}

    def _host_values(self) -> dict[str, np.ndarray]:
        values = {}
        for name in self.engine.host:
            dtype, shape = self.engine.numpy_type(name), self.shapes[name]
            count = int(np.prod(shape)) * dtype.itemsize
            values[name] = np.frombuffer(ctypes.string_at(self.addresses[name], count), dtype).reshape(shape).copy()
        return values

    def _output_shapes(self) -> dict[str, Any]:
        import onnxruntime.capi.onnxruntime_pybind11_state as state

        host = self._host_values()
        for name, value in host.items():
            limits = self._limits("values").get(name)
            if limits and not _inside(tuple(value.reshape(-1)), limits):
                raise RuntimeError(f"values of {name} are outside the profile")
        try:
            return self.engine.output_shapes(self.shapes, host)
        except (state.Fail, state.InvalidArgument, state.RuntimeException) as error:
            self.sim.log("ERROR", "IExecutionContext::inferShapes: Error Code 7: Internal Error (shapes do not fit)")
            raise RuntimeError("infer_shapes failed") from error

    def _problem(self, stream: int) -> str | None:
        """Why this enqueue is refused; what a GPU would not notice is a violation as well."""
        engine, sim = self.engine, self.sim
        if not sim.has_context():
            sim.violate("inference without a current CUDA context")
            return "no CUDA context"
        for name in engine.inputs:
            if name not in self.shapes:
                return f"Input dimensions of {name} have not been specified"
        outputs = self._output_shapes()
        for name in engine.names:
            if self.allocators.get(name) is not None:
                continue
            if not self.addresses.get(name):
                return f"Neither address or allocator is set for {name}"
            shape = outputs.get(name) or self.shapes.get(name, ())
            need = int(np.prod(shape)) * engine.numpy_type(name).itemsize
            if name in engine.host:
                continue
            _, nbytes = sim.cuda.resolve(self.addresses[name])
            if nbytes < max(need, 1) or self.addresses[name] % 256:
                sim.violate(f"tensor {name}: {need} bytes needed, {nbytes} usable at its address")
                return f"bad address of {name}"
        if self.strategy is Strategy.USER_MANAGED:
            need = engine.device_memory_size_v2
            if self.scratch[1] < need or sim.cuda.resolve(self.scratch[0])[1] < need:
                sim.violate("the activation memory is missing or too small")
                return "no device memory"
        for other, count in (self.pending, sim.scratch.get(self.scratch[0], (0, 0))):
            if count and other != stream:
                sim.violate("one context or activation memory is used on two streams at once")
        return None

    def _compute(
        self, shapes: dict[str, Any], addresses: dict[str, int], outputs: dict[str, Any], host: dict[str, np.ndarray]
    ) -> None:
        self.sim.runs += 1
        if self.sim.fail_next == "kernel":
            self.sim.fail_next = None
            self.sim.cuda.set(poison=719)
        if not self.sim.compute:
            return
        feeds = {
            n: host[n] if n in host else self._memory(n, addresses[n], shapes[n]).copy() for n in self.engine.inputs
        }
        results = self._run(feeds)
        for name, value in zip(self.engine.outputs, results, strict=True):
            if tuple(value.shape) != tuple(outputs[name]):
                self.sim.violate(f"output {name} became {value.shape}, expected {outputs[name]}")
                return
            self._memory(name, addresses[name], value.shape)[...] = value

    def _run(self, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
        return self.engine.session.run(list(self.engine.outputs), feeds)

    def _execute_found(self, stream: int) -> bool:
        """Engines with outputs of unknown size wait for the GPU in the call itself, to learn the size."""
        self.sim.cuda.library.cuStreamSynchronize(stream)
        host = self._host_values()
        feeds = {
            n: host[n] if n in host else self._memory(n, self.addresses[n], self.shapes[n]).copy()
            for n in self.engine.inputs
        }
        self.sim.runs += 1
        for name, value in zip(self.engine.outputs, self._run(feeds), strict=True):
            address = self.addresses.get(name, 0)
            allocator = self.allocators.get(name)
            if allocator is not None:
                address = allocator.reallocate_output_async(name, address, max(value.nbytes, 1), 256, stream)
                if not address:
                    self.sim.log(
                        "ERROR", f"IExecutionContext::enqueueV3: the output allocator gave no memory for {name}"
                    )
                    return False
                if self.sim.cuda.resolve(address)[1] < value.nbytes:
                    self.sim.violate(f"the allocator gave too little memory for {name}")
                    return False
            if value.nbytes:
                self._memory(name, address, value.shape)[...] = value
            if allocator is not None:
                allocator.notify_shape(name, value.shape)
        return True

    def _memory(self, name: str, address: int, shape: Sequence[int]) -> np.ndarray:
        dtype = self.engine.numpy_type(name)
        count = int(np.prod(shape)) * dtype.itemsize
        if not count:
            return np.empty(shape, dtype)
        host, nbytes = self.sim.cuda.resolve(address)
        if nbytes < count:
            self.sim.violate(f"tensor {name}: its memory was freed before the GPU used it")
            return np.zeros(shape, dtype)
        return np.ctypeslib.as_array((ctypes.c_uint8 * count).from_address(host)).view(dtype).reshape(shape)


def _inside(shape: Sequence[int], limits: Range) -> bool:
    return len(shape) == len(limits[0]) and all(
        low <= dim <= high for low, dim, high in zip(limits[0], shape, limits[2], strict=True)
    )


def make_tensorrt(cuda: SimCuda, *, version: str = "10.3.0") -> types.ModuleType:
    """A module to use in place of ``tensorrt``; ``module.sim`` is its SimState."""
    sim = SimState(cuda)
    module: Any = types.ModuleType(f"simulated_tensorrt_{id(sim)}")

    class ILogger(PybindBase):
        Severity = Severity

        def log(self, severity: Any, msg: str) -> None: ...

    class IOutputAllocator(PybindBase): ...

    class IProfiler(PybindBase): ...

    class Runtime:
        num_DLA_cores = 0

        def __init__(self, logger: Any) -> None:
            self.logger = check_base(logger)
            sim.log_sink = logger
            sim.live["runtimes"] += 1
            self.DLA_core = -1
            self.engine_host_code_allowed = False

        def __del__(self) -> None:
            sim.live["runtimes"] -= 1

        def deserialize_cuda_engine(self, serialized_engine: Any) -> Engine | None:
            data = bytes(serialized_engine)
            if not sim.has_context():
                sim.violate("a plan was read without a current CUDA context")
            try:
                manifest = json.loads(data[len(MAGIC) :]) if data[: len(MAGIC)] == MAGIC else None
            except ValueError:
                manifest = None
            if sim.fail_next == "load":
                sim.fail_next = None
                sim.log("ERROR", "[defaultAllocator.cpp::allocate] Error Code 1: Cuda Runtime (out of memory)")
                sim.log("ERROR", "Requested amount of GPU memory (1610612736 bytes) could not be allocated.")
                return None
            if manifest is None:
                sim.log("ERROR", "IRuntime::deserializeCudaEngine: Error Code 1: Serialization (size does not match)")
                return None
            if manifest["version"] != version:
                sim.log(
                    "ERROR",
                    "IRuntime::deserializeCudaEngine: Error Code 6: API Usage Error (The engine plan file is not "
                    f"compatible with this version of TensorRT, expecting library version {version} got "
                    f"{manifest['version']}, please rebuild.)",
                )
                return None
            return Engine(sim, manifest)

    empty = types.SimpleNamespace()
    for name, value in {
        "__version__": version,
        "sim": sim,
        "ILogger": ILogger,
        "IOutputAllocator": IOutputAllocator,
        "IProfiler": IProfiler,
        "Runtime": Runtime,
        "DataType": DataType,
        "TensorIOMode": TensorIOMode,
        "TensorLocation": TensorLocation,
        "TensorFormat": TensorFormat,
        "ExecutionContextAllocationStrategy": Strategy,
        # Only there; simbuild has the build half.
        "Builder": object,
        "OnnxParser": object,
        "IBuilderConfig": type("IBuilderConfig", (), {"progress_monitor": None}),
        "IProgressMonitor": PybindBase,
        "BuilderFlag": types.SimpleNamespace(FP16=1, INT8=2),
        "HardwareCompatibilityLevel": empty,
        "DeviceType": types.SimpleNamespace(GPU=0, DLA=1),
        "NetworkDefinitionCreationFlag": types.SimpleNamespace(STRONGLY_TYPED=1),
    }.items():
        setattr(module, name, value)
    return module
