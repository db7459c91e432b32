"""Execution contexts: made, wired to shapes and addresses, and started, every silent False turned into an error."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from edgeds.engines.base import one_line, shape_text
from edgeds.engines.build_log import tap_log
from edgeds.engines.cuda import Cuda
from edgeds.engines.trt_io import Profile, Shape, TensorInfo
from edgeds.engines.trt_load import LoadedPlan, last_words, runtime_error
from edgeds.errors import DeviceError, EdgedsError, InputError


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What all lanes of one engine share. ``compute`` is the one stream that runs inference.

    All contexts work in the same ``scratch`` memory. That is safe because their work is on one stream, one after the
    other, and it is why an engine with four profiles does not need four times the activation memory.
    """

    trt: ModuleType
    cuda: Cuda
    loaded: LoadedPlan
    tensors: Mapping[str, TensorInfo]
    profiles: Sequence[Profile]
    compute: int
    scratch_address: int
    scratch_bytes: int
    where: str

    def nbytes(self, name: str, shape: Shape) -> int:
        """Size of a tensor; 0 while its shape depends on data."""
        if -1 in shape:
            return 0
        return int(np.prod(shape, dtype=np.int64)) * np.dtype(self.tensors[name].dtype).itemsize


def scratch_size(loaded: LoadedPlan) -> int:
    """Bytes of activation memory one execution context needs."""
    # 10.x has both, 11 only the second form.
    if hasattr(loaded.engine, "device_memory_size_v2"):
        return int(loaded.engine.device_memory_size_v2)
    return int(loaded.engine.device_memory_size)


class LiveContext:
    """One execution context in the shared scratch memory. A CUDA context must be current for every call.

    Only this object refers to TensorRT's, so that ``close`` frees it whatever exceptions still remember.
    """

    def __init__(self, machine: Machine, profile: int) -> None:
        self._machine = machine
        strategy = machine.trt.ExecutionContextAllocationStrategy.USER_MANAGED
        with tap_log() as tap:
            self._raw: Any = machine.loaded.engine.create_execution_context(strategy)
            if self._raw is None:
                raise runtime_error(tap, where=machine.where, what="no execution context could be made")
            self._raw.set_device_memory(machine.scratch_address, machine.scratch_bytes)
            if not self._raw.set_optimization_profile_async(profile, machine.compute):
                self.close()
                raise runtime_error(tap, where=machine.where, what=f"profile {profile} could not be chosen")

    def set_shapes(self, shapes: Mapping[str, Shape], *, host_addresses: Mapping[str, int]) -> dict[str, Shape]:
        """Set input shapes (and where shape inputs lie) and return all outputs' shapes; -1 where data decides.

        Raises InputError when the model cannot process these shapes.
        """
        machine = self._machine
        with tap_log() as tap:
            for name, shape in shapes.items():
                if -1 in machine.tensors[name].shape and not self._raw.set_input_shape(name, shape):
                    reason = last_words(tap, "TensorRT gave no reason")
                    raise InputError(
                        f"{machine.where}: input {name!r}: shape {shape_text(shape)} was refused: {reason}"
                    )
            for name, address in host_addresses.items():
                if not self._raw.set_tensor_address(name, address):
                    raise runtime_error(tap, where=machine.where, what=f"the address of {name!r} was refused")
            try:
                missing = self._raw.infer_shapes()
            except RuntimeError as error:
                text = ", ".join(f"{name} {shape_text(shape)}" for name, shape in shapes.items())
                reason = last_words(tap, one_line(error))
                raise InputError(f"{machine.where}: the model cannot process {text}: {reason}") from error
            if missing:
                raise DeviceError(f"{machine.where}: shapes or values are missing for {', '.join(map(str, missing))}")
            outputs = [name for name, info in machine.tensors.items() if not info.is_input]
            return {name: tuple(map(int, self._raw.get_tensor_shape(name))) for name in outputs}

    def set_addresses(self, addresses: Mapping[str, int]) -> None:
        """Tell where the tensors lie."""
        for name, address in addresses.items():
            if not self._raw.set_tensor_address(name, address):
                raise DeviceError(f"{self._machine.where}: TensorRT refused the address of tensor {name!r}")

    def set_allocator(self, name: str, allocator: Any) -> None:
        """Let an output whose shape depends on data ask for its memory."""
        if not self._raw.set_output_allocator(name, allocator):
            raise DeviceError(f"{self._machine.where}: TensorRT refused an allocator for output {name!r}")

    def set_profiler(self, make: Callable[[Any], Any]) -> Any:
        """Give the raw context to something that attaches a profiler; its result must be kept."""
        return make(self._raw)

    def execute(self) -> None:
        """Enqueue one inference on the compute stream. Raises DeviceError or OutOfMemory with TensorRT's reason."""
        with tap_log() as tap:
            if not self._raw.execute_async_v3(self._machine.compute):
                raise runtime_error(tap, where=self._machine.where, what="inference could not be started")

    def is_capturable(self) -> bool:
        """False when TensorRT knows that its work cannot be captured now; only TensorRT-RTX can tell."""
        if not hasattr(self._raw, "is_stream_capturable"):
            return True
        return bool(self._raw.is_stream_capturable(self._machine.compute))

    def close(self) -> None:
        """Free it. Its work must be done."""
        self._raw = None


