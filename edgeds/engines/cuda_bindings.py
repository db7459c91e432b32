"""The CUDA driver through NVIDIA's cuda-bindings (``cuda.bindings.driver``), 12 or 13."""

from __future__ import annotations

from typing import Any

from edgeds.engines.cuda_driver import (
    EVENT_BLOCKING_SYNC,
    EVENT_DISABLE_TIMING,
    HOST_ALLOC_DEVICEMAP,
    HOST_ALLOC_PORTABLE,
    STREAM_NON_BLOCKING,
    CudaCallError,
)
from edgeds.errors import DeviceError


class BindingsDriver:
    """See ``Driver``. Raises ImportError without cuda-bindings, DeviceError where libcuda cannot be loaded."""

    name = "cuda-bindings"

    def __init__(self) -> None:
        from cuda.bindings import driver

        self._cu: Any = driver
        self._capture_mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        self._attributes: Any = driver.CUdevice_attribute
        try:
            self._call("cuInit", 0)
        except (RuntimeError, OSError) as error:  # cuda-bindings looks for libcuda at the first call
            raise DeviceError(f"cuda-bindings is installed but cannot load the CUDA driver: {error}") from error

    def driver_version(self) -> int:
        return int(self._call("cuDriverGetVersion"))

    def count_devices(self) -> int:
        return int(self._call("cuDeviceGetCount"))

    def device_name(self, index: int) -> str:
        text = self._call("cuDeviceGetName", 256, index)
        return bytes(text).split(b"\0")[0].decode("utf-8", "replace")

    def attribute(self, index: int, attribute: int) -> int:
        return int(self._call("cuDeviceGetAttribute", self._attributes(attribute), index))

    def retain(self, index: int) -> Any:
        return self._call("cuDevicePrimaryCtxRetain", index)

    def release(self, index: int) -> None:
        self._call("cuDevicePrimaryCtxRelease", index)

    def push(self, context: Any) -> None:
        self._call("cuCtxPushCurrent", context)

    def pop(self) -> None:
        self._call("cuCtxPopCurrent")

    def memory_info(self) -> tuple[int, int]:
        free, total = self._call("cuMemGetInfo")
        return int(free), int(total)

    def alloc(self, nbytes: int) -> int:
        return int(self._call("cuMemAlloc", nbytes))

    def free(self, address: int) -> None:
        self._call("cuMemFree", address)

    def alloc_host(self, nbytes: int, *, mapped: bool) -> tuple[int, int]:
        flags = HOST_ALLOC_PORTABLE | (HOST_ALLOC_DEVICEMAP if mapped else 0)
        host = int(self._call("cuMemHostAlloc", nbytes, flags))
        if not mapped:
            return host, 0
        try:
            return host, int(self._call("cuMemHostGetDevicePointer", host, 0))
        except CudaCallError:
            self.free_host(host)
            raise

    def free_host(self, address: int) -> None:
        self._call("cuMemFreeHost", address)

    def copy_in(self, device: int, host: int, nbytes: int, stream: int) -> None:
        self._call("cuMemcpyHtoDAsync", device, host, nbytes, stream)

    def copy_out(self, host: int, device: int, nbytes: int, stream: int) -> None:
        self._call("cuMemcpyDtoHAsync", host, device, nbytes, stream)

    def new_stream(self) -> int:
        return int(self._call("cuStreamCreate", STREAM_NON_BLOCKING))

    def free_stream(self, stream: int) -> None:
        self._call("cuStreamDestroy", stream)

    def sync_stream(self, stream: int) -> None:
        self._call("cuStreamSynchronize", stream)

    def new_event(self, *, timing: bool) -> int:
        return int(self._call("cuEventCreate", EVENT_BLOCKING_SYNC | (0 if timing else EVENT_DISABLE_TIMING)))

    def free_event(self, event: int) -> None:
        self._call("cuEventDestroy", event)

    def record_event(self, event: int, stream: int) -> None:
        self._call("cuEventRecord", event, stream)

    def wait_event(self, stream: int, event: int) -> None:
        self._call("cuStreamWaitEvent", stream, event, 0)

    def sync_event(self, event: int) -> None:
        self._call("cuEventSynchronize", event)

    def elapsed_ms(self, begin: int, end: int) -> float:
        return float(self._call("cuEventElapsedTime", begin, end))

    def begin_capture(self, stream: int) -> None:
        self._call("cuStreamBeginCapture", stream, self._capture_mode)

    def end_capture(self, stream: int) -> int:
        graph = self._call("cuStreamEndCapture", stream)
        try:
            return int(self._call("cuGraphInstantiate", graph, 0))
        finally:
            self._call("cuGraphDestroy", graph)

    def launch_graph(self, graph: int, stream: int) -> None:
        self._call("cuGraphLaunch", graph, stream)

    def free_graph(self, graph: int) -> None:
        self._call("cuGraphExecDestroy", graph)

    def _call(self, call: str, *arguments: Any) -> Any:
        """The value of a call (a tuple when it gives several), or CudaCallError."""
        code, *values = getattr(self._cu, call)(*arguments)
        if code.value:
            raise CudaCallError(call, code=int(code.value), name=code.name)
        return values[0] if len(values) == 1 else tuple(values)
