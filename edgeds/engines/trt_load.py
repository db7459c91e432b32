"""From a plan file to a live engine, with TensorRT's silent failures turned into errors."""

from __future__ import annotations

import mmap
import re
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from edgeds.engines.build_log import ERRORS, LogTap, process_logger, tap_log
from edgeds.engines.plan_file import split_engine
from edgeds.errors import DeviceError, EdgedsError, EngineMismatch, ModelError, OutOfMemory

RTX_MAGIC = b"vtrt"

_MISMATCH = re.compile(
    r"version tag|incompatible|different version|not compatible|platform|compute capability|different device",
    re.IGNORECASE,
)
_MEMORY = re.compile(r"out ?of ?memory|memoryallocation|cuda(?:Error| error)\W*2\b|NvMapMem", re.IGNORECASE)


@dataclass(kw_only=True)
class LoadedPlan:
    """A deserialized engine; ``runtime`` must outlive it. ``metadata`` is the file's own header, if it has one.

    TensorRT's objects are freed when the last reference goes. Nobody else keeps one, not even in a local variable,
    which a traceback would keep alive: dropping them here frees them now, while the CUDA context is current.
    """

    runtime: Any
    engine: Any
    metadata: dict[str, str]
    plan_bytes: int


def is_rtx_plan(path: Path) -> bool:
    """Whether a plan was made by TensorRT-RTX. Raises ModelError for a file that is no engine."""
    _, offset, _ = split_engine(path)
    with path.open("rb") as stream:
        stream.seek(offset)
        return stream.read(4) == RTX_MAGIC


def load_plan(
    path: Path,
    *,
    trt: ModuleType,
    dla_core: int | None = None,
    allow_host_code: bool = False,
    free_mib: int | None = None,
) -> LoadedPlan:
    """Deserialize a plan; a CUDA context must be current. ``free_mib`` is for the message when memory runs out.

    Plans with and without the Ultralytics header are read. ``allow_host_code`` lets version-compatible plans run the
    code they carry on the CPU: only for plans you trust.

    Raises ModelError for a file that is no plan, EngineMismatch for one of another version or device, OutOfMemory,
    DeviceError when TensorRT cannot work here.
    """
    metadata, offset, length = split_engine(path)
    loaded = LoadedPlan(runtime=None, engine=None, metadata=metadata, plan_bytes=length)
    logger = process_logger(trt)
    with tap_log() as tap:
        try:
            loaded.runtime = trt.Runtime(logger)
        except TypeError as error:  # a factory that gave no object
            raise DeviceError(
                f"TensorRT's runtime cannot start here: {last_words(tap, 'is the GPU usable?')}"
            ) from error
        if dla_core is not None:
            _choose_dla(loaded, dla_core)
        if allow_host_code:
            loaded.runtime.engine_host_code_allowed = True
        if hasattr(trt, "init_libnvinfer_plugins"):
            trt.init_libnvinfer_plugins(logger, "")
        with path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            # Mapped, not read: a plan of gigabytes must not be in memory twice.
            view = memoryview(mapped)
            part = view[offset : offset + length]
            try:
                loaded.engine = loaded.runtime.deserialize_cuda_engine(part)
            finally:
                part.release()
                view.release()
        if loaded.engine is None:
            loaded.runtime = None
            raise _load_error(path, trt, tap, length=length, free_mib=free_mib)
    return loaded


def last_words(tap: LogTap, otherwise: str) -> str:
    """The errors TensorRT logged, at most two, or ``otherwise``."""
    return "; ".join(tap.errors()[-2:]) or otherwise


def _is_memory(tap: LogTap) -> bool:
    return any(severity in ERRORS and _MEMORY.search(text) for severity, text in tap.lines)


def runtime_error(tap: LogTap, *, where: str, what: str) -> EdgedsError:
    """The error for a runtime call that gave False or None."""
    text = last_words(tap, "TensorRT gave no reason")
    if _is_memory(tap):
        return OutOfMemory(f"{where}: {what}: not enough memory: {text}; use a smaller batch or fewer lanes")
    return DeviceError(f"{where}: {what}: {text}")


def _choose_dla(loaded: LoadedPlan, core: int) -> None:
    cores = int(loaded.runtime.num_DLA_cores)
    if not 0 <= core < cores:
        raise DeviceError(f"DLA core {core} was asked for, this device has {cores} that TensorRT can use")
    loaded.runtime.DLA_core = core


def _load_error(path: Path, trt: ModuleType, tap: LogTap, *, length: int, free_mib: int | None) -> EdgedsError:
    text = last_words(tap, "TensorRT gave no reason")
    if _is_memory(tap):
        free = "" if free_mib is None else f", {free_mib} MiB free"
        return OutOfMemory(
            f"{path}: not enough memory for an engine of {length >> 20} MiB{free}: {text}; close other programs; where "
            "memory is free but fragmented (L4T 36.4.7 limits single allocations) use L4T 36.5 or newer, or reboot"
        )
    if _MISMATCH.search(text):
        return EngineMismatch(
            f"{path}: this engine was not built by TensorRT {trt.__version__} for this device: {text}; engines do not "
            "move between versions and boards; build it here: edgeds build BUNDLE"
        )
    return ModelError(f"{path}: TensorRT {trt.__version__} cannot read this engine: {text}; build it again")
