"""The CUDA driver through ctypes: libcuda.so.1 is part of every driver and JetPack, so nothing needs installing.

PyCUDA has no wheel for aarch64 and no graph calls, cuda-bindings must fit the installed CUDA; the C interface used
here has been stable since CUDA 11.4. ctypes lets other Python threads run during each call.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, byref, c_char_p, c_float, c_int, c_size_t, c_uint, c_uint64, c_ulonglong, c_void_p
from typing import Any

from edgeds.engines.cuda_driver import (
    CAPTURE_THREAD_LOCAL,
    EVENT_BLOCKING_SYNC,
    EVENT_DISABLE_TIMING,
    HOST_ALLOC_DEVICEMAP,
    HOST_ALLOC_PORTABLE,
    STREAM_NON_BLOCKING,
    CudaCallError,
)
from edgeds.errors import DeviceError

LIBRARY = "libcuda.so.1"

_ADDRESS = c_uint64  # CUdeviceptr
_HANDLE = c_void_p

# Exported symbol -> argument types. Suffixed names are the current forms of calls whose first form is still exported.
_CALLS: dict[str, tuple[Any, ...]] = {
    "cuInit": (c_uint,),
    "cuDriverGetVersion": (POINTER(c_int),),
    "cuDeviceGetCount": (POINTER(c_int),),
    "cuDeviceGetName": (c_char_p, c_int, c_int),
    "cuDeviceGetAttribute": (POINTER(c_int), c_int, c_int),
    "cuDevicePrimaryCtxRetain": (POINTER(_HANDLE), c_int),
    "cuDevicePrimaryCtxRelease_v2": (c_int,),
    "cuCtxPushCurrent_v2": (_HANDLE,),
    "cuCtxPopCurrent_v2": (POINTER(_HANDLE),),
    "cuMemGetInfo_v2": (POINTER(c_size_t), POINTER(c_size_t)),
    "cuMemAlloc_v2": (POINTER(_ADDRESS), c_size_t),
    "cuMemFree_v2": (_ADDRESS,),
    "cuMemHostAlloc": (POINTER(_HANDLE), c_size_t, c_uint),
    "cuMemHostGetDevicePointer_v2": (POINTER(_ADDRESS), _HANDLE, c_uint),
    "cuMemFreeHost": (_HANDLE,),
    "cuMemcpyHtoDAsync_v2": (_ADDRESS, _HANDLE, c_size_t, _HANDLE),
    "cuMemcpyDtoHAsync_v2": (_HANDLE, _ADDRESS, c_size_t, _HANDLE),
    "cuStreamCreate": (POINTER(_HANDLE), c_uint),
    "cuStreamDestroy_v2": (_HANDLE,),
    "cuStreamSynchronize": (_HANDLE,),
    "cuStreamWaitEvent": (_HANDLE, _HANDLE, c_uint),
    "cuEventCreate": (POINTER(_HANDLE), c_uint),
    "cuEventDestroy_v2": (_HANDLE,),
    "cuEventRecord": (_HANDLE, _HANDLE),
    "cuEventSynchronize": (_HANDLE,),
    "cuEventElapsedTime": (POINTER(c_float), _HANDLE, _HANDLE),
    "cuStreamBeginCapture_v2": (_HANDLE, c_int),
    "cuStreamEndCapture": (_HANDLE, POINTER(_HANDLE)),
    "cuGraphInstantiateWithFlags": (POINTER(_HANDLE), _HANDLE, c_ulonglong),
    "cuGraphDestroy": (_HANDLE,),
    "cuGraphLaunch": (_HANDLE, _HANDLE),
    "cuGraphExecDestroy": (_HANDLE,),
}


class CtypesDriver:
    """See ``Driver``. Raises DeviceError where libcuda is missing or too old, CudaCallError where CUDA cannot start."""

    name = "ctypes"

    def __init__(self, library: str | None = None) -> None:
        path = library or LIBRARY
        try:
            self._library = ctypes.CDLL(path)
        except OSError as error:
            raise DeviceError(
                f"no CUDA driver: {path} cannot be loaded ({error}); install the NVIDIA driver, on a Jetson JetPack, "
                "in a container start it with the nvidia runtime"
            ) from error
        for symbol, types in _CALLS.items():
            try:
                function = getattr(self._library, symbol)
            except AttributeError as error:
                raise DeviceError(f"{path} has no {symbol}; edgeds needs a driver for CUDA 11.4 or newer") from error
            function.argtypes, function.restype = types, c_int
        self._library.cuGetErrorName.argtypes = (c_int, POINTER(c_char_p))
        self._library.cuGetErrorName.restype = c_int
        # Looked up once: these run for every inference.
        self._copy_in = self._library.cuMemcpyHtoDAsync_v2
        self._copy_out = self._library.cuMemcpyDtoHAsync_v2
        self._push = self._library.cuCtxPushCurrent_v2
        self._pop = self._library.cuCtxPopCurrent_v2
        self._check("cuInit", self._library.cuInit(0))

    def driver_version(self) -> int:
        value = c_int()
        self._check("cuDriverGetVersion", self._library.cuDriverGetVersion(byref(value)))
        return value.value

    def count_devices(self) -> int:
        value = c_int()
        self._check("cuDeviceGetCount", self._library.cuDeviceGetCount(byref(value)))
        return value.value

    def device_name(self, index: int) -> str:
        text = ctypes.create_string_buffer(256)
        self._check("cuDeviceGetName", self._library.cuDeviceGetName(text, len(text), index))
        return text.value.decode("utf-8", "replace")

    def attribute(self, index: int, attribute: int) -> int:
        value = c_int()
        self._check("cuDeviceGetAttribute", self._library.cuDeviceGetAttribute(byref(value), attribute, index))
        return value.value

    def retain(self, index: int) -> Any:
        return self._handle("cuDevicePrimaryCtxRetain", index)

    def release(self, index: int) -> None:
        self._check("cuDevicePrimaryCtxRelease", self._library.cuDevicePrimaryCtxRelease_v2(index))

    def push(self, context: Any) -> None:
        if code := self._push(context):
            raise self._error("cuCtxPushCurrent", code)

    def pop(self) -> None:
        if code := self._pop(None):
            raise self._error("cuCtxPopCurrent", code)

    def memory_info(self) -> tuple[int, int]:
        free, total = c_size_t(), c_size_t()
        self._check("cuMemGetInfo", self._library.cuMemGetInfo_v2(byref(free), byref(total)))
        return free.value, total.value

    def alloc(self, nbytes: int) -> int:
        address = _ADDRESS()
        self._check("cuMemAlloc", self._library.cuMemAlloc_v2(byref(address), nbytes))
        return address.value

    def free(self, address: int) -> None:
        self._check("cuMemFree", self._library.cuMemFree_v2(address))

    def alloc_host(self, nbytes: int, *, mapped: bool) -> tuple[int, int]:
        host, device = _HANDLE(), _ADDRESS()
        flags = HOST_ALLOC_PORTABLE | (HOST_ALLOC_DEVICEMAP if mapped else 0)
        self._check("cuMemHostAlloc", self._library.cuMemHostAlloc(byref(host), nbytes, flags))
        if mapped:
            code = self._library.cuMemHostGetDevicePointer_v2(byref(device), host, 0)
            if code:
                self._library.cuMemFreeHost(host)
                raise self._error("cuMemHostGetDevicePointer", code)
        return host.value or 0, device.value

    def free_host(self, address: int) -> None:
        self._check("cuMemFreeHost", self._library.cuMemFreeHost(address))

    def copy_in(self, device: int, host: int, nbytes: int, stream: int) -> None:
        if code := self._copy_in(device, host, nbytes, stream):
            raise self._error("cuMemcpyHtoDAsync", code)

    def copy_out(self, host: int, device: int, nbytes: int, stream: int) -> None:
        if code := self._copy_out(host, device, nbytes, stream):
            raise self._error("cuMemcpyDtoHAsync", code)

    def new_stream(self) -> int:
        return self._handle("cuStreamCreate", STREAM_NON_BLOCKING)

    def free_stream(self, stream: int) -> None:
        self._check("cuStreamDestroy", self._library.cuStreamDestroy_v2(stream))

    def sync_stream(self, stream: int) -> None:
        self._check("cuStreamSynchronize", self._library.cuStreamSynchronize(stream))

    def new_event(self, *, timing: bool) -> int:
        return self._handle("cuEventCreate", EVENT_BLOCKING_SYNC | (0 if timing else EVENT_DISABLE_TIMING))

    def free_event(self, event: int) -> None:
        self._check("cuEventDestroy", self._library.cuEventDestroy_v2(event))

    def record_event(self, event: int, stream: int) -> None:
        self._check("cuEventRecord", self._library.cuEventRecord(event, stream))

    def wait_event(self, stream: int, event: int) -> None:
        self._check("cuStreamWaitEvent", self._library.cuStreamWaitEvent(stream, event, 0))

    def sync_event(self, event: int) -> None:
        self._check("cuEventSynchronize", self._library.cuEventSynchronize(event))

    def elapsed_ms(self, begin: int, end: int) -> float:
        value = c_float()
        self._check("cuEventElapsedTime", self._library.cuEventElapsedTime(byref(value), begin, end))
        return value.value

    def begin_capture(self, stream: int) -> None:
        code = self._library.cuStreamBeginCapture_v2(stream, CAPTURE_THREAD_LOCAL)
        self._check("cuStreamBeginCapture", code)

    def end_capture(self, stream: int) -> int:
        graph, executable = _HANDLE(), _HANDLE()
        self._check("cuStreamEndCapture", self._library.cuStreamEndCapture(stream, byref(graph)))
        try:
            code = self._library.cuGraphInstantiateWithFlags(byref(executable), graph, 0)
            self._check("cuGraphInstantiate", code)
        finally:
            self._library.cuGraphDestroy(graph)  # the executable holds its own copy
        return executable.value or 0

    def launch_graph(self, graph: int, stream: int) -> None:
        self._check("cuGraphLaunch", self._library.cuGraphLaunch(graph, stream))

    def free_graph(self, graph: int) -> None:
        self._check("cuGraphExecDestroy", self._library.cuGraphExecDestroy(graph))

    def _handle(self, call: str, argument: int) -> int:
        handle = _HANDLE()
        self._check(call, getattr(self._library, call)(byref(handle), argument))
        return handle.value or 0

    def _check(self, call: str, code: int) -> None:
        if code:
            raise self._error(call, code)

    def _error(self, call: str, code: int) -> CudaCallError:
        text = c_char_p()
        self._library.cuGetErrorName(code, byref(text))
        return CudaCallError(call, code=code, name=(text.value or b"").decode("ascii", "replace"))
