"""Run one model. ``open_engine`` picks the backend and, for a bundle, the file with the wanted precision.

A backend that was named and is missing is an error; ``auto`` may fall back and says why in ``engine.fallback_reason``.
"""

from __future__ import annotations

import contextlib
import importlib.util
import platform
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from edgeds.engines.base import Engine, check_feeds, default_threads
from edgeds.errors import BundleError, DeviceError, EngineMismatch, MissingDependency, ModelError, SpecError

if TYPE_CHECKING:
    from edgeds.bundle import Bundle

__all__ = ["Engine", "available_backends", "check_feeds", "default_threads", "open_engine"]

Precision = Literal["auto", "float", "int8", "int4"]

BACKENDS = ("onnxruntime", "tensorrt", "cuda", "null")
ALIASES = {"cpu": "onnxruntime", "ort": "onnxruntime", "trt": "tensorrt"}
PRECISIONS = ("auto", "float", "int8", "int4")
DECODER_SPIN_US = 50
"""A decode step is some 300 parallel regions of tens of microseconds, between which threads had better not sleep: a
quarter of its time, for no more CPU time (docs/llm.md). Other models gain little and lose beside busy processes."""
SLOW_INT8 = (
    "the bundle has no CPU variant of its int8 model (model.cpu.onnx); signed int8 runs at about half the speed of "
    "float on this processor"
)


def available_backends(names: Sequence[str] = BACKENDS) -> dict[str, str | None]:
    """Every backend name (or those in ``names``) with None when it can run here, else the reason why not."""
    return {name: _backend_reason(name) for name in names}


def _backend_reason(name: str) -> str | None:
    if name == "onnxruntime":
        have = importlib.util.find_spec("onnxruntime") is not None
        return None if have else "onnxruntime is not installed; pip install 'edgeds[cpu]'"
    if name == "tensorrt":
        from edgeds.engines.trt_choice import tensorrt_reason

        return tensorrt_reason()
    if name == "cuda":
        return "edgeds does not run ONNX Runtime's CUDA provider; use onnxruntime (CPU) or tensorrt"
    return None


def open_engine(
    source: Path | str | Bundle,
    *,
    backend: str = "auto",
    threads: int | None = None,
    precision: Precision = "auto",
) -> Engine:
    """Open a model for running.

    ``source`` is an .onnx file, a TensorRT engine file, a bundle (folder or zip) or an opened Bundle; a bundle opened
    here is closed with the engine. ``auto`` takes TensorRT when an engine of the bundle is installed for this device,
    nothing is ever built here. On the CPU ``auto`` and ``int8`` take the uint8 variant of an int8 model where the
    bundle has one.

    Raises SpecError for a bad argument or a precision the bundle does not have, DeviceError or MissingDependency for
    a named backend that cannot run here, EngineMismatch when TensorRT was named and no engine of the bundle fits,
    ModelError or BundleError for a source that cannot be read.
    """
    if precision not in PRECISIONS:
        raise SpecError(f"precision {precision!r}: expected one of {', '.join(PRECISIONS)}")
    name = ALIASES.get(backend, backend)
    if not isinstance(source, str | Path):
        return _open_bundle(source, name, precision=precision, threads=threads, asked=backend, close=None)
    path = Path(source)
    if not path.exists():
        raise ModelError(f"{path}: no such file or folder; expected an .onnx model, an engine file or a bundle")
    if path.is_dir() or path.suffix.lower() == ".zip":
        from edgeds.bundle import open_bundle

        with contextlib.ExitStack() as on_failure:
            bundle = on_failure.enter_context(open_bundle(path))
            engine = _open_bundle(bundle, name, precision=precision, threads=threads, asked=backend, close=bundle.close)
            on_failure.pop_all()
        return engine
    if precision != "auto":
        raise SpecError(
            f"{path}: precision {precision!r} can be chosen only for a bundle; a model file has one precision"
        )
    return _open_file(path, name, threads=threads, asked=backend)


