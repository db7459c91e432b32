"""An engine without a model: outputs follow from its inputs, latency is what the caller says.

For dry runs of batching and reports, and for tests. Row i of every output depends only on row i of the inputs, so
results do not change with batching.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

import numpy as np

from edgeds.engines.base import Array, check_feeds
from edgeds.errors import SessionClosed, SpecError
from edgeds.specs import TensorSpec

Latency = float | Callable[[tuple[int, ...]], float]


class NullEngine:
    """Returns the mean of each input row in every element of the matching output row.

    ``latency_ms`` is a number or a function of the first input's shape; ``sleep`` takes seconds and can be replaced
    by a fake clock's. Output dims named like an input dim take its size; other dynamic dims are 1, except the
    leading one, which is the batch.
    """

    def __init__(
        self,
        inputs: Sequence[TensorSpec],
        outputs: Sequence[TensorSpec],
        *,
        latency_ms: Latency = 0.0,
        sleep: Callable[[float], None] = time.sleep,
        metadata: Mapping[str, str] | None = None,
        fallback_reason: str | None = None,
        precision: str | None = None,
    ) -> None:
        if not inputs or not outputs:
            raise SpecError("null engine: at least one input and one output are needed")
        if not callable(latency_ms) and not (math.isfinite(latency_ms) and latency_ms >= 0):
            raise SpecError(f"null engine: latency_ms must be a finite number >= 0, got {latency_ms!r}")
        self.backend = "null"
        self.fallback_reason = fallback_reason
        self.precision = precision
        self.threads = 1
        self.inputs = tuple(inputs)
        self.outputs = tuple(outputs)
        self.metadata: Mapping[str, str] = dict(metadata or {})
        self._latency_ms = latency_ms
        self._sleep = sleep
        self._closed = False
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None

    def infer(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Deterministic outputs after the given latency. Raises InputError, or SessionClosed once closed."""
        if self._closed:
            raise SessionClosed("the null engine is closed; open a new one")
        checked = check_feeds(self.inputs, feeds)
        first = checked[self.inputs[0].name]
        latency_ms = self._latency_ms(first.shape) if callable(self._latency_ms) else self._latency_ms
        if latency_ms > 0:
            self._sleep(latency_ms / 1000)
        marks = _row_means(checked)
        sizes = {
            dim: got
            for spec in self.inputs
            for dim, got in zip(spec.shape, checked[spec.name].shape, strict=True)
            if isinstance(dim, str)
        }
        return {spec.name: _filled(spec, marks, sizes) for spec in self.outputs}

    def infer_async(self, feeds: Mapping[str, Array]) -> Future[dict[str, Array]]:
        """``infer`` on a worker thread."""
        with self._lock:
            if self._closed:
                raise SessionClosed("the null engine is closed; open a new one")
            if self._pool is None:
                self._pool = ThreadPoolExecutor(1, thread_name_prefix="edgeds-null")
            return self._pool.submit(self.infer, feeds)

    def close(self) -> None:
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=True)
        self._closed = True

    def __enter__(self) -> NullEngine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _row_means(feeds: Mapping[str, Array]) -> Array:
    """Sum over the inputs of each row's mean, float64, shape (rows,)."""
    rows = max((array.shape[0] for array in feeds.values() if array.ndim), default=1)
    total = np.zeros(rows)
    for array in feeds.values():
        if array.dtype == object:
            continue
        flat = array.reshape(array.shape[0], -1) if array.ndim else array.reshape(1, 1)
        total = total + (flat.mean(axis=1, dtype=np.float64) if flat.shape[1] else 0.0)
    return total


def _filled(spec: TensorSpec, marks: Array, sizes: Mapping[str, int]) -> Array:
    shape = [dim if isinstance(dim, int) else sizes.get(dim, 1) if dim is not None else 1 for dim in spec.shape]
    if shape and not isinstance(spec.shape[0], int):
        shape[0] = sizes.get(spec.shape[0] or "", len(marks))
    out = np.empty(shape, dtype=spec.np_dtype)
    if shape and shape[0] == len(marks):
        out[...] = marks.reshape((-1, *[1] * (out.ndim - 1))).astype(spec.np_dtype)
    else:
        out[...] = np.asarray(marks.mean()).astype(spec.np_dtype)
    return out
