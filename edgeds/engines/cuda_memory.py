"""Device and page-locked memory with a definite end, and what to say and try when there is not enough of it."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from edgeds.engines.cuda_driver import CudaCallError
from edgeds.errors import InputError, OutOfMemory, SpecError

if TYPE_CHECKING:
    from edgeds.engines.cuda import Cuda

MIB = 1 << 20
CHUNK_MIB = 256
SMALLEST_CHUNK_MIB = 4


@dataclass(frozen=True, kw_only=True)
class DeviceMemory:
    """What can be allocated now. On an integrated GPU (``is_shared``) that is system memory minus ``reserve_bytes``."""

    free_bytes: int
    total_bytes: int
    is_shared: bool
    reserve_bytes: int = 0

    @property
    def free_mib(self) -> int:
        return self.free_bytes // MIB


class Resource:
    """One thing of the driver: closed once, by ``close`` or with its Cuda, on any thread."""

    def __init__(self, cuda: Cuda, handle: int, free: Callable[[int], None]) -> None:
        self.cuda = cuda
        self.handle = handle
        self._free: Callable[[int], None] | None = free
        cuda.adopt(self)

    def close(self) -> None:
        """Give it back. Work that uses it must be done; safe to call twice."""
        free, self._free = self._free, None
        if free is None or not self.cuda.disown(self):
            return
        try:
            with self.cuda.current():
                free(self.handle)
        except CudaCallError as error:
            # The driver frees everything of a lost context itself; the failure that lost it was told already.
            if not error.is_sticky:
                raise

    @property
    def is_closed(self) -> bool:
        return self._free is None


class DeviceBuffer(Resource):
    """``nbytes`` of device memory at ``address``."""

    def __init__(self, cuda: Cuda, address: int, nbytes: int) -> None:
        super().__init__(cuda, address, cuda.driver.free)
        self.address = address
        self.nbytes = nbytes

    def write(self, array: np.ndarray) -> None:
        """Copy an array in and wait. Raises InputError when it does not fit."""
        data = np.ascontiguousarray(array)
        self._check_size(data.nbytes)
        self.cuda.copy_now(lambda stream: self.cuda.driver.copy_in(self.address, data.ctypes.data, data.nbytes, stream))

    def read(self, shape: tuple[int, ...], *, dtype: Any) -> np.ndarray:
        """Copy the first bytes out as a new array of that shape and wait. Raises InputError beyond the buffer's end."""
        out = np.empty(shape, dtype)
        self._check_size(out.nbytes)
        if out.nbytes:
            self.cuda.copy_now(
                lambda stream: self.cuda.driver.copy_out(out.ctypes.data, self.address, out.nbytes, stream)
            )
        return out

    def _check_size(self, nbytes: int) -> None:
        if nbytes > self.nbytes:
            raise InputError(f"{nbytes} bytes do not fit a device buffer of {self.nbytes} bytes; make a larger one")


class HostBuffer(Resource):
    """``nbytes`` of page-locked memory at ``address``; ``device_address`` is its other name when it is mapped, else 0.

    ``array`` is a uint8 view that must not outlive the buffer.
    """

    def __init__(self, cuda: Cuda, address: int, device_address: int, nbytes: int) -> None:
        super().__init__(cuda, address, cuda.driver.free_host)
        self.address = address
        self.device_address = device_address
        self.nbytes = nbytes
        self.array = _view(address, nbytes)


class DeviceChunks:
    """``nbytes`` of device memory in pieces, none larger than ``chunk_bytes``; for weights, which need not be one."""

    def __init__(self, buffers: tuple[DeviceBuffer, ...], *, chunk_bytes: int) -> None:
        self.buffers = buffers
        self.chunk_bytes = chunk_bytes

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self.buffers)

    def close(self) -> None:
        for buffer in self.buffers:
            buffer.close()


def allocate_chunks(cuda: Cuda, nbytes: int, *, chunk_bytes: int = CHUNK_MIB * MIB) -> DeviceChunks:
    """Allocate ``nbytes`` piece by piece, halving the pieces whenever one is refused.

    Some drivers refuse single large allocations although memory is free (L4T 36.4.7, or a fragmented NvMap heap).
    Raises OutOfMemory when even small pieces do not fit; nothing stays allocated then.
    """
    if nbytes < 1 or chunk_bytes < 1:
        raise SpecError(f"chunks of {chunk_bytes} bytes for {nbytes} bytes: both must be at least 1")
    size = min(chunk_bytes, nbytes)
    buffers: list[DeviceBuffer] = []
    with contextlib.ExitStack() as on_failure:
        left = nbytes
        while left:
            want = min(size, left)
            try:
                buffer = cuda.device_buffer(want)
            except OutOfMemory as error:
                size = want // 2
                if size < min(SMALLEST_CHUNK_MIB * MIB, nbytes):
                    raise OutOfMemory(
                        f"{_mib(nbytes - left)} of {_mib(nbytes)} MiB could be allocated in pieces, then {error}"
                    ) from error
                continue
            on_failure.callback(buffer.close)
            buffers.append(buffer)
            left -= want
        on_failure.pop_all()
    return DeviceChunks(tuple(buffers), chunk_bytes=max(buffer.nbytes for buffer in buffers))


def read_available_bytes(meminfo: Path) -> tuple[int, int] | None:
    """MemAvailable and MemTotal in bytes; None where the file has them not."""
    try:
        text = meminfo.read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    values = dict(re.findall(r"^(MemTotal|MemAvailable):\s+(\d+) kB", text, re.MULTILINE))
    if len(values) < 2:
        return None
    return int(values["MemAvailable"]) * 1024, int(values["MemTotal"]) * 1024


def out_of_memory(nbytes: int, *, memory: DeviceMemory, kind: str) -> OutOfMemory:
    """The error for a refused allocation of ``nbytes``; names fragmentation when enough was free."""
    text = f"{kind}: {_mib(nbytes)} MiB needed, {memory.free_mib} of {memory.total_bytes // MIB} MiB free"
    if nbytes <= memory.free_bytes:
        return OutOfMemory(
            f"{text}, yet the driver refused: its memory is fragmented or it limits single allocations, as L4T 36.4.7 "
            "does; allocate early, use L4T 36.5 or newer, or reboot"
        )
    shared = "; the GPU shares the system's memory, so closing other programs helps" if memory.is_shared else ""
    return OutOfMemory(f"{text}; use a smaller batch or resolution{shared}")


def _mib(nbytes: int) -> str:
    return f"{nbytes / MIB:.0f}" if nbytes >= 10 * MIB else f"{nbytes / MIB:.2f}"


def _view(address: int, nbytes: int) -> np.ndarray:
    import ctypes

    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))
