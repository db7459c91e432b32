"""ONNX Runtime on the CPU.

Defaults differ from ONNX Runtime's own for two reasons. Threads do not spin while they wait: on shared or small
machines spinning makes models several times slower. Memory patterns are off, since ONNX Runtime keeps one plan per
input shape. The arena stays on: measured with yolo11n over 160 runs of 40 random sizes, memory is flat from the
first pass on (94 MiB; 106 with patterns; 106 to 110 and still growing with the arena shrunk after new shapes).
``trim`` makes the next run give unused arena blocks back, for the time after an unusually large request.
"""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

import numpy as np

from edgeds.engines.base import Array, check_feeds, check_threads, one_line
from edgeds.errors import DeviceError, InputError, MissingDependency, ModelError, OutOfMemory, SessionClosed
from edgeds.specs import Dim, TensorSpec

_DTYPES = {
    "tensor(float)": "float32",
    "tensor(double)": "float64",
    "tensor(float16)": "float16",
    "tensor(int8)": "int8",
    "tensor(int16)": "int16",
    "tensor(int32)": "int32",
    "tensor(int64)": "int64",
    "tensor(uint8)": "uint8",
    "tensor(uint16)": "uint16",
    "tensor(uint32)": "uint32",
    "tensor(uint64)": "uint64",
    "tensor(bool)": "bool",
    "tensor(string)": "object",
}
SPIN_DURATION_SINCE = (1, 26)


