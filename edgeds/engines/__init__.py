"""Run one model. ``open_engine`` picks the backend and, for a bundle, the file with the wanted precision.

A backend that was named and is missing is an error; ``auto`` may fall back and says why in ``engine.fallback_reason``.
"""

from __future__ import annotations

import contextlib
import importlib.util
import platform
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from edgeds.engines.base import Engine, check_feeds, default_threads
from edgeds.errors import BundleError, DeviceError, MissingDependency, ModelError, SpecError

if TYPE_CHECKING:
    from edgeds.bundle import Bundle

__all__ = ["Engine", "available_backends", "check_feeds", "default_threads", "open_engine"]

Precision = Literal["auto", "float", "int8"]

ALIASES = {"cpu": "onnxruntime", "ort": "onnxruntime", "trt": "tensorrt"}
PRECISIONS = ("auto", "float", "int8")
SLOW_INT8 = (
    "the bundle has no CPU variant of its int8 model (model.cpu.onnx); signed int8 runs at about half the speed of "
    "float on this processor"
)


def available_backends() -> dict[str, str | None]:
    """Every backend name with None when it can run here, else the reason why not."""
    have_ort = importlib.util.find_spec("onnxruntime") is not None
    return {
        "onnxruntime": None if have_ort else "onnxruntime is not installed; pip install 'edgeds[cpu]'",
        "tensorrt": _tensorrt_reason(),
        "cuda": "edgeds does not run ONNX Runtime's CUDA provider; use onnxruntime (CPU)",
        "null": None,
    }


def open_engine(
    source: Path | str | Bundle,
    *,
    backend: str = "auto",
    threads: int | None = None,
    precision: Precision = "auto",
) -> Engine:
    """Open a model for running.

    ``source`` is an .onnx file, a bundle (folder or zip) or an opened Bundle; a bundle opened here is closed with the
    engine. On the CPU ``auto`` and ``int8`` take the uint8 variant of an int8 model where the bundle has one.

    Raises SpecError for a bad argument or a precision the bundle does not have, DeviceError or MissingDependency for
    a named backend that cannot run here, ModelError or BundleError for a source that cannot be read.
    """
    if precision not in PRECISIONS:
        raise SpecError(f"precision {precision!r}: expected one of {', '.join(PRECISIONS)}")
    name, reason = _choose_backend(backend)
    path, chosen, note, close = _locate(source, precision=precision)
    reasons = [text for text in (reason, note) if text]
    options: dict[str, Any] = {
        "threads": threads,
        "precision": chosen,
        "fallback_reason": "; ".join(reasons) or None,
        "on_close": close,
    }
    with contextlib.ExitStack() as on_failure:
        if close is not None:
            on_failure.callback(close)
        engine = _open_onnxruntime(path, options)
        on_failure.pop_all()
    return engine if name == "onnxruntime" else _as_null(engine)


def _choose_backend(backend: str) -> tuple[str, str | None]:
    """The backend to use and, for ``auto``, why it is not the preferred one."""
    backends = available_backends()
    name = ALIASES.get(backend, backend)
    if name == "auto":
        if backends["onnxruntime"] is not None:
            raise MissingDependency("onnxruntime", extra="cpu", purpose="running models on the CPU")
        return "onnxruntime", f"no TensorRT engine ({backends['tensorrt']}), so onnxruntime runs on the CPU"
    if name not in backends:
        known = ", ".join(["auto", *backends, *ALIASES])
        raise SpecError(f"backend {backend!r} is unknown; expected one of {known}")
    reason = backends[name]
    if reason is None:
        return name, None
    if name == "onnxruntime":
        raise MissingDependency("onnxruntime", extra="cpu", purpose="running models on the CPU")
    raise DeviceError(f"backend {backend!r} was asked for but cannot run here: {reason}")


def _tensorrt_reason() -> str:
    installed = any(importlib.util.find_spec(name) is not None for name in ("tensorrt", "tensorrt_rtx"))
    if installed:
        return "TensorRT is installed, but this version of edgeds cannot run TensorRT engines yet"
    gpu = "" if shutil.which("nvidia-smi") or Path("/etc/nv_tegra_release").exists() else " and no NVIDIA GPU was found"
    return f"TensorRT is not installed{gpu}; this version of edgeds cannot run TensorRT engines yet"


def _locate(
    source: Path | str | Bundle, *, precision: Precision
) -> tuple[Path, str | None, str | None, Callable[[], None] | None]:
    """The model file, its precision when known, a note when it is not the best choice, and what to close."""
    if not isinstance(source, str | Path):
        path, chosen, note = _pick_model(source, precision=precision)
        return path, chosen, note, None
    path = Path(source)
    if not path.exists():
        raise ModelError(f"{path}: no such file or folder; expected an .onnx model or a bundle")
    if path.is_dir() or path.suffix.lower() == ".zip":
        from edgeds.bundle import open_bundle

        with contextlib.ExitStack() as on_failure:
            bundle = on_failure.enter_context(open_bundle(path))
            path, chosen, note = _pick_model(bundle, precision=precision)
            on_failure.pop_all()
        return path, chosen, note, bundle.close
    if precision != "auto":
        raise SpecError(
            f"{path}: precision {precision!r} can be chosen only for a bundle; a model file has one precision"
        )
    return path, None, None, None


def _pick_model(bundle: Bundle, *, precision: Precision) -> tuple[Path, str, str | None]:
    models = bundle.manifest.models
    wanted = {"auto": ("cpu_int8", "int8", "float"), "int8": ("cpu_int8", "int8"), "float": ("float",)}[precision]
    for key in wanted:
        if key in models:
            chosen = "float" if key == "float" else "int8"
            slow = key == "int8" and platform.machine().lower() in ("x86_64", "amd64")
            return bundle.path(models[key]), chosen, SLOW_INT8 if slow else None
    if not models:
        raise BundleError("the bundle lists no model")
    raise SpecError(f"precision {precision!r}: the bundle has no such model; it has {', '.join(sorted(models))}")


def _open_onnxruntime(path: Path, options: dict[str, Any]) -> Engine:
    from edgeds.engines.onnxruntime import OnnxRuntimeEngine

    return OnnxRuntimeEngine(path, **options)


def _as_null(engine: Engine) -> Engine:
    """A null engine with the inputs and outputs of a real model."""
    from edgeds.engines.null import NullEngine

    with engine:
        return NullEngine(engine.inputs, engine.outputs, metadata=engine.metadata)