def largest_bytes(machine: Machine, context: LiveContext, profile: Profile) -> dict[str, int]:
    """Bytes of every tensor at the profile's largest shapes; outputs whose shape depends on data are left out."""
    sizes = {name: machine.nbytes(name, allowed.max) for name, allowed in profile.shapes.items()}
    if any(machine.tensors[name].on_host for name in profile.shapes):
        return sizes  # their values decide the other shapes; buffers grow to what is used
    try:
        found = context.set_shapes({n: a.max for n, a in profile.shapes.items()}, host_addresses={})
    except InputError:
        return sizes  # an engine may be built with a largest shape its graph cannot process
    return sizes | {name: machine.nbytes(name, shape) for name, shape in found.items() if -1 not in shape}


def follows_batch(machine: Machine, context: LiveContext, profile: Profile) -> frozenset[str]:
    """Tensors whose axis 0 is the batch, told by shape inference at two batch sizes; empty when it cannot vary."""
    first = [allowed for allowed in profile.shapes.values() if allowed.max]
    if not first or any(machine.tensors[name].on_host for name in profile.shapes):
        return frozenset()
    low, high = max(a.min[0] for a in first), min(a.max[0] for a in first)
    if low >= high or any(a.min[0] == a.max[0] for a in first):
        return frozenset()
    seen = []
    for rows in (low, high):
        shapes = {name: (rows, *allowed.max[1:]) for name, allowed in profile.shapes.items() if allowed.max}
        try:
            seen.append(context.set_shapes(shapes, host_addresses={}))
        except InputError:
            return frozenset()
    batched = {name for name, shape in seen[0].items() if shape[:1] == (low,) and seen[1][name][:1] == (high,)}
    return frozenset(batched | set(profile.shapes))


def make_allocator(trt: ModuleType, *, grow: Callable[[str, int], int], shapes: dict[str, Shape]) -> Any:
    """An ``IOutputAllocator`` for outputs whose shape depends on data: asks ``grow`` for memory, notes the shapes."""

    class Allocator(trt.IOutputAllocator):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            trt.IOutputAllocator.__init__(self)
            self.error: EdgedsError | None = None

        def reallocate_output(self, tensor_name: str, memory: int, size: int, alignment: int) -> int:
            try:
                return grow(tensor_name, size)
            except EdgedsError as error:  # nothing may be raised into TensorRT; a null address makes it stop
                self.error = error.with_traceback(None)
                return 0

        def reallocate_output_async(self, tensor_name: str, memory: int, size: int, alignment: int, stream: int) -> int:
            return self.reallocate_output(tensor_name, memory, size, alignment)

        def notify_shape(self, tensor_name: str, shape: Iterable[int]) -> None:
            shapes[tensor_name] = tuple(int(dim) for dim in shape)

    return Allocator()