class OnnxRuntimeEngine:
    """One ONNX file on the CPU execution provider. Thread-safe; outputs are owned by the caller.

    ``spin_us``: how long a thread looks for more work before it sleeps (ONNX Runtime from 1.26 on; 0: not at all).
    Raises MissingDependency without onnxruntime, ModelError for a file that cannot be loaded.
    """

    def __init__(
        self,
        path: Path | str,
        *,
        threads: int | None = None,
        spin_us: int = 0,
        precision: str | None = None,
        fallback_reason: str | None = None,
        on_close: Callable[[], None] | None = None,
    ) -> None:
        ort = import_onnxruntime()
        self.backend = "onnxruntime"
        self.fallback_reason = fallback_reason
        self.precision = precision
        self.threads = check_threads(threads)
        self.path = Path(path)
        self._errors = _error_types(ort)
        self._session: Any = _load(ort, self.path, threads=self.threads, spin_us=spin_us, errors=self._errors)
        self.inputs = tuple(_spec(arg, self.path, kind="input") for arg in self._session.get_inputs())
        self.outputs = tuple(_spec(arg, self.path, kind="output") for arg in self._session.get_outputs())
        self.metadata: Mapping[str, str] = dict(self._session.get_modelmeta().custom_metadata_map)
        self._names = [spec.name for spec in self.outputs]
        self._plain = _run_options(ort, shrink=False)
        self._shrinking = _run_options(ort, shrink=True)
        self._trim = False
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None
        self._on_close = on_close
        _live.add(self)

    def infer(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Run once; see Engine.infer."""
        return {name: _own(value) for name, value in self.infer_borrowed(feeds).items()}

    def infer_borrowed(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """``infer`` without the last copy, for callers that copy themselves and drop the arrays at once.

        The arrays are nobody else's, but they may be views into the runtime's arena and keep a block of it alive.
        """
        session = self._session
        if session is None:
            raise SessionClosed(f"the engine of {self.path.name} is closed; open it again")
        checked = check_feeds(self.inputs, feeds)
        options = self._shrinking if self._trim else self._plain
        self._trim = False
        try:
            values = session.run(self._names, checked, options)
        except MemoryError as error:
            raise OutOfMemory(f"{self.path.name}: not enough memory for {_shapes(checked)}") from error
        except self._errors as error:
            raise self._run_error(error, checked) from error
        for name, value in zip(self._names, values, strict=True):
            if not isinstance(value, np.ndarray):
                raise ModelError(f"{self.path.name}: output {name!r} is {type(value).__name__}, not a tensor")
        return dict(zip(self._names, values, strict=True))

    def infer_async(self, feeds: Mapping[str, Array]) -> Future[dict[str, Array]]:
        """``infer`` on a worker thread; see Engine.infer_async."""
        with self._lock:
            if self._session is None:
                raise SessionClosed(f"the engine of {self.path.name} is closed; open it again")
            if self._pool is None:
                self._pool = ThreadPoolExecutor(1, thread_name_prefix="edgeds-ort")
            return self._pool.submit(self.infer, feeds)

    def trim(self) -> None:
        """Give arena memory that is not in use back to the system at the end of the next run."""
        self._trim = True

    def close(self) -> None:
        """Wait for asynchronous runs, free the model. Safe to call twice."""
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=True)
        with self._lock:
            self._session = None
            on_close, self._on_close = self._on_close, None
        if on_close is not None:
            on_close()

    def __enter__(self) -> OnnxRuntimeEngine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run_error(self, error: BaseException, feeds: Mapping[str, Array]) -> Exception:
        text = one_line(error)
        kind = type(error).__name__
        if "bad_alloc" in text or "bad allocation" in text or "Failed to allocate memory" in text:
            return OutOfMemory(f"{self.path.name}: not enough memory for {_shapes(feeds)}: {text}")
        if kind in ("EPFail", "EngineError"):
            return DeviceError(f"{self.path.name}: ONNX Runtime failed: {text}")
        return InputError(f"{self.path.name}: the model cannot process {_shapes(feeds)}: {text}")


_live: weakref.WeakSet[OnnxRuntimeEngine] = weakref.WeakSet()


def _keep_after_fork() -> None:
    """In a forked child, make the engines usable and never free their models.

    The runtime's threads did not come along: runs work without them, but destroying a model waits for them for ever.
    """
    for engine in list(_live):
        engine._lock = threading.Lock()  # another thread may have held it
        engine._pool = None
        if engine._session is not None:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(engine._session))


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_keep_after_fork)


def import_onnxruntime() -> ModuleType:
    """The onnxruntime module, or MissingDependency that names the extra."""
    try:
        import onnxruntime
    except ImportError as error:
        raise MissingDependency("onnxruntime", extra="cpu", purpose="running models on the CPU", cause=error) from error
    return onnxruntime


def _error_types(ort: ModuleType) -> tuple[type[BaseException], ...]:
    """ONNX Runtime's exceptions have no common base of their own; RuntimeError covers its untyped ones."""
    state = ort.capi.onnxruntime_pybind11_state
    names = (
        "EPFail",
        "EngineError",
        "Fail",
        "InvalidArgument",
        "InvalidGraph",
        "InvalidProtobuf",
        "NoModel",
        "NoSuchFile",
        "NotImplemented",
        "RuntimeException",
    )
    found = [getattr(state, name) for name in names if hasattr(state, name)]
    return (*found, RuntimeError, ValueError)


def _load(ort: ModuleType, path: Path, *, threads: int, spin_us: int, errors: tuple[type[BaseException], ...]) -> Any:
    if not path.is_file():
        raise ModelError(f"{path}: no such model file")
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.enable_mem_pattern = False
    # Errors reach the caller as exceptions; the library's own log lines would only repeat them.
    options.log_severity_level = 4
    # Older versions would spin for as long as they like.
    spins = spin_us > 0 and _version(ort) >= SPIN_DURATION_SINCE
    for pool in ("intra_op", "inter_op"):
        options.add_session_config_entry(f"session.{pool}.allow_spinning", "1" if spins else "0")
    if spins:
        options.add_session_config_entry("session.intra_op.spin_duration_us", str(spin_us))
    try:
        return ort.InferenceSession(str(path), sess_options=options, providers=["CPUExecutionProvider"])
    except MemoryError as error:
        raise OutOfMemory(f"{path}: not enough memory to load {path.stat().st_size >> 20} MiB") from error
    except errors as error:
        raise ModelError(f"{path}: ONNX Runtime {ort.__version__} cannot load it: {one_line(error)}") from error


def _version(ort: ModuleType) -> tuple[int, ...]:
    return tuple(int(part) for part in ort.__version__.split(".")[:2] if part.isdigit())


def _run_options(ort: ModuleType, *, shrink: bool) -> Any:
    options = ort.RunOptions()
    options.log_severity_level = 4
    if shrink:
        options.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
    return options


def _spec(arg: Any, path: Path, *, kind: str) -> TensorSpec:
    dtype = _DTYPES.get(arg.type)
    if dtype is None:
        raise ModelError(
            f"{path}: {kind} {arg.name!r} has type {arg.type}, which numpy cannot hold; export it as float32 or an "
            "integer tensor"
        )
    shape: tuple[Dim, ...] = tuple(dim if isinstance(dim, int | str) else None for dim in arg.shape or ())
    return TensorSpec(name=arg.name, dtype=dtype, shape=shape)


def _own(value: Array) -> Array:
    """The output as an array that shares no memory with the runtime."""
    # Newer releases hand out views into their arena: a caller that keeps one would pin a whole arena block.
    return value if value.flags.owndata and value.flags.writeable else value.copy()


def _shapes(feeds: Mapping[str, Array]) -> str:
    return ", ".join(f"{name} {list(array.shape)}" for name, array in feeds.items())
