"""The KV cache where a device engine reads it in place: host memory that the GPU sees under an address of its own.

On a Jetson both share one memory, so nothing is copied: the runtime writes a step's keys and values with the CPU, and
the next run of the engine, whose inputs are bound to the pages, reads them. The cache never passes through ``infer``.
"""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np

from edgeds.engines.base import Engine
from edgeds.runtime.kv_layout import KvLayout
from edgeds.runtime.kv_store import KvStore

ALIGNMENT = 256
"""Bytes; what TensorRT asks of a tensor's address."""


class MappedStore(KvStore):
    """A ``KvStore`` in mapped memory, bound to ``engine`` (a TensorRTEngine) until it is closed. Closing unbinds.

    Layers of a kind whose size is no multiple of 256 bytes are fed like other inputs. Raises OutOfMemory and what
    ``bind`` raises; nothing stays bound then.
    """

    def __init__(self, engine: Any, layout: KvLayout, pages: int) -> None:
        self._engine = engine
        self._stack = contextlib.ExitStack()
        self._bound: set[str] = set()
        buffers: dict[str, Any] = {}

        def allocate(name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
            nbytes = int(np.prod(shape)) * dtype.itemsize
            buffers[name] = buffer = engine.cuda.host_buffer(nbytes, mapped=True)
            self._stack.callback(buffer.close)
            buffer.array[:] = 0
            made: np.ndarray = buffer.array.view(dtype).reshape(shape)
            return made

        try:
            super().__init__(layout, pages, allocate=allocate)
            for name, array in self._arrays.items():
                self._bind(name, array, buffers[name])
        except BaseException:
            self.close()
            raise

    def _bind(self, name: str, array: np.ndarray, buffer: Any) -> None:
        layer_bytes = array[0].nbytes
        if layer_bytes % ALIGNMENT:
            return
        for layer in range(len(array)):
            tensor = f"{name}.{layer}"
            self._engine.bind(tensor, buffer, shape=array.shape[1:], offset=layer * layer_bytes)
            self._bound.add(tensor)
            self._stack.callback(self._engine.bind, tensor, None)

    def feeds(self) -> dict[str, np.ndarray]:
        """What is not bound."""
        return {name: array for name, array in super().feeds().items() if name not in self._bound}

    def close(self) -> None:
        """Unbind, and give the memory back. The arrays must not be used any more; safe to call twice."""
        self._stack.close()
        self._bound.clear()
        self._arrays = {}


def open_store(engine: Engine, layout: KvLayout, pages: int) -> KvStore:
    """A store that ``engine`` reads in place where it can, else one whose arrays are fed."""
    cuda = getattr(engine, "cuda", None)
    if cuda is not None and hasattr(engine, "bind") and cuda.can_map:
        return MappedStore(engine, layout, pages)
    return KvStore(layout, pages)
