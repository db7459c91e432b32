"""The CUDA driver through PyCUDA, where an application already uses it. Its primary context is shared, not a new one.

PyCUDA has no calls for graphs. They go straight to libcuda, which is possible because both work on the same driver
handles. PyCUDA's objects free themselves when they are collected; the tables here keep them until they are asked to.
"""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

from edgeds.engines.cuda_ctypes import CtypesDriver
from edgeds.engines.cuda_driver import OUT_OF_MEMORY, STREAM_NON_BLOCKING, CudaCallError

LAUNCH_FAILED = 719
OTHER_ERROR = 1


class PycudaDriver:
    """See ``Driver``. Raises ImportError without PyCUDA."""

    name = "pycuda"

    def __init__(self, library: str | None = None) -> None:
        with warnings.catch_warnings():
            # A PyCUDA that does not fit the driver warns first, then raises ImportError; the error says enough.
            warnings.simplefilter("ignore")
            import pycuda.driver

        self._drv: Any = pycuda.driver
        self._raw = CtypesDriver(library)
        self._call("cuInit", self._drv.init)
        self._streams: dict[int, Any] = {}
        self._events: dict[int, Any] = {}
        self._device: dict[int, Any] = {}
        self._host: dict[int, Any] = {}
        self._contexts: dict[int, list[Any]] = {}

    def driver_version(self) -> int:
        return int(self._drv.get_driver_version())

    def count_devices(self) -> int:
        return int(self._call("cuDeviceGetCount", self._drv.Device.count))

    def device_name(self, index: int) -> str:
        return str(self._call("cuDeviceGetName", self._drv.Device(index).name))

    def attribute(self, index: int, attribute: int) -> int:
        return self._raw.attribute(index, attribute)

    def retain(self, index: int) -> Any:
        context = self._call("cuDevicePrimaryCtxRetain", self._drv.Device(index).retain_primary_context)
        self._contexts.setdefault(index, []).append(context)
        return context

    def release(self, index: int) -> None:
        # Left to its destructor, PyCUDA keeps the reference when another thread collects the object. detach() gives it
        # back at once if the context is current, but counts on the driver to pop it, which a primary context is not.
        context = self._contexts[index].pop()
        self.push(context)
        self._raw.pop()
        self._call("cuDevicePrimaryCtxRelease", context.detach)

    def push(self, context: Any) -> None:
        self._call("cuCtxPushCurrent", context.push)

    def pop(self) -> None:
        self._call("cuCtxPopCurrent", self._drv.Context.pop)

    def memory_info(self) -> tuple[int, int]:
        free, total = self._call("cuMemGetInfo", self._drv.mem_get_info)
        return int(free), int(total)

    def alloc(self, nbytes: int) -> int:
        block = self._call("cuMemAlloc", self._drv.mem_alloc, nbytes)
        self._device[int(block)] = block
        return int(block)

    def free(self, address: int) -> None:
        self._call("cuMemFree", self._device.pop(address).free)

    def alloc_host(self, nbytes: int, *, mapped: bool) -> tuple[int, int]:
        kinds = self._drv.host_alloc_flags
        flags = kinds.PORTABLE | (kinds.DEVICEMAP if mapped else 0)
        array = self._call("cuMemHostAlloc", self._drv.pagelocked_empty, nbytes, np.uint8, mem_flags=flags)
        address = int(array.ctypes.data)
        device = int(self._call("cuMemHostGetDevicePointer", array.base.get_device_pointer)) if mapped else 0
        self._host[address] = array
        return address, device

    def free_host(self, address: int) -> None:
        self._call("cuMemFreeHost", self._host.pop(address).base.free)

    def copy_in(self, device: int, host: int, nbytes: int, stream: int) -> None:
        source = (ctypes.c_char * nbytes).from_address(host)
        self._call("cuMemcpyHtoDAsync", self._drv.memcpy_htod_async, device, source, self._streams[stream])

    def copy_out(self, host: int, device: int, nbytes: int, stream: int) -> None:
        target = (ctypes.c_char * nbytes).from_address(host)
        self._call("cuMemcpyDtoHAsync", self._drv.memcpy_dtoh_async, target, device, self._streams[stream])

    def new_stream(self) -> int:
        stream = self._call("cuStreamCreate", self._drv.Stream, STREAM_NON_BLOCKING)
        self._streams[int(stream.handle)] = stream
        return int(stream.handle)

    def free_stream(self, stream: int) -> None:
        del self._streams[stream]

    def sync_stream(self, stream: int) -> None:
        self._call("cuStreamSynchronize", self._streams[stream].synchronize)

    def new_event(self, *, timing: bool) -> int:
        kinds = self._drv.event_flags
        event = self._call(
            "cuEventCreate", self._drv.Event, kinds.BLOCKING_SYNC | (0 if timing else kinds.DISABLE_TIMING)
        )
        self._events[id(event)] = event
        return id(event)

    def free_event(self, event: int) -> None:
        del self._events[event]

    def record_event(self, event: int, stream: int) -> None:
        self._call("cuEventRecord", self._events[event].record, self._streams[stream])

    def wait_event(self, stream: int, event: int) -> None:
        self._call("cuStreamWaitEvent", self._streams[stream].wait_for_event, self._events[event])

    def sync_event(self, event: int) -> None:
        self._call("cuEventSynchronize", self._events[event].synchronize)

    def elapsed_ms(self, begin: int, end: int) -> float:
        return float(self._call("cuEventElapsedTime", self._events[end].time_since, self._events[begin]))

    def begin_capture(self, stream: int) -> None:
        self._raw.begin_capture(stream)

    def end_capture(self, stream: int) -> int:
        return self._raw.end_capture(stream)

    def launch_graph(self, graph: int, stream: int) -> None:
        self._raw.launch_graph(graph, stream)

    def free_graph(self, graph: int) -> None:
        self._raw.free_graph(graph)

    def _call(self, call: str, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Run a PyCUDA function; its exceptions carry no code, only their class tells the kind."""
        drv = self._drv
        try:
            return function(*arguments, **options)
        except drv.MemoryError as error:
            raise CudaCallError(call, code=OUT_OF_MEMORY, name=str(error)) from error
        except drv.LaunchError as error:
            raise CudaCallError(call, code=LAUNCH_FAILED, name=str(error)) from error
        except drv.Error as error:
            raise CudaCallError(call, code=OTHER_ERROR, name=str(error)) from error
