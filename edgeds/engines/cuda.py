"""CUDA for the engines: one device's primary context, its memory, streams, events and graphs.

``open_cuda`` takes PyCUDA where an application has it, else cuda-bindings, else libcuda through ctypes. The context is
the process' primary one, so memory and streams are shared with PyTorch, PyCUDA and TensorRT. It is pushed on the
calling thread for the time of ``with cuda.current():`` and popped again, also on exceptions: any thread may call.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Literal, TypeVar

from edgeds.engines.cuda_driver import (
    ATTRIBUTE_CAN_MAP_HOST_MEMORY,
    ATTRIBUTE_CAPABILITY_MAJOR,
    ATTRIBUTE_CAPABILITY_MINOR,
    ATTRIBUTE_INTEGRATED,
    OUT_OF_MEMORY,
    CudaCallError,
    Driver,
)
from edgeds.engines.cuda_memory import (
    DeviceBuffer,
    DeviceMemory,
    HostBuffer,
    Resource,
    out_of_memory,
    read_available_bytes,
)
from edgeds.errors import CudaError, DeviceError, SpecError

T = TypeVar("T")

DriverName = Literal["auto", "pycuda", "cuda-bindings", "ctypes"]
DRIVERS: tuple[DriverName, ...] = ("pycuda", "cuda-bindings", "ctypes")

RESERVE_BYTES = 256 << 20
"""System memory left alone on an integrated GPU: below it the kernel starts to kill processes."""

CLOSED_TEXT = "this CUDA device is closed; open it again"


def open_cuda(device: int = 0, *, driver: DriverName = "auto", library: str | None = None) -> Cuda:
    """Open a CUDA device. ``library`` is a path in place of libcuda.so.1.

    Raises DeviceError without driver or device (its message says what is missing), CudaError when the driver fails,
    SpecError for an unknown name. A named binding that is not installed is a DeviceError; ``auto`` takes the next.
    """
    if driver not in ("auto", *DRIVERS):
        raise SpecError(f"CUDA driver {driver!r}: expected auto, {', '.join(DRIVERS)}")
    opened = _open_driver(driver, library)
    count = opened.count_devices()
    if not 0 <= device < count:
        raise DeviceError(f"CUDA device {device}: this machine has {count} (numbered from 0)")
    return Cuda(opened, device=device)


def cuda_reason() -> str | None:
    """None when CUDA works here, else why not, in one line. Does not create a context."""
    try:
        found = _open_driver("auto", None)
        return None if found.count_devices() else "the CUDA driver finds no device"
    except DeviceError as error:
        return str(error)


def _open_driver(name: DriverName, library: str | None) -> Driver:
    for kind in DRIVERS if name == "auto" else (name,):
        try:
            return _load_driver(kind, library)
        except ImportError as error:
            if name == "auto" and kind != DRIVERS[-1]:
                continue
            raise DeviceError(f"CUDA through {kind} was asked for, but it cannot be imported: {error}") from error
    raise DeviceError("no CUDA binding was found")


def _load_driver(kind: DriverName, library: str | None) -> Driver:
    if kind == "pycuda":
        from edgeds.engines.cuda_pycuda import PycudaDriver

        return PycudaDriver(library)
    if kind == "cuda-bindings":
        from edgeds.engines.cuda_bindings import BindingsDriver

        return BindingsDriver()
    from edgeds.engines.cuda_ctypes import CtypesDriver

    return CtypesDriver(library)


class _Current:
    """Pushes and pops a context; holds no state, so that all threads can share one."""

    def __init__(self, cuda: Cuda) -> None:
        self._cuda = cuda

    def __enter__(self) -> None:
        self._cuda.push()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._cuda.driver.pop()


class Cuda:
    """One device. ``is_integrated`` tells a Jetson, where CPU and GPU share memory and mapped buffers need no copy."""

    def __init__(self, driver: Driver, *, device: int = 0) -> None:
        self.driver = driver
        self.device = device
        self.name = driver.device_name(device)
        self.capability = (
            driver.attribute(device, ATTRIBUTE_CAPABILITY_MAJOR),
            driver.attribute(device, ATTRIBUTE_CAPABILITY_MINOR),
        )
        self.is_integrated = bool(driver.attribute(device, ATTRIBUTE_INTEGRATED))
        self.can_map = bool(driver.attribute(device, ATTRIBUTE_CAN_MAP_HOST_MEMORY))
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._open: dict[int, Resource] = {}
        self._current = _Current(self)
        self._closed = False
        self._context = driver.retain(device)

    def current(self) -> _Current:
        """A context manager in which this device's context is current on the calling thread."""
        return self._current

    def push(self) -> None:
        """Make the context current; pair with ``driver.pop``. Prefer ``with cuda.current()``."""
        if self._closed:
            raise DeviceError(CLOSED_TEXT)
        if os.getpid() != self._pid:
            raise DeviceError(
                "CUDA was opened before this process was forked and cannot be used here; start workers with the "
                "'spawn' method, or open the device in the worker"
            )
        self.driver.push(self._context)

    def stream(self) -> Resource:
        """A new stream that does not wait for the default one."""
        with self._current:
            return Resource(self, self.driver.new_stream(), self.driver.free_stream)

    def event(self, *, timing: bool = False) -> Resource:
        """A new event; waiting for it sleeps instead of spinning."""
        with self._current:
            return Resource(self, self.driver.new_event(timing=timing), self.driver.free_event)

    def graph(self, stream: int, record: Callable[[], None]) -> Resource:
        """Capture what ``record`` enqueues on ``stream`` into a graph, without running it.

        Raises CudaError when something in it cannot be captured; the stream is out of capture mode in any case.
        """
        with self._current:
            self.driver.begin_capture(stream)
            try:
                record()
            except BaseException:
                self._drop_capture(stream)
                raise
            return Resource(self, self.driver.end_capture(stream), self.driver.free_graph)

    def device_buffer(self, nbytes: int) -> DeviceBuffer:
        """Device memory, at least one byte. Raises OutOfMemory with needed and free MiB."""
        size = max(1, nbytes)
        with self._current:
            return DeviceBuffer(self, self._allocate(lambda: self.driver.alloc(size), size, "device memory"), size)

    def host_buffer(self, nbytes: int, *, mapped: bool = False) -> HostBuffer:
        """Page-locked memory; ``mapped`` gives the GPU direct access. Raises OutOfMemory."""
        size = max(1, nbytes)
        with self._current:
            host, device = self._allocate(
                lambda: self.driver.alloc_host(size, mapped=mapped), size, "page-locked host memory"
            )
            return HostBuffer(self, host, device, size)

    def copy_now(self, enqueue: Callable[[int], None]) -> None:
        """Run one copy on a stream of its own and wait for it."""
        stream = self.stream()
        try:
            with self._current:
                enqueue(stream.handle)
                self.driver.sync_stream(stream.handle)
        finally:
            stream.close()

    def memory(self, *, meminfo: Path = Path("/proc/meminfo")) -> DeviceMemory:
        """Free memory: MemAvailable minus a reserve on an integrated GPU, the device's own figure elsewhere.

        On a Jetson the driver's figure leaves out memory that the kernel would free on demand, such as file caches.
        """
        shared = read_available_bytes(meminfo) if self.is_integrated else None
        if shared is not None:
            available, total = shared
            return DeviceMemory(
                free_bytes=max(0, available - RESERVE_BYTES),
                total_bytes=total,
                is_shared=True,
                reserve_bytes=RESERVE_BYTES,
            )
        with self._current:
            free, total = self.driver.memory_info()
        return DeviceMemory(free_bytes=free, total_bytes=total, is_shared=self.is_integrated)

    def adopt(self, resource: Resource) -> None:
        with self._lock:
            self._open[id(resource)] = resource

    def disown(self, resource: Resource) -> bool:
        """Forget a resource; False when there is nothing to give back any more (closed, or a forked process)."""
        with self._lock:
            known = self._open.pop(id(resource), None) is not None
        return known and not self._closed and os.getpid() == self._pid

    @property
    def open_count(self) -> int:
        """Buffers, streams, events and graphs that are still open."""
        return len(self._open)

    def close(self) -> None:
        """Free everything that is still open, give the context back. Safe to call twice."""
        if self._closed:
            return
        with self._lock:
            left = list(self._open.values())
        try:
            for resource in reversed(left):
                resource.close()
        finally:
            self._closed = True
            if os.getpid() == self._pid:
                self.driver.release(self.device)

    def __enter__(self) -> Cuda:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        kind = "integrated" if self.is_integrated else "discrete"
        return f"Cuda({self.name!r}, {self.capability[0]}.{self.capability[1]}, {kind}, {self.driver.name})"

    def _allocate(self, allocate: Callable[[], T], nbytes: int, kind: str) -> T:
        try:
            return allocate()
        except CudaCallError as error:
            if error.code != OUT_OF_MEMORY:
                raise
            raise out_of_memory(nbytes, memory=self.memory(), kind=kind) from error

    def _drop_capture(self, stream: int) -> None:
        """Leave capture mode after a failure; what was recorded, if anything, is thrown away."""
        try:
            graph = self.driver.end_capture(stream)
        except CudaError:
            return  # the failure that is already under way is the one to report
        self.driver.free_graph(graph)
