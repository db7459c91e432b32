"""What every CUDA driver binding offers, in plain integers, and how its failures are told.

Three bindings implement ``Driver``: PyCUDA, NVIDIA's cuda-bindings, and ctypes over libcuda itself. Streams, events,
graphs and device addresses are integers (the driver's own handles); contexts are opaque. Every call raises
``CudaCallError`` on failure and works on the calling thread's current context.
"""

from __future__ import annotations

from typing import Any, Protocol

from edgeds.errors import CudaError

# CUdevice_attribute, CUhostAlloc and CUevent flags, CUstreamCaptureMode: values of the public cuda.h, stable by ABI.
ATTRIBUTE_INTEGRATED = 18
ATTRIBUTE_CAN_MAP_HOST_MEMORY = 19
ATTRIBUTE_CAPABILITY_MAJOR = 75
ATTRIBUTE_CAPABILITY_MINOR = 76
HOST_ALLOC_PORTABLE = 1
HOST_ALLOC_DEVICEMAP = 2
EVENT_BLOCKING_SYNC = 1
EVENT_DISABLE_TIMING = 2
STREAM_NON_BLOCKING = 1
CAPTURE_THREAD_LOCAL = 1

OUT_OF_MEMORY = 2
STICKY_CODES = frozenset({700, 702, 710, 714, 715, 716, 717, 718, 719, 999})
"""Failures after which the process' CUDA context is lost: bad addresses, hung or failed kernels."""

_HINTS = {
    1: "an argument does not fit; this is a fault of the caller or of edgeds",
    3: "the driver is not initialised",
    35: "the driver is older than the CUDA libraries; update it or install the libraries of your JetPack",
    100: "no NVIDIA GPU is visible; in a container start it with the nvidia runtime",
    101: "there is no device of that number",
    201: "no CUDA context is current on this thread",
    209: "a library holds no code for this GPU; install the build for its compute capability",
    304: "the operating system refused; check the permissions of /dev/nvidia* or /dev/nvhost*",
    700: "a kernel used a bad address; the CUDA context is lost, restart the process",
    719: "a kernel failed; the CUDA context is lost, restart the process",
    801: "this device or driver does not support the call",
    802: "the system is not ready for CUDA; wait for the GPU services to start",
    803: "kernel driver and libcuda differ in version; reboot after a driver update",
    999: "the driver is in an unknown state; restart the process, after suspend reboot or reload the driver",
}


class CudaCallError(CudaError):
    """One driver call failed. ``call`` and ``code`` tell which; ``is_sticky`` that the context is lost."""

    def __init__(self, call: str, *, code: int, name: str = "") -> None:
        self.call = call
        self.code = code
        hint = _HINTS.get(code)
        super().__init__(f"{call} failed with {name or 'CUDA error'} ({code}){f': {hint}' if hint else ''}")

    @property
    def is_sticky(self) -> bool:
        return self.code in STICKY_CODES


class Driver(Protocol):
    """One binding of the CUDA driver. Sizes in bytes; ``stream`` is never 0, the default stream."""

    @property
    def name(self) -> str:
        """``pycuda``, ``cuda-bindings`` or ``ctypes``."""
        ...

    def driver_version(self) -> int:
        """CUDA version the driver supports, as 1000 x major + 10 x minor."""
        ...

    def count_devices(self) -> int: ...
    def device_name(self, index: int) -> str: ...
    def attribute(self, index: int, attribute: int) -> int: ...

    def retain(self, index: int) -> Any:
        """The device's primary context, shared with every other library of the process; one more reference."""
        ...

    def release(self, index: int) -> None: ...
    def push(self, context: Any) -> None: ...
    def pop(self) -> None: ...

    def memory_info(self) -> tuple[int, int]:
        """Free and total bytes as the driver sees them."""
        ...

    def alloc(self, nbytes: int) -> int: ...
    def free(self, address: int) -> None: ...

    def alloc_host(self, nbytes: int, *, mapped: bool) -> tuple[int, int]:
        """Page-locked memory: host address, and its device address when ``mapped``, else 0."""
        ...

    def free_host(self, address: int) -> None: ...
    def copy_in(self, device: int, host: int, nbytes: int, stream: int) -> None: ...
    def copy_out(self, host: int, device: int, nbytes: int, stream: int) -> None: ...

    def new_stream(self) -> int: ...
    def free_stream(self, stream: int) -> None: ...
    def sync_stream(self, stream: int) -> None: ...

    def new_event(self, *, timing: bool) -> int: ...
    def free_event(self, event: int) -> None: ...
    def record_event(self, event: int, stream: int) -> None: ...
    def wait_event(self, stream: int, event: int) -> None: ...
    def sync_event(self, event: int) -> None: ...
    def elapsed_ms(self, begin: int, end: int) -> float: ...

    def begin_capture(self, stream: int) -> None: ...

    def end_capture(self, stream: int) -> int:
        """Leave capture mode (always) and return an executable graph."""
        ...

    def launch_graph(self, graph: int, stream: int) -> None: ...
    def free_graph(self, graph: int) -> None: ...
