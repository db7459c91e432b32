"""The memory behind one input or output of a TensorRT engine, seen from both sides."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from edgeds.engines.cuda import Cuda
from edgeds.engines.cuda_memory import DeviceBuffer, HostBuffer
from edgeds.errors import OutOfMemory

LOGGER = logging.getLogger("edgeds.tensorrt")

Kind = Literal["mapped", "staged", "host"]
"""``mapped``: one memory, read by CPU and GPU without a copy (Jetson). ``staged``: page-locked memory and device
memory with copies between them. ``host``: shape tensors, which TensorRT reads on the CPU."""

SMALLEST_BYTES = 256
"""Also tensors without elements need an address."""


class IoBuffer:
    """Persistent memory of one tensor. ``address`` is what TensorRT gets, ``host`` what the CPU reads and writes."""

    def __init__(self, cuda: Cuda, *, name: str, kind: Kind) -> None:
        self._cuda = cuda
        self.name = name
        self.kind = kind
        self._host: HostBuffer | None = None
        self._device: DeviceBuffer | None = None
        self.nbytes = 0

    @property
    def address(self) -> int:
        if self._host is None:
            return 0
        if self.kind == "host":
            return self._host.address
        return self._device.address if self._device is not None else self._host.device_address

    @property
    def host_address(self) -> int:
        return self._host.address if self._host is not None else 0

    def view(self, shape: tuple[int, ...], *, dtype: Any) -> np.ndarray:
        """The first bytes as an array; valid until the buffer grows or closes."""
        assert self._host is not None
        count = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        return self._host.array[:count].view(dtype).reshape(shape)

    def holds(self, need: int) -> bool:
        """Whether there are ``need`` bytes already."""
        return self._host is not None and need <= self.nbytes

    def ensure(self, need: int, *, want: int = 0) -> None:
        """Hold at least ``need`` bytes, ``want`` if there is memory. Memory that is too small is given up first.

        Raises OutOfMemory when even ``need`` bytes cannot be had; the buffer is empty then.
        """
        if self.holds(need):
            return
        self.close()
        largest = max(need, want, SMALLEST_BYTES)
        try:
            self._allocate(largest)
        except OutOfMemory as error:
            smaller = max(need, SMALLEST_BYTES)
            if smaller == largest:
                raise
            # The profile allows more than there is room for; what this request needs may still fit.
            LOGGER.warning("tensor %r: %s; trying %d MiB for the shape in use", self.name, error, smaller >> 20)
            self._allocate(smaller)

    def close(self) -> None:
        for buffer in (self._host, self._device):
            if buffer is not None:
                buffer.close()
        self._host = self._device = None
        self.nbytes = 0

    def _allocate(self, nbytes: int) -> None:
        self._host = self._cuda.host_buffer(nbytes, mapped=self.kind == "mapped")
        if self.kind == "staged":
            try:
                self._device = self._cuda.device_buffer(nbytes)
            except OutOfMemory:
                self.close()
                raise
        self.nbytes = nbytes


@dataclass(frozen=True, kw_only=True)
class Bound:
    """A caller's device memory that takes the place of a tensor's own. ``shape`` is for inputs."""

    address: int
    nbytes: int
    shape: tuple[int, ...] | None