def _open_file(path: Path, name: str, *, threads: int | None, asked: str) -> Engine:
    from edgeds.engines.trt_choice import PLAN_SUFFIXES, open_plan_file

    if path.suffix.lower() in PLAN_SUFFIXES:
        _check_backend("tensorrt" if name == "auto" else name, asked="tensorrt" if name == "auto" else asked)
        if name not in ("auto", "tensorrt"):
            raise ModelError(f"{path}: is a TensorRT engine, which backend {asked!r} cannot run; use tensorrt or auto")
        return open_plan_file(path)
    reason = None
    if name == "auto":
        reason = f"no TensorRT engine ({_missing_engine('a model file is not one')}), so onnxruntime runs on the CPU"
        name = "onnxruntime"
    _check_backend(name, asked=asked)
    if name == "tensorrt":
        raise ModelError(
            f"{path}: TensorRT runs engines that were built from a model; make a bundle of it and run 'edgeds build "
            "BUNDLE', or give an .engine file"
        )
    engine = _open_onnxruntime(path, threads=threads, fallback_reason=reason)
    return engine if name == "onnxruntime" else _as_null(engine)


def _open_bundle(
    bundle: Bundle,
    name: str,
    *,
    precision: Precision,
    threads: int | None,
    asked: str,
    close: Callable[[], None] | None,
) -> Engine:
    """The engine of a bundle. ``close`` belongs to the engine once it is open, and is not called before."""
    from edgeds.engines.trt_choice import open_installed, tensorrt_reason

    reason = None
    if name == "auto":
        reason = tensorrt_reason()
        if reason is None:
            try:
                return open_installed(bundle, precision=precision, on_close=close)
            except (DeviceError, EngineMismatch, ModelError) as error:
                reason = str(error)
        reason = f"no TensorRT engine ({reason}), so onnxruntime runs on the CPU"
        name = "onnxruntime"
    _check_backend(name, asked=asked)
    if name == "tensorrt":
        return open_installed(bundle, precision=precision, on_close=close)
    path, chosen, note = _pick_model(bundle, precision=precision)
    reasons = [text for text in (reason, note) if text]
    engine = _open_onnxruntime(
        path,
        threads=threads,
        spin_us=DECODER_SPIN_US if bundle.manifest.task == "generate" else 0,
        precision=chosen,
        fallback_reason="; ".join(reasons) or None,
        on_close=close,
    )
    return engine if name == "onnxruntime" else _as_null(engine)


def _missing_engine(otherwise: str) -> str:
    from edgeds.engines.trt_choice import tensorrt_reason

    return tensorrt_reason() or otherwise


def _check_backend(name: str, *, asked: str) -> None:
    """Raise unless ``name`` can run here; a backend that was named is never replaced by another."""
    if name not in BACKENDS:
        raise SpecError(f"backend {asked!r} is unknown; expected one of {', '.join(['auto', *BACKENDS, *ALIASES])}")
    reason = available_backends([name])[name]
    if reason is None:
        return
    if name == "onnxruntime":
        raise MissingDependency("onnxruntime", extra="cpu", purpose="running models on the CPU")
    raise DeviceError(f"backend {asked!r} was asked for but cannot run here: {reason}")


def _pick_model(bundle: Bundle, *, precision: Precision) -> tuple[Path, str, str | None]:
    models = bundle.manifest.models
    quantized = {"int8": ("cpu_int8", "int8"), "int4": ("cpu_int4", "int4")}
    wanted = {"auto": (*quantized["int8"], *quantized["int4"], "float"), "float": ("float",), **quantized}[precision]
    for key in wanted:
        if key in models:
            chosen = key.removeprefix("cpu_")
            slow = key == "int8" and platform.machine().lower() in ("x86_64", "amd64")
            return bundle.path(models[key]), chosen, SLOW_INT8 if slow else None
    if not models:
        raise BundleError("the bundle lists no model")
    raise SpecError(f"precision {precision!r}: the bundle has no such model; it has {', '.join(sorted(models))}")


def _open_onnxruntime(path: Path, **options: Any) -> Engine:
    from edgeds.engines.onnxruntime import OnnxRuntimeEngine

    return OnnxRuntimeEngine(path, **options)


def _as_null(engine: Engine) -> Engine:
    """A null engine with the inputs and outputs of a real model."""
    from edgeds.engines.null import NullEngine

    with engine:
        return NullEngine(engine.inputs, engine.outputs, metadata=engine.metadata)
