"""What every engine offers, and the checks they share: one model, numpy in, numpy out.

| name    | type                    | meaning                                                           |
|---------|-------------------------|-------------------------------------------------------------------|
| inputs  | tuple of TensorSpec     | names, numpy dtypes, shapes with dynamic dims as names or None     |
| outputs | tuple of TensorSpec     | the same for what ``infer`` returns                               |
| feeds   | Mapping[str, ndarray]   | one array per input; the engine only reads them                   |
| result  | dict[str, ndarray]      | one array per output; owned by the caller, never reused            |
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, runtime_checkable

import numpy as np

from edgeds.errors import InputError, SpecError
from edgeds.specs import TensorSpec

Array = np.ndarray[Any, np.dtype[Any]]

MAX_THREADS = 1024


@runtime_checkable
class Engine(Protocol):
    """Runs one model. ``infer`` may be called from any thread; a closed engine raises SessionClosed."""

    @property
    def backend(self) -> str:
        """Name of the backend that really runs: ``onnxruntime``, ``null``, ..."""
        ...

    @property
    def fallback_reason(self) -> str | None:
        """Why this is not the backend or precision that was preferred; None when it is."""
        ...

    @property
    def precision(self) -> str | None:
        """``float`` or ``int8`` when the engine was chosen from a bundle, else None (as the file is)."""
        ...

    @property
    def threads(self) -> int:
        """CPU threads one run may use."""
        ...

    @property
    def inputs(self) -> tuple[TensorSpec, ...]: ...

    @property
    def outputs(self) -> tuple[TensorSpec, ...]: ...

    @property
    def metadata(self) -> Mapping[str, str]:
        """The model's own key-value metadata."""
        ...

    def infer(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Run once. Raises InputError for feeds that do not fit, DeviceError when the device fails."""
        ...

    def infer_async(self, feeds: Mapping[str, Array]) -> Future[dict[str, Array]]:
        """Run on a worker thread; the feeds must stay unchanged until the future is done."""
        ...

    def close(self) -> None:
        """Free the model. Safe to call twice."""
        ...

    def __enter__(self) -> Engine: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def check_feeds(inputs: Sequence[TensorSpec], feeds: Mapping[str, Array]) -> dict[str, Array]:
    """Return the feeds in input order and contiguous, or raise InputError with the input, got and expected.

    Checked: names, array type, dtype, rank, fixed dims, no empty batch, and that dims of the same name have the
    same size in all inputs.
    """
    if not isinstance(feeds, Mapping):
        raise InputError(f"feeds: expected a mapping of input name to array, got {type(feeds).__name__}")
    names = [spec.name for spec in inputs]
    for name in feeds:
        if name not in names:
            raise InputError(f"input {name!r} is unknown; the model's inputs are {', '.join(names)}")
    checked: dict[str, Array] = {}
    sizes: dict[str, tuple[int, str]] = {}
    for spec in inputs:
        if spec.name not in feeds:
            raise InputError(f"input {spec.name!r} is missing; expected {spec}")
        checked[spec.name] = _check_array(spec, feeds[spec.name])
        for want, got in zip(spec.shape, checked[spec.name].shape, strict=True):
            if isinstance(want, str):
                first, owner = sizes.setdefault(want, (got, spec.name))
                if first != got:
                    raise InputError(
                        f"input {spec.name!r}: dimension {want!r} is {got}, but it is {first} in input {owner!r}; "
                        "they must be equal"
                    )
    return checked


def _check_array(spec: TensorSpec, array: Any) -> Array:
    if not isinstance(array, np.ndarray):
        raise InputError(f"input {spec.name!r}: expected a numpy array of {spec}, got {type(array).__name__}")
    if array.dtype != spec.np_dtype:
        raise InputError(
            f"input {spec.name!r}: expected dtype {spec.dtype}, got {array.dtype}; "
            f"convert it with .astype('{spec.dtype}')"
        )
    if not spec.accepts(array.shape):
        raise InputError(f"input {spec.name!r}: expected shape {shape_text(spec.shape)}, got {shape_text(array.shape)}")
    if array.ndim and array.shape[0] == 0:
        raise InputError(f"input {spec.name!r}: the batch is empty (shape {shape_text(array.shape)})")
    # ascontiguousarray would turn a rank-0 array into rank 1.
    return array if array.flags.c_contiguous else np.ascontiguousarray(array)


def shape_text(shape: Sequence[object]) -> str:
    """``(1, 3, ?, ?)``-style text for messages; unknown dims are ``?``."""
    return "[" + ", ".join("?" if dim is None else str(dim) for dim in shape) + "]"


def one_line(error: BaseException, *, limit: int = 300) -> str:
    """A library's message as one line of bounded length; of a long one the end, where the cause stands, is kept."""
    text = " ".join(str(error).split()) or type(error).__name__
    text = re.sub(r"^\[ONNXRuntimeError\] : \d+ : \w+ : ", "", text)
    return text if len(text) <= limit else f"{text[:60]} ... {text[len(text) - limit + 65 :]}"


def check_threads(threads: int | None) -> int:
    """Validate a thread count; None means the cores this process may use."""
    if threads is None:
        return default_threads()
    if isinstance(threads, bool) or not isinstance(threads, int) or not 1 <= threads <= MAX_THREADS:
        raise SpecError(f"threads: expected a whole number from 1 to {MAX_THREADS}, got {threads!r}")
    return threads


def default_threads(*, sysfs: Path = Path("/sys")) -> int:
    """Physical cores this process may use: affinity mask, hyper-threads counted once, container CPU quota."""
    cpus = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    cores = set()
    for cpu in cpus:
        siblings = _read_text(sysfs / f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        cores.add(siblings or str(cpu))
    quota = _read_text(sysfs / "fs/cgroup/cpu.max").split()
    limit = len(cores)
    if len(quota) == 2 and quota[0].isdigit() and quota[1].isdigit() and int(quota[1]) > 0:
        limit = min(limit, math.ceil(int(quota[0]) / int(quota[1])))
    return max(1, limit)


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""
